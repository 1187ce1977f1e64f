"""Parking against workers that are slow, refuse, die and lose their broker, judged by the bytes that are really there.

Each simulated worker knows where its session and its regions are. The node's truth is the sum of what the workers have
on the card. No order of events may let that sum exceed the card, answer a request twice or never, leave host memory
behind, or open a region that has ended.
"""

import itertools
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpulease.daemon.leases import parking
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import (
    AcquireRequested,
    AdoptSession,
    ArmTimer,
    CopyAhead,
    DrainCancelled,
    DrainRequested,
    DrainTimerFired,
    DropParkMemory,
    Effect,
    EndRegion,
    Event,
    FreeRequested,
    GiveParkMemory,
    Granted,
    KillWorker,
    LeaseEnded,
    LeaseLeft,
    LeaseMoved,
    LeaseParked,
    LeaseRestored,
    LeaseReturned,
    LeaveSession,
    MoveRequested,
    OpenRegion,
    ParkRequested,
    ParkSession,
    PoolTimerFired,
    ProveReclaimed,
    ProveRegion,
    ReclaimProved,
    RefuseSubmit,
    RefuseWaitingOperations,
    RefuseWork,
    RegionEnded,
    RegionGranted,
    RegionOpened,
    RegionProved,
    RegionRefused,
    RegionReleased,
    RegionRequested,
    RegionRestored,
    RenameWorker,
    Renewed,
    RenewRequested,
    RequestDenied,
    RequesterGone,
    RequestFaulted,
    Resized,
    ResizeRequested,
    ResizeSlice,
    RestartWorker,
    ReturnSession,
    ReturnWanted,
    RevokeRequested,
    SessionCondemned,
    SessionImaged,
    SessionMoved,
    SessionParkDone,
    SessionParked,
    SessionParkRefused,
    SessionReturned,
    SessionReturnFailed,
    SessionStays,
    SessionsUsed,
    SetDeadline,
    ShutdownRequested,
    SliceResized,
    SpawnSubmit,
    SpawnWorker,
    StaySession,
    SubmitFound,
    SubmitReady,
    TimerEvent,
    WarmEnded,
    WarmUp,
    WorkerExited,
    WorkerFound,
    WorkerReady,
)
from gpulease.daemon.leases.model import (
    Cause,
    LeaseState,
    LeaseTerms,
    RegionState,
    SubmitRequested,
    WarmState,
    WorkerKind,
    kind_of,
)
from gpulease.daemon.leases.need_moves import MOVED_STAY_NS
from gpulease.daemon.leases.park_state import ParkDepth, ParkPhase
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.protocol.opcodes import Exclusivity

from .disk import LONGEST_TAIL, Disk

MS = 1_000_000
CARD = Card("GPU-a", 0, "Card", 1000, 50, peers=("GPU-b",))
OTHER = Card("GPU-b", 1, "Card", 700, 50, peers=("GPU-a",))
CARDS = {card.uuid: card for card in (CARD, OTHER)}
GRANULE = 2 << 20
LIMITS = CoreLimits(
    max_ttl_s=600,
    max_leases=20,
    park_memory_bytes=4 * GRANULE,
    overcommit=3.0,
    park_stay_ms=500,
    session_timeout_s=2,
    max_hold_back_s=1,
    spawn_timeout_s=3,
    reclaim_timeout_s=60,
    cold_park_s=2,
)
ANSWERS = Granted | RegionGranted | RequestDenied | Resized | SessionParkDone | SessionMoved | SubmitReady
"""What is awaited by the requests that the rules make."""

USUAL_BURST = parking.PARK_BURST
ANY = st.integers(0, 1 << 16)


@dataclass
class ModelWorker:
    """A worker process: what it has on the card, the orders in its channel, and the park that it is in.

    Attributes:
        held: Orders to open a region, or to resize the slice, that wait for the session's return.
        regions: Bytes of each open region; they are part of the slice.
        gone: Bytes of ended regions that nothing else of the session may use yet.
        card: Its card.
        has_left: It has sent its image: it does nothing until it is killed, or stays.
        serves: It has adopted an image, or was ordered to stay, as its claims page says.
        is_new: It waits for the image of a cold session.
        submit_of: The lease whose submit it runs, in the place of the session, which has allocated nothing.
        submit_bytes: Bytes of that submit.
        of_lease: The lease for which its zygote knows it.
        deadline_ns: The deadline on its page; 0 without one.
        is_in_place: It is parked with its bytes on the card.
        borrows: It is parked, and its bytes are in its former worker.
        ended: The cause on its page, which is written when its lease ends, before anything else.
    """

    worker_id: int
    size: int = 0
    on_card: bool = True
    park: int = 0
    has_memory: bool = False
    waits: bool = False
    orders: list[Effect] = field(default_factory=list)
    answers: list[Event] = field(default_factory=list)
    held: list[OpenRegion | ResizeSlice] = field(default_factory=list)
    regions: dict[int, int] = field(default_factory=dict)
    gone: dict[int, int] = field(default_factory=dict)
    card: str = CARD.uuid
    has_left: bool = False
    serves: bool = False
    is_new: bool = False
    submit_of: int = 0
    submit_bytes: int = 0
    of_lease: int = 0
    deadline_ns: int = 0
    is_in_place: bool = False
    borrows: bool = False
    ended: Cause | None = None

    @property
    def is_leased(self) -> bool:
        return self.deadline_ns > 0

    @property
    def is_parked(self) -> bool:
        return self.is_in_place or not self.on_card

    @property
    def bytes_on_card(self) -> int:
        return CARD.overhead_bytes + self.submit_bytes + (self.size - sum(self.gone.values()) if self.on_card else 0)

    def open(self, order: OpenRegion) -> None:
        self.regions[order.region_id] = order.size_bytes
        self.answers.append(RegionOpened(order.region_id, 0x1000))

    def resize(self, size_bytes: int, *, has_room: bool) -> None:
        is_possible = sum(self.regions.values()) + sum(self.gone.values()) <= size_bytes
        if is_possible and (has_room or size_bytes <= self.size):
            self.size = size_bytes
        self.answers.append(SliceResized(self.worker_id, self.size, "" if self.size == size_bytes else "it is in use"))

    def end_region(self, region_id: int, *, is_shown: bool) -> None:
        self.held = [order for order in self.held if isinstance(order, ResizeSlice) or order.region_id != region_id]
        size = self.regions.pop(region_id, 0) or self.gone.get(region_id, 0)
        if not size:
            self.answers.append(RegionRefused(region_id, "the session has nothing of the region"))
            return
        self.gone[region_id] = size
        # A parked session's bytes were shown when it was parked, and what stays of a region is in the host, too.
        self.answers.append(RegionEnded(region_id, size - 2, 2, is_shown or not self.on_card))

    def come_back(self) -> None:
        self.on_card, self.park, self.waits = True, 0, False
        self.is_in_place = self.borrows = False
        held, self.held = self.held, []
        for order in held:
            if isinstance(order, OpenRegion):
                self.open(order)
            else:
                self.resize(order.size_bytes, has_room=False)


@dataclass(eq=False)
class Unrecorded:
    """An event whose rows may not be on the disk yet.

    Attributes:
        ended: Number of ends of each lease before it.
        records: Parks and returns of each lease before it.
        promised: The deadline of each lease by the replies before it.
        kills: Workers that it had killed without waiting for the disk.
        growths: Orders to grow that wait for the disk.
        forgotten: Reaped workers that their zygotes forget once it is on the disk.
    """

    ended: dict[int, int]
    records: dict[int, list[type]]
    promised: dict[int, int]
    kills: list[int] = field(default_factory=list)
    growths: list[tuple[ModelWorker, ResizeSlice]] = field(default_factory=list)
    forgotten: list[ModelWorker] = field(default_factory=list)


