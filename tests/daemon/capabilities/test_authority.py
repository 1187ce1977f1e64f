"""What a token is good for, and for how long."""

import pytest
from biscuit_auth import PublicKey

from gpulease.daemon.capabilities import tokens
from gpulease.daemon.capabilities.authority import KEY_LIFE_S, MAX_NONCES_PER_LEASE
from gpulease.daemon.capabilities.claims import MAX_TOKEN_TTL_S, CapabilityDenied, CapabilityRequest, TokenCheck
from gpulease.daemon.capabilities.keys import Key, KeyRing
from gpulease.daemon.capabilities.tokens import public_key
from gpulease.protocol.capabilities import NODE_LEASE, SESSION_PERMISSIONS, Permission
from helpers.token_scene import LEASE, OTHER, S, Scene


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_token_says_what_was_asked_for(scene: Scene) -> None:
    wanted = Permission.MEM_READ | Permission.TASKLET_SUBMIT
    request = CapabilityRequest(LEASE, wanted, scene.bob).ttl_secs(30).nonce(b"n" * 16)
    grant = scene.authority.issue(request)
    for permission in (Permission.MEM_READ, Permission.TASKLET_SUBMIT, SESSION_PERMISSIONS):
        assert scene.authority.validate(grant.token, scene.bob, permission) == grant.claims
    claims = grant.claims
    assert (claims.lease_id, claims.tenant, claims.generation) == (LEASE, "ann", 1)
    assert (claims.permissions, claims.audience, claims.nonce) == (wanted, scene.bob, b"n" * 16)
    assert claims.expires_ns == scene.now_ns + 30 * S
    for permission in set(Permission) - set(wanted):
        assert scene.refused(grant.token, permission) is TokenCheck.PERMISSION


def count_checks(monkeypatch: pytest.MonkeyPatch) -> list[Key]:
    """The keys with which signatures are checked from now on."""
    checked: list[Key] = []

    def counted(key: Key) -> PublicKey:
        checked.append(key)
        return public_key(key)

    monkeypatch.setattr(tokens, "public_key", counted)
    return checked


def test_its_signatures_are_checked_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    token = scene.token()
    checked = count_checks(monkeypatch)
    # The authority that minted it checks nothing; another one of this node checks it the first time.
    minted = scene.authority.validate(token, scene.bob, Permission.MEM_READ)
    assert not checked
    after = scene.restarted()
    for _ in range(2):
        assert after.validate(token, scene.bob, Permission.MEM_READ) == minted
        assert len(checked) == 1
    # One changed byte makes another token.
    with pytest.raises(CapabilityDenied):
        after.validate(token[:-1] + bytes([token[-1] ^ 1]), scene.bob, Permission.MEM_READ)
    assert len(checked) == 2


def test_it_is_forgotten_with_its_key(scene: Scene) -> None:
    token = scene.token()
    scene.authority.validate(token, scene.bob, Permission.MEM_READ)
    scene.authority.rotate()
    assert scene.authority.validate(token, scene.bob, Permission.MEM_READ)
    scene.ring.replace_all()
    assert scene.refused(token) is TokenCheck.UNKNOWN_KEY


def test_old_tokens_are_verified_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    token = scene.token()
    monkeypatch.setattr(tokens, "MAX_RECENT", 1)
    scene.token()
    checked = count_checks(monkeypatch)
    assert scene.authority.validate(token, scene.bob, Permission.MEM_READ)
    assert len(checked) == 1


def test_it_ends_on_the_dot(scene: Scene) -> None:
    token = scene.token(ttl_s=30)
    claims = scene.authority.validate(token, scene.bob, Permission.MEM_READ)
    scene.later(29.999)
    assert scene.authority.validate(token, scene.bob, Permission.MEM_READ)
    assert scene.authority.holds(claims)
    scene.later(0.001)
    assert scene.refused(token) is TokenCheck.EXPIRED
    assert not scene.authority.holds(claims)


def test_the_wall_clock_has_no_say(scene: Scene) -> None:
    token = scene.token(ttl_s=30)
    for step in (-1e6, 2e6):
        scene.unix_s += step
        assert scene.authority.validate(token, scene.bob, Permission.MEM_READ)


def test_it_never_outlives_its_lease(scene: Scene) -> None:
    scene.later(990)
    assert scene.authority.issue(CapabilityRequest(LEASE, Permission.MEM_READ, scene.bob, 60)).claims.expires_ns == (
        scene.leases[LEASE].deadline_ns
    )
    token = scene.token()
    del scene.leases[LEASE]
    assert scene.refused(token) is TokenCheck.LEASE


def test_a_renewal_ends_it(scene: Scene) -> None:
    token = scene.token()
    claims = scene.authority.validate(token, scene.bob, Permission.MEM_READ)
    scene.renew()
    assert scene.refused(token) is TokenCheck.GENERATION
    assert not scene.authority.holds(claims)
    assert scene.authority.validate(scene.token(), scene.bob, Permission.MEM_READ)


