"""The command ring: a session's two byte streams in memory that client and worker share.

A ring has one writer and one reader. The writer counts all bytes that it has put in, and the reader all bytes that it
has taken out; data is at the counter modulo the capacity. A side that has nothing to do sets its sleep word, checks
again, and sleeps. The other side checks the word after each change of its counter, and wakes the sleeping side. All
words are native u64, each in its own cache line.

    at    word                     written by
    0     tail of the requests     the client
    8     awaited request          the client
    64    head of the requests     the worker
    128   reader sleeps            the worker; the side that wakes it clears it
    192   writer sleeps            the client; the side that wakes it clears it
    256   these words for the replies, with the sides exchanged
    264   answer to word 8         the worker
    4096  the requests' bytes, then the replies'

The memory order is x86-64's: a processor's stores become visible in program order (Intel SDM 3A, 9.2.2), so bytes are
there before the counter that announces them. Only a store and a later load of another word may be reordered. They are
separated by a barrier, a locked instruction (9.2.3.9); acquiring and releasing any lock is one.

Neither side trusts the memory: each reads a word once, checks the copy, and uses that copy.

If the worker offers SYNC_WORD, a sync needs no frame: see `SyncWords`.

A client and a worker on one host agree on the shared memory in the options of ATTACH and of its reply. The client names
the kinds of memory that it can use, and the worker those that it provides. The memory's descriptors come with the
reply's first byte (SCM_RIGHTS, unix(7)), in the order of `SharedMemory`. An option of another length counts as unknown
and is skipped.
"""

import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import IntEnum
from typing import Any, Final, Protocol, Self

from gpulease.protocol.errors import FramingError
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.primitives import Tlv
from gpulease.protocol.session_words import SESSION_WORDS_VERSION

RING_VERSION: Final = 1
"""The version of the layout above."""

DATA_AT: Final = 4096
"""The offset of the bytes. The words have their own page."""

MIN_RING_BYTES: Final = 4096
MAX_RING_BYTES: Final = 16 << 20
"""The bounds of a ring's capacity, a power of two. They stop a peer from announcing a layout that does not fit in
memory."""

PIECES_PER_RING: Final = 4
"""The pieces into which a ring cuts larger data, so that the reader takes one out while the writer puts in the next."""

READS_PER_CLOCK: Final = 16
"""How often to poll the ring between two reads of the clock. On some hosts reading the clock takes as long as polling
the ring."""

NO_DATA: Final = memoryview(bytearray())
"""The empty buffer for `take_if`, if no data follows the expected bytes."""

CHECK_BYTES: Final = 16 << 10
"""Number of bytes after which a writer checks that the reader still exists (`RingWriter`): about 130 launches. A check
takes half a microsecond."""

_WORDS_PER_LINE: Final = 64 // 8
_TAIL, _HEAD, _READER_SLEEPS, _WRITER_SLEEPS = (line * _WORDS_PER_LINE for line in range(4))
_WORDS_PER_RING: Final = 4 * _WORDS_PER_LINE
AWAITED: Final = 1
"""The index of the word that a sync uses (`SyncWords`), in the words of the requests and in those of the replies."""

_AWAITED: Final = AWAITED
_ANSWER: Final = _WORDS_PER_RING + AWAITED
_LAYOUT: Final = struct.Struct(">BII")


class Barrier(Protocol):
    """A lock that is used only for this. Acquiring and releasing it is a full memory barrier."""

    def acquire(self, blocking: bool = ..., /) -> bool: ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RingLayout:
    """The capacities in bytes of both rings, each a power of two from MIN_RING_BYTES to MAX_RING_BYTES."""

    request_bytes: int
    reply_bytes: int

    @property
    def total_bytes(self) -> int:
        """The size of the memory: the page of words, then the bytes of both rings."""
        return DATA_AT + self.request_bytes + self.reply_bytes

    def to_bytes(self) -> bytes:
        """The value of the option RING: version and both capacities."""
        return _LAYOUT.pack(RING_VERSION, self.request_bytes, self.reply_bytes)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self | None:
        """Return the layout of an option's value; None for another version or for impossible sizes."""
        # Options of another length, version or size count as unknown, so a later version can change all three.
        if len(data) != _LAYOUT.size:
            return None
        version, *sizes = _LAYOUT.unpack(data)
        # A power of two has one bit: `counter & capacity - 1` is then the place in the ring.
        if version != RING_VERSION or any(size & size - 1 for size in sizes):
            return None
        return cls(*sizes) if all(MIN_RING_BYTES <= size <= MAX_RING_BYTES for size in sizes) else None


