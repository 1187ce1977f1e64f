"""Events come at their time, once, and nothing is kept of those that never come."""

import asyncio
from collections.abc import Coroutine, Hashable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.virtual import CLOCK, VirtualLoop, virtual_time
from gpulease.daemon.broker.timers import AFTER_STOP_NS, SLOT_BITS, Timers
from gpulease.daemon.leases.events import Event, TimerFired, TimerKind, WaitTimerFired

MS = 1_000_000
LATE_NS = 10_000
"""The virtual loop counts in floating-point seconds."""

STEPS = st.lists(
    st.tuples(st.just("arm"), st.integers(0, 5), st.integers(-2, 500))
    | st.tuples(st.just("cancel"), st.integers(0, 5), st.just(0))
    | st.tuples(st.just("wait"), st.just(0), st.integers(1, 200)),
    max_size=40,
)


class Bell:
    """Timers, and what they posted at what time; a number below 0 is one that its receiver fails at."""

    def __init__(self) -> None:
        self.rang: list[tuple[int, int]] = []
        self.timers = Timers(self._post, lambda: None)

    def arm(self, key: Hashable, due_ns: int, number: int) -> None:
        self.timers.arm(key, due_ns, WaitTimerFired(number))

    def _post(self, event: Event) -> None:
        assert isinstance(event, WaitTimerFired)
        self.rang.append((event.request, CLOCK.now_ns))
        if event.request < 0:
            raise RuntimeError("it can't be told")


def run(story: Coroutine[Any, Any, None]) -> list[str]:
    """Have it happen on the virtual clock; what the loop was told that went wrong."""
    loop = VirtualLoop()
    with virtual_time(loop):
        loop.run_until_complete(story)
        loop.close()
    return loop.wrong


