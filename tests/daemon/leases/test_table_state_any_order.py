"""The queue in any order, judged from outside: who keeps whom off free bytes, and for how long.

Tenants come, wait, leave, get leases and end them; timers fire on time. The node's bytes, and who joined the queue
when, are kept apart from the table's own state.
"""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.devices import Card, PlacementOrder
from gpulease.daemon.leases.events import (
    AcquireRequested,
    ArmTimer,
    Effect,
    Event,
    FreeRequested,
    HoldTimerFired,
    ReclaimProved,
    RequestDenied,
    RequesterGone,
    SpawnWorker,
    WaitTimerFired,
    WorkerExited,
    WorkerReady,
)
from gpulease.daemon.leases.model import LeaseTerms
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable

MS = 1_000_000
HOLD_NS = 1000 * MS
WINDOW_NS = 10 * HOLD_NS
CARDS = (Card("GPU-a", 0, "Big", 100, 0), Card("GPU-b", 1, "Small", 60, 0))
LIMITS = CoreLimits(max_hold_back_s=1, max_waiting=6, max_waiting_per_tenant=3)
ANY = st.integers(min_value=0, max_value=1 << 16)


@dataclass(frozen=True)
class ReceivedRequest:
    """An acquire and its time; its lease has the same number."""

    event: AcquireRequested
    since_ns: int

    def cards(self) -> set[str]:
        wanted, size = self.event.selector, self.event.terms.size_bytes
        return {card.uuid for card in CARDS if wanted in (None, str(card.index)) and size <= card.capacity_bytes}


