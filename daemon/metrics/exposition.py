"""The registry, and its text: one family at a time, so that nobody who waits for the loop waits for all of it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from gpulease.daemon.metrics.families import FAMILIES, Family, Kind
from gpulease.daemon.metrics.series import Distribution, Histogram, Labels

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus's text format (prometheus.io/docs/instrumenting/exposition_formats)."""

SAMPLES_PER_CHUNK: Final = 256
"""A line takes some 3 us to make."""

Content = Mapping[Family, Mapping[Labels, float] | Histogram]
"""The values of each family; of one that is missing, or empty, there is nothing to tell."""


class NodeCollector(Collector):
    """Gives a registry the node's families. `read` is asked for their values once a scrape."""

    def __init__(self, read: Callable[[], Content]) -> None:
        self._read = read

    def describe(self) -> Iterator[Metric]:
        """All there are, without values: a registry asks when it is given the collector."""
        for family in FAMILIES:
            yield Metric(family.name, family.meaning, family.kind.value)

    def collect(self) -> Iterator[Metric]:
        """Those that have values, each made when it is come to."""
        content = self._read()
        for family in FAMILIES:
            values = content.get(family)
            if values:
                yield _metric(family, values)


def chunks(registry: CollectorRegistry) -> Iterator[bytes]:
    """The text of all that is registered, in pieces that take a millisecond or so each."""
    for metric in registry.collect():
        samples = metric.samples
        for first in range(0, len(samples), SAMPLES_PER_CHUNK):
            metric.samples = samples[first : first + SAMPLES_PER_CHUNK]
            text = generate_latest(_Alone(metric))
            # What a family is, is told once, in its first two lines.
            yield text if first == 0 else text.split(b"\n", 2)[2]


class _Alone(Collector):
    """One family, as the library's renderer wants it."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)


def _metric(family: Family, values: Mapping[Labels, float] | Histogram) -> Metric:
    metric = Metric(family.name, family.meaning, family.kind.value)
    if isinstance(values, Histogram):
        for labels, distribution in values.of.items():
            _add_distribution(metric, family, dict(zip(family.labels, labels, strict=True)), distribution)
        return metric
    (name,) = family.series_names
    for labels, value in values.items():
        metric.add_sample(name, dict(zip(family.labels, labels, strict=True)), float(value))
    return metric


def _add_distribution(metric: Metric, family: Family, labels: dict[str, str], distribution: Distribution) -> None:
    below = 0
    if family.kind is Kind.HISTOGRAM:
        for bound, count in zip((*map(str, family.bounds), "+Inf"), distribution.counts, strict=True):
            below += count
            metric.add_sample(f"{family.name}_bucket", labels | {"le": bound}, below)
    metric.add_sample(f"{family.name}_sum", labels, distribution.total)
    metric.add_sample(f"{family.name}_count", labels, distribution.count)
