"""Stores by their URL: what is typed where a gateway is started."""

from typing import Final

from gpulease.client.errors import InvalidRequest
from gpulease.client.gateway.errors import StoreUnavailable
from gpulease.client.gateway.sqlite_store import SqliteStore
from gpulease.client.gateway.store import ReplicatedIdempotencyStore

SQLITE: Final = "sqlite:"
POSTGRES: Final = ("postgresql://", "postgres://")


def open_store(url: str) -> ReplicatedIdempotencyStore:
    """The store at `sqlite:PATH` or `postgresql://...`. Raises InvalidRequest for another URL, StoreUnavailable."""
    if url.startswith(SQLITE) and len(url) > len(SQLITE):
        return SqliteStore(url.removeprefix(SQLITE))
    if not url.startswith(POSTGRES):
        raise InvalidRequest(f"{url!r} is no store", "Say sqlite:PATH or postgresql://HOST/DATABASE")
    try:
        from gpulease.client.gateway.postgres_store import PostgresStore
    except ImportError as error:
        raise StoreUnavailable(
            f"no PostgreSQL: {error}", "Install it: pip install '.[postgres]' in gpulease's repository"
        ) from None
    return PostgresStore(url)
