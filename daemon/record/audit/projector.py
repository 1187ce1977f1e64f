"""Turns facts of a lease's history into records of the audit log: kinds and particulars. No I/O, no state."""

from collections.abc import Callable
from typing import Any, Final

from gpulease.daemon.leases import events
from gpulease.daemon.leases.model import LeaseSnapshot, SubmitRequested
from gpulease.daemon.leases.time_account import LeaseTimeUse
from gpulease.daemon.record.audit.records import MAX_INTEGER, RecordKind, clean_text
from gpulease.daemon.record.lease_facts import REQUESTS, THE_DAEMON, Fact, FactKind, ReceivedRequest
from gpulease.protocol.lease_ids import lease_text
from gpulease.protocol.opcodes import Exclusivity
from gpulease.protocol.time_units import NS_PER_US

Particulars = dict[str, Any]
Entry = tuple[RecordKind, Particulars]


EXCLUSIVITY_NAMES: Final = {one: one.name.lower() for one in Exclusivity}
"""Names in records and log lines. The table saves time, because an enum computes `name` at each use."""


def entry_of(fact: Fact) -> Entry | None:
    """Return the kind and the particulars of a fact's record; None if the audit log has no record for it.

    The outcome of request 0, which is the daemon's own, has no record. The lease's other records describe it.
    """
    row = fact.kind.row
    if row.audit is None or (row.is_answer and not fact.source.request):
        return None
    particulars = _PARTICULARS[fact.kind](fact)
    return None if particulars is None else (row.audit, particulars)


def bounded(number: int) -> int:
    """Return a tenant's number, limited to the largest integer of a record."""
    return min(number, MAX_INTEGER)


# --- outcomes ---


def _grant(fact: Fact) -> Particulars:
    lease = fact.source.lease
    particulars = _lease(lease)
    particulars["exclusivity"], particulars["ttl_ms"] = EXCLUSIVITY_NAMES[lease.exclusivity], lease.ttl_ms
    particulars["generation"], particulars["waited_us"] = lease.generation, _waited_us(fact)
    return particulars


def _renew(fact: Fact) -> Particulars:
    lease = fact.source.lease
    particulars = _lease(lease)
    particulars["generation"], particulars["ttl_ms"] = lease.generation, lease.ttl_ms
    particulars["by"] = _request_of(fact).by
    return particulars


def _resize(fact: Fact) -> Particulars:
    return _lease(fact.source.lease) | {"by": _request_of(fact).by}


