"""Converts the broker's reports to the page's JSON, with tenants' names or with pseudonyms.

Any local user may open the page. Without the operator's token, the page shows a slice's size, age and remaining time,
but not its tenant, its id or texts about it. A tenant has the same pseudonym as long as the broker runs, and no other
process can compute it.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.time_units import MS_PER_S

PSEUDONYM_CHARS: Final = 8
"""Hexadecimal digits of a pseudonym. With a thousand tenants, two of them have the same pseudonym in about one of 8,600
runs of the daemon.
"""

KEY_CHARS: Final = 16

OF_CARD: Final = (
    "uuid",
    "index",
    "name",
    "driver",
    "capacity_bytes",
    "held_bytes",
    "available_bytes",
    "fenced_bytes",
    "exclusive",
    "warm_contexts",
    "warm_wanted",
    "warm_bytes",
)
"""The keys of a card's map that the page shows. The protocol shows them to everybody."""

PARKING_OF_CARD: Final = (
    "parked_bytes",
    "park_host_bytes",
    "park_host_limit_bytes",
    "park_wait_ms",
    "tenant_park_wait_ms",
)
"""Additional keys: the bytes of the card that parked leases have released, the host memory that they use and may use,
and how long the card's next park must wait. All are 0 without parking.
"""

Report = Mapping[str, Any]


class Pseudonyms:
    """Stand-ins for tenants' names and lease ids, for readers without the operator's token."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def of_tenant(self, tenant: str) -> str:
        return f"tenant {self._digest('tenant', tenant)[:PSEUDONYM_CHARS]}"

    def of_lease(self, lease_id: str) -> str:
        """Return the key by which a page recognises a lease."""
        return self._digest("lease", lease_id)[:KEY_CHARS]

    def _digest(self, kind: str, text: str) -> str:
        # Without the key, no reader can compute the pseudonym of a guessed name. The kind gives a tenant and a lease
        # with the same text different pseudonyms.
        return hmac.new(self._secret, f"{kind}:{text}".encode(errors="replace"), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Changed:
    """The subject of a change.

    Attributes:
        tenant: The tenant of the lease or region.
        card_uuid: The card.
        size_bytes: The size of the lease or region when the broker last reported it.
        is_region: Whether it is a region, not a lease.
    """

    tenant: str
    card_uuid: str
    size_bytes: int
    is_region: bool


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """A change of a lease or region to another phase; `about` is None until the feed has the lease's report."""

    number: int
    at_s: float
    lease_id: str
    phase: str
    cause: str
    reason: str
    about: Changed | None = None


@dataclass(frozen=True, slots=True)
class FleetNow:
    """The node in its fleet at one moment. `left_s`: Seconds to the membership deadline; None if not joined."""

    node: str
    left_s: float | None
    fenced: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The broker's reports at one moment.

    Attributes:
        at_s: The moment, by a monotonic clock.
        node: The host's name.
        agent: The broker's name and version, from its HELLO.
        cards: The maps of GET_INVENTORY.
        leases: The maps of LEASE_LIST_ACTIVE.
        rates: Launches per second by lease id, for leases that are in two consecutive snapshots.
        history: Launches per second of all leases on a card, by the card's UUID, one figure per snapshot; None for a
          gap.
        changes: The leases' changes, the newest last.
        fleet: The node in its fleet; None if it belongs to none.
    """

    at_s: float
    node: str
    agent: str
    cards: Sequence[Report]
    leases: Sequence[Report]
    rates: Mapping[str, float]
    history: Mapping[str, Sequence[float | None]]
    changes: Sequence[LeaseChange]
    fleet: FleetNow | None = None


def view_of(snapshot: Snapshot, pseudonyms: Pseudonyms, now_s: float, *, is_named: bool) -> dict[str, Any]:
    """Return the state as the page's JSON. Times are seconds relative to `now_s`, which is by a monotonic clock."""
    # Reports are as old as the snapshot, so correct every time in them by its age.
    age_s = max(0.0, now_s - snapshot.at_s)
    slices: dict[str, list[dict[str, Any]]] = {}
    regions: dict[str, list[dict[str, Any]]] = {}
    # Group leases by card, and regions by lease; a region may come before its lease.
    for lease in snapshot.leases:
        slice_view = _slice(lease, snapshot.rates, pseudonyms, age_s, is_named=is_named)
        if (parent := lease.get("parent")) is not None:
            # A region's bytes are part of its lease's.
            regions.setdefault(parent, []).append(slice_view | {"is_region": True})
            continue
        slice_view["regions"] = regions.setdefault(lease["lease_id"], [])
        slices.setdefault(lease["card_uuid"], []).append(slice_view)
    left_ms = next((card.get("drain_left_ms") for card in snapshot.cards), None)
    return {
        "host": snapshot.node,
        "version": snapshot.agent,
        "named": is_named,
        "age_s": _rounded(age_s),
        "drain_left_s": None if left_ms is None else _left_s(left_ms, age_s),
        "cards": [_card(card, snapshot.history, slices.get(card["uuid"], []), age_s) for card in snapshot.cards],
        "events": [_event(change, pseudonyms, now_s, is_named=is_named) for change in reversed(snapshot.changes)],
        "fleet": _fleet(snapshot, age_s, is_named=is_named),
    }


