"""A session's allocations, and copies to and from them whose bytes are on the wire."""

from collections.abc import Callable

from gpulease.daemon.drivers.interface import Context
from gpulease.daemon.worker.ledger import Ledger
from gpulease.daemon.worker.replies import done, empty
from gpulease.protocol.codec import parse_body
from gpulease.protocol.errors import BodyError
from gpulease.protocol.fastpath import HANDLE, MEM_READ, data_prefix, parse_fixed, parse_mem_write
from gpulease.protocol.framing import Frame
from gpulease.protocol.limits import MAX_DATA_BYTES
from gpulease.protocol.messages import Handle, MemAlloc, MemRead


class MemoryDesk:
    """Each method does one operation and gives its reply.

    They raise BodyError, Refused, DriverError, and what the look at the lease raises.
    """

    def __init__(
        self, ledger: Ledger, context: Context, count: Callable[[], None], check_lease: Callable[[], None]
    ) -> None:
        """Args: count: Called when what the session holds has changed."""
        self._ledger = ledger
        self._context = context
        self._count = count
        self._check_lease = check_lease
        self._staging = bytearray()

    def alloc(self, frame: Frame) -> bytes:
        """MEM_ALLOC."""
        size_bytes = parse_body(MemAlloc, frame.payload).size_bytes
        self._ledger.check_alloc(size_bytes)
        address = self._context.mem_alloc(size_bytes)
        self._ledger.add_allocation(address, size_bytes)
        self._count()
        return done(frame, Handle(address))

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
            self._context.mem_write(address, data, self._check_lease)
        return empty(frame)

    def read(self, frame: Frame) -> bytes | memoryview:
        """MEM_READ. The reply is this desk's own memory, void at the next read."""
        handle, offset, length = parse_fixed(MEM_READ, MemRead, memoryview(frame.payload))
        if length > MAX_DATA_BYTES:
            raise BodyError(f"{length} bytes in one MEM_READ; at most {MAX_DATA_BYTES} are allowed")
        address = self._ledger.locate(handle, offset, length)
        prefix = data_prefix(length, request_id=frame.request_id, session_id=frame.session_id)
        total = len(prefix) + length
        if len(self._staging) < total:
            self._staging = bytearray(total)
        reply = memoryview(self._staging)[:total]
        reply[: len(prefix)] = prefix
        if length:
            self._context.mem_read(address, reply[len(prefix) :], self._check_lease)
        return reply
