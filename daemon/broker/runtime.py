"""Tells the lease table when a lease loses its last connection, and when it has one again.

A lease is connected while one of these is there: a control connection that acquired or renewed it, asked about it as
its tenant, or asked for a submit of it; a connection of its session, a guest's too, or one on its way to the worker; a
submit of it that starts or runs. The worker counts its own connections on its page, so that the next broker knows them
too; of control connections the next broker knows none, and gives their clients time to come back.

The lease table's hands: events in, effects out, each effect carried out here.

Nothing here decides. An event posted while an effect is being carried out waits for its turn, so the table is never
entered twice.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from gpulease.daemon.broker.fair_queue import FairQueue
from gpulease.daemon.broker.handlers.token_requests import TokenService
from gpulease.daemon.broker.health import Health
from gpulease.daemon.broker.memory_reserve import MemoryReserve
from gpulease.daemon.broker.node_metrics import NodeMetrics
from gpulease.daemon.broker.refusal import submit_word_for, word_for
from gpulease.daemon.broker.subscriptions import Publisher
from gpulease.daemon.broker.timers import Timers
from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.gpus.source import CardSource
from gpulease.daemon.leases import (
    FIRST_WARM_ID,
    ArmDrainTimer,
    ArmHoldTimer,
    ArmPoolTimer,
    ArmTimer,
    ArmWaitTimer,
    CapacityChanged,
    Card,
    Cause,
    ConnectionsChanged,
    Denied,
    DrainTimerFired,
    Effect,
    Event,
    FenceCleared,
    Freed,
    Granted,
    HoldTimerFired,
    KillWorker,
    LeaseEnded,
    LeaseState,
    LeaseTable,
    Outcome,
    PoolTimerFired,
    ProveReclaimed,
    RecycleWorker,
    RefuseSubmit,
    RefuseWork,
    RenameWorker,
    Renewed,
    ScrubWorker,
    SetDeadline,
    SpawnSubmit,
    SpawnWorker,
    SubmitEnded,
    SubmitFenced,
    SubmitState,
    TimerFired,
    TimerKind,
    WaitTimerFired,
    WarmEnded,
    WarmState,
    WarmUp,
    Warned,
)
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.audit.recorder import Recorder
from gpulease.daemon.record.history import LeaseHistory
from gpulease.daemon.record.journal import Journal
from gpulease.daemon.record.lease_log import LeaseLog
from gpulease.daemon.workers.adoption import adopt
from gpulease.daemon.workers.memory_monitor import CardWatch, MemoryMonitor, Reclaimer
from gpulease.daemon.workers.recycler import Recycler
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.watchdog import KernelWatchdog
from gpulease.protocol.opcodes import Exclusivity, Status

TAKEOVER_WAIT_MS: Final = 60_000
"""The shortest wait of a lease that was taken over. Its client may live without a connection: it makes a new one only
when it next asks for something. Stops an upgrade from ending its lease before that."""

_GOES_ON: Final = frozenset({SubmitState.STARTING, SubmitState.RUNNING})


class ConnectionTracker:
    """Knows which leases are connected."""

    def __init__(self, table: LeaseTable, workers: Workers, post: Callable[[Event], None]) -> None:
        self._table = table
        self._workers = workers
        self._post = post
        self._holders: dict[int, set[object]] = {}
        self._held: dict[object, set[int]] = {}
        # Leases of which the table was told that nobody is connected.
        self._unconnected: set[int] = set()
        # An earlier broker's.
        self._taken_over: set[int] = set()

    def hold(self, lease_id: int, holder: object) -> None:
        """Count a control connection as the lease's, until `leave`."""
        if not self._table.orphan_ms(lease_id):
            return
        self._holders.setdefault(lease_id, set()).add(holder)
        self._held.setdefault(holder, set()).add(lease_id)
        self.look(lease_id)

    def leave(self, holder: object) -> None:
        """A control connection is gone."""
        lease_ids = self._held.pop(holder, set())
        for lease_id in lease_ids:
            self._holders[lease_id].discard(holder)
        for lease_id in lease_ids:
            self.look(lease_id)

    def look(self, lease_id: int) -> None:
        """Tell the table if the lease is connected and was not, or the other way round."""
        if not self._table.orphan_ms(lease_id):
            return
        is_connected = self._is_connected(lease_id)
        if is_connected != (lease_id in self._unconnected):
            return
        (self._unconnected.discard if is_connected else self._unconnected.add)(lease_id)
        self._post(ConnectionsChanged(lease_id, is_connected, TAKEOVER_WAIT_MS if lease_id in self._taken_over else 0))

    def look_at_all(self) -> None:
        """An earlier daemon's leases were taken over: those that nobody is connected to wait from now on."""
        for lease in self._table.snapshots():
            self._taken_over.add(lease.lease_id)
            self.look(lease.lease_id)

    def forget(self, lease_id: int) -> None:
        """The lease is over."""
        self._unconnected.discard(lease_id)
        self._taken_over.discard(lease_id)
        for holder in self._holders.pop(lease_id, ()):
            held = self._held[holder]
            held.discard(lease_id)
            if not held:
                del self._held[holder]

    def _is_connected(self, lease_id: int) -> bool:
        if self._holders.get(lease_id):
            return True
        submit = self._table.submits.of(lease_id)
        if submit is not None and submit.state in _GOES_ON:
            return True
        worker = self._workers.worker(lease_id)
        return worker is not None and (worker.hand_overs > 0 or worker.page.counter(Counter.CONNECTIONS) > 0)


