from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpulease.daemon.drivers.interface import DriverError, ImageRejected
from gpulease.daemon.session.ledger import MAX_ALLOCATIONS, MAX_IMAGE_BYTES, MAX_MODULES, Ledger
from gpulease.protocol.failures import Refused
from gpulease.protocol.opcodes import Status
from helpers.session_rig import MadeModule

SLICE = 1000


@contextmanager
def refused(status: Status, message: str) -> Iterator[None]:
    with pytest.raises(Refused, match=message) as caught:
        yield
    assert caught.value.failure.status is status


def test_the_slice_is_the_limit() -> None:
    ledger = Ledger(SLICE)
    ledger.check_alloc(SLICE)
    with refused(Status.ALLOC_FAILED, "1001 bytes were requested; 1000 of the slice's 1000"):
        ledger.check_alloc(SLICE + 1)
    ledger.add_allocation(0x1000, 600)
    assert ledger.used_bytes == 600
    with refused(Status.ALLOC_FAILED, "401 bytes were requested; 400 of the slice's 1000"):
        ledger.check_alloc(401)
    ledger.check_alloc(400)
    ledger.remove_allocation(0x1000)
    assert ledger.used_bytes == 0
    ledger.check_alloc(SLICE)


def test_what_a_card_takes_besides_is_on_the_allowance_first() -> None:
    ledger = Ledger(SLICE, allowance_bytes=100, page_bytes=10)
    number = ledger.add_module(MadeModule(device_bytes=60), 1)
    ledger.charge_kept(30)
    ledger.charge_kept(20)
    assert (ledger.charged_bytes, ledger.room_bytes) == (0, SLICE + 10)
    ledger.check_alloc(SLICE)
    ledger.charge_kept(70)
    assert ledger.charged_bytes == 30
    with refused(Status.ALLOC_FAILED, "1000 bytes were requested; 970 of the slice's 1000"):
        ledger.check_alloc(SLICE)
    ledger.remove_module(number)
    assert (ledger.charged_bytes, ledger.room_bytes) == (0, SLICE + 30)


def test_rounding_to_pages_counts_before_it_is_taken() -> None:
    ledger = Ledger(SLICE, allowance_bytes=9, page_bytes=10)
    ledger.check_alloc(991)
    ledger.add_allocation(0x1000, 501)
    ledger.rounding_bytes = 9
    assert ledger.charged_bytes == 501
    ledger.check_alloc(490)
    with refused(Status.ALLOC_FAILED, "491 bytes were requested"):
        ledger.check_alloc(491)


@pytest.mark.parametrize(("device_bytes", "kept_bytes", "fits"), [(700, 0, True), (701, 0, False), (300, 600, True)])
def test_a_module_must_fit_before_it_is_loaded(device_bytes: int, kept_bytes: int, fits: bool) -> None:
    ledger = Ledger(SLICE, allowance_bytes=100)
    ledger.add_allocation(0x1000, 200)
    ledger.charge_kept(200)
    if fits:
        ledger.check_module(device_bytes, 0, kept_bytes)
        return
    with pytest.raises(ImageRejected, match=f"needs {device_bytes} bytes on the card.*room for 700") as caught:
        ledger.check_module(device_bytes, 0, kept_bytes)
    assert caught.value.hint
    assert ledger.charged_bytes == 300


def test_what_is_kept_for_later_makes_room_for_what_comes() -> None:
    ledger = Ledger(SLICE, allowance_bytes=100, page_bytes=10)
    spare: list[int] = []
    ledger.make_room = spare.append
    ledger.add_allocation(0x1000, 200)
    assert [ledger.cacheable_bytes(size) for size in (1, 10, 800)] == [890, 890, 100]
    ledger.check_module(300, 0, 100)
    ledger.charge_kept(200)
    ledger.charge_kept(200)
    assert spare == [500, 700], "nothing for what is there already"
    with pytest.raises(ImageRejected):
        ledger.check_module(701, 0, 0)
    with pytest.raises(DriverError):
        ledger.charge_kept(901)
    assert len(spare) == 2, "nothing for what is refused"


def test_pages_that_modules_share_are_charged_until_all_are_gone() -> None:
    ledger = Ledger(SLICE)
    numbers = [ledger.add_module(MadeModule(device_bytes=300, shared_bytes=200), 1) for _ in range(2)]
    assert ledger.charged_bytes == 600
    ledger.remove_module(numbers[0])
    assert ledger.charged_bytes == 500
    # The next one has room in the page that is kept.
    ledger.check_module(700, 200, 0)
    with pytest.raises(ImageRejected, match="needs 501 bytes"):
        ledger.check_module(701, 200, 0)
    ledger.remove_module(numbers[1])
    assert ledger.charged_bytes == 0


def test_nothing_can_not_be_allocated() -> None:
    with refused(Status.ALLOC_FAILED, "0 bytes"):
        Ledger(SLICE).check_alloc(0)


def test_the_number_of_allocations_is_bounded() -> None:
    ledger = Ledger(1 << 40)
    for number in range(MAX_ALLOCATIONS):
        ledger.check_alloc(1)
        ledger.add_allocation(16 * number, 1)
    with refused(Status.ALLOC_FAILED, "the maximum"):
        ledger.check_alloc(1)
    ledger.remove_allocation(0)
    ledger.check_alloc(1)


@pytest.mark.parametrize(("offset", "length"), [(0, 100), (99, 1), (100, 0), (0, 0)])
def test_ranges_inside(offset: int, length: int) -> None:
    ledger = Ledger(SLICE)
    ledger.add_allocation(0x1000, 100)
    assert ledger.locate(0x1000, offset, length) == 0x1000 + offset


