"""Peers that owe two things at the same time, or that hold what belongs to others. Each has its own limit."""

import contextlib
import select
from collections.abc import Callable, Sequence

import pytest

from gpulease.client import GpuExclusivityClass, GpuSession, LoadFailed
from gpulease.protocol import Failure, Opcode, Reply, Status
from gpulease.protocol.framing import HEADER_BYTES
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Attach, Empty, Launch
from helpers.daemon import Daemon, Faults
from helpers.kernels import FAULTS, TRANSFORM, Neighbour, check_main_job
from helpers.raw_peer import RawPeer, frame_of
from helpers.waiting import wait_until

pytestmark = pytest.mark.exhaustive

STALL_S = 1.0
UNREAD = 2000
IMPATIENT = {"gpulease.daemon.broker.control_connection:STALL_TIMEOUT_S": STALL_S}


def ask_and_do_not_read(peer: RawPeer, last: bytes) -> None:
    """Send requests whose replies fill every buffer, and `last`. Does not read the replies."""
    requests = b"".join(frame_of(Opcode.GET_INVENTORY, Empty(), number + 2) for number in range(UNREAD))
    peer.sock.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        peer.sock.sendall(requests + last)


def wait_until_closed(peer: RawPeer) -> None:
    """Read everything until the end of the stream."""
    peer.sock.settimeout(60)
    with contextlib.suppress(ConnectionResetError):
        while peer.sock.recv(1 << 20):
            pass


def test_half_a_frame_behind_unread_replies(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(faults=Faults(IMPATIENT))
    for unread in (10, 1700, UNREAD):
        with RawPeer(daemon.address).hello() as peer:
            requests = b"".join(frame_of(Opcode.GET_INVENTORY, Empty(), number + 2) for number in range(unread))
            peer.sock.sendall(requests + frame_of(Opcode.GET_INVENTORY, Empty(), 99_999)[:20])
            wait_until_closed(peer)


def test_an_attach_behind_unread_replies(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(faults=Faults(IMPATIENT))
    files = len(daemon.open_files())
    with RawPeer(daemon.address).hello() as peer:
        ask_and_do_not_read(peer, frame_of(Opcode.ATTACH, Attach(()), 99_999, 1))
        wait_until(lambda: len(daemon.open_files()) <= files, "the broker lets go of it, unread")


def test_half_sent_frames_have_one_budget(daemon: Daemon) -> None:
    lease = daemon.builder().exclusivity(GpuExclusivityClass.SHARED).acquire()
    header = frame_of(Opcode.MODULE_LOAD, Empty(), 1, lease.lease_id)
    announced = header[:12] + MAX_PAYLOAD_BYTES.to_bytes(4, "big") + header[16:HEADER_BYTES]
    with lease, GpuSession(lease) as session, contextlib.ExitStack() as stack:
        greedy = [stack.enter_context(RawPeer(daemon.address).hello()) for _ in range(3)]
        ends = []
        for peer in greedy:
            assert not isinstance(peer.attach(lease.lease_id), Failure)
            try:
                peer.sock.sendall(announced + bytes(MAX_PAYLOAD_BYTES - 1))
                ends.append("held")
            except ConnectionError:
                ends.append("cut")
        assert ends[0] == "held"
        assert "cut" in ends
        check_main_job(session)


def ask_to_attach(peer: RawPeer, lease_id: int) -> RawPeer:
    """Send an ATTACH without waiting for a reply, because there may be none."""
    _, frame = peer.connection.send_request(Opcode.ATTACH, Attach(()), session_id=lease_id)
    peer.sock.sendall(frame)
    return peer


def with_answers(peers: Sequence[RawPeer], within_s: float = 0.0) -> list[RawPeer]:
    """Return the peers that have received something."""
    came, _, _ = select.select([peer.sock for peer in peers], [], [], within_s)
    return [peer for peer in peers if peer.sock in came]


def test_sockets_on_their_way_to_a_busy_worker_are_counted(daemon: Daemon) -> None:
    lease = daemon.builder().exclusivity(GpuExclusivityClass.SHARED).acquire()
    with lease, GpuSession(lease) as session, RawPeer(daemon.address).hello() as busy, contextlib.ExitStack() as stack:
        module, flag = session.module_load(FAULTS), session.mem_alloc(4)
        assert not isinstance(busy.attach(lease.lease_id), Failure)
        endless = Launch(module.handle, "endless", 1, 1, 1, 1, 1, 1, 0, flag.handle.to_bytes(8, "little"), (8,))
        busy.request(Opcode.LAUNCH, endless, lease.lease_id)
        _, sync = busy.connection.send_request(Opcode.SYNC, Empty(), session_id=lease.lease_id)
        busy.sock.sendall(sync)

        def knock() -> RawPeer:
            return ask_to_attach(stack.enter_context(RawPeer(daemon.address).hello()), lease.lease_id)

        wait_until(lambda: not with_answers([knock()], 0.2), "the worker waits for its kernel and answers nobody")
        # Send all at once: while the kernel runs, it occupies a processor.
        peers = [knock() for _ in range(40)]
        wait_until(lambda: len(with_answers(peers)) >= 20, "most are answered", seen=lambda: with_answers(peers))
        answers = [peer.next_event() for peer in with_answers(peers)]
        refused = [a.result.status for a in answers if isinstance(a, Reply) and isinstance(a.result, Failure)]
        assert refused == [Status.BUSY] * len(answers)
        lease.free()


def test_a_kernel_whose_name_can_not_be_told(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        with pytest.raises(LoadFailed, match="can't be listed"):
            session.module_load(TRANSFORM.replace(b"scale", b"s" * 5000))
        neighbour.check()
