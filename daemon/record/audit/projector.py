"""What of the lease table's life goes into the log: events and effects in, kinds and particulars out. No I/O.

It holds what a record needs and no single effect tells: who asked, since when a lease is granted, since when refused.
All of it is bounded by open requests and live leases.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from gpulease.daemon.leases import (
    AcquireRequested,
    Denied,
    DrainCancelled,
    DrainRequested,
    DrainSet,
    Effect,
    Event,
    FenceCleared,
    FenceClearRequested,
    Freed,
    FreeRequested,
    Granted,
    LeaseEnded,
    LeaseRestored,
    LeaseSnapshot,
    LeaseState,
    Outcome,
    RefuseWork,
    Renewed,
    RenewRequested,
    RequesterGone,
    RevokeDone,
    RevokeRequested,
    SessionFaulted,
    SubmitEnded,
    SubmitFenced,
    SubmitReady,
    SubmitRequested,
    WarmEnded,
)
from gpulease.daemon.record.audit.records import Kind, clean_text
from gpulease.protocol.lease_ids import lease_text

THE_DAEMON: Final = "gpuleased"
"""Who asked, where nobody did."""

NS_PER_US: Final = 1000

_OfTenant = RenewRequested | AcquireRequested | FreeRequested | SubmitRequested
_Request = _OfTenant | RevokeRequested | FenceClearRequested | DrainRequested | DrainCancelled
_OPERATIONS: Final[dict[type, str]] = {
    AcquireRequested: "acquire",
    RenewRequested: "renew",
    SubmitRequested: "submit",
    FreeRequested: "free",
    RevokeRequested: "revoke",
    FenceClearRequested: "fence_clear",
    DrainRequested: "drain",
    DrainCancelled: "drain_cancel",
}
_TELLING: Final = frozenset(
    {
        *(Denied, SubmitReady, Granted, Renewed, Freed, RevokeDone, FenceCleared, DrainSet),
        *(RefuseWork, LeaseEnded, SubmitFenced, SubmitEnded, WarmEnded),
    }
)
"""Effects of which something may be told: most are passed over by their kind."""

Told = tuple[Kind, dict[str, Any]]
Lookup = Callable[[int], LeaseSnapshot | None]


class _Asked(NamedTuple):
    by: str
    at_us: int
    request: _Request | None

    @property
    def operation(self) -> str:
        return _OPERATIONS.get(type(self.request), "")

    def told(self) -> dict[str, Any]:
        """Which lease it was about, and its particulars."""
        match self.request:
            case AcquireRequested(terms=terms, selector=selector):
                card = {} if selector is None else {"card": clean_text(selector)}
                return {"size_bytes": bounded(terms.size_bytes), "ttl_ms": bounded(terms.ttl_ms)} | card
            case RenewRequested(lease_id=lease_id, ttl_ms=ttl_ms):
                return _lease_of(lease_id) | {"ttl_ms": bounded(ttl_ms)}
            case SubmitRequested(lease_id=lease_id, timeout_ms=timeout_ms):
                return _lease_of(lease_id) | {"timeout_ms": bounded(timeout_ms)}
            case FreeRequested(lease_id=lease_id):
                return _lease_of(lease_id)
            case RevokeRequested(lease_id=lease_id, reason=reason):
                return _lease_of(lease_id) | {"reason": clean_text(reason)}
            case FenceClearRequested(card_uuid=card_uuid):
                return {"card": clean_text(card_uuid or "")}
            case DrainRequested(within_ms=within_ms):
                return {"within_ms": within_ms}
            case DrainCancelled() | None:
                return {}


class AuditProjector:
    """Tells what happened. `lookup` is the lease table's: a lease as it is after the event.

    Request 0 is the daemon's own: its outcome is nobody's answer, and what it did to a lease is told of the lease.
    """

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._asked: dict[int, _Asked] = {}
        self._askers: dict[int, str] = {}
        # None of one that an earlier daemon granted: its record is there to tell.
        self._granted_us: dict[int, int | None] = {}
        self._over_us: dict[int, int] = {}
        self._faulted: set[int] = set()

    def asked_by(self, request: int, peer: str) -> None:
        """Who is behind a request whose event does not tell, or tells in whose name it is."""
        self._askers[request] = peer

    def saw(self, event: Event, effects: Sequence[Effect], now_ns: int) -> Iterator[Told]:
        """What one event brought about, in order, at monotonic time `now_ns`."""
        now_us = now_ns // NS_PER_US
        if isinstance(event, SessionFaulted):
            yield from self._fault(event)
        elif isinstance(event, LeaseRestored):
            yield from self._adopt(event.kept.lease_id)
        elif isinstance(event, RequesterGone):
            self._asked.pop(event.request, None)
        elif type(event) in _OPERATIONS and isinstance(event, _Request):
            by = event.tenant if isinstance(event, _OfTenant) else THE_DAEMON
            self._asked[event.request] = _Asked(self._askers.pop(event.request, by), now_us, event)
        for effect in effects:
            if type(effect) not in _TELLING:
                continue
            match effect:
                case Denied() | SubmitReady() if effect.request:
                    yield from self._answered(effect, now_us)
                case Granted() | Renewed() | Freed() | RevokeDone() | FenceCleared() | DrainSet() if effect.request:
                    yield from self._answered(effect, now_us)
                case RefuseWork(lease_id):
                    yield from self._over(lease_id, now_us)
                case LeaseEnded(lease):
                    yield self._ended(lease, now_us)
                case SubmitFenced(lease_id=lease_id, reason=reason):
                    yield Kind.SUBMIT, self._of(lease_id) | {"what": "fenced", "reason": clean_text(reason)}
                case SubmitEnded(lease_id=lease_id, reason=reason):
                    yield Kind.SUBMIT, self._of(lease_id) | {"what": "ended", "reason": clean_text(reason)}
                case WarmEnded(card_uuid=card_uuid, reason=reason, is_fenced=True):
                    # The one thing about the pool that is anybody's: bytes that no lease can have.
                    yield Kind.POOL, {"card": card_uuid, "what": "fenced", "reason": clean_text(reason)}

    def ended_untold(self, lease: LeaseSnapshot, now_ns: int) -> Told:
        """The end of a lease under an earlier daemon, which was killed before it was recorded."""
        return self._ended(lease, (lease.ended_ns or now_ns) // NS_PER_US)

    # --- what came of it ---

    def _answered(self, effect: Outcome, now_us: int) -> Iterator[Told]:
        asked = self._asked.pop(effect.request, None)
        yield from self._outcome(effect, asked or _Asked(THE_DAEMON, now_us, None), now_us)

    def _outcome(
        self,
        effect: Outcome,
        asked: _Asked,
        now_us: int,
    ) -> Iterator[Told]:
        took_us = now_us - asked.at_us
        match effect:
            case Granted(lease=lease):
                self._granted_us[lease.lease_id] = now_us
                particulars = {"exclusivity": lease.exclusivity.name.lower(), "ttl_ms": lease.ttl_ms}
                yield Kind.GRANT, _lease(lease) | particulars | {"generation": lease.generation, "waited_us": took_us}
            case Renewed(lease=lease):
                particulars = {"generation": lease.generation, "ttl_ms": lease.ttl_ms, "by": asked.by}
                yield Kind.RENEW, _lease(lease) | particulars
            case Freed(lease=lease) if asked.by not in (lease.tenant, THE_DAEMON):
                yield Kind.OPERATOR, {"action": "free", "by": asked.by, "latency_us": took_us} | asked.told()
            case RevokeDone(outcome=outcome):
                done = {"action": "revoke", "by": asked.by, "outcome": outcome.name.lower(), "latency_us": took_us}
                yield Kind.OPERATOR, done | asked.told()
            case FenceCleared(count=count, lease_ids=lease_ids, warm_ids=warm_ids):
                done = {"action": "fence_clear", "by": asked.by, "count": count, "contexts": len(warm_ids)}
                yield Kind.OPERATOR, done | asked.told()
                for lease_id in lease_ids:
                    yield Kind.CLEAR, self._of(lease_id) | {"by": asked.by}
            case DrainSet(active_leases=active_leases):
                done = {"action": asked.operation, "by": asked.by, "leases": active_leases}
                yield Kind.OPERATOR, done | asked.told()
            case SubmitReady(lease_id=lease_id, size_bytes=size_bytes):
                yield Kind.SUBMIT, self._of(lease_id) | {"what": "begun", "by": asked.by, "submit_bytes": size_bytes}
            case Denied(denial=denial):
                said = {"reason": denial.reason.value, "message": clean_text(denial.message)}
                yield Kind.DENY, {"operation": asked.operation, "tenant": asked.by} | asked.told() | said

    def _fault(self, event: SessionFaulted) -> Iterator[Told]:
        lease = self._lookup(event.worker_id)
        if lease is not None and lease.state is LeaseState.ACTIVE and event.worker_id not in self._faulted:
            self._faulted.add(event.worker_id)
            yield Kind.FAULT, _lease(lease) | {"reason": clean_text(event.reason)}

    def _adopt(self, lease_id: int) -> Iterator[Told]:
        """A lease of an earlier daemon that goes on. Of one that does not, its end tells."""
        lease = self._lookup(lease_id)
        if lease is not None and lease.state is LeaseState.ACTIVE:
            self._granted_us[lease_id] = None
            yield Kind.ADOPT, _lease(lease) | {"generation": lease.generation, "ttl_ms": lease.ttl_ms}

    def _over(self, lease_id: int, now_us: int) -> Iterator[Told]:
        self._over_us[lease_id] = now_us
        # One that was never granted is nobody's yet: its denial and its end say all.
        if lease_id in self._granted_us:
            lease = self._lookup(lease_id)
            why = {} if lease is None else {"cause": _cause(lease), "reason": clean_text(lease.reason)}
            yield Kind.OVER, _named(lease_id, lease) | self._times(lease_id, now_us) | why

    def _ended(self, lease: LeaseSnapshot, now_us: int) -> Told:
        kind = Kind.FENCE if lease.state is LeaseState.FENCED else Kind.END
        latency_us = now_us - self._over_us.get(lease.lease_id, now_us)
        times = self._times(lease.lease_id, now_us) | {"latency_us": latency_us}
        told = _lease(lease) | times | {"cause": _cause(lease), "reason": clean_text(lease.reason)}
        for memory in (self._granted_us, self._over_us):
            memory.pop(lease.lease_id, None)
        self._faulted.discard(lease.lease_id)
        return kind, told

    def _times(self, lease_id: int, now_us: int) -> dict[str, int | None]:
        return {"granted_us": self._granted_us.get(lease_id), "over_us": self._over_us.get(lease_id, now_us)}

    def _of(self, lease_id: int) -> dict[str, Any]:
        return _named(lease_id, self._lookup(lease_id))


def _lease_of(lease_id: int) -> dict[str, Any]:
    return {"lease": lease_text(lease_id)} if lease_id else {}


def _named(lease_id: int, lease: LeaseSnapshot | None) -> dict[str, Any]:
    return {"lease": lease_text(lease_id)} if lease is None else _lease(lease)


def _lease(lease: LeaseSnapshot) -> dict[str, Any]:
    return {
        "lease": lease_text(lease.lease_id),
        "tenant": lease.tenant,
        "card": lease.card_uuid,
        "size_bytes": lease.size_bytes,
    }


def _cause(lease: LeaseSnapshot) -> str:
    return "" if lease.cause is None else lease.cause.value


def bounded(number: int) -> int:
    """A tenant's number: what JSON's readers can't hold is told as the largest that they can."""
    return min(number, (1 << 53) - 1)
