"""The metrics of a server with several models.

They are all families of `decode_metrics`, each with the additional label `model`, and these:

    gpulease_decode_model_state{model, state}        gauge: 1 for the state of the model, 0 for the others
    gpulease_decode_model_bytes{model}               gauge: memory of its lease
    gpulease_decode_model_waiting{model}             gauge: requests that wait until it is on the card
    gpulease_decode_model_in_use{model}              gauge: requests that use it
    gpulease_decode_model_load_seconds{model}        gauge: duration of its last load
    gpulease_decode_model_changes_total{model, kind} counter; kind: load, load_failed, park, return, unload
    gpulease_decode_models_card_bytes                gauge: memory of models that are on the card or moving onto it
    gpulease_decode_models_parked_bytes              gauge: memory of models that are parked in the host or being parked
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpulease.client.decode.decode_reports import DecoderObserver
from gpulease.client.decode.openai.decode_metrics import DecodeMetrics
from gpulease.client.decode.scheduler.model_residency import ModelState
from gpulease.client.decode.supervisor.decoder import Decoder
from gpulease.client.decode.supervisor.model_pool import ModelPool
from gpulease.client.http.server_metrics import ServerMetrics

CHANGES: Final = ("load", "load_failed", "park", "return", "unload")


class PoolMetrics(ServerMetrics):
    """The metrics of one server with several models.

    Args:
        tenants: The tenants of the settings.
        pool: Returns the pool; None while there is none.
        on_gap: See DecodeMetrics; called for all models.
    """

    def __init__(
        self,
        tenants: Sequence[str],
        pool: Callable[[], ModelPool | None] = lambda: None,
        on_gap: Callable[[str, float, int], None] = lambda *_: None,
    ) -> None:
        super().__init__()
        self._tenants, self._pool, self._on_gap = tuple(tenants), pool, on_gap
        # A model's entry is kept while the model is unloaded, so that its counters continue when it is loaded again.
        self._models: dict[str, DecodeMetrics] = {}
        self.registry.register(_ByModel(self._served))
        self.registry.register(_OfPool(pool))

    def observer(self, model: str) -> DecoderObserver:
        """Return a model's observer. All decoders that the model gets over time share it."""
        if model not in self._models:

            def decoder() -> Decoder | None:
                pool = self._pool()
                return None if pool is None else pool.decoders.get(model)

            self._models[model] = DecodeMetrics(self._tenants, decoder, on_gap=self._on_gap)
        return self._models[model]

    def _served(self) -> dict[str, DecodeMetrics]:
        # Drop models that a reload of the settings has removed.
        if (pool := self._pool()) is not None:
            self._models = {name: counts for name, counts in self._models.items() if name in pool.residency.models}
        return self._models


class _ByModel(Collector):
    """The families of several models' registries, with the label `model`."""

    def __init__(self, models: Callable[[], dict[str, DecodeMetrics]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model, metrics in self._models().items():
            for family in metrics.registry.collect():
                family_of_all = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    family_of_all.add_sample(sample.name, {"model": model, **sample.labels}, sample.value)
        yield from families.values()


class _OfPool(Collector):
    """The families that are read from the pool at each scrape."""

    def __init__(self, pool: Callable[[], ModelPool | None]) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        if (pool := self._pool()) is None:
            return
        models = pool.residency.models
        state = GaugeMetricFamily("gpulease_decode_model_state", "Where the model is.", labels=["model", "state"])
        changes = CounterMetricFamily(
            "gpulease_decode_model_changes", "Loads and parks of the model.", labels=["model", "kind"]
        )
        gauges = {
            "bytes": GaugeMetricFamily("gpulease_decode_model_bytes", "Memory of the model's lease.", labels=["model"]),
            "waiting": GaugeMetricFamily(
                "gpulease_decode_model_waiting", "Requests that wait for the model.", labels=["model"]
            ),
            "in_use": GaugeMetricFamily(
                "gpulease_decode_model_in_use", "Requests that use the model.", labels=["model"]
            ),
            "load": GaugeMetricFamily(
                "gpulease_decode_model_load_seconds", "Duration of the model's last load.", labels=["model"]
            ),
        }
        for name, model in models.items():
            for model_state in ModelState:
                state.add_metric([name, model_state.value], float(model.state is model_state))
            for kind in CHANGES:
                changes.add_metric([name, kind], pool.counts[name, kind])
            gauges["bytes"].add_metric([name], model.terms.size_bytes)
            gauges["waiting"].add_metric([name], len(model.waiting))
            gauges["in_use"].add_metric([name], len(model.in_use))
            gauges["load"].add_metric([name], pool.seconds.get(name, 0.0))
        yield from (state, changes, *gauges.values())
        on_card, in_host = pool.residency.card_bytes, pool.residency.host_bytes
        yield GaugeMetricFamily("gpulease_decode_models_card_bytes", "Memory of models on the card.", value=on_card)
        yield GaugeMetricFamily("gpulease_decode_models_parked_bytes", "Memory of parked models.", value=in_host)
