"""Checks of numbers from the program, such as sizes, counts and seconds, in the call to which they are passed.

A bool is an int in Python, but as a size, a count or a time it is a mistake: `min_vram(True)` would be 1 byte.
"""

import math
from typing import Any, TypeGuard

from gpulease.client.errors import InvalidRequest
from gpulease.client.texts import quoted


def integer(value: Any) -> int:
    """Return an integer as an int; numpy's integers are accepted. Raises TypeError for a bool, and anything else."""
    if isinstance(value, bool):
        raise TypeError("a bool is not a number")
    try:
        return int(value.__index__())
    except AttributeError:
        raise TypeError("it is not an integer") from None


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is an int or a float, but not a bool, and finite as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def whole(value: Any, subject: str, *, least: int, most: int) -> int:
    """Check an integer's range, and return it as `integer` does.

    Raises InvalidRequest, naming the value `subject`.
    """
    # Usually it is a plain int: this is called for each allocation.
    if type(value) is int and least <= value <= most:
        return value
    try:
        number = integer(value)
    except TypeError:
        raise InvalidRequest(f"{subject} must be an integer, not {quoted(value)}") from None
    if not least <= number <= most:
        raise InvalidRequest(f"{subject} must be from {least} to {most}, not {quoted(number)}")
    return number
