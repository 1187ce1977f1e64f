"""The journal's files: an SQLite database and its head, in a folder that one daemon locks.

The daemon reads and checks the whole database at its start, and afterwards only writes to it. These rules make a commit
durable and a loss visible:

1. SQLite writes changes to its log first (WAL), and syncs the log at each commit (`synchronous=FULL`). So a commit that
   has returned is on the disk (sqlite.org/pragma.html). The code reads every pragma back, because SQLite ignores
   unknown pragmas.
2. No other process may open the database (`locking_mode=EXCLUSIVE`). So SQLite keeps the log's index in memory and not
   in a file.
3. If one of the files was moved or removed, a commit fails, because the next daemon could not read it.
4. Each commit writes its number and the sum of all rows' digests. If either is wrong at the start, the daemon does not
   use the database.

The head is a small file with the number of commits. SQLite reads its log up to the first frame with a wrong checksum,
and ignores the rest. A number of commits below the head's reveals such a loss. The daemon writes the head after each
commit and never syncs it. So after a crash of the host, the head may be too low; it is never too high.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Final

from gpulease.daemon.host.cannot_start import CannotStart
from gpulease.daemon.record.journal.rows import SCHEMA as ENTRY_SCHEMA
from gpulease.daemon.record.journal.rows import Change, RowDigests, digest_of, put
from gpulease.protocol.fast_dataclass import dataclass

_OR_MOVE_ASIDE: Final = (
    "or move the folder's journal files aside: then the daemon ends the "
    "sessions that run, and forgets their leases and all fences and revocations."
)
MOVE_ASIDE: Final = f"Restore it from where it was, {_OR_MOVE_ASIDE}"
_START_NEWER: Final = f"Start that version, {_OR_MOVE_ASIDE}"


class JournalBroken(CannotStart):
    """The journal can't be used. The hint has advice, and says what following it loses."""


def not_whole(path: object, reason: str) -> JournalBroken:
    """Return the error for files whose contents are not those that the daemon wrote."""
    return JournalBroken(f"the journal {path} is damaged: {reason}", MOVE_ASIDE, os.EX_DATAERR)


class _NewerFormat(ValueError):
    """The journal is intact, but this version can't read its format."""

    def __init__(self, version: int) -> None:
        super().__init__(f"was written by a newer gpulease (format {version}; this version supports {VERSION})")


FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600

JOURNAL_NAME: Final = "journal.db"
HEAD_NAME: Final = "journal.head"

HEAD_BYTES: Final = 64
"""The head's constant size. It is less than a sector, so a crash leaves the old head or the new one."""

_MAKE_IT: Final = "Create it, or name another folder: the daemon creates only the last folder of a path."
_MISTAKES: Final = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""Errors that remain until someone corrects the setting or the folder."""

_HEAD: Final = re.compile(rb"commits (\d{1,20}) ([0-9a-f]{16}) *\n")


def prepare(folder: Path) -> int:
    """Create the folder if only its parent exists, and lock it. Returns the lock's descriptor. Raises JournalBroken."""
    try:
        # Step 1: create a folder that only the daemon's user can enter. In another user's folder, that user could
        # replace files.
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=FOLDER_MODE)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise JournalBroken(
                f"the state folder {folder} must be a folder of the daemon's user with mode 0700",
                "Correct that, or let the daemon create one.",
                os.EX_CONFIG,
            )
        # The folder itself is locked, because a lock file in it could be removed. systemd-tmpfiles(8) does not touch a
        # locked folder.
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise _unusable(folder, error) from None
    try:
        # Step 2: lock it. The kernel releases the lock when the process ends.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise JournalBroken(
            f"another daemon uses the state folder {folder}",
            "Stop that daemon, or give this one another folder.",
            os.EX_UNAVAILABLE,
        ) from None
    except OSError as error:
        os.close(fd)
        raise _unusable(folder, error) from None
    return fd


def sync(folder: Path) -> None:
    """Make the names of a folder's files durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class HeadFile:
    """The file with the number of the journal's commits.

    Attributes:
        commits: The number; None if the file does not exist.

    Raises:
        JournalBroken: The file's contents are not those that a daemon wrote.
        OSError: It can't be read.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / HEAD_NAME
        self._fd = -1
        self.commits: int | None = None
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        # Read one byte more than the head has, to detect a longer file.
        data = os.pread(self._fd, HEAD_BYTES + 1, 0)
        match = _HEAD.fullmatch(data)
        if match is None or len(data) != HEAD_BYTES or data != _head_bytes(int(match[1])):
            self.close()
            raise not_whole(self._path, "its content is not what was written")
        self.commits = int(match[1])

    def make(self) -> None:
        """Make the file durable with 0 commits. Raises OSError."""
        # Use a temporary name first, because a crash could leave an empty file, which would count as a broken journal.
        # The order is: write, sync, rename, sync the folder.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        new = self._path.with_name(f"{HEAD_NAME}.new")
        with contextlib.suppress(FileNotFoundError):
            new.unlink()
        self._fd = os.open(new, flags, FILE_MODE)
        os.pwrite(self._fd, _head_bytes(0), 0)
        os.fsync(self._fd)
        new.rename(self._path)
        sync(self._path.parent)
        self.commits = 0

    def write(self, commits: int) -> None:
        """Write the number of commits. Raises OSError."""
        # The head is not synced (see the module's docstring). A write of less than a sector is complete or not done.
        os.pwrite(self._fd, _head_bytes(commits), 0)
        self.commits = commits

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _head_bytes(commits: int) -> bytes:
    digest = blake2b(b"%d" % commits, digest_size=8).hexdigest().encode()
    return (b"commits %d %s" % (commits, digest)).ljust(HEAD_BYTES - 1) + b"\n"


