"""What only the blocking face has: threads, signals, finalizers, forks, the keep-alive thread."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from gpulease.client import (
    Disconnected,
    GpuBuilder,
    GpuLease,
    GpuLeaseError,
    GpuSession,
    InvalidRequest,
    KernelArgs,
    LeaseExpired,
    Revoked,
    keep_alive,
)
from gpulease.client.core.lease import RenewalSchedule
from gpulease.client.sync import idle_frees
from gpulease.client.sync.driver import ask
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.messages import Empty, Ping
from helpers.scripted_peer import Refusal, ScriptedPeer, Silence
from helpers.waiting import wait_until


def lease_of(peer: ScriptedPeer, seconds: float = 60) -> GpuLease:
    return GpuBuilder(peer.address).min_vram(1 << 20).lease_secs(seconds).acquire()


def wait_for(peer: ScriptedPeer, op: str, count: int = 1) -> None:
    wait_until(lambda: peer.ops().count(op) >= count, f"{op} is received", seen=peer.ops)


def test_sessions_one_after_the_other_have_the_same_thread(peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    idle_thread = idle_frees._IdleThread()
    monkeypatch.setattr(idle_frees, "_idle_thread", idle_thread)
    # Longer than any host needs for the next session.
    monkeypatch.setattr(idle_frees, "LINGER_S", 600.0)
    seen = set()
    with lease_of(peer) as lease:
        for _ in range(3):
            with GpuSession(lease):
                seen.add(idle_thread._thread)
            # Time for some polls.
            time.sleep(0.05)
    assert len(seen) == 1
    assert seen != {0}
    monkeypatch.setattr(idle_frees, "LINGER_S", 0.0)
    wait_until(lambda: not idle_thread._thread, "the thread ends")


def test_threads_share_a_session(peer: ScriptedPeer) -> None:
    problems: list[BaseException] = []

    def work(session: GpuSession, mark: int) -> None:
        try:
            buffer = session.mem_alloc(5000)
            module = session.module_load(b"ptx")
            for _ in range(50):
                session.mem_write(buffer, 0, bytes([mark]) * 5000)
                session.launch(module, "small", [1], [1], KernelArgs().push_u32(mark))
                assert session.mem_read(buffer, 0, 5000) == bytes([mark]) * 5000
        except BaseException as error:
            problems.append(error)

    with lease_of(peer) as lease, GpuSession(lease) as session:
        threads = [threading.Thread(target=work, args=(session, mark)) for mark in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        session.sync()
    assert not problems
    assert peer.ops().count("LAUNCH") == 200


def test_a_dropped_lease_is_freed(peer: ScriptedPeer) -> None:
    lease = lease_of(peer)
    del lease
    wait_for(peer, "LEASE_FREE")


def test_a_session_holds_its_lease(peer: ScriptedPeer) -> None:
    session = GpuSession(lease_of(peer))
    session.sync()
    assert "LEASE_FREE" not in peer.ops()
    del session
    wait_for(peer, "LEASE_FREE")


def test_leaving_an_expired_lease_is_no_error(peer: ScriptedPeer) -> None:
    peer.fail(Opcode.LEASE_FREE, Status.LEASE_EXPIRED, "over")
    with lease_of(peer):
        pass
    peer.fail(Opcode.LEASE_FREE, Status.FENCED, "stuck")
    with pytest.raises(GpuLeaseError, match="stuck"), lease_of(peer):
        pass


def test_leaving_never_hides_what_went_wrong_inside(peer: ScriptedPeer) -> None:
    peer.fail(Opcode.LEASE_FREE, Status.INTERNAL, "this too")
    with pytest.raises(ZeroDivisionError), lease_of(peer), lease_of(peer):
        raise ZeroDivisionError


def test_leaving_without_a_daemon_hides_nothing_either(peer: ScriptedPeer) -> None:
    lease = lease_of(peer)
    peer.close()
    with pytest.raises(ZeroDivisionError), lease:
        raise ZeroDivisionError


def test_an_interrupted_sync_leaves_the_session_usable(peer: ScriptedPeer) -> None:
    release = threading.Event()
    handled = peer._empty

    def slow(request: object) -> object:
        release.wait(60)
        return handled(request)  # type: ignore[arg-type]

    with lease_of(peer) as lease, GpuSession(lease) as session:
        buffer = session.mem_alloc(8)
        session.mem_write(buffer, 0, b"12345678")
        peer.script[Opcode.SYNC] = slow  # type: ignore[assignment]
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            session.sync()
        release.set()
        assert session.mem_read(buffer, 0, 8) == b"12345678"
        session.sync()


def test_an_interrupted_write_breaks_the_session_and_says_so(peer: ScriptedPeer) -> None:
    release = threading.Event()

    def slow(request: object) -> object:
        release.wait(60)
        return peer._mem_write(request)  # type: ignore[arg-type]

    with lease_of(peer) as lease, GpuSession(lease) as session:
        buffer = session.mem_alloc(64 << 20)
        peer.script[Opcode.MEM_WRITE] = slow  # type: ignore[assignment]
        peer.report.update(cause=None, state="active")
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            session.mem_write(buffer, 0, bytes(64 << 20))
        with pytest.raises(Disconnected, match="interrupted in the middle of a request"):
            session.sync()
        release.set()


def test_close_wakes_a_waiting_thread(peer: ScriptedPeer) -> None:
    peer.on(Opcode.SYNC, Silence())
    caught: list[BaseException] = []
    with lease_of(peer) as lease:
        session = GpuSession(lease)

        def wait() -> None:
            try:
                session.sync()
            except GpuLeaseError as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        wait_for(peer, "SYNC")
        session.close()
        thread.join(60)
        assert not thread.is_alive()
    assert isinstance(caught[0], InvalidRequest)
    assert "the session was closed" in str(caught[0])


PROGRAM = """
import os, sys
from gpulease.client import GpuBuilder, GpuSession
lease = GpuBuilder(sys.argv[1]).min_vram(1).acquire()
session = GpuSession(lease)
buffer = session.mem_alloc(4)
if sys.argv[2] == "fork":
    child = os.fork()
    if not child:
        sys.exit(0)  # runs the child's finalizers
    assert os.waitpid(child, 0)[1] == 0
    session.sync()
    lease.query()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["exit", "fork"])
