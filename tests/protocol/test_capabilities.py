import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.protocol.capabilities import (
    ALL_PERMISSIONS,
    SESSION_PERMISSIONS,
    Permission,
    missing_permission,
    names_of,
    narrowing_source,
    parse_narrowing,
    permissions_of,
)
from gpulease.protocol.opcodes import SESSION_OPCODES, Opcode

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
