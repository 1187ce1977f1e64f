"""A peer that shares a ring with its worker, and misuses it in ways that no correct client would."""

import contextlib
import mmap
import os
import select
import socket
import threading
import time
from typing import Any

from gpulease.protocol import Opcode, Reply
from gpulease.protocol.messages import Attach, AttachReply, Body
from gpulease.protocol.ring import (
    DATA_AT,
    MAX_DESCRIPTORS,
    RingLayout,
    SharedMemoryGrant,
    SharedMemoryRequest,
    client_ends,
)
from helpers.raw_peer import REPLY_LIMIT_S, RawPeer

# Offsets of words in the memory; see `protocol.ring`.
TAIL, READER_SLEEPS, REPLY_HEAD, REPLY_WRITER_SLEEPS = 0, 16, 40, 56


class RingPeer(RawPeer):
    """A RawPeer that sends and receives frames through the ring once `attach_ring` has returned.

    Attributes:
        fd: The memory's descriptor.
        memory: The whole mapped memory.
        words: Its control words.
    """

    def attach_ring(self, session_id: int, wanted: SharedMemoryRequest | None = None) -> SharedMemoryGrant:
        self.session_id = session_id
        body = Attach((wanted or SharedMemoryRequest(ring=True)).to_options())
        _, frame = self.connection.send_request(Opcode.ATTACH, body, session_id=session_id)
        self.sock.sendall(frame)
        data, self.fds, _, _ = socket.recv_fds(self.sock, 1 << 16, MAX_DESCRIPTORS)
        self.connection.receive_data(data)
        reply = self.connection.next_event()
        assert isinstance(reply, Reply), reply
        assert isinstance(reply.result, AttachReply), reply
        given = SharedMemoryGrant.from_options(reply.result.options)
        if given.ring is not None:
            self._map(given.ring)
        return given

    def _map(self, layout: RingLayout) -> None:
        self.fd = self.fds[0]
        self.layout = layout
        self.map = mmap.mmap(self.fd, layout.total_bytes)
        self.memory = memoryview(self.map)
        self.words = self.memory[:DATA_AT].cast("Q")
        barriers = (threading.Lock(), threading.Lock())
        self.replies, self.requests = client_ends(self.memory, layout, barriers, self.bell)

    def bell(self) -> None:
        """Wake the worker. If the socket has no room, it already has unread wake-ups."""
        with contextlib.suppress(BlockingIOError):
            self.sock.sendall(b"!")

    def put(self, data: bytes) -> None:
        """Write all bytes into the ring, in pieces that have room."""
        until = time.monotonic() + REPLY_LIMIT_S
        while data:
            sent = self.requests.put(data)
            data = data[sent:]
            assert sent or time.monotonic() < until, "the worker takes nothing"

    def ask_in_ring(self, op: Opcode, body: Body, *, rings: bool = False) -> Body:
        """Send one request through the ring. Returns the reply. `rings`: wake the worker even if it is not asleep."""
        _, frame = self.connection.send_request(op, body, session_id=self.session_id)
        self.put(frame)
        if rings:
            self.bell()
        reply = self.next_event()
        assert isinstance(reply, Reply), reply
        assert not isinstance(reply.result, Exception)
        return reply.result  # type: ignore[return-value]

    def next_event(self) -> Any:
        """Return the worker's next event, from the ring if there is one, or the end of the connection."""
        if not hasattr(self, "words"):
            return super().next_event()
        into = bytearray(1 << 16)
        is_open = True
        while (event := self.connection.next_event()) is None:
            if count := self.replies.take(memoryview(into)):
                self.connection.receive_data(memoryview(into)[:count])
            elif not is_open:
                self.connection.receive_eof()
            elif self.replies.doze():
                assert select.select([self.sock], [], [], REPLY_LIMIT_S)[0], "the worker says nothing"
                is_open = self._hear()
                self.replies.rise()
        return event

    def _hear(self) -> bool:
        try:
            return bool(self.sock.recv(1 << 16))
        except ConnectionError:
            return False

    def __exit__(self, *what: object) -> None:
        super().__exit__(None, None, None)
        if hasattr(self, "words"):
            for end in (self.replies, self.requests):
                end.release()
            self.words.release()
            self.memory.release()
            self.map.close()
        for fd in getattr(self, "fds", ()):
            os.close(fd)
