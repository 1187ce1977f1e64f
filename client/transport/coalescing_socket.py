"""A session's socket without a ring: small frames gather in an outbox and are sent together.

A system call costs more than the rest of a launch. So the first frame for which no caller waits is sent at once, and
the outbox gathers the frames that follow closely. The outbox is sent when it holds some kilobytes, together with any
frame that awaits a reply, or by the flusher.

The flusher is one thread for all sessions of the process. While there is anything to send, it runs every quarter of a
millisecond. Otherwise it sleeps, and after a long sleep it exits. So a launch is sent within half a millisecond,
whatever its caller does next. Only a caller that computes in pure Python delays the flusher, by up to Python's switch
interval of 5 ms.

An interrupt at any moment, for example by Ctrl-C, neither loses a frame nor sends one twice: a frame is in the outbox
completely or not at all, and the call that sends records how much the kernel accepted (`_Outbox`).
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

from gpulease.client.transport.channel import AskOutcome, Channel, FrameWriter
from gpulease.client.transport.spin_policy import SpinPolicy
from gpulease.protocol.ring import NO_DATA

FLUSH_BYTES: Final = 8 << 10
"""Size at which the outbox is sent. Between 4 and 16 KiB, a launch costs the client and the worker together the
least."""

MAX_OUTBOX_BYTES: Final = 64 << 10
"""Maximum number of bytes that the outbox holds for a peer that does not read. Beyond this limit the caller waits, as
for a full socket."""

FLUSH_PAUSE_S: Final = 250e-6
"""Pause between two rounds of the flusher."""

EMPTY_ROUNDS: Final = 8
"""Number of rounds with nothing to send after which the flusher sleeps. Waking it costs the next launch a system
call."""

IDLE_LIMIT_S: Final = 0.5
"""Longest sleep of the flusher before it exits, so that a session that is never closed does not keep a thread."""

BLOCKED_PAUSE_S: Final = 2e-3
"""Pause of the flusher while every socket with something to send has no room."""

CLOSE_LIMIT_S: Final = 0.2
"""How long `close` waits for the socket to accept the rest, so that a peer that never reads can't delay a program's
exit."""


class _Outbox:
    """Bytes to send, and how many of them were sent.

    The call that sends fills `counts`, too, in C, so that no interrupt can come in between. A single assignment
    replaces `counts` together with the bytes that it counts.
    """

    __slots__ = ("counts", "data")

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.counts: list[int] = []


class CoalescingSocket(Channel):
    """A session's channel through a socket. It takes over the socket and the link of the channel that attached.

    Threads: the flusher sends the outbox, under the outbox's own lock. The session does everything else, under its
    lock.
    """

    def __init__(self, channel: Channel, spin: SpinPolicy) -> None:
        super().__init__(channel.sock, channel.address, channel.link)
        self._spin_policy = spin
        self._outbox = _Outbox(bytearray())
        self._is_first = True
        # Whether the outbox may hold a frame that only waits for the next one (`put_with_next`).
        self._has_waiting = False
        # How many bytes `ask` received but did not use, and how many the link had received before.
        self._unused_counts: list[int] = []
        self._received = 0
        self.tail = 0
        # Re-entrant, because the garbage collector may close a session while its outbox is being flushed.
        self._lock = threading.RLock()
        _channels.add(self)

    @property
    def writer(self) -> FrameWriter:
        """This channel itself: `put_whole` and `put_packed` add to its outbox."""
        return self

    def put_whole(self, first: bytes | memoryview, second: bytes | memoryview = b"") -> bool:
        """Queue a frame, given in two parts. Returns False if it is large, or if the outbox is full."""
        frame = b"".join((first, second)) if second else first
        size = len(frame)
        # A large frame gains nothing from the outbox, and `send` does not copy it.
        if size >= FLUSH_BYTES:
            return False
        with self._lock:
            # Send the first frame after a pause at once, because perhaps no other follows.
            if self._is_first:
                self._is_first = False
                if not self._outbox.data:
                    self._put_first(frame)
                    return True
            # _settled() drops sent bytes, even those of a call that was interrupted after sending.
            before = len(self._settled())
            if before > MAX_OUTBOX_BYTES:
                return False
            is_due = before + size >= FLUSH_BYTES or self._has_waiting
            # Register the channel with the flusher before the outbox holds anything.
            if not (before or is_due):
                _flusher.notice(self)
            # No interrupt can come between these two statements (`transport.link`), so `tail` counts a frame exactly if
            # the outbox has it.
            self.tail += size
            self._outbox.data.extend(frame)
            if is_due:
                try:
                    self._flush()
                except OSError:
                    pass  # the peer is gone: the next operation that waits for a reply reports it
                finally:
                    self._schedule_rest()
        return True

    def put_with_next(self, frame: bytes) -> bool:
        """Queue a frame that is of use only to later ones: it is sent together with the next frame."""
        with self._lock:
            if len(self._settled()) + len(frame) >= FLUSH_BYTES:
                return self.put_whole(frame)
            self._has_waiting = True
            # As in `put_whole`, no interrupt can come between these two statements.
            self.tail += len(frame)
            self._outbox.data.extend(frame)
        return True

    def _put_first(self, frame: bytes | memoryview) -> None:
        """Queue and send one frame. Often the caller then waits for this launch."""
        # `tail` and the outbox change together, as in `put_whole`; the send itself stores how much was sent.
        outbox, size = self._outbox, len(frame)
        try:
            self.tail += size
            outbox.data.extend(frame)
            outbox.counts.extend(map(self.sock.send, (frame,)))
            # All of it was sent, so the outbox is empty again.
            if outbox.counts[0] == len(frame):
                self._outbox = _Outbox(bytearray())
        except OSError:
            pass  # no room, or the peer is gone: the next operation that waits for a reply reports it
        finally:
            # If part of the outbox is left, the flusher sends it.
            if self._outbox is outbox:
                _flusher.notice(self)

    def put_packed(self, layout: struct.Struct, a: Any, b: Any, c: Any, d: Any, e: Any) -> bool:
        """Queue a frame of five packed fields, as `put_whole` does."""
        return self.put_whole(layout.pack(a, b, c, d, e))

    def spin(self) -> bool:
        """Poll for bytes for a bounded time. Each poll is a system call."""
        clock, policy = time.monotonic_ns, self._spin_policy
        deadline_ns = clock() + policy.spin_ns
        # Receive until bytes come or the time is up. A YIELD session lets other threads use its core between two polls.
        while clock() < deadline_ns:
            if self.pump():
                return True
            if policy.yields:
                os.sched_yield()
        return False

    def ask(
        self,
        request: bytes,
        reply: tuple[bytes, bytes, bytes],
        into: memoryview = NO_DATA,
        more_ns: int = 0,
    ) -> AskOutcome:
        """Send a small request together with the outbox, and spin for its reply."""
        # Without spinning, the reply would always come too late here, so the general path is cheaper.
        if not self._spin_policy.spin_ns:
            return AskOutcome.NOT_SENT
        with self._lock:
            # The caller waits for this reply, so a burst of launches ends here.
            self._is_first = True
            if len(self._settled()) > MAX_OUTBOX_BYTES:
                return AskOutcome.NOT_SENT
            # The request and the frames before it go out in order, in one system call.
            self._outbox.data.extend(request)
            try:
                if not self._flush():
                    return AskOutcome.UNANSWERED
            except OSError:
                return AskOutcome.UNANSWERED  # the peer is gone: the wait for the reply reports it
            finally:
                self._schedule_rest()
        # Receive into the link's buffer, but count them there only if they are not the expected reply.
        self._received = self.link.received
        expected = b"".join(reply)
        room, size, total = self.link.get_buffer(), len(expected), len(expected) + len(into)
        self._poll_into(room, more_ns)
        if self._unused_counts == [total] and room[:size] == expected:
            # Make no call between these statements: after an interrupt, either `into` is filled or `feed` gives the
            # bytes to the link.
            into[:] = room[size:total]
            self._unused_counts = []
            return AskOutcome.ANSWERED
        return AskOutcome.UNANSWERED

    def _poll_into(self, room: memoryview, more_ns: int) -> None:
        """Receive for a bounded time. The call that receives stores the number of bytes in `_unused_counts`."""
        clock, policy, unfed = time.monotonic_ns, self._spin_policy, self._unused_counts
        receive, deadline_ns = self.sock.recv_into, clock() + policy.spin_ns + more_ns
        while clock() < deadline_ns:
            try:
                unfed.extend(map(receive, (room,)))
                return
            except BlockingIOError:
                if policy.yields:
                    os.sched_yield()
            except OSError:
                break  # the next receive raises it again

    def feed(self) -> None:
        """Give the link the bytes that `ask` received and did not use."""
        unfed = self._unused_counts
        if unfed and unfed[0]:
            self._received_before = self._received
            self._pass_on(unfed[0])
        self._unused_counts = []

    @property
    def has_unsent(self) -> bool:  # type: ignore[override]  # read-only; in Channel it is a plain attribute
        """True while the outbox has bytes, including sent ones that the next `push` drops."""
        return bool(self._outbox.data)

    def push(self, parts: deque[memoryview]) -> bool:
        """Send the outbox, then `parts`. Small parts are joined to the outbox, so that no interrupt can split them."""
        with self._lock:
            # The caller waits for this frame, or it is large, so the next quiet frame is the first of another burst.
            self._is_first = True
            if not self._outbox.data:
                return super().push(parts) if parts else True
            try:
                before = len(self._settled())
                # Add small parts to the outbox. It is sent whole, so an interrupt can't leave half a frame on the wire.
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
            # Keep this order: if an interrupt comes between the two, the whole request is still sent, with the outbox.
            self._outbox.data.extend(b"".join(parts))
            parts.clear()
            self._flush()
        finally:
            self._schedule_rest()
        return has_parts or len(self._outbox.data) < before

    def _schedule_rest(self) -> None:
        if self._outbox.data:
            self._notice()

    def _notice(self) -> None:
        _flusher.notice(self)

    def close(self) -> None:
        """Send the outbox, if the socket accepts it in time, and close the socket. Calling it twice is harmless."""
        self.send_rest()
        super().close()
        _channels.discard(self)
        _flusher.ring()

    def send_rest(self) -> None:
        """Send the outbox, waiting at most CLOSE_LIMIT_S."""
        deadline_s = time.monotonic() + CLOSE_LIMIT_S
        with contextlib.suppress(OSError, ValueError):
            while not self._flush_locked() and (left_s := deadline_s - time.monotonic()) > 0:
                # Poll for room, to give a peer that reads slowly the time that is left.
                room = select.poll()
                room.register(self.sock, select.POLLOUT)
                room.poll(left_s * 1000)

    # --- called by the flusher, and around forks ---

    def flush_idle(self, pending: "set[CoalescingSocket]") -> bool:
        """Send the outbox, and remove it from `pending` if nothing is left. Returns True if any bytes were sent."""
        # Never wait for a session: its thread flushes the outbox itself.
        if not self._lock.acquire(blocking=False):
            return False  # a thread of the session is sending
        try:
            # If everything is sent, the burst is over, and the next frame counts as a first frame.
            before = len(self._settled())
            if self._flush():
                pending.discard(self)
                self._is_first = True
            return len(self._outbox.data) < before
        except (OSError, ValueError):
            pending.discard(self)  # the session's next operation reports it
            return False
        finally:
            self._lock.release()

    def before_fork(self) -> None:
        """Send the outbox, so that the child inherits as little of it as possible."""
        with contextlib.suppress(OSError, ValueError):
            self._flush_locked()

    def after_fork(self) -> None:
        """In the child: leave to the parent the outbox, and the lock, which a thread of the parent may have held."""
        # The parent sends the content of its outbox, so the child must not send it again.
        self._lock = threading.RLock()
        self._outbox = _Outbox(bytearray())

    # --- under the lock ---

    def _flush_locked(self) -> bool:
        with self._lock:
            return self._flush()

    def _settled(self) -> bytearray:
        """Drop the bytes that were sent according to `counts`, and return the rest."""
        # Sent bytes are dropped only here, even those of a send that was interrupted after the kernel had taken them.
        outbox = self._outbox
        if outbox.counts:
            self._outbox = outbox = _Outbox(outbox.data[sum(outbox.counts) :])
        return outbox.data

    def _flush(self) -> bool:
        """Send what the socket accepts; True if nothing is left. Raises OSError if the peer is gone."""
        data = self._settled()
        self._has_waiting = False
        if not data:
            return True
        # The call itself stores how much was sent (`_Outbox`), so an interrupt can't lose the number.
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
    """The thread that sends the outboxes that no other thread sends in time."""

    def __init__(self) -> None:
        self._pending: set[CoalescingSocket] = set()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._is_awake = False
        self._thread_lock = threading.RLock()
        # Ident of the flusher's thread; 0 if there is none.
        self._thread = 0

    def notice(self, channel: CoalescingSocket) -> None:
        """Register a channel before its empty outbox is filled. The caller holds the channel's lock."""
        # List the channel first, then check the flusher's state: a flusher that is about to sleep does one more round,
        # and finds the channel.
        self._pending.add(channel)
        if not self._is_awake:
            self.ring()
            with self._thread_lock:
                if not self._thread:
                    self._begin()

    def ring(self) -> None:
        """Wake the flusher if it sleeps. Calling this twice is harmless."""
        with contextlib.suppress(RuntimeError):  # it was woken already
            self._bell.release()

    def _begin(self) -> None:
        # Not threading.Thread: an interrupt in its `start` can leave the new thread waiting for a lock forever. At
        # interpreter exit no thread can start: then closing the session sends the remaining bytes.
        with contextlib.suppress(RuntimeError):
            self._thread = start_new_thread(self._run, ())

    def _run(self) -> None:
        pause_s, is_idle = 0.0, False
        while self._continues(is_idle):
            # Sleep until a channel has something to send. A full sleep without any is a reason to exit.
            is_idle = not self._bell.acquire(timeout=pause_s) and pause_s == IDLE_LIMIT_S
            self._is_awake = True
            empty_rounds = 0
            # Stay awake through short gaps, because waking this thread costs the next launch a system call.
            while empty_rounds < EMPTY_ROUNDS:
                time.sleep(FLUSH_PAUSE_S)
                empty_rounds = 0 if self._round() else empty_rounds + 1
            self._is_awake = False
            # Do one more round: a thread that has just queued a frame may have found the flusher awake, and so did not
            # wake it.
            pause_s = 0.0 if self._round() else BLOCKED_PAUSE_S if self._pending else IDLE_LIMIT_S

    def _continues(self, is_idle: bool) -> bool:
        with self._thread_lock:
            # If `notice` was interrupted between starting a thread and storing its ident, another thread is now the
            # flusher.
            if self._thread != threading.get_ident():
                return False
            # If no session is left, or the thread has been idle for long, exit. notice() starts another thread.
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
    # The child has no flusher thread: threads do not survive a fork.
    _flusher = _Flusher()
    for channel in list(_channels):
        channel.after_fork()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
