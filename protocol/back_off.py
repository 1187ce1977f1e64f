"""Pauses after failed attempts: each is twice the previous one, up to a maximum."""

from typing import Final

MAX_DOUBLINGS: Final = 64
"""Maximum number of failures in a row that lengthen a pause. Stops a number that grows for days from exceeding a
float's range."""


def back_off_s(failures: int, first_s: float, longest_s: float) -> float:
    """Return the pause in seconds before the next attempt.

    Args:
        failures: Number of failures in a row before the latest one; for 0 the pause is `first_s`.
        first_s: The shortest pause.
        longest_s: The longest pause.
    """
    # Limit the exponent, not only the product, because 2.0 ** 1024 raises OverflowError.
    return min(first_s * 2.0 ** min(failures, MAX_DOUBLINGS), longest_s)
