"""The command ring: a session's two byte streams in memory that client and worker share.

A ring has one writer and one reader. Each owns a counter of all bytes it ever put in or took out; data lies at the
counter modulo the capacity. Whoever finds nothing to do says so in a word of its own, looks once more, and sleeps; the
other side finds the word set behind its next move and wakes it. All words are native u64, each in a cache line.

    at    word                     written by
    0     tail of the requests     the client
    64    head of the requests     the worker
    128   reader sleeps            the worker; cleared by whoever wakes it
    192   writer sleeps            the client; cleared by whoever wakes it
    256   the same for the replies, the sides exchanged
    4096  the requests' bytes, then the replies'

Order rests on x86-64: stores are seen in the order they were made (Intel SDM 3A, 9.2.2), so bytes are there before the
counter that announces them. Only a store and a later load of another word may change places; between them goes a
barrier, a locked instruction (9.2.3.9), for which any lock will do that is taken and given back.

Nothing in the memory is trusted: a word is read once, checked, and used from where it was read to.

What a client and a worker on one host agree to share, in the options of ATTACH and of its reply.

The client names what it can use, the worker what it gives; the memory's descriptors come beside the reply's first byte
(SCM_RIGHTS, unix(7)), in the order of `SharedMemory`. An option of another length is one that is not known: skipped.
"""

import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol, Self

from gpulease.protocol.errors import FramingError
from gpulease.protocol.primitives import Tlv

RING_VERSION: Final = 1
"""Of the layout above."""

DATA_AT: Final = 4096
"""Where the bytes begin: a page of their own for the words."""

MIN_RING_BYTES: Final = 4096
MAX_RING_BYTES: Final = 16 << 20
"""What a ring's capacity may be, a power of two. Stops a layout that would not fit, or wrap inside a word."""

PIECES_PER_RING: Final = 4
"""Into how many pieces a ring cuts what is larger than one, so that one is taken out while the next is put in."""

LOOKS_PER_CLOCK: Final = 16
"""Looks between two at the clock, which on some hosts takes as long."""

NO_DATA: Final = memoryview(bytearray())
"""For a frame whose end nobody wants elsewhere."""

_WORDS_PER_LINE: Final = 64 // 8
_TAIL, _HEAD, _READER_SLEEPS, _WRITER_SLEEPS = (line * _WORDS_PER_LINE for line in range(4))
_WORDS_PER_RING: Final = 4 * _WORDS_PER_LINE
_LAYOUT: Final = struct.Struct(">BII")