class ParkingAnyOrder(RuleBasedStateMachine):
    @initialize(
        warm=st.sampled_from([0, 2]),
        is_slow=st.booleans(),
        moves=st.booleans(),
        is_direct=st.sampled_from([True, True, False]),
    )
    def begin(self, warm: int, is_slow: bool = False, moves: bool = False, is_direct: bool = False) -> None:
        # A small burst and a slow pace, so that runs use them up.
        self.burst, self.parks_per_minute = (2, 20) if is_slow else (USUAL_BURST, 6000)
        parking.PARK_BURST = self.burst  # type: ignore[misc]
        self.limits = replace(LIMITS, parks_per_minute=self.parks_per_minute, moves_for_need=moves)
        self.limits = replace(self.limits, direct_moves=is_direct)
        self.warm = warm
        self.table = LeaseTable(CARDS.values(), self.limits, warm)
        # The number of the park of each session whose image the broker has.
        self.images: dict[int, int] = {}
        # Images with bytes in pages of the former worker.
        self.lent_pages: set[int] = set()
        self.lent: set[int] = set()
        self.imaged: dict[int, int] = {}
        # Open and ended regions in each image, and what the broker answers itself for those.
        self.image_regions: dict[int, tuple[dict[int, int], dict[int, int]]] = {}
        self.posted: list[Event] = []
        self.disk = Disk()
        self.now_ns = 10_000 * MS
        self.workers: dict[int, ModelWorker] = {}
        # Workers that were reaped and that their zygotes still know.
        self.reaped: list[ModelWorker] = []
        # The last events whose rows may not be on the disk yet.
        self.tail: deque[Unrecorded] = deque(maxlen=LONGEST_TAIL)
        # The worker that may have served the session of each lease last.
        self.served_by: dict[int, ModelWorker] = {}
        self.timers: list[tuple[int, TimerEvent]] = []
        self.kills: list[int] = []
        # Kills that wait until the disk has the rows of their event.
        self.recorded_kills: dict[int, Unrecorded] = {}
        self.proofs: list[ProveRegion] = []
        self.open: set[int] = set()
        # Requests whose clients have left.
        self.left: set[int] = set()
        self.ended: dict[int, int] = {}
        self.records: dict[int, list[type]] = {}
        # The deadline of each lease by the last reply to its tenant.
        self.promised: dict[int, int] = {}
        self.number = 0
        # The card of each lease by the events that report it, and the time of each card's parks.
        self.cards: dict[int, str] = {}
        self.parks: dict[str, list[int]] = {uuid: [] for uuid in CARDS}
        self.need_moves: dict[int, int] = {}
        self.send(PoolTimerFired())

    # --- the shell ---

    def send(self, event: Event) -> list[Effect]:
        # The broker keeps an image until the worker that adopts it has the session whole.
        if isinstance(event, SessionReturned | SessionReturnFailed) and event.lease_id in self.lent:
            self.lent.discard(event.lease_id)
            if isinstance(event, SessionReturned) or not event.is_mismatch:
                self.images.pop(event.lease_id, None)
        before = self.table.charges()
        effects = self.table.handle(event, self.now_ns)
        self.table.validate()
        if not isinstance(event, LeaseRestored | RegionRestored | WorkerFound | SubmitFound):
            self.table.validate_charges(before)
        self.disk.saw(event, effects, self.table)
        # What is lost with its rows: nobody was told of it, so the next daemon may report it again.
        records = {one: list(kinds) for one, kinds in self.records.items()}
        self.tail.append(Unrecorded(dict(self.ended), records, dict(self.promised)))
        for effect in effects:
            self.execute(effect)
        while self.posted:
            self.send(self.posted.pop(0))
        return effects

    def execute(self, effect: Effect) -> None:
        match effect:
            case RequestFaulted():
                raise effect.error
            case ArmTimer(event, due_ns):
                self.timers.append((due_ns, event))
            case SpawnWorker(lease_id, card, terms):
                worker = self.workers.setdefault(lease_id, ModelWorker(lease_id, card=card))
                worker.size, worker.of_lease = terms.size_bytes, lease_id
                self.served_by[lease_id] = worker
                worker.answers.append(WorkerReady(lease_id))
            case SetDeadline(worker_id, deadline_ns=deadline_ns):
                if worker_id in self.workers:
                    self.workers[worker_id].deadline_ns = deadline_ns
            case RefuseWork(worker_id, cause) | RefuseSubmit(worker_id, cause):
                if worker_id in self.workers:
                    # A submit that ends alone has no cause.
                    self.workers[worker_id].ended = cause or Cause.FREED
            case RestartWorker(lease_id, card, terms):
                worker = self.workers.setdefault(lease_id, ModelWorker(lease_id, card=card))
                worker.size, worker.on_card, worker.is_new, worker.of_lease = terms.size_bytes, False, True, lease_id
                worker.answers.append(WorkerReady(lease_id))
            case SpawnSubmit(submit_id, lease_id, card):
                submit = self.workers.setdefault(submit_id, ModelWorker(submit_id, card=card))
                submit.submit_of, submit.submit_bytes = lease_id, effect.size_bytes
                submit.answers.append(WorkerReady(submit_id))
            case LeaseLeft(lease):
                self.images[lease.lease_id] = self.imaged[lease.lease_id]
            case WarmUp(warm_id, card):
                self.workers[warm_id] = ModelWorker(warm_id, answers=[WorkerReady(warm_id)], card=card)
            case RenameWorker(from_id, to_id):
                if from_id in self.workers:
                    renamed = self.workers[to_id] = self.workers.pop(from_id)
                    # A warm context that did not answer in time for a lease goes back to its own id, to be killed: its
                    # session never opened, so no tenant has allocated there. A former worker may continue its session.
                    is_held = any(one.warm_id == to_id and one.state is WarmState.HELD for one in self.table.warming())
                    was_held = kind_of(from_id) is WorkerKind.WARM and renamed.has_left
                    renamed.worker_id = to_id
                    if not (is_held or was_held):
                        renamed.answers, renamed.size = [], 0
                for reaped in self.reaped:
                    reaped.worker_id = to_id if reaped.worker_id == from_id else reaped.worker_id
            case WarmEnded(warm_id):
                self.forget(warm_id)
            case KillWorker(worker_id, after_record):
                self.kills.append(worker_id)
                if after_record:
                    self.recorded_kills[worker_id] = self.tail[-1]
                else:
                    self.tail[-1].kills.append(worker_id)
            case ProveReclaimed(worker_id=worker_id):
                self.kills.append(-worker_id)
            case CopyAhead(lease_id):
                # The worker keeps serving, or ignores the order: nothing else may depend on it.
                ahead = self.table._store.parkable[lease_id].park
                assert ahead is not None
                # The same event may park it, or take its host memory, for the next one that waits.
                assert ahead.phase in (ParkPhase.RESIDENT, ParkPhase.PARKING), "a session was copied that is not there"
                if lease_id in self.workers:
                    self.workers[lease_id].orders.append(effect)
            case GiveParkMemory(lease_id) | DropParkMemory(lease_id) | ParkSession(lease_id) | ReturnSession(lease_id):
                if isinstance(effect, ParkSession) and (parked := self.table.get(lease_id)) is not None:
                    self.parks[parked.card_uuid].append(self.now_ns)
                    self.check_need_move(lease_id)
                if lease_id in self.workers:
                    self.workers[lease_id].orders.append(effect)
            case EndRegion(lease_id, region_id) if lease_id in self.images.keys() - self.lent - self.lent_pages:
                self.wipe(*self.image_regions[lease_id], region_id)
            case RefuseWaitingOperations(lease_id) | OpenRegion(lease_id) | EndRegion(lease_id) | ResizeSlice(lease_id):
                if lease_id in self.workers:
                    self.workers[lease_id].orders.append(effect)
                    if isinstance(effect, ResizeSlice) and effect.after_record:
                        self.tail[-1].growths.append((self.workers[lease_id], effect))
            case LeaveSession(lease_id) | StaySession(lease_id) | AdoptSession(lease_id):
                if isinstance(effect, AdoptSession):
                    assert self.images.get(lease_id) == effect.number, "an image was adopted that is not there"
                    self.lent.add(lease_id)
                if isinstance(effect, StaySession):
                    self.images.pop(lease_id, None)
                    self.lent.discard(lease_id)
                if lease_id in self.workers:
                    self.workers[lease_id].orders.append(effect)
            case ProveRegion():
                self.proofs = [one for one in self.proofs if one.region_id != effect.region_id] + [effect]
            case LeaseEnded(lease):
                is_early = lease.cause is Cause.EXPIRED and self.now_ns < self.promised.get(lease.lease_id, 0)
                assert not is_early, "a lease has expired before its time"
                self.forget(lease.lease_id)
                self.images.pop(lease.lease_id, None)
                self.lent.discard(lease.lease_id)
                self.ended[lease.lease_id] = self.ended.get(lease.lease_id, 0) + 1
                if lease.parent_id in self.workers:
                    self.return_region(self.workers[lease.parent_id], lease.lease_id)
            case Granted(_, lease) | LeaseMoved(lease):
                is_granted = isinstance(effect, Granted)
                assert not is_granted or self.table.drain_ns_of(lease.card_uuid) is None, "a drained card was granted"
                self.cards[lease.lease_id] = lease.card_uuid
                if is_granted and lease.deadline_ns is not None:
                    self.promised[lease.lease_id] = lease.deadline_ns
            case Renewed(_, lease) if lease.deadline_ns is not None:
                self.promised[lease.lease_id] = lease.deadline_ns
            case LeaseParked(lease) | LeaseReturned(lease):
                self.records.setdefault(lease.lease_id, []).append(type(effect))
        request = getattr(effect, "request", None)
        if isinstance(effect, ANSWERS) and request in self.open:
            self.open.discard(request)
        elif isinstance(effect, SessionParkDone | SessionMoved | Resized) and request not in self.left:
            raise AssertionError(f"request {request} was answered twice")

    def check_need_move(self, lease_id: int) -> None:
        """Check that others' need moves no session to and fro."""
        state = self.table._store.parkable[lease_id].park
        if state is None or state.move is None or state.move.request is not None:
            return
        assert self.limits.moves_for_need
        before_ns = self.need_moves.get(lease_id)
        assert before_ns is None or self.now_ns - before_ns >= MOVED_STAY_NS, "a session is moved to and fro"
        self.need_moves[lease_id] = self.now_ns

    def wipe(self, regions: dict[int, int], gone: dict[int, int], region_id: int) -> None:
        """Have the broker end a region of a session that has no worker."""
        if (size := regions.pop(region_id, 0)) == 0:
            self.posted.append(RegionRefused(region_id, "the session has nothing of the region"))
            return
        gone[region_id] = size
        self.posted.append(RegionEnded(region_id, size - 2, 2, is_shown=True))

    def read_words(self, worker: ModelWorker) -> None:
        """Have a worker end what has ended while it did not have its session."""
        for region_id in list(worker.regions):
            row = self.table.regions.get(region_id)
            if row is None or row.state is not RegionState.ACTIVE:
                worker.end_region(region_id, is_shown=True)
        for region_id in list(worker.gone):
            row = self.table.regions.get(region_id)
            if row is None or row.state is RegionState.RETURNED:
                self.return_region(worker, region_id)

    def return_region(self, worker: ModelWorker, region_id: int) -> None:
        worker.gone.pop(region_id, None)
        # Its tenant gives up the address; what was kept there is the slice's again.
        worker.answers.append(RegionReleased(region_id))

    def ask(self, event: Event) -> None:
        self.open.add(self.number)
        self.send(event)

    def held(self, card: str = CARD.uuid) -> int:
        lending = {worker.submit_of for worker in self.workers.values()}
        return sum(
            CARD.overhead_bytes if worker.worker_id in lending else worker.bytes_on_card
            for worker in self.workers.values()
            if worker.card == card
        )

    def has_no_room(self, worker: ModelWorker) -> bool:
        return self.held(worker.card) + worker.size > CARDS[worker.card].capacity_bytes

    def next_number(self) -> int:
        self.number += 1
        return self.number

    def some(self, pick: int) -> ModelWorker | None:
        workers = [worker for worker in self.workers.values() if worker.size]
        return workers[pick % len(workers)] if workers else None

    def obey(self, worker: ModelWorker, luck: int) -> None:
        """Have a worker carry out its next order, as its session does."""
        order = worker.orders.pop(0)
        for seen in list(self.tail):
            if any(growing is worker and growth is order for growing, growth in seen.growths):
                self.is_on_disk(seen)
        # After a restart no broker knows of the image, and the session's next order is another one than to stay.
        if worker.has_left and isinstance(order, ParkSession | ReturnSession | StaySession):
            self.serve(worker)
            self.read_words(worker)
        match order:
            case LeaveSession(lease_id, number, carries):
                is_busy = (worker.waits and not carries) or worker.held or luck % 5 == 1
                if not worker.is_parked or worker.park != number or is_busy:
                    worker.answers.append(SessionStays(lease_id, number, "it is busy", is_lasting=luck % 2 == 1))
                    return
                worker.has_left, worker.serves, self.imaged[lease_id] = True, False, number
                self.image_regions[lease_id] = dict(worker.regions), dict(worker.gone)
                (self.lent_pages.add if worker.is_in_place else self.lent_pages.discard)(lease_id)
                worker.answers.append(SessionImaged(lease_id, number, 1000))
            case AdoptSession(lease_id, number, refusal) if refusal and luck % 5 != 1:
                worker.is_new, worker.park, worker.has_memory = False, number, True
                self.serve(worker)
                worker.answers.append(SessionReturnFailed(lease_id, number, refusal))
            case AdoptSession(lease_id, number):
                if luck % 5 == 1:
                    worker.answers.append(SessionReturnFailed(lease_id, number, "it moved", is_mismatch=True))
                    return
                worker.is_new, worker.park, worker.has_memory = False, number, True
                worker.borrows = lease_id in self.lent_pages
                if not worker.borrows:
                    self.serve(worker)
                regions, gone = self.image_regions[lease_id]
                worker.regions, worker.gone = dict(regions), dict(gone)
                self.read_words(worker)
                worker.orders.insert(0, ReturnSession(lease_id, number))
                self.obey(worker, luck)
            case GiveParkMemory():
                worker.has_memory = worker.has_memory or not worker.is_parked
            case DropParkMemory():
                worker.has_memory = worker.has_memory and worker.is_parked
            case ParkSession(lease_id, number, in_place=in_place):
                if not worker.is_parked and (not worker.has_memory or luck % 5 == 1 or worker.gone):
                    lacks = not worker.has_memory
                    worker.answers.append(SessionParkRefused(lease_id, number, "it runs", lacks_memory=lacks))
                    return
                # It may have too many pages to lend them.
                worker.is_in_place = in_place and worker.on_card and luck % 3 != 2
                worker.on_card, worker.park = worker.is_in_place, number
                worker.answers.append(SessionParked(lease_id, number, worker.size, is_in_place=worker.is_in_place))
            case ReturnSession(lease_id, number):
                if not worker.is_parked:
                    worker.answers.append(SessionReturned(lease_id, number, 0))
                elif number != worker.park:
                    return
                elif worker.is_in_place:
                    worker.answers.append(SessionReturned(lease_id, number, 0))
                    worker.come_back()
                # A card that has less than its books say, after a broker lost its last rows, refuses the pages.
                elif luck % 7 == 1 or self.has_no_room(worker):
                    worker.answers.append(
                        SessionReturnFailed(lease_id, number, "the address was refused", is_mismatch=worker.borrows)
                    )
                else:
                    if worker.borrows:
                        # Until now its former worker had the session.
                        self.serve(worker)
                    worker.answers.append(SessionReturned(lease_id, number, worker.size))
                    worker.come_back()
            case RefuseWaitingOperations(number=number):
                worker.waits = worker.waits and number != worker.park
            case OpenRegion() as order if not worker.is_parked:
                worker.open(order)
            case ResizeSlice(_, size) if not worker.is_parked:
                has_room = self.held(worker.card) + size - worker.size <= CARDS[worker.card].capacity_bytes
                assert has_room or size <= worker.size, "a worker was ordered to grow into what others have"
                worker.resize(size, has_room=luck % 5 != 1)
            case OpenRegion() | ResizeSlice() as order:
                worker.held.append(order)
                worker.answers.append(ReturnWanted(worker.worker_id, worker.park))
            case EndRegion(region_id=region_id):
                worker.end_region(region_id, is_shown=luck % 3 > 0)

    def serve(self, worker: ModelWorker) -> None:
        worker.has_left, worker.serves = False, True
        self.served_by[worker.of_lease] = worker

    def is_on_disk(self, event: Unrecorded) -> None:
        """Have the rows of an event, and all before, reach the disk, because what waits for them happens now."""
        while event in self.tail:
            self.tail.popleft()

    def forget(self, worker_id: int) -> None:
        self.tail[-1].forgotten += [worker for worker in self.reaped if worker.worker_id == worker_id]
        self.reaped = [worker for worker in self.reaped if worker.worker_id != worker_id]

    def reap(self, worker_id: int) -> None:
        if worker_id in self.workers:
            self.reaped.append(self.workers.pop(worker_id))
        self.proofs = [one for one in self.proofs if one.lease_id != worker_id]
        self.send(WorkerExited(worker_id, "signal 9"))

    # --- rules ---

    @rule(
        tenant=st.sampled_from(["ann", "bob"]),
        size=st.sampled_from([100, 250, 400, 400, 800]),
        idle=st.sampled_from([None, 0, 0, 0, 700]),
        wait_ms=st.sampled_from([0, 3000]),
        is_quick=st.booleans(),
    )
    def acquire(self, tenant: str, size: int, idle: int | None, wait_ms: int, is_quick: bool) -> None:
        number = self.next_number()
        terms = LeaseTerms(size, 60_000, exclusivity=Exclusivity.SHARED, park_idle_ms=idle)
        self.ask(AcquireRequested(number, tenant, number, terms, None, wait_ms))
        if is_quick and number in self.workers and self.workers[number].answers:
            self.send(self.workers[number].answers.pop(0))

    @rule(pick=ANY, luck=ANY)
    def all_is_done(self, pick: int, luck: int) -> None:
        """Have every order obeyed, every answer heard and every proof given, so that runs often park and return."""
        for _ in range(4):
            for worker in list(self.workers.values()):
                while worker.orders:
                    self.obey(worker, luck)
                while worker.answers and worker.worker_id in self.workers:
                    self.send(worker.answers.pop(0))
            self.card_proves()

    @rule(pick=ANY, size=st.sampled_from([250, 400]), luck=ANY)
    def acquire_and_park(self, pick: int, size: int, luck: int) -> None:
        """Grant, park and prove without faults, so that runs often have parked sessions, and return some."""
        self.acquire("ann", size, 0, 0, is_quick=True)
        self.all_is_done(pick, 0)
        self.park(pick, is_operator=False)
        self.all_is_done(pick, 0)
        if luck % 2:
            self.tenant_works(pick)
            self.all_is_done(pick, luck)

    @rule(
        pick=ANY,
        luck=ANY,
        size=st.sampled_from([100, 250]),
        count=st.integers(2, 4),
        needed=st.sampled_from([300, 450, 600, 800]),
    )
    def need_many(self, pick: int, luck: int, size: int = 250, count: int = 4, needed: int = 800) -> None:
        """Fill cards with idle sessions, and ask for more than one of them has."""
        for _ in range(count):
            self.acquire("bob", size, 0, 0, is_quick=True)
        self.all_is_done(pick, 0)
        self.time_passes(1000)
        self.acquire("ann", needed, 0, 3000, is_quick=False)
        self.all_is_done(pick, luck)
        # As in `park_and_move`: the workers that sessions have left are gone.
        self.kills_happen()
        self.kills_happen()

    @rule(pick=ANY, is_operator=st.booleans())
    def park(self, pick: int, is_operator: bool) -> None:
        if (worker := self.some(pick)) is not None:
            lease = self.table.get(worker.worker_id)
            tenant = "root" if is_operator or lease is None else lease.tenant
            self.ask(ParkRequested(self.next_number(), worker.worker_id, tenant, is_operator))

    @rule(pick=ANY, luck=ANY, count=st.integers(1, 4))
    def worker_acts(self, pick: int, luck: int, count: int) -> None:
        worker = self.some(pick)
        for _ in range(count):
            if worker is not None and worker.orders:
                self.obey(worker, luck)

    @rule(pick=ANY, count=st.integers(1, 4))
    def worker_is_heard(self, pick: int, count: int) -> None:
        busy = [worker for worker in self.workers.values() if worker.answers]
        for _ in range(count):
            if busy and (worker := busy[pick % len(busy)]).answers:
                self.send(worker.answers.pop(0))

    @rule(pick=ANY)
    def tenant_works(self, pick: int) -> None:
        if (worker := self.some(pick)) is None or worker.has_left or worker.is_new:
            return
        if not worker.is_parked:
            self.send(SessionsUsed((worker.worker_id,)))
        else:
            worker.waits = True
            worker.answers.append(ReturnWanted(worker.worker_id, worker.park))

    @rule(pick=ANY, card=st.sampled_from([None, "0", "1"]), luck=ANY)
    def park_and_move(self, pick: int, card: str | None, luck: int) -> None:
        """Have a session leave its worker without faults, so that runs often have cold ones, and return some."""
        self.acquire("ann", 250, 0, 0, is_quick=True)
        self.all_is_done(pick, 0)
        self.move(pick, card, is_operator=True)
        self.all_is_done(pick, 0)
        self.kills_happen()
        self.kills_happen()
        if luck % 2:
            self.client_of_a_cold_session_works(pick)
            self.all_is_done(pick, luck)

    @rule(pick=ANY)
    def client_of_a_cold_session_works(self, pick: int) -> None:
        if kept := [lease_id for lease_id in self.images if lease_id not in self.lent]:
            lease_id = kept[pick % len(kept)]
            self.send(ReturnWanted(lease_id, self.images[lease_id]))

    @rule(pick=ANY, luck=ANY)
    def cold_session_finds_no_room(self, pick: int, luck: int) -> None:
        """Fill the cards beside cold sessions until one of them that is used has waited in vain, and be slow then."""
        self.park_and_move(pick, None, 0)
        for size in (800, 400):
            self.acquire("bob", size, None, 0, is_quick=True)
        self.all_is_done(pick, 0)
        self.client_of_a_cold_session_works(pick)
        self.time_passes(4000)
        for _ in range(luck % 4):
            self.worker_acts(pick, luck, 1)
            self.worker_is_heard(pick, 1)

    @rule(pick=ANY, luck=ANY, is_parked=st.booleans())
    def upgrade(self, pick: int, luck: int, is_parked: bool) -> None:
        """Give a session another worker, on the card that it is on, at first without faults."""
        self.acquire("ann", 250, 0, 0, is_quick=True)
        self.all_is_done(pick, 0)
        if is_parked:
            self.park(pick, is_operator=False)
            self.all_is_done(pick, 0)
        if (worker := self.some(pick)) is None or (lease := self.table.get(worker.worker_id)) is None:
            return
        request, card = self.next_number(), str(CARDS[lease.card_uuid].index)
        self.ask(MoveRequested(request, lease.lease_id, "root", card, True, "0.1"))
        # Until the image is there; then whatever happens.
        for _ in range(3):
            while worker.orders and not worker.has_left:
                self.obey(worker, 0)
            while worker.answers and worker.worker_id in self.workers:
                self.send(worker.answers.pop(0))
            self.card_proves()
        for _ in range(luck % 3):
            self.worker_acts(pick, luck, 1)
            self.worker_is_heard(pick, 1)
        if luck % 4 == 3:
            self.all_is_done(pick, luck)

    @rule(
        pick=ANY,
        card=st.sampled_from([None, "0", "1", "no card"]),
        is_operator=st.booleans(),
        version=st.sampled_from(["", "0.1"]),
    )
    def move(self, pick: int, card: str | None, is_operator: bool, version: str = "") -> None:
        lease_ids = [*self.images, *(worker.worker_id for worker in self.workers.values() if worker.size)]
        if lease_ids and (lease := self.table.get(lease_ids[pick % len(lease_ids)])) is not None:
            tenant = "root" if is_operator else lease.tenant
            self.ask(MoveRequested(self.next_number(), lease.lease_id, tenant, card, is_operator, version))

    @rule(card=st.sampled_from(["0", "1"]), within_ms=st.sampled_from([None, None, 500, 60_000]))
    def drain_card(self, card: str, within_ms: int | None) -> None:
        """Drain a card, or end its drain, so that sessions move off it, return to it and end there."""
        number = self.next_number()
        self.send(DrainCancelled(number, card) if within_ms is None else DrainRequested(number, within_ms, card))

    @rule(pick=ANY, is_revoked=st.booleans())
    def end_cold(self, pick: int, is_revoked: bool) -> None:
        if pick % 3 or not self.images or (lease := self.table.get(next(iter(self.images)))) is None:
            return
        if is_revoked:
            self.send(RevokeRequested(self.next_number(), lease.lease_id, "maintenance", is_operator=True))
        else:
            self.send(FreeRequested(self.next_number(), lease.lease_id, lease.tenant))

    @rule()
    def card_proves(self) -> None:
        for order in list(self.proofs):
            worker = self.workers.get(order.lease_id)
            if worker is not None and worker.bytes_on_card <= order.allowed_bytes:
                self.proofs.remove(order)
                self.send(RegionProved(order.region_id))

    @rule(by_ms=st.sampled_from([10, 300, 1000, 4000]))
    def time_passes(self, by_ms: int) -> None:
        self.now_ns += by_ms * MS
        due = sorted(((at, n) for n, (at, _) in enumerate(self.timers) if at <= self.now_ns))
        events = [self.timers[n][1] for _, n in due]
        self.timers = [timer for timer in self.timers if timer[0] > self.now_ns]
        for event in events:
            self.send(event)

    @rule()
    def kills_happen(self) -> None:
        kills, self.kills = self.kills, []
        for worker_id in kills:
            if worker_id > 0:
                if (event := self.recorded_kills.pop(worker_id, None)) is not None:
                    self.is_on_disk(event)
                self.reap(worker_id)
            else:
                self.send(ReclaimProved(-worker_id))

    @rule(pick=ANY)
    def worker_dies(self, pick: int) -> None:
        if pick % 8 == 0 and (worker := self.some(pick)) is not None:
            self.reap(worker.worker_id)

    @rule(pick=ANY)
    def worker_hangs(self, pick: int) -> None:
        if pick % 8 == 0 and (worker := self.some(pick)) is not None:
            self.send(SessionCondemned(worker.worker_id, Cause.UNRESPONSIVE, "it showed no sign of life"))
            # A kill is carried out at once, and reaches the process that has the number then.
            self.kills_happen()

    @rule(pick=ANY, is_revoked=st.booleans())
    def end(self, pick: int, is_revoked: bool) -> None:
        if pick % 3 or (worker := self.some(pick)) is None or (lease := self.table.get(worker.worker_id)) is None:
            return
        number = self.next_number()
        if is_revoked:
            self.send(RevokeRequested(number, lease.lease_id, "maintenance", is_operator=True))
        else:
            self.send(FreeRequested(number, lease.lease_id, lease.tenant))

    @rule(pick=ANY, size=st.sampled_from([20, 90]), ttl_ms=st.sampled_from([1500, 50_000]))
    def open_region(self, pick: int, size: int, ttl_ms: int) -> None:
        # Also for a session without a worker, which it brings back.
        lease_ids = [*self.images, *(worker.worker_id for worker in self.workers.values() if worker.size)]
        if lease_ids and (lease := self.table.get(lease_ids[pick % len(lease_ids)])) is not None:
            number, tenant = self.next_number(), lease.tenant
            self.ask(RegionRequested(number, lease.lease_id, number, tenant, tenant, size, ttl_ms, 1))

    @rule(pick=ANY, size=st.sampled_from([30, 100, 250, 300, 500]))
    def resize(self, pick: int, size: int) -> None:
        # Also a session without a worker, which it brings back.
        lease_ids = [*self.images, *(worker.worker_id for worker in self.workers.values() if worker.size)]
        if lease_ids and (lease := self.table.get(lease_ids[pick % len(lease_ids)])) is not None:
            self.ask(ResizeRequested(self.next_number(), lease.lease_id, lease.tenant, size))

    @rule(pick=ANY, timeout_ms=st.sampled_from([500, 50_000]))
    def submit(self, pick: int, timeout_ms: int) -> None:
        lease_ids = [*self.images, *(worker.worker_id for worker in self.workers.values() if worker.size)]
        if lease_ids and (lease := self.table.get(lease_ids[pick % len(lease_ids)])) is not None:
            self.ask(SubmitRequested(self.next_number(), lease.lease_id, lease.tenant, timeout_ms))

    @rule(pick=ANY)
    def submit_ends(self, pick: int) -> None:
        submits = [worker.worker_id for worker in self.workers.values() if worker.submit_of and not worker.answers]
        if submits:
            self.reap(submits[pick % len(submits)])

    @rule(pick=ANY)
    def client_leaves(self, pick: int) -> None:
        """A client disconnects before its request is answered."""
        if self.open:
            request = sorted(self.open)[pick % len(self.open)]
            self.open.discard(request)
            self.left.add(request)
            self.send(RequesterGone(request))

    @rule(pick=ANY, is_revoked=st.booleans())
    def end_a_region(self, pick: int, is_revoked: bool) -> None:
        regions = self.table.regions.snapshots()
        if not regions:
            return
        region, number = regions[pick % len(regions)], self.next_number()
        if is_revoked:
            self.send(RevokeRequested(number, region.lease_id, "maintenance", is_operator=True))
        else:
            self.send(FreeRequested(number, region.lease_id, region.tenant))

    @rule(pick=ANY, ttl_ms=st.sampled_from([3000, 60_000, 90_000]))
    def renew(self, pick: int, ttl_ms: int) -> None:
        lease_ids = [*self.images, *(worker.worker_id for worker in self.workers.values() if worker.size)]
        if lease_ids and (lease := self.table.get(lease_ids[pick % len(lease_ids)])) is not None:
            self.send(RenewRequested(self.next_number(), lease.lease_id, lease.tenant, ttl_ms))

    @rule(lost=st.sampled_from([0, 0, 1, 1, 2, 4, LONGEST_TAIL]), luck=ANY)
    def broker_is_killed(self, lost: int, luck: int) -> None:
        """Kill the broker while the rows of the last events are on their way to the disk, and start another."""
        if luck % 4:
            return
        # Each step of a worker may meet the new daemon: its orders and answers stay in the channel.
        tail = [self.tail.pop() for _ in range(min(lost, len(self.tail)))]
        self.disk.lose_tail(len(tail))
        for seen in tail:
            self.reaped += seen.forgotten
            self.ended, self.records, self.promised = seen.ended, seen.records, seen.promised
            for worker, order in seen.growths:
                worker.orders.remove(order)
        contents = self.disk.read()
        # The next broker numbers its orders by a later time.
        self.now_ns += MS
        killed = [self.workers.get(worker_id) for seen in tail for worker_id in seen.kills]
        self.tail.clear()
        self.table = LeaseTable(CARDS.values(), self.limits, self.warm, contents.recovered())
        self.images, self.lent = {}, set()
        reported, self.cards = self.cards, {kept.lease_id: kept.card_uuid for kept in contents.leases}
        self.timers, self.kills, self.proofs, self.open = [], [], [], set()
        self.recorded_kills.clear()
        beside, has_session = self.find_workers({kept.lease_id: kept.worker_pid for kept in contents.leases})
        for kept in contents.leases:
            if kept.lease_id in has_session:
                kept = kept._replace(is_cold=not has_session[kept.lease_id])
            if (own := self.workers.get(kept.lease_id)) is not None:
                kept = kept._replace(card_uuid=own.card)
                # The record of a move that has failed since names the other card, which nobody was told of.
                if own.card == reported.get(kept.lease_id):
                    self.cards[kept.lease_id] = own.card
                # A broker writes an end on the page before it records it.
                if kept.state is LeaseState.ACTIVE and kept.deadline_ns is not None:
                    kept = kept._replace(deadline_ns=max(kept.deadline_ns, own.deadline_ns))
                if own.ended is not None and kept.state is LeaseState.ACTIVE:
                    kept = kept._replace(state=LeaseState.DRAINING, cause=own.ended)
            park = own.park if own is not None and own.is_parked else 0
            self.send(LeaseRestored(kept, has_worker=own is not None, has_session=True, park_number=park))
            lease = self.table.get(kept.lease_id)
            if own is not None and lease is not None and lease.state is LeaseState.ACTIVE:
                assert self.served_by[kept.lease_id] is own, "a session continues as it was before"
                assert own not in killed, "a worker that its record needs was killed"
        for region in contents.regions:
            self.send(RegionRestored(region))
        for worker in self.workers.values():
            # What the new daemon does not know, a session ends by itself when it gets the new page, after these orders.
            is_known = self.table.regions.get
            worker.held = [
                order for order in worker.held if isinstance(order, ResizeSlice) or is_known(order.region_id)
            ]
            worker.orders = [
                order for order in worker.orders if not isinstance(order, OpenRegion) or is_known(order.region_id)
            ]
            worker.regions = {one: size for one, size in worker.regions.items() if self.table.regions.get(one)}
            worker.gone = {one: size for one, size in worker.gone.items() if self.table.regions.get(one)}
        # What an earlier daemon ordered, and what this one repeats, counts for no pace.
        self.parks = {uuid: [] for uuid in CARDS}
        self.need_moves.clear()
        known = {kept.lease_id for kept in contents.leases}
        open_for_submits = {kept.lease_id for kept in contents.leases if kept.state is not LeaseState.FENCED}
        for worker in list(self.workers.values()):
            worker.answers = [one for one in worker.answers if not isinstance(one, WorkerReady)]
            if worker.submit_of in open_for_submits and worker.ended is not Cause.ABANDONED:
                open_for_submits.discard(worker.submit_of)
                is_running = worker.is_leased and worker.ended is None
                size = worker.submit_bytes
                self.send(SubmitFound(worker.worker_id, worker.submit_of, worker.card, is_running, 500, size))
            elif worker.submit_of:
                del self.workers[worker.worker_id]
                worker.worker_id = self.next_number() + (1 << 20)
                self.workers[worker.worker_id] = worker
                held = CARD.overhead_bytes + worker.submit_bytes
                self.send(WorkerFound(worker.worker_id, worker.card, held, worker.submit_of))
            elif worker.worker_id not in known:
                held = CARD.overhead_bytes + worker.size
                self.send(WorkerFound(worker.worker_id, worker.card, held, beside.get(worker.worker_id, 0)))
        if self.table.has_drain:
            self.send(DrainTimerFired())
        self.send(PoolTimerFired())

    def find_workers(self, pids: dict[int, int]) -> tuple[dict[int, int], dict[int, bool]]:
        """Number the workers as a new daemon does.

        `pids`: The process id of the worker of each lease, as recorded.

        Returns the lease of each that is one too many, by its number; and for some leases whether a worker has the
        session, which is newer than the record.
        """
        beside: dict[int, int] = {}
        has_session: dict[int, bool] = {}
        for lease_id, pid in pids.items():
            known = [worker for worker in (*self.workers.values(), *self.reaped) if worker.of_lease == lease_id]
            # One that an earlier broker has dropped may still be ending.
            dropped = [worker for worker in known if worker.ended is Cause.ABANDONED]
            leased = [worker for worker in known if worker.is_leased and worker not in dropped]
            own = [worker for worker in known if worker not in dropped and worker not in self.reaped]
            own.sort(key=lambda worker: worker.is_leased, reverse=True)
            serving = [worker for worker in leased if worker.serves]
            left = [worker for worker in own if worker.is_leased and worker.has_left]
            best = own[0] if own else None
            if len(serving) == 1:
                has_session[lease_id], best = True, serving[0]
            elif not (pid or serving or left):
                has_session[lease_id] = False
            elif len(leased) > 1 and len(left) == 1 and not serving:
                has_session[lease_id], best = True, left[0]
                # The others are killed before they can do anything more.
                for worker in own:
                    worker.orders = [] if worker is not best else worker.orders
            elif sum(worker.is_leased for worker in own) > 1:
                has_session[lease_id] = False
            own.sort(key=lambda worker: worker is best, reverse=True)
            own += [worker for worker in dropped if worker not in self.reaped]
            for worker in own:
                del self.workers[worker.worker_id]
            for worker in own:
                is_own = worker is best
                worker.worker_id = lease_id if is_own else self.next_number() + (1 << 20)
                worker.answers = worker.answers if is_own else []
                self.workers[worker.worker_id] = worker
                if not is_own:
                    beside[worker.worker_id] = lease_id
        return beside, has_session

    # --- what must hold ---

    @invariant()
    def bytes_are_where_they_fit(self) -> None:
        if not hasattr(self, "workers"):
            return
        for uuid, card in CARDS.items():
            held = self.held(uuid)
            assert held <= card.capacity_bytes, f"{held} bytes are on a card of {card.capacity_bytes}"

    @invariant()
    def all_bytes_are_charged(self) -> None:
        for card in self.table.cards() if hasattr(self, "workers") else ():
            charged_bytes = card.held_bytes + card.warm_bytes
            assert charged_bytes >= self.held(card.uuid), "bytes on a card that are charged to nobody"

    @invariant()
    def cold_sessions_have_their_image(self) -> None:
        if not hasattr(self, "workers"):
            return
        for lease_id, park in self.table.parking.snapshots().items():
            lease = self.table.get(lease_id)
            if lease is not None and lease.state is LeaseState.ACTIVE and park.depth is ParkDepth.COLD:
                assert lease_id in self.images, "a cold session has no image"
                assert lease_id not in self.workers, "a cold session has a worker"

    @invariant()
    def open_regions_are_known(self) -> None:
        # A worker that its session has left reads the words of what has ended meanwhile once it has the session again.
        for worker in (one for one in getattr(self, "workers", {}).values() if not one.has_left):
            for region_id in worker.regions.keys() - self.table.regions.open_ids() - worker.gone.keys():
                # An end of its lease is not ordered region by region.
                lease = self.table.get(worker.worker_id)
                assert lease is None or lease.state is not LeaseState.ACTIVE, f"region {region_id} is open for nobody"

    @invariant()
    def every_worker_of_an_ended_lease_shows_the_end(self) -> None:
        # The next broker may continue the session in any worker that has, or had, it.
        for worker in getattr(self, "workers", {}).values():
            lease = self.table.get(worker.of_lease) if worker.is_leased else None
            is_over = lease is not None and lease.state not in (LeaseState.PENDING, LeaseState.ACTIVE)
            assert not is_over or worker.ended is not None, f"a worker of lease {worker.of_lease} shows no end"

    @invariant()
    def moves_are_reported(self) -> None:
        for lease_id, park in self.table.parking.snapshots().items() if hasattr(self, "table") else ():
            lease = self.table.get(lease_id)
            if lease is not None and lease.state is LeaseState.ACTIVE and not park.is_moving:
                assert lease.card_uuid == self.cards[lease_id], "a lease has changed its card, and nobody knows"

    @invariant()
    def parks_have_their_pace(self) -> None:
        for times in getattr(self, "parks", {}).values():
            for first, since_ns in enumerate(times):
                for last, at_ns in enumerate(times[first:], 1):
                    most = self.burst + (at_ns - since_ns) * self.parks_per_minute // 60_000 // MS
                    assert last <= most, f"{last} parks of a card within {(at_ns - since_ns) // MS} ms"

    @invariant()
    def deadlines_outlast_everything(self) -> None:
        for lease_id, promised_ns in getattr(self, "promised", {}).items():
            lease = self.table.get(lease_id)
            if lease is None or lease.state is not LeaseState.ACTIVE or lease.deadline_ns is None:
                continue
            assert lease.deadline_ns >= promised_ns, "a reply promised more time"
            # While no broker runs, the zygote ends the lease by the page of its worker, or of the one set aside.
            park = self.table._store.live[lease_id].park
            held_id = park.held_id if park is not None else 0
            for worker in (self.workers[one] for one in (lease_id, held_id) if one in self.workers):
                assert worker.deadline_ns in (0, lease.deadline_ns), "a page has another deadline"

    @invariant()
    def whoever_waits_for_a_return_is_served(self) -> None:
        # An operation that comes later asks for no second return.
        for lease_id, park in self.table.parking.snapshots().items() if hasattr(self, "table") else ():
            is_settled = park.phase is ParkPhase.PARKED and park.depth in (ParkDepth.WARM, ParkDepth.COLD)
            lease = self.table.get(lease_id)
            if is_settled and park.is_awaited and lease is not None and lease.state is LeaseState.ACTIVE:
                assert self.table._store.queue.get(-lease_id) is not None, f"lease {lease_id} is in no queue"

    @invariant()
    def records_alternate(self) -> None:
        for lease_id, kinds in getattr(self, "records", {}).items():
            doubled = [kind for kind, after in itertools.pairwise(kinds) if kind is after]
            assert not doubled, f"lease {lease_id} was recorded as {doubled[0].__name__} twice"

    def teardown(self) -> None:
        parking.PARK_BURST = USUAL_BURST  # type: ignore[misc]
        if not hasattr(self, "workers"):
            return
        self.check_returns()
        self.send(ShutdownRequested())
        for _ in range(30):
            self.time_passes(1000)
            self.kills_happen()
            self.card_proves()
        assert not self.open, f"requests without an answer: {self.open}"
        assert set(self.ended.values()) <= {1}, f"leases that ended twice: {self.ended}"
        assert all(lease.state is LeaseState.FENCED for lease in self.table.snapshots())
        held, _ = self.table.parking.host_bytes()
        assert held == 0 or self.table.snapshots(), f"{held} bytes of the host are left"

    def check_returns(self) -> None:
        """Check that no session waits for an answer that never comes."""
        for _ in range(6):
            self.all_is_done(0, 0)
            self.kills_happen()
        for lease_id, park in self.table.parking.snapshots().items():
            lease = self.table.get(lease_id)
            is_active = lease is not None and lease.state is LeaseState.ACTIVE
            assert not is_active or park.phase is not ParkPhase.RETURNING, f"lease {lease_id} returns for ever"


