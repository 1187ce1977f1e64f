"""Steps of random rows that the decode engine is measured with: their rows, and the loop that times them."""

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from gpulease.client.decode.engine.forward_pass import StepLimits
from gpulease.client.decode.row_records import NOBODY, PAGE, ROW, Results, Rows

PREFILL: Final = 512
"""Rows of the step that computes a prompt at once."""

SEED: Final = 1
"""Seed of the random weights: equal for every engine, so that results are the same."""

WARM_STEPS: Final = 5
STEPS: Final = 40
"""Steps of each figure: two are under way at a time, as under a decoder."""


class Stepper(Protocol):
    """An engine, as far as its steps are timed."""

    async def start(self, rows: Rows, pools: Iterable[Any]) -> int:
        """Start a step behind those under way, and do not wait for it."""

    async def finish(self) -> Results:
        """Wait for the oldest step under way. Returns RESULT records."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of keys and values that rows name.

    Attributes:
        address: Where they begin on the card.
        count: Their number.
    """

    address: int
    count: int


class StepTime(NamedTuple):
    """Time of a step.

    Attributes:
        took_s: Seconds, two steps under way.
        results: Digest of the last step's results. Equal rows on equal weights have equal ones.
    """

    took_s: float
    results: str


def numbers_of(text: str) -> tuple[int, ...]:
    """Read numbers with commas between them."""
    return tuple(int(number) for number in text.split(","))


def limits_of(batches: Iterable[int], contexts: Iterable[int]) -> StepLimits:
    """Return the limits that all steps of these batches and contexts, and a prompt's, fit in."""
    most = max(batches)
    return StepLimits(max(most, PREFILL), most, max(contexts) + WARM_STEPS + STEPS)


def block_tables(limits: StepLimits) -> "np.typing.NDArray[np.int32]":
    """Return tables that give each sequence blocks of its own, one after the other."""
    return np.arange(limits.tables * limits.table_blocks, dtype=np.int32)


def decode_rows(blocks: Blocks, limits: StepLimits, batch: int, context: int) -> Rows:
    """Return the rows of a step of `batch` sequences, at the position `context`."""
    rows = _rows(blocks, batch)
    rows["position"], rows["table"] = context, np.arange(batch)
    rows["block"] = rows["table"] * limits.table_blocks + context // PAGE
    return rows


def prompt_rows(blocks: Blocks, limits: StepLimits) -> Rows:
    """Return the rows of a step of one prompt, as far as a sequence has positions."""
    rows = _rows(blocks, min(PREFILL, limits.positions))
    rows["position"] = np.arange(len(rows))
    rows["block"] = rows["position"] // PAGE
    return rows


def _rows(blocks: Blocks, count: int) -> Rows:
    rows = np.zeros(count, ROW)
    rows["token"], rows["source"], rows["top_p"] = np.arange(count) + 5, NOBODY, 1
    rows["base"], rows["blocks"] = blocks.address, blocks.count
    return rows


async def step_time(engine: Stepper, rows: Rows, pools: Iterable[Any]) -> StepTime:
    """Return the time of a step of these rows, two under way."""
    await engine.start(rows, pools)
    for _ in range(WARM_STEPS):
        await engine.start(rows, pools)
        await engine.finish()
    began = time.perf_counter()
    for _ in range(STEPS):
        await engine.start(rows, pools)
        await engine.finish()
    took_s = (time.perf_counter() - began) / STEPS
    results = await engine.finish()
    return StepTime(took_s, hashlib.sha256(results.tobytes()).hexdigest()[:16])
