"""Tokens as bytes: the only module that imports the Biscuit library.

A holder can append blocks with any program to a token, and the library accepts their signatures. A check that joins
three lists of facts runs for seconds, and the library checks its time limit only between rounds. So no block is
evaluated unless `protocol.capabilities.narrowing_source` could have written it.
"""

from collections import OrderedDict
from datetime import timedelta
from typing import Any, Final

from biscuit_auth import (
    Algorithm,
    AuthorizationError,
    AuthorizerBuilder,
    Biscuit,
    BiscuitBuilder,
    KeyPair,
    PrivateKey,
    PublicKey,
    Rule,
)

from gpulease.daemon.capabilities.claims import CapabilityDenied, Claims, TokenCheck
from gpulease.daemon.capabilities.keys import Key, KeyRing
from gpulease.protocol.capabilities import Permission, names_of, parse_narrowing, permissions_of
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.limits import AUDIENCE_BYTES, MAX_TOKEN_BYTES

MAX_BLOCKS: Final = 8
"""Maximum number of blocks of one token, including the daemon's. Each costs a signature check of about 50 us."""

EVALUATION_LIMIT: Final = timedelta(seconds=1)
"""The library's default of 1 ms refuses valid tokens on a busy host. An evaluation here takes about 20 us, so only
a host that does not schedule this process reaches the limit."""

MAX_FACTS: Final = 256
"""Maximum number of facts of one evaluation. The daemon's own block has a dozen."""

MAX_ITERATIONS: Final = 8
"""Maximum number of rounds of one evaluation. Without rules, one is enough."""

_SOURCE: Final = (
    "grant({lease}, {tenant}, {generation}, {audience}, {issued_ms}, {issued_unix_ms}, {expires_ms}, {nonce});"
)
_CLAIMS: Final = "claims($a, $b, $c, $d, $e, $f, $g, $h) <- grant($a, $b, $c, $d, $e, $f, $g, $h)"
_PERMITTED: Final = "permitted($p) <- permit($p)"
_BROKEN: Final = "Get a new token: this one was damaged, or something that no daemon accepts was appended to it."


@dataclass(frozen=True, slots=True)
class Opened:
    """A token with valid signatures, its claims, and the key of its first signature."""

    claims: Claims
    biscuit: Biscuit
    key: Key


MAX_RECENT: Final = 256
"""Maximum number of tokens that `RecentTokens` keeps, at most 1 MiB."""


class RecentTokens:
    """The tokens that were minted or opened last, so that each token's signatures are checked once.

    A signature stays valid for as long as the ring has its key, which `open` checks each time. Nothing else about a
    token is kept: the caller checks its end, its lease and its use.
    """

    def __init__(self) -> None:
        self._opened: OrderedDict[bytes, Opened] = OrderedDict()

    def mint(self, key: Key, claims: Claims, issued_ms: int, issued_unix_ms: int) -> bytes:
        """Return a signed token with these claims, as `mint` makes it."""
        biscuit = mint(key, claims, issued_ms, issued_unix_ms)
        token = bytes(biscuit.to_bytes())
        self._keep(token, Opened(claims, biscuit, key))
        return token

    def open(self, token: bytes, ring: KeyRing, now_ns: int) -> Opened:
        """Return the result of `open_token`, and raise its errors."""
        opened = self._opened.get(token)
        if opened is not None:
            key = ring.get(opened.key.number, now_ns)
            if key is not None and key.private == opened.key.private:
                return opened
        opened = open_token(token, ring, now_ns)
        self._keep(token, opened)
        return opened

    def _keep(self, token: bytes, opened: Opened) -> None:
        self._opened[token] = opened
        if len(self._opened) > MAX_RECENT:
            self._opened.popitem(last=False)


def mint(key: Key, claims: Claims, issued_ms: int, issued_unix_ms: int) -> Biscuit:
    """Return a signed token with these claims. The times are its time of issue, monotonic and by the wall clock."""
    source = _SOURCE + "".join(f'permit("{name}");' for name in names_of(claims.permissions))
    builder = BiscuitBuilder(
        source,
        {
            "lease": f"{claims.lease_id:032x}",
            "tenant": claims.tenant,
            "generation": claims.generation,
            "audience": claims.audience,
            "issued_ms": issued_ms,
            "issued_unix_ms": issued_unix_ms,
            "expires_ms": claims.expires_ms,
            "nonce": claims.nonce,
        },
    )
    # The number lets a verifier choose the key after a rotation.
    builder.set_root_key_id(key.number)
    return builder.build(_private(key))


def public_key(key: Key) -> PublicKey:
    """Return the public key that verifies a key's signatures."""
    return KeyPair.from_private_key(_private(key)).public_key


