"""Reads settings by their declarations: dataclasses with annotations that say what an operator may write.

    @dataclass(frozen=True, slots=True)
    class PoolSettings:
        contexts: Annotated[int, Setting("Contexts kept ready on each card.", least=0, most=64)] = 0

    read_settings(PoolSettings, {"contexts": 65})  # BadSetting: contexts must be a whole number from 0 to 64, not 65

The daemon, the gateway, the model server and the decode server declare their settings in this way. The example files
and the tables of the manuals are made from these declarations, or a test compares them.

A field's type decides what its value may be: bool, int, float, str, an Enum (one of its values), or another declaration
(a table). Any other type needs a `read` function. A field without a Setting is not a setting.
"""

import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

from gpulease.protocol.did_you_mean import did_you_mean
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.foreign_text import shortened
from gpulease.protocol.sizes import parse_size

MAX_WHOLE: Final = 2**31 - 1
"""The largest whole number of a setting that has no bound of its own. A larger number is a typing mistake; converted to
nanoseconds, it might not fit a clock, a control page or a socket option.
"""

MAX_SHOWN_CHARS: Final = 200
"""Maximum number of characters of a wrong value that an error shows. A file's value may have megabytes."""

_BARE: Final = re.compile(r"[A-Za-z0-9_:.-]+", re.ASCII)

Settings = TypeVar("Settings")
Choice = TypeVar("Choice", bound=Enum)


class BadSetting(ValueError):
    """A setting that can't be used. Its text states the setting's name, its required value and its actual value.

    Args:
        text: What is wrong, with {} where the setting's name belongs.
        path: The setting's key, after the keys of the tables that contain it; () for the table that was read.
    """

    def __init__(self, text: str, path: tuple[str, ...] = ()) -> None:
        keys = (key if _BARE.fullmatch(key) else _shown(key) for key in path)
        super().__init__(text.replace("{}", ".".join(keys) or "it", 1))
        self._text, self._path = text, path

    def within(self, *keys: str) -> "BadSetting":
        """Return this error for a setting in a table that has these keys."""
        return BadSetting(self._text, (*keys, *self._path))


def must_be(subject: str, value: object, hint: str = "") -> BadSetting:
    """Return the error of a setting that must be something other than `value`."""
    return BadSetting(f"{{}} must be {subject}, not {_shown(value)}{hint and f'; {hint}'}")


def _shown(value: object) -> str:
    try:
        return shortened(repr(value), MAX_SHOWN_CHARS)
    except ValueError:
        # Python does not write out integers of more than 4,300 digits.
        return "a number of thousands of digits"


@dataclass(frozen=True, slots=True)
class Setting:
    """The properties of a setting, from its field's annotation.

    Attributes:
        does: What it decides, in sentences for operators.
        key: The key that operators write; "" for the field's name.
        what: The words after "must be" in an error; "" if the field's type determines them.
        read: Turns the file's value into the field's. Raises ValueError with a clause that names the wrong value, or
            without text if `what` is sufficient. None: the field's type decides.
        least: The smallest number.
        most: The largest number; None for no bound, but MAX_WHOLE for a whole number in a file.
        over: A number that the value must exceed.
        or_zero: Whether 0 is accepted in addition to the bounds.
        unit: The unit of the bounds in errors.
        choices: The texts that are accepted; () for any.
        instead: Keys of other settings. Exactly one of this setting and these must be given.
        example: A value in TOML, for the example file; "" to write the default.
        is_secret: Whether errors must not repeat the value.
        is_reloaded: Whether a reload applies it.
        added_later: Whether it came after the first digests of settings in audit logs: its default is then not part of
            the digest, so that an upgrade changes none.
    """

    does: str
    key: str = ""
    what: str = ""
    read: Callable[[Any], Any] | None = None
    least: float | None = None
    most: float | None = None
    over: float | None = None
    or_zero: bool = False
    unit: str = ""
    choices: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    example: str = ""
    is_secret: bool = False
    is_reloaded: bool = False
    added_later: bool = False

    @property
    def bounds_text(self) -> str:
        """The bounds, to follow "a number"; "" if there are none."""
        least, most, over = map(_number_text, (self.least, self.most, self.over))
        if over:
            text = f"above {over} and at most {most}" if most else f"above {over}"
        elif least:
            text = f"from {least} to {most}" if most else f"of at least {least}"
        else:
            text = f"of at most {most}" if most else ""
        return f"{text}{self.unit and f' {self.unit}'}{', or 0' if self.or_zero else ''}" if text else ""

    def has_within(self, number: float) -> bool:
        """Return whether a number is within the bounds; nan never is."""
        # 0 usually means "off", and may be outside the bounds.
        if self.or_zero and number == 0:
            return True
        # Comparisons with nan are false, so nan fails whichever bound there is.
        is_enough = number >= (self.least if self.least is not None else number)
        is_above = self.over is None or number > self.over
        return is_enough and is_above and (self.most is None or number <= self.most)


