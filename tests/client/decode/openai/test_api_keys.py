"""API keys in headers: each key's tenant, keys with any characters, and the refusal of keys that are too long."""

import hashlib

import pytest

from gpulease.client.decode.openai.api_keys import MAX_KEY_BYTES, bearer_digest, distinct_keys, key_digest

NAMED = "schl\u00fcssel-\u00e0"
KEYS = distinct_keys({"ann": key_digest("key-of-ann"), "bob": key_digest(NAMED)})


def header(key: bytes) -> str:
    """Return a header as an ASGI framework passes it."""
    return (b"Bearer " + key).decode("latin-1")


@pytest.mark.parametrize("said", ["Bearer key-of-ann", "bearer key-of-ann", "BEARER   key-of-ann \t"])
def test_the_scheme_has_any_case_and_white_space_around_the_key_is_none_of_it(said: str) -> None:
    assert KEYS.tenant(said) == "ann"


def test_a_key_in_utf_8_is_the_one_that_was_hashed() -> None:
    """The key's last byte is a space in Latin-1."""
    assert KEYS.tenant(header(NAMED.encode())) == "bob"
    assert KEYS.tenant(header(NAMED.encode("latin-1"))) is None


@pytest.mark.parametrize("said", ["", "Bearer", "Bearer ", "Basic key-of-ann", "key-of-ann", "Bearer key-of-anna"])
def test_others_are_nobody_s(said: str) -> None:
    assert KEYS.tenant(said) is None


def test_a_key_that_is_too_long_is_not_hashed() -> None:
    longest = b"\xff" * MAX_KEY_BYTES
    assert bearer_digest(header(longest)) == hashlib.sha256(longest).digest()
    assert bearer_digest(header(longest + b"x")) is None
