"""Memory that is refused for a moment is asked for again, while the card shows room and within a bound."""

import pytest

from gpulease.daemon.drivers.cuda import refused_memory
from gpulease.daemon.drivers.cuda.refused_memory import SMALL_BYTES, MemoryRefused, take_if_shown, take_once_given
from gpulease.daemon.drivers.interface import keep_waiting
from helpers.waiting import PATIENCE_S

SIZE = 100


class Taker:
    def __init__(self, refusals: int) -> None:
        self.refusals, self.calls = refusals, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.refusals:
            raise MemoryRefused("no")
        return "memory"


def test_memory_that_the_card_shows_free_is_asked_for_until_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_memory, "REFUSAL_WAIT_S", PATIENCE_S)
    take = Taker(5)
    assert take_once_given(take, SIZE, lambda: SIZE, keep_waiting) == "memory"
    assert take.calls == 6


def test_a_card_that_shows_no_room_for_a_while_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_memory, "SHORTAGE_S", 0.01)
    with pytest.raises(MemoryRefused, match="no; it reported 99 bytes free"):
        take_once_given(Taker(1 << 30), SIZE, lambda: SIZE - 1, keep_waiting)


def test_a_large_refusal_says_the_free_bytes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_memory, "SHORTAGE_S", 0.01)
    said = rf"the card can't provide {SMALL_BYTES + 1} bytes: it has 99 bytes free after \d+\.\d s of retries"
    with pytest.raises(MemoryRefused, match=f"^{said}$"):
        take_once_given(Taker(0), SMALL_BYTES + 1, lambda: 99, keep_waiting)


def test_a_card_that_shows_no_room_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_memory, "SHORTAGE_S", PATIENCE_S)
    monkeypatch.setattr(refused_memory, "REFUSAL_WAIT_S", PATIENCE_S)
    shown = iter([SIZE - 1, SIZE])
    assert take_once_given(Taker(2), SIZE, lambda: next(shown), keep_waiting) == "memory"


def test_the_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_memory, "REFUSAL_WAIT_S", 0.01)
    with pytest.raises(MemoryRefused):
        take_once_given(Taker(1 << 30), SIZE, lambda: SIZE, keep_waiting)


def test_a_poll_ends_the_wait() -> None:
    class Over(Exception):
        pass

    def poll() -> None:
        raise Over

    with pytest.raises(Over):
        take_once_given(Taker(1 << 30), SIZE, lambda: SIZE, poll)


@pytest.mark.parametrize(("size_bytes", "calls"), [(SMALL_BYTES + 1, 0), (SMALL_BYTES, 1)])
def test_the_driver_is_not_asked_for_a_large_piece_that_the_card_does_not_show(size_bytes: int, calls: int) -> None:
    take = Taker(1 << 30)
    with pytest.raises(MemoryRefused):
        take_if_shown(take, size_bytes, lambda: size_bytes - 1)
    assert take.calls == calls


def test_a_large_piece_is_asked_for_once_the_card_shows_it() -> None:
    size_bytes = SMALL_BYTES + 1
    shown = iter([size_bytes - 1, size_bytes - 1, size_bytes])
    take = Taker(0)
    assert take_once_given(take, size_bytes, lambda: next(shown), keep_waiting) == "memory"
    assert take.calls == 1
