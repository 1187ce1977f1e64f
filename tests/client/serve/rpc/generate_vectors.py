"""Writes `vectors/rpc/calls.json`: `PYTHONPATH=.dev:tests python -m tests.client.serve.rpc.generate_vectors`.

A test generates it again and compares. A changed file is another layout, and needs another version.
"""

import json
from pathlib import Path
from typing import Any, Final

from gpulease.protocol.rpc import (
    MAX_PAYLOAD_BYTES,
    REPLY_AT,
    REQUEST_AT,
    SHARED_BYTES,
    TIME_LEFT_AT,
    CallError,
    CallErrorCode,
    CallHeader,
    CallStatus,
    TimeLeft,
    greeting,
)

FILE: Final = Path(__file__).parents[4] / "vectors" / "rpc" / "calls.json"

REGIONS: Final[tuple[tuple[str, int, CallHeader, bytes], ...]] = (
    ("nothing yet", REQUEST_AT, CallHeader(0, 0, CallStatus.EMPTY, 0), b""),
    ("describe", REQUEST_AT, CallHeader(1, 0, CallStatus.REQUEST_READY, 0), b""),
    ("a request", REQUEST_AT, CallHeader(0x0102030405060708, 7, CallStatus.REQUEST_READY, 4), b"\x01\x02\x03\x04"),
    ("the same, taken", REQUEST_AT, CallHeader(0x0102030405060708, 7, CallStatus.PROCESSING, 4), b"\x01\x02\x03\x04"),
    ("its reply, by another method", REPLY_AT, CallHeader(0x0102030405060708, 8, CallStatus.RESPONSE_READY, 2), b"ok"),
    ("largest numbers", REPLY_AT, CallHeader(2**64 - 1, 2**32 - 1, CallStatus.RESPONSE_READY, 1), b"\xff"),
    ("largest payload", REQUEST_AT, CallHeader(2, 1, CallStatus.REQUEST_READY, MAX_PAYLOAD_BYTES), b"\xab"),
)
"""A payload of one byte where more are said is that byte again and again."""

ERRORS: Final = (
    CallError(CallErrorCode.INTERNAL, ""),
    CallError(CallErrorCode.QUEUE_FULL, "32 items wait already", 1500),
    CallError(CallErrorCode.LEASE_LOST, "größer als möglich", 2**32 - 1),
)

TIMES_LEFT: Final = (
    ("a minute and a half of that request", TimeLeft(0x0102030405060708, 90_000)),
    ("nothing said", TimeLeft(1, 0)),
    ("largest numbers", TimeLeft(2**64 - 1, 2**32 - 1)),
)

INVALID: Final = (
    ("longer than the region", CallHeader(3, 1, CallStatus.REQUEST_READY, MAX_PAYLOAD_BYTES + 1)),
    ("as long as can be said", CallHeader(3, 1, CallStatus.REQUEST_READY, 2**32 - 1)),
)


def document() -> str:
    found = {
        "shared_bytes": SHARED_BYTES,
        "max_payload_bytes": MAX_PAYLOAD_BYTES,
        "statuses": {status.name: int(status) for status in CallStatus},
        "error_codes": {code.name: int(code) for code in CallErrorCode},
        "greeting": greeting().hex(),
        "regions": [_region(*region) for region in REGIONS],
        "errors": [
            {"code": int(e.code), "retry_after_ms": e.retry_after_ms, "text": e.text, "payload": e.to_bytes().hex()}
            for e in ERRORS
        ],
        "time_left_at": TIME_LEFT_AT,
        "times_left": [
            {"name": name, "request_id": hex(t.request_id), "left_ms": t.left_ms, "bytes": t.to_bytes().hex()}
            for name, t in TIMES_LEFT
        ],
        "invalid": [{"name": name, "header": header.to_bytes().hex()} for name, header in INVALID],
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _region(name: str, at: int, header: CallHeader, payload: bytes) -> dict[str, Any]:
    return {
        "name": name,
        "at": at,
        "request_id": hex(header.request_id),
        "method_id": header.method_id,
        "status": header.status,
        "payload_len": header.payload_len,
        "header": header.to_bytes().hex(),
        "payload": payload.hex(),
    }


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(document(), encoding="utf-8")
