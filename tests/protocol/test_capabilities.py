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
from gpulease.protocol.operations import SESSION_OPCODES, SPECS, missing_permission

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
PINNED = {
    Opcode.MEM_ALLOC: (WRITE, False),
    Opcode.MEM_FREE: (WRITE, False),
    Opcode.MEM_WRITE: (WRITE, False),
    Opcode.ARENA_WRITE: (WRITE, False),
    Opcode.MEM_READ: (READ, False),
    Opcode.ARENA_READ: (READ, False),
    Opcode.MODULE_LOAD: (SUBMIT, False),
    Opcode.MODULE_UNLOAD: (SUBMIT, False),
    Opcode.LAUNCH: (SUBMIT, False),
    Opcode.MODULE_PARAMETERS: (SUBMIT, False),
    Opcode.MODULE_VARIABLE: (SUBMIT, False),
    Opcode.MODULE_FIGURES: (SUBMIT, False),
    Opcode.EVENT_RECORD: (SUBMIT, False),
    Opcode.EVENT_ELAPSED: (SUBMIT, False),
    Opcode.EVENT_DESTROY: (SUBMIT, False),
    Opcode.PRINTED: (SUBMIT, False),
    Opcode.STREAM_CREATE: (SUBMIT, False),
    Opcode.STREAM_DESTROY: (SUBMIT, False),
    Opcode.STREAM_WAIT: (SUBMIT, False),
    Opcode.SUBMIT_RUN: (SUBMIT, False),
    Opcode.LAUNCH_IN: (SUBMIT, False),
    Opcode.LAUNCH_WITH: (SUBMIT, False),
    Opcode.MEM_REUSE: (WRITE, False),
    Opcode.MEM_KEEP: (WRITE, False),
    Opcode.MEM_RESET: (SUBMIT | READ | WRITE, False),
    Opcode.REGION_REFUSED: (SUBMIT | READ | WRITE, True),
    Opcode.USE_TOKEN: (SUBMIT | READ | WRITE, True),
    Opcode.REGION_SET: (SUBMIT, False),
    Opcode.REGION_SET_FREE: (SUBMIT, False),
    Opcode.REGION_RELEASE: (SUBMIT | READ | WRITE, False),
    Opcode.GRAPH_CREATE: (SUBMIT | READ | WRITE, False),
    Opcode.GRAPH_LAUNCH: (SUBMIT | READ | WRITE, False),
    Opcode.GRAPH_LAUNCH_IN: (SUBMIT | READ | WRITE, False),
    Opcode.GRAPH_DESTROY: (SUBMIT | READ | WRITE, False),
    **dict.fromkeys(
        (Opcode.MEM_KEPT, Opcode.SYNC, Opcode.STREAM_SELECT, Opcode.STREAM_SYNC), (SUBMIT | READ | WRITE, True)
    ),
}
"""Permissions, and whether one suffices, when tokens were first given for these operations: none may change."""


@pytest.mark.parametrize("op", sorted(SESSION_OPCODES), ids=lambda op: op.name)
def test_what_each_operation_needs_of_each_set_of_permissions(op: Opcode) -> None:
    needs = SPECS[op].needs
    assert (needs.permissions, needs.any_suffices) == PINNED.get(op, (needs.permissions, needs.any_suffices))
    for bits in range(int(ALL_PERMISSIONS) + 1):
        has = Permission(bits)
        may = bool(has & SESSION_PERMISSIONS) if needs.any_suffices else not needs.permissions & ~has
        assert (not missing_permission(op, has)) == may, has
        frame = Frame(int(op), 0, 0, 7, 5, b"")
        assert (Guest(has, 1 << 62, 1, 9).refuse(frame) is None) == may, has


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
