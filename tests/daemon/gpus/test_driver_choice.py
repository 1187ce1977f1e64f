import pytest

from gpulease.daemon.gpus.driver_choice import DEFAULT_VRAM_BYTES, choose_cards, has_nvidia_driver
from gpulease.daemon.gpus.source import CardsUnavailable

GIB = 1 << 30
without_driver = pytest.mark.skipif(has_nvidia_driver(), reason="this host has an NVIDIA driver")


def sizes(driver: str, *vram_bytes: int) -> list[int]:
    source = choose_cards(driver, vram_bytes)
    assert source.driver == "cpu"
    return [card.capacity_bytes for card in source.discover({})]


def test_cpu() -> None:
    assert sizes("cpu") == [DEFAULT_VRAM_BYTES]
    assert sizes("cpu", GIB, 2 * GIB) == [GIB, 2 * GIB]


@without_driver
def test_auto_without_an_nvidia_driver() -> None:
    assert sizes("auto") == [DEFAULT_VRAM_BYTES]
    assert sizes("auto", GIB) == [GIB]


@without_driver
def test_cuda_without_an_nvidia_driver_never_falls_back() -> None:
    with pytest.raises(CardsUnavailable) as caught:
        choose_cards("cuda", ())
    assert caught.value.hint


def test_real_cards_have_the_sizes_they_have() -> None:
    with pytest.raises(CardsUnavailable, match="must be one size"):
        choose_cards("cuda", (GIB, GIB))
