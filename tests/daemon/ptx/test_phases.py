"""Kernels whose threads meet at barriers in shared memory, as nvcc writes them from libcu++, against numpy."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.image import CpuKernel, CpuModule

Array = np.ndarray[Any, np.dtype[Any]]
VECTORS = Path(__file__).parents[3] / "vectors" / "gpu"


@pytest.fixture(scope="module", params=["sm80", "sm90"])
def module(request: pytest.FixtureRequest, lasting: CpuContext) -> CpuModule:
    return lasting.module_load((VECTORS / f"phases.{request.param}.ptx").read_bytes())


def run(context: CpuContext, kernel: CpuKernel, block: int, x: Array, *rest: int) -> Array:
    """What a kernel from x to y, of the same size, leaves in y."""
    places = [context.mem_alloc(x.nbytes) for _ in range(2)]
    context.mem_write(places[0], np.ascontiguousarray(x).data.cast("B"))
    context.launch(kernel, (1, 1, 1), (block, 1, 1), 0, struct.pack(f"<QQ{len(rest)}i", *places, *rest), 1)
    y = np.empty_like(x)
    context.mem_read(places[1], y.data.cast("B"))
    for place in places:
        context.mem_free(place)
    return y


def numbers(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype="i4").reshape(shape)


@pytest.mark.exhaustive
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_rounds(resting: CpuContext, module: CpuModule, rounds: int) -> None:
    expected = np.roll(numbers(60), -rounds) + rounds * (rounds - 1) // 2
    assert np.array_equal(run(resting, module.kernels["rounds"], 60, numbers(60), rounds), expected)


def test_producers_and_consumers(resting: CpuContext, module: CpuModule) -> None:
    x = numbers(6, 32)
    assert np.array_equal(run(resting, module.kernels["hand_over"], 64, x, 6), 2 * x[:, ::-1])


def test_a_copy_that_a_barrier_counts(resting: CpuContext, module: CpuModule) -> None:
    x = numbers(64, 4)
    assert np.array_equal(run(resting, module.kernels["bulk"], 64, x), x[::-1])


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_a_pipeline(resting: CpuContext, module: CpuModule, stages: int) -> None:
    x = numbers(stages, 64, 4)
    assert np.array_equal(run(resting, module.kernels["pipelined"], 64, x, stages), x[:, ::-1])
