"""The lease table against a shell that is slow, forgetful and out of order, judged from outside.

Timers fire early, late, twice or never. Orders to workers get lost, and workers die at random. The daemon is killed and
comes back with its disk; see `simulated`.
"""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpulease.daemon.leases import (
    AcquireRequested,
    Cause,
    ConnectionsChanged,
    DenialReason,
    DrainCancelled,
    DrainRequested,
    Event,
    FenceClearRequested,
    FreeRequested,
    GuestAttached,
    LeaseState,
    LeaseTerms,
    PoolTimerFired,
    ReclaimProved,
    Recycling,
    RefuseWork,
    RenewRequested,
    RequesterGone,
    RevokeRequested,
    ScrubWorker,
    SessionCondemned,
    SessionFaulted,
    ShutdownRequested,
    SpawnSubmit,
    SpawnWorker,
    SubmitAbandoned,
    SubmitRequested,
    TimerFired,
    TimerKind,
    WarmUp,
    WorkerExited,
    WorkerScrubbed,
)
from gpulease.daemon.leases.quotas import TenantRules
from gpulease.daemon.leases.warm_pool import MAX_BACK_OFF_S, REFILL_PAUSE_MS
from gpulease.protocol.opcodes import Exclusivity

from .expected_recycling import RECYCLING
from .expected_tenants import NARROW, RULES, WIDE
from .simulated import CARDS, LIMITS, MS, Shell

TENANTS = st.sampled_from(["ann", "bob", "cid"])
ANY = st.integers(min_value=0, max_value=1 << 16)


