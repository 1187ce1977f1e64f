import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.protocol import Failure, Status
from gpulease.protocol.codec import build_body, parse_body
from gpulease.protocol.errors import BodyError
from gpulease.protocol.limits import MAX_CONTROL_PAYLOAD_BYTES, MAX_ERROR_TEXT_BYTES
from gpulease.protocol.messages import ErrorBody
from gpulease.protocol.opcodes import ErrorTlv
from gpulease.protocol.primitives import Tlv

from . import strategies

TEXTS = strategies.bounded_text(400)
FAILURES = st.builds(
    Failure,
    status=strategies.FAILED_STATUSES,
    message=TEXTS,
    hint=TEXTS,
    failed_request_id=st.none() | strategies.integers(64),
    failed_op=st.none() | strategies.integers(16),
    kernel=TEXTS,
    address=st.none() | strategies.integers(64),
    log=TEXTS,
    line=strategies.integers(32),
    region=st.none() | strategies.integers(128),
    site=st.none() | strategies.integers(32),
    flipped_ns=st.none() | strategies.integers(64),
    position=st.none() | strategies.integers(64),
)


@settings(max_examples=100, deadline=None)
@given(failure=FAILURES)
def test_a_failure_comes_back_as_it_went(failure: Failure) -> None:
    body = parse_body(ErrorBody, build_body(failure.to_body()))
    assert Failure.from_body(failure.status, body) == failure


def test_what_is_not_known_is_not_sent() -> None:
    assert Failure(Status.DENIED, "no").to_body() == ErrorBody("no", ())
    # Zero is a value of these, not their absence.
    body = Failure(Status.SYNC_FAILED, "x", address=0, failed_request_id=0, failed_op=0, position=0).to_body()
    assert [tlv.type for tlv in body.details] == [2, 3, 5, 11]


def test_unknown_details_are_skipped() -> None:
    body = ErrorBody("m", (Tlv(0, b"?"), Tlv(200, bytes(65535)), Tlv(ErrorTlv.HINT, b"try"), Tlv(255, b"")))
    assert Failure.from_body(Status.BUSY, body) == Failure(Status.BUSY, "m", hint="try")


@pytest.mark.parametrize("status", [-7, -15, -25, -1000, 1])
def test_an_unknown_status_is_internal(status: int) -> None:
    assert Failure.from_body(status, ErrorBody("m", ())).status is Status.INTERNAL


@pytest.mark.parametrize("kind", sorted(set(ErrorTlv) - {ErrorTlv.HINT, ErrorTlv.KERNEL, ErrorTlv.LOG}))
@pytest.mark.parametrize("value", [b"", b"\1", bytes(3), b"\xff" * 60000])
def test_a_number_of_a_wrong_width_is_skipped(kind: ErrorTlv, value: bytes) -> None:
    failure = Failure.from_body(Status.INTERNAL, ErrorBody("m", (Tlv(kind, value),)))
    assert failure == Failure(Status.INTERNAL, "m")


def test_a_detail_that_is_not_utf8_is_still_shown() -> None:
    failure = Failure.from_body(Status.INTERNAL, ErrorBody("m", (Tlv(ErrorTlv.LOG, b"a\xffb"),)))
    assert failure.log == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize("character", ["x", "é", "€", "😀"])
def test_long_texts_are_cut_between_characters(character: str) -> None:
    long = "<" + character * MAX_ERROR_TEXT_BYTES + ">"
    failure = Failure(Status.LOAD_FAILED, long, hint=long, kernel=long, log=long)
    body = failure.to_body()
    payload = build_body(body)
    assert len(payload) < MAX_CONTROL_PAYLOAD_BYTES
    back = Failure.from_body(failure.status, parse_body(ErrorBody, payload))
    width = len(character.encode())
    for start in (back.message, back.hint, back.kernel):
        assert long.startswith(start)
        assert MAX_ERROR_TEXT_BYTES - width < len(start.encode()) <= MAX_ERROR_TEXT_BYTES
    # The compiler's last lines name the fault.
    assert long.endswith(back.log)
    assert MAX_ERROR_TEXT_BYTES - width < len(back.log.encode()) <= MAX_ERROR_TEXT_BYTES


def test_text_that_can_not_be_encoded_is_still_sent() -> None:
    assert Failure(Status.INTERNAL, "bad \udcff name").to_body().message == "bad ? name"


@settings(max_examples=100, deadline=None)
@given(body=strategies.records(ErrorBody), status=strategies.FAILED_STATUSES)
def test_any_error_body_is_a_failure(body: ErrorBody, status: Status) -> None:
    failure = Failure.from_body(status, body)
    build_body(failure.to_body())


@settings(max_examples=200, deadline=None)
@given(
    body=strategies.records(ErrorBody),
    status=strategies.FAILED_STATUSES,
    flips=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 255)), max_size=2),
    cut=st.integers(0, 40),
    more=st.binary(max_size=2),
)
def test_a_payload_is_read_as_its_definition_says(
    body: ErrorBody, status: Status, flips: list[tuple[int, int]], cut: int, more: bytes
) -> None:
    payload = bytearray(build_body(body))
    for place, bits in flips:
        if place < len(payload):
            payload[place] ^= bits
    for data in (bytes(payload), bytes(payload[: len(payload) - cut]), bytes(payload) + more):
        try:
            expected = Failure.from_body(status, parse_body(ErrorBody, data))
        except BodyError as error:
            with pytest.raises(BodyError, match=re.escape(str(error))):
                Failure.from_payload(status, memoryview(data))
        else:
            assert Failure.from_payload(status, memoryview(data)) == expected