def _unusable(folder: Path, error: OSError) -> JournalBroken:
    if error.errno == errno.ENOENT:
        return JournalBroken(
            f"the folder {folder.parent} of the state folder {folder} does not exist", _MAKE_IT, os.EX_CONFIG
        )
    message = f"the state folder {folder} can't be used: {error.strerror}"
    if error.errno in _MISTAKES:
        return JournalBroken(message, "Name another folder, or give the daemon's user access.", os.EX_CONFIG)
    return JournalBroken(message, "Check the disk, or name another folder.", os.EX_IOERR)


APPLICATION_ID: Final = 0x67704C4A
"""The number by which file(1) recognises the database ("gpLJ")."""

VERSION: Final = 2
"""The version of the format of rows and tables. Rows of version 1 are valid in this version."""

_FIRST_VERSION: Final = 1

BUSY_TIMEOUT_S: Final = 1.0
"""Maximum seconds to wait while an operator reads the database with another tool."""

COPY_PREFIX: Final = "examined-"
"""First part of the name of the folder with the copy of the database that is checked."""

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
"""SQLite's primary error codes that say nothing about the database's contents (sqlite.org/rescode.html)."""

Place = tuple[int, int] | None
"""A file's device and inode; None if the file does not exist."""

TakeRow = Callable[[int, bytes, bytes], None]


@dataclass(slots=True)
class _State:
    boot: str
    commits: int = 0
    total: int = 0

    def digest(self) -> bytes:
        return blake2b(f"{self.boot} {self.commits} {self.total}".encode(), digest_size=16).digest()


class Store:
    """An open journal. Used by one thread at a time.

    Args:
        folder: Its folder, which this process has locked.
        boot: This boot of the host.
        take: Called with the kind, key and value of every row, in order. The sum of digests is checked after the last
            call.

    Attributes:
        last_boot: The boot of the host in which the journal was last written.

    Raises:
        JournalBroken: It can't be used. Its files are unchanged.
    """

    def __init__(self, folder: Path, boot: str, take: TakeRow) -> None:
        self._path = folder / JOURNAL_NAME
        self._wal = folder / f"{JOURNAL_NAME}-wal"
        self._files = (self._path, self._wal, folder / HEAD_NAME)
        self._boot = boot
        self._connection: sqlite3.Connection | None = None
        self._head: HeadFile | None = None
        self._places: tuple[Place, ...] | None = None
        # Digests of rows that this connection has committed, so that they need not be read again.
        self._known = RowDigests()
        try:
            # Read the head first. Its number of commits is needed to check the database.
            self._head = HeadFile(folder)
            if self._is_new(self._head):
                self._make(folder, self._head)
            # Check a copy, because SQLite may change a database when it opens it.
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
        """Make the first commit, and so check that the disk can be written. Raises JournalBroken."""
        try:
            # Set the version, so that a daemon that supports only version 1 does not open the file.
            if self._connection is not None:
                self._connection.execute(f"PRAGMA user_version={VERSION}")
            self.apply(changes)
        except (sqlite3.Error, OSError, ValueError) as error:
            self.close()
            raise _broken(self._path, error) from None

    def apply(self, changes: Iterable[Change]) -> None:
        """Commit changes, all or none. They are durable when this returns.

        Raises sqlite3.Error, OSError or ValueError. After an error, the next call must have the same changes, and may
        have later ones after them.
        """
        if self._head is None:
            raise OSError("the journal is closed")
        # After a failure, connect again, and read whether the failed commit is in the database.
        if self._connection is None:
            self._connection = _connect(self._path)
            self._state = _state_in(self._connection, self._boot, self._head.commits or 0)
        # The next daemon would not find a commit in a file that was moved.
        if self._places not in (None, self._file_places()):
            raise OSError(
                f"{self._path}, its log or its head was moved or deleted; put them back, or restart the daemon"
            )
        connection = self._connection
        state = _State(self._boot, self._state.commits + 1, self._state.total)
        try:
            # One transaction writes the rows and the state that describes them.
            connection.execute("BEGIN IMMEDIATE")
            done = put(connection, changes, self._known)
            state.total = (state.total + done.sum_change) % _MODULUS
            _write_state(connection, state)
            connection.execute("COMMIT")
        except BaseException:
            # A failed commit may or may not be in the database. The next try reads whether it is.
            self._disconnect()
            raise
        self._state = state
        self._known |= done.digests
        for row in done.removed:
            del self._known[row]
        # Write the head after the commit, never before it.
        self._head.write(state.commits)
        # The first commit has created the log (WAL). From now on, check that no file is moved.
        if self._places is None:
            self._places = self._file_places()

    def close(self) -> None:
        """Close the files. SQLite tries to copy its log into the database."""
        self._disconnect()
        if self._head is not None:
            self._head.close()
            self._head = None

    def _file_places(self) -> tuple[Place, ...]:
        """Return the device and inode of the file at each of the journal's paths."""
        return tuple(_place(path) for path in self._files)

    def _is_new(self, head: HeadFile) -> bool:
        # The journal is new if both files are missing. It is also new if there is only a head with 0 commits, which an
        # interrupted start leaves.
        exists = self._path.exists()
        if exists and head.commits is None:
            raise not_whole(self._path, f"its head, {HEAD_NAME}, is missing")
        if not exists and head.commits:
            raise not_whole(self._path, "it is missing")
        if not exists and self._wal.exists():
            # SQLite would create a new database and remove the log of the old one.
            raise not_whole(self._path, f"it is missing, but its log, {self._wal.name}, exists")
        return not exists

    def _make(self, folder: Path, head: HeadFile) -> None:
        # Create the head before the database. After a crash in between, the journal counts as new.
        if head.commits is None:
            head.make()
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
        sync(folder)

    def _disconnect(self) -> None:
        # The next connection creates a new log, so read the places again after its first commit.
        self._places = None
        # It is not known whether the database has the rows from before or after a failed commit.
        self._known.clear()
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


