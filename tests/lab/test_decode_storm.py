"""The storm passes on a correct decoder, and fails with a wrong token, a wrong record or a broken chain."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from helpers.audit_log import config
from helpers.daemon import Daemon

from . import decode_storm
from .decode_storm import audited, is_sound, main, memory_figures, storm_table

SOUND: dict[str, Any] = {
    "seconds": 600.0,
    "outputs": 900,
    "wrong": 0,
    "errors": {},
    "tokens": 9000,
    "revoked": 300,
    "rebinds": 300,
    "replays": 500,
    "memory": {"bench": memory_figures([1, 2, 3], [1024, 1024, 1024])},
    "audit": {
        "finished": 900,
        "recorded": 900,
        "missing": 0,
        "twice_or_of_nothing": 0,
        "other_outputs": 0,
        "chain_records": 2000,
        "chain_is_whole": True,
    },
}


def test_a_sound_storm_is_told_as_one() -> None:
    assert is_sound(SOUND)
    lines = storm_table(SOUND).splitlines()
    assert lines[-1] == "sound"
    assert ["recorded", "900"] in [line.split() for line in lines]


@pytest.mark.parametrize(
    "change",
    [
        {"wrong": 1},
        {"errors": {"AdmissionRefused": 1}},
        {"outputs": 0},
        {"rebinds": 0},
        {"memory": {"broker": memory_figures([1, 2, 3], [1024, 6144, 11264])}},
        *({"audit": SOUND["audit"] | fault} for fault in ({"missing": 1}, {"twice_or_of_nothing": 1})),
        *({"audit": SOUND["audit"] | fault} for fault in ({"other_outputs": 1}, {"chain_is_whole": False})),
    ],
)
def test_a_storm_with_a_fault_is_not(change: dict[str, Any]) -> None:
    assert not is_sound(SOUND | change)
    assert storm_table(SOUND | change).endswith("NOT SOUND")


def test_records_are_counted_against_what_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(request: str, sha256: str = "ab", reason: str = "MaxTokensReached") -> str:
        note = {"event": "decode", "request": request, "output": {"sha256": sha256}, "reason": reason}
        return json.dumps({"data": {"note": note}})

    lines = [line("run-0-1"), line("run-0-1"), line("run-3-2", "ef"), line("run-3-4", "ef", "Cancelled")]
    lines += [line("other-0-1"), json.dumps({"data": {"note": {"event": "decode_start"}}})]
    verdict = json.dumps({"whole": True, "records": 9})
    monkeypatch.setattr(decode_storm, "_audit", lambda *words: verdict if "verify" in words else "\n".join(lines))
    found = audited(Path(), "run", [1, 2, 3, 4], {0: "ab", 3: "cd"})
    assert (found["finished"], found["recorded"], found["missing"]) == (4, 4, 1)
    assert (found["twice_or_of_nothing"], found["other_outputs"]) == (1, 1)


@pytest.mark.exhaustive
def test_a_short_storm_is_sound_and_its_records_are_there(
    start_daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Use the shortest requests, so that some end while regions are revoked.
    monkeypatch.setattr(decode_storm, "KINDS", ((3, 6, False), (5, 8, True)))
    monkeypatch.setattr(decode_storm, "READINGS", 3)
    monkeypatch.setattr(decode_storm, "GROWTH_KIB", float("inf"))
    daemon: Daemon = start_daemon(config=config(tmp_path / "log"))
    monkeypatch.setenv("GPULEASE_ADDRESS", daemon.address)
    words = ["--minutes", "0.02", "--sequences", "4", "--audit", str(tmp_path / "log"), "--json"]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    report = json.loads(done.stdout)
    assert (report["wrong"], report["errors"]) == (0, {})
    assert report["audit"]["recorded"] == report["audit"]["finished"] >= report["outputs"]
    assert report["audit"]["chain_is_whole"]
    assert {"bench", "broker", "worker"} == set(report["memory"])
    # In this short time, a slow host may not revoke any region, or not see any request's end.
    assert done.exit_code == (0 if is_sound(report) else 1)
