"""The bench of shared prefixes, on the embedded driver."""

import asyncio

import pytest

from gpulease.client.decode.checkpoint import RandomCheckpoint
from helpers.daemon import Daemon
from helpers.decode.random_models import TINY

from . import prefix_times


def test_a_known_prefix_gives_the_first_token_sooner_and_leaves_room_for_more_sequences(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer answers show no more: they begin behind their prefix in any case.
    monkeypatch.setattr(prefix_times, "ANSWER", 12)
    figures = asyncio.run(
        prefix_times.measure(daemon.address, RandomCheckpoint(TINY, 1), 96, 20, rounds=1, sequences=6)
    )
    without, few, first, many, outputs = figures
    assert (without["reuses_prefixes"], first["reuses_prefixes"]) == (False, True)
    assert first["again_ms"] < first["new_ms"]
    assert few["reserved_before"] == few["sequences"] == 2
    assert many["sequences"] >= 4
    assert outputs == {"figure": "outputs", "compared": 10, "wrong": 0}
