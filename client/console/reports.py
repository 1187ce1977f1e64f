"""Reports: a daemon's maps that describe cards, leases and itself, checked before they are used.

A report has no fixed form on the wire: a daemon of another version may send more members, or lack some. If a required
member is missing, MalformedReport says that the daemon's answer is wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from gpulease.client.errors import GpuLeaseError
from gpulease.client.numbers import is_number
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.json_text import indented_json
from gpulease.protocol.messages import Empty, Inventory

Report = dict[str, Any]
T = TypeVar("T")

REGION_MARK: Final = "- "
"""The text before a region's id or tenant in a list. A region is listed after its lease."""


class MalformedReport(GpuLeaseError):
    """The daemon's answer has a form that this program can't read."""

    default_hint = (
        "Do their versions differ? Compare `gpulease --version` with the version that the daemon logs "
        "when it starts. The peer may also be another program"
    )


NUMBER: Final = "a number"
WORD: Final = "a text"
TRUTH: Final = "true or false"
LIST: Final = "a list"

CARD: Final = {
    **dict.fromkeys(("uuid", "name", "driver"), WORD),
    **dict.fromkeys(("index", "capacity_bytes", "available_bytes", "fenced_bytes", "leases"), NUMBER),
    "exclusive": TRUTH,
}
CARD_PERHAPS: Final = {
    **dict.fromkeys(
        ("drain_left_ms", "card_drain_left_ms", "held_bytes", "warm_contexts", "warm_wanted", "warm_bytes"), NUMBER
    ),
    **dict.fromkeys(("recycled_contexts", "unowned_bytes", "outside_bytes"), NUMBER),
    "sandbox": LIST,
}
MEASURE: Final = {"measure": WORD, "on": TRUTH, "detail": WORD}
LEASE: Final = {
    **dict.fromkeys(("lease_id", "tenant", "state"), WORD),
    **dict.fromkeys(("size_bytes", "remaining_ms"), NUMBER),
}
LEASE_PERHAPS: Final = {
    **dict.fromkeys(("cause", "card_uuid", "parent", "name", "earlier_version"), WORD),
    **dict.fromkeys(("allocated_bytes", "launches", "copies", "age_ms", "orphaned_in_ms", "epoch"), NUMBER),
    **dict.fromkeys(("kept_memory_bytes", "unheld_bytes", "gpu_seconds", "held_back_seconds"), NUMBER),
    "connections": LIST,
}
CONNECTION: Final = dict.fromkeys(("number", "pid", "held_bytes"), NUMBER)
CHECK: Final = {"check": WORD, "ok": TRUTH, "detail": WORD}
"""Members that each report must have; those in names with `_PERHAPS` may be missing or None."""


def cards_of(inventory: Inventory) -> list[Report]:
    """The cards of GET_INVENTORY, each with the sandbox's measures if it lists any. Raises MalformedReport."""
    cards = _maps(inventory.details, "card", CARD, CARD_PERHAPS)
    for card in cards:
        _maps(card.get("sandbox") or [], "measure of the sandbox", MEASURE)
    return cards


def first_card(address: str, *figures: str) -> Report:
    """The first card of the daemon at an address.

    Args:
        address: The daemon's address.
        figures: Names of further numbers that the card's report must have.

    Raises MalformedReport, or an error of `ask`.
    """
    cards = cards_of(ask(Opcode.GET_INVENTORY, Empty(), address))
    if not cards:
        raise MalformedReport("the daemon's answer contains no card")
    return _map(cards[0], "card 1 of the daemon's answer", dict.fromkeys(figures, NUMBER), {})


def leases_of(report: object) -> list[Report]:
    """The leases of LEASE_LIST_ACTIVE, each with its connections if it lists any. Raises MalformedReport."""
    leases = _maps(report, "lease", LEASE, LEASE_PERHAPS)
    for lease in leases:
        _maps(lease.get("connections") or [], "connection of a lease", CONNECTION)
    return leases


def as_tree(records: Sequence[T], id_of: Callable[[T], str], parent_of: Callable[[T], str | None]) -> list[T]:
    """Put each region directly after its lease. A region whose lease is not in the list keeps its place."""
    leases = {id_of(item) for item in records if not parent_of(item)}
    under: dict[str, list[T]] = {}
    # Collect each region under its lease. Leases, and regions whose lease is not listed, are rows of the tree.
    tree = []
    for item in records:
        parent = parent_of(item)
        if parent and parent in leases:
            under.setdefault(parent, []).append(item)
        else:
            tree.append(item)
    return [listed for item in tree for listed in (item, *under.pop(id_of(item), ()))]


def health_of(report: object) -> tuple[bool, list[Report]]:
    """Return whether leases can be granted, and the checks, from a HEALTH report. Raises MalformedReport."""
    health = _map(report, "the daemon's answer", {"ready": TRUTH, "checks": LIST}, {})
    return health["ready"], _maps(health["checks"], "check", CHECK)


def json_text(report: object) -> str:
    """Return a report as JSON, unchanged. Raises MalformedReport if JSON can't represent it."""
    try:
        return indented_json(report, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedReport(f"the daemon's answer can't be written as JSON: {error}") from None


def _maps(
    value: object, subject: str, needed: Mapping[str, str], perhaps: Mapping[str, str] | None = None
) -> list[Report]:
    if not isinstance(value, list):
        raise MalformedReport(f"the daemon's answer is not a list of {subject}s")
    # Count from 1, as people do.
    numbered = enumerate(value, 1)
    return [
        _map(item, f"{subject} {number} of the daemon's answer", needed, perhaps or {}) for number, item in numbered
    ]


def _map(item: object, subject: str, needed: Mapping[str, str], perhaps: Mapping[str, str]) -> Report:
    # Check that it is a map, that the required members are there, and that all have the right types.
    if not isinstance(item, dict):
        raise MalformedReport(f"{subject} is not a map")
    for name, kind in needed.items():
        if name not in item:
            raise MalformedReport(f"{subject} lacks {name}")
        _check(item[name], f"{name} of {subject}", kind)
    for name, kind in perhaps.items():
        if item.get(name) is not None:
            _check(item[name], f"{name} of {subject}", kind)
    return item


def _check(value: object, subject: str, kind: str) -> None:
    if not _IS[kind](value):
        raise MalformedReport(f"{subject} is not {kind}")


_IS: Final[Mapping[str, Callable[[object], bool]]] = {
    NUMBER: is_number,
    WORD: lambda value: isinstance(value, str),
    TRUTH: lambda value: isinstance(value, bool),
    LIST: lambda value: isinstance(value, list),
}
