"""Many rows at a time come to the same as one after the other."""

import sqlite3
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.record.journal.rows import (
    MAX_ROWS,
    SCHEMA,
    Change,
    RowDigests,
    RowKind,
    digest_of,
    encode,
    number_key,
    put,
)

CHANGES = st.lists(
    st.builds(
        Change,
        st.sampled_from([RowKind.LEASE, RowKind.TOMBSTONE, RowKind.DRAIN]),
        st.sampled_from([b"", b"\0", b" ", b"a key", number_key(7)]),
        st.none() | st.integers(0, 3),
    ),
    max_size=12,
)


def table() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute(SCHEMA)
    return connection


def rows_of(connection: sqlite3.Connection) -> dict[tuple[int, bytes], bytes]:
    return {(kind, key): value for kind, key, value in connection.execute("SELECT kind, key, value FROM entry")}


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    made = table()
    yield made
    made.close()


@pytest.mark.exhaustive
@given(st.lists(CHANGES, max_size=5), st.booleans())
def test_the_last_change_of_each_row_counts(commits: list[list[Change]], knows_digests: bool) -> None:
    connection, expected, total = table(), dict[tuple[int, bytes], bytes](), 0
    known = RowDigests()
    for changes in commits:
        done = put(connection, changes, known)
        total += done.sum_change
        if knows_digests:
            known |= done.digests
            known = RowDigests({row: digest for row, digest in known.items() if row not in done.removed})
        for change in changes:
            expected.pop((change.kind, change.key), None)
            if change.content is not None:
                expected[change.kind, change.key] = encode(change.content)
    assert rows_of(connection) == expected
    assert total == sum(digest_of(kind, key, value) for (kind, key), value in expected.items())
    connection.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 2, 3, MAX_ROWS - 1, MAX_ROWS, MAX_ROWS + 1, 3 * MAX_ROWS])
def test_many_take_few_statements(connection: sqlite3.Connection, count: int) -> None:
    statements: list[str] = []
    connection.set_trace_callback(statements.append)
    connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999)
    known = RowDigests()
    for content in (1, 2, None):
        done = put(connection, [Change(RowKind.LEASE, number_key(number), content) for number in range(count)], known)
        known |= done.digests
    # Only new rows are read before they are written; the digests of the others are known.
    assert len(statements) == (2 + 1 + 1) * -(-count // MAX_ROWS)
    assert rows_of(connection) == {}
    assert len(done.removed) == count
