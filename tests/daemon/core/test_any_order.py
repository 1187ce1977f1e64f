"""The lease table against a shell that is slow, forgetful and out of order, judged from outside.

The simulated shell executes effects in any order and at any time, fires timers early, late, twice or never, loses
orders to workers, and kills workers at random. What it knows of the node (which process lives, which bytes are not
yet proved free, who still waits for a reply) is kept apart from the table's own books.
"""

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpulease.daemon.core import (
    AcquireRequested,
    ArmHoldTimer,
    ArmTimer,
    ArmWaitTimer,
    Card,
    Cause,
    CoreLimits,
    Denied,
    Effect,
    Event,
    FenceCleared,
    FenceClearRequested,
    Freed,
    FreeRequested,
    Granted,
    HoldTimerFired,
    KillWorker,
    LeaseEnded,
    LeaseState,
    LeaseTable,
    ProveReclaimed,
    ReclaimFailed,
    ReclaimProved,
    RefuseWork,
    Renewed,
    RenewRequested,
    RequesterGone,
    RevokeDone,
    RevokeRequested,
    SessionCondemned,
    SessionFaulted,
    SetDeadline,
    ShutdownRequested,
    SpawnWorker,
    TimerFired,
    TimerKind,
    WaitTimerFired,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)
from gpulease.protocol.opcodes import Exclusivity

from .tenant_books import RULES, TenantBooks

MS = 1_000_000
CARDS = (
    Card("GPU-a", 0, "Big", 1000, 50),
    Card("GPU-b", 1, "Small", 400, 30),
    Card("MIG-c", 2, "Part", 300, 20, is_partition=True),
)
LIMITS = CoreLimits(
    max_ttl_s=8,
    max_leases=12,
    max_leases_per_tenant=6,
    max_waiting=5,
    max_waiting_per_tenant=3,
    max_hold_back_s=1,
    max_wait_s=6,
    max_tombstones=5,
    max_story_entries=8,
    tenants=RULES,
)
ALONE = (Exclusivity.DEVICE_EXCLUSIVE, Exclusivity.PARTITION_EXCLUSIVE)
TENANTS = st.sampled_from(["ann", "bob", "cid"])
ANY = st.integers(min_value=0, max_value=1 << 16)

AnyTimer = TimerFired | WaitTimerFired | HoldTimerFired


