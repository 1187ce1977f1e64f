"""A session's device memory and modules: allocate, free, load, unload."""

import gc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

from gpulease.client.code_texts import image_of
from gpulease.client.core.fast_request import DONE, FastRequest, Pending
from gpulease.client.core.lease_request import MAX_WIRE_BYTES
from gpulease.client.core.operations import RequestPipeline
from gpulease.client.core.waits import MaybePending, Procedure
from gpulease.client.errors import AllocFailed, GpuLeaseError, InvalidRequest
from gpulease.client.handles import Buffer, Module, Variable
from gpulease.client.numbers import whole
from gpulease.client.texts import bounded
from gpulease.protocol import Opcode
from gpulease.protocol.address import Address
from gpulease.protocol.codec import build_body
from gpulease.protocol.fastpath import HANDLE, MEM_ALLOC
from gpulease.protocol.limits import MAX_KERNEL_NAME_BYTES
from gpulease.protocol.messages import KernelEntry, KernelFigures, ModuleLoad, VariableName

MODULE_LOAD_FIXED_BYTES: Final = 4
"""Bytes of a MODULE_LOAD's payload other than the image: the field with its length."""


MAX_UNSETTLED: Final = 256
"""Maximum number of frees and reuses that no reply has acknowledged. At this number an allocation sends a request whose
reply acknowledges them."""

MAX_TYPED_IMAGES: Final = 64
MAX_TYPED_IMAGE_BYTES: Final = 64 << 10
"""Maximum number of images for which a process remembers the kernels' parameter types, and the largest of them. A
program that opens a session for each request loads the same few images each time."""

_TypesKey = tuple[Address, bytes, tuple[str, ...]]

_known_types: dict[_TypesKey, tuple[bytes, ...]] = {}
"""The replies to MODULE_PARAMETERS, by the daemon's address, the image, and the names of its kernels in the module's
order. The types depend only on the image's text."""


class ModuleBase(Module):
    """Code that a session has loaded; the base of both APIs' modules."""

    __slots__ = ("_resources",)

    def __init__(self, resources: "Resources", handle: int, kernels: tuple[KernelEntry, ...]) -> None:
        super().__init__(None, handle, kernels)
        self._resources = resources


M = TypeVar("M", bound=ModuleBase)


