"""What a reader is shown: the broker's reports as the page's JSON, with names or with pseudonyms in their place.

Tenants do not see each other by the protocol, and on loopback any local user may ask. So without the operator's token
a reader sees that there is a slice, how large it is, since when and how long; not whose, nor its id, nor any text that
somebody wrote about it. Pseudonyms are the same for as long as the broker lives, and can't be computed by others.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

PSEUDONYM_CHARS: Final = 8
"""Hexadecimal: two of a thousand tenants have the same one once in 8,600 daemons' lives."""

KEY_CHARS: Final = 16

MS_PER_S: Final = 1000

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
"""What is shown of a card's map, which the protocol tells everybody."""

Report = Mapping[str, Any]


class Pseudonyms:
    """Names and ids, as those see them who may not know them."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def of_tenant(self, tenant: str) -> str:
        """What a tenant is called."""
        return f"tenant {self._digest('tenant', tenant)[:PSEUDONYM_CHARS]}"

    def of_lease(self, lease_id: str) -> str:
        """By what a page knows a lease again."""
        return self._digest("lease", lease_id)[:KEY_CHARS]

    def _digest(self, kind: str, text: str) -> str:
        return hmac.new(self._secret, f"{kind}:{text}".encode(errors="replace"), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Happening:
    """One event of a lease; `tenant` and `card_uuid` are "" where nobody knows them any more."""

    number: int
    at_s: float
    lease_id: str
    phase: str
    cause: str
    reason: str
    tenant: str
    card_uuid: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the broker said at one moment.

    Attributes:
        at_s: When, monotonic.
        node: The host's name.
        agent: How the broker introduced itself.
        cards: The maps of GET_INVENTORY.
        leases: Those of LEASE_LIST_ACTIVE.
        rates: Launches a second by lease id, where two looks are known.
        history: The same by card's uuid, all its leases together, a look each; None where nobody looked.
        happenings: The newest last.
    """

    at_s: float
    node: str
    agent: str
    cards: Sequence[Report]
    leases: Sequence[Report]
    rates: Mapping[str, float]
    history: Mapping[str, Sequence[float | None]]
    happenings: Sequence[Happening]


def view_of(snapshot: Snapshot, pseudonyms: Pseudonyms, now_s: float, *, is_named: bool) -> dict[str, Any]:
    """The state as the page's JSON. Times are seconds from `now_s`, which no clock that is set can move."""
    age_s = max(0.0, now_s - snapshot.at_s)
    slices: dict[str, list[dict[str, Any]]] = {}
    for lease in snapshot.leases:
        found = _slice(lease, snapshot.rates, pseudonyms, age_s, is_named=is_named)
        slices.setdefault(lease["card_uuid"], []).append(found)
    left_ms = next((card.get("drain_left_ms") for card in snapshot.cards), None)
    return {
        "host": snapshot.node,
        "version": snapshot.agent,
        "named": is_named,
        "age_s": _rounded(age_s),
        "drain_left_s": None if left_ms is None else _left_s(left_ms, age_s),
        "cards": [_card(card, snapshot.history, slices.get(card["uuid"], [])) for card in snapshot.cards],
        "events": [_event(one, pseudonyms, now_s, is_named=is_named) for one in reversed(snapshot.happenings)],
    }


def _card(card: Report, history: Mapping[str, Sequence[float | None]], slices: list[dict[str, Any]]) -> dict[str, Any]:
    rates = [None if rate is None else round(rate, 1) for rate in history.get(card["uuid"], ())]
    return {name: card[name] for name in OF_CARD} | {"launches_per_s": rates, "slices": slices}


def _slice(
    lease: Report, rates: Mapping[str, float], pseudonyms: Pseudonyms, age_s: float, *, is_named: bool
) -> dict[str, Any]:
    found = {
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
        # One that is not ready yet, or not any more, has no time left to count.
        "remaining_s": _left_s(lease["remaining_ms"], age_s) if lease["state"] == "active" else None,
        # Nobody is connected to it; None while somebody is, or it may be without.
        "orphaned_in_s": None if (left_ms := lease.get("orphaned_in_ms")) is None else _left_s(left_ms, age_s),
    }
    if is_named:
        found["lease_id"] = lease["lease_id"]
        found["reason"] = lease["reason"]
        found["launches_per_s"] = rates.get(lease["lease_id"])
    return found


def _allocated(lease: Report) -> int | None:
    """What its session holds: its worker's word, so no more than it has; None where no worker tells."""
    allocated = lease.get("allocated_bytes")
    return None if allocated is None else min(allocated, lease["size_bytes"])


def _event(one: Happening, pseudonyms: Pseudonyms, now_s: float, *, is_named: bool) -> dict[str, Any]:
    hidden = pseudonyms.of_tenant(one.tenant) if one.tenant else ""
    found = {
        "number": one.number,
        "age_s": _rounded(max(0.0, now_s - one.at_s)),
        "key": pseudonyms.of_lease(one.lease_id),
        "phase": one.phase,
        "cause": one.cause,
        "tenant": one.tenant if is_named else hidden,
        "card_uuid": one.card_uuid,
    }
    if is_named:
        found |= {"lease_id": one.lease_id, "reason": one.reason}
    return found


def _left_s(left_ms: int, age_s: float) -> float:
    return _rounded(max(0.0, left_ms / MS_PER_S - age_s))


def _rounded(seconds: float) -> float:
    return round(seconds, 3)
