"""A context's streams and the order between them, and events that show how much of each has ended.

Streams. Each is made not to synchronise with the driver's own default stream (CUDA driver API, cuStreamCreate,
CU_STREAM_NON_BLOCKING). So the only order between streams is what `CudaStreams` adds. A destroyed stream is kept, and
the next request for a stream gets it. The operations that it still holds then run before the new user's work. No rule
forbids that, and every wait for the stream also waits for them.

Markers. An event after each operation in a stream shows without a wait how much has ended (CUDA driver API,
cuEventQuery). `Markers` allows fewer operations in flight than the driver does, so a launch never blocks inside the
driver. If a launch blocked there, nothing could see how long the previous kernel has been running. Copies and waits for
other streams are marked too, because the time that they take does not count as a kernel's.
"""

import time
from collections import deque
from typing import Any, Final

import pycuda.driver as cuda

from gpulease.daemon.drivers.cuda.memory import whole_pages
from gpulease.daemon.drivers.interface import Poll
from gpulease.protocol.limits import MAX_STREAMS

MAX_BEGUN_COPIES: Final = 256
"""Maximum number of copies that are put in a stream before it is waited for. At about 1024 operations the driver itself
blocks, and that wait can't be ended."""

STREAM_BYTES: Final = 512 << 10
"""Bytes of the card that the driver takes for a stream, in pages that it keeps. This is exact, as measured on an H100
(driver 580.159) with 1 to 32 streams that each had copies and kernels: all streams share local memory."""

_NON_BLOCKING: Final = 1


def streams_bytes(count: int) -> int:
    """Return the bytes that `count` streams take in addition to stream 0.

    Includes the two internal streams that are made with the first additional one.
    """
    return whole_pages((count + 2) * STREAM_BYTES) if count else 0


class StreamTicket:
    """Work in progress in a stream, up to an event after it."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_done(self) -> bool:
        """Return whether the card has reached the event, or the context is lost: then it no longer uses host memory."""
        try:
            return bool(self._event.query())
        except cuda.Error:
            return True


class TimedEvent(StreamTicket):
    """An event that records its time.

    Attributes:
        event: The driver's event.
    """

    def __init__(self, event: Any) -> None:
        super().__init__(event)
        self.event = event


class CudaStreams:
    """A context's streams by their numbers; stream 0 always exists.

    Attributes:
        selected: The number of the stream that launches and copies go into.
    """

    def __init__(self, default: Any = None) -> None:
        """Raises cuda.Error.

        Args:
            default: Stream 0, if it exists already.
        """
        # A stream's number is its index in this list. A destroyed stream keeps its index.
        self._streams: list[Any] = [default or cuda.Stream(_NON_BLOCKING)]
        self._spare: list[int] = []
        # Three events: one for the order between streams, one after the zeroing of new memory, one after the zeroing of
        # used memory.
        self._mark: Any = cuda.Event(cuda.event_flags.DISABLE_TIMING)
        self._new_zeroed: Any = cuda.Event(cuda.event_flags.DISABLE_TIMING)
        self._used_zeroed: Any = cuda.Event(cuda.event_flags.DISABLE_TIMING)
        # As soon as there are several streams, new memory is zeroed in a stream of its own: a kernel that runs in one
        # stream must not delay the others.
        self._zeroing_new: Any = None
        # Memory that was used before is zeroed in another stream, after all work that may still use it.
        self._zeroing_used: Any = None
        # By stream: copies put in it since the last wait for it.
        self._copies_begun: dict[int, int] = {}
        self.selected = 0

    def __getitem__(self, number: int) -> Any:
        return self._streams[number]

    def __len__(self) -> int:
        """Return the number of streams that may hold something, destroyed ones included."""
        return len(self._streams)

    @property
    def handles(self) -> list[int]:
        """The CUstream of each stream; the index is the stream's number."""
        return [stream.handle for stream in self._streams]

    def create(self, *, has_zeroed: bool = False) -> int:
        """Return the number of a new stream, or of a destroyed one, preferably an empty one. Raises cuda.Error.

        Args:
            has_zeroed: Whether native code has zeroed memory in stream 0, the only stream, without an event after it.
        """
        if has_zeroed:
            self._used_zeroed.record(self._streams[0])
        # Prefer a destroyed stream that is empty. One that still works is used only at the limit.
        for at, number in enumerate(self._spare):
            if self._streams[number].is_done():
                return self._spare.pop(at)
        if len(self._streams) > MAX_STREAMS:
            return self._spare.pop(0)
        # The first additional stream: from now on zeroing needs streams of its own, and this one must wait for it.
        if self._zeroing_new is None:
            self._zeroing_new, self._zeroing_used = cuda.Stream(_NON_BLOCKING), cuda.Stream(_NON_BLOCKING)
            self._zeroing_new.wait_for_event(self._new_zeroed)
            self.reuse_behind_all()
        stream = cuda.Stream(_NON_BLOCKING)
        stream.wait_for_event(self._new_zeroed)
        stream.wait_for_event(self._used_zeroed)
        self._streams.append(stream)
        return len(self._streams) - 1

    def destroy(self, number: int) -> None:
        self._spare.append(number)

    def wait(self, number: int, other: int) -> None:
        """Order later work of `number` after the work that is in `other` now. Raises cuda.Error.

        One event is enough for all streams: a wait refers to the event's latest record when the wait was queued,
        and later records do not change it (CUDA driver API, cuEventRecord).
        """
        self._mark.record(self._streams[other])
        self._streams[number].wait_for_event(self._mark)

    def reuse_behind_all(self) -> None:
        """From now on zero used memory only after all operations that any stream holds now. Raises cuda.Error."""
        if self._zeroing_used is None:
            return  # There is one stream, and it zeroes the memory in order.
        # Record and wait in turn: each wait is for the record just made.
        for stream in self._streams:
            self._mark.record(stream)
            self._zeroing_used.wait_for_event(self._mark)

    def zero(self, address: int, size_bytes: int, was_used: bool) -> list[int]:
        """Zero memory before any operation that is queued from now on, even in streams that are created later.

        Returns the numbers of the streams that now hold a wait for it. Raises cuda.Error.
        """
        # New memory needs no ordering; used memory is zeroed after everything that may still use it.
        zeroing, zeroed = (self._zeroing_used, self._used_zeroed) if was_used else (self._zeroing_new, self._new_zeroed)
        cuda.memset_d8_async(address, 0, size_bytes, zeroing or self._streams[0])
        zeroed.record(zeroing or self._streams[0])
        # With a single stream its own order is enough.
        if zeroing is None:
            return []
        # Every stream waits for the memset, because any may get the memory next.
        for stream in self._streams:
            stream.wait_for_event(zeroed)
        return list(range(len(self._streams)))

    @property
    def is_full(self) -> bool:
        """Whether the selected stream must be waited for before another copy is begun in it."""
        return self._copies_begun.get(self.selected, 0) >= MAX_BEGUN_COPIES

    def count_copy(self) -> None:
        """Count a copy that is begun in the selected stream."""
        self._copies_begun[self.selected] = self._copies_begun.get(self.selected, 0) + 1

    def emptied(self, number: int) -> None:
        self._copies_begun.pop(number, None)


