"""The server's side of calls through shared memory: callers on a Unix socket, each with separate memory.

`protocol.rpc` has the layout. The server runs in an event loop and never spins: it sleeps until a caller rings its
bell, and then reads only that caller's memory. A spinning thread would hold the interpreter's lock, which the threads
that do the work need.

Callers can't affect each other. If a caller dies in any state, the server only gets a closed socket. A caller that
writes invalid requests gets an error or is disconnected. A caller that repeatedly rings without a request is
disconnected, too.
"""

import asyncio
import logging
import os
import socket
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from gpulease.client.http.unix_path import keep_path
from gpulease.client.serve.rpc.shared import MappedCall
from gpulease.protocol.rpc import (
    DESCRIBE,
    MAX_PAYLOAD_BYTES,
    CallError,
    CallErrorCode,
    CallHeader,
    CallStatus,
    greeting,
)

MAX_CALLERS: Final = 256
"""Maximum number of simultaneous connections; one more is closed at once. Each takes two descriptors and 64 KiB of
memory.
"""

MAX_FALSE_BELLS: Final = 64
"""Maximum number of bells in a row without a request, so that a caller can't occupy the server by only ringing."""

ACCEPT_PAUSE_S: Final = 0.5
"""Seconds for which no caller is accepted after descriptors have run out, so that the loop does not retry
continually."""

BELLS_BYTES: Final = 4096
"""Maximum number of bells that are read at once."""

_log: Final = logging.getLogger("gpulease.rpc")


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call: the payload, and the method that computed it."""

    method_id: int
    payload: bytes


Outcome = Answer | CallError
Handler = Callable[[int, bytes, float | None], "asyncio.Future[Outcome]"]
"""Begins a call. The arguments are the method, the payload, and the seconds within which the call must begin, or None.

