"""Samples of how busy each card is: their bounds, their message from the broker, and the page's view of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gpulease.protocol.time_units import NS_PER_S

SAMPLE_S: Final = 10.0
"""Pause between two samples."""

MAX_SAMPLES: Final = 360
"""Samples of each card: one hour. Bounds the memory of broker and web process, and the answer, 12 kB a card."""

GAP_SAMPLES: Final = 2.5
"""Two samples further apart than so many times SAMPLE_S have a gap between them, which the page leaves undrawn."""

LOADS: Final = "loads"
"""The op of the broker's message with one card's samples."""


class LoadSample(NamedTuple):
    """The load of one card at one moment; None for an unknown figure.

    Attributes:
        at_ns: The moment, by a monotonic clock.
        utilization_percent: The card's own figure.
        used_bytes: The card's own figure; without one, the bytes that sessions have allocated.
        leased_bytes: The bytes of all leases, fenced ones included.
    """

    at_ns: int
    utilization_percent: int | None
    used_bytes: int | None
    leased_bytes: int


def message_of(card_uuid: str, samples: Iterable[LoadSample]) -> dict[str, Any]:
    """Return the broker's message with samples of one card, the newest last."""
    return {"op": LOADS, "card": card_uuid, "samples": [list(sample) for sample in samples]}


class Loads:
    """The samples of each card over the last hour."""

    def __init__(self) -> None:
        self._samples: dict[str, list[LoadSample]] = {}

    def take(self, message: Mapping[str, Any]) -> None:
        """Add a message's samples in order of time. A sample that comes twice is kept once."""
        new = [LoadSample(*fields) for fields in message["samples"]]
        by_time = {sample.at_ns: sample for sample in (*self._samples.get(message["card"], ()), *new)}
        self._samples[message["card"]] = [by_time[at_ns] for at_ns in sorted(by_time)][-MAX_SAMPLES:]

    def view(self, now_s: float) -> dict[str, Any]:
        """Return the page's JSON: a column for each figure, the oldest sample first, ages in seconds before `now_s`."""
        cards = {uuid: _columns(samples, now_s) for uuid, samples in self._samples.items()}
        return {"span_s": MAX_SAMPLES * SAMPLE_S, "gap_s": GAP_SAMPLES * SAMPLE_S, "cards": cards}


def _columns(samples: Sequence[LoadSample], now_s: float) -> dict[str, list[Any]]:
    return {
        "age_s": [round(max(0.0, now_s - sample.at_ns / NS_PER_S), 1) for sample in samples],
        "utilization_percent": [sample.utilization_percent for sample in samples],
        "used_bytes": [sample.used_bytes for sample in samples],
        "leased_bytes": [sample.leased_bytes for sample in samples],
    }