@given(STEPS)
def test_each_comes_once_at_the_time_last_asked_for(steps: list[tuple[str, int, int]]) -> None:
    async def story() -> None:
        bell, armed, expected = Bell(), dict[int, tuple[int, int]](), list[tuple[int, int]]()
        for number, (step, key, amount) in enumerate([*steps, ("wait", 0, 600)]):
            if step == "arm":
                # Never just when another step looks.
                armed[key] = (number, CLOCK.now_ns + amount * MS + MS // 2)
                bell.arm(key, armed[key][1], number)
            elif step == "cancel":
                armed.pop(key, None)
                bell.timers.cancel(key)
            else:
                began_ns = CLOCK.now_ns
                await asyncio.sleep(amount / 1000)
                for key, (one, due_ns) in list(armed.items()):
                    if due_ns < CLOCK.now_ns:
                        expected.append((one, max(due_ns, began_ns)))
                        del armed[key]
        due_of = dict(expected)
        assert sorted(due_of) == sorted(number for number, _ in bell.rang)
        assert all(due_of[number] <= at_ns <= due_of[number] + LATE_NS for number, at_ns in bell.rang)
        assert len(bell.timers) == 0

    assert run(story()) == []


def test_a_fault_at_one_keeps_no_other_from_being_posted() -> None:
    async def story() -> None:
        bell = Bell()
        for number in (-1, 2, -3, 4):
            bell.arm(number, CLOCK.now_ns + MS, number)
        await asyncio.sleep(0.01)
        assert [number for number, _ in bell.rang] == [-1, 2, -3, 4]

    assert len(run(story())) == 2


def test_what_is_armed_while_others_ring_comes_too() -> None:
    async def story() -> None:
        rang: list[Event] = []
        first, second = WaitTimerFired(1), WaitTimerFired(2)

        def post(event: Event) -> None:
            rang.append(event)
            if event is first:
                timers.arm("second", CLOCK.now_ns - 1, second)

        timers = Timers(post, lambda: None)
        timers.arm("first", CLOCK.now_ns + MS, first)
        await asyncio.sleep(0.01)
        assert rang == [first, second]

    assert run(story()) == []


def test_of_timers_that_never_ring_nothing_is_kept() -> None:
    async def story() -> None:
        bell, hour_ns = Bell(), 3_600_000 * MS
        for number in range(10_000):
            bell.arm(number, CLOCK.now_ns + hour_ns + number * MS, number)
            bell.timers.cancel(number)
            bell.arm(-1, CLOCK.now_ns + hour_ns + number * MS, number)  # renewed, each time for longer
            bell.arm(-2, CLOCK.now_ns + (10_000 - number) * MS // 1000, number)  # due soon, each time sooner
        assert len(bell.timers) == len(bell.timers._slots) + 1 == 2
        await asyncio.sleep(2 * (1 << SLOT_BITS) / 1e9)
        assert bell.rang[0][0] == 9999
        assert len(bell.timers) == len(bell.timers._slots) == 1
        assert bell.timers._heap == []
        bell.timers.stop()

    assert run(story()) == []


@pytest.mark.parametrize("others", [0, 1000])
def test_a_pause_of_the_whole_process_makes_them_late_and_no_more(others: int) -> None:
    async def story() -> None:
        bell, hour_ns = Bell(), 3_600_000 * MS
        for number in range(others):
            bell.arm(("other", number), CLOCK.now_ns + (2 + number) * hour_ns, number)
        for number in (3, 1, 2):
            bell.arm(number, CLOCK.now_ns + number * hour_ns // 4, number)
        CLOCK.now_ns += hour_ns
        await asyncio.sleep(0.001)
        assert [number for number, _ in bell.rang] == [1, 2, 3]
        assert len(bell.timers) == others
        bell.timers.stop()

    assert run(story()) == []


def test_none_comes_after_the_stop() -> None:
    async def story() -> None:
        bell = Bell()
        bell.arm(1, CLOCK.now_ns + MS, 1)
        bell.timers.stop()
        await asyncio.sleep(0.01)
        assert bell.rang == []

    assert run(story()) == []


def test_after_a_stop_of_the_process_others_have_time_and_promises_are_kept_at_once() -> None:
    """What a worker did during the stop is read only after the timers that became due meanwhile."""

    async def story() -> None:
        rang: list[tuple[TimerKind, int]] = []

        def post(event: Event) -> None:
            assert isinstance(event, TimerFired)
            rang.append((event.kind, CLOCK.now_ns - resumed_ns))

        timers = Timers(post, lambda: None)
        for kind in TimerKind:
            timers.arm(kind, CLOCK.now_ns + 2000 * MS, TimerFired(5, 1, kind))
        CLOCK.now_ns += 10_000 * MS
        resumed_ns = CLOCK.now_ns
        await asyncio.sleep(0.001)
        patient = [TimerKind.SPAWN, TimerKind.RECLAIM, TimerKind.ORPHAN, TimerKind.PARK]
        assert [kind for kind, _ in rang] == [kind for kind in TimerKind if kind not in patient]
        # What has happened meanwhile cancels its timer.
        timers.cancel(TimerKind.SPAWN)
        rang.clear()
        await asyncio.sleep(11)
        assert {kind for kind, _ in rang} == set(patient[1:])
        assert all(AFTER_STOP_NS <= late_ns <= AFTER_STOP_NS + LATE_NS for _, late_ns in rang)

    assert run(story()) == []


def test_a_timer_is_deferred_once() -> None:
    async def story() -> None:
        rang: list[Event] = []
        timers, event = Timers(rang.append, lambda: None), TimerFired(5, 1, TimerKind.RECLAIM)
        timers.arm("key", CLOCK.now_ns + 2000 * MS, event)
        for expected in ([], [event]):
            CLOCK.now_ns += 60_000 * MS
            await asyncio.sleep(0.001)
            assert rang == expected

    assert run(story()) == []


def test_a_deferred_timer_that_is_armed_again_keeps_its_time() -> None:
    """Renewals arm a lease's timers again, so a tenant could put off the judgement of its session for ever."""

    async def story() -> None:
        rang: list[Event] = []
        timers, due_ns = Timers(rang.append, lambda: None), CLOCK.now_ns + 2000 * MS
        timers.arm("key", due_ns, TimerFired(5, 0, TimerKind.PARK))
        CLOCK.now_ns += 60_000 * MS
        await asyncio.sleep(0.001)
        for generation in (1, 2, 3):
            await asyncio.sleep(3)
            timers.arm("key", due_ns, TimerFired(5, generation, TimerKind.PARK))
        await asyncio.sleep(0.9)
        assert rang == []
        await asyncio.sleep(0.2)
        assert rang == [TimerFired(5, 3, TimerKind.PARK)]
        # Another time is another judgement.
        timers.arm("key", CLOCK.now_ns + 500 * MS, TimerFired(5, 4, TimerKind.PARK))
        await asyncio.sleep(0.6)
        assert len(rang) == 2

    assert run(story()) == []
