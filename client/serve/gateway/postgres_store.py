"""The idempotency store in PostgreSQL, for gateways on several hosts. Needs `pip install '.[postgres]'`.

Every method is one transaction, at READ COMMITTED. It inserts its key's row if the row does not exist, and locks it
before reading it: `INSERT ... ON CONFLICT DO NOTHING`, then `SELECT ... FOR UPDATE` (PostgreSQL documentation, 13.2.1
and 13.3.2). So if two gateways reserve the same operation, the second gateway reads the first one's reservation.

If the server disconnects during a transaction, it is unknown whether the transaction was committed. The store then
repeats it from the start, on a new connection, for up to `patience_s`. The claim id is drawn once for each call, so the
rules recognise a row that an earlier try of the same call has written. The store never writes to a standby:
`target_session_attrs` finds the primary among the hosts of the connection string (libpq, 34.1.2), and TCP notices
within seconds that a host is unreachable.

A commit must be on the disk before it is reported, so `synchronous_commit` is turned on if the server's setting is
lower. Operations survive the loss of the primary only if `synchronous_standby_names` is set there. Each commit then
waits until a standby has written it to disk, so a promoted standby has every claim that was returned to a caller. If
the server stops waiting for the standby, it commits anyway, and only sends a warning (documentation, 27.2.8.2;
syncrep.c); if the primary is then lost, so is the commit. So the store repeats a transaction that has a warning. It
gives up after `commit_s`: while no standby is available, no attempt begins. A former primary that still runs after
another server was promoted can't complete any commit, because no standby follows it.

Claims expire by the primary's clock, which all gateways share. If the clock is set, attempts are presumed dead too
early or too late, but an effect never happens twice.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Generic, TypeVar

import psycopg
from psycopg import errors as sql_errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from gpulease.client.serve.gateway import ledger
from gpulease.client.serve.gateway.gateway_errors import StoreUnavailable
from gpulease.client.serve.gateway.ledger import (
    Entry,
    Moment,
    OperationPhase,
    Reservation,
    ReserveResult,
    checked_outcome,
)
from gpulease.protocol.back_off import back_off_s

WatchedConnection = TypeVar("WatchedConnection", bound=Hashable)


class CommitWatch(Generic[WatchedConnection]):
    """Cancels commits that take too long, because a server waits for a standby without a limit.

    One thread watches all commits of a store. While there are none, it sleeps, and the next commit wakes it. Otherwise
    it sleeps until the limit of the oldest commit, because newer commits have later limits.
    """

    def __init__(self, limit_s: float, abandon: Callable[[WatchedConnection], object]) -> None:
        """Watch commits.

        Args:
            limit_s: Longest time for a commit, in seconds.
            abandon: Cancels a commit at the server. Must not raise.
        """
        self._limit_s, self._abandon = limit_s, abandon
        self._deadlines: dict[WatchedConnection, float] = {}
        self._abandoned: WatchedConnection | None = None
        self._changed = threading.Condition()
        self._sleeps = self._is_closed = False
        self._thread: threading.Thread | None = None

    def begins(self, connection: WatchedConnection) -> None:
        """Begin to watch the commit on a connection. `ended` must follow."""
        with self._changed:
            self._deadlines[connection] = time.monotonic() + self._limit_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gpulease-commits", daemon=True)
                self._thread.start()
            elif self._sleeps:
                self._changed.notify_all()

    def ended(self, connection: WatchedConnection) -> None:
        """Stop watching a commit that has ended or never began.

        Waits for a cancellation in progress, which could otherwise cancel the connection's next statement.
        """
        with self._changed:
            self._deadlines.pop(connection, None)
            self._changed.wait_for(lambda: self._abandoned is not connection)

    def close(self) -> None:
        """End the thread when no commit is in progress. A second call does nothing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (connection := self._next()) is not None:
            # Do this without the lock, because it waits for the server. Meanwhile `_abandoned` makes `ended` wait.
            self._abandon(connection)
            with self._changed:
                self._abandoned = None
                self._changed.notify_all()

    def _next(self) -> WatchedConnection | None:
        """Wait for a commit that takes too long. Returns None when the watch is closed and no commit is in progress."""
        with self._changed:
            while self._deadlines or not self._is_closed:
                # A dict keeps the order of insertion. All commits have the same limit, so the oldest reaches it first.
                first = next(iter(self._deadlines), None)
                left_s = None if first is None else self._deadlines[first] - time.monotonic()
                if first is not None and left_s is not None and left_s <= 0:
                    del self._deadlines[first]
                    self._abandoned = first
                    return first
                self._sleeps = first is None
                self._changed.wait(left_s)
        return None


