"""Events behind what is put in streams: how much has ended, told without a wait (CUDA driver API, cuEventQuery).

There are fewer of them than the driver lets launches wait, so a launch never blocks inside the driver, where nobody
could see how long the kernel before it has been running. Copies and waits for other streams are marked too: the time
that a stream takes for them is no kernel's.

The context's streams, and the order between them.

All are made not to synchronise with the driver's own default stream (CUDA driver API, cuStreamCreate,
CU_STREAM_NON_BLOCKING), so none has an order but its own and what is asked for here. A stream that is let go of is kept
for the next one that is wanted: what it holds then comes first there, which no rule forbids, and is waited for as ever.
"""

import time
from collections import deque
from typing import Any, Final

import pycuda.driver as cuda

from gpulease.daemon.drivers.cuda.memory import whole_pages
from gpulease.daemon.drivers.interface import Poll
from gpulease.protocol.limits import MAX_STREAMS

MAX_WAITING: Final = 512
"""Launches, copies and waits in flight, in all streams together. The driver blocks at about 1024."""

_SLEEP_S: Final = 2e-4


class _Marked:
    """What one stream holds: an event behind each thing that is not known to have ended, and whether it is a kernel."""

    __slots__ = ("ended", "waiting")

    def __init__(self) -> None:
        self.ended = 0
        self.waiting: deque[tuple[Any, bool]] = deque()


class Markers:
    """One event behind everything in any stream that is not known to have ended."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll
        self._marked: dict[int, _Marked] = {}
        self._spare: list[Any] = []
        self._count = 0

    def make_room(self) -> None:
        """Wait until one more may be put in a stream."""
        self._poll()
        while self._count >= MAX_WAITING and self._collect() >= MAX_WAITING:
            time.sleep(_SLEEP_S)
            self._poll()

    def add_kernel(self, number: int, stream: Any) -> None:
        """A launch was put in a stream. Raises cuda.Error."""
        self._add(number, stream, is_kernel=True)

    def add_other(self, number: int, stream: Any) -> None:
        """A copy or a wait was. Raises cuda.Error."""
        self._add(number, stream, is_kernel=False)

    def _add(self, number: int, stream: Any, *, is_kernel: bool) -> None:
        event = self._spare.pop() if self._spare else cuda.Event(cuda.event_flags.DISABLE_TIMING)
        event.record(stream)
        self._count += 1
        marked = self._marked.get(number)
        if marked is None:
            marked = self._marked[number] = _Marked()
        marked.waiting.append((event, is_kernel))

    def running(self) -> dict[int, int]:
        """See `Context.running`."""
        self._collect()
        return {
            number: marked.ended for number, marked in self._marked.items() if marked.waiting and marked.waiting[0][1]
        }

    def _collect(self) -> int:
        """Take back the events that were reached; how many were not."""
        try:
            for marked in self._marked.values():
                waiting = marked.waiting
                while waiting and waiting[0][0].query():
                    self._spare.append(waiting.popleft()[0])
                    marked.ended += 1
                    self._count -= 1
        except cuda.Error:
            # The context is lost, and its kernels with it; the next real call says so.
            self._marked.clear()
            self._count = 0
        return self._count


MAX_BEGUN_COPIES: Final = 256
"""Copies put in a stream without waiting for it. The driver blocks at about 1024 operations, where nobody could end the
wait."""

STREAM_BYTES: Final = 512 << 10
"""What a stream makes the driver take of the card, in pages that it keeps. Measured with 1 to 32 of them, each with
copies and kernels in it, on an H100 (driver 580.159), and exact: local memory is shared by all."""

_NON_BLOCKING: Final = 1


def streams_bytes(count: int) -> int:
    """What so many streams beside stream 0 take, with the two that are made with the first of them."""
    return whole_pages((count + 2) * STREAM_BYTES) if count else 0


class CopyTicket:
    """An event behind a copy."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_done(self) -> bool:
        """Whether the card has reached it; a lost context's card reads nothing more."""
        try:
            return bool(self._event.query())
        except cuda.Error:
            return True


