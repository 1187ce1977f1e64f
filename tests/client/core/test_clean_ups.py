"""What interrupted calls owe: when it is given back, and by whom."""

import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from gpulease.client.core.clean_ups import CleanUp, with_clean_up
from gpulease.client.core.waits import Procedure, Sleep
from gpulease.client.errors import InvalidRequest
from gpulease.client.sync.driver import drive, drive_with_clean_up, due
from helpers.waiting import wait_until


class Noted(CleanUp):
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
    clean_up = Noted()
    assert drive_with_clean_up(clean_up, done(), str.upper) == "MADE"
    assert (clean_up.is_settled, clean_up.is_due) == (True, False)
    drive(clean_up.settle())
    assert not clean_up.threads


def test_nothing_is_owed_after_a_refusal() -> None:
    clean_up = Noted()
    with pytest.raises(InvalidRequest):
        drive_with_clean_up(clean_up, raising(InvalidRequest("no")), str.upper)
    assert (clean_up.is_settled, clean_up.is_due, due) == (True, False, {})


@pytest.mark.parametrize("interrupted", ["procedure", "what is made of its result"])
def test_a_thread_gives_back_what_an_interrupted_call_owes(interrupted: str) -> None:
    def made(_: str) -> str:
        raise KeyboardInterrupt

    clean_up = Noted()
    with pytest.raises(KeyboardInterrupt):
        drive_with_clean_up(clean_up, raising(KeyboardInterrupt()) if interrupted == "procedure" else done(), made)
    wait_until(lambda: clean_up.is_settled and not due, "a thread has settled it")
    assert len(clean_up.threads) == 1
    assert clean_up.threads != [threading.get_ident()]


def test_what_an_interrupted_settling_has_not_given_back_is_due_again() -> None:
    clean_up = Noted()
    with suppress(KeyboardInterrupt):
        drive(with_clean_up(clean_up, raising(KeyboardInterrupt())))
    settling = clean_up.settle()
    assert next(settling) == Sleep(0.001)
    assert not clean_up.is_due, "nobody else settles it meanwhile"
    with pytest.raises(KeyboardInterrupt):
        settling.throw(KeyboardInterrupt())
    assert clean_up.is_due
    drive(clean_up.settle())
    assert clean_up.threads == [threading.get_ident()]


PROGRAM = """
import sys
from gpulease.client.core.clean_ups import CleanUp
from gpulease.client.core.waits import Sleep
from gpulease.client.sync.driver import drive_with_clean_up

class Slow(CleanUp):
    def _give_back(self):
        yield Sleep(0.3)
        sys.stdout.write("given back")
        sys.stdout.flush()

def interrupted():
    yield Sleep(0)
    raise KeyboardInterrupt

drive_with_clean_up(Slow(), interrupted(), str)
"""


def test_a_program_that_an_interrupt_ends_gives_back_first() -> None:
    program = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert program.stdout == "given back"
    assert "KeyboardInterrupt" in program.stderr
