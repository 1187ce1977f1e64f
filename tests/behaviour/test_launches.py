"""Launches are asynchronous.

The next operation with a reply reports a failed launch; those after the failure are skipped.
"""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gpulease.client import (
    Buffer,
    GpuLease,
    GpuSession,
    InvalidRequest,
    KernelArgs,
    LaunchFailed,
    Module,
    Submission,
    SyncFailed,
)
from gpulease.protocol import Opcode, Status
from gpulease.protocol.messages import Empty, Handle, Launch, MemAlloc, MemRead, MemWrite, ModuleLoad
from helpers.daemon import Daemon
from helpers.kernels import FAULTS, TRANSFORM, check_main_job, packed_scale_args, start_endless, start_stray_store
from helpers.raw_peer import RawPeer
from helpers.waiting import wait_until

FAR_AWAY = 1 << 40
BUSY_S = 0.5


@pytest.fixture
def lease(daemon: Daemon) -> Iterator[GpuLease]:
    with daemon.builder().acquire() as lease:
        yield lease


@pytest.fixture
def faults(session: GpuSession) -> Module:
    return session.module_load(FAULTS)


@pytest.fixture
def buffer(session: GpuSession) -> Buffer:
    return session.mem_alloc(16)


def launch_fill(session: GpuSession, module: Module, buffer: Buffer, value: int) -> int:
    args = KernelArgs().push_buffer(buffer).push_u32(4).push_u32(value)
    return session.launch(module, "fill_u32", [1], [4], args)


def launch_slow(session: GpuSession, module: Module, buffer: Buffer, steps: int) -> None:
    session.launch(module, "slow", [1], [1], KernelArgs().push_buffer(buffer).push_u32(steps))


def words(session: GpuSession, buffer: Buffer) -> list[int]:
    return [int(word) for word in np.frombuffer(session.mem_read(buffer, 0, 16), np.uint32)]


