"""A simulated shell that is slow, forgetful and out of order, and its own view of the node.

The shell executes effects in any order and at any time, and loses orders to workers. It knows which processes live,
which bytes are not yet proved free, and who waits for a reply. That view is kept apart from the table's own state.
"""

from gpulease.daemon.leases.devices import SETTLE_NS, Card, PlacementOrder
from gpulease.daemon.leases.events import (
    AcquireRequested,
    ArmTimer,
    CardPolled,
    DrainSet,
    DrainTimerFired,
    Effect,
    Event,
    FreeDone,
    Granted,
    HoldTimerFired,
    KillWorker,
    LeaseEnded,
    LeaseRestored,
    PoolTimerFired,
    ProveReclaimed,
    ReclaimFailed,
    ReclaimProved,
    RecycleWorker,
    RefuseSubmit,
    RefuseWork,
    RegionCancelSet,
    RegionGranted,
    RegionRestored,
    RenameWorker,
    Renewed,
    RequestDenied,
    RequestFaulted,
    Resized,
    RevokeDone,
    ScrubWorker,
    SetDeadline,
    SlicesCleared,
    SpawnSubmit,
    SpawnWorker,
    SubmitEnded,
    SubmitFenced,
    SubmitFound,
    SubmitReady,
    TenantRulesChanged,
    TimerEvent,
    TimerFired,
    TimerKind,
    WarmEnded,
    WarmUp,
    Warned,
    WorkerExited,
    WorkerFailed,
    WorkerFound,
    WorkerReady,
    WorkerUnlisted,
)
from gpulease.daemon.leases.model import FIRST_LEFTOVER_ID, FIRST_SUBMIT_ID, FIRST_WARM_ID, Cause, LeaseState, Recycling
from gpulease.daemon.leases.persisted import LeaseRow
from gpulease.daemon.leases.quotas import CoreLimits, TenantRules
from gpulease.daemon.leases.table import LeaseTable
from gpulease.protocol.opcodes import Exclusivity

from .disk import Disk, check_answers
from .expected_names import ExpectedNames
from .expected_recycling import ExpectedRecycling
from .expected_regions import ExpectedRegions
from .expected_submits import ExpectedSubmits
from .expected_tenants import RULES, ExpectedTenants

MS = 1_000_000
CARDS = (
    Card("GPU-a", 0, "Big", 1000, 50),
    Card("GPU-b", 1, "Small", 400, 90),
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
    spawn_timeout_s=2,
    adopt_timeout_s=1,
    reclaim_timeout_s=3,
    tenants=RULES,
)
REPLIES = (
    Granted,
    RegionGranted,
    RegionCancelSet,
    Resized,
    Renewed,
    FreeDone,
    RevokeDone,
    SlicesCleared,
    DrainSet,
    SubmitReady,
    RequestDenied,
)
ALONE = (Exclusivity.DEVICE_EXCLUSIVE, Exclusivity.PARTITION_EXCLUSIVE)

AnyJob = SpawnWorker | SpawnSubmit | WarmUp | KillWorker | ScrubWorker | ProveReclaimed


