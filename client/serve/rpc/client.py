"""The caller's side of calls through shared memory. It blocks.

Threads may share a client, but its calls run one after another. For parallel calls, use several clients.
"""

import json
import math
import os
import random
import select
import socket
import threading
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from gpulease.client.errors import Disconnected, GpuLeaseError, InvalidRequest
from gpulease.client.numbers import is_number
from gpulease.client.serve.rpc.server import Answer
from gpulease.client.serve.rpc.shared import LOADS_ARE_ORDERED, MappedCall
from gpulease.client.texts import quoted, utf8
from gpulease.client.transport.spin_policy import spin_policy_of
from gpulease.protocol.address import UnixAddress, parse_address
from gpulease.protocol.back_off import back_off_s
from gpulease.protocol.rpc import (
    DESCRIBE,
    GREETING_BYTES,
    MAX_LEFT_MS,
    MAX_PAYLOAD_BYTES,
    CallError,
    CallErrorCode,
    CallStatus,
    is_greeting,
)


class CallFailed(GpuLeaseError):
    """The server returned an error, or the call's deadline passed before it was sent (TOO_LATE).

    Attributes:
        code: The server's reason.
        retry_after_s: Seconds after which the call may be retried; 0 if unknown.
    """

    def __init__(self, error: CallError) -> None:
        super().__init__(f"{error.code.name.lower()}: {error.text}")
        self.error = error
        self.code: CallErrorCode = error.code
        self.retry_after_s = error.retry_after_ms / 1000


class CallTimedOut(Disconnected):
    """No reply came in time. The call may have been executed, or may still be running."""

    default_hint = "Increase the deadline, or find out why the server is slow"


SPIN_NS: Final = 200_000
"""Nanoseconds for which a caller polls for its reply before it sleeps, if the host has enough cores."""

POLLS_PER_CLOCK: Final = 16
"""Number of polls between two readings of the clock, each of which takes as long as a poll on some hosts."""

FIRST_BACKOFF_S: Final = 0.02
"""Seconds before the second attempt at a call. The pause doubles with each attempt, and half of it is random."""

MAX_BACKOFF_S: Final = 1.0

ANSWER_ROOM_S: Final = 0.5
"""A call with a deadline but no timeout waits this many seconds longer than the deadline, so that the server's TOO_LATE
can arrive."""

MAX_DESCRIPTORS: Final = 4
"""Maximum number of descriptors received with the greeting. One is correct. The room for more lets the client notice
surplus descriptors and close them.
"""

_MAX_ID: Final = 2**64 - 1
_BELLS_BYTES: Final = 4096


