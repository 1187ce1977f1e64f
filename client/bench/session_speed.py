"""The speed of one session, measured by its tenant: launches, graphs, syncs, allocations and copies."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from gpulease.client import Buffer, GpuBuilder, GpuSession, KernelArgs
from gpulease.client.bench.figures import gigabytes_per_s, medians, per_call_us, percentile, timed_us
from gpulease.client.bench.host_floors import CallFloor

if TYPE_CHECKING:
    from numpy.typing import NDArray

SLICE_BYTES: Final = 256 << 20
COPY_SIZES: Final = (16 << 20,)
"""Sizes of large copies in bytes, whole MiB."""

CARD_COPY_SIZES: Final = (16 << 20, 256 << 20)
"""The sizes for a card. The embedded driver's memory is the host's, so there is no bus to measure."""

COPIES: Final = 15
"""Number of copies that are timed for each large size and direction; the median is reported."""

FRESH_ARRAYS: Final = 3
FRESH_COPIES: Final = (1, 2, 5)
"""Which copies of a fresh array are reported, counted from 1."""

SMALL_COPY_BYTES: Final = 4096
THREADS: Final = 32

OWN_LAUNCHES: Final = 500
"""Number of launches in a burst that measures the client's own time: few enough never to wait for room in the ring."""

OWN_BURSTS: Final = 40


def hot_path(address: str, ptx: bytes, launches: int, samples: int, *, shared_memory: bool = True) -> dict[str, float]:
    """Time launches, syncs, copies and allocations of one session, through shared memory or only its socket."""
    # The direct calls use card 0, too.
    builder = GpuBuilder(address).device("0").min_vram(SLICE_BYTES).lease_secs(600)
    with builder.acquire() as lease, GpuSession(lease, shared_memory=shared_memory) as session:
        module = session.module_load(ptx)
        buffer = session.mem_alloc(THREADS * 4)
        args = KernelArgs().push_buffer(buffer).push_u32(THREADS).push_f32(1.0)
        grid, block = (1, 1, 1), (THREADS, 1, 1)

        # Each action calls the public client, as a tenant's program does.
        def launch() -> None:
            session.launch(module, "scale", grid, block, args)

        def launch_and_sync() -> None:
            session.launch(module, "scale", grid, block, args)
            session.sync()

        def alloc_and_free() -> None:
            session.mem_free(session.mem_alloc(1 << 20))

        # Warm up, so that the first samples are like the others.
        timed_us(launch_and_sync, 50)
        round_trips = timed_us(launch_and_sync, samples)
        return {
            "launch_pipelined_us": per_call_us(launch, session.sync, launches),
            **_own_share(launch, session.sync),
            "launch_sync_p50_us": percentile(round_trips, 50),
            "launch_sync_p99_us": percentile(round_trips, 99),
            "sync_p50_us": percentile(timed_us(session.sync, samples), 50),
            "alloc_free_p50_us": percentile(timed_us(alloc_and_free, samples), 50),
        } | _small_copies(session, samples)


def _own_share(launch: Callable[[], object], sync: Callable[[], object]) -> dict[str, float]:
    """The caller's time for a launch while the worker executes earlier ones, and the host's floor at that time."""
    # Start with an empty queue and make fewer launches than the ring holds, so that none waits for room.
    with contextlib.closing(CallFloor()) as floor:
        samples, floor_us = floor.bursts_beside(launch, sync, OWN_LAUNCHES, OWN_BURSTS)
    return {"launch_own_us": percentile(samples, 50), "launch_own_floor_us": floor_us}


def copy_sizes(driver: str) -> tuple[int, ...]:
    """The sizes of large copies for a driver, in bytes."""
    return CARD_COPY_SIZES if driver == "cuda" else COPY_SIZES


def bulk_copies(address: str, sizes: tuple[int, ...], *, shared_memory: bool = True) -> dict[str, float]:
    """GB/s of ordinary arrays, and of arrays in memory shared with the worker, if there is any."""
    figures: dict[str, float] = {}
    for size in sizes:
        builder = GpuBuilder(address).device("0").min_vram(size).lease_secs(600)
        with builder.acquire() as lease, GpuSession(lease, shared_memory=shared_memory) as session:
            buffer, name = session.mem_alloc(size), f"{size >> 20}m"
            # Ordinary memory goes through the staging, an array of `empty` straight from the arena.
            for prefix, array in (("", np.empty(size, np.uint8)), ("arena_", session.empty(size, np.uint8))):
                figures |= _copies(session, buffer, f"{prefix}{{}}_{name}_gb_s", array)
    return figures


def _copies(session: GpuSession, buffer: Buffer, name: str, array: "NDArray[np.uint8]") -> dict[str, float]:
    array[:] = 1

    def write() -> None:
        session.mem_write(buffer, 0, array)

    def read() -> None:
        session.mem_read(buffer, 0, array.nbytes, into=array)

    # The first copy pins its staging memory.
    write()
    return {
        name.format("write"): gigabytes_per_s(write, array.nbytes, COPIES),
        name.format("read"): gigabytes_per_s(read, array.nbytes, COPIES),
    }


