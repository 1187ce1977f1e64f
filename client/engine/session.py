"""A session's operations; how they are done is in `attached`.

What a session's face shows and does without asking.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from gpulease.client.engine import copies
from gpulease.client.engine.exchange import send
from gpulease.client.engine.graphs import Graphed
from gpulease.client.engine.launch import KernelArguments, launch_frame
from gpulease.client.engine.request import MAX_WIRE_BYTES, whole
from gpulease.client.engine.steps import Procedure
from gpulease.client.errors import GpuLeaseError, InvalidRequest, error_of
from gpulease.client.forking import OF_PARENT
from gpulease.client.handles import BorrowedBuffer, Buffer, Module, StreamHandle
from gpulease.client.kernel_args import KernelArgs
from gpulease.client.texts import utf8
from gpulease.client.transport.arena import empty
from gpulease.protocol import Opcode
from gpulease.protocol.codec import build_body
from gpulease.protocol.errors import FramingError
from gpulease.protocol.fastpath import ARENA_COPY, HANDLE, MEM_ALLOC
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.messages import ModuleLoad
from gpulease.protocol.opcodes import SessionOption

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MODULE_LOAD_FIXED_BYTES: Final = 4
"""Of a MODULE_LOAD's payload, what is not the image: its length."""


class SessionCore(Graphed):
    """An open session."""

    def mem_alloc(self, size_bytes: int) -> Procedure[Buffer]:
        """Device memory."""
        size = whole(size_bytes, "mem_alloc", least=1, most=MAX_WIRE_BYTES)
        reply = yield from self._operation("mem_alloc", self.ask(Opcode.MEM_ALLOC, MEM_ALLOC.pack(size)))
        return Buffer(self, reply.handle, size)

    def alloc_promptly(self, size_bytes: int) -> Buffer | Procedure[Buffer]:
        """mem_alloc at once, under the session's lock: the buffer, or what has still to be driven."""
        size = whole(size_bytes, "mem_alloc", least=1, most=MAX_WIRE_BYTES)
        answer = self._alloc.ask_for(self, MEM_ALLOC.pack(size))
        if answer is None:
            return self.mem_alloc(size)
        if isinstance(answer, bytes):
            return Buffer(self, HANDLE.unpack(answer)[0], size)
        return self._go_on("mem_alloc", self._late_buffer(size))

    def _late_buffer(self, size: int) -> Procedure[Buffer]:
        reply = yield from self._alloc.late_answer(self)
        return Buffer(self, reply.handle, size)

    def mem_free(self, buffer: Buffer) -> Procedure[None] | None:
        """Give a buffer back at once, under the session's lock: None, or what has still to be driven."""
        try:
            self._check(buffer, Buffer, "mem_free")
        except GpuLeaseError as error:
            raise error.with_traceback(None)  # noqa: B904  # as `launch` does
        over = self.end or self.lease.over
        if over is not None:
            raise error_of(over, "mem_free")
        self.dropped.append(buffer.let_go())
        frees = self.frees()
        return None if self.put(frees) else self._go_on("mem_free", send(self.channel, (frees,), self.limit))

    def mem_write(
        self, buffer: Buffer, offset: int, data: Any, stream: StreamHandle | None = None
    ) -> Procedure[None] | None:
        """Copy bytes to the device, under the session's lock: None if it is done, else what has still to be driven."""
        if (
            type(buffer) is Buffer
            and buffer.owner is self
            and type(offset) is int
            and self.end is None
            and self.lease.over is None
            and not self.dropped
            and not self.selected
            and stream is None
        ):
            try:
                view = memoryview(data).cast("B")
                if 0 < len(view) <= self.quiet_bytes and 0 <= offset <= buffer.size_bytes - len(view):
                    if self.put(copies.quiet_prefix(self, buffer, offset, view), view):
                        return None
                elif self.arena is not None:
                    return self._write_arena(buffer, offset, data)
            except (TypeError, ValueError, struct.error):
                pass  # bytes that are not in one piece, or something wrong: found out below
        return self._guarded("mem_write", self._write(buffer, offset, data, stream))

    def _write(self, buffer: Buffer, offset: int, data: Any, stream: StreamHandle | None) -> Procedure[None]:
        self._check(buffer, Buffer, "mem_write")
        view = copies.readable_bytes(data, "mem_write")
        copies.check_total(buffer, offset, len(view), "mem_write")
        if view:
            begun = self.begun(Opcode.ARENA_WRITE, stream, buffer, offset, view)
            yield from self.on(stream, begun or copies.write(self, buffer, offset, view))

    def _write_arena(self, buffer: Buffer, offset: int, data: Any) -> Procedure[None] | None:
        copy = self._arena_copy(buffer, offset, data, None)
        is_done = None if copy is None else self.arena_write.ask(self, *copy)
        if is_done is None:
            return self._guarded("mem_write", self._write(buffer, offset, data, None))
        return None if is_done else self._go_on("mem_write", self.arena_write.rest(self))

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

    def read_promptly(self, buffer: Buffer, offset: int, nbytes: int, into: Any) -> Procedure[Any] | None:
        """mem_read into `into` at once, under the session's lock: None if it is done, else what has to be driven."""
        is_done: bool | None = None
        rest: Callable[[SessionCore], Procedure[None]] = self.small_read.rest
        if (
            type(nbytes) is int
            and 0 < nbytes <= copies.PROMPT_READ_BYTES
            and type(buffer) is Buffer
            and buffer.owner is self
            and type(offset) is int
            and 0 <= offset <= buffer.size_bytes - nbytes
            and not self.selected
        ):
            try:
                view = memoryview(into).cast("B")
                if not view.readonly and len(view) >= nbytes:
                    is_done = self.small_read.ask(self, buffer.handle, offset, view[:nbytes])
            except (TypeError, ValueError, struct.error):
                pass  # found out below
        elif (copy := self._arena_copy(buffer, offset, into, nbytes)) is not None:
            is_done = self.arena_read.ask(self, *copy)
            rest = self.arena_read.rest
        if is_done is None:
            return self.mem_read(buffer, offset, nbytes, into)
        return None if is_done else self._go_on("mem_read", rest(self))

    def _arena_copy(self, buffer: Buffer, offset: int, data: Any, nbytes: int | None) -> tuple[bytes, int] | None:
        """The request that copies from or to an array of the arena, and how many nanoseconds it takes itself.

        None if it is none, or anything is wrong.
        """
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
            return ARENA_COPY.pack(buffer.handle, offset, place, size), copies.spin_ns(size)
        except (TypeError, ValueError, struct.error):
            return None

    def module_load(self, image: Any) -> Procedure[Module]:
        """Compile and load PTX, or load a cubin."""
        code = (
            utf8(image, "module_load") if isinstance(image, str) else bytes(copies.readable_bytes(image, "module_load"))
        )
        most = self._max_payload_bytes - MODULE_LOAD_FIXED_BYTES
        if not 0 < len(code) <= most:
            raise InvalidRequest(f"module_load: an image of {len(code)} bytes; 1 to {most} are taken")
        return (yield from self._operation("module_load", self._load(code)))

    def _load(self, code: bytes) -> Procedure[Module]:
        reply = yield from self.ask(Opcode.MODULE_LOAD, build_body(ModuleLoad(code)))
        module = Module(self, reply.module, reply.kernels)
        self.has_loaded = True
        if any(option.type == SessionOption.PARAMETER_TYPES for option in self.attached.options):
            told = yield from self.ask(Opcode.MODULE_PARAMETERS, HANDLE.pack(reply.module), doing="module_load")
            module.tell_types(told.types)
        return module

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
    ) -> int | Procedure[int]:
        """Send a launch at once, under the session's lock: its number; or what has still to be driven to have it.

        Not a procedure, because a generator would cost as much as all the rest of this; and in one piece, for the same
        reason, where all is as it was at the last launch of this module and nothing else is to be done. Everything that
        is otherwise, or wrong, is left to `_launch_anew`.
        """
        try:
            latest = module.latest
            if (
                kernel == latest.kernel
                and type(args) is KernelArgs
                and args.kinds == latest.kinds
                and (grid is latest.grid or (type(grid) is latest.grid_type and grid == latest.grid))
                and (block is latest.block or (type(block) is latest.block_type and block == latest.block))
                and shared_bytes == latest.shared_bytes
                and arg_sizes is None
                and module.owner is self
                and self.end is None
                and self.lease.over is None
                and not self.dropped
                and not self.selected
                and stream is None
            ):
                for buffer in args.buffers:
                    if buffer.owner is not self:
                        break
                else:
                    template, connection = latest.template, self.connection
                    number = connection.last_request_id = connection.last_request_id + 1
                    if self.channel.put_packed(
                        template.layout, template.head, number, template.before, args.data, template.after
                    ):
                        return number
        except (AttributeError, TypeError, ValueError, OSError, FramingError):
            pass  # a wrong type, the first launch, or no peer: found out below
        try:
            return self._launch_anew(module, kernel, grid, block, args, arg_sizes, shared_bytes, stream)
        except GpuLeaseError as error:
            raise error.with_traceback(None)  # noqa: B904  # it ends at its caller's line, as where a face drives

    def _launch_anew(
        self,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArguments,
        arg_sizes: Iterable[int] | None,
        shared_bytes: int,
        stream: StreamHandle | None,
    ) -> int | Procedure[int]:
        over = self.end or self.lease.over
        if over is not None:
            raise error_of(over, "launch")
        number, frame = launch_frame(self, module, kernel, grid, block, args, arg_sizes, shared_bytes)
        return self.hand_over(stream, number, frame, "launch")


