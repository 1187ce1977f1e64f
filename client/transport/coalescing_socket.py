"""A session's socket where there is no ring: small frames gather in an outbox and go to the kernel together.

A system call costs more than the rest of a launch. So the first frame that nobody waits for goes at once, and the
outbox keeps those right behind it. It is sent when it holds some kilobytes, with any frame that is waited for, or by
the flusher. The flusher is one thread for all sessions of the process. It looks every quarter of a millisecond while
there is anything to send, sleeps while there is not, and ends if it sleeps for long. So a launch is under way within
half a millisecond, whatever its caller does next. A caller that computes in Python alone keeps the flusher out for up
to Python's switch interval, 5 ms.

An interrupt anywhere, by Ctrl-C for example, loses no frame and sends none twice. A frame is in the outbox whole or not
at all, and the very call that sends notes how much the kernel took (`_Outbox`).
"""

import contextlib
import os
import select
import struct
import threading
import time
import weakref
from _thread import start_new_thread
from collections import deque
from typing import Any, Final

from gpulease.client.transport.channel import Asked, Channel, FrameWriter
from gpulease.client.transport.spin_policy import SpinPolicy
from gpulease.protocol.ring import NO_DATA

FLUSH_BYTES: Final = 8 << 10
"""Size at which the outbox is sent: between 4 and 16 KiB a launch costs the least, client and worker together."""

MAX_OUTBOX_BYTES: Final = 64 << 10
"""Most bytes that wait here for a peer that does not read; beyond it the caller waits, as for a full socket."""

FLUSH_PAUSE_S: Final = 250e-6
"""Pause between two rounds of the flusher."""

EMPTY_ROUNDS: Final = 8
"""Rounds without anything to send after which the flusher sleeps. Waking it costs the next launch a system call."""

IDLE_LIMIT_S: Final = 0.5
"""Longest sleep of the flusher before it ends. A session that nobody closed must not keep a thread."""

BLOCKED_PAUSE_S: Final = 2e-3
"""Pause of the flusher while every socket with something to send has no room."""

CLOSE_LIMIT_S: Final = 0.2
"""Longest wait of a close for its socket to take the rest. Stops a peer that never reads from holding up a program's
end."""


class _Outbox:
    """Bytes to send, and how many of them were sent.

    The call that sends also fills `counts`, in C, so that no interrupt comes between. One assignment replaces `counts`
    together with the bytes it counts.
    """

    __slots__ = ("counts", "data")

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.counts: list[int] = []


