"""Retries of a busy session: each pause is longer, and the patience ends them."""

import pytest

from gpulease.client.cli import session_moves


def test_pauses_double_until_the_patience_is_exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, pauses = 100.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now_s
        pauses.append(seconds)
        now_s += seconds

    monkeypatch.setattr("time.monotonic", lambda: now_s)
    monkeypatch.setattr("time.sleep", sleep)
    retries = session_moves.BusyRetries(2.0)
    while retries.pause():
        pass
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5, 0.5]
    assert not retries.pause()
    assert len(pauses) == 7
