"""Samples of a node, and lines about its leases, computed from two samples: their present state, and rates."""

from collections.abc import Iterable, Mapping
from typing import Any, Self

from gpulease.client.console.tables import seconds_text
from gpulease.client.numbers import is_number
from gpulease.protocol.fast_dataclass import dataclass

Report = Mapping[str, Any]
"""A lease or a card as the daemon reports it. A daemon of another version may send more keys, or fewer."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A node's report at one moment.

    Attributes:
        at_s: Its time, on the monotonic clock.
        cards: The maps of GET_INVENTORY.
        leases: The maps of LEASE_LIST_ACTIVE.
    """

    at_s: float
    cards: tuple[Report, ...]
    leases: tuple[Report, ...]

    @classmethod
    def of(cls, at_s: float, cards: object, leases: object) -> Self:
        """Make a sample from reports as received; items that are not maps are dropped."""
        return cls(at_s, tuple(_maps(cards)), tuple(_maps(leases)))

    @property
    def drain_left_s(self) -> float | None:
        """Seconds until a drain ends the remaining leases; None if the node is not drained."""
        left_ms = next((number(card, "drain_left_ms") for card in self.cards), None)
        return None if left_ms is None else left_ms / 1000


@dataclass(frozen=True, slots=True)
class ScreenSamples:
    """The samples that the screen shows.

    Attributes:
        sample: The last one; None before the first.
        before: The previous one, from which rates are computed.
        trouble: A sentence that says why a newer sample is missing; "" if none is missing.
    """

    sample: Sample | None = None
    before: Sample | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class LeaseLine:
    """A lease in the table. None is a value that the daemon does not send, or a rate if there is only one sample.

    Attributes:
        card: The index of its card.
        copies_per_s: None if the daemon does not count copies.
        gpu_share: The part of the card's time that it used, 0 to 1; None if the daemon does not account for time.
        left_s: Seconds left when the sample was taken.
        parent: The id of a region's lease; "" for a lease.
    """

    lease_id: str
    tenant: str | None
    card: int | None
    state: str | None
    size_bytes: float | None
    used_bytes: float | None
    launches_per_s: float | None
    copies_per_s: float | None
    operations_per_s: float | None
    left_s: float | None
    ttl_s: float | None
    gpu_share: float | None = None
    parent: str = ""


def lease_lines(sample: Sample, before: Sample | None) -> list[LeaseLine]:
    """Return the leases of a sample, in its order, with rates since the previous sample."""
    earlier = {} if before is None else {word(lease, "lease_id"): lease for lease in before.leases}
    # Without an earlier sample every rate is unknown.
    span_s = 0.0 if before is None else sample.at_s - before.at_s
    cards = {word(card, "uuid"): number(card, "index") for card in sample.cards}
    return [_line(lease, earlier.get(word(lease, "lease_id"), {}), span_s, cards) for lease in sample.leases]


def _line(lease: Report, before: Report, span_s: float, cards: Mapping[str | None, float | None]) -> LeaseLine:
    card = cards.get(word(lease, "card_uuid"))
    left_ms, ttl_ms = number(lease, "remaining_ms"), number(lease, "ttl_ms")
    return LeaseLine(
        lease_id=word(lease, "lease_id") or "",
        tenant=word(lease, "tenant"),
        card=None if card is None else int(card),
        state=_state(lease),
        size_bytes=number(lease, "size_bytes"),
        used_bytes=number(lease, "allocated_bytes"),
        launches_per_s=_rate(lease, before, "launches", span_s),
        copies_per_s=_rate(lease, before, "copies", span_s),
        operations_per_s=_rate(lease, before, "operations", span_s),
        left_s=None if left_ms is None else left_ms / 1000,
        ttl_s=None if ttl_ms is None else ttl_ms / 1000,
        gpu_share=_rate(lease, before, "gpu_seconds", span_s),
        parent=word(lease, "parent") or "",
    )


def _state(lease: Report) -> str | None:
    """Return its state, with the cause if it is ending; the parking phase instead if its session is not on its card."""
    state, cause = word(lease, "state"), word(lease, "cause")
    park = lease.get("park")
    park = park if isinstance(park, dict) else {}
    phase = word(park, "phase")
    # A parked lease is active, but its session is not on its card. Show since when.
    if state is not None and cause is None and phase is not None and phase != "resident":
        parked_ms = number(park, "parked_for_ms")
        return phase if parked_ms is None else f"{phase} {seconds_text(parked_ms / 1000)}"
    return f"{state} {cause}" if state is not None and cause is not None else state


def _rate(lease: Report, before: Report, key: str, span_s: float) -> float | None:
    """Return events per second; None if the counter went back, because it then belongs to another session."""
    now, earlier = number(lease, key), number(before, key)
    if now is None or earlier is None or now < earlier or span_s <= 0:
        return None
    return (now - earlier) / span_s


def number(report: Report, key: str) -> float | None:
    """A number in a report; None if it is missing or not a finite number."""
    value = report.get(key)
    return value if is_number(value) else None


def word(report: Report, key: str) -> str | None:
    """A string in a report; None if it is missing or not a string."""
    value = report.get(key)
    return value if isinstance(value, str) else None


def _maps(value: object) -> Iterable[Report]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, Iterable) else []