class CoalescingSocket(Channel):
    """A session's channel through a socket. It takes over the socket and the link of the channel that attached.

    Threads: the flusher sends the outbox, under the outbox's own lock. The session does all else, under its own lock.
    """

    def __init__(self, channel: Channel, spin: SpinPolicy) -> None:
        super().__init__(channel.sock, channel.address, channel.link)
        self._spin_policy = spin
        self._outbox = _Outbox(bytearray())
        self._is_first = True
        # The bytes that `ask` received and could not use, and those that the link had before.
        self._unfed: list[int] = []
        self._received = 0
        self.tail = 0
        # Re-entrant, because the garbage collector may come to close a session whose outbox is being flushed.
        self._lock = threading.RLock()
        _channels.add(self)

    @property
    def writer(self) -> FrameWriter:
        """The socket itself."""
        return self

    def put_whole(self, first: bytes | memoryview, second: bytes | memoryview = b"") -> bool:
        """Take over a frame, given in two parts; False if it is large, or the outbox is full."""
        frame = b"".join((first, second)) if second else first
        size = len(frame)
        if size >= FLUSH_BYTES:
            return False
        with self._lock:
            if self._is_first:
                self._is_first = False
                if not self._outbox.data:
                    self._put_first(frame)
                    return True
            before = len(self._settled())
            if before > MAX_OUTBOX_BYTES:
                return False
            is_due = before + size >= FLUSH_BYTES
            if not (before or is_due):
                _flusher.notice(self)
            self.tail += size
            self._outbox.data.extend(frame)
            if is_due:
                try:
                    self._flush()
                except OSError:
                    pass  # no peer: the next that waits for an answer finds out
                finally:
                    self._have_rest_sent()
        return True

    def _put_first(self, frame: bytes | memoryview) -> None:
        """Gather and flush one frame, in one piece: a launch that is waited for next takes this way."""
        outbox, size = self._outbox, len(frame)
        try:
            self.tail += size
            outbox.data.extend(frame)
            outbox.counts.extend(map(self.sock.send, (frame,)))
            if outbox.counts[0] == len(frame):
                self._outbox = _Outbox(bytearray())
        except OSError:
            pass  # no room, or no peer: the next that waits for an answer finds out
        finally:
            if self._outbox is outbox:
                _flusher.notice(self)

    def put_packed(self, layout: struct.Struct, a: Any, b: Any, c: Any, d: Any, e: Any) -> bool:
        """`put_whole` for a frame that is packed of five fields."""
        return self.put_whole(layout.pack(a, b, c, d, e))

    def spin(self) -> bool:
        """Look for bytes for a bounded time. Each look is a system call."""
        clock, policy = time.monotonic_ns, self._spin_policy
        until = clock() + policy.spin_ns
        while clock() < until:
            if self.pump():
                return True
            if policy.yields:
                os.sched_yield()
        return False

    def ask(self, request: bytes, reply: bytes, into: memoryview = NO_DATA, more_ns: int = 0) -> Asked:
        """Send a small request, together with the outbox, and look for its reply."""
        if not self._spin_policy.spin_ns:
            return Asked.NOT_SENT
        with self._lock:
            self._is_first = True
            if len(self._settled()) > MAX_OUTBOX_BYTES:
                return Asked.NOT_SENT
            self._outbox.data.extend(request)
            try:
                if not self._flush():
                    return Asked.UNANSWERED
            except OSError:
                return Asked.UNANSWERED  # no peer: whoever waits for the reply finds out
            finally:
                self._have_rest_sent()
        self._received = self.link.received
        room, size, whole = self.link.get_buffer(), len(reply), len(reply) + len(into)
        self._look_into(room, more_ns)
        if self._unfed == [whole] and room[:size] == reply:
            # Straight on: after an interrupt `into` is filled, or the link is fed.
            into[:] = room[size:whole]
            self._unfed = []
            return Asked.ANSWERED
        return Asked.UNANSWERED

    def _look_into(self, room: memoryview, more_ns: int) -> None:
        """Receive within a bounded time; `_unfed` gets the number of bytes from the very call that receives."""
        clock, policy, unfed = time.monotonic_ns, self._spin_policy, self._unfed
        receive, until = self.sock.recv_into, clock() + policy.spin_ns + more_ns
        while clock() < until:
            try:
                unfed.extend(map(receive, (room,)))
                return
            except BlockingIOError:
                if policy.yields:
                    os.sched_yield()
            except OSError:
                break  # the next look finds it again

    def feed(self) -> None:
        """Give the link the bytes that `ask` received and could not use."""
        unfed, link = self._unfed, self.link
        if unfed and link.received == self._received and unfed[0]:
            link.buffer_updated(unfed[0])
        self._unfed = []

    @property
    def has_unsent(self) -> bool:  # type: ignore[override]  # read only, here as there
        """True while the outbox has bytes, also sent ones that the next `push` drops."""
        return bool(self._outbox.data)

    def push(self, parts: deque[memoryview]) -> bool:
        """Send the outbox, then `parts`; small ones go together with it, so that no interrupt can cut them in two."""
        with self._lock:
            self._is_first = True
            if not self._outbox.data:
                return super().push(parts) if parts else True
            try:
                before = len(self._settled())
                if sum(map(len, parts)) < FLUSH_BYTES and before <= MAX_OUTBOX_BYTES:
                    return self._push_small(parts, before)
                if not self._flush():
                    return len(self._outbox.data) < before
            except OSError as error:
                self.drain(error)
                return False
            return super().push(parts) if parts else True

    def _push_small(self, parts: deque[memoryview], before: int) -> bool:
        has_parts = bool(parts)
        try:
            self._outbox.data.extend(b"".join(parts))
            parts.clear()
            self._flush()
        finally:
            self._have_rest_sent()
        return has_parts or len(self._outbox.data) < before

    def _have_rest_sent(self) -> None:
        if self._outbox.data:
            self._notice()

    def _notice(self) -> None:
        """Have the flusher send the outbox."""
        _flusher.notice(self)

    def close(self) -> None:
        """Send the outbox, if the socket takes it in time, and close the socket; again is harmless."""
        self.send_rest()
        super().close()
        _channels.discard(self)
        _flusher.ring()

    def send_rest(self) -> None:
        """Send the outbox, waiting for a bounded time."""
        until = time.monotonic() + CLOSE_LIMIT_S
        with contextlib.suppress(OSError, ValueError):
            while not self._flush_locked() and (left_s := until - time.monotonic()) > 0:
                room = select.poll()
                room.register(self.sock, select.POLLOUT)
                room.poll(left_s * 1000)

    # --- the flusher's and a fork's ---

    def flush_idle(self, pending: "set[CoalescingSocket]") -> bool:
        """Send the outbox; leave `pending` unless some is left. True if anything went."""
        if not self._lock.acquire(blocking=False):
            return False  # a thread of the session sends
        try:
            before = len(self._settled())
            if self._flush():
                pending.discard(self)
                self._is_first = True
            return len(self._outbox.data) < before
        except (OSError, ValueError):
            pending.discard(self)  # whose session it is finds out
            return False
        finally:
            self._lock.release()

    def before_fork(self) -> None:
        """Send the outbox, so that the child gets as little of it as possible."""
        with contextlib.suppress(OSError, ValueError):
            self._flush_locked()

    def after_fork(self) -> None:
        """In the child: leave the outbox to the parent, and the lock, which a thread of the parent's may have held."""
        self._lock = threading.RLock()
        self._outbox = _Outbox(bytearray())

    # --- under the lock ---

    def _flush_locked(self) -> bool:
        with self._lock:
            return self._flush()

    def _settled(self) -> bytearray:
        """The bytes to send, without those that were sent."""
        outbox = self._outbox
        if outbox.counts:
            self._outbox = outbox = _Outbox(outbox.data[sum(outbox.counts) :])
        return outbox.data

    def _flush(self) -> bool:
        """Send what the socket takes; True if nothing is left. Raises OSError if there is no peer."""
        data = self._settled()
        if not data:
            return True
        counts = self._outbox.counts
        try:
            counts.extend(map(self.sock.send, (data,)))
        except BlockingIOError:
            return False
        if counts[0] == len(data):
            self._outbox = _Outbox(bytearray())
            return True
        return not self._settled()