class Shell:
    """What the node looks like from outside, and what is still to be done in it."""

    def __init__(self) -> None:
        self.table = LeaseTable(CARDS, LIMITS)
        self.now_ns = 5_000 * MS
        self.open_requests: set[int] = set()
        self.timers: list[tuple[int, AnyTimer]] = []
        self.lost_timers: list[tuple[int, AnyTimer]] = []
        self.jobs: list[SpawnWorker | KillWorker | ProveReclaimed] = []
        self.spawned: dict[int, SpawnWorker] = {}
        self.exclusivity: dict[int, Exclusivity] = {}
        self.tenants = TenantBooks(LIMITS)
        self.alive: set[int] = set()
        self.unproved: dict[int, tuple[str, int]] = {}
        self.asked_to_prove: set[int] = set()
        self.deadlines: dict[int, tuple[int, int]] = {}
        self.ended: set[int] = set()
        self.once: set[tuple[type, int]] = set()

    def send(self, event: Event) -> list[Effect]:
        if isinstance(event, WorkerExited):
            self.alive.discard(event.lease_id)
        if isinstance(event, ReclaimProved) and event.lease_id in self.asked_to_prove:
            self.unproved.pop(event.lease_id, None)
        effects = self.table.handle(event, self.now_ns)
        self.table.validate()
        # Bytes let go by an operator may be granted by the same call.
        for effect in effects:
            if isinstance(effect, FenceCleared):
                for lease_id in effect.lease_ids:
                    self.unproved.pop(lease_id, None)
                    self.alive.discard(lease_id)
        for effect in effects:
            self.execute(effect)
        return effects

    def request(self, event: Event, number: int) -> None:
        self.open_requests.add(number)
        self.send(event)

    def execute(self, effect: Effect) -> None:
        if isinstance(effect, Granted | Renewed | Freed | RevokeDone | FenceCleared | Denied):
            assert effect.request in self.open_requests, f"a second reply, or one to nobody: {effect}"
            self.open_requests.remove(effect.request)
        if isinstance(effect, SpawnWorker | RefuseWork | KillWorker | ProveReclaimed):
            self.only_once(type(effect), effect.lease_id)
        if isinstance(effect, Granted | LeaseEnded):
            self.only_once(type(effect), effect.lease.lease_id)
        if isinstance(effect, SpawnWorker):
            self.on_spawn(effect)
        elif isinstance(effect, Granted | Renewed):
            assert effect.lease.lease_id not in self.ended, "an ended lease came back to life"
            assert effect.lease.lease_id in self.alive, "a lease was granted without a worker"
            assert effect.lease.deadline_ns is not None
            assert effect.lease.deadline_ns <= self.now_ns + self.tenants.max_ttl_s(effect.lease.tenant) * 1000 * MS
        elif isinstance(effect, SetDeadline):
            generation, deadline_ns = self.deadlines.get(effect.lease_id, (0, 0))
            assert (effect.generation, effect.deadline_ns) >= (generation + 1, deadline_ns)
            self.deadlines[effect.lease_id] = (effect.generation, effect.deadline_ns)
        elif isinstance(effect, RefuseWork):
            self.ended.add(effect.lease_id)
        elif isinstance(effect, KillWorker | ProveReclaimed):
            if isinstance(effect, ProveReclaimed):
                assert effect.lease_id not in self.alive, "a proof was asked for before the reap"
                self.asked_to_prove.add(effect.lease_id)
            self.jobs.append(effect)
        elif isinstance(effect, ArmTimer):
            fired = TimerFired(effect.lease_id, effect.generation, effect.kind)
            self.timers.append((effect.due_ns, fired))
        elif isinstance(effect, ArmWaitTimer):
            self.timers.append((effect.due_ns, WaitTimerFired(effect.request)))
        elif isinstance(effect, ArmHoldTimer):
            assert effect.due_ns > self.now_ns, "a hold that is over already"
            self.timers = [timer for timer in self.timers if timer[1] != HoldTimerFired()]
            self.timers.append((effect.due_ns, HoldTimerFired()))

    def only_once(self, kind: type, lease_id: int) -> None:
        assert (kind, lease_id) not in self.once, f"{kind.__name__} twice for lease {lease_id}"
        self.once.add((kind, lease_id))

    def on_spawn(self, effect: SpawnWorker) -> None:
        card = next(card for card in CARDS if card.uuid == effect.card_uuid)
        on_card = [lease_id for lease_id, (uuid, _) in self.unproved.items() if uuid == card.uuid]
        held = sum(self.unproved[lease_id][1] for lease_id in on_card)
        charge = effect.size_bytes + card.overhead_bytes
        assert held + charge <= card.capacity_bytes, "bytes were granted that are not proved free"
        for lease_id in on_card:
            assert self.exclusivity[lease_id] not in ALONE, "a lease was put beside one that is to be alone"
        assert not (on_card and self.exclusivity[effect.lease_id] in ALONE), "a lease is to be alone and is not"
        self.unproved[effect.lease_id] = (card.uuid, charge)
        lease = self.table.get(effect.lease_id)
        assert lease is not None
        self.tenants.check_spawn(lease.lease_id, lease.tenant, effect.size_bytes, card, self.unproved)
        self.alive.add(effect.lease_id)
        self.spawned[effect.lease_id] = effect
        self.jobs.append(effect)

    def do_job(self, job: SpawnWorker | KillWorker | ProveReclaimed, luck: int) -> None:
        if isinstance(job, KillWorker):
            self.send(WorkerExited(job.lease_id, "killed"))
        elif isinstance(job, ProveReclaimed):
            failed = ReclaimFailed(job.lease_id, "NVML gave an error")
            self.send(failed if luck % 6 == 0 else ReclaimProved(job.lease_id))
        elif luck % 8 == 0:
            self.send(WorkerFailed(job.lease_id, "no context"))
        elif job.lease_id in self.alive:
            self.send(WorkerReady(job.lease_id))

    def fire(self, event: AnyTimer) -> None:
        effects = self.send(event)
        if isinstance(event, TimerFired) and event.kind is TimerKind.EXPIRY:
            is_due = self.deadlines[event.lease_id] <= (event.generation, self.now_ns)
            assert is_due or RefuseWork not in map(type, effects), "a timer ended a lease before its time"
        if isinstance(event, TimerFired) and event.kind is TimerKind.EXPIRY:
            generation, deadline_ns = self.deadlines[event.lease_id]
            lease = self.table.get(event.lease_id)
            if generation == event.generation and self.now_ns >= deadline_ns and lease is not None:
                assert lease.state is not LeaseState.ACTIVE, "a lease outlived its deadline"

    def finish(self) -> None:
        """Everything that was slow or lost happens after all, in due order."""
        self.timers += self.lost_timers
        while self.jobs or self.timers:
            while self.jobs:
                self.do_job(self.jobs.pop(0), 1)
            if self.timers:
                self.timers.sort(key=lambda timer: timer[0])
                due_ns, event = self.timers.pop(0)
                self.now_ns = max(self.now_ns, due_ns)
                self.fire(event)


