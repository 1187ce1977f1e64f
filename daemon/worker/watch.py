"""How long the kernel that runs has run, as far as it can be told without waiting for it.

Launches of one context run in order. So when fewer have ended than were queued, and the number of those that have ended
does not change, it is one kernel that runs. Its time counts from the look that saw the one before it ended, or that saw
it first: later than it began, never earlier. The broker reads on the control page what the last look saw, and ends what
runs for too long.
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
        self._ended = 0
        self._look_ms = max(MIN_LOOK_MS, min(max_kernel_ms // LOOKS_PER_BOUND, MAX_LOOK_MS))

    def look(self, now_ns: int) -> None:
        """See what has ended; without a bound there is nothing to see."""
        if not self.is_on:
            return
        queued, ended = self._context.progress()
        since = self._counters[Counter.KERNEL_SINCE_NS]
        if queued == ended:
            since = 0
        elif ended != self._ended or not since:
            since = now_ns
        self._ended = ended
        self._counters[Counter.KERNEL_SINCE_NS] = since

    def look_after_ms(self) -> int | None:
        """When to look again at the latest, None if nothing runs."""
        return self._look_ms if self._counters[Counter.KERNEL_SINCE_NS] else None
