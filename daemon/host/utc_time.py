"""UTC texts of the wall clock, for the log and the audit log. Reads no clock."""

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

from gpulease.protocol.time_units import US_PER_S

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def utc_text(wall_us: int) -> str:
    """Format a wall clock's time, in microseconds since 1970, by RFC 3339 in UTC."""
    return utc_bytes(wall_us).decode()


def utc_bytes(wall_us: int) -> bytes:
    """Format a time as `utc_text` does, for lines that are bytes."""
    seconds, rest_us = divmod(wall_us, US_PER_S)
    return b"%b.%06dZ" % (_second_bytes(seconds), rest_us)


@lru_cache(maxsize=2)
def _second_bytes(seconds: int) -> bytes:
    """Format a time without fractions. The last results are cached, because most lines repeat them."""
    return (_EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S").encode()
