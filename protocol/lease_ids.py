"""A lease's id: a number that is always printed as 32 hexadecimal digits."""

import re
from contextlib import suppress
from typing import Final

_TEXT: Final = re.compile("[0-9a-fA-F]{32}")
_INTEGER_KINDS: Final = frozenset("bcdeEfFgGnoxX%")
"""Last letters of format specifications for a number (Python's Format Specification Mini-Language)."""


class LeaseId(int):
    """A lease's number, 128 bits, which prints as 32 hexadecimal digits.

    A LeaseId is compared, hashed and sent like an int. `json.dumps` writes every int in decimal digits, so pass it
    `str(lease_id)`.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return int.__format__(self, "032x")

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        """Format the text, or the number if the specification asks for one: `f"{lease_id:d}"`, `f"{lease_id:,}"`."""
        # "08x" and "d" ask for a number; "", ">40" and "s" ask for the text. If the text refuses the format, try the
        # number.
        if spec[-1:] not in _INTEGER_KINDS:
            with suppress(ValueError):
                return format(str(self), spec)
        return int.__format__(self, spec)


def lease_id_of(text: str) -> LeaseId:
    """Return the id from a text of 32 hexadecimal digits. Raises ValueError."""
    if _TEXT.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not a lease id, which has 32 hexadecimal digits")
    return LeaseId(text, 16)


def lease_text(lease_id: int) -> str:
    """Return a lease's number as 32 hexadecimal digits."""
    return f"{lease_id:032x}"
