"""What the log may say is a table: the code says nothing else."""

import ast
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import JsonShape

ROOT = Path(__file__).parents[3]
SAYERS = {"log_event", "_log", "_log_of_lease"}
SHOWN = re.compile(r"\{(\w+)")


def said() -> Iterator[tuple[str, LogEvent, set[str]]]:
    """Each place where an event is logged, and the fields that it names."""
    for path in sorted((ROOT / "daemon").rglob("*.py")):
        text = path.read_text()
        if "LogEvent." not in text:
            # Most files log nothing, and to parse them takes long.
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in SAYERS:
                continue
            for part in ast.walk(node.args[0]):
                if isinstance(part, ast.Attribute) and getattr(part.value, "id", "") == "LogEvent":
                    fields = {keyword.arg for keyword in node.keywords if keyword.arg} - {"is_fault"}
                    yield f"{path.name}:{node.lineno}", LogEvent[part.attr], fields


@pytest.mark.exhaustive
def test_no_event_has_a_field_that_is_not_in_the_table() -> None:
    told = list(said())
    assert len(told) > 50
    assert [where for where, event, fields in told if fields - set(event.value.fields)] == []


def test_a_message_shows_only_fields_that_its_event_always_has() -> None:
    shown = {event: set(SHOWN.findall(event.kind.message)) for event in LogEvent}
    assert sum(map(bool, shown.values())) >= 6
    assert [where for where, event, fields in said() if not shown[event] <= fields] == []


def test_every_event_is_logged_somewhere() -> None:
    text = "".join(path.read_text() for path in (ROOT / "daemon").rglob("*.py") if path.name != "catalogue.py")
    assert {event.name for event in LogEvent} - set(re.findall(r"LogEvent\.(\w+)", text)) == set()


def test_names_are_dotted_and_one_of_a_kind() -> None:
    names = [event.value.name for event in LogEvent]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+\.[a-z_]+", name) for name in names)
    assert len(LogEvent.__members__) == len(list(LogEvent))


def test_no_field_has_the_name_of_what_every_line_has() -> None:
    line = JsonShape("broker").line(logging.LogRecord("", logging.INFO, "", 0, "", (), None))
    every = set(json.loads(line)) - set(LogEvent.LOG_OTHER.kind.fields)
    assert [event for event in LogEvent if every & set(event.kind.fields)] == []
