"""The journal's file: an SQLite database of one connection, read and checked as a whole once, then only written.

Rules:

1. The log is written ahead (WAL) and synced at each commit (`synchronous=FULL`): a commit that returned is on the disk
   (sqlite.org/pragma.html). Every pragma is asked for after it was set: SQLite ignores what it does not know.
2. Nobody else may open it (`locking_mode=EXCLUSIVE`); so the log's index is never a file, and always made anew.
3. What is committed must be where the next daemon looks: files that somebody moved or removed under this one take no
   commit, though the disk would.
4. Each commit writes its number and the sum of all rows' digests; the head tells the number from outside. If either
   does not agree, nothing is taken from the file.
"""

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from gpulease.daemon.journal.broken import EX_IOERR, JournalBroken, not_whole
from gpulease.daemon.journal.entries import SCHEMA as ENTRY_SCHEMA
from gpulease.daemon.journal.entries import put
from gpulease.daemon.journal.folder import FILE_MODE, HEAD_NAME, JOURNAL_NAME, HeadFile, sync
from gpulease.daemon.journal.rows import Change, digest_of

APPLICATION_ID: Final = 0x67704C4A
"""What file(1) knows the file by ("gpLJ")."""

VERSION: Final = 2
"""Of the rows and tables; a higher number is another format. Rows of the first one are rows of this one, too."""

_FIRST_VERSION: Final = 1

BUSY_TIMEOUT_S: Final = 1.0
"""For whoever looks into the file with a tool of their own."""

COPY_PREFIX: Final = "examined-"
"""Of a folder for a copy of the file, which is looked through before the file itself is opened."""

_MODULUS: Final = 1 << 128
_SCHEMA: Final = (
    ENTRY_SCHEMA,
    "CREATE TABLE state (one INTEGER PRIMARY KEY, boot TEXT NOT NULL, commits INTEGER NOT NULL, total BLOB NOT NULL,"
    " digest BLOB NOT NULL)",
)
_PRAGMAS: Final = (
    ("locking_mode", "EXCLUSIVE", "exclusive"),
    ("journal_mode", "WAL", "wal"),
    ("cell_size_check", "ON", 1),
    ("trusted_schema", "OFF", 0),
)

_SYNCHRONOUS: Final = {"FULL": 2, "OFF": 0}
_OF_THE_DISK: Final = frozenset(
    {
        sqlite3.SQLITE_AUTH,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    }
)
"""Errors that say nothing of what is in the file (sqlite.org/rescode.html); a primary code is an error's low byte."""

Place = tuple[int, int] | None
"""A file's device and number there; None if there is none."""

TakeRow = Callable[[int, bytes, bytes], None]


@dataclass(slots=True)
class _State:
    boot: str
    commits: int = 0
    total: int = 0

    def digest(self) -> bytes:
        return blake2b(f"{self.boot} {self.commits} {self.total}".encode(), digest_size=16).digest()


class Store:
    """An open journal; one thread at a time.

    Args:
        folder: Its folder, which nobody else has.
        boot: This boot of the host.
        take: Gets the kind, key and value of every row, in their order; whether all is well is known only afterwards.

    Attributes:
        last_boot: The boot of the host in which it was last written.

    Raises:
        JournalBroken: It can't be used. What is there is as it was.
    """

    def __init__(self, folder: Path, boot: str, take: TakeRow) -> None:
        self._path = folder / JOURNAL_NAME
        self._wal = folder / f"{JOURNAL_NAME}-wal"
        self._files = (self._path, self._wal, folder / HEAD_NAME)
        self._boot = boot
        self._connection: sqlite3.Connection | None = None
        self._head: HeadFile | None = None
        self._places: tuple[Place, ...] | None = None
        try:
            self._head = HeadFile(folder)
            if self._is_new(self._head):
                self._make(folder, self._head)
            _examine(self._path, boot, self._head.commits or 0, take)
            self._connection = _connect(self._path)
            self._state = _state_in(self._connection, boot, self._head.commits or 0)
        except (sqlite3.Error, OSError, ValueError) as error:
            self.close()
            raise _broken(self._path, error) from None
        except JournalBroken:
            self.close()
            raise
        self.last_boot = self._state.boot

    def begin(self, changes: Iterable[Change]) -> None:
        """Commit what the opening changes, which also shows that the disk can be written. Raises JournalBroken."""
        try:
            if self._connection is not None:
                self._connection.execute(f"PRAGMA user_version={VERSION}")
            self.apply(changes)
        except (sqlite3.Error, OSError, ValueError) as error:
            self.close()
            raise _broken(self._path, error) from None

    def apply(self, changes: Iterable[Change]) -> None:
        """Commit changes, all or none; returned means durable. Raises sqlite3.Error, OSError or ValueError.

        After that it may be called again with the same changes, and those behind them.
        """
        if self._head is None:
            raise OSError("the journal is closed")
        if self._connection is None:
            self._connection = _connect(self._path)
            self._state = _state_in(self._connection, self._boot, self._head.commits or 0)
        if self._places not in (None, self._look()):
            raise OSError(f"{self._path}, its log or its head was moved or removed; put them back, or start again")
        connection = self._connection
        state = _State(self._boot, self._state.commits + 1, self._state.total)
        try:
            connection.execute("BEGIN IMMEDIATE")
            state.total = (state.total + put(connection, changes)) % _MODULUS
            _write_state(connection, state)
            connection.execute("COMMIT")
        except BaseException:
            # What became of a commit that failed is the file's to say: the next try reads it.
            self._disconnect()
            raise
        self._state = state
        self._head.write(state.commits)
        if self._places is None:
            self._places = self._look()

    def close(self) -> None:
        """Close the files; SQLite then folds its log into the database, if it can."""
        self._disconnect()
        if self._head is not None:
            self._head.close()
            self._head = None

    def _look(self) -> tuple[Place, ...]:
        """Which files are where the journal's are."""
        return tuple(_place(path) for path in self._files)

    def _is_new(self, head: HeadFile) -> bool:
        is_there = self._path.exists()
        if is_there and head.commits is None:
            raise not_whole(self._path, f"its head, {HEAD_NAME}, is missing")
        if not is_there and head.commits:
            raise not_whole(self._path, "it is missing")
        if not is_there and self._wal.exists():
            # SQLite would begin a new one and take the log of the old one away.
            raise not_whole(self._path, f"it is missing, and its log, {self._wal.name}, is there")
        return not is_there

    def _make(self, folder: Path, head: HeadFile) -> None:
        if head.commits is None:
            head.make()
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
        sync(folder)

    def _disconnect(self) -> None:
        self._places = None
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


