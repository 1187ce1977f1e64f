"""Buffers that a lease keeps by name after the end of the session that made them, so that programs can share them."""

from typing import Final

from gpulease.client.core.operations import RequestPipeline
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import InvalidHandle
from gpulease.client.handles import BorrowedBuffer, Buffer
from gpulease.client.texts import bounded, quoted
from gpulease.protocol import Opcode
from gpulease.protocol.codec import build_body
from gpulease.protocol.limits import MAX_KEPT_NAME_BYTES
from gpulease.protocol.messages import Freed, KeptBuffer, MemKeep
from gpulease.protocol.messages import KeptBuffers as KeptBuffersBody

MAX_NAMED: Final = 16
"""Maximum number of kept buffers that an error message lists."""


class SessionKeptBuffers:
    """The buffers that a session's lease keeps."""

    def __init__(self, operations: RequestPipeline) -> None:
        self._operations = operations
        self._attachment = operations.attachment

    def keep(self, buffer: Buffer, name: str) -> Procedure[None]:
        """Make the lease keep a buffer under a name. Its handle here stays valid, but no longer frees the buffer."""
        self._operations.check_recording("keep")
        return self._keep(buffer, name)

    def _keep(self, buffer: Buffer, name: str) -> Procedure[None]:
        operation = "keep"
        text = self._checked_name(name, operation)
        self._operations.check(buffer, Buffer, operation)
        # The worker must keep the buffer before the handle stops freeing it.
        yield from self._operations.do(operation, self._ask_to_keep(buffer.handle, text, operation))
        buffer.lend()

    def find(self, name: str) -> Procedure[BorrowedBuffer]:
        """Return a kept buffer, which stays kept. Raises InvalidHandle if no kept buffer has that name."""
        self._operations.check_recording("kept")
        return self._find(name)

    def _find(self, name: str) -> Procedure[BorrowedBuffer]:
        operation = "kept"
        reply = yield from self._operations.do(operation, self._named(self._checked_name(name, operation), operation))
        # The handle is borrowed: dropping it frees nothing, because the lease holds the buffer.
        return BorrowedBuffer(self._attachment, reply.handle, reply.size_bytes)

    def names(self) -> Procedure[dict[str, int]]:
        """Return the sizes of the kept buffers in bytes, by name."""
        self._operations.check_recording("kept_names")
        return self._names()

    def _names(self) -> Procedure[dict[str, int]]:
        operation = "kept_names"
        self._attachment.require(Opcode.MEM_KEPT, operation)
        reply = yield from self._operations.do(operation, self._list(operation))
        return {kept.name: kept.size_bytes for kept in reply}

    def take(self, name: str) -> Procedure[Buffer]:
        """Make a kept buffer this session's own, as if the session had allocated it.

        Raises InvalidHandle if no kept buffer has that name.
        """
        self._operations.check_recording("take")
        return self._take(name)

    def _take(self, name: str) -> Procedure[Buffer]:
        operation = "take"
        return (yield from self._operations.do(operation, self._taken(self._checked_name(name, operation), operation)))

    def reset(self) -> Procedure[int]:
        """Wait for all streams, then free the memory that no open session holds. Returns the number of bytes freed."""
        self._operations.check_recording("reset")
        return self._reset()

    def _reset(self) -> Procedure[int]:
        operation = "reset"
        # MEM_RESET waits for all work, because a queued kernel may use the buffers that it frees.
        self._attachment.require(Opcode.MEM_RESET, operation)
        reply: Freed = yield from self._operations.do(
            operation, self._operations.ask(Opcode.MEM_RESET, operation=operation)
        )
        return reply.size_bytes

    # --- parts of these operations ---

    def _checked_name(self, name: str, operation: str) -> str:
        self._attachment.require(Opcode.MEM_KEEP, operation)
        return bounded(name, f"{operation}: the name", MAX_KEPT_NAME_BYTES)

    def _ask_to_keep(self, handle: int, name: str, operation: str) -> Procedure[None]:
        yield from self._operations.ask(Opcode.MEM_KEEP, build_body(MemKeep(handle, name)), operation=operation)

    def _taken(self, name: str, operation: str) -> Procedure[Buffer]:
        reply = yield from self._named(name, operation)
        # Find the buffer, then take it over by keeping it under an empty name. If another session takes it over in
        # between, the second request fails.
        yield from self._ask_to_keep(reply.handle, "", operation)
        return Buffer(self._attachment, reply.handle, reply.size_bytes)

    def _list(self, operation: str) -> Procedure[tuple[KeptBuffer, ...]]:
        reply: KeptBuffersBody = yield from self._operations.ask(Opcode.MEM_KEPT, operation=operation)
        return reply.buffers

    def _named(self, name: str, operation: str) -> Procedure[KeptBuffer]:
        listed = yield from self._list(operation)
        for kept in listed:
            if kept.name == name:
                return kept
        names = ", ".join(quoted(kept.name) for kept in listed[:MAX_NAMED]) + (
            " and more" if listed[MAX_NAMED:] else ""
        )
        raise InvalidHandle(
            f"{operation}: the lease keeps no buffer with the name {quoted(name)}", f"It keeps: {names or 'none'}"
        )
