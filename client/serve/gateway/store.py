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
    """Thread-safe. Every method raises StoreUnavailable if the store does not answer."""

    def reserve(self, key: str, request_hash: bytes, claim_ttl_s: float) -> ReserveResult:
        """The right to attempt an operation, or why there is no need or no right to.

        An operation whose attempt was released, or did nothing before its claim ran out, can be reserved again, with a
        higher epoch.

        Args:
            key: What the operation is known by.
            request_hash: Which operation that is.
            claim_ttl_s: After how long the attempt is thought to be dead. Longer than the effect can last.

        Raises:
            OperationConflict: The key stands for another operation.
        """
        ...

    def start(self, held: Reservation) -> None:
        """Write down that the effect may begin, before it does. Raises StaleEpoch: then it must not."""
        ...

    def complete(self, held: Reservation, outcome: bytes) -> None:
        """Write down what came of it, for everybody who asks from now on. Raises StaleEpoch."""
        ...

    def release(self, held: Reservation) -> None:
        """Give the reservation back, with nothing begun. Raises StaleEpoch."""
        ...

    def forget(self, older_than_s: float) -> int:
        """Drop operations that nothing has happened to for that long, and say how many. They could be done again."""
        ...

    def close(self) -> None:
        """Let go of it; what was written stays."""
        ...


SQLITE: Final = "sqlite:"
POSTGRES: Final = ("postgresql://", "postgres://")


def open_store(url: str) -> ReplicatedIdempotencyStore:
    """The store at `sqlite:PATH` or `postgresql://...`. Raises InvalidRequest for another URL, StoreUnavailable."""
    if url.startswith(SQLITE) and len(url) > len(SQLITE):
        return SqliteStore(url.removeprefix(SQLITE))
    if not url.startswith(POSTGRES):
        raise InvalidRequest(f"{url!r} is no store", "Say sqlite:PATH or postgresql://HOST/DATABASE")
    try:
        from gpulease.client.serve.gateway.postgres_store import PostgresStore
    except ImportError as error:
        raise StoreUnavailable(
            f"no PostgreSQL: {error}", "Install it: pip install '.[postgres]' in gpulease's repository"
        ) from None
    return PostgresStore(url)
