"""The idempotency store in one SQLite file, for gateways of one host.

A caller commits its own change together with all changes that wait at that moment, so that many callers share one sync
of the disk ("group commit"), and a single caller does not wait for another thread. With the write-ahead log and
`synchronous=FULL` (sqlite.org/pragma.html), committed changes survive a crash of the host. Other processes may use the
same file: `BEGIN IMMEDIATE` makes each transaction the only writer before it reads. The file must not be on a network
file system, where SQLite's locks do not work.

A transaction that contains only reservations is committed with `synchronous=NORMAL`: it survives a crash of its
process, but a crash of the host may undo it. This is safe: such a crash also ends every attempt and expires every
claim. It can only come before the effect, because `start` syncs the log, which contains the reservation.

Claims expire by CLOCK_BOOTTIME (clock_gettime(2)). All processes of a host share that clock, it can't be set, and it
continues while the host sleeps. A claim from before the host's last boot has expired.
"""

import os
import secrets
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from gpulease.client.serve.gateway import ledger
from gpulease.client.serve.gateway.gateway_errors import GatewayError, StoreUnavailable
from gpulease.client.serve.gateway.ledger import (
    Entry,
    Moment,
    OperationPhase,
    Reservation,
    ReserveResult,
    checked_outcome,
)

T = TypeVar("T")

GROUP_MAX: Final = 64
"""Maximum number of changes in one transaction. It limits how long the first caller waits for changes of other
callers."""

BUSY_S: Final = 5.0
"""Seconds for which another process may lock the file before StoreUnavailable is raised."""

