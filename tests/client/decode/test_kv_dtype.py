"""Keys and values in FP8: a decoder's tokens are the same in any company, after moves and after replays."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import pytest

from gpulease.client.decode.checkpoint import RandomCheckpoint, open_model
from gpulease.client.decode.checkpoint.stored_kv import with_kv_dtype
from gpulease.client.decode.decode_errors import RequestRejected
from gpulease.client.decode.decode_requests import SharedPrefix, TenantConfig
from gpulease.client.decode.engine.engine import lease_bytes
from gpulease.client.decode.engine.forward_pass import StepLimits, block_bytes
from gpulease.client.decode.model_config import KvDtype
from gpulease.client.decode.sample_models import TINY_MODEL
from gpulease.client.decode.supervisor.decoder import Decoder, engine_bytes
from helpers.daemon import Daemon
from helpers.decode.decoder_rig import PROMPTS, SETTINGS, TENANTS, Outputs, one_by_one, outputs_around, together
from helpers.decode.engine_rig import running
from helpers.decode.random_models import LIGHT, TINY

FP8_SETTINGS = replace(SETTINGS, kv_dtype=KvDtype.FP8)


def test_tokens_are_the_same_in_company_with_prefixes_after_moves_and_after_a_replay(
    shared_daemon: Daemon, alone: Outputs
) -> None:
    async def part() -> list[Outputs]:
        opened = Decoder.open(
            RandomCheckpoint(LIGHT, 1), TENANTS, FP8_SETTINGS, address=shared_daemon.address, prefixes=shared()
        )
        async with opened as decoder:
            # The second time, all full blocks of the prompts are in the regions already.
            found = [await one_by_one(decoder), await one_by_one(decoder), await together(decoder)]

            async def out_and_back() -> None:
                await decoder.suspend("a")
                await decoder.resume("a")

            found.append(await outputs_around(decoder, out_and_back))
            found.append(await outputs_around(decoder, lambda: decoder.move_tenant("a")))
            found.append(await outputs_around(decoder, lambda: decoder.move(shared_daemon.address)))
            return found

    first, *others = asyncio.run(part())
    assert all(outputs == first for outputs in others)
    # The stored keys and values are others than in bf16.
    assert first != alone


def shared() -> Iterable[SharedPrefix]:
    yield SharedPrefix("d", tuple(PROMPTS["d"])[:16])


def test_blocks_of_the_other_type_are_refused(shared_daemon: Daemon) -> None:
    """Blocks are kept only within one engine. Their sizes would differ, too."""
    limits = StepLimits(16, 6, 160)
    with running(shared_daemon.address, RandomCheckpoint(replace(TINY, kv_dtype=KvDtype.FP8), 1), limits) as rig:
        kept = rig.run(lambda inner: inner.engine.save_pool(inner.pools[0], [0]))
    assert kept.shape == (1, block_bytes(replace(TINY, kv_dtype=KvDtype.FP8)))
    refused = pytest.raises(RequestRejected, match="Blocks must be uint8")
    with running(shared_daemon.address, RandomCheckpoint(TINY, 1), limits) as rig, refused:
        rig.run(lambda inner: inner.engine.load_pool(inner.pools[0], [0], kept))


def test_regions_of_fp8_need_about_half_of_the_memory() -> None:
    config = replace(TINY, layers=32, key_heads=4, head_width=128)
    fp8 = replace(config, kv_dtype=KvDtype.FP8)
    assert block_bytes(fp8) * 2 == block_bytes(config) * 129 // 128
    limits = StepLimits(16, 4, 160)
    sizes = [lease_bytes(RandomCheckpoint(shape, 1), limits, [4096]) for shape in (config, fp8)]
    assert sizes[0] - sizes[1] == 4096 * (block_bytes(config) - block_bytes(fp8))


def test_the_setting_decides_the_type() -> None:
    checkpoint = RandomCheckpoint(replace(TINY, kv_dtype=KvDtype.FP8), 1)
    tenants = [TenantConfig("a", 1, 4096)]
    assert engine_bytes(checkpoint, tenants, FP8_SETTINGS) < engine_bytes(checkpoint, tenants, SETTINGS)


def test_a_checkpoint_differs_only_in_its_config() -> None:
    plain = open_model(TINY_MODEL)
    assert with_kv_dtype(plain, KvDtype.BF16) is plain
    stored = with_kv_dtype(plain, KvDtype.FP8)
    assert stored.config == replace(plain.config, kv_dtype=KvDtype.FP8)
    assert (stored.name, stored.pooling, stored.sha256()) == (plain.name, plain.pooling, plain.sha256())
    assert stored.tensor("model.norm.weight") == plain.tensor("model.norm.weight")
    assert stored.tokenizer().encode("with") == plain.tokenizer().encode("with")
    stored.close()
