"""What the log tells of leases: each one's story, from the request to the proof that its memory is free.

What the audit log's witness tells is recorded there and told here too, and what that leaves out: requests before they
are granted, the line, the workers. What a tenant can repeat at will is bounded for each tenant and event; what is left
out is counted.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpulease.daemon.capabilities.claims import Claims
from gpulease.daemon.leases import (
    AcquireRequested,
    CapacityChanged,
    Cause,
    Denial,
    Denied,
    Effect,
    Event,
    Granted,
    KillWorker,
    LeaseEnded,
    LeaseSnapshot,
    RenameWorker,
    RequesterGone,
    SpawnWorker,
    SubmitEnded,
    SubmitFenced,
    SubmitReady,
    WarmEnded,
    WorkerExited,
    WorkerFailed,
    WorkerKind,
    WorkerReady,
    WorkerScrubbed,
    kind_of,
)
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import is_logged, log_event
from gpulease.daemon.record.audit.projector import AuditProjector, Told, bounded
from gpulease.daemon.record.audit.recorder import Budgets, OnOutcome, Recorder
from gpulease.daemon.record.audit.records import Kind
from gpulease.protocol.capabilities import names_of

COUNT_EVERY_S: Final = 10.0
"""How soon it is told that a tenant's events were left out."""

MAX_COUNTS: Final = 50
"""Lines that tell it at once; those of more tenants and events are summed up in one more."""

NS_PER_MS: Final = 1_000_000
US_PER_MS: Final = 1000

_EVENT_OF: Final = {
    Kind.GRANT: LogEvent.LEASE_GRANTED,
    Kind.ADOPT: LogEvent.LEASE_ADOPTED,
    Kind.RENEW: LogEvent.LEASE_RENEWED,
    Kind.DENY: LogEvent.REQUEST_DENIED,
    Kind.ATTACH: LogEvent.SESSION_ATTACHED,
    Kind.ISSUE: LogEvent.TOKEN_ISSUED,
    Kind.FAULT: LogEvent.SESSION_FAULTED,
    Kind.OVER: LogEvent.LEASE_ENDING,
    Kind.END: LogEvent.LEASE_RECLAIMED,
    Kind.FENCE: LogEvent.LEASE_FENCED,
    Kind.CLEAR: LogEvent.LEASE_UNFENCED,
    Kind.OPERATOR: LogEvent.OPERATOR_ACTED,
}
"""What the witness tells; its fence of a warm context is told by its end."""

_WITH_WORKER: Final = frozenset({Kind.GRANT, Kind.ADOPT, Kind.ATTACH, Kind.FAULT, Kind.OVER})
"""Events of a lease whose worker is there."""

_KEPT: Final = frozenset(
    {
        *("card", "size_bytes", "exclusivity", "generation", "ttl_ms", "by", "cause", "reason", "operation"),
        *("action", "outcome", "count", "contexts", "within_ms"),
    }
)
"""Members of the witness's particulars that are fields here by the same name."""

_STORIED: Final = frozenset({AcquireRequested, RequesterGone, WorkerReady, WorkerFailed, WorkerExited, WorkerScrubbed})
_TELLING: Final = frozenset(
    {
        *(SpawnWorker, KillWorker, WarmEnded, SubmitReady, SubmitEnded, SubmitFenced, CapacityChanged),
        *(Granted, Denied, LeaseEnded),
    }
)
"""Events and effects of which more is told than the witness does: most are passed over by their kind."""

_ALWAYS: Final = frozenset(
    {LogEvent.LEASE_FENCED, LogEvent.SUBMIT_FENCED, LogEvent.LEASE_UNFENCED, LogEvent.OPERATOR_ACTED}
)
"""What no tenant can bring about as often as it likes."""


