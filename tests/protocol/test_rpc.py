"""The layout of calls through shared memory: the definition, its fast form, and the vectors."""

import json
from enum import IntEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.protocol import rpc
from gpulease.protocol.rpc import CallError, CallErrorCode, CallHeader, CallStatus, TimeLeft

from .vector_json import VECTORS

CASES = json.loads((VECTORS / "rpc" / "calls.json").read_text(encoding="utf-8"))
U32 = st.integers(0, 2**32 - 1)


@given(st.integers(0, 2**64 - 1), U32, st.integers(0, 255), U32)
def test_the_fast_form_is_the_definition(request_id: int, method_id: int, status: int, payload_len: int) -> None:
    values = {"request_id": request_id, "method_id": method_id, "status": status, "payload_len": payload_len}
    built = rpc.HEADER.build(values)
    assert CallHeader(**values).to_bytes() == built
    assert CallHeader.from_bytes(built) == CallHeader(**values)
    assert (len(built), built[rpc.STATUS_AT]) == (rpc.HEADER_BYTES, status)


@given(st.binary(min_size=rpc.HEADER_BYTES, max_size=rpc.HEADER_BYTES))
def test_any_bytes_are_a_header(data: bytes) -> None:
    header = CallHeader.from_bytes(data)
    assert header.to_bytes() == data
    assert header.fits == (rpc.REQUEST_AT + rpc.HEADER_BYTES + header.payload_len <= rpc.REPLY_AT)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), U32)
def test_the_time_left(request_id: int, other_id: int, left_ms: int) -> None:
    built = rpc.TIME_LEFT.build({"request_id": request_id, "left_ms": left_ms})
    assert TimeLeft(request_id, left_ms).to_bytes() == built
    found = TimeLeft.from_bytes(built)
    assert found == TimeLeft(request_id, left_ms)
    assert found.of_call(request_id) == (left_ms or None)
    assert found.of_call(other_id) is None or other_id == request_id


@given(st.sampled_from(CallErrorCode), st.text(max_size=2000), st.integers(0, 2**40))
def test_errors_survive_the_way(code: CallErrorCode, text: str, retry_ms: int) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    found = CallError.from_bytes(CallError(code, text, retry_ms).to_bytes())
    assert found is not None
    assert (found.code, found.retry_after_ms) == (code, min(retry_ms, 2**32 - 1))
    assert text.startswith(found.text)
    assert len(found.text.encode()) > rpc.MAX_ERROR_TEXT_BYTES - 4 or found.text == text


@given(st.binary(max_size=64))
def test_any_bytes_are_an_error_or_none(data: bytes) -> None:
    found = CallError.from_bytes(data)
    assert (found is None) == (len(data) < 8)


def test_the_regions_meet() -> None:
    assert rpc.REQUEST_AT + rpc.HEADER_BYTES + rpc.MAX_PAYLOAD_BYTES == rpc.REPLY_AT
    assert rpc.REPLY_AT + rpc.HEADER_BYTES + rpc.MAX_PAYLOAD_BYTES == rpc.SHARED_BYTES
    assert rpc.TIME_LEFT_AT + rpc.TIME_LEFT_BYTES == rpc.SHARED_BYTES
    assert len(rpc.greeting()) == rpc.GREETING_BYTES
    assert rpc.is_greeting(rpc.greeting())
    assert not rpc.is_greeting(rpc.greeting()[:-1])


@pytest.mark.parametrize("kind", [CallErrorCode, CallStatus])
def test_the_specification_names_the_same_numbers(kind: type[IntEnum]) -> None:
    text = (VECTORS.parent / "protocol" / "README.md").read_text(encoding="utf-8")
    said = " ".join(text[text.index("## Calls to a model server") :].split())
    assert [member.name for member in kind if f"{member.value} {member.name}" not in said] == []


# --- the vectors, as another language would use them ---


@pytest.mark.parametrize("case", CASES["regions"], ids=lambda case: case["name"])
def test_region_vectors(case: dict[str, object]) -> None:
    header = bytes.fromhex(str(case["header"]))
    assert int.from_bytes(header[0:8], "little") == int(str(case["request_id"]), 16)
    assert int.from_bytes(header[8:12], "little") == case["method_id"]
    assert header[12] == case["status"]
    assert int.from_bytes(header[13:17], "little") == case["payload_len"]


@pytest.mark.parametrize("case", CASES["errors"], ids=lambda case: str(case["code"]))
def test_error_vectors(case: dict[str, object]) -> None:
    payload = bytes.fromhex(str(case["payload"]))
    assert int.from_bytes(payload[:4], "little") == case["code"]
    assert int.from_bytes(payload[4:8], "little") == case["retry_after_ms"]
    assert payload[8:].decode() == case["text"]


@pytest.mark.parametrize("case", CASES["times_left"], ids=lambda case: case["name"])
def test_time_left_vectors(case: dict[str, object]) -> None:
    data = bytes.fromhex(str(case["bytes"]))
    assert CASES["time_left_at"] + len(data) == CASES["shared_bytes"]
    assert int.from_bytes(data[:8], "little") == int(str(case["request_id"]), 16)
    assert int.from_bytes(data[8:], "little") == case["left_ms"]


@pytest.mark.parametrize("case", CASES["invalid"], ids=lambda case: case["name"])
def test_invalid_vectors(case: dict[str, str]) -> None:
    assert not CallHeader.from_bytes(bytes.fromhex(case["header"])).fits
