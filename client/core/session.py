"""A session: its connection, and the parts that do its work.

Both faces hold a `Session` and call its parts. Only launches and copies can be recorded: a `Recording` takes the place
of those two parts in the face while it lasts.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from gpulease.client.core.attachment import Attachment
from gpulease.client.core.copies import Copies, CopyCommands
from gpulease.client.core.graphs import Graphs
from gpulease.client.core.kept_buffers import KeptBuffers
from gpulease.client.core.launch import LaunchCommands, Launches
from gpulease.client.core.lease import LeaseState
from gpulease.client.core.lease_request import MAX_WIRE_BYTES, whole
from gpulease.client.core.operations import Operations
from gpulease.client.core.region_sets import RegionSets
from gpulease.client.core.resources import Resources
from gpulease.client.core.streams import PrintedCallback, Streams
from gpulease.client.core.tokens import Grant
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import InvalidRequest, error_of
from gpulease.client.fork_guard import OF_PARENT
from gpulease.client.handles import BorrowedBuffer, Module
from gpulease.client.transport.arena import empty
from gpulease.client.transport.ring import wanted_of
from gpulease.client.transport.spin_policy import spin_policy_of
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.opcodes import Opcode, SessionOption
from gpulease.protocol.ring import Wanted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CARD_BYTES: Final = 6
"""Bytes of the option CARD of ATTACH's reply: a u16 and a u32."""


class Session:
    """A session on a lease.

    Attributes:
        attachment: Its connection, its lease, and how it ended.
        operations: How each of its operations is done.
        streams: Its streams, and which of them is selected.
        resources: Its device memory and modules.
        copies: Copies to and from that memory.
        launches: Launches of its modules' kernels.
        graphs: Its launch graphs.
        region_sets: Its region sets.
        kept: The buffers that its lease keeps.
    """

    def __init__(self, lease: LeaseState, lock: Any, *, grant: Grant | None, shared_memory: bool, spin_ns: int) -> None:
        """Make a session that `attach` opens. Raises InvalidRequest for another lease's grant.

        Args:
            lease: Its lease.
            lock: The face's kind of lock.
            grant: A token of the lease, by which to open it; None to open it as the lease's holder.
            shared_memory: Whether to share memory with the worker, where the address allows it.
            spin_ns: Longest time to look for a reply before sleeping.
        """
        wanted = wanted_of(lease.address) if shared_memory else Wanted()
        if grant is not None and grant.lease_id != lease.grant.lease_id:
            raise InvalidRequest(f"attach: the grant is of lease {grant.lease_id}, not of this one")
        token = lease.token if grant is None else grant.token
        spin = spin_policy_of(lease.waiting, spin_ns)
        self.attachment = Attachment(lease, lock, token=token, wanted=wanted, spin=spin)
        self.operations = Operations(self.attachment)
        self.streams = Streams(self.operations)
        self.resources = Resources(self.operations)
        self.copies = Copies(self.operations, self.streams)
        self.launches = Launches(self.operations, self.streams)
        self.graphs = Graphs(self.operations, self.streams)
        self.region_sets = RegionSets(self.operations)
        self.kept = KeptBuffers(self.operations)

    def attach(self) -> Procedure[None]:
        """Open it. Raises why it can't be opened."""
        yield from self.attachment.attach()
        self.operations.begin()
        self.attachment.lease.attached = weakref.ref(self.operations)


S = TypeVar("S", bound="np.generic")


class SessionView:
    """Base of both faces' sessions: everything that they show without asking the worker."""

    _session: Session
    _lock: Any
    _launches: LaunchCommands
    _copies: CopyCommands
    _array_kernels: Module | None = None
    _on_printed: PrintedCallback | None = None

    def _set_session(self, session: Session) -> None:
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
        """Make a numpy array, not initialised, in memory shared with the session's process.

        mem_write and mem_read of the array, or of a contiguous part of it, are as fast as the card's bus. Over TCP, or
        where the session's arena has no room left, it is an ordinary array, and all works the same. A process that is
        forked shares the arrays that were made before the fork with its parent.

        Args:
            shape: One size, or a size for each dimension.
            dtype: numpy's type of the elements.

        Raises InvalidRequest for a `dtype` that numpy does not know.
        """
        if self._session.attachment.end is OF_PARENT:
            raise error_of(OF_PARENT, "empty")
        return empty(self._session.attachment.arena, shape, dtype)

    def buffer(self, handle: int, size_bytes: int) -> BorrowedBuffer:
        """Use memory that was allocated on another connection to the lease, which lasts until that ends (`keep`).

        Dropping the last reference does not free it; `mem_free` does. Operations on it find out if the handle is wrong.

        Args:
            handle: Its `handle` there.
            size_bytes: Its size there.
        """
        at = whole(handle, "buffer", least=0, most=MAX_WIRE_BYTES)
        return BorrowedBuffer(self._session.attachment, at, whole(size_bytes, "buffer", least=1, most=MAX_WIRE_BYTES))

    @property
    def session_id(self) -> LeaseId:
        """The session's number: its lease's."""
        return LeaseId(self._session.attachment.session_id)

    @property
    def driver(self) -> str:
        """The driver the session computes with: "cuda" or "cpu"."""
        return self._session.attachment.reply.driver

    @property
    def card_uuid(self) -> str:
        """The UUID of the session's card."""
        return self._session.attachment.reply.card_uuid

    @property
    def compute_capability(self) -> int:
        """The capability to compile kernels for: 90 for 9.0; 0 if the session's daemon is too old to tell."""
        return int.from_bytes(self._card[:2])

    @property
    def cuda_version(self) -> int:
        """The version of CUDA that the card's driver has, 13000 for 13.0; 0 if there is none, or it is not told."""
        return int.from_bytes(self._card[2:])

    @property
    def _arch(self) -> int | None:
        """The capability that compilers are asked for: the card's. The embedded driver takes their default."""
        return (self.compute_capability or None) if self.driver == "cuda" else None

    @property
    def _card(self) -> bytes:
        told = self._session.attachment.told(SessionOption.CARD)
        return told if told is not None and len(told) == CARD_BYTES else bytes(CARD_BYTES)

    def on_printed(self, callback: PrintedCallback | None) -> None:
        """Have each sync, and the end of the `with` block, give `callback` what kernels have printed; None ends it.

        It is called where the sync was, and only if something was printed. What it raises, the sync raises. Raises
        Unsupported if the session's daemon is too old.
        """
        self._session.attachment.require(Opcode.PRINTED, "on_printed")
        self._on_printed = callback

    @property
    def slice_bytes(self) -> int:
        """Bytes of device memory that the session may allocate in all."""
        attachment = self._session.attachment
        return attachment.reply.slice_bytes + attachment.lease.grant.size_bytes - attachment.lease_bytes

    @property
    def owns_memory(self) -> bool:
        """True if what this session makes ends with it; False with an older daemon, where it stays in the lease."""
        return self._session.attachment.told(SessionOption.OWN_MEMORY) is not None

    @property
    def shares_memory(self) -> bool:
        """True if `empty` makes arrays that the session's process reads, and graphs copy; False over TCP."""
        return self._session.attachment.arena is not None

    @property
    def region_granule_bytes(self) -> int:
        """Regions of the lease have multiples of so many bytes; 0 if its session is too old to have regions."""
        return self._session.region_sets.granule_bytes

    @property
    def is_alive(self) -> bool:
        """True while the session is open and its lease not over, as far as is known here."""
        return self._session.attachment.is_alive

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_id}{'' if self.is_alive else ', over'}>"
