"""The lease table against a shell that is slow, forgetful and out of order, judged from outside.

Timers fire early, late, twice or never. Orders to workers get lost, and workers die at random. The daemon is killed and
comes back with its disk; see `simulated`.
"""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from gpulease.daemon.leases.devices import PlacementOrder
from gpulease.daemon.leases.events import (
    AcquireRequested,
    ConnectionsChanged,
    DrainCancelled,
    DrainRequested,
    GuestAttached,
    PoolTimerFired,
    ReclaimProved,
    ScrubWorker,
    SessionCondemned,
    SessionFaulted,
    ShutdownRequested,
    SpawnSubmit,
    SpawnWorker,
    SubmitAbandoned,
    TimerFired,
    TimerKind,
    WarmUp,
    WorkerExited,
    WorkerScrubbed,
)
from gpulease.daemon.leases.membership_events import ClaimsLost, MembershipDeadlineMoved
from gpulease.daemon.leases.model import Cause, LeaseState, LeaseTerms, Recycling, SubmitRequested
from gpulease.daemon.leases.quotas import TenantRules
from gpulease.daemon.leases.warm_pool import MAX_BACK_OFF_S, REFILL_PAUSE_MS
from gpulease.protocol.opcodes import Exclusivity

from .expected_names import SLEPT_NS
from .expected_recycling import RECYCLING
from .expected_tenants import NARROW, RULES, WIDE
from .lease_rules import ANY, TENANTS, LeaseRules
from .simulated import CARDS, LIMITS, MS, Shell