class LeaseLog(Recorder):
    """Stands before the recorder of the audit log: has recorded what happens, and logs it.

    Args:
        inner: The recorder.
        pid_of: The process id of a lease's worker, 0 if it has none.
    """

    def __init__(self, inner: Recorder, pid_of: Callable[[int], int]) -> None:
        self._inner = inner
        self._pid_of = pid_of
        self._lookup: Callable[[int], LeaseSnapshot | None] = lambda _: None
        self._witness = AuditProjector(self._lookup)
        self._budgets: defaultdict[LogEvent, Budgets] = defaultdict(Budgets)
        self._omitted: Counter[tuple[str, str]] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        # By request, and by lease: bounded by open requests and live leases.
        self._asking: dict[int, int] = {}
        self._asked_ns: dict[int, int] = {}
        self._spawned_ns: dict[int, int] = {}
        self._pids: dict[int, int] = {}

    # --- what the broker tells ---

    def observe(self, lookup: Callable[[int], LeaseSnapshot | None], post: Callable[[Event], None]) -> None:
        """As the recorder has it; so are those that it has, too."""
        self._lookup = lookup
        self._witness = AuditProjector(lookup)
        self._inner.observe(lookup, post)

    def asked_by(self, request: int, peer: str) -> None:
        """Who is behind this request, whose event does not say so: an operator, or whoever bears a token."""
        self._witness.asked_by(request, peer)

    def saw(self, event: Event, effects: Sequence[Effect], now_ns: int) -> None:
        """What an event brought about, before any of it is carried out. A fault here must not keep it from that."""
        told: list[Told] = []
        try:
            for one in self._witness.saw(event, effects, now_ns):
                self.record(one, now_ns)
                told.append(one)
        except Exception:
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"following {type(event).__name__}")
        try:
            if type(event) in _STORIED:
                self._tell_before(event, effects, now_ns)
            denied = [self._asking.get(one.request, 0) for one in effects if isinstance(one, Denied)] if told else []
            for one in told:
                self._tell(one, denied, now_ns)
            for effect in effects:
                if type(effect) in _TELLING:
                    self._tell_after(effect, effects, now_ns)
        except Exception:
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"telling of {type(event).__name__}")

    def record(self, told: Told, now_ns: int) -> None:
        """As above."""
        self._inner.record(told, now_ns)

    def without_end(self, tombstones: Sequence[LeaseSnapshot]) -> list[LeaseSnapshot]:
        """As above."""
        return self._inner.without_end(tombstones)

    def make_up(self, tombstones: Sequence[LeaseSnapshot], now_ns: int) -> None:
        """Record the ends that an earlier daemon kept in its journal, and was killed before they were recorded."""
        for lease in self.without_end(tombstones):
            self.record(self._witness.ended_untold(lease, now_ns), now_ns)

    def attached(self, lease_id: int, tenant: str) -> None:
        """As above."""
        self._say(LogEvent.SESSION_ATTACHED, tenant, lease_id=lease_id, worker_pid=self._pid_of(lease_id) or None)
        self._inner.attached(lease_id, tenant)

    def issued(self, tenant: str, by: str, grant: Claims, audience: str | None) -> None:
        """As above."""
        permissions = list(names_of(grant.permissions))
        told = {"lease_id": grant.lease_id, "by": by, "permissions": permissions, "nonce": grant.nonce.hex()}
        self._say(LogEvent.TOKEN_ISSUED, tenant, **told)
        self._inner.issued(tenant, by, grant, audience)

    def token_revoked(self, tenant: str, by: str, lease_id: int, nonce: bytes) -> None:
        """As above."""
        self._say(LogEvent.TOKEN_REVOKED, tenant, lease_id=lease_id, by=by, nonce=nonce.hex())
        self._inner.token_revoked(tenant, by, lease_id, nonce)

    def reloaded(self, config: str) -> None:
        """As above."""
        self._inner.reloaded(config)

    def refused(self, operation: str, tenant: str, lease_id: int, message: str) -> None:
        """As above."""
        told = {"operation": operation.lower(), "lease_id": lease_id, "denial": "refused", "reason": message}
        self._say(LogEvent.REQUEST_DENIED, tenant, **told)
        self._inner.refused(operation, tenant, lease_id, message)

    def denial(self) -> Denial | None:
        """As above."""
        return self._inner.denial()

    def problem(self) -> str:
        """As above."""
        return self._inner.problem()

    def figures(self) -> dict[str, int] | None:
        """As above."""
        return self._inner.figures()

    def answer(self, granted: Granted, on_outcome: OnOutcome) -> None:
        """As above."""

        def answered(outcome: Granted | Denied) -> None:
            if isinstance(outcome, Denied):
                lease = granted.lease
                told = {"operation": "acquire", "denial": outcome.denial.reason.value, "reason": outcome.denial.message}
                self._say(LogEvent.REQUEST_DENIED, lease.tenant, lease_id=lease.lease_id, **told)
            on_outcome(outcome)

        self._inner.answer(granted, answered)

    async def stop(self) -> None:
        """As above."""
        if self._timer is not None:
            self._timer.cancel()
        self._tell_suppressed()
        await self._inner.stop()

    def warned(self, lease_id: int, left_ms: int, reason: str) -> None:
        """Whoever listens was told that a lease ends soon."""
        self._say_of(LogEvent.LEASE_WARNED, lease_id, left_ms=left_ms, reason=reason)

    # --- the story ---

    def _tell_before(self, event: Event, effects: Sequence[Effect], now_ns: int) -> None:
        match event:
            case AcquireRequested():
                self._tell_request(event, effects, now_ns)
            case RequesterGone(request):
                self._answered(request)
            case WorkerReady(lease_id) if kind_of(lease_id) is WorkerKind.LEASE:
                self._pids[lease_id] = pid = self._pid_of(lease_id)
                took_ms = _ms(now_ns - self._spawned_ns.pop(lease_id, now_ns))
                self._say_of(LogEvent.WORKER_READY, lease_id, worker_pid=pid, took_ms=took_ms)
            case WorkerFailed(lease_id, reason) if kind_of(lease_id) is WorkerKind.LEASE:
                self._say_of(LogEvent.WORKER_FAILED, lease_id, worker_pid=self._pid_of(lease_id), reason=reason)
            case WorkerExited(lease_id, reason, is_by_daemon) if kind_of(lease_id) is WorkerKind.LEASE:
                exited = LogEvent.WORKER_EXITED if is_by_daemon else LogEvent.WORKER_DIED
                self._say_of(exited, lease_id, worker_pid=self._pids.get(lease_id), reason=reason)
            case WorkerScrubbed(lease_id, doubt) if doubt:
                self._say_of(LogEvent.WARM_REFUSED, lease_id, reason=doubt)

    def _tell_request(self, event: AcquireRequested, effects: Sequence[Effect], now_ns: int) -> None:
        self._say(
            LogEvent.LEASE_REQUESTED,
            event.tenant,
            lease_id=event.lease_id,
            size_bytes=bounded(event.terms.size_bytes),
            ttl_ms=bounded(event.terms.ttl_ms),
            wait_ms=bounded(event.wait_ms) or None,
            exclusivity=event.terms.exclusivity.name.lower(),
            wanted_card=event.selector,
        )
        self._asking[event.request] = event.lease_id
        self._asked_ns[event.lease_id] = now_ns
        if not is_logged(LogEvent.LEASE_QUEUED):
            return
        is_denied = any(isinstance(effect, Denied) and effect.request == event.request for effect in effects)
        if not is_denied and self._lookup(event.lease_id) is None:
            self._say(LogEvent.LEASE_QUEUED, event.tenant, lease_id=event.lease_id)

    def _tell(self, told: Told, denied: list[int], now_ns: int) -> None:
        """`denied`: the leases that will not be, one for each denial to come; 0 if it was none that was asked for."""
        kind, data = told
        if (event := _EVENT_OF.get(kind)) is None:
            return
        lease_id = int(data["lease"], 16) if "lease" in data else 0
        if kind is Kind.DENY and denied:
            lease_id = denied.pop(0) or lease_id
        if kind in _WITH_WORKER and (pid := self._pid_of(lease_id)):
            self._pids[lease_id] = pid
        if not is_logged(event):
            return
        fields = _fields_of(kind, data)
        if kind in _WITH_WORKER:
            fields["worker_pid"] = self._pids.get(lease_id)
        if kind is Kind.OVER and data["cause"] == Cause.EXPIRED.value:
            lease = self._lookup(lease_id)
            if lease is not None and lease.deadline_ns is not None:
                fields["late_ms"] = _ms(now_ns - lease.deadline_ns)
        self._say(event, str(data.get("tenant") or data.get("by", "")), lease_id=lease_id, **fields)

    def _tell_after(self, effect: Effect, effects: Sequence[Effect], now_ns: int) -> None:
        match effect:
            case SpawnWorker(lease_id):
                is_warm = any(isinstance(other, RenameWorker) and other.to_id == lease_id for other in effects)
                self._tell_placed(lease_id, now_ns, is_warm=is_warm)
            case KillWorker(lease_id) if kind_of(lease_id) is WorkerKind.LEASE:
                self._say_of(LogEvent.WORKER_KILLED, lease_id, worker_pid=self._pid_of(lease_id))
            case WarmEnded(card_uuid=card, reason=reason, is_fenced=True):
                log_event(LogEvent.WARM_FENCED, card=card, reason=reason)
            case WarmEnded(card_uuid=card, reason=reason):
                # It may have been a tenant's, who can leave one after the other.
                self._say(LogEvent.WARM_GONE, "", card=card, reason=reason)
            case CapacityChanged(card, is_less):
                log_event(
                    LogEvent.CARD_SHRANK if is_less else LogEvent.CARD_GREW,
                    card=card.uuid,
                    capacity_bytes=card.capacity_bytes,
                    unowned_bytes=card.unowned_bytes,
                    outside_bytes=card.outside_bytes,
                )
            case SubmitReady(_, submit_id, lease_id):
                self._say_of(LogEvent.SUBMIT_READY, lease_id, worker_pid=self._pid_of(submit_id))
            case SubmitEnded(_, lease_id, reason):
                self._say_of(LogEvent.SUBMIT_ENDED, lease_id, reason=reason)
            case SubmitFenced(_, lease_id, reason):
                self._say_of(LogEvent.SUBMIT_FENCED, lease_id, reason=reason)
            case Granted(request) | Denied(request):
                self._answered(request)
            case LeaseEnded(lease):
                self._spawned_ns.pop(lease.lease_id, None)
                self._pids.pop(lease.lease_id, None)

    def _tell_placed(self, lease_id: int, now_ns: int, *, is_warm: bool) -> None:
        self._spawned_ns[lease_id] = now_ns
        if not is_logged(LogEvent.LEASE_PLACED) or (lease := self._lookup(lease_id)) is None:
            return
        self._say(
            LogEvent.LEASE_PLACED,
            lease.tenant,
            lease_id=lease_id,
            card=lease.card_uuid,
            size_bytes=lease.size_bytes,
            is_warm=is_warm,
            waited_ms=_ms(now_ns - self._asked_ns.get(lease_id, now_ns)),
        )

    def _answered(self, request: int) -> None:
        self._asked_ns.pop(self._asking.pop(request, 0), None)

    # --- bounds ---

    def _say_of(self, event: LogEvent, lease_id: int, **fields: Any) -> None:
        if not is_logged(event):
            return
        lease = self._lookup(lease_id)
        self._say(event, "" if lease is None else lease.tenant, lease_id=lease_id, **fields)

    def _say(self, event: LogEvent, tenant: str, **fields: Any) -> None:
        """Log it, unless it is one too many of this tenant's."""
        if not is_logged(event):
            return
        if event not in _ALWAYS:
            omitted = self._budgets[event].spend(tenant, time.monotonic_ns())
            if omitted is None:
                self._count_later()
                return
            self._omitted[event.value.name, tenant] += omitted
        whose: dict[str, Any] = {"tenant": tenant} if "tenant" in event.value.fields else {}
        log_event(event, lease_id=fields.pop("lease_id", None), **whose, **fields)

    def _count_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COUNT_EVERY_S, self._tell_suppressed)

    def _tell_suppressed(self) -> None:
        self._timer = None
        for event, budgets in self._budgets.items():
            for tenant, count in budgets.take_omitted().items():
                self._omitted[event.value.name, tenant] += count
        counts = (+self._omitted).most_common()
        self._omitted.clear()
        for (of_event, tenant), count in counts[:MAX_COUNTS]:
            log_event(LogEvent.LOG_SUPPRESSED, tenant=tenant, of_event=of_event, count=count)
        if rest := sum(count for _, count in counts[MAX_COUNTS:]):
            log_event(LogEvent.LOG_SUPPRESSED, count=rest)


def _fields_of(kind: Kind, data: dict[str, Any]) -> dict[str, Any]:
    """What a record of the audit log has, by the names it has here."""
    fields = {name: value for name, value in data.items() if name in _KEPT and value != ""}
    if kind is Kind.DENY:
        fields["denial"], fields["reason"] = data["reason"], data["message"]
        fields["wanted_card"] = fields.pop("card", None)
    if "waited_us" in data:
        fields["took_ms"] = data["waited_us"] / US_PER_MS
    if "latency_us" in data:
        fields["took_ms" if kind is Kind.OPERATOR else "reclaim_ms"] = data["latency_us"] / US_PER_MS
    if data.get("granted_us") is not None:
        fields["held_ms"] = (data["over_us"] - data["granted_us"]) / US_PER_MS
    return fields


def _ms(duration_ns: int) -> float:
    return duration_ns // 1000 / US_PER_MS
