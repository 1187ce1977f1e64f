"""What `query` answers: one lease's map, typed."""

import asyncio
from typing import Any, get_type_hints

import pytest

from gpulease.client import Disconnected, LeaseReport, SubmitReport, aio
from gpulease.client.core.lease import lease_report_of
from helpers.daemon import Daemon
from helpers.submits import ROOM, scaling
from helpers.waiting import wait_until

WHOLE = {
    **dict.fromkeys(("lease_id", "state", "card_uuid", "exclusivity"), "x"),
    **dict.fromkeys(("generation", "size_bytes", "remaining_ms", "ttl_ms"), 1),
}


def test_the_types_name_all_that_the_daemon_says(daemon: Daemon) -> None:
    with daemon.builder().submits(ROOM).acquire() as lease:
        scaling(lease).launch()
        wait_until(lambda: "last_submit" in lease.query(), "the submit is gone")
        report = lease.query()
        remaining_ms: int = report["remaining_ms"]
        assert 0 < remaining_ms <= report["ttl_ms"]
        assert report["last_submit"]["timed_out"] is False
    over = lease.query()
    assert over["state"] == "torndown"
    for found, kind in ((report, LeaseReport), (over, LeaseReport), (report["last_submit"], SubmitReport)):
        assert found.keys() <= get_type_hints(kind).keys()


def test_coroutines_get_the_same(daemon: Daemon) -> None:
    async def ask() -> LeaseReport:
        async with await aio.GpuBuilder(daemon.address).min_vram(1 << 20).acquire() as lease:
            return await lease.query()

    assert asyncio.run(ask())["state"] == "active"


@pytest.mark.parametrize("found", [None, [], WHOLE | {"state": 5}, WHOLE | {"generation": True}])
def test_what_has_other_types_is_no_report(found: Any) -> None:
    assert lease_report_of(WHOLE | {"more": 1}, "query")["size_bytes"] == 1
    with pytest.raises(Disconnected, match="not a lease's map"):
        lease_report_of(found, "query")
