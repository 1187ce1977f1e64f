"""Times of the decode engine's steps and kernels beside the time to read their bytes, and beside torch.

    python -m gpulease.client.bench.decode_speed [SHAPE,... [BATCH,... [CONTEXT,...]]]

Weights are random, of real models' shapes. Uses the daemon that runs, or a private one. Prints a JSON object for each
figure. Where torch is installed, its loop (cuBLAS and its attention, in a CUDA graph) follows in the same run.
"""

import asyncio
import contextlib
import importlib.util
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import numpy as np

from gpulease.client.aio import GpuBuilder, GpuLease, GpuSession
from gpulease.client.bench.decode_shapes import SHAPES
from gpulease.client.bench.figures import print_figures
from gpulease.client.bench.kernel_times import kernels_ptx
from gpulease.client.cli.private_daemon import private_daemon, running_address
from gpulease.client.handles import Buffer
from gpulease.client.kernel_args import KernelArgs
from gpulease.client.serve.decode import ModelConfig, RandomCheckpoint
from gpulease.client.serve.decode.engine import BlockPool, DecodeEngine, lease_bytes
from gpulease.client.serve.decode.forward_pass import StepLimits, block_bytes
from gpulease.client.serve.decode.kernel_library import KernelLaunch
from gpulease.client.serve.decode.row_records import NOBODY, PAGE, ROW, Rows

BATCHES: Final = (1, 8, 64, 256)
CONTEXTS: Final = (128, 1024)
PREFILL: Final = 512
"""Rows of the step that computes a prompt at once."""

WARM_STEPS: Final = 5
STEPS: Final = 40
"""Steps of each figure: two are under way at a time, as under a decoder."""

KERNEL_LAUNCHES: Final = 32
"""Launches in a graph that times one kernel, at least."""

KERNEL_GRAPHS: Final = 10
MAX_COPIED_BYTES: Final = 1 << 30
"""Bytes of each of two arrays that are read to measure the memory's rate: those of the weights, or fewer."""

LEASE_S: Final = 600

Figure = dict[str, Any]


async def measure(address: str, shape: str, batches: Sequence[int], contexts: Sequence[int]) -> None:
    """Print the figures of a shape."""
    config, most, positions = SHAPES[shape], max(*batches, PREFILL), max(contexts) + WARM_STEPS + STEPS
    limits = StepLimits(most, max(batches), positions)
    blocks = max(batches) * limits.table_blocks
    checkpoint, copied = RandomCheckpoint(config, 1), min(weight_bytes(config), MAX_COPIED_BYTES)
    size_bytes = lease_bytes(checkpoint, limits, [blocks]) + 2 * copied
    async with GpuBuilder(address).min_vram(size_bytes).lease_secs(LEASE_S).acquire() as lease:
        rate = await memory_rate(lease, copied)
        print_figures({"figure": "memory", "shape": shape, "bytes_per_s": rate})
        engine = await DecodeEngine.open(lease, checkpoint, limits)
        try:
            pool = await engine.open_pool(blocks)
            await write_tables(engine, limits)
            for context in contexts:
                for batch in batches:
                    floor_s = moved_bytes(engine, batch, context) / rate
                    took_s = await step_s(engine, pool, decode_rows(pool, limits, batch, context))
                    step = {"figure": "step", "shape": shape, "batch": batch, "context": context, "ms": took_s * 1e3}
                    floor = {"floor_ms": floor_s * 1e3, "share": floor_s / took_s}
                    print_figures(step | {"tokens_per_s": batch / took_s} | floor)
            prompt = prompt_rows(pool, limits)
            took_s = await step_s(engine, pool, prompt)
            prefill = {"figure": "prefill", "shape": shape, "rows": len(prompt), "ms": took_s * 1e3}
            print_figures(prefill | {"tokens_per_s": len(prompt) / took_s})
            for batch in batches:
                async for figure in kernel_figures(engine, pool, limits, batch, max(contexts)):
                    kernel = {"figure": "kernel", "shape": shape, "batch": batch, "context": max(contexts)}
                    print_figures(kernel | figure)
        finally:
            await engine.close()


def moved_bytes(engine: DecodeEngine, batch: int, context: int) -> int:
    """Return the bytes that a step has to read at least: every weight once, and what its rows attend to."""
    config = engine.forward.weights.config
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
        for _ in range(KERNEL_GRAPHS):
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


async def write_tables(engine: DecodeEngine, limits: StepLimits) -> None:
    """Give each sequence blocks of its own, one after the other."""
    tables = np.arange(limits.tables * limits.table_blocks, dtype=np.int32)
    await engine.session.mem_write(engine.forward.tables, 0, tables)