_KINDS: Final = tuple(TimerKind)

OnOutcome = Callable[[Outcome], None]


class Runtime:
    """Carries out what the lease table wants done."""

    def __init__(
        self,
        table: LeaseTable,
        source: CardSource,
        workers: Workers,
        tokens: TokenService,
        recorder: Recorder,
        max_load_s: int,
        journal: Journal | None = None,
    ) -> None:
        self.table = table
        self.tokens = tokens
        self.teller = Publisher(table, self._warned)
        self.turns = FairQueue()
        self.headroom = MemoryReserve()
        self.workers = workers
        self.history = LeaseHistory(table.get, table.submits.lease_of)
        self.recorder = LeaseLog(recorder, table.get, workers.pid)
        self.journal = journal or Journal()
        self.health = Health(table, workers, self.journal, recorder, self.headroom)
        self.metrics = NodeMetrics(table, source, workers, recorder, self.health)
        self.recorder.attach(self.post)
        self.journal.observe(table, workers.pid, self.post)
        workers.deliver_to(self.post)
        self.presence = ConnectionTracker(table, workers, self.post)
        workers.tell_of_connections(self.presence.look, partial(tokens.guest_answered, self.journal))
        self._source = source
        self._reclaimer = Reclaimer(source, self.post)
        self.card_watch = CardWatch(source, [card.uuid for card in table.cards()], workers, self.post)
        self._weigher = MemoryMonitor(table, source, workers, self.post)
        self._recycler = Recycler(source, workers, self.post)
        workers.look_with(self._weigher.look, self._recycler.on_scrubbed)
        self._watchman = KernelWatchdog(workers, self.post, max_load_s)
        self._events: deque[Event] = deque()
        self._is_busy = False
        self._last_request = 0
        self._waiting: dict[int, OnOutcome] = {}
        self.timers = Timers(self.post, self.headroom.secure)
        self._one_ended = asyncio.Event()
        self._untold = 0

    async def drained(self) -> None:
        """Wait until no lease and no warm context is left but fenced ones."""
        while any(lease.state is not LeaseState.FENCED for lease in self.table.snapshots()) or any(
            context.state is not WarmState.FENCED for context in self.table.warming()
        ):
            self._one_ended.clear()
            await self._one_ended.wait()

    async def settled(self) -> None:
        """Wait until every lease is active or fenced, and everybody was told what became of what they asked for."""
        while self._untold or any(
            lease.state in (LeaseState.PENDING, LeaseState.DRAINING) for lease in self.table.snapshots()
        ):
            self._one_ended.clear()
            await self._one_ended.wait()

    def adopt(self, cards: Sequence[Card], latest_ns: int) -> None:
        """Take over what an earlier daemon left; before anything else happens. `latest_ns`: see `reconcile`."""
        self.recorder.record_missing_ends(self.journal.past.tombstones, time.monotonic_ns())
        overheads = {card.uuid: card.overhead_bytes for card in cards}
        adopt(self.journal.kept, self.workers, overheads, latest_ns, self.post)
        self.metrics.took_over()
        self.presence.look_at_all()
        if self.table.drain_ns is not None:
            log_event(LogEvent.DRAIN_GOES_ON)
            self.post(DrainTimerFired())
        if self.workers.serving():
            self._watchman.start()
            self._weigher.start()

    async def stop(self) -> None:
        """Wait for nothing any more."""
        self.timers.stop()
        self.teller.stop()
        await self.metrics.stop()
        await self._watchman.stop()
        await self._weigher.stop()
        await self._recycler.stop()
        await self._reclaimer.stop()
        await self.card_watch.stop()
        self.headroom.close()

    # --- requests ---

    def expect(self, on_outcome: OnOutcome) -> int:
        """A number for a request whose outcome `on_outcome` will get, exactly once."""
        self._last_request += 1
        self._waiting[self._last_request] = on_outcome
        return self._last_request

    def forget(self, request: int) -> None:
        """Nobody waits for this outcome any more."""
        self._waiting.pop(request, None)
        self.timers.cancel((WaitTimerFired, request))

    # --- events in ---

    def post(self, event: Event) -> None:
        """Tell the table what happened, and carry out what it wants done."""
        if self._recycler.holds_back(event):
            return
        self._events.append(event)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            self.headroom.secure()
            while self._events:
                event, now_ns = self._events.popleft(), time.monotonic_ns()
                effects = self.table.handle(event, now_ns)
                # Before any of it is carried out: nobody is told what is on its way to neither journal nor audit log.
                self.journal.on_event(event, effects)
                if facts := self.history.on_event(event, effects, now_ns):
                    self.recorder.on_facts(facts)
                    self.metrics.on_facts(facts)
                for effect in effects:
                    self._try(effect)
                self._tell(effects)
        finally:
            self._is_busy = False

    def _warned(self, lease_id: int, left_ms: int, reason: str) -> None:
        self.recorder.warned(lease_id, left_ms, reason)

    # --- effects out ---

    def _tell(self, effects: list[Effect]) -> None:
        try:
            self.teller.on_effects(effects)
        except Exception:
            # A bug of ours, in what nobody's lease depends on.
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"telling of {effects!r}")

    def _try(self, effect: Effect) -> None:
        try:
            self._perform(effect)
        except Exception:
            # A bug of ours; the effects behind this one, another tenant's perhaps, must be carried out all the same.
            # What this one was to bring about is missed by the lease's timers, which end it.
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"carrying out {effect!r}")

    def _perform(self, effect: Effect) -> None:
        # Those that every lease has come first.
        match effect:
            case ArmTimer():
                self._arm(effect)
            case Granted() | Renewed() | Freed():
                self._answer(effect)
            case SetDeadline(lease_id, generation, deadline_ns):
                self.workers.set_deadline(lease_id, deadline_ns, generation)
            case RefuseWork(lease_id, cause):
                lease = self.table.get(lease_id) if cause is Cause.REVOKED else None
                self.workers.refuse(lease_id, word_for(cause), "" if lease is None else lease.reason, cause.value)
            case KillWorker(lease_id):
                self.workers.kill(lease_id)
            case ProveReclaimed(lease_id, card_uuid):
                self._reclaimer.prove(lease_id, card_uuid, self.workers.ended_pid(lease_id))
            case LeaseEnded() | SubmitEnded() | WarmEnded():
                self._end(effect)
            case SpawnWorker():
                self._spawn(effect)
            case WarmUp(warm_id, card_uuid):
                self._watchman.start()
                self.workers.spawn(WorkerSpec(warm_id, card_uuid, 0, is_shared=False))
            case RenameWorker(from_id, to_id):
                self.workers.rename(from_id, to_id)
                if from_id >= FIRST_WARM_ID:
                    self._cancel_timers(from_id)
            case ScrubWorker(lease_id):
                self._recycler.scrub(lease_id)
            case RecycleWorker(lease_id, warm_id):
                self.workers.recycle(lease_id, warm_id)
            case ArmWaitTimer(request, due_ns):
                self.timers.arm((WaitTimerFired, request), due_ns, WaitTimerFired(request))
            case ArmHoldTimer(due_ns):
                self.timers.arm(HoldTimerFired, due_ns, HoldTimerFired())
            case ArmPoolTimer(due_ns):
                self.timers.arm(PoolTimerFired, due_ns, PoolTimerFired())
            case ArmDrainTimer(due_ns):
                self.timers.arm(DrainTimerFired, due_ns, DrainTimerFired())
            case SpawnSubmit():
                self._spawn_submit(effect)
            case RefuseSubmit(submit_id, cause):
                lease = self.table.get(self.table.submits.lease_of(submit_id)) if cause is Cause.REVOKED else None
                self.workers.refuse(submit_id, submit_word_for(cause), "" if lease is None else lease.reason)
            case SubmitFenced(submit_id, lease_id):
                # Not settled: the zygote goes on telling of it, so that a restart does not forget.
                self._cancel_timers(submit_id)
                self._reclaimer.give_up(submit_id)
                self.presence.look(lease_id)
            case Warned() | CapacityChanged():
                pass  # the teller's to tell, and the chronicle's
            case FenceCleared():
                self.workers.end_fences({*effect.lease_ids, *effect.warm_ids})
                self._answer(effect)
            case _:
                self._answer(effect)

    def _end(self, effect: LeaseEnded | SubmitEnded | WarmEnded) -> None:
        """Let a worker go; if a fence holds its bytes, its process stays the daemon's own."""
        match effect:
            case LeaseEnded(lease):
                if lease.state is LeaseState.FENCED:
                    self.workers.fence(lease.lease_id, lease.card_uuid, lease.lease_id)
                self._let_go(lease.lease_id)
                self.presence.forget(lease.lease_id)
            case SubmitEnded(submit_id, lease_id):
                owner = self.table.get(lease_id)
                if owner is not None and owner.state is LeaseState.FENCED:
                    self.workers.fence(submit_id, owner.card_uuid, lease_id)
                self._let_go(submit_id)
                self.presence.look(lease_id)
            case WarmEnded(warm_id, card_uuid, _, is_fenced):
                if is_fenced:
                    self.workers.fence(warm_id, card_uuid, warm_id)
                self._let_go(warm_id)

    def _arm(self, effect: ArmTimer) -> None:
        lease_id, generation, kind, due_ns = effect
        if kind is TimerKind.GRACE:
            self.workers.give_grace(lease_id, due_ns)
        self.timers.arm((kind, lease_id), due_ns, TimerFired(lease_id, generation, kind))

    def _spawn(self, effect: SpawnWorker) -> None:
        lease = self.table.get(effect.lease_id)
        self._watchman.start()
        self._weigher.start()
        is_shared = lease is not None and lease.exclusivity is Exclusivity.SHARED
        spec = WorkerSpec(
            effect.lease_id,
            effect.card_uuid,
            effect.size_bytes,
            is_shared,
            self._source.allowance_bytes,
            effect.max_kernel_ms,
            effect.waiting,
        )
        self.workers.spawn(spec)

    def _spawn_submit(self, effect: SpawnSubmit) -> None:
        self.presence.look(effect.lease_id)
        spec = WorkerSpec(
            effect.submit_id,
            effect.card_uuid,
            effect.size_bytes,
            is_shared=False,
            allowance_bytes=self._source.allowance_bytes,
            max_kernel_ms=effect.max_kernel_ms,
            waiting=effect.waiting,
            submit_of=effect.lease_id,
            timeout_ms=effect.timeout_ms,
        )
        self.workers.spawn(spec)

    def _let_go(self, number: int) -> None:
        """Nothing is to be done any more about a lease or warm context."""
        self._cancel_timers(number)
        self._reclaimer.give_up(number)
        # Until then the zygote tells the next broker that there was such a worker.
        self.journal.once_kept(lambda: self.workers.settle(number))
        self._one_ended.set()

    def _cancel_timers(self, number: int) -> None:
        for kind in _KINDS:
            self.timers.cancel((kind, number))

    def _answer(self, outcome: Outcome) -> None:
        self.timers.cancel((WaitTimerFired, outcome.request))
        on_outcome = self._waiting.pop(outcome.request, None)
        if on_outcome is None:
            return
        self._untold += 1
        self.journal.answer(outcome, partial(self._answer_kept, outcome, on_outcome))

    def _answer_kept(self, outcome: Outcome, on_outcome: OnOutcome, told: Outcome) -> None:
        """What the table said is on the disk, or `told` says that it can't be brought there."""
        if isinstance(told, Granted):
            self.recorder.answer(told, partial(self._answer_told, on_outcome))
            return
        if isinstance(outcome, Granted | Renewed) and isinstance(told, Denied):
            operation = "LEASE_ALLOC" if isinstance(outcome, Granted) else "LEASE_RENEW"
            lease = outcome.lease
            self.recorder.refused(operation, lease.tenant, lease.lease_id, told.denial.message)
            self.metrics.refused(operation, Status.BUSY)
        self._answer_told(on_outcome, told)

    def _answer_told(self, on_outcome: OnOutcome, told: Outcome) -> None:
        self._untold -= 1
        self._one_ended.set()
        on_outcome(told)
