"""The idempotency store: which operations were begun, and what came of them.

A store outlives the processes that use it, and several may use it at once. Its rules are in `ledger`. A store makes
each of them one durable transaction: when a method returns, its effect survives a crash.
"""

from typing import Final, Protocol

from gpulease.client.errors import InvalidRequest
from gpulease.client.serve.gateway.gateway_errors import StoreUnavailable
from gpulease.client.serve.gateway.ledger import Reservation, ReserveResult
from gpulease.client.serve.gateway.sqlite_store import SqliteStore


class ReplicatedIdempotencyStore(Protocol):
    """A thread-safe store. Every method raises StoreUnavailable if the store does not answer."""

    def reserve(self, key: str, request_hash: bytes, claim_ttl_s: float) -> ReserveResult:
        """Reserve an operation, or say why that is not needed or not allowed.

        An operation can be reserved again, with a higher epoch, once its attempt was released. So can one if its
        claim expired before the attempt began the effect.

        Args:
            key: The operation's key.
            request_hash: The operation's hash.
            claim_ttl_s: Seconds after which the attempt is presumed dead. Longer than the effect can last.

        Raises:
            OperationConflict: The key stands for another operation.
        """
        ...

    def start(self, held: Reservation) -> None:
        """Record that the effect may begin, before it does. Raises StaleEpoch: then it must not begin."""
        ...

    def complete(self, held: Reservation, outcome: bytes) -> None:
        """Record the outcome, for every later request of the key. Raises StaleEpoch."""
        ...

    def release(self, held: Reservation) -> None:
        """Give the reservation back, with nothing begun. Raises StaleEpoch."""
        ...

    def forget(self, older_than_s: float) -> int:
        """Drop operations that have not changed for that long; return their number. They could be done again."""
        ...

    def close(self) -> None:
        """Close the store; its records stay."""
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
        raise InvalidRequest(f"{url!r} is not a store", "Write sqlite:PATH or postgresql://HOST/DATABASE")
    try:
        from gpulease.client.serve.gateway.postgres_store import PostgresStore
    except ImportError as error:
        raise StoreUnavailable(
            f"no PostgreSQL: {error}", "Install it: pip install '.[postgres]' in gpulease's repository"
        ) from None
    return PostgresStore(url)
