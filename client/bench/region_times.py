"""Times of regions: opening, revoking, refusing and proving free, and the time that naming regions adds to a launch."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from gpulease.client import GpuBuilder, GpuLease, GpuSession, KernelArgs, Region, RegionRevoked
from gpulease.client.bench.figures import Figures, LogLine, in_a_process, per_call_us, percentile, timed_us
from gpulease.client.console.reports import first_card
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.messages import LeaseRevoke

MIB: Final = 1 << 20
REGION_BYTES: Final = {"cuda": 64 * MIB, "cpu": 4 * MIB}
SLICE_BYTES: Final = 1 << 30
GRAPH_NODES: Final = 100
THREADS: Final = 32
TTL_S: Final = 600.0
END_S: Final = 20.0
"""Longest time for a region's launches to be refused, or its memory proved free, in seconds."""

FLOOR_TIMEOUT_S: Final = 120
LAUNCHES: Final = 10_000
GATE_BURSTS: Final = 10
"""Number of bursts into which LAUNCHES are divided, without and with regions in turn."""


def measure_regions(address: str, ptx: bytes, samples: int, log: LogLine) -> Figures:
    """Return the figures of regions on the daemon's first card; times in us or ms, according to their names."""
    driver, card_uuid = (first_card(address)[key] for key in ("driver", "uuid"))
    size_bytes = REGION_BYTES[driver]
    figures = {"region_mib": size_bytes / MIB} | _floor(driver, card_uuid, size_bytes, samples, log)
    # Use one session for all parts, because a region's cost must not depend on earlier measurements.
    builder = GpuBuilder(address).device("0").min_vram(SLICE_BYTES).lease_secs(TTL_S)
    with builder.acquire() as lease, GpuSession(lease) as session:
        bench = _Bench(address, lease, session, ptx, size_bytes)
        for name, measure in (
            ("open and return", bench.lives),
            ("launches that name regions", bench.gate),
            ("revoked launch by launch", bench.refused),
            ("revoked in graphs", bench.refused_in_graphs),
            ("a neighbour's launches", bench.neighbour),
        ):
            log(f"regions: {name}")
            figures |= measure(samples)
    return figures


def _floor(driver: str, card_uuid: str, size_bytes: int, samples: int, log: LogLine) -> Figures:
    """Time the same driver calls in a separate process, without a lease."""
    log("regions: the driver's own calls")
    arguments = (driver, card_uuid, str(size_bytes), str(samples))
    return in_a_process("region_floor", *arguments, timeout_s=FLOOR_TIMEOUT_S)


def _quantiles(name: str, samples: list[float]) -> Figures:
    # The unit is at the end of the name, and stays there.
    unit = name.rsplit("_", 1)[1]
    stem = name.removesuffix(f"_{unit}")
    return {f"{stem}_p{part}_{unit}": percentile(samples, part) for part in (50, 90, 99)}


