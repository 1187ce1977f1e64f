"""An acquire from its request to its answer: its checks, its claims in the fleet if it needs any, then its placement.

A client that asks again with the request id of an acquire that is still open takes it over: the later connection gets
the answer, and nothing is requested twice. An acquire is open until its grant is durable, even if its client has
disconnected by then. If the grant was answered, by this daemon or an earlier one, the client gets the lease again.
"""

import time
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Final

from gpulease.daemon.broker.name_claims import BytesAnswer, BytesWant, ClaimAnswer, ClaimWant, release_all
from gpulease.daemon.broker.refusal import failure_of
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.leases import (
    AcquireRequested,
    AcquireStep,
    Checked,
    Denied,
    Granted,
    Outcome,
    RequesterGone,
)
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status
from gpulease.protocol.time_units import NS_PER_MS

Answer = Callable[[Granted | Failure], None]

TAKEN_OVER: Final = Failure(
    Status.CANCELLED,
    "another connection asked with the same request id, and gets the answer",
    hint="Wait for the answer there.",
)
"""Answer to the earlier of two requests with the same request id."""


class Acquire:
    """An acquire that is not answered yet.

    Args:
        event: The acquire without its number, and without claims.
        open_acquires: The node's open acquires by tenant and request id, which this one enters and leaves.
    """

    def __init__(
        self,
        runtime: Runtime,
        event: AcquireRequested,
        open_acquires: "MutableMapping[tuple[str, str], Acquire]",
    ) -> None:
        self._runtime = runtime
        self._event = event
        self._answer: Answer = lambda _: None
        self._open_acquires = open_acquires
        self._began_ns = time.monotonic_ns()
        self._number = 0
        self._is_over = False
        self._answers = 0
        self._cancel: Callable[[], None] | None = None

    def begin(self, answer: Answer) -> None:
        """Have it checked; then claim the name, then bytes of the tenant's quota, and then request the lease.

        `answer` gets the grant, or why there is none, exactly once, unless the acquire is abandoned.
        """
        self._answer = answer
        event, terms = self._event, self._event.terms
        if terms.request_id:
            self._open_acquires[event.tenant, terms.request_id] = self
        if terms.name or self._runtime.table.counts_in_fleet(event.tenant):
            # Check first, because a claim costs all nodes of the fleet a write to the store.
            self._post(event, AcquireStep.CHECK)
        else:
            self._post(event, AcquireStep.BOTH)

    def pass_to(self, answer: Answer) -> None:
        """Answer another request instead, and answer the earlier one with TAKEN_OVER."""
        earlier, self._answer = self._answer, answer
        earlier(TAKEN_OVER)

    def give_up(self) -> None:
        """Abandon the acquire without an answer, because its client has disconnected.

        An outcome that waits to be durable is still answered: until then a later request may take the acquire over.
        """
        if self._is_over or (self._number and not self._runtime.is_awaited(self._number)):
            return
        self._leave()
        # It waits for the fleet, or for the table; or for neither, between two steps.
        if self._cancel is not None:
            self._cancel()
        elif self._number:
            self._runtime.post(RequesterGone(self._number))
            self._runtime.forget(self._number)
        self._release_unused()

    def _wait(self, ask: Callable[[], Callable[[], None]]) -> None:
        """Request a claim, and keep the function that cancels it, unless the answer came during the request."""
        answers = self._answers
        cancel = ask()
        # The fleet may answer before `ask` returns; then nothing is left to cancel.
        if answers == self._answers:
            self._cancel = cancel

    def _on_claim(self, answer: ClaimAnswer) -> None:
        self._answers, self._cancel = self._answers + 1, None
        if isinstance(answer, Failure):
            self._refuse(answer)
            return
        self._event = replace(self._event, terms=replace(self._event.terms, epoch=answer.epoch))
        self._count()

    def _claim(self) -> None:
        event, name = self._event, self._event.terms.name
        if not name:
            self._count()
            return
        want = ClaimWant(name, event.lease_id, event.tenant, self._left_ms())
        self._wait(lambda: self._runtime.claims.claim(want, self._on_claim))

    def _count(self) -> None:
        """Claim bytes of the tenant's quota in the fleet. A tenant without a quota goes straight to the placement."""
        event = self._event
        if not self._runtime.table.counts_in_fleet(event.tenant):
            self._ask(event)
            return
        want = BytesWant(event.tenant, event.lease_id, event.terms.size_bytes, self._left_ms())
        self._wait(lambda: self._runtime.claims.count(want, self._on_counted))

    def _on_counted(self, answer: BytesAnswer) -> None:
        self._answers, self._cancel = self._answers + 1, None
        if isinstance(answer, Failure):
            self._refuse(answer)
            return
        terms = self._event.terms
        self._event = replace(self._event, terms=replace(terms, fleet_bytes=terms.size_bytes))
        self._ask(self._event)

    def _left_ms(self) -> int:
        """Return how long the tenant is still willing to wait."""
        return max(0, self._event.wait_ms - (time.monotonic_ns() - self._began_ns) // NS_PER_MS)

    def _refuse(self, failure: Failure) -> None:
        """Answer that the fleet refused a claim, and log and count it, because the table never sees it."""
        self._runtime.recorder.refused("LEASE_ALLOC", self._event.tenant, self._event.lease_id, failure.message)
        self._runtime.metrics.refused("LEASE_ALLOC", failure.status)
        self._release_unused()
        self._finish(failure)

    def _ask(self, event: AcquireRequested) -> None:
        self._post(replace(event, wait_ms=self._left_ms()), AcquireStep.PLACE)

    def _post(self, event: AcquireRequested, step: AcquireStep) -> None:
        self._number = self._runtime.expect(self._on_outcome)
        self._runtime.post(replace(event, request=self._number, step=step))

    def _on_outcome(self, outcome: Outcome) -> None:
        if isinstance(outcome, Granted):
            self._finish(outcome)
        elif isinstance(outcome, Checked):
            self._number = 0
            self._claim()
        elif isinstance(outcome, Denied):
            self._release_unused()
            self._finish(failure_of(outcome.denial))

    def _release_unused(self) -> None:
        """End the claims if the lease table knows no such lease. If it does, the lease's end will end them."""
        terms, lease_id = self._event.terms, self._event.lease_id
        if terms.is_claimed and self._runtime.table.get(lease_id) is None:
            release_all(self._runtime.claims, self._event.tenant, lease_id, terms)

    def _finish(self, result: Granted | Failure) -> None:
        self._leave()
        self._answer(result)

    def _leave(self) -> None:
        self._is_over = True
        key = self._event.tenant, self._event.terms.request_id
        if self._open_acquires.get(key) is self:
            del self._open_acquires[key]


class OpenAcquires:
    """The acquires that one control connection waits for.

    Args:
        runtime: The node's runtime.
        by_request: The node's open acquires by tenant and request id.
    """

    def __init__(self, runtime: Runtime, by_request: MutableMapping[tuple[str, str], Acquire]) -> None:
        self._runtime = runtime
        self._by_request = by_request
        self._answers: dict[int, tuple[Acquire, Answer]] = {}
        self._last_number = 0

    def answer_known(self, tenant: str, request_id: str, answer: Answer) -> bool:
        """Answer with the open acquire or the active lease of that request id. Returns whether there is one."""
        if not request_id:
            return False
        if (acquire := self._by_request.get((tenant, request_id))) is not None:
            acquire.pass_to(self._answer_of(acquire, answer))
            return True
        lease = self._runtime.table.lease_of_request(tenant, request_id)
        if lease is None:
            return False
        # Its acquire is no longer open, so the journal and the audit log have the grant.
        answer(Granted(0, lease))
        return True

    def ask(self, event: AcquireRequested, answer: Answer) -> None:
        """Request a lease with a request id that is not known here."""
        acquire = Acquire(self._runtime, event, self._by_request)
        acquire.begin(self._answer_of(acquire, answer))

    def leave(self) -> None:
        """Abandon all acquires, because the client has disconnected."""
        open_ones, self._answers = self._answers, {}
        for acquire, _ in open_ones.values():
            acquire.give_up()

    def answer_all(self, failure: Failure) -> None:
        """Answer all acquires with a failure; they stay open until `leave`."""
        for _, answer in self._answers.values():
            answer(failure)

    def _answer_of(self, acquire: Acquire, answer: Answer) -> Answer:
        """Record that this connection waits for an acquire. Returns the function that answers it."""
        self._last_number += 1
        self._answers[self._last_number] = acquire, answer
        return partial(self._answer, self._last_number, answer)

    def _answer(self, number: int, answer: Answer, result: Granted | Failure) -> None:
        self._answers.pop(number, None)
        answer(result)
