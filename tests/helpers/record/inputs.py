"""Kernel inputs from fixed seeds, which are the same on every host and with every NumPy."""

import zlib
from typing import Final

import numpy as np

from helpers.record.cases import Array

_SPECIALS: Final = {
    2: (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFC00, 0x7C00, 0x7E01),
    4: (0, 0x80000000, 1, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF800000, 0x7F800000, 0x7FC00001, 0xFFA00000),
    8: (
        0,
        1 << 63,
        1,
        (1 << 63) + (1 << 52) - 1,
        1 << 52,
        (0x7FF << 52) - 1,
        0xFFF << 52,
        0x7FF << 52,
        (0x7FF8 << 48) + 1,
    ),
}
"""Zeros, denormal numbers, the least normal and the greatest finite number, infinities, NaNs."""
_BF16_SPECIALS: Final = (0, 0x8000, 1, 0x807F, 0x80, 0x7F7F, 0xFF80, 0x7F80, 0x7FC1)


class Draw:
    """Numbers for one case. NumPy's legacy generator never changes (NEP 19), and no function of libm is used."""

    def __init__(self, name: str) -> None:
        self._state = np.random.RandomState(zlib.crc32(name.encode()))

    def floats(self, *shape: int, kind: str = "f4", most: float = 4.0) -> Array:
        """Return floats between -most and most."""
        return self._state.uniform(-most, most, shape).astype(kind)

    def integers(self, *shape: int, low: int = -50, high: int = 50, kind: str = "i4") -> Array:
        """Return integers from low to high - 1."""
        return self._state.randint(low, high, shape).astype(kind)

    def bits(self, *shape: int, kind: str = "u4") -> Array:
        """Return any bit patterns of the type."""
        size = np.dtype(kind).itemsize
        return np.frombuffer(self._state.bytes(size * int(np.prod(shape))), kind).reshape(shape).copy()

    def specials(self, *shape: int, kind: str = "f4", most: float = 4.0) -> Array:
        """Return numbers like `floats`, with each special value at some place."""
        array = self.floats(*shape, kind=kind, most=most)
        values = _SPECIALS[array.itemsize]
        flat = array.reshape(-1).view(f"u{array.itemsize}")
        flat[self._state.permutation(flat.size)[: len(values)]] = values[: flat.size]
        return array

    def bf16(self, *shape: int, with_specials: bool) -> Array:
        array = (self.floats(*shape).view("u4") >> 16).astype("u2")
        if with_specials:
            array.reshape(-1)[self._state.permutation(array.size)[: len(_BF16_SPECIALS)]] = _BF16_SPECIALS
        return array


def zeros(*shape: int, kind: str = "i4") -> Array:
    return np.zeros(shape, kind)
