"""`python -m gpulease.daemon.bench.direct DRIVER PTX_FILE LAUNCHES SAMPLES COPY_BYTES...`: times driver calls, as JSON.

`gpulease bench` compares its figures with these. The driver is called in this process, without a lease, by the calls
that a program without gpulease would make.
"""

import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from gpulease.daemon.bench.percentiles import percentile
from gpulease.daemon.drivers.interface import Context, Dim3, DriverKernel, KernelStep, admit_any, keep_waiting
from gpulease.daemon.gpus.driver_choice import choose_cards
from gpulease.daemon.zygote.driver_registry import driver_named

ONE: Final[Dim3] = (1, 1, 1)

COPIES: Final = 15
"""Number of copies that are timed for each large size and direction; the median is reported."""

SMALL_COPY_BYTES: Final = 4096
SLICE_BYTES: Final = 256 << 20
THREADS: Final = 32


def measure(driver_name: str, ptx: bytes, launches: int, samples: int, copy_sizes: list[int]) -> dict[str, float]:
    """Return microseconds and GB/s of the driver's own calls. `copy_sizes` are in bytes, multiples of 1 MiB."""
    driver_name, context = _open(driver_name)
    module = context.module_load(ptx)
    kernel = module.kernels["scale"]
    # The kernel's parameters, as laid out in memory: an address, a count, and the float 1.0.
    address = context.mem_alloc(THREADS * 4)
    params = address.to_bytes(8, "little") + THREADS.to_bytes(4, "little") + b"\0\0\x80\x3f"

    def launch() -> None:
        context.launch(kernel, ONE, (THREADS, 1, 1), 0, params, 1)

    def sync() -> None:
        context.sync()

    def launch_and_sync() -> None:
        launch()
        sync()

    # Warm up: the first launches load code and grow the driver's queues.
    _timed_us(launch_and_sync, 50)
    # First launch and sync each time, for the latency; then many launches and one sync, for the throughput.
    round_trips = _timed_us(launch_and_sync, samples)
    started = time.perf_counter()
    for _ in range(launches):
        launch()
    sync()
    figures = {
        "launch_pipelined_us": (time.perf_counter() - started) / launches * 1e6,
        "launch_sync_p50_us": percentile(round_trips, 50),
        "launch_sync_p99_us": percentile(round_trips, 99),
        "sync_p50_us": _timed_us(sync, samples)[samples // 2],
        "alloc_free_p50_us": _timed_us(lambda: context.mem_free(context.mem_alloc(1 << 20)), samples)[samples // 2],
    }
    figures |= _graph_figures(context, kernel, (THREADS, 1, 1), params, samples)
    figures |= _small_copies(context, samples)
    # Pinned memory, as a session's arena is.
    pinned = memoryview(mmap.mmap(-1, max(copy_sizes)))
    context.pin(pinned)
    for size in copy_sizes:
        figures |= _copies(context, size, pinned[:size])
    if driver_name == "cuda":
        from gpulease.daemon.drivers.cuda import pycuda_baseline

        figures["pycuda_call_us"] = pycuda_baseline.call_us(ptx, address, THREADS, launches)
        # A context reuses freed memory, so time allocations from the card itself.
        figures["alloc_free_p50_us"] = _timed_us(pycuda_baseline.alloc_and_free, samples)[samples // 2]
    context.close()
    return figures


def _open(selector: str) -> tuple[str, Context]:
    source = choose_cards(selector, ())
    driver = driver_named(source.driver)
    driver.preload()
    return source.driver, driver.open_context(source.discover({})[0].uuid, SLICE_BYTES)


LAUNCHES: Final = 20
"""Number of launches in one graph."""

CALLS: Final = 200
"""Number of graphs that are launched without a wait, fewer than the driver's queue holds."""


def _graph_figures(
    context: Context, kernel: DriverKernel, block: Dim3, params: bytes, samples: int
) -> dict[str, float]:
    """Return the microseconds of twenty launches, as calls and as one graph. `params` ends with a float."""
    graph = context.graph([KernelStep(kernel, ONE, block, 0, params)] * LAUNCHES, admit_any)
    # Each call of `rebind` gives every step a value that it did not have, so that nothing can be skipped.
    values = _values(params)

    def launch() -> None:
        for _ in range(LAUNCHES):
            context.launch(kernel, ONE, block, 0, params, 1)

    def replay() -> None:
        graph.replay(1, keep_waiting)

    def rebind() -> None:
        value = next(values)
        for step in range(LAUNCHES):
            graph.bind(step, value)
        replay()

    def synced(action: Callable[[], None]) -> float:
        def both() -> None:
            action()
            context.sync()

        _timed_us(both, 20)
        return _timed_us(both, samples)[samples // 2]

    def pipelined(action: Callable[[], None]) -> float:
        started = time.perf_counter()
        for _ in range(samples):
            action()
        context.sync()
        return (time.perf_counter() - started) / samples * 1e6

    figures = {
        "calls_20_sync_p50_us": synced(launch),
        "graph_20_sync_p50_us": synced(replay),
        "graph_20_rebound_p50_us": synced(rebind),
        "calls_20_us": pipelined(launch),
        "graph_20_us": pipelined(replay),
    }
    # A synchronisation after CALLS graphs keeps the driver's queue from filling up, which would make calls wait.
    calls = []
    for _ in range(samples // CALLS + 1):
        calls += _timed_us(replay, CALLS)
        context.sync()
    return figures | {"graph_20_call_us": sorted(calls)[len(calls) // 2]}


def _values(params: bytes) -> Iterator[bytes]:
    number = 0
    while True:
        number += 1
        yield params[:-4] + struct.pack("<f", number)


def _small_copies(context: Context, samples: int) -> dict[str, float]:
    # Pageable memory: the driver stages such copies itself.
    small = memoryview(bytearray(SMALL_COPY_BYTES))
    address = context.mem_alloc(SMALL_COPY_BYTES)
    return {
        "write_4k_pipelined_us": _pipelined_us(lambda: context.mem_write(address, small), context.sync, samples),
        "write_4k_p50_us": _timed_us(lambda: context.mem_write(address, small), samples)[samples // 2],
        "read_4k_p50_us": _timed_us(lambda: context.mem_read(address, small), samples)[samples // 2],
    }


def _copies(context: Context, size: int, pinned: memoryview) -> dict[str, float]:
    """Return the GB/s of copies from and to pinned memory, and pageable memory."""
    # Reuse the host's buffer, because the first touch of its pages is not part of a copy.
    address, name = context.mem_alloc(size), f"{size >> 20}m"
    pageable = memoryview(bytearray(size))

    def rate(copy: Callable[[], object]) -> float:
        # Bytes per microsecond divided by a thousand are GB/s.
        return size / _timed_us(copy, COPIES)[COPIES // 2] / 1e3

    figures = {
        f"write_{name}_gb_s": rate(lambda: context.mem_write(address, pageable)),
        f"read_{name}_gb_s": rate(lambda: context.mem_read(address, pageable)),
        f"arena_write_{name}_gb_s": rate(lambda: context.write_pinned(address, pinned)),
        f"arena_read_{name}_gb_s": rate(lambda: context.read_pinned(address, pinned)),
    }
    context.mem_free(address)
    return figures


def _pipelined_us(action: Callable[[], object], fence: Callable[[], object], count: int) -> float:
    """Return the microseconds per call of many calls, issued back to back and then fenced."""
    started = time.perf_counter()
    for _ in range(count):
        action()
    fence()
    return (time.perf_counter() - started) / count * 1e6


def _timed_us(action: Callable[[], object], count: int) -> list[float]:
    """Return the microseconds that each call takes, sorted."""
    samples = []
    for _ in range(count):
        started = time.perf_counter()
        action()
        samples.append((time.perf_counter() - started) * 1e6)
    return sorted(samples)


if __name__ == "__main__":
    name, ptx_file, launch_count, sample_count, *sizes = sys.argv[1:]
    source = Path(ptx_file).read_bytes()
    print(json.dumps(measure(name, source, int(launch_count), int(sample_count), [int(size) for size in sizes])))
    sys.stdout.flush()
    # Like a worker: pycuda aborts a process that exits normally and leaves its context behind.
    os._exit(0)
