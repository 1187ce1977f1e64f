"""An engine with two tenants' pools, lines (sequences computed alone), and schedules that compute lines together.

A line is computed with one row per step, in ascending order, without other rows. A schedule computes positions of
several lines together, some more than once. The logits and the result of every row are compared with the line's, bit
for bit.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpulease.client.aio import GpuBuilder, GpuLease
from gpulease.client.decode.checkpoint import Checkpoint
from gpulease.client.decode.decode_requests import SamplingParameters
from gpulease.client.decode.engine.engine import MAX_STEPS, UNSET, BlockPool, DecodeEngine
from gpulease.client.decode.engine.forward_pass import StepLimits
from gpulease.client.decode.row_records import NO_ROW, PAGE, RESULT, ROW, Results, Rows

T = TypeVar("T")

LEASE_BYTES: Final = 256 << 20
LEASE_S: Final = 600.0
TENANTS: Final = ("a", "b")
BLOCKS: Final = 24
"""Default number of blocks of each tenant's pool."""

GREEDY: Final = SamplingParameters()


@dataclass
class Tally:
    """The result of comparing values bit for bit.

    Attributes:
        compared: Number of values that were compared.
        differing: Number of values that differ.
        places: Where the first few differences are.
    """

    compared: int = 0
    differing: int = 0
    places: list[str] = field(default_factory=list)

    def compare(self, place: str, got: NDArray[Any], expected: NDArray[Any]) -> None:
        """Compare two arrays of 32-bit values by their bits."""
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        words = [np.ascontiguousarray(array).view(np.uint32) for array in (got, expected)]
        wrong = int(np.count_nonzero(words[0] != words[1]))
        self.compared += words[0].size
        self.differing += wrong
        if wrong and len(self.places) < 8:
            self.places.append(f"{place}: {wrong} of {words[0].size}")

    def check(self) -> None:
        """Fail if a value differs, or if nothing was compared."""
        assert self.compared
        assert self.differing == 0, self.places


@dataclass(frozen=True)
class Line:
    """A sequence that was computed alone, with one row per step.

    Attributes:
        tokens: Its token at each position: those of the prompt, then the emitted ones.
        prompt: Number of tokens of the prompt.
        sampling: How tokens were chosen.
        logits: [positions, vocabulary] f32.
        results: RESULT records, one for each position.
    """

    tokens: tuple[int, ...]
    prompt: int
    sampling: SamplingParameters
    logits: NDArray[np.float32]
    results: Results

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Seat:
    """Where a line's keys and values are: a tenant's pool, a row of the block tables, and blocks of the pool."""

    line: int
    tenant: int
    table: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class MixedStep:
    """One step of a schedule: its rows in order, and whether its results are read before the next step starts."""

    rows: tuple[tuple[Seat, int], ...]
    is_awaited: bool = True


def _yields(lines: Sequence[Line], place: tuple[Seat, int]) -> bool:
    """Return whether a row yields a token: its position is the last one of the prompt, or a later one."""
    seat, position = place
    return position + 1 >= lines[seat.line].prompt