def test_a_program_that_ends_gives_its_lease_back_once(peer: ScriptedPeer, what: str) -> None:
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, peer.address, what],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    wait_for(peer, "LEASE_FREE")
    assert peer.ops().count("LEASE_FREE") == 1
    if what == "fork":
        assert peer.ops()[-3:] == ["SYNC", "LEASE_QUERY", "LEASE_FREE"], "the child's end changed nothing"


@pytest.mark.usefixtures("renewed_soon")
def test_keep_alive_renews_for_as_long_as_it_was_granted(peer: ScriptedPeer) -> None:
    with lease_of(peer) as lease:
        with lease.keep_alive() as keeper:
            wait_for(peer, "LEASE_RENEW", 3)
            assert lease.is_alive
        assert keeper.loss is None
        count = peer.ops().count("LEASE_RENEW")
        time.sleep(0.15)
        assert peer.ops().count("LEASE_RENEW") == count


@pytest.mark.usefixtures("renewed_soon")
def test_keep_alive_tries_again_and_then_tells_of_a_loss(peer: ScriptedPeer) -> None:
    answers = [Status.BUSY, Status.INTERNAL, Status.REVOKED]

    def refuse(request: object) -> object:
        raise Refusal(Failure(answers.pop(0), "no"))

    peer.script[Opcode.LEASE_RENEW] = refuse  # type: ignore[assignment]
    losses: list[GpuLeaseError] = []
    told = threading.Event()

    def on_loss(error: GpuLeaseError) -> None:
        losses.append(error)
        told.set()

    lease = lease_of(peer)
    keeper = keep_alive(lease, on_loss, RenewalSchedule(lambda: 0.0))
    assert told.wait(60)
    keeper.stop()
    assert isinstance(losses[0], Revoked)
    assert keeper.loss is losses[0]
    with pytest.raises(Revoked):
        lease.free()


def test_keep_alive_ends_with_its_lease(peer: ScriptedPeer) -> None:
    dropped, freed = lease_of(peer, 0.1), lease_of(peer, 0.1)
    keepers = [dropped.keep_alive(), freed.keep_alive()]
    freed.free()
    del dropped
    for keeper in keepers:
        keeper._thread.join(60)
        assert not keeper._thread.is_alive()
        assert keeper.loss is None


def test_keep_alive_stops_when_nobody_answers_until_the_end(peer: ScriptedPeer) -> None:
    lease = lease_of(peer, 0.3)
    peer.close()
    keeper = lease.keep_alive()
    keeper._thread.join(60)
    assert isinstance(keeper.loss, Disconnected | LeaseExpired)


def test_ask_is_one_question_on_a_connection_of_its_own(peer: ScriptedPeer) -> None:
    assert ask(Opcode.PING, Ping(7), peer.address) == Ping(7)
    peer.fail(Opcode.LEASE_LIST_ACTIVE, Status.DENIED, "operators only")
    with pytest.raises(GpuLeaseError, match="lease_list_active: operators only"):
        ask(Opcode.LEASE_LIST_ACTIVE, Empty(), peer.address)
