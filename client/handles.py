"""Buffers and modules: handles of objects in a session, which are freed with their last reference."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from gpulease.client.errors import InvalidHandle
from gpulease.client.texts import quoted
from gpulease.protocol import Opcode
from gpulease.protocol.messages import KernelEntry
from gpulease.protocol.opcodes import ParameterType

if TYPE_CHECKING:
    from gpulease.protocol.fastpath import LaunchTemplate


class HandleOwner(Protocol):
    """The part of a session's connection that handles use.

    Attributes:
        dropped: (operation, handle) for each handle without a reference; the session's next operation frees them.
    """

    dropped: list[tuple[Opcode, int]]

    @property
    def is_alive(self) -> bool:
        """True until this process has been notified that the session or its lease has ended."""


class Handle:
    """An object in a session. After its last reference is gone, the session's next operation frees it."""

    __slots__ = ("__weakref__", "handle", "owner")

    _free_op: Opcode

    def __init__(self, owner: HandleOwner | None, handle: int) -> None:
        """Bind the handle to its session.

        Args:
            owner: The session's connection; None until the handle is claimed.
            handle: Its number on the wire.
        """
        self.owner: HandleOwner | None = owner
        self.handle = handle

    @property
    def is_alive(self) -> bool:
        """True while it can be used.

        It is not freed, and this process has no report that its session or lease has ended.
        """
        return self.owner is not None and self.owner.is_alive

    def check(self, session: HandleOwner, subject: str) -> None:
        """Raise InvalidHandle, naming the operation `subject`, if this object can't be used in `session`."""
        # The usual case costs one comparison. Only an error needs the reason.
        if self.owner is not session:
            kind = type(self).__name__.lower()
            reason = "is freed" if self.owner is None else "belongs to another session"
            raise InvalidHandle(f"{subject}: {kind} {self.handle:#x} {reason}")

    def mark_freed(self) -> tuple[Opcode, int]:
        """Mark the object as freed. Return the operation and the handle for the request that frees it."""
        # From here on, the destructor adds nothing, because the caller sends the request that frees the object.
        self.owner = None
        return self._free_op, self.handle

    def __del__(self) -> None:
        # This runs in any thread that drops the last reference, perhaps inside another operation of the session, on a
        # half-built object, or at interpreter exit. So it only records the handle. Appending to a list is atomic.
        owner = getattr(self, "owner", None)
        if owner is not None:
            owner.dropped.append((self._free_op, self.handle))


class Buffer(Handle):
    """Device memory, zero at first.

    Attributes:
        size_bytes: Its size.
    """

    __slots__ = ("size_bytes",)

    _free_op = Opcode.MEM_FREE

    def __init__(self, owner: HandleOwner | None, handle: int, size_bytes: int) -> None:
        super().__init__(owner, handle)
        self.size_bytes = size_bytes

    def __len__(self) -> int:
        return self.size_bytes

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Buffer {self.handle:#x} {self.size_bytes} bytes{'' if self.is_alive else ', gone'}>"

    def lend(self) -> None:
        """Free nothing when the last reference is dropped, because the lease holds the memory from now on."""
        # Change the class, which determines the destructor. All references to the object stay valid.
        self.__class__ = BorrowedBuffer

    def check_range(self, offset: int, size_bytes: int, subject: str) -> None:
        """Raise InvalidHandle, naming the operation `subject`, if the bytes are not all inside the buffer."""
        if offset < 0 or offset + size_bytes > self.size_bytes:
            place = f"bytes {quoted(offset)} to {quoted(offset + size_bytes)}"
            raise InvalidHandle(f"{subject}: {place} are outside buffer {self.handle:#x} of {self.size_bytes} bytes")


class BorrowedBuffer(Buffer):
    """Device memory that the lease or another reference holds; made by `GpuSession.buffer`, `keep` and `kept`."""

    __slots__ = ()

    def __del__(self) -> None:
        """Free nothing, because the memory belongs to the lease or to another reference."""


class Module(Handle):
    """Loaded code.

    Attributes:
        kernels: Its kernels by name, each with the sizes of its parameters in bytes, and the maximum number of threads
            of a block.
        parameter_types: By kernel, the types of its parameters; empty unless the image is PTX, which declares them.
        templates: Launches that were checked once (`core.launch`). They are void after the module is unloaded.
        latest: The most recent of these launches that named no regions.
        latest_in: The most recent of these launches that named regions.
    """

    __slots__ = ("kernels", "latest", "latest_in", "parameter_types", "templates")

    _free_op = Opcode.MODULE_UNLOAD

    def __init__(self, owner: HandleOwner | None, handle: int, kernels: tuple[KernelEntry, ...]) -> None:
        super().__init__(owner, handle)
        self.kernels: Mapping[str, KernelEntry] = MappingProxyType({kernel.name: kernel for kernel in kernels})
        self.parameter_types: Mapping[str, tuple[ParameterType, ...]] = {}
        self.templates: dict[tuple[Any, ...], LaunchTemplate] = {}
        self.latest: Any = None
        self.latest_in: Any = None

    def set_parameter_types(self, types: tuple[bytes, ...]) -> None:
        """Store the parameter types of each kernel from the reply to MODULE_PARAMETERS."""
        # The reply has the kernels in the module's order. A kernel without type information has no bytes.
        pairs = zip(self.kernels, types, strict=False)
        self.parameter_types = MappingProxyType({name: tuple(map(_type_of, each)) for name, each in pairs if each})

    def __repr__(self) -> str:
        return f"<Module {self.handle:#x} [{', '.join(self.kernels)}]{'' if self.is_alive else ', gone'}>"


ModuleHandle = Module
"""The base of both APIs' modules, under a name that neither API uses."""


class Variable(BorrowedBuffer):
    """Bytes that a module declares in device or constant memory; made by `Module.variable`.

    It exists as long as its module, to which it keeps a reference. `mem_write`, `mem_read` and launches accept it.

    Attributes:
        module: The module that declares it.
        name: Its name in PTX.
    """

    __slots__ = ("module", "name")

    def __init__(self, module: Module, name: str, owner: HandleOwner, handle: int, size_bytes: int) -> None:
        # Set the module first, because `owner`, which the base class sets, is read from it.
        self.module, self.name = module, name
        super().__init__(owner, handle, size_bytes)

    @property
    def owner(self) -> HandleOwner | None:
        """The session's connection, from its module; None once the module is freed."""
        return self.module.owner

    @owner.setter
    def owner(self, owner: HandleOwner | None) -> None:
        """Ignore the value, because the owner is always the module's."""

    def check(self, session: HandleOwner, subject: str) -> None:
        """Raise InvalidHandle, naming the operation `subject`, if the module can't be used in `session`."""
        self.module.check(session, subject)

    def mark_freed(self) -> tuple[Opcode, int]:
        """Raise InvalidHandle, because a part of a module can't be freed."""
        raise InvalidHandle(
            f"mem_free: {self.name} is a variable, not an allocation", "It is freed with its module: unload the module"
        )


def _type_of(byte: int) -> ParameterType:
    try:
        return ParameterType(byte)
    except ValueError:
        return ParameterType.UNTOLD  # a type that only newer daemons know
