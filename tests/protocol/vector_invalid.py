"""The cases of `vectors/frames.json` (headers that are right) and `vectors/invalid.json` (frames that are not)."""

from dataclasses import dataclass, replace
from typing import Any

from gpulease.protocol import Opcode, State, Status, limits
from gpulease.protocol import messages as m
from gpulease.protocol.opcodes import Flag
from gpulease.protocol.primitives import Record

from .vector_json import bytes_to_json, frame, header_to_json

FLAGS = {
    "TRUNCATED": "The stream ends inside a frame. A receiver that waits for the rest must notice the end.",
    "NOT_OURS": "The bytes are no header of this protocol and version. Nothing behind them can be trusted.",
    "HEADER": "A header field has a value that its rules forbid.",
    "TOO_LARGE": "A length or count is over its limit. It must be refused by the number alone, before any memory is "
    "reserved or read by it.",
    "LENGTHS_DISAGREE": "A length or count points past the end of the payload, or bytes are left over.",
    "ENCODING": "A value is not encoded as its field is defined.",
    "OPERATION": "The operation does not exist.",
    "ORDER": "The frame is well formed and not allowed in this state.",
    "REQUEST_ID": "The request id can't be that one.",
    "QUIET": "Only session operations can be quiet.",
}


@dataclass(frozen=True)
class Context:
    """Who gets the frame in which state, and what must come of it."""

    status: Status = Status.INVALID_REQUEST
    is_fatal: bool = False
    receiver: str = "daemon"
    state: State = State.CONTROL
    in_flight: tuple[tuple[int, int, Opcode], ...] = ()
    """First request id, how many from it on, operation."""
    max_payload_bytes: int = limits.MAX_PAYLOAD_BYTES


REFUSED = Context()
UNSUPPORTED = Context(Status.UNSUPPORTED)
BROKEN = Context(is_fatal=True)
OTHER_VERSION = Context(Status.UNSUPPORTED, is_fatal=True)
IN_SESSION = Context(state=State.SESSION)
TORN = Context(Status.DISCONNECTED, is_fatal=True)
CLIENT = Context(is_fatal=True, receiver="client", in_flight=((1, 1, Opcode.PING),))
QUERYING = replace(CLIENT, in_flight=((1, 1, Opcode.LEASE_QUERY),))
CLIENT_UNSUPPORTED = replace(CLIENT, status=Status.UNSUPPORTED)

Wires = dict[str, tuple[str, bytes]]
"""By case id: a comment and the bytes."""


def cases(flag: str, context: Context, wires: Wires) -> list[dict[str, Any]]:
    """Cases of one kind in one context, as JSON."""
    return [
        {
            "id": case_id,
            "comment": comment,
            "flags": [flag],
            "receiver": context.receiver,
            "state": context.state.name,
            "in_flight": [
                {"first_request_id": first, "count": count, "op": op.name} for first, count, op in context.in_flight
            ],
            "max_payload_bytes": context.max_payload_bytes,
            "wire": bytes_to_json(wire),
            "then_eof": context is TORN,
            "error": {"status": context.status.name, "fatal": context.is_fatal},
        }
        for case_id, (comment, wire) in wires.items()
    ]


def built(body: m.Body) -> bytes:
    return bytes(Record(type(body)).build(body))