class _Bench:
    """Measures regions in one session; each method measures one part of their life."""

    def __init__(self, address: str, lease: GpuLease, session: GpuSession, ptx: bytes, size_bytes: int) -> None:
        self._address, self._lease, self._session, self._size_bytes = address, lease, session, size_bytes
        self._module = session.module_load(ptx)
        self._buffer = session.mem_alloc(THREADS * 4)
        self._args = KernelArgs().push_buffer(self._buffer).push_u32(THREADS).push_f32(1.0)

    def lives(self, samples: int) -> Figures:
        """Time how long it takes to open a region and to revoke it, repeatedly."""
        opened_us, returned_us = [], []
        for _ in range(samples):
            # The region's memory is mapped when the reply comes.
            started = time.perf_counter()
            region = self._open()
            opened_us.append((time.perf_counter() - started) * 1e6)
            started = time.perf_counter()
            region.revoke("bench")
            returned_us.append((time.perf_counter() - started) * 1e6)
            # Closing releases the addresses, and is not timed.
            region.close()
        return _quantiles("open_us", opened_us) | _quantiles("revoke_to_returned_us", returned_us)

    def gate(self, samples: int) -> Figures:
        """Time launches without a region, with one, and with as many as a set can name."""
        # Make enough launches that the syncs at both ends hardly matter.
        launches = max(100, LAUNCHES * samples // 100 // GATE_BURSTS)
        bursts: dict[str, list[float]] = {}
        for count in (1, MAX_REGIONS):
            regions = [self._lease.region(2 * MIB, ttl_secs=TTL_S) for _ in range(count)]
            names = self._session.region_set(regions)
            # Launch without and with the set in turn. Each launch with it compares the words of all its regions.
            for _ in range(GATE_BURSTS):
                for name, launch in (("launch", self._launch), (f"launch_in_{count}", partial(self._launch, names))):
                    bursts.setdefault(name, []).append(per_call_us(launch, self._session.sync, launches))
            for region in regions:
                region.free()
                region.close()
        return {f"{name}_us": percentile(taken_us, 50) for name, taken_us in bursts.items()}

    def refused(self, samples: int) -> Figures:
        """Revoke a region while launches are sent one by one.

        Times are from the change of the region's word to the refusal.
        """
        return self._refusals(samples, "revoke_wall_clock_us", self._launch)

    def refused_in_graphs(self, samples: int) -> Figures:
        """Revoke a region while graphs are launched one by one.

        Times are from the change of its word to the refusal.
        """
        with self._session.record() as graph:
            for _ in range(GRAPH_NODES):
                self._launch()

        def step() -> None:
            graph.launch()
            self._session.sync()

        # Time one graph alone, for comparison with the refusals.
        step_us = percentile(timed_us(step, 20), 50)
        figures = self._refusals(samples, "revoke_in_graphs_us", lambda names: graph.launch(regions=names))
        graph.close()
        return figures | {"graph_step_us": step_us}

    def neighbour(self, samples: int) -> Figures:
        """Time launches in one region, first undisturbed, then while other regions are opened and revoked."""
        kept_region = self._open()
        names = self._session.region_set([kept_region])

        def step() -> None:
            self._launch(names)
            self._session.sync()

        quiet_us = timed_us(step, 20 * samples)
        is_stopped = threading.Event()

        def churn() -> None:
            while not is_stopped.is_set():
                region = self._open()
                region.revoke("bench")
                region.close()

        churning = threading.Thread(target=churn)
        churning.start()
        try:
            beside_us = timed_us(step, 20 * samples)
        finally:
            is_stopped.set()
            churning.join()
        kept_region.free()
        kept_region.close()
        return _quantiles("step_quiet_us", quiet_us) | _quantiles("step_beside_revocations_us", beside_us)

    def _open(self) -> Region:
        return self._lease.region(self._size_bytes, ttl_secs=TTL_S)

    def _launch(self, names: Any = None) -> None:
        self._session.launch(self._module, "scale", (1, 1, 1), (THREADS, 1, 1), self._args, regions=names)

    def _refusals(self, samples: int, name: str, launch: Callable[[Any], object]) -> Figures:
        refused_us, proved_ms = [], []
        with _revoker(self._address) as revoke:
            # Open a new region each time, because a revoked one never becomes active again.
            for _ in range(samples):
                region = self._open()
                names = self._session.region_set([region])
                launch(names)
                self._session.sync()
                # Revoke from another process, and keep launching here until the refusal comes.
                answer = revoke(region)
                flipped_ns, refused_ns = self._launch_until_refused(partial(launch, names))
                refused_us.append((refused_ns - flipped_ns) / 1e3)
                proved_ms.append((answer() - flipped_ns) / 1e6)
                region.close()
        return _quantiles(name, refused_us) | _quantiles(name.replace("_us", "_proved_ms"), proved_ms)

    def _launch_until_refused(self, launch: Callable[[], object]) -> tuple[int, int]:
        deadline_s = time.monotonic() + END_S
        while time.monotonic() < deadline_s:
            try:
                launch()
                self._session.sync()
            except RegionRevoked as error:
                # The error contains the time at which the word was written, on the same clock.
                return error.flipped_ns or 0, time.monotonic_ns()
        raise TimeoutError("a revoked region's launches are still taken")


@contextlib.contextmanager
def _revoker(address: str) -> Iterator[Callable[[Region], Callable[[], int]]]:
    """Yield a function that lets another process revoke a region, and returns a function that waits for its answer.

    The answer is the time at which the daemon reported that the region's bytes are free. A thread in this process would
    hold the interpreter's lock, and so delay the timed launches.
    """
    command = [sys.executable, "-P", "-m", "gpulease.client.bench.region_times", address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdin is None or process.stdout is None:
            raise ValueError("the revoking process has no pipes")
        ids, times = process.stdin, process.stdout

        def revoke(region: Region) -> Callable[[], int]:
            ids.write(f"{region.lease_id_text}\n")
            ids.flush()
            # Read the answer later, so that this thread can launch until then.
            return lambda: int(times.readline())

        yield revoke


def _revoke_for_ever(address: str) -> None:
    # Each line names a region; the reply to the revoke comes once its memory is proved free.
    for line in sys.stdin:
        ask(Opcode.LEASE_REVOKE, LeaseRevoke(int(line, 16), "bench"), address)
        print(time.monotonic_ns(), flush=True)


if __name__ == "__main__":
    _revoke_for_ever(sys.argv[1])
