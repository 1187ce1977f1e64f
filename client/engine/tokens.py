"""Tokens as the client knows them: bytes, and what was said of them when they were made."""

import base64
from dataclasses import dataclass
from typing import Final, Self

from gpulease.client.engine.request import milliseconds, whole
from gpulease.client.errors import InvalidRequest
from gpulease.client.texts import quoted
from gpulease.protocol.capabilities import ALL_PERMISSIONS, Permission
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.limits import AUDIENCE_BYTES, MAX_TOKEN_BYTES
from gpulease.protocol.messages import CapabilityHeld, CapabilityIssue

TOKEN_S: Final = 60.0
"""Life of a token if its issuer does not say."""

MAX_NONCE: Final = 2**128 - 1
"""Largest nonce; 0 leaves the choice to the daemon."""


@dataclass(frozen=True, slots=True, repr=False)
class Grant:
    """A token that was issued.

    Attributes:
        token: What its holder needs, and whoever has it and is its audience can use.
        public_key: What its holder needs besides to narrow it.
        lease_id: The lease it is about.
        permissions: What it permits.
        ttl_s: For how long, from when it was issued.
        expires_at_unix_secs: The same as a date by the daemon's wall clock, for people.
    """

    token: bytes
    public_key: bytes
    lease_id: LeaseId
    permissions: Permission
    ttl_s: float
    expires_at_unix_secs: int

    def to_text(self) -> str:
        """The token as text without blanks, for an environment variable or a file."""
        return base64.urlsafe_b64encode(self.token).decode()

    def __repr__(self) -> str:
        # Without the token: what is printed ends up in logs.
        return f"<Grant of {self.permissions!s} on {self.lease_id} for {self.ttl_s:g} s>"


@dataclass(frozen=True, slots=True)
class HeldToken:
    """What a node says of a token that was shown to it.

    Attributes:
        lease_id: The lease it is about.
        permissions: What it lets this program do.
        ttl_s: For how long.
        expires_at_unix_secs: The same as a date by the daemon's wall clock, for people.
    """

    lease_id: LeaseId
    permissions: Permission
    ttl_s: float
    expires_at_unix_secs: int

    @classmethod
    def of(cls, told: CapabilityHeld) -> Self:
        """The node's reply, with the permissions by name and the time in seconds."""
        return cls(LeaseId(told.lease_id), Permission(told.permissions), told.ttl_ms / 1000, told.expires_at_unix_s)


def token_of(token: "bytes | str | Grant") -> bytes:
    """The token's bytes, also from its text or its grant. Raises InvalidRequest."""
    if isinstance(token, Grant):
        return token.token
    try:
        if isinstance(token, str):
            found = base64.b64decode(token, altchars=b"-_", validate=True)
        else:
            # Not bytes() of whatever it is: of a number that would be as many zeros.
            found = bytes(memoryview(token))
    except (ValueError, TypeError):
        raise InvalidRequest("a token is bytes, or the text that Grant.to_text gave") from None
    if len(found) > MAX_TOKEN_BYTES:
        raise InvalidRequest(f"a token has {MAX_TOKEN_BYTES} bytes at most, not {len(found)}")
    return found


def issue_request(
    lease_id: int, permissions: Permission, audience: bytes | None, ttl_secs: float, nonce: int
) -> CapabilityIssue:
    """What to ask the daemon. Raises InvalidRequest."""
    if not isinstance(permissions, Permission) or not permissions or permissions & ~ALL_PERMISSIONS:
        raise InvalidRequest(f"issue: {quoted(permissions)} is no set of Permission")
    if audience is not None and (not isinstance(audience, bytes | bytearray) or len(audience) != AUDIENCE_BYTES):
        raise InvalidRequest(f"issue: an audience has {AUDIENCE_BYTES} bytes", "Ask the holder for their my_audience()")
    return CapabilityIssue(
        lease_id,
        int(permissions),
        bytes(audience or b""),
        milliseconds(ttl_secs, "issue", least_ms=1),
        whole(nonce, "issue", least=0, most=MAX_NONCE),
    )
