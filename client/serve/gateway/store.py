"""The idempotency store: which operations were begun, and what came of them.

A store outlives the processes that use it, and may be used by several at once. Its rules are in `ledger`; a store makes
each of them one durable transaction: when a method returns, what it did survives a crash.
"""

from typing import Final, Protocol

from gpulease.client.errors import InvalidRequest
from gpulease.client.serve.gateway.ledger import Answer, Completed, InFlight, Reservation, Unknown

__all__ = [
    "MAX_OUTCOME_BYTES",
    "Answer",
    "Completed",
    "InFlight",
    "ReplicatedIdempotencyStore",
    "Reservation",
    "Unknown",
    "checked_outcome",
]

MAX_OUTCOME_BYTES: Final = 17 << 20
"""Largest outcome kept: an output of 16 MiB and what is said of it. Stops a model whose outputs fill the store."""


class ReplicatedIdempotencyStore(Protocol):
    """Thread-safe. Every method raises StoreUnavailable if the store does not answer."""

    def reserve(self, key: str, request_hash: bytes, claim_ttl_s: float) -> Answer:
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


def checked_outcome(outcome: bytes) -> bytes:
    """The outcome. Raises InvalidRequest if it is too large to keep."""
    if len(outcome) > MAX_OUTCOME_BYTES:
        raise InvalidRequest(f"an outcome of {len(outcome)} bytes; at most {MAX_OUTCOME_BYTES} are kept")
    return outcome