def _fleet(snapshot: Snapshot, age_s: float, *, is_named: bool) -> dict[str, Any] | None:
    """Return the node's state in its fleet and the number of names that it serves; for an operator, the names too."""
    if (fleet := snapshot.fleet) is None:
        return None
    # A fenced lease keeps its name, but no longer serves it.
    served = [lease for lease in snapshot.leases if "name" in lease and lease["state"] != "fenced"]
    left_s = None if fleet.left_s is None else _rounded(max(0.0, fleet.left_s - age_s))
    fields: dict[str, Any] = {
        "node": fleet.node,
        "horizon_left_s": left_s,
        "fenced": fleet.fenced,
        "served": len(served),
    }
    # A name may reveal the tenant, so only an operator sees it.
    if is_named:
        fields["names"] = [{"name": lease["name"], "epoch": lease["epoch"]} for lease in served]
    return fields


def _card(
    card: Report, history: Mapping[str, Sequence[float | None]], slices: list[dict[str, Any]], age_s: float
) -> dict[str, Any]:
    rates = [None if rate is None else round(rate, 1) for rate in history.get(card["uuid"], ())]
    parking = {name: card.get(name, 0) for name in PARKING_OF_CARD}
    left_ms = card.get("card_drain_left_ms")
    drain = {"drain_left_s": None if left_ms is None else _left_s(left_ms, age_s)}
    return {name: card[name] for name in OF_CARD} | parking | drain | {"launches_per_s": rates, "slices": slices}


def _slice(
    lease: Report, rates: Mapping[str, float], pseudonyms: Pseudonyms, age_s: float, *, is_named: bool
) -> dict[str, Any]:
    fields = {
        "key": pseudonyms.of_lease(lease["lease_id"]),
        "tenant": lease["tenant"] if is_named else pseudonyms.of_tenant(lease["tenant"]),
        "state": lease["state"],
        "phase": lease.get("phase"),
        "cause": lease["cause"],
        "size_bytes": lease["size_bytes"],
        "allocated_bytes": _allocated(lease),
        "exclusivity": lease["exclusivity"],
        "age_s": _rounded(lease["age_ms"] / MS_PER_S + age_s),
        "ttl_s": lease["ttl_ms"] / MS_PER_S,
        # Only an active lease has time left to count.
        "remaining_s": _left_s(lease["remaining_ms"], age_s) if lease["state"] == "active" else None,
        # None while a client is connected to the lease, or if the lease needs no connection.
        "orphaned_in_s": None if (left_ms := lease.get("orphaned_in_ms")) is None else _left_s(left_ms, age_s),
    }
    # For a parkable lease, show where its session is, and since when it has been off its card.
    if (park := lease.get("park")) is not None:
        parked_ms = park["parked_for_ms"]
        fields["park"] = park["phase"]
        fields["parked_for_s"] = None if parked_ms is None else _rounded(parked_ms / MS_PER_S + age_s)
        # Only an operator sees the reason, because it describes the tenant's session.
        warm_only = park.get("warm_only") or ""
        fields |= {"is_warm_only": bool(warm_only)} | ({"warm_only": warm_only} if is_named else {})
    # An id gives no access to a lease, but a local user could recognise a tenant by it.
    if is_named:
        fields["lease_id"] = lease["lease_id"]
        fields["reason"] = lease["reason"]
        fields["launches_per_s"] = rates.get(lease["lease_id"])
        # The broker counts these seconds. Regions and sessions without a context have none.
        fields["gpu_s"] = lease.get("gpu_seconds")
    return fields


def _allocated(lease: Report) -> int | None:
    """Return the bytes that a session holds by its worker's report, at most its lease; None without a report."""
    # A worker may be compromised, so bound its figure by the lease.
    allocated = lease.get("allocated_bytes")
    return None if allocated is None else min(allocated, lease["size_bytes"])


def _event(change: LeaseChange, pseudonyms: Pseudonyms, now_s: float, *, is_named: bool) -> dict[str, Any]:
    snapshot = change.about
    # If the feed does not have the lease's report, show the change without its details.
    tenant = "" if snapshot is None else snapshot.tenant if is_named else pseudonyms.of_tenant(snapshot.tenant)
    fields = {
        "number": change.number,
        "age_s": _rounded(max(0.0, now_s - change.at_s)),
        "key": pseudonyms.of_lease(change.lease_id),
        "phase": change.phase,
        "cause": change.cause,
        "tenant": tenant,
        "card_uuid": "" if snapshot is None else snapshot.card_uuid,
        "size_bytes": None if snapshot is None else snapshot.size_bytes,
        "is_region": snapshot is not None and snapshot.is_region,
    }
    if is_named:
        fields |= {"lease_id": change.lease_id, "reason": change.reason}
    return fields


def _left_s(left_ms: int, age_s: float) -> float:
    return _rounded(max(0.0, left_ms / MS_PER_S - age_s))


def _rounded(seconds: float) -> float:
    return round(seconds, 3)
