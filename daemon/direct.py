"""`python -m gpulease.daemon.direct DRIVER PTX_FILE`: the same work without a lease, as one JSON object.

What `gpulease bench` holds its figures against: the driver called in this very process, by the calls a program without
gpulease would make.
"""

import json
import mmap
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpulease.daemon.cards.choice import choose_cards
from gpulease.daemon.drivers.interface import Context, Dim3
from gpulease.daemon.drivers.registry import driver_named
from gpulease.daemon.replaying import graph_figures

COPY_BYTES: Final = 16 << 20
LARGE_COPY_BYTES: Final = 256 << 20
SMALL_COPY_BYTES: Final = 4096
SLICE_BYTES: Final = 256 << 20
THREADS: Final = 32
ONE: Final[Dim3] = (1, 1, 1)


def measure(driver_name: str, ptx: bytes, launches: int, samples: int) -> dict[str, float]:
    """Microseconds and GB/s of the driver's own calls."""
    driver_name, context = _open(driver_name)
    module = context.module_load(ptx)
    kernel = module.kernels["scale"]
    address = context.mem_alloc(THREADS * 4)
    params = address.to_bytes(8, "little") + THREADS.to_bytes(4, "little") + b"\0\0\x80\x3f"

    def launch() -> None:
        context.launch(kernel, ONE, (THREADS, 1, 1), 0, params, 1)

    def sync() -> None:
        context.sync()

    def launch_and_sync() -> None:
        launch()
        sync()

    _timed_us(launch_and_sync, 50)
    round_trips = _timed_us(launch_and_sync, samples)
    started = time.perf_counter()
    for _ in range(launches):
        launch()
    sync()
    figures = {
        "launch_pipelined_us": (time.perf_counter() - started) / launches * 1e6,
        "launch_sync_p50_us": round_trips[samples // 2],
        "launch_sync_p99_us": round_trips[samples * 99 // 100],
        "sync_p50_us": _timed_us(sync, samples)[samples // 2],
        "alloc_free_p50_us": _timed_us(lambda: context.mem_free(context.mem_alloc(1 << 20)), samples)[samples // 2],
    }
    figures |= graph_figures(context, kernel, (THREADS, 1, 1), params, samples)
    figures |= _copies(context, samples)
    pinned = memoryview(mmap.mmap(-1, LARGE_COPY_BYTES if driver_name == "cuda" else COPY_BYTES))
    context.pin(pinned)
    figures |= _pinned_copies(context, "16m", pinned[:COPY_BYTES])
    if driver_name == "cuda":
        figures |= _pinned_copies(context, "256m", pinned)
        from gpulease.daemon.drivers.cuda.baseline import call_us

        figures["pycuda_call_us"] = call_us(module, address, THREADS, launches)
    context.close()
    return figures


def _open(wanted: str) -> tuple[str, Context]:
    source = choose_cards(wanted, ())
    driver = driver_named(source.driver)
    driver.preload()
    return source.driver, driver.open_context(source.discover()[0].uuid, SLICE_BYTES)


def _copies(context: Context, samples: int) -> dict[str, float]:
    host = memoryview(bytearray(COPY_BYTES))
    small = host[:SMALL_COPY_BYTES]
    address = context.mem_alloc(COPY_BYTES)
    return {
        "write_gb_s": COPY_BYTES / _timed_us(lambda: context.mem_write(address, host), 15)[7] / 1e3,
        "read_gb_s": COPY_BYTES / _timed_us(lambda: context.mem_read(address, host), 15)[7] / 1e3,
        "write_4k_p50_us": _timed_us(lambda: context.mem_write(address, small), samples)[samples // 2],
        "read_4k_p50_us": _timed_us(lambda: context.mem_read(address, small), samples)[samples // 2],
    }


def _pinned_copies(context: Context, name: str, host: memoryview) -> dict[str, float]:
    size = len(host)
    address = context.mem_alloc(size)
    figures = {
        f"arena_write_{name}_gb_s": size / _timed_us(lambda: context.write_pinned(address, host), 15)[7] / 1e3,
        f"arena_read_{name}_gb_s": size / _timed_us(lambda: context.read_pinned(address, host), 15)[7] / 1e3,
    }
    context.mem_free(address)
    return figures


def _timed_us(action: Callable[[], object], count: int) -> list[float]:
    """Sorted."""
    samples = []
    for _ in range(count):
        started = time.perf_counter()
        action()
        samples.append((time.perf_counter() - started) * 1e6)
    return sorted(samples)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]).read_bytes(), int(sys.argv[3]), int(sys.argv[4]))))
    sys.stdout.flush()
