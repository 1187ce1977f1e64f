"""`gpulease verify` on the embedded driver: a few rows, and its report of a broken promise."""

import json
import signal
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpulease.client import GpuSession
from gpulease.client.cli import verify as command
from gpulease.client.console.scene import Breach, MatrixCheck, Scene, worker_pid
from gpulease.client.verify.claims import at_the_same_time, check
from gpulease.client.verify.faults import FaultOutcome, Sizes, faults
from helpers.daemon import Daemon, python_environment
from helpers.waiting import PATIENCE_S


def verify(*words: str) -> Result:
    return CliRunner().invoke(command.verify, ["--driver", "cpu", *words])


def rows_named(*names: str) -> Any:
    def chosen(scene: Scene, sizes: Sizes) -> list[MatrixCheck[FaultOutcome]]:
        return [fault for fault in faults(scene, sizes) if fault.name in names]

    return chosen


@pytest.mark.exhaustive
def test_a_few_faults_beside_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["trap", "more than the slice", "variables of 40 GiB", "worker SIGKILL", "client that stops reading"]
    monkeypatch.setattr("gpulease.client.verify.matrix.faults", rows_named(*names))
    # The test below makes them.
    monkeypatch.setattr("gpulease.client.verify.matrix.parked_claims", lambda scene: [])
    done = verify("--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    rows = {row["fault"]: row for row in report["faults"]}
    assert list(rows) == names
    assert [row["told"]["error"] for row in rows.values()] == [
        "SyncFailed",
        "AllocFailed",
        "LoadFailed",
        "GpuSessionFailed",
        "-",
    ]
    assert rows["worker SIGKILL"]["told"]["cause"] == "worker_died"
    assert all(row["during"]["rounds"] > 0 and not row["during"]["error"] for row in rows.values())
    assert {claim["name"] for claim in report["claims"]} == {
        "no byte of an earlier lease",
        "no byte of it in the host's buffers",
        "launch gate",
        "a submit alongside its session",
        "six leases",
        "a region next to another",
        "a stale pointer into a region",
        "regions that come and go",
        "a region under a graph",
        "regions of a killed session",
        "256 regions that expire at once",
        "regions of a killed broker",
        "a parked session's address refused",
    }
    assert report["breaches"] == 0


def test_the_promises_of_parked_sessions() -> None:
    done = verify("--only", "parked", "--json")
    assert done.exit_code == 0, done.output
    claims = {claim["name"]: claim for claim in json.loads(done.stdout)["claims"]}
    assert {claim["breach"] for claim in claims.values()} == {""}
    assert "none of it readable" in claims["no byte of a parked session"]["found"]
    assert "Busy" in claims["a parked session's return to a full card"]["found"]
    assert "holes" in claims["a parked session's return to a fragmented card"]["found"]
    assert "nothing of it on the card" in claims["a parked session in another process"]["found"]
    assert "all right" in claims["a parked session's neighbour"]["found"]
    assert "none of it readable" in claims["a region that ends in a parked session"]["found"]
    assert "went on in its former worker" in claims["a parked session's address refused"]["found"]


@pytest.mark.exhaustive
def test_a_breach_is_told_and_its_lease_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(scene: Scene) -> FaultOutcome:
        scene.builder(1 << 20).acquire()
        raise Breach("it was told nothing")

    monkeypatch.setattr("gpulease.client.verify.matrix.faults", lambda scene, sizes: [MatrixCheck("silence", forget)])
    done = verify("--only", "silence")
    assert done.exit_code == 1
    assert "Breach: it was told nothing" in done.stdout
    assert "exactly" in done.stdout


def test_a_promise_that_does_not_hold() -> None:
    def prove() -> str:
        raise Breach("7 words were readable")

    assert check("canary", prove).breach == "Breach: 7 words were readable"
    assert check("canary", lambda: "all zero").breach == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_tables_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    def found(scene: Scene) -> str:
        return "the endless kernel was ended, and nothing was launched behind it: " + "42 launches " * 12

    monkeypatch.setattr("gpulease.client.verify.claims.launch_gate", lambda scene, rounds: found(scene))
    monkeypatch.setenv("COLUMNS", str(width))
    done = verify("--only", "launch gate")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= width
    assert "".join(found(None).split()) in "".join("".join(lines[lines.index("") :]).split())  # type: ignore[arg-type]


def test_a_process_that_is_not_there() -> None:
    with pytest.raises(Breach, match="no process is named gpul-"):
        # A small number may be a lease of a test beside this one.
        worker_pid(0xFEEDC0FFEE << 88)


@pytest.mark.exhaustive
def test_one_wrong_result_among_six_is_told(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.client.verify.claims.WORK_S", 0)
    monkeypatch.setattr("gpulease.client.verify.claims.count_set", lambda *_: 5)
    with ExitStack() as stack:
        leases = [stack.enter_context(daemon.builder(32 << 20).acquire()) for _ in range(6)]
        sessions = [stack.enter_context(GpuSession(lease)) for lease in leases]
        with pytest.raises(Breach) as caught:
            at_the_same_time(sessions)
    told = sorted(str(caught.value).split("; "))
    assert told == ["tenant 5: 5 of 262144 words were counted", "tenant 6: memory granted again is not zero"]


def test_a_neighbour_whose_parent_was_killed_ends_without_a_traceback(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease:
        card = lease.card_uuid
    words = [sys.executable, "-P", "-m", "gpulease.client.verify.neighbour", daemon.address, card]
    with subprocess.Popen(
        words,
        env=python_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["errors"] == 0
        # A killed parent closes both pipes. The neighbour may read the last request, and then has nobody to answer.
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait(PATIENCE_S) == -signal.SIGPIPE
    assert daemon.leases() == []
