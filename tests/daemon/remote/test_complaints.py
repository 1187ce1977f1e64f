import logging

import pytest

from gpulease.daemon.log.writer import ATTRIBUTE
from gpulease.daemon.remote.acceptor import MAX_CHARS, RateLimitedLog


def test_a_flood_of_strangers_is_a_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    complaints = RateLimitedLog(lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            complaints.add("1.2.3.4", "x" * 1000)
        now = 101.0
        complaints.add("5.6.7.8", "late")
    told = [getattr(record, ATTRIBUTE)[1] for record in caplog.records]
    assert told == [
        {"peer": "1.2.3.4", "reason": "x" * MAX_CHARS, "suppressed": None},
        {"peer": "5.6.7.8", "reason": "late", "suppressed": 999},
    ]