class AnyOrder(LeaseRules):
    """State machine that draws the next event."""

    @initialize(
        warm_contexts=st.sampled_from([0, 1, 3]),
        recycling=st.sampled_from([None, RECYCLING]),
        order=st.sampled_from(PlacementOrder),
    )
    def begin(self, warm_contexts: int, recycling: Recycling | None, order: PlacementOrder) -> None:
        self.warm_contexts = warm_contexts
        self.shell = Shell(warm_contexts, recycling, order)
        self.shell.send(PoolTimerFired())

    @rule(
        tenant=TENANTS,
        size=st.one_of(st.integers(1, 300), st.integers(0, 1100)),
        ttl_ms=st.integers(0, 8100),
        exclusivity=st.sampled_from([Exclusivity.SHARED, Exclusivity.SHARED, *Exclusivity]),
        selector=st.sampled_from([None, None, None, "0", "1", "GPU-b", "mig-c", "nope"]),
        wait_ms=st.one_of(st.just(0), st.integers(1, 6100)),
        for_submits=st.sampled_from([0, 0, 5, 40]),
    )
    def acquire(
        self,
        tenant: str,
        size: int,
        ttl_ms: int,
        exclusivity: Exclusivity,
        selector: str | None,
        wait_ms: int,
        for_submits: int,
    ) -> None:
        lease_id = self.next_number()
        self.shell.exclusivity[lease_id] = exclusivity
        self.ask(
            lambda number: AcquireRequested(
                number,
                tenant,
                lease_id,
                LeaseTerms(
                    size, ttl_ms, exclusivity=exclusivity, submit_bytes=for_submits, orphan_ms=(0, 400)[lease_id % 2]
                ),
                selector,
                wait_ms,
            )
        )

    @rule(
        tenant=TENANTS,
        size=st.integers(1, 200),
        ttl_ms=st.integers(100, 8000),
        exclusivity=st.sampled_from([Exclusivity.SHARED, *Exclusivity]),
        wait_ms=st.sampled_from([0, 3000, 6000]),
        for_submits=st.sampled_from([0, 1, 30]),
    )
    def acquire_and_start(
        self, tenant: str, size: int, ttl_ms: int, exclusivity: Exclusivity, wait_ms: int, for_submits: int
    ) -> None:
        """Acquire and start a lease without faults, so that runs often have several active leases."""
        self.acquire(tenant, size, ttl_ms, exclusivity, None, wait_ms, for_submits)
        for job in [job for job in self.shell.jobs if isinstance(job, SpawnWorker | WarmUp)]:
            if job in self.shell.jobs:
                self.shell.jobs.remove(job)
                self.shell.do_job(job, 1)

    @rule(
        tenant=TENANTS,
        name=st.sampled_from(["a", "b", ""]),
        pick=ANY,
        wait_ms=st.sampled_from([0, 3000]),
        is_started=st.booleans(),
    )
    def acquire_claimed(self, tenant: str, name: str, pick: int, wait_ms: int, is_started: bool) -> None:
        """Ask for a name, as a rule with a claim that is new, or for bytes of a quota in the fleet, or for both."""
        lease_id = self.next_number()
        epoch = 0 if not name else lease_id if pick % 6 else max(1, lease_id - pick % 40)
        fleet_bytes = 20 if not name or pick % 4 == 0 else 0
        if name:
            self.shell.names.named[lease_id] = name, epoch
        if fleet_bytes:
            self.shell.names.counted.add(lease_id)
        self.shell.exclusivity[lease_id] = Exclusivity.SHARED
        request_id = f"{lease_id:032x}"
        terms = LeaseTerms(20, 5000, submit_bytes=5 * (pick % 2), name=name, epoch=epoch, request_id=request_id)
        terms = replace(terms, fleet_bytes=fleet_bytes)
        self.ask(lambda number: AcquireRequested(number, tenant, lease_id, terms, None, wait_ms))
        for job in [job for job in self.shell.jobs if isinstance(job, SpawnWorker | WarmUp) and is_started]:
            if job in self.shell.jobs:
                self.shell.jobs.remove(job)
                self.shell.do_job(job, 1)
        lease = self.shell.table.get(lease_id)
        if lease is not None and lease.state is LeaseState.ACTIVE:
            assert self.shell.table.lease_of_request(tenant, request_id) == lease
            assert self.shell.table.lease_of_request("another", request_id) is None

    @rule(by_ms=st.one_of(st.integers(500, 4000), st.integers(-500, 500)))
    def move_membership_deadline(self, by_ms: int) -> None:
        membership_deadline_ns = self.shell.now_ns + by_ms * MS
        self.shell.send(MembershipDeadlineMoved(membership_deadline_ns, membership_deadline_ns + SLEPT_NS))

    @rule(luck=ANY)
    def lose_claims(self, luck: int) -> None:
        if luck % 8 == 1:
            self.shell.send(ClaimsLost("the fleet has fenced this node"))

    @rule(pick=ANY)
    def open_session(self, pick: int) -> None:
        self.shell.submits.open_session(self.some_lease(pick), self.shell)

    @rule(pick=ANY, is_connected=st.booleans())
    def change_connections(self, pick: int, is_connected: bool) -> None:
        self.shell.send(ConnectionsChanged(self.some_lease(pick), is_connected))

    @precondition(lambda self: self.shell.spawned)
    @rule(pick=ANY)
    def session_faults(self, pick: int) -> None:
        self.shell.send(SessionFaulted(self.some_lease(pick), "illegal address"))

    @precondition(lambda self: self.shell.spawned)
    @rule(pick=ANY)
    def somebody_attaches(self, pick: int) -> None:
        lease_id = self.some_lease(pick)
        self.shell.recycled.tainted.add(lease_id)
        self.shell.send(GuestAttached(lease_id))

    @precondition(lambda self: self.shell.spawned)
    @rule(pick=ANY)
    def worker_is_in_doubt(self, pick: int) -> None:
        self.shell.send(WorkerScrubbed(self.some_lease(pick), "it still has 1 byte"))

    @rule(pick=ANY)
    def free_and_scrub(self, pick: int) -> None:
        """Free and scrub a lease without faults, so that runs often recycle contexts."""
        lease_id = self.some_lease(pick)
        self.free(pick, 1, is_operator=False)
        for job in [job for job in self.shell.jobs if job == ScrubWorker(lease_id)]:
            self.shell.jobs.remove(job)
            self.shell.do_job(job, 1)

    @precondition(lambda self: self.shell.spawned)
    @rule(pick=ANY, cause=st.sampled_from([Cause.OVER_SLICE, Cause.KERNEL_TIMEOUT, Cause.UNRESPONSIVE]))
    def session_is_condemned(self, pick: int, cause: Cause) -> None:
        self.shell.send(SessionCondemned(self.some_lease(pick), cause, "a rule was broken"))

    @precondition(lambda self: self.shell.spawned)
    @rule(pick=ANY, by=ANY, timeout_ms=st.sampled_from([0, 100, 3000, 60_000]), is_started=st.booleans())
    def submit(self, pick: int, by: int, timeout_ms: int, is_started: bool) -> None:
        lease_id = self.some_lease(pick)
        tenant = self.owner_of(lease_id, by)
        self.ask(lambda number: SubmitRequested(number, lease_id, tenant, timeout_ms))
        for job in [job for job in self.shell.jobs if isinstance(job, SpawnSubmit) and is_started]:
            self.shell.jobs.remove(job)
            self.shell.do_job(job, 1)

    @rule(tenant=TENANTS, left=st.sampled_from([0, 40, 90]))
    def submit_beside_others(self, tenant: str, left: int) -> None:
        """Set up a submit that would borrow bytes that others have just taken, which is rare at random."""
        self.acquire_and_start(tenant, 100, 8000, Exclusivity.SHARED, 0, 0)
        lease = self.shell.table.get(max(self.shell.spawned, default=1))
        if lease is None:
            return
        free_bytes = next(card.free_bytes for card in self.shell.table.cards() if card.uuid == lease.card_uuid)
        unowned, outside = self.shell.others[lease.card_uuid]
        self.shell.others[lease.card_uuid] = unowned, outside + max(0, free_bytes - left)
        self.shell.poll(lease.card_uuid)
        self.ask(lambda number: SubmitRequested(number, lease.lease_id, lease.tenant, 3000))

    @precondition(lambda self: self.warm_contexts)
    @rule(tenant=TENANTS, how=st.sampled_from(["starts", "dies", "hangs"]), is_refilled=st.booleans())
    def submit_takes_a_context(self, tenant: str, how: str, is_refilled: bool) -> None:
        """Set up a submit on a warm context, which is rare at random."""
        if is_refilled:
            self.shell.now_ns += MAX_BACK_OFF_S * 1000 * MS
            self.shell.send(PoolTimerFired())
        self.acquire_and_start(tenant, 20, 8000, Exclusivity.SHARED, 0, 10)
        if is_refilled:
            self.shell.now_ns += REFILL_PAUSE_MS * MS
            self.shell.send(PoolTimerFired())
        for made in [job for job in self.shell.jobs if isinstance(job, WarmUp)]:
            self.shell.jobs.remove(made)
            self.shell.do_job(made, 1)
        lease_id = max(self.shell.spawned, default=1)
        self.ask(lambda number: SubmitRequested(number, lease_id, tenant, 3000))
        for job in [job for job in self.shell.jobs if isinstance(job, SpawnSubmit) and job.is_warm]:
            self.shell.jobs.remove(job)
            if how == "starts":
                self.shell.do_job(job, 1)
            elif how == "dies":
                self.shell.send(WorkerExited(job.submit_id, "signal 9"))
            else:
                self.shell.now_ns += LIMITS.adopt_timeout_s * 1000 * MS
                self.shell.send(TimerFired(job.submit_id, 0, TimerKind.SPAWN))

    @precondition(lambda self: self.shell.table.submits.snapshots())
    @rule(pick=ANY, what=st.sampled_from(["dies", "abandoned", "condemned", "proof", *TimerKind]))
    def submit_is_troubled(self, pick: int, what: str | TimerKind) -> None:
        submits = self.shell.table.submits.snapshots()
        number = submits[pick % len(submits)].submit_id
        if what == "dies" and number in self.shell.alive:
            self.shell.send(WorkerExited(number, "signal 11"))
        elif what == "abandoned" and number in self.shell.submits.running:
            self.shell.send(SubmitAbandoned(number))
        elif what == "condemned":
            self.shell.send(SessionCondemned(number, Cause.OVER_SLICE, "a rule was broken"))
        elif isinstance(what, TimerKind):
            self.shell.send(TimerFired(number, 0, what))
        elif number not in self.shell.asked_to_prove:
            self.shell.send(ReclaimProved(number))

    @precondition(lambda self: self.shell.table.warming())
    @rule(pick=ANY, cause=st.sampled_from(["unresponsive", "proof", *TimerKind]))
    def warm_context_is_troubled(self, pick: int, cause: str | TimerKind) -> None:
        warm_id = self.shell.table.warming()[pick % len(self.shell.table.warming())].warm_id
        if cause == "unresponsive":
            self.shell.send(SessionCondemned(warm_id, Cause.UNRESPONSIVE, "it showed no sign of life"))
        elif isinstance(cause, TimerKind):
            self.shell.send(TimerFired(warm_id, 0, cause))
        elif warm_id not in self.shell.asked_to_prove:
            self.shell.send(ReclaimProved(warm_id))

    @rule(pick=ANY, unowned=st.integers(-20, 400), outside=st.integers(-20, 400), luck=ANY)
    def others_come_and_go(self, pick: int, unowned: int, outside: int, luck: int) -> None:
        card = CARDS[pick % len(CARDS)]
        is_there = luck % 3 == 1
        self.shell.others[card.uuid] = (unowned, outside) if is_there else (0, 0)

    @rule(pick=ANY, ms=st.sampled_from([0, 1000, 2000]))
    def a_card_is_looked_at(self, pick: int, ms: int) -> None:
        self.shell.now_ns += ms * MS
        self.shell.poll(CARDS[pick % len(CARDS)].uuid)

    @precondition(lambda self: self.shell.lingering)
    @rule(pick=ANY)
    def a_dead_workers_bytes_leave_the_card(self, pick: int) -> None:
        numbers = sorted(self.shell.lingering)
        del self.shell.lingering[numbers[pick % len(numbers)]]

    @precondition(lambda self: self.shell.spawned)
    @rule(pick=ANY)
    def stray_proof(self, pick: int) -> None:
        lease_id = self.some_lease(pick)
        if lease_id not in self.shell.asked_to_prove:
            self.shell.send(ReclaimProved(lease_id))

    @rule(luck=ANY, within_ms=st.integers(0, 3000))
    def drain(self, luck: int, within_ms: int) -> None:
        if luck % 16 == 1:
            self.ask(lambda number: DrainRequested(number, within_ms))

    @rule(luck=ANY, card=st.sampled_from(["0", "gpu-b", "MIG-c", "nope"]), within_ms=st.integers(0, 3000))
    def drain_card(self, luck: int, card: str, within_ms: int) -> None:
        if luck % 8 == 1:
            self.ask(lambda number: DrainRequested(number, within_ms, card))

    @rule(card=st.sampled_from(["0", "gpu-b", "MIG-c", "nope"]))
    def cancel_drain_of_card(self, card: str) -> None:
        self.ask(lambda number: DrainCancelled(number, card))

    @rule(luck=ANY)
    def cancel_drain(self, luck: int) -> None:
        if luck % 4 == 1 or self.shell.table.drain_ns is None:
            self.ask(DrainCancelled)

    @rule(luck=ANY, rules=st.sampled_from([RULES, NARROW, WIDE]), renamed=st.frozensets(TENANTS, max_size=1))
    def rules_change(self, luck: int, rules: TenantRules, renamed: frozenset[str]) -> None:
        if luck % 8 == 1:
            self.shell.change_rules(rules, renamed)

    @rule(luck=ANY)
    def shutdown(self, luck: int) -> None:
        if luck % 64 == 1:
            self.shell.send(ShutdownRequested())

    def teardown(self) -> None:
        shell = self.shell
        shell.finish()
        assert not shell.open_requests, f"requests that were never answered: {shell.open_requests}"
        assert set(shell.spawned) <= shell.ended, "leases that never ended"
        assert {lease.state for lease in shell.table.snapshots()} <= {LeaseState.FENCED}
        for card in (None, *(card.uuid for card in CARDS)):
            self.ask(partial(DrainCancelled, card=card))
        self.clear_fences(None)
        shell.leave_alone()
        shell.finish()
        assert all(card.held_bytes == 0 for card in shell.table.cards())
        wanted = 0 if shell.table.is_shutting_down else self.warm_contexts
        assert [card.warm_contexts for card in shell.table.cards()] == [wanted] * len(CARDS), "a pool that is not full"
        shell.send(ShutdownRequested())
        shell.finish()
        assert not shell.unproved
        assert not shell.table.submits.snapshots()
        assert not shell.table.submits.open_requests()
        assert not shell.table.warming()
        assert not shell.table.regions.snapshots()


