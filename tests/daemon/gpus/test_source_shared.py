import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpulease.daemon.gpus.source import SharedCall
from helpers.waiting import wait_until

MANY = 8


class Polls:
    """Each look says which one it was, once it may end."""

    def __init__(self, *, is_held: bool = False) -> None:
        self.begun = 0
        self.may_end = threading.Semaphore(0)
        self._is_held = is_held
        self._one = threading.Lock()

    def poll(self) -> int:
        assert self._one.acquire(blocking=False), "another is under way"
        self.begun += 1
        number = self.begun
        assert not self._is_held or self.may_end.acquire(timeout=60)
        self._one.release()
        if number == 2:
            raise ValueError("the second")
        return number


def waiting() -> int:
    """How many threads wait for an answer, or a semaphore."""
    return sum(frame.f_code is threading.Condition.wait.__code__ for frame in sys._current_frames().values())


def test_who_asks_while_one_is_under_way_shares_the_next() -> None:
    looks = Polls(is_held=True)
    shared = SharedCall(looks.poll)
    before = waiting()
    with ThreadPoolExecutor(MANY + 1) as threads:
        first = threads.submit(shared.get)
        wait_until(lambda: looks.begun == 1, "the first look has begun")
        others = [threads.submit(shared.get) for _ in range(MANY)]
        # All but the one of them that will look, and the first, which may not end.
        wait_until(lambda: waiting() - before == MANY, "they wait", seen=waiting)
        looks.may_end.release(2)
        assert first.result(30) == 1
        for other in others:
            with pytest.raises(ValueError, match="the second"):
                other.result(30)
    assert looks.begun == 2


def test_no_answer_is_older_than_its_question() -> None:
    looks = Polls()
    shared = SharedCall(looks.poll)

    def ask() -> bool:
        begun = looks.begun
        try:
            return shared.get() > begun
        except ValueError:
            return begun < 2

    with ThreadPoolExecutor(MANY) as threads:
        assert all(threads.map(lambda _: all(ask() for _ in range(100)), range(MANY)))
    assert 100 <= looks.begun <= 100 * MANY
