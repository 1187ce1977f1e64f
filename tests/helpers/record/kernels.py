"""The launches of kernels from nvcc, numba and NVRTC. Their results were recorded on a real card."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from gpulease.daemon.drivers.interface import Dim3
from helpers.record.cases import Array, Bound, Case, Result
from helpers.record.inputs import Draw, zeros

PROGRAMS: Final = ("programs.sm75", "programs.debug.sm75")
WORKLOADS: Final = ("workloads.sm75", "workloads.debug.sm75")
NARROW: Final = ("narrow.sm75", "narrow.sm80", "narrow.sm90", "narrow.debug.sm90")
TOGETHER: Final = ("together.sm75", "together.debug.sm75")
TEAMWORK: Final = ("teamwork.sm80",)
CALLS: Final = ("calls.sm75", "calls.debug.sm75")
TENSOR: Final = ("tensor.sm80",)

EX2: Final = 2.0**-22
"""The ISA's relative error of ex2.approx: 2 units in the last place. Two correct results may differ by twice that."""
RSQRT: Final = 2.0**-22.9

Argument = Array | Result | bytes | int | float


def case(
    images: tuple[str, ...],
    kernel: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    *arguments: Argument,
    shared: int = 0,
    name: str = "",
) -> Case:
    """Return one launch. Integers are passed as C's `int`, floats as C's `float`."""
    return Case(
        name=f"{images[0].split('.')[0]}.{name or kernel}",
        images=images,
        kernel=kernel,
        grid=_three(grid),
        block=_three(block),
        arguments=tuple(_packed(argument) for argument in arguments),
        shared=shared,
    )


def _three(sizes: tuple[int, ...]) -> Dim3:
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _packed(argument: Argument) -> Array | Result | bytes:
    if isinstance(argument, int):
        return np.int32(argument).tobytes()
    if isinstance(argument, float):
        return np.float32(argument).tobytes()
    return argument


def kernel_cases() -> Iterator[Case]:
    yield from _programs()
    yield from _workloads()
    yield from _narrow()
    yield from _together()
    yield from _teamwork()
    yield from _calls()
    yield from _tensor()
    yield from _other_compilers()


def _programs() -> Iterator[Case]:
    d = Draw("programs")
    x, y = d.specials(1000), d.specials(1000)
    yield case(PROGRAMS, "saxpy", (2,), (64,), np.uint64(997).tobytes(), 1.5, x, Result(y))
    n = 200
    numbers = (d.bits(n, kind="i4"), d.bits(n), d.bits(n, kind="i8"))
    yield case(PROGRAMS, "integers", (2,), (128,), *(Result(array) for array in numbers), n)
    yield case(PROGRAMS, "doubles", (2,), (128,), Result(d.specials(n, kind="f8")), n)
    into = (zeros(n), zeros(n), zeros(n), zeros(n), zeros(n, kind="u1"))
    yield case(PROGRAMS, "conversions", (2,), (128,), d.specials(n, most=300), *(Result(a) for a in into), n)
    yield case(PROGRAMS, "vectors", (2,), (32,), d.specials(61, 4), Result(zeros(61, 4, kind="f4")), 61)
    square = (d.specials(32, 32), d.floats(32, 32))
    yield case(PROGRAMS, "matmul", (2, 2), (16, 16), *square, Result(zeros(32, 32, kind="f4")), 32)
    yield case(PROGRAMS, "scan", (1,), (100,), Result(d.floats(100, kind="f8")), shared=800)
    yield case(PROGRAMS, "locals", (1,), (64,), d.integers(10), Result(zeros(64)), 10, 3)
    yield case(PROGRAMS, "generic", (1,), (32,), Result(zeros(128)), 2)
    plane = Result(zeros(30, 30, kind="u1"))
    yield case(PROGRAMS, "mandelbrot", (2, 2), (16, 16), -2.0, -1.25, 0.0825, plane, 30, 60)
    yield case(PROGRAMS, "bits", (2,), (64,), Result(d.bits(100)), 100)


