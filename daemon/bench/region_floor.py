"""`python -m gpulease.daemon.bench.region_floor DRIVER CARD SIZE_BYTES SAMPLES`: times region calls, as JSON.

`gpulease bench --regions` compares its figures with these, which time the calls alone, without a lease or a session.
"""

import json
import os
import sys
import time
from typing import Final

from gpulease.daemon.bench.percentiles import percentile
from gpulease.daemon.zygote.driver_registry import driver_named

SLICE_BYTES: Final = 1 << 30


def measure(driver_name: str, card_uuid: str, size_bytes: int, samples: int) -> dict[str, float]:
    """Return microseconds of opening, ending and releasing one region."""
    driver = driver_named(driver_name)
    driver.preload()
    context = driver.open_context(card_uuid, SLICE_BYTES)
    steps: dict[str, list[float]] = {"floor_open": [], "floor_end": [], "floor_release": []}
    for _ in range(samples):
        times = [time.perf_counter()]
        address = context.region_open(size_bytes)
        # A region is open once its memory is zero.
        while not context.region_is_zeroed():
            pass
        times.append(time.perf_counter())
        context.region_end(address)
        times.append(time.perf_counter())
        context.region_release(address)
        times.append(time.perf_counter())
        for name, begin_s, ended in zip(steps, times, times[1:], strict=False):
            steps[name].append((ended - begin_s) * 1e6)
    return {
        f"{name}_p{percent}_us": percentile(taken, percent) for name, taken in steps.items() for percent in (50, 99)
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))), flush=True)
    # Like a worker: pycuda aborts a process that exits normally and leaves its context behind.
    os._exit(0)
