"""The decode engine as a scorer, to be held to references: a step has as many rows of a prompt as it can."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import numpy as np

from gpulease.client.aio import GpuBuilder
from gpulease.client.serve.decode.checkpoint import Checkpoint, size_bytes
from gpulease.client.serve.decode.engine import BlockPool, DecodeEngine
from gpulease.client.serve.decode.forward_pass import StepLimits, block_bytes, buffer_sizes
from gpulease.client.serve.decode.row_records import NOBODY, PAGE, ROW, Results, Rows
from helpers.decode.agreement import Logits

LEASE_S: Final = 900.0
SPARE_BYTES: Final = 64 << 20


class EngineScorer:
    """An engine's logits and greedy tokens. Each sequence has a row of the block tables, and the same blocks always."""

    def __init__(self, runner: asyncio.Runner, engine: DecodeEngine, pool: BlockPool) -> None:
        self._runner, self._engine, self._pool = runner, engine, pool

    def logits(self, token_ids: list[int]) -> Logits:
        """Logits [tokens, vocabulary] of every position of a prompt."""
        return self._runner.run(self._prefilled(0, token_ids))[0]

    def greedy(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """The `count` likeliest next tokens of each prompt, as many prompts at a time as there are tables."""
        size = min(self._engine.limits.tables, self._engine.limits.max_rows)
        groups = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        return [output for group in groups for output in self._runner.run(self._decoded(group, count))]

    async def _prefilled(self, table: int, tokens: list[int]) -> tuple[Logits, int]:
        """Compute a prompt. Returns its logits, and the token behind it."""
        found, step = [], self._engine.limits.max_rows
        for first in range(0, len(tokens), step):
            chunk = tokens[first : first + step]
            results = await self._computed(self._rows([table] * len(chunk), range(first, first + len(chunk)), chunk))
            found.append(await self._engine.logits(len(chunk)))
        return np.concatenate(found), int(results["token"][-1])

    async def _decoded(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        outputs = [[(await self._prefilled(table, prompt))[1]] for table, prompt in enumerate(prompts)]
        for place in range(count - 1):
            positions = [len(prompt) + place for prompt in prompts]
            tokens = [output[-1] for output in outputs]
            results = await self._computed(self._rows(range(len(prompts)), positions, tokens))
            for output, token in zip(outputs, results["token"].tolist(), strict=True):
                output.append(token)
        return outputs

    async def _computed(self, rows: Rows) -> Results:
        await self._engine.start(rows, [self._pool])
        return await self._engine.finish()

    def _rows(self, tables: "range | list[int]", positions: "range | list[int]", tokens: list[int]) -> Rows:
        rows = np.zeros(len(tokens), ROW)
        rows["token"], rows["source"], rows["top_p"] = tokens, NOBODY, 1
        rows["table"], rows["position"] = tables, positions
        rows["block"] = rows["table"] * self._engine.limits.table_blocks + rows["position"] // PAGE
        rows["blocks"], rows["base"] = self._pool.blocks, self._pool.region.address
        return rows


@contextmanager
def engine_scorer(address: str, checkpoint: Checkpoint, limits: StepLimits) -> Iterator[EngineScorer]:
    """Open an engine on the daemon there."""
    with asyncio.Runner() as runner:
        opened = _opened(address, checkpoint, limits)
        engine, pool = runner.run(opened.__aenter__())
        try:
            yield EngineScorer(runner, engine, pool)
        finally:
            runner.run(opened.__aexit__(None, None, None))


@asynccontextmanager
async def _opened(
    address: str, checkpoint: Checkpoint, limits: StepLimits
) -> AsyncIterator[tuple[DecodeEngine, BlockPool]]:
    blocks = limits.tables * limits.table_blocks
    wanted = size_bytes(checkpoint, positions=limits.positions) + blocks * block_bytes(checkpoint.config) + SPARE_BYTES
    wanted += sum(buffer_sizes(checkpoint.config, limits).values())
    async with GpuBuilder(address).min_vram(wanted).lease_secs(LEASE_S).acquire() as lease:
        engine = await DecodeEngine.open(lease, checkpoint, limits)
        try:
            pool = await engine.open_pool(blocks)
            yield engine, pool
        finally:
            await engine.close()
