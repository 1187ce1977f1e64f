import uuid

from gpulease.daemon.gpus.emulated_cards import EmbeddedCards
from gpulease.daemon.gpus.source import CardReading

GIB = 1 << 30


def test_one_card_for_each_size() -> None:
    cards = EmbeddedCards([2 * GIB, GIB]).discover({})
    assert [(card.index, card.capacity_bytes) for card in cards] == [(0, 2 * GIB), (1, GIB)]
    assert not any(card.is_partition for card in cards)
    assert all(card.name for card in cards)


def test_uuids_differ_and_depend_on_the_index_alone() -> None:
    one = [card.uuid for card in EmbeddedCards([GIB] * 8).discover({})]
    other = [card.uuid for card in EmbeddedCards([2 * GIB] * 9).discover({})]
    assert len(set(other)) == 9
    assert one == other[:8]
    for text in other:
        kind, _, number = text.partition("-")
        assert kind == "GPU"
        assert str(uuid.UUID(number)) == number


def test_each_card_is_the_peer_of_all_others() -> None:
    first, second, third = EmbeddedCards([GIB] * 3).discover({})
    assert (first.peers, second.peers) == ((second.uuid, third.uuid), (first.uuid, third.uuid))
    assert EmbeddedCards([GIB]).discover({})[0].peers == ()


def test_nothing_but_the_tenants_bytes_is_charged_and_nothing_is_missing() -> None:
    source = EmbeddedCards([GIB])
    assert source.driver == "cpu"
    assert source.process_bytes("GPU-any", 1) == 0
    assert source.read("GPU-any") == CardReading(0, {})
    assert not source.has_others
    source.close()
