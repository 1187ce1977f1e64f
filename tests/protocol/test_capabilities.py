import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.contract.guests import Guest
from gpulease.protocol.capabilities import (
    ALL_PERMISSIONS,
    SESSION_PERMISSIONS,
    Permission,
    names_of,
    narrowing_source,
    parse_narrowing,
    permissions_of,
)
from gpulease.protocol.framing import Frame
from gpulease.protocol.opcodes import Opcode
from gpulease.protocol.operations import SESSION_OPCODES, missing_permission

README = Path(__file__).parents[2] / "protocol" / "README.md"
SETS = st.integers(1, int(ALL_PERMISSIONS)).map(Permission)


@given(SETS, SETS)
def test_more_permissions_never_miss_more(one: Permission, other: Permission) -> None:
    for op in range(0x0600, 0x0640):
        assert missing_permission(op, one | other) & ~missing_permission(op, one) == 0


def test_each_operation_needs_something_and_all_suffice() -> None:
    for op in SESSION_OPCODES:
        assert missing_permission(op, Permission(0)), op.name
        assert not missing_permission(op, SESSION_PERMISSIONS), op.name
        assert missing_permission(op, ALL_PERMISSIONS & ~SESSION_PERMISSIONS)
    assert not missing_permission(Opcode.PING, Permission(0))


def test_an_operation_that_is_not_in_the_table_needs_all() -> None:
    assert missing_permission(0x06FF, SESSION_PERMISSIONS & ~Permission.MEM_READ) is Permission.MEM_READ


SUBMIT, READ, WRITE = Permission.TASKLET_SUBMIT, Permission.MEM_READ, Permission.MEM_WRITE
ALL_OF = {
    Opcode.MEM_ALLOC: WRITE,
    Opcode.MEM_FREE: WRITE,
    Opcode.MEM_WRITE: WRITE,
    Opcode.ARENA_WRITE: WRITE,
    Opcode.MEM_READ: READ,
    Opcode.ARENA_READ: READ,
    Opcode.MODULE_LOAD: SUBMIT,
    Opcode.MODULE_UNLOAD: SUBMIT,
    Opcode.LAUNCH: SUBMIT,
    Opcode.MODULE_PARAMETERS: SUBMIT,
    Opcode.MODULE_VARIABLE: SUBMIT,
    Opcode.MODULE_FIGURES: SUBMIT,
    Opcode.EVENT_RECORD: SUBMIT,
    Opcode.EVENT_ELAPSED: SUBMIT,
    Opcode.EVENT_DESTROY: SUBMIT,
    Opcode.PRINTED: SUBMIT,
    Opcode.STREAM_CREATE: SUBMIT,
    Opcode.STREAM_DESTROY: SUBMIT,
    Opcode.STREAM_WAIT: SUBMIT,
    Opcode.SUBMIT_RUN: SUBMIT,
    Opcode.LAUNCH_IN: SUBMIT,
    Opcode.LAUNCH_WITH: SUBMIT,
    Opcode.MEM_REUSE: WRITE,
    Opcode.MEM_KEEP: WRITE,
    Opcode.MEM_RESET: SUBMIT | READ | WRITE,
    Opcode.REGION_SET: SUBMIT,
    Opcode.REGION_SET_FREE: SUBMIT,
    Opcode.REGION_RELEASE: SUBMIT | READ | WRITE,
    Opcode.GRAPH_CREATE: SUBMIT | READ | WRITE,
    Opcode.GRAPH_LAUNCH: SUBMIT | READ | WRITE,
    Opcode.GRAPH_LAUNCH_IN: SUBMIT | READ | WRITE,
    Opcode.GRAPH_DESTROY: SUBMIT | READ | WRITE,
}
ANY_OF = frozenset({Opcode.MEM_KEPT, Opcode.SYNC, Opcode.STREAM_SELECT, Opcode.STREAM_SYNC})


@pytest.mark.parametrize("op", sorted(SESSION_OPCODES), ids=lambda op: op.name)
def test_what_each_operation_needs_of_each_set_of_permissions(op: Opcode) -> None:
    for bits in range(int(ALL_PERMISSIONS) + 1):
        has = Permission(bits)
        may = bool(has & SESSION_PERMISSIONS) if op in ANY_OF else not ALL_OF[op] & ~has
        assert (not missing_permission(op, has)) == may, has
        frame = Frame(int(op), 0, 0, 7, 5, b"")
        assert (Guest(has, 1 << 62, 1, 9).refuse(frame) is None) == may, has


def test_the_specification_says_the_same() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split("## Tokens")[1].split("## Events")[0].split())
    for permission in (SUBMIT, READ, WRITE):
        (row,) = re.findall(rf"\| {int(permission):#04x} \| {permission.name} \| ([^|]*) \|", text)
        named = {Opcode[word] for word in re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", row) if word in Opcode.__members__}
        listed = {op for op, needed in ALL_OF.items() if needed == permission}
        assert named - {Opcode.GPU_SUBMIT} == listed
    (any_of,) = re.findall(r"([A-Z_, a-z]*) need any of the three", text)
    assert {Opcode[word] for word in re.findall(r"[A-Z]+_?[A-Z]+", any_of)} == ANY_OF


@given(st.integers(0, 10**18 - 1), SETS)
def test_narrowings_are_read_as_they_were_written(expires_ms: int, permissions: Permission) -> None:
    assert parse_narrowing(narrowing_source(expires_ms, permissions)) == (expires_ms, permissions)
    assert parse_narrowing(narrowing_source(expires_ms, None)) == (expires_ms, ALL_PERMISSIONS)


@given(SETS)
def test_names(permissions: Permission) -> None:
    assert permissions_of(names_of(permissions)) == permissions


@pytest.mark.parametrize(
    "text",
    [
        "",
        "check if true;\n",
        "check if time($t), $t <= 5;",
        "check if time($t), $t <= 5;\ncheck if time($t), $t <= 6;\n",
        "check if time($t), $t <= 5;\ncheck if permission($p), {}.contains($p);\n",
        'check if time($t), $t <= 5;\ncheck if permission($p), {"ROOT"}.contains($p);\n',
        f"check if time($t), $t <= {10**18};\n",
    ],
)
def test_nothing_else_is_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"block|permission"):
        parse_narrowing(text)


def test_what_no_daemon_would_take_is_not_written() -> None:
    for expires_ms, permissions in ((-1, None), (10**18, None), (5, Permission(0))):
        with pytest.raises(ValueError, match=r"time|nothing"):
            narrowing_source(expires_ms, permissions)
