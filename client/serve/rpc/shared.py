"""The memory of one caller and its server: who makes it, who maps it, and what is read and written there.

**Which memory.** The server makes 64 KiB for each connection and hands over its descriptor. It is not a piece of a
session's arena, which the lease's worker shares with the server: a descriptor gives the whole of what it stands for, so
each caller would see the requests of all others, and could change them under the worker. A copy of at most 32 KiB
between the two costs a microsecond or two. The server's batches lie in the arena (`session.empty`), so nothing is
copied a third time before the card takes it.

The memory can't be made smaller or larger, which would end whoever touches it by SIGBUS: it is sealed (memfd_create(2),
F_ADD_SEALS of fcntl(2)), and who gets it looks whether it is.
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

LOOKING_IS_ORDERED: Final = platform.machine() == "x86_64"
"""Whether what is seen without having heard the bell can be relied on; see `protocol.rpc`."""


class Region:
    """A request's or a reply's place."""

    def __init__(self, memory: memoryview, at: int) -> None:
        self._memory = memory[at : at + HEADER_BYTES + MAX_PAYLOAD_BYTES]

    @property
    def status(self) -> int:
        """As it is now: any byte."""
        return self._memory[STATUS_AT]

    @status.setter
    def status(self, status: CallStatus) -> None:
        self._memory[STATUS_AT] = status

    def header(self) -> CallHeader:
        """All of it, copied first."""
        return CallHeader.from_bytes(bytes(self._memory[:HEADER_BYTES]))

    def payload(self, size_bytes: int) -> bytes:
        """A copy of so many bytes of it; at most MAX_PAYLOAD_BYTES, as `CallHeader.fits` says."""
        return bytes(self._memory[HEADER_BYTES : HEADER_BYTES + size_bytes])

    def put(self, request_id: int, method_id: int, payload: bytes | memoryview, status: CallStatus) -> None:
        """Write all of it, the status last. Raises ValueError if the payload is too large."""
        size = len(payload)
        if size > MAX_PAYLOAD_BYTES:
            raise ValueError(f"{size} bytes do not fit in a region, which takes {MAX_PAYLOAD_BYTES}")
        memory = self._memory
        memory[HEADER_BYTES : HEADER_BYTES + size] = payload
        # The status that is there stays until all else is: nobody else writes it meanwhile, by the rules.
        HEADER_FAST.pack_into(memory, 0, request_id, method_id, memory[STATUS_AT], size)
        memory[STATUS_AT] = status

    def release(self) -> None:
        """Let go of the memory."""
        self._memory.release()


class SharedCall:
    """The memory of one connection, mapped.

    Attributes:
        request: The caller's region.
        reply: The server's.
    """

    def __init__(self, fd: int) -> None:
        """Takes over the descriptor. Raises OSError or ValueError if it is no memory of this kind."""
        try:
            if os.fstat(fd).st_size != SHARED_BYTES or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise ValueError("the shared memory has another size, or may change it")
            self._map = mmap.mmap(fd, SHARED_BYTES)
        finally:
            os.close(fd)
        memory = memoryview(self._map)
        self.request, self.reply = Region(memory, REQUEST_AT), Region(memory, REPLY_AT)
        self._time_left = memory[TIME_LEFT_AT : TIME_LEFT_AT + TIME_LEFT_BYTES]
        memory.release()

    @classmethod
    def make(cls) -> tuple[Self, int]:
        """New memory, zeroed, and a descriptor to hand over, which the caller closes."""
        fd = os.memfd_create("gpulease-rpc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, SHARED_BYTES)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            return cls(os.dup(fd)), fd
        except BaseException:
            os.close(fd)
            raise

    def say_time_left(self, request_id: int, left_ms: int) -> None:
        """How long the next request is worth doing, 0 for nothing said; before it is put in."""
        self._time_left[:] = TimeLeft(request_id, left_ms).to_bytes()

    def time_left_ms(self, request_id: int) -> int | None:
        """What was said of that request; before its reply is put in."""
        return TimeLeft.from_bytes(bytes(self._time_left)).of_call(request_id)

    def close(self) -> None:
        """Unmap it."""
        self._time_left.release()
        self.request.release()
        self.reply.release()
        with suppress(BufferError):
            self._map.close()
