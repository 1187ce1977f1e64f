"""A connection that may be of another tenant attaches: the context first forgets what earlier leases compiled."""

import socket
from typing import Any

import pytest

from gpulease.daemon.host.ipc import channel_pair, send_message
from gpulease.daemon.session.server import SessionServer
from gpulease.protocol.framing import FrameReader
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import AttachReply
from gpulease.protocol.opcodes import Opcode
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
