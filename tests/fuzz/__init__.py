"""Targets for fuzzing, each of which says first what holds whatever the input.

A target is a module with `check(data)`, which raises if it does not hold; `seeds()`, what to begin with, made of the
vectors; and `MAX_BYTES`, the longest input worth trying. `python -m tests.fuzz` runs one for as long as wished; the
suite runs all of them for a moment, so that they can't rot.
"""

from typing import Final

TARGETS: Final = (
    "audit",
    "control",
    "frames",
    "images",
    "ptx",
    "rings",
    "serving",
    "sessions",
    "settings",
    "submits",
    "tokens",
)