def patched(data: bytes, at: int, new: str) -> bytes:
    return data[:at] + bytes.fromhex(new) + data[at + len(new) // 2 :]


def payloads(op: Opcode, rows: Wires, **header: int) -> Wires:
    """Frames of one operation around these payloads."""
    return {case_id: (comment, frame(op, payload, **header)) for case_id, (comment, payload) in rows.items()}


REPLY, QUIET = int(Flag.REPLY), int(Flag.QUIET)
PING = frame(Opcode.PING, m.Ping(1))
PONG = frame(Opcode.PING, m.Ping(1), flags=REPLY)
ATTACH = frame(Opcode.ATTACH, m.Attach(()), request_id=2, session_id=9)
WRITE = built(m.MemWrite(1, 0, b"data"))
LAUNCH = built(m.Launch(1, "scale", 1, 1, 1, 1, 1, 1, 0, b"12345678", (8,)))
ARGS_AT, SIZES_AT = 45, 57
"""Where a LAUNCH says how many argument bytes and sizes follow, if its kernel is called scale."""


def _truncated() -> list[dict[str, Any]]:
    cuts = {1: "magic", 4: "version", 20: "request-id", 39: "header", 40: "no-payload", 47: "payload"}
    wires = {f"cut-at-{at}-{name}": (f"{at} of 48 bytes, then the end", PING[:at]) for at, name in cuts.items()}
    return cases("TRUNCATED", TORN, wires)


def _headers() -> list[dict[str, Any]]:
    http = b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n"
    magic = {
        "magic-http": ("an HTTP request", http),
        "magic-zeros": ("40 zero bytes", bytes(40)),
        "magic-last-byte": ("GPLT", patched(PING, 3, "54")),
    }
    version = {
        "version-0": ("version 0", patched(PING, 4, "00")),
        "version-2": ("version 2", patched(PING, 4, "02")),
        "version-255": ("version 255", patched(PING, 4, "ff")),
    }
    flags = {
        "flag-04": ("flag bit 0x04", patched(PING, 5, "04")),
        "flag-80": ("flag bit 0x80", patched(PING, 5, "80")),
    }
    wrong = {
        "request-with-status": ("a request with status -1", patched(PING, 8, "ffff")),
        "reserved-low": ("reserved is 0x0001", patched(PING, 10, "0001")),
        "reserved-high": ("reserved is 0x8000", patched(PING, 10, "8000")),
    }
    wrong_reply = {
        "quiet-reply": ("REPLY and QUIET", patched(PONG, 5, "03")),
        "positive-status": ("status 1", patched(PONG, 8, "0001")),
    }
    unknown_reply = {
        "flag-40-in-reply": ("REPLY and flag bit 0x40", patched(PONG, 5, "41")),
    }
    return [
        *cases("NOT_OURS", BROKEN, magic),
        *cases("NOT_OURS", OTHER_VERSION, version),
        *cases("HEADER", OTHER_VERSION, flags),
        *cases("HEADER", BROKEN, wrong),
        *cases("HEADER", CLIENT, wrong_reply),
        *cases("HEADER", CLIENT_UNSUPPORTED, unknown_reply),
    ]


def _payload_lengths() -> list[dict[str, Any]]:
    write = frame(Opcode.MEM_WRITE, WRITE, session_id=9)
    to_broker = replace(BROKEN, max_payload_bytes=limits.MAX_CONTROL_PAYLOAD_BYTES)
    to_worker = replace(BROKEN, state=State.SESSION)
    ping = {
        "trailing-byte": ("9 bytes", bytes(9)),
        "missing-byte": ("7 bytes", bytes(7)),
        "no-payload": ("nothing", b""),
    }
    empty = {"payload-of-empty": ("a byte where none belongs", b"\0")}
    return [
        *cases("TOO_LARGE", BROKEN, {"payload-4-gib": ("4 GiB announced", patched(PING, 12, "ffffffff"))}),
        *cases("TOO_LARGE", to_broker, {"payload-over-control": ("64 KiB + 1", patched(PING, 12, "00010001"))}),
        *cases("TOO_LARGE", to_worker, {"payload-over-session": ("64 MiB + 1", patched(write, 12, "04000001"))}),
        *cases("LENGTHS_DISAGREE", REFUSED, payloads(Opcode.PING, ping)),
        *cases("LENGTHS_DISAGREE", REFUSED, payloads(Opcode.LEASE_LIST_ACTIVE, empty)),
    ]


def _field_lengths() -> list[dict[str, Any]]:
    write_over = {
        "data-over": ("16 MiB + 1 of data announced", patched(WRITE, 16, "01000001")),
        "data-4-gib": ("4 GiB of data announced", patched(WRITE, 16, "ffffffff")),
    }
    write = {
        "data-past-end": ("5 bytes announced, 4 there", patched(WRITE, 16, "00000005")),
        "data-left-over": ("3 bytes announced, 4 there", patched(WRITE, 16, "00000003")),
    }
    launch_over = {
        "kernel-name-over": ("a kernel name of 4097 bytes announced", patched(LAUNCH, 8, "00001001")),
        "args-over": ("32765 argument bytes announced", patched(LAUNCH, ARGS_AT, "00007ffd")),
        "sizes-over": ("4097 sizes", LAUNCH[:SIZES_AT] + bytes.fromhex("1001") + bytes(4 * 4097)),
    }
    launch = {
        "kernel-name-past-end": ("a kernel name of 300 bytes announced", patched(LAUNCH, 8, "0000012c")),
        "args-past-end": ("20 argument bytes announced, 14 there", patched(LAUNCH, ARGS_AT, "00000014")),
        "sizes-past-end": ("2 sizes announced, 1 there", patched(LAUNCH, SIZES_AT, "0002")),
        "sizes-left-over": ("0 sizes announced, 1 there", patched(LAUNCH, SIZES_AT, "0000")),
    }
    attach_over = {"tlvs-over": ("65 TLVs", b"\0\x41" + b"\1\0\0" * 65)}
    attach = {
        "tlvs-past-end": ("2 TLVs announced, 1 there", bytes.fromhex("0002010000")),
        "tlv-value-past-end": ("a TLV of 2 bytes announced, 1 there", bytes.fromhex("0001010002ff")),
    }
    text_over = {"text-over": ("a device of 1025 bytes", bytes.fromhex("0100000401") + b"x" * 1025)}
    return [
        *cases("TOO_LARGE", IN_SESSION, payloads(Opcode.MEM_WRITE, write_over, session_id=9)),
        *cases("TOO_LARGE", IN_SESSION, payloads(Opcode.LAUNCH, launch_over, session_id=9)),
        *cases("TOO_LARGE", REFUSED, payloads(Opcode.ATTACH, attach_over, session_id=9)),
        *cases("TOO_LARGE", REFUSED, payloads(Opcode.FENCE_CLEAR, text_over)),
        *cases("LENGTHS_DISAGREE", IN_SESSION, payloads(Opcode.MEM_WRITE, write, session_id=9)),
        *cases("LENGTHS_DISAGREE", IN_SESSION, payloads(Opcode.LAUNCH, launch, session_id=9)),
        *cases("LENGTHS_DISAGREE", REFUSED, payloads(Opcode.ATTACH, attach, session_id=9)),
    ]


def _encodings() -> list[dict[str, Any]]:
    device = {
        "present-2": ("a present flag of 2", b"\2"),
        "present-255": ("a present flag of 255", b"\xff\0\0\0\0"),
        "utf-8": ("a device of the byte ff", bytes.fromhex("0100000001ff")),
        "utf-8-surrogate": ("an encoded surrogate", bytes.fromhex("0100000003eda080")),
        "utf-8-overlong": ("an overlong slash", bytes.fromhex("0100000002c0af")),
    }
    report = {
        "report-cut": ("a msgpack map without its value", bytes.fromhex("000000028101")),
        "report-number-key": ("a msgpack map keyed by a number", bytes.fromhex("00000003810102")),
        "report-two-values": ("two msgpack values", bytes.fromhex("000000020102")),
    }
    failure = {"error-body-missing": ("an error reply without its body", b"")}
    return [
        *cases("ENCODING", REFUSED, payloads(Opcode.FENCE_CLEAR, device)),
        *cases("ENCODING", QUERYING, payloads(Opcode.LEASE_QUERY, report, flags=REPLY)),
        *cases("ENCODING", QUERYING, payloads(Opcode.LEASE_QUERY, failure, flags=REPLY, status=Status.INTERNAL)),
    ]


def _operations() -> list[dict[str, Any]]:
    unknown = {
        "op-0000": ("operation 0x0000", frame(0)),
        "op-ffff": ("operation 0xffff with a payload", frame(0xFFFF, b"x" * 40)),
    }
    in_session = replace(UNSUPPORTED, state=State.SESSION)
    quiet = {
        "quiet-control-op": ("a quiet LEASE_FREE", frame(Opcode.LEASE_FREE, m.LeaseRef(9), flags=QUIET)),
        "quiet-attach": ("a quiet ATTACH", frame(Opcode.ATTACH, m.Attach(()), session_id=9, flags=QUIET)),
    }
    quiet_ping = {"quiet-ping": ("a quiet PING in a session", frame(Opcode.PING, m.Ping(1), flags=QUIET))}
    return [
        *cases("OPERATION", UNSUPPORTED, unknown),
        *cases("OPERATION", in_session, {"op-06ff": ("0x06FF in a session", frame(0x06FF, session_id=9))}),
        *cases("QUIET", REFUSED, quiet),
        *cases("QUIET", IN_SESSION, quiet_ping),
    ]


def _order() -> list[dict[str, Any]]:
    opening = Context(state=State.OPENING)
    greeting = Context(state=State.GREETING, in_flight=((1, 1, Opcode.HELLO),))
    attaching = Context(state=State.ATTACHING, in_flight=((1, 1, Opcode.ATTACH),))
    asked = Context(in_flight=((1, 1, Opcode.PING),))
    control = {
        "hello-twice": ("HELLO after HELLO", frame(Opcode.HELLO, m.Hello(0, "", ()))),
        "session-op-before-attach": ("MEM_WRITE before ATTACH", frame(Opcode.MEM_WRITE, WRITE, session_id=9)),
        "goodbye-from-client": ("GOODBYE as a request", frame(Opcode.GOODBYE)),
    }
    session = {
        "control-op-after-attach": ("LEASE_FREE after ATTACH", frame(Opcode.LEASE_FREE, m.LeaseRef(9), session_id=9)),
        "attach-twice": ("ATTACH after ATTACH", ATTACH),
    }
    sync = frame(Opcode.SYNC, request_id=2, session_id=9)
    return [
        *cases("ORDER", opening, {"ping-before-hello": ("the first frame is not HELLO", PING)}),
        *cases("ORDER", greeting, {"request-behind-hello": ("HELLO awaits its reply", patched(PING, 23, "02"))}),
        *cases("ORDER", REFUSED, control),
        *cases("ORDER", asked, {"attach-with-requests-in-flight": ("a PING awaits its reply", ATTACH)}),
        *cases("ORDER", attaching, {"request-behind-attach": ("ATTACH awaits its reply", sync)}),
        *cases("ORDER", IN_SESSION, session),
        *cases("ORDER", BROKEN, {"reply-from-client": ("a client sends a reply", PONG)}),
        *cases("ORDER", CLIENT, {"request-from-daemon": ("a daemon sends a request", PING)}),
    ]


def _request_ids() -> list[dict[str, Any]]:
    asked = replace(BROKEN, in_flight=((1, 1, Opcode.PING),))
    full = Context(Status.BUSY, is_fatal=True, in_flight=((2, limits.MAX_IN_FLIGHT, Opcode.PING),))
    event = frame(Opcode.LEASE_EVENT, m.LeaseEvent(1, 1, 0, 0, 0, 1, "", ""), flags=REPLY)
    replies = {
        "event-not-subscribed": ("an event, and nothing was subscribed to", event),
        "reply-not-asked": ("a reply to request 2", patched(PONG, 23, "02")),
        "reply-of-other-op": ("SYNC answers PING", frame(Opcode.SYNC, flags=REPLY)),
    }
    zero = frame(Opcode.PING, m.Ping(1), request_id=0)
    return [
        *cases("REQUEST_ID", BROKEN, {"request-id-0": ("request id 0", zero)}),
        *cases("REQUEST_ID", asked, {"request-id-in-flight": ("request 1 awaits its reply", PING)}),
        *cases("REQUEST_ID", full, {"too-many-in-flight": ("1024 requests await their replies", PING)}),
        *cases("REQUEST_ID", CLIENT, replies),
    ]


def invalid_document() -> dict[str, Any]:
    groups = (_truncated, _headers, _payload_lengths, _field_lengths, _encodings, _operations, _order, _request_ids)
    return {"kind": "invalid", "flags": FLAGS, "cases": [case for group in groups for case in group()]}


def frames_document() -> dict[str, Any]:
    wires = {
        "request": frame(Opcode.LEASE_LIST_ACTIVE),
        "reply": frame(Opcode.SYNC, flags=Flag.REPLY, session_id=9),
        "quiet request": frame(Opcode.SYNC, flags=Flag.QUIET, session_id=9),
        "largest ids": frame(Opcode.SYNC, request_id=2**64 - 1, session_id=2**128 - 1),
        "byte order": frame(0x0102, request_id=0x0102030405060708, session_id=0x0102030405060708090A0B0C0D0E0F10),
        "payload": frame(Opcode.PING, m.Ping(0x0102030405060708)),
        "unknown operation": frame(0x7777, b"?"),
        "goodbye": frame(Opcode.GOODBYE, bytes(6), flags=Flag.REPLY, status=Status.BUSY, request_id=0),
    }
    wires |= {
        f"status {status.name}": frame(Opcode.SYNC, bytes(6), flags=Flag.REPLY, status=status)
        for status in Status
        if status is not Status.OK
    }
    return {
        "kind": "frames",
        "cases": [
            {"name": name, "header": header_to_json(wire[:40]), "payload": wire[40:].hex(), "wire": wire.hex()}
            for name, wire in wires.items()
        ],
    }
