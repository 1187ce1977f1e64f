"""The worker's loop: the broker's channel, and the tenant's connections it handed over.

One thread, one poll(2). Between requests the worker sleeps in the kernel and costs nothing. While it waits inside the
driver it looks at the control page; what it does not see in time, the broker ends with SIGKILL. It waits for no peer:
one that does not read is left aside (see `backlog`).

The loop of a submit's worker: one connection, one run, and the end.

Nothing of it is shared with the session beside it but the lease. It ends with its connection, whoever closes that, and
with the broker's word; what it does not see in time, the broker ends with SIGKILL.
"""

import contextlib
import select
import socket
import time
from contextlib import suppress
from dataclasses import replace
from typing import Final

from gpulease.daemon.contract.control_page import PageFds
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.contract.message_fields import MalformedMessage, Message
from gpulease.daemon.contract.messages import (
    TO_WORKER,
    Attach,
    Attached,
    EndSession,
    Faulted,
    LastLeft,
    MemoryGrew,
    Scrub,
    parse_message,
)
from gpulease.daemon.host.ipc import ChannelClosed, close_all, receive_message, send_message
from gpulease.daemon.session.connection import (
    ALONE_WAIT_NS,
    DISTRUST_S,
    SHARED_WAIT_NS,
    UNREAD_BYTES,
    Backlog,
    Connection,
    ConnectionLost,
    SpinPolicy,
    can_share,
    ring_for,
)
from gpulease.daemon.session.memory import Arena
from gpulease.daemon.session.native.layout import Outcome
from gpulease.daemon.session.replies import refusal_of
from gpulease.daemon.session.session import Session
from gpulease.protocol.codec import build_body
from gpulease.protocol.errors import FramingError
from gpulease.protocol.failures import Failure
from gpulease.protocol.framing import FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES, RETAINED_BUFFER_BYTES
from gpulease.protocol.messages import AttachReply
from gpulease.protocol.opcodes import Flag, Opcode, SessionOption, Status
from gpulease.protocol.primitives import Tlv
from gpulease.protocol.ring import Given, Wanted

MAX_CONNECTIONS: Final = 16
"""Most connections of a SHARED session. Stops a tenant from filling its worker with descriptors."""

BUFFERS_BYTES: Final = MAX_PAYLOAD_BYTES + (16 << 20)
"""What a session's connections may hold together of frames that have not ended: one of the largest, and many small
ones. Stops a lease of one byte from taking a gigabyte of the host's memory."""

LOOK_MS: Final = 5000
"""How long the worker sleeps at most: it looks at connections with half a frame then, and shows that it goes round."""

READS_PER_TURN: Final = 16
"""Buffers taken from one connection before the others and the broker get a turn."""

_LAUNCH: Final = int(Opcode.LAUNCH)
_SYNC: Final = int(Opcode.SYNC)


