"""What work through a lease costs, seen from the tenant."""

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from gpulease.client import Buffer, GpuBuilder, GpuSession, KernelArgs
from gpulease.client.bench.figures import gigabytes_per_s, per_call_us, percentile, timed_us
from gpulease.client.cli.reports import first_card

if TYPE_CHECKING:
    from numpy.typing import NDArray

SLICE_BYTES: Final = 256 << 20
COPY_SIZES: Final = (16 << 20,)
"""Of large copies, in bytes, whole MiB."""

CARD_COPY_SIZES: Final = (16 << 20, 256 << 20)
"""The same where a bus lies between: the embedded driver's memory is the host's."""

COPIES: Final = 15
"""Of each such size and direction; the median counts."""

SMALL_COPY_BYTES: Final = 4096
THREADS: Final = 32

OWN_LAUNCHES: Final = 500
"""Launches of which the client's own share is told: few enough that they never wait for room, whatever the worker does
meanwhile."""

OWN_BURSTS: Final = 40
POOL_TIMEOUT_S: Final = 30.0
"""For a pool to be full again; a context takes 0.3 s."""

_LOOK_S: Final = 0.01

FIRST_PTX: Final = b""".version 7.0
.target sm_75
.address_size 64
.visible .entry first_%s(.param .u64 into)
{
    .reg .b32 %%r1;
    .reg .b64 %%rd<3>;
    ld.param.u64 %%rd1, [into];
    cvta.to.global.u64 %%rd2, %%rd1;
    mov.u32 %%r1, 1;
    st.global.u32 [%%rd2], %%r1;
    ret;
}
"""
"""A kernel of a name that no compiler's cache knows."""


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
        } | _small_copies(session, samples)


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


def copy_sizes(driver: str) -> tuple[int, ...]:
    """How large the large copies are, in bytes."""
    return CARD_COPY_SIZES if driver == "cuda" else COPY_SIZES


def bulk_copies(address: str, sizes: tuple[int, ...], *, shared_memory: bool = True) -> dict[str, float]:
    """GB/s of ordinary arrays, and of arrays that session and worker share, if they share any."""
    figures: dict[str, float] = {}
    for size in sizes:
        wanted = GpuBuilder(address).device("0").min_vram(size).lease_secs(600)
        with wanted.acquire() as lease, GpuSession(lease, shared_memory=shared_memory) as session:
            buffer, name = session.mem_alloc(size), f"{size >> 20}m"
            for prefix, array in (("", np.empty(size, np.uint8)), ("arena_", session.empty(size, np.uint8))):
                figures |= _copies(session, buffer, f"{prefix}{{}}_{name}_gb_s", array)
    return figures


def _copies(session: GpuSession, buffer: Buffer, name: str, array: "NDArray[np.uint8]") -> dict[str, float]:
    array[:] = 1

    def write() -> None:
        session.mem_write(buffer, 0, array)

    def read() -> None:
        session.mem_read(buffer, 0, array.nbytes, into=array)

    # The first copy pins what it goes through.
    write()
    return {
        name.format("write"): gigabytes_per_s(write, array.nbytes, COPIES),
        name.format("read"): gigabytes_per_s(read, array.nbytes, COPIES),
    }


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


def acquisition(address: str, count: int) -> dict[str, float]:
    """From asking for a lease to its session's first answer, and from giving it back to memory proved free."""
    return _figures([_lease(address) for _ in range(count)], ("acquire", "first_kernel", "free"))


def warm_acquisition(address: str, count: int) -> dict[str, float]:
    """The same of leases that take a context made ahead: each is asked for once all that are wanted are there."""
    rounds = []
    for _ in range(count):
        await_pool(address)
        rounds.append(_lease(address))
    return _figures(rounds, ("warm_acquire", "warm_first_kernel"))


def _lease(address: str) -> tuple[float, ...]:
    """Milliseconds to the first answer, and to the end of a kernel that nobody has seen; and of the lease's end."""
    ptx = FIRST_PTX % secrets.token_hex(8).encode()
    started = time.perf_counter()
    lease = GpuBuilder(address).device("0").min_vram(SLICE_BYTES).lease_secs(60).acquire()
    with GpuSession(lease) as session:
        session.sync()
        answered = time.perf_counter()
        module, into = session.module_load(ptx), session.mem_alloc(4)
        session.launch(module, next(iter(module.kernels)), (1,), (1,), KernelArgs().push_buffer(into))
        session.sync()
        done = time.perf_counter()
    freeing = time.perf_counter()
    lease.free()
    freed = time.perf_counter()
    return tuple(seconds * 1e3 for seconds in (answered - started, done - started, freed - freeing))


def await_pool(address: str) -> None:
    """Return once the first card's pool has all the contexts that are wanted. Raises RuntimeError if it never has."""
    until = time.monotonic() + POOL_TIMEOUT_S
    while True:
        card = first_card(address, "warm_contexts", "warm_wanted")
        if card["warm_contexts"] >= card["warm_wanted"]:
            return
        if time.monotonic() > until:
            raise RuntimeError(f"the pool has {card['warm_contexts']} of {card['warm_wanted']} contexts")
        time.sleep(_LOOK_S)


def _figures(rounds: list[tuple[float, ...]], names: tuple[str, ...]) -> dict[str, float]:
    columns = zip(names, zip(*rounds, strict=True), strict=False)
    return {f"{name}_p{part}_ms": percentile(samples, part) for name, samples in columns for part in (50, 99)}