MAX_WAITING: Final = 512
"""Maximum number of launches, copies and waits in flight, in all streams. The driver blocks at about 1024."""

_SLEEP_S: Final = 2e-4


class _Marked:
    __slots__ = ("ended", "waiting")

    def __init__(self) -> None:
        self.ended = 0
        self.waiting: deque[tuple[Any, bool]] = deque()


class Markers:
    """Events of all streams, one after each operation that is not known to have ended."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll
        self._marked: dict[int, _Marked] = {}
        self._spare: list[Any] = []
        self._count = 0

    def make_room(self) -> None:
        """Wait until one more operation may be put in a stream."""
        # Poll even if there is room, so that a lease that has ended gets no further launch.
        self._poll()
        # First free the entries of operations that have ended. Sleep and poll again only if there are none.
        while self._count >= MAX_WAITING and self._collect() >= MAX_WAITING:
            time.sleep(_SLEEP_S)
            self._poll()

    def add_kernel(self, number: int, stream: Any) -> None:
        """Mark a launch that was put in a stream. Raises cuda.Error."""
        self._add(number, stream, is_kernel=True)

    def add_other(self, number: int, stream: Any) -> None:
        """Mark a copy or a wait that was put in a stream. Raises cuda.Error."""
        self._add(number, stream, is_kernel=False)

    def _add(self, number: int, stream: Any, *, is_kernel: bool) -> None:
        # Reuse events, because making one costs more than recording it.
        event = self._spare.pop() if self._spare else cuda.Event(cuda.event_flags.DISABLE_TIMING)
        event.record(stream)
        self._count += 1
        marked = self._marked.get(number)
        if marked is None:
            marked = self._marked[number] = _Marked()
        marked.waiting.append((event, is_kernel))

    def running(self) -> dict[int, int]:
        """Map each stream that runs a kernel now to the number of its operations that have ended."""
        self._collect()
        # The first event not reached is the stream's current operation.
        return {
            number: marked.ended for number, marked in self._marked.items() if marked.waiting and marked.waiting[0][1]
        }

    def _collect(self) -> int:
        """Take back the events that the card has reached; return the number of those that it has not."""
        try:
            for marked in self._marked.values():
                # A stream ends its operations in order, so the first that is not done ends the search.
                waiting = marked.waiting
                while waiting and waiting[0][0].query():
                    self._spare.append(waiting.popleft()[0])
                    marked.ended += 1
                    self._count -= 1
        except cuda.Error:
            # The context is lost, and its kernels with it; the next driver call reports that.
            self._marked.clear()
            self._count = 0
        return self._count
