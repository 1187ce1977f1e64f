"""A model of random weights is written as files, and their way to the card is timed."""

import json

import pytest

from gpulease.client.bench import checkpoint_load
from helpers.daemon import Daemon


def test_loads_of_files_are_timed_beside_copies_of_memory(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("COPIED_BYTES", "ARENA_BYTES"):
        monkeypatch.setattr(checkpoint_load, name, 1 << 20)
    monkeypatch.setattr(checkpoint_load, "ROUNDS", 1)
    monkeypatch.setattr(checkpoint_load, "WINDOW_BYTES", 1 << 14)
    monkeypatch.setattr(checkpoint_load, "running_address", lambda: daemon.address)
    checkpoint_load.main(["two-layers"])
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [figure["of"] for figure in figures if figure["figure"] == "mem_write"] == ["ordinary memory", "the arena"]
    assert [figure["state"] for figure in figures if figure["figure"] == "load"] == ["warm", "cold"]
    assert {(figure["way"], figure["threads"]) for figure in figures if figure["figure"] == "read"} == {
        (way, threads) for way in ("mapped", "read") for threads in (1, 4, 8)
    }
    assert all(figure["gb_per_s"] > 0 for figure in figures)
