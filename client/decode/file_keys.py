"""What becomes of each key of a model's files: one table for each kind of file, by which the loader judges keys.

A key is used, refused, advice to callers, or without effect. A loader gets the used ones alone, so it uses nothing that
the table does not declare. No key that the reference obeys and the engine does not may pass in silence.
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
"""Most keys of a file in a line of the log. Stops a hostile file from filling it."""

MAX_LOGGED_FILES: Final = 1024
"""Lines of the log that are remembered, so that a model opened again does not repeat them."""

LOG: Final = logging.getLogger("gpulease.decode")


class Effect(Enum):
    """What a key does to the answer."""

    USED = "used"
    """The loader reads it."""
    REFUSED = "refused"
    """The reference obeys it and the engine does not: only its neutral values are taken."""
    ADVICE = "advice"
    """A default for callers who do not choose; this engine's requests choose, so the log has it."""
    NONE = "none"
    """It changes no token."""


@dataclass(frozen=True, slots=True)
class Key:
    """What becomes of a key.

    Attributes:
        effect: What it does.
        neutral: Values that change nothing; an absent key, null and a list of neutral values never do.
        why: For the error: what the engine does instead.
    """

    effect: Effect
    neutral: tuple[Any, ...] = ()
    why: str = ""

    def is_neutral(self, value: Any) -> bool:
        """Whether a value changes nothing. Types count: a text is not a number, nor a number a flag."""
        values = value if isinstance(value, list) else [] if value is None or value == {} else [value]
        neutral = {(_kind(one), one) for one in self.neutral}
        return all(isinstance(one, Hashable) and (_kind(one), one) in neutral for one in values)


KeyTable = Mapping[str, Key]
"""Keys by name; a `*` in one stands for any text, and exact names go first."""


def used(*keys: str) -> dict[str, Key]:
    """Keys that the loader reads."""
    return dict.fromkeys(keys, Key(Effect.USED))


def refused(why: str, keys: Mapping[str, tuple[Any, ...]]) -> dict[str, Key]:
    """Keys that are taken with these neutral values alone. Args: why: What the engine does instead."""
    return {key: Key(Effect.REFUSED, neutral, why) for key, neutral in keys.items()}


def advice(keys: Mapping[str, tuple[Any, ...]]) -> dict[str, Key]:
    """Keys that advise callers, with the values that advise nothing."""
    return {key: Key(Effect.ADVICE, neutral) for key, neutral in keys.items()}


def no_effect(*keys: str) -> dict[str, Key]:
    """Keys that change no token."""
    return dict.fromkeys(keys, Key(Effect.NONE))


def judged(said: Members, table: KeyTable) -> Members:
    """Return the members that the table says are used.

    Logs once, in a line each, the keys that the table does not have and the advice that is not neutral. Raises
    ModelRejected for a key that asks for something that the engine does not compute.
    """
    kept: dict[str, Any] = {}
    unknown, advised = [], []
    for name, value in said.values.items():
        key = find_key(name, table)
        if key is None:
            unknown.append(name)
        elif key.effect is Effect.USED:
            kept[name] = value
        elif key.effect is Effect.REFUSED and not key.is_neutral(value):
            raise ModelRejected(f"{said.where}: {name} is {quoted_value(value)}; {key.why}")
        elif key.effect is Effect.ADVICE and not key.is_neutral(value):
            advised.append(f"{name} {quoted_value(value)}")
    if unknown:
        _log_once(f"{said.where}: keys that are not known are left out: {_listed(map(quoted, unknown))}")
    if advised:
        _log_once(f"{said.where}: sampling is each request's own; this advice is left out: {_listed(advised)}")
    return Members(kept, said.where)


def find_key(name: str, table: KeyTable) -> Key | None:
    """A key's entry, by its exact name or else by a pattern; None for one that the table does not have."""
    if name in table:
        return table[name]
    return next((key for pattern, key in table.items() if "*" in pattern and fnmatchcase(name, pattern)), None)


def _kind(value: Any) -> type:
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - MAX_LOGGED_KEYS} more" if len(names) > MAX_LOGGED_KEYS else ""
    return ", ".join(names[:MAX_LOGGED_KEYS]) + more


@lru_cache(MAX_LOGGED_FILES)
def _log_once(line: str) -> None:
    LOG.warning("%s", line)
