from dataclasses import dataclass, field
from typing import cast

import pytest

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.drivers.interface import Context
from gpulease.daemon.session.launches import MAX_POLL_MS, MIN_POLL_MS, KernelWatch


@dataclass
class MadeContext:
    """A context that only tells where its streams' kernels stand."""

    queued: int = 0
    ended: int = 0
    others: dict[int, int] = field(default_factory=dict)

    def running(self) -> dict[int, int]:
        return self.others | ({0: self.ended} if self.queued != self.ended else {})


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
        watch.poll(now_ns)
        assert counters[Counter.KERNEL_SINCE_NS] == since_ns, now_ns


def test_the_oldest_of_several_streams_counts() -> None:
    context = MadeContext()
    watch, counters = watch_of(context, 1000)
    # (now, what stream 0 has ended, of those others that run, since)
    for now_ns, ended, others, since_ns in (
        (10, 1, {}, 10),
        (20, 1, {3: 0}, 10),
        # One stream goes on, the kernel of the other still runs.
        (30, 2, {3: 0}, 20),
        (40, 3, {3: 0, 4: 7}, 20),
        (50, 4, {3: 1, 4: 7}, 40),
        # It waits for another stream: that is no kernel's time.
        (60, 4, {3: 1}, 50),
        (70, 4, {3: 1, 4: 8}, 50),
        (80, 5, {4: 8}, 70),
    ):
        context.queued, context.ended, context.others = 100, ended, others
        watch.poll(now_ns)
        assert counters[Counter.KERNEL_SINCE_NS] == since_ns, now_ns
    context.queued, context.others = 5, {}
    watch.poll(90)
    assert watch.next_poll_in_ms() is None


@pytest.mark.parametrize(("max_kernel_ms", "look_ms"), [(8, MIN_POLL_MS), (800, 100), (60_000, MAX_POLL_MS)])
def test_the_time_between_looks_follows_the_bound(max_kernel_ms: int, look_ms: int) -> None:
    watch, _ = watch_of(MadeContext(queued=1), max_kernel_ms)
    assert watch.next_poll_in_ms() is None
    watch.poll(5)
    assert watch.next_poll_in_ms() == look_ms


def test_without_a_bound_nothing_is_looked_at() -> None:
    watch, counters = watch_of(MadeContext(queued=1), 0)
    watch.poll(5)
    assert (counters[Counter.KERNEL_SINCE_NS], watch.next_poll_in_ms(), watch.is_on) == (0, None, False)
