"""Made-up samples of a node, for `gpulease top`."""

from typing import Any

from gpulease.client.cli.top.sample import Sample

CARD: dict[str, Any] = {
    "index": 0,
    "uuid": "GPU-0",
    "name": "a card",
    "driver": "cpu",
    "capacity_bytes": 8 << 30,
    "held_bytes": 2 << 30,
    "available_bytes": 6 << 30,
    "fenced_bytes": 0,
    "leases": 2,
}


def lease(number: int, **more: Any) -> dict[str, Any]:
    return {
        "lease_id": f"{number:08x}{'0' * 24}",
        "tenant": f"tenant-{number}",
        "state": "active",
        "cause": None,
        "card_uuid": "GPU-0",
        "size_bytes": number << 30,
        "allocated_bytes": number << 20,
        "launches": 0,
        "operations": 0,
        "remaining_ms": 1000 * number,
        "ttl_ms": 10_000,
    } | more


def sample(*leases: Any, at_s: float = 100.0, cards: Any = (CARD,)) -> Sample:
    return Sample.of(at_s, cards, list(leases))
