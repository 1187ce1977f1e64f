"""The runtime around the lease table: events go in, effects come out and are executed here.

The lease table decides; the runtime executes. `Runtime.post` gives the table one event, passes its effects to the
journal, the audit log and the metrics, and then executes them in order. An event that is posted during this waits in a
queue, so the table never handles two events at once.

An effect that answers a request goes to `PendingRequests`, which holds the answer until it is durable.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final, get_args

from gpulease.daemon.broker.claimed_acquires import ClaimedAcquires
from gpulease.daemon.broker.connection_tracker import ConnectionTracker
from gpulease.daemon.broker.health import Health
from gpulease.daemon.broker.memory_reserve import MemoryReserve
from gpulease.daemon.broker.name_claims import FleetClaims, release_all
from gpulease.daemon.broker.node_metrics import NodeMetrics
from gpulease.daemon.broker.subscriptions import Publisher
from gpulease.daemon.broker.timers import Timers
from gpulease.daemon.broker.token_service import TokenService
from gpulease.daemon.contract.messages import ForwardRevokedReport
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.gpus.source import CardSource
from gpulease.daemon.host.fair_queue import FairQueue
from gpulease.daemon.host.loop_polling import LoopPolling
from gpulease.daemon.host.periodic_task import PeriodicTask
from gpulease.daemon.leases import events
from gpulease.daemon.leases.acquire_steps import Checked
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import Effect, Event, Outcome, TimerKind
from gpulease.daemon.leases.membership_events import SetMembershipDeadline
from gpulease.daemon.leases.model import LeaseSnapshot, LeaseState, WarmState, WorkerKind, kind_of
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.audit.recorder import FactRecorder
from gpulease.daemon.record.journal import Journal
from gpulease.daemon.record.lease_facts import Fact, FactKind
from gpulease.daemon.record.lease_history import LeaseHistory
from gpulease.daemon.record.lease_log import LeaseLog
from gpulease.daemon.workers.adoption import adopt
from gpulease.daemon.workers.card_time import CardTimes
from gpulease.daemon.workers.monitors import BytesProver, CardWatch, KernelWatchdog, MemoryMonitor, Reclaimer, Recycler
from gpulease.daemon.workers.park_orders import ParkOrders
from gpulease.daemon.workers.region_orders import RegionOrders
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.revocation_word import submit_word_for, word_for
from gpulease.protocol.failures import Failure
from gpulease.protocol.fast_dataclass import replace
from gpulease.protocol.lease_options import options_for_worker
from gpulease.protocol.messages import RegionEvent
from gpulease.protocol.opcodes import Exclusivity, Status

_TIMER_KINDS: Final = tuple(TimerKind)

_AWAIT_WORKERS: Final = frozenset({TimerKind.SPAWN, TimerKind.GRACE, TimerKind.RECLAIM, TimerKind.PARK})
"""Timers that are over when a worker has answered, or has ended."""

USE_RECORDS_S: Final = 600.0
"""Seconds between two audit records of the card's time that a lease has used. If the daemon crashes and is not
restarted, the log may lack the use during this time."""

USE_RECORDS_AT_ONCE: Final = 64
"""Number of records that are made before the event loop runs again, which takes about a millisecond."""

_NEW_SESSIONS: Final = frozenset({FactKind.GRANTED, FactKind.ADOPTED, FactKind.SUBMIT_READY})
"""Facts after which another worker uses its card's time."""

Result = Outcome | Failure
"""The answer to a request: the lease table's outcome, or the failure if there is none."""

OnResult = Callable[[Result], None]
NoteRefusal = Callable[[str, str, int, Failure], None]

RequestKey = tuple[str, str]
"""A tenant and the request id that its client chose for an acquire."""

FAULT: Final = Failure(
    Status.INTERNAL,
    "the daemon failed while handling this request",
    hint="Report it to the operator: the daemon's log has details. The request may have had effects.",
)
"""The answer to a request if a bug in the daemon prevents another."""

TAKEN_OVER: Final = Failure(
    Status.CANCELLED,
    "another connection sent the same request id, and gets the answer",
    hint="Wait for the answer on that connection.",
)
"""Answer to the earlier of two requests with the same request id."""