FEW = settings(max_examples=60, stateful_step_count=60, deadline=None)
ParkingAnyOrder.TestCase.settings = FEW
TestParkingAnyOrder = ParkingAnyOrder.TestCase


@pytest.mark.exhaustive
class TestManyParkingOrders(TestParkingAnyOrder):  # type: ignore[valid-type, misc]
    settings = settings(FEW, max_examples=150)


@pytest.mark.slow
class TestParkingCampaign(TestParkingAnyOrder):  # type: ignore[valid-type, misc]
    """After a change of parking: this search finds what one of hundreds of runs shows."""

    settings = settings(FEW, max_examples=600)


def test_a_cold_session_may_wait_on_a_card_that_restored_leases_exceed() -> None:
    """The search found it in one of hundreds of runs: a move to such a card is charged nothing until there is room."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    for _ in range(2):
        state.acquire_and_park(pick=0, size=250, luck=0)
    state.open_region(pick=0, size=20, ttl_ms=1500)
    for card, pick in ((None, 0), (None, 0), ("1", 1)):
        state.park_and_move(pick, card, luck=0)
    state.broker_is_killed(lost=0, luck=0)
    state.park_and_move(404, "1", luck=0)
    state.teardown()


def test_a_session_that_was_parked_without_a_record_serves_a_request_to_the_next_broker() -> None:
    """The killed broker received the worker's report. No operation of the session makes the worker ask again."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.acquire(tenant="ann", size=250, idle=0, wait_ms=0, is_quick=True)
    state.park(pick=0, is_operator=False)
    state.worker_acts(pick=0, luck=0, count=4)
    state.worker_is_heard(pick=0, count=4)
    state.broker_is_killed(lost=0, luck=0)
    state.open_region(pick=0, size=20, ttl_ms=1500)
    state.all_is_done(pick=0, luck=0)
    assert not state.open, "the region is not open"
    state.teardown()


