"""Tokens in the client: issuing them, what they grant, and passing them to other programs."""

import base64
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from gpulease.client.core.lease_request import milliseconds
from gpulease.client.errors import InvalidRequest
from gpulease.client.numbers import whole
from gpulease.client.texts import quoted
from gpulease.protocol.capabilities import ALL_PERMISSIONS, Permission, names_of
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.limits import AUDIENCE_BYTES, MAX_TOKEN_BYTES
from gpulease.protocol.messages import CapabilityHeld, CapabilityIssue

TOKEN_S: Final = 60.0
"""Lifetime of a token in seconds, if its issuer does not choose one."""

MAX_NONCE: Final = 2**128 - 1
"""Largest nonce, of 128 bits; for 0 the daemon chooses one."""


@dataclass(frozen=True, slots=True, repr=False)
class Grant:
    """A token that was issued.

    Attributes:
        token: The token's bytes. The token's audience can use it with these bytes.
        public_key: The key that the token's holder needs to attenuate it.
        lease_id: The lease that the token is for.
        permissions: The permissions that the token gives.
        ttl_s: The token's lifetime in seconds, from its issue.
        expires_at_unix_secs: When it ends, in Unix seconds by the daemon's wall clock; for display.
    """

    token: bytes
    public_key: bytes
    lease_id: LeaseId
    permissions: Permission
    ttl_s: float
    expires_at_unix_secs: int

    def to_text(self) -> str:
        """Return the token as text without blanks, for an environment variable or a file (URL-safe base64)."""
        return base64.urlsafe_b64encode(self.token).decode()

    def __repr__(self) -> str:
        # Leave the token out, because printed objects end up in logs.
        return f"<Grant of {', '.join(names_of(self.permissions))} on {self.lease_id} for {self.ttl_s:g} s>"


class GrantPair(NamedTuple):
    """What a session is opened with if it uses two tokens in turn (`RequestPipeline.use_grant`).

    Attributes:
        first: A token of the lease; None for the lease's holder, who needs none.
        second: Another token of the lease. A daemon that is too old for it ignores it.
    """

    first: Grant | None
    second: Grant


def session_tokens(lease_id: int, lease_token: bytes, grant: Grant | GrantPair | None) -> tuple[bytes, bytes]:
    """Return the two tokens with which a session is opened, each empty if there is none.

    Raises InvalidRequest for a grant of another lease.
    """
    pair = grant if isinstance(grant, GrantPair) else (grant, None)
    # The session's frames name this lease, so the worker would refuse each of them with another lease's token.
    for given in pair:
        if given is not None and given.lease_id != lease_id:
            raise InvalidRequest(f"attach: the grant must be of this lease, not of lease {given.lease_id}")
    first, second = pair
    return lease_token if first is None else first.token, b"" if second is None else second.token


@dataclass(frozen=True, slots=True)
class HeldToken:
    """A node's answer about a token that was presented to it.

    Attributes:
        lease_id: The lease that the token is for.
        permissions: The permissions that the token gives this program.
        ttl_s: Seconds until the token ends.
        expires_at_unix_secs: When it ends, in Unix seconds by the daemon's wall clock; for display.
    """

    lease_id: LeaseId
    permissions: Permission
    ttl_s: float
    expires_at_unix_secs: int

    @classmethod
    def of(cls, reply: CapabilityHeld) -> Self:
        """Convert the node's reply: permissions by name, time in seconds."""
        return cls(LeaseId(reply.lease_id), Permission(reply.permissions), reply.ttl_ms / 1000, reply.expires_at_unix_s)


def token_of(token: "bytes | str | Grant") -> bytes:
    """Return the bytes of a token that is given as bytes, text or grant. Raises InvalidRequest."""
    if isinstance(token, Grant):
        return token.token
    try:
        if isinstance(token, str):
            # Refuse characters outside the URL-safe alphabet, which show that the token was copied wrongly.
            token_bytes = base64.b64decode(token, altchars=b"-_", validate=True)
        else:
            # Call memoryview() first, because bytes() of a number would return that many zeros.
            token_bytes = bytes(memoryview(token))
    except (ValueError, TypeError):
        raise InvalidRequest("a token must be bytes, or a string from Grant.to_text") from None
    if len(token_bytes) > MAX_TOKEN_BYTES:
        raise InvalidRequest(f"a token must have at most {MAX_TOKEN_BYTES} bytes, not {len(token_bytes)}")
    return token_bytes


def issue_request(
    lease_id: int, permissions: Permission, audience: bytes | None, ttl_secs: float, nonce: int
) -> CapabilityIssue:
    """Return the request that issues a token. The arguments are as for `GpuLease.issue`. Raises InvalidRequest."""
    # Accept only a Permission: the permission must not be guessed from a string or a number.
    if not isinstance(permissions, Permission) or not permissions or permissions & ~ALL_PERMISSIONS:
        raise InvalidRequest(f"issue: permissions must be Permission members, not {quoted(permissions)}")
    if audience is not None and (not isinstance(audience, bytes | bytearray) or len(audience) != AUDIENCE_BYTES):
        raise InvalidRequest(
            f"issue: an audience must be {AUDIENCE_BYTES} bytes, not {quoted(audience)}",
            "Ask the token's holder for its my_audience()",
        )
    return CapabilityIssue(
        lease_id,
        int(permissions),
        bytes(audience or b""),
        milliseconds(ttl_secs, "issue: ttl_secs", least_ms=1),
        whole(nonce, "issue: nonce", least=0, most=MAX_NONCE),
    )
