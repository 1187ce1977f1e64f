import struct
from collections.abc import Callable
from ctypes import c_uint32

import pytest

from gpulease.daemon.drivers.interface import Dim3, DriverError, KernelFault, LaunchRejected
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.limits import QUEUE_DEPTH
from helpers.processes import own_threads
from helpers.waiting import wait_until

Vector = Callable[[str], bytes]
ONE: Dim3 = (1, 1, 1)
# Steps of `slow` that take about a tenth of a second and more.
LONG = 100_000_000
HELD = b"""
.version 7.8 .target sm_75 .address_size 64
.entry held(.param .u64 flag)
{
    .reg .b64 %flag; .reg .b32 %value; .reg .pred %is_held;
    ld.param.u64 %flag, [flag];
AGAIN:
    ld.volatile.global.u32 %value, [%flag];
    setp.eq.u32 %is_held, %value, 0;
    @%is_held bra AGAIN;
    ret;
}
"""


def nothing() -> None:
    pass


class GaveUp(Exception):
    """What a poll raises."""


def give_up() -> None:
    raise GaveUp


class Rig:
    """A context with the misbehaving kernels and one allocation of 4096 bytes."""

    def __init__(self, context: CpuContext, image: bytes) -> None:
        self.context = context
        self.kernels = context.module_load(image).kernels
        self.address = context.mem_alloc(4096)

    def fill(self, value: int, n: int = 32, tag: int = 0) -> None:
        params = struct.pack("<QII", self.address, n, value)
        self.context.launch(self.kernels["fill_u32"], ONE, (32, 1, 1), 0, params, tag)

    def slow(self, steps: int) -> None:
        self.context.launch(self.kernels["slow"], ONE, ONE, 0, struct.pack("<QI", self.address + 1024, steps), 0)

    def hold(self) -> c_uint32:
        """Launch a kernel that runs until the word returned is not 0."""
        kernel = self.context.module_load(HELD).kernels["held"]
        self.context.launch(kernel, ONE, ONE, 0, struct.pack("<Q", self.address + 1024), 0)
        return c_uint32.from_address(self.address + 1024)

    def stray(self, tag: int) -> None:
        params = struct.pack("<QQ", self.address, 4096)
        self.context.launch(self.kernels["stray_store"], (2, 1, 1), (4, 1, 1), 0, params, tag)

    def first(self) -> int:
        into = bytearray(4)
        self.context.mem_read(self.address, memoryview(into))
        return int.from_bytes(into, "little")


@pytest.fixture
def rig(context: CpuContext, vector: Vector) -> Rig:
    return Rig(context, vector("faults.sm75.ptx"))


def test_no_thread_before_the_first_launch(context: CpuContext, vector: Vector) -> None:
    # An earlier test's may end meanwhile.
    before = set(own_threads())
    rig = Rig(context, vector("faults.sm75.ptx"))
    assert set(own_threads()) <= before
    rig.fill(1)
    assert len(set(own_threads()) - before) == 1


def test_copies_go_through(rig: Rig) -> None:
    data = bytes(range(256)) * 16
    rig.context.mem_write(rig.address, memoryview(data))
    into = bytearray(100)
    rig.context.mem_read(rig.address + 50, memoryview(into))
    assert into == data[50:150]


def test_copies_outside_of_an_allocation_are_refused(rig: Rig) -> None:
    with pytest.raises(DriverError):
        rig.context.mem_write(rig.address + 4000, memoryview(bytes(97)))
    with pytest.raises(DriverError):
        rig.context.mem_read(rig.address - 1, memoryview(bytearray(1)))


def test_launch_returns_before_the_kernel_ends(rig: Rig) -> None:
    flag = rig.hold()
    flag.value = 1
    rig.context.sync(nothing)


def test_everything_happens_in_order(rig: Rig) -> None:
    rig.slow(LONG)
    for value in range(1, 300):
        rig.fill(value)
    assert rig.first() == 299
    rig.context.mem_write(rig.address, memoryview(bytes(4)))
    assert rig.first() == 0


