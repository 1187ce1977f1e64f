"""The authority that issues tokens and validates them when they are presented, and its store of used nonces.

A token opens one session connection, once: its nonce is remembered as used.
"""

import heapq
import secrets
import time
from collections.abc import Callable
from typing import Final

from gpulease.daemon.capabilities import tokens
from gpulease.daemon.capabilities.claims import (
    MAX_TOKEN_TTL_S,
    NONCE_BYTES,
    CapabilityDenied,
    CapabilityRequest,
    Claims,
    TokenCheck,
    TokenGrant,
    audience_of,
)
from gpulease.daemon.capabilities.keys import Draw, Key, KeyRing
from gpulease.protocol.capabilities import NODE_LEASE, Permission, names_of
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S

MAX_NONCES_PER_LEASE: Final = 256
"""Maximum number of used tokens of one lease that are remembered at a time, so that a tenant that mints and attaches in
a loop can't fill memory. The count is per lease, so such a tenant locks out only itself.
"""

MAX_STALE: Final = 64
"""Maximum number of the heap's entries for returned nonces, in addition to the number of used nonces. Without it, a
guest that fails to attach again and again could fill memory: each attempt uses its token and returns it."""


class NonceStore:
    """The used nonces of tokens that have not expired. A nonce is forgotten when its token expires."""

    def __init__(self) -> None:
        self._used: dict[int, dict[bytes, int]] = {}
        self._count = 0
        self._ends: list[tuple[int, int, bytes]] = []

    def __len__(self) -> int:
        return len(self._ends)

    def is_used(self, lease_id: int, nonce: bytes) -> bool:
        """Return whether a token of this lease with this nonce was used."""
        return nonce in self._used.get(lease_id, ())

    def has_room(self, lease_id: int, now_ms: int) -> bool:
        """Return whether the store can remember another nonce of this lease."""
        self._forget(now_ms)
        return len(self._used.get(lease_id, ())) < MAX_NONCES_PER_LEASE

    def use(self, lease_id: int, nonce: bytes, expires_ms: int) -> None:
        """Remember a nonce until no token with it can be valid."""
        used = self._used.setdefault(lease_id, {})
        if nonce not in used:
            used[nonce] = expires_ms
            self._count += 1
            heapq.heappush(self._ends, (expires_ms, lease_id, nonce))

    def give_back(self, lease_id: int, nonce: bytes) -> None:
        """Forget a nonce that was not used after all."""
        used = self._used.get(lease_id, {})
        # The heap keeps the entry, because removing it would cost a search. The heap is rebuilt when most entries are
        # of this kind.
        if used.pop(nonce, None) is not None:
            self._count -= 1
        if not used:
            self._used.pop(lease_id, None)
        if len(self._ends) > 2 * self._count + MAX_STALE:
            self._ends = [(ends, lease, key) for lease, used in self._used.items() for key, ends in used.items()]
            heapq.heapify(self._ends)

    def _forget(self, now_ms: int) -> None:
        while self._ends and self._ends[0][0] < now_ms:
            ends_ms, lease_id, nonce = heapq.heappop(self._ends)
            # A returned nonce may be in use again, with a later end.
            if self._used.get(lease_id, {}).get(nonce) == ends_ms:
                self.give_back(lease_id, nonce)


KEY_LIFE_S: Final = 86_400
"""Seconds for which a key signs. A key that leaks unnoticed is useful for at most a day."""


@dataclass(frozen=True, slots=True)
class LeaseFacts:
    """The facts about an active lease that the authority needs.

    Attributes:
        tenant: The lease's tenant.
        generation: The lease's generation; each renewal raises it.
        deadline_ns: The lease's end, on the monotonic clock.
    """

    tenant: str
    generation: int
    deadline_ns: int


