"""What a gateway counts, in Prometheus' text format.

    gpulease_gateway_requests_total{model, outcome}   requests answered; outcome: done, replayed, or a problem's code
    gpulease_gateway_request_seconds{model}           histogram: from a request's head to its answer
    gpulease_gateway_in_flight                        requests that are served now, each on a lease of its own
    gpulease_gateway_queued                           requests that wait for that
    gpulease_gateway_input_bytes_total{model}         bytes of input taken
    gpulease_gateway_output_bytes_total{model}        bytes of output told

`model` is "" for what named no model that is served.
"""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from gpulease.client.serve.gateway.admission import Admission

BUCKETS_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""A warm context on a card takes tens of milliseconds, a fresh one hundreds; the rest is waiting."""


class GatewayMetrics:
    """One gateway's."""

    content_type: Final = CONTENT_TYPE_LATEST

    def __init__(self, admission: Admission) -> None:
        self._registry = registry = CollectorRegistry()
        name = "gpulease_gateway_"
        self._requests = Counter(f"{name}requests", "Requests answered.", ("model", "outcome"), registry=registry)
        self._seconds = Histogram(
            f"{name}request_seconds", "From head to answer.", ("model",), buckets=BUCKETS_S, registry=registry
        )
        self._input = Counter(f"{name}input_bytes", "Bytes of input taken.", ("model",), registry=registry)
        self._output = Counter(f"{name}output_bytes", "Bytes of output told.", ("model",), registry=registry)
        in_flight = Gauge(f"{name}in_flight", "Requests that are served now.", registry=registry)
        in_flight.set_function(lambda: admission.in_flight)
        queued = Gauge(f"{name}queued", "Requests that wait.", registry=registry)
        queued.set_function(lambda: admission.taken - admission.in_flight)

    def answered(self, model: str, outcome: str, seconds: float) -> None:
        """A request was answered."""
        self._requests.labels(model, outcome).inc()
        self._seconds.labels(model).observe(seconds)

    def moved(self, model: str, input_bytes: int, output_bytes: int) -> None:
        """So much came in and went out for it."""
        self._input.labels(model).inc(input_bytes)
        self._output.labels(model).inc(output_bytes)

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)
