"""Messages and wires as the JSON of `vectors/`, and back: the notation that `vectors/README.md` explains."""

import json
import re
from pathlib import Path
from typing import Any

from gpulease.protocol.framing import HEADER
from gpulease.protocol.messages import Body
from gpulease.protocol.primitives import Record

from .encodings import Encoding, fields_of

VECTORS = Path(__file__).parents[2] / "vectors"
MIN_REPEATS = 64
MAX_UNIT_BYTES = 36
_REPEATED = re.compile(rb"(.{1,%d}?)\1{%d}" % (MAX_UNIT_BYTES, MIN_REPEATS - 1), re.DOTALL)
"""A unit, the shortest that there is, and as many repeats as are worth a list."""


def frame(op: int, body: Body | bytes = b"", **header: int) -> bytes:
    """A frame by the definitions alone, the connection and the fast paths left out; any header, right or wrong."""
    payload = body if isinstance(body, bytes) else Record(type(body)).build(body)
    given = {"flags": 0, "status": 0, "request_id": 1, "session_id": 0, "payload_length": len(payload)} | header
    return bytes(HEADER.build({"op": op} | given)) + payload


# --- to JSON ---


def body_to_json(body: Any) -> dict[str, Any]:
    return {name: _to_json(encoding, getattr(body, name)) for name, encoding in fields_of(type(body)).items()}


def header_to_json(wire: bytes) -> dict[str, Any]:
    header = HEADER.parse(wire)
    numbers = {name: header[name] for name in ("flags", "op", "status", "payload_length")}
    return numbers | {"request_id": hex(header.request_id), "session_id": hex(header.session_id)}


def bytes_to_json(data: bytes) -> Any:
    """Hex; where a unit is repeated often, a list of hex and repeats."""
    parts: list[Any] = []
    start = 0
    while found := _REPEATED.search(data, start):
        at, unit = found.start(), found[1]
        count = _period_end(data, at, len(unit)) // len(unit)
        parts += [data[start:at].hex()] * (at > start) + [{"repeat": [unit.hex(), count]}]
        start = at + count * len(unit)
    parts += [data[start:].hex()] * (start < len(data))
    return parts if start else data.hex()


def _period_end(data: bytes, at: int, size: int) -> int:
    """How many bytes from `at` on have this period."""
    end, step = at, 1 << 16
    view = memoryview(data)
    while step:
        ahead = view[end + size : end + size + step]
        if len(ahead) == step and ahead == view[end : end + step]:
            end += step
        else:
            step //= 2
    return end + size - at


def _to_json(encoding: Encoding, value: Any) -> Any:
    if encoding.kind in ("u64", "u128"):
        return hex(value)
    if encoding.kind in ("bytes", "short bytes"):
        return bytes_to_json(value)
    if encoding.kind == "record":
        return body_to_json(value)
    if encoding.kind == "list":
        assert encoding.item is not None
        if len(value) >= MIN_REPEATS and len(set(value)) == 1:
            return {"repeat": [_to_json(encoding.item, value[0]), len(value)]}
        return [_to_json(encoding.item, item) for item in value]
    if encoding.kind == "text" and len(value) >= MIN_REPEATS and len(set(value)) == 1:
        return {"repeat": [value[0], len(value)]}
    if encoding.kind == "optional" and value is not None:
        assert encoding.item is not None
        return _to_json(encoding.item, value)
    return value


# --- from JSON ---


def body_from_json(record: type[Any], json_fields: dict[str, Any]) -> Any:
    """The message or record that these fields are."""
    encodings = fields_of(record)
    assert list(encodings) == list(json_fields)
    return record(**{name: _from_json(encodings[name], value) for name, value in json_fields.items()})


def bytes_from_json(value: Any) -> bytes:
    """The bytes that hex, or a list of hex and repeats, stands for."""
    if isinstance(value, str):
        return bytes.fromhex(value)
    if isinstance(value, dict):
        unit, count = value["repeat"]
        return bytes.fromhex(unit) * int(count)
    return b"".join(bytes_from_json(part) for part in value)


def _from_json(encoding: Encoding, value: Any) -> Any:
    if encoding.kind in ("u64", "u128"):
        return int(value, 16)
    if encoding.kind in ("bytes", "short bytes"):
        return bytes_from_json(value)
    if encoding.kind == "record":
        assert encoding.record is not None
        return body_from_json(encoding.record, value)
    if encoding.kind == "list":
        assert encoding.item is not None
        if isinstance(value, dict):
            item, count = value["repeat"]
            return (_from_json(encoding.item, item),) * count
        return tuple(_from_json(encoding.item, item) for item in value)
    if encoding.kind == "text" and isinstance(value, dict):
        unit, count = value["repeat"]
        return unit * count
    if encoding.kind == "optional" and value is not None:
        assert encoding.item is not None
        return _from_json(encoding.item, value)
    return value


# --- files ---


def dump(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
