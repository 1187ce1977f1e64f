"""Benches of parking: models that share a card, and the storm; a run that is right passes, and a wrong one fails."""

from typing import Any

import pytest

from gpulease.client import GpuBuilder, GpuSession
from gpulease.client.bench.park_models import is_right, measure_park, park_table
from gpulease.client.bench.park_storm import is_calm, measure_storm, storm_table
from gpulease.client.bench.woven_data import WORD_BYTES, WovenData, woven_bytes
from helpers.daemon import Daemon

CALM: dict[str, Any] = {
    "minutes": 1.0,
    "did": {"checks": 5, "parked": 3},
    "wrong": 0,
    "surprises": [],
    "leases_left": 0,
    "unaccounted_bytes": 0,
    "granted": 4,
    "ends_per_lease": [1],
}


@pytest.mark.parametrize(
    "fault",
    [
        {"wrong": 1},
        {"surprises": ["free: TimedOut: ..."]},
        {"leases_left": 1},
        {"unaccounted_bytes": 4096},
        {"ends_per_lease": [0, 1]},
        {"ends_per_lease": [1, 2]},
        {"did": {"checks": 5}},
    ],
)
def test_a_storm_with_a_fault_is_not_sound(fault: dict[str, Any]) -> None:
    assert is_calm(CALM)
    assert storm_table(CALM).endswith("\n\nsound")
    assert not is_calm(CALM | fault)
    assert storm_table(CALM | fault).endswith("NOT SOUND")


def test_a_wrong_word_is_found_wherever_it_is(daemon: Daemon) -> None:
    size = woven_bytes((1 << 20) + 5)
    with GpuBuilder(daemon.address).min_vram(4 << 20).acquire() as lease, GpuSession(lease) as session:
        data = WovenData(session, size, 7)
        data.begin()
        assert (size, data.check()) == (1 << 20, 0)
        for at in (0, 8 * 77, size - WORD_BYTES):
            right = session.mem_read(data.block, at, WORD_BYTES)
            session.mem_write(data.block, at, b"\1" * WORD_BYTES)
            assert data.check() == 1
            session.mem_write(data.block, at, right)
        data.begin()
        assert data.check() == 0


@pytest.mark.exhaustive
def test_models_take_turns_and_a_storm_is_sound() -> None:
    report = measure_park("cpu", 2 << 20, 6.0, lambda text: None, models=6, host_models=6)
    assert is_right(report)
    # The card has room for three of the six, so no request in turn finds its model there.
    assert report["parked"]["in turn"]["hit_rate"] == 0
    assert all(0 < figures["hit_rate"] < 1 for name, figures in report["parked"].items() if name != "in turn")
    assert "Zipf" in park_table(report)
    # Long enough for a broker that is killed.
    storm = measure_storm("cpu", 0.2, lambda text: None)
    assert is_calm(storm), storm_table(storm)
