"""A client and a worker that share a ring, in one thread. Native code or Python serves the ring."""

import contextlib
import mmap
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpulease.daemon.session.connection import AttachedConnection, RingWire, WorkerSpinPolicy
from gpulease.daemon.session.server import SessionServer
from gpulease.daemon.session.session import Session
from gpulease.protocol.errors import FramingError
from gpulease.protocol.messages import AttachReply
from gpulease.protocol.ring import DATA_AT, RingLayout, RingReader, RingWriter, client_ends
from helpers.session_rig import Rig, rig

SMALL = RingLayout(4096, 4096)


@dataclass
class RingLine:
    """The client's and the worker's ends of a ring.

    Attributes:
        requests: The client's end of the ring for requests; `replies` is its end of the ring for replies.
        heard: The bytes that the worker has sent and the client has read.
    """

    server: SessionServer
    connection: AttachedConnection
    near: socket.socket
    words: memoryview
    data: memoryview
    requests: RingWriter
    replies: RingReader
    heard: bytearray = field(default_factory=bytearray)

    def put(self, stream: bytes) -> None:
        """Write all of the stream into the ring. Lets the worker serve whenever the ring is full, and at the end."""
        while stream and self.is_served:
            try:
                sent = self.requests.put(stream)
            except FramingError:
                return  # The test overwrote the client's word in the ring, and the worker used it.
            stream = stream[sent:]
            if not sent or not stream:
                self.turn()

    def turn(self) -> None:
        if self.is_served:
            self.server._serve(self.connection)
        into = bytearray(SMALL.reply_bytes)
        with contextlib.suppress(Exception):
            while count := self.replies.take(memoryview(into)):
                self.heard += into[:count]

    @property
    def is_served(self) -> bool:
        return self.connection.fd in self.server._connections

    def bells(self) -> int:
        with contextlib.suppress(BlockingIOError):
            return len(self.near.recv(1 << 16))
        return 0


@dataclass
class Pair(RingLine):
    """A ring, and the session that serves it."""

    made: Rig = field(kw_only=True)


@contextmanager
def pair(*, is_native: bool, has_chains: bool = False, has_graphs: bool = False) -> Iterator[Pair]:
    with (
        rig(is_native=is_native, has_chains=has_chains, has_graphs=has_graphs) as made,
        ring_line(made.session) as line,
    ):
        yield Pair(**vars(line), made=made)


@contextmanager
def ring_line(session: Session) -> Iterator[RingLine]:
    """Connect a client to a session."""
    near, far = socket.socketpair()
    channel, broker = socket.socketpair()
    with contextlib.ExitStack() as stack:
        for sock in (near, far, channel, broker):
            sock.setblocking(False)
            stack.callback(sock.close)
        server = SessionServer(channel, session, AttachReply(1 << 20, "cpu", "GPU-0", ()), is_shared=False)
        connection = AttachedConnection(far, b"", session.pinned_buffers, WorkerSpinPolicy())
        connection.holder = session.begin_connection(0, owns=True)
        connection.wire = wire = RingWire(far, WorkerSpinPolicy())
        server._connections[connection.fd] = connection
        server._poll.register(far)
        memory = mmap.mmap(wire.fd, wire.layout.total_bytes)
        stack.callback(memory.close)
        view = stack.enter_context(memoryview(memory))
        words = stack.enter_context(stack.enter_context(view[:DATA_AT]).cast("Q"))
        data = stack.enter_context(view[DATA_AT : DATA_AT + wire.layout.request_bytes])
        barriers = (threading.Lock(), threading.Lock())
        replies, requests = client_ends(view, wire.layout, barriers, lambda: None)
        for end in (replies, requests):
            stack.callback(end.release)
        try:
            yield RingLine(server, connection, near, words, data, requests, replies)
        finally:
            if connection.fd in server._connections:
                wire.close()
