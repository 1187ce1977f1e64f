"""Times of the decode engine's steps and kernels, compared with reading their bytes and with other ways to decode.

    python -m gpulease.client.bench.decode_speed [SHAPE,... [BATCH,... [CONTEXT,...]]]

`gpulease bench --decode` runs it with the shapes, batches and contexts for a card, or for the embedded driver. Weights
are random, in real models' shapes. Each figure is a JSON object. The same run also measures, each in a separate
process: the same engine and kernels on the driver without a daemon (decode_direct), torch's loop (decode_torch), and
transformers with a static cache (decode_transformers). For each that is not installed, one figure says so.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from gpulease.client.aio import GpuBuilder, GpuLease, GpuSession
from gpulease.client.bench.decode_kernels import kernel_figures, tile_figures
from gpulease.client.bench.decode_shapes import SHAPES
from gpulease.client.bench.decode_steps import (
    SEED,
    RowBlocks,
    StepTime,
    block_tables,
    decode_rows,
    limits_of,
    numbers_of,
    prompt_rows,
    step_time,
)
from gpulease.client.bench.figures import print_figures
from gpulease.client.bench.kernel_times import kernels_ptx
from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.console.reports import first_card
from gpulease.client.decode import ModelConfig, RandomCheckpoint
from gpulease.client.decode.engine.engine import BlockPool, DecodeEngine, lease_bytes
from gpulease.client.decode.engine.forward_pass import block_bytes
from gpulease.client.decode.row_records import PAGE, Results, Rows
from gpulease.client.kernel_args import KernelArgs

COPIES: Final = 10

MAX_COPIED_BYTES: Final = 1 << 30
"""Maximum size, in bytes, of each of the two arrays with which the memory's rate is measured; by default they are as
large as the weights."""

SHEET_BYTES_PER_S: Final = 4.8e12
"""Memory rate of an H200 according to its data sheet. No kernel reaches it; a copy reaches about nine tenths."""

LEASE_S: Final = 600
CHILD_TIMEOUT_S: Final = 900
"""Longest time for all figures of one way to decode, in seconds. Stops a hung driver from hanging the benchmark."""

OTHER_WAYS: Final = ("decode_torch", "decode_transformers")
"""Modules in this package that time other ways to decode; their arguments are a shape, batches and contexts."""

Report = Callable[[Mapping[str, object]], object]
"""Receives each figure as soon as it is measured."""

Figure = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Sizes of one run.

    Attributes:
        shapes: Names of SHAPES.
        batches: Numbers of sequences in a step.
        contexts: Numbers of positions of each sequence.
        other_ways: The members of OTHER_WAYS that are timed in the same run.
        times_kernels: Whether to time kernels alone, and linear layers with other tiles.
    """

    shapes: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    other_ways: tuple[str, ...] = OTHER_WAYS
    times_kernels: bool = True


FULL: Final = DecodePlan(("qwen3-0.6b", "llama-1b", "llama-8b"), (1, 8, 64, 256), (128, 1024))
QUICK: Final = DecodePlan(("llama-1b",), (1, 64), (128,))
EMBEDDED: Final = DecodePlan(("two-layers",), (1, 8), (64,))
QUICK_EMBEDDED: Final = DecodePlan(("two-layers",), (1,), (32,))


def plan_for(driver: str, *, quick: bool) -> DecodePlan:
    """Return the plan for a daemon's driver. Only plans for cards have real models' shapes."""
    if driver == "cuda":
        return QUICK if quick else FULL
    return QUICK_EMBEDDED if quick else EMBEDDED


def measure_decode(address: str, plan: DecodePlan, report: Report, log: Callable[[str], object]) -> None:
    """Report all figures of a plan: on a lease of the daemon at this address, and of the other ways to decode.

    Args:
        address: The daemon's address.
        plan: The plan.
        report: Receives each figure.
        log: Receives the name of each measurement before it starts.
    """
    # Measure each shape on a lease first, and then each other way in a separate process, so that none disturbs another.
    for shape in plan.shapes:
        log(f"{shape}: the decode engine on a lease")
        target, steps = asyncio.run(measure(address, shape, plan, report))
        log(f"{shape}: the same engine and kernels on the driver in a process of its own")
        for figure in _figures_of("decode_direct", shape, target, plan):
            report(_with_comparison(figure, steps))
        for module in plan.other_ways:
            log(f"{shape}: {module.removeprefix('decode_')}")
            for figure in _figures_of(module, shape, "", plan):
                report(_with_comparison(figure, steps))


