"""Logs the life of each lease, from the request to the proof that its memory is free.

Besides the facts that the audit log records, `LeaseLog` logs requests, waits in the queue and workers. Events that a
tenant can repeat at will are limited for each tenant and event. Omitted events are counted.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gpulease.daemon.capabilities.claims import Claims
from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.events import Event, RequestDenied
from gpulease.daemon.leases.model import Cause, LeaseSnapshot
from gpulease.daemon.leases.time_account import LeaseTimeUse
from gpulease.daemon.log.catalogue import WARNING, LogEvent
from gpulease.daemon.log.writer import is_logged, log_event, log_fields
from gpulease.daemon.record.audit.projector import EXCLUSIVITY_NAMES, Entry, Particulars, bounded, entry_of, use_entry
from gpulease.daemon.record.audit.recorder import Budgets, FactRecorder, Grant, OnNoteRecorded, OnOutcome
from gpulease.daemon.record.audit.records import RecordKind
from gpulease.daemon.record.lease_facts import Fact, FactKind
from gpulease.daemon.record.lease_history import Lookup, end_under_earlier_daemon
from gpulease.protocol.capabilities import names_of
from gpulease.protocol.lease_ids import lease_text
from gpulease.protocol.opcodes import Status
from gpulease.protocol.time_units import NS_PER_US, US_PER_MS

_SAME_NAMES: Final = frozenset(
    {
        *("card", "size_bytes", "exclusivity", "generation", "ttl_ms", "by", "cause", "reason", "operation"),
        *("name", "epoch", "parent", "action", "outcome", "count", "contexts", "within_ms"),
        *("why", "moved_bytes", "image_bytes", "from_card", "way", "through_host", "from_version"),
    }
)
"""Particulars of an audit record that have the same name as a log field."""


class LeaseLog(FactRecorder):
    """Wraps the recorder of the audit log: passes every record on to `inner`, and writes a log line for it.

    Args:
        inner: The recorder of the audit log.
        lookup: Returns a lease in its state after the event.
        pid_of: Returns the process id of a lease's worker, 0 if it has none.
    """

    def __init__(self, inner: FactRecorder, lookup: Lookup, pid_of: Callable[[int], int]) -> None:
        self._inner = inner
        self._lookup = lookup
        self._pid_of = pid_of
        self._limited = _LimitedLog()
        # Workers' process ids, by lease. The line about a worker's end needs the id after `pid_of` has forgotten it.
        self._pids: dict[int, int] = {}
        # The last event's facts until `log_facts`, and the entries that were recorded, by the number of the fact.
        self._unlogged: tuple[Sequence[Fact], Mapping[int, Entry | None]] | None = None

    # --- events ---

    def attach(self, post: Callable[[Event], None]) -> None:
        self._inner.attach(post)

    @property
    def keeps_records(self) -> bool:
        return self._inner.keeps_records

    def on_facts(self, facts: Sequence[Fact]) -> None:
        """Record an event's facts in the audit log. Called before any effect is executed; raises nothing.

        The caller must then call `log_facts`, which may be after the effects.
        """
        self.log_facts()
        entries: dict[int, Entry | None] = {}
        self._unlogged = facts, entries
        if not self._inner.keeps_records:
            return
        try:
            for number, fact in enumerate(facts):
                entries[number] = entry = entry_of(fact)
                if entry is not None:
                    self._inner.record(entry, fact.now_ns)
        except Exception:
            # A bug here must not stop the log, or the effects that follow.
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="recording what happened to a lease")

    def log_facts(self) -> None:
        """Log the facts of the last `on_facts`, unless they are logged. Other methods call this before they log."""
        if self._unlogged is None:
            return
        (facts, entries), self._unlogged = self._unlogged, None
        try:
            self._log_facts(facts, entries)
        except Exception:
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="logging what happened to a lease")

    def record(self, entry: Entry, now_ns: int) -> None:
        self._inner.record(entry, now_ns)

    def find_without_end_record(self, tombstones: Sequence[LeaseSnapshot]) -> list[LeaseSnapshot]:
        return self._inner.find_without_end_record(tombstones)

    def record_missing_ends(self, tombstones: Sequence[LeaseSnapshot], now_ns: int) -> None:
        """Record ends that an earlier daemon wrote to its journal, but not to the audit log before it died."""
        for lease in self.find_without_end_record(tombstones):
            if (entry := entry_of(end_under_earlier_daemon(lease, now_ns))) is not None:
                self.record(entry, now_ns)

    def used(self, lease: LeaseSnapshot, use: LeaseTimeUse) -> None:
        """Record the card time that a live lease has used so far. Writes no log line."""
        self.record(use_entry(lease, use), time.monotonic_ns())

    def attached(self, lease_id: int, tenant: str) -> None:
        self._log(LogEvent.SESSION_ATTACHED, tenant, lease_id=lease_id, worker_pid=self._pid_of(lease_id) or None)
        self._inner.attached(lease_id, tenant)

    def issued(self, tenant: str, by: str, grant: Claims, audience: str | None) -> None:
        permissions = list(names_of(grant.permissions))
        fields: dict[str, Any] = {
            "lease_id": grant.lease_id,
            "by": by,
            "permissions": permissions,
            "nonce": grant.nonce.hex(),
        }
        # The nonce identifies the token in a later TOKEN_REVOKED. The token itself is a secret and is never logged.
        self._log(LogEvent.TOKEN_ISSUED, tenant, **fields)
        self._inner.issued(tenant, by, grant, audience)

    def token_revoked(self, tenant: str, by: str, lease_id: int, nonce: bytes) -> None:
        self._log(LogEvent.TOKEN_REVOKED, tenant, lease_id=lease_id, by=by, nonce=nonce.hex())
        self._inner.token_revoked(tenant, by, lease_id, nonce)

    def reloaded(self, config: str) -> None:
        self._inner.reloaded(config)

    def refused(self, operation: str, tenant: str, lease_id: int, message: str) -> None:
        fields: dict[str, Any] = {
            "operation": operation.lower(),
            "lease_id": lease_id,
            "denial": "refused",
            "reason": message,
        }
        self._log(LogEvent.REQUEST_DENIED, tenant, **fields)
        self._inner.refused(operation, tenant, lease_id, message)

    def note(self, lease_id: int, tenant: str, note: bytes, on_noted: OnNoteRecorded) -> None:
        self._inner.note(lease_id, tenant, note, on_noted)

    def forward_revoked(
        self,
        region: LeaseSnapshot,
        status: Status,
        kernel: str,
        site: int,
        position: int,
        seen_after_ns: int,
        told_after_ns: int | None,
    ) -> None:
        """Log that a session refused a launch because of a region.

        `seen_after_ns` and `told_after_ns` count from the change of the region's word. `told_after_ns` is None if the
        tenant has not received the error yet.
        """
        self._log(
            LogEvent.FORWARD_REVOKED,
            region.tenant,
            lease_id=region.lease_id,
            parent=lease_text(region.parent_id),
            status=status.name.lower(),
            kernel=kernel,
            site=site,
            position=position,
            seen_after_us=seen_after_ns // NS_PER_US,
            told_after_us=None if told_after_ns is None else told_after_ns // NS_PER_US,
        )

    def warned(self, lease_id: int, left_ms: int, reason: str) -> None:
        """Log that subscribers were warned that a lease ends soon."""
        self._log_of_lease(LogEvent.LEASE_WARNED, lease_id, left_ms=left_ms, reason=reason)

    # --- requirements of the audit log ---

    def denial(self) -> Denial | None:
        return self._inner.denial()

    def problem(self) -> str:
        return self._inner.problem()

    def figures(self) -> dict[str, int] | None:
        return self._inner.figures()

    def answer(self, granted: Grant, on_outcome: OnOutcome) -> None:
        """Pass the grant on, and log a denial that takes its place."""

        def answered(outcome: Grant | RequestDenied) -> None:
            # The grant is already logged, so log that it was denied after all.
            if isinstance(outcome, RequestDenied):
                lease, denial = granted.lease, outcome.denial
                operation = "region_open" if lease.parent_id else "acquire"
                fields = {"operation": operation, "denial": denial.reason.value, "reason": denial.message}
                self._log(LogEvent.REQUEST_DENIED, lease.tenant, lease_id=lease.lease_id, **fields)
            on_outcome(outcome)

        self._inner.answer(granted, answered)

    async def stop(self) -> None:
        self._limited.stop()
        await self._inner.stop()

    # --- facts ---

    def _log_facts(self, facts: Sequence[Fact], entries: Mapping[int, Entry | None]) -> None:
        """Log requests and workers first, then the recorded facts, then the rest."""
        # First pass: requests and workers, then records.
        for number, fact in enumerate(facts):
            kind = fact.kind
            if kind in _RECORDED:
                self._log_entry(fact, number, entries)
            elif kind is FactKind.REQUESTED:
                self._log_request(fact)
                self._log_queued(fact, facts)
            elif (first := _FIRST.get(kind)) is not None:
                first(self, fact)
        # Second pass: the rest. The process id of an ended lease's worker is no longer needed.
        for fact in facts:
            if fact.kind in (FactKind.ENDED, FactKind.FENCED):
                self._pids.pop(fact.lease_id, None)
            if (last := _LAST.get(fact.kind)) is not None:
                last(self, fact)

    def _log_request(self, fact: Fact) -> None:
        if not is_logged(LogEvent.LEASE_REQUESTED):
            return
        request = fact.source
        fields = {
            "size_bytes": bounded(request.terms.size_bytes),
            "ttl_ms": bounded(request.terms.ttl_ms),
            "wait_ms": bounded(request.wait_ms) or None,
            "exclusivity": EXCLUSIVITY_NAMES[request.terms.exclusivity],
            "wanted_card": request.selector,
        }
        self._limited.log(LogEvent.LEASE_REQUESTED, request.tenant, request.lease_id, fields)

    def _log_queued(self, fact: Fact, facts: Sequence[Fact]) -> None:
        if not is_logged(LogEvent.LEASE_QUEUED):
            return
        # There is no effect for waiting. An acquire waits if its event neither denied nor placed it, and no lease
        # exists.
        request, lease_id = fact.source.request, fact.lease_id
        for other in facts:
            is_denied = other.kind is FactKind.DENIED and other.source.request == request
            if is_denied or (other.kind is FactKind.PLACED and other.lease_id == lease_id):
                return
        if self._lookup(lease_id) is None:
            self._log(LogEvent.LEASE_QUEUED, fact.source.tenant, lease_id=lease_id)

    def _log_ready(self, fact: Fact) -> None:
        self._pids[fact.lease_id] = pid = self._pid_of(fact.lease_id)
        took_ms = _ms(fact.now_ns - _or(fact.times.spawned_ns, fact.now_ns))
        self._log_of_lease(LogEvent.WORKER_READY, fact.lease_id, worker_pid=pid, took_ms=took_ms)

    def _log_failed(self, fact: Fact) -> None:
        pid, reason = self._pid_of(fact.lease_id), fact.source.reason
        self._log_of_lease(LogEvent.WORKER_FAILED, fact.lease_id, worker_pid=pid, reason=reason)

    def _log_exited(self, fact: Fact) -> None:
        event = LogEvent.WORKER_EXITED if fact.source.is_by_daemon else LogEvent.WORKER_DIED
        self._log_of_lease(event, fact.lease_id, worker_pid=self._pids.get(fact.lease_id), reason=fact.source.reason)

    def _log_scrub(self, fact: Fact) -> None:
        self._log_of_lease(LogEvent.WARM_REFUSED, fact.lease_id, reason=fact.source.doubt)

    def _log_entry(self, fact: Fact, number: int, entries: Mapping[int, Entry | None]) -> None:
        # Remember the process id for a later line about the worker's end, even if nothing is logged now.
        if fact.kind.row.has_worker and (pid := self._pid_of(fact.lease_id)):
            self._pids[fact.lease_id] = pid
        event = _RECORDED[fact.kind]
        level = _level_of(fact, event)
        if not is_logged(event, level):
            return
        # The line has the record's particulars, so make an entry even if nothing was recorded.
        entry = entries[number] if number in entries else entry_of(fact)
        if entry is None:
            return
        kind, particulars = entry
        fields = _fields_of(kind, particulars)
        if fact.kind.row.has_worker:
            fields["worker_pid"] = self._pids.get(fact.lease_id)
        if (deadline_ns := _deadline_that_passed(fact)) is not None:
            fields["late_ms"] = _ms(fact.now_ns - deadline_ns)
        # An operator's action without a tenant counts towards the operator's budget.
        tenant = str(particulars.get("tenant") or particulars.get("by", ""))
        self._limited.log(event, tenant, fact.lease_id or _lease_in(particulars), fields, level)

    def _log_placed(self, fact: Fact) -> None:
        if not is_logged(LogEvent.LEASE_PLACED) or (lease := self._lookup(fact.lease_id)) is None:
            return
        self._log(
            LogEvent.LEASE_PLACED,
            lease.tenant,
            lease_id=lease.lease_id,
            card=lease.card_uuid,
            size_bytes=lease.size_bytes,
            is_warm=fact.is_warm,
            waited_ms=_ms(fact.now_ns - _or(fact.times.asked_ns, fact.now_ns)),
        )

    def _log_killed(self, fact: Fact) -> None:
        self._log_of_lease(LogEvent.WORKER_KILLED, fact.lease_id, worker_pid=self._pid_of(fact.lease_id))
        if fact.source.doubt:
            self._log_of_lease(LogEvent.WARM_REFUSED, fact.lease_id, reason=fact.source.doubt)

    def _log_park_failed(self, fact: Fact) -> None:
        reason = "return" if fact.source.cause is None else fact.source.cause.value
        self._log_of_lease(LogEvent.LEASE_PARK_FAILED, fact.lease_id, why=reason, reason=fact.source.reason)

    def _log_warm_lost(self, fact: Fact) -> None:
        # Limit these lines, because a tenant can leave one context after another.
        self._log(LogEvent.WARM_GONE, "", card=fact.card, reason=fact.source.reason)

    def _log_submit_ready(self, fact: Fact) -> None:
        self._log_of_lease(LogEvent.SUBMIT_READY, fact.lease_id, worker_pid=self._pid_of(fact.source.submit_id))

    def _log_submit_ended(self, fact: Fact) -> None:
        self._log_of_lease(fact.kind.row.logs[0], fact.lease_id, reason=fact.source.reason)

    def _log_warm_fenced(self, fact: Fact) -> None:
        log_event(LogEvent.WARM_FENCED, card=fact.card, reason=fact.source.reason)

    def _log_capacity(self, fact: Fact) -> None:
        card, is_less = fact.source.card, fact.source.is_less
        log_event(
            LogEvent.CARD_SHRANK if is_less else LogEvent.CARD_GREW,
            card=card.uuid,
            capacity_bytes=card.capacity_bytes,
            unowned_bytes=card.unowned_bytes,
            outside_bytes=card.outside_bytes,
        )

    # --- lines ---

    def _log_of_lease(self, event: LogEvent, lease_id: int, **fields: Any) -> None:
        if not is_logged(event):
            return
        lease = self._lookup(lease_id)
        self._limited.log(event, "" if lease is None else lease.tenant, lease_id, fields)

    def _log(self, event: LogEvent, tenant: str, lease_id: int | None = None, **fields: Any) -> None:
        if is_logged(event):
            self.log_facts()
            self._limited.log(event, tenant, lease_id, fields)


_FIRST: Final[dict[FactKind, Callable[[LeaseLog, Fact], None]]] = {
    FactKind.WORKER_READY: LeaseLog._log_ready,
    FactKind.WORKER_FAILED: LeaseLog._log_failed,
    FactKind.WORKER_EXITED: LeaseLog._log_exited,
    FactKind.SCRUB_DOUBTED: LeaseLog._log_scrub,
}
"""Methods for facts that are logged before those with an audit record."""

_LAST: Final[dict[FactKind, Callable[[LeaseLog, Fact], None]]] = {
    FactKind.PLACED: LeaseLog._log_placed,
    FactKind.WORKER_KILLED: LeaseLog._log_killed,
    FactKind.WARM_LOST: LeaseLog._log_warm_lost,
    FactKind.PARK_FAILED: LeaseLog._log_park_failed,
    FactKind.WARM_FENCED: LeaseLog._log_warm_fenced,
    FactKind.CAPACITY_CHANGED: LeaseLog._log_capacity,
    FactKind.SUBMIT_READY: LeaseLog._log_submit_ready,
    FactKind.SUBMIT_ENDED: LeaseLog._log_submit_ended,
    FactKind.SUBMIT_FENCED: LeaseLog._log_submit_ended,
}
"""Methods for facts that are logged after those with an audit record."""

_LOGGED_BY_METHODS: Final = frozenset({FactKind.REQUESTED, *_FIRST, *_LAST})

_RECORDED: Final = {
    kind: kind.row.logs[0]
    for kind in FactKind
    if kind.row.audit is not None and kind.row.logs and kind not in _LOGGED_BY_METHODS
}
"""Facts that are logged with the particulars of their audit records."""

if {*_RECORDED, *_LOGGED_BY_METHODS} != {kind for kind in FactKind if kind.row.logs}:
    raise TypeError("exactly the facts with a log event in their row must have an audit record or a method that logs")


COUNT_EVERY_S: Final = 10.0
"""Seconds until the log reports how many events were omitted."""

MAX_COUNTS: Final = 50
"""Maximum number of lines in one such report, each for one tenant and event. One more line has the sum of all others.
"""

_UNLIMITED: Final = frozenset(
    {LogEvent.LEASE_FENCED, LogEvent.SUBMIT_FENCED, LogEvent.LEASE_UNFENCED, LogEvent.OPERATOR_ACTED}
)
"""Events that a tenant can't repeat at will."""