class RpcClient:
    """Calls a model server on this host.

    Args:
        address: The server's socket, `unix:/path`.
        timeout_s: Default timeout of calls, in seconds.
        spin_ns: Nanoseconds to poll for a reply before sleeping. None: 200 us if the host has at least four cores.
            Ignored on processors that may reorder loads; see `protocol.rpc`.
    """

    def __init__(self, address: str, timeout_s: float = 30.0, spin_ns: int | None = None) -> None:
        try:
            utf8(address, "rpc: the server's address")
            endpoint = parse_address(address)
        except ValueError as error:
            raise InvalidRequest(f"rpc: {error}") from None
        if not isinstance(endpoint, UnixAddress):
            raise InvalidRequest(
                f"rpc: the address must be unix:PATH, not {address}, because memory is shared only within a host",
                "Use HTTP",
            )
        _check_timeout(timeout_s)
        self._path, self._timeout_s = endpoint.path, timeout_s
        # Spinning is useful only if the server can run on another core at the same time.
        policy_ns = spin_policy_of(None, SPIN_NS).spin_ns if spin_ns is None else spin_ns
        self._spin_ns = policy_ns if LOADS_ARE_ORDERED else 0
        self._connection: _Connection | None = None
        self._lock = threading.Lock()
        self._last_id = random.getrandbits(32)

    def call(
        self,
        method_id: int,
        payload: Any,
        timeout_s: float | None = None,
        *,
        deadline_s: float | None = None,
        is_idempotent: bool = False,
    ) -> Answer:
        """Make one call, and return the answer with the method that computed it.

        The client waits for a server that is not running yet, with growing pauses. A call that the server may have
        received is repeated only if `is_idempotent` is true.

        The server does not begin a call after its deadline. It replies TOO_LATE as soon as it predicts that the call
        would be late. After the server has begun a call, the client waits until the timeout.

        Args:
            method_id: The method.
            payload: The bytes of any buffer, at most MAX_PAYLOAD_BYTES.
            timeout_s: Seconds for the whole call. None: `deadline_s` plus ANSWER_ROOM_S, or the client's timeout.
            deadline_s: Seconds within which the call must begin; None: the model's own deadline, at the server.
            is_idempotent: Whether the call may be executed twice.

        Raises:
            CallFailed: The server returned an error, or the call was not sent before its deadline (TOO_LATE).
            CallTimedOut: No reply came in time.
            Disconnected: The server ended, or violated the protocol.
        """
        # Copy the payload, so that the caller's buffer may change while the call waits for its turn.
        data = bytes(memoryview(payload))
        if len(data) > MAX_PAYLOAD_BYTES:
            raise InvalidRequest(
                f"rpc: a call must have at most {MAX_PAYLOAD_BYTES} bytes, not {len(data)}", "Use HTTP for more"
            )
        if deadline_s is not None and not (is_number(deadline_s) and deadline_s > 0):
            raise InvalidRequest(f"rpc: a deadline must be a number of seconds above 0, not {quoted(deadline_s)}")
        if timeout_s is not None:
            _check_timeout(timeout_s)
        span = _Span.of(self._timeout_s if timeout_s is None and deadline_s is None else timeout_s, deadline_s)
        # Calls take turns, because the shared memory has room for one request and one reply.
        if not self._lock.acquire(timeout=min(span.send_timeout_s(), threading.TIMEOUT_MAX)):
            raise _too_late("calls of other threads took until its deadline")
        try:
            return self._call(method_id, data, span, is_idempotent=is_idempotent)
        finally:
            self._lock.release()

    def describe(self) -> dict[str, Any]:
        """Return the server's models by name, with their methods' numbers and sizes in bytes."""
        try:
            description = json.loads(self.call(DESCRIBE, b"", is_idempotent=True).payload)
        except (ValueError, RecursionError):
            description = None
        if not isinstance(description, dict):
            raise Disconnected("rpc: the server does not list its methods")
        return description

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _call(self, method_id: int, data: bytes, span: "_Span", *, is_idempotent: bool) -> Answer:
        failures = 0
        cause: GpuLeaseError | None = None
        uncertain: GpuLeaseError | None = None
        while True:
            try:
                return self._try(method_id, data, span)
            except _NotReceived as error:
                # The server can't have received the call, so a retry is safe. Choose the error to raise in the end. The
                # error of an earlier attempt that may have been executed is the most important. The error of an attempt
                # that ran out of time is less informative than the error of an attempt before it.
                cause = uncertain or (cause if cause is not None and error.has_no_time else error.cause)
            # The reply may still come, so this connection can't be used for another call.
            except CallTimedOut:
                self._disconnect()
                raise
            except Disconnected as error:
                self._disconnect()
                if not is_idempotent:
                    raise
                # The server may have executed the call. It is repeated only because the caller allows that.
                cause = uncertain = error
            # Retry only while the call could still begin in time.
            left_s = span.send_timeout_s()
            if left_s <= 0:
                raise cause
            pause_s = back_off_s(failures, FIRST_BACKOFF_S, MAX_BACKOFF_S)
            time.sleep(min(left_s, pause_s * random.uniform(0.5, 1)))
            failures += 1

    def _try(self, method_id: int, data: bytes, span: "_Span") -> Answer:
        # Connect with the first call, and again after each connection that was lost.
        if self._connection is None:
            self._connection = _connected(self._path, span.wait_until_s)
        # Use a new id for each attempt, so that a late reply to an earlier one is recognised.
        self._last_id = self._last_id + 1 & _MAX_ID
        connection = self._connection
        left_ms = span.left_ms()
        try:
            # A failure before the bell is sent is harmless; after it the call may be executed.
            connection.ask(self._last_id, method_id, data, left_ms)
        except OSError as error:
            # The connection was closed before the bell was sent, and the server reads no request without a bell.
            self._disconnect()
            raise _NotReceived(_disconnected(self._path, error)) from None
        try:
            return connection.answer(self._last_id, span.wait_until_s, self._spin_ns)
        except OSError as error:
            raise _disconnected(self._path, error) from None

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


