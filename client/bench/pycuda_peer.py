"""`python -m gpulease.client.bench.pycuda_peer LAUNCHES SAMPLES`: the round trips with pycuda, as JSON.

It uses no daemon and no lease. Launches are prepared calls, which are pycuda's fastest.
"""

import json
import os
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pycuda.driver as cuda

from gpulease.client.bench.round_trips import (
    ALLOCATION_BYTES,
    OTHER_BYTES,
    PINNED_BYTES,
    SMALL_COPY_BYTES,
    STEP,
    THREADS,
    Calls,
    kernel_text,
    measure_calls,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def measure(launches: int, samples: int) -> dict[str, float]:
    """Time the calls on the first card that this process sees. Raises pycuda's Error and WrongCallerResult."""
    started = time.perf_counter()
    cuda.init()
    # This variable keeps the context alive. pycuda destroys a context without references.
    context = cuda.Device(0).make_context()
    context.synchronize()
    opened_ms = (time.perf_counter() - started) * 1e3
    return {"session_start_p50_ms": opened_ms} | measure_calls(_alloc_and_free, _open_calls, launches, samples)


def _alloc_and_free() -> None:
    cuda.mem_alloc(ALLOCATION_BYTES).free()


def _open_calls() -> Calls:
    # Prepare the function once, so that a call only packs three numbers.
    module = cuda.module_from_buffer(kernel_text())
    function = module.get_function("count")
    function.prepare("PII")
    other, counters, card_small, card_large = (
        cuda.mem_alloc(size) for size in (OTHER_BYTES, THREADS * 4, SMALL_COPY_BYTES, PINNED_BYTES)
    )
    cuda.memset_d8(counters, 0, THREADS * 4)
    small, counts = np.empty(SMALL_COPY_BYTES, np.uint8), np.empty(THREADS, np.uint32)
    pinned = cuda.pagelocked_empty(PINNED_BYTES, np.uint8)
    # Look up the names that every call needs once.
    call, address, grid, block = function.prepared_call, int(counters), (1, 1), (THREADS, 1, 1)

    # The default argument keeps module and memory, which pycuda unloads and frees without references.
    def launch(_alive: object = (module, other, counters)) -> None:
        call(grid, block, address, THREADS, STEP)

    def read_counters() -> "NDArray[np.uint32]":
        cuda.memcpy_dtoh(counts, counters)
        return counts

    return Calls(
        launch,
        cuda.Context.synchronize,
        lambda: cuda.memcpy_htod(card_small, small),
        lambda: cuda.memcpy_dtoh(small, card_small),
        lambda: cuda.memcpy_htod(card_large, pinned),
        lambda: cuda.memcpy_dtoh(pinned, card_large),
        read_counters,
        small,
        pinned,
    )


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))), flush=True)
    # pycuda aborts a process that exits normally and leaves its context behind.
    os._exit(0)