class Line(RuleBasedStateMachine):
    """State machine that draws the next event."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(CARDS, LIMITS)
        self.now_ns = 5_000 * MS
        self.number = 0
        self.line: dict[int, ReceivedRequest] = {}
        self.placed: dict[int, tuple[ReceivedRequest, str]] = {}
        self.joins: dict[str, list[int]] = {}
        self.kept_off_at: dict[str, list[int]] = {}
        self.wait_due: dict[int, int] = {}
        self.hold_due: int | None = None

    @initialize(order=st.sampled_from(PlacementOrder))
    def begin(self, order: PlacementOrder) -> None:
        self.table = LeaseTable(CARDS, LIMITS, order=order)

    # --- The node, from outside. ---

    def free_bytes(self, uuid: str) -> int:
        capacity = next(card.capacity_bytes for card in CARDS if card.uuid == uuid)
        return capacity - sum(asked.event.terms.size_bytes for asked, at in self.placed.values() if at == uuid)

    def room_for(self, asked: ReceivedRequest) -> set[str]:
        return {uuid for uuid in asked.cards() if asked.event.terms.size_bytes <= self.free_bytes(uuid)}

    def keepers(self, uuid: str, behind: list[ReceivedRequest]) -> set[str]:
        """Return the waiters ahead whose tenants may keep others off the card."""
        able = [asked for asked in behind if uuid in asked.cards() and self.now_ns - asked.since_ns < HOLD_NS]
        return {asked.event.tenant for asked in able if not self.has_own(asked)}

    def has_own(self, asked: ReceivedRequest) -> bool:
        tenant, cards = asked.event.tenant, asked.cards()
        return any(other.event.tenant == tenant and at in cards for other, at in self.placed.values())

    def judge_kept_off(self, asked: ReceivedRequest, ahead: list[ReceivedRequest]) -> None:
        """Check that each card with room is kept by someone ahead of a request that was not placed."""
        for uuid in self.room_for(asked):
            keepers = self.keepers(uuid, ahead)
            assert keepers, f"{asked} is kept off {uuid} by nobody who may"
            if len(keepers) == 1:
                moments = self.kept_off_at.setdefault(keepers.pop(), [])
                moments.append(self.now_ns)
                for earlier_ns in moments:
                    apart_ns = self.now_ns - earlier_ns
                    assert apart_ns < HOLD_NS or apart_ns > WINDOW_NS - HOLD_NS, "a tenant kept others off for too long"

    def judge_passed(self, uuid: str, ahead: list[ReceivedRequest]) -> None:
        """Check that a newcomer passed nobody who had just begun to hold others back."""
        for asked in ahead:
            begun = [joined for joined in self.joins[asked.event.tenant] if joined <= asked.since_ns]
            is_first = all(joined == asked.since_ns or asked.since_ns - joined >= WINDOW_NS for joined in begun)
            is_fresh = is_first and self.now_ns - asked.since_ns < HOLD_NS
            is_held = uuid in asked.cards() and not self.has_own(asked)
            # The table remembers the terms of `max_waiting` tenants; there are fewer here.
            assert not (is_fresh and is_held), f"{asked} was passed on {uuid}"

    # --- The table. ---

    def send(self, event: Event) -> list[Effect]:
        effects = self.table.handle(event, self.now_ns)
        self.table.validate()
        for effect in effects:
            if isinstance(effect, SpawnWorker) and effect.lease_id in self.line:
                self.placed[effect.lease_id] = (self.line.pop(effect.lease_id), effect.card_uuid)
            elif isinstance(effect, RequestDenied):
                self.line.pop(effect.request, None)
            elif isinstance(effect, ArmTimer) and isinstance(effect.event, WaitTimerFired):
                self.wait_due[effect.event.request] = effect.due_ns
            elif isinstance(effect, ArmTimer) and isinstance(effect.event, HoldTimerFired):
                assert effect.due_ns > self.now_ns
                self.hold_due = effect.due_ns
        return effects

    def judge_line(self) -> None:
        assert [waiter.request for waiter in self.table.waiting()] == list(self.line)
        ahead: list[ReceivedRequest] = []
        for asked in self.line.values():
            self.judge_kept_off(asked, ahead)
            ahead.append(asked)

    @rule(
        tenant=st.sampled_from(["ann", "bob", "cid", "dan"]),
        size=st.one_of(st.integers(1, 30), st.integers(1, 100)),
        selector=st.sampled_from([None, "0", "1"]),
        wait_ms=st.sampled_from([0, 0, 500, 5_000, 60_000]),
    )
    def acquire(self, tenant: str, size: int, selector: str | None, wait_ms: int) -> None:
        self.number += 1
        number = self.number
        event = AcquireRequested(number, tenant, number, LeaseTerms(size, 60_000), selector=selector, wait_ms=wait_ms)
        asked, ahead = ReceivedRequest(event, self.now_ns), list(self.line.values())
        for effect in (effects := self.send(event)):
            if isinstance(effect, SpawnWorker) and effect.lease_id == number:
                self.judge_passed(effect.card_uuid, ahead)
                self.placed[number] = (asked, effect.card_uuid)
            elif isinstance(effect, RequestDenied) and effect.denial.reason is DenialReason.CAPACITY_EXCEEDED:
                self.judge_kept_off(asked, ahead)
                assert not self.room_for(asked) or "earlier requests" in effect.denial.message
            elif isinstance(effect, ArmTimer) and isinstance(effect.event, WaitTimerFired):
                self.line[number] = asked
                self.joins.setdefault(tenant, []).append(self.now_ns)
        assert effects
        self.judge_line()

    @precondition(lambda self: self.placed)
    @rule(pick=ANY)
    def lease_ends(self, pick: int) -> None:
        lease_id = sorted(self.placed)[pick % len(self.placed)]
        self.send(WorkerReady(lease_id))
        self.send(FreeRequested(0, lease_id, self.placed[lease_id][0].event.tenant))
        self.send(WorkerExited(lease_id, "killed"))
        del self.placed[lease_id]
        self.send(ReclaimProved(lease_id))
        self.judge_line()

    @precondition(lambda self: self.line)
    @rule(pick=ANY)
    def client_leaves(self, pick: int) -> None:
        request = sorted(self.line)[pick % len(self.line)]
        del self.line[request]
        self.send(RequesterGone(request))
        self.judge_line()

    @rule(ms=st.sampled_from([1, 200, 500, 999, 1000, 3000, 8000, 9000, 10_000]))
    def time_passes(self, ms: int) -> None:
        """Let time pass; timers that come due fire on time."""
        end_ns = self.now_ns + ms * MS
        while (due_ns := min([*self.wait_due.values(), self.hold_due or end_ns + 1])) <= end_ns:
            self.now_ns = max(self.now_ns, due_ns)
            if self.hold_due == due_ns:
                self.hold_due = None
                self.send(HoldTimerFired())
            for request in [request for request, wait_ns in self.wait_due.items() if wait_ns == due_ns]:
                del self.wait_due[request]
                self.send(WaitTimerFired(request))
            self.judge_line()
        self.now_ns = end_ns
        self.judge_line()


FEW = settings(max_examples=20, stateful_step_count=60, deadline=None)
Line.TestCase.settings = FEW
TestLine = Line.TestCase


@pytest.mark.exhaustive
class TestManyLines(TestLine):  # type: ignore[valid-type, misc]
    settings = settings(FEW, max_examples=150)
