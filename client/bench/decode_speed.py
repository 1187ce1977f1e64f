"""Times of the decode engine's steps and kernels beside the time to read their bytes, and beside other ways to decode.

    python -m gpulease.client.bench.decode_speed [SHAPE,... [BATCH,... [CONTEXT,...]]]

`gpulease bench --decode` does it with the shapes, batches and contexts for a card, or for the embedded driver. Weights
are random, of real models' shapes. Each figure is a JSON object. In the same run, each in a process of its own: the
same engine and kernels on the driver without a daemon (decode_direct), torch's loop (decode_torch), and transformers
with a static cache (decode_transformers). Of what is not there, one figure says so.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpulease.client.aio import GpuBuilder, GpuLease, GpuSession
from gpulease.client.bench.decode_kernels import kernel_figures, tile_figures
from gpulease.client.bench.decode_shapes import SHAPES
from gpulease.client.bench.decode_steps import (
    SEED,
    Blocks,
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
from gpulease.client.decode.engine.engine import DecodeEngine, lease_bytes
from gpulease.client.decode.engine.forward_pass import block_bytes
from gpulease.client.decode.row_records import PAGE
from gpulease.client.kernel_args import KernelArgs

COPIES: Final = 10

MAX_COPIED_BYTES: Final = 1 << 30
"""Bytes of each of two arrays that are read to measure the memory's rate: those of the weights, or fewer."""

SHEET_BYTES_PER_S: Final = 4.8e12
"""Rate of an H200's memory as its data sheet says it. No kernel reaches it; a copy reaches some nine tenths."""

LEASE_S: Final = 600
CHILD_TIMEOUT_S: Final = 900
"""Seconds for all figures of one way to decode; a hung driver must not hang the benchmark."""

OTHER_WAYS: Final = ("decode_torch", "decode_transformers")
"""Modules beside this one that time other ways to decode, given a shape, batches and contexts."""

Tell = Callable[[Mapping[str, object]], object]
"""Is given each figure as soon as it is there."""

Figure = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Sizes of one run.

    Attributes:
        shapes: Names of SHAPES.
        batches: Sequences of a step.
        contexts: Positions of the sequences.
        other_ways: Those of OTHER_WAYS that are timed beside it.
        times_kernels: Whether kernels are timed alone, and linears by other tiles.
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
    """Return the plan for a daemon's driver: real models' shapes are for a card."""
    if driver == "cuda":
        return QUICK if quick else FULL
    return QUICK_EMBEDDED if quick else EMBEDDED


def measure_decode(address: str, plan: DecodePlan, tell: Tell, say: Callable[[str], object]) -> None:
    """Tell all figures of a plan, on the daemon at this address and beside it."""
    for shape in plan.shapes:
        say(f"{shape}: the decode engine on a lease")
        target, steps = asyncio.run(measure(address, shape, plan, tell))
        say(f"{shape}: the same engine and kernels on the driver in a process of its own")
        for figure in _told_by("decode_direct", shape, target, plan):
            tell(_beside(figure, steps))
        for module in plan.other_ways:
            say(f"{shape}: {module.removeprefix('decode_')}")
            for figure in _told_by(module, shape, "", plan):
                tell(_beside(figure, steps))


Steps = dict[tuple[int, int], StepTime]
"""Leased steps by batch and context."""


def _beside(figure: Figure, steps: Steps) -> Figure:
    """Add how many times as many tokens the lease gives in the same time, and whether its results are the same."""
    leased = steps.get((figure.get("batch", 0), figure.get("context", 0)))
    if leased is None or "ms" not in figure:
        return figure
    beside = {"tokens_per_s": figure["batch"] / figure["ms"] * 1e3, "leased_ratio": figure["ms"] / leased.took_s / 1e3}
    if "results" in figure:
        beside["same_results"] = figure["results"] == leased.results
    return {name: value for name, value in figure.items() if name != "results"} | beside


def _told_by(module: str, shape: str, target: str, plan: DecodePlan) -> Iterator[Figure]:
    """Yield the figures that a module prints in a process of its own; one that tells why there are none, or no more."""
    lists = [",".join(map(str, values)) for values in (plan.batches, plan.contexts)]
    words = [word for word in (shape, target, *lists) if word]
    command = [sys.executable, "-P", "-m", f"gpulease.client.bench.{module}", *words]
    why = {"figure": module.removeprefix("decode_"), "shape": shape}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        yield why | {"skipped": f"no end within {CHILD_TIMEOUT_S} s"}
        return
    for line in done.stdout.splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(figure := json.loads(line), dict):
                yield figure
    if done.returncode:
        yield why | {"skipped": (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]}


