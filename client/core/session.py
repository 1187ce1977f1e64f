"""A session: its connection, and the parts that do its work.

Both APIs hold a `SessionCore` and call its parts. Only launches and copies can be recorded: while a `Recording` lasts,
it replaces these two parts in the API.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from gpulease.client.core.attachment import Attachment
from gpulease.client.core.copies import Copies, CopyCommands
from gpulease.client.core.graphs import Graphs
from gpulease.client.core.kept_buffers import SessionKeptBuffers
from gpulease.client.core.launch import LaunchCommands, Launches
from gpulease.client.core.lease import LeaseHandle
from gpulease.client.core.lease_request import MAX_WIRE_BYTES
from gpulease.client.core.operations import RequestPipeline
from gpulease.client.core.refused_regions import RefusedRegions
from gpulease.client.core.region_sets import RegionSets
from gpulease.client.core.resources import Resources
from gpulease.client.core.streams import PrintedCallback, Streams
from gpulease.client.core.tokens import Grant, GrantPair, session_tokens
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import error_of
from gpulease.client.fork_guard import OWNED_BY_PARENT
from gpulease.client.handles import BorrowedBuffer, Module
from gpulease.client.numbers import whole
from gpulease.client.texts import check_callback
from gpulease.client.transport.arena import empty
from gpulease.client.transport.ring import shared_memory_request
from gpulease.client.transport.spin_policy import spin_policy_of
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.opcodes import Opcode, SessionOption
from gpulease.protocol.ring import SharedMemoryRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CARD_BYTES: Final = 6
"""Bytes of the option CARD in ATTACH's reply: a u16 and a u32."""


class SessionCore:
    """A session on a lease.

    Attributes:
        attachment: Its connection, its lease, and how it ended.
        operations: Sends its requests and receives their replies.
        streams: Its streams, and the one that the worker has selected.
        resources: Its device memory and modules.
        copies: Copies to and from that memory.
        launches: Launches of its modules' kernels.
        graphs: Its launch graphs.
        region_sets: Its region sets.
        kept: The buffers that its lease keeps.
    """

    def __init__(
        self,
        lease: LeaseHandle,
        lock: Any,
        *,
        grant: Grant | GrantPair | None,
        shared_memory: bool,
        spin_ns: int,
    ) -> None:
        """Prepare a session, which `attach` opens.

        Args:
            lease: Its lease.
            lock: The API's kind of lock.
            grant: The tokens with which to open it; None to open it as the lease's holder.
            shared_memory: Whether to share memory with the worker, where the address allows it.
            spin_ns: Longest time to poll for a reply before sleeping, in nanoseconds.

        Raises InvalidRequest for another lease's grant.
        """
        # Memory can only be shared on one host, which the address shows.
        memory_request = shared_memory_request(lease.address) if shared_memory else SharedMemoryRequest()
        tokens = session_tokens(lease.grant.lease_id, lease.token, grant)
        spin = spin_policy_of(lease.waiting, spin_ns)
        # Build the parts in order: each depends only on earlier ones.
        self.attachment = Attachment(lease, lock, tokens=tokens, memory_request=memory_request, spin=spin)
        self.operations = RequestPipeline(self.attachment)
        self.streams = Streams(self.operations)
        self.resources = Resources(self.operations)
        refused = RefusedRegions(self.operations)
        self.copies = Copies(self.operations, self.streams, refused)
        self.launches = Launches(self.operations, self.streams, refused)
        self.graphs = Graphs(self.operations, self.streams, refused)
        self.region_sets = RegionSets(self.operations)
        self.kept = SessionKeptBuffers(self.operations)

    def attach(self) -> Procedure[None]:
        """Open the session. Raises the reason if it can't be opened."""
        yield from self.attachment.attach()

        self.operations.begin()
        # A weak reference, so that a lease that outlives its session does not keep the session in memory.
        self.attachment.lease.attached = weakref.ref(self.operations)


S = TypeVar("S", bound="np.generic")


