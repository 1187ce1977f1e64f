"""Prompts that begin with computed blocks: a card's tokens equal those of the embedded driver without reuse, bit for
bit.
"""

import asyncio
from dataclasses import replace

import pytest

from gpulease.client.decode import (
    TINY_MODEL,
    Decoder,
    DecoderSettings,
    Emitted,
    SamplingParameters,
    SharedPrefix,
    TenantConfig,
    open_model,
)
from helpers.daemon import Daemon

pytestmark = pytest.mark.gpu

SETTINGS = DecoderSettings(max_rows=64, prefill_rows=48, max_sequences=8, positions=128)
TENANTS = [TenantConfig("a", 8, 24), TenantConfig("b", 8, 24)]
TEXT = [3 + 7 * number % 400 for number in range(80)]


async def outputs(address: str, settings: DecoderSettings) -> tuple[list[list[Emitted]], int]:
    """Return the outputs of prompts that share prefixes of several lengths, some at the same time, and the number of
    reused tokens.
    """
    async with Decoder.open(open_model(TINY_MODEL), TENANTS, settings, address=address) as decoder:

        async def read(length: int, own: int) -> list[Emitted]:
            sampling = SamplingParameters(temperature=0.8, seed=own)
            prompt = [*TEXT[:length], *range(10 + own, 20 + own)]
            return [one async for one in decoder.submit(prompt, max_tokens=20, tenant_id="a", sampling=sampling)]

        found = [await read(80, 1), await read(80, 2), await read(37, 3)]
        # Without sharing, these would need more blocks than the region has.
        found += await asyncio.gather(*(read(80, own) for own in range(4, 12)))
        return found, decoder.scheduler.tenants["a"].reused_tokens


def test_reused_prefixes_give_the_embedded_driver_s_tokens(daemon: Daemon, shared_daemon: Daemon) -> None:
    card, reused = asyncio.run(outputs(daemon.address, SETTINGS))
    plain, none = asyncio.run(outputs(shared_daemon.address, replace(SETTINGS, reuses_prefixes=False)))
    assert card == plain
    assert reused > 9 * 64
    assert none == 0


async def shared_outputs(address: str, settings: DecoderSettings, *prefixes: SharedPrefix) -> list[list[Emitted]]:
    """Return the outputs of two tenants' prompts, before and while the region of their shared prefix is revoked."""
    async with Decoder.open(open_model(TINY_MODEL), TENANTS, settings, address=address, prefixes=prefixes) as decoder:

        async def read(tenant: str, length: int, own: int, *, revokes: bool = False) -> list[Emitted]:
            sampling = SamplingParameters(temperature=0.8, seed=own)
            prompt = [*TEXT[:length], *range(10 + own, 20 + own)]
            generation, found = decoder.submit(prompt, max_tokens=20, tenant_id=tenant, sampling=sampling), []
            async for one in generation:
                found.append(one)
                if revokes and len(found) == 3:
                    for _, pool in list(decoder.regions.prefixes.values()):
                        await pool.region.revoke("because")
            # Both tenants use the shared blocks, although neither has computed a sequence before.
            assert not prefixes or generation.reused_tokens >= length // 16 * 16
            return found

        every = [(tenant, length, own) for own, (tenant, length) in enumerate(("a", n) for n in (80, 70, 33))]
        every += [("b", 80, 1), ("b", 47, 2)]
        found = await asyncio.gather(*(read(*one) for one in every))
        users = [read("a", 80, 5, revokes=True), read("a", 80, 6), read("b", 80, 7), read("b", 0, 8)]
        return found + await asyncio.gather(*users)


def test_a_prefix_that_tenants_share_gives_the_embedded_driver_s_tokens(daemon: Daemon, shared_daemon: Daemon) -> None:
    """Compare before the prefix's region ends, while it ends, and without it."""
    # With few rows, the embedded driver compiles the kernels faster.
    prefix, settings = SharedPrefix("text", tuple(TEXT)), replace(SETTINGS, max_rows=16, prefill_rows=12)
    plain = asyncio.run(shared_outputs(shared_daemon.address, replace(settings, reuses_prefixes=False)))
    assert asyncio.run(shared_outputs(daemon.address, settings, prefix)) == plain
