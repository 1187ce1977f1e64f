"""A decode engine of dictionaries: what a row computes depends on the tokens that it really reads through its table."""

import zlib
from collections.abc import Collection, Sequence
from itertools import count

from gpulease.client.decode.decode_requests import PromptRequest, SamplingParameters
from gpulease.client.decode.row_records import NO_ROW, PAGE
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler
from gpulease.client.decode.scheduler.step_plan import StepPlan

VOCABULARY = 24
END_TOKEN = 0
STRAY = VOCABULARY + 1
"""What memory holds where nobody wrote: no token."""


def next_token(tokens: Sequence[int]) -> int:
    """The model: any change of any token before changes it."""
    return zlib.crc32(bytes(tokens)) % VOCABULARY


def continuation(tokens: Sequence[int], most: int, end_tokens: frozenset[int] = frozenset({END_TOKEN})) -> list[int]:
    """What a request emits that nothing ever happens to."""
    found: list[int] = []
    while len(found) < most and not (found and found[-1] in end_tokens):
        found.append(next_token([*tokens, *found]))
    return found


def prompt_request(
    tenant: str, name: str, prompt: int, most: int, wait_s: float = 0.0, first_token: int = 1
) -> PromptRequest:
    """A request with a prompt of so many tokens."""
    tokens = tuple((first_token + i) % VOCABULARY for i in range(prompt))
    return PromptRequest(tenant, name, tokens, SamplingParameters(), most, wait_s)


class SimulatedEngine:
    """Regions, block tables and results of the last step.

    Steps run in the order in which they are planned. A step that does not begin has no results and writes nothing.
    """

    def __init__(self) -> None:
        self._generations = count()
        self.regions: dict[str, int] = {}
        self.memory: dict[tuple[int, int, int], int] = {}
        self.tables: dict[tuple[int, int], int] = {}

    def open(self, tenant: str) -> None:
        """Give a tenant a new region, with nothing in it."""
        self.regions[tenant] = next(self._generations)

    def move(self, tenant: str, blocks: Collection[int]) -> None:
        """Copy these blocks of a tenant's region to another place; the old one is spoilt."""
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
            places = range(step.positions[row] + 1)
            tokens = [self._read(region, step.tables[row], position) for position in places]
            results.append(next_token(tokens))
        return results

    def _read(self, region: int, table: int, position: int) -> int:
        block = self.tables.get((table, position // PAGE), NO_ROW)
        return self.memory.get((region, block, position % PAGE), STRAY)


def check_books(scheduler: ContinuousBatchScheduler) -> None:
    """Blocks sum to the pools, tables to the engine's, and no tenant has more than it may have."""
    tables = []
    for tenant in scheduler.tenants.values():
        live = list(tenant.live.values())
        assert len(live) <= tenant.config.max_concurrent
        used = {block for sequence in live for block in sequence.blocks}
        assert tenant.blocks.used == len(used)
        assert tenant.blocks.available == tenant.region_blocks - len(used)
        # Of the blocks that several sequences have, none may be written again: all have rows behind them.
        for sequence in live:
            others = {block for other in live for block in other.blocks if other is not sequence}
            assert not others.intersection(sequence.blocks[sequence.length // PAGE :])
        assert tenant.region_blocks <= tenant.config.max_blocks
        assert all(len(sequence.blocks) * PAGE > min(sequence.length, sequence.last) for sequence in live)
        assert len(tenant.waiting) <= tenant.config.max_waiting + tenant.config.max_concurrent
        tables += [sequence.table for sequence in live]
    assert len(set(tables)) == len(tables) == scheduler.live_sequences <= scheduler.settings.max_sequences
    assert all(0 <= table < scheduler.settings.max_sequences for table in tables)
