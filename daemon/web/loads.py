"""Samples of how busy the cards are: their bounds, how they come from the broker, and what a reader is told of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

SAMPLE_S: Final = 10.0
"""Between two samples."""

MAX_SAMPLES: Final = 360
"""Of each card: an hour. Bounds the memory of broker and web process, and the answer: 12 kB a card."""

GAP_SAMPLES: Final = 2.5
"""Times SAMPLE_S between two samples, from which on what lies between is unknown and is drawn as a gap."""

LOADS: Final = "loads"
"""The message of the broker's that carries samples of one card."""

NS_PER_S: Final = 1_000_000_000


class LoadSample(NamedTuple):
    """One card at one moment; None is what is unknown.

    Attributes:
        at_ns: When, monotonic.
        used_bytes: By the card's own figure; where it has none, what sessions have allocated.
        leased_bytes: What leases have of it, fenced ones too.
    """

    at_ns: int
    utilization_percent: int | None
    used_bytes: int | None
    leased_bytes: int


def message_of(card_uuid: str, samples: Iterable[LoadSample]) -> dict[str, Any]:
    """Samples of one card, the newest last, as the broker tells the web process."""
    return {"op": LOADS, "card": card_uuid, "samples": [list(sample) for sample in samples]}


class Loads:
    """The last hour of each card, as the broker told it."""

    def __init__(self) -> None:
        self._samples: dict[str, list[LoadSample]] = {}

    def take(self, message: Mapping[str, Any]) -> None:
        """Add what such a message tells, in order of time. What is told twice is kept once."""
        told = [LoadSample(*one) for one in message["samples"]]
        by_time = {sample.at_ns: sample for sample in (*self._samples.get(message["card"], ()), *told)}
        self._samples[message["card"]] = [by_time[at_ns] for at_ns in sorted(by_time)][-MAX_SAMPLES:]

    def view(self, now_s: float) -> dict[str, Any]:
        """As the page's JSON: a column for each figure, the oldest sample first, ages in seconds before `now_s`."""
        cards = {uuid: _columns(samples, now_s) for uuid, samples in self._samples.items()}
        return {"span_s": MAX_SAMPLES * SAMPLE_S, "gap_s": GAP_SAMPLES * SAMPLE_S, "cards": cards}


def _columns(kept: Sequence[LoadSample], now_s: float) -> dict[str, list[Any]]:
    return {
        "age_s": [round(max(0.0, now_s - one.at_ns / NS_PER_S), 1) for one in kept],
        "utilization_percent": [one.utilization_percent for one in kept],
        "used_bytes": [one.used_bytes for one in kept],
        "leased_bytes": [one.leased_bytes for one in kept],
    }