class Runtime:
    """Executes the lease table's decisions.

    Args:
        source: Information about the node's cards.
        max_load_s: How long a worker may compile one image.
        journal: Keeps the records that a restarted daemon needs; None to keep nothing.

    Attributes:
        recorder: The log of leases, which passes everything on to the audit log.
        connections: Tracks which leases are connected.
        fair_queue: Decides which control connection is served next.
        claimed_acquires: The acquires that are checked, claimed in the fleet, and then placed.
        claims: The node's claims in its fleet. The service sets it before the first request if the node joins one.
    """

    def __init__(
        self,
        table: LeaseTable,
        source: CardSource,
        workers: Workers,
        tokens: TokenService,
        recorder: FactRecorder,
        max_load_s: int,
        journal: Journal | None = None,
    ) -> None:
        # First set the parts that others read: the table, the tokens, the records.
        self.table = table
        self.tokens = tokens
        self.workers = workers
        self.journal = journal or Journal()
        self.card_times = CardTimes(table, workers)
        self.history = LeaseHistory(table.get, table.submits.lease_of, self.card_times.known_use)
        self.recorder = LeaseLog(recorder, table.get, workers.pid)
        self.publisher = Publisher(table, self.recorder.warned)
        self.fair_queue = FairQueue()
        self._polling = LoopPolling()
        self.claims: FleetClaims | None = None
        self.memory_reserve = MemoryReserve()
        self.timers = Timers(self._post_timer, self.memory_reserve.secure)
        self.health = Health(table, workers, self.journal, recorder, self.memory_reserve)
        self.metrics = NodeMetrics(table, source, workers, recorder, self.health, self.card_times)
        self.connections = ConnectionTracker(table, workers, self.post)
        self.card_watch = CardWatch(source, [card.uuid for card in table.cards()], workers, self.post)
        # The monitors, which execute effects that take time and post their results as events.
        self._source = source
        self._reclaimer = Reclaimer(source, self.post)
        self._memory_monitor = MemoryMonitor(table, source, workers, self.post)
        self._recycler = Recycler(source, workers, self.post)
        self._bytes_prover = BytesProver(source, workers, self.post, table.regions.allowed_bytes)
        self._parks = ParkOrders(
            table, workers, source.allowance_bytes, self.post, moves_modules=source.driver != "cpu"
        )
        self._regions = RegionOrders(table.get, workers, self.post, self._on_forward_revoked)
        self._watchdog = KernelWatchdog(workers, self.post, max_load_s)
        self._use_records = PeriodicTask(
            self._record_uses,
            USE_RECORDS_S,
            lambda _: log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="recording what leases have used"),
        )
        # Set when an outcome was answered, a kill was recorded or a worker was settled; see `settled`.
        self._one_settled = asyncio.Event()
        # Number of kills that wait until the journal has decided about their records.
        self._kills_to_record = 0
        self._is_watching = False
        self._is_stopped = False
        self._pending = PendingRequests(self.journal, self.recorder, self.note_refusal, self._one_settled.set)
        self.claimed_acquires = ClaimedAcquires(table, lambda: self.claims, self.post, self._refuse)
        self._events: deque[Event] = deque()
        self._is_executing = False
        self._executors = self._executors_by_effect()
        self._connect_parts()

    def _connect_parts(self) -> None:
        """Connect each part to the receivers of its events."""
        self.recorder.attach(self.post)
        self.journal.observe(self.table, self.workers.pid, self.post)
        self.workers.deliver_to(self.post)
        self.workers.set_memory_listeners(
            self._memory_monitor.poll, self._recycler.on_fresh, self._recycler.on_scrubbed
        )
        self.workers.set_region_listener(self._regions.on_message)
        self.workers.set_park_listener(self._parks.on_message)
        on_guest_answered = partial(self.tokens.on_guest_answered, self.journal)
        self.workers.set_connection_listeners(self.connections.update, on_guest_answered)

    def adopt(self, cards: Sequence[Card], latest_ns: int) -> None:
        """Take over the leases and workers of an earlier daemon, before any other event.

        Args:
            cards: The node's cards, with what a context takes of each.
            latest_ns: The latest deadline that the earlier daemon could have given; see `adoption.reconcile`.
        """
        # Step 1: complete the audit log with ends that the earlier daemon could not record. The ends of leases and
        # those of regions are each in chronological order.
        tombstones = self.journal.recovered.tombstones
        for ends in (
            [tombstone for tombstone in tombstones if not tombstone.parent_id],
            [tombstone for tombstone in tombstones if tombstone.parent_id],
        ):
            self.recorder.record_missing_ends(ends, time.monotonic_ns())
        # Step 2: compare the journal with the live workers, and post one event for each lease, region and worker.
        overheads = {card.uuid: card.overhead_bytes for card in cards}
        # Hold orders about regions until all words are on the pages, so that no worker acts on incomplete pages.
        self._regions.begin_adoption()
        adopt(self.journal.kept, self.workers, overheads, latest_ns, self.post, self.journal.regions)
        self._regions.end_adoption()
        # Step 3: begin to count, and continue a drain.
        self.metrics.take_over_workers()
        self.connections.take_over()
        if self.table.drain_ns is not None:
            log_event(LogEvent.DRAIN_GOES_ON)
        for card in self.table.cards():
            if card.drain_ns is not None:
                log_event(LogEvent.CARD_DRAIN_GOES_ON, card=card.uuid)
        if self.table.has_drain:
            self.post(events.DrainTimerFired())
        self.card_times.members_changed()
        self._use_records.start()
        # Step 4: watch the workers that were taken over. Those started later start the watch themselves.
        if self.workers.serving():
            self._watch_workers()
        if self.table.parking.snapshots():
            self._parks.start()

    async def _record_uses(self) -> None:
        for number, (lease_id, use) in enumerate(self.card_times.take_unrecorded()):
            # For a lease that has ended by now, the record of its end contains its use.
            if (lease := self.table.get(lease_id)) is not None and lease.ended_ns is None:
                self.recorder.used(lease, use)
            if number % USE_RECORDS_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def drained(self) -> None:
        """Wait until only fenced leases and fenced warm contexts are left."""
        while any(lease.state is not LeaseState.FENCED for lease in self.table.snapshots()) or any(
            context.state is not WarmState.FENCED for context in self.table.warming()
        ):
            self._one_settled.clear()
            await self._one_settled.wait()

    async def settled(self) -> None:
        """Wait until every lease is active or fenced, every outcome was answered, and no kill waits for the journal."""
        while (
            self._pending.unanswered
            or self._kills_to_record
            or any(lease.state in (LeaseState.PENDING, LeaseState.DRAINING) for lease in self.table.snapshots())
        ):
            self._one_settled.clear()
            await self._one_settled.wait()

    async def stop(self) -> None:
        # Stop the timers first: nothing may post an event to a table that has stopped.
        self._is_stopped = True
        self.timers.stop()
        self.publisher.stop()
        await self._use_records.stop()
        self.card_times.stop()
        await self.metrics.stop()
        await self._watchdog.stop()
        await self._memory_monitor.stop()
        await self._recycler.stop()
        await self._bytes_prover.stop()
        await self._parks.stop()
        await self._reclaimer.stop()
        await self.card_watch.stop()
        self.memory_reserve.close()

    # --- requests ---

    def expect(self, on_result: OnResult, key: RequestKey | None = None) -> int:
        """Return a number for a request to the lease table.

        Args:
            on_result: Receives the request's answer, exactly once, unless the request is abandoned or taken over.
            key: The key by which `take_over` finds the request until it is answered.
        """
        return self._pending.add(on_result, key)

    def take_over(self, key: RequestKey, on_result: OnResult) -> int:
        """Make `on_result` the receiver of the answer to the open request with that key.

        The earlier receiver gets TAKEN_OVER.

        Returns:
            The request's number; 0 if no request with that key is open.
        """
        return self._pending.take_over(key, on_result)

    def abandon(self, number: int) -> None:
        """Abandon a request without an answer, because its client has disconnected.

        A request with an outcome that is not durable yet is answered nevertheless, because a later request may take it
        over.
        """
        if not self._pending.remove(number):
            return
        # The request waits either for the fleet's claims or for the lease table.
        if not self.claimed_acquires.cancel(number):
            self.post(events.RequesterGone(number))
            self.timers.cancel((events.WaitTimerFired, number))
        self.claimed_acquires.forget(number)

    def _refuse(self, event: events.AcquireRequested, failure: Failure) -> None:
        """Answer that the fleet refused a claim."""
        self.note_refusal("LEASE_ALLOC", event.tenant, event.lease_id, failure)
        self._pending.refuse(event.request, failure)

    def note_refusal(self, operation: str, tenant: str, lease_id: int, failure: Failure) -> None:
        """Log, record and count a refusal in which the lease table takes no part.

        `lease_id` is 0 if it concerns no lease.
        """
        self.recorder.refused(operation, tenant, lease_id, failure.message)
        self.metrics.counters.refused(operation.lower(), failure.status.name.lower())

    # --- events in ---

    def post(self, event: Event) -> None:
        """Give the table an event and execute its effects, now or after the event that is being executed.

        If handling this event raises an error, which is a bug, that error is raised here, after the events posted so
        far are handled. The caller must then answer the event's request, if it has one.
        """
        self._events.append(event)
        # An effect posted this event. The outer call handles it after the current effects, in order.
        if self._is_executing:
            return
        self._is_executing = True
        try:
            self.memory_reserve.secure()
            self._handle(self._events.popleft(), time.monotonic_ns())
        finally:
            self._handle_posted()
            self._is_executing = False

    def _post_timer(self, event: Event) -> None:
        # Raise nothing: the other timers that are due must be posted, too.
        try:
            # A worker may have answered in time even if this process is late.
            if isinstance(event, events.TimerFired) and event.kind in _AWAIT_WORKERS:
                region = self.table.regions.get(event.worker_id)
                self.workers.read_arrived(event.worker_id if region is None else region.lease_id)
                if event.kind is TimerKind.GRACE and (
                    until_ns := self._recycler.kill_put_off_until_ns(event.worker_id)
                ):
                    self._arm_timer(events.ArmTimer(event, until_ns))
                    return
            self.post(event)
        except Exception as error:
            self._answer_fault(event, error)

    def _handle_posted(self) -> None:
        """Handle the events that effects have posted. Raises nothing."""
        while self._events:
            event = self._events.popleft()
            try:
                self._handle(event, time.monotonic_ns())
            except Exception as error:
                # The events after it are still handled.
                self._answer_fault(event, error)

    def _answer_fault(self, event: Event, error: Exception) -> None:
        """Log a bug of ours, or a lack of memory, that no caller can catch, and answer the event's request."""
        if isinstance(error, MemoryError):
            self.memory_reserve.release()
        log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"handling {type(event).__name__}")
        self._fail(getattr(event, "request", 0))

    def _fail(self, number: int) -> None:
        self.timers.cancel((events.WaitTimerFired, number))
        self.claimed_acquires.forget(number)
        self._pending.refuse(number, FAULT)

    def _answer_waiting(self, effect: events.RequestFaulted) -> None:
        self._fail(effect.request)
        # The table caught this error, so that the event that it was handling kept its effects. Raise it now, so that
        # the caller logs it.
        raise effect.error

    def _handle(self, event: Event, now_ns: int) -> None:
        effects = self.table.handle(event, now_ns)
        # Write journal and audit log before the effects are executed: no peer may notice an effect that they lack.
        self.journal.on_event(event, effects)
        facts = self.history.on_event(event, effects, now_ns)
        if facts:
            self.recorder.on_facts(facts)
        # Execute in order: RefuseWork comes before KillWorker, and SetDeadline before Granted.
        executors = self._executors
        for effect in effects:
            try:
                executors[type(effect)](effect)
            except Exception:
                # This is a bug of ours. The remaining effects, perhaps another tenant's, must still be executed. If
                # an effect of a lease is missing, its timers end the lease.
                log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"carrying out {effect!r}")
        self._report(event, effects, facts)

    def _report(self, event: Event, effects: list[Effect], facts: Sequence[Fact]) -> None:
        """Log, count and publish an event, after its effects: one may be a reply that a client waits for."""
        if facts:
            self.recorder.log_facts()
            self.metrics.counters.on_facts(facts)
        if isinstance(event, events.TenantRulesChanged) or any(fact.kind in _NEW_SESSIONS for fact in facts):
            self.card_times.members_changed()
        # Notify subscribers last, when everything has happened.
        try:
            self.publisher.on_effects(effects)
        except Exception:
            # This is a bug of ours; no lease depends on subscriptions.
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"publishing {effects!r}")

    def _on_forward_revoked(self, region: LeaseSnapshot, message: ForwardRevokedReport, is_first_refusal: bool) -> None:
        status, seen_after_ns = Status(-message.status), message.seen_ns - message.flipped_ns
        told_after_ns = message.told_ns - message.flipped_ns if message.told_ns else None
        self.recorder.forward_revoked(
            region, status, message.kernel, message.site, message.position, seen_after_ns, told_after_ns
        )
        # Only the first refusal for a region shows how soon a launch was refused after the region's word had changed.
        if is_first_refusal:
            self.metrics.counters.forward_revoked(status.name.lower(), seen_after_ns, told_after_ns)
        event = RegionEvent(
            lease_id=region.lease_id,
            sequence=0,
            lost=0,
            status=-message.status,
            kernel=message.kernel,
            site=message.site,
            position=message.position,
            flipped_ns=message.flipped_ns,
            seen_ns=message.seen_ns,
        )
        self.publisher.on_forward_revoked(region.parent_id, event)

    # --- effects out ---

    def _executors_by_effect(self) -> dict[type[Any], Callable[[Any], None]]:
        # All outcomes answer requests; some have a second use, below.
        executors: dict[type[Any], Callable[[Any], None]] = dict.fromkeys(get_args(Outcome), self._answer)
        executors |= {
            events.ArmTimer: self._arm_timer,
            events.SpawnWorker: self._spawn_worker,
            events.SpawnSubmit: self._spawn_submit,
            events.WarmUp: self._spawn_warm_context,
            events.RenameWorker: self._rename_worker,
            events.SetDeadline: self._set_deadline,
            SetMembershipDeadline: self._set_membership_deadline,
            events.RefuseWork: self._refuse_work,
            events.RefuseSubmit: self._refuse_submit,
            events.KillWorker: self._kill_worker,
            events.ProveReclaimed: self._prove_reclaimed,
            events.ScrubWorker: self._scrub_worker,
            events.RecycleWorker: self._recycle_worker,
            events.LeaseEnded: self._end_lease,
            events.SubmitEnded: self._end_submit,
            events.WarmEnded: self._end_warm_context,
            events.SubmitFenced: self._fence_submit,
            events.SlicesCleared: self._clear_fences,
            events.OpenRegion: self._open_region,
            events.SetRegion: self._regions.set,
            events.EndRegion: self._regions.end,
            events.ProveRegion: self._bytes_prover.prove,
            events.ResizeSlice: self._resize_slice,
            events.GiveParkMemory: self._parks.give_memory,
            events.DropParkMemory: self._parks.drop_memory,
            events.CopyAhead: self._parks.copy_ahead,
            events.ParkSession: self._parks.park,
            events.ReturnSession: self._parks.bring_back,
            events.RefuseWaitingOperations: self._parks.refuse_return,
            events.LeaveSession: self._parks.leave,
            events.LeaseLeft: self._parks.keep_image,
            events.StaySession: self._stay,
            events.RestartWorker: self._spawn_worker,
            events.AdoptSession: self._parks.adopt,
            events.WatchClients: self._parks.watch_clients,
            events.RequestFaulted: self._answer_waiting,
            events.LeaseMoved: self._moved,
            events.WorkerReplaced: self._moved,
            Checked: self.claimed_acquires.on_checked,
            # Only subscribers, the records and the log use these.
            events.LeaseParked: lambda _: None,
            events.LeaseReturned: lambda _: None,
            events.ParkFailed: lambda _: None,
            events.Warned: lambda _: None,
            events.CapacityChanged: lambda _: None,
        }
        if forgotten := set(get_args(Effect)) - executors.keys():
            raise TypeError(f"effects without an executor: {sorted(effect.__name__ for effect in forgotten)}")
        return executors

    def _answer(self, outcome: Outcome) -> None:
        # The wait in the queue is over, however it ended.
        self.timers.cancel((events.WaitTimerFired, outcome.request))
        if outcome.request in self.claimed_acquires.by_number:
            self.claimed_acquires.forget(outcome.request)
        try:
            self._pending.resolve(outcome)
        except Exception:
            # This is a bug of ours. The client must not wait for an answer that never comes.
            self._pending.refuse(outcome.request, FAULT)
            raise

    # Timers.

    def _arm_timer(self, effect: events.ArmTimer) -> None:
        event, due_ns = effect
        # Timers of one key replace each other: a renewal moves the lease's timer instead of adding one.
        key: Hashable
        if isinstance(event, events.TimerFired):
            key = event.kind, event.worker_id
            if event.kind is TimerKind.GRACE:
                # The zygote gets the same deadline, so that the grace ends even if this process hangs.
                self.workers.set_grace_end(event.worker_id, due_ns)
        elif isinstance(event, events.WaitTimerFired):
            key = events.WaitTimerFired, event.request
        else:
            key = type(event).__name__
        self.timers.arm(key, due_ns, event)

    def _cancel_timers(self, number: int) -> None:
        self.timers.cancel_each([(kind, number) for kind in _TIMER_KINDS])

    # Workers.

    def _watch_workers(self) -> None:
        """Start the monitors of all workers, with the first one."""
        if not self._is_watching:
            self._is_watching = True
            self._watchdog.start()
            self._memory_monitor.start()

    def _spawn_worker(self, effect: events.SpawnWorker | events.RestartWorker) -> None:
        self._watch_workers()
        if effect.terms.is_parkable:
            self._parks.start()
        spec = lease_worker_spec(effect, self._source.allowance_bytes)
        # A session that comes from another worker keeps its addresses.
        if isinstance(effect, events.RestartWorker):
            spec = replace(spec, opened_bytes=self.workers.images.opened_bytes(effect.lease_id))
        # A warm worker is ready in a millisecond, and its client opens the session in another.
        if self.workers.context_pid(effect.lease_id):
            self._polling.stay_awake(spec.waiting, periods=2)
        self.workers.spawn(spec)

    def _open_region(self, effect: events.OpenRegion) -> None:
        self._regions.open(effect)
        if (worker := self.workers.worker(effect.lease_id)) is not None:
            self._polling.stay_awake(worker.spec.waiting)

    def _resize_slice(self, effect: events.ResizeSlice) -> None:
        if effect.after_record:
            self.journal.once_decided(lambda problem: self._grow_recorded(effect, problem))
        else:
            self._regions.resize(effect)

    def _grow_recorded(self, effect: events.ResizeSlice, problem: str) -> None:
        lease = self.table.get(effect.lease_id)
        if self._is_stopped or lease is None or lease.state is not LeaseState.ACTIVE:
            return
        if problem:
            self._regions.refuse_resize(effect, f"the journal can't be written: {problem}")
        else:
            self._regions.resize(effect)

    def _moved(self, effect: events.LeaseMoved | events.WorkerReplaced) -> None:
        # From now on the session's use counts for the other card, or for the other worker.
        self.card_times.members_changed()

    def _stay(self, effect: events.StaySession) -> None:
        # The worker may have been set aside.
        self._parks.stay(effect)
        self.card_times.members_changed()

    def _spawn_submit(self, effect: events.SpawnSubmit) -> None:
        # A submit counts as a connection of its lease from its start on.
        self.connections.update(effect.lease_id)
        self.workers.spawn(submit_worker_spec(effect, self._source.allowance_bytes))

    def _spawn_warm_context(self, effect: events.WarmUp) -> None:
        self._watch_workers()
        self.workers.spawn(WorkerSpec(effect.warm_id, effect.card_uuid, 0, is_shared=False))

    def _rename_worker(self, effect: events.RenameWorker) -> None:
        self.workers.rename(effect.from_id, effect.to_id)
        # A warm context's timers end with it. A lease that gives its context back keeps its own timers.
        if kind_of(effect.from_id) is not WorkerKind.LEASE:
            self._cancel_timers(effect.from_id)

    def _set_deadline(self, effect: events.SetDeadline) -> None:
        self.workers.set_deadline(effect.worker_id, effect.deadline_ns, effect.generation)

    def _set_membership_deadline(self, effect: SetMembershipDeadline) -> None:
        self.workers.set_membership_deadline(effect.worker_id, effect.membership_deadline_boot_ns)

    def _refuse_work(self, effect: events.RefuseWork) -> None:
        lease_id, cause = effect.worker_id, effect.cause
        self.workers.refuse(lease_id, word_for(cause), self._end_reason(lease_id), cause.value)

    def _refuse_submit(self, effect: events.RefuseSubmit) -> None:
        # Without a cause only the submit ends, because its own time is over, as its status says.
        lease_id = 0 if effect.cause is None else self.table.submits.lease_of(effect.submit_id)
        self.workers.refuse(effect.submit_id, submit_word_for(effect.cause), self._end_reason(lease_id))

    def _end_reason(self, lease_id: int) -> str:
        """Return the reason for the lease's end, as LEASE_QUERY reports it; "" if it has not ended."""
        lease = self.table.get(lease_id)
        return "" if lease is None else lease.reason

    def _kill_worker(self, effect: events.KillWorker) -> None:
        if effect.after_record:
            # Until the records are durable, a new broker would continue the session in this worker, which still has all
            # of it.
            self._kills_to_record += 1
            self.journal.once_decided(lambda _: self._kill_recorded(effect.worker_id))
        else:
            self.workers.kill(effect.worker_id)

    def _kill_recorded(self, worker_id: int) -> None:
        self._kills_to_record -= 1
        self._one_settled.set()
        # The journal writes its last records after this daemon's stop. By then the worker belongs to the next daemon.
        if not self._is_stopped:
            self.workers.kill(worker_id)

    def _prove_reclaimed(self, effect: events.ProveReclaimed) -> None:
        self._reclaimer.prove(effect.worker_id, effect.card_uuid, self.workers.ended_pid(effect.worker_id))

    def _scrub_worker(self, effect: events.ScrubWorker) -> None:
        self._recycler.scrub(effect.lease_id)

    def _recycle_worker(self, effect: events.RecycleWorker) -> None:
        self.workers.recycle(effect.lease_id, effect.warm_id)

    # Ends.

    def _end_lease(self, effect: events.LeaseEnded) -> None:
        lease = effect.lease
        # If a fence holds the bytes, the process still counts as the daemon's own in measurements of the card.
        if lease.state is LeaseState.FENCED:
            self.workers.fence(lease.lease_id, lease.card_uuid, lease.lease_id)
        self._settle_worker(lease.lease_id)
        # Proofs and orders for the lease's regions end with the lease.
        self._bytes_prover.give_up(lease.lease_id)
        self.workers.images.discard(lease.lease_id)
        self._regions.forget(lease.lease_id)
        self.card_times.forget(lease.lease_id)
        self.connections.forget(lease.lease_id)
        # The claim of the name ends once the memory is proved free. A fenced lease keeps its name until an operator
        # clears the fence.
        if lease.state is not LeaseState.FENCED:
            release_all(self.claims, lease.tenant, lease.lease_id, lease)
        elif self.claims is not None and (lease.name or lease.fleet_bytes):
            self.claims.on_fenced()

    def _end_submit(self, effect: events.SubmitEnded) -> None:
        owner = self.table.get(effect.lease_id)
        if owner is not None and owner.state is LeaseState.FENCED:
            self.workers.fence(effect.submit_id, owner.card_uuid, effect.lease_id)
        self._settle_worker(effect.submit_id)
        self.connections.update(effect.lease_id)

    def _end_warm_context(self, effect: events.WarmEnded) -> None:
        if effect.is_fenced:
            self.workers.fence(effect.warm_id, effect.card_uuid, effect.warm_id)
        self._settle_worker(effect.warm_id)

    def _fence_submit(self, effect: events.SubmitFenced) -> None:
        # Keep the worker: the zygote continues to report it, so that a restarted daemon restores the fence.
        self._cancel_timers(effect.submit_id)
        self._reclaimer.give_up(effect.submit_id)
        self.connections.update(effect.lease_id)

    def _clear_fences(self, effect: events.SlicesCleared) -> None:
        # An operator vouches for the bytes: their processes are no longer the daemon's, and the claims of names end.
        self.workers.end_fences({*effect.lease_ids, *effect.warm_ids})
        for lease in filter(None, map(self.table.get, effect.lease_ids)):
            release_all(self.claims, lease.tenant, lease.lease_id, lease)
        self._answer(effect)

    def _settle_worker(self, number: int) -> None:
        """Forget a worker after its end is complete."""
        self._cancel_timers(number)
        self._reclaimer.give_up(number)
        # Until the end is durable, the zygote reports the worker to the next broker.
        self.journal.once_kept(lambda: self.workers.settle(number))
        self._one_settled.set()


