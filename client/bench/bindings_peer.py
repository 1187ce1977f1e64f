"""`python -m gpulease.client.bench.bindings_peer LAUNCHES SAMPLES`: the round trips with cuda-bindings, as JSON.

It uses no daemon and no lease: these are the calls of a program without gpulease, which packs its arguments once.
"""

import ctypes
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from cuda.bindings import driver as api

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


class BindingsCallFailed(Exception):
    """A call to the CUDA driver returned an error."""


def measure(launches: int, samples: int) -> dict[str, float]:
    """Time the calls on the first card that this process sees. Raises BindingsCallFailed and WrongCallerResult."""
    # Measure a program's start: from cuInit until a context has finished its first wait.
    started = time.perf_counter()
    _checked(api.cuInit(0))
    card = _checked(api.cuDeviceGet(0))
    _checked(api.cuCtxSetCurrent(_checked(api.cuDevicePrimaryCtxRetain(card))))
    _checked(api.cuCtxSynchronize())
    opened_ms = (time.perf_counter() - started) * 1e3
    return {"session_start_p50_ms": opened_ms} | measure_calls(_alloc_and_free, _open_calls, launches, samples)


def _checked(answer: tuple[Any, ...]) -> Any:
    """The result of a call, without its status. Raises BindingsCallFailed."""
    if answer[0]:
        raise BindingsCallFailed(str(answer[0]))
    return answer[1] if len(answer) > 1 else None


def _alloc_and_free() -> None:
    error, address = api.cuMemAlloc(ALLOCATION_BYTES)
    if error or api.cuMemFree(address)[0]:
        raise BindingsCallFailed("cuMemAlloc or cuMemFree")


def _open_calls() -> Calls:
    # Allocate OTHER_BYTES first, so that the timed allocations are not the process's first ones.
    text = ctypes.create_string_buffer(kernel_text())
    module = _checked(api.cuModuleLoadData(ctypes.addressof(text)))
    function = _checked(api.cuModuleGetFunction(module, b"count"))
    _checked(api.cuMemAlloc(OTHER_BYTES))
    counters, card_small, card_large = (
        _checked(api.cuMemAlloc(size)) for size in (THREADS * 4, SMALL_COPY_BYTES, PINNED_BYTES)
    )
    _checked(api.cuMemsetD8(counters, 0, THREADS * 4))
    # Use two kinds of host memory: an ordinary array, and pinned memory that the driver allocates.
    small, counts = np.empty(SMALL_COPY_BYTES, np.uint8), np.empty(THREADS, np.uint32)
    pinned_address = int(_checked(api.cuMemHostAlloc(PINNED_BYTES, 0)))
    pinned = np.ctypeslib.as_array((ctypes.c_uint8 * PINNED_BYTES).from_address(pinned_address))
    # Pack the arguments once. A launch passes an array of pointers to their values.
    values = ctypes.c_uint64(int(counters)), ctypes.c_uint32(THREADS), ctypes.c_uint32(STEP)
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    packed, small_address = ctypes.addressof(pointers), small.ctypes.data
    # Bind the functions, so that a call costs no look-up.
    launch_kernel, synchronize = api.cuLaunchKernel, api.cuCtxSynchronize
    to_card, from_card = api.cuMemcpyHtoD, api.cuMemcpyDtoH

    # The default argument keeps the packed values alive as long as the function.
    def launch(_alive: object = (values, pointers)) -> None:
        if launch_kernel(function, 1, 1, 1, THREADS, 1, 1, 0, 0, packed, 0)[0]:
            raise BindingsCallFailed("cuLaunchKernel")

    def sync() -> None:
        if synchronize()[0]:
            raise BindingsCallFailed("cuCtxSynchronize")

    def read_counters() -> "NDArray[np.uint32]":
        _checked(from_card(counts.ctypes.data, counters, counts.nbytes))
        return counts

    return Calls(
        launch,
        sync,
        lambda: _checked(to_card(card_small, small_address, SMALL_COPY_BYTES)),
        lambda: _checked(from_card(small_address, card_small, SMALL_COPY_BYTES)),
        lambda: _checked(to_card(card_large, pinned_address, PINNED_BYTES)),
        lambda: _checked(from_card(pinned_address, card_large, PINNED_BYTES)),
        read_counters,
        small,
        pinned,
    )


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))), flush=True)
