"""The specification's tables are the code's: numbers, bodies, offsets, limits, states."""

import re
from pathlib import Path
from typing import Any

import pytest

from gpulease.protocol import Opcode, Status, limits
from gpulease.protocol import messages as m
from gpulease.protocol.capabilities import AttachOption, Permission
from gpulease.protocol.connection_states import TRANSITIONS
from gpulease.protocol.framing import HEADER
from gpulease.protocol.opcodes import (
    ErrorTlv,
    HelloOption,
    HelloRequestOption,
    ParameterType,
    SessionOption,
    SubmitOption,
)
from gpulease.protocol.primitives import LeaseParameter, Tlv
from gpulease.protocol.rpc import CallErrorCode, CallStatus

from .encodings import BODY_CLASSES, Encoding, fields_of
from .generate_readme import TABLES, made
from .vector_json import VECTORS

TEXT = (VECTORS.parent / "protocol" / "README.md").read_text(encoding="utf-8")
GRAPH_PARTS = (m.GraphNode, m.GraphParameter, m.GraphPlace, m.RegionRef)
PARTS = (
    Tlv,
    LeaseParameter,
    m.InventoryEntry,
    m.Candidate,
    m.KernelEntry,
    m.KernelFigures,
    *GRAPH_PARTS,
    m.SubmitArgument,
    m.KeptBuffer,
)
RECORDS: dict[str, type[Any]] = {kind.__name__: kind for kind in PARTS}
DESCRIBED = {name: kind for name, kind in (BODY_CLASSES | RECORDS).items() if kind is not m.Empty}


def table(first_header: str, text: str = TEXT) -> list[list[str]]:
    """The rows of the first table that starts with these headers."""
    lines = text[text.index(first_header) :].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.parent.name)
def test_generated_tables(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert made(path) == text, "write them: PYTHONPATH=.dev python -m tests.protocol.generate_readme"


def test_statuses() -> None:
    rows = table("| number | status |")
    assert [row[:2] for row in rows] == [[str(int(status)), status.name] for status in Status]
    assert all(meaning and remedy for _, _, meaning, remedy in rows)


def test_error_details() -> None:
    rows = table("| type | detail |")
    assert [row[:2] for row in rows] == [[str(int(kind)), kind.name] for kind in ErrorTlv]


def test_limits() -> None:
    # How large a receiver's buffer is shows nowhere on the wire.
    values = {name: str(value) for name, value in vars(limits).items() if name.isupper() and "BUFFER" not in name}
    assert {row[0]: row[1] for row in table("| limit | value |")} == values


def test_permissions() -> None:
    expected = [[f"0x{int(permission):02x}", permission.name] for permission in Permission]
    assert [row[:2] for row in table("| bit | permission |")] == expected


def test_header() -> None:
    at, expected = 0, []
    for field in HEADER.subcons:
        expected.append([str(at), field.name])
        at += field.sizeof()
    assert [row[:2] for row in table("| at | header field |")] == expected
    assert at == 40


def limit_of(encoding: Encoding) -> int:
    return encoding.limit or (encoding.item.limit if encoding.item else 0)


def test_each_body() -> None:
    sections = {name: TEXT[TEXT.index(f"#### `{name}`\n") :] for name in DESCRIBED}
    tables = {name: table("| at | field |", section) for name, section in sections.items()}
    assert {name: [row[:3] for row in rows] for name, rows in tables.items()} == {
        name: rows_of(name) for name in DESCRIBED
    }


def rows_of(name: str) -> list[list[str]]:
    at: int | None = 0
    expected = []
    for field, encoding in fields_of(DESCRIBED[name]).items():
        limit = f"`, {limit_of(encoding)}" if limit_of(encoding) else ""
        expected.append(["…" if at is None else str(at), field, f"{encoding}{limit}"])
        at = None if at is None or encoding.size is None else at + encoding.size
    return expected


def test_nothing_is_described_that_does_not_exist() -> None:
    assert set(re.findall(r"^#### `(\w+)`$", TEXT, re.MULTILINE)) == set(DESCRIBED)
    known = set(DESCRIBED) | {"Empty"} | {op.name for op in Opcode} | {status.name for status in Status}
    said = set(re.findall(r"\b[A-Z]{3,}_[A-Z_]+\b", TEXT))
    known |= set(Permission.__members__) | set(HelloOption.__members__) | set(SessionOption.__members__)
    known |= set(HelloRequestOption.__members__) | set(AttachOption.__members__)
    known |= set(SubmitOption.__members__)
    known |= set(CallStatus.__members__) | set(CallErrorCode.__members__)
    triggers = {trigger.name for _, trigger in TRANSITIONS}
    assert (
        said - known - triggers - {name for name in vars(limits) if name.isupper()} - set(ErrorTlv.__members__) == set()
    )


def test_links_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= anchors


def test_parameter_types() -> None:
    told = [name.strip("`. ") for row in table("| byte | parameter type |")[1:5] for name in row[1].split("` `")]
    assert [name.upper() for name in told] == [kind.name for kind in ParameterType][1:17]
