"""A connection that may be of another tenant attaches: the context first forgets what earlier leases compiled."""

import select
import socket
import time
from typing import Any

import pytest

from gpulease.daemon.host.ipc import channel_pair, send_message
from gpulease.daemon.session import server as server_module
from gpulease.daemon.session.connection import WorkerSpinPolicy
from gpulease.daemon.session.server import SessionServer
from gpulease.protocol.framing import FrameReader
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import AttachReply
from gpulease.protocol.opcodes import Opcode
from gpulease.protocol.time_units import NS_PER_S
from helpers.session_rig import rig

ATTACH: dict[str, Any] = {"op": "attach", "request_id": 1, "rest": b"", "ring": False, "arena": 0, "guest": None}


@pytest.mark.parametrize(
    ("said", "forgotten"), [({"is_stranger": False}, 0), ({"is_stranger": True}, 1), ({}, 1)], ids=repr
)
def test_compiled_images_are_forgotten_before_a_stranger_attaches(
    said: dict[str, bool], forgotten: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, worker = channel_pair()
    near, far = socket.socketpair()
    count = 0

    def forget() -> None:
        nonlocal count
        with pytest.raises(BlockingIOError):
            near.recv(1, socket.MSG_DONTWAIT)
        count += 1

    with worker, near, rig() as made:
        monkeypatch.setattr(made.context, "forget_earlier", forget, raising=False)
        with broker, far:
            send_message(broker, ATTACH | said, (far.fileno(),))
            send_message(broker, {"op": "end"})
        SessionServer(worker, made.session, AttachReply(1 << 20, "cpu", "GPU-0", ()), is_shared=False).run()
        reader = FrameReader(MAX_PAYLOAD_BYTES)
        reader.receive_data(near.recv(1 << 16))
        frame = reader.next_frame()
    assert frame is not None
    assert frame.op == Opcode.ATTACH
    assert count == forgotten


@pytest.mark.parametrize("polls", [True, False])
def test_a_worker_polls_for_the_first_connection_and_its_first_request(
    polls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "ATTACH_POLL_NS", 300 * NS_PER_S)
    monkeypatch.setattr(server_module, "ORDER_POLL_NS", 600 * NS_PER_S)
    timeouts: list[int] = []

    class Poll:
        """poll(2), with a note of each timeout."""

        def __init__(self) -> None:
            self._poll = select.poll()
            self.register, self.unregister, self.modify = self._poll.register, self._poll.unregister, self._poll.modify

        def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
            timeouts.append(timeout_ms)
            return self._poll.poll(timeout_ms)

    broker, worker = channel_pair()
    near, far = socket.socketpair()
    with worker, near, rig() as made:
        with broker, far:
            send_message(broker, ATTACH, (far.fileno(),))
            send_message(broker, {"op": "end"})
        policy = WorkerSpinPolicy(spins_when_quiet=polls)
        server = SessionServer(
            worker, made.session, AttachReply(1 << 20, "cpu", "GPU-0", ()), is_shared=False, spin_policy=policy
        )
        server._poll = Poll()  # type: ignore[assignment]
        server.run()
    assert (timeouts[0] == 0) == polls
    assert (server._poll_until_ns > time.monotonic_ns() + 300 * NS_PER_S) == polls
