"""What a journal tells the next daemon of a fleet's membership: all of it only to one that has the same journal."""

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.record.journal import MembershipRow, open_journal
from gpulease.daemon.record.journal.rows import encode

from .scenes import BOOT

MEMBERSHIP = MembershipRow(7, 8, "first", 9, 10, is_restored=True, beat=11, run="ab", entered="cd-3")


def told(folder: Path, boot: str = BOOT, remember: MembershipRow | None = None) -> MembershipRow | None:
    """What a daemon finds, which then remembers."""

    async def live() -> MembershipRow | None:
        journal = await asyncio.to_thread(open_journal, folder, boot)
        if remember is not None:
            journal.observe(LeaseTable([]), lambda _: 0, lambda _: None)
            journal.remember_membership(remember)
        await journal.stop()
        return journal.membership

    return asyncio.run(live())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert told(tmp_path / "state", remember=MEMBERSHIP) is None
    return tmp_path / "state"


def assert_forgot(found: MembershipRow | None) -> None:
    """The fleet is known, and not which member of it the node was."""
    assert found == replace(MEMBERSHIP, incarnation=0, beat=0, run="", entered="")


def test_the_next_daemon_goes_on(folder: Path) -> None:
    for _ in range(2):
        found = told(folder)
        assert found is not None
        assert replace(found, folder="") == MEMBERSHIP


def test_another_boot_of_the_host_may_be_another_host(folder: Path) -> None:
    assert_forgot(told(folder, "b2" * 16))
    assert_forgot(told(folder, "b2" * 16))


def test_a_copied_folder_is_another_s(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert_forgot(told(tmp_path / "copy"))
    # A backup that takes the place of the folder.
    shutil.rmtree(folder)
    (tmp_path / "other").mkdir()
    shutil.copytree(tmp_path / "copy", folder)
    assert_forgot(told(folder))


def test_a_row_of_a_version_that_did_not_count_is_read(tmp_path: Path) -> None:
    first = MembershipRow(7, 8, "first", 9)
    members = json.loads(encode(first))
    assert {name for name, value in members.items() if value} == {"incarnation", "cluster_id", "generation", "revision"}
    assert told(tmp_path / "state", remember=first) is None
    found = told(tmp_path / "state")
    assert found is not None
    assert (found.incarnation, found.beat) == (7, 0)
