"""Tokens: daemon/capabilities, and what a holder can append to them.

The invariant. Whatever bytes are presented as a token, whether made up, changed, or made by appending to valid tokens:

- no error is raised except CapabilityDenied, and the check takes little time;
- an accepted token claims no more permissions and no longer time than one that the node issued to the same audience,
  and the same lease, tenant, generation and nonce; every appended block has removed what it says;
- it is accepted for no other audience, for no permission that it does not name, and not after its lease was renewed.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from biscuit_auth import Biscuit, BlockBuilder

from gpulease.daemon.capabilities.claims import CapabilityDenied, CapabilityRequest, Claims
from gpulease.daemon.capabilities.tokens import public_key
from gpulease.protocol.capabilities import (
    ALL_PERMISSIONS,
    NODE_LEASE,
    OPERATOR_PERMISSIONS,
    Permission,
    narrowing_source,
    parse_narrowing,
)
from gpulease.protocol.limits import MAX_TOKEN_BYTES
from helpers.token_scene import LEASE, OTHER, Scene

from .draws import Draws
from .vector_seeds import conversations

MAX_BYTES = 2048
SOON_S = 5.0
"""Limit of this thread's own CPU time in seconds. To check a signature takes 0.2 ms."""

LEASE_PERMISSIONS = ALL_PERMISSIONS & ~OPERATOR_PERMISSIONS
SCENE = Scene()
EVE = SCENE.authority.audience_of("eve")
LATE_MS = SCENE.now_ns // 1_000_000 + 3_600_000


def _issued() -> list[tuple[bytes, Claims]]:
    """Return the tokens that the node has issued, most of them to bob."""
    requests = [
        CapabilityRequest(LEASE, LEASE_PERMISSIONS, SCENE.bob, 300),
        CapabilityRequest(LEASE, Permission.MEM_READ, SCENE.bob, 60),
        CapabilityRequest(OTHER, Permission.LEASE_FREE | Permission.REVOKE, SCENE.bob, 200),
        CapabilityRequest(NODE_LEASE, Permission.LEASE_ALLOC, SCENE.bob, 100),
        CapabilityRequest(LEASE, LEASE_PERMISSIONS, EVE, 300),
        CapabilityRequest(OTHER, ALL_PERMISSIONS, EVE, 300),
    ]
    grants = [SCENE.authority.issue(request) for request in requests]
    # Another node signs with a key that has the same number.
    stranger = Scene()
    stranger.ring.rotate(stranger.now_ns, stranger.draw)
    grants.append(stranger.authority.issue(CapabilityRequest(LEASE, ALL_PERMISSIONS, SCENE.bob, 300)))
    return [(grant.token, grant.claims) for grant in grants]


ISSUED = _issued()
OWN = ISSUED[:-1]
BY_NONCE = {claims.nonce: claims for _, claims in OWN}
KEY = public_key(SCENE.ring.signing)


@dataclass
class Appended:
    """What valid blocks have left of a token. None if a block contains anything else."""

    permissions: Permission = ALL_PERMISSIONS
    expires_ms: int = LATE_MS
    is_honest: bool = True
    token: bytes = field(default=b"")


def check(data: bytes) -> None:
    draws = Draws(data)
    match draws.below(8):
        case 0:
            accepted(draws.rest())
        case 1 | 2:
            accepted(edited(draws.pick(ISSUED)[0], draws))
        case 3:
            one, other = draws.pick(ISSUED)[0], draws.pick(ISSUED)[0]
            at, since = draws.number(2) % (len(one) + 1), draws.number(2) % (len(other) + 1)
            accepted(one[:at] + draws.sized(30) + other[since:])
        case 4:
            check_source(draws.rest().decode("utf-8", "replace"))
        case _:
            check_appended(draws)


def accepted(token: bytes) -> Claims | None:
    """Return a token's claims if bob may use it. Checks them against the issued tokens."""
    begun_s = time.thread_time()
    claims = validated(token, SCENE.bob, ALL_PERMISSIONS)
    assert time.thread_time() - begun_s < SOON_S
    assert validated(token, EVE, ALL_PERMISSIONS) is None or claims is None, "one token, two holders"
    if claims is None:
        return None
    original = BY_NONCE[claims.nonce]
    assert claims.permissions
    assert not claims.permissions & ~original.permissions
    assert claims.expires_ms <= original.expires_ms
    assert (claims.lease_id, claims.tenant, claims.generation) == (
        original.lease_id,
        original.tenant,
        original.generation,
    )
    assert claims.audience == original.audience == SCENE.bob
    for permission in Permission:
        assert (validated(token, SCENE.bob, permission) is None) == (not claims.permissions & permission)
    if claims.lease_id != NODE_LEASE:
        facts = SCENE.leases[claims.lease_id]
        SCENE.renew(claims.lease_id)
        assert validated(token, SCENE.bob, ALL_PERMISSIONS) is None, "a renewal kills it"
        SCENE.leases[claims.lease_id] = facts
    return claims


