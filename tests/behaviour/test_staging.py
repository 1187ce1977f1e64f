"""Large copies of ordinary arrays: through the arena's slots, through a socket, and when something fails."""

import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from gpulease.client import Buffer, GpuBuilder, GpuSession, InvalidHandle, KernelArgs, LaunchFailed, Revoked
from gpulease.client.core import staged_copies as staging
from gpulease.client.core.staged_copies import ONE_PIECE_BYTES, SLOT_BYTES, SLOTS, STAGED_FROM_BYTES, Copiers
from gpulease.client.core.waits import Procedure
from gpulease.protocol import Opcode
from helpers.daemon import Daemon
from helpers.kernels import TRANSFORM

MIB = 1 << 20
SIZES = (STAGED_FROM_BYTES - 1, STAGED_FROM_BYTES, ONE_PIECE_BYTES, ONE_PIECE_BYTES + 1, SLOT_BYTES * (SLOTS + 2) + 5)
SLICE = 64 * MIB


@pytest.fixture(params=[0, 2], ids=["no threads", "two threads"])
def copiers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy without threads and with two threads, on every host."""
    monkeypatch.setattr(staging, "Copiers", partial(Copiers, request.param))


@pytest.fixture
def session(daemon: Daemon, copiers: None) -> Iterator[GpuSession]:
    with daemon.builder(SLICE).acquire() as lease, GpuSession(lease) as session:
        yield session


def check_round_trips(session: GpuSession) -> None:
    data = np.random.default_rng(3).integers(0, 256, SIZES[-1], dtype=np.uint8)
    buffer = session.mem_alloc(data.nbytes + 3)
    for size in SIZES:
        session.mem_write(buffer, 3, data[:size].tobytes() if size < MIB else data[:size])
        back = np.zeros(size + 1, np.uint8)
        session.mem_read(buffer, 3, size, into=back)
        assert np.array_equal(back[:-1], data[:size])
        assert back[-1] == 0
    session.mem_free(buffer)


def test_there_and_back(session: GpuSession) -> None:
    check_round_trips(session)
    check_round_trips(session)


@pytest.mark.parametrize("over", ["tcp", "socket", "full arena"])
def test_there_and_back_without_slots(daemon: Daemon, over: str) -> None:
    builder = GpuBuilder(daemon.tcp_address if over == "tcp" else daemon.address).min_vram(SLICE).lease_secs(60)
    with builder.acquire() as lease, GpuSession(lease, shared_memory=over != "socket") as session:
        arena = session._session.attachment.arena
        taken = arena.allocate(arena._size) if arena is not None else None
        check_round_trips(session)
        assert (taken is None) == (over != "full arena")


def test_a_kept_failure_is_told_once_and_nothing_is_written(session: GpuSession) -> None:
    module, data = session.module_load(TRANSFORM), np.ones(5 * MIB, np.uint8)
    buffer = session.mem_alloc(data.nbytes)
    args = KernelArgs().push_u64(buffer.handle).push_u32(1).push_f32(1)
    number = session.launch(module, "scale", [1 << 31], [1], args)
    with pytest.raises(LaunchFailed) as caught:
        session.mem_write(buffer, 0, data)
    assert caught.value.failure.failed_request_id == number
    assert not np.frombuffer(session.mem_read(buffer, 0, data.nbytes), np.uint8).any()
    session.mem_write(buffer, 0, data)
    assert np.frombuffer(session.mem_read(buffer, 0, data.nbytes), np.uint8).all()


def test_a_range_the_worker_refuses_is_told_once(session: GpuSession) -> None:
    data, real = np.ones(40 * MIB, np.uint8), session.mem_alloc(9 * MIB)
    forged = Buffer(session._session.attachment, real.handle, data.nbytes)
    for _ in range(2):
        with pytest.raises(InvalidHandle):
            session.mem_write(forged, 0, data)
        session.sync()
        with pytest.raises(InvalidHandle):
            session.mem_read(forged, 0, data.nbytes, into=data)
        session.sync()
    forged.owner = None
    check_round_trips(session)


def test_a_copy_that_was_interrupted_leaves_no_trace(session: GpuSession, monkeypatch: pytest.MonkeyPatch) -> None:
    data, buffer = np.full(20 * MIB, 9, np.uint8), session.mem_alloc(20 * MIB)
    session.mem_write(buffer, 0, data)
    count = 0

    def interrupted(
        copy: staging._StagedCopy, op: Opcode, payload: bytes, request_id: int, flags: int = 0
    ) -> Procedure[None]:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return send(copy, op, payload, request_id, flags)

    send = staging._StagedCopy._send
    with monkeypatch.context() as patch:
        patch.setattr(staging._StagedCopy, "_send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.mem_read(buffer, 0, data.nbytes, into=np.empty_like(data))
    assert not [thread for thread in threading.enumerate() if thread.name == "gpulease-copier"]
    check_round_trips(session)


def test_a_revoked_lease_ends_a_copy(daemon: Daemon, copiers: None) -> None:
    lease = daemon.builder(SLICE).acquire()
    session = GpuSession(lease)
    buffer, data = session.mem_alloc(9 * MIB), np.ones(9 * MIB, np.uint8)
    daemon.revoke(lease.lease_id)
    with pytest.raises(Revoked):
        session.mem_write(buffer, 0, data)
    with pytest.raises(Revoked):
        session.mem_read(buffer, 0, data.nbytes)


def test_threads_end_with_the_session(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "Copiers", partial(Copiers, 2))
    with daemon.builder(SLICE).acquire() as lease:
        with GpuSession(lease) as session:
            session.mem_write(session.mem_alloc(4 * MIB), 0, bytes(4 * MIB))
            assert len([thread for thread in threading.enumerate() if thread.name == "gpulease-copier"]) == 2
        assert not [thread for thread in threading.enumerate() if thread.name == "gpulease-copier"]
