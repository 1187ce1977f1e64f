"""What work through a lease costs, seen from the tenant."""

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from gpulease.client import GpuBuilder, GpuSession, KernelArgs
from gpulease.client.bench.figures import gigabytes_per_s, per_call_us, percentile, timed_us

SLICE_BYTES: Final = 256 << 20
COPY_BYTES: Final = 16 << 20
LARGE_COPY_BYTES: Final = 256 << 20
SMALL_COPY_BYTES: Final = 4096
THREADS: Final = 32

OWN_LAUNCHES: Final = 500
"""Launches of which the client's own share is told: few enough that they never wait for room, whatever the worker does
meanwhile."""

OWN_BURSTS: Final = 40


def hot_path(address: str, ptx: bytes, launches: int, samples: int, *, shared_memory: bool = True) -> dict[str, float]:
    """Launches, syncs, copies and allocations of one session, through shared memory or through its socket alone."""
    # Card 0, because that is the one the direct calls are made on.
    wanted = GpuBuilder(address).device("0").min_vram(SLICE_BYTES).lease_secs(600)
    with wanted.acquire() as lease, GpuSession(lease, shared_memory=shared_memory) as session:
        module = session.module_load(ptx)
        buffer = session.mem_alloc(THREADS * 4)
        args = KernelArgs().push_buffer(buffer).push_u32(THREADS).push_f32(1.0)
        grid, block = (1, 1, 1), (THREADS, 1, 1)

        def launch() -> None:
            session.launch(module, "scale", grid, block, args)

        def launch_and_sync() -> None:
            session.launch(module, "scale", grid, block, args)
            session.sync()

        def alloc_and_free() -> None:
            session.mem_free(session.mem_alloc(1 << 20))

        timed_us(launch_and_sync, 50)
        round_trips = timed_us(launch_and_sync, samples)
        return {
            "launch_pipelined_us": per_call_us(launch, session.sync, launches),
            "launch_own_us": _own_share_us(launch, session.sync),
            "launch_sync_p50_us": percentile(round_trips, 50),
            "launch_sync_p99_us": percentile(round_trips, 99),
            "sync_p50_us": percentile(timed_us(session.sync, samples), 50),
            "alloc_free_p50_us": percentile(timed_us(alloc_and_free, samples), 50),
        } | _copies(session, samples)


def _own_share_us(launch: Callable[[], object], sync: Callable[[], object]) -> float:
    """How long a launch keeps its caller, while the worker takes the earlier ones."""
    bursts = []
    for _ in range(OWN_BURSTS):
        sync()
        started = time.perf_counter()
        for _ in range(OWN_LAUNCHES):
            launch()
        bursts.append((time.perf_counter() - started) / OWN_LAUNCHES * 1e6)
    sync()
    return percentile(bursts, 50)


def arena_copies(address: str, driver: str, *, shared_memory: bool = True) -> dict[str, float]:
    """Copies of arrays that session and worker share; ordinary ones without shared memory."""
    figures: dict[str, float] = {}
    for name, size in [("16m", COPY_BYTES)] + [("256m", LARGE_COPY_BYTES)] * (driver == "cuda"):
        wanted = GpuBuilder(address).device("0").min_vram(size).lease_secs(600)
        with wanted.acquire() as lease, GpuSession(lease, shared_memory=shared_memory) as session:
            figures |= _arena_copies(session, name, size)
    return figures


def _arena_copies(session: GpuSession, name: str, size: int) -> dict[str, float]:
    array = session.empty(size, np.uint8)
    array[:] = 1
    buffer = session.mem_alloc(size)

    def write() -> None:
        session.mem_write(buffer, 0, array)

    def read() -> None:
        session.mem_read(buffer, 0, size, into=array)

    # The first copy pins the array.
    write()
    return {
        f"arena_write_{name}_gb_s": gigabytes_per_s(write, size, 15),
        f"arena_read_{name}_gb_s": gigabytes_per_s(read, size, 15),
    }


def _copies(session: GpuSession, samples: int) -> dict[str, float]:
    large = np.ones(COPY_BYTES, np.uint8)
    small = np.ones(SMALL_COPY_BYTES, np.uint8)
    buffer = session.mem_alloc(COPY_BYTES)

    def write_large() -> None:
        session.mem_write(buffer, 0, large)

    def read_large() -> None:
        session.mem_read(buffer, 0, COPY_BYTES, into=large)

    def write_small() -> None:
        session.mem_write(buffer, 0, small)

    return {
        "write_gb_s": gigabytes_per_s(write_large, COPY_BYTES, 15),
        "read_gb_s": gigabytes_per_s(read_large, COPY_BYTES, 15),
        "write_4k_p50_us": percentile(timed_us(write_small, samples), 50),
        "write_4k_pipelined_us": per_call_us(write_small, session.sync, samples),
        "read_4k_p50_us": percentile(
            timed_us(lambda: session.mem_read(buffer, 0, SMALL_COPY_BYTES, into=small), samples), 50
        ),
    }


def acquisition(address: str, count: int) -> dict[str, float]:
    """From asking for a lease to its session's first answer, and from giving it back to memory proved free."""
    acquires, frees = [], []
    for _ in range(count):
        started = time.perf_counter()
        lease = GpuBuilder(address).min_vram(SLICE_BYTES).lease_secs(60).acquire()
        with GpuSession(lease) as session:
            session.sync()
            acquires.append((time.perf_counter() - started) * 1e3)
        started = time.perf_counter()
        lease.free()
        frees.append((time.perf_counter() - started) * 1e3)
    return {
        "acquire_p50_ms": percentile(acquires, 50),
        "acquire_p99_ms": percentile(acquires, 99),
        "free_p50_ms": percentile(frees, 50),
        "free_p99_ms": percentile(frees, 99),
    }
