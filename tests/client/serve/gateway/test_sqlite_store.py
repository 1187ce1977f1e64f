"""The properties that only the SQLite store has."""

import sqlite3
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease.client import InvalidRequest
from gpulease.client.serve.gateway import SqliteStore, StoreUnavailable
from gpulease.client.serve.gateway.ledger import Moment, Reservation
from gpulease.client.serve.gateway.sqlite_store import host_clock
from gpulease.client.serve.gateway.store import open_store

HASH = bytes(32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_its_files_are_its_owners_alone(path: Path) -> None:
    store = SqliteStore(path)
    store.reserve("k", HASH, 1)
    modes = {stat.S_IMODE(found.stat().st_mode) for found in path.parent.glob("store*")}
    store.close()
    assert modes == {0o600}


def test_it_syncs_each_commit_of_a_write_ahead_log_but_a_reservation(path: Path) -> None:
    store = SqliteStore(path)

    def pragma(name: str) -> object:
        return store._connection.execute(f"PRAGMA {name}").fetchone()[0]

    normal, full = 1, 2
    assert pragma("journal_mode") == "wal"
    levels = []
    for key in ("first", "second"):
        held = store.reserve(key, HASH, 1)
        assert isinstance(held, Reservation)
        levels.append(pragma("synchronous"))
        store.start(held)
        levels.append(pragma("synchronous"))
        store.complete(held, b"outcome")
        levels.append(pragma("synchronous"))
    store.close()
    assert levels == [normal, full, full] * 2


def test_callers_that_wait_share_a_commit(path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    began = threading.Event()
    commit = SqliteStore._commit

    def noted(store: SqliteStore, group: list[Any]) -> None:
        groups.append(len(group))
        commit(store, group)

    def slow_clock() -> Moment:
        began.set()
        gate.wait()
        return host_clock()

    monkeypatch.setattr(SqliteStore, "_commit", noted)
    store = SqliteStore(path, clock=slow_clock)
    first = threading.Thread(target=store.reserve, args=("first", HASH, 1))
    first.start()
    began.wait()
    others = [threading.Thread(target=store.reserve, args=(f"key {number}", HASH, 1)) for number in range(20)]
    for thread in others:
        thread.start()
    while len(store._waiting) < len(others):
        pass
    gate.set()
    for thread in (first, *others):
        thread.join()
    store.close()
    assert groups == [1, 20]


def test_an_interrupted_commit_is_undone_and_the_next_one_works(path: Path) -> None:
    class Clock:
        error: BaseException | None = KeyboardInterrupt()

        def __call__(self) -> Moment:
            error, self.error = self.error, None
            if error is not None:
                raise error
            return host_clock()

    store = SqliteStore(path, clock=Clock())
    with pytest.raises(KeyboardInterrupt):
        store.reserve("k", HASH, 1)
    assert isinstance(store.reserve("k", HASH, 1), Reservation)
    store.close()
    store.close()
    with pytest.raises(StoreUnavailable, match="is closed"):
        store.reserve("k", HASH, 1)


def test_it_syncs_after_an_interrupt_whatever_the_interrupted_one_had_set(path: Path) -> None:
    class Interrupted:
        """The store's connection, on which an interrupt comes as soon as the next commits are not synced."""

        def __init__(self, real: sqlite3.Connection) -> None:
            self.real = real

        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            cursor = self.real.execute(sql, *values)
            if sql == "PRAGMA synchronous = NORMAL":
                raise KeyboardInterrupt
            return cursor

    store = SqliteStore(path)
    held = store.reserve("k", HASH, 1)
    assert isinstance(held, Reservation)
    store.start(held)
    connection = store._connection
    store._connection = Interrupted(connection)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        store.reserve("another", HASH, 1)
    store._connection = connection
    store.complete(held, b"outcome")
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    store.close()


@pytest.mark.parametrize("content", [b"this is no database, and never was one" * 40, None])
def test_what_can_not_be_opened(path: Path, content: bytes | None) -> None:
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(StoreUnavailable, match=r"store.*Name a new file"):
        SqliteStore(path)


@pytest.mark.parametrize("version", [0, 1, 7])
@pytest.mark.parametrize("table", ["customer", "operation"])
def test_another_program_s_database_is_not_changed(path: Path, version: int, table: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"CREATE TABLE {table} (name)")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreUnavailable, match=r"is another program's database.*Name a new file"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_a_file_of_another_format(path: Path) -> None:
    SqliteStore(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(StoreUnavailable, match="format 7"):
        SqliteStore(path)


def test_another_process_that_keeps_it_locked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulease.client.serve.gateway.sqlite_store.BUSY_S", 0.05)
    store = SqliteStore(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked"):
        store.reserve("k", HASH, 1)
    other.execute("ROLLBACK")
    other.close()
    assert isinstance(store.reserve("k", HASH, 1), Reservation)
    store.close()


def test_its_url(path: Path) -> None:
    store = open_store(f"sqlite:{path}")
    store.reserve("k", HASH, 1)
    store.close()
    assert path.exists()
    for url in ("", "sqlite:", str(path), "redis://x"):
        with pytest.raises(InvalidRequest, match="a store must be sqlite:PATH"):
            open_store(url)
