"""The idempotency store: which operations have begun, and their outcomes.

A store outlives the processes that use it, and several processes may use it at the same time. Its rules are in
`ledger`. A store makes each rule one durable transaction: when a method returns, its effect survives a crash. The only
exception is a reservation in a store of one host: a crash of the host may undo it, which is harmless because the crash
also ends the attempt.
"""

from typing import Final, Protocol

from gpulease.client.errors import InvalidRequest
from gpulease.client.serve.gateway.gateway_errors import StoreUnavailable
from gpulease.client.serve.gateway.ledger import Reservation, ReserveResult
from gpulease.client.serve.gateway.sqlite_store import SqliteStore


class ReplicatedIdempotencyStore(Protocol):
    """A thread-safe store. Every method raises StoreUnavailable if the store does not answer."""

    def reserve(self, key: str, request_hash: bytes, claim_ttl_s: float) -> ReserveResult:
        """Reserve an operation, or return why that is unnecessary or impossible.

        An operation can be reserved again, with a higher epoch, if its attempt was released, or if the attempt's claim
        expired before the effect began.

        Args:
            key: The operation's key.
            request_hash: The operation's hash.
            claim_ttl_s: Seconds after which the attempt is presumed dead. Must be longer than the effect can last.

        Raises:
            OperationConflict: The key was used for another operation.
        """
        ...

    def start(self, reservation: Reservation) -> None:
        """Record that the effect may begin, before it begins. If this raises StaleEpoch, the effect must not begin."""
        ...

    def complete(self, reservation: Reservation, outcome: bytes) -> None:
        """Record the outcome, which every later request with the key gets. Raises StaleEpoch."""
        ...

    def release(self, reservation: Reservation) -> None:
        """Release the reservation of an attempt that has not begun the effect. Raises StaleEpoch."""
        ...

    def forget(self, older_than_s: float) -> int:
        """Delete operations that have not changed for `older_than_s`; they may then run again. Returns their number."""
        ...

    def close(self) -> None:
        """Close the store. Its records stay, for the next process that opens it."""
        ...


SQLITE: Final = "sqlite:"
POSTGRES: Final = ("postgresql://", "postgres://")


def open_store(url: str) -> ReplicatedIdempotencyStore:
    """Open the store at `sqlite:PATH` or `postgresql://...`.

    Raises:
        InvalidRequest: The URL has another form.
        StoreUnavailable: The store can't be opened, or PostgreSQL's client library is not installed.
    """
    if url.startswith(SQLITE) and len(url) > len(SQLITE):
        return SqliteStore(url.removeprefix(SQLITE))
    if not url.startswith(POSTGRES):
        raise InvalidRequest(f"a store must be sqlite:PATH or postgresql://HOST/DATABASE, not {url!r}")
    try:
        # Imported late, because it needs the extra `postgres`.
        from gpulease.client.serve.gateway.postgres_store import PostgresStore
    except ImportError as error:
        raise StoreUnavailable(
            f"PostgreSQL's client library is missing: {error}",
            "Install it: pip install '.[postgres]' in gpulease's repository",
        ) from None
    return PostgresStore(url)
