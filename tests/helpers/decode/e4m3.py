"""Float8 e4m3 (OCP OFP8) in numpy, by its definition: the values of all bytes, and the nearest byte to a number."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def _value(byte: int) -> float:
    sign, exponent, fraction = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return float("nan")
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


E4M3: Final = np.array([_value(byte) for byte in range(256)])
"""The value of each byte."""

_SIZES: Final = E4M3[:127]


def e4m3_exponents(values: Array) -> NDArray[np.uint8]:
    """Return the exponents [..., 1] of the smallest powers of two with which values [..., width] fit into e4m3.

    They are those of an f32, from 1 on, and 255 for values that are not all finite.
    """
    most = abs(values).max(-1, keepdims=True)
    finite = np.isfinite(most)
    fraction, exponent = np.frexp(np.where(finite, most, 1))
    # 448 is 0.875 * 2^9.
    exponent = np.where(most == 0, -(10**6), exponent - 9 + (fraction > 0.875))
    return np.where(finite, np.maximum(exponent + 127, 1), 255).astype(np.uint8)


def e4m3_codes(values: Array, exponents: Array) -> NDArray[np.uint8]:
    """Return the bytes nearest to values / 2^(exponent - 127), ties to even. Not for values that are not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        sizes = np.nan_to_num(abs(values) * 2.0 ** (127.0 - exponents), nan=0, posinf=0)
    # The two nearest bytes, of which the even one is nearest in a tie.
    upper = np.clip(np.searchsorted(_SIZES, sizes), 1, 126)
    below, above = sizes - _SIZES[upper - 1], _SIZES[upper] - sizes
    is_lower = (below < above) | ((below == above) & (upper % 2 == 1))
    codes = np.where(is_lower, upper - 1, upper)
    return (codes | np.where(np.signbit(values), 128, 0)).astype(np.uint8)
