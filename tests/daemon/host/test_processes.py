import os
import signal
import subprocess
import sys

import pytest

from gpulease.daemon.host.processes import exit_text, has_ended, is_exiting, name_of, set_name, started_ticks
from gpulease.protocol.failures import KILLED
from helpers.daemon import python_environment
from helpers.processes import is_running
from helpers.waiting import wait_until

PARENT_THAT_DIES = """
import os, sys, time
from gpulease.daemon.host.processes import die_with_parent, set_name
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
from gpulease.daemon.host.processes import die_with_parent
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


def test_clients_know_the_words_for_a_kill() -> None:
    assert exit_text(int(signal.SIGKILL)) == KILLED


def test_words_for_a_status() -> None:
    assert exit_text(4 << 8) == "exited with status 4"
    assert exit_text(0) == "exited with status 0"


def test_words_for_a_signal_without_a_name() -> None:
    number = signal.SIGRTMIN + 3
    assert str(int(number)) in exit_text(int(number)) or "SIGRT" in exit_text(int(number))
    assert os.WIFSIGNALED(int(number))


HEEDLESS = """
import sys, traceback
from gpulease.daemon.host.processes import survive_stderr
survive_stderr()
for _ in range(3):
    print("x" * 100_000, "\\udcff", file=sys.stderr)
    sys.stderr.flush()
try:
    raise ValueError("something went wrong")
except ValueError:
    traceback.print_exc()
print("still here")
"""


@pytest.mark.parametrize("is_read", [True, False])
def test_what_nobody_reads_is_lost_and_nothing_else(is_read: bool) -> None:
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-P", "-c", HEEDLESS],
        stdout=subprocess.PIPE,
        stderr=writer,
        text=True,
        env=python_environment(),
    ) as process:
        os.close(writer)
        said = b""
        if is_read:
            with open(reader, "rb") as file:
                said = file.read()
        else:
            os.close(reader)
        assert process.communicate()[0] == "still here\n"
    assert process.returncode == 0
    if is_read:
        assert said.count(b"x" * 100_000 + b" \\udcff\n") == 3
        assert b"ValueError: something went wrong" in said


def test_whether_a_process_has_ended_and_what_it_is_called() -> None:
    name = name_of(os.getpid())
    try:
        set_name("gpul-test")
        assert name_of(os.getpid()) == "gpul-test"
    finally:
        set_name(name)
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    try:
        assert not has_ended(pidfd)
        assert not is_exiting(process.pid)
        process.kill()
        assert has_ended(pidfd, 10)
        # It is not reaped yet.
        assert is_exiting(process.pid)
        assert has_ended(pidfd)
    finally:
        os.close(pidfd)
        process.communicate()
    assert name_of(process.pid) == ""


def test_when_a_process_was_started_tells_it_from_others() -> None:
    own = started_ticks(os.getpid())
    assert own > 0
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as later:
        assert started_ticks(later.pid) > own
        later.communicate(b"\n")
    assert started_ticks(later.pid) == 0
