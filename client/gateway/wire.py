"""A request and its answer over HTTP, as bytes and as JSON. `asgi` says which when."""

import base64
import binascii
import json
import re
from dataclasses import dataclass
from typing import Any, Final

from gpulease.client.errors import InvalidRequest
from gpulease.client.gateway.inference import MAX_INPUT_BYTES, InferenceResponse
from gpulease.client.gateway.operation import checked_id
from gpulease.client.gateway.problems import Problem, Refused

BINARY: Final = "application/octet-stream"
JSON: Final = "application/json"

MAX_JSON_BYTES: Final = (MAX_INPUT_BYTES + 2) // 3 * 4 + 1024
"""The largest input in base64, and what is around it."""

_FIELDS: Final = frozenset({"input_base64", "output_len"})
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\["\\])*)"')
_DIGITS: Final = re.compile(r"[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body says."""

    input: bytes
    output_len: int


def media_type(header: str) -> str:
    """BINARY or JSON. Raises Refused for any other."""
    found = header.partition(";")[0].strip().lower()
    if found not in (BINARY, JSON):
        raise Refused(Problem(415, "unsupported_media_type", f"{found or 'no media type'!r}; {JSON} or {BINARY} are"))
    return found


def wanted_type(accept: str, asked_in: str) -> str:
    """In what to answer: what is accepted, else what was asked in."""
    accepted = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    return next((found for found in accepted if found in (BINARY, JSON)), asked_in)


def idempotency_key(values: list[str]) -> str:
    """The request's id, of the header `Idempotency-Key`: a string in quotes (RFC 8941, 3.3.3), or without them.

    Raises InvalidRequest.
    """
    if len(values) != 1:
        raise InvalidRequest("a request has one header Idempotency-Key, which makes it the same when it is asked again")
    text = values[0].strip()
    if quoted := _QUOTED.fullmatch(text):
        text = re.sub(r"\\(.)", r"\1", quoted[1])
    return checked_id(text, "Idempotency-Key")


def asked_of(body: bytes, asked_in: str, output_len: str) -> Asked:
    """What a body says; `output_len` is the query's, which a binary one needs. Raises InvalidRequest."""
    if asked_in == BINARY:
        if not _DIGITS.fullmatch(output_len):
            raise InvalidRequest("a binary request says ?output_len= and how many bytes of output it wants")
        return Asked(body, int(output_len))
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is no JSON: {error}") from None
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise InvalidRequest(f"the body is an object of {' and '.join(sorted(_FIELDS))}")
    text, length = value["input_base64"], value["output_len"]
    if not isinstance(text, str) or not isinstance(length, int) or isinstance(length, bool):
        raise InvalidRequest("input_base64 is text, and output_len a number of bytes")
    try:
        return Asked(base64.b64decode(text, validate=True), length)
    except (binascii.Error, ValueError):
        raise InvalidRequest("input_base64 is no base64 (RFC 4648, 4)") from None


def answer_of(response: InferenceResponse) -> dict[str, Any]:
    """The JSON of a response."""
    return {
        "request_id": response.request_id,
        "lease_id": str(response.lease_id),
        "token_expires_at_unix_secs": response.token_expires_at_unix_secs,
        "is_replayed": response.is_replayed,
        "output_base64": base64.b64encode(response.output).decode(),
    }


def headers_of(response: InferenceResponse) -> dict[str, str]:
    """The headers beside an output in bytes."""
    return {
        "Gpulease-Lease-Id": str(response.lease_id),
        "Gpulease-Token-Expires-At": str(response.token_expires_at_unix_secs),
        "Idempotency-Replayed": "true" if response.is_replayed else "false",
    }
