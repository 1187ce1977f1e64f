"""Who asks on a control connection, how it is answered, and what is behind it: what the desks of one have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gpulease.daemon.broker.handlers.token_requests import TokenHandler
from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.broker.refusal import Refusal, failure_of
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.leases import Denied, Outcome
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure
from gpulease.protocol.messages import Body, LeaseEvent
from gpulease.protocol.opcodes import Status


class Answerer(Protocol):
    """Where answers go: a control connection."""

    @property
    def peer(self) -> Peer:
        """Who asks."""

    def answer(self, request: Request, result: Body | Failure) -> None:
        """Answer a request; does nothing once the connection is gone."""

    def tell(self, subscription: int, event: LeaseEvent) -> bool:
        """Tell a subscriber something; whether there was room for it."""

    @property
    def is_open(self) -> bool:
        """Whether anybody is there to read an answer."""


@dataclass(frozen=True, slots=True)
class Caller:
    """One control connection.

    Attributes:
        acquired: The leases granted on it.
    """

    runtime: Runtime
    answerer: Answerer
    tokens: TokenHandler
    acquired: set[int]

    @property
    def peer(self) -> Peer:
        """Who asks."""
        return self.answerer.peer

    def answer(self, request: Request, result: Body | Failure) -> None:
        """Answer a request."""
        self.answerer.answer(request, result)

    def answer_denied(self, request: Request, outcome: Outcome) -> None:
        """Answer a request that the lease table denied."""
        if isinstance(outcome, Denied):
            self.answer(request, failure_of(outcome.denial))

    def expect(self, on_outcome: Callable[[Outcome], None]) -> int:
        """The number of a request to the lease table, which the audit log tells with who asked."""
        number = self.runtime.expect(on_outcome)
        self.runtime.history.asked_by(number, self.peer.tenant)
        return number

    def hold(self, lease_id: int) -> None:
        """Count the connection as one of the lease's, until it is gone."""
        if self.answerer.is_open:
            self.runtime.presence.hold(lease_id, self.answerer)

    def need_operator(self, operation: str) -> None:
        """Raises Refusal unless an operator asks."""
        if not self.peer.is_operator:
            raise Refusal(
                Failure(
                    Status.DENIED,
                    f"{operation} is for operators; this connection is {self.peer}",
                    hint="Run it as root or as the daemon's user, over its Unix socket; or be one of [tls] operators.",
                )
            )