def _workloads() -> Iterator[Case]:
    d = Draw("workloads")
    m, n, k = 13, 11, 17
    c = Result(zeros(m, n, kind="f4"))
    yield case(WORKLOADS, "ragged_matmul", (2, 2), (8, 8), d.specials(m, k), d.floats(k, n), c, m, n, k)
    # Each power may be off by EX2 in either result. Sum and quotient at most double that.
    y = Result(zeros(4, 77, kind="f4"), Bound(5 * EX2, 2.0**-125, "ex2.approx in expf"))
    x = np.concatenate([d.floats(3, 77, most=30), d.specials(1, 77)])
    yield case(WORKLOADS, "row_softmax", (4,), (32,), x, y, 77, shared=128)
    tokens = 19
    heads = (d.floats(2, tokens, 64) for _ in range(3))
    # Each of a row's steps adds EX2 in either result to a mean of numbers below 4, and once more to its divisor.
    out = Result(zeros(2, tokens, 64, kind="f4"), Bound(0, 4 * 4 * tokens * EX2, "ex2.approx in __expf"))
    yield case(WORKLOADS, "attend", (tokens, 2), (64,), *heads, out, tokens, 0.125)
    counts = Result(zeros(37, kind="u4"))
    yield case(WORKLOADS, "histogram", (3,), (64,), d.bits(1000), counts, 1000, 37, shared=37 * 4)
    four = (d.bits(100, kind="i4"), d.bits(100, kind="i4"))
    yield case(WORKLOADS, "byte_dots", (2,), (64,), *four, Result(zeros(100)), 100)
    yield case(WORKLOADS, "bitonic_sort", (1,), (128,), Result(d.specials(128)), shared=512)
    picture = d.bits(33, 29, kind="u1")
    blurred = Result(zeros(33, 29, kind="u1"))
    yield case(WORKLOADS, "blur", (2, 3), (16, 16), picture, blurred, 29, 33)
    yield case(WORKLOADS, "philox", (2,), (64,), Result(zeros(128, 4, kind="u4")), 0x1234567, -559038737)
    places = d.floats(50, 4)
    # Each of 50 bodies adds at most 4 / 0.01. The cube of rsqrt.approx has three times its error, in either result.
    pull = Result(zeros(50, 4, kind="f4"), Bound(0, 50 * 400 * 6 * RSQRT, "rsqrt.approx"))
    yield case(WORKLOADS, "bodies", (2,), (32,), places, pull, 50)
    x = d.specials(150, most=20)
    optimised = WORKLOADS[:1]
    # CUDA's Programming Guide, "Mathematical Functions": at most 2 units in the last place (powf 4), in either result.
    near = Result(zeros(5, 150, kind="f4"), Bound(8 * 2.0**-23, 2.0**-125, "ex2.approx, lg2.approx and rcp.approx"))
    yield case(optimised, "functions", (2,), (128,), x, Result(zeros(4, 150, kind="f4")), near, 150)
    near = Result(zeros(5, 150, kind="f8"), Bound(2.0**-50, 0, "rcp.approx.ftz.f64 and rsqrt.approx.f64"))
    wide = d.specials(150, kind="f8", most=20)
    yield case(optimised, "double_functions", (2,), (128,), wide, Result(zeros(4, 150, kind="f8")), near, 150)


def _narrow() -> Iterator[Case]:
    d = Draw("narrow")
    x = d.specials(300, kind="f2")
    # One unit of a half. Near -4, the sum of 1 and tanh has only tanh's absolute error.
    y = Result(zeros(300, kind="f2"), Bound(2.0**-10, 2.0**-20, "ex2.approx and rcp.approx in tanhf"))
    yield case(NARROW, "gelu_half", (3,), (128,), x, y, 299)
    yield case(NARROW, "polynomial_half2", (2,), (128,), d.specials(300, kind="f2"), Result(zeros(300, kind="f2")), 150)
    # One unit of a bf16. If two products cancel, the angle's error times numbers below 4 remains.
    turned = Result(d.bf16(9, 32, with_specials=True), Bound(2.0**-7, 2.0**-15, "ex2.approx in powf"), is_bf16=True)
    yield case(NARROW, "rope_bf16", (2,), (96,), turned, 9, 32, 10000.0)
    weights, scales = d.bits(7, 192, kind="i1"), d.floats(7, 6, kind="f2")
    y = Result(zeros(7, kind="f4"))
    yield case(NARROW, "quantised_gemv", (7,), (64,), weights, scales, d.floats(192), y, 192)


def _together() -> Iterator[Case]:
    d = Draw("together")
    x, gain, bias = d.floats(3, 100), d.floats(100), d.floats(100)
    # Scaled numbers below 4 times gains below 4, with the error of rsqrt.approx in either result.
    y = Result(zeros(3, 100, kind="f4"), Bound(2.0**-22, 32 * RSQRT, "rsqrt.approx"))
    yield case(TOGETHER, "layernorm", (3,), (96,), x, gain, bias, y, 100)
    y = Result(zeros(2, 77, kind="f2"), Bound(2.0**-10, 2.0**-24, "ex2.approx in __expf, then one unit of a half"))
    yield case(TOGETHER, "softmax", (2,), (64,), d.floats(2, 77, kind="f2"), y, 77)
    yield case(TOGETHER, "recursion", (1,), (64,), Result(zeros(64)), 6)


