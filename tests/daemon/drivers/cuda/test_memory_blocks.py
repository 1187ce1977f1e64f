"""Records of blocks, compared with a model of a card that gives addresses as cuMemAlloc does."""

import random

from gpulease.daemon.drivers.cuda.memory import (
    MAX_CACHED_BLOCKS,
    MAX_CACHED_BYTES,
    PAGE_BYTES,
    Blocks,
    Pages,
    block_bytes,
)

MIB = 1 << 20


class Card:
    """A card that gives out blocks and counts their pages."""

    def __init__(self) -> None:
        self.pages = Pages()
        self.sizes: dict[int, int] = {}
        self._next = 0x7F0000000000

    def give(self, size_bytes: int) -> int:
        address = self._next
        self._next += -(-size_bytes // PAGE_BYTES) * PAGE_BYTES if size_bytes > MIB else size_bytes
        self.sizes[address] = size_bytes
        self.pages.add(address, size_bytes)
        return address

    def take_back(self, address: int) -> None:
        del self.sizes[address]
        self.pages.remove(address)


def test_blocks_are_those_of_the_card_and_each_has_one_owner() -> None:
    rng, card, blocks = random.Random(1), Card(), Blocks()
    live: dict[int, int] = {}
    for _ in range(4000):
        choice = rng.random()
        if choice < 0.45:
            size = rng.choice([1, 512, 513, 5000, MIB - 1, MIB, MIB + 1, 3 * MIB, 4 * MIB])
            address = blocks.reuse(size)
            if address is None:
                address = card.give(block_bytes(size))
                blocks.add(address, size, address)
            assert address not in live
            assert card.sizes[address] == block_bytes(size) >= size
            live[address] = size
        elif choice < 0.9 and live:
            address = rng.choice(list(live))
            del live[address]
            blocks.cache(address)
        elif blocks.cached_blocks:
            card.take_back(blocks.drop_oldest()[0])
        of_live = Pages()
        if not len(live) % 64:
            for address, size in live.items():
                of_live.add(address, size)
            assert blocks.rounding_bytes == of_live.rounding_bytes
            assert blocks.cached_bytes == card.pages.taken_bytes - of_live.taken_bytes
        assert blocks.cached_blocks == len(card.sizes) - len(live)


def test_the_block_freed_last_is_reused_first_and_the_one_freed_first_goes_back_first() -> None:
    card, blocks = Card(), Blocks()
    addresses = [card.give(block_bytes(2 * MIB)) for _ in range(3)]
    for address in addresses:
        blocks.add(address, 2 * MIB, address)
    for address in addresses:
        blocks.cache(address)
    assert blocks.reuse(2 * MIB - 1) == addresses[2]
    assert blocks.drop_oldest() == (addresses[0], 2 * MIB)
    assert blocks.reuse(MIB) is None
    assert blocks.cached_bytes == 2 * MIB


def test_cached_blocks_are_bounded() -> None:
    card, blocks = Card(), Blocks()
    for size, fits in ((MAX_CACHED_BYTES // 4, 4), (MAX_CACHED_BYTES // (4 * MAX_CACHED_BLOCKS), MAX_CACHED_BLOCKS)):
        addresses = [card.give(size) for _ in range(fits + 1)]
        for address in addresses:
            blocks.add(address, size, address)
        for address in addresses[:-1]:
            assert blocks.may_cache(address)
            blocks.cache(address)
        assert not blocks.may_cache(addresses[-1])
        while blocks.cached_blocks:
            blocks.drop_oldest()
        assert blocks.may_cache(addresses[-1])
