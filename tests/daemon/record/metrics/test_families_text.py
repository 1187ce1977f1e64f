"""The text: what Prometheus's own tools and parser make of it, with every family there is."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gpulease.daemon.leases.denials import DenialReason
from gpulease.daemon.leases.model import Cause
from gpulease.daemon.leases.park_state import ParkFailure
from gpulease.daemon.record.metrics import families
from gpulease.daemon.record.metrics.exposition import SAMPLES_PER_CHUNK, NodeCollector, chunks
from gpulease.daemon.record.metrics.families import (
    FAILED,
    FAMILIES,
    MAX_LABEL_CHARS,
    MAX_PAIR_SERIES,
    SESSION_FAMILIES,
    Content,
    FamilyKind,
    Histogram,
    Labels,
    MetricFamily,
)
from gpulease.daemon.record.metrics.gauges import POOL_STATES
from gpulease.protocol.limits import MAX_METRICS_BYTES
from gpulease.protocol.opcodes import Opcode, Status
from gpulease.protocol.operations import SPECS

HOSTILE = 'a"} 1\ngpulease_ready 1\\\u2028é'


def values(family: MetricFamily, labels: Labels) -> dict[Labels, float] | Histogram:
    if family.kind in (FamilyKind.HISTOGRAM, FamilyKind.SUMMARY):
        histogram = Histogram(family)
        histogram.observe(labels, 0.3)
        return histogram
    return {labels: 7.0}


def registry(content: Content) -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(NodeCollector(lambda: content))
    return made


def everything(label: str = "x") -> Content:
    return {family: values(family, (label,) * len(family.labels)) for family in FAMILIES}


def text_of(content: Content) -> str:
    return b"".join(chunks(registry(content))).decode()


def test_every_family_is_told_under_its_names() -> None:
    found = {
        sample.name for family in text_string_to_metric_families(text_of(everything())) for sample in family.samples
    }
    assert found == {name for family in FAMILIES for name in family.series_names}


def test_names_are_used_once_and_say_their_units() -> None:
    names = [name for family in FAMILIES for name in family.series_names]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert re.fullmatch(r"gpu(_lease|_region|_session|_fleet|_card|lease)_[a-z_]+", family.name), family.name
        assert family.meaning.endswith("."), family.name
        assert not re.search("lease_id|_ms$|_ns$|_total$", family.name), family.name
        assert "lease" not in family.labels, "the number of leases has no bound"
        if family.kind is FamilyKind.HISTOGRAM:
            assert family.name.endswith("_seconds")
            assert list(family.bounds) == sorted(set(family.bounds))


def test_every_family_is_counted_or_read_somewhere() -> None:
    daemon = Path(__file__).parents[4] / "daemon"
    text = "".join(path.read_text() for path in daemon.rglob("*.py") if path.name != "families.py")
    from_pages = {family for added_to in SESSION_FAMILIES for family in added_to}
    names = [n for n, value in vars(families).items() if isinstance(value, MetricFamily) and value not in from_pages]
    assert set(names) - set(re.findall(r"\w+", text)) == set()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
@pytest.mark.parametrize("label", ["x", HOSTILE], ids=["plain", "hostile"])
def test_promtool_finds_nothing_to_mend(label: str) -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text_of(everything(label)), capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_a_tenants_name_stays_a_label() -> None:
    parsed = list(text_string_to_metric_families(text_of(everything(HOSTILE))))
    assert len(parsed) == len(FAMILIES)
    told = {
        value for family in parsed for sample in family.samples for name, value in sample.labels.items() if name != "le"
    }
    assert told == {HOSTILE}


def test_what_has_no_values_is_not_told() -> None:
    content: Content = {family: (Histogram(family) if family.bounds else {}) for family in FAMILIES}
    assert text_of(content) == ""


@pytest.mark.parametrize("count", [1, SAMPLES_PER_CHUNK, SAMPLES_PER_CHUNK + 1, 3 * SAMPLES_PER_CHUNK])
def test_pieces_make_the_whole(count: int) -> None:
    gauge = next(family for family in FAMILIES if family.kind is FamilyKind.GAUGE and family.labels == ("UUID",))
    content: Content = {**everything(), gauge: {(f"GPU-{number}",): number for number in range(count)}}
    assert text_of(content) == generate_latest(registry(content)).decode()


def test_the_most_there_can_be_fits_a_reply() -> None:
    """A host of 64 cards, as many tenants as are told apart, with names as long as UTF-8 makes them, all refused."""
    cards = [f"GPU-{number:032x}abcd" for number in range(64)]
    tenants = [f"{number:03d}".ljust(MAX_LABEL_CHARS, "\U0001f4a9") for number in range(MAX_PAIR_SERIES // 64)]
    choices = {"UUID": cards, "tenant": tenants, "operation": [op.name for op in Opcode if not SPECS[op].is_session]}
    choices |= {"reason": [reason.value for reason in DenialReason] + [status.name for status in Status]}
    choices |= {"cause": [cause.value for cause in Cause], "state": list(POOL_STATES), "by": ["need", "tenant"]}
    content: dict[MetricFamily, dict[Labels, float] | Histogram] = {}
    for family in FAMILIES:
        # Only denials have the reasons of all operations.
        of_family = choices | {"reason": [one.value for one in ParkFailure]} if family.labels == FAILED else choices
        labels = [of_family.get(label, ["x" * 96]) for label in family.labels]
        made = Histogram(family) if family.kind in (FamilyKind.HISTOGRAM, FamilyKind.SUMMARY) else dict[Labels, float]()
        for one in itertools.product(*labels):
            if isinstance(made, Histogram):
                made.observe(one, 1e-9)
            else:
                made[one] = 2.0**53 - 1
        content[family] = made
    size_bytes = len(text_of(content).encode())
    assert 1 << 20 < size_bytes < MAX_METRICS_BYTES


def test_a_histogram_adds_up() -> None:
    family = next(family for family in FAMILIES if family.name == "gpu_lease_reclaim_seconds")
    histogram = Histogram(family)
    for value in (0.0001, 0.2, 0.2, 1000):
        histogram.observe(("a",), value)
    (parsed,) = text_string_to_metric_families(text_of({family: histogram}))
    buckets = {sample.labels["le"]: sample.value for sample in parsed.samples if "le" in sample.labels}
    assert (buckets["0.001"], buckets["0.15"], buckets["0.25"], buckets["+Inf"]) == (1, 1, 3, 4)
    assert {sample.name[len(family.name) :]: sample.value for sample in parsed.samples[-2:]} == {
        "_count": 4,
        "_sum": pytest.approx(1000.4001),
    }
