"""The file: what was written is there, all of it or nothing."""

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulease.daemon.leases.model import Cause, LeaseState
from gpulease.daemon.record.journal import JournalBroken, open_journal
from gpulease.daemon.record.journal.database import HEAD_NAME, JOURNAL_NAME, VERSION, HeadFile
from gpulease.daemon.record.journal.rows import Contents

from .scenes import BOOT, RELAY, kept, left_behind, opened, put, tombstone

WAL_NAME = f"{JOURNAL_NAME}-wal"
FLIPS = 80
"""Of the bytes of the database and its log, drawn anew each time: each takes two opened files."""


CASES = (("stopped", JOURNAL_NAME), ("killed", WAL_NAME), ("killed", HEAD_NAME))
"""The database has all in it once a daemon has stopped, and its log while one runs."""


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Contents]:
    """Folders that daemons left, and what must be found in each."""
    folder = tmp_path_factory.mktemp("journal")
    contents = left_behind(folder)
    return folder, contents


@pytest.fixture
def state(left: tuple[Path, Contents], tmp_path: Path) -> Path:
    """A copy of the one of a daemon that was killed."""
    return Path(shutil.copytree(left[0] / "killed", tmp_path / "state"))


@pytest.fixture
def stopped(left: tuple[Path, Contents], tmp_path: Path) -> Path:
    """A copy of the one of a daemon that stopped."""
    return Path(shutil.copytree(left[0] / "stopped", tmp_path / "stopped"))


def found_in(folder: Path) -> Contents:
    store, contents = opened(folder)
    store.close()
    return contents


def test_all_is_there_after_a_kill(left: tuple[Path, Contents], state: Path) -> None:
    found = found_in(state)
    assert found == left[1]
    assert [lease.lease_id for lease in found.leases] == [1, 2, 4, 5, 6, 7, 8]
    assert found.leases[2] == kept(4, LeaseState.FENCED)
    assert (found.tombstones, list(found.revoked)) == ([tombstone(3)], [3])
    assert (found.spent, found.revoked_tokens, found.next_tombstone) == (*[[(5, b"nonce", 1234)]] * 2, 1)
    assert (found.drain_ns, found.relays, found.card_drains) == (4321, {70: RELAY}, {"GPU-b": 5432})


def test_one_of_the_first_format_is_read_and_is_of_this_one_then(left: tuple[Path, Contents], stopped: Path) -> None:
    def version(new: int = 0) -> int:
        connection = sqlite3.connect(stopped / JOURNAL_NAME)
        if new:
            connection.execute(f"PRAGMA user_version={new}")
        ((found,),) = connection.execute("PRAGMA user_version")
        connection.close()
        return int(found)

    assert version(new=1) == 1
    store, contents = opened(stopped)
    assert contents == left[1]
    store.begin([])
    store.close()
    assert version() == VERSION


def test_only_its_user_can_read_it(state: Path) -> None:
    assert state.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o077 for path in state.iterdir() if path.stat().st_mode & 0o077} == {}


