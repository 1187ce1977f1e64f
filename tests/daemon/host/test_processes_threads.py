"""The pool has all its threads from the start. If the host allows no more, an error says so at once."""

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.daemon.host.processes import NoThread, start_thread, thread_pool
from helpers.daemon import python_environment

NO_ROOM_BYTES = 1 << 46
"""For a thread's stack, whose size is that of the process's limit (pthread_create(3)): half of all addresses."""

FEW_THREADS = """
import resource
from gpulease.daemon.host.processes import STACK_BYTES, thread_pool
(size,) = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize:")]
resource.setrlimit(resource.RLIMIT_AS, (size + 8 * STACK_BYTES, resource.RLIM_INFINITY))
thread_pool()
"""


def without_room_for_stacks() -> None:
    resource.setrlimit(resource.RLIMIT_STACK, (NO_ROOM_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))


def run_without_threads(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", *command],
        env=python_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=without_room_for_stacks,  # nothing here has threads
    )


def test_a_pool_starts_no_thread_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = thread_pool(3)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    try:
        names = {future.result() for future in [pool.submit(own_name) for _ in range(100)]}
    finally:
        pool.shutdown()
    assert 1 <= len(names) <= 3
    with pytest.raises(NoThread):
        start_thread(threading.Thread())


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_pool_that_can_not_be_whole(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Those that were started end."""
    start: Callable[[threading.Thread], None] = threading.Thread.start
    left = [after]

    def limited(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(NoThread, match="start more threads") as told:
        thread_pool(3)
    assert (told.value.status, "TasksMax=" in told.value.hint) == (os.EX_UNAVAILABLE, True)


def test_a_host_that_has_too_few_for_a_pool() -> None:
    """Some of them, by room for so many stacks and no more."""
    command = [sys.executable, "-P", "-c", FEW_THREADS]
    done = subprocess.run(command, env=python_environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "NoThread: this host does not allow the daemon to start more threads" in done.stderr


def test_a_daemon_without_threads_says_so(tmp_path: Path) -> None:
    done = run_without_threads("-m", "gpulease.daemon", "--listen", f"unix:{tmp_path}/d.sock", "--driver", "cpu")
    assert done.returncode == os.EX_UNAVAILABLE
    assert done.stderr.startswith(
        "gpuleased: this host does not allow the daemon to start more threads. Raise its limits:"
    )
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "d.sock").exists()


def own_name() -> str:
    return threading.current_thread().name


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
