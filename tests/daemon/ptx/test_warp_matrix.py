"""The product of a whole warp has the bits of its lanes' parts computed one by one."""

import ctypes
import struct
from typing import Any

import numpy as np
import pytest

from gpulease.daemon.ptx.native.library import FLOATS, KINDS, LANES_PART, WARPS_WHOLE, matrix_code

Words = np.ndarray[Any, np.dtype[np.uint32]]

LANES = 32
# Bits of a kind's mantissa below its exponent, and of its exponent; chunks of a row of A.
LAYOUTS = {"f16": (10, 5, 2), "bf16": (7, 8, 2), "tf32": (10, 8, 2)}

POINTER, SIZE, NUMBER, FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_bool
SHAPE = (NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, FLAG, FLAG)


def at_once(kind: str, chunks: int, a: Words, b: Words, c: Words) -> Words:
    d = np.zeros_like(c)
    function = ctypes.CFUNCTYPE(None, *[POINTER] * 4, *SHAPE)(matrix_code()[1].address(WARPS_WHOLE + FLOATS))
    number = KINDS.index(kind)
    function(a.ctypes.data, b.ctypes.data, c.ctypes.data, d.ctypes.data, 2, 1, chunks, number, number, False, False)
    return d


def one_by_one(kind: str, chunks: int, a: Words, b: Words, c: Words) -> Words:
    d = np.zeros_like(c)
    types = (POINTER, POINTER, SIZE, SIZE, NUMBER, POINTER, POINTER)
    function = ctypes.CFUNCTYPE(None, *types, *SHAPE)(matrix_code()[0].address(LANES_PART + FLOATS))
    number = KINDS.index(kind)
    for lane in range(LANES):
        parts = a.ctypes.data, b.ctypes.data, 4, 4 * LANES, lane, c.ctypes.data + 4 * lane, d.ctypes.data + 4 * lane
        function(*parts, 2, 1, chunks, number, number, False, False)
    return d


def aligned(count: int) -> Words:
    """Words of so many registers, at the alignment of a kernel's memory."""
    room = np.zeros(LANES * count + 16, np.uint32)
    start = -room.ctypes.data % 64 // 4
    return room[start : start + LANES * count].reshape(count, LANES)


def numbers(draw: np.random.Generator, count: int, layout: tuple[int, int], way: str) -> Words:
    """Bit patterns of floats with so many bits of mantissa and of exponent."""
    digits, width = layout
    bias, most = (1 << width - 1) - 1, (1 << width) - 1
    mantissa, sign = draw.integers(0, 1 << digits, count), draw.integers(0, 2, count)
    low, high = {
        "near": (bias - 2, bias + 2),
        "like": (bias - 9, bias + 1),
        "wide": (max(1, bias - 40), min(most, bias + 40)),
        "any": (0, most),
        "tiny": (0, 3),
        "huge": (most - 2, most),
        "low": (bias - min(bias, 50), bias - min(bias, 50) + 12),
        "high": (bias + min(bias, 56), bias + min(bias, 56) + 8),
        "special": (most - 3, most + 1),
        "full": (bias, bias + 1),
    }[way]
    exponent = draw.integers(low, min(high, most + (way == "special")), count)
    if way == "full":
        mantissa, sign = np.full(count, (1 << digits) - 1), np.full(count, draw.integers(0, 2))
    return np.asarray(sign << (digits + width) | exponent << digits | mantissa, np.uint32)


WAYS = ("near", "like", "wide", "any", "tiny", "huge", "low", "high", "special", "full")


def part(draw: np.random.Generator, kind: str, words: int, way: str) -> Words:
    """A lane's words of A or B."""
    digits, width, _ = LAYOUTS[kind]
    found = aligned(words)
    if kind == "tf32":
        found[:] = (numbers(draw, found.size, (23, 8), way)).reshape(found.shape)
        return found
    low, high = (numbers(draw, found.size, (digits, width), way) for _ in range(2))
    found[:] = (low | high << 16).reshape(found.shape)
    return found


def emptied(draw: np.random.Generator, a: Words, b: Words, c: Words) -> None:
    """Zeros, of either sign, where a batch leaves rows and columns unused, and here and there."""
    for held, share in ((a, 0.5), (b, 0.2), (c, 0.3)):
        zero = draw.choice([0, 0, 0, 0x80008000])
        if draw.random() < 0.4:
            rows = draw.random(8) < share
            held[:, np.repeat(rows, 4)] = zero
        if draw.random() < 0.3:
            held[draw.random(held.shape) < share] = zero
    if draw.random() < 0.2:
        c[draw.random(c.shape) < 0.5] = 0x80000000


def product(draw: np.random.Generator, kind: str) -> tuple[int, Words, Words, Words]:
    chunks = int(draw.integers(1, LAYOUTS[kind][2] + 1))
    mixed = draw.random() < 0.3
    ways = [str(draw.choice(WAYS)) for _ in range(3)] if mixed else [str(draw.choice(WAYS))] * 3
    a, b, c = part(draw, kind, 2 * chunks, ways[0]), part(draw, kind, chunks, ways[1]), aligned(4)
    c[:] = numbers(draw, c.size, (23, 8), ways[2]).reshape(c.shape)
    if draw.random() < 0.5:
        emptied(draw, a, b, c)
    if draw.random() < 0.2:
        # What is added takes away what the products give, but for its last bits.
        c[:] = one_by_one(kind, chunks, a, b, np.zeros_like(c)) ^ np.uint32(0x80000000)
    return chunks, a, b, c


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_warp_at_once_has_the_bits_of_its_lanes(kind: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    for _ in range(1000 if seed else 300):
        chunks, a, b, c = product(draw, kind)
        found, expected = at_once(kind, chunks, a, b, c), one_by_one(kind, chunks, a, b, c)
        assert np.array_equal(found, expected), (a, b, c)


def test_sums_of_sixteen_greatest_products_are_exact() -> None:
    """They come closest to what 32 bits hold."""
    a, b, c = aligned(4), aligned(2), aligned(4)
    for kind, one in (("bf16", 0x3FFF3FFF), ("f16", 0x3FFF3FFF)):
        for sign in (0, 0x80008000):
            a[:], b[:] = one, one ^ sign
            (c[:],) = struct.unpack("<I", struct.pack("<f", -3.9999998 if sign else 3.9999998))
            assert np.array_equal(at_once(kind, 2, a, b, c), one_by_one(kind, 2, a, b, c))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_rows_of_zeros_give_what_is_added(kind: str) -> None:
    draw = np.random.default_rng(4)
    a, b, c = aligned(4), part(draw, kind, 2, "near"), aligned(4)
    for way in ("special", "tiny", "any"):
        c[:] = numbers(draw, c.size, (23, 8), way).reshape(c.shape)
        assert np.array_equal(at_once(kind, 2, a, b, c), one_by_one(kind, 2, a, b, c))
