"""Acquires with claims in the fleet: of a name, or of bytes of the tenant's quota.

A claim costs all nodes of the fleet a write to the store. So the lease table checks such an acquire first, and denies
one that this node would deny anyway. Then the node asks the fleet for the claims, and the table places the lease. The
request keeps its number through all steps. An acquire without a claim has a single step and does not come here.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from gpulease.daemon.broker.name_claims import (
    FleetClaims,
    NameAnswer,
    NameRequest,
    QuotaAnswer,
    QuotaRequest,
    release_all,
)
from gpulease.daemon.leases.acquire_steps import AcquireStep, Checked
from gpulease.daemon.leases.events import AcquireRequested, Event
from gpulease.daemon.leases.table import LeaseTable
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status
from gpulease.protocol.time_units import NS_PER_MS


class ClaimedAcquires:
    """The node's acquires with claims, by request number, until the lease table has decided them.

    Args:
        claims: Returns the node's claims; None if it is in no fleet.
        post: Posts an event to the lease table.
        refuse: Answers an acquire that the fleet refused.

    Attributes:
        by_number: The acquires.
    """

    def __init__(
        self,
        table: LeaseTable,
        claims: Callable[[], FleetClaims | None],
        post: Callable[[Event], None],
        refuse: Callable[[AcquireRequested, Failure], None],
    ) -> None:
        self._table = table
        self._claims = claims
        self._post = post
        self._refuse = refuse
        self.by_number: dict[int, _ClaimedAcquire] = {}

    def begin(self, event: AcquireRequested) -> None:
        """Begin to check, claim and place an acquire. It is answered like any other request."""
        # Keep it by its number, because the check is answered by an effect, not by a call.
        acquire = _ClaimedAcquire(self._table, self._claims(), self._post, self._on_refused, event)
        self.by_number[event.request] = acquire
        acquire.check()

    def on_checked(self, effect: Checked) -> None:
        """Claim an acquire that has passed its check, unless it was abandoned during the check."""
        if (acquire := self.by_number.get(effect.request)) is not None:
            acquire.claim()

    def cancel(self, number: int) -> bool:
        """Stop waiting for the fleet on behalf of an acquire. Returns False if it did not wait for the fleet."""
        acquire = self.by_number.get(number)
        return acquire is not None and acquire.cancel()

    def forget(self, number: int) -> None:
        """Forget an acquire that is decided or abandoned, and end its claims if no lease has them."""
        if (acquire := self.by_number.pop(number, None)) is not None:
            acquire.release_unused()

    def _on_refused(self, event: AcquireRequested, failure: Failure) -> None:
        self.forget(event.request)
        self._refuse(event, failure)


class _ClaimedAcquire:
    """One acquire with claims. The terms of its event contain the claims made so far."""

    def __init__(
        self,
        table: LeaseTable,
        claims: FleetClaims | None,
        post: Callable[[Event], None],
        refuse: Callable[[AcquireRequested, Failure], None],
        event: AcquireRequested,
    ) -> None:
        self._table = table
        self._claims = claims
        self._post = post
        self._refuse = refuse
        self._event = event
        self._began_ns = time.monotonic_ns()
        # Number of answers so far, and the function that cancels the claim request in progress.
        self._answers = 0
        self._cancel: Callable[[], None] | None = None

    def check(self) -> None:
        """Step 1: the lease table checks the request, and counts it against the tenant's rate."""
        self._post(replace(self._event, step=AcquireStep.CHECK))

    def claim(self) -> None:
        """Step 2: claim the name in the fleet; an acquire without a name continues with its quota."""
        event, name = self._event, self._event.terms.name
        if not name:
            self._claim_quota()
            return
        if self._claims is None:
            text = f"this node does not belong to a fleet, so no lease can have the name {name!r} here"
            hint = "Leave the name out, or use a node of a fleet; a node's operator adds it to one with --fleet."
            self._refuse(event, Failure(Status.UNSUPPORTED, text, hint=hint))
            return
        claim, want = self._claims.claim_name, NameRequest(name, event.lease_id, event.tenant, self._left_ms())
        self._wait(lambda: claim(want, self._on_claim))

    def cancel(self) -> bool:
        """Cancel the claim request in progress. Returns False if there is none."""
        # Take the function out first: to cancel twice must not cancel a later claim.
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()
        return cancel is not None

    def release_unused(self) -> None:
        """End the claims if the lease table has no such lease. If it does, the lease's end will end them."""
        event = self._event
        # The terms of the event contain only the claims made so far.
        if event.terms.is_claimed and self._table.get(event.lease_id) is None:
            release_all(self._claims, event.tenant, event.lease_id, event.terms)

    def _wait(self, ask: Callable[[], Callable[[], None]]) -> None:
        """Request a claim, and keep the function that cancels it, unless the answer came during the request."""
        answers = self._answers
        cancel = ask()
        # The fleet may answer before `ask` returns; then nothing is left to cancel.
        if answers == self._answers:
            self._cancel = cancel

    def _on_claim(self, answer: NameAnswer) -> None:
        # Count the answer, so that `_wait` notices an answer that came before `ask` returned.
        self._answers, self._cancel = self._answers + 1, None
        if isinstance(answer, Failure):
            self._refuse(self._event, answer)
            return
        self._event = replace(self._event, terms=replace(self._event.terms, epoch=answer.epoch))
        self._claim_quota()

    def _claim_quota(self) -> None:
        """Step 3: claim bytes of the tenant's quota in the fleet, if it has one."""
        event = self._event
        if not self._table.counts_in_fleet(event.tenant):
            self._place()
            return
        if self._claims is None:
            # The settings can't define a fleet quota without a fleet. If they did, the quota would count as used up.
            text = f"tenant {event.tenant!r} has a fleet quota, but this node does not belong to a fleet"
            self._refuse(
                event,
                Failure(Status.DENIED, text, hint="The node's operator must add a [fleet] table to the settings."),
            )
            return
        want = QuotaRequest(event.tenant, event.lease_id, event.terms.size_bytes, self._left_ms())
        count = self._claims.claim_quota
        self._wait(lambda: count(want, self._on_counted))

    def _on_counted(self, answer: QuotaAnswer) -> None:
        self._answers, self._cancel = self._answers + 1, None
        if isinstance(answer, Failure):
            self._refuse(self._event, answer)
            return
        # From now on the lease's end, or a refusal, returns these bytes.
        terms = self._event.terms
        self._event = replace(self._event, terms=replace(terms, fleet_bytes=terms.size_bytes))
        self._place()

    def _place(self) -> None:
        """Step 4: the lease table places the lease with its claims."""
        self._post(replace(self._event, wait_ms=self._left_ms(), step=AcquireStep.PLACE))

    def _left_ms(self) -> int:
        """Return how much of the tenant's waiting time is left."""
        # All steps share the tenant's wait: each step may wait only for the time that the steps before it left.
        return max(0, self._event.wait_ms - (time.monotonic_ns() - self._began_ns) // NS_PER_MS)
