"""The installed commands: whenever an interrupt comes, none of them prints a traceback."""

import os
import random
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease import entry_points
from gpulease.client import GpuBuilder, GpuSession
from helpers.daemon import python_environment
from helpers.waiting import PATIENCE_S, wait_until

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
SCRIPTS: dict[str, str] = PROJECT["scripts"]
"""Each installed command, with its module and function."""

BEGUN_S = 0.5
"""Interrupts come within this many seconds of the start, before or after the command has begun its work."""

RUNS = 8
"""Runs of each command: an interrupt at once, and one at a random time of each further part of BEGUN_S."""

WORK: dict[str, Callable[[Path], list[str]]] = {
    "gpuleased": lambda folder: ["--driver", "cpu", "--vram", "1GiB", "--listen", f"unix:{folder}/d.sock"],
    "gpulease": lambda folder: ["submit", "kernel", str(folder / "none.ptx")],
    "gpulease-dra": lambda folder: ["serve", "--node", "n", "--kubelet", str(folder)],
    "gpulease-slurm": lambda folder: ["service", "--folder", str(folder)],
}


def test_each_command_begins_with_the_interrupt_s_handler() -> None:
    for script, place in SCRIPTS.items():
        module, _, function = place.partition(":")
        assert module == entry_points.__name__, script
        assert callable(getattr(entry_points, function)), script
    assert SCRIPTS.keys() == WORK.keys()


def started(code: str, words: list[str], path: Path | None = None) -> "subprocess.Popen[str]":
    where = python_environment()
    if path is not None:
        where["PYTHONPATH"] = os.pathsep.join([str(path), where["PYTHONPATH"]])
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, *words],
        env=where,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


CALLS = {
    **{script: (place.partition(":")[2], []) for script, place in SCRIPTS.items()},
    "a module of the daemon": ("module_of_daemon", ["daemon", "gpulease.daemon.record.audit"]),
}


@pytest.mark.parametrize("command", CALLS)
def test_an_interrupt_while_it_imports_ends_it_silently(command: str, tmp_path: Path) -> None:
    function, words = CALLS[command]
    (tmp_path / "click.py").write_text("print(flush=True)\nimport time\ntime.sleep(600)")
    with started(f"from gpulease.entry_points import {function}; {function}()", words, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE_S) == ("", "")
    assert process.returncode == -signal.SIGINT


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_interrupt_at_any_time_prints_no_traceback(script: str, tmp_path: Path) -> None:
    function = SCRIPTS[script].partition(":")[2]
    # Until the handler is set, Python itself prints a traceback. So set it before the first interrupt can come.
    code = "from gpulease import interrupts as i; i.interrupt_ends_it(); print(flush=True); "
    code += f"from gpulease.entry_points import {function}; {function}()"
    for number in range(RUNS):
        with started(code, WORK[script](tmp_path)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "\n"
            # The first comes at once.
            delay_s = BEGUN_S * (number - random.random()) / (RUNS - 1) if number else 0
            try:
                process.wait(delay_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
            said = "".join(process.communicate(timeout=PATIENCE_S))
        assert "Traceback" not in said, (delay_s, said)
        assert "Aborted" not in said, (delay_s, said)
        # The signal ended it, or a shell's status says so; it stopped as the daemon does; or it had failed before.
        assert process.returncode in {-signal.SIGINT, 128 + signal.SIGINT, 0, 1, 2, 69}, (delay_s, said)


@pytest.mark.parametrize("closed", [[1], [2], [0, 1, 2]], ids=str)
def test_the_daemon_runs_with_standard_files_closed(closed: list[int], tmp_path: Path) -> None:
    """Without /dev/null in their place, libuv aborts the daemon when it closes its own file of that number."""
    address = f"unix:{tmp_path}/d.sock"
    code = "from gpulease.entry_points import gpuleased; gpuleased()"
    shell = f'exec "$@" {" ".join(f"{number}>&-" for number in closed)}'
    command = ["bash", "-c", shell, "bash", sys.executable, "-P", "-c", code, *WORK["gpuleased"](tmp_path)]
    process = subprocess.Popen(command, env=python_environment())
    try:
        wait_until(lambda: (tmp_path / "d.sock").exists() or process.poll() is not None, "it listens")
        with GpuBuilder(address).min_vram("1MiB").acquire() as lease, GpuSession(lease) as session:
            session.sync()
            opened = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in closed]
        assert opened == [os.devnull] * len(closed)
    finally:
        process.terminate()
    assert process.wait(PATIENCE_S) == 0
