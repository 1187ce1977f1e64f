"""The caller of a control request: its connection, with that connection's peer, tokens and leases."""

import time
from collections.abc import Callable
from dataclasses import field
from typing import Final, Protocol

from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.broker.runtime import OnResult, Result, Runtime
from gpulease.daemon.broker.token_service import ConnectionTokens
from gpulease.daemon.leases.events import RequestDenied
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.messages import Body, LeaseEvent, RegionEvent
from gpulease.protocol.opcodes import Opcode, Status
from gpulease.protocol.operations import Trait, having

_READ_ONLY: Final = having(Trait.READ_ONLY)
_OPERATORS: Final = having(Trait.OPERATORS)


Step = Callable[[], bool]
"""A function that does about a millisecond of a request's work. Returns whether the work is complete."""


class ClientConnection(Protocol):
    """The part of a control connection that the handlers of its requests use. ATTACH and GPU_SUBMIT hand it over."""

    @property
    def peer(self) -> Peer: ...

    @property
    def is_open(self) -> bool:
        """Return whether the peer can still read an answer."""

    def answer(self, request: Request, result: Body | Failure) -> None:
        """Answer a request. Does nothing once the connection is closed."""

    def send_event(self, subscription: int, event: LeaseEvent | RegionEvent) -> bool:
        """Send an event to a subscriber. Returns False if the connection has no room for it."""

    @property
    def is_lost(self) -> bool:
        """Return whether the transport is gone, so that the request needs no answer."""

    def resume_reading(self) -> None:
        """Read from the socket, so that a disconnect of the peer is noticed."""

    def when_written(self, action: Callable[[], None]) -> None:
        """Stop reading. Call `action` once the peer has read every reply, or the connection is closed."""

    def hand_over(self, pass_on: Callable[[int, bytes], bool]) -> bool:
        """Pass the socket to another process; see `ControlConnection.hand_over`."""

    def serve_in_steps(self, request: Request, step: Step) -> None:
        """Call `step` in each of the connection's turns until it has answered the request and returns True.

        Further requests of the peer are served after that. Once the connection is closed, `step` is not called again.
        """

    def serve_next(self) -> None:
        """Serve the requests that the peer sent after an ATTACH or GPU_SUBMIT that was refused."""


def unix_s_after(left_ms: int) -> int:
    """Return the time in `left_ms` on the wall clock, for people. Only monotonic deadlines are binding."""
    return int(time.time() + left_ms / 1000)


ACQUIRED_STEP: Final = 256
"""Number of recorded leases of a connection at which the leases that the table has forgotten are dropped."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The context that all handlers of one control connection share.

    Attributes:
        tokens: The tokens that the peer has presented on this connection.
        driver: The name of the driver of the node's cards.
        acquired: The leases granted on this connection, if its peer has no proven identity.
    """

    runtime: Runtime
    connection: ClientConnection
    tokens: ConnectionTokens
    driver: str
    acquired: set[int] = field(default_factory=set)

    @property
    def peer(self) -> Peer:
        return self.connection.peer

    def answer(self, request: Request, result: Body | Failure) -> None:
        self.connection.answer(request, result)

    def answer_denied(self, request: Request, answer: Result) -> None:
        """Answer a request that the lease table denied, or that was refused before it reached the table."""
        if isinstance(answer, RequestDenied):
            self.answer(request, answer.denial.failure)
        elif isinstance(answer, Failure):
            self.answer(request, answer)

    def expect(self, on_result: OnResult) -> int:
        """Return a number for a request to the lease table. The audit log records the peer as the requester."""
        number = self.runtime.expect(on_result)
        self.runtime.history.note_requester(number, self.peer.tenant)
        return number

    def hold(self, lease_id: int) -> None:
        """Count the connection as one of the lease's until it closes."""
        # A connection that has closed by now would keep the lease connected forever.
        if self.connection.is_open:
            self.runtime.connections.hold(lease_id, self.connection)

    def note_acquired(self, lease_id: int) -> None:
        """Record a grant on this connection if its peer has no proven identity: such a peer may list only these."""
        if self.peer.is_known:
            return
        # A client may acquire many leases one after the other on one connection: drop those that the table has
        # forgotten.
        if len(self.acquired) % ACQUIRED_STEP == 0:
            self.acquired.intersection_update([lease for lease in self.acquired if self.runtime.table.get(lease)])
        self.acquired.add(lease_id)

    def check_peer(self, op: Opcode) -> None:
        """Raise Refused if the peer may not do `op`: a reader may only read, and some operations need an operator."""
        # The web process has an operator's rights, but may change nothing.
        if self.peer.is_reader and op not in _READ_ONLY:
            raise Refused(Failure(Status.DENIED, f"{op.name} is not allowed for {self.peer}, which may only read"))
        if op in _OPERATORS:
            self.need_operator(op.name)

    def need_memory(self) -> None:
        """Raise Refused if the broker has no memory for new work."""
        # Check this before anything is stored for the request.
        if not self.runtime.memory_reserve.is_enough():
            hint = "Leases continue, and can be renewed and freed: try again later."
            raise Refused(Failure(Status.BUSY, "the daemon is out of memory", hint=hint))

    def need_operator(self, operation: str) -> None:
        """Raise Refused unless the peer is an operator."""
        if not self.peer.is_operator:
            raise Refused(
                Failure(
                    Status.DENIED,
                    f"{operation} is only for operators; this connection is {self.peer}",
                    hint="Run it as root or as the daemon's user through its Unix socket, or have the "
                    "operator add you to `operators` in [tls].",
                )
            )
