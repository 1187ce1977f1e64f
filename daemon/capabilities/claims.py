"""What an operator can demand a token for.

What is asked of the authority, what it gives, what a token says, and why one is refused.
"""

import hashlib
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Self

from gpulease.protocol.capabilities import Permission
from gpulease.protocol.limits import AUDIENCE_BYTES


class Demand(Enum):
    """What needs a token, also of a lease's own tenant; operators need none."""

    ALLOC = "alloc"
    RENEW = "renew"
    ATTACH = "attach"


MAX_TOKEN_TTL_S: Final = 300
"""Longest life of a token. A stolen one is of use for no longer, even if its lease is renewed for a day."""

DEFAULT_TOKEN_TTL_S: Final = 60.0
"""Life of a token if nothing else was asked for."""

NONCE_BYTES: Final = 16
"""Length of a nonce: enough that two drawn at random are never the same."""

NS_PER_S: Final = 1_000_000_000

_AUDIENCE_DOMAIN: Final = b"gpulease audience 1\0"


class Check(Enum):
    """Which check a token failed."""

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
    """A token that is not given out, or not accepted.

    Attributes:
        check: Which check failed.
        hint: What to do about it, a sentence.
    """

    def __init__(self, check: Check, message: str, hint: str) -> None:
        super().__init__(message)
        self.check = check
        self.hint = hint


@dataclass(frozen=True, slots=True)
class CapabilityRequest:
    """What a token is wanted for. The methods return a changed copy.

    Attributes:
        lease_id: The lease; `NODE_LEASE` for a token about the node.
        permissions: What it is to permit.
        audience: Who may use it, where: `audience_of` the holder's tenant and the node.
        ttl_s: For how long, at most `MAX_TOKEN_TTL_S`; it never outlives the lease.
        nonce_bytes: Its nonce; empty: the authority draws one.
    """

    lease_id: int
    permissions: Permission
    audience: bytes
    ttl_s: float = DEFAULT_TOKEN_TTL_S
    nonce_bytes: bytes = b""

    def ttl_secs(self, seconds: float) -> Self:
        """How long the token is to live."""
        return replace(self, ttl_s=seconds)

    def nonce(self, nonce: bytes) -> Self:
        """The token's nonce, `NONCE_BYTES` that no other token has."""
        return replace(self, nonce_bytes=nonce)

    def check(self) -> None:
        """Raises CapabilityDenied if it makes no sense."""
        if not self.permissions:
            raise _request("no permission was asked for", "Name at least one.")
        if len(self.audience) != AUDIENCE_BYTES:
            raise _request(f"an audience has {AUDIENCE_BYTES} bytes", "Ask the holder for theirs.")
        if not 0 < self.ttl_s <= MAX_TOKEN_TTL_S:
            raise _request(
                f"a token can't live for {self.ttl_s:g} s; at most {MAX_TOKEN_TTL_S} s are given",
                "Ask for less, and for another token in time.",
            )
        if self.nonce_bytes and len(self.nonce_bytes) != NONCE_BYTES:
            raise _request(f"a nonce has {NONCE_BYTES} bytes", "Draw them at random, or leave that to the daemon.")


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says, all its narrowings taken into account.

    Attributes:
        tenant: Whose lease it is.
        generation: The lease's, when the token was made; a renewal ends it.
        expires_ms: When it ends, on the node's monotonic clock.
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
        """The same in nanoseconds."""
        return self.expires_ms * 1_000_000


@dataclass(frozen=True, slots=True)
class Grant:
    """A token and what it says.

    Attributes:
        public_key: Of the key that signed it: what a holder needs to narrow it.
    """

    token: bytes
    claims: Claims
    public_key: bytes


def audience_of(node_id: bytes, tenant: str) -> bytes:
    """The name of one tenant on one node: a token for it is of no use to anybody else, or anywhere else."""
    return hashlib.sha256(_AUDIENCE_DOMAIN + len(node_id).to_bytes(2, "big") + node_id + tenant.encode()).digest()


def _request(message: str, hint: str) -> CapabilityDenied:
    return CapabilityDenied(Check.REQUEST, message, hint)
