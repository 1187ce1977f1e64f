"""Waiting for something to become true, with a bound, instead of sleeping for as long as it usually takes."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

PATIENCE_S: Final = 120.0
"""How long a test waits for what takes milliseconds on an idle host; past this the host, or the code, hangs."""

LOOK_S: Final = 0.005


def wait_until(
    condition: Callable[[], T], what: str, within_s: float = PATIENCE_S, *, seen: Callable[[], object] | None = None
) -> T:
    """The first true value of `condition`. Fails the test, with `what` and what is `seen`, if there is none in time."""
    until = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > until:
            raise AssertionError(f"not within {within_s:g} s: {what}; seen: {value if seen is None else seen()!r}")
        time.sleep(LOOK_S)
    return value