@dataclass(frozen=True, slots=True)
class _Span:
    """The limits of a call in monotonic seconds.

    Attributes:
        wait_until_s: The time until which the caller waits.
        begin_by_s: The time before which the call must begin; None without a deadline.
    """

    wait_until_s: float
    begin_by_s: float | None

    @classmethod
    def of(cls, timeout_s: float | None, deadline_s: float | None) -> Self:
        """Return the limits of a call that begins now. At least one of the arguments must be given."""
        now_s = time.monotonic()
        begin_by_s = None if deadline_s is None else now_s + deadline_s
        if timeout_s is not None:
            return cls(now_s + timeout_s, begin_by_s)
        return cls(now_s + (deadline_s or 0.0) + ANSWER_ROOM_S, begin_by_s)

    def send_timeout_s(self) -> float:
        """Return the seconds left for sending the call; 0 if none are left."""
        send_by_s = self.wait_until_s if self.begin_by_s is None else min(self.wait_until_s, self.begin_by_s)
        return max(0.0, send_by_s - time.monotonic())

    def left_ms(self) -> int:
        """Return the milliseconds left until the deadline; 0 without a deadline. Raises _NotReceived after it."""
        if self.begin_by_s is None:
            return 0
        left_ms = int((self.begin_by_s - time.monotonic()) * 1000)
        if left_ms <= 0:
            raise _NotReceived(_too_late("its deadline passed before it reached the server"))
        return min(left_ms, MAX_LEFT_MS)


def _check_timeout(timeout_s: float) -> None:
    if not is_number(timeout_s) and timeout_s != math.inf:
        raise InvalidRequest(f"rpc: a timeout must be a number of seconds, not {quoted(timeout_s)}")


def _too_late(reason: str) -> CallFailed:
    return CallFailed(CallError(CallErrorCode.TOO_LATE, f"{reason}; the call was not sent"))


class _NotReceived(Exception):
    """A call that the server cannot have received.

    Attributes:
        cause: The error for the caller.
        has_no_time: Whether the call's time ran out before the server accepted the connection.
    """

    def __init__(self, cause: GpuLeaseError, *, has_no_time: bool = False) -> None:
        super().__init__(str(cause))
        self.cause, self.has_no_time = cause, has_no_time