S = TypeVar("S", bound="np.generic")


class SessionView:
    """What a session's face shows without asking."""

    _state: SessionCore
    _lock: Any

    def disown(self) -> None:
        """See Inherited."""
        self._lock = self._state.disown()

    @overload
    def empty(self, shape: int | Sequence[int]) -> "NDArray[np.float64]": ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: "type[S] | np.dtype[S]") -> "NDArray[S]": ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: Any) -> "NDArray[Any]": ...

    def empty(self, shape: int | Sequence[int], dtype: Any = float) -> "NDArray[Any]":
        """A numpy array, not initialised, in memory that the session's process shares where there is such memory.

        mem_write and mem_read of it, or of a contiguous part of it, are as fast as the card's bus. Over TCP, or where
        the session's arena has no room left, it is an ordinary array, and all works the same. A process that is forked
        shares the arrays that were made before the fork with its parent.
        """
        if self._state.end is OF_PARENT:
            raise error_of(OF_PARENT, "empty")
        return empty(self._state.arena, shape, dtype)

    def buffer(self, handle: int, size_bytes: int) -> BorrowedBuffer:
        """Memory that was allocated on another connection to the same lease: by its owner, or before this one opened.

        It is not freed with its last reference; `mem_free` frees it. What it is, the operations on it find out.

        Args:
            handle: Its `handle` there.
            size_bytes: Its size there.
        """
        at = whole(handle, "buffer", least=0, most=MAX_WIRE_BYTES)
        return BorrowedBuffer(self._state, at, whole(size_bytes, "buffer", least=1, most=MAX_WIRE_BYTES))

    @property
    def session_id(self) -> LeaseId:
        """The session's number: its lease's."""
        return LeaseId(self._state.session_id)

    @property
    def driver(self) -> str:
        """What the session computes with: "cuda" or "cpu"."""
        return self._state.attached.driver

    @property
    def card_uuid(self) -> str:
        """Which card it is on."""
        return self._state.attached.card_uuid

    @property
    def slice_bytes(self) -> int:
        """Device memory it may allocate in all."""
        return self._state.attached.slice_bytes

    @property
    def is_alive(self) -> bool:
        """Whether it is open and its lease not over, as far as is known here."""
        return self._state.is_alive

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_id}{'' if self.is_alive else ', over'}>"
