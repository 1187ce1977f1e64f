"""A decoder that generates while its engine's session moves from one card of its daemon to another."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import pairwise

from gpulease.client.aio import GpuLease
from gpulease.client.decode.checkpoint import RandomCheckpoint
from gpulease.client.decode.decode_requests import TenantConfig
from gpulease.client.decode.supervisor.decoder import Decoder
from helpers.daemon import Daemon
from helpers.decode.decoder_rig import PROMPTS, SETTINGS, Outputs, Recorder, one_by_one, read, submit
from helpers.decode.random_models import LIGHT

MOVES = 3


@dataclass(frozen=True)
class EngineMoves:
    """The tenants' outputs, and their delays.

    Attributes:
        outputs: The outputs of all tenants.
        rebinds: Number of sequences that were replayed, plus the number of engines that were opened again.
        took_s: Duration of each move in seconds.
        longest_s: The longest time between two tokens of the first request, in seconds.
        median_s: The median of these times, in seconds.
    """

    outputs: Outputs
    rebinds: int
    took_s: list[float]
    longest_s: float
    median_s: float


async def outputs_alone(node: Daemon, tokens: int) -> Outputs:
    """Return each tenant's output of `tokens` tokens, generated without a move, one tenant after another."""
    async with _opened(node, Recorder()) as decoder:
        return await one_by_one(decoder, tokens)


def _opened(node: Daemon, reports: Recorder) -> AbstractAsyncContextManager[Decoder]:
    tenants = [TenantConfig(name, 2, 40) for name in "abcd"]
    model = RandomCheckpoint(LIGHT, 1)
    return Decoder.open(model, tenants, SETTINGS, address=node.address, observers=(reports,), is_parkable=True)


async def outputs_around_moves(node: Daemon, card_uuids: Sequence[str], tokens: int) -> EngineMoves:
    """Move the engine's session from card to card while each tenant generates `tokens` tokens."""
    reports = Recorder()
    async with _opened(node, reports) as decoder:
        generations = {name: submit(decoder, name, tokens) for name in PROMPTS}
        first, *others = generations.values()
        reads = asyncio.gather(*map(read, others))
        moving: asyncio.Task[list[float]] | None = None
        output, times = [], []
        async for emitted in first:
            output.append(emitted)
            times.append(time.monotonic())
            if len(output) == 4:
                moving = asyncio.create_task(_move(decoder.engine.lease, card_uuids))
        outputs = dict(zip(PROMPTS, [output, *await reads], strict=True))
        assert moving is not None
        took_s = await moving
    gaps = [after - before for before, after in pairwise(times)]
    rebinds = len(reports.rebinds) + len(reports.rebuilt)
    return EngineMoves(outputs, rebinds, took_s, max(gaps), statistics.median(gaps))


async def _move(lease: GpuLease, card_uuids: Sequence[str]) -> list[float]:
    took_s = []
    for _ in range(MOVES):
        target = next(uuid for uuid in card_uuids if uuid != lease.card_uuid)
        began = time.monotonic()
        assert await lease.move(target)
        assert lease.card_uuid == target
        took_s.append(time.monotonic() - began)
    return took_s
