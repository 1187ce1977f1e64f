"""What of the lease table outlives its process: the shapes that a journal keeps and a new table is made from.

Times are monotonic nanoseconds (CLOCK_MONOTONIC), which all processes of one boot of the host share.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from gpulease.daemon.leases.model import Cause, Lease, LeaseSnapshot, LeaseState, LeaseTerms


class KeptLease(NamedTuple):
    """A lease whose grant may have been told, or whose bytes are fenced. A tuple: each change to a lease makes one.

    Attributes:
        charge_bytes: What it holds of its card: its size and the context's overhead when it was placed.
        state: ACTIVE, DRAINING or FENCED.
        cause: Why it ended, None while it is ACTIVE.
        fault: What its worker said when the context was lost, "" if it was not.
        deadline_ns: When it expires; None of one that is fenced and was never granted.
        ended_ns: When it was fenced.
        worker_pid: Its worker's process, 0 if none is known.
    """

    lease_id: int
    tenant: str
    card_uuid: str
    terms: LeaseTerms
    charge_bytes: int
    generation: int
    state: LeaseState
    cause: Cause | None
    reason: str
    fault: str
    created_ns: int
    deadline_ns: int | None
    ended_ns: int | None
    worker_pid: int = 0


@dataclass(frozen=True, slots=True)
class KeptWarm:
    """A context made ahead that could not be proved gone: its bytes are fenced."""

    warm_id: int
    card_uuid: str
    charge_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class KeptCard:
    """What was measured of a card while it had no leases: it can't be measured beside them.

    Attributes:
        capacity_bytes: What there was to lease, before the operator's own bound.
        overhead_bytes: What a context costs.
        unattributed_bytes: What belonged to no process.
    """

    uuid: str
    capacity_bytes: int
    overhead_bytes: int
    unattributed_bytes: int


@dataclass(frozen=True, slots=True)
class Past:
    """What an earlier table left that needs no doing.

    Attributes:
        tombstones: Leases that were torn down, oldest first.
        revoked: Marks of the ids of leases that ended by revocation (`revoked.mark_of`), ascending, all there
            ever were.
        cleared: The same of leases whose fences were cleared.
        fenced_warm: Contexts made ahead whose bytes are fenced; those of cards that are not here are passed over.
        drain_ns: When a drain of the node ends what is left; None if it is not drained.
    """

    tombstones: tuple[LeaseSnapshot, ...] = ()
    revoked: Collection[int] = ()
    cleared: Collection[int] = ()
    fenced_warm: tuple[KeptWarm, ...] = ()
    drain_ns: int | None = None


def keep(lease: Lease, worker_pid: int) -> KeptLease | None:
    """What is to be kept of a live lease; None while it is PENDING: nobody was told of it."""
    if lease.state is LeaseState.PENDING:
        return None
    # What a submit borrows of the card goes back with it, unless it is part of a fence.
    extra_bytes = 0 if lease.state is LeaseState.FENCED else lease.extra_bytes
    return KeptLease(
        lease.lease_id,
        lease.tenant,
        lease.card_uuid,
        lease.terms,
        lease.charge_bytes - extra_bytes,
        lease.generation,
        lease.state,
        lease.cause,
        lease.reason,
        lease.fault,
        lease.created_ns,
        lease.deadline_ns,
        lease.ended_ns,
        worker_pid,
    )


def revive(kept: KeptLease, max_history_entries: int, *, has_session: bool) -> Lease:
    """The lease as it was, with a story that begins anew. `has_session`: see `Lease`."""
    return Lease(
        lease_id=kept.lease_id,
        tenant=kept.tenant,
        card_uuid=kept.card_uuid,
        terms=kept.terms,
        charge_bytes=kept.charge_bytes,
        request=0,
        created_ns=kept.created_ns,
        spawn_due_ns=0,
        max_history_entries=max_history_entries,
        generation=kept.generation,
        state=kept.state,
        cause=kept.cause,
        reason=kept.reason,
        fault=kept.fault,
        deadline_ns=kept.deadline_ns,
        ended_ns=kept.ended_ns,
        is_restored=True,
        has_session=has_session,
    )
