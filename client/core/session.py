"""A session's operations; how they are done is in `attached`."""

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

from gpulease.client.core import copies
from gpulease.client.core.exchange import send
from gpulease.client.core.graphs import Graphed
from gpulease.client.core.launching import KernelArguments, launch_frame
from gpulease.client.core.link import LinkEnded
from gpulease.client.core.steps import Procedure
from gpulease.client.core.wish import MAX_WIRE_BYTES, whole
from gpulease.client.errors import InvalidRequest, error_of
from gpulease.client.handles import Buffer, Module, StreamHandle
from gpulease.protocol import Opcode
from gpulease.protocol.codec import build_body
from gpulease.protocol.errors import FramingError
from gpulease.protocol.fastpath import ARENA_COPY, fixed_struct
from gpulease.protocol.messages import MemAlloc, ModuleLoad

MODULE_LOAD_FIXED_BYTES: Final = 4
"""Of a MODULE_LOAD's payload, what is not the image: its length."""

_SIZE: Final = fixed_struct(MemAlloc, "size_bytes")


class SessionState(Graphed):
    """An open session."""

    def mem_alloc(self, size_bytes: int) -> Procedure[Buffer]:
        """Device memory."""
        size = whole(size_bytes, "mem_alloc", least=1, most=MAX_WIRE_BYTES)
        reply = yield from self._operation("mem_alloc", self.ask(Opcode.MEM_ALLOC, _SIZE.pack(size)))
        return Buffer(self, reply.handle, size)

    def mem_free(self, buffer: Buffer) -> Procedure[None]:
        """Give a buffer back now."""
        yield from self._free(buffer, Buffer, "mem_free")

    def mem_write(self, buffer: Buffer, offset: int, data: Any, stream: StreamHandle | None = None) -> Procedure[None]:
        """Copy bytes to the device."""
        self._check(buffer, Buffer, "mem_write")
        view = copies.readable_bytes(data, "mem_write")
        copies.check_total(buffer, offset, len(view), "mem_write")
        if view:
            begun = self.begun(Opcode.ARENA_WRITE, stream, buffer, offset, view)
            copy = begun or copies.write(self, buffer, offset, view)
            yield from self._operation("mem_write", self.on(stream, copy))

    def mem_read(
        self, buffer: Buffer, offset: int, nbytes: int, into: Any = None, stream: StreamHandle | None = None
    ) -> Procedure[Any]:
        """Copy bytes from the device."""
        self._check(buffer, Buffer, "mem_read")
        copies.check_total(buffer, offset, nbytes, "mem_read")
        owned = bytearray(nbytes) if into is None else None
        target = copies.writable_bytes(into if owned is None else owned, nbytes, "mem_read")
        if nbytes:
            begun = self.begun(Opcode.ARENA_READ, stream, buffer, offset, target)
            copy = begun or copies.read(self, buffer, offset, target)
            yield from self._operation("mem_read", self.on(stream, copy))
        return into if owned is None else bytes(owned)

    def write_promptly(self, buffer: Buffer, offset: int, data: Any) -> Procedure[None] | None:
        """mem_write at once, under the session's lock: None if it is done, else what has still to be driven."""
        copy = self._arena_copy(buffer, offset, data, None)
        is_done = None if copy is None else self.arena_write.ask(self, copy)
        if is_done is None:
            return self.mem_write(buffer, offset, data)
        return None if is_done else self._go_on("mem_write", self.arena_write.rest(self))

    def read_promptly(self, buffer: Buffer, offset: int, nbytes: int, into: Any) -> Procedure[Any] | None:
        """mem_read likewise; if it is done, the bytes are in `into`."""
        copy = self._arena_copy(buffer, offset, into, nbytes)
        is_done = None if copy is None else self.arena_read.ask(self, copy)
        if is_done is None:
            return self.mem_read(buffer, offset, nbytes, into)
        return None if is_done else self._go_on("mem_read", self.arena_read.rest(self))

    def _arena_copy(self, buffer: Buffer, offset: int, data: Any, nbytes: int | None) -> bytes | None:
        """The request that copies from or to an array of the arena; None if it is none, or anything is wrong."""
        if (
            self.arena is None
            or data is None
            or self.selected
            or type(buffer) is not Buffer
            or buffer.owner is not self
        ):
            return None
        try:
            view = memoryview(data)
            place = self.arena.offset_of(view)
            size = view.nbytes if nbytes is None else nbytes
            if place is None or not 0 < size <= view.nbytes or not 0 <= offset <= buffer.size_bytes - size:
                return None
            return ARENA_COPY.pack(buffer.handle, offset, place, size)
        except (TypeError, ValueError, struct.error):
            return None

    def module_load(self, image: Any) -> Procedure[Module]:
        """Compile and load PTX, or load a cubin."""
        code = image.encode() if isinstance(image, str) else bytes(copies.readable_bytes(image, "module_load"))
        most = self._max_payload_bytes - MODULE_LOAD_FIXED_BYTES
        if not 0 < len(code) <= most:
            raise InvalidRequest(f"module_load: an image of {len(code)} bytes; 1 to {most} are taken")
        reply = yield from self._operation("module_load", self.ask(Opcode.MODULE_LOAD, build_body(ModuleLoad(code))))
        return Module(self, reply.module, reply.kernels)

    def module_unload(self, module: Module) -> Procedure[None]:
        """Unload a module now."""
        yield from self._free(module, Module, "module_unload")

    def sync(self) -> Procedure[None]:
        """Wait until all that was put in any stream has ended."""
        yield from self._operation("sync", self.releasing(self.ask(Opcode.SYNC)))

    def sync_promptly(self) -> Procedure[None] | None:
        """The same at once, under the session's lock: None if it is done, else what has still to be driven."""
        is_done = self._sync.ask(self)
        if is_done is None:
            return self.sync()
        if not is_done:
            return self._go_on("sync", self.releasing(self._sync.rest(self)))
        if self.held:
            self.held.clear()
        if self.lent:
            self.lent.clear()
        return None

    def launch(
        self,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArguments,
        arg_sizes: Iterable[int] | None,
        shared_bytes: int,
        stream: StreamHandle | None = None,
    ) -> tuple[int, bytes, int]:
        """Send a launch at once, under the session's lock: (its number, its frame, how many bytes of it went).

        Not a procedure, because a generator would cost as much as all the rest of this.
        """
        over = self.end or self.lease.over
        if over is not None:
            raise error_of(over, "launch")
        number, frame = launch_frame(self, module, kernel, grid, block, args, arg_sizes, shared_bytes)
        if stream is not None or self.selected:
            return number, *self.put_in(stream, frame)
        if self.dropped:
            frame += self.frees()
        try:
            return number, frame, self._send(frame)
        except (OSError, FramingError):
            return number, frame, 0  # no room, or no peer: sending again waits, or finds out

    def finish_launch(self, frame: bytes, sent: int) -> Procedure[None]:
        """Send what the socket did not take at once; under the session's lock."""
        try:
            yield from send(self.channel, (memoryview(frame)[sent:],), self.limit, has_begun=sent > 0)
            return
        except LinkEnded as ended:
            failure = ended.failure
        raise (yield from self._find_out(failure, "launch"))