class RingWriter:
    """The side that puts bytes in.

    Args:
        memory: All of the shared memory.
        ring: The number of the ring's first word, and the offset and capacity of its data.
        barrier: The memory barrier that the module describes.
        wake: Wakes the reader; may raise OSError if the reader is gone.
        check_reader: Called at least once per CHECK_BYTES put in; may raise OSError if the reader is gone. A reader
            that was killed while it was awake is never woken, so without this check its end would be noticed only when
            the ring is full.

    Attributes:
        tail: The counter of bytes put in. Code that moves the shared counter by other means moves this one too.
        head: The reader's counter when this side last read it.
    """

    __slots__ = (
        "_acquire",
        "_capacity",
        "_check_reader",
        "_data",
        "_lap",
        "_limit",
        "_release",
        "_wake",
        "_words",
        "head",
        "tail",
    )

    def __init__(
        self,
        memory: memoryview,
        ring: tuple[int, int, int],
        barrier: Barrier,
        wake: Callable[[], object],
        check_reader: Callable[[], object] | None = None,
    ) -> None:
        # This ring's words, as native u64, and its data. Both are views of the shared memory.
        first, data_at, self._capacity = ring
        self._words = memory[:DATA_AT].cast("Q")[first : first + _WORDS_PER_RING]
        self._data = memory[data_at : data_at + self._capacity]
        self._acquire, self._release = barrier.acquire, barrier.release
        self._wake = wake
        self._check_reader = check_reader
        self.tail = self.head = 0
        # The counter up to which one piece has room, as last computed; and the counter at which this lap began.
        self._limit = self._lap = 0

    def put(self, data: bytes | memoryview) -> int:
        """Put in as much as fits in one piece, and wake the reader if it sleeps. Returns the number of bytes put in.

        Raises FramingError for an impossible reader's counter, OSError if the reader could not be woken.
        """
        size, tail = len(data), self.tail
        end = tail + size
        # Step 1: room for one piece. `_limit` was found earlier and needs no read of the shared counter.
        if end > self._limit:
            # No room there: read the reader's counter, and cut the piece to what fits, perhaps to nothing.
            end = min(end, self._piece_limit())
            if end != tail + size:
                size = end - tail
                data = memoryview(data)[:size]
        # Step 2: the bytes, then the counter that announces them, in this order.
        at = tail - self._lap
        self._data[at : at + size] = data
        self.tail = self._words[_TAIL] = end
        # Step 3: after the barrier, the check whether the reader sleeps.
        self._wake_if_asleep()
        return size

    def put_whole(self, first: bytes | memoryview, second: bytes | memoryview = b"") -> bool:
        """Put in both and announce them at once. If there is not enough room, put in nothing and return False.

        So an interrupted sender never leaves half a frame. Raises the errors of `put`.
        """
        # Both parts together must fit into the free space. Unlike a piece, they may wrap around the ring's end.
        tail = self.tail
        middle = tail + len(first)
        end = middle + len(second)
        if end > self._limit and end > self._piece_limit():
            if end - tail > self.room():
                return False
            self._copy_in(tail, first)
            self._copy_in(middle, second)
        # The usual case: both are before the ring's end, within the room that was found earlier.
        else:
            data, lap = self._data, self._lap
            data[tail - lap : middle - lap] = first
            if second:
                data[middle - lap : end - lap] = second
        self.tail = self._words[_TAIL] = end
        self._wake_if_asleep()
        return True

    def put_packed(self, layout: struct.Struct, a: Any, b: Any, c: Any, d: Any, e: Any) -> bool:
        """Put in a frame of five fields, packed in place. Returns False if it does not fit in one piece.

        The fields are separate parameters, because a list would cost a third of the call. Raises the errors of `put`.
        """
        # The hot path of launches: everything that it needs is in local variables, and nothing is allocated.
        tail = self.tail
        end = tail + layout.size
        if end > self._limit and end > self._piece_limit():
            return False
        layout.pack_into(self._data, tail - self._lap, a, b, c, d, e)
        words = self._words
        self.tail = words[_TAIL] = end
        try:
            # The barrier: the counter's store must be visible before the sleep word is read, or both sides could sleep.
            self._acquire(False)
            self._release()
            if words[_READER_SLEEPS]:
                self._wake_reader()
        except BaseException as error:
            self._interrupted(error)
            raise
        return True

    def _copy_in(self, counter: int, data: bytes | memoryview) -> None:
        """Copy data in, around the ring's end if need be; the caller has checked the room."""
        # The place of the counter in the ring, and how many bytes are between it and the ring's end.
        at = counter & self._capacity - 1
        first_bytes = self._capacity - at
        view = memoryview(data)
        self._data[at : at + min(first_bytes, len(view))] = view[:first_bytes]
        if first_bytes < len(view):
            self._data[: len(view) - first_bytes] = view[first_bytes:]

    def _wake_if_asleep(self) -> None:
        # As in `put_packed`: barrier, then the check; after an interruption, wake the reader in any case.
        try:
            self._acquire(False)
            self._release()
            if self._words[_READER_SLEEPS]:
                self._wake_reader()
        except BaseException as error:
            self._interrupted(error)
            raise

    def _interrupted(self, error: BaseException) -> None:
        """Wake the reader in any case: an exception may have come between the bytes and the check whether it sleeps."""
        # An OSError is the wake's own: the reader is gone, and a second wake would fail as well.
        if not isinstance(error, OSError):
            with suppress(OSError):
                self._wake()

    def _piece_limit(self) -> int:
        """Return the counter up to which one piece of bounded size has room."""
        room, tail = self.room(), self.tail
        # The counter at which this lap of the ring began, so that `tail - lap` is the place of the next byte.
        self._lap = tail & -self._capacity
        # A piece ends at the room's end, at a quarter of the ring, or at the ring's end, whichever comes first.
        limit = tail + min(room, self._capacity // PIECES_PER_RING, self._lap + self._capacity - tail)
        if self._check_reader is not None:
            self._check_reader()
            # The reader need not be checked again before a smaller piece; before a larger one, it is checked each time.
            self._limit = min(limit, tail + CHECK_BYTES)
        else:
            self._limit = limit
        return limit

    def _wake_reader(self) -> None:
        # Clear the word before the wake: the reader may set it again.
        self._words[_READER_SLEEPS] = 0
        try:
            self._wake()
        except OSError:
            self._words[_READER_SLEEPS] = 1  # the reader is gone: the next write fails as well
            raise

    def room(self) -> int:
        """Return how many bytes fit now. Raises FramingError."""
        head = self._words[_HEAD]
        # The reader's counter never goes back and never passes the writer's. Only a faulty peer writes any other value.
        if not self.head <= head <= self.tail:
            raise FramingError(f"the ring's reader claims to be at {head}, not from {self.head} to {self.tail}")
        self.head = head
        return self._capacity - self.tail + head

    def doze(self) -> bool:
        """Announce that this side will sleep until half of the ring is free. Returns False if that is already free.

        Raises FramingError.
        """
        # Announce first, then check again: if the reader makes room in between, it sees the word, or this side sees the
        # room.
        self._words[_WRITER_SLEEPS] = 1
        self._acquire(False)
        self._release()
        # Half the ring must be free: a reader that wakes the writer for every byte would cost more than it gains.
        if self.room() * 2 < self._capacity:
            return True
        self.rise()
        return False

    def rise(self) -> None:
        """Announce that this side is awake and checks for room itself, so that the reader need not wake it."""
        self._words[_WRITER_SLEEPS] = 0

    def release(self) -> None:
        """Release the views of the memory. No other call may follow."""
        self._words.release()
        self._data.release()


class RingReader:
    """The side that takes bytes out. Its arguments are those of RingWriter.

    Attributes:
        head: The counter of bytes taken out. Code that moves the shared counter by other means moves this one too.
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
        """True if there seem to be bytes. The counter is unchecked; `take` checks it."""
        return self._words[_TAIL] != self.head

    def poll(self, times: int, least: int = 1) -> bool:
        """Read the unchecked counter up to `times` times. Returns whether at least `least` bytes seem to be there."""
        words, tail = self._words, self.head + least
        for _ in range(times):
            if words[_TAIL] >= tail:
                break
        else:
            return False
        return True

    def take(self, into: memoryview) -> int:
        """Take as many bytes as fit, and wake the writer if it waits for room. Returns the number of bytes.

        Raises FramingError for an impossible writer's counter. A writer that can't be woken is gone; its last bytes can
        still be taken.
        """
        # Check the writer's counter before using it: the other side can write any number at any time.
        head = self.head
        available = self._words[_TAIL] - head
        if not available:
            return 0
        if not 0 < available <= self._capacity:
            raise FramingError(f"the ring's writer claims to be {available} bytes ahead; it holds {self._capacity}")
        size = min(available, len(into))
        # The bytes may wrap around the end of the ring, and then need two copies.
        at = head & self._capacity - 1
        end = at + size
        if end <= self._capacity:
            into[:size] = self._data[at:end]
        else:
            first_bytes = self._capacity - at
            into[:first_bytes] = self._data[at:]
            into[first_bytes:size] = self._data[: size - first_bytes]
        self.advance(size, available - size)
        return size

    def take_if(self, expected: bytes, into: memoryview = NO_DATA) -> bool:
        """Take everything if it begins with `expected` and the rest fills `into` exactly. Returns whether it was taken.

        If `expected` would wrap around the ring's end, the bytes are left to `take`.
        """
        expected_bytes = len(into)
        size, at = len(expected) + expected_bytes, self.head & self._capacity - 1
        data_at = at + len(expected)
        # Compare without taking: bytes that are not the expected ones stay for `take`.
        if self._words[_TAIL] - self.head != size or self._data[at:data_at] != expected:
            return False
        # Until the head is stored there is no call in which an interruption could separate the copy from the counter.
        if expected_bytes:
            first_bytes = self._capacity - data_at
            if first_bytes >= expected_bytes:
                into[:] = self._data[data_at : data_at + expected_bytes]
            else:
                into[:first_bytes] = self._data[data_at:]
                into[first_bytes:] = self._data[: expected_bytes - first_bytes]
        words = self._words
        words[_HEAD] = self.head = self.head + size
        # The bytes are counted already; this only wakes a writer that waits for room.
        self.advance(0, 0)
        return True

    def advance(self, size: int, unread_bytes: int) -> None:
        """Count `size` bytes as taken, and wake a waiting writer if `unread_bytes` are at most half the ring."""
        words = self._words
        # Publish the counter, then the barrier, then check whether the writer sleeps: the reverse of the order in
        # `doze`.
        words[_HEAD] = self.head = self.head + size
        self._barrier.acquire(False)
        self._barrier.release()
        if words[_WRITER_SLEEPS] and unread_bytes * 2 <= self._capacity:
            # Clear the word before the wake: the writer may set it again.
            words[_WRITER_SLEEPS] = 0
            with suppress(OSError):
                self._wake()

    def doze(self) -> bool:
        """Announce that this side will sleep until bytes come. Returns False if there are some already."""
        # Announce first, then check again, as in `RingWriter.doze`.
        self._words[_READER_SLEEPS] = 1
        self._barrier.acquire(False)
        self._barrier.release()
        if not self.has_bytes:
            return True
        self.rise()
        return False

    def rise(self) -> None:
        """Announce that this side is awake and polls for bytes itself, so that the writer need not wake it."""
        self._words[_READER_SLEEPS] = 0

    def leave(self) -> None:
        """Announce that this side leaves, so that the peer notices when its next write fails to wake this side."""
        self._words[_READER_SLEEPS] = 1

    def release(self) -> None:
        """Release the views of the memory. No other call may follow."""
        self._words.release()
        self._data.release()


class SyncWords:
    """The client's side of two words by which it waits for all that it has sent, without a frame in either direction.

    Next to its tail, the client writes a request number that is higher than that of every request in the ring. A worker
    that is polling the ring answers in the replies' words once it has taken everything from the ring: with twice the
    number, plus one if all work of the session has succeeded. After the even number, or if no answer comes in time, the
    client sends SYNC.

    Args:
        memory: All of the shared memory.
        barrier: The barrier of the requests' writer, which the two use in turn.
    """

    __slots__ = ("_acquire", "_release", "_words")

    def __init__(self, memory: memoryview, barrier: Barrier) -> None:
        self._words = memory[:DATA_AT].cast("Q")
        self._acquire, self._release = barrier.acquire, barrier.release

    def ask(self, number: int) -> bool:
        """Write the number. Returns False if the worker sleeps, so that no answer will come."""
        # The number, the barrier, then the check whether the worker sleeps: as for bytes that are put in.
        words = self._words
        words[_AWAITED] = number
        self._acquire(False)
        self._release()
        return not words[_READER_SLEEPS]

    def poll(self, number: int, times: int) -> bool | None:
        """Read the answer up to `times` times: whether all work has succeeded; None if the answer has not come."""
        words, succeeded = self._words, 2 * number + 1
        for _ in range(times):
            # Each answer contains the request's number, so an old answer is not mistaken for this one.
            answer = words[_ANSWER]
            if answer == succeeded:
                return True
        return False if answer == succeeded - 1 else None

    def release(self) -> None:
        """Release the view of the memory. No other call may follow."""
        self._words.release()


def client_ends(
    memory: memoryview,
    layout: RingLayout,
    barriers: tuple[Barrier, Barrier],
    wake: Callable[[], object],
    check_reader: Callable[[], object] | None = None,
) -> tuple[RingReader, RingWriter]:
    """Return the client's sides: the replies' reader and the requests' writer."""
    requests, replies = _places(layout)
    return RingReader(memory, replies, barriers[0], wake), RingWriter(memory, requests, barriers[1], wake, check_reader)


def worker_ends(
    memory: memoryview, layout: RingLayout, barriers: tuple[Barrier, Barrier], wake: Callable[[], object]
) -> tuple[RingReader, RingWriter]:
    """Return the worker's sides: the requests' reader and the replies' writer."""
    requests, replies = _places(layout)
    return RingReader(memory, requests, barriers[0], wake), RingWriter(memory, replies, barriers[1], wake)


def _places(layout: RingLayout) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    # In each place: the index of the ring's first word, the offset of its bytes, and its capacity.
    replies_at = DATA_AT + layout.request_bytes
    return (0, DATA_AT, layout.request_bytes), (_WORDS_PER_RING, replies_at, layout.reply_bytes)


MAX_DESCRIPTORS: Final = 3
"""Maximum number of descriptors with ATTACH's reply: one for each kind of `SharedMemory`."""

_U64: Final = struct.Struct(">Q")
_WORDS: Final = bytes([SESSION_WORDS_VERSION])


class SharedMemory(IntEnum):
    """The types of ATTACH's options about shared memory."""

    RING = 1
    ARENA = 2
    WORDS = 3


@dataclass(frozen=True, slots=True)
class SharedMemoryRequest:
    """The shared memory that a client asks for.

    Attributes:
        ring: Whether the client can use a ring of this version.
        arena_bytes: The largest arena that the client wants; 0 for none.
        words: Whether the client can use the session's words of this version (`session_words`).
    """

    ring: bool = False
    arena_bytes: int = 0
    words: bool = False

    def to_options(self) -> tuple[Tlv, ...]:
        """The options of an ATTACH: one for each kind of memory that the client requests."""
        options = [Tlv(SharedMemory.RING, bytes([RING_VERSION]))] * self.ring
        if self.arena_bytes:
            options.append(Tlv(SharedMemory.ARENA, _U64.pack(self.arena_bytes)))
        options += [Tlv(SharedMemory.WORDS, _WORDS)] * self.words
        return tuple(options)

    @classmethod
    def from_options(cls, options: Iterable[Tlv]) -> Self:
        """Return the request in an ATTACH's options."""
        values = {option.type: option.value for option in options}
        # An option that is missing, of another version or of another length counts as not requested.
        ring = values.get(SharedMemory.RING) == bytes([RING_VERSION])
        return cls(ring, _number(values.get(SharedMemory.ARENA)), values.get(SharedMemory.WORDS) == _WORDS)


@dataclass(frozen=True, slots=True)
class SharedMemoryGrant:
    """The shared memory that a worker provides.

    Attributes:
        ring: The layout of the first descriptor's memory; None without a ring.
        arena_bytes: The size of the next descriptor's memory; 0 without an arena.
        words: Whether the next descriptor is the page of the session's words.
    """

    ring: RingLayout | None = None
    arena_bytes: int = 0
    words: bool = False

    def to_options(self) -> tuple[Tlv, ...]:
        """The options of ATTACH's reply: one for each kind of memory provided, in the descriptors' order."""
        options = [] if self.ring is None else [Tlv(SharedMemory.RING, self.ring.to_bytes())]
        if self.arena_bytes:
            options.append(Tlv(SharedMemory.ARENA, _U64.pack(self.arena_bytes)))
        options += [Tlv(SharedMemory.WORDS, _WORDS)] * self.words
        return tuple(options)

    @classmethod
    def from_options(cls, options: Iterable[Tlv]) -> Self:
        """Return the shared memory in the options of ATTACH's reply."""
        values = {option.type: option.value for option in options}
        # A layout of another version counts as absent, as in `SharedMemoryRequest.from_options`.
        ring = values.get(SharedMemory.RING)
        layout = None if ring is None else RingLayout.from_bytes(ring)
        return cls(layout, _number(values.get(SharedMemory.ARENA)), values.get(SharedMemory.WORDS) == _WORDS)


def _number(value: bytes | None) -> int:
    # A number of another width counts as absent.
    return 0 if value is None or len(value) != _U64.size else int(_U64.unpack(value)[0])
