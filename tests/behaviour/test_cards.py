"""Several cards: each is accounted for separately, and is chosen by index, by UUID, or by the daemon."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from gpulease.client import CapacityExceeded, GpuExclusivityClass, GpuSession, InvalidRequest
from helpers.daemon import Daemon, lent, running
from helpers.kernels import check_main_job
from helpers.leaks import SHARED_PROCESSES

GIB = 1 << 30


@pytest.fixture(scope="module")
def two_cards() -> Iterator[Daemon]:
    with running(Daemon(vram=("2GiB", "1GiB"))) as daemon:
        yield daemon


@pytest.fixture
def cards(two_cards: Daemon) -> Iterator[Daemon]:
    """Yield a daemon with a card of 2 GiB and one of 1 GiB."""
    yield from lent(two_cards)


def uuids(daemon: Daemon) -> list[str]:
    return [card["uuid"] for card in daemon.inventory().details]


def test_the_inventory_names_both(cards: Daemon) -> None:
    inventory = cards.inventory()
    assert [entry.capacity_bytes for entry in inventory.entries] == [2 * GIB, GIB]
    assert [card["index"] for card in inventory.details] == [0, 1]
    assert len({entry.id for entry in inventory.entries}) == 2
    for entry, card in zip(inventory.entries, inventory.details, strict=True):
        assert card["uuid"].replace("-", "").endswith(f"{entry.id:032x}")


@pytest.mark.parametrize("index", [0, 1])
def test_by_index_and_by_uuid(cards: Daemon, index: int) -> None:
    uuid = uuids(cards)[index]
    for device in (index, str(index), uuid):
        with cards.builder().device(device).acquire() as lease, GpuSession(lease) as session:
            assert lease.card_uuid == session.card_uuid == uuid
            assert (session.compute_capability, session.cuda_version) == (90, 0)
            check_main_job(session)
            assert cards.inventory().entries[index].available_bytes < (2 - index) * GIB
            assert cards.inventory().entries[1 - index].available_bytes == (1 + index) * GIB


@pytest.mark.parametrize("device", ["2", "-1", "GPU-00000000-0000-0000-0000-000000000000", "embedded", "0x0"])
def test_a_card_that_is_not_there(cards: Daemon, device: str) -> None:
    with pytest.raises(InvalidRequest, match="No card matches") as caught:
        cards.builder().device(device).acquire()
    # The error lists the cards that exist.
    for uuid in uuids(cards):
        assert uuid in str(caught.value)


def test_no_lease_spans_two_cards(cards: Daemon) -> None:
    with pytest.raises(CapacityExceeded):
        cards.builder(2 * GIB + 1).acquire()
    with pytest.raises(CapacityExceeded):
        cards.builder(GIB + 1).device(1).acquire()


def test_the_daemon_fills_both(cards: Daemon) -> None:
    with ExitStack() as stack:
        leases = [stack.enter_context(cards.builder(GIB).acquire()) for _ in range(3)]
        first, second = uuids(cards)
        assert sorted([lease.card_uuid for lease in leases]) == sorted([first, first, second])
        with pytest.raises(CapacityExceeded):
            cards.builder(GIB).acquire()


def test_a_whole_card_leaves_the_other_to_everybody(cards: Daemon) -> None:
    whole = cards.builder().device(0).exclusivity(GpuExclusivityClass.DEVICE_EXCLUSIVE)
    with whole.acquire() as lease, cards.builder().acquire() as other:
        assert other.card_uuid != lease.card_uuid
        with pytest.raises(CapacityExceeded):
            cards.builder().device(0).acquire()


@pytest.fixture(scope="module")
def packed_cards() -> Iterator[Daemon]:
    """Return a daemon with three cards of 1 GiB and a warm context on each.

    It places a lease on the fullest card that has room. It makes contexts at any time, which are no leak.
    """
    config = 'placement = "pack"\nwarm_contexts = 1\n'
    with running(Daemon(vram=("1GiB",) * 3, config=config)) as daemon:
        SHARED_PROCESSES.add(daemon.process.pid)
        yield daemon
        SHARED_PROCESSES.remove(daemon.process.pid)


def test_packing_fills_one_card_and_keeps_the_others_whole(packed_cards: Daemon) -> None:
    first, second, third = uuids(packed_cards)
    with ExitStack() as stack:
        packed = [stack.enter_context(packed_cards.builder(GIB // 4).acquire()) for _ in range(3)]
        assert [lease.card_uuid for lease in packed] == [first] * 3
        larger = stack.enter_context(packed_cards.builder(GIB // 2).acquire())
        assert larger.card_uuid == second, "it does not fit the first any more"
        with GpuSession(packed[2]) as session:
            check_main_job(session)
        last = stack.enter_context(packed_cards.builder(GIB // 4).acquire())
        assert last.card_uuid == first
        alone = packed_cards.builder(GIB).exclusivity(GpuExclusivityClass.DEVICE_EXCLUSIVE)
        assert stack.enter_context(alone.acquire()).card_uuid == third, "a whole card was left"
        with pytest.raises(CapacityExceeded):
            packed_cards.builder(GIB // 2 + 1).acquire()


@pytest.mark.exhaustive
def test_a_packed_lease_grows_on_its_card_alone(packed_cards: Daemon) -> None:
    with packed_cards.builder(GIB // 2).acquire() as first, packed_cards.builder(GIB // 4).acquire() as second:
        assert first.card_uuid == second.card_uuid
        with pytest.raises(CapacityExceeded):
            second.grow(GIB // 2)
        second.grow(GIB // 4)
        assert packed_cards.inventory().entries[0].available_bytes == 0


@pytest.mark.exhaustive
def test_a_cards_uuid_survives_a_restart(start_daemon: Callable[..., Daemon], cards: Daemon) -> None:
    again = start_daemon(vram=("1GiB", "4GiB"))
    assert uuids(again) == uuids(cards)