def _park(fact: Fact) -> Particulars:
    parked = fact.source
    details = {"why": parked.cause.value, "moved_bytes": bounded(parked.moved_bytes)}
    details["ahead_bytes"] = bounded(parked.ahead_bytes)
    return _lease(parked.lease) | details | {"took_us": parked.took_ns // NS_PER_US}


def _return(fact: Fact) -> Particulars:
    returned = fact.source
    times = {"parked_us": returned.parked_for_ns // NS_PER_US, "took_us": returned.took_ns // NS_PER_US}
    return _lease(returned.lease) | {"moved_bytes": bounded(returned.moved_bytes)} | times


def _left(fact: Fact) -> Particulars:
    event = fact.source
    return _lease(event.lease) | {"image_bytes": bounded(event.image_bytes), "took_us": event.took_ns // NS_PER_US}


def _moved(fact: Fact) -> Particulars:
    moved = fact.source
    way = {"way": "host" if moved.why_through_host else "direct", "through_host": clean_text(moved.why_through_host)}
    details = {"from_card": moved.from_uuid} | way | {"moved_bytes": bounded(moved.moved_bytes)}
    # The GPU time so far was used on the card that the lease has left.
    return _lease(moved.lease) | details | {"took_us": moved.took_ns // NS_PER_US} | _use(fact.use)


def _upgraded(fact: Fact) -> Particulars:
    replaced = fact.source
    details = {"from_version": clean_text(replaced.from_version), "moved_bytes": bounded(replaced.moved_bytes)}
    return _lease(replaced.lease) | details | {"took_us": replaced.took_ns // NS_PER_US}


def _move_done(fact: Fact) -> Particulars | None:
    """Record only a move that someone other than the tenant requested.

    The record of the move itself contains everything else.
    """
    request = _request_of(fact)
    if request.by in (fact.source.lease.tenant, THE_DAEMON):
        return None
    return {"action": "move", "by": request.by, "latency_us": _waited_us(fact)} | _request(request)


def _park_done(fact: Fact) -> Particulars | None:
    """Record only a park that someone other than the tenant requested.

    The record of the park itself contains everything else.
    """
    request = _request_of(fact)
    if request.by in (fact.source.lease.tenant, THE_DAEMON):
        return None
    return {"action": "park", "by": request.by, "latency_us": _waited_us(fact)} | _request(request)


def _free(fact: Fact) -> Particulars | None:
    """Record only a free by someone other than the tenant. The lease's end records everything else."""
    request = _request_of(fact)
    # A tenant that frees its own lease ends it normally, and END records that.
    if request.by in (fact.source.lease.tenant, THE_DAEMON):
        return None
    return {"action": "free", "by": request.by, "latency_us": _waited_us(fact)} | _request(request)


def _revoke(fact: Fact) -> Particulars:
    request, outcome = _request_of(fact), fact.source.outcome.name.lower()
    done = {"action": "revoke", "by": request.by, "outcome": outcome, "latency_us": _waited_us(fact)}
    return done | _request(request)


def _clear_fences(fact: Fact) -> Particulars:
    request, cleared = _request_of(fact), fact.source
    done = {"action": "fence_clear", "by": request.by, "count": cleared.count, "contexts": len(cleared.warm_ids)}
    return done | _request(request)


def _clear(fact: Fact) -> Particulars:
    return _lease_of(fact) | {"by": _request_of(fact).by}


def _drain(fact: Fact) -> Particulars:
    request = _request_of(fact)
    done = {"action": _operation(request), "by": request.by, "leases": fact.source.active_leases}
    return done | _request(request)


def _deny(fact: Fact) -> Particulars:
    request, denial = _request_of(fact), fact.source.denial
    # The message may contain a tenant's or a driver's words, so clean it.
    details = {"reason": denial.reason.value, "message": clean_text(denial.message)}
    return {"operation": _operation(request), "tenant": request.by} | _request(request) | details


def _begin_submit(fact: Fact) -> Particulars:
    particulars = {"what": "begun", "by": _request_of(fact).by, "submit_bytes": fact.source.size_bytes}
    return _lease_of(fact) | particulars


# --- events of leases ---


def _fault(fact: Fact) -> Particulars:
    return _lease_of(fact) | {"reason": clean_text(fact.source.reason)}


def _adopt(fact: Fact) -> Particulars | None:
    lease = fact.lease
    return lease and _lease(lease) | {"generation": lease.generation, "ttl_ms": lease.ttl_ms}


def _over(fact: Fact) -> Particulars | None:
    lease = fact.lease
    return lease and _lease(lease) | _times(fact) | _why(lease)


def _end(fact: Fact) -> Particulars | None:
    lease, over_ns = fact.lease, fact.times.over_ns
    # Round both times down to microseconds, so that the difference agrees with the record's other times.
    latency_us = 0 if over_ns is None else fact.now_ns // NS_PER_US - over_ns // NS_PER_US
    return lease and _lease(lease) | _times(fact) | {"latency_us": latency_us} | _use(fact.use) | _why(lease)


def _end_submit(fact: Fact) -> Particulars:
    action = "fenced" if fact.kind is FactKind.SUBMIT_FENCED else "ended"
    return _lease_of(fact) | {"what": action, "reason": clean_text(fact.source.reason)}


def _fence_warm(fact: Fact) -> Particulars:
    # Auditors need only one fact about the warm pool: that bytes are fenced.
    return {"card": fact.card, "what": "fenced", "reason": clean_text(fact.source.reason)}


_PARTICULARS: Final[dict[FactKind, Callable[[Fact], Particulars | None]]] = {
    FactKind.GRANTED: _grant,
    FactKind.RENEWED: _renew,
    FactKind.RESIZED: _resize,
    FactKind.FREED: _free,
    FactKind.PARKED: _park,
    FactKind.UNPARKED: _return,
    FactKind.PARK_DONE: _park_done,
    FactKind.LEFT: _left,
    FactKind.MOVED: _moved,
    FactKind.UPGRADED: _upgraded,
    FactKind.MOVE_DONE: _move_done,
    FactKind.REVOKED: _revoke,
    FactKind.FENCES_CLEARED: _clear_fences,
    FactKind.UNFENCED: _clear,
    FactKind.DRAIN_SET: _drain,
    FactKind.DENIED: _deny,
    FactKind.FAULTED: _fault,
    FactKind.ADOPTED: _adopt,
    FactKind.ENDING: _over,
    FactKind.ENDED: _end,
    FactKind.FENCED: _end,
    FactKind.SUBMIT_READY: _begin_submit,
    FactKind.SUBMIT_ENDED: _end_submit,
    FactKind.SUBMIT_FENCED: _end_submit,
    FactKind.WARM_FENCED: _fence_warm,
}
"""For each kind of fact that is recorded, the function that returns its particulars. If it returns None, the fact gets
no record.
"""

if _PARTICULARS.keys() != {kind for kind in FactKind if kind.row.audit is not None}:
    raise TypeError("exactly the facts with an audit kind in their row must have particulars")


# --- particulars ---


def _request(request: ReceivedRequest) -> Particulars:
    """Return the lease that a request concerns, and the request's details."""
    # Clean and bound a tenant's texts and numbers before they are recorded.
    match request.event:
        case events.AcquireRequested(terms=terms, selector=selector):
            card = {} if selector is None else {"card": clean_text(selector)}
            name = {"name": terms.name} if terms.name else {}
            return {"size_bytes": bounded(terms.size_bytes), "ttl_ms": bounded(terms.ttl_ms)} | card | name
        case events.RenewRequested(lease_id=lease_id, ttl_ms=ttl_ms):
            return _lease_named(lease_id) | {"ttl_ms": bounded(ttl_ms)}
        case SubmitRequested(lease_id=lease_id, timeout_ms=timeout_ms):
            return _lease_named(lease_id) | {"timeout_ms": bounded(timeout_ms)}
        case events.RegionRequested(lease_id=lease_id, size_bytes=size_bytes, ttl_ms=ttl_ms):
            return _lease_named(lease_id) | {"size_bytes": bounded(size_bytes), "ttl_ms": bounded(ttl_ms)}
        case events.ResizeRequested(lease_id=lease_id, size_bytes=size_bytes):
            return _lease_named(lease_id) | {"size_bytes": bounded(size_bytes)}
        case events.ParkRequested(lease_id=lease_id):
            return _lease_named(lease_id)
        case events.MoveRequested(lease_id=lease_id, card=card):
            return _lease_named(lease_id) | ({} if card is None else {"card": clean_text(card)})
        case events.RegionCancelRequested(region_id=region_id):
            return _lease_named(region_id)
        case events.FreeRequested(lease_id=lease_id):
            return _lease_named(lease_id)
        case events.RevokeRequested(lease_id=lease_id, reason=reason):
            return _lease_named(lease_id) | {"reason": clean_text(reason)}
        case events.FenceClearRequested(card_uuid=card_uuid):
            return {"card": clean_text(card_uuid or "")}
        case events.DrainRequested(within_ms=within_ms, card=card):
            return {"within_ms": within_ms} | _card_named(card)
        case events.DrainCancelled(card=card):
            return _card_named(card)
        case None:
            return {}


def _card_named(card: str | None) -> Particulars:
    return {} if card is None else {"card": clean_text(card)}


def _request_of(fact: Fact) -> ReceivedRequest:
    return fact.request or ReceivedRequest(THE_DAEMON, fact.now_ns, None)


def _operation(tenant_request: ReceivedRequest) -> str:
    request = REQUESTS.get(type(tenant_request.event))
    return "" if request is None else request.operation


def _waited_us(fact: Fact) -> int:
    return fact.now_ns // NS_PER_US - _request_of(fact).at_ns // NS_PER_US


def _lease_named(lease_id: int) -> Particulars:
    return {"lease": lease_text(lease_id)} if lease_id else {}


def _lease_of(fact: Fact) -> Particulars:
    return {"lease": lease_text(fact.lease_id)} if fact.lease is None else _lease(fact.lease)


def _lease(lease: LeaseSnapshot) -> Particulars:
    """Return the particulars that identify a record's lease, in a new dict, to which the caller may add."""
    particulars: Particulars = {
        "lease": lease_text(lease.lease_id),
        "tenant": lease.tenant,
        "card": lease.card_uuid,
        "size_bytes": lease.size_bytes,
    }
    if lease.parent_id:
        particulars["parent"] = lease_text(lease.parent_id)
    if lease.name:
        particulars["name"], particulars["epoch"] = lease.name, lease.epoch
    return particulars


def use_entry(lease: LeaseSnapshot, use: LeaseTimeUse) -> Entry:
    """Return the record of the card's time that a live lease has used so far."""
    return RecordKind.USE, _lease(lease) | _use(use)


def _use(use: LeaseTimeUse | None) -> Particulars:
    if use is None:
        return {}
    return {
        "gpu_us": int(use.gpu_ns) // NS_PER_US,
        "busy_us": use.busy_ns // NS_PER_US,
        "held_back_us": use.held_ns // NS_PER_US,
    }


def _times(fact: Fact) -> Particulars:
    granted_ns, over_ns = fact.times.granted_ns, fact.times.over_ns
    return {
        # None for a lease of an earlier daemon. Its grant record has the time.
        "granted_us": None if granted_ns is None else granted_ns // NS_PER_US,
        "over_us": (fact.now_ns if over_ns is None else over_ns) // NS_PER_US,
    }


def _why(lease: LeaseSnapshot) -> Particulars:
    return {"cause": "" if lease.cause is None else lease.cause.value, "reason": clean_text(lease.reason)}
