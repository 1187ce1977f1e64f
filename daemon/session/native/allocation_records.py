"""The allocations for which serve.ll may copy without Python: a table of fixed size, filled on demand.

An allocation is entered once Python has served a copy of it. Another allocation with the same place in the table
displaces it; then Python serves the next copy of the displaced one. A record never outlives its allocation.
"""

import ctypes
from typing import Final

_PLACES_BITS: Final = 10
_HANDLE_BITS: Final = 64
_MULTIPLIER: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: the upper bits of a product with it differ for numbers that are close, or that are
all multiples of a power of two (Knuth, The Art of Computer Programming, volume 3, section 6.4)."""


class AllocationRecord(ctypes.Structure):
    """One entry of the table; serve.ll repeats the offsets, eight bytes a field.

    handle       The allocation's address; 0 if the place is free.
    size_bytes   Its size.
    is_reusable  1 if nothing but the tenant's own handle depends on it.
    """

    _fields_ = (("handle", ctypes.c_uint64), ("size_bytes", ctypes.c_uint64), ("is_reusable", ctypes.c_uint64))


class AllocationRecords:
    """The table.

    Attributes:
        address: Its address.
    """

    def __init__(self) -> None:
        self._places = (AllocationRecord * (1 << _PLACES_BITS))()
        self.address = ctypes.addressof(self._places)

    def show(self, handle: int, size_bytes: int, *, is_reusable: bool) -> None:
        """Let native code serve copies of an allocation; it displaces any other at the same place of the table."""
        self._places[_place_of(handle)] = AllocationRecord(handle, size_bytes, is_reusable)

    def hide(self, handle: int) -> None:
        """Leave an allocation's copies to Python. Has no effect on an allocation that is not in the table."""
        place = _place_of(handle)
        if self._places[place].handle == handle:
            self._places[place] = AllocationRecord()


def _place_of(handle: int) -> int:
    return (handle * _MULTIPLIER & (1 << _HANDLE_BITS) - 1) >> _HANDLE_BITS - _PLACES_BITS
