"""`gpulease demo`: its claims hold beside a daemon that runs and with one of its own; one that does not fails it."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpulease.client.cli import live_lines, tenants_demo
from gpulease.client.cli.__main__ import main
from gpulease.client.cli.live_lines import PIPE_LINE_S, LiveLines
from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.daemon import Daemon
from helpers.waiting import wait_until

PHASES = ["before bob", "while bob writes", "next to bob's endless kernel", "after it, next to carol"]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BEFORE_S", "AFTER_S", "POLL_S"):
        monkeypatch.setattr(tenants_demo, name, 0.1)
    # The first is over before its session opens, as on a host that is slow.
    monkeypatch.setattr(tenants_demo, "BOB_S", (0.001, 1.5, 10.0, 40.0))


@pytest.mark.exhaustive
def test_beside_a_daemon_that_runs(start_daemon: Callable[..., Daemon]) -> None:
    # On a larger card the demonstration reads more memory, which takes most of its time.
    daemon = start_daemon(vram=("320MiB",))
    done = CliRunner().invoke(main, ["demo", "--json"], env={ADDRESS_VARIABLE: daemon.address})
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["driver"], report["tenant"]) == ("cpu", f"uid:{os.getuid()}")
    assert report["results"] == {"0": 10.0, "1": 12.0, "100": 210.0}
    assert [phase["name"] for phase in report["ann"]] == PHASES
    assert all(phase["launches"] and not phase["errors"] for phase in report["ann"])
    assert report["expired_lease"]["error"] == "LeaseExpired"
    assert daemon.query(int(report["expired_lease"]["lease_id"], 16))["cause"] == "expired"
    free = report["free_bytes"]
    assert free["before"] - free["beside_bob"] == report["slice_bytes"] == report["expired_lease"]["slice_bytes"]
    assert free["after"] == free["before"]
    assert len(report["claims"]) == 6
    assert all(claim["holds"] for claim in report["claims"])
    wait_until(lambda: not json.loads(_leases(daemon)), "no lease is left")


def _leases(daemon: Daemon) -> str:
    return CliRunner().invoke(main, ["leases", "--json"], env={ADDRESS_VARIABLE: daemon.address}).stdout


def test_with_a_daemon_of_its_own_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    monkeypatch.setattr("gpulease.client.console.private_daemon.DEFAULT_ADDRESS", f"unix:{tmp_path}/nobody")
    done = CliRunner().invoke(main, ["demo"])
    assert done.exit_code == 0, done.output
    for words in (
        "No daemon runs here",
        "three leases of yours",
        "could not start within the 0.001 s of his lease: this host is slow",
        "carol  asks for 144 MiB too, and 48 MiB are free: CapacityExceeded",
        "his call ends, LeaseExpired",
        "free on the card: 192 MiB before, 48 MiB beside bob, 192 MiB after",
        "reads 37,224,448 words: 0 are not 0",
        "x[100] = 210",
        "a launch in it: RegionRevoked; in the other 2,097,152 of 2,097,152 words are there",
        "Next: `gpulease verify`",
    ):
        assert words in done.stdout
    assert done.stdout.count("\nheld ") == 7
    assert "BROKEN" not in done.stdout
    assert "\x1b" not in done.stdout


@contextmanager
def _ann_killed() -> Iterator[None]:
    """Kill ann's process as soon as it is there."""
    is_over = threading.Event()

    def kill() -> None:
        while not is_over.wait(0.01):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    is_ann = b"gpulease.client.verify.neighbour" in path.read_bytes()
                    parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
                    if is_ann and parent == os.getpid():
                        os.kill(int(path.parent.name), signal.SIGKILL)
                        return

    # Ann begins by answering, so the kill comes after that.
    begin = tenants_demo.Ann.begin

    def begun(ann: tenants_demo.Ann, name: str) -> None:
        begin(ann, name)
        if name == PHASES[1]:
            killing.start()

    killing = threading.Thread(target=kill)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tenants_demo.Ann, "begin", begun)
        try:
            yield
        finally:
            is_over.set()
            killing.join()


def test_a_claim_that_does_not_hold_fails_it(daemon: Daemon) -> None:
    with _ann_killed():
        done = CliRunner().invoke(main, ["demo"], env={ADDRESS_VARIABLE: daemon.address})
    assert done.exit_code == 1
    assert "BROKEN all of ann's launches had the right result" in done.stdout
    assert "its process ended" in done.stdout
    assert "held   carol reads only zeros" in done.stdout


def test_a_card_without_room_says_how_much_is_needed() -> None:
    with pytest.raises(MissingPrerequisite, match=r"must have 256 MiB free for the demonstration, not 100 MiB"):
        tenants_demo._bob_bytes(100 << 20, is_private=False)


def test_a_pipe_gets_a_line_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    lines = LiveLines(clock=lambda: now[0])
    for step in range(9):
        now[0] = step * PIPE_LINE_S / 4
        lines.show(f"at {now[0]:g}")
    lines.settle()
    lines.say("over")
    assert capsys.readouterr().out == "at 1\nat 2\nover\n"


def test_a_terminal_s_line_is_rewritten(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_lines, "is_terminal", lambda: True)
    monkeypatch.setattr(live_lines, "output_width", lambda: 6)
    monkeypatch.setenv("TERM", "xterm")
    lines = LiveLines()
    lines.show("one and more")
    lines.show("two")
    lines.say("over")
    lines.settle()
    assert capsys.readouterr().out == "\r\x1b[2Kone a\r\x1b[2Ktwo\r\x1b[2Kover\n"


def test_a_silent_one_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LiveLines(is_silent=True)
    lines.say("one")
    lines.show("two")
    lines.settle()
    assert capsys.readouterr().out == ""
