"""The blocks of a region against a naive model, in any order of uses."""

import itertools
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpulease.client.decode.row_records import PAGE
from gpulease.client.decode.scheduler.region_blocks import RegionBlocks

SIZE = 6


@dataclass
class User:
    """A sequence as the model knows it: its tokens, its blocks, and how many of them are computed."""

    tokens: list[int]
    keys: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    shared: int = 0


def contents(tokens: list[int], index: int) -> tuple[int, ...]:
    """What a full block holds: it depends on all tokens up to its end."""
    return tuple(tokens[: (index + 1) * PAGE])


class AnyUse(RuleBasedStateMachine):
    """State machine that draws the next use."""

    @initialize()
    def begin(self) -> None:
        self.generation = 0
        self.region = RegionBlocks(SIZE)
        self.users: list[User] = []
        # What the memory holds; the least recently released last blocks first.
        self.memory: dict[int, tuple[int, ...]] = {}
        self.kept: list[int] = []
        self.old_keys: list[bytes] = []
        # Shared prefixes, by their names: the part of which each of their blocks consists.
        self.prefixes: dict[str, list[int]] = {}

    @rule(name=st.sampled_from("xyz"), parts=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def share_or_end(self, name: str, parts: list[int]) -> None:
        """A shared prefix comes, or its region ends, with the sequences that use it."""
        if name not in self.prefixes:
            self.prefixes[name] = parts
            self.region.attach(name, [part for part in parts for _ in range(PAGE)])
            return
        del self.prefixes[name]
        self.region.detach(name)
        while users := [number for number, user in enumerate(self.users) if user.shared]:
            self.end(users[0])

    @rule(parts=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def come(self, parts: list[int]) -> None:
        """A sequence of whole blocks, each of equal tokens, shares what is there, and takes the rest."""
        user = User([part for part in parts for _ in range(PAGE)])
        self.region.extend_keys(user.keys, user.tokens, len(parts))
        name, shared = self.region.find_shared(user.keys)
        alike = {other: _common(parts, its) for other, its in self.prefixes.items()}
        assert shared == max(alike.values(), default=0) == alike.get(name, 0)
        found, kept = self.region.find(user.keys[shared:])
        found += shared
        fresh = len(parts) - found
        if fresh > self.region.available - kept:
            return
        user.shared, user.blocks = shared, list(range(SIZE, SIZE + shared))
        for index in range(shared, found):
            block = self.region.share(user.keys[index])
            assert block is not None
            assert self.memory[block] == contents(user.tokens, index), "the very prefix"
            self.kept = [other for other in self.kept if other != block]
            user.blocks.append(block)
        # Whatever is published with this prefix is found.
        held = {self.memory[other] for other in (*self.kept, *self.published())}
        assert found == len(parts) or contents(user.tokens, found) not in held
        for _ in range(fresh):
            used = {block for other in (*self.users, user) for block in other.blocks if block < SIZE}
            free = SIZE - len(self.kept) - len(used)
            block = self.region.take()
            assert block is not None
            assert all(block not in other.blocks for other in (*self.users, user))
            # Free blocks first; then the one that was released before all others.
            assert block not in self.kept if free else block == self.kept[0]
            self.kept = [other for other in self.kept if other != block]
            self.memory.pop(block, None)
            user.blocks.append(block)
        user.computed = found
        self.users.append(user)

    def published(self) -> list[int]:
        return [block for user in self.users for block in user.blocks[: user.computed] if block in self.memory]

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """A sequence's next block is full, and can be found unless an equal one is there already."""
        user = data.draw(st.sampled_from(self.users))
        if user.computed == len(user.blocks):
            return
        index = user.computed
        user.computed += 1
        self.region.publish(user.blocks[index], user.keys[index])
        if contents(user.tokens, index) not in self.memory.values():
            self.memory[user.blocks[index]] = contents(user.tokens, index)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A sequence ends; full blocks that nobody else uses are kept, its last one first in the order to go."""
        self.end(data.draw(st.integers(0, len(self.users) - 1)))

    def end(self, number: int) -> None:
        user = self.users.pop(number)
        self.region.release(reversed(user.blocks))
        for block in reversed(user.blocks):
            if block in self.memory and all(block not in other.blocks for other in self.users):
                self.kept.append(block)

    @rule()
    def forget(self) -> None:
        self.region.forget()
        for block in self.kept:
            del self.memory[block]
        self.kept = []

    @rule()
    def lose(self) -> None:
        """The region ends. In the next one no key of it is found."""
        for user in self.users:
            self.old_keys += user.keys
        self.generation += 1
        self.region = RegionBlocks(SIZE, self.generation)
        self.users, self.memory, self.kept, self.prefixes = [], {}, [], {}

    @rule(data=st.data(), parts=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def claim(self, data: st.DataObject, parts: list[int]) -> None:
        """One writer at a time; after it withdraws, another may be it."""
        keys: list[bytes] = []
        self.region.extend_keys(keys, [part for part in parts for _ in range(PAGE)], len(parts))
        one, other = object(), object()
        assert self.region.claim(one, keys)
        assert self.region.claim(one, keys)
        assert not self.region.claim(other, keys)
        if data.draw(st.booleans()):
            assert not self.region.claim(other, keys[-1:])
        self.region.withdraw(other, keys)
        assert not self.region.claim(other, keys)
        self.region.withdraw(one, keys)
        assert self.region.claim(other, keys)
        self.region.withdraw(other, keys)

    @invariant()
    def counts(self) -> None:
        used = {block for user in self.users for block in user.blocks if block < SIZE}
        assert self.region.used == len(used)
        assert self.region.cached == len(self.kept)
        assert self.region.available == SIZE - len(used)
        assert all(self.region.share(key) is None for key in self.old_keys)


def _common(parts: list[int], others: list[int]) -> int:
    """The number of first parts that are equal."""
    pairs = zip(parts, others, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


AnyUse.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestAnyUse = AnyUse.TestCase


def test_a_chain_s_keys_depend_on_all_tokens_before_and_on_the_generation() -> None:
    tokens = list(range(4 * PAGE))
    chains: list[list[bytes]] = []
    for generation, changed, salt in [(0, None, ""), (0, 0, ""), (0, 3 * PAGE, ""), (1, None, ""), (0, None, "\ud800")]:
        keys: list[bytes] = []
        its = [99 if place == changed else token for place, token in enumerate(tokens)]
        RegionBlocks(1, generation).extend_keys(keys, its, 2, salt)
        RegionBlocks(1, generation).extend_keys(keys, its, 4, salt)
        chains.append(keys)
    same, first, last, other, salted = chains
    assert all(len(set(keys)) == 4 for keys in chains)
    assert not {*first, *other, *salted}.intersection(same)
    assert last[:3] == same[:3]
    assert last[3] != same[3]


def test_a_salt_with_the_bytes_of_a_block_is_none() -> None:
    """Otherwise a salted prompt would take, and give, blocks of a prompt that has one more block before it."""
    region, keys, salted = RegionBlocks(1), list[bytes](), list[bytes]()
    region.extend_keys(keys, [*range(PAGE), *[7] * PAGE], 2)
    region.extend_keys(salted, [7] * PAGE, 1, b"".join(token.to_bytes(4, "little") for token in range(PAGE)).decode())
    assert not {*keys} & {*salted}


def test_a_full_region_has_no_block_to_give() -> None:
    region = RegionBlocks(1)
    assert region.take() == 0
    assert region.take() is None
    region.release([0])
    assert region.take() == 0
    assert region.evictions == 0