class _Flusher:
    """The thread that sends for all channels what nobody else sends in time."""

    def __init__(self) -> None:
        self._pending: set[CoalescingSocket] = set()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._is_awake = False
        self._begins_or_ends = threading.RLock()
        # The flusher's ident; 0 for none.
        self._thread = 0

    def notice(self, channel: CoalescingSocket) -> None:
        """Take note of a channel whose empty outbox is about to be filled, under its lock."""
        self._pending.add(channel)
        if not self._is_awake:
            self.ring()
            with self._begins_or_ends:
                if not self._thread:
                    self._begin()

    def ring(self) -> None:
        """Wake the flusher, if it sleeps."""
        with contextlib.suppress(RuntimeError):  # rung already
            self._bell.release()

    def _begin(self) -> None:
        # Not threading.Thread: an interrupt in its `start` can leave the new thread waiting for a lock for ever.
        # Where the interpreter ends already, no thread starts: closing the session sends what is left.
        with contextlib.suppress(RuntimeError):
            self._thread = start_new_thread(self._run, ())

    def _run(self) -> None:
        pause_s, is_idle = 0.0, False
        while self._goes_on(is_idle):
            is_idle = not self._bell.acquire(timeout=pause_s) and pause_s == IDLE_LIMIT_S
            self._is_awake = True
            empty_rounds = 0
            while empty_rounds < EMPTY_ROUNDS:
                time.sleep(FLUSH_PAUSE_S)
                empty_rounds = 0 if self._round() else empty_rounds + 1
            self._is_awake = False
            # A frame put in just now: its thread saw the flusher awake, and did not ring.
            pause_s = 0.0 if self._round() else BLOCKED_PAUSE_S if self._pending else IDLE_LIMIT_S

    def _goes_on(self, is_idle: bool) -> bool:
        with self._begins_or_ends:
            # Another thread is the flusher if the one who started this was interrupted before it could say so.
            if self._thread != threading.get_ident():
                return False
            if not self._pending and (is_idle or not _channels):
                self._thread = 0
            return self._thread != 0

    def _round(self) -> bool:
        return sum(channel.flush_idle(self._pending) for channel in tuple(self._pending)) > 0


_flusher = _Flusher()
_channels: "weakref.WeakSet[CoalescingSocket]" = weakref.WeakSet()


def _before_fork() -> None:
    for channel in list(_channels):
        channel.before_fork()


def _after_fork() -> None:
    global _flusher
    _flusher = _Flusher()
    for channel in list(_channels):
        channel.after_fork()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
