from dataclasses import dataclass
from typing import cast

import pytest

from gpulease.daemon.drivers.interface import Context
from gpulease.daemon.worker.page import Counter
from gpulease.daemon.worker.watch import MAX_LOOK_MS, MIN_LOOK_MS, KernelWatch


@dataclass
class MadeContext:
    """Counts of launches are all a watch knows of a context."""

    queued: int = 0
    ended: int = 0

    def progress(self) -> tuple[int, int]:
        return self.queued, self.ended


def watch_of(context: MadeContext, max_kernel_ms: int) -> tuple[KernelWatch, memoryview]:
    counters = memoryview(bytearray(8 * len(Counter))).cast("Q")
    return KernelWatch(cast(Context, context), counters, max_kernel_ms), counters


def test_time_counts_from_the_look_that_saw_the_one_before_end() -> None:
    context = MadeContext()
    watch, counters = watch_of(context, 1000)
    # (now, queued, ended, since)
    for now_ns, context.queued, context.ended, since_ns in (
        (10, 0, 0, 0),
        (20, 3, 0, 20),
        (30, 3, 0, 20),
        (40, 9, 1, 40),
        (50, 9, 1, 40),
        (60, 9, 9, 0),
        (70, 10, 9, 70),
        # Ended and another begun between two looks.
        (80, 11, 10, 80),
    ):
        watch.look(now_ns)
        assert counters[Counter.KERNEL_SINCE_NS] == since_ns, now_ns


@pytest.mark.parametrize(("max_kernel_ms", "look_ms"), [(8, MIN_LOOK_MS), (800, 100), (60_000, MAX_LOOK_MS)])
def test_how_often_it_looks(max_kernel_ms: int, look_ms: int) -> None:
    watch, _ = watch_of(MadeContext(queued=1), max_kernel_ms)
    assert watch.look_after_ms() is None
    watch.look(5)
    assert watch.look_after_ms() == look_ms


def test_without_a_bound_nothing_is_looked_at() -> None:
    watch, counters = watch_of(MadeContext(queued=1), 0)
    watch.look(5)
    assert (counters[Counter.KERNEL_SINCE_NS], watch.look_after_ms(), watch.is_on) == (0, None, False)