def test_a_return_behind_a_killed_broker_is_recorded() -> None:
    """The worker returned its session for a broker that died before it heard so; the next one orders the park again."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.acquire_and_park(pick=0, size=250, luck=0)
    state.open_region(pick=0, size=20, ttl_ms=1500)
    state.park_and_move(0, None, luck=0)
    state.tenant_works(pick=0)
    state.time_passes(by_ms=4000)
    state.worker_is_heard(pick=0, count=1)
    state.broker_is_killed(lost=0, luck=0)
    state.acquire_and_park(pick=0, size=250, luck=0)
    assert state.records[1][-2:] == [LeaseReturned, LeaseParked]
    state.teardown()


def test_a_worker_that_ends_behind_a_move_is_charged_where_it_is() -> None:
    """The broker is killed while a moved session waits for room, and its last worker still ends on the other card."""
    state = ParkingAnyOrder()
    state.begin(warm=2)
    for _ in range(2):
        state.need_many(pick=0, luck=0)
    state.move(pick=296, card="0", is_operator=False, version="")
    state.upgrade(is_parked=False, luck=0, pick=0)
    state.broker_is_killed(lost=0, luck=0)
    state.bytes_are_where_they_fit()
    state.teardown()


def test_a_worker_behind_a_move_that_has_its_next_worker_is_charged_where_it_is() -> None:
    """The broker is killed while the new worker starts, and the former one still ends on the other card."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.acquire(idle=700, is_quick=False, size=400, tenant="ann", wait_ms=0)
    state.worker_is_heard(count=1, pick=0)
    state.move(card="1", is_operator=False, pick=0)
    state.upgrade(is_parked=False, luck=0, pick=0)
    state.broker_is_killed(lost=0, luck=0)
    state.all_bytes_are_charged()
    state.teardown()


