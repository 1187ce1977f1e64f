"""Rules of a state machine about leases and their regions: requests, sessions, kills, timers and restarts."""

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.events import (
    AcquireRequested,
    EndRegion,
    Event,
    FenceClearRequested,
    FreeRequested,
    RefuseWork,
    RegionCancelRequested,
    RegionRequested,
    RenewRequested,
    RequesterGone,
    ResizeRequested,
    RevokeRequested,
    SpawnWorker,
    TimerFired,
    TimerKind,
    WarmUp,
    WorkerExited,
)
from gpulease.daemon.leases.model import LeaseState, LeaseTerms

from .simulated import MS, Shell

TENANTS = st.sampled_from(["ann", "bob", "cid"])
ANY = st.integers(min_value=0, max_value=1 << 16)


class LeaseRules(RuleBasedStateMachine):
    """Rules that draw the next event of a shell's leases and regions."""

    def __init__(self) -> None:
        super().__init__()
        self.shell = Shell()
        self.number = 0

    def start_lease(self, tenant: str, terms: LeaseTerms, wait_ms: int = 0) -> int:
        """Acquire and start a lease without faults; return its id."""
        lease_id = self.next_number()
        self.shell.exclusivity[lease_id] = terms.exclusivity
        self.ask(lambda number: AcquireRequested(number, tenant, lease_id, terms, None, wait_ms))
        for job in [job for job in self.shell.jobs if isinstance(job, SpawnWorker | WarmUp)]:
            if job in self.shell.jobs:
                self.shell.jobs.remove(job)
                self.shell.do_job(job, 1)
        return lease_id

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def some_lease(self, pick: int) -> int:
        """Return a live lease as a rule, else any that was ever placed; 1 if there was none."""
        live = [lease.lease_id for lease in self.shell.table.snapshots()]
        ids = live if live and pick % 4 else list(self.shell.spawned)
        return ids[pick // 4 % len(ids)] if ids else 1

    def some_region(self, pick: int) -> int:
        """Return a region that is not returned as a rule, else any that there was; a lease if there was none."""
        live = [region.lease_id for region in self.shell.table.regions.snapshots()]
        ids = live if live and pick % 4 else list(self.shell.regions.leases)
        return ids[pick // 4 % len(ids)] if ids else self.some_lease(pick)

    def some_one(self, pick: int) -> int:
        return self.some_region(pick // 2) if pick % 2 else self.some_lease(pick // 2)

    def owner_of(self, lease_id: int, pick: int) -> str:
        """Return the lease's tenant as a rule, else another name."""
        lease = self.shell.table.get(lease_id)
        return lease.tenant if lease is not None and pick % 3 else "ann"

    def ask(self, build: Callable[[int], Event]) -> None:
        number = self.next_number()
        self.shell.request(build(number), number)

    @rule(pick=ANY, by=ANY, ttl_ms=st.one_of(st.integers(1, 8000), st.integers(0, 8100)), is_operator=st.booleans())
    def renew(self, pick: int, by: int, ttl_ms: int, is_operator: bool) -> None:
        lease_id = self.some_one(pick)
        tenant = self.owner_of(lease_id, by)
        self.ask(lambda number: RenewRequested(number, lease_id, tenant, ttl_ms, is_operator))

    @rule(pick=ANY, by=ANY, is_operator=st.booleans())
    def free(self, pick: int, by: int, is_operator: bool) -> None:
        lease_id = self.some_one(pick)
        tenant = self.owner_of(lease_id, by)
        self.ask(lambda number: FreeRequested(number, lease_id, tenant, is_operator))

    @rule(pick=ANY)
    def revoke(self, pick: int) -> None:
        lease_id = self.some_one(pick)
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
        submits = self.shell.table.submits.open_requests()
        effects = self.shell.send(RequesterGone(request))
        # A free or a revoke continues without its client; an acquire or a submit gets no reply then.
        if request in waits | submits or {RefuseWork, EndRegion} & set(map(type, effects)):
            self.shell.open_requests.remove(request)

    @precondition(lambda self: self.shell.alive)
    @rule(pick=ANY)
    def worker_dies(self, pick: int) -> None:
        alive = sorted(self.shell.alive)
        self.shell.send(WorkerExited(alive[pick % len(alive)], "signal 11"))

    @precondition(lambda self: self.shell.spawned)
    @rule(
        pick=ANY,
        by=ANY,
        owner=TENANTS,
        size=st.one_of(st.integers(1, 40), st.integers(0, 300)),
        ttl_ms=st.one_of(st.integers(1, 8000), st.integers(0, 8100)),
        granule=st.sampled_from([1, 1, 16, 0]),
        is_started=st.booleans(),
    )
    def open_region(
        self, pick: int, by: int, owner: str, size: int, ttl_ms: int, granule: int, is_started: bool
    ) -> None:
        lease_id, region_id = self.some_lease(pick), self.next_number()
        tenant, is_operator = self.owner_of(lease_id, by), by % 7 == 0
        self.ask(
            lambda number: RegionRequested(
                number, lease_id, region_id, tenant, owner, size, ttl_ms, granule, is_operator
            )
        )
        while is_started and self.shell.regions.orders.get(lease_id):
            self.shell.regions.carry_out(lease_id, 1, self.shell)

    @rule(tenant=TENANTS, sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), ttl_ms=st.integers(100, 2000))
    def open_regions_of_a_new_lease(self, tenant: str, sizes: list[int], ttl_ms: int) -> None:
        """Open regions without faults, so that runs often have several."""
        lease_id = self.start_lease(tenant, LeaseTerms(100, 5000))
        for size in sizes:
            region_id = self.next_number()
            self.ask(
                lambda number, region_id=region_id, size=size: RegionRequested(  # type: ignore[misc]
                    number, lease_id, region_id, tenant, "bob", size, ttl_ms, 1, is_operator=True
                )
            )
            self.shell.regions.carry_out(lease_id, 1, self.shell)

    @precondition(lambda self: self.shell.regions.leases)
    @rule(pick=ANY, size=st.integers(1, 30))
    def replace_region(self, pick: int, size: int) -> None:
        """Have a region returned and open another, without faults, so that runs often use slots again."""
        region_id, new_id = self.some_region(pick), self.next_number()
        lease_id = self.shell.regions.leases.get(region_id, 1)
        self.ask(lambda number: FreeRequested(number, region_id, "root", is_operator=True))
        while self.shell.regions.orders.get(lease_id):
            self.shell.regions.carry_out(lease_id, 1, self.shell)
        self.shell.regions.release(region_id, self.shell)
        self.ask(
            lambda number: RegionRequested(number, lease_id, new_id, "root", "cid", size, 3000, 1, is_operator=True)
        )
        self.shell.regions.carry_out(lease_id, 1, self.shell)

    @precondition(lambda self: self.shell.regions.leases)
    @rule(pick=ANY, is_cleared=st.booleans(), is_revoked=st.booleans())
    def region_is_not_proved(self, pick: int, is_cleared: bool, is_revoked: bool) -> None:
        """Have a region's memory taken away and not proved back in time, which is rare at random."""
        region_id = self.some_region(pick)
        self.ask(lambda number: FreeRequested(number, region_id, "root", is_operator=True))
        lease_id = self.shell.regions.leases.get(region_id, 1)
        while self.shell.regions.orders.get(lease_id):
            self.shell.regions.carry_out(lease_id, 3, self.shell)
        region = self.shell.table.get(region_id)
        if self.shell.regions.proofs.pop(region_id, None) is None or region is None:
            return
        due_ns = [due_ns for due_ns, event in self.shell.timers if event == self.reclaim_timer(region_id)]
        self.shell.now_ns = max(self.shell.now_ns, *due_ns[-1:], 0)
        self.shell.fire(self.reclaim_timer(region_id))
        if is_revoked:
            self.ask(lambda number: RevokeRequested(number, region_id, "because"))
        if is_cleared:
            self.clear_fences(None)

    def reclaim_timer(self, region_id: int) -> TimerFired:
        region = self.shell.table.get(region_id)
        return TimerFired(region_id, 1 if region is None else region.generation, TimerKind.RECLAIM)

    @precondition(lambda self: self.shell.regions.leases)
    @rule(pick=ANY, by=ANY, is_cancelled=st.booleans())
    def cancel_region(self, pick: int, by: int, is_cancelled: bool) -> None:
        region_id = self.some_region(pick)
        tenant = self.owner_of(region_id, by)
        self.ask(lambda number: RegionCancelRequested(number, region_id, tenant, is_cancelled))

    @precondition(lambda self: self.shell.regions.leases)
    @rule(pick=ANY, by=ANY)
    def revoke_as_tenant(self, pick: int, by: int) -> None:
        region_id = self.some_region(pick)
        tenant = self.owner_of(self.shell.regions.leases.get(region_id, 1), by)
        self.ask(lambda number: RevokeRequested(number, region_id, "because", tenant, is_operator=False))

    @precondition(lambda self: self.shell.spawned)
    @rule(pick=ANY, by=ANY, size=st.integers(0, 400), is_started=st.booleans())
    def resize(self, pick: int, by: int, size: int, is_started: bool) -> None:
        lease_id = self.some_one(pick * 2)
        tenant = self.owner_of(lease_id, by)
        self.ask(lambda number: ResizeRequested(number, lease_id, tenant, size, by % 7 == 0))
        while is_started and self.shell.regions.orders.get(lease_id):
            self.shell.regions.carry_out(lease_id, 1, self.shell)

    @precondition(lambda self: self.shell.regions.orders)
    @rule(pick=ANY, luck=ANY)
    def session_carries_an_order_out(self, pick: int, luck: int) -> None:
        waiting = sorted(self.shell.regions.orders)
        self.shell.regions.carry_out(waiting[pick % len(waiting)], luck, self.shell)

    @precondition(lambda self: self.shell.regions.orders)
    @rule(pick=ANY, luck=ANY)
    def session_hangs(self, pick: int, luck: int) -> None:
        waiting = sorted(self.shell.regions.orders)
        if luck % 8 == 1:
            self.shell.regions.hang(waiting[pick % len(waiting)])

    @precondition(lambda self: self.shell.regions.mapped)
    @rule(pick=ANY)
    def session_lets_go_of_an_address(self, pick: int) -> None:
        mapped = sorted(self.shell.regions.mapped)
        self.shell.regions.release(mapped[pick % len(mapped)], self.shell)

    @precondition(lambda self: self.shell.regions.proofs)
    @rule(pick=ANY, is_lost=st.sampled_from([False, False, True]))
    def card_is_looked_at_for_a_proof(self, pick: int, is_lost: bool) -> None:
        numbers = sorted(self.shell.regions.proofs)
        number = numbers[pick % len(numbers)]
        if is_lost:
            del self.shell.regions.proofs[number]
        else:
            self.shell.regions.poll(number, self.shell)

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

    @rule(ms=st.integers(0, 3000))
    def time_passes(self, ms: int) -> None:
        self.shell.now_ns += ms * MS

    @precondition(lambda self: self.shell.spawned)
    @rule(pick=ANY, kind=st.sampled_from(TimerKind), generation=st.integers(0, 4))
    def stray_timer(self, pick: int, kind: TimerKind, generation: int) -> None:
        self.shell.send(TimerFired(self.some_one(pick), generation, kind))

    @rule(luck=ANY, is_tail_lost=st.booleans(), is_zygote_told=st.booleans())
    def restart(self, luck: int, is_tail_lost: bool, is_zygote_told: bool) -> None:
        if luck % 3 == 1:
            self.shell.restart(is_tail_lost=is_tail_lost, is_zygote_told=is_zygote_told)

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
