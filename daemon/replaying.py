"""Launch graphs called directly, without a lease: see `direct`."""

import struct
import time
from collections.abc import Callable, Iterator
from typing import Final

from gpulease.daemon.drivers.interface import Context, Dim3, Kernel, keep_waiting
from gpulease.daemon.drivers.steps import KernelStep, admit_any

LAUNCHES: Final = 20
CALLS: Final = 200
"""Graphs launched without a wait: fewer than the driver lets wait."""

ONE: Final[Dim3] = (1, 1, 1)


def graph_figures(context: Context, kernel: Kernel, block: Dim3, params: bytes, samples: int) -> dict[str, float]:
    """Microseconds of twenty launches, as calls and as one graph; the last of `params` is a float."""
    graph = context.graph([KernelStep(kernel, ONE, block, 0, params)] * LAUNCHES, admit_any)
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


def _timed_us(action: Callable[[], None], count: int) -> list[float]:
    """Sorted."""
    samples = []
    for _ in range(count):
        started = time.perf_counter()
        action()
        samples.append((time.perf_counter() - started) * 1e6)
    return sorted(samples)
