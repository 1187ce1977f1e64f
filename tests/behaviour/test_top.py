"""`gpulease top` on a terminal, with a real daemon: what a user sees and types, and what is left when it has ended."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpulease.client import GpuLease, GpuSession, Revoked
from gpulease.client.cli.__main__ import main
from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.daemon import Daemon, python_environment
from helpers.kernels import check_main_job
from helpers.lasting import LastingDaemon
from helpers.processes import is_running, stop_process
from helpers.terminal import Terminal
from helpers.waiting import wait_until

RUN = "from gpulease.entry_points import gpulease; gpulease()"
BREAK = (
    "import gpulease.client.cli.top.screen as screen\n"
    "def broken(*_): raise RuntimeError('a fault')\n"
    "screen.press = broken\n"
)
# Ignore SIGHUP, as nohup does.
DEAF = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"

# Each test starts a Python process, possibly on a busy host.
START_S = 120.0


def top(address: str, *words: str, size: tuple[int, int] = (100, 12), code: str = RUN, **more: str) -> Terminal:
    command = [sys.executable, "-P", "-c", code, "top", "--every", "0.1", *words]
    # The environment has another size than the terminal, as if a shell had exported it before a resize.
    kind = {"TERM": "xterm-256color", "COLUMNS": "70", "LINES": "9"}
    return Terminal(command, python_environment() | kind | {ADDRESS_VARIABLE: address} | more, size)


def check_restored(terminal: Terminal) -> None:
    assert terminal.settings_now() == terminal.settings
    assert terminal.screen.strange == set()


def test_leases_appear_and_their_rates_move(daemon: Daemon) -> None:
    with ExitStack() as stack:
        terminal = stack.enter_context(top(daemon.address))
        terminal.wait_for("No leases.", "embedded CPU card", "of 6 GiB held", within_s=START_S)
        lease = stack.enter_context(daemon.builder(8 << 20).acquire())
        begin = lease.lease_id_text[:8]
        terminal.wait_for(begin, f"uid:{os.getuid()}", "8 MiB", "1 lease ")
        session = stack.enter_context(GpuSession(lease))

        def launches_per_s() -> str:
            check_main_job(session)
            (row,) = [line for line in terminal.text().splitlines() if line.startswith(begin)]
            launches, copies = row.split()[8:10]
            return "" if {launches, copies} & {"0", "-"} else row

        assert "active" in wait_until(launches_per_s, "launches and copies are counted", seen=terminal.text)
        small = stack.enter_context(daemon.builder(1 << 20, 3600).acquire())
        terminal.press("S")
        terminal.wait_for("SLICEv", small.lease_id_text[:8])
        wait_until(lambda: order(terminal) == [begin, small.lease_id_text[:8]], "the larger slice comes first")
        terminal.press("R")
        terminal.wait_for("SLICE^")
        wait_until(lambda: order(terminal) == [small.lease_id_text[:8], begin], "the order is reversed")
        terminal.press("q")
        assert terminal.wait_for_exit() == 0
        check_restored(terminal)


def order(terminal: Terminal) -> list[str]:
    return [line[:8] for line in terminal.text().splitlines() if "active" in line]


def test_revoking_asks_first_and_says_what_came_of_it(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, top(daemon.address) as terminal:
        terminal.wait_for(lease.lease_id_text[:8], within_s=START_S)
        terminal.press("\x1bOBk")
        terminal.wait_for(f"Revoke {lease.lease_id_text[:8]}")
        terminal.press("it is late\r")
        terminal.wait_for(f"Type {lease.lease_id_text[:4]} to revoke")
        terminal.press("yes\r")
        terminal.wait_for("The lease was not revoked")
        assert daemon.query(lease.lease_id)["state"] == "active"
        terminal.press("kit is late\r" + lease.lease_id_text[:4] + "\r")
        terminal.wait_for(f"Lease {lease.lease_id_text} has ended, and its memory is free.", "No leases.")
        terminal.press("q")
        assert terminal.wait_for_exit() == 0
        with pytest.raises(Revoked, match="it is late"):
            lease.renew(60)


def test_a_terminal_without_colours_that_shrinks_and_grows(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, top(daemon.address, TERM="vt100", size=(90, 20)) as terminal:
        terminal.wait_for("embedded CPU", lease.lease_id_text[:8], within_s=START_S)
        for size in ((20, 5), (1, 1), (20, 5), (100, 40)):
            terminal.resize(*size)
            terminal.signal_job(signal.SIGWINCH)
            if size[0] > 1:
                terminal.wait_for("gpulease top", lease.lease_id_text[:8], "LEFTv")
        terminal.wait_for("embedded CPU card", "q quit", "k revoke")
        terminal.press("q")
        assert terminal.wait_for_exit() == 0
        check_restored(terminal)


@pytest.mark.exhaustive
def test_a_daemon_that_is_killed_and_comes_back(lasting: LastingDaemon) -> None:
    with lasting.now.builder(seconds=600).acquire() as lease, top(lasting.address) as terminal:
        terminal.wait_for(lease.lease_id_text[:8], "active", within_s=START_S)
        lasting.kill()
        terminal.wait_for("the table is", "old", lease.lease_id_text[:8])
        lasting.start()
        terminal.wait_for("The daemon answers again", lease.lease_id_text[:8], without="the table is")
        terminal.press("q")
        assert terminal.wait_for_exit() == 0


@pytest.mark.exhaustive
def test_a_drain_shows_and_a_daemon_that_hangs(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    with top(daemon.address) as terminal:
        terminal.wait_for("No leases.", within_s=START_S)
        assert CliRunner().invoke(main, ["drain"], env={ADDRESS_VARIABLE: daemon.address}).exit_code == 0
        terminal.wait_for("DRAINED: no new leases")
        assert CliRunner().invoke(main, ["drain", "--cancel"], env={ADDRESS_VARIABLE: daemon.address}).exit_code == 0
        terminal.wait_for("No leases.", without="DRAINED")
        stop_process(daemon.process.pid)
        terminal.wait_for("the daemon does not answer; the table is", "q quit")
        daemon.process.send_signal(signal.SIGCONT)
        terminal.wait_for("No leases.", without="the daemon does not answer")


@pytest.mark.parametrize(
    ("end", "code", "status", "said"),
    [
        ("\x03", RUN, 128 + signal.SIGINT, ""),
        (signal.SIGTERM, RUN, 128 + signal.SIGTERM, ""),
        ("x", f"{BREAK}{RUN}", 70, "gpulease: an internal error of gpulease: RuntimeError: a fault"),
    ],
    ids=["interrupt", "SIGTERM", "fault"],
)
def test_however_it_ends_the_terminal_is_as_before(
    daemon: Daemon, end: str | signal.Signals, code: str, status: int, said: str
) -> None:
    with top(daemon.address, code=code) as terminal:
        terminal.wait_for("No leases.", within_s=START_S)
        if isinstance(end, str):
            terminal.press(end)
        else:
            terminal.signal_job(end)
        assert terminal.wait_for_exit() == status
        assert said in terminal.text()
        check_restored(terminal)


def test_stopped_and_continued(daemon: Daemon) -> None:
    with top(daemon.address) as terminal:
        terminal.wait_for("No leases.", within_s=START_S)
        terminal.press("\x1a")
        terminal.wait_for("STOPPED")
        check_restored(terminal)
        with daemon.builder().acquire() as lease:
            terminal.press("\n")
            terminal.wait_for(lease.lease_id_text[:8], "q quit", without="STOPPED")
            terminal.press("q")
            assert terminal.wait_for_exit() == 0
            check_restored(terminal)


@pytest.mark.parametrize(("locale", "as_shown"), [("C.UTF-8", "'é'"), ("C", "'\\ufffd")])
def test_what_is_typed_in_another_script(daemon: Daemon, locale: str, as_shown: str) -> None:
    plainly = {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    with daemon.builder().acquire() as lease, top(daemon.address, size=(120, 12), **plainly) as terminal:
        terminal.wait_for(lease.lease_id_text[:8], within_s=START_S)
        terminal.press("/é\r")
        terminal.wait_for(f"filter {as_shown}", "No lease matches the filter.", "q quit")
        terminal.press("\x1b")
        terminal.wait_for(lease.lease_id_text[:8], without="filter '")
        terminal.press("q")
        assert terminal.wait_for_exit() == 0


def test_no_daemon_from_the_beginning(tmp_path: Path) -> None:
    with top(f"unix:{tmp_path}/nobody") as terminal:
        assert terminal.wait_for_exit() == 69
        assert "gpulease: can't connect" in terminal.text()
        check_restored(terminal)


@pytest.mark.parametrize("code", [RUN, f"{DEAF}{RUN}"], ids=["told", "deaf"])
def test_a_terminal_that_goes_away(daemon: Daemon, code: str) -> None:
    with top(daemon.address, code=code) as terminal:
        terminal.wait_for("No leases.", within_s=START_S)
        pid = terminal.job()
        assert is_running(pid)
        terminal.hang_up()
        wait_until(lambda: not is_running(pid), "it has ended, too")


@pytest.mark.parametrize(
    ("kind", "said"), [("dumb", "its cursor can't be moved"), ("nonsense", "terminal type 'nonsense'")]
)
def test_a_terminal_it_cannot_use(daemon: Daemon, kind: str, said: str) -> None:
    with top(daemon.address, TERM=kind) as terminal:
        assert terminal.wait_for_exit() == 1
        assert said in " ".join(terminal.text().split())
        assert "Traceback" not in terminal.text()


def test_one_frame_into_a_pipe(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease:
        done = CliRunner().invoke(
            main, ["top", "--every", "0.1"], env={ADDRESS_VARIABLE: daemon.address, "COLUMNS": None}
        )
        assert done.exit_code == 0, done.output
        assert f"{lease.lease_id_text} uid:{os.getuid()}" in done.stdout
        assert done.stdout.isascii()
        assert "\x1b" not in done.stdout
        once = CliRunner().invoke(
            main, ["top", "--once", "--json", "--every", "0.1"], env={ADDRESS_VARIABLE: daemon.address}
        )
        (found,) = json.loads(once.stdout)["leases"]
        assert (found["lease_id"], found["launches_per_s"]) == (lease.lease_id_text, 0)


def test_a_line_of_json_a_reading(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease:
        read = stream_of(daemon, lease)
        assert [line["interval_s"] is None for line in read] == [True, False]
        assert read[0]["leases"][0]["operations_per_s"] is None
        assert read[1]["leases"][0]["operations_per_s"] == 0


def stream_of(daemon: Daemon, lease: GpuLease) -> list[dict[str, Any]]:
    command = [sys.executable, "-P", "-c", RUN, "top", "--json", "--every", "0.1"]
    environment = python_environment() | {ADDRESS_VARIABLE: daemon.address}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        read = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.stdout.close()
        assert process.wait(START_S) == -signal.SIGPIPE
        assert process.stderr.read() == b""
    assert [line["leases"][0]["lease_id"] for line in read] == [lease.lease_id_text] * 2
    return read
