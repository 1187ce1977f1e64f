"""All timers of the lease table, on one timer of the event loop: a timing wheel.

Each lease has a few timers, and most never fire: a renewal postpones a timer, and the end of a lease cancels it. So
timers wait unsorted in the slot of time in which they are due, and are sorted when the slot begins. No operation takes
longer when there are many timers. A cancelled timer leaves nothing behind after its slot has passed.

Source: Varghese and Lauck, "Hashed and hierarchical timing wheels", 1987.
"""

import asyncio
import heapq
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Final

from gpulease.daemon.leases.events import Event, TimerFired, TimerKind
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.time_units import NS_PER_S

SLOT_BITS: Final = 27
"""Bits of a slot's length in nanoseconds: 0.13 s. A slot that begins sorts its timers, which blocks the loop."""

LATE_NS: Final = 1 * NS_PER_S
"""If a timer is noticed later than this, the process has missed it: the process was stopped, or frozen with its
container."""

AFTER_STOP_NS: Final = 10 * NS_PER_S
"""Time that other processes get, after this process was stopped, to finish the work for which a patient timer waits.
Often the work is done already, and only this process has not read the result; or those processes were frozen, too.
"""

_PATIENT: Final = frozenset({TimerKind.SPAWN, TimerKind.RECLAIM, TimerKind.PARK, TimerKind.ORPHAN})
"""Timers after which a worker, a card or a client counts as failed. All other timers are for promised times, so a stop
does not delay them further."""


@dataclass(slots=True, eq=False)
class _Timer:
    """A timer.

    Attributes:
        due_ns: When the event is posted.
        event: None once the timer was cancelled.
        missed_ns: When it was due before it was deferred; None if it was not.
    """

    due_ns: int
    event: Event | None
    missed_ns: int | None = None


class Timers:
    """Posts each event once, at its monotonic time in nanoseconds or later. Each timer has its own key.

    If this process was stopped, the patient timers that became due during the stop are deferred once, by AFTER_STOP_NS.

    Args:
        secure: Called before due timers are processed. Posting needs memory, and every timer depends on it.
    """

    def __init__(self, post: Callable[[Event], None], secure: Callable[[], None]) -> None:
        self._post = post
        self._secure = secure
        self._timers: dict[Hashable, _Timer] = {}
        # Timers of later slots, unsorted.
        self._slots: dict[int, dict[Hashable, _Timer]] = {}
        # A heap of the timers of slots that have begun: due time, a serial number, key and timer.
        self._heap: list[tuple[int, int, Hashable, _Timer]] = []
        self._current_slot = time.monotonic_ns() >> SLOT_BITS
        self._last_serial = 0
        self._handle: asyncio.TimerHandle | None = None
        self._handle_ns = 0

    def arm(self, key: Hashable, due_ns: int, event: Event) -> None:
        """Post `event` at `due_ns`. Replaces the timer with this key, if there is one.

        If that timer was deferred from the same time, the new one is posted when the old one would have been: a renewal
        arms the timers of its lease again, and must neither end the delay nor begin another one.
        """
        former = self._timers.get(key)
        self.cancel(key)
        if former is not None and former.missed_ns == due_ns:
            self._add(key, _Timer(former.due_ns, event, due_ns))
        else:
            self._add(key, _Timer(due_ns, event))

    def _add(self, key: Hashable, timer: _Timer) -> None:
        self._timers[key] = timer
        # Near timers go to the heap, all others wait unsorted in their slot.
        due_ns = timer.due_ns
        slot = due_ns >> SLOT_BITS
        if slot > self._current_slot:
            self._slots.setdefault(slot, {})[key] = timer
        else:
            self._push(key, timer)
        if self._handle is None or due_ns < self._handle_ns:
            self._schedule()

    def cancel(self, key: Hashable) -> None:
        """Drop the timer with this key, if there is one."""
        if (timer := self._timers.pop(key, None)) is None:
            return
        # A heap can't drop an entry cheaply, so the entry stays there without its event. A slot can drop it.
        timer.event = None
        slot = timer.due_ns >> SLOT_BITS
        if (others := self._slots.get(slot)) is not None and others.pop(key, None) is not None and not others:
            del self._slots[slot]

    def cancel_each(self, keys: Iterable[Hashable]) -> None:
        """Drop the timers with these keys. Most keys have none."""
        for key in keys:
            if key in self._timers:
                self.cancel(key)

    def stop(self) -> None:
        self._timers.clear()
        self._slots.clear()
        self._heap.clear()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def __len__(self) -> int:
        return len(self._timers)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._timers

    def _push(self, key: Hashable, timer: _Timer) -> None:
        # The serial number orders timers that are due at the same time, so that their keys are never compared.
        self._last_serial += 1
        heapq.heappush(self._heap, (timer.due_ns, self._last_serial, key, timer))

    def _begin_slots(self, now_ns: int) -> None:
        """Move the timers of all slots up to `now_ns` to the heap, which sorts them."""
        now_slot = now_ns >> SLOT_BITS
        # After a pause many slots may have passed, but few of them have a timer. Walk the smaller set.
        passed = range(self._current_slot + 1, now_slot + 1)
        slots = passed if len(passed) <= len(self._slots) else [slot for slot in self._slots if slot <= now_slot]
        for slot in slots:
            for key, timer in self._slots.pop(slot, {}).items():
                self._push(key, timer)
        self._current_slot = now_slot

    def _schedule(self) -> None:
        """Schedule the next call for the time when the first timer is due, or when the next slot begins."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        if not self._timers:
            return
        # That is the start of the next slot, when its timers must be sorted, unless a timer is due earlier.
        self._handle_ns = (self._current_slot + 1) << SLOT_BITS
        if self._heap:
            self._handle_ns = min(self._handle_ns, self._heap[0][0])
        delay_s = max(0, self._handle_ns - time.monotonic_ns()) / NS_PER_S
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._post_due)

    def _post_due(self) -> None:
        self._handle = None
        try:
            self._secure()
            # The loop's clock is coarser, so this call may come early.
            now_ns = time.monotonic_ns()
            self._begin_slots(now_ns)
            while self._heap and self._heap[0][0] <= now_ns:
                _, _, key, timer = heapq.heappop(self._heap)
                # A cancelled timer stays in the heap without an event.
                if timer.event is None:
                    continue
                del self._timers[key]
                if _is_patient(timer) and now_ns - timer.due_ns > LATE_NS:
                    self._add(key, _Timer(now_ns + AFTER_STOP_NS, timer.event, timer.due_ns))
                else:
                    self._post(timer.event)
        finally:
            self._schedule()


def _is_patient(timer: _Timer) -> bool:
    """Return whether a timer that is noticed late may be deferred; a timer is deferred only once."""
    return isinstance(timer.event, TimerFired) and timer.event.kind in _PATIENT and timer.missed_ns is None
