"""The registry of one HTTP server's metrics, in Prometheus's format."""

from prometheus_client import CollectorRegistry, generate_latest


class ServerMetrics:
    """A Prometheus registry of one server, so that two servers in a process do not mix their metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def text(self) -> bytes:
        """Return every metric in Prometheus' text format."""
        return generate_latest(self.registry)