@pytest.mark.parametrize(("offset", "length"), [(0, 101), (100, 1), (101, 0), (2**64 - 1, 1), (2**64 - 100, 100)])
def test_ranges_outside(offset: int, length: int) -> None:
    ledger = Ledger(SLICE)
    ledger.add_allocation(0x1000, 100)
    with refused(Status.INVALID_HANDLE, "outside the allocation"):
        ledger.locate(0x1000, offset, length)


@pytest.mark.parametrize("handle", [0, 0x1001, 0x1064, 2**64 - 1])
def test_only_the_start_of_an_allocation_is_a_handle(handle: int) -> None:
    ledger = Ledger(SLICE)
    ledger.add_allocation(0x1000, 100)
    with refused(Status.INVALID_HANDLE, "not a live allocation"):
        ledger.locate(handle, 0, 1)
    with refused(Status.INVALID_HANDLE, "not a live allocation"):
        ledger.check_allocation(handle)


def test_a_freed_handle_is_none() -> None:
    ledger = Ledger(SLICE)
    ledger.add_allocation(0x1000, 100)
    ledger.remove_allocation(0x1000)
    with refused(Status.INVALID_HANDLE, "not a live allocation"):
        ledger.check_allocation(0x1000)


def test_module_numbers_are_never_given_twice() -> None:
    ledger = Ledger(SLICE)
    first = ledger.add_module(MadeModule(), 10)
    ledger.remove_module(first)
    second = ledger.add_module(MadeModule(), 10)
    assert first != second
    with refused(Status.INVALID_HANDLE, "not a loaded module"):
        ledger.module(first)
    assert ledger.module(second) is not None


def test_the_number_of_modules_is_bounded() -> None:
    ledger = Ledger(SLICE)
    numbers = [ledger.add_module(MadeModule(), 1) for _ in range(MAX_MODULES)]
    with refused(Status.LOAD_FAILED, f"{MAX_MODULES} modules"):
        ledger.check_load(1)
    ledger.remove_module(numbers[7])
    ledger.check_load(1)


def test_the_bytes_of_images_are_bounded() -> None:
    ledger = Ledger(SLICE)
    number = ledger.add_module(MadeModule(), MAX_IMAGE_BYTES - 5)
    ledger.check_load(5)
    with refused(Status.LOAD_FAILED, "images of"):
        ledger.check_load(6)
    ledger.remove_module(number)
    ledger.check_load(MAX_IMAGE_BYTES)


def test_streams_take_of_the_allowance_and_then_of_the_slice_and_give_nothing_back() -> None:
    ledger = Ledger(SLICE, 100)
    ledger.charge_streams(80)
    assert ledger.charged_bytes == 0
    ledger.charge_streams(130)
    ledger.charge_streams(80)
    assert ledger.charged_bytes == 30
    ledger.add_allocation(0x1000, SLICE - 30)
    ledger.charge_streams(130)
    with refused(Status.ALLOC_FAILED, "needs 1 bytes on the card; the slice has room for 0"):
        ledger.charge_streams(131)
    assert ledger.charged_bytes == SLICE


def test_what_graphs_took_stays_taken_and_serves_the_next() -> None:
    ledger = Ledger(SLICE, allowance_bytes=100, page_bytes=10)
    ledger.check_graph(SLICE + 100)
    ledger.add_graph(60)
    ledger.add_graph(65)
    assert ledger.charged_bytes == 30, "in whole pages"
    ledger.remove_graph(60)
    assert ledger.charged_bytes == 30
    ledger.check_graph(60)
    ledger.check_graph(60 + ledger.room_bytes)
    with refused(Status.ALLOC_FAILED, "the slice has room for 970"):
        ledger.check_graph(61 + ledger.room_bytes)


def test_dependents_learn_once_what_was_released() -> None:
    ledger, released = Ledger(SLICE), list[str]()
    for address in (0x10, 0x20):
        ledger.add_allocation(address, 1)
    number = ledger.add_module(MadeModule(), 1)
    ledger.allocation_dependents.add(0x10, 1, released.append)
    ledger.allocation_dependents.add(0x10, 2, released.append)
    ledger.allocation_dependents.add(0x20, 1, released.append)
    ledger.module_dependents.add(number, 1, released.append)
    ledger.allocation_dependents.remove(0x10, 2)
    ledger.allocation_dependents.remove(0x30, 2)
    ledger.remove_allocation(0x10)
    assert released == ["the allocation 0x10, which was freed"]
    ledger.add_allocation(0x10, 1)
    ledger.remove_allocation(0x10)
    ledger.remove_module(number)
    assert released[1:] == [f"module {number}, which was unloaded"]


def test_a_variable_is_named_until_its_module_goes() -> None:
    ledger = Ledger(SLICE)
    number = ledger.add_module(MadeModule(), 10)
    for _ in range(2):
        ledger.add_variable(number, 4096, 16)
    assert ledger.locate(4096, 8, 8) == 4104
    for offset, length in ((0, 17), (16, 1)):
        with pytest.raises(Refused, match="outside the allocation"):
            ledger.locate(4096, offset, length)
    with pytest.raises(Refused, match="a module's variable"):
        ledger.check_free(4096)
    told: list[str] = []
    ledger.allocation_dependents.add(4096, 1, told.append)
    ledger.remove_module(number)
    assert told == ["the variable 0x1000 of an unloaded module"]
    with pytest.raises(Refused, match="not a live allocation"):
        ledger.locate(4096, 0, 1)