FORMAT: Final = 1
"""The format of the tables, stored as the file's `user_version`."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")

_TABLES: Final = """
CREATE TABLE IF NOT EXISTS operation (
    key TEXT PRIMARY KEY,
    request_hash BLOB NOT NULL,
    epoch INTEGER NOT NULL,
    claim_id BLOB NOT NULL,
    phase INTEGER NOT NULL,
    clock_id TEXT NOT NULL,
    claim_until_s REAL NOT NULL,
    outcome BLOB NOT NULL,
    changed_unix_s REAL NOT NULL
) WITHOUT ROWID, STRICT
"""
_INDEX: Final = "CREATE INDEX IF NOT EXISTS operation_changed ON operation (changed_unix_s)"
_OTHER_FILE: Final = "Name a new file, or the store of an earlier run"
_SELECT: Final = """
SELECT request_hash, epoch, claim_id, phase, clock_id, claim_until_s, outcome FROM operation WHERE key = ?
"""
_UPSERT: Final = "INSERT OR REPLACE INTO operation VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_FORGET: Final = "DELETE FROM operation WHERE changed_unix_s < ?"


def host_clock() -> Moment:
    """Return the time of the clock that all processes of this host share until its next boot."""
    return Moment(_boot_id(), time.clock_gettime(time.CLOCK_BOOTTIME))


@cache
def _boot_id() -> str:
    # Read it once, because it changes only when the host boots.
    return _BOOT_ID.read_text().strip()


class _Change:
    """A change that waits for its commit.

    Attributes:
        job: Makes the change in a transaction, and returns the caller's answer or raises GatewayError.
        is_synced: Whether its transaction must survive a crash of the host.
        answer: The caller's answer, or the error to raise. Set when the transaction ends.
        is_done: Whether the transaction has ended.
    """

    __slots__ = ("answer", "is_done", "is_synced", "job")

    def __init__(self, job: Callable[[sqlite3.Connection], Any], *, is_synced: bool) -> None:
        self.job = job
        self.is_synced = is_synced
        self.answer: Any = None
        self.is_done = False

    def set_answer(self, answer: Any) -> None:
        # The order matters: another thread may read the answer as soon as `is_done` is true.
        self.answer = answer
        self.is_done = True


class SqliteStore:
    """A ReplicatedIdempotencyStore in a file. Only its owner can read a new file."""

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Callable[[], Moment] = host_clock,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """Open or create the file. Raises StoreUnavailable if it can't be opened or has another format.

        Args:
            path: The file.
            clock: The clock by which claims expire.
            unix_s: The clock by which old operations are deleted, in seconds since 1970.
        """
        self._path, self._clock, self._unix_s = Path(path), clock, unix_s
        # `_changing` guards the queue and `_is_closed`. `_committing` guards the connection, and is held during a
        # commit.
        self._changing, self._committing = threading.Lock(), threading.Lock()
        self._waiting: deque[_Change] = deque()
        self._is_closed = False
        # Whether the connection is set to sync its next transaction. None while the setting is being changed.
        self._is_synced: bool | None = True
        try:
            self._connection = _open(self._path)
        except (OSError, sqlite3.Error) as error:
            raise StoreUnavailable(f"the store {self._path}: {error}", _OTHER_FILE) from None

    def reserve(self, key: str, request_hash: bytes, claim_ttl_s: float) -> ReserveResult:
        """Implement `ReplicatedIdempotencyStore.reserve`."""
        claim_id = secrets.token_bytes(16)

        def job(connection: sqlite3.Connection) -> ReserveResult:
            before = _load(connection, key)
            # The rule runs inside the transaction, between its read and its write.
            after, answer = ledger.reserve(before, key, request_hash, claim_id, self._clock(), claim_ttl_s)
            self._save(connection, key, before, after)
            return answer

        return self._do(job, is_synced=False)

    def start(self, reservation: Reservation) -> None:
        self._move(reservation, lambda entry: ledger.start(entry, reservation))

    def complete(self, reservation: Reservation, outcome: bytes) -> None:
        checked = checked_outcome(outcome)
        self._move(reservation, lambda entry: ledger.complete(entry, reservation, checked))

    def release(self, reservation: Reservation) -> None:
        self._move(reservation, lambda entry: ledger.release(entry, reservation))

    def forget(self, older_than_s: float) -> int:
        """Implement `ReplicatedIdempotencyStore.forget`."""
        # Use the wall clock, because ages of hours must survive reboots, which reset the clock of claims.
        before_unix_s = self._unix_s() - older_than_s
        return self._do(lambda connection: connection.execute(_FORGET, (before_unix_s,)).rowcount)

    def close(self) -> None:
        """Commit waiting changes, then close the file. A second call does nothing."""
        with self._changing:
            self._is_closed = True
        with self._committing:
            # The callers of these changes wait for the lock, and then find their changes committed.
            while group := self._next_group():
                self._commit(group)
            self._connection.close()

    def _move(self, reservation: Reservation, rule: Callable[[Entry | None], Entry]) -> None:
        def job(connection: sqlite3.Connection) -> None:
            before = _load(connection, reservation.key)
            self._save(connection, reservation.key, before, rule(before))

        self._do(job)

    def _do(self, job: Callable[[sqlite3.Connection], T], *, is_synced: bool = True) -> T:
        change = _Change(job, is_synced=is_synced)
        with self._changing:
            if self._is_closed:
                raise StoreUnavailable(f"the store {self._path} is closed")
            # Append under the lock, so that no change is queued after `close` has committed the last ones.
            self._waiting.append(change)
        with self._committing:
            # While this caller waited for the lock, another caller may have committed this change with its own.
            while not change.is_done:
                if not (group := self._next_group()):
                    raise StoreUnavailable(f"the store {self._path}: a caller was interrupted in the transaction")
                self._commit(group)
        if isinstance(change.answer, BaseException):
            raise change.answer
        answer: T = change.answer
        return answer

    # --- under the commit's lock ---

    def _save(self, connection: sqlite3.Connection, key: str, before: Entry | None, after: Entry | None) -> None:
        if after is not None and after != before:
            row = (after.request_hash, after.epoch, after.claim_id, int(after.phase), after.clock_id)
            connection.execute(_UPSERT, (key, *row, after.claim_until_s, after.outcome, self._unix_s()))

    def _next_group(self) -> list[_Change]:
        """Remove and return the changes that wait, at most GROUP_MAX."""
        with self._changing:
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), GROUP_MAX))]

    def _commit(self, group: list[_Change]) -> None:
        """Commit the changes in one transaction, and answer their callers only after the commit."""
        connection, answers = self._connection, list[Any]()
        is_synced = any(change.is_synced for change in group)
        try:
            if is_synced is not self._is_synced:
                # If this is interrupted, the setting is unknown: None makes the next transaction set it again.
                self._is_synced = None
                connection.execute(f"PRAGMA synchronous = {'FULL' if is_synced else 'NORMAL'}")
                self._is_synced = is_synced
            connection.execute("BEGIN IMMEDIATE")
            for change in group:
                try:
                    answers.append(change.job(connection))
                except GatewayError as refused:  # the rule refused the change
                    answers.append(refused)
            connection.execute("COMMIT")
        except BaseException as error:
            # The rollback fails if the transaction never began.
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            # The whole transaction failed, including the changes of other callers that had succeeded.
            for change in group:
                change.set_answer(_unavailable(self._path, error))
            # Raise an interrupt of this caller, or a bug, here as well.
            if not isinstance(error, OSError | sqlite3.Error):
                raise
            return
        # Answer only after the commit: a caller must not act on a reservation that is not committed.
        for change, answer in zip(group, answers, strict=True):
            change.set_answer(answer)


def _open(path: Path) -> sqlite3.Connection:
    # Only the owner may read the file, because it contains outputs of requests. SQLite's other files get this mode.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        _check_is_store(path, connection)
        # With WAL a commit syncs one file, and readers do not block the writer.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(_TABLES)
        connection.execute(_INDEX)
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _check_is_store(path: Path, connection: sqlite3.Connection) -> None:
    """Raise StoreUnavailable, before anything is changed, unless the file is empty or a store of this format."""
    connection.execute("BEGIN")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.execute("COMMIT")
    # A user_version proves nothing by itself, because other programs number their formats in it, too.
    if tables and "operation_changed" not in tables:
        raise StoreUnavailable(f"{path} is another program's database", _OTHER_FILE)
    # 0 means a new file. Refuse any other format, because a newer version may have written it.
    if version not in (0, FORMAT):
        raise StoreUnavailable(f"{path} is a store of format {version}; this program supports {FORMAT}", _OTHER_FILE)


def _load(connection: sqlite3.Connection, key: str) -> Entry | None:
    row = connection.execute(_SELECT, (key,)).fetchone()
    return None if row is None else Entry(row[0], row[1], row[2], OperationPhase(row[3]), row[4], row[5], row[6])


def _unavailable(path: Path, error: BaseException) -> StoreUnavailable:
    return StoreUnavailable(f"the store {path}: {error}")
