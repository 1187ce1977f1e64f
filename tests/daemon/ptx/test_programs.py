"""Whole kernels, as nvcc writes them, against numpy."""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.image import CpuKernel

Vector = Callable[[str], bytes]
Array = np.ndarray[Any, np.dtype[Any]]
# As users' longest kernels run; the tests of single instructions take the first code.
pytestmark = pytest.mark.usefixtures("optimised")

ARCHITECTURES = ["sm75", "sm80", "sm90", "debug.sm75"]
RNG = np.random.default_rng(7)


class Program:
    """A module's kernels, run on numpy arrays: each array is copied in before and out after."""

    def __init__(self, context: CpuContext, image: bytes) -> None:
        self.context = context
        self.kernels: Mapping[str, CpuKernel] = context.module_load(image).kernels

    def run(
        self, name: str, grid: tuple[int, ...], block: tuple[int, ...], *arguments: Array | bytes, shared: int = 0
    ) -> list[Array]:
        kernel = self.kernels[name]
        params = bytearray(kernel.parameter_bytes)
        placed: list[tuple[int, Array]] = []
        for argument, slot in zip(arguments, kernel.parameters, strict=True):
            value = argument
            if isinstance(value, np.ndarray):
                address = self.context.mem_alloc(value.nbytes)
                self.context.mem_write(address, value.data.cast("B"))
                placed.append((address, value))
                value = struct.pack("<Q", address)
            params[slot.offset : slot.offset + slot.size] = value
        x, y, z = (*grid, 1, 1)[:3]
        bx, by, bz = (*block, 1, 1)[:3]
        self.context.launch(kernel, (x, y, z), (bx, by, bz), shared, bytes(params), 1)
        results = []
        for address, array in placed:
            result = np.empty_like(array)
            self.context.mem_read(address, result.data.cast("B"))
            self.context.mem_free(address)
            results.append(result)
        return results


@pytest.fixture(scope="module", params=ARCHITECTURES)
def loaded(request: pytest.FixtureRequest, lasting: CpuContext) -> Program:
    path = Path(__file__).parents[3] / "vectors" / "gpu" / f"programs.{request.param}.ptx"
    return Program(lasting, path.read_bytes())


@pytest.fixture
def programs(loaded: Program, resting: CpuContext) -> Program:
    return loaded


def i32(value: int) -> bytes:
    return struct.pack("<i", value)


def f32(value: float) -> bytes:
    return struct.pack("<f", value)


@pytest.mark.parametrize("name", ["transform.sm75", "transform.sm80", "transform.sm90", "transform.debug.sm75"])
@pytest.mark.parametrize("n", [1, 255, 1000])
def test_scale_and_bias(context: CpuContext, vector: Vector, name: str, n: int) -> None:
    program = Program(context, vector(f"{name}.ptx"))
    x = RNG.standard_normal(1000).astype("f4")
    (scaled,) = program.run("scale", (4,), (256,), x, i32(n), f32(1.1))
    assert np.array_equal(scaled, np.concatenate([x[:n] * np.float32(1.1), x[n:]]))
    (moved,) = program.run("bias", (4,), (256,), x, i32(n), f32(0.3))
    assert np.array_equal(moved, np.concatenate([x[:n] + np.float32(0.3), x[n:]]))


@pytest.mark.exhaustive
def test_saxpy_strides_over_the_grid(programs: Program) -> None:
    x, y = (RNG.standard_normal(5000).astype("f4") for _ in range(2))
    _, result = programs.run("saxpy", (3,), (64,), struct.pack("<Q", 4999), f32(2.5), x, y)
    # nvcc -G leaves the product and the sum two instructions.
    fused, twice = (x.astype("f8") * 2.5 + y).astype("f4"), x * np.float32(2.5) + y
    assert any(np.array_equal(result[:4999], exact[:4999]) for exact in (fused, twice))
    assert result[4999] == y[4999]