class EngineRig:
    """An engine, and a pool for each of TENANTS."""

    def __init__(self, lease: GpuLease, engine: DecodeEngine, pools: Sequence[BlockPool]) -> None:
        self.lease, self.engine, self.pools = lease, engine, pools

    def row(self, seat: Seat, sampling: SamplingParameters, position: int, token: int, source: int = NO_ROW) -> Rows:
        pool = self.pools[seat.tenant]
        row: Rows = np.zeros(1, ROW)
        row["token"], row["source"], row["position"], row["table"] = token, source, position, seat.table
        row["block"], row["blocks"], row["base"] = seat.blocks[position // PAGE], pool.blocks, pool.region.address
        row["seed"], row["top_k"], row["top_p"] = sampling.seed, sampling.top_k, sampling.top_p
        row["inverse_temperature"] = sampling.inverse_temperature
        return row

    def seat(self, line: int = 0, tenant: int = 0, table: int = 0) -> Seat:
        """Return a seat with all blocks of a pool, in order."""
        return Seat(line, tenant, table, tuple(range(self.pools[tenant].blocks)))

    async def compute(self, rows: Rows, tenants: Sequence[int] = (0,)) -> Results:
        await self.engine.start(rows, [self.pools[tenant] for tenant in tenants])
        return await self.engine.finish()

    async def launch(self, rows: Rows) -> Results:
        """Compute one step without a graph: each kernel is launched separately. The lease must not require regions."""
        session, forward, count = self.engine.session, self.engine.forward, len(rows)
        padded: Rows = np.zeros(self.engine._bucket(count), ROW)
        padded["position"] = NO_ROW
        padded[:count] = rows
        await session.mem_write(forward.rows, 0, padded)
        await forward.launch(len(padded))
        results: Results = np.empty(count, RESULT)
        return await session.mem_read(forward.results, 0, results.nbytes, into=results)

    async def line(self, prompt: Sequence[int], emitted: int, sampling: SamplingParameters = GREEDY) -> Line:
        """Compute a prompt and `emitted` tokens after it, with one row per step."""
        tokens, logits, results = list(prompt), [], []
        for position in range(len(prompt) + emitted):
            found = await self.compute(self.row(self.seat(), sampling, position, tokens[position]))
            logits.append((await self.engine.logits(1))[0])
            results.append(found)
            if position + 1 == len(tokens):
                tokens.append(int(found["token"][0]))
        return Line(tuple(tokens[:-1]), len(prompt), sampling, np.stack(logits), np.concatenate(results))

    async def lines(self, shapes: Sequence[tuple[int, int, SamplingParameters]], seed: int = 0) -> list[Line]:
        """Compute lines of random prompts. A shape is a prompt's length, a number of emitted tokens, and a sampling."""
        numbers = np.random.default_rng(seed)
        vocabulary = self.engine.forward.weights.config.vocabulary
        return [
            await self.line([int(token) for token in numbers.integers(0, vocabulary, length)], emitted, sampling)
            for length, emitted, sampling in shapes
        ]

    async def play(
        self, lines: Sequence[Line], schedule: Sequence[MixedStep], tally: Tally, *, is_served: bool = False
    ) -> None:
        """Compute a schedule, with two steps in progress where it allows this, and compare all results and logits.

        If the previous step computes a row's token, the row takes it from there; its record contains a wrong token.
        With `is_served`, only the results of rows that yield tokens are used, as a decoder does.
        """
        waiting: list[MixedStep] = []
        unset = 0
        before: dict[tuple[Seat, int], int] = {}
        for step in schedule:
            rows = np.concatenate([self._mixed_row(lines[seat.line], seat, at, before) for seat, at in step.rows])
            chosen = np.array([row for row, place in enumerate(step.rows) if _yields(lines, place)], np.intp)
            pools = {self.pools[seat.tenant] for seat, _ in step.rows}
            await self.engine.start(rows, pools, chosen=chosen if is_served else None)
            before = {place: number for number, place in enumerate(step.rows)}
            waiting.append(step)
            while len(waiting) == MAX_STEPS or (waiting and (step.is_awaited or step is schedule[-1])):
                found, results = waiting.pop(0), await self.engine.finish()
                if is_served:
                    self._compare_served(lines, found, results, tally)
                    unset += int(np.count_nonzero(results == UNSET))
                    continue
                logits = None if waiting else await self.engine.logits(len(found.rows))
                self._compare(lines, found, results, logits, tally)
        assert unset or not is_served, "logits were computed for all rows of every step"

    async def play_launches(self, lines: Sequence[Line], schedule: Sequence[MixedStep], tally: Tally) -> None:
        """Compute a schedule like `play`, but one step after another and without graphs."""
        before: dict[tuple[Seat, int], int] = {}
        for step in schedule:
            rows = np.concatenate([self._mixed_row(lines[seat.line], seat, at, before) for seat, at in step.rows])
            results = await self.launch(rows)
            before = {place: number for number, place in enumerate(step.rows)}
            self._compare(lines, step, results, await self.engine.logits(len(rows)), tally)

    def _mixed_row(self, line: Line, seat: Seat, position: int, before: dict[tuple[Seat, int], int]) -> Rows:
        token, source = line.tokens[position], NO_ROW
        if position >= line.prompt and (seat, position - 1) in before:
            source, token = before[seat, position - 1], (token + 1) % line.logits.shape[1]
        return self.row(seat, line.sampling, position, token, source)

    def _compare(
        self, lines: Sequence[Line], step: MixedStep, results: Results, logits: NDArray[np.float32] | None, tally: Tally
    ) -> None:
        for number, (seat, position) in enumerate(step.rows):
            line, place = lines[seat.line], f"row {number} of {len(step.rows)}: {seat} at {position}"
            tally.compare(f"result of {place}", results[[number]], line.results[[position]])
            if logits is not None:
                tally.compare(f"logits of {place}", logits[number], line.logits[position])

    def _compare_served(self, lines: Sequence[Line], step: MixedStep, results: Results, tally: Tally) -> None:
        for number, (seat, position) in enumerate(step.rows):
            if _yields(lines, (seat, position)):
                place = f"result of row {number} of {len(step.rows)}: {seat} at {position}"
                tally.compare(place, results[[number]], lines[seat.line].results[[position]])

    async def memory(self, tenant: int) -> bytes:
        region = self.pools[tenant].region
        return await self.engine.session.mem_read(region, 0, region.size_bytes)

    async def tables(self) -> bytes:
        buffer = self.engine.forward._buffers["tables"]
        return await self.engine.session.mem_read(buffer, 0, buffer.size_bytes)


@asynccontextmanager
async def opened(
    address: str,
    checkpoint: Checkpoint,
    limits: StepLimits,
    *,
    size_bytes: int = LEASE_BYTES,
    blocks: int = BLOCKS,
    regions_required: bool = True,
) -> AsyncIterator[EngineRig]:
    """Open an engine and its pools on a new lease."""
    builder = GpuBuilder(address).min_vram(size_bytes).lease_secs(LEASE_S)
    async with (builder.regions_required() if regions_required else builder).acquire() as lease:
        engine = await DecodeEngine.open(lease, checkpoint, limits)
        try:
            yield EngineRig(lease, engine, [await engine.open_pool(blocks, tenant=name) for name in TENANTS])
        finally:
            await engine.close()


class RunningRig:
    """A rig with an event loop that outlives a test. `run` runs a test's coroutine in the loop."""

    def __init__(self, runner: asyncio.Runner, rig: EngineRig) -> None:
        self._runner, self.rig = runner, rig

    def run(self, part: Callable[[EngineRig], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine function with the rig as its argument."""
        return self._runner.run(part(self.rig))

    def mix(self, lines: Sequence[Line], schedule: Sequence[MixedStep], *, is_served: bool = False) -> None:
        tally = Tally()
        self.run(lambda rig: rig.play(lines, schedule, tally, is_served=is_served))
        tally.check()


@contextmanager
def running(
    address: str, checkpoint: Checkpoint, limits: StepLimits, *, size_bytes: int = LEASE_BYTES
) -> Iterator[RunningRig]:
    with asyncio.Runner() as runner:
        rig = opened(address, checkpoint, limits, size_bytes=size_bytes)
        try:
            yield RunningRig(runner, runner.run(rig.__aenter__()))
        finally:
            runner.run(rig.__aexit__(None, None, None))
