"""Reports on leases, cards and drains: the answers to LEASE_QUERY, LEASE_LIST_ACTIVE, GET_INVENTORY and DRAIN."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from gpulease.daemon.contract.control_page import BrokerPage, Counter
from gpulease.daemon.leases.devices import CardSnapshot
from gpulease.daemon.leases.events import DrainSet
from gpulease.daemon.leases.model import LeaseSnapshot, SubmitSnapshot
from gpulease.daemon.leases.park_state import ParkSnapshot
from gpulease.daemon.leases.parking import Parking, ParkPace
from gpulease.daemon.leases.persisted import RegionRow
from gpulease.daemon.leases.quotas import LeasePhase, ms_until, remaining_ms
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.leases.time_account import LeaseTimeUse
from gpulease.daemon.workers.registry import Workers
from gpulease.protocol.messages import DrainStatus, Inventory, InventoryEntry
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE, InventoryFlag
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S

MAX_LISTED_REGIONS: Final = 1024
"""Maximum number of regions that a list of leases describes; each lease always names its own regions. Stops tenants
that fill their leases with small regions from delaying the broker's loop: 4,096 regions took half a second."""


def full_report(
    lease: LeaseSnapshot, table: LeaseTable, workers: Workers, use: LeaseTimeUse | None = None
) -> dict[str, Any]:
    """Report one lease with its connections and submits.

    `use`: how much of its card's time the lease has used, if that is known.
    """
    # Use the same moment for all times in the report.
    lease_id, now_ns = lease.lease_id, time.monotonic_ns()
    report = lease_report(
        lease, workers.page(lease_id), now_ns, table.phase(lease_id, now_ns), table.drain_ns_of(lease.card_uuid)
    )
    report |= orphan_report(table.orphan_ms(lease_id), table.orphan_due_ns(lease_id), now_ns)
    report |= {} if use is None else use_report(use)
    # A region reports its lease and its address there; a lease reports its regions.
    if (region := table.regions.get(lease_id)) is not None:
        report |= region_report(region)
    else:
        report["regions"] = [f"{open_region.lease_id:032x}" for open_region in table.regions.of(lease_id)]
        report["region_bytes"] = table.regions.held_bytes(lease_id)
        report["park"] = park_report(table.parking.of(lease_id), now_ns)
        report["earlier_version"] = workers.earlier_version(lease_id)
    submit = table.submits.of(lease_id)
    # A submit has a worker and a page of its own.
    page = None if submit is None else workers.page(submit.submit_id)
    return report | submit_report(submit, table.submits.last_of(lease_id), page)


def lease_report(
    lease: LeaseSnapshot,
    page: BrokerPage | None,
    now_ns: int,
    standing: LeasePhase | None = None,
    drain_ns: int | None = None,
) -> dict[str, Any]:
    """Report one lease. The counters are what the worker reports on its page."""
    # Leave out members that this lease does not have.
    parent = {"parent": f"{lease.parent_id:032x}"} if lease.parent_id else {}
    claim: dict[str, Any] = {"name": lease.name, "epoch": lease.epoch} if lease.name else {}
    report: dict[str, Any] = (
        parent
        | claim
        | {
            "lease_id": f"{lease.lease_id:032x}",
            "tenant": lease.tenant,
            "state": lease.state.value,
            "cause": None if lease.cause is None else lease.cause.value,
            "reason": lease.reason or lease.fault,
            "fault": lease.fault,
            "generation": lease.generation,
            "size_bytes": lease.size_bytes,
            "card_uuid": lease.card_uuid,
            "exclusivity": lease.exclusivity.name.lower(),
            "weight": lease.weight,
            "latency": lease.latency,
            "remaining_ms": remaining_ms(lease, now_ns, drain_ns) if lease.ended_ns is None else 0,
            "ttl_ms": lease.ttl_ms,
            "age_ms": max(0, now_ns - lease.created_ns) // NS_PER_MS,
        }
    )
    if standing is not None:
        report["phase"] = standing.phase.name.lower()
    if lease.ended_ns is not None and lease.deadline_ns is not None:
        report["ended_after_deadline_us"] = (lease.ended_ns - lease.deadline_ns) // 1000
    # The worker itself reports these counters, so they are only information and never a basis for decisions.
    if page is not None:
        report |= {
            "allocated_bytes": page.counter(Counter.ALLOCATED_BYTES),
            "most_allocated_bytes": page.counter(Counter.MOST_ALLOCATED_BYTES),
            "launches": page.counter(Counter.LAUNCHES),
            "syncs": page.counter(Counter.SYNCS),
            "operations": page.counter(Counter.OPS),
            "failed_operations": page.counter(Counter.FAILED_OPS),
            "sync_errors": page.counter(Counter.SYNC_ERRORS),
            "copies": page.counter(Counter.COPIES),
            "copied_bytes": page.counter(Counter.COPIED_BYTES),
            "kept_memory_bytes": page.counter(Counter.KEPT_BYTES),
            "unheld_bytes": page.counter(Counter.UNHELD_BYTES),
            "connections": [connection._asdict() for connection in page.connections()],
        }
    return report


def use_report(use: LeaseTimeUse) -> dict[str, Any]:
    """Report how much of its card's time a lease has used."""
    return {
        "gpu_seconds": round(use.gpu_ns / NS_PER_S, 6),
        "busy_seconds": round(use.busy_ns / NS_PER_S, 6),
        "held_back_seconds": round(use.held_ns / NS_PER_S, 6),
    }


