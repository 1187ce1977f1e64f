"""The claims of a token, the request for a token, its grant, and the reasons to refuse it."""

import hashlib
from dataclasses import replace
from enum import Enum
from typing import Final, Self

from gpulease.protocol.capabilities import Permission
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.limits import AUDIENCE_BYTES
from gpulease.protocol.time_units import NS_PER_MS


class Demand(Enum):
    """Requests for which an operator may demand a token, even from a lease's own tenant. Operators need none."""

    ALLOC = "alloc"
    RENEW = "renew"
    ATTACH = "attach"


MAX_TOKEN_TTL_S: Final = 300
"""Longest life of a token. A stolen token can be used for at most this time, even if its lease is renewed for a day."""

DEFAULT_TOKEN_TTL_S: Final = 60.0

NONCE_BYTES: Final = 16
"""Length of a nonce. Two random nonces of this length never collide."""

_AUDIENCE_DOMAIN: Final = b"gpulease audience 1\0"


class TokenCheck(Enum):
    """The checks of a token, in no order; REQUEST is about issuing one. The value is the name in messages."""

    MALFORMED = "malformed"
    UNKNOWN_KEY = "unknown key"
    EXPIRED = "expired"
    AUDIENCE = "foreign audience"
    LEASE = "no such lease"
    GENERATION = "stale generation"
    REVOKED = "revoked"
    PERMISSION = "permission missing"
    REPLAYED = "replayed nonce"
    REQUEST = "request"


class CapabilityDenied(Exception):
    """The refusal to issue or accept a token.

    Attributes:
        check: The check that failed.
        hint: A sentence that says what to do about it.
    """

    def __init__(self, check: TokenCheck, message: str, hint: str) -> None:
        super().__init__(message)
        self.check = check
        self.hint = hint


@dataclass(frozen=True, slots=True)
class CapabilityRequest:
    """A request for a token. The methods return a changed copy.

    Attributes:
        lease_id: The lease; `NODE_LEASE` for a token about the node.
        permissions: The permissions of the token.
        audience: The holder on the node, as `audience_of` returns it for the holder's tenant.
        ttl_s: The token's life, at most `MAX_TOKEN_TTL_S`; it never outlives the lease.
        nonce_bytes: The token's nonce; if it is empty, the authority draws one.
    """

    lease_id: int
    permissions: Permission
    audience: bytes
    ttl_s: float = DEFAULT_TOKEN_TTL_S
    nonce_bytes: bytes = b""

    def ttl_secs(self, seconds: float) -> Self:
        return replace(self, ttl_s=seconds)

    def nonce(self, nonce: bytes) -> Self:
        return replace(self, nonce_bytes=nonce)

    def check(self) -> None:
        """Raise CapabilityDenied for an impossible request."""
        # Trust no caller, because the request comes from a tenant.
        if not self.permissions:
            raise _request("no permission was requested", "Request at least one permission.")
        if len(self.audience) != AUDIENCE_BYTES:
            raise _request(f"an audience must have {AUDIENCE_BYTES} bytes", "Ask the token's holder for its audience.")
        # The bound also limits how long used nonces must be remembered.
        if not 0 < self.ttl_s <= MAX_TOKEN_TTL_S:
            raise _request(
                f"a token's lifetime must be more than 0 s and at most {MAX_TOKEN_TTL_S} s, not {self.ttl_s:g} s",
                "Request a shorter lifetime, and another token before it ends.",
            )
        if self.nonce_bytes and len(self.nonce_bytes) != NONCE_BYTES:
            raise _request(
                f"a nonce must have {NONCE_BYTES} bytes", "Choose nonces at random, or leave the choice to the daemon."
            )


@dataclass(frozen=True, slots=True)
class Claims:
    """A token's claims, after all of its narrowings.

    Attributes:
        lease_id: The lease; `NODE_LEASE` for a token about the node.
        tenant: The lease's tenant.
        generation: The lease's generation when the token was made; a renewal ends the token.
        permissions: The remaining permissions.
        audience: The holder on the node.
        expires_ms: The token's end, on the node's monotonic clock.
        nonce: The token's nonce.
    """

    lease_id: int
    tenant: str
    generation: int
    permissions: Permission
    audience: bytes
    expires_ms: int
    nonce: bytes

    @property
    def expires_ns(self) -> int:
        return self.expires_ms * NS_PER_MS


@dataclass(frozen=True, slots=True)
class TokenGrant:
    """An issued token.

    Attributes:
        token: The token's bytes.
        claims: The token's claims.
        public_key: The public half of the signing key, with which a holder narrows the token.
    """

    token: bytes
    claims: Claims
    public_key: bytes


def audience_of(node_id: bytes, tenant: str) -> bytes:
    """Return the audience of one tenant on one node. A token for it is of no use to other tenants or on other nodes."""
    # The lengths are fixed, or written before the bytes, so that no two pairs give the same input. The domain
    # distinguishes this hash from other uses of SHA-256.
    return hashlib.sha256(_AUDIENCE_DOMAIN + len(node_id).to_bytes(2, "big") + node_id + tenant.encode()).digest()


def _request(message: str, hint: str) -> CapabilityDenied:
    return CapabilityDenied(TokenCheck.REQUEST, message, hint)