def _place(path: Path) -> Place:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _connect(path: Path, synchronous: str = "FULL") -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        uri=True,
    )
    try:
        for name, wanted, answer in (*_PRAGMAS, ("synchronous", synchronous, _SYNCHRONOUS[synchronous])):
            connection.execute(f"PRAGMA {name}={wanted}")
            ((got,),) = connection.execute(f"PRAGMA {name}")
            if got != answer:
                raise OSError(f"SQLite sets {name} to {got}, not {wanted}")
    except BaseException:
        connection.close()
        raise
    return connection


def _examine(path: Path, boot: str, head_commits: int, take: TakeRow) -> None:
    """Read and check all of it, in a copy: SQLite cuts and folds in what it finds when it opens and closes a file.

    Raises sqlite3.Error, OSError or ValueError.
    """
    for left in path.parent.glob(f"{COPY_PREFIX}*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=COPY_PREFIX, dir=path.parent) as folder:
        for name in (path.name, f"{path.name}-wal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(path.with_name(name), Path(folder, name))
        connection = _connect(Path(folder, path.name), "OFF")
        try:
            state = _state_in(connection, boot, head_commits)
            _check_rows(connection, state, take)
        finally:
            connection.close()


def _state_in(connection: sqlite3.Connection, boot: str, head_commits: int) -> _State:
    """What the file says of itself; the tables are made if there are none and have never been."""
    ((application,),) = connection.execute("PRAGMA application_id")
    ((version,),) = connection.execute("PRAGMA user_version")
    tables = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema")]
    if not (application or version or tables or head_commits):
        return _make_tables(connection, boot)
    if application != APPLICATION_ID:
        raise ValueError("it is not a journal of gpulease, or not all of it is there")
    if version > VERSION:
        raise ValueError(f"it was written by a newer gpulease (format {version}; this one knows {VERSION})")
    if version < _FIRST_VERSION or tables != list(_SCHEMA):
        raise ValueError("its tables are not those of a journal")
    rows = list(connection.execute("SELECT one, boot, commits, total, digest FROM state"))
    if len(rows) != 1 or [type(value) for value in rows[0]] != [int, str, int, bytes, bytes]:
        raise ValueError("its state is not what was written")
    _, last_boot, commits, total, digest = rows[0]
    state = _State(last_boot, commits, int.from_bytes(total, "big"))
    if state.digest() != digest:
        raise ValueError("its state is not what was written")
    if commits < head_commits:
        raise ValueError(f"it ends with commit {commits}, and there were {head_commits}")
    return state


def _make_tables(connection: sqlite3.Connection, boot: str) -> _State:
    state = _State(boot)
    connection.execute("BEGIN IMMEDIATE")
    for statement in _SCHEMA:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version={VERSION}")
    _write_state(connection, state)
    connection.execute("COMMIT")
    return state


def _check_rows(connection: sqlite3.Connection, state: _State, take: TakeRow) -> None:
    ((said,),) = connection.execute("PRAGMA quick_check(1)")
    if said != "ok":
        raise ValueError(f"SQLite finds it damaged: {said}")
    total = 0
    for kind, key, value in connection.execute("SELECT kind, key, value FROM entry ORDER BY kind, key"):
        try:
            total += digest_of(kind, key, value)
            take(kind, key, value)
        except (ValueError, TypeError, KeyError):
            raise ValueError("a row is not what was written") from None
    if total % _MODULUS != state.total:
        raise ValueError("its rows are not those that were written")


def _write_state(connection: sqlite3.Connection, state: _State) -> None:
    values = (state.boot, state.commits, state.total.to_bytes(16, "big"), state.digest())
    connection.execute("INSERT OR REPLACE INTO state VALUES (1, ?, ?, ?, ?)", values)


def _broken(path: Path, error: Exception) -> JournalBroken:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if not isinstance(error, OSError) and code not in _OF_THE_DISK:
        return not_whole(path, str(error))
    said = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return JournalBroken(
        f"the journal {path} can't be opened: {said}",
        "Look after the disk, its free space and the file's owner, then start again; nothing was changed.",
        EX_IOERR,
    )
