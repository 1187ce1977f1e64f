"""A request's key and hash: equal to the vectors of other languages, and different for any two requests."""

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client import InvalidRequest
from gpulease.client.serve.gateway.ledger import MAX_ID_BYTES, operation_hash, operation_key, operation_payload

from .generate_vectors import FILE, document

CASES: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
HEADS = (b"gpu", b"inference", b"serve", b"gpulease.inference.v1")

IDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=4).filter(str.isprintable)
REQUESTS = st.tuples(IDS, IDS, st.integers(1, 2**64 - 1), st.binary(max_size=12))


def test_the_file_is_what_the_code_makes() -> None:
    assert FILE.read_text(encoding="utf-8") == document()


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["key"][:20]))
def test_a_vector_made_by_hand(case: dict[str, Any]) -> None:
    payload = case["request_id"].encode() + b"\0" + case["model_id"].encode() + b"\0"
    payload += int(case["output_len"], 16).to_bytes(8, "big") + bytes.fromhex(case["input"])
    framed = b"".join(len(field).to_bytes(4, "big") + field for field in (*HEADS, payload))
    assert case["key"] == "inference:" + case["request_id"]
    assert case["payload"] == payload.hex()
    assert case["sha256"] == hashlib.sha256(framed).hexdigest()


def test_the_vectors_differ() -> None:
    assert len({case["sha256"] for case in CASES}) == len(CASES)


@given(REQUESTS, REQUESTS)
def test_two_requests_have_the_same_payload_only_if_they_are_the_same(
    one: tuple[str, str, int, bytes], other: tuple[str, str, int, bytes]
) -> None:
    assert (operation_payload(*one) == operation_payload(*other)) == (one == other)
    assert (operation_hash(*one) == operation_hash(*other)) == (one == other)


@given(REQUESTS)
def test_a_payload_can_be_taken_apart(request: tuple[str, str, int, bytes]) -> None:
    first, second, rest = operation_payload(*request).split(b"\0", 2)
    assert (first.decode(), second.decode(), int.from_bytes(rest[:8], "big"), rest[8:]) == request


@pytest.mark.parametrize(
    "text", ["", "a\0b", "a\nb", "\ud800", "x" * (MAX_ID_BYTES + 1), "é" * (MAX_ID_BYTES // 2 + 1)]
)
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(InvalidRequest, match="request id"):
        operation_key(text)
    with pytest.raises(InvalidRequest, match="model id"):
        operation_hash("r", text, 1, b"")


@pytest.mark.parametrize("output_len", [0, -1, 2**64])
def test_what_is_no_output_length(output_len: int) -> None:
    with pytest.raises(InvalidRequest, match="output"):
        operation_hash("r", "m", output_len, b"")
