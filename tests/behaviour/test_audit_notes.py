"""Notes of tenants in the audit log of a real daemon."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.client import InvalidRequest, Unsupported
from gpulease.client.aio import GpuBuilder
from helpers.audit_log import check_whole, config, gpulease_audit, records, stop
from helpers.daemon import Daemon

SIZE = 4 << 20
MANY = 259


def test_notes_are_in_the_chain_when_they_are_answered(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    folder = tmp_path / "log"
    daemon = start_daemon(config=config(folder))
    said = {"text": "é\x1b", "of": {"tokens": [1, 2**53 - 1], "none": None}}
    with daemon.builder(SIZE, 60).acquire() as lease:
        lease.note(said)
        (note,) = [record for record in records(folder) if record["kind"] == "note"]
        assert (note["data"]["note"], note["data"]["lease"]) == (said, lease.lease_id_text)
        with pytest.raises(InvalidRequest, match="is not an integer"):
            lease.note({"p": 0.5})

    async def many() -> None:
        async with GpuBuilder(daemon.address).min_vram(SIZE).acquire() as lease:
            for number in range(3):
                await lease.note({"number": number})
            assert await lease.notes([{"number": number} for number in range(3, MANY)]) == [None] * (MANY - 3)

    asyncio.run(many())
    stop(daemon)
    check_whole(folder)
    notes = [record["data"]["note"] for record in records(folder) if record["kind"] == "note"]
    assert notes == [said, *({"number": number} for number in range(MANY))]
    shown = gpulease_audit("show", "--kind", "note", folder).stdout.splitlines()
    assert len(shown) == MANY + 1
    assert "\x1b" not in shown[0]


def test_a_daemon_without_a_log_refuses_notes(daemon: Daemon) -> None:
    with daemon.builder(SIZE).acquire() as lease, pytest.raises(Unsupported, match="keeps no audit log"):
        lease.note({})
