"""Memory of the card that this process maps itself (CUDA driver API, "Virtual Memory Management").

Addresses are reserved first; then memory is allocated on the card in pieces, and each piece is mapped into reserved
addresses. So a piece can leave its addresses and another one can take its place. In this way regions end
(region_pages.py), and a parkable session leaves the card and returns to the same addresses (slice_pages.py).

Parking. All pieces are copied to host memory, one after another, unmapped and released. Until they return, changes are
made only to the records and to the copy: bytes that are dropped are zeroed in the copy, and mappings are only recorded.
The return takes new memory, maps it where the pieces were, and copies the bytes back.

Copying ahead. While nothing runs, the bytes of a session that stays on the card can be copied to host memory, one step
after another, so that a park has less left to copy. Every call that changes a piece, or what is mapped, makes that copy
void first. The caller knows when kernels and copies may have changed the bytes.

Lending. A session that moves to a card that can read this one's memory (a peer) leaves its bytes where they are: large
pieces are exported as descriptors, and the others are copied to host memory as by a park. The process on the other card
imports the pieces, maps them next to its own, and copies them from card to card; then it unmaps and closes them. It
need not see the card that they are on (H200, driver 580). This process keeps its pieces, unchanged, until it ends.

If the other card can't read this one's memory, all pieces are lent through a ring of buffers in host memory
(host/copy_ring.py) instead: this process copies them into the ring while the other one copies them out of it. Bytes
that return from unpinned host memory also go through a ring, which threads then fill.
"""

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from gpulease.daemon.drivers.cuda.memory import PAGE_BYTES
from gpulease.daemon.drivers.cuda.refused_memory import MemoryRefused
from gpulease.daemon.drivers.interface import PARK_STEP_BYTES, DriverError, ImageMismatch, PageMove, Poll
from gpulease.daemon.host.copy_ring import Batch, CopyRing, RingBroken, RingEnd, batches, run

OWN_STREAM: Final = 0
"""The driver's default stream. Only these pages use it, and the context's streams do not synchronise with it
(streams.py). It exists anyway: another stream would take memory of the card."""

LENT_BYTES: Final = 32 << 20
"""Minimum size in bytes of a piece that is made exportable. To make an exportable piece of 2 MiB takes 0.18 ms, not
0.06 ms, and to export and import it takes 0.3 ms. In that time, six such pieces can be copied to host memory (H200,
driver 580)."""

STEPS_AHEAD: Final = 4
"""Maximum number of steps of a copy in flight: enough that the bus never waits for the host, and few enough that a copy
that is given up ends within milliseconds."""

QUIET_STEPS: Final = 2
"""The same number while the session stays on the card: a request that takes or releases pages waits for these steps,
for at most 2.4 ms. While one is copied, the worker's loop may sleep for a millisecond."""

THREADS: Final = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
"""Threads that copy host memory into a ring. The driver copies memory that is not pinned in one thread, at 6 GB/s, and
pinning it first takes as long if another process has touched it (H200)."""

Wait = Callable[[Callable[[], bool], Poll], None]
"""Waits until its first argument returns true, and polls."""


@dataclass(slots=True, eq=False)
class Piece:
    """Memory that one call allocated on the card, and where it is mapped.

    Attributes:
        handle: The driver's handle; None while the piece is parked.
        mappings: Address and size of each mapping, from the piece's beginning; the first one maps all of it.
        saved_at: The position of its bytes in host memory while it is parked; the sum of the sizes of the pieces before
            it while it is lent.
        lent_fd: Descriptor of the piece of another process from which its bytes come; -1 without one.
        is_lent: Whether its bytes are in another process, which lends it by a descriptor or through a ring.
        zeroed_bytes: Bytes at its beginning that were zeroed since it was adopted, if it is lent.
    """

    size_bytes: int
    handle: Any
    mappings: list[tuple[int, int]] = field(default_factory=list)
    saved_at: int = 0
    lent_fd: int = -1
    is_lent: bool = False
    zeroed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Step:
    """A part of a piece to copy, and the position in host memory, or in what is lent, at which it ends."""

    target: int
    source: int
    size_bytes: int
    end: int


