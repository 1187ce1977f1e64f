"""Whatever bytes come as a token, and whatever a holder appended to one: refused, typed, and soon."""

import random
import time

import pytest
from biscuit_auth import Biscuit, BlockBuilder, KeyPair
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.capabilities.claims import CapabilityDenied, TokenCheck
from gpulease.daemon.capabilities.tokens import MAX_BLOCKS, public_key
from gpulease.protocol.capabilities import ALL_PERMISSIONS, Permission, narrowing_source
from gpulease.protocol.limits import MAX_TOKEN_BYTES
from helpers.token_scene import Scene

SCENE = Scene()
TOKEN = SCENE.token(ALL_PERMISSIONS, 300)
MUTATIONS = 1500
SOON_S = 5.0
BOMB = "".join(f"f({number});" for number in range(200)) + "check if f($a), f($b), f($c), $a > $b, $b > $c, $c > $a"
LATE = 10**9


def appended(token: bytes, source: str) -> bytes:
    biscuit = Biscuit.from_bytes(token, public_key(SCENE.ring.signing))
    return bytes(biscuit.append(BlockBuilder(source)).to_bytes())


def check_refused_or_weaker(token: bytes) -> TokenCheck | None:
    """Which check it fails; if none, it must say no more than the token it was made of."""
    try:
        claims = SCENE.authority.validate(token, SCENE.bob, ALL_PERMISSIONS)
    except CapabilityDenied as denied:
        return denied.check
    original = SCENE.authority.validate(TOKEN, SCENE.bob, ALL_PERMISSIONS)
    assert claims.permissions & ~original.permissions == 0
    assert claims.expires_ms <= original.expires_ms
    assert (claims.lease_id, claims.tenant, claims.nonce) == (original.lease_id, original.tenant, original.nonce)
    return None


def mutated(dice: random.Random, token: bytes) -> bytes:
    data = bytearray(token)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data))
        match dice.randrange(5):
            case 0:
                data[at] ^= 1 << dice.randrange(8)
            case 1:
                data[at] = dice.randrange(256)
            case 2:
                del data[at : at + dice.randint(1, 40)]
            case 3:
                data[at:at] = dice.randbytes(dice.randint(1, 40))
            case _:
                start = dice.randrange(len(data))
                data[at:at] = data[start : start + dice.randint(1, 80)]
        if not data:
            return b""
    return bytes(data)


@given(st.binary(max_size=MAX_TOKEN_BYTES + 10))
@settings(max_examples=150, deadline=None)
def test_any_bytes(data: bytes) -> None:
    assert check_refused_or_weaker(data) is TokenCheck.MALFORMED


def test_mutated_tokens() -> None:
    dice = random.Random(11)
    narrowed = appended(TOKEN, narrowing_source(LATE, Permission.MEM_READ))
    for number in range(MUTATIONS):
        check_refused_or_weaker(mutated(dice, (TOKEN, narrowed)[number % 2]))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "source",
    [
        BOMB,
        'permit("REVOKE")',
        'grant("00", "eve", 1, hex:00, 1, 1, 99999999999999, hex:00)',
        "permit($p) <- permission($p)",
        f"check if time($t), $t <= {LATE} or true",
        "check if true",
        "check if time($t), $t <= -5",
        'check if permission($p), {"MEM_READ"}.contains($p)',
        f'check if time($t), $t <= {LATE}; check if permission($p), {{"NONE"}}.contains($p)',
        f"check if time($t), $t <= {LATE}; check if time($t), $t <= {LATE}",
        f'check if time($t), $t <= {LATE}; f("x")',
        'check if "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa".matches("(a*)*b")',
    ],
)
def test_a_block_that_says_anything_else_is_refused_unread(source: str) -> None:
    token = appended(TOKEN, source)
    begun_s = time.thread_time()
    assert check_refused_or_weaker(token) is TokenCheck.MALFORMED
    assert time.thread_time() - begun_s < SOON_S


def test_a_block_that_others_signed_is_refused() -> None:
    biscuit = Biscuit.from_bytes(TOKEN, public_key(SCENE.ring.signing))
    outsider = KeyPair()
    source = narrowing_source(LATE, Permission.MEM_READ)
    block = biscuit.third_party_request().create_block(outsider.private_key, BlockBuilder(source))
    token = bytes(biscuit.append_third_party(outsider.public_key, block).to_bytes())
    assert check_refused_or_weaker(token) is TokenCheck.MALFORMED


def test_too_many_blocks_and_bytes() -> None:
    token = TOKEN
    for _ in range(MAX_BLOCKS - 1):
        token = appended(token, narrowing_source(LATE, None))
    assert check_refused_or_weaker(token) is None
    assert check_refused_or_weaker(appended(token, narrowing_source(LATE, None))) is TokenCheck.MALFORMED
    assert check_refused_or_weaker(TOKEN + bytes(MAX_TOKEN_BYTES)) is TokenCheck.MALFORMED


def test_blocks_only_take_away() -> None:
    now_ms = SCENE.now_ns // 1_000_000
    token = appended(TOKEN, narrowing_source(now_ms + 5000, Permission.MEM_READ | Permission.MEM_WRITE))
    token = appended(token, narrowing_source(now_ms + 9000, Permission.MEM_READ | Permission.REVOKE))
    claims = SCENE.authority.validate(token, SCENE.bob, Permission.MEM_READ)
    assert (claims.permissions, claims.expires_ms) == (Permission.MEM_READ, now_ms + 5000)
    for permission in set(Permission) - {Permission.MEM_READ}:
        assert SCENE.refused(token, permission) is TokenCheck.PERMISSION
    empty = appended(token, narrowing_source(LATE, Permission.REVOKE))
    assert SCENE.refused(empty) is TokenCheck.PERMISSION
    over = appended(token, narrowing_source(now_ms - 1, None))
    assert SCENE.refused(over) is TokenCheck.EXPIRED
