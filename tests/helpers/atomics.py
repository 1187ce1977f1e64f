"""The new values that atomic operations store, as bit patterns (PTX ISA section 9.7.13, "atom")."""

import struct
from collections.abc import Callable

import numpy as np

from helpers.exact import signed

Step = Callable[[int, int], int]


def integer(kind: str, operation: str) -> Step:
    bits = int(kind[1:])

    def number(value: int) -> int:
        return signed(value, bits) if kind[0] == "s" else value

    table: dict[str, Step] = {
        "add": lambda old, b: old + b,
        "min": lambda old, b: old if number(old) <= number(b) else b,
        "max": lambda old, b: old if number(old) >= number(b) else b,
        "and": lambda old, b: old & b,
        "or": lambda old, b: old | b,
        "xor": lambda old, b: old ^ b,
        "exch": lambda old, b: b,
        "inc": lambda old, b: 0 if old >= b else old + 1,
        "dec": lambda old, b: b if old == 0 or old > b else old - 1,
    }
    return lambda old, b: table[operation](old, b) % (1 << bits)


def outcome(operation: str, kind: str, old: int, operand: int, new: int, *, ftz: bool) -> int:
    """Return the new value of one number in memory.

    `new` is the value that `cas` stores. With `ftz`, sums of f32 flush subnormals to zero.
    """
    if operation == "cas":
        return new if old == operand else old
    if kind == "f32":
        return sum_f32(old, operand, ftz=ftz)
    if kind == "f64":
        return sum_f64(old, operand)
    if "f16" in kind:
        halves = range(0, 32 if kind.endswith("x2") else 16, 16)
        name = kind.removesuffix("x2")
        return sum(sum_half(name, old >> n & 0xFFFF, operand >> n & 0xFFFF) << n for n in halves)
    return integer(kind, operation)(old, operand)


def flushed(bits: int) -> int:
    return bits & 0x80000000 if not bits & 0x7F800000 else bits


def sum_f32(left: int, right: int, *, ftz: bool) -> int:
    if ftz:
        left, right = flushed(left), flushed(right)
    with np.errstate(all="ignore"):
        total = np.array(left, "u4").view("f4") + np.array(right, "u4").view("f4")
    if np.isnan(total):
        return 0x7FFFFFFF
    found = int(total.view("u4"))
    return flushed(found) if ftz else found


def sum_f64(left: int, right: int) -> int:
    with np.errstate(all="ignore"):
        return int((np.array(left, "u8").view("f8") + np.array(right, "u8").view("f8")).view("u8"))


def sum_half(kind: str, left: int, right: int) -> int:
    """Return a sum, computed exactly in f64 and rounded once."""
    if kind == "f16":
        with np.errstate(all="ignore"):
            parts = np.array([left, right], "u2").view("f2").astype("f8")
            total = (parts[0] + parts[1]).astype("f2")
        return 0x7FFF if np.isnan(total) else int(total.view("u2"))
    with np.errstate(all="ignore"):
        wide = (np.array([left, right], "u4") << np.uint32(16)).view("f4").astype("f8")
        total = wide[0] + wide[1]
    return 0x7FFF if np.isnan(total) else round_bf16(float(total), left & right & 0x8000)


def round_bf16(total: float, zero_sign: int) -> int:
    """Round a double to bf16, to nearest even: compare the two neighbouring bf16 values."""
    if total == 0:
        return zero_sign
    sign, size = (0x8000 if total < 0 else 0), abs(total)
    largest = 0x7F7F

    def value(bits: int) -> float:
        return 2.0**128 if bits == 0x7F80 else struct.unpack("<f", struct.pack("<I", bits << 16))[0]

    low, high = 0, largest + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) <= size else (low, middle)
    below, above = size - value(low), value(high) - size
    return sign | (high if above < below or (above == below and low & 1) else low)