def validated(token: bytes, audience: bytes, permission: Permission) -> Claims | None:
    try:
        return SCENE.authority.validate(token, audience, permission)
    except CapabilityDenied as denied:
        assert str(denied)
        assert denied.hint
        return None


def edited(token: bytes, draws: Draws) -> bytes:
    data = bytearray(token)
    for _ in range(1 + draws.below(4)):
        at = draws.number(2) % (len(data) + 1)
        match draws.below(5):
            case 0 if at < len(data):
                data[at] ^= 1 << draws.below(8)
            case 1 if at < len(data):
                data[at] = draws.byte()
            case 2:
                del data[at : at + 1 + draws.below(40)]
            case 3:
                data[at:at] = draws.sized(40)
            case _:
                since = draws.number(2) % (len(data) + 1)
                data[at:at] = data[since : since + draws.below(80)]
    return bytes(data[: MAX_TOKEN_BYTES + 10])


# --- what holders append ---


def check_source(source: str) -> None:
    """Check that a text that is read as a narrowing, written again, says the same."""
    try:
        expires_ms, permissions = parse_narrowing(source)
    except ValueError:
        return
    assert parse_narrowing(narrowing_source(expires_ms, permissions)) == (expires_ms, permissions)


def check_appended(draws: Draws) -> None:
    """Append blocks that the library accepts, valid or not, and check the token."""
    token, original = draws.pick(OWN)
    left = Appended(original.permissions, original.expires_ms, token=token)
    for _ in range(1 + draws.below(9)):
        if not append(left, draws):
            return
    claims = accepted(left.token)
    if claims is not None:
        assert not claims.permissions & ~left.permissions
        assert claims.expires_ms <= left.expires_ms


def append(left: Appended, draws: Draws) -> bool:
    """Append one block. Returns False if the library itself refuses such a block."""
    way = draws.below(8)
    now_ms = SCENE.now_ns // 1_000_000
    expires_ms = draws.pick((LATE_MS, now_ms + 5000, now_ms, now_ms - 1, now_ms + draws.number(2), 0, 10**17))
    permissions = Permission(draws.byte())
    source = narrowing_source(expires_ms, permissions or None)
    if way < 3:
        left.permissions &= permissions or ALL_PERMISSIONS
        left.expires_ms = min(left.expires_ms, expires_ms)
    elif way == 3:
        source += draws.pick(SOURCES)
    elif way == 4:
        source = draws.pick(SOURCES)
    elif way == 5:
        source = draws.sized(200).decode("utf-8", "replace")
    else:
        at = draws.below(len(source))
        source = source[:at] + draws.sized(20).decode("utf-8", "replace") + source[at + draws.below(20) :]
    try:
        biscuit = Biscuit.from_bytes(left.token, KEY)
        left.token = bytes(biscuit.append(BlockBuilder(source)).to_bytes())
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        # The source is invalid. The library's panics are not Exceptions.
        return False
    return True


SOURCES = (
    'permit("REVOKE");',
    'grant("00", "eve", 1, hex:00, 1, 1, 99999999999999, hex:00);',
    "permit($p) <- permission($p);",
    "check if true;",
    "check if time($t), $t >= 0;",
    "check if time($t), $t <= 99999999999999999;",
    'check all permission($p), {"MEM_READ"}.contains($p);',
    'check if permission($p), {"MEM_READ"}.contains($p) or true;',
    'check if permission($p), {"MEM_READ", "REVOKE"}.contains($p);',
    'check if permission("MEM_READ");',
    "reject if false;",
    'check if permission($p), ["MEM_READ"].contains($p);',
    "check if time($t), $t <= 2030-01-01T00:00:00Z;",
    "",
)


def seeds() -> Iterator[bytes]:
    """Yield the token messages of the vectors, as tokens; then edits, splices and blocks of every kind."""
    for steps in conversations().values():
        for _, _, wire in steps:
            if wire[6] == 3:
                yield b"\0" + wire[44:]
    for number, (token, _) in enumerate(ISSUED):
        yield b"\0" + token
        yield bytes([1, number, 0, 1, 0, 0, 200, 3])
        for other in range(len(ISSUED)):
            yield bytes([3, number, other, 0, 120, 0, 0, 120])
        for way in range(8):
            for expiry in range(7):
                yield bytes([5, number, 0, way, expiry, 0, 9, 0x18, 3, 40]) + b"check if"
    for permissions in (0x10, 0x18, 0xFF):
        yield bytes([5, 0, 3]) + bytes([0, 1, permissions]) * 4
        yield b"\4" + narrowing_source(LATE_MS, Permission(permissions)).encode()
    for number in range(len(SOURCES)):
        yield bytes([5, 0, 0, 4, 0, 0x10, number])
        yield bytes([5, 0, 0, 3, 0, 0x10, number])
