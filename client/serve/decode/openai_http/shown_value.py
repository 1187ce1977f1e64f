"""A caller's value as an error repeats it."""

from typing import Any, Final

SHOWN_CHARACTERS: Final = 60
"""Characters of a wrong value that an error repeats. Stops a caller from having megabytes sent back, or logged."""


def shown(value: Any) -> str:
    """Return a caller's value for an error: in ASCII, and cut."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return "a value that can't be shown"
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
