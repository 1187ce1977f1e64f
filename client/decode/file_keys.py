"""Declares the effect of each key in a model's files. One table for each kind of file accepts or refuses keys.

A key is used, refused, advice to callers, or without effect. A loader receives only the used keys, so it can't use a
key that no table declares. A key that affects the reference implementation, but not the engine, is never ignored
silently.
"""

import logging
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final

from gpulease.client.decode.checked_file import Members, quoted_value
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.texts import quoted

MAX_LOGGED_KEYS: Final = 20
"""Maximum number of a file's keys in a log line, so that a hostile file can't fill the log."""

MAX_LOGGED_FILES: Final = 1024
"""Maximum number of log lines that are remembered. A remembered line is not repeated when a model is opened again."""

LOG: Final = logging.getLogger("gpulease.decode")


class Effect(Enum):
    """How a key affects the tokens that a model emits."""

    USED = "used"
    """The loader reads it."""
    REFUSED = "refused"
    """The reference implementation supports it and the engine does not, so only its neutral values are accepted."""
    ADVICE = "advice"
    """A default for callers that set no value. This engine's requests always have a value, so the default is only
    logged."""
    NONE = "none"
    """It changes no token."""


@dataclass(frozen=True, slots=True)
class FileKey:
    """How the engine treats a key.

    Attributes:
        effect: Its effect on tokens.
        neutral: Values that change nothing, in addition to null, an empty object and lists of neutral values.
        why: A sentence for the error, which says what the engine does instead.
    """

    effect: Effect
    neutral: tuple[Any, ...] = ()
    why: str = ""

    def is_neutral(self, value: Any) -> bool:
        """Return whether a value changes nothing. Types must match: "1", 1 and true are different values."""
        # A list is neutral if all of its items are, such as one value per layer.
        values = value if isinstance(value, list) else [] if value is None or value == {} else [value]
        neutral = {(_kind(number), number) for number in self.neutral}
        return all(isinstance(number, Hashable) and (_kind(number), number) in neutral for number in values)


KeyTable = Mapping[str, FileKey]
"""Keys by name. A `*` in a name matches any text; exact names take precedence."""


def used(*keys: str) -> dict[str, FileKey]:
    """Return entries for keys that the loader reads."""
    return dict.fromkeys(keys, FileKey(Effect.USED))


def refused(reason: str, keys: Mapping[str, tuple[Any, ...]]) -> dict[str, FileKey]:
    """Return entries for keys that may have only neutral values. `reason` is their `why`."""
    return {key: FileKey(Effect.REFUSED, neutral, reason) for key, neutral in keys.items()}


def advice(keys: Mapping[str, tuple[Any, ...]]) -> dict[str, FileKey]:
    """Return entries for keys that advise callers, with the values that contain no advice."""
    return {key: FileKey(Effect.ADVICE, neutral) for key, neutral in keys.items()}


def no_effect(*keys: str) -> dict[str, FileKey]:
    """Return entries for keys that never change a token."""
    return dict.fromkeys(keys, FileKey(Effect.NONE))


def used_members(members: Members, table: KeyTable) -> Members:
    """Return the members that the table marks as used.

    Logs, once per file, a line with the keys that are not in the table, and a line with advice that is not neutral.
    Raises ModelRejected for a key that requires something that the engine does not support.
    """
    used: dict[str, Any] = {}
    unknown, advised = [], []
    for name, value in members.values.items():
        key = find_key(name, table)
        if key is None:
            # Ignore unknown keys, as the reference does, but log them: a newer version of the reference may use them.
            unknown.append(name)
        elif key.effect is Effect.USED:
            used[name] = value
        elif key.effect is Effect.REFUSED and not key.is_neutral(value):
            raise ModelRejected(f"{members.where}: {name} is {quoted_value(value)}; {key.why}")
        elif key.effect is Effect.ADVICE and not key.is_neutral(value):
            advised.append(f"{name} {quoted_value(value)}")
    if unknown:
        _log_once(f"{members.where}: unknown keys are ignored: {_listed(map(quoted, unknown))}")
    if advised:
        _log_once(
            f"{members.where}: recommended sampling parameters are ignored, because each request sets its "
            f"own: {_listed(advised)}"
        )
    return Members(used, members.where)


def find_key(name: str, table: KeyTable) -> FileKey | None:
    """Return a key's entry, by its exact name or else by the first pattern that matches; None if there is none."""
    if name in table:
        return table[name]
    return next((key for pattern, key in table.items() if "*" in pattern and fnmatchcase(name, pattern)), None)


def _kind(value: Any) -> type:
    # 1 and 1.0 are the same number in JSON; true is not a number.
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    rest_text = f" and {len(names) - MAX_LOGGED_KEYS} more" if len(names) > MAX_LOGGED_KEYS else ""
    return ", ".join(names[:MAX_LOGGED_KEYS]) + rest_text


@lru_cache(MAX_LOGGED_FILES)
def _log_once(line: str) -> None:
    LOG.warning("%s", line)