def test_a_full_queue_makes_launch_wait(rig: Rig) -> None:
    rig.slow(LONG)
    for value in range(3 * QUEUE_DEPTH):
        rig.fill(value)
    assert rig.first() == 3 * QUEUE_DEPTH - 1


def test_sync_polls_while_it_waits_and_can_be_given_up(rig: Rig) -> None:
    flag, polled = rig.hold(), list[int]()

    def poll() -> None:
        polled.append(flag.value)
        flag.value = len(polled) > 10

    with pytest.raises(GaveUp):
        rig.context.sync(give_up)
    rig.context.sync(poll)
    assert len(polled) > 10


def test_a_fault_is_raised_once_and_says_which_launch(rig: Rig) -> None:
    rig.stray(tag=2**64 - 1)
    with pytest.raises(KernelFault) as caught:
        rig.context.sync(nothing)
    error = caught.value
    assert error.tag == 2**64 - 1
    assert error.kernel == "stray_store"
    assert error.address == rig.address + 4096
    assert not error.context_lost
    assert "(4-byte store) by thread (0,0,0) of block (0,0,0)" in str(error)
    rig.context.sync(nothing)
    assert rig.context.fault() is None


def test_launches_behind_a_fault_are_skipped_until_it_was_raised(rig: Rig) -> None:
    rig.fill(1)
    rig.slow(LONG)
    rig.stray(tag=7)
    for _ in range(50):
        rig.fill(2)
    rig.stray(tag=8)
    with pytest.raises(KernelFault) as caught:
        rig.first()
    assert caught.value.tag == 7
    assert rig.first() == 1
    rig.fill(3)
    assert rig.first() == 3


@pytest.mark.parametrize("reporter", ["write", "read", "free", "unload", "sync"])
def test_every_waiting_call_reports_a_fault_and_does_nothing_else(rig: Rig, vector: Vector, reporter: str) -> None:
    other = rig.context.module_load(vector("transform.sm75.ptx"))
    calls: dict[str, Callable[[], None]] = {
        "write": lambda: rig.context.mem_write(rig.address, memoryview(b"\xff" * 4)),
        "read": lambda: rig.context.mem_read(rig.address, memoryview(bytearray(4))),
        "free": lambda: rig.context.mem_free(rig.address),
        "unload": lambda: rig.context.module_unload(other),
        "sync": lambda: rig.context.sync(nothing),
    }
    rig.fill(5)
    rig.stray(tag=1)
    with pytest.raises(KernelFault):
        calls[reporter]()
    assert rig.first() == 5
    calls[reporter]()


def test_fault_tells_without_waiting(rig: Rig) -> None:
    flag = rig.hold()
    assert rig.context.fault() is None
    flag.value = 1
    rig.stray(tag=9)
    error = wait_until(rig.context.fault, "the fault is told")
    assert error is not None
    assert error.tag == 9
    assert rig.context.fault() is None


BESIDE = b"""
.version 8.0
.target sm_75
.entry beside(.param .u64 at) { .reg .b64 %p; ld.param.u64 %p, [at]; st.global.u32 [%p], 7; ret; }
"""


@pytest.mark.parametrize(
    ("size", "offset", "said"),
    [
        (1024, -4, r"4 bytes before the start of the 1024 allocated at"),
        (1024, 1024, r"4 bytes past the end of the 1024 allocated at"),
        (65_536, -256, r"256 bytes before the start of the 65536 allocated at"),
        (256, 380, r"128 bytes past the end of the 256 allocated at"),
    ],
)
def test_an_overrun_is_a_fault_that_names_the_buffer(context: CpuContext, size: int, offset: int, said: str) -> None:
    buffers = [context.mem_alloc(size) for _ in range(3)]
    kernel = context.module_load(BESIDE).kernels["beside"]
    context.launch(kernel, ONE, ONE, 0, (buffers[1] + offset).to_bytes(8, "little"), 1)
    with pytest.raises(KernelFault, match=rf"illegal address .* PTX line \d+: {said} {buffers[1]:#x}"):
        context.sync(nothing)
    for buffer in buffers:
        found = bytearray(size)
        context.mem_read(buffer, memoryview(found))
        assert found == bytes(size)