def test_a_park_that_waits_for_a_return_is_answered_if_no_worker_starts() -> None:
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.park_and_move(0, None, luck=0)
    state.client_of_a_cold_session_works(pick=0)
    state.park(pick=0, is_operator=False)
    assert state.open
    state.time_passes(by_ms=4000)
    assert not state.open
    state.teardown()


def test_a_region_that_ends_while_its_session_has_left_ends_once_the_former_worker_stays() -> None:
    """There is no room for a new worker, and the region's time is over before the former one has its session again."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.acquire(tenant="ann", size=250, idle=700, wait_ms=0, is_quick=True)
    state.open_region(pick=0, size=20, ttl_ms=1500)
    state.all_is_done(pick=0, luck=0)
    state.acquire(tenant="bob", size=650, idle=None, wait_ms=0, is_quick=True)
    state.move(pick=0, card="0", is_operator=True, version="0.1")
    state.all_is_done(pick=0, luck=0)
    state.time_passes(by_ms=4000)
    worker = state.workers[1]
    assert worker.has_left
    assert list(worker.regions) == [2]
    state.open_regions_are_known()
    state.all_is_done(pick=0, luck=0)
    assert not worker.has_left
    assert list(worker.regions) == []
    state.open_regions_are_known()
    state.teardown()


def test_a_region_that_ended_in_an_image_ends_in_the_former_worker_behind_a_killed_broker() -> None:
    """The broker is killed while the new worker of an upgrade starts, and the former one still has the region."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.acquire("ann", 250, 0, 0, is_quick=True)
    state.open_region(pick=0, size=20, ttl_ms=50_000)
    state.all_is_done(pick=0, luck=0)
    state.upgrade(is_parked=False, luck=0, pick=0)
    (region,) = state.table.regions.open_ids()
    state.end_a_region(pick=0, is_revoked=True)
    assert state.table.regions.open_ids() == ()
    state.broker_is_killed(lost=0, luck=0)
    assert state.workers[1].regions == {region: 20}
    # The next broker parks the session again.
    state.all_is_done(pick=0, luck=0)
    state.open_regions_are_known()
    assert (state.workers[1].has_left, state.workers[1].regions) == (False, {})
    # Its place is given up, too.
    assert state.table.regions.get(region) is None
    state.teardown()


