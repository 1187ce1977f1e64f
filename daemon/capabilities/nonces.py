"""Which nonces were used: a token opens one session connection, once."""

import heapq
from typing import Final

MAX_NONCES_PER_LEASE: Final = 256
"""Tokens of one lease that are remembered as used at a time. Bounds memory against a tenant that mints and attaches in
a loop; counted per lease, so that it shuts nobody out but itself."""


class NonceStore:
    """The used nonces of tokens that have not expired. Forgets each when its token's own time is over."""

    def __init__(self) -> None:
        self._used: dict[int, set[bytes]] = {}
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
        used = self._used.setdefault(lease_id, set())
        if nonce not in used:
            used.add(nonce)
            heapq.heappush(self._ends, (expires_ms, lease_id, nonce))

    def give_back(self, lease_id: int, nonce: bytes) -> None:
        """It was not used after all."""
        used = self._used.get(lease_id, set())
        used.discard(nonce)
        if not used:
            self._used.pop(lease_id, None)

    def _forget(self, now_ms: int) -> None:
        while self._ends and self._ends[0][0] < now_ms:
            _, lease_id, nonce = heapq.heappop(self._ends)
            self.give_back(lease_id, nonce)
