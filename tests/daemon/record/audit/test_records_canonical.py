import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.record.audit.records import MAX_DEPTH, MAX_INTEGER, NotCanonical, canonical_bytes, value_of

from .chains import ANY_SPEED

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | texts
keys = st.text("abcXYZ019_", min_size=1, max_size=5)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=12
)

ESCAPES = {8: r"\b", 9: r"\t", 10: r"\n", 12: r"\f", 13: r"\r", 34: r"\"", 92: r"\\"}


def plainly(value: Any) -> str:
    """RFC 8785 once more, from its text."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{plainly(key)}:{plainly(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(plainly, value)) + "]"
    if isinstance(value, str):
        codes = [(ESCAPES.get(ord(c)) or f"\\u{ord(c):04x}") if ord(c) < 32 or c in '"\\' else c for c in value]
        return f'"{"".join(codes)}"'
    return "null" if value is None else str(value) if not isinstance(value, bool) else str(value).lower()


@ANY_SPEED
@given(values)
def test_it_is_what_the_standard_says(value: Any) -> None:
    data = canonical_bytes(value)
    assert data.decode() == plainly(value)
    assert value_of(data) == value == json.loads(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b'{"b":1,"a":2}', "not in canonical form"),
        (b'{"a":1,"a":1}', "not in canonical form"),
        (b'{"a": 1}', "not in canonical form"),
        (b'"\\u0041"', "not in canonical form"),
        (b'"\\u001F"', "not in canonical form"),
        (b"01", "not JSON"),
        (b"-0", "not in canonical form"),
        (b"1.0", "1.0 is not an integer"),
        (b"1e3", "not an integer"),
        (b"NaN", "NaN is not an integer"),
        (b"9007199254740992", "beyond"),
        (b"9" * 5000, "not JSON"),
        (b'{"a b":1}', "a key"),
        (b'"\xff"', "not JSON"),
        (b'"\\ud800"', "surrogate"),
        (b"[" * 20_000, "not JSON"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "deep"),
        (b"", "not JSON"),
    ],
)
def test_what_is_not_canonical(data: bytes, why: str) -> None:
    with pytest.raises(NotCanonical, match=why):
        value_of(data)


@pytest.mark.parametrize("value", [1.5, {1: 2}, {"a-b": 1}, 2**53, -(2**53), b"x", object(), "\ud800"])
def test_what_has_no_canonical_form(value: Any) -> None:
    with pytest.raises(NotCanonical):
        canonical_bytes(value)


@ANY_SPEED
@given(st.binary(max_size=60))
def test_no_bytes_do_harm(data: bytes) -> None:
    try:
        value = value_of(data)
    except NotCanonical:
        return
    assert canonical_bytes(value) == data
