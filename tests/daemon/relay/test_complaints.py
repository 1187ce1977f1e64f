import logging

import pytest

from gpulease.daemon.relay.complaints import MAX_CHARS, Complaints


def test_a_flood_of_strangers_is_a_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    complaints = Complaints(lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            complaints.add("1.2.3.4", "x" * 1000)
        now = 101.0
        complaints.add("5.6.7.8", "late")
    assert [record.getMessage() for record in caplog.records] == [
        f"turned away 1.2.3.4: {'x' * MAX_CHARS}",
        "turned away 5.6.7.8: late (999 more since the last such line)",
    ]