A call that can't begin in that time must be answered TOO_LATE. The future is cancelled if the caller disconnects. An
exception in the future is an internal error of the server."""


class RpcServer:
    """Serves callers of a listening Unix socket, while its `async with` block lasts.

    Args:
        sock: The socket. The server does not close it.
        handler: Begins the calls.
        describe: Returns the answer to DESCRIBE.
    """

    def __init__(self, sock: socket.socket, handler: Handler, describe: Callable[[], bytes]) -> None:
        self._sock, self._handler, self._describe = sock, handler, describe
        self._callers: set[_Caller] = set()

    @property
    def callers(self) -> int:
        return len(self._callers)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock, self._accept)
        # A clean-up of the folder may remove the socket's file, so watch its path.
        self._keeping = self._loop.create_task(keep_path(self._sock, self._replace))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.stop_accepting()
        # Closing removes a caller from the set, so iterate over a copy.
        for caller in list(self._callers):
            caller.close()

    def stop_accepting(self) -> None:
        """Accept no more callers. Connected ones can continue to call."""
        if self._is_stopping:
            return
        self._loop.remove_reader(self._sock)
        self._keeping.cancel()
        if self._replacement is not None:
            self._replacement.close()
        self._is_stopping = True

    _is_stopping = False
    _replacement: socket.socket | None = None
    """The socket that replaces the given one after its file was removed."""

    async def _replace(self, sock: socket.socket) -> None:
        self._loop.remove_reader(self._sock)
        if self._replacement is not None:
            self._replacement.close()
        # Do not close the original socket, because it belongs to the user of this class.
        self._sock = self._replacement = sock
        self._loop.add_reader(sock, self._accept)

    def _accept(self) -> None:
        try:
            peer, _ = self._sock.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            _log.warning("no callers are admitted for %g s: %s", ACCEPT_PAUSE_S, error)
            self._loop.remove_reader(self._sock)
            # During this time callers wait in the socket's backlog.
            self._loop.call_later(ACCEPT_PAUSE_S, self._resume_accepting)
            return
        # Close the connection rather than leave it in the backlog, so that the caller notices at once.
        if len(self._callers) >= MAX_CALLERS:
            peer.close()
            return
        try:
            # This allocates memory and greets the peer, so it may fail if descriptors or memory run out.
            caller = _Caller(peer, self._loop, self._begin, self._callers.discard)
        except OSError as error:
            _log.warning("a caller was not admitted: %s", error)
            peer.close()
            return
        self._callers.add(caller)

    def _resume_accepting(self) -> None:
        if not self._is_stopping:
            self._loop.add_reader(self._sock, self._accept)

    def _begin(self, method_id: int, payload: bytes, left_s: float | None) -> "asyncio.Future[Outcome]":
        # The server answers DESCRIBE itself. All other methods go to the handler.
        if method_id == DESCRIBE:
            outcome: asyncio.Future[Outcome] = self._loop.create_future()
            outcome.set_result(Answer(DESCRIBE, self._describe()))
            return outcome
        return self._handler(method_id, payload, left_s)


class _Caller:
    """The connection of one caller, and the memory that the caller shares. At most one call is in progress."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        begin: Handler,
        on_disconnect: Callable[["_Caller"], object],
    ) -> None:
        """Raises OSError if memory or descriptors for the caller run out, and leaves `sock` open."""
        self._sock, self._loop, self._begin, self._on_disconnect = sock, loop, begin, on_disconnect
        self._call: asyncio.Future[Outcome] | None = None
        self._false_bells = 0
        self._is_closed = False
        self._shared, fd = MappedCall.make()
        try:
            sock.setblocking(False)
            # The greeting carries the descriptor of the shared memory. This process keeps only its mapping.
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]
            sock.sendmsg([greeting()], rights)
        except BaseException:
            self._shared.close()
            raise
        finally:
            os.close(fd)
        loop.add_reader(sock, self._on_bell)

    def close(self) -> None:
        """Close the connection, and cancel its call if there is one. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self._shared.close()
        if self._call is not None:
            # Do not compute for a caller that has disconnected.
            self._call.cancel()
        self._on_disconnect(self)

    def _on_bell(self) -> None:
        try:
            # The bytes have no meaning. An empty read means that the connection has ended.
            bells = self._sock.recv(BELLS_BYTES)
        except BlockingIOError:
            return
        except OSError:
            bells = b""
        if not bells:
            self.close()
        elif self._call is not None or self._shared.request.status != CallStatus.REQUEST_READY:
            # A bell during a call, or without a request: harmless, but counted.
            self._false_bells += len(bells)
            if self._false_bells > MAX_FALSE_BELLS:
                _log.warning("a caller rang repeatedly without sending a call, so it was disconnected")
                self.close()
        else:
            self._false_bells = 0
            self._begin_call()

    def _begin_call(self) -> None:
        request = self._shared.request
        header = request.header()
        # The header is a copy, so later changes of the region do not affect it.
        request.status = CallStatus.PROCESSING
        if not header.fits:
            text = f"a payload must have at most {MAX_PAYLOAD_BYTES} bytes, not {header.payload_len}"
            self._answer(header, CallError(CallErrorCode.INVALID_REQUEST, text))
            return
        # The deadline is in the shared memory, too, tagged with its request's id.
        left_ms = self._shared.time_left_ms(header.request_id)
        left_s = None if left_ms is None else left_ms / 1000
        try:
            self._call = self._begin(header.method_id, request.payload(header.payload_len), left_s)
        except Exception:
            _log.exception("a call of method %d failed", header.method_id)
            self._answer(header, _FAILED)
            return
        # The reply needs the header of this request, even if the caller overwrites the region meanwhile.
        self._call.add_done_callback(lambda call: self._on_call_done(header, call))

    def _on_call_done(self, header: CallHeader, call: "asyncio.Future[Outcome]") -> None:
        self._call = None
        if self._is_closed:
            if not call.cancelled():
                call.exception()  # retrieve it, or asyncio would log that it was not retrieved
            return
        if call.cancelled():
            outcome: Outcome = CallError(CallErrorCode.UNAVAILABLE, "the server is stopping")
        elif error := call.exception():
            _log.error("a call of method %d failed", header.method_id, exc_info=error)
            outcome = _FAILED
        else:
            outcome = call.result()
        self._answer(header, outcome)

    def _answer(self, header: CallHeader, outcome: Outcome) -> None:
        # An answer that does not fit becomes an error, because the caller must get a reply.
        if isinstance(outcome, Answer) and len(outcome.payload) > MAX_PAYLOAD_BYTES:
            outcome = CallError(CallErrorCode.INVALID_REQUEST, "the answer is larger than a region: request less")
        # Empty the request's region before replying: after the reply, the caller may write its next request at once.
        self._shared.request.status = CallStatus.EMPTY
        reply = self._shared.reply
        if isinstance(outcome, Answer):
            reply.put(header.request_id, outcome.method_id, outcome.payload, CallStatus.RESPONSE_READY)
        else:
            reply.put(header.request_id, header.method_id, outcome.to_bytes(), CallStatus.ERROR)
        try:
            self._sock.send(b"\0", socket.MSG_NOSIGNAL)
        except BlockingIOError:
            pass  # the socket is full of bells that the caller has not read, and one is enough
        except OSError:
            self.close()


_FAILED: Final = CallError(CallErrorCode.INTERNAL, "the server failed; its log has details")
