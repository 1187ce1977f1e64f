"""What a holder takes away from a token, without a daemon; the daemon's own authority says what is left."""

import pytest

from gpulease.client import InvalidRequest, Permission
from gpulease.client.narrowing import attenuate
from gpulease.daemon.capabilities.authority import CapabilityAuthority, LeaseFacts
from gpulease.daemon.capabilities.claims import CapabilityRequest, TokenGrant
from gpulease.daemon.capabilities.keys import KeyRing

S = 1_000_000_000
WANTED = Permission.MEM_READ | Permission.MEM_WRITE
NOW_NS = 77 * S
UNIX_S = 1_790_000_000.25
AUDIENCE = bytes(32)


def authority(at_ns: int = NOW_NS) -> CapabilityAuthority:
    ring = KeyRing(b"i" * 32, [(1, b"k" * 32)], at_ns)
    lease = LeaseFacts("ann", 1, NOW_NS + 1000 * S)
    return CapabilityAuthority(ring, {5: lease}.get, clock_ns=lambda: at_ns, unix_s=lambda: UNIX_S)


@pytest.fixture
def grant() -> TokenGrant:
    return authority().issue(CapabilityRequest(5, WANTED, AUDIENCE).ttl_secs(60))


@pytest.mark.parametrize(
    ("permissions", "ttl_s", "passed_s", "left", "expires_s"),
    [
        (Permission.MEM_READ, None, 0, Permission.MEM_READ, 60),
        (None, 10, 0, WANTED, 10),
        (None, 10, 20, WANTED, 30),
        (None, 10, 55, WANTED, 60),
        (None, 1000, 0, WANTED, 60),
        (Permission.MEM_READ | Permission.REVOKE, 0.5, 1, Permission.MEM_READ, 1.5),
        # A holder whose date is wrong narrows by more or by less, never to more than there was.
        (None, 10, -3600, WANTED, 0.001),
        (None, 10, 3600, WANTED, 60),
    ],
)
def test_what_is_left(
    grant: TokenGrant,
    permissions: Permission | None,
    ttl_s: float | None,
    passed_s: float,
    left: Permission,
    expires_s: float,
) -> None:
    narrowed = attenuate(
        grant.token, grant.public_key, permissions=permissions, ttl_secs=ttl_s, unix_s=lambda: UNIX_S + passed_s
    )
    if expires_s > 0.01:
        claims = authority().validate(narrowed, AUDIENCE, Permission.MEM_READ)
        assert claims.permissions == left
        assert claims.expires_ns == NOW_NS + int(expires_s * S)
    else:
        with pytest.raises(Exception, match="expired"):
            authority().validate(narrowed, AUDIENCE, Permission.MEM_READ)


def test_again_and_again_until_no_daemon_takes_it(grant: TokenGrant) -> None:
    token = grant.token
    for _ in range(7):
        token = attenuate(token, grant.public_key, permissions=Permission.MEM_READ)
        assert authority().validate(token, AUDIENCE, Permission.MEM_READ).permissions == Permission.MEM_READ
    with pytest.raises(Exception, match="blocks"):
        authority().validate(attenuate(token, grant.public_key), AUDIENCE, Permission.MEM_READ)


def test_what_can_not_be_narrowed(grant: TokenGrant) -> None:
    for token, key in ((b"", grant.public_key), (grant.token, bytes(32)), (grant.token[:-1], grant.public_key)):
        with pytest.raises(InvalidRequest, match="not signed with that key"):
            attenuate(token, key, permissions=Permission.MEM_READ)
    for ttl_s in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InvalidRequest, match="ttl_secs must be"):
            attenuate(grant.token, grant.public_key, ttl_secs=ttl_s)
    with pytest.raises(InvalidRequest, match="permits nothing"):
        attenuate(grant.token, grant.public_key, permissions=Permission(0))
