"""Both ways of a rebind are measured, and told as a table."""

import asyncio

import pytest

from gpulease.client.bench import rebind_times
from gpulease.client.bench.rebind_times import measure_rebinds, table_of
from gpulease.client.decode.checkpoint import RandomCheckpoint
from helpers.daemon import Daemon
from helpers.decode.random_models import TINY


@pytest.mark.exhaustive
def test_each_length_is_measured_both_ways(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    # More rows need kernels that the embedded driver compiles for seconds.
    monkeypatch.setattr(rebind_times, "CHUNK_ROWS", 16)
    found = asyncio.run(measure_rebinds(daemon.address, RandomCheckpoint(TINY, 1), (8, 20), rounds=1))
    assert [times.prompt for times in found] == [8, 20]
    assert all(min(times.replay_ms, times.out_ms, times.in_ms) > 0 for times in found)
    assert found[1].copied_bytes == 2 * found[0].copied_bytes
    lines = table_of(found).splitlines()
    assert [line.split()[0] for line in lines] == ["prompt", "8", "20"]
