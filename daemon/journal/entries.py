"""The table of rows, many rows at a time.

A statement lets go of the interpreter at each step (sqlite3), and has it back when the broker's thread pauses: a commit
of hundreds of statements would last for as long as the broker is busy. So each takes many rows, and gives one at most.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Final, TypeVar

from gpulease.daemon.journal.rows import Change, RowKind, digest_of

SCHEMA: Final = (
    "CREATE TABLE entry (kind INTEGER NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (kind, key))"
    " WITHOUT ROWID"
)

MAX_ROWS: Final = 256
"""In one statement, a power of two: 768 parameters, of which any SQLite takes 999 (sqlite.org/limits.html)."""

_Part = TypeVar("_Part")


def put(connection: sqlite3.Connection, changes: Iterable[Change]) -> int:
    """Write changes in a transaction, of each row the last; by how much the sum over all rows changes.

    Raises sqlite3.Error, or ValueError if what is there was not written here.
    """
    latest = {(change.kind, change.key): change for change in changes}
    keys: defaultdict[RowKind, list[bytes]] = defaultdict(list)
    gone: defaultdict[RowKind, list[bytes]] = defaultdict(list)
    there: list[tuple[int, bytes, bytes]] = []
    for (kind, key), change in latest.items():
        keys[kind].append(key)
        if (value := change.value()) is None:
            gone[kind].append(key)
        else:
            there.append((int(kind), key, value))
    more = -sum(digest_of(kind, key, value) for kind, key, value in _present(connection, keys))
    for kind, some in gone.items():
        for part in _parts(some):
            connection.execute(_delete(len(part)), (int(kind), *part))
    for rows in _parts(there):
        connection.execute(_insert(len(rows)), [value for row in rows for value in row])
    return more + sum(digest_of(*row) for row in there)


def _present(
    connection: sqlite3.Connection, keys: defaultdict[RowKind, list[bytes]]
) -> Iterator[tuple[int, bytes, bytes]]:
    """Those of these rows that there are."""
    for kind, some in keys.items():
        for part in _parts(some):
            ((text,),) = connection.execute(_select(len(part)), (int(kind), *part))
            found = [bytes.fromhex(piece) for piece in text.split(" ")] if text is not None else []
            for key, value in zip(found[::2], found[1::2], strict=True):
                yield int(kind), key, value


def _parts(rows: Sequence[_Part]) -> Iterator[Sequence[_Part]]:
    """Powers of two of them, so that few statements are ever compiled: the last row fills up, which changes nothing."""
    for start in range(0, len(rows), MAX_ROWS):
        part = rows[start : start + MAX_ROWS]
        missing = (1 << (len(part) - 1).bit_length()) - len(part)
        yield [*part, *[part[-1]] * missing]


@cache
def _select(count: int) -> str:
    return (
        "SELECT group_concat(hex(key) || ' ' || hex(value), ' ') FROM entry"
        f" WHERE kind = ? AND key IN ({_places('?', count)})"
    )


@cache
def _delete(count: int) -> str:
    return f"DELETE FROM entry WHERE kind = ? AND key IN ({_places('?', count)})"


@cache
def _insert(count: int) -> str:
    return f"INSERT OR REPLACE INTO entry VALUES {_places('(?, ?, ?)', count)}"


def _places(one: str, count: int) -> str:
    return ", ".join([one] * count)