def test_integers(programs: Program) -> None:
    x = RNG.integers(-(2**31), 2**31, 500).astype("i4")
    u = RNG.integers(0, 2**32, 500).astype("u4")
    wide = RNG.integers(-(2**40), 2**40, 500)
    got = programs.run("integers", (4,), (128,), x, u, wide, i32(500))

    def cut(v: int, w: int) -> int:
        return int(np.fmod(v, w))

    for k in range(500):
        v, w, q = int(x[k]), int(u[k]), int(wide[k])
        first = int(v / 7) + cut(v, 7 - 2) - (v >> 3) + max(v, (w ^ 2**31) - 2**31) * 3
        second = ((w << 5) ^ (w >> 7)) | ((w * (v % 2**32)) >> 32 & ~w)
        divisor, other = v | 1, w | 1
        third = (
            q * q
            + abs(q) // abs(divisor) * (1 if (q < 0) == (divisor < 0) else -1)
            - (abs(q) % other * (-1 if q < 0 else 1))
        )
        assert [int(a[k]) % 2**b for a, b in zip(got, (32, 32, 64), strict=True)] == [
            first % 2**32,
            second % 2**32,
            third % 2**64,
        ]


def test_doubles(programs: Program) -> None:
    x = np.concatenate([RNG.uniform(-3, 5, 200), [0.5, 3.0, -1.0]])
    (result,) = programs.run("doubles", (2,), (128,), x, i32(len(x)))
    turned = ((x > 0.5) & (x < 3)) | (x < -1)
    assert np.array_equal(result, np.where(turned, -x, np.sqrt(np.abs(x)) + 1 / x))


def test_conversions(programs: Program) -> None:
    x = np.concatenate([RNG.uniform(-300, 300, 200), [0.5, -0.5, 1.5, 2.5]]).astype("f4")
    outs = [np.zeros(len(x), "i4") for _ in range(4)]
    _, cut, nearest, down, up, byte = programs.run(
        "conversions", (2,), (128,), x, *outs, np.zeros(len(x), "u1"), i32(len(x))
    )
    assert np.array_equal(cut, np.trunc(x))
    assert np.array_equal(nearest, np.rint(x))
    assert np.array_equal(down, np.floor(x))
    assert np.array_equal(up, np.ceil(x))
    assert np.array_equal(byte, ((np.trunc(x).astype("i4") + 3) & 255).astype("u1"))


def test_vectors(programs: Program) -> None:
    a = RNG.standard_normal((50, 4)).astype("f4")
    _, b = programs.run("vectors", (1,), (64,), a, np.zeros_like(a), i32(50))
    assert np.array_equal(b, a * np.array([2, 1, 1, 1], "f4") + np.array([0, 0, 0, 1], "f4"))


def test_matmul_by_shared_tiles(programs: Program) -> None:
    a, b = (RNG.integers(-9, 9, (48, 48)).astype("f4") for _ in range(2))
    _, _, c = programs.run("matmul", (3, 3), (16, 16), a, b, np.zeros_like(a), i32(48))
    assert np.array_equal(c, a @ b)


@pytest.mark.parametrize("threads", [1, 7, 128, 1024])
def test_scan_in_dynamic_shared_memory(programs: Program, threads: int) -> None:
    x = RNG.integers(0, 100, threads).astype("f8")
    (result,) = programs.run("scan", (1,), (threads,), x, shared=8 * threads)
    assert np.array_equal(result, np.cumsum(x))


def wide_numbers(n: int) -> list[int]:
    """Of 128 bits, of all lengths; those of the same length leave small quotients."""
    words = RNG.integers(0, 2**32, (n, 4)).tolist()
    lengths = RNG.integers(1, 129, n).tolist()
    numbers = [
        sum(w << 32 * k for k, w in enumerate(row)) >> (128 - size) for row, size in zip(words, lengths, strict=True)
    ]
    return [*numbers, 2**128 - 1, 2**127, 2**127 - 1, 2**64, 2**96 - 1, 2**32]


