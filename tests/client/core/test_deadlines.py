"""A client that was stopped (job control, a debugger) for longer than its time limits does not blame the daemon."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from gpulease.client.core.exchange import (
    CONNECT_LIMIT_S,
    CONTROL_REPLY_LIMIT_S,
    MAX_EXTENSIONS,
    PING_AFTER_S,
    FixedDeadline,
    _connect,
    control_limit_s,
    receive,
    receive_from_living,
    receive_reply,
)
from gpulease.client.core.waits import Procedure, Wait
from gpulease.client.errors import Disconnected
from gpulease.client.transport.channel import Channel
from gpulease.protocol import Opcode
from gpulease.protocol.address import TcpAddress, UnixAddress
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES, USUAL_MAX_WAIT_S
from gpulease.protocol.messages import Body, Hello, HelloReply, LeaseMove, LeaseRef, Ping, Report
from gpulease.protocol.opcodes import Flag
from gpulease.protocol.operations import Trait, having

HERE = UnixAddress("/nowhere")
STOP_S = 3600.0


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Peer:
    """A channel after HELLO, whose client is at `clock`, and the daemon's end of it."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        ours.setblocking(False)
        for each in (ours, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self.channel, self.clock, self._theirs = Channel(ours, HERE), Clock(), theirs
        hello_id = self.request(Opcode.HELLO, Hello(0, "tests", ()))
        self.reply(Opcode.HELLO, HelloReply(0, "tests", MAX_PAYLOAD_BYTES, ()), hello_id)
        self.channel.pump()
        self.channel.link.take(hello_id)

    def deadline(self, seconds: float) -> FixedDeadline:
        return FixedDeadline(seconds, "lease_query", HERE, self.clock)

    def request(self, op: Opcode, body: Body) -> int:
        return self.channel.link.request(op, body)[0]

    def reply(self, op: Opcode, body: Body, request_id: int) -> None:
        self._theirs.sendall(build_frame(op, build_body(body), request_id=request_id, flags=Flag.REPLY))

    def sent(self) -> bytes:
        return self._theirs.recv(1 << 16)


@pytest.fixture
def peer() -> Iterator[Peer]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Peer(ours, theirs)


def waits(procedure: Procedure[Any]) -> float:
    """Run a procedure to its next wait. Returns how long it would wait, in seconds."""
    step = procedure.send(None)
    assert isinstance(step, Wait)
    return step.timeout_s


def result_of(procedure: Procedure[Any]) -> Any:
    with pytest.raises(StopIteration) as done:
        waits(procedure)
    return done.value.value


@pytest.mark.parametrize("entries", [1, 100_000])
def test_a_reply_that_came_while_the_client_was_stopped_is_returned(peer: Peer, entries: int) -> None:
    number = peer.request(Opcode.LEASE_QUERY, LeaseRef(5))
    answer = receive(peer.channel, number, peer.deadline(10))
    assert waits(answer) == 10
    # With many entries, the reply fills the client's buffer several times.
    peer.reply(Opcode.LEASE_QUERY, Report(list(range(entries))), number)
    peer.clock.now_s += STOP_S
    assert result_of(answer) == Report(list(range(entries)))


def test_a_reply_that_is_on_its_way_after_a_stop_has_its_time(peer: Peer) -> None:
    number = peer.request(Opcode.LEASE_QUERY, LeaseRef(5))
    answer = receive(peer.channel, number, peer.deadline(60))
    waits(answer)
    peer.clock.now_s += STOP_S
    assert waits(answer) == CONNECT_LIMIT_S
    peer.reply(Opcode.LEASE_QUERY, Report({}), number)
    assert result_of(answer) == Report({})


def test_a_daemon_that_does_not_answer_after_a_stop_is_given_up(peer: Peer) -> None:
    answer = receive(peer.channel, peer.request(Opcode.LEASE_QUERY, LeaseRef(5)), peer.deadline(60))
    waits(answer)
    peer.clock.now_s += STOP_S
    peer.clock.now_s += waits(answer)
    with pytest.raises(Disconnected, match="did not answer within 60 s"):
        waits(answer)


def test_a_daemon_that_hangs_is_given_up_although_each_limit_is_noticed_late(peer: Peer) -> None:
    """An event loop that other work blocks for seconds at a time notices all of them late."""
    answer = receive(peer.channel, peer.request(Opcode.LEASE_QUERY, LeaseRef(5)), peer.deadline(60))
    waits(answer)
    for _ in range(MAX_EXTENSIONS):
        peer.clock.now_s += STOP_S
        assert waits(answer) == CONNECT_LIMIT_S
    peer.clock.now_s += STOP_S
    with pytest.raises(Disconnected, match="did not answer within 60 s"):
        waits(answer)


def test_a_ping_that_was_answered_while_the_client_was_stopped_counts(peer: Peer) -> None:
    number = peer.request(Opcode.LEASE_QUERY, LeaseRef(5))
    answer = receive_from_living(peer.channel, number, peer.deadline(2 * STOP_S), pong_limit_s=5, clock=peer.clock)
    assert waits(answer) == PING_AFTER_S
    peer.clock.now_s += PING_AFTER_S
    assert waits(answer) == 5
    assert peer.sent()
    peer.clock.now_s += STOP_S
    peer.reply(Opcode.PING, Ping(0), number + 1)
    assert waits(answer) == PING_AFTER_S
    peer.reply(Opcode.LEASE_QUERY, Report({}), number)
    assert result_of(answer) == Report({})


def test_a_request_that_may_wait_for_a_parked_session_waits_as_long_as_the_daemon_lives(peer: Peer) -> None:
    """The bound is the wait of the lease's acquire, which a command, or a guest of the lease, does not know."""
    for op in having(Trait.AWAITS_SESSION):
        assert control_limit_s(op) == USUAL_MAX_WAIT_S + CONTROL_REPLY_LIMIT_S
    op = Opcode.LEASE_MOVE
    number = peer.request(op, LeaseMove(5, None))
    answer = receive_reply(peer.channel, op, number, peer.deadline(control_limit_s(op)), peer.clock)
    for ping in range(1, 100):
        assert waits(answer) == PING_AFTER_S
        peer.clock.now_s += PING_AFTER_S
        assert waits(answer) == CONNECT_LIMIT_S
        assert peer.sent()
        peer.reply(Opcode.PING, Ping(0), number + ping)
    assert peer.clock.now_s > CONTROL_REPLY_LIMIT_S
    # One that hangs is noticed by its missing answer to a PING.
    waits(answer)
    peer.clock.now_s += PING_AFTER_S
    waits(answer)
    peer.clock.now_s += CONNECT_LIMIT_S
    with pytest.raises(Disconnected, match="ping"):
        waits(answer)


def test_another_request_has_the_usual_time(peer: Peer) -> None:
    op = Opcode.LEASE_QUERY
    assert control_limit_s(op) == CONTROL_REPLY_LIMIT_S
    answer = receive_reply(peer.channel, op, peer.request(op, LeaseRef(5)), peer.deadline(control_limit_s(op)))
    assert waits(answer) == CONTROL_REPLY_LIMIT_S


def test_a_connect_that_succeeded_while_the_client_was_stopped_is_used() -> None:
    clock = Clock()
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = TcpAddress("127.0.0.1", server.getsockname()[1])
        deadline = FixedDeadline(10, "connect", where, clock)
        clock.now_s += STOP_S
        connecting = _connect(where, deadline)
        assert waits(connecting) == 0
        with pytest.raises(StopIteration) as done:
            connecting.send(True)
        done.value.value.close()
