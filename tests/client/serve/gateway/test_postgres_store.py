"""The properties that only the PostgreSQL store has."""

import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from gpulease.client.serve.gateway import StoreUnavailable
from gpulease.client.serve.gateway.ledger import InFlight, OperationCompleted, Reservation
from gpulease.client.serve.gateway.postgres_store import MAX_CONNECTIONS, PostgresStore
from helpers.losing_proxy import LosingProxy
from helpers.postgres_server import PostgresServer

HASH = bytes(32)


@pytest.fixture
def key() -> str:
    return secrets.token_hex(8)


def test_claims_run_out_by_the_servers_clock(postgres: PostgresServer, key: str) -> None:
    store = PostgresStore(postgres.conninfo)
    assert isinstance(store.reserve(key, HASH, 0.2), Reservation)
    answer = store.reserve(key, HASH, 0.2)
    assert isinstance(answer, InFlight)
    time.sleep(answer.remaining_s)
    again = store.reserve(key, HASH, 0.2)
    assert isinstance(again, Reservation)
    assert again.epoch == 2
    store.close()


def test_a_commit_is_on_the_disk_before_it_is_told(postgres: PostgresServer) -> None:
    with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET synchronous_commit TO off")
        connection.execute("SELECT pg_reload_conf()")
    try:
        store = PostgresStore(postgres.conninfo)
        assert store._transact(lambda connection: connection.execute("SHOW synchronous_commit").fetchone()) == ("on",)
        store.close()
    finally:
        with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM RESET synchronous_commit")
            connection.execute("SELECT pg_reload_conf()")


def test_connections_that_died_are_made_anew(postgres: PostgresServer, key: str) -> None:
    store = PostgresStore(postgres.conninfo)
    held = store.reserve(key, HASH, 60)
    assert isinstance(held, Reservation)
    steps: list[Callable[[], None]] = [lambda: store.start(held), lambda: store.complete(held, b"out")]
    for step in steps:
        with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'gpulease-gateway'"
            )
        step()
    assert store.reserve(key, HASH, 60) == OperationCompleted(1, b"out")
    store.close()


def test_a_commit_whose_answer_is_lost_is_found_done(postgres: PostgresServer, key: str) -> None:
    with tempfile.TemporaryDirectory(prefix="gpul-", dir="/tmp") as folder:
        proxy = LosingProxy(postgres.folder, Path(folder))
        store = PostgresStore(proxy.conninfo)
        try:
            proxy.lose = True
            held = store.reserve(key, HASH, 60)
            assert isinstance(held, Reservation)
            assert held.epoch == 1
            steps: list[Callable[[], None]] = [lambda: store.start(held), lambda: store.complete(held, b"out")]
            for step in steps:
                proxy.lose = True
                step()
            proxy.lose = True
            other = store.reserve(f"{key}!", HASH, 60)
            assert isinstance(other, Reservation)
            proxy.lose = True
            store.release(other)
            assert proxy.lost == 5
            assert store.reserve(key, HASH, 60) == OperationCompleted(1, b"out")
        finally:
            store.close()
            proxy.close()


def test_many_threads_share_few_connections(postgres: PostgresServer, key: str) -> None:
    store = PostgresStore(postgres.conninfo)
    seen: list[int] = []

    def ask(number: int) -> None:
        store.reserve(f"{key} {number}", HASH, 60)
        seen.append(len(store._idle))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 40
    assert max(seen) <= MAX_CONNECTIONS
    store.close()


@pytest.mark.parametrize("url", ["postgresql:///postgres?host=/nowhere", "postgresql:///nothing?host={}&user=gateway"])
def test_a_server_that_is_not_there(postgres: PostgresServer, url: str) -> None:
    with pytest.raises(StoreUnavailable, match="PostgreSQL: "):
        PostgresStore(url.format(postgres.folder), patience_s=0.2)


def test_two_that_make_the_table_at_once(postgres: PostgresServer) -> None:
    with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA fresh")
    url = f"{postgres.conninfo}&options=-c%20search_path%3Dfresh"
    stores: list[PostgresStore] = []
    threads = [threading.Thread(target=lambda: stores.append(PostgresStore(url))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 6
    for store in stores:
        store.close()
    with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
        found = connection.execute("SELECT schemaname FROM pg_tables WHERE tablename = 'gpulease_operation'").fetchall()
        assert ("fresh",) in found
