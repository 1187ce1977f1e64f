"""A session's allocations, and copies to and from them whose bytes are on the wire."""

import mmap
from typing import Final

from gpulease.daemon.worker.desks import Desk, Holdings
from gpulease.daemon.worker.intake import Slots
from gpulease.daemon.worker.replies import empty, number
from gpulease.protocol.errors import BodyError
from gpulease.protocol.fastpath import HANDLE, MEM_ALLOC, MEM_READ, data_prefix, parse_fixed, parse_mem_write
from gpulease.protocol.framing import Frame
from gpulease.protocol.limits import DATA_CHUNK_BYTES, MAX_DATA_BYTES
from gpulease.protocol.messages import Handle, MemAlloc, MemRead

PINNED_FROM_BYTES: Final = 64 << 10
"""Replies with so much data or more are copied by the card where they are sent from."""

PINNED_BYTES: Final = DATA_CHUNK_BYTES + 4096
"""Of the memory for that: a reply of the advised size. Pinned memory stays, so what is larger goes another way."""


class MemoryDesk(Desk):
    """See Desk.

    Attributes:
        slots: Pinned memory that large writes may be received into.
    """

    def __init__(self, holdings: Holdings) -> None:
        super().__init__(holdings)
        self._staging = bytearray()
        self._pinned: memoryview | None = None
        self.slots = Slots(holdings.context)

    def alloc(self, frame: Frame) -> bytes:
        """MEM_ALLOC."""
        (size_bytes,) = parse_fixed(MEM_ALLOC, MemAlloc, memoryview(frame.payload))
        ledger = self._ledger
        ledger.check_alloc(size_bytes)
        address = self._context.mem_alloc(size_bytes, ledger.spare_bytes_beside(size_bytes), self._check_lease)
        ledger.add_allocation(address, size_bytes)
        self._count()
        return number(frame, address)

    def free(self, frame: Frame) -> bytes:
        """MEM_FREE."""
        (handle,) = parse_fixed(HANDLE, Handle, memoryview(frame.payload))
        self._ledger.check_allocation(handle)
        self._context.mem_free(handle, self._check_lease)
        self._ledger.remove_allocation(handle)
        self._count()
        return empty(frame)

    def write(self, frame: Frame) -> bytes:
        """MEM_WRITE."""
        handle, offset, data = parse_mem_write(memoryview(frame.payload))
        address = self._ledger.locate(handle, offset, len(data))
        if data:
            slot = self.slots.holding(data)
            if slot is None:
                self._context.mem_write(address, data, self._check_lease)
            elif frame.flags:
                slot.ticket = self._context.begin_write(address, data, self._check_lease)
            else:
                # Its answer is for all before it.
                self._context.write_pinned(address, data, self._check_lease)
        self._count_copy(len(data))
        return empty(frame)

    def read(self, frame: Frame) -> bytes | memoryview:
        """MEM_READ. The reply is this desk's own memory, void at the next read."""
        handle, offset, length = parse_fixed(MEM_READ, MemRead, memoryview(frame.payload))
        if length > MAX_DATA_BYTES:
            raise BodyError(f"{length} bytes in one MEM_READ; at most {MAX_DATA_BYTES} are allowed")
        address = self._ledger.locate(handle, offset, length)
        prefix = data_prefix(length, request_id=frame.request_id, session_id=frame.session_id)
        is_pinned = PINNED_FROM_BYTES <= length <= DATA_CHUNK_BYTES
        reply = self._room(len(prefix) + length, is_pinned=is_pinned)
        reply[: len(prefix)] = prefix
        if is_pinned:
            self._context.read_pinned(address, reply[len(prefix) :], self._check_lease)
        elif length:
            self._context.mem_read(address, reply[len(prefix) :], self._check_lease)
        self._count_copy(length)
        return reply

    def close(self) -> None:
        """Give the host back what was pinned; it is not any more."""
        self.slots.close()
        if self._pinned is not None:
            self._pinned.release()
            self._pinned_map.close()
            self._pinned = None

    def _room(self, nbytes: int, *, is_pinned: bool) -> memoryview:
        """This desk's memory for a reply."""
        if is_pinned:
            if self._pinned is None:
                self._pinned_map = mmap.mmap(-1, PINNED_BYTES)
                self._pinned = memoryview(self._pinned_map)
                self._context.pin(self._pinned)
            return self._pinned[:nbytes]
        if len(self._staging) < nbytes:
            self._staging = bytearray(nbytes)
        return memoryview(self._staging)[:nbytes]