class Barrier(Protocol):
    """A lock nobody else uses: taking it and giving it back is a full barrier."""

    def acquire(self, blocking: bool = ..., /) -> bool:
        """Take it."""

    def release(self) -> None:
        """Give it back."""


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Both rings' capacities in bytes."""

    request_bytes: int
    reply_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of the memory that holds them."""
        return DATA_AT + self.request_bytes + self.reply_bytes

    def to_bytes(self) -> bytes:
        """As it is offered."""
        return _LAYOUT.pack(RING_VERSION, self.request_bytes, self.reply_bytes)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self | None:
        """As it was offered; None if it is of another version or makes no sense."""
        if len(data) != _LAYOUT.size:
            return None
        version, *sizes = _LAYOUT.unpack(data)
        if version != RING_VERSION or any(size & size - 1 for size in sizes):
            return None
        return cls(*sizes) if all(MIN_RING_BYTES <= size <= MAX_RING_BYTES for size in sizes) else None


class RingWriter:
    """The end that puts bytes in.

    Args:
        memory: All of the shared memory.
        ring: Which one: its first word, and its data's place and capacity.
        barrier: See the module.
        wake: Wakes the reader; may raise OSError if there is none any more.

    Attributes:
        tail: The counter of what was put in. Who moves the shared counter by other means moves this one too.
        head: The reader's, as it was when it was last looked at.
    """

    __slots__ = ("_acquire", "_capacity", "_data", "_lap", "_limit", "_release", "_wake", "_words", "head", "tail")

    def __init__(
        self, memory: memoryview, ring: tuple[int, int, int], barrier: Barrier, wake: Callable[[], object]
    ) -> None:
        first, data_at, self._capacity = ring
        self._words = memory[:DATA_AT].cast("Q")[first : first + _WORDS_PER_RING]
        self._data = memory[data_at : data_at + self._capacity]
        self._acquire, self._release = barrier.acquire, barrier.release
        self._wake = wake
        self.tail = self.head = 0
        # The counter up to which there is room in one piece, as far as was looked; where the data's start lies in it.
        self._limit = self._lap = 0

    def put(self, data: bytes | memoryview) -> int:
        """Put in as much as goes in one piece, and wake the reader if it sleeps; how many bytes went, 0 without room.

        Raises FramingError if the reader's counter makes no sense, OSError if it could not be woken.
        """
        size, tail = len(data), self.tail
        end = tail + size
        if end > self._limit:
            end = min(end, self._look_ahead())
            if end != tail + size:
                size = end - tail
                data = memoryview(data)[:size]
        at = tail - self._lap
        self._data[at : at + size] = data
        self.tail = self._words[_TAIL] = end
        self._see_to_reader()
        return size

    def put_whole(self, first: bytes | memoryview, second: bytes | memoryview = b"") -> bool:
        """Put in all of both, announced at once; False, and nothing is put in, if there is no room. Raises like put.

        So a frame is never half sent, wherever its sender is interrupted.
        """
        tail = self.tail
        middle = tail + len(first)
        end = middle + len(second)
        if end > self._limit and end > self._look_ahead():
            if end - tail > self.room():
                return False
            self._copy_in(tail, first)
            self._copy_in(middle, second)
        else:
            data, lap = self._data, self._lap
            data[tail - lap : middle - lap] = first
            if second:
                data[middle - lap : end - lap] = second
        self.tail = self._words[_TAIL] = end
        self._see_to_reader()
        return True

    def put_packed(self, layout: struct.Struct, a: Any, b: Any, c: Any, d: Any, e: Any) -> bool:
        """The same for a frame of five fields, packed where it belongs; False, too, if it does not fit in one piece.

        Named one by one, because a list of them would cost a third of the call.
        """
        tail = self.tail
        end = tail + layout.size
        if end > self._limit and end > self._look_ahead():
            return False
        layout.pack_into(self._data, tail - self._lap, a, b, c, d, e)
        words = self._words
        self.tail = words[_TAIL] = end
        try:
            self._acquire(False)
            self._release()
            if words[_READER_SLEEPS]:
                self._wake_reader()
        except BaseException as error:
            self._interrupted(error)
            raise
        return True

    def _copy_in(self, counter: int, data: bytes | memoryview) -> None:
        """Where there is room, around the ring's end."""
        at = counter & self._capacity - 1
        here = self._capacity - at
        view = memoryview(data)
        self._data[at : at + min(here, len(view))] = view[:here]
        if here < len(view):
            self._data[: len(view) - here] = view[here:]

    def _see_to_reader(self) -> None:
        try:
            self._acquire(False)
            self._release()
            if self._words[_READER_SLEEPS]:
                self._wake_reader()
        except BaseException as error:
            self._interrupted(error)
            raise

    def _interrupted(self, error: BaseException) -> None:
        """Bytes are in, and their writer may not have come to look whether the reader sleeps: wake it in any case."""
        if not isinstance(error, OSError):
            with suppress(OSError):
                self._wake()

    def _look_ahead(self) -> int:
        """Find out how far the data can go on in one piece of a bounded size."""
        room, tail = self.room(), self.tail
        self._lap = tail & -self._capacity
        self._limit = tail + min(room, self._capacity // PIECES_PER_RING, self._lap + self._capacity - tail)
        return self._limit

    def _wake_reader(self) -> None:
        self._words[_READER_SLEEPS] = 0  # first: once woken, it may say again that it sleeps
        try:
            self._wake()
        except OSError:
            self._words[_READER_SLEEPS] = 1  # nobody hears it: the next write finds out as well
            raise

    def room(self) -> int:
        """How many bytes fit now. Raises FramingError."""
        head = self._words[_HEAD]
        if not self.head <= head <= self.tail:
            raise FramingError(f"the ring's reader claims to be at {head}, not from {self.head} to {self.tail}")
        self.head = head
        return self._capacity - self.tail + head

    def doze(self) -> bool:
        """Say that this side waits for half of the ring to be free; False if it is already. Raises FramingError."""
        self._words[_WRITER_SLEEPS] = 1
        self._acquire(False)
        self._release()
        if self.room() * 2 < self._capacity:
            return True
        self.rise()
        return False

    def rise(self) -> None:
        """This side is awake."""
        self._words[_WRITER_SLEEPS] = 0

    def release(self) -> None:
        """Let go of the memory; nothing else may be called then."""
        self._words.release()
        self._data.release()


class RingReader:
    """The end that takes bytes out; see RingWriter for its arguments.

    Attributes:
        head: The counter of what was taken. Who moves the shared counter by other means moves this one too.
    """

    __slots__ = ("_barrier", "_capacity", "_data", "_wake", "_words", "head")

    def __init__(
        self, memory: memoryview, ring: tuple[int, int, int], barrier: Barrier, wake: Callable[[], object]
    ) -> None:
        first, data_at, self._capacity = ring
        self._words = memory[:DATA_AT].cast("Q")[first : first + _WORDS_PER_RING]
        self._data = memory[data_at : data_at + self._capacity]
        self._barrier = barrier
        self._wake = wake
        self.head = 0

    @property
    def has_bytes(self) -> bool:
        """Whether there seems to be something; what it is worth, `take` finds out."""
        return self._words[_TAIL] != self.head

    def look(self, times: int, least: int = 1) -> bool:
        """Whether there seem to be so many bytes at least, looked for so many times; see `has_bytes`."""
        words, tail = self._words, self.head + least
        for _ in range(times):
            if words[_TAIL] >= tail:
                break
        else:
            return False
        return True

    def take(self, into: memoryview) -> int:
        """Move what is there, as far as it fits, and wake the writer if it waits for room; how many bytes came.

        Raises FramingError if the writer's counter makes no sense. A writer that can't be woken is gone: what it wrote
        last can still be taken.
        """
        head = self.head
        there = self._words[_TAIL] - head
        if not there:
            return 0
        if not 0 < there <= self._capacity:
            raise FramingError(f"the ring's writer claims to be {there} bytes ahead; it holds {self._capacity}")
        size = min(there, len(into))
        at = head & self._capacity - 1
        end = at + size
        if end <= self._capacity:
            into[:size] = self._data[at:end]
        else:
            here = self._capacity - at
            into[:here] = self._data[at:]
            into[here:size] = self._data[: size - here]
        self.advance(size, there - size)
        return size

    def take_if(self, expected: bytes, into: memoryview = NO_DATA) -> bool:
        """Take all that is there if it begins with these bytes and what is behind them fills `into`; else nothing.

        What goes around the ring's end within `expected` is left to `take`.
        """
        size, at = len(expected) + len(into), self.head & self._capacity - 1
        data_at = at + len(expected)
        if self._words[_TAIL] - self.head != size or self._data[at:data_at] != expected:
            return False
        if into:
            here = self._capacity - data_at
            if here >= len(into):
                into[:] = self._data[data_at : data_at + len(into)]
            else:
                into[:here] = self._data[data_at:]
                into[here:] = self._data[: len(into) - here]
        self.advance(size, 0)
        return True

    def advance(self, size: int, left: int) -> None:
        """Count so many bytes as taken, and wake the writer if it waits for room and no more than `left` are in it."""
        words = self._words
        words[_HEAD] = self.head = self.head + size
        self._barrier.acquire(False)
        self._barrier.release()
        if words[_WRITER_SLEEPS] and left * 2 <= self._capacity:
            words[_WRITER_SLEEPS] = 0  # first: once woken, it may say again that it sleeps
            with suppress(OSError):
                self._wake()

    def doze(self) -> bool:
        """Say that this side waits for bytes; False if there are some already."""
        self._words[_READER_SLEEPS] = 1
        self._barrier.acquire(False)
        self._barrier.release()
        if not self.has_bytes:
            return True
        self.rise()
        return False

    def rise(self) -> None:
        """This side is awake."""
        self._words[_READER_SLEEPS] = 0

    def leave(self) -> None:
        """This side is going: the next write tries to wake it, and so finds out."""
        self._words[_READER_SLEEPS] = 1

    def release(self) -> None:
        """Let go of the memory; nothing else may be called then."""
        self._words.release()
        self._data.release()


def client_ends(
    memory: memoryview, layout: RingLayout, barriers: tuple[Barrier, Barrier], wake: Callable[[], object]
) -> tuple[RingReader, RingWriter]:
    """The client's ends: replies out, requests in."""
    requests, replies = _places(layout)
    return RingReader(memory, replies, barriers[0], wake), RingWriter(memory, requests, barriers[1], wake)


def worker_ends(
    memory: memoryview, layout: RingLayout, barriers: tuple[Barrier, Barrier], wake: Callable[[], object]
) -> tuple[RingReader, RingWriter]:
    """The worker's ends: requests out, replies in."""
    requests, replies = _places(layout)
    return RingReader(memory, requests, barriers[0], wake), RingWriter(memory, replies, barriers[1], wake)


def _places(layout: RingLayout) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    replies_at = DATA_AT + layout.request_bytes
    return (0, DATA_AT, layout.request_bytes), (_WORDS_PER_RING, replies_at, layout.reply_bytes)


MAX_DESCRIPTORS: Final = 2
"""One for each kind of `SharedMemory`."""

_U64: Final = struct.Struct(">Q")


class SharedMemory(IntEnum):
    """Types of the options."""

    RING = 1
    ARENA = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client asks for.

    Attributes:
        ring: Whether it can speak through a ring of this version.
        arena_bytes: How large an arena it wants at most; 0: none.
    """

    ring: bool = False
    arena_bytes: int = 0

    def to_options(self) -> tuple[Tlv, ...]:
        """As ATTACH carries it."""
        options = [Tlv(SharedMemory.RING, bytes([RING_VERSION]))] * self.ring
        if self.arena_bytes:
            options.append(Tlv(SharedMemory.ARENA, _U64.pack(self.arena_bytes)))
        return tuple(options)

    @classmethod
    def from_options(cls, options: Iterable[Tlv]) -> Self:
        """As ATTACH carried it."""
        values = {option.type: option.value for option in options}
        return cls(values.get(SharedMemory.RING) == bytes([RING_VERSION]), _number(values.get(SharedMemory.ARENA)))


@dataclass(frozen=True, slots=True)
class Given:
    """What a worker gives.

    Attributes:
        ring: The layout of the first descriptor's memory; None if it gives no ring.
        arena_bytes: Of the next descriptor's memory; 0 if it gives no arena.
    """

    ring: RingLayout | None = None
    arena_bytes: int = 0

    def to_options(self) -> tuple[Tlv, ...]:
        """As ATTACH's reply carries it."""
        options = [] if self.ring is None else [Tlv(SharedMemory.RING, self.ring.to_bytes())]
        if self.arena_bytes:
            options.append(Tlv(SharedMemory.ARENA, _U64.pack(self.arena_bytes)))
        return tuple(options)

    @classmethod
    def from_options(cls, options: Iterable[Tlv]) -> Self:
        """As ATTACH's reply carried it."""
        values = {option.type: option.value for option in options}
        ring = values.get(SharedMemory.RING)
        return cls(None if ring is None else RingLayout.from_bytes(ring), _number(values.get(SharedMemory.ARENA)))


def _number(value: bytes | None) -> int:
    return 0 if value is None or len(value) != _U64.size else int(_U64.unpack(value)[0])