FEW = settings(max_examples=20, stateful_step_count=80, deadline=None)
AnyOrder.TestCase.settings = FEW
TestAnyOrder = AnyOrder.TestCase


@pytest.mark.exhaustive
class TestManyOrders(TestAnyOrder):  # type: ignore[valid-type, misc]
    settings = settings(FEW, max_examples=150)


def test_a_restart_ends_a_lease_past_its_nodes_isolation_whose_timer_is_late() -> None:
    """The lease is refused with the same reason before and after, so the restart changes no answer about it."""
    state = AnyOrder()
    state.begin(warm_contexts=0, recycling=None, order=PlacementOrder.SPREAD)
    state.move_membership_deadline(by_ms=500)
    state.acquire_claimed(tenant="ann", name="a", pick=1, wait_ms=0, is_started=True)
    state.time_passes(ms=1000)
    (lease,) = state.shell.table.snapshots()
    assert lease.state is LeaseState.ACTIVE
    before = state.shell.table.denial_for(lease.lease_id, state.shell.now_ns)
    state.restart(luck=1, is_tail_lost=False, is_zygote_told=False)
    (ended,) = state.shell.table.snapshots()
    assert ended.state is LeaseState.DRAINING
    after = state.shell.table.denial_for(lease.lease_id, state.shell.now_ns)
    assert before is not None
    assert after is not None
    assert before.reason == after.reason
    state.teardown()