def test_integers_of_128_bits(context: CpuContext, vector: Vector) -> None:
    programs = Program(context, vector("quotients.sm75.ptx"))
    x, y = wide_numbers(90), wide_numbers(90)
    held = [np.frombuffer(b"".join(v.to_bytes(16, "little") for v in values), "u8") for values in (x, y)]
    results = programs.run("wide_integers", (1,), (128,), *held, *(np.zeros_like(x) for x in held), i32(96))[2:]
    signed = [v - 2**128 if v >> 127 else v for v in y]
    for i, (got_x, got_y) in enumerate(zip(*(array.reshape(-1, 2).tolist() for array in results), strict=True)):
        a, b, c, d = x[i], x[i ^ 1] | 1, signed[i], signed[i ^ 1] | 1
        quotient = abs(c) // abs(d) * (1 if (c < 0) == (d < 0) else -1)
        assert got_x[0] | got_x[1] << 64 == (a // b + a % b * 5) % 2**128
        assert got_y[0] | got_y[1] << 64 == (quotient - (c - quotient * d) * 3) % 2**128


def test_variables_of_the_module(programs: Program) -> None:
    # As many threads as there is scratch for: more would race for it.
    x = RNG.integers(0, 100, 8).astype("f4")
    (result,) = programs.run("variables", (1,), (8,), x, i32(8))
    k = np.arange(8)
    expected = x * np.array([1, 2, 3, 4], "f4")[k & 3] + np.array([5, -6, 7], "f4")[k % 3]
    assert np.array_equal(result, expected)


def test_local_arrays(programs: Program) -> None:
    x = RNG.integers(0, 100, 10).astype("i4")
    _, y = programs.run("locals", (1,), (64,), x, np.zeros(64, "i4"), i32(10), i32(3))
    kept = np.arange(32) * x[np.arange(32) % 10]
    assert np.array_equal(y, kept[(np.arange(64) * 3) & 31])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_generic_pointers(programs: Program, which: int) -> None:
    # As many threads as there are places that they add to: more would race.
    (result,) = programs.run("generic", (1,), (4,), np.zeros(128, "i4"), i32(which))
    k = np.arange(4)
    expected = {0: np.full(4, 100), 1: k * 2 + 100, 2: k + 100}[which]
    assert np.array_equal(result[64:68], expected)


def test_mandelbrot(programs: Program) -> None:
    (out,) = programs.run(
        "mandelbrot", (2, 2), (16, 16), f32(-2), f32(-1.25), f32(0.08), np.zeros((32, 32), "u1"), i32(32), i32(50)
    )
    assert out[16, 24] == 50
    assert out[0, 0] < 5
    assert len(np.unique(out)) > 8


def test_bits(programs: Program) -> None:
    x = np.concatenate([RNG.integers(0, 2**32, 100), [0, 1, 2**32 - 1]]).astype("u4")
    (result,) = programs.run("bits", (1,), (128,), x, i32(len(x)))
    for v, got in zip(x.tolist(), result.tolist(), strict=True):
        reverse, high = int(f"{v:032b}"[::-1], 2), (v + 1) % 2**32
        funnel = (high << 5 | v >> 27) % 2**32
        expected = v.bit_count() + (32 - v.bit_length()) * 3 + reverse + funnel + (v >> 4 & 255)
        assert got == expected % 2**32


def test_blocks_in_three_dimensions(context: CpuContext) -> None:
    image = b"""
    .version 8.0
    .target sm_75
    .address_size 64
    .entry where(.param .u64 out)
    {
        .reg .b32 %x<16>; .reg .b64 %p<3>;
        mov.u32 %x0, %tid.x; mov.u32 %x1, %tid.y; mov.u32 %x2, %tid.z;
        mov.u32 %x3, %ctaid.x; mov.u32 %x4, %ctaid.y; mov.u32 %x5, %ctaid.z;
        mad.lo.u32 %x6, %x2, %ntid.y, %x1; mad.lo.u32 %x6, %x6, %ntid.x, %x0;
        mad.lo.u32 %x7, %x5, %nctaid.y, %x4; mad.lo.u32 %x7, %x7, %nctaid.x, %x3;
        mad.lo.u32 %x8, %x7, 24, %x6;
        ld.param.u64 %p0, [out]; mad.wide.u32 %p1, %x8, 4, %p0;
        mov.u32 %x9, %laneid; mad.lo.u32 %x8, %x9, 1000, %x8;
        st.global.u32 [%p1], %x8;
    }
    """
    (out,) = Program(context, image).run("where", (2, 3, 2), (4, 3, 2), np.zeros(12 * 24, "u4"))
    k = np.arange(12 * 24)
    assert np.array_equal(out, k + 1000 * (k % 24))