def test_other_ways_to_fault(rig: Rig) -> None:
    params = rig.address.to_bytes(8, "little")
    rig.context.launch(rig.kernels["misaligned"], ONE, ONE, 0, params, 1)
    with pytest.raises(KernelFault, match="misaligned address"):
        rig.context.sync(nothing)
    far = struct.pack("<QQ", rig.address, 1 << 44)
    rig.context.launch(rig.kernels["stray_load"], ONE, ONE, 0, far, 1)
    with pytest.raises(KernelFault, match="4-byte load"):
        rig.context.sync(nothing)


@pytest.mark.parametrize(
    ("grid", "block", "said"),
    [
        ((0, 1, 1), ONE, "grid (0, 1, 1)"),
        ((2**31, 1, 1), ONE, "2147483647"),
        ((1, 65536, 1), ONE, "65535"),
        ((1, 1, 65536), ONE, "65535"),
        ((1, 1, -1), ONE, "grid"),
        (ONE, (0, 1, 1), "block (0, 1, 1)"),
        (ONE, (1025, 1, 1), "1024"),
        (ONE, (1, 1, 65), "64"),
        (ONE, (32, 33, 1), "1056 threads"),
    ],
)
def test_impossible_shapes_are_rejected(rig: Rig, grid: Dim3, block: Dim3, said: str) -> None:
    with pytest.raises(LaunchRejected) as caught:
        rig.context.launch(rig.kernels["slow"], grid, block, 0, bytes(12), 0)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("shared", "params", "said"), [(232449, 12, "232448"), (-1, 12, "-1"), (0, 11, "12 bytes"), (0, 13, "13")]
)
def test_impossible_resources_are_rejected(rig: Rig, shared: int, params: int, said: str) -> None:
    with pytest.raises(LaunchRejected) as caught:
        rig.context.launch(rig.kernels["slow"], ONE, ONE, shared, bytes(params), 0)
    assert said in str(caught.value)


def test_static_and_dynamic_shared_memory_count_together(context: CpuContext, vector: Vector) -> None:
    kernel = context.module_load(vector("programs.sm75.ptx")).kernels["matmul"]
    assert kernel.static_shared_bytes == 2048
    with pytest.raises(LaunchRejected):
        context.launch(kernel, ONE, ONE, 227 * 1024 - 2047, bytes(kernel.parameter_bytes), 0)


def test_a_kernel_s_own_bounds_hold(context: CpuContext, vector: Vector) -> None:
    kernel = context.module_load(vector("programs.sm75.ptx")).kernels["bounded"]
    assert kernel.max_threads_per_block == 128
    with pytest.raises(LaunchRejected, match="at most 128"):
        context.launch(kernel, ONE, (129, 1, 1), 0, bytes(8), 0)
    text = ".version 8.0 .target sm_75 .entry k() .reqntid 8, 2 { ret; }"
    demanding = context.module_load(text.encode()).kernels["k"]
    context.launch(demanding, ONE, (8, 2, 1), 0, b"", 0)
    with pytest.raises(LaunchRejected, match=r"\(8, 2, 1\)"):
        context.launch(demanding, ONE, (8, 1, 1), 0, b"", 0)


def test_an_unloaded_module_s_kernels_are_gone(rig: Rig, vector: Vector) -> None:
    module = rig.context.module_load(vector("transform.sm75.ptx"))
    rig.context.module_unload(module)
    with pytest.raises(LaunchRejected):
        rig.context.launch(module.kernels["scale"], ONE, ONE, 0, bytes(16), 0)
    with pytest.raises(DriverError):
        rig.context.module_unload(module)


def test_closing_a_fresh_context(vector: Vector) -> None:
    CpuContext(1 << 20).close()