class _Connection:
    """A connection to the server, with the memory that it shares with this caller."""

    def __init__(self, sock: socket.socket, shared: MappedCall) -> None:
        self._sock, self._shared = sock, shared
        self._bell = select.poll()
        self._bell.register(sock, select.POLLIN)

    def ask(self, request_id: int, method_id: int, data: bytes, left_ms: int) -> None:
        """Write the request and ring the bell. Raises OSError if the server has closed the connection."""
        # The order matters: empty the reply's region first; `put` writes the request's status last.
        self._shared.reply.status = CallStatus.EMPTY
        self._shared.write_time_left(request_id, left_ms)
        self._shared.request.put(request_id, method_id, data, CallStatus.REQUEST_READY)
        with suppress(BlockingIOError):
            # A full socket means that the server has unread bells, so one more is not needed.
            self._sock.send(b"\0", socket.MSG_NOSIGNAL)

    def answer(self, request_id: int, deadline_s: float, spin_ns: int) -> Answer:
        """Wait for the reply and return it. Raises CallFailed, CallTimedOut, Disconnected, OSError."""
        # Poll the memory first: a fast model answers in less time than a sleep and a wake-up take.
        if not self._spin(spin_ns):
            self._sleep(deadline_s)
        reply = self._shared.reply
        # The server may change the memory at any time: copy the header once, and check its id, size and status.
        header = reply.header()
        if header.request_id != request_id or not header.fits or header.status not in _FINAL_STATUSES:
            raise Disconnected("rpc: the server's reply is invalid")
        # Copy the payload before giving the region back to the server.
        payload = reply.payload(header.payload_len)
        reply.status = CallStatus.EMPTY
        if header.status == CallStatus.RESPONSE_READY:
            return Answer(header.method_id, payload)
        if (error := CallError.from_bytes(payload)) is None:
            raise Disconnected("rpc: the server's error is invalid")
        raise CallFailed(error)

    def close(self) -> None:
        """Close the socket, which ends the call at the server, and unmap the memory."""
        self._sock.close()
        self._shared.close()

    def _spin(self, spin_ns: int) -> bool:
        if not spin_ns:
            return False
        # Poll only the status byte. Read the other bytes after the status has changed.
        reply, deadline = self._shared.reply, time.monotonic_ns() + spin_ns
        while time.monotonic_ns() < deadline:
            for _ in range(POLLS_PER_CLOCK):
                if reply.status:
                    return True
        return False

    def _sleep(self, deadline_s: float) -> None:
        """Sleep until the server has rung the bell and the reply is written."""
        while True:
            left_ms = (deadline_s - time.monotonic()) * 1000
            if left_ms <= 0 or not self._bell.poll(left_ms):
                raise CallTimedOut("rpc: the server did not reply in time; the call may have been executed")
            # Bells may be left over from replies that were found by polling, so check the reply itself.
            has_ended = not self._sock.recv(_BELLS_BYTES)
            if self._shared.reply.status:
                return
            # Check this after the reply, because a server that stops first replies and then closes.
            if has_ended:
                raise Disconnected("rpc: the server closed the connection; the call may have been executed")


_FINAL_STATUSES: Final = (CallStatus.RESPONSE_READY, CallStatus.ERROR)


def _disconnected(path: str, error: OSError) -> Disconnected:
    return Disconnected(f"rpc: the server at {path}: {error.strerror or error}", "Is `gpulease serve models` running?")


def _connected(path: str, deadline_s: float) -> _Connection:
    """Connect and map the shared memory. Raises _NotReceived."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        # 0 would mean a non-blocking socket, so at least a millisecond.
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        sock.connect(path)
        shared = _greeted(sock)
        sock.setblocking(False)
        return _Connection(sock, shared)
    except (OSError, ValueError) as error:
        sock.close()
        cause = error if isinstance(error, OSError) else OSError(str(error))
        raise _NotReceived(_disconnected(path, cause), has_no_time=isinstance(error, TimeoutError)) from None
    except BaseException:
        sock.close()
        raise


def _greeted(sock: socket.socket) -> MappedCall:
    """Receive the greeting, and map the memory that comes with it. Raises OSError or ValueError."""
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)
    # The greeting and the descriptor of the shared memory come in one message.
    data, rights, _, _ = sock.recvmsg(GREETING_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array("i")
    for level, kind, raw in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(raw[: len(raw) - len(raw) % descriptors.itemsize])
    if len(descriptors) == 1 and is_greeting(data):
        return MappedCall(descriptors[0])
    # The message is not a greeting: close all descriptors that came with it, so that none leaks.
    for fd in descriptors:
        os.close(fd)
    raise ConnectionResetError("it accepts no more callers" if not data else "it is not a model server of this version")
