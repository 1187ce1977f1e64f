"""Matrix products by warps, as nvcc writes them, against numpy: small whole numbers, so that every sum is exact."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.image import CpuKernel, CpuModule

pytestmark = pytest.mark.exhaustive

Array = np.ndarray[Any, np.dtype[Any]]
RNG = np.random.default_rng(5)
VECTORS = Path(__file__).parents[3] / "vectors" / "gpu"


@pytest.fixture(scope="module", params=["sm75", "sm80", "debug.sm80"])
def module(request: pytest.FixtureRequest, lasting: CpuContext) -> CpuModule:
    return lasting.module_load((VECTORS / f"matrices.{request.param}.ptx").read_bytes())


def kernel_of(module: CpuModule, name: str) -> CpuKernel:
    if name not in module.kernels:
        pytest.skip("not for this architecture")
    return module.kernels[name]


def run(
    context: CpuContext, kernel: CpuKernel, grid: tuple[int, int], block: int, *arguments: Array | int | float
) -> list[Array]:
    """The arrays as the kernel leaves them."""
    params = bytearray(kernel.parameter_bytes)
    placed = []
    for argument, slot in zip(arguments, kernel.parameters, strict=True):
        if isinstance(argument, np.ndarray):
            address = context.mem_alloc(argument.nbytes)
            context.mem_write(address, np.ascontiguousarray(argument).view("u1").data.cast("B"))
            placed.append((address, argument))
            struct.pack_into("<Q", params, slot.offset, address)
        else:
            struct.pack_into("<i" if isinstance(argument, int) else "<f", params, slot.offset, argument)
    context.launch(kernel, (*grid, 1), (block, 1, 1), 0, bytes(params), 1)
    results = []
    for address, array in placed:
        results.append(np.empty(array.shape, array.dtype))
        context.mem_read(address, results[-1].data.cast("B"))
        context.mem_free(address)
    return results


def whole(rows: int, columns: int, low: int = -4) -> Array:
    return RNG.integers(low, 9, (rows, columns))


def as_bf16(values: Array) -> Array:
    return (values.astype("f4").view("u4") >> 16).astype("u2")


# For each kernel: its shape, whether A and B lie by rows, and the types of A and B and of C; None is bfloat16.
PRODUCTS: dict[str, tuple[tuple[int, int, int], bool, bool, str | None, str]] = {
    "half_16x16": ((16, 16, 16), True, False, "f2", "f4"),
    "half_32x8": ((32, 8, 16), False, True, "f2", "f4"),
    "half_8x32": ((8, 32, 16), True, True, "f2", "f2"),
    "s8_16x16": ((16, 16, 16), True, False, "i1", "i4"),
    "s8_32x8": ((32, 8, 16), False, True, "i1", "i4"),
    "u8_8x32": ((8, 32, 16), True, True, "u1", "i4"),
    "bf16_16x16": ((16, 16, 16), False, True, None, "f4"),
    "bf16_32x8": ((32, 8, 16), True, False, None, "f4"),
    "bf16_8x32": ((8, 32, 16), True, True, None, "f4"),
    "tf32_16x16": ((16, 16, 8), True, False, "f4", "f4"),
    "f64_8x8": ((8, 8, 4), True, True, "f8", "f8"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(resting: CpuContext, module: CpuModule, name: str) -> None:
    kernel = kernel_of(module, name)
    (m, n, k), a_by_rows, b_by_rows, kind, result = PRODUCTS[name]
    low = 0 if kind == "u1" else -4
    a, b, c = whole(m, k, low), whole(k, n, low), whole(m, n)
    given = [x if by_rows else x.T for x, by_rows in ((a, a_by_rows), (b, b_by_rows))]
    held = [as_bf16(x) if kind is None else x.astype(kind) for x in given]
    found = run(resting, kernel, (1, 1), 32, *held, c.astype(result), np.zeros((m, n), result))[3]
    assert np.array_equal(found, a @ b + c)


def test_an_element_is_changed_once_whatever_the_layout(resting: CpuContext, module: CpuModule) -> None:
    a = whole(16, 16)
    found = run(resting, kernel_of(module, "elementwise"), (1, 1), 32, a.astype("f2"), np.zeros((16, 16), "f2"))[1]
    assert np.array_equal(found.T, (2 * a @ (a.T + 1) + 1) / 2)


def test_a_gemm_through_shared_memory(resting: CpuContext, module: CpuModule) -> None:
    m, n, k = 64, 96, 80
    a, b, bias = whole(m, k), whole(k, n), whole(1, n)
    arrays = [a.astype("f2"), b.astype("f2"), bias.astype("f4"), np.zeros((m, n), "f4")]
    found = run(resting, kernel_of(module, "gemm"), (n // 32, m // 32), 128, *arrays, m, n, k, 0.5)[3]
    assert np.array_equal(found, np.maximum(a @ b * 0.5, 0) + bias)


def test_a_gemm_of_ldmatrix_and_mma(resting: CpuContext, module: CpuModule) -> None:
    m, n, k = 32, 48, 64
    a, b = whole(m, k), whole(k, n)
    arrays = [a.astype("f2"), b.astype("f2"), np.zeros((m, n), "f4")]
    found = run(resting, kernel_of(module, "pipelined_gemm"), (n // 16, m // 16), 32, *arrays, n, k)[2]
    assert np.array_equal(found, a @ b)