class Resources:
    """Allocates and frees one session's device memory; loads and unloads its modules."""

    def __init__(self, operations: RequestPipeline) -> None:
        self._operations = operations
        self.attachment = operations.attachment
        self._alloc_request = FastRequest(
            operations, Opcode.MEM_ALLOC, MEM_ALLOC.size, HANDLE.size, undo=Opcode.MEM_FREE
        )

    def alloc(self, size_bytes: int) -> Procedure[Buffer]:
        """Allocate device memory of `size_bytes`, zeroed. Raises InvalidRequest while the session records."""
        self._operations.check_recording("mem_alloc")
        return self._alloc(size_bytes)

    def _alloc(self, size_bytes: int) -> Procedure[Buffer]:
        size = whole(size_bytes, "mem_alloc: size_bytes", least=1, most=MAX_WIRE_BYTES)
        return (yield from self._or_after_collection(size, self._operations.do("mem_alloc", self._make(size))))

    def _make(self, size: int) -> Procedure[Buffer]:
        return self._operations.make(
            Opcode.MEM_ALLOC, MEM_ALLOC.pack(size), Opcode.MEM_FREE, lambda reply: Buffer(None, reply.handle, size)
        )

    def _or_after_collection(self, size: int, allocation: Procedure[Buffer]) -> Procedure[Buffer]:
        """Drive an allocation. If there is no room, free the buffers in garbage, and allocate once more."""
        attachment = self.attachment
        try:
            return (yield from allocation)
        except AllocFailed as error:
            # The reply may report the failure of an earlier request, which the program must get. The second token may
            # not permit a free.
            if error.failure.failed_request_id is not None or attachment.uses_second:
                raise
            # Objects in reference cycles are finalized only by a collection. Without one, Python may not run it for
            # long, because it counts objects and not their memory on the card.
            gc.collect()
            if not (attachment.dropped or attachment.held):
                raise
        return (yield from self._operations.do("mem_alloc", self._free_and_make(size)))

    def _free_and_make(self, size: int) -> Procedure[Buffer]:
        # There may be more frees than an operation sends before it.
        while self.attachment.dropped:
            yield from self._operations.send_frees()
        return (yield from self._make(size))

    def alloc_at_once(self, size_bytes: int) -> MaybePending[Buffer]:
        """`alloc`, tried immediately, under the session's lock."""
        size = whole(size_bytes, "mem_alloc: size_bytes", least=1, most=MAX_WIRE_BYTES)
        attachment = self.attachment
        # Reuse a held buffer of this size, which saves the round trip. If there is none, free the held ones first,
        # because the allocation may need their memory.
        if attachment.held:
            reused = self._alloc_held(size)
            if reused is not None:
                return reused
            self._operations.drop_held()
        # The handle arrives in `answer`, which this call can read at any moment, so that no interrupt can lose it.
        buffer, answer = Buffer(None, 0, size), bytearray(HANDLE.size)
        try:
            outcome = self._alloc_request.ask(MEM_ALLOC.pack(size), into=memoryview(answer))
            if outcome is DONE:
                (buffer.handle,) = HANDLE.unpack(answer)
                buffer.owner = attachment
                return buffer
        except BaseException:
            if any(answer):
                # The interrupt came after the reply: no handle owns the memory yet, so free it.
                attachment.dropped.append((Opcode.MEM_FREE, *HANDLE.unpack(answer)))
            raise
        # The reply did not come in time. Wait for it by the general path, and store its handle in the same object.
        if isinstance(outcome, Pending):

            def late(reply: Any) -> Buffer:
                buffer.handle = reply.handle
                return buffer

            making = self._operations.made(Opcode.MEM_ALLOC, outcome.request_id, late)
            return self._or_after_collection(size, self._operations.go_on("mem_alloc", making))
        return self.alloc(size)

    def _alloc_held(self, size: int) -> MaybePending[Buffer] | None:
        """Reuse a held buffer; None if there is none, or if the worker has to reply first."""
        attachment, operations = self.attachment, self._operations
        if (
            attachment.end_failure is not None
            or attachment.recording is not None
            or len(operations.freed) >= MAX_UNSETTLED
        ):
            return None
        buffer = attachment.held.take(size, attachment)
        if buffer is None:
            return None
        reusing = operations.reuse(buffer.handle)
        return buffer if reusing is None else _after(reusing, buffer)

    def free(self, buffer: Buffer) -> MaybePending[None]:
        """Free a buffer immediately, under the session's lock, without waiting for a reply."""
        attachment, operations = self.attachment, self._operations
        operations.check_recording("mem_free")
        try:
            operations.check(buffer, Buffer, "mem_free")
        except GpuLeaseError as error:
            raise error.with_traceback(None)  # noqa: B904  # the traceback then starts at the caller's line
        attachment.check_open("mem_free")
        # Keep the memory for the next allocation of its size, if there is room for that.
        if type(buffer) is Buffer and attachment.held.hold(buffer):
            return None
        attachment.dropped.append(buffer.mark_freed())
        if operations.try_queue_frees():
            return None
        return operations.go_on("mem_free", operations.send_frees())

    def load(self, image: Any, kind: type[M]) -> Procedure[M]:
        """Compile and load PTX, or load a cubin; return a `kind` of module. Raises InvalidRequest while recording."""
        self._operations.check_recording("module_load")
        return self.load_unrecorded(image, kind)

    def load_unrecorded(self, image: Any, kind: type[M]) -> Procedure[M]:
        """Load code now, even while the session records: a recording changes nothing for the worker."""
        code = image_of(image, "module_load")
        most = self.attachment.max_payload_bytes - MODULE_LOAD_FIXED_BYTES
        # The whole image must fit into one frame.
        if not 0 < len(code) <= most:
            raise InvalidRequest(f"module_load: the image must have 1 to {most} bytes, not {len(code)}")
        return (yield from self._operations.do("module_load", self._load_code(code, kind)))

    def _load_code(self, code: bytes, kind: type[M]) -> Procedure[M]:
        operations, attachment = self._operations, self.attachment

        def loaded(reply: Any) -> M:
            attachment.has_loaded = True
            return kind(self, reply.module, reply.kernels)

        load = build_body(ModuleLoad(code))
        module = yield from operations.make(Opcode.MODULE_LOAD, load, Opcode.MODULE_UNLOAD, loaded)
        # A worker that serves MODULE_PARAMETERS reports the kernels' parameter types. Launches use them to check ints
        # and floats.
        if Opcode.MODULE_PARAMETERS in attachment.served:
            key = attachment.lease.address, code, tuple(module.kernels)
            # Do not even hash a large image, which would take longer than the round trip.
            is_small = len(code) <= MAX_TYPED_IMAGE_BYTES
            types = _known_types.get(key) if is_small else None
            if types is None:
                parameters = HANDLE.pack(module.handle)
                answer = yield from operations.ask(Opcode.MODULE_PARAMETERS, parameters, operation="module_load")
                types = answer.types
                if is_small:
                    _remember_types(key, types)
            module.set_parameter_types(types)
        return module

    def variable(self, module: Module, name: str) -> Procedure[Variable]:
        """Find a variable of a module. Raises InvalidHandle if the module has no variable of that name."""
        operation = "variable"
        self._check_module_query(Opcode.MODULE_VARIABLE, module, operation)
        request = VariableName(module.handle, bounded(name, "variable: a name", MAX_KERNEL_NAME_BYTES))
        asking = self._operations.ask(Opcode.MODULE_VARIABLE, build_body(request), operation=operation)
        reply = yield from self._operations.do(operation, asking)
        return Variable(module, name, self.attachment, reply.handle, reply.size_bytes)

    def figures(self, module: Module) -> Procedure[Mapping[str, KernelFigures]]:
        """Ask how many registers and how much memory each kernel of a module uses."""
        operation = "kernel_figures"
        self._check_module_query(Opcode.MODULE_FIGURES, module, operation)
        asking = self._operations.ask(Opcode.MODULE_FIGURES, HANDLE.pack(module.handle), operation=operation)
        reply = yield from self._operations.do(operation, asking)
        # The reply has the module's kernels in the same order as the reply to MODULE_LOAD.
        return MappingProxyType(dict(zip(module.kernels, reply.kernels, strict=False)))

    def _check_module_query(self, op: Opcode, module: Module, operation: str) -> None:
        self._operations.check_recording(operation)
        self._operations.check(module, Module, operation)
        self.attachment.require(op, operation)

    def unload(self, module: Module) -> Procedure[None]:
        """Unload a module now. Raises InvalidRequest while the session records."""
        self._operations.check_recording("module_unload")
        return self._operations.free(module, Module, "module_unload")


def _after(remaining: Procedure[None], buffer: Buffer) -> Procedure[Buffer]:
    yield from remaining
    return buffer


def _remember_types(key: _TypesKey, types: tuple[bytes, ...]) -> None:
    # Clear the cache when it is full: this bounds the memory of a program that keeps loading new images.
    if len(_known_types) >= MAX_TYPED_IMAGES:
        _known_types.clear()
    _known_types[key] = types
