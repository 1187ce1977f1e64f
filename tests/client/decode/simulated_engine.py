"""A simulated decode engine: what a row computes depends on the tokens that it reads through its block table."""

import zlib
from collections.abc import Collection, Sequence
from itertools import count

from gpulease.client.decode.decode_requests import PromptRequest, SamplingParameters, SharedPrefix
from gpulease.client.decode.row_records import NO_ROW, PAGE
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler
from gpulease.client.decode.scheduler.step_plan import StepPlan
from gpulease.client.decode.scheduler.tenant_state import NO_BLOCK, LiveSequence

VOCABULARY = 24
END_TOKEN = 0
MOST_TOKENS = 1000
STRAY = VOCABULARY + 1
"""The contents of memory that was never written: a value that can't be a token."""


def next_token(tokens: Sequence[int]) -> int:
    """Return the model's next token. It depends on every token before it."""
    return zlib.crc32(bytes(tokens)) % VOCABULARY


def continuation(
    tokens: Sequence[int],
    most: int,
    end_tokens: frozenset[int] = frozenset({END_TOKEN}),
    window: int | None = None,
) -> list[int]:
    """Return the tokens of a request that is never interrupted. Each depends on the last `window` tokens before it."""
    found: list[int] = []
    while len(found) < most and not (found and found[-1] in end_tokens):
        found.append(next_token([*tokens, *found][-(window or MOST_TOKENS) :]))
    return found


def prompt_request(
    tenant: str, name: str, prompt: int, most: int, wait_s: float = 0.0, first_token: int = 1
) -> PromptRequest:
    """Return a request whose prompt has `prompt` tokens."""
    tokens = tuple((first_token + i) % VOCABULARY for i in range(prompt))
    return PromptRequest(tenant, name, tokens, SamplingParameters(), most, wait_s)


class SimulatedEngine:
    """Regions, block tables, and the results of the last step.

    Steps run in the order in which they were planned. A step that is refused has no results, and writes nothing.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window or MOST_TOKENS
        self._generations = count()
        self.regions: dict[str, int] = {}
        # Regions of shared prefixes, by the prefix's name.
        self.shared: dict[str, int] = {}
        self.memory: dict[tuple[int, int, int], int] = {}
        self.tables: dict[tuple[int, int], int] = {}

    def open(self, tenant: str) -> None:
        """Give a tenant a new, empty region."""
        self.regions[tenant] = next(self._generations)

    def share(self, prefix: SharedPrefix) -> None:
        """Compute a shared prefix's blocks in a separate region."""
        region = self.shared[prefix.name] = next(self._generations)
        for place, token in enumerate(prefix.token_ids[: prefix.blocks * PAGE]):
            self.memory[region, place // PAGE, place % PAGE] = token

    def unshare(self, name: str) -> None:
        """Destroy the contents of a shared prefix's region."""
        region = self.shared.pop(name)
        self.memory.update({place: STRAY for place in self.memory if place[0] == region})

    def move(self, tenant: str, blocks: Collection[int]) -> None:
        """Copy these blocks of a tenant's region to a new region, and destroy the contents of the old one."""
        old, self.regions[tenant] = self.regions[tenant], next(self._generations)
        for (region, block, place), token in list(self.memory.items()):
            if region == old:
                if block in blocks:
                    self.memory[self.regions[tenant], block, place] = token
                self.memory[region, block, place] = STRAY

    def run(self, step: StepPlan, before: Sequence[int] | None) -> list[int]:
        """Compute a step after the one with the results `before`."""
        regions = [self.regions[sequence.tenant.config.id] for sequence in step.sequences]
        for sequence in step.joined:
            for index, block in enumerate(sequence.blocks[: sequence.reused // PAGE]):
                self.tables[sequence.table, index] = block
        for row, region in enumerate(regions):
            source, position, block = step.sources[row], step.positions[row], step.blocks[row]
            token = step.tokens[row]
            if source != NO_ROW:
                token = STRAY if before is None else before[source]
            self.tables[step.tables[row], position // PAGE] = block
            self.memory[region, block, position % PAGE] = token
        results = []
        for row, region in enumerate(regions):
            end = step.positions[row] + 1
            places = range(max(0, end - self._window), end)
            sequence = step.sequences[row]
            tokens = [self._read(region, sequence, position) for position in places]
            results.append(next_token(tokens))
        return results

    def _read(self, region: int, sequence: LiveSequence, position: int) -> int:
        block, own = self.tables.get((sequence.table, position // PAGE), NO_ROW), sequence.tenant.region_blocks
        if block >= own and sequence.prefix:
            region, block = self.shared[sequence.prefix], block - own
        return self.memory.get((region, block, position % PAGE), STRAY)


def check_books(scheduler: ContinuousBatchScheduler) -> None:
    """Check that used and free blocks and tables add up, and that no tenant exceeds its limits."""
    tables = []
    for tenant in scheduler.tenants.values():
        live = list(tenant.live.values())
        assert len(live) <= tenant.config.max_concurrent
        used = {block for sequence in live for block in sequence.blocks if NO_BLOCK < block < tenant.region_blocks}
        # A sequence has no blocks before its window, and all blocks from there on.
        for sequence in live:
            assert sequence.blocks.index(next(it for it in sequence.blocks if it != NO_BLOCK)) == sequence.freed_blocks
            assert NO_BLOCK not in sequence.blocks[sequence.freed_blocks :]
            window = scheduler.settings.window
            assert sequence.freed_blocks * PAGE <= max(0, sequence.length + 1 - (window or MOST_TOKENS))
        # Blocks of a shared prefix come first. All of its blocks are there, and no row writes them.
        for sequence in live:
            shared = [block for block in sequence.blocks if block >= tenant.region_blocks]
            first = sequence.freed_blocks
            assert shared == [tenant.region_blocks + first + index for index in range(len(shared))]
            assert sequence.blocks[first : first + len(shared)] == shared
            assert not shared or (first + len(shared)) * PAGE <= sequence.reused <= sequence.next_position
            assert bool(shared) <= bool(sequence.prefix)
            assert bool(shared) == bool(sequence.prefix) or first
            assert not shared or len(shared) <= scheduler.prefixes[sequence.prefix].blocks
        assert tenant.blocks.used == len(used)
        assert tenant.blocks.available == tenant.region_blocks - len(used)
        # Blocks that several sequences use must not be written again: all sequences have rows after them.
        for sequence in live:
            others = {block for other in live for block in other.blocks if other is not sequence}
            assert not others.intersection(sequence.blocks[sequence.length // PAGE :])
        assert tenant.region_blocks <= tenant.config.max_blocks
        assert all(len(sequence.blocks) * PAGE > min(sequence.length, sequence.last) for sequence in live)
        assert len(tenant.waiting) <= tenant.config.max_waiting + tenant.config.max_concurrent
        tables += [sequence.table for sequence in live]
    assert len(set(tables)) == len(tables) == scheduler.live_sequences <= scheduler.settings.max_sequences
    assert all(0 <= table < scheduler.settings.max_sequences for table in tables)
