"""Requests per second through the gateway without HTTP, each on its own lease."""

import contextlib
import itertools
import secrets
import tempfile
import time
from typing import Final

import numpy as np

from gpulease.client.bench.figures import load_figures, percentile, percentiles_ms
from gpulease.client.bench.host_floors import parse_cpu_us
from gpulease.client.console.reports import first_card
from gpulease.client.console.scene import await_pool
from gpulease.client.errors import CapacityExceeded, GpuLeaseError
from gpulease.client.serve.gateway import (
    DaemonEffects,
    InferenceRequest,
    NodeAuthority,
    SpareConnections,
    SqliteStore,
    serve_inference_request,
)
from gpulease.client.serve.gateway.settings import EXAMPLE, load_models
from gpulease.client.sync.lease import GpuBuilder

RECYCLED: Final = "recycled_contexts"
"""Key, in a card's report, of the number of contexts that wait for their tenant's next lease."""

AT_A_TIME: Final = (1, 4, 8)
"""Numbers of requests in flight together."""

REQUESTS_TO_FLOOR: Final = 10
"""Number of requests between two measurements of the host's floor, which take a hundredth of the requests' time."""

INPUT: Final = np.arange(1024, dtype=np.float32)
SPACED: Final = 10
"""Number of requests that are sent one by one, each when the pool is full."""

WARM_UP_S: Final = 0.5
"""Seconds of load before a measurement with reused contexts. In this time each context loads the kernel once."""


class _GatewayLoad:
    """A load of requests. Each of several threads sends one request after another.

    Attributes:
        floors_us: The host's floor of parses, in microseconds of CPU time, measured between the requests.
    """

    def __init__(self, store: SqliteStore, address: str) -> None:
        (name, self._model), *_ = load_models(EXAMPLE).items()
        self._name, self._store, self._address = name, store, address
        self._run = secrets.token_hex(8)
        self._numbers, self._until_floor = itertools.count(), itertools.count()
        self._spare = SpareConnections()
        self.floors_us: list[float] = []

    def ask(self) -> float:
        """Send one request. Returns the seconds that it took. Raises GpuLeaseError."""
        started = time.perf_counter()
        model = self._model
        # Give the request an id of this run, so that the answer can't be one from an earlier run's store.
        request = InferenceRequest(
            f"{self._run}-{next(self._numbers)}",
            self._name,
            INPUT.tobytes(),
            INPUT.nbytes,
            model.min_vram_bytes,
            model.lease_s,
            audience=None,
            token_nonce=0,
            now_secs=time.time(),
        )
        # Serve the request completely, except for HTTP: lease, session, kernel, result, store.
        effects = DaemonEffects(self._store, self._address, wait_s=30.0, spare=self._spare)
        output = serve_inference_request(effects, NodeAuthority(), request, model.image, model.kernel).output
        took_s = time.perf_counter() - started
        if not np.array_equal(np.frombuffer(output, np.float32), 2 * INPUT + 1):
            raise GpuLeaseError("a request's output is wrong")
        if next(self._until_floor) % REQUESTS_TO_FLOOR == 0:
            self.floors_us.append(parse_cpu_us())
        return took_s

    def warm_up(self, at_a_time: int) -> None:
        """Make the daemon keep as many of the tenant's contexts as the load uses at a time, each with the kernel.

        Only contexts of the pool are kept. A request that finds none makes one for itself, which takes the driver
        longer than several requests.
        """
        kept, before = 0, -1
        # Hold all kept contexts and the pool's at the same time, so that those of the pool are kept, too. Stop if the
        # card has no room for more.
        while before < kept < at_a_time:
            await_pool(self._address)
            card = first_card(self._address, RECYCLED, "warm_contexts")
            with contextlib.ExitStack() as leases, contextlib.suppress(CapacityExceeded):
                for _ in range(min(at_a_time, card[RECYCLED] + card["warm_contexts"])):
                    builder = GpuBuilder(self._address).min_vram(self._model.min_vram_bytes)
                    leases.enter_context(builder.lease_secs(self._model.lease_s).acquire())
            before, kept = kept, first_card(self._address, RECYCLED)[RECYCLED]
        await_pool(self._address)
        load_figures(self.ask, at_a_time, WARM_UP_S)

    def loaded(self, at_a_time: int, seconds: float) -> dict[str, float]:
        """Keep requests in flight. Returns their rate, its reciprocal in milliseconds, their times, and the floor."""
        self.floors_us.clear()
        figures = load_figures(self.ask, at_a_time, seconds)
        # A short load may end before the floor was measured.
        if not self.floors_us:
            self.floors_us.append(parse_cpu_us())
        return figures | {"each_ms": 1e3 / figures["per_s"], "floor_us": percentile(self.floors_us, 50)}


def request_figures(
    address: str, seconds: float, *, has_pool: bool, has_recycling: bool
) -> dict[str, dict[str, float]]:
    """Measure rates and times for each number of requests in flight; with a pool, also requests that find it full.

    Args:
        address: The daemon's address.
        seconds: Seconds of each measurement.
        has_pool: Whether the daemon keeps contexts ready.
        has_recycling: Whether it gives a tenant its own contexts again. Then they exist before a measurement begins.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(f"{folder}/store")
        try:
            load = _GatewayLoad(store, address)
            load.ask()  # compiles the kernel
            figures = {}
            for count in AT_A_TIME:
                if has_recycling:
                    load.warm_up(count)
                figures[f"{count} at a time"] = load.loaded(count, seconds)
            if has_pool:
                durations = []
                # Wait for a full pool before each request, so that each takes as long as a single request.
                for _ in range(SPACED):
                    await_pool(address)
                    durations.append(load.ask())
                figures["alone, pool full"] = percentiles_ms(durations)
            return figures
        finally:
            store.close()
