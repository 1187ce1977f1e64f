"""Fields of the messages between our processes: how each is packed, and which values are accepted.

A message class is a frozen dataclass derived from `Message`. Each of its fields is annotated with a `Kind`:
`Annotated[int, integer(0, MAX_PID)]`. `Message.to_map` and `Message.from_map` do the rest.

Versions differ between processes: an upgraded broker takes over the zygote and the workers of its predecessor. So
`from_map` ignores keys that it does not know. A field with a default may be missing, because an older process does not
send it.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Self, get_type_hints

from gpulease.protocol.lease_options import ChoiceOption, FlagOption, LeaseOption, NumberOption

U64_MAX: Final = 2**64 - 1

MAX_PID: Final = 1 << 22
"""PID_MAX_LIMIT of Linux (proc_sys_kernel(5), pid_max)."""

MAX_LEASE_NUMBER: Final = 1 << 131
"""Bound of the numbers by which broker and zygote know workers. A lease's number has 128 bits; warm contexts and
submits are counted from 1 << 128 and from 1 << 129 on."""


class MalformedMessage(ValueError):
    """A message lacks a field, or a field has the wrong type or a value out of bounds.

    Attributes:
        op: The message's op.
    """

    def __init__(self, op: str, problem: str) -> None:
        super().__init__(f"{op}: {problem}")
        self.op = op


@dataclass(frozen=True, slots=True)
class Kind:
    """The form of one field in a map, and the values that it accepts.

    Attributes:
        parse: Returns the value of what arrived; raises ValueError.
        pack: Returns what to send for a value.
        key: The key in the map; "" for the field's name.
        is_inline: The field is a message with its own keys in the same map.
        is_optional: The key is left out of the map while the value is None.
    """

    parse: Callable[[Any], Any]
    pack: Callable[[Any], Any] = lambda value: value
    key: str = ""
    is_inline: bool = False
    is_optional: bool = False

    def named(self, key: str) -> Self:
        """Return this kind with `key` in place of the field's name in the map."""
        return replace(self, key=key)

    def or_nil(self) -> Self:
        """Return the kind of a value or None, which is sent as nil."""
        parse, pack = self.parse, self.pack
        return replace(
            self,
            parse=lambda value: None if value is None else parse(value),
            pack=lambda value: None if value is None else pack(value),
        )

    def optional(self) -> Self:
        """Return the kind of a value or None, for which nothing is sent."""
        return replace(self, is_optional=True)


def integer(least: int, most: int) -> Kind:
    """Return the kind of an integer between two bounds, both included."""

    def parse(value: Any) -> int:
        # Not isinstance: a bool is an int, and True must not pass as 1.
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{value!r} must be an integer from {least} to {most}")
        return value

    return Kind(parse)


def instance(kind: type[Any]) -> Kind:
    """Return the kind of what msgpack itself carries: text, bytes, truth values."""

    def parse(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"{value!r} must be of type {kind.__name__}")
        return value

    return Kind(parse)


def converted(parse: Callable[[Any], Any], pack: Callable[[Any], Any] = lambda value: value) -> Kind:
    """Return the kind of a class of ours; `parse` may raise TypeError, too."""

    def checked(value: Any) -> Any:
        try:
            return parse(value)
        except TypeError as error:
            raise ValueError(str(error)) from None

    return Kind(checked, pack)


def nested(message: "type[Message]") -> Kind:
    """Return the kind of a message within the map of another."""

    def parse(value: Any) -> "Message":
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} must be a map")
        return message.from_map(value)

    return Kind(parse, message.to_map)


def inline(message: "type[Message]") -> Kind:
    """Return the kind of a message with its keys in the map of another."""
    return replace(nested(message), is_inline=True)


def _number(text: Any) -> int:
    number = int(text, 16)
    if not 0 <= number < MAX_LEASE_NUMBER:
        raise ValueError(f"{text!r} is not a lease number")
    return number