Steps = dict[tuple[int, int], StepTime]
"""Steps on a lease, by batch and context."""


def _with_comparison(figure: Figure, steps: Steps) -> Figure:
    """Add the ratio of tokens per second on the lease to this way's, and whether the results are equal."""
    # Only steps of the same batch and context are compared; other figures stay unchanged.
    leased = steps.get((figure.get("batch", 0), figure.get("context", 0)))
    if leased is None or "ms" not in figure:
        return figure
    comparison = {
        "tokens_per_s": figure["batch"] / figure["ms"] * 1e3,
        "leased_ratio": figure["ms"] / leased.took_s / 1e3,
    }
    if "results" in figure:
        comparison["same_results"] = figure["results"] == leased.results
    return {name: value for name, value in figure.items() if name != "results"} | comparison


def _figures_of(module: str, shape: str, target: str, plan: DecodePlan) -> Iterator[Figure]:
    """Yield the figures that a module prints in a separate process, and one with the reason if some are missing."""
    # The modules' arguments are a shape, an architecture if there is one, batches and contexts.
    lists = [",".join(map(str, values)) for values in (plan.batches, plan.contexts)]
    arguments = [word for word in (shape, target, *lists) if word]
    command = [sys.executable, "-P", "-m", f"gpulease.client.bench.{module}", *arguments]
    labels = {"figure": module.removeprefix("decode_"), "shape": shape}
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        yield labels | {"skipped": f"no end within {CHILD_TIMEOUT_S} s"}
        return
    # Libraries print other lines, too.
    for line in result.stdout.splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(figure := json.loads(line), dict):
                yield figure
    # If a peer is not installed, or fails, report one figure that says so.
    if result.returncode:
        yield labels | {"skipped": (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[-1]}


async def measure(address: str, shape: str, plan: DecodePlan, report: Report = print_figures) -> tuple[str, Steps]:
    """Report the figures of a shape on a lease. Returns the architecture of the kernels, and the steps' times."""
    # Acquire a lease for the engine, its blocks, and the two arrays with which the memory's rate is measured.
    batches, contexts = plan.batches, plan.contexts
    config, limits = SHAPES[shape], limits_of(batches, contexts)
    count = max(batches) * limits.table_blocks
    checkpoint, copied = RandomCheckpoint(config, SEED), min(weight_bytes(config), MAX_COPIED_BYTES)
    size_bytes = lease_bytes(checkpoint, limits, [count]) + 2 * copied
    async with GpuBuilder(address).min_vram(size_bytes).lease_secs(LEASE_S).acquire() as lease:
        # A step's time is compared with the rate of this card's memory, measured in the same run.
        rate = await memory_rate(lease, copied)
        report({"figure": "memory", "shape": shape, "bytes_per_s": rate})
        engine = await DecodeEngine.open(lease, checkpoint, limits)
        try:
            # Use one pool for all rows. Each sequence has its own blocks in it.
            pool = await engine.open_pool(count)
            blocks = RowBlocks(pool.region.address, pool.blocks)
            await engine.session.mem_write(engine.forward.tables, 0, block_tables(limits))
            steps: Steps = {}
            for context in contexts:
                for batch in batches:
                    step_times = await step_time(engine, decode_rows(blocks, limits, batch, context), [pool])
                    steps[batch, context] = step_times
                    step = {"figure": "step", "shape": shape, "batch": batch, "context": context}
                    moved = moved_bytes(config, batch, context)
                    report(step | step_figure(batch, step_times.took_s, moved, rate))
            # Time a whole prompt in one step.
            prompt = prompt_rows(blocks, limits)
            took_s = (await step_time(_PromptSteps(engine), prompt, [pool])).took_s
            prefill = {"figure": "prefill", "shape": shape, "rows": len(prompt), "ms": took_s * 1e3}
            report(prefill | {"tokens_per_s": len(prompt) / took_s})
            if plan.times_kernels:
                await _report_kernels(engine, blocks, shape, steps, report)
            return engine.forward.target, steps
        finally:
            await engine.close()


class _PromptSteps:
    """Runs steps of a whole prompt, of which only the last row yields a token."""

    def __init__(self, engine: DecodeEngine) -> None:
        self._engine = engine

    async def start(self, rows: Rows, pools: Iterable[BlockPool]) -> int:
        return await self._engine.start(rows, pools, chosen=np.array([len(rows) - 1]))

    async def finish(self) -> Results:
        return await self._engine.finish()


async def _report_kernels(engine: DecodeEngine, blocks: RowBlocks, shape: str, steps: Steps, report: Report) -> None:
    """Report the times of kernels, and of linear layers with other tiles, in the steps of the longest context."""
    # Kernels are timed where attention is longest.
    context = max(context for _, context in steps)
    for batch, at in steps:
        if at == context:
            inputs = {"shape": shape, "batch": batch, "context": context}
            async for figure in kernel_figures(engine, blocks, batch, context):
                report({"figure": "kernel"} | inputs | figure)
            async for figure in tile_figures(engine, blocks, batch, context, steps[batch, at].took_s):
                report({"figure": "invariance"} | inputs | figure)


def step_figure(batch: int, took_s: float, moved: int, rate: float) -> Figure:
    """Return a step's figures: its time, and the share of it that reading its bytes would take.

    Args:
        batch: Tokens of the step.
        took_s: Its seconds.
        moved: Minimum number of bytes that it must read.
        rate: Measured bytes per second that a kernel reads on this card.
    """
    # The floor follows from the memory's measured rate; the data sheet's rate is given for comparison.
    return {
        "ms": took_s * 1e3,
        "tokens_per_s": batch / took_s,
        "floor_ms": moved / rate * 1e3,
        "share": moved / rate / took_s,
        "share_of_4_8_tb_per_s": moved / SHEET_BYTES_PER_S / took_s,
    }


def moved_bytes(config: ModelConfig, batch: int, context: int) -> int:
    """The minimum bytes that a step reads: every weight once, and the keys and values to which its rows attend."""
    return weight_bytes(config) + batch * context * block_bytes(config) // PAGE


async def memory_rate(lease: GpuLease, size_bytes: int) -> float:
    """Return the bytes per second at which a kernel reads two arrays of this size and writes one."""
    async with GpuSession(lease) as session:
        module = await session.module_load(kernels_ptx())
        y, x = await session.mem_alloc(size_bytes), await session.mem_alloc(size_bytes)
        # y = y + a x over both arrays: as many bytes as the largest weights.
        count, samples = size_bytes // 4, []
        args = KernelArgs()
        args.push_buffer(y)
        args.push_buffer(x)
        args.push_u32(count)
        args.push_f32(0.5)
        for _ in range(COPIES):
            began = time.perf_counter()
            await session.launch(module, "saxpy", (-(-count // 256),), (256,), args)
            await session.sync()
            samples.append(time.perf_counter() - began)
        # The best sample; saxpy reads two arrays and writes one.
        return 3 * size_bytes / min(samples)


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of the weights that every step reads."""
    # Query, key, value and output projections, the three of the feed-forward part, and the embedding once.
    heads, keys = config.heads * config.head_width, config.key_heads * config.head_width
    layer = (2 * heads + 2 * keys + 3 * config.inner_width) * config.width
    return (config.layers * layer + config.vocabulary * config.width) * 2


def main(arguments: Sequence[str]) -> None:
    """Print the figures of the shapes, batches and contexts that the arguments name, or of all."""
    with contextlib.ExitStack() as stack:
        address = running_address() or stack.enter_context(private_daemon("auto"))
        plan = plan_for(first_card(address)["driver"], quick=False)
        shapes = tuple(arguments[0].split(",")) if arguments else plan.shapes
        batches = numbers_of(arguments[1]) if len(arguments) > 1 else plan.batches
        contexts = numbers_of(arguments[2]) if len(arguments) > 2 else plan.contexts
        measure_decode(address, DecodePlan(shapes, batches, contexts), print_figures, lambda text: None)


if __name__ == "__main__":
    main(sys.argv[1:])
