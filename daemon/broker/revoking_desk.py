"""Ends before their time: LEASE_REVOKE, CAPABILITY_REVOKE, FENCE_CLEAR and the drain, of one control connection."""

from collections.abc import Callable

from gpulease.daemon.audit.records import clean_text
from gpulease.daemon.broker.caller import Caller
from gpulease.daemon.broker.drains import status_of
from gpulease.daemon.core import (
    DrainSet,
    Event,
    FenceCleared,
    FenceClearRequested,
    Outcome,
    RevokeDone,
    RevokeRequested,
)
from gpulease.protocol import messages
from gpulease.protocol.connection import Request
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status


def told_reason(text: str) -> str:
    """What a tenant is told of why, of what an operator wrote: nothing that a terminal obeys, "" for what is blank."""
    return clean_text(text.strip())


class RevokingDesk:
    """Takes these requests, most of which are operators'; each raises Refusal for what is not the caller's to end."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._runtime = caller.runtime
        self._peer = caller.peer
        self._tokens = caller.tokens

    def lease_revoke(self, request: Request, body: messages.LeaseRevoke) -> None:
        """LEASE_REVOKE."""
        if not self._tokens.may_revoke(body.lease_id):
            self._caller.need_operator("LEASE_REVOKE")

        def on_outcome(outcome: Outcome) -> None:
            if isinstance(outcome, RevokeDone):
                self._caller.answer(request, messages.LeaseRevoked(int(outcome.outcome)))
            else:
                self._caller.answer_denied(request, outcome)

        number = self._caller.expect(on_outcome)
        self._runtime.post(RevokeRequested(number, body.lease_id, told_reason(body.reason)))

    def capability_revoke(self, request: Request, body: messages.CapabilityRevoke) -> None:
        """CAPABILITY_REVOKE."""
        lease_id, nonce = self._tokens.to_revoke(body)
        lease, submit = self._runtime.table.get(lease_id), self._runtime.table.submits.of(lease_id)
        numbers = (lease_id,) if submit is None else (lease_id, submit.submit_id)
        pages = [self._runtime.workers.page(number) for number in numbers]

        def on_done(is_kept: bool) -> None:
            why = "the token has ended, but that can't be written down now: a restart of the daemon may forget it"
            failure = Failure(Status.BUSY, why, hint="Ask again, or renew the lease, which ends all of its tokens.")
            self._caller.answer(request, messages.Empty() if is_kept else failure)

        self._tokens.revoke(lease_id, nonce, pages, self._runtime.journal, on_done)
        tenant = self._peer.tenant if lease is None else lease.tenant
        self._runtime.recorder.token_revoked(tenant, self._peer.tenant, lease_id, nonce)

    def fence_clear(self, request: Request, body: messages.FenceClear) -> None:
        """FENCE_CLEAR."""
        self._caller.need_operator("FENCE_CLEAR")

        def on_outcome(outcome: Outcome) -> None:
            if isinstance(outcome, FenceCleared):
                self._caller.answer(request, messages.FenceCleared(outcome.count))
            else:
                self._caller.answer_denied(request, outcome)

        number = self._caller.expect(on_outcome)
        self._runtime.post(FenceClearRequested(number, body.device))

    def drain(self, request: Request, event_for: Callable[[int], Event]) -> None:
        """DRAIN and DRAIN_CANCEL, each with the event that it is."""
        self._caller.need_operator(request.op.name)

        def on_outcome(outcome: Outcome) -> None:
            if isinstance(outcome, DrainSet):
                self._caller.answer(request, status_of(outcome))
            else:
                self._caller.answer_denied(request, outcome)

        number = self._caller.expect(on_outcome)
        self._runtime.post(event_for(number))