LEASE_NUMBER: Final = converted(_number, lambda number: f"{number:032x}")
"""A lease's number as hexadecimal text: msgpack's integers end at 64 bits."""

TEXT: Final = instance(str)
BYTES: Final = instance(bytes)
FLAG: Final = instance(bool)
U64: Final = integer(0, U64_MAX)

LeaseNumber = Annotated[int, LEASE_NUMBER.named("lease")]
Pid = Annotated[int, integer(0, MAX_PID)]
Serial = Annotated[int, integer(0, U64_MAX)]
Text = Annotated[str, TEXT]
Flag = Annotated[bool, FLAG]


class _Field(NamedTuple):
    name: str
    key: str
    kind: Kind
    default: Any


class Message:
    """A message. Subclasses are frozen dataclasses and set `OP`, the value of the key "op".

    Attributes:
        ORDER: The first fields of the map, if they are not the first of the class. Bytes of versions are compared.
    """

    __slots__ = ()
    OP: ClassVar[str]
    ORDER: ClassVar[tuple[str, ...]] = ()

    def to_map(self) -> dict[str, Any]:
        """Return the map to be packed and sent; its keys are in the order of the fields."""
        # "op" comes first, so that a dump of the channel is readable.
        message: dict[str, Any] = {"op": self.OP}
        for name, key, kind, _ in _fields_of(type(self)):
            value = getattr(self, name)
            if kind.is_inline:
                # The inline message brings its own "op", which must not replace this one's.
                message |= kind.pack(value)
                message["op"] = self.OP
            elif value is not None or not kind.is_optional:
                message[key] = kind.pack(value)
        return message

    @classmethod
    def from_map(cls, message: Mapping[str, Any]) -> Self:
        """Return the message of a map that arrived. Raises MalformedMessage."""
        values = {}
        key = ""
        try:
            # Keys that no field has are ignored: a newer process may send them.
            for name, key, kind, default in _fields_of(cls):
                if kind.is_inline:
                    values[name] = kind.parse(message)
                elif key in message:
                    values[name] = kind.parse(message[key])
                # A missing field with a default is one that an older process does not know.
                elif default is MISSING:
                    raise ValueError("it is missing")
        # `key` is still the field's that failed.
        except ValueError as error:
            raise MalformedMessage(cls.OP, f"{key}: {error}") from None
        return cls(**values)


_FIELDS: Final[dict[type[Any], tuple[_Field, ...]]] = {}


def _fields_of(message: type[Any]) -> tuple[_Field, ...]:
    # Resolving annotations is slow, so it is done once for each class.
    if (known := _FIELDS.get(message)) is not None:
        return known
    hints = get_type_hints(message, include_extras=True)
    # ORDER puts fields first without moving them in the class, where defaults must come last.
    found = {field.name: _field_of(field.name, hints[field.name], field.default) for field in fields(message)}
    _FIELDS[message] = tuple(found[name] for name in dict.fromkeys((*message.ORDER, *found)))
    return _FIELDS[message]


def _field_of(name: str, hint: Any, default: Any) -> _Field:
    (kind,) = hint.__metadata__
    if isinstance(kind, LeaseOption):
        kind = _kind_of(kind)
    return _Field(name, kind.key or name, kind, default)


def _kind_of(option: LeaseOption[Any, Any]) -> Kind:
    """Return the kind of a lease option that a worker obeys. Raises TypeError for a value that no message has yet."""
    match option:
        case NumberOption():
            return U64
        case FlagOption():
            return FLAG
        case ChoiceOption():
            return converted(option.kind).or_nil()
    raise TypeError(f"{type(option).__name__} has no kind here: add one for the worker's messages")


def by_op(*messages: type[Message]) -> Mapping[str, type[Message]]:
    """Return message classes by their ops. Their fields are resolved now, not later in a process just forked."""
    for message in messages:
        _fields_of(message)
    return {message.OP: message for message in messages}