def test_a_session_that_a_new_worker_has_parked_outlives_its_broker() -> None:
    """It was cold, found no room, and was adopted for a refusal alone: from then on its lease has a worker again."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.cold_session_finds_no_room(pick=0, luck=0)
    assert state.workers[1].is_new
    state.all_is_done(pick=0, luck=0)
    assert (state.workers[1].is_new, state.workers[1].on_card) == (False, False)
    state.broker_is_killed(lost=0, luck=0)
    state.all_is_done(pick=0, luck=0)
    lease = state.table.get(1)
    assert lease is not None
    assert lease.state is LeaseState.ACTIVE
    state.teardown()


def test_a_submit_is_charged_again_behind_a_killed_broker() -> None:
    state = ParkingAnyOrder()
    state.begin(warm=2)
    state.acquire("ann", 250, 0, 0, is_quick=True)
    state.all_is_done(0, 0)
    state.submit(pick=0, timeout_ms=50_000)
    state.all_is_done(0, 0)
    (submit,) = (worker for worker in state.workers.values() if worker.submit_of)
    state.broker_is_killed(lost=0, luck=0)
    state.all_is_done(0, 0)
    assert state.table.submits.may_hold(submit.worker_id) == (submit.card, CARD.overhead_bytes + 250)
    state.bytes_are_where_they_fit()
    state.teardown()


def test_a_session_that_is_lost_beside_its_submit_ends_with_it() -> None:
    """A worker that an earlier broker left reports falsely that its session is not on the card."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.acquire("ann", 250, 0, 0, is_quick=True)
    state.submit(pick=0, timeout_ms=50_000)
    state.all_is_done(0, 0)
    state.broker_is_killed(lost=0, luck=0)
    (order,) = (order for order in state.workers[1].orders if isinstance(order, ReturnSession))
    state.send(SessionReturnFailed(1, order.number, "the address was refused"))
    lease = state.table.get(1)
    assert lease is not None
    assert (lease.state, lease.cause) == (LeaseState.DRAINING, Cause.WORKER_DIED)
    assert not state.proofs, "no bytes are given back while the submit may hold them"
    state.teardown()


