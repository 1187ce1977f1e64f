"""Samples of each card's load: their bounds, the broker's message with them, and the page's view."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from gpulease.daemon.contract.message_fields import U64, Message, Text, listed, row
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.time_units import NS_PER_S

SAMPLE_S: Final = 10.0
"""Pause between two samples."""

MAX_SAMPLES: Final = 360
"""Maximum number of samples of each card, one hour of them. In a response they take 12 kB for each card."""

GAP_SAMPLES: Final = 2.5
"""If two samples are further apart than this many times SAMPLE_S, the page draws a gap between them."""


class LoadSample(NamedTuple):
    """The load of one card at one moment; None for an unknown figure.

    Attributes:
        at_ns: The moment, on a monotonic clock.
        utilization_percent: The utilisation that the card reports.
        used_bytes: The used bytes that the card reports; if it reports none, the bytes that sessions have allocated.
        leased_bytes: The bytes of all leases, including fenced ones.
    """

    at_ns: int
    utilization_percent: int | None
    used_bytes: int | None
    leased_bytes: int


_SAMPLE: Final = row(LoadSample, at_ns=U64, utilization_percent=U64.or_nil(), used_bytes=U64.or_nil(), leased_bytes=U64)


@dataclass(frozen=True, slots=True)
class CardLoads(Message):
    """The broker's message with samples of one card, the newest last."""

    OP: ClassVar[str] = "loads"
    card: Text
    samples: Annotated[tuple[LoadSample, ...], listed(_SAMPLE, MAX_SAMPLES)]


class Loads:
    """The samples of each card over the last hour."""

    def __init__(self) -> None:
        self._samples: dict[str, list[LoadSample]] = {}

    def take(self, loads: CardLoads) -> None:
        """Add a message's samples in order of time. A sample that arrives twice is kept once."""
        # A new web process receives one message with the whole hour, and may receive a newer sample before that
        # message.
        by_time = {sample.at_ns: sample for sample in (*self._samples.get(loads.card, ()), *loads.samples)}
        self._samples[loads.card] = [by_time[at_ns] for at_ns in sorted(by_time)][-MAX_SAMPLES:]

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
