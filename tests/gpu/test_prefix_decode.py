"""Prompts that begin with computed blocks: a card has the tokens of the embedded driver without reuse, to the bit."""

import asyncio
from dataclasses import replace

import pytest

from gpulease.client.decode import (
    TINY_MODEL,
    Decoder,
    DecoderSettings,
    Emitted,
    SamplingParameters,
    TenantConfig,
    open_model,
)
from helpers.daemon import Daemon

pytestmark = pytest.mark.gpu

SETTINGS = DecoderSettings(max_rows=64, prefill_rows=48, max_sequences=8, positions=128)
TENANTS = [TenantConfig("a", 8, 24)]
TEXT = [3 + 7 * number % 400 for number in range(80)]


async def outputs(address: str, settings: DecoderSettings) -> tuple[list[list[Emitted]], int]:
    """The outputs of prompts that share prefixes of several lengths, some at once, and the tokens that were reused."""
    async with Decoder.open(open_model(TINY_MODEL), TENANTS, settings, address=address) as decoder:

        async def read(length: int, own: int) -> list[Emitted]:
            sampling = SamplingParameters(temperature=0.8, seed=own)
            prompt = [*TEXT[:length], *range(10 + own, 20 + own)]
            return [one async for one in decoder.submit(prompt, max_tokens=20, tenant_id="a", sampling=sampling)]

        found = [await read(80, 1), await read(80, 2), await read(37, 3)]
        # More than the region has room for without sharing.
        found += await asyncio.gather(*(read(80, own) for own in range(4, 12)))
        return found, decoder.scheduler.tenants["a"].reused_tokens


def test_reused_prefixes_give_the_embedded_driver_s_tokens(daemon: Daemon, shared_daemon: Daemon) -> None:
    card, reused = asyncio.run(outputs(daemon.address, SETTINGS))
    plain, none = asyncio.run(outputs(shared_daemon.address, replace(SETTINGS, reuses_prefixes=False)))
    assert card == plain
    assert reused > 9 * 64
    assert none == 0
