"""Attenuate a token before you pass it on, without a daemon: needs `pip install '.[tokens]'`.

from gpulease.client.narrowing import attenuate

weaker = attenuate(grant.token, grant.public_key, permissions=Permission.MEM_READ, ttl_secs=10)
"""

import time
from collections.abc import Callable
from typing import Any

from biscuit_auth import Algorithm, AuthorizerBuilder, Biscuit, BiscuitValidationError, BlockBuilder, PublicKey, Rule

from gpulease.client.errors import InvalidRequest
from gpulease.protocol.capabilities import Permission, narrowing_source
from gpulease.protocol.limits import MAX_TOKEN_BYTES

_TIMES = "times($e, $f, $g) <- grant($a, $b, $c, $d, $e, $f, $g, $h)"


def attenuate(
    token: bytes,
    public_key: bytes,
    *,
    permissions: Permission | None = None,
    ttl_secs: float | None = None,
    unix_s: Callable[[], float] = time.time,
) -> bytes:
    """Restrict a token to `permissions` and to `ttl_secs` from now; None leaves that part as it is.

    The daemon's clock is inferred from this machine's date. If the two differ, the new token ends that much earlier or
    later, but never later than the old one. A token can be attenuated seven times.

    Args:
        token: The token.
        public_key: Public part of the key that signed the token, from its Grant.
        permissions: The permissions to keep.
        ttl_secs: The new token's lifetime in seconds from now.
        unix_s: Returns this machine's date, in seconds.

    Raises:
        InvalidRequest: The token is not signed with that key, or no permission or time would be left.
    """
    if ttl_secs is not None and not 0 < ttl_secs < float("inf"):
        raise InvalidRequest(f"attenuate: ttl_secs must be a positive time, not {ttl_secs!r}")
    try:
        # The times are facts of the token's first block, which the node signed.
        biscuit = Biscuit.from_bytes(token, _key(public_key))
        # The policy does not matter, because only the facts are read.
        (times,) = AuthorizerBuilder("allow if true").build(biscuit).query(Rule(_TIMES))
        issued_ms, issued_unix_ms, expires_ms = times.terms
    except (BiscuitValidationError, TypeError, ValueError):
        raise InvalidRequest("attenuate: the token is not signed with that key") from None
    if ttl_secs is not None:
        # The token has its time of issue by two clocks: the daemon's clock, by which it expires, and the date. The time
        # since the issue, by this machine's date, gives the daemon's present time.
        since_ms = int(unix_s() * 1000) - issued_unix_ms
        expires_ms = max(issued_ms, min(expires_ms, issued_ms + since_ms + int(ttl_secs * 1000)))
    try:
        narrowed = bytes(biscuit.append(BlockBuilder(narrowing_source(expires_ms, permissions))).to_bytes())
    except ValueError as error:
        raise InvalidRequest(f"attenuate: {error}") from None
    # Each block makes a token longer, so after several holders it can become too long for a daemon.
    if len(narrowed) > MAX_TOKEN_BYTES:
        raise InvalidRequest(f"attenuate: the token would have more than {MAX_TOKEN_BYTES} bytes")
    return narrowed


def _key(public_key: bytes) -> PublicKey:
    # The library's type stubs lack the algorithm, which the function requires.
    from_bytes: Any = PublicKey.from_bytes
    algorithm: Any = Algorithm
    result: PublicKey = from_bytes(public_key, algorithm.Ed25519)
    return result
