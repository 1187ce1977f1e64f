"""Which nonces were used: a token opens one session connection, once."""

import heapq
from typing import Final

MAX_NONCES_PER_LEASE: Final = 256
"""Tokens of one lease that are remembered as used at a time. Bounds memory against a tenant that mints and attaches in
a loop; counted per lease, so that it shuts nobody out but itself."""

MAX_STALE: Final = 64
"""Ends of nonces that were given back, beside as many as are used. Bounds memory against a guest that attaches again
and again where it can't be let in: each time its token is used, and given back."""


class NonceStore:
    """The used nonces of tokens that have not expired. Forgets each when its token's own time is over."""

    def __init__(self) -> None:
        self._used: dict[int, dict[bytes, int]] = {}
        self._count = 0
        self._ends: list[tuple[int, int, bytes]] = []

    def __len__(self) -> int:
        return len(self._ends)

    def is_used(self, lease_id: int, nonce: bytes) -> bool:
        """Whether a token of that lease with this nonce was used."""
        return nonce in self._used.get(lease_id, ())

    def has_room(self, lease_id: int, now_ms: int) -> bool:
        """Whether another one of that lease can be remembered."""
        self._forget(now_ms)
        return len(self._used.get(lease_id, ())) < MAX_NONCES_PER_LEASE

    def use(self, lease_id: int, nonce: bytes, expires_ms: int) -> None:
        """Remember a nonce until no token of its kind can be valid any more."""
        used = self._used.setdefault(lease_id, {})
        if nonce not in used:
            used[nonce] = expires_ms
            self._count += 1
            heapq.heappush(self._ends, (expires_ms, lease_id, nonce))

    def give_back(self, lease_id: int, nonce: bytes) -> None:
        """It was not used after all."""
        used = self._used.get(lease_id, {})
        if used.pop(nonce, None) is not None:
            self._count -= 1
        if not used:
            self._used.pop(lease_id, None)
        if len(self._ends) > 2 * self._count + MAX_STALE:
            self._ends = [(ends, of, one) for of, those in self._used.items() for one, ends in those.items()]
            heapq.heapify(self._ends)

    def _forget(self, now_ms: int) -> None:
        while self._ends and self._ends[0][0] < now_ms:
            ends_ms, lease_id, nonce = heapq.heappop(self._ends)
            # One that was given back may be in use again, to a later end.
            if self._used.get(lease_id, {}).get(nonce) == ends_ms:
                self.give_back(lease_id, nonce)