def region_report(region: RegionRow) -> dict[str, Any]:
    """Report a region's lease and address in its session."""
    return {
        "region_state": region.state.value,
        "address": region.address,
        "slot": region.slot,
        "number": region.number,
        "is_cancelled": region.is_cancelled,
        "kept_bytes": region.kept_bytes,
    }


def orphan_report(orphan_ms: int, due_ns: int | None, now_ns: int) -> dict[str, Any]:
    """Report how long a lease may be without a connection, and how much of that time is left (None while connected)."""
    left_ms = None if due_ns is None else ms_until(due_ns, now_ns)
    return {"orphan_ms": orphan_ms, "orphaned_in_ms": left_ms}


def park_report(park: ParkSnapshot | None, now_ns: int) -> dict[str, Any] | None:
    """Report where a parkable lease's session is; None for a lease that is not parkable."""
    if park is None:
        return None
    return {
        "phase": park.phase.value,
        "cause": None if park.cause is None else park.cause.value,
        "idle_ms": park.idle_ms,
        "parked_for_ms": (now_ns - park.parked_ns) // NS_PER_MS if park.parked_ns else None,
        "moved_bytes": park.moved_bytes,
        "off_bytes": park.off_bytes,
        "host_bytes": park.host_bytes,
        "is_awaited": park.is_awaited,
        "parks": park.parks,
        "depth": park.depth.value,
        "stays_here": park.stays_here,
        "warm_only": park.warm_only,
        "is_moving": park.is_moving,
        "last_move": None if park.last_move is None else {"is_direct": not park.last_move, "reason": park.last_move},
    }


def submit_report(
    submit: SubmitSnapshot | None, last: SubmitSnapshot | None, page: BrokerPage | None
) -> dict[str, Any]:
    """Report a lease's submits: the current one, and the last one with bytes that are proved free."""
    report: dict[str, Any] = {}
    if submit is not None:
        launches = 0 if page is None else page.counter(Counter.LAUNCHES)
        report["submit"] = _submit(submit) | {"state": submit.state.value, "launches": launches}
    if last is not None:
        report["last_submit"] = _submit(last)
    return report


def inventory(
    cards: Sequence[CardSnapshot],
    driver: str,
    sandbox: list[dict[str, Any]],
    parking: Parking,
    drain_left_ms: int | None = None,
) -> Inventory:
    """Report all cards, in the public 36-byte form and as maps, with the sandbox of their workers.

    A drained node or card can grant nothing, so it reports no available bytes.
    """
    if drain_left_ms is not None:
        cards = [replace(card, available_bytes=0) for card in cards]
    host_bytes, most_host_bytes = parking.host_bytes()
    of_node = {"drain_left_ms": drain_left_ms, "sandbox": sandbox}
    of_node |= {"park_host_bytes": host_bytes, "park_host_limit_bytes": most_host_bytes}
    now_ns = time.monotonic_ns()
    paces = parking.paces(now_ns)
    details = [_details(card, driver, now_ns) | _pace(paces[card.uuid]) | of_node for card in cards]
    return Inventory(tuple(_entry(card) for card in cards), details)


def drain_left_ms(table: LeaseTable) -> int | None:
    """Return the time until the node's drain ends the remaining leases, in ms, rounded up; None without a drain."""
    return None if table.drain_ns is None else ms_until(table.drain_ns, time.monotonic_ns())


def drain_status(outcome: DrainSet) -> DrainStatus:
    """Return the reply to DRAIN, DRAIN_CANCEL and CARD_DRAIN."""
    deadline_ns = outcome.deadline_ns
    left_ms = None if deadline_ns is None else ms_until(deadline_ns, time.monotonic_ns())
    return DrainStatus(left_ms, outcome.active_leases)


def _submit(submit: SubmitSnapshot) -> dict[str, Any]:
    return {"number": submit.number, "reason": submit.reason, "timed_out": submit.is_timed_out}


def _entry(card: CardSnapshot) -> InventoryEntry:
    # Set the flag for any fenced byte, because an operator has to act.
    flags = InventoryFlag.FENCED if card.fenced_bytes else InventoryFlag(0)
    return InventoryEntry(
        _uuid_number(card.uuid), GPU_RESOURCE_TYPE, int(flags), card.capacity_bytes, card.available_bytes
    )


def _pace(pace: ParkPace) -> dict[str, Any]:
    return {
        "park_wait_ms": -(-pace.need_wait_ns // NS_PER_MS),
        "tenant_park_wait_ms": -(-pace.tenant_wait_ns // NS_PER_MS),
    }


def _uuid_number(card_uuid: str) -> int:
    """Return the 128 bits of `GPU-xxxxxxxx-...`, or of a MIG device's `MIG-xxxxxxxx-...`."""
    return uuid.UUID(card_uuid.partition("-")[2]).int


def _details(card: CardSnapshot, driver: str, now_ns: int) -> dict[str, Any]:
    return {
        "uuid": card.uuid,
        "index": card.index,
        "name": card.name,
        "driver": driver,
        "capacity_bytes": card.capacity_bytes,
        "held_bytes": card.held_bytes,
        "available_bytes": card.available_bytes,
        "fenced_bytes": card.fenced_bytes,
        "leases": card.leases,
        "exclusive": card.is_exclusive,
        "warm_contexts": card.warm_contexts,
        "warm_wanted": card.warm_wanted,
        "recycled_contexts": card.recycled_contexts,
        "warm_bytes": card.warm_bytes,
        "parked_bytes": card.parked_bytes,
        "unowned_bytes": card.unowned_bytes,
        "outside_bytes": card.outside_bytes,
        "card_drain_left_ms": None if card.drain_ns is None else ms_until(card.drain_ns, now_ns),
    }
