"""Round trips beside other callers: ratios, goals, absence, and the order of rounds. What needs a card is in gpu/."""

import shutil
import subprocess
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from gpulease.client.bench import peers
from gpulease.client.bench.bounds import load_bounds
from gpulease.client.bench.figures import Figures
from gpulease.client.bench.peers import (
    BINDINGS,
    CALLERS,
    LEASED,
    NO_CARD,
    PYCUDA,
    ROWS,
    C,
    compile_direct_calls,
    measure_with_peers,
    missing_reason,
    report_of,
)
from gpulease.client.bench.round_trips import Calls, WrongCallerResult, measure_calls, measure_session
from gpulease.client.cli.bench import round_trip_table
from gpulease.client.console.exit_status import MissingPrerequisite
from helpers.daemon import Daemon

EVERY_FIGURE = {row.figure(percent) for row in ROWS for percent in (50, 99)}
ALLOC_GOAL = next(bound.aim_text for bound in load_bounds("cuda") if bound.name == "alloc_free")
HOST_US = {"call_us": 1.0, "exchange_us": 300.0}
FLOORS = {
    f"{name}_floor_us" for name in ("alloc_free_beside", "launch_own", "launch_pipelined", "sync_idle", "train_sync")
}
FOUND = {
    LEASED: {"launch_pipelined_p50_us": 2.0, "launch_pipelined_p99_us": 2.5, "write_16m_pinned_p50_gb_s": 50.0},
    C: {"launch_pipelined_p50_us": 4.0, "launch_pipelined_p99_us": 5.0, "write_16m_pinned_p50_gb_s": 53.0},
}


def test_ratios_goals_and_the_missing_are_told_in_the_table() -> None:
    report = report_of(FOUND, HOST_US, {BINDINGS: "not there", PYCUDA: "not there"}, 3, has_goals=True)
    assert report["ratio"] == {C: {"launch_pipelined": 0.5, "write_16m_pinned": 0.943}}
    assert report["goals"]["launch_pipelined"] == {"goal": "<= 0.5 of C", "is_met": True}
    assert report["goals"]["write_16m_pinned"] == {"goal": ">= 0.95 of C", "is_met": False}
    head, launch, write, *rest = round_trip_table(report).splitlines()
    assert head.split()[-9:] == ["leased", "p50", "p99", "C", "p50", "p99", "leased/C", "goal", "met"]
    assert report["goals"]["alloc_free_beside"] == {"goal": ALLOC_GOAL, "is_met": None}
    assert launch.split() == [
        "launch,",
        "pipelined",
        "us",
        "2.00",
        "2.50",
        "4.00",
        "5.00",
        "0.50",
        "<=",
        "0.5",
        "of",
        "C",
        "yes",
    ]
    assert write.split()[-6:] == ["0.94", ">=", "0.95", "of", "C", "no"]
    assert "Left out: cuda-bindings, pycuda: not there." in rest


def test_what_is_not_installed_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert missing_reason("numpy", "numpy.linalg") == ""
    missing = missing_reason("some-package", "some_package_of_nobody.driver")
    assert missing == "some-package is not installed: pip install some-package"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPrerequisite, match="no C compiler was found: install one of cc, gcc, clang"):
        compile_direct_calls(tmp_path)
    (tmp_path / "gcc").write_text("#!/bin/sh\necho 'stdio.h: not there' >&2\nexit 1\n")
    (tmp_path / "gcc").chmod(0o755)
    with pytest.raises(MissingPrerequisite, match=r"gcc failed: stdio\.h: not there"):
        compile_direct_calls(tmp_path)


def test_each_round_begins_with_another_caller_and_one_that_fails_is_left_out() -> None:
    order: list[str] = []

    def caller(name: str) -> Callable[[], Figures]:
        def measured() -> Figures:
            order.append(name)
            if name == C:
                raise MissingPrerequisite("the direct calls failed: no card")
            return {"x": float(len(order))}

        return measured

    absent: dict[str, str] = {}
    found = peers._in_turn({name: caller(name) for name in (LEASED, C, PYCUDA)}, absent, 3, lambda text: None)
    assert order == [LEASED, C, PYCUDA, PYCUDA, LEASED, PYCUDA, LEASED]
    assert absent == {C: "the direct calls failed: no card"}
    assert found == {LEASED: {"x": 5.0}, PYCUDA: {"x": 4.0}}


@pytest.mark.parametrize(("lost", "garbled", "told"), [(1, 0, "launches left"), (0, 1, "16 MiB came back")])
def test_wrong_results_are_found(lost: int, garbled: int, told: str) -> None:
    """Memory of this process stands for the card's: launches are counted, copies are kept."""
    counters = np.zeros(32, np.uint32)
    counters -= lost * 3
    small, pinned = np.empty(4096, np.uint8), np.empty(16 << 20, np.uint8)
    kept: dict[str, bytes] = {}

    def launch() -> None:
        np.add(counters, 3, out=counters)

    def read(name: str, into: "np.ndarray[tuple[int], np.dtype[np.uint8]]", wrong: int = 0) -> None:
        into[:] = np.frombuffer(kept[name], np.uint8)
        into[0] += wrong

    calls = Calls(
        launch,
        lambda: None,
        lambda: kept.update(small=small.tobytes()),
        lambda: read("small", small),
        lambda: kept.update(pinned=pinned.tobytes()),
        lambda: read("pinned", pinned, garbled),
        lambda: counters,
        small,
        pinned,
    )
    with pytest.raises(WrongCallerResult, match=told):
        measure_calls(lambda: None, lambda: calls, 1, 2)


def test_a_session_is_measured_without_peers_on_the_embedded_driver(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "measure_session", lambda address, launches, samples: measure_session(address, 1, 3))
    card = {"driver": "cpu", "warm_wanted": 0, "uuid": "none"}
    report = measure_with_peers(daemon.address, card, 1, 1, 3, lambda text: None)
    starts = {f"session_start_p{percent}_ms" for percent in (50, 99)}
    assert set(report["figures"]) == {LEASED}
    assert set(report["figures"][LEASED]) == (EVERY_FIGURE - starts) | FLOORS
    assert all(value > 0 for value in report["figures"][LEASED].values())
    assert report["goals"] == {}
    assert {name: report["absent"][name] for name in CALLERS[1:]} == dict.fromkeys(CALLERS[1:], NO_CARD)
    assert f"Left out: C, cuda-bindings, pycuda: {NO_CARD}." in round_trip_table(report)


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_the_c_caller_compiles_without_a_warning_by_the_documents_command(tmp_path: Path) -> None:
    folder = files("gpulease.client.bench")
    text = folder.joinpath("PEERS.md").read_text(encoding="utf-8")
    command = 'cc -O2 -o direct_calls "$BENCH/direct_calls.c" -ldl'
    assert command in text
    strict = command.replace("-O2", "-O2 -Wall -Wextra -Werror")
    done = subprocess.run(
        ["sh", "-c", f"{strict} && ./direct_calls"],
        cwd=tmp_path,
        env={"BENCH": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "usage: ./direct_calls PTX_FILE LAUNCHES SAMPLES\n")