@dataclass(slots=True)
class _CopyAhead:
    """A copy of all pieces while they stay on the card.

    Attributes:
        host: The host memory.
        steps: The steps that have not begun.
        in_flight: The events after the steps that have begun.
    """

    host: memoryview
    steps: deque[_Step]
    in_flight: deque[Any]


class MappedPages:
    """The pieces of one context.

    Args:
        api: The driver API of cuda-bindings.
        failure: Makes the error of a failed call.
        wait: Waits for the card.

    Attributes:
        held_bytes: Bytes of all pieces, parked or not.
        is_broken: Whether a park or a return failed and left the session partly on the card and partly off it.
        is_lent: Whether the pieces were lent and have not changed since.
    """

    def __init__(self, api: Any, failure: Callable[[Any], DriverError], wait: Wait) -> None:
        self._api = api
        self._failure = failure
        self._wait = wait
        self._granule_bytes: int | None = None
        # The pieces, in the order in which they were taken, which is the order of their bytes in the host memory.
        self._pieces: dict[Piece, None] = {}
        self._host: memoryview | None = None
        self._ahead: _CopyAhead | None = None
        # Descriptors of another process's pieces that no piece here has yet.
        self._lent_fds: list[int] = []
        # The ring through which another process lends its pieces, and the list of these pieces.
        self._ring: CopyRing | None = None
        self._ring_pieces: list[Piece] = []
        # Mappings made since a return began.
        self._returning: list[tuple[int, int]] = []
        self._events: list[Any] = []
        # The arguments of the driver's calls that never change. Make them once, because each is an object with checked
        # fields.
        self._properties, self._lendable = _card_memory(api), _card_memory(api)
        self._lent_kind = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._lendable.requestedHandleTypes = self._lent_kind
        self._access = [_full_access(api)]
        self.held_bytes = 0
        self.is_broken = self.is_lent = False

    @property
    def granule_bytes(self) -> int:
        """The card's page size, if the driver can map pages; otherwise 0."""
        # Queried once. Pages of another size than PAGE_BYTES would not fit the bookkeeping.
        if self._granule_bytes is None:
            option = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            error, least_bytes = self._api.cuMemGetAllocationGranularity(self._properties, option)
            self._granule_bytes = 0 if error or PAGE_BYTES % int(least_bytes) else PAGE_BYTES
        return self._granule_bytes

    @property
    def is_parked(self) -> bool:
        return self._host is not None

    def free_bytes(self) -> int:
        """Return the card's free bytes (CUDA driver API, cuMemGetInfo)."""
        return int(self.check(self._api.cuMemGetInfo()))

    # --- one step each ---

    def reserve(self, size_bytes: int, at: int = 0) -> int:
        """Reserve addresses; return the first. `at`: the preferred address, which the driver may ignore."""
        return int(self.check(self._api.cuMemAddressReserve(size_bytes, PAGE_BYTES, at, 0)))

    def free_addresses(self, address: int, size_bytes: int) -> None:
        """Free reserved addresses. Nothing may be mapped there."""
        self.check(self._api.cuMemAddressFree(address, size_bytes))

    def take(self, size_bytes: int) -> Piece:
        """Allocate memory on the card. Raises MemoryRefused."""
        if self.is_parked:
            raise DriverError("the session is parked")
        self.forget_ahead()
        piece = Piece(size_bytes, self._create(size_bytes))
        self._pieces[piece] = None
        self.held_bytes += size_bytes
        self.is_lent = False
        return piece

    def map(self, piece: Piece, address: int, size_bytes: int) -> None:
        """Map the beginning of a piece into reserved addresses."""
        self.forget_ahead()
        if not self.is_parked:
            self.check(self._api.cuMemMap(address, size_bytes, 0, piece.handle, 0))
        piece.mappings.append((address, size_bytes))

    def allow(self, address: int, size_bytes: int) -> None:
        """Let kernels read and write the memory mapped there; required before its first use (cuMemSetAccess)."""
        if not self.is_parked:
            self._allow(address, size_bytes)

    def _allow(self, address: int, size_bytes: int) -> None:
        self.check(self._api.cuMemSetAccess(address, size_bytes, self._access, 1))

    def begin_zeroing(self, piece: Piece, address: int, size_bytes: int) -> None:
        """Begin to zero mapped bytes. `piece` is the piece that is mapped at `address`."""
        if self._host is not None:
            self._wipe(piece, min(size_bytes, piece.size_bytes))
            return
        self.forget_ahead()
        self.check(self._api.cuMemsetD8Async(address, 0, size_bytes, OWN_STREAM))

    def is_zeroed(self) -> bool:
        """Return whether all memsets and copies have ended. Raises the error that ended the context."""
        return self._has_ended(self._api.cuStreamQuery(OWN_STREAM))

    def _has_ended(self, answer: tuple[Any]) -> bool:
        """Return whether a query's result says that everything has ended. Raises the error that it reports."""
        if answer[0] == self._api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self.check(answer)
        return True

    def unmap(self, piece: Piece) -> None:
        """Undo all mappings of a piece. Each call of cuMemUnmap undoes one whole mapping.

        If a call fails, `mappings` still has those that remain.
        """
        self.forget_ahead()
        while piece.mappings:
            if not self.is_parked:
                self.check(self._api.cuMemUnmap(*piece.mappings[-1]))
            piece.mappings.pop()

    def release(self, piece: Piece) -> None:
        """Release a piece to the card. Its memory is free once no mapping is left."""
        self.forget_ahead()
        if piece.handle is not None:
            self.check(self._api.cuMemRelease(piece.handle))
        elif piece.is_lent:
            _close([piece.lent_fd] if piece.lent_fd >= 0 else [])
        else:
            self._wipe(piece, piece.size_bytes)
        del self._pieces[piece]
        self.held_bytes -= piece.size_bytes
        self.is_lent = False

    def drop(self, piece: Piece) -> None:
        self.unmap(piece)
        self.release(piece)

    # --- parking ---

    def park(self, host: memoryview, ready: Callable[[int], None], poll: Poll) -> PageMove:
        """Copy all pieces to `host`, which keeps the bytes, and release them. Nothing may be in progress.

        Args:
            host: At least `held_bytes`, and not used otherwise until the return.
            ready: Called before bytes of `host` up to its argument are used.
            poll: May raise to give up, which leaves everything as it was.
        """
        # Step 1: the copy. Until its end nothing has changed. What was copied ahead to this memory is copied already.
        began_ns = time.monotonic_ns()
        ahead, self._ahead = self._copy_ahead_to(host), None
        self._copy(ahead.steps, self._api.cuMemcpyDtoHAsync, ready, poll, ahead.in_flight)
        copied_ns = time.monotonic_ns()
        # Step 2: leave the card. If a call fails here, the session is half unmapped and can't continue.
        self.is_broken = True
        for piece in self._pieces:
            for address, size_bytes in piece.mappings:
                self.check(self._api.cuMemUnmap(address, size_bytes))
            self.check(self._api.cuMemRelease(piece.handle))
            piece.handle = None
        self._host, self.is_broken = host, False
        return PageMove(self.held_bytes, copied_ns - began_ns, time.monotonic_ns() - copied_ns)

    def copy_ahead(self, host: memoryview, end: int) -> bool:
        """Begin to copy the next steps of all pieces to `host`, before `end`, as `park` would; never wait for them.

        Returns whether everything is copied. Nothing may be in progress.
        """
        ahead = self._copy_ahead_to(host)
        while ahead.in_flight and self._is_copied(ahead.in_flight[0]):
            ahead.in_flight.popleft()
        while ahead.steps and ahead.steps[0].end <= end and len(ahead.in_flight) < QUIET_STEPS:
            self._begin_step(ahead.steps.popleft(), self._api.cuMemcpyDtoHAsync, ahead.in_flight)
        return not (ahead.steps or ahead.in_flight)

    def _copy_ahead_to(self, host: memoryview) -> _CopyAhead:
        """Return the copy to this host memory; a new one, of which nothing is copied, if there is none."""
        if self._ahead is None or self._ahead.host is not host:
            self.forget_ahead()
            self._place_all()
            steps = deque(self._steps_of(self._pieces, _start_of(host), is_out=True))
            self._ahead = _CopyAhead(host, steps, deque())
        return self._ahead

    @property
    def ahead_bytes(self) -> int:
        """Bytes whose copy ahead has begun."""
        if self._ahead is None:
            return 0
        return self.held_bytes - sum(step.size_bytes for step in self._ahead.steps)

    def forget_ahead(self) -> None:
        """Forget what was copied ahead. Afterwards nothing is written to that host memory."""
        ahead, self._ahead = self._ahead, None
        while ahead is not None and ahead.in_flight:
            self._await(ahead.in_flight.popleft(), _ignore)

    def _place_all(self) -> None:
        """Give each piece its place in a copy of all."""
        at = 0
        for piece in self._pieces:
            piece.saved_at, at = at, at + piece.size_bytes

    def can_lend(self) -> bool:
        # If a piece is mapped nowhere, it belongs to a region whose end failed.
        return all(piece.mappings for piece in self._pieces)

    def lend(self, most: int, host: memoryview, ready: Callable[[int], None], poll: Poll) -> list[int]:
        """Export the `most` largest pieces, and copy the others to `host`, for `adopt` in another process.

        Returns a descriptor of each exported piece, in their order, which the caller closes. `ready`, `poll`: as for
        `park`.
        """
        fds: list[int] = []
        kind = self._lent_kind
        self.forget_ahead()
        self._place_all()
        lent = self._lent_pieces(most)
        others = [piece for piece in self._pieces if piece not in lent]
        steps = self._steps_of(others, _start_of(host), is_out=True)
        self._copy(steps, self._api.cuMemcpyDtoHAsync, ready, poll)
        try:
            for piece in lent:
                fds.append(int(self.check(self._api.cuMemExportToShareableHandle(piece.handle, kind, 0))))
        except BaseException:
            _close(fds)
            raise
        self.is_lent = True
        return fds

    def fill_ring(self, ring: CopyRing) -> RingEnd:
        """Lend all pieces through a ring, for `adopt` in another process; return the end that fills it."""
        self.forget_ahead()
        self._place_all()
        self.is_lent = True
        return self._card_end(ring, list(self._pieces), fills=True)

    def adopt(self, host: memoryview, lent_fds: Sequence[int] = (), ring: CopyRing | None = None) -> None:
        """Enter the parked state, with the bytes of another process's pieces in `host`.

        Then call `adopt_piece` for each.

        Args:
            host: The host memory.
            lent_fds: What `lend` returned there, if that process has lent its pieces; call `assign_lent` after the last
                piece.
            ring: The ring that it fills, if it lends its pieces through one; call `assign_lent`, too.
        """
        self._host, self._lent_fds, self._ring = host, list(lent_fds), ring

    def assign_lent(self) -> None:
        """Assign to adopted pieces the lent ones that have their bytes.

        Raises ImageMismatch if there are too few pieces.
        """
        if self._ring is not None:
            # Sort the pieces as the other process does, which fills the ring in this order.
            self._ring_pieces, at = sorted(self._pieces, key=_saved_at), 0
            for piece in self._ring_pieces:
                if piece.saved_at != at:
                    raise ImageMismatch("its pieces of memory are not those that the ring is filled with")
                piece.is_lent, at = True, at + piece.size_bytes
            return
        lent = self._lent_pieces(len(self._lent_fds))
        if len(lent) != len(self._lent_fds):
            raise ImageMismatch(
                f"{len(self._lent_fds)} pieces of memory were lent, and it has {len(lent)} of that size"
            )
        for piece, fd in zip(lent, self._lent_fds, strict=True):
            piece.lent_fd, piece.is_lent = fd, True
        self._lent_fds = []
        # The bytes of the others are in the host memory.
        host_bytes = 0 if self._host is None else len(self._host)
        if any(not piece.is_lent and piece.saved_at + piece.size_bytes > host_bytes for piece in self._pieces):
            raise ImageMismatch("its host memory is too small")

    def _lent_pieces(self, most: int) -> list[Piece]:
        """Return the pieces to lend, in their order, if at most `most` can be lent: the largest ones."""
        able = [piece for piece in self._pieces if piece.size_bytes >= LENT_BYTES]
        return sorted(sorted(able, key=_largest_first)[:most], key=_saved_at)

    def adopt_piece(self, size_bytes: int, saved_at: int) -> Piece:
        """Enter a parked piece of another process, to be mapped. Raises ImageMismatch if its bytes are not in `host`.

        `saved_at`: The position of the bytes in `host`.
        """
        is_within = self._host is not None and saved_at <= len(self._host) - size_bytes
        if size_bytes <= 0 or saved_at < 0 or not (is_within or self._lent_fds or self._ring):
            raise ImageMismatch("its host memory is too small")
        piece = Piece(size_bytes, None, saved_at=saved_at)
        self._pieces[piece] = None
        self.held_bytes += size_bytes
        return piece

    def take_again(self) -> None:
        """Take memory for all parked pieces, and map it where they were. Raises MemoryRefused, having taken nothing."""
        try:
            for piece in self._pieces:
                piece.handle = self._create(piece.size_bytes)
                for address, size_bytes in piece.mappings:
                    self.check(self._api.cuMemMap(address, size_bytes, 0, piece.handle, 0))
                    self._returning.append((address, size_bytes))
            for address, size_bytes in self._runs():
                self._allow(address, size_bytes)
        except BaseException:
            self._undo_take()
            raise

    def copy_back(self, poll: Poll, *, is_pinned: bool = True) -> None:
        """Copy the bytes back after `take_again`. On a failure, release that memory; everything stays parked.

        `is_pinned`: Whether at least some of the host memory is pinned.
        """
        host = self._host
        if host is None:
            return
        try:
            # The bytes of lent pieces are not in the host memory.
            saved = [piece for piece in self._pieces if not piece.is_lent]
            if self._ring is not None:
                self._copy_from_ring(self._ring, poll)
            elif len(saved) < len(self._pieces):
                self._copy_lent(poll)
            if saved and (is_pinned or not self._copy_by_threads(saved, host, poll)):
                steps = self._steps_of(saved, _start_of(host), is_out=False)
                self._copy(steps, self._api.cuMemcpyHtoDAsync, _ignore_end, poll)
        except BaseException:
            self._undo_take()
            raise
        self._host = None
        self._returning.clear()

    def _copy_lent(self, poll: Poll) -> None:
        """Copy the bytes from the lent pieces, which are on another card, and then release these."""
        kind = self._lent_kind
        lent = [piece for piece in self._pieces if piece.is_lent]
        total_bytes = max(piece.saved_at + piece.size_bytes for piece in lent)
        start = self.reserve(total_bytes)
        mapped: list[tuple[int, int, Any]] = []
        try:
            # Step 1: map the lent pieces, each in its place of one range. The mapping keeps the memory, so the handle
            # is released at the end.
            for piece in lent:
                handle = self.check(self._api.cuMemImportFromShareableHandle(piece.lent_fd, kind))
                mapped.append((start + piece.saved_at, 0, handle))
                self.check(self._api.cuMemMap(start + piece.saved_at, piece.size_bytes, 0, handle, 0))
                mapped[-1] = (start + piece.saved_at, piece.size_bytes, handle)
                self._allow(start + piece.saved_at, piece.size_bytes)
            # Step 2: copy. Also zero the bytes of regions that ended in the meantime.
            steps = self._steps_of(lent, start, is_out=False)
            self._copy(steps, self._api.cuMemcpyDtoDAsync, _ignore_end, poll)
            self._zero_again(lent)
        finally:
            # Step 3: unmap and close them. Without that this process would hold memory of another card, so a call that
            # fails here leaves the context unusable.
            was_broken, self.is_broken = self.is_broken, True
            while mapped:
                address, size_bytes, handle = mapped.pop()
                if size_bytes:
                    self.check(self._api.cuMemUnmap(address, size_bytes))
                self.check(self._api.cuMemRelease(handle))
            self.free_addresses(start, total_bytes)
            self.is_broken = was_broken
        for piece in lent:
            _close([piece.lent_fd])
            piece.lent_fd, piece.is_lent, piece.zeroed_bytes = -1, False, 0

    def _zero_again(self, lent: Iterable[Piece]) -> None:
        """Zero what was zeroed while it was lent, for regions that ended, and wait for that and for all copies."""
        for piece in lent:
            if piece.zeroed_bytes:
                address = piece.mappings[0][0]
                self.check(self._api.cuMemsetD8Async(address, 0, piece.zeroed_bytes, OWN_STREAM))
        self._wait(self.is_zeroed, _ignore)

    # --- rings ---

    def _copy_from_ring(self, ring: CopyRing, poll: Poll) -> None:
        """Copy the bytes out of the ring that another process fills. Raises DriverError if it does not."""
        with self._pinned(ring):
            try:
                run([self._card_end(ring, self._ring_pieces, fills=False)], poll)
            except RingBroken as error:
                raise DriverError(f"the former worker does not send its pages: {error}") from None
        lent = [piece for piece in self._pieces if piece.is_lent]
        self._zero_again(lent)
        for piece in lent:
            piece.is_lent, piece.zeroed_bytes = False, 0
        self._ring, self._ring_pieces = None, []

    def _copy_by_threads(self, saved: Sequence[Piece], host: memoryview, poll: Poll) -> bool:
        """Copy pieces from host memory that is not pinned, through a ring that threads fill.

        Returns False, with nothing copied, if no memory can be pinned for it.
        """
        start = _start_of(host)
        here = [piece for piece in saved if piece.mappings]

        def fill(batch: Batch, buffer: int) -> None:
            for part in batch:
                source = start + here[part.item].saved_at + part.start
                ctypes.memmove(buffer + part.at, source, part.size_bytes)

        try:
            ring = CopyRing(is_shared=False)
        except OSError:
            return False
        try:
            with self._pinned(ring) as is_pinned, ThreadPoolExecutor(THREADS, "gpul-fill") as pool:
                if not is_pinned:
                    return False
                sizes = (piece.size_bytes for piece in here)
                threads = RingEnd(
                    ring,
                    batches(sizes),
                    lambda batch, buffer: pool.submit(fill, batch, buffer),
                    _has_filled,
                    fills=True,
                )
                run([threads, self._card_end(ring, here, fills=False)], poll)
        finally:
            ring.close()
        return True

    def _card_end(self, ring: CopyRing, pieces: Sequence[Piece], *, fills: bool) -> RingEnd:
        copy = self._api.cuMemcpyDtoHAsync if fills else self._api.cuMemcpyHtoDAsync

        def begin(batch: Batch, buffer: int) -> Any:
            for part in batch:
                # A region that has been released since then has no memory here.
                if (piece := pieces[part.item]) in self._pieces and piece.mappings:
                    address, place = piece.mappings[0][0] + part.start, buffer + part.at
                    target, source = (place, address) if fills else (address, place)
                    self.check(copy(target, source, part.size_bytes, OWN_STREAM))
            return self._record()

        return RingEnd(ring, batches(piece.size_bytes for piece in pieces), begin, self._is_copied, fills=fills)

    def _is_copied(self, event: Any) -> bool:
        if not self._has_ended(self._api.cuEventQuery(event)):
            return False
        self._events.append(event)
        return True

    @contextmanager
    def _pinned(self, ring: CopyRing) -> Iterator[bool]:
        """Pin a ring's buffers; yield whether the driver did."""
        address = ring.address(0)
        (error,) = self._api.cuMemHostRegister(address, len(ring.buffers), 0)
        try:
            yield not error
        finally:
            if not error:
                self.check(self._api.cuMemHostUnregister(address))

    def _undo_take(self) -> None:
        """Undo `take_again`: release the memory that it took. The session stays parked."""
        self.is_broken = True
        while self._returning:
            self.check(self._api.cuMemUnmap(*self._returning[-1]))
            self._returning.pop()
        for piece in self._pieces:
            if piece.handle is not None:
                self.check(self._api.cuMemRelease(piece.handle))
                piece.handle = None
        self.is_broken = False

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Yield address and size of each run of mappings without a gap. One call allows access to a whole run."""
        start = end = 0
        for address, size_bytes in sorted(self._returning):
            if address != end:
                if end:
                    yield start, end - start
                start = address
            end = address + size_bytes
        if end:
            yield start, end - start

    def _steps_of(self, pieces: Iterable[Piece], start: int, *, is_out: bool) -> Iterator[_Step]:
        """Yield the steps of a copy, of at most PARK_STEP_BYTES, which match the parts of host memory that are pinned.

        `start`: The address from which each piece's `saved_at` counts.
        """
        for piece in pieces:
            # A region whose end failed may have memory that is mapped nowhere, which nothing can read.
            if not piece.mappings:
                continue
            (address, _), done = piece.mappings[0], 0
            while done < piece.size_bytes:
                at = piece.saved_at + done
                end = min(piece.saved_at + piece.size_bytes, (at // PARK_STEP_BYTES + 1) * PARK_STEP_BYTES)
                target, source = (start + at, address + done) if is_out else (address + done, start + at)
                yield _Step(target, source, end - at, end)
                done += end - at

    def _copy(
        self,
        steps: Iterable[_Step],
        copy: Any,
        ready: Callable[[int], None],
        poll: Poll,
        in_flight: deque[Any] | None = None,
    ) -> None:
        """Copy these steps, and wait for them and for those that are in flight already."""
        in_flight = deque() if in_flight is None else in_flight
        try:
            for step in steps:
                # The host prepares this step while the card copies the previous ones.
                ready(step.end)
                self._begin_step(step, copy, in_flight)
                if len(in_flight) == STEPS_AHEAD:
                    self._await(in_flight.popleft(), poll)
        finally:
            # Wait even if the copy is given up: nothing may be written to the host memory after this call.
            while in_flight:
                self._await(in_flight.popleft(), lambda: None)

    def _begin_step(self, step: _Step, copy: Any, in_flight: deque[Any]) -> None:
        self.check(copy(step.target, step.source, step.size_bytes, OWN_STREAM))
        in_flight.append(self._record())

    def _record(self) -> Any:
        event = self._events.pop() if self._events else self.check(self._api.cuEventCreate(_DISABLE_TIMING))
        self.check(self._api.cuEventRecord(event, OWN_STREAM))
        return event

    def _await(self, event: Any, poll: Poll) -> None:
        self._wait(lambda: self._has_ended(self._api.cuEventQuery(event)), poll)
        self._events.append(event)

    def _wipe(self, piece: Piece, size_bytes: int) -> None:
        """Zero the beginning of a parked piece's bytes. The bytes of a lent piece are zeroed after they were copied."""
        if piece.is_lent:
            piece.zeroed_bytes = max(piece.zeroed_bytes, size_bytes)
        elif self._host is not None:
            ctypes.memset(_start_of(self._host) + piece.saved_at, 0, size_bytes)

    # --- the driver ---

    def _create(self, size_bytes: int) -> Any:
        properties = self._properties if size_bytes < LENT_BYTES else self._lendable
        return self.check(self._api.cuMemCreate(size_bytes, properties, 0))

    def check(self, answer: tuple[Any, ...]) -> Any:
        """Return the first value that a driver call returns. Raises the call's error."""
        # Out of memory may pass (refused_memory.py); every other error is the context's.
        error = answer[0]
        if error == self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryRefused("the card can't provide this memory now", hint="Free something, or request less.")
        if error:
            raise self._failure(error)
        return answer[1] if len(answer) > 1 else None


def _card_memory(api: Any) -> Any:
    """Describe memory of the one card that this process sees, as cuMemAlloc would give it."""
    memory = api.CUmemAllocationProp()
    memory.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    memory.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    memory.location.id = 0
    return memory


def _full_access(api: Any) -> Any:
    """Describe the card's access to such memory, for reading and writing."""
    access = api.CUmemAccessDesc()
    access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = 0
    access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _start_of(host: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(host))


def _saved_at(piece: Piece) -> int:
    return piece.saved_at


def _largest_first(piece: Piece) -> tuple[int, int]:
    return -piece.size_bytes, piece.saved_at


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _has_filled(filling: "Future[None]") -> bool:
    if not filling.done():
        return False
    filling.result()
    return True


def _ignore() -> None: ...


def _ignore_end(end: int) -> None: ...


_DISABLE_TIMING: Final = 2
"""CU_EVENT_DISABLE_TIMING."""
