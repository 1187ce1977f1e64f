"""Every timer of the lease table, on one timer of the loop.

There are a few for each lease, and most never ring: a renewal puts one off, the end of a lease cancels it. So they wait
unsorted by the slot of time in which they are due, and are sorted when it begins (a timing wheel: Varghese and Lauck,
"Hashed and hierarchical timing wheels", 1987). Nothing takes longer for there being many, and of one that was cancelled
nothing is left, or not for longer than a slot.
"""

import asyncio
import heapq
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

from gpulease.daemon.leases import Event

SLOT_BITS: Final = 27
"""Of a slot's length in nanoseconds, 0.13 s: what begins a slot sorts what is due in it, and holds up the loop so."""

NS_PER_S: Final = 1_000_000_000


@dataclass(slots=True, eq=False)
class _Timer:
    due_ns: int
    event: Event | None
    """None of one that was cancelled while it was being sorted."""


class Timers:
    """Events at their time, which is monotonic, in nanoseconds; each by a key of its own.

    Args:
        post: Gets an event no earlier than it is due, once.
        secure: Called before any is looked for: what is done then needs memory, and all timers wait for it.
    """

    def __init__(self, post: Callable[[Event], None], secure: Callable[[], None]) -> None:
        self._post = post
        self._secure = secure
        self._timers: dict[Hashable, _Timer] = {}
        self._slots: dict[int, dict[Hashable, _Timer]] = {}
        # Those of slots that have begun: when, a number that is nobody else's, by what key, and which.
        self._near: list[tuple[int, int, Hashable, _Timer]] = []
        self._last_begun = time.monotonic_ns() >> SLOT_BITS
        self._sorted = 0
        self._handle: asyncio.TimerHandle | None = None
        self._handle_ns = 0

    def arm(self, key: Hashable, due_ns: int, event: Event) -> None:
        """Post an event then, instead of what was armed by this key."""
        self.cancel(key)
        timer = self._timers[key] = _Timer(due_ns, event)
        slot = due_ns >> SLOT_BITS
        if slot > self._last_begun:
            self._slots.setdefault(slot, {})[key] = timer
        else:
            self._sort(key, timer)
        if self._handle is None or due_ns < self._handle_ns:
            self._wind()

    def cancel(self, key: Hashable) -> None:
        """Post nothing of this key, if anything was armed."""
        if (timer := self._timers.pop(key, None)) is None:
            return
        timer.event = None
        slot = timer.due_ns >> SLOT_BITS
        if (others := self._slots.get(slot)) is not None and others.pop(key, None) is not None and not others:
            del self._slots[slot]

    def stop(self) -> None:
        """Post nothing any more."""
        self._timers.clear()
        self._slots.clear()
        self._near.clear()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def __len__(self) -> int:
        return len(self._timers)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._timers

    def _sort(self, key: Hashable, timer: _Timer) -> None:
        self._sorted += 1
        heapq.heappush(self._near, (timer.due_ns, self._sorted, key, timer))

    def _begin_slots(self, now_ns: int) -> None:
        now = now_ns >> SLOT_BITS
        # There may be very many after a pause, and few that anything is in.
        missed = range(self._last_begun + 1, now + 1)
        due = missed if len(missed) <= len(self._slots) else [slot for slot in self._slots if slot <= now]
        for slot in due:
            for key, timer in self._slots.pop(slot, {}).items():
                self._sort(key, timer)
        self._last_begun = now

    def _wind(self) -> None:
        """Have the loop call when the first is due, or the next slot begins."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if not self._timers:
            return
        self._handle_ns = (self._last_begun + 1) << SLOT_BITS
        if self._near:
            self._handle_ns = min(self._handle_ns, self._near[0][0])
        delay_s = max(0, self._handle_ns - time.monotonic_ns()) / NS_PER_S
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._handle = None
        try:
            self._secure()
            # The loop's own clock is coarser: it may be early.
            now_ns = time.monotonic_ns()
            self._begin_slots(now_ns)
            while self._near and self._near[0][0] <= now_ns:
                _, _, key, timer = heapq.heappop(self._near)
                if timer.event is not None:
                    del self._timers[key]
                    self._post(timer.event)
        finally:
            self._wind()