def test_a_launch_returns_while_its_kernel_never_ends(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        module, flag = start_endless(session)
        for _ in range(100):
            session.launch(module, "endless", [1], [1], KernelArgs().push_buffer(flag))
        wait_until(lambda: lease.query()["launches"] == 101, "the worker has queued all launches")
        assert lease.query()["syncs"] == 0
        # Only the end of the lease frees them: every operation, and the end of the block, would wait for the kernel.
        session.close()


def test_a_launch_takes_a_small_part_of_its_kernels_time(session: GpuSession, faults: Module, buffer: Buffer) -> None:
    steps = 1 << 22
    while True:
        started = time.monotonic()
        launch_slow(session, faults, buffer, steps)
        launched_s = time.monotonic() - started
        session.sync()
        took_s = time.monotonic() - started
        if took_s > BUSY_S and launched_s < took_s / 4:
            break
        # A busy host may delay the launch, but not for as long as ever longer kernels run.
        assert took_s < 40 * BUSY_S, (launched_s, took_s)
        steps *= 2


def test_work_is_done_in_the_order_it_was_asked_for(session: GpuSession, faults: Module, buffer: Buffer) -> None:
    launch_slow(session, faults, buffer, 1 << 24)
    for value in range(1, 200):
        launch_fill(session, faults, buffer, value)
    assert words(session, buffer) == [199] * 4


def test_a_fault_names_its_launch_and_skips_what_was_behind_it(
    session: GpuSession, faults: Module, buffer: Buffer
) -> None:
    launch_fill(session, faults, buffer, 1)
    launch_slow(session, faults, session.mem_alloc(4), 1 << 24)
    number = start_stray_store(session, faults, buffer, FAR_AWAY)
    launch_fill(session, faults, buffer, 2)
    with pytest.raises(SyncFailed, match="stray_store") as caught:
        session.sync()
    assert caught.value.failure.failed_request_id == number
    assert caught.value.failure.failed_op == Opcode.LAUNCH
    assert caught.value.kernel == "stray_store"
    assert caught.value.address == buffer.handle + FAR_AWAY
    # The fault is reported once. The session continues, and the launch after the fault was not executed.
    session.sync()
    assert words(session, buffer) == [1] * 4
    launch_fill(session, faults, buffer, 3)
    assert words(session, buffer) == [3] * 4
    check_main_job(session)


def test_the_operation_that_reports_a_fault_is_not_done(session: GpuSession, faults: Module, buffer: Buffer) -> None:
    session.mem_write(buffer, 0, bytes(16))
    start_stray_store(session, faults, buffer, FAR_AWAY)
    with pytest.raises(SyncFailed, match="this mem_read was not executed"):
        words(session, buffer)
    assert words(session, buffer) == [0] * 4


def test_what_is_handed_over_behind_a_fault_is_not_done(session: GpuSession, faults: Module, buffer: Buffer) -> None:
    freed = session.mem_alloc(session.slice_bytes // 2)
    number = start_stray_store(session, faults, buffer, FAR_AWAY)
    session.mem_write(buffer, 0, b"\xff" * 16)
    session.mem_free(freed)
    with pytest.raises(SyncFailed) as caught:
        session.sync()
    assert caught.value.failure.failed_request_id == number
    assert words(session, buffer) == [0] * 4
    # The free was skipped, and the client has repeated it.
    session.mem_alloc(session.slice_bytes * 3 // 4)


@pytest.mark.parametrize("operation", ["mem_read", "mem_alloc", "module_load"])
def test_any_operation_with_a_reply_reports(
    session: GpuSession, faults: Module, buffer: Buffer, operation: str
) -> None:
    operations: dict[str, Callable[[], object]] = {
        "mem_read": lambda: session.mem_read(buffer, 0, 4),
        "mem_alloc": lambda: session.mem_alloc(4),
        "module_load": lambda: session.module_load(TRANSFORM),
    }
    number = start_stray_store(session, faults, buffer, FAR_AWAY)
    reported: list[SyncFailed] = []

    def reports() -> list[SyncFailed]:
        try:
            operations[operation]()
        except SyncFailed as error:
            reported.append(error)
        return reported

    if operation in ("mem_alloc", "module_load"):
        # These operations need not wait for the kernel, so the first one may return before the fault occurs.
        wait_until(reports, "an operation reports the fault")
    else:
        reports()
    assert [error.failure.failed_request_id for error in reported] == [number]
    session.sync()


class TestOverTheWire:
    """A client without checks of its own.

    It gets the failures of the worker's checks, which are kept until a request with a reply.
    """

    @pytest.fixture
    def peer(self, daemon: Daemon, lease: GpuLease) -> Iterator[RawPeer]:
        with RawPeer(daemon.address).hello() as peer:
            peer.attach(lease.lease_id)
            yield peer

    @pytest.fixture
    def handle(self, peer: RawPeer, lease: GpuLease) -> int:
        handle: int = peer.request(Opcode.MEM_ALLOC, MemAlloc(16), lease.lease_id).handle
        return handle

    @pytest.fixture
    def module(self, peer: RawPeer, lease: GpuLease) -> int:
        module: int = peer.request(Opcode.MODULE_LOAD, ModuleLoad(TRANSFORM), lease.lease_id).module
        return module

    def bias(self, module: int, handle: int, kernel: str = "bias", add: float = 1.0) -> Launch:
        return Launch(module, kernel, 1, 1, 1, 4, 1, 1, 0, *packed_scale_args(handle, 4, add))

    def test_a_bad_launch_is_kept_and_everything_behind_it_skipped(
        self, peer: RawPeer, lease: GpuLease, module: int, handle: int
    ) -> None:
        ident = lease.lease_id
        peer.quiet(Opcode.LAUNCH, self.bias(module, handle), ident)
        bad = peer.quiet(Opcode.LAUNCH, self.bias(module, handle, "no_such"), ident)
        peer.quiet(Opcode.LAUNCH, self.bias(module, handle), ident)
        peer.quiet(Opcode.MEM_WRITE, MemWrite(handle, 0, b"\xff" * 16), ident)
        peer.quiet(Opcode.LAUNCH, self.bias(module, handle, "also_no_such"), ident)
        failure = peer.refused(Opcode.SYNC, Empty(), ident)
        assert failure.status is Status.LAUNCH_FAILED
        assert failure.failed_request_id == bad
        assert failure.failed_op == Opcode.LAUNCH
        assert failure.kernel == "no_such"
        assert "bias, scale" in failure.hint
        peer.request(Opcode.SYNC, Empty(), ident)
        data = peer.request(Opcode.MEM_READ, MemRead(handle, 0, 16), ident).data
        assert np.frombuffer(data, np.float32).tolist() == [1.0] * 4

    def test_a_quiet_free_that_fails_is_reported_too(self, peer: RawPeer, lease: GpuLease, handle: int) -> None:
        number = peer.quiet(Opcode.MEM_FREE, Handle(handle + 1), lease.lease_id)
        failure = peer.refused(Opcode.SYNC, Empty(), lease.lease_id)
        assert (failure.status, failure.failed_request_id) == (Status.INVALID_HANDLE, number)
        assert failure.failed_op == Opcode.MEM_FREE
        peer.request(Opcode.SYNC, Empty(), lease.lease_id)

    def test_a_launch_may_ask_for_its_reply(self, peer: RawPeer, lease: GpuLease, module: int, handle: int) -> None:
        assert peer.request(Opcode.LAUNCH, self.bias(module, handle), lease.lease_id) == Empty()
        failure = peer.refused(Opcode.LAUNCH, self.bias(module, handle, "no_such"), lease.lease_id)
        assert failure.status is Status.LAUNCH_FAILED
        assert failure.failed_request_id is None


def test_a_bad_launch_found_by_the_client_is_not_sent(lease: GpuLease, session: GpuSession, faults: Module) -> None:
    before = lease.query()["operations"]
    with pytest.raises(LaunchFailed, match="no such kernel"):
        session.launch(faults, "no_such", [1], [1], KernelArgs())
    session.sync()
    assert lease.query()["operations"] == before + 1


def test_a_float_for_an_integer_is_refused_before_anything_is_sent(session: GpuSession) -> None:
    module, buffer = session.module_load(TRANSFORM), session.mem_alloc(16)
    session.mem_write(buffer, 0, np.ones(4, np.float32))
    with pytest.raises(LaunchFailed, match=r"argument 2 is a u32, but the kernel's parameter is \.f32"):
        session.launch(module, "scale", [1], [4], KernelArgs().push_buffer(buffer).push_u32(4).push_u32(2))
    with pytest.raises(LaunchFailed, match=r"argument 1 is an f32, but the kernel's parameter is \.u32"):
        session.launch(module, "scale", [1], [4], [buffer, np.float32(4), np.float32(2)])
    with pytest.raises(
        LaunchFailed, match=r"'scale': argument 1 is a Python float, but the kernel's parameter is \.u32"
    ):
        session.launch(module, "scale", [1], [4], [buffer, 16.0, 2.0])
    assert session.mem_read(buffer, 0, 16) == np.ones(4, np.float32).tobytes()


def test_arguments_are_a_list(session: GpuSession) -> None:
    module, buffer = session.module_load(TRANSFORM), session.mem_alloc(16)
    array = session.empty(4, np.float32)
    session.mem_write(buffer, 0, np.ones(4, np.float32))
    session.launch(module, "scale", [1], [4], [buffer, np.uint32(4), np.float32(2)])
    session.launch(module, "scale", [1], [4], (buffer, 4, 3), stream=session.default_stream)
    with session.record() as graph:
        session.launch(module, "scale", [1], [4], [buffer, 4, 5.0])
        session.mem_read(buffer, 0, 16, into=array)
    graph.launch()
    session.sync()
    assert array.tolist() == [30.0] * 4


def test_a_submit_takes_numpy_scalars_in_a_list(daemon: Daemon) -> None:
    ones = np.ones(4, np.float32)
    with daemon.builder(2 << 20).submits(1 << 20).acquire() as lease:
        submit = lease.submit("scale", TRANSFORM).grid([1]).block([4]).inout(ones)
        with pytest.raises(InvalidRequest, match=r"argument 0: 4 has no size.*np\.uint32\(4\)"):
            submit.args([4, 2.0])
        assert submit.args([np.uint32(4), np.float32(2)]).launch() == [(ones * 2).tobytes()]


def test_a_submit_s_float_for_an_integer_is_refused_before_it_runs(daemon: Daemon) -> None:
    wrong: list[tuple[Callable[[Submission], Submission], str]] = [
        (
            lambda s: s.args(KernelArgs().push_u32(4).push_u32(2)),
            r"argument 2 is \.u32, the kernel's parameter is \.f32",
        ),
        (lambda s: s.arg(np.float32(4)).arg(np.float32(2)), r"argument 1 is \.f32, the kernel's parameter is \.u32"),
        (lambda s: s.arg(np.uint32(4)).arg(b"four"), r"argument 2 is a pointer .*, the kernel's parameter is \.f32"),
    ]
    with daemon.builder(2 << 20).submits(1 << 20).acquire() as lease:
        for push, words in wrong:
            submit = lease.submit("scale", TRANSFORM).block([4]).inout(np.ones(4, np.float32))
            with pytest.raises(LaunchFailed, match=words):
                push(submit).launch()
        raw = KernelArgs().push_raw(bytes([4, 0, 0, 0])).push_raw(np.float32(2).tobytes())
        submit = lease.submit("scale", TRANSFORM).block([4]).inout(np.ones(4, np.float32)).args(raw)
        assert submit.launch() == [np.full(4, 2, np.float32).tobytes()]
