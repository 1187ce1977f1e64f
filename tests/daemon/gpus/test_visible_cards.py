"""Which of the host's cards CUDA_VISIBLE_DEVICES leaves the daemon."""

import os

import pytest

from gpulease.daemon.gpus.source import CardsUnavailable
from gpulease.daemon.gpus.visible_cards import HostCard, visible_cards

CARDS = [HostCard("GPU-aa11", "H200"), HostCard("GPU-aa22", "H200"), HostCard("GPU-bb33", "H200")]
MIXED = [*CARDS, HostCard("GPU-cc44", "T4")]


def seen(value: str | None, cards: list[HostCard] = CARDS, order: str = "") -> list[int]:
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    return visible_cards(cards, environment | ({"CUDA_DEVICE_ORDER": order} if order else {}))


@pytest.mark.parametrize(
    ("value", "numbers"),
    [
        (None, [0, 1, 2]),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 2 , 0 ", [2, 0]),
        ("GPU-bb33", [2]),
        ("GPU-b,0", [2, 0]),
        ("GPU-aa22,GPU-aa11", [1, 0]),
    ],
)
def test_the_cards_in_the_order_of_the_variable(value: str | None, numbers: list[int]) -> None:
    assert seen(value) == numbers


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("", "'' names none"),
        ("-1", "'-1' names none"),
        ("3", "'3' names none of the host's 3 cards"),
        ("0,3", "'3' names none"),
        ("0,,1", "'' names none"),
        ("GPU-zz", "'GPU-zz' names none"),
        ("GPU-aa", "'GPU-aa' names several"),
        ("aa11", "'aa11' names none"),
        ("MIG-1234", "'MIG-1234' names none"),
        ("0,GPU-aa11", "names a card twice"),
        ("\u0661", "names none"),
    ],
)
def test_a_value_that_hides_more_than_it_says_is_refused(value: str, why: str) -> None:
    with pytest.raises(CardsUnavailable, match=why) as refused:
        seen(value)
    assert refused.value.status == os.EX_CONFIG
    assert repr(value) in str(refused.value)


def test_numbers_of_different_cards_need_a_declared_order() -> None:
    with pytest.raises(CardsUnavailable, match="CUDA_DEVICE_ORDER"):
        seen("1", MIXED)
    with pytest.raises(CardsUnavailable, match="CUDA_DEVICE_ORDER"):
        seen("1", MIXED, order="FASTEST_FIRST")
    assert seen("3,1", MIXED, order="PCI_BUS_ID") == [3, 1]
    assert seen("GPU-c", MIXED) == [3]
