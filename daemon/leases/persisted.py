"""The parts of the lease table that outlive its process: the journal keeps them, and a new table starts from them.

Times are monotonic nanoseconds (CLOCK_MONOTONIC), which all processes of one boot of the host share.
"""

from collections.abc import Collection
from typing import NamedTuple

from gpulease.daemon.contract.regions_page import MAX_NUMBER
from gpulease.daemon.leases.model import (
    Cause,
    Lease,
    LeaseSnapshot,
    LeaseState,
    LeaseTerms,
    MembershipDeadline,
    RegionState,
    TableRegion,
)
from gpulease.daemon.leases.park_state import ParkState
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.limits import MAX_REGIONS


class LeaseRow(NamedTuple):
    """A lease whose grant its tenant may have received, or that is fenced.

    A tuple rather than a dataclass, because each change to a lease makes one.

    Attributes:
        charge_bytes: Bytes it holds on its card: its size and its contexts' overhead when it was placed.
        state: ACTIVE, DRAINING or FENCED.
        cause: Why it ended; None while ACTIVE.
        fault: Message of the worker that lost its context; "" if none did.
        deadline_ns: Time at which it expires; None if it is fenced and was never granted.
        ended_ns: Time at which it was fenced.
        worker_pid: Process id of its worker; 0 if unknown.
        region_number: Number of the last region that was opened in it. Numbers are not reused, so that a set that names
          an earlier region can't match a later one.
        parked_ns: Time since which its session's bytes are off the card; 0 if they are on it.
        wait_ms: Longest wait of a parkable lease's session for room to return.
        is_cold: Whether its session has no worker, or one that may not have restored it completely yet.
        misfit: As in ParkState: without it, the next table would move the session without keeping its former worker.
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
    region_number: int = 0
    parked_ns: int = 0
    wait_ms: int = 0
    is_cold: bool = False
    misfit: str = ""


class RegionRow(NamedTuple):
    """A region that its lease's worker was ordered to open, until its last bytes are released.

    Attributes:
        kept_bytes: Bytes that stay in the place of a FENCED or RETURNED region.
        is_given_up: Whether its memory was not proved free in time, and its end has been reported.
    """

    region_id: int
    lease_id: int
    tenant: str
    size_bytes: int
    ttl_ms: int
    slot: int
    number: int
    address: int
    generation: int
    state: RegionState
    cause: Cause | None
    reason: str
    created_ns: int
    deadline_ns: int | None
    ended_ns: int | None
    kept_bytes: int = 0
    is_cancelled: bool = False
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class WarmRow:
    """A warm context after the proof of free memory failed: its bytes are fenced."""

    warm_id: int
    card_uuid: str
    charge_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class CardRow:
    """Measurements of a card from a time when it had no leases, because a card with leases can't be measured.

    Attributes:
        capacity_bytes: Bytes to lease, before the operator's own bound.
        overhead_bytes: Bytes that one context costs.
        unattributed_bytes: Bytes that belonged to no process.
    """

    uuid: str
    capacity_bytes: int
    overhead_bytes: int
    unattributed_bytes: int


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """Records of an earlier table that the new one adopts without further action.

    Attributes:
        tombstones: Leases that were torn down, oldest first.
        revoked: Marks (`table_state.mark_of`) of all leases that ever ended by revocation, ascending.
        cleared: Marks of all leases with a cleared fence, ascending.
        fenced_warm: Warm contexts with fenced bytes. Contexts on cards that are missing now are skipped.
        drain_ns: Time at which a drain ends the remaining leases; None if the node is not drained.
        epochs: Names and the highest epoch that each had here (`epochs.HighestEpochs`).
        card_drains: Each drained card by UUID, with the time at which its drain ends its leases.
    """

    tombstones: tuple[LeaseSnapshot, ...] = ()
    revoked: Collection[int] = ()
    cleared: Collection[int] = ()
    fenced_warm: tuple[WarmRow, ...] = ()
    drain_ns: int | None = None
    epochs: tuple[tuple[str, int], ...] = ()
    card_drains: tuple[tuple[str, int], ...] = ()


def lease_row(lease: Lease, worker_pid: int) -> LeaseRow | None:
    """Return the row of a live lease; None while PENDING, because no grant has been reported yet."""
    # A restarted daemon has no record of a pending lease: its client loses the connection, and acquires again.
    if lease.state is LeaseState.PENDING:
        return None
    # A context that the card lends for a submit ends with the submit, unless it is part of a fence.
    extra_bytes = 0 if lease.state is LeaseState.FENCED else lease.extra_bytes
    # Record the full charge of a parked lease, because the next table charges it in full until its worker's state is
    # proved. That also applies to one that ends: the worker that the next table finds may be one that its session has
    # left. A fence holds only what could not be proved free.
    off_bytes = 0 if lease.park is None or lease.state is LeaseState.FENCED else lease.park.off_bytes
    # Pass the arguments by position, which is fast: each change to a lease makes a row.
    return LeaseRow(
        lease.lease_id,
        lease.tenant,
        lease.card_uuid if lease.park is None else lease.park.recorded_card(lease.card_uuid),
        lease.terms,
        lease.charge_bytes - extra_bytes + off_bytes,
        lease.generation,
        lease.state,
        lease.cause,
        lease.reason,
        lease.fault,
        lease.created_ns,
        lease.deadline_ns,
        lease.ended_ns,
        worker_pid,
        lease.region_number,
        0 if lease.park is None else lease.park.parked_ns,
        0 if lease.park is None else lease.wait_ms,
        lease.park is not None and lease.park.is_cold,
        "" if lease.park is None else lease.park.misfit,
    )


def region_row(region: TableRegion) -> RegionRow:
    """Return the row of a region. An OPENING one has a row too, because its worker may have mapped it."""
    # Pass the arguments by position, as in `lease_row`: each change of the region makes a row.
    return RegionRow(
        region.region_id,
        region.lease_id,
        region.tenant,
        region.size_bytes,
        region.ttl_ms,
        region.slot,
        region.number,
        region.address,
        region.generation,
        region.state,
        region.cause,
        region.reason,
        region.created_ns,
        region.deadline_ns,
        region.ended_ns,
        region.kept_bytes,
        region.is_cancelled,
        region.is_given_up,
    )


def revive_region(row: RegionRow, lease: Lease) -> TableRegion:
    """Return the region of a record, with an empty history."""
    return TableRegion(
        region_id=row.region_id,
        lease_id=row.lease_id,
        tenant=row.tenant,
        card_uuid=lease.card_uuid,
        exclusivity=lease.terms.exclusivity,
        size_bytes=row.size_bytes,
        ttl_ms=row.ttl_ms,
        slot=row.slot,
        number=row.number,
        # The earlier daemon has answered its request, or the client's connection ended with that daemon.
        request=0,
        created_ns=row.created_ns,
        open_due_ns=0,
        max_story_entries=lease.max_story_entries,
        # The generation and the deadline continue; timers are armed again by `on_restored`.
        address=row.address,
        generation=row.generation,
        state=row.state,
        cause=row.cause,
        reason=row.reason,
        deadline_ns=row.deadline_ns,
        ended_ns=row.ended_ns,
        kept_bytes=row.kept_bytes,
        is_cancelled=row.is_cancelled,
        is_given_up=row.is_given_up,
        is_restored=True,
    )


def revive(
    row: LeaseRow, max_story_entries: int, *, has_session: bool, membership_deadline: MembershipDeadline | None = None
) -> Lease:
    """Return the lease of a record, with an empty history."""
    return Lease(
        lease_id=row.lease_id,
        tenant=row.tenant,
        card_uuid=row.card_uuid,
        terms=row.terms,
        charge_bytes=row.charge_bytes,
        request=0,
        created_ns=row.created_ns,
        spawn_due_ns=0,
        max_story_entries=max_story_entries,
        generation=row.generation,
        state=row.state,
        cause=row.cause,
        reason=row.reason,
        fault=row.fault,
        deadline_ns=row.deadline_ns,
        ended_ns=row.ended_ns,
        # Restored leases may exceed bounds that were lowered, and are never recycled.
        is_restored=True,
        membership_deadline=membership_deadline,
        has_session=has_session,
        # The earlier daemon may have ordered regions and lost their rows, and the session may have used their numbers:
        # skip these.
        region_number=min(MAX_NUMBER, row.region_number + MAX_REGIONS),
        park=ParkState(parked_ns=row.parked_ns, misfit=row.misfit) if row.terms.is_parkable else None,
        wait_ms=row.wait_ms,
    )