async def measure(address: str, shape: str, plan: DecodePlan, tell: Tell = print_figures) -> tuple[str, Steps]:
    """Tell the figures of a shape on a lease. Returns the architecture whose kernels ran, and the steps' times."""
    batches, contexts = plan.batches, plan.contexts
    config, limits = SHAPES[shape], limits_of(batches, contexts)
    count = max(batches) * limits.table_blocks
    checkpoint, copied = RandomCheckpoint(config, SEED), min(weight_bytes(config), MAX_COPIED_BYTES)
    size_bytes = lease_bytes(checkpoint, limits, [count]) + 2 * copied
    async with GpuBuilder(address).min_vram(size_bytes).lease_secs(LEASE_S).acquire() as lease:
        rate = await memory_rate(lease, copied)
        tell({"figure": "memory", "shape": shape, "bytes_per_s": rate})
        engine = await DecodeEngine.open(lease, checkpoint, limits)
        try:
            pool = await engine.open_pool(count)
            blocks = Blocks(pool.region.address, pool.blocks)
            await engine.session.mem_write(engine.forward.tables, 0, block_tables(limits))
            steps: Steps = {}
            for context in contexts:
                for batch in batches:
                    found = await step_time(engine, decode_rows(blocks, limits, batch, context), [pool])
                    steps[batch, context] = found
                    step = {"figure": "step", "shape": shape, "batch": batch, "context": context}
                    moved = moved_bytes(config, batch, context)
                    tell(step | step_figure(batch, found.took_s, moved, rate))
            prompt = prompt_rows(blocks, limits)
            took_s = (await step_time(engine, prompt, [pool])).took_s
            prefill = {"figure": "prefill", "shape": shape, "rows": len(prompt), "ms": took_s * 1e3}
            tell(prefill | {"tokens_per_s": len(prompt) / took_s})
            if plan.times_kernels:
                await _tell_kernels(engine, blocks, shape, steps, tell)
            return engine.forward.target, steps
        finally:
            await engine.close()


async def _tell_kernels(engine: DecodeEngine, blocks: Blocks, shape: str, steps: Steps, tell: Tell) -> None:
    """Tell the times of kernels, and of linears by other tiles, in the steps of the longest context."""
    context = max(context for _, context in steps)
    for batch, at in steps:
        if at == context:
            about = {"shape": shape, "batch": batch, "context": context}
            async for figure in kernel_figures(engine, blocks, batch, context):
                tell({"figure": "kernel"} | about | figure)
            async for figure in tile_figures(engine, blocks, batch, context, steps[batch, at].took_s):
                tell({"figure": "invariance"} | about | figure)


def step_figure(batch: int, took_s: float, moved: int, rate: float) -> Figure:
    """Return a step's figures: its time, and its share of the time to read its bytes.

    Args:
        batch: Tokens of the step.
        took_s: Seconds.
        moved: Bytes that it reads at least.
        rate: Bytes a second that a kernel here was measured to read.
    """
    return {
        "ms": took_s * 1e3,
        "tokens_per_s": batch / took_s,
        "floor_ms": moved / rate * 1e3,
        "share": moved / rate / took_s,
        "share_of_4_8_tb_per_s": moved / SHEET_BYTES_PER_S / took_s,
    }


def moved_bytes(config: ModelConfig, batch: int, context: int) -> int:
    """Return the bytes that a step has to read at least: every weight once, and what its rows attend to."""
    return weight_bytes(config) + batch * context * block_bytes(config) // PAGE


async def memory_rate(lease: GpuLease, size_bytes: int) -> float:
    """Return the bytes a second at which a kernel reads two arrays of this size and writes one."""
    async with GpuSession(lease) as session:
        module = await session.module_load(kernels_ptx())
        y, x = await session.mem_alloc(size_bytes), await session.mem_alloc(size_bytes)
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
        return 3 * size_bytes / min(samples)


def weight_bytes(config: ModelConfig) -> int:
    """Return the bytes of the weights that every step reads."""
    heads, keys = config.heads * config.head_width, config.key_heads * config.head_width
    layer = (2 * heads + 2 * keys + 3 * config.inner_width) * config.width
    return (config.layers * layer + config.vocabulary * config.width) * 2


def main(words: Sequence[str]) -> None:
    """Print the figures of the shapes, batches and contexts that the words name, or of all."""
    with contextlib.ExitStack() as stack:
        address = running_address() or stack.enter_context(private_daemon("auto"))
        plan = plan_for(first_card(address)["driver"], quick=False)
        shapes = tuple(words[0].split(",")) if words else plan.shapes
        batches = numbers_of(words[1]) if len(words) > 1 else plan.batches
        contexts = numbers_of(words[2]) if len(words) > 2 else plan.contexts
        measure_decode(address, DecodePlan(shapes, batches, contexts), print_figures, lambda text: None)


if __name__ == "__main__":
    main(sys.argv[1:])