_WITH_TENANT: Final = frozenset(event for event in LogEvent if "tenant" in event.kind.fields)


class _LimitedLog:
    """Logs events within each tenant's budget, and counts omitted ones."""

    def __init__(self) -> None:
        self._budgets: defaultdict[LogEvent, Budgets] = defaultdict(Budgets)
        self._omitted: Counter[tuple[str, str]] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def log(
        self, event: LogEvent, tenant: str, lease_id: int | None, fields: dict[str, Any], level: int | None = None
    ) -> None:
        """Log an event for which `is_logged` was true, if the tenant's budget has room for it."""
        if event not in _UNLIMITED:
            # Each kind of event has a separate budget, so a flood of one kind does not suppress other kinds.
            omitted = self._budgets[event].spend(tenant, time.monotonic_ns())
            if omitted is None:
                # The first omitted event starts the timer.
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(COUNT_EVERY_S, self._log_suppressed)
                return
            # The budget has room again. Events omitted before this one are reported when the timer fires.
            if omitted:
                self._omitted[event.kind.name, tenant] += omitted
        about: dict[str, Any] = (
            {"lease_id": lease_id, "tenant": tenant} if event in _WITH_TENANT else {"lease_id": lease_id}
        )
        log_fields(event, about | fields, level)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._log_suppressed()

    def _log_suppressed(self) -> None:
        # Collect the counts of tenants without a later line.
        self._timer = None
        for event, budgets in self._budgets.items():
            for tenant, count in budgets.take_omitted().items():
                self._omitted[event.kind.name, tenant] += count
        # Unary plus drops zeros. The highest counts get lines of their own.
        counts = (+self._omitted).most_common()
        self._omitted.clear()
        for (of_event, tenant), count in counts[:MAX_COUNTS]:
            log_event(LogEvent.LOG_SUPPRESSED, tenant=tenant, of_event=of_event, count=count)
        if omitted := sum(count for _, count in counts[MAX_COUNTS:]):
            log_event(LogEvent.LOG_SUPPRESSED, count=omitted)


