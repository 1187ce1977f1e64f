"""Which nonces were used: a token opens one session connection, once.

Gives out tokens and says what a presented one permits.
"""

import heapq
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpulease.daemon.capabilities import tokens
from gpulease.daemon.capabilities.claims import (
    MAX_TOKEN_TTL_S,
    NONCE_BYTES,
    NS_PER_S,
    CapabilityDenied,
    CapabilityRequest,
    Check,
    Claims,
    Grant,
    audience_of,
)
from gpulease.daemon.capabilities.keys import Draw, KeyRing
from gpulease.protocol.capabilities import NODE_LEASE, Permission, names_of

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


KEY_LIFE_S: Final = 86_400
"""How long a key signs. One that leaks unnoticed is worth something for a day."""

NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class LeaseFacts:
    """What the authority must know of a lease: an active one, whose time is not over.

    Attributes:
        deadline_ns: When it ends, on the monotonic clock.
    """

    tenant: str
    generation: int
    deadline_ns: int


class CapabilityAuthority:
    """The node's own: it signs and verifies with its keys, and knows its leases.

    Args:
        ring: The keys.
        find_lease: The lease with that id; None unless it is active.
        clock_ns: The monotonic clock, in nanoseconds; the same for all processes of the host until it restarts.
        unix_s: The wall clock, for holders that narrow a token without asking anybody.
        save: Called when the ring has changed, before the new key signs anything.
        nonces: Those that were used.
        revoked: Those of tokens that were revoked.
    """

    def __init__(
        self,
        ring: KeyRing,
        find_lease: Callable[[int], LeaseFacts | None],
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        unix_s: Callable[[], float] = time.time,
        draw: Draw = secrets.token_bytes,
        save: Callable[[KeyRing], None] = lambda ring: None,
        nonces: NonceStore | None = None,
        revoked: NonceStore | None = None,
    ) -> None:
        self._ring = ring
        self._find_lease = find_lease
        self._clock_ns = clock_ns
        self._unix_s = unix_s
        self._draw = draw
        self._save = save
        self._nonces = NonceStore() if nonces is None else nonces
        self._revoked = NonceStore() if revoked is None else revoked

    def audience_of(self, tenant: str) -> bytes:
        """The name of a tenant on this node."""
        return audience_of(self._ring.node_id, tenant)

    def issue(self, request: CapabilityRequest) -> Grant:
        """A token for what is asked; who may ask is the caller's to know.

        Raises CapabilityDenied: REQUEST, LEASE, or REPLAYED for a nonce that was used.
        """
        request.check()
        now_ns = self._clock_ns()
        lease = self._lease(request.lease_id)
        ends_ns = min(now_ns + int(request.ttl_s * NS_PER_S), lease.deadline_ns)
        nonce = request.nonce_bytes or self._draw(NONCE_BYTES)
        if self._nonces.is_used(request.lease_id, nonce) or self._revoked.is_used(request.lease_id, nonce):
            raise _replayed()
        claims = Claims(
            request.lease_id,
            lease.tenant,
            lease.generation,
            request.permissions,
            request.audience,
            ends_ns // NS_PER_MS,
            nonce,
        )
        if self._ring.age_ns(now_ns) > KEY_LIFE_S * NS_PER_S:
            self.rotate()
        key = self._ring.signing
        token = tokens.mint(key, claims, now_ns // NS_PER_MS, int(self._unix_s() * 1000))
        return Grant(token, claims, bytes(tokens.public_key(key).to_bytes()))

    def validate(self, token: bytes, audience: bytes, permission: Permission) -> Claims:
        """What a token says, if it is `audience`'s to use, now, and permits one of the permissions in `permission`.

        Raises CapabilityDenied with the check that failed; the first of MALFORMED, UNKNOWN_KEY, AUDIENCE, EXPIRED,
        LEASE, GENERATION, REVOKED, PERMISSION, REPLAYED. Nothing is changed: see `use`.
        """
        now_ns = self._clock_ns()
        now_ms = now_ns // NS_PER_MS
        opened = tokens.open_token(token, self._ring, now_ns)
        claims = opened.claims
        if not secrets.compare_digest(claims.audience, audience):
            raise CapabilityDenied(
                Check.AUDIENCE,
                "the token is for another holder, or another node",
                "Tell the lease's tenant your own audience on this node.",
            )
        # Also a token that would live too long, as one of a run before the host's restart may seem to.
        if not now_ms < claims.expires_ms <= now_ms + MAX_TOKEN_TTL_S * 1000:
            raise CapabilityDenied(Check.EXPIRED, "the token has expired", "Get a new one.")
        self._check_lease(claims)
        if self._revoked.is_used(claims.lease_id, claims.nonce):
            raise CapabilityDenied(Check.REVOKED, "the token was revoked", "Ask who gave it for another.")
        permitted = claims.permissions & permission
        if not permitted or not tokens.agrees(opened, now_ms, next(iter(permitted))):
            raise CapabilityDenied(
                Check.PERMISSION,
                f"the token permits {_list(claims.permissions)}, and {_list(permission)} is needed",
                "Get a token that permits it.",
            )
        if self._nonces.is_used(claims.lease_id, claims.nonce):
            raise _replayed()
        if not self._nonces.has_room(claims.lease_id, now_ms):
            raise CapabilityDenied(
                Check.REPLAYED,
                "too many tokens of this lease were used in the last minutes",
                "Wait for some of them to expire.",
            )
        return claims

    def use(self, claims: Claims) -> int:
        """The token does what it can do once: from now on it is refused, REPLAYED. Until when, in monotonic ms."""
        # Narrowed copies of a token have its nonce and may expire earlier: it is kept for as long as any could live.
        latest_ms = self._clock_ns() // NS_PER_MS + MAX_TOKEN_TTL_S * 1000
        self._nonces.use(claims.lease_id, claims.nonce, latest_ms)
        return latest_ms

    def give_back(self, claims: Claims) -> None:
        """The token could not do it, and may be tried again."""
        self._nonces.give_back(claims.lease_id, claims.nonce)

    def holds(self, claims: Claims) -> bool:
        """Whether what was validated earlier holds still: not expired nor revoked, the lease alive and not renewed."""
        try:
            self._check_lease(claims)
        except CapabilityDenied:
            return False
        return self._clock_ns() < claims.expires_ns and not self._revoked.is_used(claims.lease_id, claims.nonce)

    def name(self, token: bytes) -> tuple[int, bytes]:
        """A token's lease and nonce, be it good for anything or not. Raises CapabilityDenied if it is not ours."""
        claims = tokens.open_token(token, self._ring, self._clock_ns()).claims
        return claims.lease_id, claims.nonce

    def revoke(self, lease_id: int, nonce: bytes) -> int | None:
        """Refuse every token of a lease with that nonce. Until when, in monotonic ms; None if there is no room."""
        now_ms = self._clock_ns() // NS_PER_MS
        if not self._revoked.has_room(lease_id, now_ms) and not self._revoked.is_used(lease_id, nonce):
            return None
        latest_ms = now_ms + MAX_TOKEN_TTL_S * 1000
        self._revoked.use(lease_id, nonce, latest_ms)
        return latest_ms

    def rotate(self) -> None:
        """Sign with a new key from now on; tokens of the old one are good until they expire."""
        self._ring.rotate(self._clock_ns(), self._draw)
        self._save(self._ring)

    def _check_lease(self, claims: Claims) -> None:
        lease = self._lease(claims.lease_id)
        if lease.tenant != claims.tenant:
            raise _no_lease(claims.lease_id)
        if lease.generation != claims.generation:
            raise CapabilityDenied(
                Check.GENERATION,
                f"the token is of generation {claims.generation}, and the lease was renewed since",
                "Get a new token from the lease's tenant.",
            )

    def _lease(self, lease_id: int) -> LeaseFacts:
        if lease_id == NODE_LEASE:
            return LeaseFacts("", 0, self._clock_ns() + MAX_TOKEN_TTL_S * NS_PER_S)
        lease = self._find_lease(lease_id)
        if lease is None:
            raise _no_lease(lease_id)
        return lease


def _list(permissions: Permission) -> str:
    return " or ".join(names_of(permissions)) or "nothing"


def _no_lease(lease_id: int) -> CapabilityDenied:
    return CapabilityDenied(
        Check.LEASE, f"there is no live lease {lease_id:032x} here", "It may have ended: get a token for another."
    )


def _replayed() -> CapabilityDenied:
    return CapabilityDenied(Check.REPLAYED, "a token with this nonce was used before", "Get a new token for each use.")
