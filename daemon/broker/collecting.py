"""How often Python's collector of cycles goes through all that the broker holds: it holds up the loop for as long.

With ten thousand leases a full round takes 0.1 s, in which no deadline is kept and nobody is answered. What a request
leaves in cycles (what is parsed, by `construct`) dies young, and is found by the short rounds.
"""

import gc
from typing import Final

YOUNG: Final = 1000
"""New objects, those that are gone again not counted, between two short rounds: each takes well under a millisecond."""

MIDDLE: Final = 10
"""Short rounds for one of middle length."""

FULL: Final = 100
"""Rounds of middle length for a full one, where 10 is Python's default: one for a million objects that stay."""


def collect_rarely() -> None:
    """Once the daemon has started: what there is by now stays, and need not be gone through at all."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, FULL)
