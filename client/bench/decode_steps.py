"""Steps of random rows, with which the decode engine is measured: makes the rows, and times the steps."""

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from gpulease.client.decode.engine.forward_pass import StepLimits
from gpulease.client.decode.row_records import NO_ROW, PAGE, ROW, Results, Rows

PREFILL: Final = 512
"""Number of rows in the step that computes a prompt at once."""

SEED: Final = 1
"""Seed of the random weights: the same for every engine, so that results are equal."""

WARM_STEPS: Final = 5
STEPS: Final = 40
"""Number of steps for each figure; two are in progress at a time, as in a decoder."""


class Stepper(Protocol):
    """The part of an engine that is needed to time its steps."""

    async def start(self, rows: Rows, pools: Iterable[Any]) -> int:
        """Start a step after those in progress, and do not wait for it."""

    async def finish(self) -> Results:
        """Wait for the oldest step in progress. Returns RESULT records."""


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Blocks of keys and values that rows name.

    Attributes:
        address: Address of the first block on the card.
        count: Number of blocks.
    """

    address: int
    count: int


class StepTime(NamedTuple):
    """Time of a step.

    Attributes:
        took_s: Seconds per step, with two in progress.
        results: Digest of the last step's results. Equal rows with equal weights have equal digests.
    """

    took_s: float
    results: str


def numbers_of(text: str) -> tuple[int, ...]:
    """Parse numbers separated by commas. Raises ValueError."""
    return tuple(int(number) for number in text.split(","))


def limits_of(batches: Iterable[int], contexts: Iterable[int]) -> StepLimits:
    """Return limits that suffice for all steps of these batches and contexts, and for a prompt's step."""
    # Allow a position for every step, since each one adds a token.
    max_batch = max(batches)
    return StepLimits(max(max_batch, PREFILL), max_batch, max(contexts) + WARM_STEPS + STEPS)


def block_tables(limits: StepLimits) -> "np.typing.NDArray[np.int32]":
    """Return tables that give each sequence its own consecutive blocks."""
    return np.arange(limits.tables * limits.table_blocks, dtype=np.int32)


def decode_rows(blocks: RowBlocks, limits: StepLimits, batch: int, context: int) -> Rows:
    """Return the rows of a step of `batch` sequences at the position `context`."""
    # Each row belongs to another sequence, and all are at the same position.
    rows = _rows(blocks, batch)
    rows["position"], rows["table"] = context, np.arange(batch)
    rows["block"] = rows["table"] * limits.table_blocks + context // PAGE
    return rows


def prompt_rows(blocks: RowBlocks, limits: StepLimits) -> Rows:
    """Return the rows of a step that computes one prompt: PREFILL rows, or as many as a sequence has positions."""
    rows = _rows(blocks, min(PREFILL, limits.positions))
    rows["position"] = np.arange(len(rows))
    rows["block"] = rows["position"] // PAGE
    return rows


def _rows(blocks: RowBlocks, count: int) -> Rows:
    # Only these fields affect what a row computes, because it samples nothing.
    rows = np.zeros(count, ROW)
    rows["token"], rows["source"], rows["top_p"] = np.arange(count) + 5, NO_ROW, 1
    rows["base"], rows["blocks"] = blocks.address, blocks.count
    return rows


async def step_time(engine: Stepper, rows: Rows, pools: Iterable[Any]) -> StepTime:
    """Return the time of a step of these rows, with two in progress."""
    # Keep two steps in progress from here on, so that each finish() overlaps with the next step.
    await engine.start(rows, pools)
    for _ in range(WARM_STEPS):
        await engine.start(rows, pools)
        await engine.finish()
    # WARM_STEPS have filled every queue; the clock starts with two steps in progress and stops with two.
    begin_s = time.perf_counter()
    for _ in range(STEPS):
        await engine.start(rows, pools)
        await engine.finish()
    took_s = (time.perf_counter() - begin_s) / STEPS
    results = await engine.finish()
    return StepTime(took_s, hashlib.sha256(results.tobytes()).hexdigest()[:16])