class Shell:
    """The node as seen from outside, and the effects still to execute."""

    def __init__(
        self,
        warm_contexts: int = 0,
        recycling: Recycling | None = None,
        order: PlacementOrder = PlacementOrder.SPREAD,
    ) -> None:
        self.table = LeaseTable(CARDS, LIMITS, warm_contexts, recycling=recycling, order=order)
        self.cards = CARDS
        self.order = order
        self.warm_contexts = warm_contexts
        self.recycled = ExpectedRecycling(recycling)
        self.disk = Disk()
        self.words: dict[int, Cause] = {}
        self.revoked: set[int] = set()
        self.revoked_last: set[int] = set()
        self.now_ns = 5_000 * MS
        self.look_interval_ns = 100 * MS
        self.open_requests: set[int] = set()
        self.timers: list[tuple[int, TimerEvent]] = []
        self.lost_timers: list[tuple[int, TimerEvent]] = []
        self.jobs: list[AnyJob] = []
        self.spawned: dict[int, SpawnWorker] = {}
        self.exclusivity: dict[int, Exclusivity] = {}
        self.tenants = ExpectedTenants(LIMITS)
        self.alive: set[int] = set()
        self.unproved: dict[int, tuple[str, int]] = {}
        self.asked_to_prove: set[int] = set()
        # Others' real bytes on each card: unowned, and of their processes. Then dead workers' bytes still in the card's
        # sum, by id, proved free or not.
        self.others: dict[str, tuple[int, int]] = {card.uuid: (0, 0) for card in CARDS}
        self.lingering: dict[int, tuple[str, int]] = {}
        self.unlisted: dict[int, tuple[int, int]] = {}
        self.deadlines: dict[int, tuple[int, int]] = {}
        self.ended: set[int] = set()
        self.remembered: dict[int, tuple[str, int]] = {}
        self.once: set[tuple[type, int]] = set()
        self.submits = ExpectedSubmits()
        self.regions = ExpectedRegions()
        self.names = ExpectedNames()

    def send(self, event: Event) -> list[Effect]:
        if isinstance(event, WorkerExited):
            if event.worker_id in self.alive and event.worker_id in self.unproved:
                self.lingering[event.worker_id] = self.unproved[event.worker_id]
            self.alive.discard(event.worker_id)
        if isinstance(event, ReclaimProved) and event.worker_id in self.asked_to_prove:
            self.unproved.pop(event.worker_id, None)
        if isinstance(event, WorkerUnlisted) and self.is_provable(event):
            self.unproved.pop(event.worker_id, None)
        self.regions.before_growth.clear()
        charges = self.table.charges()
        preferred = self.preferred_card(event)
        effects = self.table.handle(event, self.now_ns)
        self.check_card(event, preferred)
        self.table.validate()
        if not isinstance(event, LeaseRestored | RegionRestored | WorkerFound | SubmitFound):
            self.table.validate_charges(charges)
        self.disk.saw(event, effects, self.table)
        self.revoked_last.clear()
        # Bytes released by an operator may be granted by the same call.
        self.submits.is_cleared = any(isinstance(effect, SlicesCleared) for effect in effects)
        for effect in effects:
            if isinstance(effect, SlicesCleared):
                of_leases = [number for number, lease_id in self.submits.leases.items() if lease_id in effect.lease_ids]
                for lease_id in (*effect.lease_ids, *effect.warm_ids, *of_leases):
                    self.forget(lease_id)
            elif isinstance(effect, SubmitEnded) and self.submits.is_cleared:
                self.forget(effect.submit_id)
        for effect in effects:
            self.execute(effect)
        self.regions.check(self)
        self.names.saw(event, effects, self)
        return effects

    def preferred_card(self, event: Event) -> str:
        """Return the card that the order prefers for an acquire; "" if there is none, or others come first."""
        if not isinstance(event, AcquireRequested) or event.selector is not None or self.table.waiting():
            return ""
        devices = self.tenants.limits.tenants.of(event.tenant).devices
        fitting = []
        for card, state in zip(CARDS, self.table.cards(), strict=True):
            is_alone = state.is_exclusive or (event.terms.exclusivity in ALONE and state.leases)
            is_usable = devices is None or any(map(card.answers_to, devices))
            is_kind = event.terms.exclusivity is not Exclusivity.PARTITION_EXCLUSIVE or card.is_partition
            charge = event.terms.size_bytes + event.terms.contexts * card.overhead_bytes
            is_open = state.drain_ns is None
            if is_usable and is_kind and is_open and not is_alone and charge <= state.free_bytes:
                fitting.append((state.free_bytes, card.index))
        if not fitting:
            return ""
        free, _ = min(fitting) if self.order is PlacementOrder.PACK else max(fitting)
        return CARDS[min(index for bytes_, index in fitting if bytes_ == free)].uuid

    def check_card(self, event: Event, preferred: str) -> None:
        """Check that a lease that was placed at once is on the card that the order prefers."""
        if preferred and isinstance(event, AcquireRequested):
            lease = self.table.get(event.lease_id)
            if lease is not None and lease.state is LeaseState.PENDING:
                assert lease.card_uuid == preferred, f"{self.order} prefers {preferred}"

    def forget(self, number: int) -> None:
        """Drop a worker after an operator has vouched for its bytes."""
        self.unproved.pop(number, None)
        self.lingering.pop(number, None)
        self.alive.discard(number)

    def unowned_bytes(self, card_uuid: str) -> int:
        """Return the card's bytes that no process has."""
        return self.others[card_uuid][0] + sum(held for uuid, held in self.lingering.values() if uuid == card_uuid)

    def booked_bytes(self, card_uuid: str) -> int:
        """Return the bytes that the table has booked for others."""
        card = next(card for card in self.table.cards() if card.uuid == card_uuid)
        return card.unowned_bytes + card.outside_bytes

    def is_provable(self, event: WorkerUnlisted) -> bool:
        booked = next(card.unowned_bytes for card in self.table.cards() if card.uuid == event.card_uuid)
        has_settled = event.polled_ns - event.since_ns >= SETTLE_NS
        return event.worker_id in self.asked_to_prove and (event.unowned_bytes <= booked or has_settled)

    def poll(self, card_uuid: str) -> None:
        self.send(CardPolled(card_uuid, self.unowned_bytes(card_uuid), self.others[card_uuid][1], self.now_ns))

    def leave_alone(self) -> None:
        """Remove others' bytes and dead workers' bytes from all cards, and let the table see it."""
        self.lingering.clear()
        self.others = dict.fromkeys(self.others, (0, 0))
        # The first look may end a settling time that began when others held more; its lasting bytes are booked.
        for wait_ns in (0, SETTLE_NS, SETTLE_NS):
            self.now_ns += wait_ns
            for card in CARDS:
                self.poll(card.uuid)

    def look_for(self, job: ProveReclaimed) -> None:
        """Look at the card for a dead worker, and queue another look unless this one was enough."""
        number, card_uuid = job.worker_id, job.card_uuid
        unowned = self.unowned_bytes(card_uuid)
        since_ns, least = self.unlisted.get(number, (self.now_ns, unowned))
        self.unlisted[number] = since_ns, min(least, unowned)
        event = WorkerUnlisted(number, card_uuid, unowned, min(least, unowned), since_ns, self.now_ns)
        is_enough = self.is_provable(event)
        self.send(event)
        if not is_enough:
            self.now_ns += self.look_interval_ns
            self.jobs.append(job)

    def change_rules(self, rules: TenantRules, renamed: frozenset[str]) -> None:
        waiting = {waiter.tenant for waiter in self.table.waiting()}
        self.tenants.change(rules, waiting | {lease.tenant for lease in self.table.snapshots()})
        self.recycled.renamed |= renamed
        self.send(TenantRulesChanged(rules, renamed))

    def request(self, event: Event, number: int) -> None:
        self.open_requests.add(number)
        self.send(event)

    def execute(self, effect: Effect) -> None:
        if isinstance(effect, RequestFaulted):
            raise effect.error
        if isinstance(effect, REPLIES):
            assert effect.request in self.open_requests, f"a second reply, or one to nobody: {effect}"
            self.open_requests.remove(effect.request)
        if isinstance(effect, WarmUp | WarmEnded):
            self.only_once(type(effect), effect.warm_id)
        if isinstance(effect, SpawnWorker | ScrubWorker):
            self.only_once(type(effect), effect.lease_id)
        if isinstance(effect, RefuseWork | KillWorker | ProveReclaimed):
            self.only_once(type(effect), effect.worker_id)
        if isinstance(effect, Granted | LeaseEnded):
            self.only_once(type(effect), effect.lease.lease_id)
        self.regions.saw(effect, self)
        if isinstance(effect, LeaseEnded) and effect.lease.state is LeaseState.TORNDOWN and not effect.lease.parent_id:
            self.remembered[effect.lease.lease_id] = (effect.lease.card_uuid, effect.lease.size_bytes)
        if isinstance(effect, SpawnSubmit | RefuseSubmit | SubmitFenced | SubmitEnded | SubmitReady):
            self.only_once(type(effect), effect.submit_id)
            self.submits.saw(effect, self)
        elif isinstance(effect, SpawnWorker):
            self.on_spawn(effect)
        elif isinstance(effect, WarmUp):
            self.on_warm_up(effect)
        elif isinstance(effect, RenameWorker):
            self.on_rename(effect.from_id, effect.to_id)
        elif isinstance(effect, RecycleWorker):
            self.recycled.on_recycle(effect, self)
        elif isinstance(effect, Granted | Renewed):
            assert effect.lease.lease_id not in self.ended, "an ended lease came back to life"
            assert effect.lease.parent_id or effect.lease.lease_id in self.alive, "a lease was granted without a worker"
            assert effect.lease.deadline_ns is not None
            is_drained = not effect.lease.parent_id and self.table.drain_ns_of(effect.lease.card_uuid) is not None
            assert isinstance(effect, Renewed) or not is_drained, "a lease was granted in a drain"
            assert effect.lease.deadline_ns <= self.now_ns + self.tenants.max_ttl_s(effect.lease.tenant) * 1000 * MS
        elif isinstance(effect, SetDeadline):
            self.on_deadline(effect)
        elif isinstance(effect, RefuseWork):
            self.ended.add(effect.worker_id)
            self.words.setdefault(effect.worker_id, effect.cause)
            if effect.cause is Cause.REVOKED:
                self.revoked.add(effect.worker_id)
                self.revoked_last.add(effect.worker_id)
        elif isinstance(effect, KillWorker | ScrubWorker | ProveReclaimed):
            if isinstance(effect, ProveReclaimed):
                assert effect.worker_id not in self.alive, "a proof was asked for before the reap"
                self.asked_to_prove.add(effect.worker_id)
            self.jobs.append(effect)
        elif isinstance(effect, Warned):
            assert self.table.get(effect.lease_id) is not None
            assert effect.lease_id not in self.ended
        else:
            self.on_timer_armed(effect)

    def on_timer_armed(self, effect: Effect) -> None:
        if not isinstance(effect, ArmTimer):
            return
        if isinstance(effect.event, HoldTimerFired | DrainTimerFired | PoolTimerFired):
            assert effect.due_ns > self.now_ns, f"armed for a time that is over already: {effect.event}"
            self.timers = [timer for timer in self.timers if timer[1] != effect.event]
        self.timers.append((effect.due_ns, effect.event))

    def on_deadline(self, effect: SetDeadline) -> None:
        generation, deadline_ns = self.deadlines.get(effect.worker_id, (0, 0))
        is_again = effect.generation == generation and (
            self.disk.is_being_read or effect.worker_id in self.submits.leases
        )
        assert (effect.generation, effect.deadline_ns) >= (generation + (not is_again), deadline_ns)
        self.deadlines[effect.worker_id] = (effect.generation, effect.deadline_ns)

    def only_once(self, kind: type, lease_id: int) -> None:
        assert (kind, lease_id) not in self.once, f"{kind.__name__} twice for lease {lease_id}"
        self.once.add((kind, lease_id))

    def on_spawn(self, effect: SpawnWorker) -> None:
        card = next(card for card in CARDS if card.uuid == effect.card_uuid)
        has_worker = effect.lease_id in self.unproved
        self.hold(effect.lease_id, card, effect.terms.session_bytes + card.overhead_bytes)
        self.check_room(card)
        on_card = self.leases_on(card) - {effect.lease_id}
        for lease_id in on_card:
            assert self.exclusivity[lease_id] not in ALONE, "a lease was put beside one that is to be alone"
        assert not (on_card and self.exclusivity[effect.lease_id] in ALONE), "a lease is to be alone and is not"
        lease = self.table.get(effect.lease_id)
        assert lease is not None
        self.tenants.check_spawn(lease.lease_id, lease.tenant, effect.terms.session_bytes, card, self.unproved)
        if not has_worker:
            self.alive.add(effect.lease_id)
        self.spawned[effect.lease_id] = effect
        self.regions.slices[effect.lease_id] = effect.terms.session_bytes
        self.jobs.append(effect)

    def on_warm_up(self, effect: WarmUp) -> None:
        card = next(card for card in CARDS if card.uuid == effect.card_uuid)
        self.hold(effect.warm_id, card, card.overhead_bytes)
        self.check_room(card)
        alone = [lease_id for lease_id in self.leases_on(card) if self.exclusivity[lease_id] in ALONE]
        assert not alone, "a context was made beside a lease that is to be alone"
        self.alive.add(effect.warm_id)
        self.jobs.append(effect)

    def on_rename(self, from_id: int, to_id: int) -> None:
        """Move a worker to another id. It holds one context's overhead: nothing more yet, or never."""
        if FIRST_LEFTOVER_ID <= to_id < FIRST_SUBMIT_ID:
            if from_id in self.submits.left:
                self.submits.on_rename(from_id, to_id, self)
                return
            assert (LeaseEnded, from_id) in self.once, "a lease was given away that has not ended"
            return  # It was proved gone: only the table holds something for it.
        card = next(card for card in CARDS if card.uuid == self.unproved[from_id][0])
        self.recycled.on_rename(from_id, to_id, self)
        del self.unproved[from_id]
        if from_id in self.lingering:
            self.lingering[to_id] = self.lingering.pop(from_id)
        assert to_id not in self.unproved, "two workers of one name"
        self.hold(to_id, card, card.overhead_bytes)
        if from_id in self.alive:
            self.alive.remove(from_id)
            self.alive.add(to_id)
        if from_id < FIRST_WARM_ID:
            # The worker's late events carry its warm id; the lease gets another worker.
            self.jobs = [job for job in self.jobs if not (isinstance(job, SpawnWorker) and job.lease_id == from_id)]
            self.once.discard((SpawnWorker, from_id))

    def hold_on(self, number: int, card_uuid: str, size_bytes: int) -> None:
        self.hold(number, next(card for card in CARDS if card.uuid == card_uuid), size_bytes)

    def hold(self, number: int, card: Card, size_bytes: int) -> None:
        """Let a process hold bytes; they must fit in addition to everything not proved back."""
        self.unproved[number] = (card.uuid, size_bytes)
        held = sum(held_bytes for uuid, held_bytes in self.unproved.values() if uuid == card.uuid)
        assert held <= card.capacity_bytes, "bytes were granted that are not proved free"

    def check_room(self, card: Card) -> None:
        """Check that grants and booked bytes of others fit the card.

        Nor may grants exceed the card together with bytes of dead workers that were proved free but are still on the
        card.
        """
        held = sum(held_bytes for uuid, held_bytes in self.unproved.values() if uuid == card.uuid)
        assert held + self.booked_bytes(card.uuid) <= card.capacity_bytes, "what others hold was granted"
        twice = sum(
            held_bytes
            for number, (uuid, held_bytes) in self.lingering.items()
            if uuid == card.uuid and number not in self.unproved
        )
        # A card whose processes have more than it has in use, by its own figures, hides as many of those bytes.
        hidden = max(0, -self.others[card.uuid][0])
        assert held + twice - hidden <= card.capacity_bytes, (
            "a dead worker's bytes were granted while they are on the card"
        )

    def leases_on(self, card: Card) -> set[int]:
        return {number for number, (uuid, _) in self.unproved.items() if uuid == card.uuid and number < FIRST_WARM_ID}

    def do_job(self, job: AnyJob, luck: int) -> None:
        match job:
            case WarmUp(number) | SpawnSubmit(number) | KillWorker(number) | ProveReclaimed(number):
                pass
            case SpawnWorker(number) | ScrubWorker(number):
                pass
        if isinstance(job, KillWorker):
            self.send(WorkerExited(number, "killed"))
        elif isinstance(job, ScrubWorker):
            self.recycled.scrub(number, luck, self)
        elif isinstance(job, ProveReclaimed):
            if luck % 6 == 0:
                self.send(ReclaimFailed(number, "NVML gave an error"))
            else:
                self.look_for(job)
        elif luck % 8 == 0:
            self.send(WorkerFailed(number, "no context"))
        elif number in self.alive:
            self.send(WorkerReady(number))

    def fire(self, event: TimerEvent) -> None:
        effects = self.send(event)
        if isinstance(event, TimerFired) and event.worker_id >= FIRST_SUBMIT_ID:
            return
        if isinstance(event, TimerFired) and event.worker_id in self.regions.leases:
            region = self.table.get(event.worker_id)
            if event.kind is TimerKind.EXPIRY and region is not None and region.state is LeaseState.ACTIVE:
                is_over = region.deadline_ns is not None and region.deadline_ns <= self.now_ns
                assert not is_over or region.generation != event.generation, "a region outlived its deadline"
            return
        if isinstance(event, TimerFired) and event.kind is TimerKind.EXPIRY:
            is_due = self.deadlines[event.worker_id] <= (event.generation, self.now_ns)
            assert is_due or RefuseWork not in map(type, effects), "a timer ended a lease before its time"
        if event == DrainTimerFired():
            for one in self.table.snapshots():
                drain_ns = self.table.drain_ns_of(one.card_uuid)
                is_over = drain_ns is not None and self.now_ns >= drain_ns
                assert one.state is not LeaseState.ACTIVE or not is_over, "a lease outlived a drain"
        if isinstance(event, TimerFired) and event.kind is TimerKind.EXPIRY:
            generation, deadline_ns = self.deadlines[event.worker_id]
            lease = self.table.get(event.worker_id)
            if generation == event.generation and self.now_ns >= deadline_ns and lease is not None:
                assert lease.state is not LeaseState.ACTIVE, "a lease outlived its deadline"

    def restart(self, *, is_tail_lost: bool, is_zygote_told: bool) -> None:
        """Kill the daemon and bring it back with its journal, and with what workers and pages show.

        The rows of the last event may be lost although its effects were executed; no reply about them was sent then.
        """
        before = self.table
        if is_zygote_told:
            self.remembered.clear()
        if is_tail_lost:
            self.disk.lose_tail()
            self.names.lose_tail()
            self.regions.lose_tail(self)
        self.regions.forget_daemon()
        self.names.forget_daemon()
        contents = self.disk.read()
        # The id of a lease revoked before its grant is unknown if its row was lost.
        if is_tail_lost:
            self.revoked -= self.revoked_last - {kept.lease_id for kept in contents.leases}
        self.table = LeaseTable(
            CARDS, LIMITS, self.warm_contexts, contents.recovered(), self.recycled.bounds, self.order
        )
        self.tenants.change(LIMITS.tenants, (kept.tenant for kept in contents.leases))
        self.open_requests, self.timers, self.lost_timers, self.jobs = set(), [], [], []
        self.recycled.renamed, self.asked_to_prove, self.once = (
            set(),
            set(),
            {(kind, number) for kind, number in self.once if kind is Granted},
        )
        # A lease with a tombstone on disk must not end again, and neither may a region while its fence lasts.
        lasting = {region.region_id for region in contents.regions if region.is_given_up}
        self.once |= {(LeaseEnded, number) for number in {*self.disk.buried(), *lasting}}
        found = self.unproved.keys() - {kept.lease_id for kept in contents.leases}
        for number in self.spawned.keys() - self.unproved.keys() - {kept.lease_id for kept in contents.leases}:
            if number not in self.ended and (Granted, number) not in self.once:
                # No reply about this lease was sent, and its worker went back to the pool.
                del self.spawned[number]
        fenced = {kept.lease_id for kept in contents.leases if kept.state is LeaseState.FENCED}
        going_on = {kept.lease_id for kept in contents.leases} - fenced
        of_leases = {number for number in found if self.submits.leases.get(number) in going_on}
        for kept in contents.leases:
            self.send(self.names.restored(self.as_its_page_says(kept), self))
        for number in sorted(of_leases):
            self.submits.restore(number, self)
        for region in contents.regions:
            self.send(RegionRestored(region))
        for found_as in sorted(found - of_leases - {kept.warm_id for kept in contents.warm}):
            number = self.submits.renumber(found_as, self)
            uuid, held_bytes = self.unproved[number]
            self.tenants.leases.pop(number, None)
            self.exclusivity[number] = Exclusivity.SHARED
            self.send(WorkerFound(number, uuid, held_bytes, self.submits.left.get(number, 0)))
        self.find_ended()
        self.disk.is_being_read = False
        self.unlisted.clear()
        for card in CARDS:
            self.poll(card.uuid)
        if self.table.has_drain:
            self.fire(DrainTimerFired())
        if not is_tail_lost:
            drains = [(one.drain_ns, *(card.drain_ns for card in one.cards())) for one in (self.table, before)]
            assert drains[0] == drains[1], "a restart changed a drain"
            lease_ids = {*(kept.lease_id for kept in contents.leases), *self.disk.buried()}
            check_answers(before, self.table, lease_ids, self.now_ns)
        self.send(PoolTimerFired())

    def find_ended(self) -> None:
        """Report dead workers of ended leases that the zygote was never asked to forget."""
        for number, (uuid, size_bytes) in self.remembered.items():
            lease = self.table.get(number)
            if lease is not None and lease.state is LeaseState.TORNDOWN:
                self.send(WorkerFound(number, uuid, size_bytes))
                assert self.table.get(number) == lease, "an ended lease came back"

    def as_its_page_says(self, kept: LeaseRow) -> LeaseRow:
        """Correct a persisted lease by its control page, as the daemon does.

        The later deadline counts, and a flipped word ends the lease.
        """
        generation, deadline_ns = self.deadlines.get(kept.lease_id, (0, 0))
        if kept.state is not LeaseState.ACTIVE or kept.deadline_ns is None:
            return kept
        cause = self.words.get(kept.lease_id)
        state = LeaseState.ACTIVE if cause is None else LeaseState.DRAINING
        return kept._replace(
            generation=max(generation, kept.generation),
            deadline_ns=max(deadline_ns, kept.deadline_ns),
            state=state,
            cause=cause,
        )

    def finish(self) -> None:
        """Execute everything that was slow or lost, in due order; dead workers' bytes are gone."""
        self.lingering.clear()
        # Each look is an event: at the daemon's own interval, looks until a card has settled would be most events.
        self.look_interval_ns = SETTLE_NS // 4
        self.timers += self.lost_timers
        while self.jobs or self.timers or self.regions.is_busy:
            while self.jobs or self.regions.is_busy:
                self.regions.finish(self)
                if self.jobs:
                    self.do_job(self.jobs.pop(0), 1)
            if self.timers:
                self.timers.sort(key=lambda timer: timer[0])
                due_ns, event = self.timers.pop(0)
                self.now_ns = max(self.now_ns, due_ns)
                self.fire(event)
