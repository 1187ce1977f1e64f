"""Copies of ordinary memory through slots in the session's arena, by threads where the host has cores for them.

One core copies 9 to 13 GB/s, on a host whose bus carries 55 GB/s. So a copy is divided into pieces, and a part of the
arena into slots, which are pinned once. While the card copies one slot, threads of this process fill the next slots for
a write, or empty them for a read. No data goes through the ring or the socket.

Pieces are requested in groups, of which only the last request has a reply. A reply costs both sides as much as a piece.

A write must not begin if the failure of an earlier operation was not reported yet. So a SYNC precedes a write's pieces.
The worker answers the SYNC while the first slots are filled.
"""

import ctypes
import os
import threading
from collections import deque
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

import numpy as np

from gpulease.client.core.exchange import receive, send
from gpulease.client.core.fast_request import FastRequest
from gpulease.client.core.operations import RequestPipeline
from gpulease.client.core.waits import Procedure
from gpulease.client.transport.arena import Arena
from gpulease.protocol import Failure, Opcode
from gpulease.protocol.fastpath import ARENA_COPY
from gpulease.protocol.framing import build_frame
from gpulease.protocol.messages import Body
from gpulease.protocol.opcodes import Flag

STAGED_FROM_BYTES: Final = 128 << 10
"""Minimum bytes of a staged copy. Fewer bytes are sent in a frame, which takes less time than the request for a slot.
"""

ONE_PIECE_BYTES: Final = 1 << 20
"""Maximum bytes of a copy in one piece and without threads. To wake threads would take as long as a part of the copy.
"""

SLOT_BYTES: Final = 2 << 20
"""Bytes of a slot, and so of a large copy's pieces. The request for a piece takes each side up to 40 us. A core copies
a piece in 200 us, and the card in 40 us."""

MIN_PIECE_BYTES: Final = 512 << 10
"""Minimum bytes of a piece. The request for a smaller one takes longer than its copy."""

MIN_PIECES: Final = 4
"""Minimum number of pieces of a copy, unless they would be too small. While one side copies the first or the last
piece, the other side is idle."""

SLOTS: Final = 8
"""Maximum number of pieces in progress. They take `SLOTS * SLOT_BYTES` of the arena, and so of the host's memory."""

WRITE_GROUP: Final = 2
READ_GROUP: Final = 1
"""Number of pieces per reply of a read. Each piece has a reply, after which its bytes can be used."""


class _Piece(NamedTuple):
    slot: int
    at: int
    nbytes: int