def outcome_of(folder: Path, whole: Contents) -> JournalBroken | None:
    """How it is refused; None if all is there."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    try:
        store, contents = opened(folder)
    except JournalBroken as broken:
        assert files == {path.name: path.read_bytes() for path in folder.iterdir()}, "what was refused was changed"
        return broken
    store.close()
    assert contents == whole
    return None


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_no_flipped_byte_misleads(left: tuple[Path, Contents], tmp_path: Path, kind: str, name: str) -> None:
    """Either it is refused, or the byte meant nothing and all is there."""
    folder = tmp_path / "state"
    whole = (left[0] / kind / name).read_bytes()
    draw = random.Random()
    places = range(len(whole)) if len(whole) < FLIPS else draw.sample(range(len(whole)), FLIPS)
    refused = 0
    for place in places:
        shutil.copytree(left[0] / kind, folder)
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        (folder / name).write_bytes(flipped)
        broken = outcome_of(folder, left[1])
        refused += broken is not None
        assert broken is None or broken.status in (os.EX_DATAERR, os.EX_IOERR), str(broken)
        shutil.rmtree(folder)
    assert refused > len(places) // 20, "hardly a byte of it mattered"


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_none_of_it_is_taken_if_some_of_it_is_cut(
    left: tuple[Path, Contents], tmp_path: Path, kind: str, name: str
) -> None:
    folder = tmp_path / "state"
    whole = (left[0] / kind / name).read_bytes()
    for keep in {0, 1, 31, 32, len(whole) // 3, len(whole) - 4096, len(whole) - 1} & set(range(len(whole))):
        shutil.copytree(left[0] / kind, folder)
        (folder / name).write_bytes(whole[:keep])
        assert outcome_of(folder, left[1]) is not None, keep
        shutil.rmtree(folder)


DB, WAL, HEAD = JOURNAL_NAME, WAL_NAME, HEAD_NAME


@pytest.mark.parametrize(
    ("kind", "there", "said"),
    [
        ("killed", {DB, WAL, HEAD}, None),
        ("killed", {DB, HEAD}, "parts of it are missing"),
        ("killed", {DB, WAL}, "its head, journal.head, is missing"),
        ("killed", {WAL, HEAD}, "it is missing"),
        ("killed", {DB}, "its head, journal.head, is missing"),
        ("killed", {WAL}, "it is missing, but its log, journal.db-wal, exists"),
        ("killed", {HEAD}, "it is missing"),
        ("killed", set(), None),
        ("stopped", {DB, HEAD}, None),
        ("stopped", {DB}, "its head, journal.head, is missing"),
        ("stopped", {HEAD}, "it is missing"),
        ("stopped", set(), None),
        ("begun", {WAL, HEAD}, "it is missing, but its log, journal.db-wal, exists"),
        ("begun", {HEAD}, None),
    ],
)
def test_no_file_of_it_can_be_missing(
    left: tuple[Path, Contents], tmp_path: Path, kind: str, there: set[str], said: str | None
) -> None:
    """With some files gone it is refused and left alone; with all of them gone, or before a commit, it is a new one.

    "begun" is as a daemon leaves it that is killed between the head and the database.
    """
    folder = Path(shutil.copytree(left[0] / ("killed" if kind == "begun" else kind), tmp_path / "state"))
    if kind == "begun":
        (folder / HEAD).unlink()
        head = HeadFile(folder)
        head.make()
        head.close()
    for name in {DB, WAL, HEAD} - there:
        (folder / name).unlink(missing_ok=True)
    if said is None:
        assert found_in(folder) == (left[1] if DB in there else Contents())
        return
    before = {name: (folder / name).read_bytes() for name in there}
    with pytest.raises(JournalBroken, match=said) as broken:
        open_journal(folder, BOOT)
    assert broken.value.status == os.EX_DATAERR
    assert "move the folder's journal files aside" in broken.value.hint
    assert {name: (folder / name).read_bytes() for name in there} == before


def not_a_database(state: Path) -> None:
    (state / JOURNAL_NAME).write_bytes(b"gpulease " * 1000)


def a_newer_one(state: Path) -> None:
    connection = sqlite3.connect(state / JOURNAL_NAME)
    connection.execute(f"PRAGMA user_version={VERSION + 1}")
    connection.close()


def somebody_elses(state: Path) -> None:
    connection = sqlite3.connect(state / JOURNAL_NAME)
    connection.execute("PRAGMA application_id=7")
    connection.close()


def with_a_forged_row(state: Path) -> None:
    connection = sqlite3.connect(state / JOURNAL_NAME, isolation_level=None)
    connection.execute("UPDATE entry SET value = CAST(replace(value, '\"ann\"', '\"bob\"') AS BLOB) WHERE kind = 1")
    connection.close()


def with_a_table_more(state: Path) -> None:
    connection = sqlite3.connect(state / JOURNAL_NAME, isolation_level=None)
    connection.execute("CREATE TABLE more (one)")
    connection.close()


def a_folder(state: Path) -> None:
    (state / JOURNAL_NAME).unlink()
    (state / JOURNAL_NAME).mkdir()


@pytest.mark.parametrize(
    ("spoil", "status", "said"),
    [
        (not_a_database, os.EX_DATAERR, "not a database"),
        (a_newer_one, os.EX_DATAERR, "journal.db was written by a newer gpulease"),
        (somebody_elses, os.EX_DATAERR, "not a journal of gpulease"),
        (with_a_forged_row, os.EX_DATAERR, "not those that were written"),
        (with_a_table_more, os.EX_DATAERR, "tables"),
        (a_folder, os.EX_IOERR, "can't be opened"),
    ],
)
def test_what_is_not_a_journal_is_refused(stopped: Path, spoil: Callable[[Path], None], status: int, said: str) -> None:
    spoil(stopped)
    with pytest.raises(JournalBroken, match=said) as broken:
        open_journal(stopped, BOOT)
    assert broken.value.status == status
    # Refused means left alone: it can be opened again, and the lock is let go.
    with pytest.raises(JournalBroken, match=said):
        open_journal(stopped, BOOT)


def test_a_commit_that_is_older_than_the_head_is_refused_later_too(state: Path) -> None:
    """The disk failed, the file is opened again, and some of its log does not check any more."""
    store, _ = opened(state)
    store.begin([])
    store._disconnect()
    shutil.copy(state / JOURNAL_NAME, state / "old")
    store.apply([put(kept(20))])
    store._disconnect()
    shutil.copy(state / "old", state / JOURNAL_NAME)
    with pytest.raises(ValueError, match="it ends with commit"):
        store.apply([put(kept(21))])
    store.close()


@pytest.mark.parametrize("name", [JOURNAL_NAME, WAL_NAME, HEAD_NAME, ""])
def test_nothing_is_written_where_nobody_finds_it(state: Path, name: str) -> None:
    store, _ = opened(state)
    store.begin([])
    place = state / name
    place.rename(state.with_name("aside"))
    with pytest.raises(OSError, match="was moved or deleted; put them back"):
        store.apply([put(kept(20))])
    state.with_name("aside").rename(place)
    store.apply([put(kept(20))])
    store.close()
    assert 20 in {lease.lease_id for lease in found_in(state).leases}


def test_one_daemon_at_a_time(tmp_path: Path) -> None:
    first = open_journal(tmp_path / "state", BOOT)
    for name in os.listdir(tmp_path / "state"):
        if not name.startswith("journal"):
            (tmp_path / "state" / name).unlink()
    with pytest.raises(JournalBroken, match="another daemon") as broken:
        open_journal(tmp_path / "state", BOOT)
    assert broken.value.status == os.EX_UNAVAILABLE
    os.close(first._lock_fd)
    first._committer.stop()
    again = open_journal(tmp_path / "state", BOOT)
    os.close(again._lock_fd)
    again._committer.stop()


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(mode)
    with pytest.raises(JournalBroken, match="mode 0700") as broken:
        open_journal(tmp_path / "state", BOOT)
    assert broken.value.status == os.EX_CONFIG


def test_a_folder_whose_parent_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalBroken, match=r"the folder .*/no of the state folder .* does not exist") as broken:
        open_journal(tmp_path / "no" / "state", BOOT)
    assert broken.value.status == os.EX_CONFIG


def test_what_was_interrupted_while_it_was_made_is_made_again(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "state", BOOT)
    journal._committer.stop()
    os.close(journal._lock_fd)
    whole = tmp_path / "state"
    head = (whole / HEAD_NAME).read_bytes()
    for files in ([], [HEAD_NAME], [HEAD_NAME, JOURNAL_NAME]):
        shutil.rmtree(whole)
        whole.mkdir(mode=0o700)
        for name in files:
            (whole / name).write_bytes(_head_of_none(head) if name == HEAD_NAME else b"")
        store, contents = opened(whole)
        store.begin([put(kept(1))])
        store.close()
        assert contents == Contents()


def _head_of_none(head: bytes) -> bytes:
    from gpulease.daemon.record.journal.database import _head_bytes

    assert len(head) == len(_head_bytes(0))
    return _head_bytes(0)


def test_another_boot_ends_every_lease_and_keeps_every_fence(state: Path) -> None:
    for _ in range(2):
        journal = open_journal(state, "b2" * 16)
        ended = {lease.lease_id: lease for lease in journal.recovered.tombstones}
        assert set(ended) == {1, 2, 3, 5, 6, 7, 8}
        assert (ended[1].cause, ended[1].reason) == (Cause.WORKER_DIED, "the host was restarted")
        assert ended[3] == tombstone(3)
        fenced = kept(4, LeaseState.FENCED, created_ns=0, deadline_ns=0, ended_ns=0, worker_pid=0)
        assert journal.kept == (fenced,)
        assert (list(journal.recovered.revoked), journal.spent, journal.cards) == ([3], (), {})
        assert (journal.relays, journal.revoked_tokens) == ((), ())
        assert journal.recovered.drain_ns == 0, "it is drained, and nothing is left for that to end"
        assert journal.recovered.card_drains == (("GPU-b", 0),)
        journal._committer.stop()
        os.close(journal._lock_fd)


def test_a_newer_journal_is_for_a_newer_daemon(stopped: Path) -> None:
    a_newer_one(stopped)
    with pytest.raises(JournalBroken) as broken:
        open_journal(stopped, BOOT)
    assert "damaged" not in str(broken.value)
    assert broken.value.hint.startswith("Start that version, or move the folder's journal files aside: then the daemon")
