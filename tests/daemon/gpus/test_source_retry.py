import asyncio
import logging

import pytest

from gpulease.daemon.gpus import source
from gpulease.daemon.gpus.source import MAX_PAUSE_S, RETRY_S, CardsUnavailable, pause_s, retry


def test_pauses_grow_and_come_to_an_end() -> None:
    waited_s, pauses = 0.0, list[float]()
    while (wait_s := pause_s(len(pauses) + 1, waited_s)) is not None:
        pauses.append(wait_s)
        waited_s += wait_s
    assert pauses[:5] == [0.25, 0.5, 1, 2, 4]
    assert pauses == sorted(pauses)
    assert max(pauses) == MAX_PAUSE_S
    assert RETRY_S - MAX_PAUSE_S < waited_s <= RETRY_S
    assert pause_s(10**9, 0) == MAX_PAUSE_S


def failing(times: int, *, may_pass: bool) -> tuple[list[int], object]:
    """An attempt that fails so often, and the list of its attempts."""
    tried: list[int] = []

    async def attempt() -> str:
        tried.append(1)
        if len(tried) <= times:
            raise CardsUnavailable(f"broken {len(tried)}", hint="Mend it.", may_pass=may_pass)
        return "cards"

    return tried, attempt


def test_what_passes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(source, "FIRST_PAUSE_S", 0.001)
    tried, attempt = failing(3, may_pass=True)
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(retry(attempt)) == "cards"  # type: ignore[arg-type]
    assert len(tried) == 4
    assert [record.message for record in caplog.records] == [
        "the cards can't be used yet: broken 1; the daemon retries for 30 s. Mend it."
    ]


@pytest.mark.parametrize(("may_pass", "patience_s", "times"), [(False, 30.0, 1), (True, 0.0, 1), (True, 0.02, 5)])
def test_what_does_not(monkeypatch: pytest.MonkeyPatch, may_pass: bool, patience_s: float, times: int) -> None:
    monkeypatch.setattr(source, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(source, "RETRY_S", patience_s)
    tried, attempt = failing(100, may_pass=may_pass)
    with pytest.raises(CardsUnavailable) as raised:
        asyncio.run(retry(attempt))  # type: ignore[arg-type]
    assert str(raised.value) == f"broken {len(tried)}", "the last reason counts"
    assert len(tried) <= times