def _number_text(bound: float | None) -> str:
    if bound is None:
        return ""
    return str(int(bound)) if bound == int(bound) else str(bound)


@dataclass(frozen=True, slots=True)
class Declared:
    """A setting as its class declares it.

    Attributes:
        key: The key that operators write.
        attribute: The field that holds the value.
        kind: The field's type, without None.
        default: The field's default; MISSING if the setting must be given.
        setting: What the annotation says.
    """

    key: str
    attribute: str
    kind: Any
    default: Any
    setting: Setting

    @property
    def table(self) -> Any:
        """The declaration of the table if the setting is a table; None for a setting with a single value."""
        return self.kind if isinstance(self.kind, type) and is_dataclass(self.kind) and not self.setting.what else None

    @property
    def what(self) -> str:
        """A phrase to follow "must be" in error messages."""
        setting = self.setting
        # Use the setting's own words if it has any, otherwise a phrase for its choices or its type.
        if setting.what:
            return f"{setting.what} {setting.bounds_text}".rstrip()
        if setting.choices:
            return any_of(setting.choices)
        if self.kind in (int, float):
            return f"a {'whole ' if self.kind is int else ''}number {setting.bounds_text}".rstrip()
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            return any_of([choice.value for choice in self.kind])
        return _WHAT.get(self.kind, "a table")

    def value_of(self, value: Any) -> Any:
        """Return the field's value for the value in a file. Raises BadSetting."""
        try:
            return self._read(value)
        # A secret's error must not repeat the value, and neither must an error of its read function.
        except (ValueError, TypeError) as error:
            if self.setting.is_secret:
                problem = BadSetting(f"{{}} must be {self.what}")
            # The error of a table inside this one names its own key; `within` adds this table's.
            elif isinstance(error, BadSetting):
                problem = error
            else:
                problem = BadSetting(f"{{}}: {error}") if str(error) else must_be(self.what, value)
        raise problem.within(self.key)

    def check_bounds(self, number: Any, shown: Any) -> None:
        """Raise BadSetting for a number out of bounds. Other values, and None, have no bounds."""
        # True and False are ints in Python, but never numbers of a setting.
        if isinstance(number, int | float) and not isinstance(number, bool) and not self.setting.has_within(number):
            raise must_be(self.what, shown)

    def _read(self, value: Any) -> Any:
        setting = self.setting
        # Step 1: the value in the field's type.
        if setting.read is not None:
            result = setting.read(value)
        elif self.table is not None:
            result = read_settings(self.table, value)
        elif isinstance(self.kind, type) and issubclass(self.kind, Enum):
            result = read_choice(self.kind, value)
        elif self.kind is float and type(value) in (int, float):
            result = _finite(value)
        elif type(value) is self.kind:
            result = value
        else:
            raise must_be(self.what, value)
        # Step 2: its bounds.
        if setting.choices and result not in setting.choices:
            raise must_be(self.what, value, did_you_mean(value, setting.choices, ""))
        self.check_bounds(result, value)
        # MAX_WHOLE bounds whole numbers without a bound of their own. A `read` function has checked its own result.
        if self.kind is int and setting.read is None and setting.most is None and result > MAX_WHOLE:
            raise must_be(f"at most {MAX_WHOLE}", value)
        return result


def _finite(number: float) -> float:
    """Return a number as a float. Raises ValueError without text for one that is infinite, nan or too large."""
    # An int of thousands of digits raises OverflowError here.
    try:
        parsed = float(number)
    except OverflowError:
        raise ValueError from None
    if not math.isfinite(parsed):
        raise ValueError
    return parsed


_WHAT: Final = {bool: "true or false", str: "a string"}


def declared(kind: type) -> Mapping[str, Declared]:
    """Return the settings that a class declares, by their keys, in its order.

    Raises:
        TypeError: A field's type says nothing about its values, and no `read` function does; or two have one key.
    """
    hashable: Any = kind
    return _declared(hashable)