def test_a_submit_whose_sessions_return_has_no_record_is_held_beside_its_lease() -> None:
    """The record says that the session is parked, so it is parked again, and its bytes are released to the card."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.acquire_and_park(pick=0, size=250, luck=0)
    state.submit(pick=0, timeout_ms=50_000)
    (worker,) = state.workers.values()
    while worker.orders:
        state.obey(worker, 0)
    while not any(one.submit_of for one in state.workers.values()):
        state.send(worker.answers.pop(0))
    state.broker_is_killed(lost=1, luck=0)
    state.all_is_done(0, 0)
    state.all_bytes_are_charged()
    # The park is proved: an allowance that counted the submit's bytes as the session's would never be met.
    state.kills_happen()
    state.kills_happen()
    state.all_is_done(0, 0)
    assert not state.proofs
    assert [(card.held_bytes, card.warm_bytes) for card in state.table.cards()] == [(CARD.overhead_bytes, 0), (0, 0)]
    state.teardown()


def test_a_session_that_left_without_a_record_of_it_continues_in_its_worker() -> None:
    """The broker was killed with the session's image, right after it had received it."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.acquire("ann", 250, 0, 0, is_quick=True)
    state.all_is_done(0, 0)
    state.move(0, None, is_operator=True)
    state.all_is_done(0, 0)
    (lease_id,) = state.images
    assert state.kills
    state.broker_is_killed(lost=1, luck=0)
    assert state.table._store.live[lease_id].state is LeaseState.ACTIVE
    state.all_is_done(0, 0)
    worker = state.workers[lease_id]
    state.send(ReturnWanted(lease_id, worker.park))
    state.all_is_done(0, 0)
    assert worker.on_card
    state.teardown()


