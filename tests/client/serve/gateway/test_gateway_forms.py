"""Headers and bodies of the gateway's HTTP API, without a socket."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client import InvalidRequest
from gpulease.client.http.application import BINARY, JSON
from gpulease.client.http.problems import RequestRefused
from gpulease.client.serve.gateway.gateway import (
    ParsedBody,
    answer_of,
    answer_type,
    checked_media_type,
    headers_of,
    idempotency_key,
    parse_body,
)
from gpulease.client.serve.gateway.gateway_errors import OperationFailed
from gpulease.client.serve.gateway.inference import (
    InferenceResponse,
    failure_to_outcome,
    outcome_to_response,
    response_to_outcome,
)
from gpulease.protocol.lease_ids import LeaseId

RESPONSE = InferenceResponse("id", LeaseId(0xABC), 1_790_000_000, b"\0out\xff")


@pytest.mark.parametrize(
    ("value", "key"),
    [("k", "k"), ('"k"', "k"), ("  k ", "k"), ('"a\\"b\\\\c"', 'a"b\\c'), ('"half', '"half'), ("a b", "a b")],
)
def test_keys(value: str, key: str) -> None:
    assert idempotency_key([value]) == key


@pytest.mark.parametrize("values", [[], ["a", "b"], [""], ['""'], ["a\x7fb"], ["x" * 201]])
def test_what_is_no_key(values: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        idempotency_key(values)


@pytest.mark.parametrize(
    ("accept", "asked_in", "wanted"),
    [
        ("", BINARY, BINARY),
        ("*/*", JSON, JSON),
        ("application/json", BINARY, JSON),
        ("text/html, Application/Octet-Stream;q=0.5", JSON, BINARY),
    ],
)
def test_what_to_answer_in(accept: str, asked_in: str, wanted: str) -> None:
    assert answer_type(accept, asked_in) == wanted


def test_media_types() -> None:
    assert checked_media_type("application/json; charset=utf-8") == JSON
    assert checked_media_type("Application/Octet-Stream") == BINARY
    for header in ("", "text/plain", "application/jsonx"):
        with pytest.raises(RequestRefused):
            checked_media_type(header)


@given(st.binary(max_size=40), st.integers(0, 2**70))
def test_both_forms_say_the_same(data: bytes, output_len: int) -> None:
    body = json.dumps({"output_len": output_len, "input_base64": base64.b64encode(data).decode()}).encode()
    assert parse_body(body, JSON, "") == ParsedBody(data, output_len)
    if output_len < 10**20:
        assert parse_body(data, BINARY, str(output_len)) == ParsedBody(data, output_len)


@given(st.binary(max_size=60))
def test_any_json_is_taken_or_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_body(body, JSON, "")


@pytest.mark.parametrize("output_len", ["", "-1", "+1", "1.0", "\N{ARABIC-INDIC DIGIT ONE}", "1" * 21])
def test_what_is_no_length(output_len: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_body(b"", BINARY, output_len)


def test_an_outcome_is_told_again_as_it_was() -> None:
    again = outcome_to_response("id", response_to_outcome(RESPONSE))
    assert again.is_replayed
    assert answer_of(again) == answer_of(RESPONSE) | {"is_replayed": True}
    assert headers_of(again) == headers_of(RESPONSE) | {"Idempotency-Replayed": "true"}
    assert base64.b64decode(answer_of(again)["output_base64"]) == RESPONSE.output


def test_a_failure_is_told_again() -> None:
    with pytest.raises(OperationFailed) as caught:
        outcome_to_response("id", failure_to_outcome(InvalidRequest("x" * 5000)))
    assert (caught.value.kind, caught.value.message) == ("InvalidRequest", "x" * 2000)
