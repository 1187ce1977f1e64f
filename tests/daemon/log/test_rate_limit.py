import logging

import pytest

from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.rate_limit import MAX_REASON_CHARS, RateLimitedLog
from gpulease.daemon.log.writer import ATTRIBUTE


def test_a_flood_of_strangers_is_a_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    refusals = RateLimitedLog(LogEvent.STRANGER_REFUSED, lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            refusals.add("1.2.3.4", "x" * 1000)
        now = 101.0
        refusals.add("5.6.7.8", "late")
    told = [getattr(record, ATTRIBUTE)[1] for record in caplog.records]
    assert told == [
        {"peer": "1.2.3.4", "reason": "x" * MAX_REASON_CHARS, "suppressed": None},
        {"peer": "5.6.7.8", "reason": "late", "suppressed": 999},
    ]