class Staging:
    """The slots of one session. Used under the session's lock."""

    def __init__(self, arena: Arena, operations: RequestPipeline, writes: FastRequest, reads: FastRequest) -> None:
        """Prepare; the slots are allocated on first use.

        Args:
            arena: The session's arena.
            operations: The session's operations.
            writes: Requests a copy in one piece to the card.
            reads: Requests a copy in one piece from the card.
        """
        self.operations = operations
        self._arena = arena
        self._writes, self._reads = writes, reads
        self._block: Any = None
        self._copiers: Copiers | None = None
        # Whether the worker may still use slots, because an operation was interrupted.
        self._is_unsettled = False

    @property
    def is_ready(self) -> bool:
        """True if the slots exist or could be allocated now; False if the arena has no room for them."""
        if self._block is None:
            self._block = self._arena.allocate(SLOTS * SLOT_BYTES)
        return self._block is not None

    @property
    def copiers(self) -> "Copiers":
        """The threads, which start with the first copy that needs them."""
        if self._copiers is None:
            self._copiers = Copiers()
        return self._copiers

    def close(self) -> None:
        """End the threads once they have finished the copies in progress."""
        copiers, self._copiers = self._copiers, None
        if copiers is not None:
            copiers.close()

    def write(self, handle: int, offset: int, data: memoryview) -> Procedure[None]:
        """Copy bytes to an allocation, from byte `offset` on."""
        yield from self._settle()
        source, slots = _address_of(data), self.slot_address(0)
        # One piece fits slot 0: copy it there, and send a single request.
        if len(data) <= ONE_PIECE_BYTES:
            ctypes.memmove(slots, source, len(data))
            yield from self._writes.do(self.request(handle, offset, _Piece(0, 0, len(data))))
            return
        copy = _StagedCopy(self, handle, offset, source, len(data))
        yield from self._run(copy, copy.write(), "mem_write")

    def read(self, handle: int, offset: int, into: memoryview) -> Procedure[None]:
        """Copy an allocation's bytes, from byte `offset` on, into memory here."""
        yield from self._settle()
        target, slots = _address_of(into), self.slot_address(0)
        if len(into) <= ONE_PIECE_BYTES:
            yield from self._reads.do(self.request(handle, offset, _Piece(0, 0, len(into))))
            ctypes.memmove(target, slots, len(into))
            return
        copy = _StagedCopy(self, handle, offset, target, len(into))
        yield from self._run(copy, copy.read(), "mem_read")

    def _settle(self) -> Procedure[None]:
        # The SYNC waits for everything that the worker still has to do with the slots.
        if self._is_unsettled:
            yield from self.operations.ask(Opcode.SYNC)
            self._is_unsettled = False

    def _run(self, copy: "_StagedCopy", pieces: Procedure[None], operation: str) -> Procedure[None]:
        # If this copy is interrupted, the next one must wait for a SYNC before it uses the slots.
        self._is_unsettled = True
        try:
            yield from pieces
            yield from copy.end_group()
        except BaseException:
            # Whatever the outcome, no thread may access the caller's memory after the return.
            self.close()
            raise
        self._is_unsettled = False
        copy.raise_failure(operation)

    def slot_address(self, slot: int) -> int:
        """A slot's address in this process, by its index."""
        return ctypes.addressof(self._block) + slot * SLOT_BYTES

    def request(self, handle: int, offset: int, piece: _Piece) -> bytes:
        """The body of the request to copy one piece."""
        place = self._arena.offset_of_address(self.slot_address(piece.slot))
        return ARENA_COPY.pack(handle, offset + piece.at, place, piece.nbytes)


