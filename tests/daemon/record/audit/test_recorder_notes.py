"""Tenants' notes in the broker's side of the audit log: what is recorded, when that is told, and what is refused."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from gpulease.daemon.leases.denials import Denial, DenialReason
from gpulease.daemon.record.audit import recorder as recorder_module
from gpulease.daemon.record.audit.record_writer import AuditWriter
from gpulease.daemon.record.audit.recorder import NOTE_BURST_BYTES, NOTE_FRAME_BYTES, FactRecorder, LogRecorder
from gpulease.daemon.record.audit.records import MAX_DEPTH, RecordKind

LEASE = 7


class MadeWriter:
    """A writer whose disk is the test."""

    def __init__(self) -> None:
        self.durable = 0
        self.taken: list[tuple[RecordKind, dict[str, Any]]] = []
        self.broken = ""
        self.is_full = False

    def put(self, kind: RecordKind, data: dict[str, Any], now_ns: int = 0) -> int:
        self.taken.append((kind, data))
        return 0 if self.is_full else len(self.taken)

    def problem(self) -> str:
        return self.broken


Told = list[DenialReason | None]


def played(scenario: Callable[[LogRecorder, MadeWriter, Callable[[bytes], None], Told], None]) -> Told:
    """Play a scenario in a loop. Returns what the notes' tenant was told."""
    told: Told = []

    def on_noted(denial: Denial | None) -> None:
        told.append(None if denial is None else denial.reason)

    async def play() -> None:
        recorder, writer = LogRecorder(is_required=False), MadeWriter()
        recorder.write_with(cast(AuditWriter, writer))
        recorder.attach(lambda event: None)
        scenario(recorder, writer, lambda note: recorder.note(LEASE, "ann", note, on_noted), told)
        recorder.on_change()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(play())
    return told


def test_a_note_is_answered_when_it_is_durable_and_not_before() -> None:
    def scenario(_: LogRecorder, writer: MadeWriter, note: Callable[[bytes], None], told: Told) -> None:
        note(b'{"a":[1,"x"]}')
        assert told == []
        assert writer.taken == [(RecordKind.NOTE, {"lease": f"{LEASE:032x}", "tenant": "ann", "note": {"a": [1, "x"]}})]
        writer.durable = 1

    assert played(scenario) == [None]


@pytest.mark.parametrize(
    "note",
    [b"", b"[]", b"7", b'{"a":0.5}', b'{"a": 1}', b'{"b":1,"a":1}', b'{"a b":1}', b'{"a":9007199254740992}', b"\xff"],
)
def test_what_is_no_canonical_object_is_refused_and_leaves_nothing(note: bytes) -> None:
    def scenario(_: LogRecorder, writer: MadeWriter, send: Callable[[bytes], None], __: Told) -> None:
        send(note)
        assert writer.taken == []

    assert played(scenario) == [DenialReason.INVALID_REQUEST]


def test_a_note_may_be_as_deep_as_its_record_can_hold() -> None:
    def scenario(_: LogRecorder, writer: MadeWriter, send: Callable[[bytes], None], __: Told) -> None:
        for depth in (MAX_DEPTH - 2, MAX_DEPTH - 1):
            send(b'{"a":' * depth + b"1" + b"}" * depth)
        writer.durable = 1

    assert played(scenario) == [DenialReason.INVALID_REQUEST, None]


def test_a_flood_is_refused_and_hinders_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    # However long a busy host takes for the flood.
    monkeypatch.setattr(recorder_module, "NOTE_BYTES_PER_S", 1)
    others: list[Denial | None] = []
    cost = 2 + NOTE_FRAME_BYTES

    def scenario(recorder: LogRecorder, writer: MadeWriter, send: Callable[[bytes], None], told: Told) -> None:
        writer.durable = 1 << 30
        for _ in range(NOTE_BURST_BYTES // cost + 2000):
            send(b"{}")
        assert told.count(None) < NOTE_BURST_BYTES // cost + 2000
        recorder.note(LEASE, "bob", b"{}", others.append)

    assert set(played(scenario)) == {None, DenialReason.RATE}
    assert others == [None]


def test_no_more_wait_for_the_disk_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_NOTES_WAITING", 2)

    def scenario(_: LogRecorder, writer: MadeWriter, send: Callable[[bytes], None], __: Told) -> None:
        for _i in range(3):
            send(b"{}")
        writer.durable = 2

    assert played(scenario) == [DenialReason.RATE, None, None]


def test_a_disk_that_refuses_and_a_queue_without_room_are_told() -> None:
    def scenario(recorder: LogRecorder, writer: MadeWriter, send: Callable[[bytes], None], _: Told) -> None:
        writer.is_full = True
        send(b"{}")
        writer.is_full = False
        send(b"{}")
        writer.broken = "No space left on device"
        send(b"{}")

    assert played(scenario) == [DenialReason.NOT_RECORDED] * 3


def test_a_daemon_without_a_log_says_so() -> None:
    told: list[Denial | None] = []
    FactRecorder().note(LEASE, "ann", b"{}", told.append)
    assert [denial and denial.reason for denial in told] == [DenialReason.UNSUPPORTED]
