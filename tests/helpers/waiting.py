"""Waiting for something to become true, with a bound, instead of sleeping for as long as it usually takes."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

PATIENCE_S: Final = 120.0
"""How long a test waits for what takes milliseconds on an idle host; past this the host, or the code, hangs."""

LOOK_S: Final = 0.005
"""Shortest pause between two looks."""

MAX_LOOK_S: Final = 0.05
"""Longest pause for a look that takes next to no time."""

_OF_THE_WAIT: Final = 1 / 16
"""What has not come for long is looked at less often: a wait becomes longer by this share at most."""

_TIMES_A_LOOK: Final = 3
"""Pauses are so many times as long as a look at least: other tests need the processor."""


def wait_until(
    condition: Callable[[], T], what: str, within_s: float = PATIENCE_S, *, seen: Callable[[], object] | None = None
) -> T:
    """The first true value of `condition`. Fails the test, with `what` and what is `seen`, if there is none in time."""
    begun = looked = time.monotonic()
    while not (value := condition()):
        now = time.monotonic()
        if now > begun + within_s:
            raise AssertionError(f"not within {within_s:g} s: {what}; seen: {value if seen is None else seen()!r}")
        rarely = min((now - begun) * _OF_THE_WAIT, MAX_LOOK_S)
        time.sleep(max(LOOK_S, rarely, min((now - looked) * _TIMES_A_LOOK, MAX_LOOK_S)))
        looked = time.monotonic()
    return value