class CapabilityAuthority:
    """The node's authority: signs and verifies tokens with the node's keys, for the node's leases.

    Args:
        ring: The keys.
        find_lease: Returns the lease with an id; None unless it is active.
        clock_ns: The monotonic clock, in nanoseconds. All processes share it until the host restarts.
        unix_s: The wall clock, in seconds. Holders that narrow a token offline need it.
        draw: Returns random bytes.
        save: Saves a changed ring. Called before the new key signs anything.
        nonces: The nonces of used tokens.
        revoked: The nonces of revoked tokens.
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
        self._recent = tokens.RecentTokens()
        self._find_lease = find_lease
        self._clock_ns = clock_ns
        self._unix_s = unix_s
        self._draw = draw
        self._save = save
        self._nonces = NonceStore() if nonces is None else nonces
        self._revoked = NonceStore() if revoked is None else revoked
        self._public: tuple[int, bytes] | None = None

    def audience_of(self, tenant: str) -> bytes:
        """Return the bytes by which tokens of this node name a tenant as their holder."""
        return audience_of(self._ring.node_id, tenant)

    def issue(self, request: CapabilityRequest) -> TokenGrant:
        """Issue a token. The caller has checked that the requester may ask for it.

        Raises CapabilityDenied: REQUEST, LEASE, or REPLAYED for a nonce that was used.
        """
        # Step 1: check the request, and the lease, which must be active.
        request.check()
        now_ns = self._clock_ns()
        lease = self._lease(request.lease_id)
        # A token never outlives its lease.
        ends_ns = min(now_ns + int(request.ttl_s * NS_PER_S), lease.deadline_ns)
        # Step 2: choose a nonce. A nonce that was used or revoked for the lease would make the token invalid.
        nonce = request.nonce_bytes or self._draw(NONCE_BYTES)
        if self._nonces.is_used(request.lease_id, nonce) or self._revoked.is_used(request.lease_id, nonce):
            raise _replayed()
        # Step 3: make the claims, with the lease's own tenant and generation, and an end that is not after the lease's.
        claims = Claims(
            request.lease_id,
            lease.tenant,
            lease.generation,
            request.permissions,
            request.audience,
            ends_ns // NS_PER_MS,
            nonce,
        )
        # Rotate before signing, not on a timer: a node that issues no tokens keeps its key.
        if self._ring.age_ns(now_ns) > KEY_LIFE_S * NS_PER_S:
            self.rotate()
        # Step 4: sign. The wall clock is only for holders that narrow the token offline.
        key = self._ring.signing
        token = self._recent.mint(key, claims, now_ns // NS_PER_MS, int(self._unix_s() * 1000))
        return TokenGrant(token, claims, self._public_bytes(key))

    def _public_bytes(self, key: Key) -> bytes:
        # Compute this once for each key: it costs as much as a signature.
        if self._public is None or self._public[0] != key.number:
            self._public = key.number, bytes(tokens.public_key(key).to_bytes())
        return self._public[1]

    def validate(self, token: bytes, audience: bytes, permission: Permission) -> Claims:
        """Return a token's claims if `audience` may use it now for one of the permissions in `permission`.

        Raises CapabilityDenied with the first check that failed, in the order MALFORMED, UNKNOWN_KEY, AUDIENCE,
        EXPIRED, LEASE, GENERATION, REVOKED, PERMISSION, REPLAYED. Changes nothing; `use` marks a token as used.
        """
        now_ns = self._clock_ns()
        now_ms = now_ns // NS_PER_MS
        # First check the signatures, because without them nothing in the token can be trusted.
        opened = self._recent.open(token, self._ring, now_ns)
        claims = opened.claims
        # Then check the holder, before the lease, so that a stolen token reveals nothing about the lease to a thief.
        if not secrets.compare_digest(claims.audience, audience):
            raise CapabilityDenied(
                TokenCheck.AUDIENCE,
                "the token was issued for another holder, or for another node",
                "Give the lease's tenant your audience on this node, and ask for a new token.",
            )
        # A token from before the host's restart may seem to be valid for too long. Refuse it, too.
        if not now_ms < claims.expires_ms <= now_ms + MAX_TOKEN_TTL_S * 1000:
            raise CapabilityDenied(TokenCheck.EXPIRED, "the token has expired", "Get a new token.")
        # Check the facts that only the node has: the lease's current state, and the revoked tokens.
        self._check_lease(claims)
        if self._revoked.is_used(claims.lease_id, claims.nonce):
            raise CapabilityDenied(TokenCheck.REVOKED, "the token was revoked", "Ask its issuer for another token.")
        # The claims and the appended blocks must both permit the use. `agrees` evaluates the blocks.
        permitted = claims.permissions & permission
        if not permitted or not tokens.agrees(opened, now_ms, next(iter(permitted))):
            raise CapabilityDenied(
                TokenCheck.PERMISSION,
                f"the token permits only {_list(claims.permissions)}, but {_list(permission)} is needed",
                "Get a token that permits the operation.",
            )
        # Check last whether the token was used, and whether its use can be remembered.
        if self._nonces.is_used(claims.lease_id, claims.nonce):
            raise _replayed()
        if not self._nonces.has_room(claims.lease_id, now_ms):
            raise CapabilityDenied(
                TokenCheck.REPLAYED,
                "too many tokens of this lease were used in the last minutes",
                "Wait until some of them have expired.",
            )
        return claims

    def use(self, claims: Claims) -> int:
        """Mark a token as used; later uses fail with REPLAYED. Returns until when this is kept, in monotonic ms."""
        # Narrowed copies share the nonce and may expire earlier, so keep it for as long as any copy could be valid.
        latest_ms = self._clock_ns() // NS_PER_MS + MAX_TOKEN_TTL_S * 1000
        self._nonces.use(claims.lease_id, claims.nonce, latest_ms)
        return latest_ms

    def give_back(self, claims: Claims) -> None:
        """Forget the use of a token with which nothing was opened, so that its holder can try again."""
        self._nonces.give_back(claims.lease_id, claims.nonce)

    def holds(self, claims: Claims) -> bool:
        """Return whether validated claims are still valid: not expired or revoked, the lease active and not renewed."""
        try:
            self._check_lease(claims)
        except CapabilityDenied:
            return False
        return self._clock_ns() < claims.expires_ns and not self._revoked.is_used(claims.lease_id, claims.nonce)

    def name(self, token: bytes) -> tuple[int, bytes]:
        """Return a token's lease and nonce, even if it is not valid. Raises CapabilityDenied for a foreign token."""
        claims = self._recent.open(token, self._ring, self._clock_ns()).claims
        return claims.lease_id, claims.nonce

    def revoke(self, lease_id: int, nonce: bytes) -> int | None:
        """Refuse every token of a lease with this nonce. Returns until when, in monotonic ms, or None without room."""
        now_ms = self._clock_ns() // NS_PER_MS
        # A nonce that was already revoked needs no more room.
        if not self._revoked.has_room(lease_id, now_ms) and not self._revoked.is_used(lease_id, nonce):
            return None
        latest_ms = now_ms + MAX_TOKEN_TTL_S * 1000
        self._revoked.use(lease_id, nonce, latest_ms)
        return latest_ms

    def rotate(self) -> None:
        """Sign with a new key from now on. Tokens of the old key stay valid until they expire."""
        # Save the key before it signs anything, or a restart would lose the key of tokens that were given out.
        self._ring.rotate(self._clock_ns(), self._draw)
        self._save(self._ring)

    def _check_lease(self, claims: Claims) -> None:
        lease = self._lease(claims.lease_id)
        # Answer the id of another tenant's lease like an unknown id.
        if lease.tenant != claims.tenant:
            raise _no_lease(claims.lease_id)
        if lease.generation != claims.generation:
            raise CapabilityDenied(
                TokenCheck.GENERATION,
                f"the token is of generation {claims.generation}, but the lease was renewed after it was issued",
                "Get a new token from the lease's tenant.",
            )

    def _lease(self, lease_id: int) -> LeaseFacts:
        # A token for the node does not depend on a lease, which could end before the token.
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
        TokenCheck.LEASE,
        f"no active lease {lease_id:032x} exists here",
        "The lease may have ended: get a token for another lease.",
    )


def _replayed() -> CapabilityDenied:
    return CapabilityDenied(
        TokenCheck.REPLAYED, "a token with this nonce was used before", "Get a new token for each use."
    )
