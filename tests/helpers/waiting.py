"""Waits until a condition is true, with a time limit, instead of sleeping for as long as something usually takes."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

PATIENCE_S: Final = 120.0
"""How long a test waits for something that takes milliseconds on an idle host. After that, the test fails."""

LOOK_S: Final = 0.005
"""Shortest pause between two checks of the condition."""

MAX_LOOK_S: Final = 0.2
"""Longest pause after a check that is fast."""

_OF_THE_WAIT: Final = 1 / 16
"""Pauses become longer during a wait, up to this part of the time waited, so a wait is late by at most this part."""

_TIMES_A_LOOK: Final = 3
"""A pause is at least this many times as long as the check before it, because other tests need the processor."""

_MAX_PAUSE_S: Final = 0.3
"""Longest pause after a slow check, which starts a process or runs on a busy host."""


def wait_until(
    condition: Callable[[], T], what: str, within_s: float = PATIENCE_S, *, seen: Callable[[], object] | None = None
) -> T:
    """Return the first true value of `condition`. If there is none in time, fails with `what` and what is `seen`."""
    begun = looked = time.monotonic()
    while not (value := condition()):
        now = time.monotonic()
        if now > begun + within_s:
            raise AssertionError(f"not within {within_s:g} s: {what}; seen: {value if seen is None else seen()!r}")
        rarely = min((now - begun) * _OF_THE_WAIT, MAX_LOOK_S)
        time.sleep(max(LOOK_S, rarely, min((now - looked) * _TIMES_A_LOOK, _MAX_PAUSE_S)))
        looked = time.monotonic()
    return value
