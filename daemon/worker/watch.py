"""How long the kernel that runs has run, as far as it can be told without waiting for it.

What one stream holds runs in order. So as long as the number of what has ended in it does not change, and a kernel is
next, it is one kernel that runs. Its time counts from the look that saw what was before it ended, or that saw it first:
later than the stream came to it, never earlier. The broker reads on the control page since when the oldest of them has
run as the last look saw it, and ends what runs for too long. A kernel that the card has no room for, beside those of
other streams, can't be told from one that runs.
"""

from typing import Final

from gpulease.daemon.drivers.interface import Context
from gpulease.daemon.worker.page import Counter

LOOKS_PER_BOUND: Final = 8
"""How late a kernel that runs too long is found at most, as a part of the time it may run."""

MAX_LOOK_MS: Final = 1000
"""Between two looks, however long kernels may run."""

MIN_LOOK_MS: Final = 5
"""Between two looks, however short: a look costs microseconds."""


class KernelWatch:
    """Watches one context's kernels, if a bound was asked for."""

    def __init__(self, context: Context, counters: memoryview, max_kernel_ms: int) -> None:
        self.is_on = max_kernel_ms > 0
        self._context = context
        self._counters = counters
        self._running: dict[int, tuple[int, int]] = {}
        self._look_ms = max(MIN_LOOK_MS, min(max_kernel_ms // LOOKS_PER_BOUND, MAX_LOOK_MS))

    def look(self, now_ns: int) -> None:
        """See what has ended; without a bound there is nothing to see."""
        if not self.is_on:
            return
        known, self._running = self._running, {}
        for stream, ended in self._context.running().items():
            seen, since_ns = known.get(stream, (-1, 0))
            self._running[stream] = (ended, since_ns if seen == ended else now_ns)
        self._counters[Counter.KERNEL_SINCE_NS] = min((since_ns for _, since_ns in self._running.values()), default=0)

    def look_after_ms(self) -> int | None:
        """When to look again at the latest, None if nothing runs."""
        return self._look_ms if self._counters[Counter.KERNEL_SINCE_NS] else None
