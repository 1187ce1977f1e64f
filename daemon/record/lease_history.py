"""Turns each event and its effects into facts, once for the audit log, the log and the metrics.

The history remembers open requests and live leases. Its only I/O is a log line that reports a bug.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from gpulease.daemon.leases import events
from gpulease.daemon.leases.acquire_steps import AcquireStep, Checked
from gpulease.daemon.leases.events import Effect, Event
from gpulease.daemon.leases.model import Cause, LeaseSnapshot, LeaseState, WorkerKind, kind_of
from gpulease.daemon.leases.time_account import LeaseTimeUse
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.lease_facts import (
    NO_TIMES,
    REQUESTS,
    THE_DAEMON,
    Fact,
    FactKind,
    ReceivedRequest,
    Times,
)
from gpulease.protocol.session_words import ENDED_WORDS

Lookup = Callable[[int], LeaseSnapshot | None]


class LeaseHistory:
    """Turns each event, with the effects that the lease table made of it, into facts.

    Request 0 is the daemon's own: no peer waits for its outcome.

    Args:
        lookup: Returns a lease in its state after the event.
        lease_of_submit: Returns the lease of a submit by the submit's number, 0 for any other number.
        use_of: Returns the card time that a lease has used so far; None if unknown.
    """

    def __init__(
        self,
        lookup: Lookup,
        lease_of_submit: Callable[[int], int] = lambda _: 0,
        use_of: Callable[[int], LeaseTimeUse | None] = lambda _: None,
    ) -> None:
        self._lookup = lookup
        self._lease_of_submit = lease_of_submit
        self._use_of = use_of
        self._requests: dict[int, ReceivedRequest] = {}
        self._requesters: dict[int, str] = {}
        self._times: dict[int, Times] = {}
        # The lease or submit that took over a running worker in this event, for the `SpawnWorker` that follows.
        self._renamed_to = 0
        # Leases and submits with a reported fault: a second fault of the same session makes no fact.
        self._faulted: set[int] = set()
        self._on_event: Final[dict[type, Callable[[Any, int], Fact | None]]] = {
            events.AcquireRequested: self._requested,
            events.WorkerReady: self._worker_ready,
            events.WorkerFailed: self._worker_failed,
            events.WorkerScrubbed: self._scrubbed,
            events.SessionFaulted: self._session_faulted,
            events.LeaseRestored: self._restored,
            events.RegionRestored: self._region_restored,
        }
        self._on_effect: Final[dict[type, Callable[[Any, int], Fact | None]]] = {
            events.SpawnWorker: self._placed,
            events.KillWorker: self._killed,
            events.Granted: self._granted,
            events.RegionGranted: self._granted,
            Checked: self._checked,
            events.RequestDenied: self._denied,
            events.RefuseWork: self._refused_work,
            events.SetRegion: self._set_region,
            events.LeaseEnded: self._ended,
            events.SubmitReady: self._submit_ready,
            events.SubmitEnded: self._submit_ended,
            events.SubmitFenced: self._submit_fenced,
            events.RenameWorker: self._renamed,
            events.SpawnSubmit: self._submit_spawned,
            events.RecycleWorker: self._recycled,
            events.WarmEnded: self._warm_ended,
            events.CapacityChanged: self._capacity_changed,
            events.LeaseParked: lambda effect, now_ns: _parking(FactKind.PARKED, effect, now_ns),
            events.LeaseReturned: lambda effect, now_ns: _parking(FactKind.UNPARKED, effect, now_ns),
            events.ParkFailed: lambda effect, now_ns: _parking(FactKind.PARK_FAILED, effect, now_ns),
            events.LeaseLeft: lambda effect, now_ns: _parking(FactKind.LEFT, effect, now_ns),
            events.LeaseMoved: self._moved,
            events.WorkerReplaced: lambda effect, now_ns: _parking(FactKind.UPGRADED, effect, now_ns),
        }
        # `_answer_of` makes the facts of all other effects, which are answers. `_follow` makes those of WorkerExited
        # and UNFENCED.
        handled = {*self._on_event, *self._on_effect, events.WorkerExited}
        for kind in FactKind:
            for source in kind.row.sources:
                if source in handled:
                    continue
                # Fail at the start if a kind's source has no method here.
                if not kind.row.is_answer:
                    raise TypeError(f"{source.__name__} must have a method that makes its fact, {kind.name}")
                self._on_effect.setdefault(source, self._answer_of(kind))

    @property
    def is_at_rest(self) -> bool:
        """True if no request is open and no lease is left."""
        return not (self._requests or self._requesters or self._times or self._faulted)

    def note_requester(self, request: int, peer: str) -> None:
        """Note the peer that made a request: for an event without a tenant, or if an operator acts for the tenant."""
        self._requesters[request] = peer

    def on_event(self, event: Event, effects: Sequence[Effect], now_ns: int) -> list[Fact]:
        """Return the facts that follow from one event, in order, at monotonic time `now_ns`.

        A bug must not stop the effects. So it is logged, and the facts made so far are returned.
        """
        facts: list[Fact] = []
        try:
            self._follow(event, effects, now_ns, facts)
        except Exception:
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"following {type(event).__name__}")
        return facts

    def _follow(self, event: Event, effects: Sequence[Effect], now_ns: int, facts: list[Fact]) -> None:
        kind = type(event)
        # A rename concerns only a spawn in the same event.
        self._renamed_to = 0
        # Step 1: remember requester and time for the answer, which may be an effect of a later event.
        if (request := REQUESTS.get(kind)) is not None:
            self._take_in(event, now_ns, names_tenant=request.names_tenant)
        # Step 2: make the event's own fact.
        on_event = self._on_event.get(kind)
        if on_event is not None and (fact := on_event(event, now_ns)) is not None:
            facts.append(fact)
        # Step 3: make the facts of the effects, in order.
        for effect in effects:
            on_effect = self._on_effect.get(type(effect))
            # Most effects, such as orders to workers and timers, make no fact.
            if on_effect is None or (fact := on_effect(effect, now_ns)) is None:
                continue
            facts.append(fact)
            # Clearing fences is one answer, but each lease's tenant needs a record, so there is also one fact for each
            # lease.
            if fact.kind is FactKind.FENCES_CLEARED:
                facts += self._unfenced(fact)
        # Step 4: forget the request of a requester that is gone, and put a worker's end before the effects.
        if isinstance(event, events.RequesterGone):
            self._forget_request(self._requests.pop(event.request, None))
        elif isinstance(event, events.WorkerExited) and kind_of(event.worker_id) is WorkerKind.LEASE:
            # The fact has the lease's times after the effects, because the worker's end may refuse the lease's work.
            times = self._times.get(event.worker_id, NO_TIMES)
            facts.insert(0, Fact(FactKind.WORKER_EXITED, now_ns, event, event.worker_id, None, None, times))

    def _take_in(self, event: Any, now_ns: int, *, names_tenant: bool) -> None:
        # Request 0, the daemon's own, is never answered, so it is not remembered.
        if request := event.request:
            issuer = event.tenant if names_tenant else THE_DAEMON
            self._requests[request] = ReceivedRequest(self._requesters.pop(request, issuer), now_ns, event)

    # --- events ---

    def _requested(self, event: events.AcquireRequested, now_ns: int) -> Fact | None:
        # The time of an acquire starts here. A second step of the same acquire starts it again.
        self._times[event.lease_id] = times = Times(now_ns)
        if event.step is AcquireStep.PLACE:
            # The first step, the check, already made this fact.
            return None
        return Fact(FactKind.REQUESTED, now_ns, event, event.lease_id, None, None, times)

    def _worker_ready(self, event: events.WorkerReady, now_ns: int) -> Fact | None:
        if kind_of(event.worker_id) is not WorkerKind.LEASE:
            return None
        times = self._times.get(event.worker_id, NO_TIMES)
        if times.spawned_ns is not None:
            # Clear the time of the start, so that a repeated event does not measure it again.
            self._times[event.worker_id] = Times(times.asked_ns, None, *times[2:])
        return Fact(FactKind.WORKER_READY, now_ns, event, event.worker_id, None, None, times)

    def _worker_failed(self, event: events.WorkerFailed, now_ns: int) -> Fact | None:
        if kind_of(event.worker_id) is not WorkerKind.LEASE:
            return None
        return Fact(FactKind.WORKER_FAILED, now_ns, event, event.worker_id)

    def _scrubbed(self, event: events.WorkerScrubbed, now_ns: int) -> Fact | None:
        return Fact(FactKind.SCRUB_DOUBTED, now_ns, event, event.lease_id) if event.doubt else None

    def _session_faulted(self, event: events.SessionFaulted, now_ns: int) -> Fact | None:
        number = event.worker_id
        # The number is a submit's or a lease's. Only a session's first fault makes a fact, and only before the lease's
        # end.
        of_submit = self._lease_of_submit(number)
        lease = self._lookup(of_submit or number)
        if lease is None or lease.state is not LeaseState.ACTIVE or number in self._faulted:
            return None
        self._faulted.add(number)
        kind = FactKind.SUBMIT_FAULTED if of_submit else FactKind.FAULTED
        return Fact(kind, now_ns, event, lease.lease_id, lease)

    def _restored(self, event: events.LeaseRestored, now_ns: int) -> Fact | None:
        return self._adopted(event, event.kept.lease_id, event.kept.created_ns, now_ns)

    def _region_restored(self, event: events.RegionRestored, now_ns: int) -> Fact | None:
        return self._adopted(event, event.kept.region_id, event.kept.created_ns, now_ns)

    def _adopted(
        self, event: events.LeaseRestored | events.RegionRestored, lease_id: int, created_ns: int, now_ns: int
    ) -> Fact | None:
        lease = self._lookup(lease_id)
        # A restored lease that has ended or is fenced does not continue.
        if lease is None or lease.state not in (LeaseState.ACTIVE, LeaseState.DRAINING):
            return None
        is_active = lease.state is LeaseState.ACTIVE
        self._times[lease.lease_id] = times = Times(began_ns=created_ns, is_granted=is_active)
        kind = FactKind.ADOPTED if is_active else FactKind.ADOPTED_ENDING
        return Fact(kind, now_ns, event, lease.lease_id, lease, times=times)

    # --- answers ---

    def _answer_of(self, kind: FactKind) -> Callable[[Any, int], Fact]:
        def answered(effect: Any, now_ns: int) -> Fact:
            # Every answer has a request, and most have a lease.
            lease = getattr(effect, "lease", None)
            lease_id = 0 if lease is None else lease.lease_id
            return Fact(kind, now_ns, effect, lease_id, lease, self._take_request(effect.request, now_ns))

        return answered

    def _granted(self, effect: events.Granted | events.RegionGranted, now_ns: int) -> Fact:
        lease = effect.lease
        before = self._times.get(lease.lease_id, NO_TIMES)
        # The lease's life begins with this grant. The same event may already have refused its work.
        times = Times(before.asked_ns, before.spawned_ns, now_ns, now_ns, True, before.over_ns, before.cause)
        self._times[lease.lease_id] = times
        request = self._take_request(effect.request, now_ns)
        return Fact(FactKind.GRANTED, now_ns, effect, lease.lease_id, lease, request, times)

    def _denied(self, effect: events.RequestDenied, now_ns: int) -> Fact:
        request = self._take_request(effect.request, now_ns)
        self._forget_request(request)
        lease_id = getattr(request.event, "lease_id", 0)
        return Fact(FactKind.DENIED, now_ns, effect, lease_id, request=request)

    def _checked(self, effect: Checked, now_ns: int) -> None:
        """Forget an acquire that passed its check. After its name is claimed, it comes again as a new request."""
        self._forget_request(self._take_request(effect.request, now_ns))

    def _submit_ready(self, effect: events.SubmitReady, now_ns: int) -> Fact:
        request, lease = self._take_request(effect.request, now_ns), self._lookup(effect.lease_id)
        return Fact(FactKind.SUBMIT_READY, now_ns, effect, effect.lease_id, lease, request)

    def _unfenced(self, cleared: Fact) -> list[Fact]:
        effect: events.SlicesCleared = cleared.source
        return [
            Fact(FactKind.UNFENCED, cleared.now_ns, effect, lease_id, self._lookup(lease_id), cleared.request)
            for lease_id in effect.lease_ids
        ]

    def _take_request(self, request: int, now_ns: int) -> ReceivedRequest:
        return self._requests.pop(request, None) or ReceivedRequest(THE_DAEMON, now_ns, None)

    def _forget_request(self, request: ReceivedRequest | None) -> None:
        """Forget the times of a requested lease that was not placed, and now will not be."""
        if request is None or not isinstance(request.event, events.AcquireRequested):
            return
        times = self._times.get(request.event.lease_id)
        if times is not None and times.spawned_ns is None and times.over_ns is None:
            del self._times[request.event.lease_id]

    # --- other effects ---

    def _placed(self, effect: events.SpawnWorker, now_ns: int) -> Fact:
        lease_id = effect.lease_id
        # Keep the time of the acquire, from which the grant's latency is measured.
        before = self._times.get(lease_id, NO_TIMES)
        self._times[lease_id] = times = Times(before.asked_ns, now_ns, *before[2:])
        is_warm = self._renamed_to == lease_id
        return Fact(FactKind.PLACED, now_ns, effect, lease_id, None, None, times, "", is_warm)

    def _killed(self, effect: events.KillWorker, now_ns: int) -> Fact | None:
        if kind_of(effect.worker_id) is not WorkerKind.LEASE:
            return None
        return Fact(FactKind.WORKER_KILLED, now_ns, effect, effect.worker_id)

    def _refused_work(self, effect: events.RefuseWork, now_ns: int) -> Fact | None:
        lease = self._lookup(effect.worker_id)
        # The end of a warm context is the fact of `WarmEnded`.
        return None if lease is None else self._over(effect, lease, effect.cause, now_ns)

    def _set_region(self, effect: events.SetRegion, now_ns: int) -> Fact | None:
        region = self._lookup(effect.region_id)
        if effect.word not in ENDED_WORDS or region is None or region.cause is None:
            return None
        # The word of an ended region may be written again. Only the first write is the region's end.
        is_over = self._times.get(effect.region_id, NO_TIMES).over_ns is not None
        return None if is_over else self._over(effect, region, region.cause, now_ns)

    def _moved(self, effect: events.LeaseMoved, now_ns: int) -> Fact:
        return _parking(FactKind.MOVED, effect, now_ns)._replace(use=self._use_of(effect.lease.lease_id))

    def _over(
        self, effect: events.RefuseWork | events.SetRegion, lease: LeaseSnapshot, cause: Cause, now_ns: int
    ) -> Fact:
        before = self._times.get(lease.lease_id, NO_TIMES)
        self._times[lease.lease_id] = times = Times(*before[:5], now_ns, cause)
        # A lease that was never granted is only cancelled, because its tenant gets a denial.
        kind = FactKind.ENDING if times.is_granted else FactKind.CANCELLED
        return Fact(kind, now_ns, effect, lease.lease_id, lease, None, times)

    def _ended(self, effect: events.LeaseEnded, now_ns: int) -> Fact:
        lease_id = effect.lease.lease_id
        self._faulted.discard(lease_id)
        return _end_of(effect.lease, effect, now_ns, self._times.pop(lease_id, NO_TIMES), self._use_of(lease_id))

    def _submit_ended(self, effect: events.SubmitEnded, now_ns: int) -> Fact:
        self._faulted.discard(effect.submit_id)
        return Fact(FactKind.SUBMIT_ENDED, now_ns, effect, effect.lease_id, self._lookup(effect.lease_id))

    def _submit_fenced(self, effect: events.SubmitFenced, now_ns: int) -> Fact:
        return Fact(FactKind.SUBMIT_FENCED, now_ns, effect, effect.lease_id, self._lookup(effect.lease_id))

    def _renamed(self, effect: events.RenameWorker, now_ns: int) -> Fact | None:
        # The spawn that follows in the same event uses this context.
        self._renamed_to = effect.to_id
        # A lease's worker that is recycled is also renamed. Only a warm context that gets a lease counts as taken.
        if kind_of(effect.from_id) is WorkerKind.LEASE or (lease := self._lookup(effect.to_id)) is None:
            return None
        return Fact(FactKind.WARM_TAKEN, now_ns, effect, lease.lease_id, card=lease.card_uuid)

    def _submit_spawned(self, effect: events.SpawnSubmit, now_ns: int) -> Fact | None:
        # The submit has a new worker, so the pool was not used.
        if not effect.is_warm:
            return None
        return Fact(FactKind.WARM_TAKEN, now_ns, effect, effect.lease_id, card=effect.card_uuid)

    def _recycled(self, effect: events.RecycleWorker, now_ns: int) -> Fact | None:
        lease = self._lookup(effect.lease_id)
        if lease is None:
            return None
        return Fact(FactKind.WARM_RECYCLED, now_ns, effect, lease.lease_id, card=lease.card_uuid)

    def _warm_ended(self, effect: events.WarmEnded, now_ns: int) -> Fact:
        kind = FactKind.WARM_FENCED if effect.is_fenced else FactKind.WARM_LOST
        return Fact(kind, now_ns, effect, card=effect.card_uuid)

    def _capacity_changed(self, effect: events.CapacityChanged, now_ns: int) -> Fact:
        return Fact(FactKind.CAPACITY_CHANGED, now_ns, effect)


def _parking(
    kind: FactKind,
    effect: events.LeaseParked
    | events.LeaseReturned
    | events.ParkFailed
    | events.LeaseLeft
    | events.LeaseMoved
    | events.WorkerReplaced,
    now_ns: int,
) -> Fact:
    return Fact(kind, now_ns, effect, effect.lease.lease_id, effect.lease)


def end_under_earlier_daemon(lease: LeaseSnapshot, now_ns: int) -> Fact:
    """Return the fact that a lease ended under an earlier daemon, which was killed before it could record the end."""
    return _end_of(lease, None, lease.ended_ns or now_ns, NO_TIMES)


def _end_of(
    lease: LeaseSnapshot, effect: events.LeaseEnded | None, now_ns: int, times: Times, use: LeaseTimeUse | None = None
) -> Fact:
    kind = FactKind.FENCED if lease.state is LeaseState.FENCED else FactKind.ENDED
    return Fact(kind, now_ns, effect, lease.lease_id, lease, times=times, use=use)
