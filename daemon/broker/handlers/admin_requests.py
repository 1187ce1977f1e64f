"""LEASE_REVOKE, FENCE_CLEAR, DRAIN, DRAIN_CANCEL and CARD_DRAIN: requests of operators."""

from collections.abc import Callable

from gpulease.daemon.broker.caller import Caller
from gpulease.daemon.broker.reports import drain_status
from gpulease.daemon.broker.runtime import Result
from gpulease.daemon.leases.events import (
    DrainCancelled,
    DrainRequested,
    DrainSet,
    Event,
    FenceClearRequested,
    RevokeDone,
    RevokeRequested,
    SlicesCleared,
)
from gpulease.daemon.record.audit.records import clean_text
from gpulease.protocol import messages
from gpulease.protocol.connection import Request


class AdminHandler:
    """Serves one caller's requests to end leases and to manage the node. Every method may raise Refused."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._runtime = caller.runtime
        self._tokens = caller.tokens

    def lease_revoke(self, request: Request, body: messages.LeaseRevoke) -> None:
        """Serve LEASE_REVOKE of an operator, or of a peer with a token that permits it.

        The tenant of a lease may revoke the regions in it.
        """
        # A region may be revoked by rights over itself or over the lease that contains it.
        peer, table = self._caller.peer, self._runtime.table
        region = table.get(body.lease_id)
        parent = None if region is None or not region.parent_id else table.get(region.parent_id)
        parent_id = 0 if parent is None else parent.lease_id
        # A token's bearer acts with its issuer's rights, which were checked when the token was issued.
        is_operator = peer.is_operator or self._may_revoke(body.lease_id, parent_id)
        if not is_operator and (parent is None or parent.tenant != peer.tenant):
            self._caller.need_operator("LEASE_REVOKE")

        def on_outcome(outcome: Result) -> None:
            if isinstance(outcome, RevokeDone):
                self._caller.answer(request, messages.LeaseRevoked(int(outcome.outcome)))
            else:
                self._caller.answer_denied(request, outcome)

        # The reason is shown to the tenant and recorded, so it is cleaned here.
        number = self._caller.expect(on_outcome)
        reason = shown_reason(body.reason)
        self._runtime.post(RevokeRequested(number, body.lease_id, reason, peer.tenant, is_operator))

    def _may_revoke(self, lease_id: int, parent_id: int) -> bool:
        """Return whether one of the peer's tokens permits it to revoke a lease, or a region alone or with its lease."""
        return self._tokens.may_revoke(lease_id) or bool(parent_id and self._tokens.may_revoke(parent_id))

    def fence_clear(self, request: Request, body: messages.FenceClear) -> None:
        def on_outcome(outcome: Result) -> None:
            if isinstance(outcome, SlicesCleared):
                self._caller.answer(request, messages.FenceCleared(outcome.count))
            else:
                self._caller.answer_denied(request, outcome)

        number = self._caller.expect(on_outcome)
        self._runtime.post(FenceClearRequested(number, body.device))

    def drain(self, request: Request, body: messages.Drain) -> None:
        self._change_drain(request, lambda number: DrainRequested(number, body.within_ms))

    def drain_cancel(self, request: Request, body: messages.Empty) -> None:
        self._change_drain(request, DrainCancelled)

    def card_drain(self, request: Request, body: messages.CardDrain) -> None:
        self._change_drain(request, lambda number: drain_event(number, body.within_ms, body.device))

    def _change_drain(self, request: Request, event_for: Callable[[int], Event]) -> None:
        def on_outcome(outcome: Result) -> None:
            if isinstance(outcome, DrainSet):
                self._caller.answer(request, drain_status(outcome))
            else:
                self._caller.answer_denied(request, outcome)

        number = self._caller.expect(on_outcome)
        self._runtime.post(event_for(number))


def drain_event(request: int, within_ms: int | None, card: str | None = None) -> DrainRequested | DrainCancelled:
    """Return the event that drains the node, or a card of it, or that ends such a drain if `within_ms` is None."""
    if within_ms is None:
        return DrainCancelled(request, card)
    return DrainRequested(request, within_ms, card)


def shown_reason(text: str) -> str:
    """Strip control characters from an operator's reason before a tenant's terminal shows it; "" for a blank reason."""
    return clean_text(text.strip())
