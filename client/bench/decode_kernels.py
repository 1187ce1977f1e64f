"""Times of the decode engine's kernels, one kernel per launch graph; and of linear layers with other tiles and splits.

The engine splits a linear layer's sums by the weight's shape alone, so that a row's bits are the same in every step.
`tile_figures` measures the cost of that rule: it compares every tile and number of parts that the kernels have with
those in use.
"""

import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final

from gpulease.client.bench.decode_steps import RowBlocks, decode_rows
from gpulease.client.decode.checkpoint.weights import Plane
from gpulease.client.decode.engine.engine import DecodeEngine
from gpulease.client.decode.engine.forward_pass import chunk_of
from gpulease.client.decode.engine.kernel_library import KernelLaunch, manifest
from gpulease.client.decode.engine.linear_tiles import IN_TURNS, SM_80, linear_grid, tiles_of
from gpulease.client.handles import Buffer

KERNEL_LAUNCHES: Final = 32
"""Minimum number of launches in a graph that times one kernel."""

KERNEL_GRAPHS: Final = 10

MOST_SPLITS: Final = 16
"""Maximum number of parts of a sum that are tried."""

MOST_READS: Final = 8
"""Maximum number of times that a tile may read the weights: tiles that read them more often never win, and are slow to
measure."""

Figure = dict[str, Any]


async def kernel_figures(engine: DecodeEngine, blocks: RowBlocks, batch: int, context: int) -> AsyncIterator[Figure]:
    """Yield each kernel's microseconds per launch and per step, alone in graphs, in order of their share of a step."""
    await _give_rows(engine, blocks, batch, context)
    # The share of a step is the kernel's time times its launches in that step.
    figures: list[Figure] = []
    for kind, launches in _kinds(engine, batch).items():
        took_us = await _launch_us(engine, launches)
        moved = _weight_bytes(launches[0])
        # Only linear layers read a known number of bytes: their weights.
        rate = {"gb_per_s": moved / took_us / 1e3} if moved else {}
        figures.append(
            {"kernel": kind, "us": took_us, "launches": len(launches), "step_us": took_us * len(launches)} | rate
        )
    for figure in sorted(figures, key=lambda figure: -figure["step_us"]):
        yield figure


async def tile_figures(
    engine: DecodeEngine, blocks: RowBlocks, batch: int, context: int, step_s: float
) -> AsyncIterator[Figure]:
    """Yield each linear layer's times, with the best tile and splits and with those in use; then the sum of all layers.

    Args:
        engine: The engine.
        blocks: Blocks of keys and values that the rows name.
        batch: Number of rows in the step.
        context: Position of the rows.
        step_s: Seconds of such a step; the cost of all linear layers is reported as a share of it.
    """
    await _give_rows(engine, blocks, batch, context)
    linears = {
        kind: launches for kind, launches in _kinds(engine, batch).items() if launches[0].name.startswith("linear")
    }
    target = engine.forward.target
    tried = {kind: list(variants(launches[0], target)) for kind, launches in linears.items()}
    # Load all variants first, so that no time includes compiling.
    await engine.forward.library.load(*{one.name for others in tried.values() for one in others})
    chosen_us = best_us = 0.0
    for kind, launches in linears.items():
        # Each variant computes the same layer; only its tile and the parts of its sums differ.
        times = {
            described(other): await _launch_us(engine, [varied(one, other) for one in launches])
            for other in tried[kind]
        }
        chosen, best = described(launches[0]), min(times, key=times.__getitem__)
        chosen_us += times[chosen] * len(launches)
        best_us += times[best] * len(launches)
        yield {
            "linear": f"{_count(launches[0])} x {_whole(launches[0], 'K')}",
            "launches": len(launches),
            "chosen": chosen,
            "best": best,
            "chosen_us": times[chosen],
            "best_us": times[best],
            "cost": times[chosen] / times[best] - 1,
        }
    best_step_us = step_s * 1e6 - (chosen_us - best_us)
    # The cost is a share of the time of a step in which each linear layer uses its best kernel.
    share = {"step_cost": (chosen_us - best_us) / best_step_us} if best_step_us > 0 else {}
    yield {"linear": "all", "chosen_us": chosen_us, "best_us": best_us, "cost": chosen_us / best_us - 1} | share


