"""What interrupted calls owe: when it is given back, and by whom."""

import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from gpulease.client.core.clean_ups import Owed, owing
from gpulease.client.core.waits import Procedure, Sleep
from gpulease.client.errors import InvalidRequest
from gpulease.client.sync.clean_ups import drive_owing, due
from gpulease.client.sync.driver import drive
from helpers.waiting import wait_until


class Noted(Owed):
    """Notes the threads that gave it back."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def _give_back(self) -> Procedure[None]:
        yield Sleep(0.001)
        self.threads.append(threading.get_ident())


def raising(error: BaseException) -> Procedure[str]:
    yield Sleep(0)
    raise error


def done() -> Procedure[str]:
    yield Sleep(0)
    return "made"


def test_what_the_program_has_is_not_given_back() -> None:
    owed = Noted()
    assert drive_owing(owed, done(), str.upper) == "MADE"
    assert (owed.is_settled, owed.is_due) == (True, False)
    drive(owed.settle())
    assert not owed.threads


def test_nothing_is_owed_after_a_refusal() -> None:
    owed = Noted()
    with pytest.raises(InvalidRequest):
        drive_owing(owed, raising(InvalidRequest("no")), str.upper)
    assert (owed.is_settled, owed.is_due, due) == (True, False, {})


@pytest.mark.parametrize("interrupted", ["procedure", "what is made of its result"])
def test_a_thread_gives_back_what_an_interrupted_call_owes(interrupted: str) -> None:
    def made(_: str) -> str:
        raise KeyboardInterrupt

    owed = Noted()
    with pytest.raises(KeyboardInterrupt):
        drive_owing(owed, raising(KeyboardInterrupt()) if interrupted == "procedure" else done(), made)
    wait_until(lambda: owed.is_settled and not due, "a thread has settled it")
    assert len(owed.threads) == 1
    assert owed.threads != [threading.get_ident()]


def test_what_an_interrupted_settling_has_not_given_back_is_due_again() -> None:
    owed = Noted()
    with suppress(KeyboardInterrupt):
        drive(owing(owed, raising(KeyboardInterrupt())))
    settling = owed.settle()
    assert next(settling) == Sleep(0.001)
    assert not owed.is_due, "nobody else settles it meanwhile"
    with pytest.raises(KeyboardInterrupt):
        settling.throw(KeyboardInterrupt())
    assert owed.is_due
    drive(owed.settle())
    assert owed.threads == [threading.get_ident()]


PROGRAM = """
import sys
from gpulease.client.core.clean_ups import Owed
from gpulease.client.core.waits import Sleep
from gpulease.client.sync.clean_ups import drive_owing

class Slow(Owed):
    def _give_back(self):
        yield Sleep(0.3)
        sys.stdout.write("given back")
        sys.stdout.flush()

def interrupted():
    yield Sleep(0)
    raise KeyboardInterrupt

drive_owing(Slow(), interrupted(), str)
"""


def test_a_program_that_an_interrupt_ends_gives_back_first() -> None:
    program = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert program.stdout == "given back"
    assert "KeyboardInterrupt" in program.stderr