_log: Final = logging.getLogger("gpulease.gateway")

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

MAX_CONNECTIONS: Final = 8
"""Maximum number of connections of one store, so that a gateway does not take all of the server's connections."""

CONNECT_S: Final = 5
"""Longest time, in seconds, for one attempt to connect, a whole number as libpq requires."""

STATEMENT_MS: Final = 10_000
"""Longest time for one statement, in milliseconds, including the wait for the row's lock, so that a gateway that hangs
does not block the others."""

COMMIT_S: Final = 4.0
"""Longest time for one commit, in seconds, including the wait for a standby's disk, which the server itself does not
limit. Without a limit, requests would wait forever for a standby that is down."""

CANCEL_S: Final = 2.0
"""Longest time, in seconds, for the request that cancels a commit at the server."""

PATIENCE_S: Final = 10.0
"""Seconds for which a transaction is repeated while the server is down. A primary's restart takes seconds."""

_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 0.5

_NAME: Final = "gpulease-gateway"
_KEEPALIVE: Final = {"keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": 3, "tcp_user_timeout": 5000}
"""Limits after which a silent host is considered lost (libpq, 34.1.2): times in seconds, but `tcp_user_timeout` in
milliseconds. Without them, a request to a host without power would wait for hours."""
_OPTIONS: Final = f"-c statement_timeout={STATEMENT_MS} -c default_transaction_isolation=read\\ committed"

_TABLES: Final = (
    """
    CREATE TABLE IF NOT EXISTS gpulease_operation (
        key text PRIMARY KEY,
        request_hash bytea NOT NULL,
        epoch bigint NOT NULL,
        claim_id bytea NOT NULL,
        phase smallint NOT NULL,
        claim_until_s double precision NOT NULL,
        outcome bytea NOT NULL,
        changed_s double precision NOT NULL
    )
    """,
    "CREATE INDEX IF NOT EXISTS gpulease_operation_changed ON gpulease_operation (changed_s)",
)
_TABLE_LOCK: Final = 0x6770756C65617365
"""Key of the pg_advisory_xact_lock that is held while the table is created: if two stores created it at the same time,
both would fail despite IF NOT EXISTS."""

_DURABILITY: Final = """
SELECT current_setting('synchronous_commit'), current_setting('synchronous_standby_names'),
    coalesce(host(inet_server_addr()), 'the primary')
"""
_NOW: Final = "SELECT extract(epoch FROM clock_timestamp())::float8"
_INSERT: Final = """
INSERT INTO gpulease_operation VALUES (%s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (key) DO NOTHING
"""
_SELECT: Final = """
SELECT request_hash, epoch, claim_id, phase, claim_until_s, outcome FROM gpulease_operation WHERE key = %s FOR UPDATE
"""
_UPDATE: Final = """
UPDATE gpulease_operation
SET request_hash = %s, epoch = %s, claim_id = %s, phase = %s, claim_until_s = %s, outcome = %s, changed_s = %s
WHERE key = %s
"""
_FORGET: Final = "DELETE FROM gpulease_operation WHERE changed_s < %s"


class _NotTrusted(Exception):
    """The server committed with a warning, so a standby may not have the commit."""


_RETRIED: Final = (
    psycopg.OperationalError,  # the connection ended, the server starts or stops, a deadlock, a serialisation failure
    psycopg.InterfaceError,  # the connection was closed earlier
    sql_errors.ReadOnlySqlTransaction,  # the primary has become a standby
    _NotTrusted,
)