def variants(launch: KernelLaunch, target: str) -> Iterator[KernelLaunch]:
    """Yield a linear layer's launch with each tile that a card has, and each number of parts that fits its buffer.

    Args:
        launch: The launch as the engine chose it.
        target: The card's architecture. Its tiles are tried in addition to those of every card.
    """
    kernels, values = manifest().kernels, launch.values
    rows, count, columns = _whole(launch, "R"), _count(launch), _whole(launch, "K")
    function = kernels[launch.name].kernel.removesuffix(IN_TURNS)
    tiles = (*tiles_of(function, SM_80), *tiles_of(function, target), *tiles_of(function + IN_TURNS, target))
    for name in dict.fromkeys(tiles):
        # Skip tiles that read the weights too often, except the one in use.
        if kernels[name].constants["BM"] * MOST_READS < rows and name != launch.name:
            continue
        # A tile that does not split its sums has no parts to choose.
        if "chunk" not in values:
            yield KernelLaunch(name, linear_grid(name, rows, count, 1), **values)
            continue
        # The parts' sums need room in a buffer of the engine. Leave out a number of parts that does not fit.
        parts = values["parts"]
        assert isinstance(parts, Buffer)
        for chunk in _chunks(columns, _whole(launch, "chunk")):
            splits = -(-columns // chunk)
            if splits * rows * count * 4 <= parts.size_bytes:
                yield KernelLaunch(name, linear_grid(name, rows, count, splits), **values | {"chunk": chunk})


def _chunks(columns: int, chosen: int) -> list[int]:
    """Return columns per part: the number in use, and those for every number of parts."""
    return sorted({chosen} | {chunk_of(columns, splits) for splits in range(1, MOST_SPLITS + 1)})


def varied(launch: KernelLaunch, other: KernelLaunch) -> KernelLaunch:
    """A launch with the weights of `launch`, and the tile and splits of `other`."""
    cut = {"chunk": other.values["chunk"]} if "chunk" in other.values else {}
    return KernelLaunch(other.name, other.grid, **launch.values | cut)


def described(launch: KernelLaunch) -> str:
    """Name a linear layer's kernel and its number of parts."""
    parts = -(-_whole(launch, "K") // _whole(launch, "chunk")) if "chunk" in launch.values else 1
    return f"{launch.name}, {parts} part{'s' * (parts > 1)}"


def _count(launch: KernelLaunch) -> int:
    """Return the number of values in a row of the linear layer's result: N, or F for one of a fused pair."""
    return _whole(launch, "N" if "N" in launch.values else "F")


def _whole(launch: KernelLaunch, name: str) -> int:
    value = launch.values[name]
    assert isinstance(value, int)
    return value


async def _give_rows(engine: DecodeEngine, blocks: RowBlocks, batch: int, context: int) -> None:
    # Rows must be valid, because kernels follow their tables and blocks.
    rows = decode_rows(blocks, engine.limits, batch, context)
    await engine.session.mem_write(engine.forward.rows, 0, rows)


def _kinds(engine: DecodeEngine, batch: int) -> dict[str, list[KernelLaunch]]:
    kinds: dict[str, list[KernelLaunch]] = defaultdict(list)
    for launch in engine.forward.launches(batch):
        kinds[_kind(launch)].append(launch)
    return kinds


async def _launch_us(engine: DecodeEngine, launches: Sequence[KernelLaunch]) -> float:
    """Return the mean microseconds of one of these launches, in graphs of all of them."""
    session, repeats = engine.session, -(-KERNEL_LAUNCHES // len(launches))
    # Use a graph, so that the client's launches don't limit short kernels.
    async with session.record() as graph:
        for _ in range(repeats):
            for launch in launches:
                await engine.forward.library.launch(launch)
    # Launch it once before the clock starts, because the first launch of a graph prepares it.
    await graph.launch()
    await session.sync()
    begin_s = time.perf_counter()
    for _ in range(KERNEL_GRAPHS):
        await graph.launch()
    await session.sync()
    return (time.perf_counter() - begin_s) * 1e6 / (KERNEL_GRAPHS * repeats * len(launches))


def _kind(launch: KernelLaunch) -> str:
    """Name a kernel by its computation: linear layers of different shapes are different kinds."""
    shape = [str(launch.values[name]) for name in ("N", "F", "K") if name in launch.values]
    return f"{launch.name} [{' x '.join(shape)}]" if shape else launch.name


def _weight_bytes(launch: KernelLaunch) -> int:
    """Bytes of a linear layer's weights; 0 for other kernels."""
    if not launch.name.startswith("linear"):
        return 0
    return sum(value.size_bytes for value in launch.values.values() if isinstance(value, Plane))
