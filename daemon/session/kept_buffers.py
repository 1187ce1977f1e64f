"""Allocations that outlive the connection that made them: each has a name, and the lease holds it.

So programs that run one after another on a lease can pass memory on. A name ends when its allocation is freed, replaced
by another (MEM_REUSE), or taken over by a connection.
"""

from typing import Final

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.session.holders import Holder
from gpulease.daemon.session.ledger import invalid_handle
from gpulease.daemon.session.operations import OperationHandler, SessionResources, serves
from gpulease.daemon.session.replies import done, empty
from gpulease.protocol.codec import parse_body
from gpulease.protocol.errors import BodyError
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.framing import Frame
from gpulease.protocol.limits import MAX_KEPT
from gpulease.protocol.messages import KeptBuffer, KeptBuffers, MemKeep
from gpulease.protocol.opcodes import Opcode, Status

_NAME: Final = 0
"""The number of a name among an allocation's dependents. The other dependents are graphs, numbered from 1."""


class KeepOperations(OperationHandler):
    """MEM_KEEP and MEM_KEPT.

    Attributes:
        holder: The holder of kept allocations, which represents the lease.
    """

    def __init__(self, resources: SessionResources) -> None:
        super().__init__(resources)
        self.holder = Holder(resources.counters, Counter.KEPT_BYTES)
        self._handles: dict[str, int] = {}

    @serves(Opcode.MEM_KEEP)
    def keep(self, frame: Frame) -> bytes:
        body = parse_body(MemKeep, frame.payload)
        self._ledger.check_free(body.handle)
        is_kept = self._ledger.holder_of(body.handle) is self.holder
        if not body.name and not is_kept:
            raise invalid_handle(f"the allocation {body.handle:#x} is not kept, so it can't be taken")
        # Keeping the same allocation under the same name changes nothing.
        earlier = self._handles.get(body.name)
        if earlier == body.handle:
            return empty(frame)
        if earlier is not None:
            raise Refused(
                Failure(
                    Status.INVALID_REQUEST,
                    f"a buffer is already kept by the name {body.name!r}: allocation {earlier:#x}",
                    hint="Take or free that buffer first, or choose another name.",
                )
            )
        if not is_kept and len(self._handles) >= MAX_KEPT:
            raise Refused(
                Failure(
                    Status.BUSY,
                    f"the lease keeps {MAX_KEPT} buffers, the maximum",
                    hint="Free some of them, or take them into the session.",
                )
            )
        # A new name replaces the old one. An empty name means that the connection takes the allocation over.
        if is_kept:
            self._forget(body.handle)
        if body.name:
            self._remember(body.name, body.handle)
        self._ledger.hand_over(body.handle, self.holder if body.name else self._ledger.holder)
        return empty(frame)

    @serves(Opcode.MEM_KEPT)
    def kept(self, frame: Frame) -> bytes:
        if frame.payload:
            raise BodyError("MEM_KEPT takes no payload")
        sizes = ((name, handle, self._ledger.size_of(handle) or 0) for name, handle in sorted(self._handles.items()))
        return done(frame, KeptBuffers(tuple(KeptBuffer(*kept) for kept in sizes)))

    def names(self) -> list[tuple[str, int]]:
        """Return the name and handle of each kept allocation."""
        return list(self._handles.items())

    def restore(self, name: str, handle: int) -> None:
        """Restore the name of an allocation that the session kept in another process. The lease holds it already."""
        self._remember(name, handle)

    def _remember(self, name: str, handle: int) -> None:
        def released(_what: str) -> None:
            # If another allocation replaces it, the new one belongs to the connection that asked for it.
            del self._handles[name]
            self._ledger.hand_over(handle, self._ledger.holder)

        self._handles[name] = handle
        self._ledger.allocation_dependents.add(handle, _NAME, released)

    def _forget(self, handle: int) -> None:
        name = next(name for name, kept_handle in self._handles.items() if kept_handle == handle)
        del self._handles[name]
        self._ledger.allocation_dependents.remove(handle, _NAME)
