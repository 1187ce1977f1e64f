"""The loop of a submit's worker: one connection, one run, and the end.

Nothing of it is shared with the session beside it but the lease. It ends with its connection, whoever closes that, and
with the broker's word; what it does not see in time, the broker ends with SIGKILL.
"""

import contextlib
import select
import socket
import time
from typing import Final

from gpulease.daemon.channel import ChannelClosed, close_all, receive_message
from gpulease.daemon.worker.guests import Guest
from gpulease.daemon.worker.reasons import refusal_of
from gpulease.daemon.worker.serving import LOOK_MS, report
from gpulease.daemon.worker.session import Session
from gpulease.protocol.codec import build_body
from gpulease.protocol.errors import FramingError
from gpulease.protocol.failures import Failure
from gpulease.protocol.framing import FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import AttachReply
from gpulease.protocol.opcodes import Flag, Opcode, Status

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
                message, fds = receive_message(self._channel)
            except BlockingIOError:
                continue
            match message:
                case {"op": "attach", "request_id": int(request_id), "rest": bytes(rest), "guest": terms} if (
                    len(fds) == 1
                ):
                    report(self._channel, {"op": "attached"})
                    self._guest = Guest.from_message(terms)
                    return self._welcome_in(socket.socket(fileno=fds.pop()), request_id, rest)
                case {"op": "attach"} | {"op": "end"}:
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
                        report(self._channel, {"op": "faulted", "reason": lost.message})
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
        report(self._channel, {"op": "look"})

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
            message, fds = receive_message(self._channel)
        except BlockingIOError:
            return
        close_all(fds)
        if message.get("op") == "end":
            raise BrokerSays

    def _say_last(self, sock: socket.socket, failure: Failure) -> None:
        with contextlib.suppress(OSError):
            sock.send(failure.to_frame(Opcode.GOODBYE, request_id=0), socket.MSG_NOSIGNAL)