class AnyOrder(RuleBasedStateMachine):
    """State machine that draws the next event."""

    def __init__(self) -> None:
        super().__init__()
        self.shell = Shell()
        self.number = 0

    @initialize(warm_contexts=st.sampled_from([0, 1, 3]), recycling=st.sampled_from([None, RECYCLING]))
    def begin(self, warm_contexts: int, recycling: Recycling | None) -> None:
        self.warm_contexts = warm_contexts
        self.shell = Shell(warm_contexts, recycling)
        self.shell.send(PoolTimerFired())

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def some_lease(self, pick: int) -> int:
        """Return a live lease as a rule, else any that was ever placed; 1 if there was none."""
        live = [lease.lease_id for lease in self.shell.table.snapshots()]
        ids = live if live and pick % 4 else list(self.shell.spawned)
        return ids[pick // 4 % len(ids)] if ids else 1

    def owner_of(self, lease_id: int, pick: int) -> str:
        """Return the lease's tenant as a rule, else another name."""
        lease = self.shell.table.get(lease_id)
        return lease.tenant if lease is not None and pick % 3 else "ann"

    def ask(self, build: Callable[[int], Event]) -> None:
        number = self.next_number()
        self.shell.request(build(number), number)

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
                LeaseTerms(size, ttl_ms, exclusivity, submit_bytes=for_submits, orphan_ms=(0, 400)[lease_id % 2]),
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

    @rule(pick=ANY, by=ANY, ttl_ms=st.one_of(st.integers(1, 8000), st.integers(0, 8100)), is_operator=st.booleans())
    def renew(self, pick: int, by: int, ttl_ms: int, is_operator: bool) -> None:
        lease_id = self.some_lease(pick)
        tenant = self.owner_of(lease_id, by)
        self.ask(lambda number: RenewRequested(number, lease_id, tenant, ttl_ms, is_operator))

    @rule(pick=ANY)
    def open_session(self, pick: int) -> None:
        self.shell.submits.open_session(self.some_lease(pick), self.shell)

    @rule(pick=ANY, is_connected=st.booleans())
    def change_connections(self, pick: int, is_connected: bool) -> None:
        self.shell.send(ConnectionsChanged(self.some_lease(pick), is_connected))

    @rule(pick=ANY, by=ANY, is_operator=st.booleans())
    def free(self, pick: int, by: int, is_operator: bool) -> None:
        lease_id = self.some_lease(pick)
        tenant = self.owner_of(lease_id, by)
        self.ask(lambda number: FreeRequested(number, lease_id, tenant, is_operator))

    @rule(pick=ANY)
    def revoke(self, pick: int) -> None:
        lease_id = self.some_lease(pick)
        self.ask(lambda number: RevokeRequested(number, lease_id, "because"))

    @rule(uuid=st.sampled_from([None, "GPU-a", "GPU-b", "MIG-c", "GPU-z"]))
    def clear_fences(self, uuid: str | None) -> None:
        self.ask(lambda number: FenceClearRequested(number, uuid))

    @precondition(lambda self: self.shell.open_requests)
    @rule(pick=ANY)
    def client_leaves(self, pick: int) -> None:
        requests = sorted(self.shell.open_requests)
        request = requests[pick % len(requests)]
        waits = {waiter.request for waiter in self.shell.table.waiting()}
        submits = self.shell.table.submits.asked()
        effects = self.shell.send(RequesterGone(request))
        # A free or a revoke goes on without its client; an acquire gets no reply any more, nor does a submit.
        if request in waits | submits or RefuseWork in map(type, effects):
            self.shell.open_requests.remove(request)

    @precondition(lambda self: self.shell.alive)
    @rule(pick=ANY)
    def worker_dies(self, pick: int) -> None:
        alive = sorted(self.shell.alive)
        self.shell.send(WorkerExited(alive[pick % len(alive)], "signal 11"))

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
        self.shell.look(lease.card_uuid)
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

    @precondition(lambda self: self.shell.jobs)
    @rule(pick=ANY, luck=ANY, is_lost=st.sampled_from([False] * 7 + [True]))
    def job_is_done(self, pick: int, luck: int, is_lost: bool) -> None:
        job = self.shell.jobs.pop(pick % len(self.shell.jobs))
        if not is_lost:
            self.shell.do_job(job, luck)

    @rule(is_busy=st.booleans())
    def all_jobs_are_done(self, is_busy: bool) -> None:
        while is_busy and self.shell.jobs:
            self.shell.do_job(self.shell.jobs.pop(0), 1)

    @precondition(lambda self: self.shell.timers)
    @rule(pick=ANY, is_repeated=st.booleans(), is_early=st.booleans())
    def timer_fires(self, pick: int, is_repeated: bool, is_early: bool) -> None:
        due_ns, event = self.shell.timers.pop(pick % len(self.shell.timers))
        if is_repeated:
            self.shell.timers.append((due_ns, event))
        if not is_early:
            self.shell.now_ns = max(self.shell.now_ns, due_ns)
        self.shell.fire(event)

    @precondition(lambda self: self.shell.timers)
    @rule(pick=ANY)
    def timer_is_lost(self, pick: int) -> None:
        self.shell.lost_timers.append(self.shell.timers.pop(pick % len(self.shell.timers)))

    @rule(pick=ANY, unowned=st.integers(-20, 400), outside=st.integers(-20, 400), luck=ANY)
    def others_come_and_go(self, pick: int, unowned: int, outside: int, luck: int) -> None:
        card = CARDS[pick % len(CARDS)]
        is_there = luck % 3 == 1
        self.shell.others[card.uuid] = (unowned, outside) if is_there else (0, 0)

    @rule(pick=ANY, ms=st.sampled_from([0, 1000, 2000]))
    def a_card_is_looked_at(self, pick: int, ms: int) -> None:
        self.shell.now_ns += ms * MS
        self.shell.look(CARDS[pick % len(CARDS)].uuid)

    @precondition(lambda self: self.shell.lingering)
    @rule(pick=ANY)
    def a_dead_workers_bytes_leave_the_card(self, pick: int) -> None:
        numbers = sorted(self.shell.lingering)
        del self.shell.lingering[numbers[pick % len(numbers)]]

    @rule(ms=st.integers(0, 3000))
    def time_passes(self, ms: int) -> None:
        self.shell.now_ns += ms * MS

    @precondition(lambda self: self.shell.spawned)
    @rule(pick=ANY)
    def stray_proof(self, pick: int) -> None:
        lease_id = self.some_lease(pick)
        if lease_id not in self.shell.asked_to_prove:
            self.shell.send(ReclaimProved(lease_id))

    @precondition(lambda self: self.shell.spawned)
    @rule(pick=ANY, kind=st.sampled_from(TimerKind), generation=st.integers(0, 4))
    def stray_timer(self, pick: int, kind: TimerKind, generation: int) -> None:
        self.shell.send(TimerFired(self.some_lease(pick), generation, kind))

    @rule(luck=ANY, is_tail_lost=st.booleans(), is_zygote_told=st.booleans())
    def restart(self, luck: int, is_tail_lost: bool, is_zygote_told: bool) -> None:
        if luck % 3 == 1:
            self.shell.restart(is_tail_lost=is_tail_lost, is_zygote_told=is_zygote_told)

    @rule(luck=ANY, within_ms=st.integers(0, 3000))
    def drain(self, luck: int, within_ms: int) -> None:
        if luck % 16 == 1:
            self.ask(lambda number: DrainRequested(number, within_ms))

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

    @invariant()
    def ended_leases_stay_ended(self) -> None:
        active = {
            lease.lease_id
            for lease in self.shell.table.snapshots()
            if lease.state in (LeaseState.PENDING, LeaseState.ACTIVE)
        }
        assert not active & self.shell.ended
        for lease_id in self.shell.ended:
            denial = self.shell.table.denial_for(lease_id, self.shell.now_ns)
            assert denial is not None
            if lease_id in self.shell.revoked:
                assert denial.reason in (DenialReason.REVOKED, DenialReason.FENCED), "a revocation was forgotten"

    def teardown(self) -> None:
        shell = self.shell
        shell.finish()
        assert not shell.open_requests, f"requests that were never answered: {shell.open_requests}"
        assert set(shell.spawned) <= shell.ended, "leases that never ended"
        assert {lease.state for lease in shell.table.snapshots()} <= {LeaseState.FENCED}
        self.ask(DrainCancelled)
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
        assert not shell.table.submits.asked()
        assert not shell.table.warming()


FEW = settings(max_examples=40, stateful_step_count=80, deadline=None)
AnyOrder.TestCase.settings = FEW
TestAnyOrder = AnyOrder.TestCase


@pytest.mark.exhaustive
class TestManyOrders(TestAnyOrder):  # type: ignore[valid-type, misc]
    settings = settings(FEW, max_examples=150)