def _teamwork() -> Iterator[Case]:
    d = Draw("teamwork")
    x = d.integers(4 * 96)
    yield case(TEAMWORK, "warp_scan", (4,), (96,), x, *(Result(zeros(x.size)) for _ in range(3)))
    yield case(TEAMWORK, "segment_sums", (1,), (64,), d.bits(64, kind="i8"), Result(zeros(64, kind="i8")))
    yield case(TEAMWORK, "match_histogram", (3,), (70,), d.integers(1000, low=0, high=7), Result(zeros(7)), 1000)
    yield case(TEAMWORK, "block_votes", (1,), (77,), d.integers(77, low=0, high=2), Result(zeros(231)))
    yield case(TEAMWORK, "producer_consumer", (1,), (128,), d.integers(7 * 64), Result(zeros(7 * 64)), 7)
    yield case(TEAMWORK, "chain", (1,), (100,), Result(zeros(100)))
    parts = (Result(zeros(20)), Result(zeros(1, kind="u4")), Result(zeros(1)))
    yield case(TEAMWORK, "last_block_sum", (20,), (64,), d.integers(20 * 64), *parts)
    x = d.integers(9 * 40)
    yield case(TEAMWORK, "look_back", (9,), (40,), x, *(Result(zeros(size)) for size in (9, 9, x.size)))
    w = np.array([0, 0, 0, 0, -1, 0, 0, 0], "i4")
    places = (w, zeros(8, kind="u8"), zeros(2, kind="f4"), zeros(1, kind="f8"), zeros(2, kind="f2"))
    yield case(TEAMWORK, "all_atomics", (3,), (50,), *(Result(place) for place in places))
    x = d.integers(96, low=0, high=30)
    yield case(TEAMWORK, "groups", (1,), (96,), x, *(Result(zeros(96)) for _ in range(3)))
    yield case(TEAMWORK, "reductions", (1,), (64,), d.bits(64, kind="i4"), Result(zeros(6 * 64)))
    tiles = d.specials(5, 64, 4)
    yield case(TEAMWORK, "pipelined", (1,), (64,), tiles, Result(np.zeros_like(tiles)), 5)


def _calls() -> Iterator[Case]:
    for name in ("recursion", "structures", "pointed"):
        yield case(CALLS, name, (1,), (32,), Result(zeros(32)), 5)
    for name in ("meeting", "choose"):
        yield case(CALLS, name, (1,), (32,), Result(zeros(32)))


def _tensor() -> Iterator[Case]:
    d = Draw("tensor")
    because = "the ISA leaves a matrix product's order and inner precision open"
    whole = (d.integers(32, 48, low=-8, high=8).astype("f2"), d.integers(16, 48, low=-8, high=8).astype("f2"))
    c = Result(d.integers(32, 16).astype("f4"))
    yield case(TENSOR, "half_product", (1, 2), (32,), *whole, c, 16, 48, name="half_product-exact")
    a, b = d.floats(32, 48, kind="f2"), d.floats(16, 48, kind="f2")
    # Each of the 48 products, below 16, and each of their sums may be off by a unit of the greatest sum's single
    # precision.
    c = Result(d.floats(32, 16), Bound(0, 48 * 16 * 3 * 2.0**-22, because))
    yield case(TENSOR, "half_product", (1, 2), (32,), a, b, c, 16, 48)
    a, b = d.floats(32, 32, kind="f2", most=1), d.floats(32, 32, kind="f2", most=1)
    halves = Result(zeros(32, 32, kind="f2"), Bound(2.0**-9, 2 * 16 * 2.0**-11, because))
    yield case(TENSOR, "all_half_product", (2, 2), (32,), a, b, halves, 32, 32)
    a, b = d.bits(32, 32, kind="i1"), d.bits(16, 32, kind="i1")
    yield case(TENSOR, "byte_product", (1, 2), (32,), a, b, Result(zeros(32, 16)), 16, 32)
    a, b = d.bf16(16, 16, with_specials=False), d.bf16(16, 16, with_specials=False)
    places = [Result(zeros(16, 16, kind="f4"), Bound(0, 16 * 16 * 2.0**-20, because)) for _ in range(2)]
    floats = (d.floats(16, 8), d.floats(16, 8))
    yield case(TENSOR, "wide_range_products", (1,), (32,), a, b, *floats, *places)


def _numba_array(array: Array | Result) -> tuple[Argument, ...]:
    """Return an array's arguments as numba passes one dimension.

    They are a null owner, a null parent, length, item size, data, shape and strides.
    """
    held = array.before if isinstance(array, Result) else array
    length, size = (np.int64(number).tobytes() for number in (len(held), held.itemsize))
    return bytes(8), bytes(8), length, size, array, length, size


def _other_compilers() -> Iterator[Case]:
    d = Draw("others")
    x, y = _numba_array(d.specials(50)), _numba_array(Result(d.specials(50)))
    yield case(("numba.saxpy.sm80",), "saxpy", (1,), (64,), 40, 2.5, *x, *y)
    x, y = _numba_array(np.arange(1, 31, dtype="i8")), _numba_array(Result(zeros(30, kind="i8")))
    yield case(("numba.steps.sm80",), "steps", (1,), (64,), *x, *y)
    yield case(("numba.reverse.sm80",), "reverse", (1,), (100,), *_numba_array(Result(d.specials(100))))
    for kind, mangled in (("f4", "powersIf"), ("i8", "powersIx")):
        powers = Result(d.specials(40) if kind == "f4" else d.bits(40, kind=kind))
        yield case(("nvrtc.sm90",), mangled, (1,), (64,), powers, 40)
    yield case(("nvrtc.sm90",), "twice", (1,), (40,), Result(d.specials(40, kind="f8")))
