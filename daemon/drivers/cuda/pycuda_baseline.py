"""The benchmarks' baseline: a program without gpulease, with pycuda alone, in the current context."""

import time
from typing import Final

import numpy as np
import pycuda.driver as cuda

ALLOCATION_BYTES: Final = 1 << 20


def alloc_and_free() -> None:
    """Allocate and free 1 MiB: cuMemAlloc and cuMemFree."""
    cuda.mem_alloc(ALLOCATION_BYTES).free()


def call_us(image: bytes, address: int, count: int, launches: int) -> float:
    """Microseconds for each call of `scale`, with the calls issued back to back and then synchronised."""
    module = cuda.module_from_buffer(image)
    function = module.get_function("scale")
    pointer, length, factor = np.uint64(address), np.uint32(count), np.float32(1)
    block, grid = (count, 1, 1), (1, 1)
    # Warm up: the first calls load the kernel.
    for _ in range(100):
        function(pointer, length, factor, block=block, grid=grid)
    cuda.Context.synchronize()
    started = time.perf_counter()
    for _ in range(launches):
        function(pointer, length, factor, block=block, grid=grid)
    cuda.Context.synchronize()
    return (time.perf_counter() - started) / launches * 1e6
