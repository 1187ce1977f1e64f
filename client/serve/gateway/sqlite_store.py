"""The idempotency store in one SQLite file, for gateways of one host.

One thread owns the connection. It puts all waiting changes into one transaction, so that many callers share one sync of
the disk ("group commit"). With the write-ahead log and `synchronous=FULL` (sqlite.org/pragma.html), committed changes
survive a crash of the host. Other processes may use the same file: `BEGIN IMMEDIATE` makes each transaction the only
writer before it reads. The file must not be on a network file system, where SQLite's locks do not work.

Claims expire by CLOCK_BOOTTIME (clock_gettime(2)). All processes of a host share that clock, it can't be set, and it
continues while the host sleeps. A claim from before the host's last boot has expired.
"""

import os
import queue
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
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
_Job = tuple[Callable[[sqlite3.Connection], Any], "Future[Any]"]

GROUP_MAX: Final = 64
"""Most changes in one transaction. Limits the wait of the first caller for the others."""

BUSY_S: Final = 5.0
"""Seconds that another process may lock the file before StoreUnavailable is raised."""

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
    # Read once, because no process outlives the boot of its host.
    return _BOOT_ID.read_text().strip()


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
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._is_closed = False
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="gpulease-store", daemon=True)
        # The connection must be used by the thread that opens it, so opening is that thread's first job.
        self._thread.start()
        # Wait until the file is open, so that the constructor raises what went wrong.
        opened.result()

    def reserve(self, key: str, request_hash: bytes, claim_ttl_s: float) -> ReserveResult:
        """Implement `ReplicatedIdempotencyStore.reserve`."""
        claim_id = secrets.token_bytes(16)

        def job(connection: sqlite3.Connection) -> ReserveResult:
            before = _load(connection, key)
            # The rule runs inside the transaction, between its read and its write.
            after, answer = ledger.reserve(before, key, request_hash, claim_id, self._clock(), claim_ttl_s)
            self._save(connection, key, before, after)
            return answer

        return self._do(job)

    def start(self, held: Reservation) -> None:
        self._move(held, lambda entry: ledger.start(entry, held))

    def complete(self, held: Reservation, outcome: bytes) -> None:
        kept = checked_outcome(outcome)
        self._move(held, lambda entry: ledger.complete(entry, held, kept))

    def release(self, held: Reservation) -> None:
        self._move(held, lambda entry: ledger.release(entry, held))

    def forget(self, older_than_s: float) -> int:
        """Implement `ReplicatedIdempotencyStore.forget`."""
        # By the wall clock: an age of hours must survive reboots, which reset the clock of claims.
        before_unix_s = self._unix_s() - older_than_s
        return self._do(lambda connection: connection.execute(_FORGET, (before_unix_s,)).rowcount)

    def close(self) -> None:
        """Commit waiting changes, then close the file. A second call does nothing."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
        self._thread.join()

    # --- in the callers' threads ---

    def _move(self, held: Reservation, rule: Callable[[Entry | None], Entry]) -> None:
        def job(connection: sqlite3.Connection) -> None:
            before = _load(connection, held.key)
            self._save(connection, held.key, before, rule(before))

        self._do(job)

    def _do(self, job: Callable[[sqlite3.Connection], T]) -> T:
        done: Future[T] = Future()
        with self._closing:
            if self._is_closed:
                raise StoreUnavailable(f"the store {self._path} is closed")
            # Under the lock, so that no job comes after the end marker that `close` puts.
            self._jobs.put((job, done))
        return done.result()

    # --- in the thread that has the connection ---

    def _save(self, connection: sqlite3.Connection, key: str, before: Entry | None, after: Entry | None) -> None:
        if after is not None and after != before:
            row = (after.request_hash, after.epoch, after.claim_id, int(after.phase), after.clock_id)
            connection.execute(_UPSERT, (key, *row, after.claim_until_s, after.outcome, self._unix_s()))

    def _run(self, opened: "Future[None]") -> None:
        try:
            connection = _open(self._path)
        except (OSError, sqlite3.Error) as error:
            self._is_closed = True
            opened.set_exception(_unavailable(self._path, error))
            return
        except StoreUnavailable as error:
            self._is_closed = True
            opened.set_exception(error)
            return
        opened.set_result(None)
        try:
            while (group := self._next_group()) is not None:
                self._commit(connection, group)
        finally:
            connection.close()

    def _next_group(self) -> list[_Job] | None:
        """Wait for changes, and return all that wait. Returns None when the store is closed and none waits."""
        first = self._jobs.get()
        if first is None:
            return None
        group = [first]
        with suppress(queue.Empty):
            # Take what waits already, without waiting for more: under load, groups grow by themselves.
            while len(group) < GROUP_MAX:
                job = self._jobs.get_nowait()
                if job is None:
                    self._jobs.put(None)
                    break
                group.append(job)
        return group

    def _commit(self, connection: sqlite3.Connection, group: list[_Job]) -> None:
        """Commit the changes in one transaction, and wake each caller only when it is on the disk."""
        answers: list[tuple[Future[Any], Any]] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            for job, done in group:
                try:
                    answers.append((done, job(connection)))
                except GatewayError as refused:  # the rule refused it, without any change
                    answers.append((done, refused))
            connection.execute("COMMIT")
        except (OSError, sqlite3.Error) as error:
            # The rollback fails if the transaction never began.
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            # The whole transaction failed, also for callers with a rule that had succeeded.
            answers = [(done, _unavailable(self._path, error)) for _, done in group]
        # Only after the commit: a caller must not act on a reservation that a crash could lose.
        for done, answer in answers:
            if isinstance(answer, BaseException):
                # A rule's refusal, or the failure of the whole transaction.
                done.set_exception(answer)
            else:
                done.set_result(answer)


def _open(path: Path) -> sqlite3.Connection:
    # Create it with this mode, because it holds outputs of requests. SQLite gives its other files the same mode.
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    try:
        # WAL, so that a commit syncs one file, and readers do not block the writer.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        # 0 is a new file. Any other format may have been written by a newer version, so it is left alone.
        if found not in (0, FORMAT):
            raise StoreUnavailable(f"{path} is a store of format {found}; this program knows {FORMAT}")
        connection.execute(_TABLES)
        connection.execute(_INDEX)
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _load(connection: sqlite3.Connection, key: str) -> Entry | None:
    row = connection.execute(_SELECT, (key,)).fetchone()
    return None if row is None else Entry(row[0], row[1], row[2], OperationPhase(row[3]), row[4], row[5], row[6])


def _unavailable(path: Path, error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"the store {path}: {error}")
