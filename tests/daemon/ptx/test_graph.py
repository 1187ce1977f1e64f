"""Launch graphs of the embedded driver by themselves: what it refuses, when it looks at the lease."""

from collections.abc import Iterator

import numpy as np
import pytest

from gpulease.daemon.drivers.interface import (
    SEGMENT_STEPS,
    CopyStep,
    DataStep,
    DriverKernel,
    KernelStep,
    LaunchRejected,
    keep_waiting,
)
from gpulease.daemon.ptx.context import CpuContext
from helpers.kernels import TRANSFORM, packed_scale_args

COUNT = 4


class Over(Exception):
    pass


@pytest.fixture
def context() -> Iterator[CpuContext]:
    context = CpuContext(1 << 20)
    yield context
    context.close()


def bias_of(context: CpuContext, address: int, more: float) -> KernelStep:
    kernel: DriverKernel = context.module_load(TRANSFORM).kernels["bias"]
    return KernelStep(kernel, (1, 1, 1), (COUNT, 1, 1), 0, packed_scale_args(address, COUNT, more)[0])


def floats(context: CpuContext, address: int) -> list[float]:
    data = bytearray(4 * COUNT)
    context.mem_read(address, memoryview(data))
    return [float(value) for value in np.frombuffer(data, np.float32)]


def test_steps_in_order_and_other_parameters(context: CpuContext) -> None:
    address = context.mem_alloc(4 * COUNT)
    host = memoryview(bytearray(4 * COUNT))
    bias = bias_of(context, address, 1)
    start = np.arange(COUNT, dtype=np.float32).tobytes()
    graph = context.graph([DataStep(address, start), bias, bias, CopyStep(address, host, to_device=False)])
    assert graph.device_bytes == 0
    for more in (1, 10):
        graph.bind(2, packed_scale_args(address, COUNT, more)[0])
        graph.replay(1, keep_waiting)
        context.sync()
        assert np.frombuffer(host, np.float32).tolist() == [float(value + 1 + more) for value in range(COUNT)]
    graph.close()
    assert floats(context, address) == [11, 12, 13, 14]


def test_what_it_does_not_take(context: CpuContext) -> None:
    bias = bias_of(context, context.mem_alloc(4 * COUNT), 1)
    with pytest.raises(LaunchRejected):
        context.graph([bias, KernelStep(bias.kernel, (1, 1, 1), (COUNT, 1, 1), 1 << 30, bias.params)])
    graph = context.graph([bias, DataStep(0, b"x")])
    with pytest.raises(LaunchRejected, match="bytes of parameters"):
        graph.bind(0, bias.params + b"x")
    with pytest.raises(TypeError):
        graph.bind(1, b"")


def test_it_looks_before_each_segment_but_the_first(context: CpuContext) -> None:
    address = context.mem_alloc(4 * COUNT)
    graph = context.graph([bias_of(context, address, 1)] * (2 * SEGMENT_STEPS + 1))
    looks = []

    def look() -> None:
        looks.append(context._stream.progress()[0])
        if len(looks) == 2:
            raise Over

    with pytest.raises(Over):
        graph.replay(1, look)
    assert looks == [SEGMENT_STEPS, 2 * SEGMENT_STEPS]
    context.sync()
    assert floats(context, address) == [2 * SEGMENT_STEPS] * COUNT
