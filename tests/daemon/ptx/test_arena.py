from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gpulease.daemon.drivers.interface import DriverError, OutOfMemory
from gpulease.daemon.ptx.memory import MAX_SLICE_BYTES, MemoryArena

SLICE_BYTES = 1 << 20


@pytest.fixture
def arena() -> Iterator[MemoryArena]:
    made = MemoryArena(SLICE_BYTES)
    yield made
    made.close()


def allowed(arena: MemoryArena, address: int) -> int:
    """How many bytes of an address's granule may be touched."""
    entry = (address - arena.memory.address) // 256 * 2
    return int.from_bytes(arena.shadow.view[entry : entry + 2], "little")


class ArenaModel(RuleBasedStateMachine):
    """Allocations against a dict; a ledger keeps them within the slice, as the session's does."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = MemoryArena(SLICE_BYTES)
        self.held: dict[int, int] = {}

    @rule(size=st.integers(1, 2000) | st.integers(1, SLICE_BYTES))
    def allocate(self, size: int) -> None:
        if sum(self.held.values()) + size > SLICE_BYTES:
            return
        address = self.arena.allocate(size)
        assert address % 256 == 0
        assert all(address + size + 256 <= other or other + held + 256 <= address for other, held in self.held.items())
        content = self.arena.bytes_at(address, size)
        assert content == bytes(size)
        content[:] = b"\xa5" * size
        self.held[address] = size

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if not self.held:
            return
        address = data.draw(st.sampled_from(sorted(self.held)))
        size = self.held.pop(address)
        self.arena.free(address)
        assert allowed(self.arena, address) == 0
        assert allowed(self.arena, address + size - 1) == 0

    @invariant()
    def the_shadow_knows_the_last_byte(self) -> None:
        for address, size in self.held.items():
            last = address + size - 1
            assert allowed(self.arena, last) == last % 256 + 1

    def teardown(self) -> None:
        self.arena.close()


TestArenaModel = ArenaModel.TestCase
TestArenaModel.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def test_no_pattern_of_frees_keeps_what_fits_from_being_allocated(arena: MemoryArena) -> None:
    small = [arena.allocate(256) for _ in range(SLICE_BYTES // 256)]
    for address in small[::2]:
        arena.free(address)
    for _ in range(SLICE_BYTES // 2 // 4096):
        arena.allocate(4096)


def test_the_whole_slice_at_once(arena: MemoryArena) -> None:
    for _ in range(50):
        address = arena.allocate(SLICE_BYTES)
        arena.bytes_at(address, SLICE_BYTES)[-1] = 7
        arena.free(address)
    assert arena.bytes_at(arena.allocate(SLICE_BYTES), SLICE_BYTES)[-1] == 0


def test_more_than_the_slice_is_out_of_memory(arena: MemoryArena) -> None:
    with pytest.raises(OutOfMemory):
        arena.allocate(SLICE_BYTES + 1)


def test_a_class_that_is_full_is_out_of_memory(arena: MemoryArena) -> None:
    for _ in range(3):
        arena.allocate(SLICE_BYTES)
    with pytest.raises(OutOfMemory):
        arena.allocate(SLICE_BYTES)


@pytest.mark.parametrize("size", [0, -1])
def test_an_allocation_has_a_byte(arena: MemoryArena, size: int) -> None:
    with pytest.raises(DriverError):
        arena.allocate(size)


def test_only_what_was_given_can_be_freed_and_once(arena: MemoryArena) -> None:
    address = arena.allocate(1000)
    for wrong in (address + 256, 0, address - 256):
        with pytest.raises(DriverError):
            arena.free(wrong)
    arena.free(address)
    with pytest.raises(DriverError):
        arena.free(address)


def test_copies_stay_within_one_allocation(arena: MemoryArena) -> None:
    address = arena.allocate(1000)
    neighbour = arena.allocate(1000)
    assert abs(neighbour - address) == 2048
    assert len(arena.bytes_at(address + 999, 1)) == 1
    for start, size in ((address + 999, 2), (address - 1, 1), (address, 1001), (0, 1), (1 << 63, 1)):
        with pytest.raises(DriverError):
            arena.bytes_at(start, size)


@pytest.mark.parametrize("size", [0, -5, MAX_SLICE_BYTES + 1])
def test_a_slice_has_a_size(size: int) -> None:
    with pytest.raises(DriverError):
        MemoryArena(size)


def test_a_large_slice_costs_nothing() -> None:
    large = MemoryArena(80 << 30)
    address = large.allocate(3 << 30)
    large.bytes_at(address + (2 << 30), 1)[0] = 1
    large.free(address)
    large.close()


@pytest.mark.parametrize("size", [1, 255, 256, 257, 768, 769, 1024, 4096, 65_536, 100_000])
def test_two_slices_of_one_size_find_a_place(arena: MemoryArena, size: int) -> None:
    for _ in range(min(2 * SLICE_BYTES // size, 10_000)):
        arena.allocate(size)


@pytest.mark.parametrize("size", [1, 256, 1000, 4096, 1 << 16])
def test_an_access_beside_an_allocation_is_nobodys_and_named(arena: MemoryArena, size: int) -> None:
    first, second = (arena.allocate(size) for _ in range(2))
    end = first + size
    assert arena.miss_text(second - 4, 4) == f"4 bytes before the start of the {size} allocated at {second:#x}"
    assert arena.miss_text(end, 4) == f"4 bytes past the end of the {size} allocated at {first:#x}"
    assert arena.miss_text(end - 1, 4) == f"3 bytes past the end of the {size} allocated at {first:#x}"
    assert allowed(arena, second - 1) == allowed(arena, first - 1) == 0
    assert allowed(arena, end) == size % 256


def test_an_access_beside_nothing_has_no_name(arena: MemoryArena) -> None:
    address = arena.allocate(1000)
    arena.free(address)
    assert {arena.miss_text(at, 4) for at in (address, 0, 1 << 63, arena.regions_start)} == {""}
