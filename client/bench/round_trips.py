"""Round trips, pipelined launches and pinned copies of one caller, timed by the same loop for every Python caller.

`client/bench/direct_calls.c` does the same work in C. Each caller checks its results: the kernel counts its launches.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Final

import numpy as np

from gpulease.client import GpuBuilder, GpuSession, KernelArgs
from gpulease.client.bench.figures import percentile, timed_us
from gpulease.client.bench.host_floors import CALLS_IN_TURN, CallFloor

if TYPE_CHECKING:
    from numpy.typing import NDArray

THREADS: Final = 32
ALLOCATION_BYTES: Final = 1 << 20
OTHER_BYTES: Final = 512 << 10
"""Size of another allocation that leaves room for the timed one: the CUDA driver reserves granules of 2 MiB for small
allocations."""

SMALL_COPY_BYTES: Final = 4096
PINNED_BYTES: Final = 16 << 20
PINNED_COPIES: Final = 15
SLICE_BYTES: Final = 256 << 20

WARM_LAUNCHES: Final = 50
BURST_LAUNCHES: Final = 1000
"""Number of launches between two syncs of a pipelined burst: so many that a launch's share of the sync hardly
matters."""

OWN_LAUNCHES: Final = 500
"""Number of launches in a burst that measures the caller's own time: few enough for the CUDA driver's queue, or the
ring, to hold all."""

OWN_BURSTS: Final = 40
TRAIN_LAUNCHES: Final = 20
"""Number of launches before the sync in the row `train_sync`."""

STEP: Final = 3
"""The number that each launch adds to every counter."""

PATTERN: Final = 0x5A

Action = Callable[[], object]


class WrongCallerResult(Exception):
    """A caller's work gave a wrong result, so its times mean nothing."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of one caller, each with its arguments bound.

    Attributes:
        launch: Queues `count` over `THREADS` counters.
        sync: Waits for everything that is queued.
        write_small: Copies `small` to the card.
        read_small: Copies it back into `small`.
        write_pinned: Copies `pinned` to the card.
        read_pinned: Copies it back into `pinned`.
        read_counters: Returns the counters: uint32, shape (THREADS,).
        small: Ordinary memory: uint8, shape (SMALL_COPY_BYTES,).
        pinned: Pinned memory, for a session an array in its arena: uint8, shape (PINNED_BYTES,).
    """

    launch: Action
    sync: Action
    write_small: Action
    read_small: Action
    write_pinned: Action
    read_pinned: Action
    read_counters: "Callable[[], NDArray[np.uint32]]"
    small: "NDArray[np.uint8]"
    pinned: "NDArray[np.uint8]"


def kernel_text() -> bytes:
    """The PTX of the kernel `count`, which adds STEP to each of THREADS counters."""
    return files("gpulease.client.bench").joinpath("round_trips.ptx").read_bytes()


def measure_calls(
    alloc_and_free: Action, open_calls: Callable[[], Calls], launches: int, samples: int
) -> dict[str, float]:
    """Time a caller's calls: microseconds and GB/s, p50 and p99, by the names of the table's rows.

    Args:
        alloc_and_free: Allocates and frees ALLOCATION_BYTES; at first, the caller holds no other allocation.
        open_calls: Allocates and keeps the memory that the other calls need, and OTHER_BYTES more.
        launches: Number of pipelined launches, at least one burst.
        samples: Number of samples of each call that is timed alone.

    Raises WrongCallerResult.
    """
    # Time allocations first without another allocation, then next to others: the driver treats these cases differently.
    timed_us(alloc_and_free, WARM_LAUNCHES)
    figures = _microseconds("alloc_free_alone", timed_us(alloc_and_free, samples))
    calls = open_calls()
    timed_us(alloc_and_free, WARM_LAUNCHES)
    # Measure the host's floor in turn with each figure that is compared with it.
    with contextlib.closing(CallFloor()) as floor:
        figures |= _with_floor("alloc_free_beside", alloc_and_free, samples, floor)
        launched, launch_figures = _launch_figures(calls, launches, samples, floor)
    figures |= launch_figures
    # The counters show whether the caller made every launch. If it did not, its times mean nothing.
    counters = calls.read_counters()
    if not (counters == launched * STEP).all():
        raise WrongCallerResult(f"{launched} launches left {counters[0]} in a counter, not {launched * STEP}")
    return figures | _copy_figures(calls, samples)


def _launch_figures(calls: Calls, launches: int, samples: int, floor: CallFloor) -> tuple[int, dict[str, float]]:
    """Time launches and syncs. Returns the number of launches, and the figures."""
    launch, sync = calls.launch, calls.sync

    def launch_and_sync() -> None:
        launch()
        sync()

    def train() -> None:
        for _ in range(TRAIN_LAUNCHES):
            launch()
        sync()

    # Warm up, so that clocks rise and caches fill.
    timed_us(launch_and_sync, WARM_LAUNCHES)
    bursts = max(1, launches // BURST_LAUNCHES)
    burst_us, floors_us = [], []
    for _ in range(bursts):
        burst_us.append(_burst_us(calls, BURST_LAUNCHES))
        floors_us.append(floor.burst_us(CALLS_IN_TURN))
    figures = _microseconds("launch_pipelined", burst_us)
    figures |= {"launch_pipelined_floor_us": percentile(floors_us, 50)}
    own_us, floor_us = floor.bursts_beside(launch, sync, OWN_LAUNCHES, OWN_BURSTS)
    figures |= _microseconds("launch_own", own_us) | {"launch_own_floor_us": floor_us}
    figures |= _microseconds("launch_sync", timed_us(launch_and_sync, samples))
    figures |= _with_floor("sync_idle", sync, samples, floor)
    figures |= _with_floor("train_sync", train, samples, floor)
    # Count every launch of this function, because the counters must show as many.
    launched = WARM_LAUNCHES + bursts * BURST_LAUNCHES + OWN_BURSTS * OWN_LAUNCHES + samples * (1 + TRAIN_LAUNCHES)
    return launched, figures


def _burst_us(calls: Calls, count: int) -> float:
    """Microseconds per launch of a burst, until all work is done."""
    launch = calls.launch
    started = time.perf_counter()
    for _ in range(count):
        launch()
    calls.sync()
    return (time.perf_counter() - started) / count * 1e6


def _copy_figures(calls: Calls, samples: int) -> dict[str, float]:
    def write_and_sync() -> None:
        calls.write_small()
        calls.sync()

    def write_pinned_and_sync() -> None:
        calls.write_pinned()
        calls.sync()

    figures: dict[str, float] = {}
    # Write the pattern to the card, clear the array, and read: the pattern must come back.
    calls.small[:] = PATTERN
    timed_us(write_and_sync, WARM_LAUNCHES)
    figures |= _microseconds("write_4k_sync", timed_us(write_and_sync, samples))
    # Clear the memory, so that the check below compares only bytes that came from the card.
    calls.small[:] = 0
    figures |= _microseconds("read_4k", timed_us(calls.read_small, samples))
    calls.pinned[:] = PATTERN
    write_pinned_and_sync()
    figures |= _rates("write_16m_pinned", timed_us(write_pinned_and_sync, PINNED_COPIES))
    calls.pinned[:] = 0
    figures |= _rates("read_16m_pinned", timed_us(calls.read_pinned, PINNED_COPIES))
    for name, array in (("4 KiB", calls.small), ("16 MiB", calls.pinned)):
        if not (array == PATTERN).all():
            raise WrongCallerResult(f"{name} came back from the card with other bytes than were written")
    return figures


def _with_floor(name: str, action: Action, samples: int, floor: CallFloor) -> dict[str, float]:
    times_us, floor_us = floor.beside(action, samples)
    return _microseconds(name, times_us) | {f"{name}_floor_us": floor_us}


def _microseconds(name: str, times_us: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p{part}_us": percentile(times_us, part) for part in (50, 99)}


def _rates(name: str, times_us: list[float]) -> dict[str, float]:
    """Return GB/s of PINNED_BYTES at the percentiles 50 and 99 of the times.

    The p99 is the rate of the slowest copies.
    """
    return {f"{name}_p{part}_gb_s": PINNED_BYTES / percentile(times_us, part) / 1e3 for part in (50, 99)}


def measure_session(address: str, launches: int, samples: int) -> dict[str, float]:
    """Time the calls of one session, through the public client. Raises WrongCallerResult."""
    # The other callers use the same card.
    builder = GpuBuilder(address).device("0").min_vram(SLICE_BYTES).lease_secs(600)
    with builder.acquire() as lease, GpuSession(lease) as session:
        return measure_calls(
            lambda: session.mem_free(session.mem_alloc(ALLOCATION_BYTES)),
            lambda: _calls_of(session),
            launches,
            samples,
        )


def _calls_of(session: GpuSession) -> Calls:
    # OTHER_BYTES keep a granule occupied while allocations are timed.
    module = session.module_load(kernel_text())
    other, counters = session.mem_alloc(OTHER_BYTES), session.mem_alloc(THREADS * 4)
    small_buffer, large_buffer = session.mem_alloc(SMALL_COPY_BYTES), session.mem_alloc(PINNED_BYTES)
    args = KernelArgs().push_buffer(counters).push_u32(THREADS).push_u32(STEP)
    grid, block = (1, 1, 1), (THREADS, 1, 1)
    small = np.empty(SMALL_COPY_BYTES, np.uint8)
    pinned = session.empty(PINNED_BYTES, np.uint8)
    counts = np.empty(THREADS, np.uint32)

    def read_counters() -> "NDArray[np.uint32]":
        session.mem_read(counters, 0, counts.nbytes, into=counts)
        return counts

    # The default argument keeps the other allocation alive.
    def launch(_alive: object = other) -> None:
        session.launch(module, "count", grid, block, args)

    return Calls(
        launch,
        session.sync,
        lambda: session.mem_write(small_buffer, 0, small),
        lambda: session.mem_read(small_buffer, 0, SMALL_COPY_BYTES, into=small),
        lambda: session.mem_write(large_buffer, 0, pinned),
        lambda: session.mem_read(large_buffer, 0, PINNED_BYTES, into=pinned),
        read_counters,
        small,
        pinned,
    )
