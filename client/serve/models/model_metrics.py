"""The metrics of a model server, in Prometheus's text format.

    gpu_lease_seconds_total{model}      counter: how long the model has held leases
    kernel_launch_total{model}          counter: batches launched
    kernel_fail_total{model}            counter: batches that failed: by the kernel, its time limit, or the lease's end
    inference_latency_ms{model}         histogram: from a request's arrival to its outcome, of answered requests
    bytes_in_total{model}               counter: bytes of inputs received
    bytes_out_total{model}              counter: bytes of outputs sent
    queue_depth{model}                  gauge: items that wait
    batch_items{model}                  histogram: items in a launch
    requests_total{model, outcome}      counter: requests answered; outcome: done, or a CallErrorCode in small letters

`model` is the model that the client named, or the smaller variant that computed the request in its place.
"""

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

from gpulease.client.http.server_metrics import ServerMetrics

LATENCY_BUCKETS_MS: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


class ModelMetrics:
    """The metrics of one model: the server's, with the label `model` set."""

    def __init__(self, metrics: "ModelServerMetrics", model: str) -> None:
        self.lease_seconds = metrics.lease_seconds.labels(model)
        self.launches = metrics.launches.labels(model)
        self.failures = metrics.failures.labels(model)
        self.latency_ms = metrics.latency_ms.labels(model)
        self.bytes_in = metrics.bytes_in.labels(model)
        self.bytes_out = metrics.bytes_out.labels(model)
        self.queue_depth = metrics.queue_depth.labels(model)
        self.batch_items = metrics.batch_items.labels(model)
        self._requests, self._model = metrics.requests, model

    def answered(self, outcome: str) -> None:
        self._requests.labels(self._model, outcome).inc()


class ModelServerMetrics(ServerMetrics):
    """The metrics of one server, with the label `model`."""

    def __init__(self) -> None:
        super().__init__()
        registry = self.registry
        by_model = ("model",)
        self.lease_seconds = Counter("gpu_lease_seconds", "How long leases were held.", by_model, registry=registry)
        self.launches = Counter("kernel_launch", "Batches launched.", by_model, registry=registry)
        self.failures = Counter("kernel_fail", "Batches that failed.", by_model, registry=registry)
        self.latency_ms = Histogram(
            "inference_latency_ms",
            "Time from the arrival of a request to its outcome.",
            by_model,
            buckets=LATENCY_BUCKETS_MS,
            registry=registry,
        )
        self.bytes_in = Counter("bytes_in", "Bytes of inputs received.", by_model, registry=registry)
        self.bytes_out = Counter("bytes_out", "Bytes of outputs sent.", by_model, registry=registry)
        self.queue_depth = Gauge("queue_depth", "Items that wait for a launch.", by_model, registry=registry)
        self.batch_items = Histogram(
            "batch_items", "Items in a launch.", by_model, buckets=BATCH_BUCKETS, registry=registry
        )
        self.requests = Counter("requests", "Requests answered.", ("model", "outcome"), registry=registry)