class SessionView:
    """Base of both APIs' sessions: all properties that need no request to the worker."""

    _session: SessionCore
    _lock: Any
    _launches: LaunchCommands
    _copies: CopyCommands
    _array_kernels: Module | None = None
    _on_printed: PrintedCallback | None = None

    def _set_session(self, session: SessionCore) -> None:
        self._session, self._lock = session, session.attachment.lock
        self._set_commands(session.launches, session.copies)

    def _set_commands(self, launches: LaunchCommands, copies: CopyCommands) -> None:
        """Send launches and copies to the session itself, or to a recording."""
        self._launches, self._copies = launches, copies

    def disown(self) -> None:
        """Leave the session to the parent process (`fork_guard.Inherited`)."""
        self._lock = self._session.attachment.disown()

    @overload
    def empty(self, shape: int | Sequence[int]) -> "NDArray[np.float64]": ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: "type[S] | np.dtype[S]") -> "NDArray[S]": ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: Any) -> "NDArray[Any]": ...

    def empty(self, shape: int | Sequence[int], dtype: Any = float) -> "NDArray[Any]":
        """Make an uninitialised numpy array in memory that is shared with the session's worker.

        mem_write and mem_read of the array, or of a contiguous part of it, are as fast as the card's bus. Over TCP, or
        if the session's arena has no room left, it is an ordinary array, and everything works the same. A forked
        process shares the arrays made before the fork with its parent.

        Args:
            shape: One size, or a size per dimension.
            dtype: The elements' numpy dtype.

        Raises InvalidRequest for a `dtype` that numpy does not support, or for a shape that no array can have.
        """
        # A forked child shares the arena with its parent: new arrays in it would overwrite the parent's.
        if self._session.attachment.end is OWNED_BY_PARENT:
            raise error_of(OWNED_BY_PARENT, "empty")
        return empty(self._session.attachment.arena, shape, dtype)

    def buffer(self, handle: int, size_bytes: int) -> BorrowedBuffer:
        """Use memory that another connection to the lease allocated, for as long as that memory exists (`keep`).

        Dropping the last reference does not free it; `mem_free` does. Operations on it raise InvalidHandle if the
        handle is wrong.

        Args:
            handle: The buffer's `handle` in that connection.
            size_bytes: The buffer's size, as that connection reports it.
        """
        # No request is sent: the worker checks the handle with each operation.
        at = whole(handle, "buffer: handle", least=0, most=MAX_WIRE_BYTES)
        return BorrowedBuffer(
            self._session.attachment, at, whole(size_bytes, "buffer: size_bytes", least=1, most=MAX_WIRE_BYTES)
        )

    @property
    def session_id(self) -> LeaseId:
        """The session's id, which is its lease's id."""
        return LeaseId(self._session.attachment.session_id)

    @property
    def driver(self) -> str:
        """The driver that runs the session's kernels: "cuda" or "cpu"."""
        return self._session.attachment.reply.driver

    @property
    def card_uuid(self) -> str:
        """The UUID of the session's card, as the driver reports it."""
        return self._session.attachment.reply.card_uuid

    @property
    def compute_capability(self) -> int:
        """The card's compute capability, such as 90 for 9.0; 0 if the session's daemon is too old to report it."""
        return int.from_bytes(self._card[:2])

    @property
    def cuda_version(self) -> int:
        """The CUDA version of the card's driver, such as 13000 for 13.0; 0 without CUDA, or if it is not reported."""
        return int.from_bytes(self._card[2:])

    @property
    def _arch(self) -> int | None:
        """The card's compute capability, to compile for it. None, the compilers' default, for the embedded driver."""
        return (self.compute_capability or None) if self.driver == "cuda" else None

    @property
    def _card(self) -> bytes:
        value = self._session.attachment.option_value(SessionOption.CARD)
        # An option of another width comes from a later version. Treat it as missing.
        return value if value is not None and len(value) == CARD_BYTES else bytes(CARD_BYTES)

    def on_printed(self, callback: PrintedCallback | None) -> None:
        """Pass what kernels have printed to `callback` at each sync and at the end of the `with` block.

        None stops this. The sync calls `callback` only if something was printed, and lets its exceptions through.
        Raises Unsupported if the session's daemon is too old, InvalidRequest if `callback` can't be called.
        """
        if callback is not None:
            check_callback(callback, "on_printed: the callback")
        self._session.attachment.require(Opcode.PRINTED, "on_printed")
        self._on_printed = callback

    @property
    def slice_bytes(self) -> int:
        """Total device memory that the session may allocate, in bytes."""
        attachment = self._session.attachment
        # The worker reported the slice once; since then the lease may have grown or shrunk.
        return attachment.reply.slice_bytes + attachment.lease.grant.size_bytes - attachment.lease_bytes

    @property
    def owns_memory(self) -> bool:
        """True if this session's objects end with it; False with an older daemon, which keeps them in the lease."""
        return self._session.attachment.option_value(SessionOption.OWN_MEMORY) is not None

    @property
    def shares_memory(self) -> bool:
        """True if `empty` makes arrays that the session's worker reads and graphs can copy; False over TCP."""
        return self._session.attachment.arena is not None

    @property
    def region_granule_bytes(self) -> int:
        """Sizes of the lease's regions are multiples of this many bytes; 0 without regions."""
        return self._session.region_sets.granule_bytes

    @property
    def is_alive(self) -> bool:
        """True until the session or its lease is known here to have ended."""
        return self._session.attachment.is_alive

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_id}{'' if self.is_alive else ', over'}>"
