"""The memory that one caller shares with its server: allocation, mapping, reads and writes.

**Which memory.** The server allocates 64 KiB for each connection and passes its descriptor. This memory must not be
part of a session's arena, which the lease's worker shares with the server: a descriptor gives access to the whole
arena, so each caller could read the other callers' requests, and change them while the worker uses them. Copying at
most 32 KiB from this memory to the arena takes a microsecond or two. The server's batches are in the arena
(`session.empty`), so no further copy is needed before the card reads them.

If the memory could shrink, SIGBUS would end a process that accesses it. So it is sealed (memfd_create(2), F_ADD_SEALS
of fcntl(2)), and the receiver checks the seals.
"""

import fcntl
import mmap
import os
import platform
from contextlib import suppress
from typing import Final, Self

from gpulease.protocol.rpc import (
    HEADER_BYTES,
    HEADER_FAST,
    MAX_PAYLOAD_BYTES,
    REPLY_AT,
    REQUEST_AT,
    SHARED_BYTES,
    STATUS_AT,
    TIME_LEFT_AT,
    TIME_LEFT_BYTES,
    CallHeader,
    CallStatus,
    TimeLeft,
)

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

LOADS_ARE_ORDERED: Final = platform.machine() == "x86_64"
"""Whether the rest of a reply can be read as soon as polling shows its status, without a bell; see `protocol.rpc`."""


class CallRegion:
    """The part of the shared memory that contains a request, or a reply."""

    def __init__(self, memory: memoryview, at: int) -> None:
        self._memory = memory[at : at + HEADER_BYTES + MAX_PAYLOAD_BYTES]

    @property
    def status(self) -> int:
        """The current status byte. It may have any value, because the peer can write it."""
        # A read of one byte is never torn.
        return self._memory[STATUS_AT]

    @status.setter
    def status(self, status: CallStatus) -> None:
        self._memory[STATUS_AT] = status

    def header(self) -> CallHeader:
        """Return the header. It is copied before it is parsed, so that the peer can't change it in between."""
        return CallHeader.from_bytes(bytes(self._memory[:HEADER_BYTES]))

    def payload(self, size_bytes: int) -> bytes:
        """Return a copy of `size_bytes` of the payload; at most MAX_PAYLOAD_BYTES, which `CallHeader.fits` checks."""
        return bytes(self._memory[HEADER_BYTES : HEADER_BYTES + size_bytes])

    def put(self, request_id: int, method_id: int, payload: bytes | memoryview, status: CallStatus) -> None:
        """Write payload and header, and the status last. Raises ValueError if the payload is too large."""
        size = len(payload)
        if size > MAX_PAYLOAD_BYTES:
            raise ValueError(f"{size} bytes do not fit in a region, which takes {MAX_PAYLOAD_BYTES}")
        memory = self._memory
        memory[HEADER_BYTES : HEADER_BYTES + size] = payload
        # Keep the old status until everything else is written. Until then, the protocol forbids the peer to change this
        # region.
        HEADER_FAST.pack_into(memory, 0, request_id, method_id, memory[STATUS_AT], size)
        memory[STATUS_AT] = status

    def release(self) -> None:
        """Release the view of the memory, so that the mapping can be closed."""
        self._memory.release()


class MappedCall:
    """The mapped memory of one connection.

    Attributes:
        request: The region that the caller writes.
        reply: The region that the server writes.
    """

    def __init__(self, fd: int) -> None:
        """Map the memory and close the descriptor. Raises OSError, or ValueError for a wrong size or missing seals."""
        try:
            # Check size and seals before mapping: only sealed memory is safe to touch.
            if os.fstat(fd).st_size != SHARED_BYTES or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise ValueError("the shared memory has another size, or may change it")
            self._map = mmap.mmap(fd, SHARED_BYTES)
        finally:
            os.close(fd)
        # The slices keep the map alive, so release the view of the whole.
        memory = memoryview(self._map)
        self.request, self.reply = CallRegion(memory, REQUEST_AT), CallRegion(memory, REPLY_AT)
        self._time_left = memory[TIME_LEFT_AT : TIME_LEFT_AT + TIME_LEFT_BYTES]
        memory.release()

    @classmethod
    def make(cls) -> tuple[Self, int]:
        """Allocate zeroed memory. Returns it, and a descriptor to pass on, which the caller must close."""
        fd = os.memfd_create("gpulease-rpc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, SHARED_BYTES)
            # Seal the memory before passing on the descriptor. F_SEAL_SEAL prevents further changes of the seals.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(os.dup(fd)), fd
        except BaseException:
            os.close(fd)
            raise

    def write_time_left(self, request_id: int, left_ms: int) -> None:
        """Write the milliseconds within which the next request must begin, 0 for no limit. Call it before `put`."""
        self._time_left[:] = TimeLeft(request_id, left_ms).to_bytes()

    def time_left_ms(self, request_id: int) -> int | None:
        """Return the milliseconds that the caller wrote for this request, or None. Call it before replying."""
        return TimeLeft.from_bytes(bytes(self._time_left)).of_call(request_id)

    def close(self) -> None:
        """Unmap the memory. If a view is still in use, the memory is unmapped when that view is released."""
        self._time_left.release()
        self.request.release()
        self.reply.release()
        with suppress(BufferError):
            self._map.close()
