"""Two readings of a node become lines: what is there, and how much happened between them."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

Report = Mapping[str, Any]
"""A lease or a card as the daemon tells of it. Of another version it may have more keys, or lack some."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a node said at one moment.

    Attributes:
        at_s: When, on the monotonic clock.
        cards: GET_INVENTORY's maps.
        leases: LEASE_LIST_ACTIVE's maps.
    """

    at_s: float
    cards: tuple[Report, ...]
    leases: tuple[Report, ...]

    @classmethod
    def of(cls, at_s: float, cards: object, leases: object) -> Self:
        """Of reports as they came; what is no map in them is passed over."""
        return cls(at_s, tuple(_maps(cards)), tuple(_maps(leases)))

    @property
    def drain_left_s(self) -> float | None:
        """Until a drain ends what is left; None if the node is not drained."""
        left_ms = next((number(card, "drain_left_ms") for card in self.cards), None)
        return None if left_ms is None else left_ms / 1000


@dataclass(frozen=True, slots=True)
class Scene:
    """What is there to look at.

    Attributes:
        sample: The last reading; None while there is none.
        before: The one before it, for rates.
        trouble: Why there is no newer one, a sentence; "" if there is.
    """

    sample: Sample | None = None
    before: Sample | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class LeaseLine:
    """A lease. None is what the daemon does not say, and what two readings are needed for while there is one.

    Attributes:
        card: The index of its card.
        copies_per_s: Of daemons that count them.
        left_s: When the sample was taken.
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


def lease_lines(sample: Sample, before: Sample | None) -> list[LeaseLine]:
    """The leases of a sample, in its order, with rates since the one before."""
    earlier = {} if before is None else {word(lease, "lease_id"): lease for lease in before.leases}
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
    )


def _state(lease: Report) -> str | None:
    """Its state, and if something ends it, what."""
    state, cause = word(lease, "state"), word(lease, "cause")
    return f"{state} {cause}" if state is not None and cause is not None else state


def _rate(lease: Report, before: Report, key: str, span_s: float) -> float | None:
    """Events a second. The counters are the session's word: one that went backwards says nothing."""
    now, then = number(lease, key), number(before, key)
    if now is None or then is None or now < then or span_s <= 0:
        return None
    return (now - then) / span_s


def number(report: Report, key: str) -> float | None:
    """A figure of a report, None if there is none."""
    value = report.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def word(report: Report, key: str) -> str | None:
    """A text of a report, None if there is none."""
    value = report.get(key)
    return value if isinstance(value, str) else None


def _maps(found: object) -> Iterable[Report]:
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, Iterable) else []