class Server:
    """Serves one session until the broker's channel closes, or until it is to be scrubbed, for `next_pages`."""

    def __init__(
        self,
        channel: socket.socket,
        session: Session,
        welcome: AttachReply,
        *,
        is_shared: bool,
        patience: SpinPolicy | None = None,
    ) -> None:
        self._channel = channel
        self._session = session
        self._patience = patience or SpinPolicy()
        self._welcome = welcome
        self._max_connections = MAX_CONNECTIONS if is_shared else 1
        self._connections: dict[int, Connection] = {}
        self._unfinished: set[int] = set()
        self._poll = select.poll()
        self._reported_lost = False
        self._reported_left = True
        self.next_pages: PageFds | None = None

    def run(self) -> None:
        """Serve; returns when the broker is gone or says that the session is to be scrubbed."""
        self._channel.setblocking(False)
        self._poll.register(self._channel, select.POLLIN)
        while True:
            self._session.look()
            timeout_ms = self._look_after_ms()
            for connection in self._connections.values():
                is_aside = connection.backlog is not None
                if connection.fd not in self._unfinished and not connection.wire.doze(for_room=is_aside):
                    self._unfinished.add(connection.fd)
            heard = {fd for fd, _ in self._poll.poll(0 if self._unfinished else timeout_ms)}
            for connection in self._connections.values():
                connection.wire.rise(connection.fd in heard)
            if self._channel.fileno() in heard and not self._serve_broker():
                return
            heard |= self._unfinished
            self._unfinished.clear()
            for fd in heard & self._connections.keys():
                self._serve(self._connections[fd])

    def _look_after_ms(self) -> int:
        """How long to sleep at most; drops connections that have kept something here for too long."""
        now_s = time.monotonic()
        for connection in list(self._connections.values()):
            if (error := connection.overdue(now_s)) is not None:
                self._drop(connection, error)
            elif connection.backlog is None and 0 < connection.distrusted_until_s < now_s:
                connection.distrusted_until_s = 0.0
                self._share_waits()
        self._drop_late_guests()
        self._report_left()
        return self._session.watch.look_after_ms() or LOOK_MS

    def _drop_late_guests(self) -> None:
        """A connection whose token is over takes no other's place."""
        for connection in list(self._connections.values()):
            if connection.guest is not None and not self._session.is_held_by(connection.guest):
                over = refusal_of(Status.DENIED)
                self._drop(connection, FramingError(over.message, over.status), over)

    # --- the broker ---

    def _serve_broker(self) -> bool:
        while True:
            try:
                message, fds = receive(self._channel)
            except BlockingIOError:
                return True
            except ChannelClosed:
                return False
            match message:
                case Attach() as attach if len(fds) == 1:
                    self._session.meet(is_stranger=attach.is_stranger)
                    wanted = Wanted(attach.ring, attach.arena_bytes)
                    self._attach(socket.socket(fileno=fds.pop()), attach.request_id, attach.rest, wanted, attach.guest)
                case Attach(guest=guest):
                    # Its socket did not get through, for want of descriptors here: to its peer it is closed.
                    self._tell_of(guest, is_in=False)
                case Scrub() if len(fds) == 2:
                    self._say_goodbye()
                    self.next_pages = PageFds(*fds)
                    return False
                case EndSession():
                    self._say_goodbye()
            close_all(fds)

    def _attach(self, sock: socket.socket, request_id: int, rest: bytes, wanted: Wanted, guest: Guest | None) -> None:
        sock.setblocking(False)
        connection = Connection(sock, rest, self._session.slots, self._patience, guest)
        # A peer that closed before this one came must not stand in its way: what it sent last is served, its end seen.
        for earlier in list(self._connections.values()):
            earlier.wire.rise(True)
            self._serve(earlier)
        self._drop_late_guests()
        failure = self._session.refusal()
        if failure is None and len(self._connections) >= self._max_connections:
            failure = Failure(
                Status.BUSY,
                f"the session has {len(self._connections)} connections, the most its exclusivity class allows",
                hint="Close the other connection first, or acquire the lease as SHARED.",
            )
        if failure is not None:
            # Before its peer hears it, who may try again at once.
            self._tell_of(guest, is_in=False)
            with suppress(ConnectionLost):
                lease_id = self._session.lease_id
                connection.wire.send(failure.to_frame(Opcode.ATTACH, request_id=request_id, session_id=lease_id), 0)
            connection.wire.close()
            return
        try:
            self._connections[connection.fd] = connection
            self._session.count_connections(len(self._connections))
            self._poll.register(sock, select.POLLIN)
            self._share_waits()
            self._welcome_in(connection, request_id, wanted)
        except ConnectionLost as error:
            self._drop(connection, error)
            self._tell_of(guest, is_in=False)
            return
        self._tell_of(guest, is_in=True)
        try:
            self._session.streams.sit(connection.place)
            self._serve_frames(connection)
        except (ConnectionLost, FramingError) as error:
            self._drop(connection, error)

    def _tell_of(self, guest: Guest | None, *, is_in: bool) -> None:
        """Tell the broker of a socket that it handed over: a token that let nobody in may be used again."""
        report(self._channel, Attached() if guest is None else Attached(guest.mark, is_in))

    def _welcome_in(self, connection: Connection, request_id: int, wanted: Wanted) -> None:
        """Answer its ATTACH, with a ring if it asks for one and there can be one; all that follows goes through it."""
        ring, arena = ring_for(connection.sock, wanted, self._patience), self._arena_for(connection, wanted)
        given = Given(None if ring is None else ring.layout, 0 if arena is None else arena.size_bytes)
        options = (*given.to_options(), Tlv(SessionOption.PARAMETER_TYPES, b""))
        body = build_body(replace(self._welcome, options=options))
        header = {"request_id": request_id, "session_id": self._session.lease_id, "flags": int(Flag.REPLY)}
        frame = build_frame(Opcode.ATTACH, body, **header)
        fds = [shared.fd for shared in (ring, arena) if shared is not None]
        try:
            # Nothing was sent on this socket since its last reply was read: there is room.
            sent = socket.send_fds(connection.sock, [frame], fds, socket.MSG_NOSIGNAL)
        except OSError:
            sent = 0
        if sent != len(frame):
            if ring is not None:
                ring.close()
            raise ConnectionLost("the peer is gone, or does not read")
        connection.has_arena = arena is not None
        if ring is not None:
            ring.offered()
            connection.wire = ring

    def _arena_for(self, connection: Connection, wanted: Wanted) -> Arena | None:
        """The session's arena, unless another connection has it: two clients would use the same bytes.

        Nor is it a guest's: who had it before still maps it, and may be another tenant.
        """
        is_taken = connection.guest is not None or any(other.has_arena for other in self._connections.values())
        if not wanted.arena_bytes or is_taken or not can_share(connection.sock):
            return None
        try:
            return self._session.arena.open(wanted.arena_bytes)
        except OSError:
            return None

    def _say_goodbye(self) -> None:
        """Tell every connection why it will not be answered any more; the process is about to be killed."""
        failure = self._session.refusal() or Failure(Status.SESSION_FAILED, "the session has ended")
        for connection in list(self._connections.values()):
            self._drop(connection, FramingError(failure.message, failure.status), failure)

    # --- tenants ---

    def _serve(self, connection: Connection) -> None:
        self._session.streams.sit(connection.place)
        try:
            if connection.backlog is not None:
                self._catch_up(connection, connection.backlog)
            for _ in range(READS_PER_TURN):
                if connection.backlog is not None:
                    return
                outcome = connection.serve_ring(self._session.serve_ring)
                if outcome is Outcome.TURN:
                    break
                if connection.reader.is_mid_frame and outcome is not None:
                    self._serve_frames(connection)
                elif outcome in (Outcome.WAKE_READER, Outcome.WAKE_WRITER):
                    continue
                elif connection.receive():
                    if len(connection.reader.buffer) > RETAINED_BUFFER_BYTES:
                        self._check_buffers()
                    self._serve_frames(connection)
                else:
                    return
            self._unfinished.add(connection.fd)
        except (ConnectionLost, FramingError) as error:
            self._drop(connection, error)

    def _check_buffers(self) -> None:
        held = sum(len(connection.reader.buffer) for connection in self._connections.values())
        if held > BUFFERS_BYTES:
            raise FramingError(
                f"the session's connections hold {held} bytes of frames that have not ended; at most {BUFFERS_BYTES} "
                "are allowed together",
                Status.BUSY,
            )

    def _serve_guest(self, connection: Connection, guest: Guest) -> None:
        """Serve what came on a connection that is bound to a token, each request behind a look at the token."""
        with self._session.serving(guest):
            while (frame := connection.intake.next_frame()) is not None:
                reply = guest.refuse(frame) or self._session.handle(frame)
                if reply is not None:
                    connection.spins_left = self._patience.spins_per_reply
                    if not self._send(connection, reply):
                        break

    def _serve_frames(self, connection: Connection) -> None:
        reader, session, intake = connection.reader, self._session, connection.intake
        if connection.guest is not None:
            self._serve_guest(connection, connection.guest)
        while connection.guest is None and (reader.start != reader.end or intake.has_whole):
            reply: bytes | memoryview | None = None
            op = reader.peek_op()
            if op == _LAUNCH:
                session.take_launches(reader)
                op = reader.peek_op()
            if op == _SYNC:
                reply = session.take_sync(reader)
            if reply is None:
                frame = intake.next_frame()
                if frame is None:
                    break
                reply = session.handle(frame)
            if reply is not None:
                connection.spins_left = self._patience.spins_per_reply
                if not self._send(connection, reply):
                    break
        if intake.is_mid_frame:
            connection.heard_at_s = time.monotonic()
        if session.take_growth():
            report(self._channel, MemoryGrew())
        if self._session.lost is not None and not self._reported_lost:
            self._reported_lost = report(self._channel, Faulted(self._session.lost.message))

    def _report_left(self) -> None:
        """Have the broker look at the page, once the last connection has gone."""
        if not self._reported_left and not self._connections:
            self._reported_left = report(self._channel, LastLeft())

    # --- replies ---

    def _send(self, connection: Connection, data: bytes | memoryview) -> bool:
        """Whether all of it went. If not, the connection is left aside, and nothing more may be served of it now."""
        rest = connection.wire.send(data, connection.wait_ns)
        if rest is None:
            return True
        connection.backlog = Backlog(rest)
        connection.distrusted_until_s = time.monotonic() + DISTRUST_S
        self._share_waits()
        self._poll.modify(connection.fd, connection.wire.events(for_room=True))
        held = sum(len(other.backlog.rest) for other in self._connections.values() if other.backlog is not None)
        if held > UNREAD_BYTES:
            raise ConnectionLost(f"the session's peers have left {held} bytes unread")
        return False

    def _catch_up(self, connection: Connection, backlog: Backlog) -> None:
        """Send on what its peer has not read; then what it asked meanwhile is served."""
        rest = connection.wire.send(backlog.rest, 0)
        if rest is not None:
            backlog.keep(rest)
            return
        connection.backlog = None
        self._poll.modify(connection.fd, connection.wire.events(for_room=False))
        self._share_waits()
        self._serve_frames(connection)

    def _share_waits(self) -> None:
        """How long each connection is waited for from now on; those that were left aside lately are not."""
        is_alone = len(self._connections) == 1
        for connection in self._connections.values():
            is_trusted = not connection.distrusted_until_s
            connection.wait_ns = ALONE_WAIT_NS if is_alone else SHARED_WAIT_NS if is_trusted else 0

    def _drop(self, connection: Connection, error: Exception, failure: Failure | None = None) -> None:
        # Behind half a reply nothing can be said.
        if isinstance(error, FramingError) and connection.backlog is None:
            failure = failure or Failure(error.status, str(error))
            connection.wire.say_last(failure.to_frame(Opcode.GOODBYE, request_id=0))
        if self._connections.pop(connection.fd, None) is not None:
            self._poll.unregister(connection.fd)
            self._session.streams.leave(connection.place)
            self._share_waits()
            self._session.count_connections(len(self._connections))
            self._reported_left = bool(self._connections)
        connection.intake.close()
        connection.wire.close()