def test_an_end_that_only_the_page_shows_continues_behind_a_killed_broker() -> None:
    """The worker is killed at once, and the record of the end is lost with the broker."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.acquire("bob", 100, 0, 0, is_quick=True)
    state.end(pick=0, is_revoked=False)
    assert state.tail[-1].kills == [1]
    state.broker_is_killed(lost=1, luck=0)
    (lease,) = state.table.snapshots()
    assert (lease.lease_id, lease.state) == (1, LeaseState.DRAINING)
    state.teardown()


def test_an_empty_worker_does_not_continue_a_session_behind_a_killed_broker() -> None:
    """The worker that a session has left dies while the next one starts, and then the broker with the image."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.upgrade(pick=0, luck=0, is_parked=False)
    state.worker_dies(pick=0)
    (following,) = state.workers.values()
    assert following.is_new
    state.broker_is_killed(lost=0, luck=0)
    lease = state.table.get(1)
    assert lease is not None
    assert (lease.state, lease.cause) == (LeaseState.DRAINING, Cause.WORKER_DIED)
    state.teardown()


def test_an_end_during_an_upgrade_is_on_both_pages_behind_a_killed_broker() -> None:
    """The record of the end is lost with the broker, and the session would continue in the worker that it has left."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.upgrade(pick=0, luck=0, is_parked=False)
    (former,) = (worker for worker in state.workers.values() if worker.has_left)
    state.end_cold(pick=0, is_revoked=True)
    state.every_worker_of_an_ended_lease_shows_the_end()
    assert former.ended is Cause.REVOKED
    state.broker_is_killed(lost=1, luck=0)
    assert [(lease.lease_id, lease.state) for lease in state.table.snapshots()] == [(1, LeaseState.DRAINING)]
    state.teardown()


def test_a_worker_that_the_broker_before_has_dropped_is_not_continued() -> None:
    """Its end takes long, and the next broker is killed during another upgrade of the same session."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.upgrade(pick=0, luck=5, is_parked=True)
    state.broker_is_killed(lost=1, luck=0)
    (dropped,) = (worker for worker in state.workers.values() if worker.ended is Cause.ABANDONED)
    state.open_region(pick=0, size=20, ttl_ms=1500)
    state.upgrade(pick=0, luck=0, is_parked=False)
    state.broker_is_killed(lost=1, luck=0)
    assert dropped in state.workers.values()
    lease = state.table.get(1)
    assert lease is not None
    assert lease.state is LeaseState.ACTIVE
    assert state.table.regions.open_ids()
    state.teardown()


def test_a_submit_that_the_broker_before_has_dropped_is_not_its_leases_again() -> None:
    """Its end takes longer than the next broker lives."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.acquire_and_park(pick=0, size=250, luck=0)
    state.submit(pick=0, timeout_ms=500)
    state.need_many(count=2, luck=990, needed=600, pick=1704, size=250)
    state.end(pick=1545, is_revoked=True)
    state.kills_happen()
    state.acquire("bob", 400, 0, 0, is_quick=True)
    state.broker_is_killed(lost=1, luck=0)
    assert any(worker.submit_of and worker.ended is Cause.ABANDONED for worker in state.workers.values())
    state.worker_dies(pick=0)
    state.broker_is_killed(lost=1, luck=0)
    state.teardown()


def test_a_worker_that_a_session_has_left_is_charged_behind_the_end_of_its_lease() -> None:
    """The lease ends while its session is cold, and the broker is killed before it has killed the former worker."""
    state = ParkingAnyOrder()
    state.begin(warm=0)
    state.acquire("ann", 250, 0, 0, is_quick=True)
    state.all_is_done(0, 0)
    state.move(0, None, is_operator=True)
    state.all_is_done(0, 0)
    state.end_cold(pick=0, is_revoked=False)
    state.all_bytes_are_charged()
    state.broker_is_killed(lost=0, luck=0)
    state.all_bytes_are_charged()
    state.kills_happen()
    state.kills_happen()
    assert [(card.held_bytes, card.warm_bytes) for card in state.table.cards()] == [(0, 0), (0, 0)]
    state.teardown()


def test_bytes_of_a_direct_move_are_charged_behind_the_end_of_its_lease() -> None:
    """The lease ends while its session waits for room on the other card, and its bytes are in its former worker."""
    state = ParkingAnyOrder()
    state.begin(warm=0, is_direct=True)
    state.acquire("ann", 400, 0, 0, is_quick=True)
    state.all_is_done(0, 0)
    state.move(0, "1", is_operator=True)
    state.worker_acts(pick=0, luck=0, count=4)
    state.worker_is_heard(pick=0, count=4)
    state.worker_acts(pick=0, luck=0, count=4)
    # Another tenant takes the room before the image is there.
    state.acquire("bob", 650, None, 0, is_quick=True)
    state.worker_is_heard(pick=0, count=4)
    assert state.held(CARD.uuid) == 400 + CARD.overhead_bytes
    state.end_cold(pick=0, is_revoked=True)
    state.broker_is_killed(lost=0, luck=0)
    state.all_bytes_are_charged()
    state.teardown()