@cache
def _declared(kind: Any) -> Mapping[str, Declared]:
    settings_by_key: dict[str, Declared] = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    # A field is a setting if its annotation has a `Setting`. Operators can't set other fields.
    for item in fields(kind):
        if get_origin(hints[item.name]) is not Annotated:
            continue
        inner, *notes = get_args(hints[item.name])
        settings = [note for note in notes if isinstance(note, Setting)]
        if not settings:
            continue
        # Call the default's factory, if it has one. MISSING means that a file must give the setting.
        default = item.default if item.default_factory is MISSING else item.default_factory()
        entry = Declared(settings[0].key or item.name, item.name, _without_none(inner), default, settings[0])
        # A mistake in a declaration raises an error when its class is first read, so a test that reads each class finds
        # all mistakes.
        is_known = entry.kind in (bool, int, float, str) or entry.table is not None
        if not (is_known or entry.setting.read or (isinstance(entry.kind, type) and issubclass(entry.kind, Enum))):
            raise TypeError(f"{kind.__name__}.{item.name} needs a read function: its type is {entry.kind}")
        if entry.setting.read is not None and entry.table is None and not entry.setting.what:
            raise TypeError(f"{kind.__name__}.{item.name} must say what its value is, because it has a read function")
        if not entry.setting.does or entry.key in settings_by_key:
            raise TypeError(f"{kind.__name__}.{item.name} must say what it does, and have a key of its own")
        settings_by_key[entry.key] = entry
    return types.MappingProxyType(settings_by_key)


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (types.UnionType, typing.Union):
        others = [member for member in get_args(kind) if member is not types.NoneType]
        return others[0] if len(others) == 1 else kind
    return kind


def read_values(kind: type | Mapping[str, Declared], table: Any) -> dict[str, Any]:
    """Return the values of a table by the attributes of its declaration; settings that the table lacks are left out.

    Args:
        kind: The class that declares the settings, or the settings by their keys.
        table: The table as the file has it.

    Raises:
        BadSetting: It is not a table, has a key that is not declared or a wrong value, or lacks a setting that must
            be given.
    """
    # Step 1: the table's form.
    if not isinstance(table, dict):
        raise must_be("a table", table)
    settings = kind if isinstance(kind, Mapping) else declared(kind)
    values: dict[str, Any] = {}
    # Step 2: each key of the file, so that a misspelt one is an error and not a default.
    for key, value in table.items():
        if (entry := settings.get(key)) is None:
            raise BadSetting(f"there is no setting {{}}; {did_you_mean(key, settings)}", (key,))
        values[entry.attribute] = entry.value_of(value)
    # Step 3: report required settings that the file lacks.
    missing = [key for key, entry in settings.items() if entry.default is MISSING and entry.attribute not in values]
    if missing:
        raise BadSetting(f"{{}} must be given{''.join(f', and {key}' for key in missing[1:])}", (missing[0],))
    return values


def read_settings(kind: type[Settings], table: Any) -> Settings:
    """Return a table as an instance of the class that declares its settings. Raises BadSetting."""
    values = read_values(kind, table)
    # The class may check its settings against each other; its error does not name a setting.
    try:
        return kind(**values)
    except BadSetting:
        raise
    except ValueError as error:
        raise BadSetting(f"{{}}: {error}") from None


def check_bounds(settings: Any) -> None:
    """Check the numbers of an instance, by its attributes' names, for a `__post_init__`. Raises BadSetting."""
    for entry in declared(type(settings)).values():
        value = getattr(settings, entry.attribute)
        try:
            entry.check_bounds(value, value)
        except BadSetting as error:
            raise error.within(entry.attribute) from None


# --- values that several declarations read ---


def any_of(texts: Iterable[str]) -> str:
    """Return texts as alternatives: "'a', 'b' or 'c'"."""
    # The last text is joined with "or"; a single text is returned alone.
    *others, last = [repr(text) for text in texts]
    return f"{', '.join(others)} or {last}" if others else last


def read_choice(kind: type[Choice], value: Any, without: Iterable[Choice] = ()) -> Choice:
    """Return the member with that value. Raises BadSetting if there is none, or if it is one of `without`."""
    values = [choice.value for choice in kind if choice not in without]
    if value not in values:
        raise must_be(any_of(values), value, did_you_mean(value, values, ""))
    return kind(value)


def read_text(value: Any) -> str:
    """Return a string of a file unchanged. Raises BadSetting for any other type."""
    if not isinstance(value, str):
        raise must_be("a string", value)
    return value


def read_texts(value: Any) -> list[str]:
    """Return the strings of a list, or of one string. Raises BadSetting."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise must_be("a string or a list of strings", value)
    return list(texts)


def read_size(value: Any) -> int:
    """Return the bytes of a size such as "6GiB". Raises ValueError."""
    return parse_size(read_text(value))
