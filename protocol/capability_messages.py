"""The bodies of tokens' operations; see `messages`."""

from dataclasses import dataclass

from gpulease.protocol import limits
from gpulease.protocol.primitives import U32, U64, U128, sized_bytes, wire


@dataclass(frozen=True, slots=True)
class CapabilityIssue:
    """Ask for a token: `Permission` bits, whose it is to be (empty: the asker's own), a nonce (0: any)."""

    lease_id: int = wire(U128)
    permissions: int = wire(U32)
    audience: bytes = wire(sized_bytes(limits.AUDIENCE_BYTES))
    ttl_ms: int = wire(U32)
    nonce: int = wire(U128)


@dataclass(frozen=True, slots=True)
class CapabilityGrant:
    """A token. `public_key` is the signer's: with it a holder can narrow the token without asking anybody."""

    token: bytes = wire(sized_bytes(limits.MAX_TOKEN_BYTES))
    public_key: bytes = wire(sized_bytes(limits.PUBLIC_KEY_BYTES))
    generation: int = wire(U64)
    ttl_ms: int = wire(U32)
    expires_at_unix_s: int = wire(U64)


@dataclass(frozen=True, slots=True)
class CapabilityPresent:
    """A token that is to count for the rest of this control connection."""

    token: bytes = wire(sized_bytes(limits.MAX_TOKEN_BYTES))


@dataclass(frozen=True, slots=True)
class CapabilityHeld:
    """What a presented token permits, all its narrowings taken into account."""

    lease_id: int = wire(U128)
    permissions: int = wire(U32)
    generation: int = wire(U64)
    ttl_ms: int = wire(U32)
    expires_at_unix_s: int = wire(U64)


@dataclass(frozen=True, slots=True)
class CapabilityRevoke:
    """End one token, and what was narrowed from it: `token`, or if that is empty the one of that lease and nonce."""

    lease_id: int = wire(U128)
    nonce: int = wire(U128)
    token: bytes = wire(sized_bytes(limits.MAX_TOKEN_BYTES))


@dataclass(frozen=True, slots=True)
class Audience:
    """The name that this node has for the peer: who is to get a token tells it to whoever asks for one."""

    audience: bytes = wire(sized_bytes(limits.AUDIENCE_BYTES))
