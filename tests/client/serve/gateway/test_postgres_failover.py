"""A primary is lost for good, and its standby promoted: the standby has every outcome that a caller received."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest

from gpulease.client.serve.gateway import StoreUnavailable
from gpulease.client.serve.gateway.ledger import InFlight, OperationPhase, Reservation
from gpulease.client.serve.gateway.postgres_store import PostgresStore
from helpers.postgres_server import USER, PostgresServer
from helpers.store_contender import HASH, KEYS
from helpers.waiting import wait_until

from .test_store_contention import Contenders

ALONE_S = 0.3
WAITING = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


class Pair:
    """A primary and its standby; commits wait for the standby's disk."""

    def __init__(self) -> None:
        self.primary = PostgresServer(synchronous_standby_names="*")
        try:
            self.primary.start()
            self.standby = PostgresServer(self.primary, synchronous_standby_names="")
            self.conninfo = f"postgresql:///postgres?host={self.primary.folder},{self.standby.folder}&user={USER}"
        except BaseException:
            self.primary.discard()
            raise

    def waiting(self) -> list[int]:
        """The server's processes with commits that wait for the standby."""
        with psycopg.connect(self.primary.conninfo, autocommit=True) as connection:
            return [int(row[0]) for row in connection.execute(WAITING)]

    def cancel(self) -> None:
        """As an administrator who wants them gone: their commits are done, here alone."""
        with psycopg.connect(self.primary.conninfo, autocommit=True) as connection:
            connection.execute(f"SELECT pg_cancel_backend(pid) FROM ({WAITING}) AS waiting")

    def discard(self) -> None:
        self.standby.discard()
        self.primary.discard()


@pytest.fixture
def pair(postgres: PostgresServer) -> Iterator[Pair]:
    found = Pair()
    try:
        found.standby.start()
        yield found
    finally:
        found.discard()


@pytest.mark.exhaustive
def test_a_primary_that_is_lost_under_load(pair: Pair, tmp_path: Path) -> None:
    contenders = Contenders(pair.conninfo, tmp_path, 3)
    try:
        contenders.wait_for_effects(4)
        # What the primary would commit from now on, the standby never hears of.
        pair.standby.stop()
        time.sleep(ALONE_S)
        before = contenders.effects()
        pair.primary.stop()
        pair.standby.start()
        pair.standby.promote()
        contenders.finish()
        contenders.check()
        assert 0 < sum(before.values()) < len(KEYS)
        # Nobody was killed: those that were under way alone can have run out, or be unknown.
        assert len(contenders.effects()) >= len(KEYS) - 3
    finally:
        contenders.discard()


@pytest.mark.exhaustive
def test_what_no_standby_has_nobody_is_told(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    store = PostgresStore(pair.conninfo, patience_s=1.0, commit_s=0.2)
    held = store.reserve("key", HASH, 60)
    assert isinstance(held, Reservation)
    pair.standby.stop()
    with pytest.raises(StoreUnavailable, match=r"replication|timeout"):
        store.start(held)
    # Here it was done; there nobody has heard of it, so nobody may have relied on it.
    with psycopg.connect(pair.primary.conninfo, autocommit=True) as connection:
        assert connection.execute("SELECT phase FROM gpulease_operation").fetchall() == [(int(OperationPhase.STARTED),)]
    assert pair.waiting() == []
    pair.primary.stop()
    pair.standby.start()
    pair.standby.promote()
    assert not caplog.text
    assert isinstance(store.reserve("key", HASH, 60), InFlight)
    assert "no synchronous_standby_names" in caplog.text
    store.start(held)
    store.complete(held, b"out")
    store.close()


@pytest.mark.exhaustive
def test_a_commit_whose_wait_an_administrator_ended_is_not_believed(pair: Pair) -> None:
    store = PostgresStore(pair.conninfo)
    pair.standby.stop()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(store.reserve, "key", HASH, 60)
        (first,) = wait_until(pair.waiting, "it waits for the standby")
        pair.cancel()
        # It is done again, and waits again.
        wait_until(lambda: {*pair.waiting()} - {first}, "it waits for the standby once more")
        assert not asked.done()
        pair.standby.start()
        held = asked.result(20)
    assert isinstance(held, Reservation)
    assert held.epoch == 1
    store.close()