class Streams:
    """By their numbers; 0 is always there.

    Attributes:
        selected: The number of the one that launches and copies go into.
    """

    def __init__(self, default: Any = None) -> None:
        """Args: default: Stream 0, if there is one already. Raises cuda.Error."""
        self._streams: list[Any] = [default or cuda.Stream(_NON_BLOCKING)]
        self._spare: list[int] = []
        self._mark: Any = cuda.Event(cuda.event_flags.DISABLE_TIMING)
        self._zeroed: Any = cuda.Event(cuda.event_flags.DISABLE_TIMING)
        self._zeroed_behind: Any = cuda.Event(cuda.event_flags.DISABLE_TIMING)
        # Fresh memory is zeroed here as soon as there are several: a kernel that runs in one must not hold up others.
        self._apart: Any = None
        # The same for memory that was freed: behind all that may still use it.
        self._behind: Any = None
        self._begun: dict[int, int] = {}
        self.selected = 0

    def __getitem__(self, number: int) -> Any:
        return self._streams[number]

    def __len__(self) -> int:
        """How many may hold something: those that were destroyed too."""
        return len(self._streams)

    def create(self) -> int:
        """One that holds nothing if there is one or one can be made. Raises cuda.Error."""
        for at, number in enumerate(self._spare):
            if self._streams[number].is_done():
                return self._spare.pop(at)
        if len(self._streams) > MAX_STREAMS:
            return self._spare.pop(0)
        if self._apart is None:
            self._apart, self._behind = cuda.Stream(_NON_BLOCKING), cuda.Stream(_NON_BLOCKING)
            self._apart.wait_for_event(self._zeroed)
            self.reuse_behind_all()
        stream = cuda.Stream(_NON_BLOCKING)
        stream.wait_for_event(self._zeroed)
        stream.wait_for_event(self._zeroed_behind)
        self._streams.append(stream)
        return len(self._streams) - 1

    def destroy(self, number: int) -> None:
        """It may be given out again."""
        self._spare.append(number)

    def wait(self, number: int, other: int) -> None:
        """What is put in one from now on comes after what the other holds now. Raises cuda.Error.

        One event does for all: a wait is for what was recorded when it was asked for, whatever is recorded later (CUDA
        driver API, cuEventRecord).
        """
        self._mark.record(self._streams[other])
        self._streams[number].wait_for_event(self._mark)

    def reuse_behind_all(self) -> None:
        """Used memory is zeroed from now on only behind what any stream holds now. Raises cuda.Error."""
        if self._behind is None:
            return  # it is zeroed in the one stream there is
        for stream in self._streams:
            self._mark.record(stream)
            self._behind.wait_for_event(self._mark)

    def zero(self, address: int, size_bytes: int, was_used: bool) -> list[int]:
        """Zero memory before what is put in any stream from now on, also in one that is made later.

        Gives the streams that wait for another. Raises cuda.Error.
        """
        apart, zeroed = (self._behind, self._zeroed_behind) if was_used else (self._apart, self._zeroed)
        cuda.memset_d8_async(address, 0, size_bytes, apart or self._streams[0])
        zeroed.record(apart or self._streams[0])
        if apart is None:
            return []
        for stream in self._streams:
            stream.wait_for_event(zeroed)
        return list(range(len(self._streams)))

    @property
    def is_full(self) -> bool:
        """Whether the selected one must be waited for before another copy is put in it and not waited for."""
        return self._begun.get(self.selected, 0) >= MAX_BEGUN_COPIES

    def began(self) -> None:
        """Such a copy was put in the selected one."""
        self._begun[self.selected] = self._begun.get(self.selected, 0) + 1

    def emptied(self, number: int) -> None:
        """One was waited for."""
        self._begun.pop(number, None)
