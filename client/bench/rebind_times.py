"""Times of two ways to continue a tenant's sequence in another region: compute it again, or copy it out and in.

    python -m gpulease.client.bench.rebind_times [MODEL | llama-1b [PROMPT...]]

PROMPT is a number of tokens. Uses the running daemon, or a private one. Prints a table with medians of ROUNDS. Opening
the region is not included: it takes the same time either way.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpulease.client.aio import GpuBuilder
from gpulease.client.bench.decode_service import checkpoint_named
from gpulease.client.bench.figures import percentile
from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.decode import (
    TINY_MODEL,
    BlockPool,
    Checkpoint,
    DecodeEngine,
    StepLimits,
)
from gpulease.client.decode.engine.engine import MAX_STEPS, lease_bytes
from gpulease.client.decode.row_records import NO_ROW, PAGE, ROW, Rows

PROMPTS: Final = (64, 128, 256, 512, 1024)
ROUNDS: Final = 5
CHUNK_ROWS: Final = 64
"""Number of a prompt's rows per step: the maximum for a decoder's step."""

LEASE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class RebindTimes:
    """Median times for one length of the prompt, in milliseconds.

    Attributes:
        prompt: Number of the prompt's tokens.
        replay_ms: Time to compute the prompt again, with no other load.
        out_ms: Time to copy the prompt's blocks to host memory.
        in_ms: Time to copy the blocks back.
        copied_bytes: Size of the blocks.
    """

    prompt: int
    replay_ms: float
    out_ms: float
    in_ms: float
    copied_bytes: int

    @property
    def stateful_ms(self) -> float:
        """Milliseconds to copy the sequence out and in, one after the other."""
        return self.out_ms + self.in_ms


async def measure_rebinds(
    address: str, checkpoint: Checkpoint, prompts: Sequence[int] = PROMPTS, rounds: int = ROUNDS
) -> list[RebindTimes]:
    """Measure each length of the prompt, all on one engine. Raises the errors of `DecodeEngine.open`."""
    longest = max(prompts)
    # Limit the engine to one sequence, with room for the longest prompt.
    limits = StepLimits(min(CHUNK_ROWS, longest), 1, longest + PAGE)
    blocks = limits.table_blocks
    size_bytes = lease_bytes(checkpoint, limits, [blocks, blocks])
    builder = GpuBuilder(address).min_vram(size_bytes).lease_secs(LEASE_S).regions_required()
    async with builder.acquire() as lease, lease.keep_alive():
        engine = await DecodeEngine.open(lease, checkpoint, limits)
        try:
            # Open two regions: one that is lost, and one in which the sequence continues.
            old, new = await engine.open_pool(blocks), await engine.open_pool(blocks)
            return [await _times(engine, old, new, prompt, rounds) for prompt in prompts]
        finally:
            await engine.close()


async def _times(engine: DecodeEngine, old: BlockPool, new: BlockPool, prompt: int, rounds: int) -> RebindTimes:
    # These are the blocks that the prompt fills; it may fill only part of the last one.
    used = list(range(-(-prompt // PAGE)))
    await _compute(engine, old, prompt)
    # The contents of the first region are the reference for both ways.
    saved = await engine.save_pool(old, used)
    replay_ms = await _median_ms(rounds, lambda: _compute(engine, new, prompt))
    # Compare the times only if both ways give the same bits.
    if not np.array_equal(await engine.save_pool(new, used), saved):
        raise AssertionError("what was computed again has other bits")
    out_ms = await _median_ms(rounds, lambda: engine.save_pool(old, used))
    in_ms = await _median_ms(rounds, lambda: engine.load_pool(new, used, saved))
    return RebindTimes(prompt, replay_ms, out_ms, in_ms, saved.nbytes)


async def _compute(engine: DecodeEngine, pool: BlockPool, prompt: int) -> None:
    """Compute a prompt in chunks, with two steps in progress."""
    max_rows = engine.limits.max_rows
    for begin in range(0, prompt, max_rows):
        # As in a decoder, queue the next step while one computes.
        if engine.steps_under_way == MAX_STEPS:
            await engine.finish()
        await engine.start(_rows(engine, pool, range(begin, min(begin + max_rows, prompt))), [pool])
    while engine.steps_under_way:
        await engine.finish()


def _rows(engine: DecodeEngine, pool: BlockPool, positions: range) -> Rows:
    rows: Rows = np.zeros(len(positions), ROW)
    at = np.array(positions)
    rows["position"], rows["block"], rows["source"] = at, at // PAGE, NO_ROW
    rows["token"] = 1 + at % (engine.forward.weights.config.vocabulary - 1)
    rows["base"], rows["blocks"] = pool.region.address, pool.blocks
    return rows


async def _median_ms(rounds: int, work: Callable[[], Awaitable[object]]) -> float:
    took_ms = []
    # Run once before the clock starts, so that buffers are allocated and kernels loaded.
    await work()
    for _ in range(rounds):
        begin_s = time.perf_counter()
        await work()
        took_ms.append(1e3 * (time.perf_counter() - begin_s))
    return percentile(took_ms, 50)


def table_of(runs: Sequence[RebindTimes]) -> str:
    """Lay out the times, one line for each prompt, with both copies of the stateful way."""
    lines = ["prompt   replay ms   stateful ms   (out + in)        MiB"]
    for times in runs:
        parts = f"({times.out_ms:.2f} + {times.in_ms:.2f})"
        size = f"{times.copied_bytes / 2**20:.2f}"
        lines.append(f"{times.prompt:6}   {times.replay_ms:9.2f}   {times.stateful_ms:11.2f}   {parts:14} {size:>6}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Measure the model that the arguments name, for the lengths of prompts that they name."""
    checkpoint = checkpoint_named(arguments[0] if arguments else str(TINY_MODEL))
    prompts = [int(argument) for argument in arguments[1:]] or PROMPTS
    lengths = [prompt for prompt in prompts if prompt + PAGE <= checkpoint.config.context]
    with contextlib.ExitStack() as stack:
        address = running_address() or stack.enter_context(private_daemon("auto"))
        print(table_of(asyncio.run(measure_rebinds(address, checkpoint, lengths))))


if __name__ == "__main__":
    main(sys.argv[1:])
