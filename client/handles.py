"""Buffers and modules: handles of things that live in a session, freed when the last reference goes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from gpulease.client.errors import InvalidHandle
from gpulease.protocol import Opcode
from gpulease.protocol.messages import KernelEntry
from gpulease.protocol.opcodes import ParameterType

if TYPE_CHECKING:
    from gpulease.protocol.fastpath import LaunchTemplate


class HandleOwner(Protocol):
    """A session's connection, as far as its handles know it.

    Attributes:
        dropped: (operation, handle) of handles without a reference, which the session's next operation frees.
    """

    dropped: list[tuple[Opcode, int]]

    @property
    def is_alive(self) -> bool:
        """True while the session and its lease live, as far as is known here."""


class Handle:
    """A thing that lives in a session. The session's next operation after its last reference went frees it."""

    __slots__ = ("__weakref__", "handle", "owner")

    _free_op: Opcode

    def __init__(self, owner: HandleOwner | None, handle: int) -> None:
        """Args: owner: Its session's connection; None until it is claimed, and once it is freed. handle: Its number."""
        self.owner: HandleOwner | None = owner
        self.handle = handle

    @property
    def is_alive(self) -> bool:
        """True while it can be used: not freed, and its session and lease not over as far as is known here."""
        return self.owner is not None and self.owner.is_alive

    def check(self, session: HandleOwner, what: str) -> None:
        """Raises InvalidHandle, naming the operation `what`, if this can't be used in `session`."""
        if self.owner is not session:
            kind = type(self).__name__.lower()
            why = "is freed" if self.owner is None else "belongs to another session"
            raise InvalidHandle(f"{what}: {kind} {self.handle:#x} {why}")

    def mark_freed(self) -> tuple[Opcode, int]:
        """Mark it as freed; returns the request's operation and handle that free it."""
        self.owner = None
        return self._free_op, self.handle

    def __del__(self) -> None:
        # Runs in whatever thread dropped the last reference, perhaps inside another operation of the session, perhaps
        # half-built or while the interpreter ends: only note it. Appending to a list is atomic.
        owner = getattr(self, "owner", None)
        if owner is not None:
            owner.dropped.append((self._free_op, self.handle))


class Buffer(Handle):
    """Device memory. Its bytes are zero at first.

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
        """Free nothing when the last reference goes: somebody else holds the memory from now on."""
        self.__class__ = BorrowedBuffer

    def check_range(self, offset: int, size_bytes: int, what: str) -> None:
        """Raises InvalidHandle if the bytes are not all inside."""
        if offset < 0 or offset + size_bytes > self.size_bytes:
            raise InvalidHandle(
                f"{what}: bytes {offset} to {offset + size_bytes} are outside buffer {self.handle:#x} "
                f"of {self.size_bytes} bytes"
            )


class BorrowedBuffer(Buffer):
    """Device memory that a reference elsewhere keeps, or its lease; made by `GpuSession.buffer`, `keep` and `kept`."""

    __slots__ = ()

    def __del__(self) -> None:
        """Free nothing: the reference elsewhere does."""


class Module(Handle):
    """Loaded code.

    Attributes:
        kernels: Its kernels by name, each with its parameters' sizes in bytes and the most threads its block may have.
        parameter_types: By kernel, its parameters' types as the image's PTX declares them; empty if it does not.
        templates: Launches that were checked once (`core.launch`). They are void when the module is unloaded.
        latest: The last of these launches that named no regions.
        latest_in: The last that named regions.
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
        """Take the parameters' types of each kernel, as MODULE_PARAMETERS answers them."""
        pairs = zip(self.kernels, types, strict=False)
        self.parameter_types = MappingProxyType({name: tuple(map(_type_of, each)) for name, each in pairs if each})

    def __repr__(self) -> str:
        return f"<Module {self.handle:#x} [{', '.join(self.kernels)}]{'' if self.is_alive else ', gone'}>"


ModuleHandle = Module
"""The base of both faces' modules, under a name that neither has."""


class Variable(BorrowedBuffer):
    """Bytes that a module declares in device or constant memory; made by `Module.variable`.

    It ends with its module, which it keeps from being dropped. `mem_write`, `mem_read` and launches take it.

    Attributes:
        module: Its module.
        name: Its name, as PTX spells it.
    """

    __slots__ = ("module", "name")

    def __init__(self, module: Module, name: str, owner: HandleOwner, handle: int, size_bytes: int) -> None:
        self.module, self.name = module, name
        super().__init__(owner, handle, size_bytes)

    @property
    def owner(self) -> HandleOwner | None:
        """The session's connection, as its module has it; None once that is freed."""
        return self.module.owner

    @owner.setter
    def owner(self, owner: HandleOwner | None) -> None:
        """Change nothing: the module's counts."""

    def check(self, session: HandleOwner, what: str) -> None:
        """Raises InvalidHandle, naming the operation `what`, if its module can't be used in `session`."""
        self.module.check(session, what)

    def mark_freed(self) -> tuple[Opcode, int]:
        """Raises InvalidHandle: nobody can free a part of a module."""
        raise InvalidHandle(f"mem_free: {self.name} is a variable", "It ends with its module: unload that")


def _type_of(byte: int) -> ParameterType:
    try:
        return ParameterType(byte)
    except ValueError:
        return ParameterType.UNTOLD  # of a newer daemon