def open_token(token: bytes, ring: KeyRing, now_ns: int) -> Opened:
    """Check a token's signatures and read it. Raises CapabilityDenied: MALFORMED or UNKNOWN_KEY."""
    # Check the length before parsing, which takes time in proportion to the length.
    if len(token) > MAX_TOKEN_BYTES:
        raise _malformed(f"a token must have at most {MAX_TOKEN_BYTES} bytes, not {len(token)}")
    # The library hides the callback's error, so record the key, or the number of an unknown key, here.
    matches: list[Key] = []
    unknown: list[int | None] = []

    def verify_with(number: int | None = None) -> PublicKey:
        key = ring.get(number, now_ns)
        if key is None:
            unknown.append(number)
            raise KeyError(number)
        matches.append(key)
        return public_key(key)

    try:
        biscuit = Biscuit.from_bytes(token, verify_with)
        return Opened(_read(biscuit), biscuit, matches[-1])
    except CapabilityDenied:
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # A panic inside the library arrives as a BaseException.
        if unknown:
            raise CapabilityDenied(
                TokenCheck.UNKNOWN_KEY,
                f"the token was signed with key {unknown[0]}, which no longer belongs to this node",
                "Get a new token from this node.",
            ) from None
        raise _malformed(f"the token can't be read: {type(error).__name__}") from None


def agrees(opened: Opened, now_ms: int, permission: Permission) -> bool:
    """Return whether the token's own checks pass for this permission now, evaluated by the library."""
    # The daemon's block has facts but no check, so a token without appended blocks has nothing to evaluate.
    if opened.biscuit.block_count() == 1:
        return True
    source = "time({now}); permission({name}); allow if true"
    authorizer = _limited(source, {"now": now_ms, "name": str(permission.name)}).build(opened.biscuit)
    try:
        authorizer.authorize()
    except AuthorizationError:
        return False
    return True


def _read(biscuit: Biscuit) -> Claims:
    # Block 0 is the daemon's. Every other block may only narrow, with fewer permissions or an earlier end.
    count = biscuit.block_count()
    if count > MAX_BLOCKS:
        raise _malformed(f"a token must have at most {MAX_BLOCKS} blocks, not {count}")
    remaining, narrowed_ms = None, None
    for number in range(1, count):
        # A third party's block would be evaluated with separate facts.
        if biscuit.block_external_key(number) is not None:
            raise _malformed(f"block {number} is signed by a third party")
        try:
            # The source must be exactly what `narrowing_source` writes; see the module's docstring.
            expires_ms, permissions = parse_narrowing(biscuit.block_source(number))
        except ValueError as error:
            raise _malformed(f"block {number}: {error}") from None
        remaining = permissions if remaining is None else remaining & permissions
        narrowed_ms = expires_ms if narrowed_ms is None else min(narrowed_ms, expires_ms)
    # The effective claims: the daemon's, cut by every block.
    claims = _authority(biscuit)
    return Claims(
        claims.lease_id,
        claims.tenant,
        claims.generation,
        claims.permissions if remaining is None else claims.permissions & remaining,
        claims.audience,
        claims.expires_ms if narrowed_ms is None else min(claims.expires_ms, narrowed_ms),
        claims.nonce,
    )


def _authority(biscuit: Biscuit) -> Claims:
    """Return the claims of the first block, which the daemon signed. Queries do not use the facts of other blocks."""
    authorizer = _limited("allow if true", {}).build(biscuit)
    (fact,) = authorizer.query(Rule(_CLAIMS))
    lease, tenant, generation, audience, _, _, expires_ms, nonce = fact.terms
    permissions = permissions_of(name for permit in authorizer.query(Rule(_PERMITTED)) for name in permit.terms)
    if len(audience) != AUDIENCE_BYTES:
        raise _malformed("its audience has the wrong length")
    return Claims(int(lease, 16), tenant, generation, permissions, bytes(audience), expires_ms, bytes(nonce))


def _limited(source: str, parameters: dict[str, Any]) -> AuthorizerBuilder:
    # The library's stubs lack its limits.
    builder: Any = AuthorizerBuilder(source, parameters)
    limits = builder.limits()
    limits.max_time, limits.max_facts, limits.max_iterations = EVALUATION_LIMIT, MAX_FACTS, MAX_ITERATIONS
    builder.set_limits(limits)
    result: AuthorizerBuilder = builder
    return result


def _private(key: Key) -> PrivateKey:
    # The stubs lack the algorithm, too, without which bytes can't be read as a key.
    from_bytes: Any = PrivateKey.from_bytes
    algorithm: Any = Algorithm
    result: PrivateKey = from_bytes(key.private, algorithm.Ed25519)
    return result


def _malformed(message: str) -> CapabilityDenied:
    return CapabilityDenied(TokenCheck.MALFORMED, message, _BROKEN)
