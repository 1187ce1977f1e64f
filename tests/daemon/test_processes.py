import os
import signal
import subprocess
import sys

import pytest

from gpulease.daemon.processes import exit_text
from helpers.daemon import python_environment
from helpers.processes import is_running
from helpers.waiting import wait_until

PARENT_THAT_DIES = """
import os, sys, time
from gpulease.daemon.processes import die_with_parent, set_name
parent = os.getpid()
child = os.fork()
if child == 0:
    die_with_parent(parent)
    set_name("gpul-a-name-that-is-too-long")
    print(os.getpid(), open("/proc/self/comm").read().strip(), flush=True)
    time.sleep(60)
    os._exit(0)
sys.stdin.read()
os._exit(0)
"""

CHILD_OF_SOMEBODY_ELSE = """
from gpulease.daemon.processes import die_with_parent
die_with_parent(1 << 22)
print("still here")
"""


def test_a_child_dies_with_its_parent() -> None:
    command = [sys.executable, "-P", "-c", PARENT_THAT_DIES]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=python_environment()
    ) as parent:
        assert parent.stdout is not None
        pid, name = parent.stdout.readline().split()
        assert name == "gpul-a-name-tha"
        assert is_running(int(pid))
        parent.kill()
        wait_until(lambda: not is_running(int(pid)), "the child is gone")


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    command = [sys.executable, "-P", "-c", CHILD_OF_SOMEBODY_ELSE]
    ended = subprocess.run(command, capture_output=True, text=True, env=python_environment(), check=False)
    assert (ended.returncode, ended.stdout) == (1, "")


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV")])
def test_words_for_a_signal(number: int, name: str) -> None:
    assert exit_text(int(number)) == f"was killed by {name}"


def test_words_for_a_status() -> None:
    assert exit_text(4 << 8) == "exited with status 4"
    assert exit_text(0) == "exited with status 0"


def test_words_for_a_signal_without_a_name() -> None:
    number = signal.SIGRTMIN + 3
    assert str(int(number)) in exit_text(int(number)) or "SIGRT" in exit_text(int(number))
    assert os.WIFSIGNALED(int(number))