def report(channel: socket.socket, message: Message) -> bool:
    """Tell the broker something it can do without; False if it has not read for so long that there is no room."""
    try:
        send_message(channel, message.to_map())
    except (ChannelClosed, BlockingIOError):
        return False
    return True


def receive(channel: socket.socket) -> tuple[Message | None, list[int]]:
    """Return the broker's next message, None if it means nothing here, and its descriptors.

    A malformed Attach loses its connection, so that it is refused. Raises ChannelClosed and BlockingIOError.
    """
    message, fds = receive_message(channel)
    try:
        return parse_message(TO_WORKER, message), fds
    except MalformedMessage as error:
        close_all(fds)
        return (Attach(0, b"", ring=False, arena_bytes=0) if error.op == Attach.OP else None), []


HAND_OVER_S: Final = 10.0
"""From ready to the connection. A broker that died in between hands over none, and the next one can't know that."""

_GONE: Final = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class PeerGone(Exception):
    """Whoever asked has left, or must be left."""


class BrokerSays(Exception):
    """The lease, or the submit's time, is over."""


class OnceServer:
    """Serves one submit; `run` returns when it is over."""

    def __init__(self, channel: socket.socket, session: Session, welcome: AttachReply) -> None:
        self._channel = channel
        self._session = session
        self._welcome = welcome
        self._guest: Guest | None = None
        self._reader = FrameReader(MAX_PAYLOAD_BYTES)
        self._sock: socket.socket | None = None

    def run(self) -> None:
        """Wait for the connection, serve it, end."""
        self._channel.setblocking(False)
        try:
            self._sock = sock = self._await_connection()
            if sock is not None:
                with sock:
                    self._serve(sock)
        except ChannelClosed:
            return

    def _await_connection(self) -> socket.socket | None:
        until_s = time.monotonic() + HAND_OVER_S
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while (left_s := until_s - time.monotonic()) > 0:
            self._session.look()
            if not poll.poll(left_s * 1000):
                continue
            try:
                message, fds = receive(self._channel)
            except BlockingIOError:
                continue
            match message:
                case Attach() as attach if len(fds) == 1:
                    report(self._channel, Attached())
                    self._guest = attach.guest
                    return self._welcome_in(socket.socket(fileno=fds.pop()), attach.request_id, attach.rest)
                case Attach() | EndSession():
                    # Its socket did not get through, or it is over before it began.
                    close_all(fds)
                    return None
            close_all(fds)
        return None

    def _welcome_in(self, sock: socket.socket, request_id: int, rest: bytes) -> socket.socket:
        sock.setblocking(False)
        self._reader.receive_data(rest)
        reply = build_frame(
            Opcode.GPU_SUBMIT,
            build_body(self._welcome),
            request_id=request_id,
            session_id=self._session.lease_id,
            flags=Flag.REPLY,
        )
        # Nothing was sent on this socket since its last reply was read: there is room, or the peer is gone, which is
        # seen at the next look.
        with contextlib.suppress(OSError):
            sock.send(reply)
        return sock

    def _serve(self, sock: socket.socket) -> None:
        submit = self._session.submit
        hung_up = select.poll()
        hung_up.register(sock, select.POLLRDHUP)
        submit.is_peer_gone = lambda: any(event & _GONE for _, event in hung_up.poll(0))
        submit.on_growth = self._ask_for_a_look
        try:
            while not submit.is_spent:
                while (frame := self._reader.next_frame()) is not None and not submit.is_spent:
                    guest = self._guest
                    with self._session.serving(guest) if guest is not None else contextlib.nullcontext():
                        reply = (guest.refuse(frame) if guest is not None else None) or self._session.handle(frame)
                    if (lost := self._session.lost) is not None:
                        report(self._channel, Faulted(lost.message))
                    if reply is not None:
                        self._send(sock, memoryview(reply))
                if not submit.is_spent:
                    self._receive(sock)
        except BrokerSays:
            self._say_last(sock, self._session.refusal() or Failure(Status.SESSION_FAILED, "the submit was ended"))
        except FramingError as error:
            self._say_last(sock, Failure(error.status, str(error)))
        except PeerGone:
            return

    def _ask_for_a_look(self) -> None:
        report(self._channel, MemoryGrew())

    def _receive(self, sock: socket.socket) -> None:
        self._wait(sock, select.POLLIN)
        try:
            count = sock.recv_into(self._reader.get_buffer())
        except BlockingIOError:
            return
        except OSError:
            raise PeerGone from None
        if not count:
            raise PeerGone
        self._reader.buffer_updated(count)

    def _send(self, sock: socket.socket, data: memoryview) -> None:
        while data:
            try:
                data = data[sock.send(data, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._wait(sock, select.POLLOUT)
            except OSError:
                raise PeerGone from None

    def _wait(self, sock: socket.socket, for_what: int) -> None:
        """Until the socket is ready. Raises BrokerSays or ChannelClosed."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(sock, for_what)
        while True:
            self._session.look()
            if self._guest is not None and not self._session.is_held_by(self._guest):
                over = refusal_of(Status.DENIED)
                raise FramingError(over.message, over.status)
            heard = {fd for fd, _ in poll.poll(LOOK_MS)}
            if self._channel.fileno() in heard:
                self._hear()
            if sock.fileno() in heard:
                return

    def _hear(self) -> None:
        try:
            message, fds = receive(self._channel)
        except BlockingIOError:
            return
        close_all(fds)
        if isinstance(message, EndSession):
            raise BrokerSays

    def _say_last(self, sock: socket.socket, failure: Failure) -> None:
        with contextlib.suppress(OSError):
            sock.send(failure.to_frame(Opcode.GOODBYE, request_id=0), socket.MSG_NOSIGNAL)
