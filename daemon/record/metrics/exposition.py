"""Makes the text of a scrape, in Prometheus's text format, in pieces that do not block the event loop for long."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from gpulease.daemon.record.metrics.families import (
    FAMILIES,
    Content,
    Distribution,
    FamilyKind,
    Histogram,
    Labels,
    MetricFamily,
)

SAMPLES_PER_CHUNK: Final = 256
"""Number of lines in one piece of text. Producing a line takes about 3 us."""


class NodeCollector(Collector):
    """Collects families, by default the node's, for a registry. Calls `read` once per scrape for their values."""

    def __init__(self, read: Callable[[], Content], families: Sequence[MetricFamily] = FAMILIES) -> None:
        self._read = read
        self._families = families

    def describe(self) -> Iterator[Metric]:
        """Yield every family, without values. A registry calls this when the collector is registered."""
        for family in self._families:
            yield Metric(family.name, family.meaning, family.kind.value)

    def collect(self) -> Iterator[Metric]:
        """Yield each family that has values. A family is converted only when it is yielded."""
        # Read the values once, so that all families of a scrape show the same moment.
        content = self._read()
        for family in self._families:
            # Leave out families without values.
            values = content.get(family)
            if values:
                yield _metric(family, values)


def chunks(registry: CollectorRegistry) -> Iterator[bytes]:
    """Yield the text of all registered families, in pieces that each take about a millisecond."""
    # The library renders whole families only, so render each part of a large family as a separate one.
    for metric in registry.collect():
        samples = metric.samples
        for first in range(0, len(samples), SAMPLES_PER_CHUNK):
            metric.samples = samples[first : first + SAMPLES_PER_CHUNK]
            text = generate_latest(_Alone(metric))
            # Only a family's first piece has the two lines HELP and TYPE.
            yield text if first == 0 else text.split(b"\n", 2)[2]


class _Alone(Collector):
    """A collector of one family, in the form that the library's renderer expects."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def _metric(family: MetricFamily, values: Mapping[Labels, float] | Histogram) -> Metric:
    metric = Metric(family.name, family.meaning, family.kind.value)
    if isinstance(values, Histogram):
        for labels, distribution in values.of.items():
            _add_distribution(metric, family, dict(zip(family.labels, labels, strict=True)), distribution)
        return metric
    (name,) = family.series_names
    for labels, value in values.items():
        metric.add_sample(name, dict(zip(family.labels, labels, strict=True)), float(value))
    return metric


def _add_distribution(metric: Metric, family: MetricFamily, labels: dict[str, str], distribution: Distribution) -> None:
    # Buckets are cumulative: each counts everything up to its bound (Prometheus text format, histogram).
    cumulative = 0
    if family.kind is FamilyKind.HISTOGRAM:
        for bound, count in zip((*map(str, family.bounds), "+Inf"), distribution.counts, strict=True):
            cumulative += count
            metric.add_sample(f"{family.name}_bucket", labels | {"le": bound}, cumulative)
    metric.add_sample(f"{family.name}_sum", labels, distribution.total)
    metric.add_sample(f"{family.name}_count", labels, distribution.count)