class AnyOrder(RuleBasedStateMachine):
    """Draws what happens next."""

    def __init__(self) -> None:
        super().__init__()
        self.shell = Shell()
        self.number = 0

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def some_lease(self, pick: int) -> int:
        """A live lease as a rule, else any that was ever placed; 1 if there was none."""
        live = [lease.lease_id for lease in self.shell.table.snapshots()]
        ids = live if live and pick % 4 else list(self.shell.spawned)
        return ids[pick // 4 % len(ids)] if ids else 1

    def owner_of(self, lease_id: int, pick: int) -> str:
        """The lease's tenant as a rule, else whoever comes."""
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
    )
    def acquire(
        self,
        tenant: str,
        size: int,
        ttl_ms: int,
        exclusivity: Exclusivity,
        selector: str | None,
        wait_ms: int,
    ) -> None:
        lease_id = self.next_number()
        self.shell.exclusivity[lease_id] = exclusivity
        self.ask(
            lambda number: AcquireRequested(number, tenant, lease_id, size, ttl_ms, exclusivity, selector, wait_ms)
        )

    @rule(
        tenant=TENANTS,
        size=st.integers(1, 200),
        ttl_ms=st.integers(100, 8000),
        exclusivity=st.sampled_from([Exclusivity.SHARED, *Exclusivity]),
        wait_ms=st.sampled_from([0, 3000, 6000]),
    )
    def acquire_and_start(self, tenant: str, size: int, ttl_ms: int, exclusivity: Exclusivity, wait_ms: int) -> None:
        """What goes well: without it a run seldom gets to have several active leases."""
        self.acquire(tenant, size, ttl_ms, exclusivity, None, wait_ms)
        for job in [job for job in self.shell.jobs if isinstance(job, SpawnWorker)]:
            self.shell.jobs.remove(job)
            self.shell.do_job(job, 1)

    @rule(pick=ANY, by=ANY, ttl_ms=st.one_of(st.integers(1, 8000), st.integers(0, 8100)), is_operator=st.booleans())
    def renew(self, pick: int, by: int, ttl_ms: int, is_operator: bool) -> None:
        lease_id = self.some_lease(pick)
        tenant = self.owner_of(lease_id, by)
        self.ask(lambda number: RenewRequested(number, lease_id, tenant, ttl_ms, is_operator))

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
        effects = self.shell.send(RequesterGone(request))
        # A free or a revoke goes on without its client; an acquire gets no reply any more.
        if request in waits or RefuseWork in map(type, effects):
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
    @rule(pick=ANY, cause=st.sampled_from([Cause.OVER_SLICE, Cause.KERNEL_TIMEOUT, Cause.UNRESPONSIVE]))
    def session_is_condemned(self, pick: int, cause: Cause) -> None:
        self.shell.send(SessionCondemned(self.some_lease(pick), cause, "a rule was broken"))

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
    @rule(pick=ANY)
    def stray_proof(self, pick: int) -> None:
        lease_id = self.some_lease(pick)
        if lease_id not in self.shell.asked_to_prove:
            self.shell.send(ReclaimProved(lease_id))

    @precondition(lambda self: self.shell.spawned)
    @rule(pick=ANY, kind=st.sampled_from(TimerKind), generation=st.integers(0, 4))
    def stray_timer(self, pick: int, kind: TimerKind, generation: int) -> None:
        self.shell.send(TimerFired(self.some_lease(pick), generation, kind))

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
            assert self.shell.table.denial_for(lease_id, self.shell.now_ns) is not None

    def teardown(self) -> None:
        shell = self.shell
        shell.finish()
        assert not shell.open_requests, f"requests that were never answered: {shell.open_requests}"
        assert shell.ended == set(shell.spawned), "leases that never ended"
        assert {lease.state for lease in shell.table.snapshots()} <= {LeaseState.FENCED}
        self.clear_fences(None)
        assert all(card.held_bytes == 0 for card in shell.table.cards())


AnyOrder.TestCase.settings = settings(max_examples=300, stateful_step_count=80, deadline=None)
TestAnyOrder = AnyOrder.TestCase
