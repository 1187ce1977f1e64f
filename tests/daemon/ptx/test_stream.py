import ctypes
from collections.abc import Iterator

import pytest

from gpulease.daemon.native.compiler import BadIr, NativeCode, emit_object, load_object
from gpulease.daemon.ptx.limits import QUEUE_DEPTH
from gpulease.daemon.ptx.memory import IN_ORDER
from gpulease.daemon.ptx.native.structures import (
    LAUNCH_HEAD,
    PARAMETERS_OFFSET,
    BlockEnvironment,
    KernelRunning,
    StreamState,
)
from gpulease.daemon.ptx.stream import LaunchQueue

# A "kernel" that appends its tag to a list at the address in its parameters, and faults if the tag is 13.
IR = f"""
define i32 @note(ptr %launch, ptr %environment, i64 %first, i64 %last) {{
  %tag.at = getelementptr i8, ptr %launch, i64 24
  %tag = load i64, ptr %tag.at
  %list.at = getelementptr i8, ptr %launch, i64 {PARAMETERS_OFFSET}
  %list = load ptr, ptr %list.at
  %count = load i64, ptr %list
  %more = add i64 %count, 1
  %place = getelementptr i64, ptr %list, i64 %more
  store i64 %tag, ptr %place
  store i64 %more, ptr %list
  %bad = icmp eq i64 %tag, 13
  %status = select i1 %bad, i32 2, i32 0
  ret i32 %status
}}
"""


@pytest.fixture(scope="module")
def code() -> NativeCode:
    return load_object(emit_object(IR))


@pytest.fixture
def stream() -> Iterator[LaunchQueue]:
    environments = (BlockEnvironment * 1)()
    made = LaunchQueue(ctypes.addressof(environments), hosts=1)
    yield made
    assert made.close()


class Notes:
    """What ran, in order."""

    def __init__(self, stream: LaunchQueue, code: NativeCode) -> None:
        self._list = (ctypes.c_uint64 * (4 * QUEUE_DEPTH))()
        self._address = ctypes.addressof(self._list)
        self._stream = stream
        self._running = KernelRunning(entry=code.address("note"))

    def submit(self, tag: int) -> None:
        head = LAUNCH_HEAD.pack(1, 1, 0, tag, 1, 1, 1, 1, 1, 1, 0, 42, *IN_ORDER, ctypes.addressof(self._running))
        self._stream.submit(head + self._address.to_bytes(8, "little"))

    @property
    def ran(self) -> list[int]:
        return list(self._list[1 : 1 + self._list[0]])


def test_runs_in_order_past_the_ring_s_end(stream: LaunchQueue, code: NativeCode) -> None:
    notes = Notes(stream, code)
    tags = list(range(100, 3 * QUEUE_DEPTH))
    for tag in tags:
        notes.submit(tag)
    stream.wait()
    assert notes.ran == tags


def test_skips_behind_a_fault_until_it_is_forgotten(stream: LaunchQueue, code: NativeCode) -> None:
    notes = Notes(stream, code)
    for tag in (1, 13, 2, 13, 3):
        notes.submit(tag)
    stream.wait()
    assert notes.ran == [1, 13]
    assert stream.has_fault
    assert (stream.state.tag, stream.state.kernel) == (13, 42)
    stream.forget_fault()
    notes.submit(4)
    stream.wait()
    assert notes.ran == [1, 13, 4]
    assert not stream.has_fault


def test_the_loop_s_offsets_are_the_structure_s() -> None:
    names = [
        "completed",
        "faulted",
        "waiting",
        "tag",
        "kernel",
        "ring",
        "slot_bytes",
        "slot_mask",
        "idle_spins",
        "team",
        "fault",
    ]
    assert [getattr(StreamState, name).offset for name in names] == list(range(0, 88, 8))
    assert (StreamState.queued.offset, StreamState.done.offset) == (88, 120)


def test_bad_ir_is_an_error_not_a_crash() -> None:
    with pytest.raises(BadIr):
        emit_object("define i32 @f() { ret i64 0 }")