def fresh_copies(address: str, size: int) -> dict[str, float]:
    """Return GB/s of the first, second and fifth copy from and into a new array; medians of FRESH_ARRAYS.

    A user's large arrays are often copied only a few times. Preparing an array, for example by pinning its pages, must
    not make these copies slow.
    """
    return medians([_fresh_copies(address, size) for _ in range(FRESH_ARRAYS)])


def _fresh_copies(address: str, size: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    # Open a new session, because memory of an earlier array may be pinned already.
    builder = GpuBuilder(address).device("0").min_vram(size).lease_secs(600)
    with builder.acquire() as lease, GpuSession(lease) as session:
        buffer = session.mem_alloc(size)
        for prefix, new in (("", partial(np.empty, size)), ("arena_", partial(session.empty, size))):
            # Make an array for each direction, and touch its pages before the copy, as a user's program does.
            source, into = (new(np.uint8) for _ in range(2))
            source[:], into[:] = 1, 0
            for name, copy in (
                ("write", partial(session.mem_write, buffer, 0, source)),
                ("read", partial(session.mem_read, buffer, 0, size, into=into)),
            ):
                taken_us = timed_us(copy, max(FRESH_COPIES))
                for number in FRESH_COPIES:
                    figures[f"{prefix}{name}_{size >> 20}m_{number}_gb_s"] = size / taken_us[number - 1] / 1e3
    return figures


def _small_copies(session: GpuSession, samples: int) -> dict[str, float]:
    small = np.ones(SMALL_COPY_BYTES, np.uint8)
    buffer = session.mem_alloc(SMALL_COPY_BYTES)

    def write_small() -> None:
        session.mem_write(buffer, 0, small)

    return {
        "write_4k_p50_us": percentile(timed_us(write_small, samples), 50),
        "write_4k_pipelined_us": per_call_us(write_small, session.sync, samples),
        "read_4k_p50_us": percentile(
            timed_us(lambda: session.mem_read(buffer, 0, SMALL_COPY_BYTES, into=small), samples), 50
        ),
    }


GRAPH_LAUNCHES: Final = 20
GRAPH_SLICE_BYTES: Final = 64 << 20
GRAPH_CALLS: Final = 200
"""Number of graphs launched without waiting: fewer than the driver queues."""


def graph_figures(address: str, ptx: bytes, samples: int, *, shared_memory: bool = True) -> dict[str, float]:
    """Return the microseconds of twenty launches of a small kernel, as calls and as one graph."""
    builder = GpuBuilder(address).device("0").min_vram(GRAPH_SLICE_BYTES).lease_secs(600)
    with builder.acquire() as lease, GpuSession(lease, shared_memory=shared_memory) as session:
        module = session.module_load(ptx)
        # Use a parameter, to which each launch of the graph can give another value.
        args = KernelArgs().push_buffer(session.mem_alloc(THREADS * 4)).push_u32(THREADS)
        args.push_parameter("factor", "f32", 1.0)

        def launch() -> None:
            for _ in range(GRAPH_LAUNCHES):
                session.launch(module, "scale", (1, 1, 1), (THREADS, 1, 1), args)

        with session.record() as graph:
            launch()
        # Give another value in each launch, so that rebinding really happens.
        factors = iter(range(1 << 30))

        def launch_and_sync() -> None:
            launch()
            session.sync()

        def graph_and_sync() -> None:
            graph.launch()
            session.sync()

        def rebind_and_sync() -> None:
            graph.launch(factor=next(factors))
            session.sync()

        # Warm up each way by itself, because the first launch of a graph prepares the graph.
        for warm in (launch_and_sync, graph_and_sync, rebind_and_sync):
            timed_us(warm, 20)
        calls: list[float] = []
        floors = []
        with contextlib.closing(CallFloor()) as floor:
            # Wait after every GRAPH_CALLS graphs, before the driver's queue is full.
            for _ in range(samples // GRAPH_CALLS + 1):
                samples_us, floor_us = floor.beside(graph.launch, GRAPH_CALLS)
                calls += samples_us
                floors.append(floor_us)
                session.sync()
        return {
            "calls_20_us": per_call_us(launch, session.sync, samples),
            "graph_20_us": per_call_us(graph.launch, session.sync, samples),
            "graph_20_call_us": percentile(calls, 50),
            "graph_20_call_floor_us": percentile(floors, 50),
            "calls_20_sync_p50_us": percentile(timed_us(launch_and_sync, samples), 50),
            "graph_20_sync_p50_us": percentile(timed_us(graph_and_sync, samples), 50),
            "graph_20_rebound_p50_us": percentile(timed_us(rebind_and_sync, samples), 50),
        }
