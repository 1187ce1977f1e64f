"""A directory's metrics: its families, their values at a scrape, and the HTTP server for Prometheus.

The families are defined and rendered like the daemon's. `daemon/manual/fleet.md` lists them.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from gpulease.daemon.fleet.directory.fleet_watch import FleetWatch
from gpulease.daemon.record.metrics.exposition import NodeCollector
from gpulease.daemon.record.metrics.families import CONTENT_TYPE, Content, FamilyKind, MetricFamily
from gpulease.daemon.web.http_settings import HttpSettings
from gpulease.protocol.http_origin import loopback_hosts

if TYPE_CHECKING:
    from gpulease.daemon.web.guard import Receive, Scope, Send

FRESH_S: Final = 1.0
"""Maximum age of the exposition in seconds. It is computed from every node, and any user of the host may request it."""

PLACEMENTS: Final = MetricFamily(
    "gpu_directory_placements",
    FamilyKind.COUNTER,
    "Requests for a place, by result: placed, unplaced if no node fits, or the status of the refusal.",
    ("result",),
)
LISTINGS: Final = MetricFamily(
    "gpu_directory_listings",
    FamilyKind.COUNTER,
    "Requests for the list of nodes and names, by result: listed, or the status of the refusal.",
    ("result",),
)
NODES: Final = MetricFamily(
    "gpu_directory_nodes",
    FamilyKind.GAUGE,
    "Nodes in the directory's view, by state: ready, draining or silent.",
    ("state",),
)
NAMES: Final = MetricFamily("gpu_directory_names", FamilyKind.GAUGE, "Names with a claim in the directory's view.")
VIEW_AGE: Final = MetricFamily("gpu_directory_view_age_seconds", FamilyKind.GAUGE, "Time since etcd last answered.")
CURRENT: Final = MetricFamily(
    "gpu_directory_current", FamilyKind.GAUGE, "1 while the directory names nodes; 0 while its data is too old."
)
BAD_RECORDS: Final = MetricFamily(
    "gpu_directory_bad_records", FamilyKind.COUNTER, "Records in etcd that could not be read."
)
CONNECTIONS: Final = MetricFamily(
    "gpu_directory_connections", FamilyKind.GAUGE, "Connections of tenants, open or in a handshake."
)

DIRECTORY_FAMILIES: Final = (PLACEMENTS, LISTINGS, NODES, NAMES, VIEW_AGE, CURRENT, BAD_RECORDS, CONNECTIONS)


class DirectoryMetrics:
    """The metrics registry of one directory.

    Args:
        fleet: The directory's view of the fleet.
        connections: Returns the number of connections.
        clock: Seconds on a monotonic clock.
    """

    def __init__(
        self, fleet: FleetWatch, connections: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._connections = connections
        self._clock = clock
        self._last: tuple[float, bytes] | None = None
        self._registry = CollectorRegistry()
        self._registry.register(NodeCollector(self._content, DIRECTORY_FAMILIES))
        ProcessCollector(registry=self._registry)

    @property
    def is_ready(self) -> bool:
        return self._fleet.denial() is None

    def text(self) -> bytes:
        """Return the exposition, at most FRESH_S old."""
        if self._last is None or self._clock() - self._last[0] >= FRESH_S:
            self._last = self._clock(), generate_latest(self._registry)
        return self._last[1]

    def _content(self) -> Content:
        fleet = self._fleet
        return {
            PLACEMENTS: {(result,): count for result, count in fleet.counts.placements.items()},
            LISTINGS: {(result,): count for result, count in fleet.counts.listings.items()},
            NODES: {(state,): count for state, count in fleet.nodes_by_state().items()},
            NAMES: {(): len(fleet.view.claims)},
            VIEW_AGE: {(): fleet.age_s()},
            CURRENT: {(): self.is_ready},
            BAD_RECORDS: {(): fleet.view.bad_records},
            CONNECTIONS: {(): self._connections()},
        }

    async def application(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Answer one HTTP request (ASGI): `/metrics`, `/healthz` or `/readyz`."""
        status, kind, body = 404, "text/plain; charset=utf-8", b"Here are /metrics, /healthz and /readyz.\n"
        # Any user of the host may send requests, so each response is cached or trivial.
        match scope["path"]:
            case "/metrics":
                status, kind, body = 200, CONTENT_TYPE, self.text()
            case "/healthz":
                status, body = 200, b"ok\n"
            case "/readyz":
                status, body = (200, b"ready\n") if self.is_ready else (503, b"etcd has not answered in time\n")
        head = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def metrics_served(
    metrics: DirectoryMetrics, settings: HttpSettings, listener: socket.socket
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve the metrics over HTTP on a listening socket. Yields the task, which ends only if the server fails."""
    # Imported here: only directories that serve HTTP need an HTTP server installed.
    from gpulease.daemon.web.guard import Guard, limit_server_log
    from gpulease.daemon.web.http_server import server_of

    limit_server_log()
    hosts = loopback_hosts(settings.address.host) | settings.hosts
    server = server_of(Guard(metrics.application, hosts, settings.hosts, "--http-host"))
    serving = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    try:
        yield serving
    finally:
        # Do not wait for scrapes that are in progress.
        server.should_exit = server.force_exit = True
        await asyncio.wait({serving})