class _StagedCopy:
    """A copy of several pieces in progress.

    In a write, a thread copies each piece into a slot, and then the worker is requested to copy the slot. The slot is
    free when the worker has replied. In a read, the piece is requested first, and a thread copies it after the reply.
    """

    def __init__(self, staging: Staging, handle: int, offset: int, address: int, nbytes: int) -> None:
        self._staging = staging
        self._operations = staging.operations
        self._attachment = staging.operations.attachment
        self._handle = handle
        self._offset = offset
        self._address = address
        self._nbytes = nbytes
        self._piece_bytes = min(SLOT_BYTES, max(MIN_PIECE_BYTES, -(-nbytes // MIN_PIECES)))
        self._started_bytes = 0
        # Slots that neither a thread nor the worker uses.
        self._free = deque(range(SLOTS))
        self._copying = 0
        # `_quiet`: the pieces requested since the last request with a reply. `_unacknowledged`: each request whose
        # reply has not come, with the pieces that the reply acknowledges.
        self._quiet: list[_Piece] = []
        self._unacknowledged: deque[tuple[int, list[_Piece]]] = deque()
        self._own_requests: list[int] = []
        self._failures: list[Failure] = []
        self._copiers = staging.copiers

    def write(self) -> Procedure[None]:
        """Fill slots, have the card copy them, reuse them."""
        # Each round does one thing. It lets the threads fill a free slot. If there is none, it requests the copy of a
        # filled slot. If there is none, it waits until the worker has copied a slot.
        fence = yield from self._ask(Opcode.SYNC, b"")
        while (piece := self._next(self._copiers.most)) or self._copying or self._unacknowledged:
            if piece:
                self._copy(self._staging.slot_address(piece.slot), self._address + piece.at, piece)
            elif self._copying:
                copied = self._end_copy()
                # Wait for the SYNC only now, after the first slots were filled.
                if fence:
                    yield from self._take(fence)
                    fence = 0
                if not self._failures:
                    is_last = self._started_bytes == self._nbytes and not self._copying
                    yield from self._ask_piece(Opcode.ARENA_WRITE, copied, WRITE_GROUP, is_last=is_last)
                self._free.extend(piece.slot for piece in self._take_acknowledged())
            else:
                self._free.extend(piece.slot for piece in (yield from self._await_acknowledged()))

    def read(self) -> Procedure[None]:
        """Have the card fill slots, empty them, reuse them."""
        # Each round does one thing. It requests a piece into a free slot. If there is none, it takes a slot that the
        # threads have emptied. If there is none, it waits for the worker. The threads empty slots that the card has
        # filled.
        while (piece := self._next(SLOTS)) or self._copying or self._unacknowledged:
            answered: Iterable[_Piece] = ()
            if piece:
                is_last = self._started_bytes == self._nbytes or not self._free
                yield from self._ask_piece(Opcode.ARENA_READ, piece, READ_GROUP, is_last=is_last)
                answered = self._take_acknowledged()
            elif self._copying >= self._copiers.most or not self._unacknowledged:
                self._free.append(self._end_copy().slot)
            else:
                answered = yield from self._await_acknowledged()
            for piece in answered if not self._failures else ():
                self._copy(self._address + piece.at, self._staging.slot_address(piece.slot), piece)

    def end_group(self) -> Procedure[None]:
        """After a failure, wait for the pieces that were requested without a reply, which may have failed too."""
        if self._quiet:
            yield from self._take((yield from self._ask(Opcode.SYNC, b"")))

    def raise_failure(self, operation: str) -> None:
        """Raise the first failure. It may be an earlier operation's, even though later pieces have succeeded."""
        self._operations.settle(self._failures[0] if self._failures else None, operation, self._own_requests)

    # --- slots ---

    def _next(self, most_copying: int) -> _Piece | None:
        """Start the next piece: return it with a free slot; None if none may start now."""
        if self._started_bytes == self._nbytes or not self._free or self._failures or self._copying >= most_copying:
            return None
        piece = _Piece(
            self._free.popleft(), self._started_bytes, min(self._piece_bytes, self._nbytes - self._started_bytes)
        )
        self._started_bytes += piece.nbytes
        return piece

    def _copy(self, target: int, source: int, piece: _Piece) -> None:
        self._copiers.copy(target, source, piece.nbytes, piece)
        self._copying += 1

    def _end_copy(self) -> _Piece:
        piece: _Piece = self._copiers.done()
        self._copying -= 1
        return piece

    # --- requests ---

    def _take_acknowledged(self) -> list[_Piece]:
        """Return the pieces that the worker has acknowledged, without waiting."""
        channel, pieces = self._attachment.channel, []
        # Replies come in the order of requests, so the first one without a reply ends the search.
        while self._unacknowledged:
            result = channel.link.take(self._unacknowledged[0][0])
            if result is None and channel.pump():
                result = channel.link.take(self._unacknowledged[0][0])
            if result is None:
                break
            self._note(result)
            pieces += self._unacknowledged.popleft()[1]
        return pieces

    def _await_acknowledged(self) -> Procedure[list[_Piece]]:
        """Wait until the worker acknowledges more pieces, and return them."""
        request_id, pieces = self._unacknowledged[0]
        yield from self._take(request_id)
        self._unacknowledged.popleft()
        return pieces

    def _take(self, request_id: int) -> Procedure[None]:
        self._note((yield from receive(self._attachment.channel, request_id, self._operations.deadline)))

    def _note(self, result: Body | Failure) -> None:
        if isinstance(result, Failure):
            self._failures.append(result)

    def _ask_piece(self, op: Opcode, piece: _Piece, group: int, *, is_last: bool) -> Procedure[None]:
        self._quiet.append(piece)
        # The body names the slot's offset in the arena, and the number of bytes.
        payload = self._staging.request(self._handle, self._offset, piece)
        # This request has a reply, which also acknowledges the quiet pieces before it.
        if is_last or len(self._quiet) >= group:
            request_id = yield from self._ask(op, payload)
            self._unacknowledged.append((request_id, self._quiet))
            self._quiet = []
        else:
            request_id = self._attachment.connection.next_request_id()
            self._own_requests.append(request_id)
            yield from self._send(op, payload, request_id, Flag.QUIET)

    def _ask(self, op: Opcode, payload: bytes) -> Procedure[int]:
        request_id = self._attachment.channel.link.expect(op)
        yield from self._send(op, payload, request_id)
        return request_id

    def _send(self, op: Opcode, payload: bytes, request_id: int, flags: int = 0) -> Procedure[None]:
        session_id = self._attachment.session_id
        frame = build_frame(op, payload, request_id=request_id, session_id=session_id, flags=flags)
        if not self._operations.put(frame):
            yield from send(self._attachment.channel, (frame,), self._operations.deadline)


def _address_of(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


# --- threads that copy ---

MAX_COPIERS: Final = 4
"""Maximum number of copying threads of a session: with four, an H100's host copies faster than the card fetches from
the worker."""

CORES_PER_COPIER: Final = 4
"""Cores that this process must have per thread. With fewer, the threads would take cores from the worker or the tenant.
"""

PART_BYTES: Final = 512 << 10
"""Bytes that a thread copies at a time, so that several threads share a piece."""

_Job = tuple[int, int, int, list[Any]]
"""Target address, source address, number of bytes, and a list that all parts of a copy share. The list has one item for
each part that is left: the copy's token, then None for the others."""

_COUNT: Final = min(MAX_COPIERS, len(os.sched_getaffinity(0)) // CORES_PER_COPIER)


class Copiers:
    """Copies memory, in threads where the host has cores for them, otherwise in the call.

    Attributes:
        most: Largest useful number of copies in progress.
    """

    def __init__(self, count: int = _COUNT) -> None:
        self.most = 4 if count else 1
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._done: SimpleQueue[Any] = SimpleQueue()
        # Use daemon threads, because a session that was never closed must not keep its program from exiting.
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs, self._done), name="gpulease-copier", daemon=True)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def copy(self, target: int, source: int, nbytes: int, token: Any) -> None:
        """Start to copy from one address to another; both must stay valid until `done` returns the token.

        The token must not be None.
        """
        if not self._threads:
            ctypes.memmove(target, source, nbytes)
            self._done.put(token)
            return
        # Cut it into parts. Each part removes an item from `tokens` when it is done; the last one gets the token.
        starts = range(0, nbytes, PART_BYTES)
        tokens = [token] + [None] * (len(starts) - 1)
        for at in starts:
            self._jobs.put((target + at, source + at, min(PART_BYTES, nbytes - at), tokens))

    def done(self) -> Any:
        """Wait until a copy is complete, and return its token.

        During the wait this thread copies too. To wake another thread, or to sleep, takes as long as the copy of one or
        two parts.
        """
        while self._done.empty():
            try:
                job = self._jobs.get_nowait()
            except Empty:
                break
            if job is not None:
                _do(job, self._done)
        return self._done.get()

    def close(self) -> None:
        """End the threads, after all copies that were started are complete."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._threads.clear()


def _work(jobs: "SimpleQueue[_Job | None]", done: "SimpleQueue[Any]") -> None:
    while (job := jobs.get()) is not None:
        _do(job, done)


def _do(job: _Job, done: "SimpleQueue[Any]") -> None:
    target, source, nbytes, tokens = job
    ctypes.memmove(target, source, nbytes)  # releases the interpreter's lock
    # A list's pop is atomic: exactly one thread, the one that copies the last part, gets the token.
    token = tokens.pop()
    if token is not None:
        done.put(token)
