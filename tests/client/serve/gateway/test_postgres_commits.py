"""Commits that take too long are cancelled, others never; with a real server that waits for a missing standby."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from gpulease.client.serve.gateway.postgres_store import CommitWatch, Connection
from helpers.postgres_server import PostgresServer

LIMIT_S = 0.2


@pytest.fixture
def watch() -> Iterator[CommitWatch[Connection]]:
    watch = CommitWatch[Connection](LIMIT_S, lambda connection: connection.cancel_safe(timeout=60))
    yield watch
    watch.close()
    watch.close()


def commit_slowly(watch: CommitWatch[Connection], connection: Connection, seconds: float) -> None:
    watch.begins(connection)
    try:
        connection.execute(f"SELECT pg_sleep({seconds})")
    finally:
        watch.ended(connection)


def test_each_is_given_up_in_its_time(postgres: PostgresServer, watch: CommitWatch[Connection]) -> None:
    connections = [psycopg.connect(postgres.conninfo, autocommit=True) for _ in range(4)]
    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(commit_slowly, watch, one, 60) for one in connections[:3]]
        for _ in range(5):
            commit_slowly(watch, connections[3], 0.01)
        assert all(isinstance(one.exception(), psycopg.errors.QueryCanceled) for one in slow)
    assert LIMIT_S <= time.monotonic() - began < 30
    # Nothing that came late ends what is done next.
    for connection in connections:
        commit_slowly(watch, connection, 0.01)
        connection.execute(f"SELECT pg_sleep({2 * LIMIT_S})")
        connection.close()


def test_nobody_wakes_while_there_is_nothing(postgres: PostgresServer, watch: CommitWatch[Connection]) -> None:
    connection = psycopg.connect(postgres.conninfo, autocommit=True)
    commit_slowly(watch, connection, 0)
    thread = watch._thread
    assert thread is not None
    time.sleep(2 * LIMIT_S)
    before = wakings(thread.native_id)
    time.sleep(2 * LIMIT_S)
    assert wakings(thread.native_id) == before
    commit_slowly(watch, connection, 0)
    connection.close()


def wakings(thread_id: int | None) -> list[str]:
    """Return the counts of context switches of a thread of this process."""
    lines = Path(f"/proc/self/task/{thread_id}/status").read_text().splitlines()
    return [line for line in lines if "ctxt_switches" in line]
