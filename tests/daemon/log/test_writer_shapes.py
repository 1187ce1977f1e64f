"""No text of a tenant's, a kernel's or a driver's can forge a line, tear one, or be longer than its place."""

import json
import logging
import os
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import (
    ATTRIBUTE,
    MAX_LINE_BYTES,
    HumanShape,
    JsonShape,
    Shape,
    is_journal,
    log_event,
    shown,
)

HOSTILE = [
    "ann\n2026-01-01 00:00:00.000 ERROR   forged",
    'ann"} {"event":"forged',
    "a\x00\x1b[2J\x07\r\x7f",
    "\u202etxt.exe\u2028\u2029\u0085",
    "\udc80\ud800",
    "💥" * 5000,
    "\x01" * 100_000,
]


def record_of(fields: dict[str, Any], message: str = "lease granted", level: int = logging.INFO) -> logging.LogRecord:
    record = logging.LogRecord("gpulease", level, "", 0, message, (), None)
    setattr(record, ATTRIBUTE, ("lease.granted", fields))
    return record


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize(
    "shape",
    [JsonShape("broker"), JsonShape("broker", for_journal=True), HumanShape()],
    ids=["json", "journal", "human"],
)
def test_hostile_texts_are_one_short_line(shape: Shape, text: str) -> None:
    line = shape.line(record_of({"tenant": text, "reason": text, "card": text}, f"message {text}"))
    assert len(line) <= MAX_LINE_BYTES
    assert line.endswith(b"\n")
    assert len(line.decode().splitlines()) == 1
    assert line.decode()[:-1].isprintable()


@given(st.text(max_size=3000), st.dictionaries(st.sampled_from(["tenant", "reason", "by"]), st.text()))
def test_any_text_is_one_line_of_json(message: str, fields: dict[str, str]) -> None:
    line = JsonShape("broker").line(record_of(fields, message.replace("%", "")))
    assert len(line) <= MAX_LINE_BYTES
    told = json.loads(line)
    assert line.count(b"\n") == 1
    assert told["event"] == "lease.granted"
    assert set(fields) <= set(told)


VALUES = st.none() | st.booleans() | st.integers(0, 2**64) | st.floats(0, 1e9) | st.text(max_size=300)


@given(st.dictionaries(st.sampled_from(["tenant", "reason", "took_ms"]), VALUES | st.lists(st.text(), max_size=3)))
def test_a_plain_line_is_the_one_that_cutting_makes(fields: dict[str, Any]) -> None:
    shape, record = JsonShape("broker", for_journal=True), record_of(fields)
    plain, cut = (
        re.sub(rb'"monotonic_ns":\d+,', b"", line(record, "lease.granted", fields))
        for line in (shape._plain_line, shape._cut_line)
    )
    if plain:
        assert plain.isascii()
        assert list(json.loads(plain[3:]).items()) == list(json.loads(cut[3:]).items())


@pytest.mark.parametrize("fields", [{}, {"by": None}, {"tenant": "ann", "took_ms": 0.25, "by": None}])
def test_a_line_without_odd_characters_is_plain(fields: dict[str, Any]) -> None:
    assert JsonShape("broker")._plain_line(record_of(fields), "lease.granted", fields)


@pytest.mark.parametrize("text", [*HOSTILE, "a" * 1000, "é", "\t", "[", '"'])
def test_a_text_that_may_be_shown_otherwise_is_never_in_a_plain_line(text: str) -> None:
    assert not JsonShape("broker")._plain_line(record_of({}), "lease.granted", {"tenant": text})


def test_a_record_in_json() -> None:
    told = json.loads(
        JsonShape("zygote").line(record_of({"lease_id": "0f", "took_ms": 1.25, "is_warm": True, "by": None}))
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", told.pop("time"))
    assert told.pop("monotonic_ns") > 0
    assert told == {
        "level": "info",
        "event": "lease.granted",
        "message": "lease granted",
        "process": "zygote",
        "pid": os.getpid(),
        "lease_id": "0f",
        "took_ms": 1.25,
        "is_warm": True,
    }


@pytest.mark.parametrize(
    ("fields", "tail"),
    [
        ({}, "lease granted"),
        ({"tenant": "ann", "took_ms": 1.5, "by": None}, "lease granted  tenant=ann took_ms=1.5"),
        ({"reason": 'two words and "quotes"'}, 'lease granted  reason="two words and \\"quotes\\""'),
        ({"reason": ""}, 'lease granted  reason=""'),
        ({"permissions": ["read", "write"]}, "lease granted  permissions=read,write"),
        ({"name": "lease granted"}, "lease granted"),
        ({"tenant": "a=b c=d"}, 'lease granted  tenant="a=b c=d"'),
    ],
)
def test_a_record_for_people(fields: dict[str, Any], tail: str) -> None:
    line = HumanShape().line(record_of(fields)).decode()
    assert re.fullmatch(r"[-\d]{10} [:\d]{8}\.\d{3} INFO    " + re.escape(tail) + "\n", line)


def test_colour_is_for_terminals() -> None:
    for in_colour in (False, True):
        line = HumanShape(in_colour=in_colour).line(record_of({}, level=logging.ERROR))
        assert (b"\x1b[31mERROR  \x1b[0m" in line) == in_colour


@pytest.mark.parametrize(
    ("level", "priority"), [(logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3)]
)
def test_the_journal_is_told_how_bad_it_is(level: int, priority: int) -> None:
    for shape in (JsonShape("broker", for_journal=True), HumanShape(for_journal=True)):
        assert shape.line(record_of({}, level=level)).startswith(f"<{priority}>".encode())


def test_which_descriptor_is_the_journals(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with (tmp_path / "log").open("wb") as file:
        status = os.fstat(file.fileno())
        assert not is_journal(file.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        assert is_journal(file.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + 1}")
        assert not is_journal(file.fileno())
    assert not is_journal(file.fileno() if not file.closed else 1 << 20)


def test_a_traceback_stays_in_its_record() -> None:
    try:
        raise ValueError("a\n2026-01-01 00:00:00.000 ERROR   forged\n" * 200)
    except ValueError:
        record = record_of({})
        record.exc_info = sys.exc_info()
    line = JsonShape("broker").line(record)
    assert len(line) <= MAX_LINE_BYTES
    assert line.count(b"\n") == 1
    head, *lines = HumanShape().line(record).decode().splitlines()
    assert head.endswith("lease granted")
    assert lines
    assert all(line.startswith("    | ") for line in lines)


def test_a_librarys_record_is_told_as_such() -> None:
    record = logging.LogRecord("asyncio", logging.WARNING, "", 0, "took %s s", ("3\n4",), None)
    told = json.loads(JsonShape("broker").line(record))
    assert (told["event"], told["logger"], told["message"]) == ("log.other", "asyncio", "took 3\\n4 s")


@given(st.text(), st.integers(2, 50))
def test_what_is_shown_is_bounded_and_printable(text: str, limit: int) -> None:
    result = shown(text, limit)
    assert len(result) <= limit
    assert all(char.isprintable() or char == "\t" for char in result)


def test_a_lease_is_told_by_what_the_command_line_shows(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_event(LogEvent.LEASE_GRANTED, lease_id=255, tenant="ann")
        log_event(LogEvent.REQUEST_DENIED, lease_id=0, tenant="ann")
    assert [getattr(record, ATTRIBUTE)[1]["lease_id"] for record in caplog.records] == [f"{255:032x}", None]
