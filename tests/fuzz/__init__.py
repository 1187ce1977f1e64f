"""Targets for fuzzing. Each begins with its invariant: what must hold for every input.

A target is a module with `check(data)`, which raises an error if the invariant does not hold; with `seeds()`, the
inputs to begin with, made from the vectors; and with `MAX_BYTES`, the longest useful input. `python -m tests.fuzz` runs
one target for as long as you wish. The test suite runs all of them briefly, so that they keep working.
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
