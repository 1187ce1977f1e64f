"""Pauses after failed attempts: each is twice the previous one, up to a maximum."""

from typing import Final

MAX_DOUBLINGS: Final = 64
"""Failures in a row that lengthen a pause. Stops a count that grows for days from exceeding the range of a float."""


def back_off_s(failures: int, first_s: float, longest_s: float) -> float:
    """Return the pause in seconds before the next attempt.

    Args:
        failures: Failures in a row before the one that was just seen: 0 gives `first_s`.
        first_s: The shortest pause.
        longest_s: The longest pause.
    """
    # Bound the exponent, not only the product: 2.0 ** 1024 raises OverflowError.
    return min(first_s * 2.0 ** min(failures, MAX_DOUBLINGS), longest_s)