def decode_rows(pool: BlockPool, limits: StepLimits, batch: int, context: int) -> Rows:
    """Return the rows of a step of `batch` sequences, at the position `context`."""
    rows = _rows(pool, batch)
    rows["position"], rows["table"] = context, np.arange(batch)
    rows["block"] = rows["table"] * limits.table_blocks + context // PAGE
    return rows


def prompt_rows(pool: BlockPool, limits: StepLimits) -> Rows:
    """Return the rows of a step of one prompt, as far as a sequence has positions."""
    rows = _rows(pool, min(PREFILL, limits.positions))
    rows["position"] = np.arange(len(rows))
    rows["block"] = rows["position"] // PAGE
    return rows


def _rows(pool: BlockPool, count: int) -> Rows:
    rows = np.zeros(count, ROW)
    rows["token"], rows["source"], rows["top_p"] = np.arange(count) + 5, NOBODY, 1
    rows["base"], rows["blocks"] = pool.region.address, pool.blocks
    return rows


async def step_s(engine: DecodeEngine, pool: BlockPool, rows: Rows) -> float:
    """Return the seconds a step, two under way."""
    await engine.start(rows, [pool])
    for _ in range(WARM_STEPS):
        await engine.start(rows, [pool])
        await engine.finish()
    began = time.perf_counter()
    for _ in range(STEPS):
        await engine.start(rows, [pool])
        await engine.finish()
    took_s = (time.perf_counter() - began) / STEPS
    await engine.finish()
    return took_s


async def kernel_figures(
    engine: DecodeEngine, pool: BlockPool, limits: StepLimits, batch: int, context: int
) -> AsyncIterator[Figure]:
    """Yield each kernel's microseconds a launch and a step, alone in graphs, those of the longest share first."""
    forward, session = engine.forward, engine.session
    await session.mem_write(forward.rows, 0, decode_rows(pool, limits, batch, context))
    kinds: dict[str, list[KernelLaunch]] = defaultdict(list)
    for launch in forward.launches(batch):
        kinds[_kind(launch)].append(launch)
    found: list[Figure] = []
    for kind, launches in kinds.items():
        repeats = -(-KERNEL_LAUNCHES // len(launches))
        async with session.record() as graph:
            for _ in range(repeats):
                for launch in launches:
                    await forward.library.launch(launch)
        await graph.launch()
        await session.sync()
        began = time.perf_counter()
        for _ in range(KERNEL_GRAPHS):
            await graph.launch()
        await session.sync()
        took_us = (time.perf_counter() - began) * 1e6 / (KERNEL_GRAPHS * repeats * len(launches))
        moved = _weight_bytes(launches[0])
        rate = {"gb_per_s": moved / took_us / 1e3} if moved else {}
        found.append(
            {"kernel": kind, "us": took_us, "launches": len(launches), "step_us": took_us * len(launches)} | rate
        )
    for figure in sorted(found, key=lambda figure: -figure["step_us"]):
        yield figure


def _kind(launch: KernelLaunch) -> str:
    """Name a kernel by what it computes: linears of different shapes are different kinds."""
    shape = [str(launch.values[name]) for name in ("N", "K") if name in launch.values]
    return f"{launch.name} [{' x '.join(shape)}]" if shape else launch.name


def _weight_bytes(launch: KernelLaunch) -> int:
    """Return the bytes of a linear's weights, 0 for another kernel."""
    values = launch.values
    if not launch.name.startswith("linear"):
        return 0
    return sum(
        value.size_bytes for name, value in values.items() if isinstance(value, Buffer) and name not in ("parts", "x")
    )


def torch_figures(shape: str, batches: Sequence[int], contexts: Sequence[int]) -> None:
    """Print the figures of torch's loop, in a process of its own. Its card is the one that torch sees first."""
    lists = [",".join(map(str, values)) for values in (batches, contexts)]
    command = [sys.executable, "-P", "-m", "gpulease.client.bench.decode_torch", shape, *lists]
    subprocess.run(command, check=True)


def main(shapes: Sequence[str], batches: Sequence[int], contexts: Sequence[int]) -> None:
    """Print the figures of all shapes, and torch's."""
    with contextlib.ExitStack() as stack:
        address = running_address() or stack.enter_context(private_daemon("auto"))
        for shape in shapes:
            asyncio.run(measure(address, shape, batches, contexts))
            if importlib.util.find_spec("torch"):
                torch_figures(shape, batches, contexts)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        given[0].split(",") if given else ("qwen3-0.6b", "llama-1b", "llama-8b"),
        _numbers(given[1]) if len(given) > 1 else BATCHES,
        _numbers(given[2]) if len(given) > 2 else CONTEXTS,
    )