def _place(path: Path) -> Place:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _connect(path: Path, synchronous: str = "FULL") -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        uri=True,
    )
    try:
        for name, value, answer in (*_PRAGMAS, ("synchronous", synchronous, _SYNCHRONOUS[synchronous])):
            # SQLite ignores a pragma that is unknown or can't be applied, so each is read back.
            connection.execute(f"PRAGMA {name}={value}")
            ((got,),) = connection.execute(f"PRAGMA {name}")
            if got != answer:
                raise OSError(f"SQLite sets {name} to {got}, not {value}")
    except BaseException:
        connection.close()
        raise
    return connection


def _examine(path: Path, boot: str, head_commits: int, take: TakeRow) -> None:
    """Read and check a copy of the database, because SQLite may cut or copy its log when it opens and closes a file.

    Raises sqlite3.Error, OSError or ValueError.
    """
    # Remove copies of an earlier start that was killed during its check.
    for copy in path.parent.glob(f"{COPY_PREFIX}*"):
        shutil.rmtree(copy)
    with tempfile.TemporaryDirectory(prefix=COPY_PREFIX, dir=path.parent) as folder:
        # Copy the database together with its log, which has the commits that are not yet in the database.
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
    """Read the state that the last commit wrote. Create the tables if the database is empty and has no commit."""
    ((application,),) = connection.execute("PRAGMA application_id")
    ((version,),) = connection.execute("PRAGMA user_version")
    tables = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema")]
    # The database is empty and has no commit: the first start was interrupted before it made the tables.
    if not (application or version or tables or head_commits):
        return _make_tables(connection, boot)
    # Check the application's number, the format, the tables, the state, and the number of commits, in this order.
    if application != APPLICATION_ID:
        raise ValueError("it is not a journal of gpulease, or parts of it are missing")
    if version > VERSION:
        raise _NewerFormat(version)
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
        raise ValueError(f"it ends with commit {commits}, but {head_commits} were written")
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
    # SQLite checks the pages. The sum of all rows' digests then reveals rows that another program changed.
    ((verdict,),) = connection.execute("PRAGMA quick_check(1)")
    if verdict != "ok":
        raise ValueError(f"SQLite finds it damaged: {verdict}")
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
    if isinstance(error, _NewerFormat):
        return JournalBroken(f"the journal {path} {error}", _START_NEWER, os.EX_DATAERR)
    # An extended code has its primary code in the low byte (sqlite.org/rescode.html).
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if not isinstance(error, OSError) and code not in _OF_THE_DISK:
        return not_whole(path, str(error))
    reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return JournalBroken(
        f"the journal {path} can't be opened: {reason}",
        "Check the disk, its free space and the file's owner, then start again; nothing was changed.",
        os.EX_IOERR,
    )
