from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpulease.client.serve.gateway.ledger import Moment
from gpulease.client.serve.gateway.postgres_store import PostgresStore
from gpulease.client.serve.gateway.sqlite_store import SqliteStore
from gpulease.client.serve.gateway.store import ReplicatedIdempotencyStore
from helpers.postgres_server import PostgresServer, programs

OpenStore = Callable[[], ReplicatedIdempotencyStore]


class Clock:
    """A clock for the expiry of claims, and a wall clock. The test sets both."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.clock_id = "this boot"

    def moment(self) -> Moment:
        return Moment(self.clock_id, self.now_s)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session", autouse=True)
def _postgres() -> Iterator[PostgresServer | None]:
    """Start a server for all tests, before any test counts processes. Tests must leave it running."""
    if programs() is None:
        yield None
        return
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.discard()


@pytest.fixture
def postgres(_postgres: PostgresServer | None) -> PostgresServer:
    """Return the server. Skips the test if PostgreSQL is not installed."""
    if _postgres is None:
        pytest.skip("no PostgreSQL server is installed (Debian: postgresql)")
    return _postgres


@pytest.fixture(params=["sqlite", "postgres"])
def open_store(request: pytest.FixtureRequest, clock: Clock, tmp_path: Path) -> Iterator[OpenStore]:
    """Return a function that opens the same store at each call.

    Tests with this fixture run with both kinds of stores.
    """
    server: PostgresServer | None = request.getfixturevalue("postgres") if request.param == "postgres" else None
    with ExitStack() as stack:

        def open_it() -> ReplicatedIdempotencyStore:
            store: ReplicatedIdempotencyStore
            if server is None:
                store = SqliteStore(tmp_path / "store", clock=clock.moment, unix_s=lambda: clock.now_s)
            else:
                store = PostgresStore(server.conninfo, now_s=lambda: clock.now_s)
            stack.callback(store.close)
            return store

        yield open_it


@pytest.fixture
def store(open_store: OpenStore) -> ReplicatedIdempotencyStore:
    return open_store()
