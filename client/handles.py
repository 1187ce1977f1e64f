"""Buffers, modules and streams: handles of things that live in a session, freed when the last reference goes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpulease.client.errors import InvalidHandle
from gpulease.protocol import Opcode
from gpulease.protocol.messages import KernelEntry
from gpulease.protocol.opcodes import ParameterType

if TYPE_CHECKING:
    from gpulease.client.engine.attachment import Attached
    from gpulease.client.engine.streams import Streamed


class Handle:
    """Something of a session's. Freed by the session's next operation after its last reference went."""

    __slots__ = ("__weakref__", "handle", "owner")

    _free_op: Opcode

    def __init__(self, owner: "Attached", handle: int) -> None:
        """Args: owner: Its session; None once it is freed. handle: Its number on the wire."""
        self.owner: Attached | None = owner
        self.handle = handle

    @property
    def is_alive(self) -> bool:
        """Whether it can still be used: not freed, and its session and lease not over as far as is known here."""
        return self.owner is not None and self.owner.is_alive

    def check(self, session: "Attached", what: str) -> None:
        """Raises InvalidHandle, naming the operation `what`, if this can't be used in `session`."""
        if self.owner is not session:
            kind = type(self).__name__.lower()
            why = "is freed" if self.owner is None else "belongs to another session"
            raise InvalidHandle(f"{what}: {kind} {self.handle:#x} {why}")

    def let_go(self) -> tuple[Opcode, int]:
        """It is dead from here on; what is to be asked for to free it."""
        self.owner = None
        return self._free_op, self.handle

    def __del__(self) -> None:
        # Runs in whatever thread dropped the last reference, perhaps inside another operation of the session, perhaps
        # half-built or while the interpreter ends: only note it. Appending to a deque is atomic.
        owner = getattr(self, "owner", None)
        if owner is not None:
            owner.dropped.append((self._free_op, self.handle))


class Buffer(Handle):
    """Device memory. Its bytes are zero at first."""

    __slots__ = ("size_bytes",)

    _free_op = Opcode.MEM_FREE

    def __init__(self, owner: "Attached", handle: int, size_bytes: int) -> None:
        super().__init__(owner, handle)
        self.size_bytes = size_bytes

    def __len__(self) -> int:
        return self.size_bytes

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Buffer {self.handle:#x} {self.size_bytes} bytes{'' if self.is_alive else ', gone'}>"

    def check_range(self, offset: int, size_bytes: int, what: str) -> None:
        """Raises InvalidHandle if the bytes are not all inside."""
        if offset < 0 or offset + size_bytes > self.size_bytes:
            raise InvalidHandle(
                f"{what}: bytes {offset} to {offset + size_bytes} are outside buffer {self.handle:#x} "
                f"of {self.size_bytes} bytes"
            )


class BorrowedBuffer(Buffer):
    """Device memory that somebody else's reference keeps; see `GpuSession.buffer`."""

    __slots__ = ()

    def __del__(self) -> None:
        """Nothing: it is not this reference's to free."""


class Module(Handle):
    """Loaded code.

    Attributes:
        kernels: Its kernels by name, each with its parameters' sizes in bytes and the most threads its block may have.
        parameter_types: By kernel, its parameters' types as the image's PTX declares them; nothing where it tells none.
    """

    __slots__ = ("kernels", "latest", "parameter_types", "templates")

    _free_op = Opcode.MODULE_UNLOAD

    def __init__(self, owner: "Attached", handle: int, kernels: tuple[KernelEntry, ...]) -> None:
        super().__init__(owner, handle)
        self.kernels: Mapping[str, KernelEntry] = MappingProxyType({kernel.name: kernel for kernel in kernels})
        self.parameter_types: Mapping[str, tuple[ParameterType, ...]] = {}
        self.templates: dict[tuple[Any, ...], Any] = {}
        """Launches checked once (`core.launching`). Here, because they are void when the module is unloaded."""
        self.latest: Any = None
        """The one of them that was launched last."""

    def tell_types(self, types: tuple[bytes, ...]) -> None:
        """Its parameters' types, as MODULE_PARAMETERS answers them."""
        told = zip(self.kernels, types, strict=False)
        self.parameter_types = MappingProxyType({name: tuple(map(_type_of, each)) for name, each in told if each})

    def __repr__(self) -> str:
        return f"<Module {self.handle:#x} [{', '.join(self.kernels)}]{'' if self.is_alive else ', gone'}>"


def _type_of(byte: int) -> ParameterType:
    try:
        return ParameterType(byte)
    except ValueError:
        return ParameterType.UNTOLD  # of a newer daemon


class StreamHandle(Handle):
    """An order of launches and copies; what the faces' streams have in common. Number 0 is the default stream."""

    __slots__ = ()

    _free_op = Opcode.STREAM_DESTROY

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.handle}{'' if self.is_alive else ', gone'}>"

    def session(self, what: str) -> "Streamed":
        """Its session's state. Raises InvalidHandle, naming the operation `what`, if it was closed."""
        if self.owner is None:
            raise InvalidHandle(f"{what}: stream {self.handle} is closed")
        return self.owner  # type: ignore[return-value]  # streams are made by these alone

    def drop(self) -> None:
        """Let go of it with the session's next operation, without an answer; again is harmless."""
        owner, self.owner = self.owner, None
        if owner is not None and self.handle:
            owner.dropped.append((self._free_op, self.handle))

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            super().__del__()