def test_another_holder_or_node_can_not_use_it(scene: Scene) -> None:
    token = scene.token()
    other_node = KeyRing.fresh(0)
    assert other_node.node_id != scene.ring.node_id
    for audience in (scene.authority.audience_of("eve"), b"", bytes(32)):
        with pytest.raises(CapabilityDenied) as caught:
            scene.authority.validate(token, audience, Permission.MEM_READ)
        assert caught.value.check is TokenCheck.AUDIENCE


def test_it_is_used_once(scene: Scene) -> None:
    token = scene.token()
    claims = scene.authority.validate(token, scene.bob, Permission.MEM_READ)
    scene.authority.use(claims)
    assert scene.refused(token) is TokenCheck.REPLAYED
    with pytest.raises(CapabilityDenied, match="nonce"):
        scene.authority.issue(CapabilityRequest(LEASE, Permission.MEM_READ, scene.bob).nonce(claims.nonce))
    # The nonce of one lease is nothing to another's.
    assert scene.authority.issue(CapabilityRequest(OTHER, Permission.MEM_READ, scene.bob).nonce(claims.nonce))


def test_who_mints_in_a_loop_shuts_out_nobody_else(scene: Scene) -> None:
    for _ in range(MAX_NONCES_PER_LEASE):
        scene.authority.use(scene.authority.validate(scene.token(), scene.bob, Permission.MEM_READ))
    assert scene.refused(scene.token()) is TokenCheck.REPLAYED
    other = scene.authority.issue(CapabilityRequest(OTHER, Permission.MEM_READ, scene.bob)).token
    assert scene.authority.validate(other, scene.bob, Permission.MEM_READ)
    scene.later(MAX_TOKEN_TTL_S + 1)
    assert scene.authority.validate(scene.token(), scene.bob, Permission.MEM_READ)


def test_a_token_about_the_node_needs_no_lease(scene: Scene) -> None:
    grant = scene.authority.issue(CapabilityRequest(NODE_LEASE, Permission.LEASE_ALLOC, scene.bob))
    assert scene.authority.validate(grant.token, scene.bob, Permission.LEASE_ALLOC) == grant.claims


@pytest.mark.parametrize(
    "wrong",
    [
        CapabilityRequest(LEASE, Permission(0), bytes(32)),
        CapabilityRequest(LEASE, Permission.MEM_READ, bytes(31)),
        CapabilityRequest(LEASE, Permission.MEM_READ, bytes(32)).ttl_secs(0),
        CapabilityRequest(LEASE, Permission.MEM_READ, bytes(32)).ttl_secs(MAX_TOKEN_TTL_S + 0.001),
        CapabilityRequest(LEASE, Permission.MEM_READ, bytes(32)).ttl_secs(float("nan")),
        CapabilityRequest(LEASE, Permission.MEM_READ, bytes(32)).nonce(b"n" * 15),
    ],
)
def test_what_makes_no_sense_is_not_issued(scene: Scene, wrong: CapabilityRequest) -> None:
    with pytest.raises(CapabilityDenied) as caught:
        scene.authority.issue(wrong)
    assert caught.value.check is TokenCheck.REQUEST


def test_nothing_is_issued_for_a_lease_that_is_not_there(scene: Scene) -> None:
    with pytest.raises(CapabilityDenied) as caught:
        scene.authority.issue(CapabilityRequest(0xDEAD, Permission.MEM_READ, scene.bob))
    assert caught.value.check is TokenCheck.LEASE


def test_old_keys_verify_until_their_tokens_are_over(scene: Scene) -> None:
    token = scene.token(ttl_s=MAX_TOKEN_TTL_S)
    scene.authority.rotate()
    assert scene.saved == 1
    scene.later(MAX_TOKEN_TTL_S - 1)
    assert scene.authority.validate(token, scene.bob, Permission.MEM_READ)
    assert scene.authority.validate(scene.token(), scene.bob, Permission.MEM_READ)
    scene.later(2)
    assert scene.refused(token) is TokenCheck.UNKNOWN_KEY
    assert len(scene.ring.all(scene.now_ns)) == 1


def test_a_key_signs_for_a_day(scene: Scene) -> None:
    scene.leases[LEASE] = scene.leases[OTHER].__class__("ann", 1, scene.now_ns + 10 * KEY_LIFE_S * S)
    scene.token()
    assert scene.ring.signing.number == 1
    scene.later(KEY_LIFE_S + 1)
    scene.token()
    assert (scene.ring.signing.number, scene.saved) == (2, 1)


def test_another_nodes_signature_is_none(scene: Scene) -> None:
    token, other = scene.token(), Scene()
    other.ring.rotate(other.now_ns)  # its own key 2, where this node's tokens are of key 1
    other.ring.replace_all()
    assert other.refused(token) is TokenCheck.UNKNOWN_KEY
    same_number = Scene()
    same_number.ring.__init__(scene.ring.node_id, [(1, b"k" * 32)], scene.now_ns)  # type: ignore[misc]
    assert same_number.refused(token) is TokenCheck.MALFORMED