def _fields_of(kind: RecordKind, particulars: Particulars) -> dict[str, Any]:
    """Return the particulars of an audit record by the names that they have in the log."""
    fields = {name: value for name, value in particulars.items() if name in _SAME_NAMES and value != ""}
    # In a denial's record, `card` is the requested card, and `reason` is a code.
    if kind is RecordKind.DENY:
        fields["denial"], fields["reason"] = particulars["reason"], particulars["message"]
        fields["wanted_card"] = fields.pop("card", None)
    # Durations are in microseconds in records and in milliseconds in the log.
    if "waited_us" in particulars:
        fields["took_ms"] = particulars["waited_us"] / US_PER_MS
    if "latency_us" in particulars:
        fields["took_ms" if kind is RecordKind.OPERATOR else "reclaim_ms"] = particulars["latency_us"] / US_PER_MS
    if "took_us" in particulars:
        fields["took_ms"] = particulars["took_us"] / US_PER_MS
    if "parked_us" in particulars:
        fields["parked_ms"] = particulars["parked_us"] / US_PER_MS
    if particulars.get("granted_us") is not None:
        fields["held_ms"] = (particulars["over_us"] - particulars["granted_us"]) / US_PER_MS
    return fields


def _level_of(fact: Fact, event: LogEvent) -> int:
    """Return the level of a fact's line. The level of an end depends on its cause."""
    cause = fact.times.cause if event.kind.warns_of_failures else None
    return WARNING if cause is not None and cause.row.is_warned else event.level


def _deadline_that_passed(fact: Fact) -> int | None:
    """Return the deadline of a lease that ends because it has expired."""
    lease = fact.lease
    is_expired = fact.kind is FactKind.ENDING and lease is not None and lease.cause is Cause.EXPIRED
    return lease.deadline_ns if is_expired and lease is not None else None


def _lease_in(particulars: Particulars) -> int:
    return int(particulars["lease"], 16) if "lease" in particulars else 0


def _or(time_ns: int | None, otherwise_ns: int) -> int:
    return otherwise_ns if time_ns is None else time_ns


def _ms(duration_ns: int) -> float:
    return duration_ns // 1000 / US_PER_MS
