"""Shared memory of a block, up to its last byte: what kernels declare, what launches ask for, both together."""

from collections.abc import Iterator

import pytest

from gpulease.daemon.drivers.interface import KernelFault, KernelStep, LaunchRejected, keep_waiting
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.image import CpuKernel
from gpulease.daemon.ptx.limits import MAX_SHARED_BYTES, RESIDENT_SHARED_BYTES
from helpers.block_memory import FOUND, MOST_BYTES, REACH, STATIC_BYTES

ONE = (1, 1, 1)
KERNELS = [("reach", 0), ("reach_behind", STATIC_BYTES)]
CARD_BLOCKS = 132
"""Blocks of so much shared memory that an H100 holds at a time: one for each multiprocessor."""


@pytest.fixture(scope="module")
def lasting() -> Iterator[CpuContext]:
    context = CpuContext(1 << 20)
    yield context
    context.close()


@pytest.fixture(scope="module")
def out(lasting: CpuContext) -> int:
    return lasting.mem_alloc(4)


def found(context: CpuContext, out: int) -> int:
    data = bytearray(4)
    context.mem_read(out, memoryview(data))
    return int.from_bytes(data, "little")


def params(out: int, word: int) -> bytes:
    return out.to_bytes(8, "little") + word.to_bytes(4, "little")


def kernel_of(context: CpuContext, name: str) -> CpuKernel:
    return context.module_load(REACH).kernels[name]


@pytest.mark.parametrize(("name", "own_bytes"), KERNELS)
def test_the_last_word_can_be_used(resting: CpuContext, out: int, name: str, own_bytes: int) -> None:
    kernel, size_bytes = kernel_of(resting, name), MOST_BYTES - own_bytes
    resting.mem_write(out, memoryview(bytes(4)))
    resting.launch(kernel, ONE, ONE, size_bytes, params(out, size_bytes - 4), 1)
    assert found(resting, out) == FOUND


@pytest.mark.parametrize(("name", "own_bytes"), KERNELS)
def test_the_word_behind_the_last_faults(resting: CpuContext, out: int, name: str, own_bytes: int) -> None:
    kernel, size_bytes = kernel_of(resting, name), MOST_BYTES - own_bytes
    resting.launch(kernel, ONE, ONE, size_bytes, params(out, size_bytes), 1)
    with pytest.raises(KernelFault, match="illegal shared address"):
        resting.sync()


@pytest.mark.parametrize(("name", "own_bytes"), KERNELS)
def test_a_byte_more_is_refused_in_every_way_to_launch(
    resting: CpuContext, out: int, name: str, own_bytes: int
) -> None:
    kernel, size_bytes = kernel_of(resting, name), MOST_BYTES - own_bytes + 1
    with pytest.raises(LaunchRejected, match=f"kernel {name}: {size_bytes} bytes .* exceed the {MOST_BYTES} "):
        resting.launch(kernel, ONE, ONE, size_bytes, params(out, 0), 1)
    with pytest.raises(LaunchRejected, match=f"exceed the {MOST_BYTES} "):
        resting.graph([KernelStep(kernel, ONE, ONE, size_bytes, params(out, 0))])
    assert resting.native().record(kernel, ONE, ONE, size_bytes) is None
    assert resting.native().record(kernel, ONE, ONE, size_bytes - 1) is not None


def test_a_graph_s_node_has_as_much(resting: CpuContext, out: int) -> None:
    step = KernelStep(kernel_of(resting, "reach"), ONE, ONE, MOST_BYTES, params(out, MOST_BYTES - 4))
    resting.mem_write(out, memoryview(bytes(4)))
    resting.graph([step]).replay(1, keep_waiting)
    assert found(resting, out) == FOUND


def test_as_many_of_the_largest_blocks_have_room_as_on_a_card() -> None:
    assert MAX_SHARED_BYTES == MOST_BYTES
    assert RESIDENT_SHARED_BYTES // MAX_SHARED_BYTES >= CARD_BLOCKS
