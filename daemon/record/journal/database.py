"""The journal's files: an SQLite database, its head, and the folder that one daemon locks.

The database has one connection. The daemon reads and checks all of it once, at its start, and then only writes.

1. SQLite writes its log ahead (WAL) and syncs it at each commit (`synchronous=FULL`): a commit that returned is on the
   disk (sqlite.org/pragma.html). The code reads every pragma back, because SQLite ignores pragmas that it does not
   know.
2. No other process may open the database (`locking_mode=EXCLUSIVE`), so the log's index is never a file.
3. Commits must be where the next daemon reads: if a file was moved or removed, a commit fails.
4. Each commit writes its number and the sum of all rows' digests. If either does not match, nothing is read from the
   database.

The head is a small file next to the database that holds the number of commits. SQLite reads its log up to the first
frame with a wrong checksum, as if there had never been more: the head reveals that loss. The daemon writes the head
after each commit and never syncs it. After the daemon was killed, the head is exact; after a crash of the host, it may
be older. It is never ahead of the rows.
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
    """The journal can't be used. The hint contains advice, and states what is lost by following it."""


def not_whole(path: object, reason: str) -> JournalBroken:
    """Return the error for files that lack something that was written, or that contain anything else."""
    return JournalBroken(f"the journal {path} is damaged: {reason}", MOVE_ASIDE, os.EX_DATAERR)


class _NewerFormat(ValueError):
    """The journal is intact, but this version can't read its format."""

    def __init__(self, version: int) -> None:
        super().__init__(f"was written by a newer gpulease (format {version}; this version knows {VERSION})")


FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600

JOURNAL_NAME: Final = "journal.db"
HEAD_NAME: Final = "journal.head"

HEAD_BYTES: Final = 64
"""The head's constant size, less than a sector: a crash leaves the old head or the new one."""

_MAKE_IT: Final = "Create it, or name another folder: the daemon creates only the last folder of a path."
_MISTAKES: Final = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""Errors that remain until someone corrects the setting or the folder."""

_HEAD: Final = re.compile(rb"commits (\d{1,20}) ([0-9a-f]{16}) *\n")


def prepare(folder: Path) -> int:
    """Make the folder if its parent exists, lock it, and return the lock's descriptor. Raises JournalBroken."""
    try:
        # Step 1: a folder that only the daemon's user can enter. Someone else's folder could replace files under the
        # daemon.
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=FOLDER_MODE)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise JournalBroken(
                f"the state folder {folder} must be a folder of the daemon's user with mode 0700",
                "Correct that, or let the daemon create one.",
                os.EX_CONFIG,
            )
        # Lock the folder itself: a file in it could be removed while the folder is in use. systemd-tmpfiles(8) leaves a
        # locked folder alone.
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise _unusable(folder, error) from None
    try:
        # Step 2: lock it. The kernel releases the lock with the process, so a killed daemon never blocks the next one.
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
    """Make the names in a folder durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class HeadFile:
    """The file with the number of the journal's commits, as far as the last daemon knew.

    Attributes:
        commits: The number; None if the file does not exist.

    Raises:
        JournalBroken: The file is not as it was written.
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
        # Read one byte more than the head has, to notice a longer file.
        data = os.pread(self._fd, HEAD_BYTES + 1, 0)
        match = _HEAD.fullmatch(data)
        if match is None or len(data) != HEAD_BYTES or data != _head_bytes(int(match[1])):
            self.close()
            raise not_whole(self._path, "its content is not what was written")
        self.commits = int(match[1])

    def make(self) -> None:
        """Make the file durable with 0 commits. Raises OSError."""
        # First use a temporary name: a crash must not leave an empty head, which would count as a broken journal. The
        # order is content, sync, rename, sync of the folder.
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
        # Never synced: see the module's docstring. One write of less than a sector is not torn.
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
"""The format of rows and tables. Rows of the first version are also rows of this version."""

_FIRST_VERSION: Final = 1

BUSY_TIMEOUT_S: Final = 1.0
"""Time to wait for an operator who reads the database with another tool."""

COPY_PREFIX: Final = "examined-"
"""Beginning of the name of a folder with a copy of the database, which is checked before the database is opened."""

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
"""Errors that prove nothing about the contents (sqlite.org/rescode.html). A primary code is an error's low byte."""

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
        take: Called with the kind, key and value of every row, in order, before the rows as a whole are checked.

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
        # Digests of rows that this connection has committed.
        self._known = RowDigests()
        try:
            # Read the head first, because without the number of commits the database can't be checked.
            self._head = HeadFile(folder)
            if self._is_new(self._head):
                self._make(folder, self._head)
            # Check a copy, because even opening the original can change it.
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
        """Make the first commit, which also shows that the disk can be written. Raises JournalBroken."""
        try:
            # Rows of the first format are also rows of this format. From now on, an older daemon must not open the
            # file.
            if self._connection is not None:
                self._connection.execute(f"PRAGMA user_version={VERSION}")
            self.apply(changes)
        except (sqlite3.Error, OSError, ValueError) as error:
            self.close()
            raise _broken(self._path, error) from None

    def apply(self, changes: Iterable[Change]) -> None:
        """Commit changes, all or none. They are durable when this returns.

        Raises sqlite3.Error, OSError or ValueError. Then call again with the same changes, followed by later ones.
        """
        if self._head is None:
            raise OSError("the journal is closed")
        # After a failure: connect again, and read whether the last commit is in the database.
        if self._connection is None:
            self._connection = _connect(self._path)
            self._state = _state_in(self._connection, self._boot, self._head.commits or 0)
        # A commit into a file that was moved away would be lost for the next daemon.
        if self._places not in (None, self._file_places()):
            raise OSError(
                f"{self._path}, its log or its head was moved or deleted; put them back, or restart the daemon"
            )
        connection = self._connection
        state = _State(self._boot, self._state.commits + 1, self._state.total)
        try:
            # The rows and the state that describes them are in one transaction: both are durable, or neither.
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
        # The first commit has created the log (WAL). From now on no file may change its place.
        if self._places is None:
            self._places = self._file_places()

    def close(self) -> None:
        """Close the files. SQLite then copies its log into the database, if it can."""
        self._disconnect()
        if self._head is not None:
            self._head.close()
            self._head = None

    def _file_places(self) -> tuple[Place, ...]:
        """Return which files are at the journal's paths."""
        return tuple(_place(path) for path in self._files)

    def _is_new(self, head: HeadFile) -> bool:
        # A head and a database belong together. The journal is new only if both are missing; a head with 0 commits
        # alone is left by a start that was interrupted.
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
        # Make the head before the database: a crash between the two leaves a head with 0 commits and no database, which
        # counts as new.
        if head.commits is None:
            head.make()
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
        sync(folder)

    def _disconnect(self) -> None:
        # The next connection makes a new log, so the places are noted again after its first commit.
        self._places = None
        # The rows may be those before or after a commit that failed.
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
            # SQLite ignores a pragma that it does not know or can't obey, so each is read back.
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
    """Read the state that the last commit wrote. Make the tables if there have never been any."""
    ((application,),) = connection.execute("PRAGMA application_id")
    ((version,),) = connection.execute("PRAGMA user_version")
    tables = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema")]
    # The database is empty and has no commit: the first start was interrupted before it made the tables.
    if not (application or version or tables or head_commits):
        return _make_tables(connection, boot)
    # Check from the outside in: is it a journal, of a known format, with the right tables, an intact state and all
    # commits?
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
    # There are two checks: SQLite's own, of the pages, and the sum of all rows' digests, which shows rows that were
    # changed by hand.
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
