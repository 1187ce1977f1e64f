"""Clean-ups that are interrupted: for how long an interrupt is put off, and where it is not."""

import threading
from collections.abc import Iterator

import pytest

from gpulease.client.core.clean_ups import CLEAN_UP_S, clean_up
from gpulease.client.core.waits import Locked, Procedure, Sleep


class Clock:
    """The time, which passes where a test says so."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def pauses(count: int, seconds: float = 1.0) -> Procedure[str]:
    for _ in range(count):
        yield Sleep(seconds)
    return "done"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_an_interrupt_is_raised_behind_the_end(clock: Clock) -> None:
    work = clean_up(pauses(3), clock)
    next(work)
    assert work.throw(KeyboardInterrupt("first")) == Sleep(1.0)
    assert work.throw(SystemExit("second")) == Sleep(1.0)
    with pytest.raises(SystemExit, match="second"):
        work.send(None)


def test_without_an_interrupt_the_result_comes(clock: Clock) -> None:
    work = clean_up(pauses(1), clock)
    next(work)
    with pytest.raises(StopIteration) as done:
        work.send(None)
    assert done.value.value == "done"


def test_an_interrupt_that_comes_late_ends_it_at_once(clock: Clock) -> None:
    work = clean_up(pauses(2), clock)
    next(work)
    clock.now_s = CLEAN_UP_S
    with pytest.raises(KeyboardInterrupt):
        work.throw(KeyboardInterrupt())


def test_an_interrupt_is_not_put_off_for_longer(clock: Clock) -> None:
    """Where the clean-up waits for what never comes."""
    work = clean_up(pauses(1000, seconds=30), clock)
    assert next(work) == Sleep(30)
    clock.now_s = 0.5
    assert work.throw(KeyboardInterrupt()) == Sleep(CLEAN_UP_S - 0.5)
    clock.now_s = CLEAN_UP_S
    with pytest.raises(KeyboardInterrupt):
        work.send(None)


@pytest.fixture
def held_elsewhere() -> Iterator["threading.RLock"]:
    lock, is_held, may_go = threading.RLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    yield lock
    may_go.set()
    thread.join()


def locked(lock: object) -> Procedure[object]:
    return (yield Locked(lock, pauses(1)))


def test_a_lock_that_another_thread_holds_is_not_waited_for(clock: Clock, held_elsewhere: "threading.RLock") -> None:
    work = clean_up(locked(held_elsewhere), clock)
    next(work)
    with pytest.raises(KeyboardInterrupt):
        work.throw(KeyboardInterrupt())


def test_a_lock_is_asked_for_again_and_the_result_under_it_is_kept(clock: Clock) -> None:
    work = clean_up(locked(threading.RLock()), clock)
    asked = next(work)
    assert work.throw(KeyboardInterrupt("before it was taken")) == asked
    assert isinstance(asked, Locked)
    inner = asked.procedure
    next(inner)
    with pytest.raises(StopIteration):
        inner.throw(KeyboardInterrupt("under it"))
    with pytest.raises(KeyboardInterrupt, match="at its release"):
        work.throw(KeyboardInterrupt("at its release"))