class PostgresStore:
    """A ReplicatedIdempotencyStore in the table `gpulease_operation`, which is created if it does not exist."""

    def __init__(
        self,
        conninfo: str,
        *,
        patience_s: float = PATIENCE_S,
        commit_s: float = COMMIT_S,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        """Connect, and create the table if necessary. Raises StoreUnavailable if either fails.

        Args:
            conninfo: A libpq connection string of the primary, or of several hosts one of which is the primary.
            patience_s: Seconds for which a transaction is repeated.
            commit_s: Longest time for a commit, in seconds.
            now_s: Replaces the primary's clock.
        """
        self._conninfo, self._patience_s, self._now_s = conninfo, patience_s, now_s
        self._watch = CommitWatch(commit_s, _cancel)
        # Callers beyond the limit wait for a connection instead of opening another.
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            # This also checks at the start that the server can be reached and written to.
            self._transact(_create_tables)
        except BaseException:
            self._watch.close()
            raise

    def reserve(self, key: str, request_hash: bytes, claim_ttl_s: float) -> ReserveResult:
        """Implement `ReplicatedIdempotencyStore.reserve`."""
        claim_id = secrets.token_bytes(16)

        def job(connection: Connection) -> ReserveResult:
            # Use the primary's clock, which all gateways share.
            now_s = self._now(connection)
            # Make the entry of a new operation: the INSERT then shows whether the operation is new.
            fresh, answer = ledger.reserve(None, key, request_hash, claim_id, Moment("", now_s), claim_ttl_s)
            assert fresh is not None
            # Usually the operation is new, and one INSERT is enough. A conflict means that the row exists.
            while connection.execute(_INSERT, (key, *_columns(fresh), now_s)).rowcount == 0:
                before = _load(connection, key)
                if before is None:
                    continue  # the row was deleted in between, so insert again
                # Read the clock again after waiting for the row's lock: the earlier claim may have expired during the
                # wait.
                at = Moment("", self._now(connection))
                after, answer = ledger.reserve(before, key, request_hash, claim_id, at, claim_ttl_s)
                _save(connection, key, before, after, at.now_s)
                break
            return answer

        return self._transact(job)

    def start(self, reservation: Reservation) -> None:
        self._move(reservation, lambda entry: ledger.start(entry, reservation))

    def complete(self, reservation: Reservation, outcome: bytes) -> None:
        checked = checked_outcome(outcome)
        self._move(reservation, lambda entry: ledger.complete(entry, reservation, checked))

    def release(self, reservation: Reservation) -> None:
        self._move(reservation, lambda entry: ledger.release(entry, reservation))

    def forget(self, older_than_s: float) -> int:
        """Implement `ReplicatedIdempotencyStore.forget`."""
        return self._transact(
            lambda connection: connection.execute(_FORGET, (self._now(connection) - older_than_s,)).rowcount
        )

    def close(self) -> None:
        """Close idle connections now, and the others when their transactions end. A second call does nothing."""
        with self._lock:
            self._is_closed = True
        self._drop_idle()
        self._watch.close()

    # --- transactions ---

    def _move(self, reservation: Reservation, rule: Callable[[Entry | None], Entry]) -> None:
        def job(connection: Connection) -> None:
            # `_load` locks the row until the commit, so no other gateway can change it in between.
            before = _load(connection, reservation.key)
            _save(connection, reservation.key, before, rule(before), self._now(connection))

        self._transact(job)

    def _now(self, connection: Connection) -> float:
        if self._now_s is not None:
            return self._now_s()
        row = connection.execute(_NOW).fetchone()
        assert row is not None
        return float(row[0])

    def _transact(self, job: Callable[[Connection], T]) -> T:
        """Run one transaction. Repeat it, for up to `patience_s`, while it is unknown whether it was committed."""
        deadline_s = time.monotonic() + self._patience_s
        failures = 0
        while True:
            pause_s = back_off_s(failures, _PAUSE_S, _LONGEST_PAUSE_S)
            try:
                with self._places:
                    return self._try(job)
            except _RETRIED as error:
                self._drop_idle()
                if time.monotonic() + pause_s > deadline_s:
                    raise StoreUnavailable(f"PostgreSQL: {_sentence(error)}") from None
            except psycopg.Error as error:
                raise StoreUnavailable(f"PostgreSQL: {_sentence(error)}") from None
            time.sleep(pause_s)
            failures += 1

    def _try(self, job: Callable[[Connection], T]) -> T:
        with self._lock:
            if self._is_closed:
                raise StoreUnavailable("the store is closed")
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            # Connect without the lock, because it may take seconds.
            connection = self._connect()
        try:
            with _trusted(connection):
                try:
                    with connection.transaction():
                        result = job(connection)
                        # Only the commit is left. Its wait for a standby must be limited.
                        self._watch.begins(connection)
                finally:
                    self._watch.ended(connection)
        except BaseException:
            self._return_connection(connection)
            raise
        self._return_connection(connection)
        return result

    def _connect(self) -> Connection:
        # The connection string may override these defaults, except for the options.
        own_options: dict[str, Any] = {"connect_timeout": CONNECT_S, "target_session_attrs": "read-write"} | _KEEPALIVE
        parameters = conninfo_to_dict(self._conninfo)
        # The operator's options come first: if a setting occurs twice, the last value is used.
        options = f"{parameters.get('options') or ''} {_OPTIONS}"
        merged = own_options | {"application_name": _NAME} | parameters | {"options": options}
        connection = psycopg.connect(make_conninfo(**merged), autocommit=True)
        # Ask once per connection how durable a commit is on this server.
        row = connection.execute(_DURABILITY).fetchone()
        assert row is not None
        # With a lower setting, a crash could lose a commit that was reported.
        if row[0] in ("off", "local", "remote_write"):
            connection.execute("SET synchronous_commit TO on")
        # Several hosts suggest a failover, but without synchronous standbys it may lose operations.
        if not row[1] and len(str(parameters.get("host", "")).split(",")) > 1 and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s has no synchronous_standby_names: if it is lost, a standby may repeat requests that were executed",
                row[2],
            )
        return connection

    _has_warned = False

    def _drop_idle(self) -> None:
        """Close the idle connections, because whatever broke one connection has probably broken all of them."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            with suppress(psycopg.Error):
                connection.close()

    def _return_connection(self, connection: Connection) -> None:
        with self._lock:
            # Reuse only a connection without a transaction: after an error it may be in an unknown state.
            is_usable = not self._is_closed and not connection.closed
            if is_usable and connection.info.transaction_status is psycopg.pq.TransactionStatus.IDLE:
                self._idle.append(connection)
                return
        with suppress(psycopg.Error):
            connection.close()


def _cancel(connection: Connection) -> None:
    with suppress(psycopg.Error):
        connection.cancel_safe(timeout=CANCEL_S)


@contextmanager
def _trusted(connection: Connection) -> Iterator[None]:
    """Raise _NotTrusted if the server sent a warning with any of the block's statements."""
    warnings: list[str] = []

    def on_notice(notice: psycopg.errors.Diagnostic) -> None:
        # Use the non-localized severity, because servers translate the other.
        if notice.severity_nonlocalized == "WARNING":
            warnings.append(notice.message_primary or "a warning")

    # Warnings are notices and not errors, so psycopg would only log them.
    connection.add_notice_handler(on_notice)
    try:
        yield
    finally:
        connection.remove_notice_handler(on_notice)
    if warnings:
        raise _NotTrusted(warnings[0])


def _create_tables(connection: Connection) -> None:
    # The end of the transaction releases the lock.
    connection.execute("SELECT pg_advisory_xact_lock(%s)", (_TABLE_LOCK,))
    for statement in _TABLES:
        connection.execute(statement)


def _columns(entry: Entry) -> tuple[Any, ...]:
    phase = int(entry.phase)
    return entry.request_hash, entry.epoch, entry.claim_id, phase, entry.claim_until_s, entry.outcome


def _load(connection: Connection, key: str) -> Entry | None:
    row = connection.execute(_SELECT, (key,)).fetchone()
    return None if row is None else Entry(row[0], row[1], row[2], OperationPhase(row[3]), "", row[4], row[5])


def _save(connection: Connection, key: str, before: Entry | None, after: Entry | None, now_s: float) -> None:
    # A repeated transaction changes nothing, and then writes nothing.
    if after is not None and after != before:
        connection.execute(_UPDATE, (*_columns(after), now_s, key))


def _sentence(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
