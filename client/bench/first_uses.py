"""Times of a session's first uses: its first module, launch, copies, graph and region.

Times of repeated calls leave out the preparations of a first call, but short programs make mostly first calls.
"""

import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import numpy as np

from gpulease.client import GpuBuilder, GpuSession, KernelArgs
from gpulease.client.bench.figures import Figures, percentile
from gpulease.client.bench.lease_life import FIRST_PTX
from gpulease.client.console.scene import await_pool

SLICE_BYTES: Final = 256 << 20
SMALL_BYTES: Final = 4096
LARGE_BYTES: Final = 16 << 20
REGION_BYTES: Final = 2 << 20
GRAPH_LAUNCHES: Final = 20

T = TypeVar("T")


def first_uses(address: str, count: int) -> Figures:
    """Return the microseconds of each first use: medians of `count` sessions, each with a ready context."""
    sessions = []
    for _ in range(count):
        await_pool(address)
        sessions.append(_one_session_us(address))
    return {f"{name}_us": percentile([taken_us[name] for taken_us in sessions], 50) for name in sessions[0]}


def _one_session_us(address: str) -> Figures:
    taken_us: Figures = {}

    def first(name: str, action: Callable[[], T]) -> T:
        started = time.perf_counter()
        result = action()
        taken_us[name] = (time.perf_counter() - started) * 1e6
        return result

    # Make arrays of ones, so that their pages are touched before the copies.
    small, large = np.ones(SMALL_BYTES, np.uint8), np.ones(LARGE_BYTES, np.uint8)
    builder = GpuBuilder(address).device("0").min_vram(SLICE_BYTES).lease_secs(60)
    with builder.acquire() as lease, GpuSession(lease) as session:
        session.sync()
        # Give the kernel a new name, so that no compiler's cache has it.
        ptx = FIRST_PTX % secrets.token_hex(8).encode()
        buffer = first("alloc", partial(session.mem_alloc, LARGE_BYTES))
        module = first("module", partial(session.module_load, ptx))
        kernel, args = next(iter(module.kernels)), KernelArgs().push_buffer(buffer)
        launch = partial(session.launch, module, kernel, (1,), (1,), args)

        def wait_for(action: Callable[[], object]) -> Callable[[], None]:
            def both() -> None:
                action()
                session.sync()

            return both

        first("launch_sync", wait_for(launch))
        first("write_4k", wait_for(partial(session.mem_write, buffer, 0, small)))
        first("read_4k", partial(session.mem_read, buffer, 0, SMALL_BYTES, into=small))
        first("write_16m", wait_for(partial(session.mem_write, buffer, 0, large)))
        first("read_16m", partial(session.mem_read, buffer, 0, LARGE_BYTES, into=large))
        with session.record() as graph:
            for _ in range(GRAPH_LAUNCHES):
                launch()
        first("graph_sync", wait_for(graph.launch))
        region = first("region", partial(lease.region, REGION_BYTES, ttl_secs=60))
        names = session.region_set([region])
        first("launch_in_region_sync", wait_for(partial(launch, regions=names)))
        region.free()
        region.close()
    return taken_us
