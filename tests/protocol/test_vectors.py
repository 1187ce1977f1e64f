"""The vectors as another language would use them, and that they are complete, valid and up to date."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpulease.protocol import (
    Connection,
    EndOfStream,
    Goodbye,
    Notification,
    Opcode,
    RegionNotification,
    Rejected,
    Reply,
    Request,
    Role,
    State,
    Status,
    StreamBroken,
)
from gpulease.protocol import messages as m
from gpulease.protocol.codec import build_body, parse_body
from gpulease.protocol.failures import Failure
from gpulease.protocol.framing import HEADER_BYTES, Frame, FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.opcodes import Flag
from gpulease.protocol.operations import SPECS

from . import generate_vectors
from .encodings import BODY_CLASSES, fields_of
from .peers import events_of
from .vector_json import VECTORS, body_from_json, bytes_from_json, load

FILES = sorted(
    path
    for path in VECTORS.rglob("*.json")
    if not {"gpu", "audit", "gateway", "rpc"} & set(path.relative_to(VECTORS).parts) and path.name != "schema.json"
)
SCHEMA = load(VECTORS / "schema.json")


def cases_of(pattern: str) -> list[Any]:
    """(file, case) of every case in these files, named for the test report."""
    found = []
    for path in sorted(VECTORS.glob(pattern)):
        for case in load(path)["cases"]:
            label = "-".join([path.stem, case.get("id") or case["name"], case.get("op", ""), case.get("direction", "")])
            found.append(pytest.param(path, case, id=label.strip("-").replace(" ", "-")))
    return found


MESSAGES = sorted(VECTORS.glob("messages/*.json"))
FRAMES = cases_of("frames.json")
INVALID = cases_of("invalid.json")
CONVERSATIONS = sorted(VECTORS.glob("conversations/*.json"))


def relative(path: Path) -> str:
    return path.relative_to(VECTORS).as_posix()


# --- the files ---


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_the_files_keep_to_the_schema() -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    errors = [f"{relative(path)}: {error}" for path in FILES for error in validator.iter_errors(load(path))]
    assert not errors, "\n".join(errors)


def test_the_files_are_what_the_definitions_give() -> None:
    expected = generate_vectors.documents()
    assert [relative(path) for path in FILES] == sorted(expected)
    for path in FILES:
        assert path.read_text(encoding="utf-8") == expected[relative(path)], relative(path)


def test_the_files_stay_small() -> None:
    assert sum(path.stat().st_size for path in FILES) < 670_000


def test_every_operation_and_direction_has_a_message() -> None:
    shown = {(case["op"], case["direction"]) for path in MESSAGES for case in load(path)["cases"]}
    expected = {(op.name, way) for op in Opcode for way in ("request", "reply") if op is not Opcode.GOODBYE}
    assert shown == expected - {("LEASE_EVENT", "request"), ("REGION_EVENT", "request")}


def test_every_operation_is_in_a_conversation() -> None:
    assert {step["op"] for path in CONVERSATIONS for step in load(path)["steps"]} == {op.name for op in Opcode}


def test_every_flag_of_the_invalid_cases_is_explained_and_used() -> None:
    document = load(VECTORS / "invalid.json")
    assert {flag for case in document["cases"] for flag in case["flags"]} == set(document["flags"])
    ids = [case["id"] for case in document["cases"]]
    assert len(ids) == len(set(ids))


# --- messages and frames ---


def read(chunks: list[bytes]) -> tuple[list[Frame], FrameReader]:
    reader = FrameReader(MAX_PAYLOAD_BYTES)
    frames = []
    for chunk in chunks:
        reader.receive_data(chunk)
        while (taken := reader.next_frame()) is not None:
            frames.append(taken._replace(payload=bytes(taken.payload)))
    return frames, reader


def built_by(header: dict[str, Any], payload: bytes) -> bytes:
    ids = {name: int(header[name], 16) for name in ("request_id", "session_id")}
    return build_frame(header["op"], payload, flags=header["flags"], status=header["status"], **ids)


def header_of(frame: Frame) -> dict[str, Any]:
    return {
        "flags": frame.flags,
        "op": frame.op,
        "status": frame.status,
        "payload_length": len(frame.payload),
        "request_id": hex(frame.request_id),
        "session_id": hex(frame.session_id),
    }


def ways_to_feed(wire: bytes) -> list[list[bytes]]:
    """Whole, with a tail, and in small pieces: single bytes if it is not megabytes."""
    size = 1 if len(wire) < 10_000 else 100_000
    return [[wire], [wire + wire[:39]], [wire[at : at + size] for at in range(0, len(wire), size)]]


@pytest.mark.parametrize("path", MESSAGES, ids=relative)
def test_the_cases_of_a_message_both_ways(path: Path) -> None:
    document, failed = load(path), []
    for case in document["cases"]:
        try:
            check_both_ways(BODY_CLASSES[document["message"]], case)
        except Exception as error:
            error.add_note(f"{case['name']}, {case['op']}, {case['direction']}")
            failed.append(error)
    if failed:
        raise ExceptionGroup(relative(path), failed)


def check_both_ways(kind: type[m.Body], case: dict[str, Any]) -> None:
    body, wire = body_from_json(kind, case["body"]), bytes_from_json(case["wire"])
    assert built_by(case["header"], build_body(body)) == wire
    for chunks in ways_to_feed(wire):
        (frame,), reader = read(chunks)
        assert header_of(frame) == case["header"]
        assert reader.take_rest() == b"".join(chunks)[len(wire) :]
    assert parse_body(kind, frame.payload) == body
    spec = SPECS[Opcode[case["op"]]]
    in_order = spec.reply if case["direction"] == "reply" else spec.request
    assert kind is (m.ErrorBody if case["header"]["status"] else in_order)


def test_the_fields_are_those_of_the_message() -> None:
    shown, expected = {}, {}
    for path in MESSAGES:
        document, name = load(path), relative(path)
        shown[name] = {field["name"]: field["encoding"] for field in document["fields"]}
        fields = fields_of(BODY_CLASSES[document["message"]])
        expected[name] = {field: str(encoding) for field, encoding in fields.items()}
    assert shown == expected


@pytest.mark.parametrize(("path", "case"), FRAMES)
def test_a_frame_both_ways(path: Path, case: dict[str, Any]) -> None:
    wire, payload = bytes.fromhex(case["wire"]), bytes.fromhex(case["payload"])
    assert built_by(case["header"], payload) == wire
    for chunks in ways_to_feed(wire):
        (frame,), _ = read(chunks)
        assert header_of(frame) == case["header"]
        assert frame.payload == payload


# --- what is invalid ---


def receiver_of(case: dict[str, Any]) -> Connection:
    role = Role.SERVER if case["receiver"] == "daemon" else Role.CLIENT
    connection = Connection(role, max_payload_bytes=case["max_payload_bytes"], state=State[case["state"]])
    for asked in case["in_flight"]:
        first = asked["first_request_id"]
        connection._in_flight |= dict.fromkeys(range(first, first + asked["count"]), Opcode[asked["op"]])
    return connection


@pytest.mark.parametrize(("path", "case"), INVALID)
def test_an_invalid_frame_is_refused_as_the_vector_says(path: Path, case: dict[str, Any]) -> None:
    wire = bytes_from_json(case["wire"])
    whole, with_tail, in_pieces = ways_to_feed(wire)
    # Nothing comes behind the end.
    for chunks in [whole, in_pieces] if case["then_eof"] else [whole, with_tail, in_pieces]:
        check_refusal(case, chunks)


def check_refusal(case: dict[str, Any], chunks: list[bytes]) -> None:
    connection = receiver_of(case)
    state, in_flight = connection.state, connection.in_flight
    for chunk in chunks:
        connection.receive_data(chunk)
    if case["then_eof"]:
        connection.receive_eof()
    (event,) = events_of(connection)
    status = Status[case["error"]["status"]]
    if status is Status.DISCONNECTED:
        assert event == EndOfStream(is_clean=False)
    else:
        assert isinstance(event, StreamBroken if case["error"]["fatal"] else Rejected)
        assert event.failure.status is status
    if case["error"]["fatal"]:
        assert connection.state is State.CLOSED
    else:
        assert (connection.state, connection.in_flight) == (state, in_flight)


# --- conversations ---


class Replay:
    """Both ends of each connection of a conversation, and the requests the daemon has not answered."""

    def __init__(self) -> None:
        self.clients: dict[str, Connection] = {}
        self.servers: dict[str, Connection] = {}
        self.asked: dict[tuple[str, int], Request] = {}

    def open(self, name: str) -> None:
        if name not in self.clients:
            self.clients[name] = Connection(Role.CLIENT, max_payload_bytes=MAX_PAYLOAD_BYTES)
            self.servers[name] = Connection(Role.SERVER, max_payload_bytes=MAX_PAYLOAD_BYTES)

    def step(self, step: dict[str, Any]) -> None:
        self.open(step["connection"])
        body = body_from_json(BODY_CLASSES[step["message"]], step["body"])
        wire = bytes_from_json(step["wire"])
        produced = self.client_step(step, body) if step["from"] == "client" else self.daemon_step(step, body)
        assert produced.hex() == wire.hex()
        name = step["connection"]
        assert self.clients[name].state is self.servers[name].state
        assert self.clients[name].in_flight == self.servers[name].in_flight or step["op"] == "GOODBYE"

    def client_step(self, step: dict[str, Any], body: m.Body) -> bytes:
        name, header, op = step["connection"], step["header"], Opcode[step["op"]]
        session_id, is_quiet = int(header["session_id"], 16), bool(header["flags"] & Flag.QUIET)
        request_id, wire = self.clients[name].send_request(op, body, session_id=session_id, quiet=is_quiet)
        assert hex(request_id) == header["request_id"]
        (event,) = self.receive(self.servers[name], wire)
        assert event == Request(op, request_id, session_id, is_quiet, body)
        self.asked[name, request_id] = event
        return wire

    def daemon_step(self, step: dict[str, Any], body: m.Body) -> bytes:
        name, header, server = step["connection"], step["header"], self.servers[step["connection"]]
        request_id, status = int(header["request_id"], 16), header["status"]
        result: m.Body | Failure = body
        if isinstance(body, m.ErrorBody):
            result = Failure.from_body(status, body)
        if step["op"] == "GOODBYE":
            assert isinstance(result, Failure)
            wire = server.send_goodbye(result)
            assert self.receive(self.clients[name], wire) == [Goodbye(result)]
            return wire
        if isinstance(body, m.LeaseEvent | m.RegionEvent):
            wire = server.send_event(request_id, body)
            told: Notification | RegionNotification = (
                RegionNotification(request_id, body)
                if isinstance(body, m.RegionEvent)
                else Notification(request_id, body)
            )
            assert self.receive(self.clients[name], wire) == [told]
            return wire
        request = self.asked.pop((name, request_id))
        wire = server.send_failure(request, result) if isinstance(result, Failure) else server.send_reply(request, body)
        assert self.receive(self.clients[name], wire) == [Reply(Opcode[step["op"]], request_id, result)]
        return wire

    def receive(self, connection: Connection, wire: bytes) -> list[Any]:
        """Byte by byte up to the last one: there must be nothing to see before it."""
        for at in range(len(wire) - 1):
            connection.receive_data(wire[at : at + 1])
            assert at % 97 or connection.next_event() is None
        connection.receive_data(wire[-1:])
        return events_of(connection)


@pytest.mark.parametrize("path", CONVERSATIONS, ids=relative)
def test_both_peers_replay_a_conversation(path: Path) -> None:
    replay = Replay()
    for step in load(path)["steps"]:
        replay.step(step)
    quiet = [request for request in replay.asked.values() if not request.is_quiet]
    assert not quiet or load(path)["steps"][-1]["op"] == "GOODBYE"


@pytest.mark.parametrize("path", CONVERSATIONS, ids=relative)
def test_a_conversation_read_in_one_piece(path: Path) -> None:
    """As after a stall: all that the client sent on a connection arrives at once."""
    steps = load(path)["steps"]
    for name in {step["connection"] for step in steps}:
        sent = [bytes_from_json(s["wire"]) for s in steps if s["connection"] == name and s["from"] == "client"]
        frames, reader = read([b"".join(sent)])
        assert [len(frame.payload) + HEADER_BYTES for frame in frames] == [len(wire) for wire in sent]
        assert not reader.is_mid_frame