def lease_worker_spec(effect: events.SpawnWorker | events.RestartWorker, allowance_bytes: int) -> WorkerSpec:
    """Return the specification with which the worker of a lease's session starts."""
    return WorkerSpec(
        effect.lease_id,
        effect.card_uuid,
        effect.terms.session_bytes,
        is_shared=effect.terms.exclusivity is Exclusivity.SHARED,
        allowance_bytes=allowance_bytes,
        is_parkable=effect.terms.is_parkable,
        **options_for_worker(effect.terms, is_submit=False),
    )


def submit_worker_spec(effect: events.SpawnSubmit, allowance_bytes: int) -> WorkerSpec:
    """Return the specification with which the worker of a submit starts."""
    return WorkerSpec(
        effect.submit_id,
        effect.card_uuid,
        effect.size_bytes,
        is_shared=False,
        allowance_bytes=allowance_bytes,
        submit_of=effect.lease_id,
        timeout_ms=effect.timeout_ms,
        **options_for_worker(effect.terms, is_submit=True),
    )


class PendingRequests:
    """Requests that are not answered yet, each with the receiver of its answer.

    An outcome of the lease table is answered only once it is durable in the journal and, for a grant, in the audit log.
    If that fails, the grant is revoked and the outcome is replaced by a denial (`Journal.answer`,
    `FactRecorder.answer`).

    Args:
        on_answered: Called after each outcome's answer.

    Attributes:
        unanswered: Number of outcomes that are held until they are durable.
    """

    def __init__(
        self, journal: Journal, recorder: FactRecorder, note_refusal: NoteRefusal, on_answered: Callable[[], None]
    ) -> None:
        self.unanswered = 0
        self._journal = journal
        self._recorder = recorder
        self._note_refusal = note_refusal
        self._on_answered = on_answered
        self._last_number = 0
        self._answers: dict[int, OnResult] = {}
        # Requests that the table has decided, with outcomes that are not durable yet.
        self._decided: set[int] = set()
        self._numbers: dict[RequestKey, int] = {}
        self._keys: dict[int, RequestKey] = {}

    def add(self, on_result: OnResult, key: RequestKey | None = None) -> int:
        """Return the number of a new request; `on_result` gets its answer exactly once."""
        self._last_number += 1
        self._answers[self._last_number] = on_result
        if key is not None:
            self._numbers[key] = self._last_number
            self._keys[self._last_number] = key
        return self._last_number

    def take_over(self, key: RequestKey, on_result: OnResult) -> int:
        """Replace the receiver of the answer to the request with that key. Returns its number; 0 if none is open."""
        # The earlier client may still be connected, so answer it as well.
        number = self._numbers.get(key, 0)
        if number:
            earlier, self._answers[number] = self._answers[number], on_result
            earlier(TAKEN_OVER)
        return number

    def remove(self, number: int) -> bool:
        """Drop a request that the table has not decided. Returns False for any other, which keeps its answer."""
        # Keep a decided request: its outcome has happened, and is answered once it is durable.
        if number not in self._answers or number in self._decided:
            return False
        self._pop(number)
        return True

    def refuse(self, number: int, failure: Failure) -> None:
        """Answer a request that the table does not decide, or that lacks its outcome because of a fault."""
        if number in self._answers:
            # Do not answer with an outcome that was not durable yet.
            self.unanswered -= number in self._decided
            self._decided.discard(number)
            self._pop(number)(failure)

    def resolve(self, outcome: Outcome) -> None:
        """Answer the request of an outcome once that is durable. The outcome of a dropped request is discarded."""
        if outcome.request in self._answers and outcome.request not in self._decided:
            self.unanswered += 1
            self._decided.add(outcome.request)
            self._journal.answer(outcome, partial(self._on_journal_done, outcome))

    def _on_journal_done(self, outcome: Outcome, answered: Outcome) -> None:
        # A grant must also be in the audit log. Other outcomes have happened already and are only reported.
        if isinstance(answered, (events.Granted, events.RegionGranted)):
            self._recorder.answer(answered, self._answer)
            return
        if isinstance(answered, events.RequestDenied) and (withheld := withheld_lease(outcome)) is not None:
            operation, lease = withheld
            self._note_refusal(operation, lease.tenant, lease.lease_id, answered.denial.failure)
        self._answer(answered)

    def _answer(self, answered: Outcome) -> None:
        if answered.request not in self._decided:
            return
        self.unanswered -= 1
        self._on_answered()
        self._decided.discard(answered.request)
        self._pop(answered.request)(answered)

    def _pop(self, number: int) -> OnResult:
        if (key := self._keys.pop(number, None)) is not None:
            del self._numbers[key]
        return self._answers.pop(number)


def withheld_lease(outcome: Outcome) -> tuple[str, LeaseSnapshot] | None:
    """Return the operation and lease of an outcome that counts as refused if it can't be made durable, else None.

    These are grants and renewals. Any other outcome has happened already; its denial only reports the state of the
    journal.
    """
    match outcome:
        case events.Granted(lease=lease):
            return "LEASE_ALLOC", lease
        case events.RegionGranted(lease=lease):
            return "REGION_OPEN", lease
        case events.Renewed(lease=lease):
            return "LEASE_RENEW", lease
    return None
