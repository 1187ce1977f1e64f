"""A tenant's sequences move to another region or to the host: all tenants get the same tokens as alone."""

import asyncio
from dataclasses import replace

import pytest

from gpulease.client.decode.checkpoint import RandomCheckpoint
from gpulease.client.decode.decode_errors import EngineDecodeFailed, RequestRejected
from gpulease.client.decode.decode_requests import TenantConfig
from gpulease.client.decode.engine.engine import BlockPool
from gpulease.client.decode.supervisor.decoder import Decoder, DecoderSettings
from gpulease.client.decode.supervisor.generation import Emitted, Generation
from gpulease.client.decode.supervisor.tenant_regions import TenantRegions
from gpulease.client.errors import CapacityExceeded, RegionFreed, RegionRevoked
from helpers.daemon import Daemon
from helpers.decode.decoder_rig import PROMPTS, SETTINGS, TENANTS, Outputs, play, read, submit
from helpers.decode.random_models import LIGHT


async def begin(decoder: Decoder, tokens: int = 3) -> tuple[dict[str, Generation], Outputs]:
    """Submit every prompt, and take the first tokens of each."""
    generations = {name: submit(decoder, name) for name in PROMPTS}
    outputs = {name: [await anext(generation) for _ in range(tokens)] for name, generation in generations.items()}
    return generations, outputs


async def rest(generations: dict[str, Generation], outputs: Outputs) -> Outputs:
    """Take what comes behind those."""
    found = await asyncio.gather(*map(read, generations.values()))
    return {name: outputs[name] + tokens for name, tokens in zip(generations, found, strict=True)}


def replays(generations: dict[str, Generation]) -> dict[str, int]:
    return {name: generation.replays for name, generation in generations.items() if generation.replays}


def test_a_suspended_tenant_goes_on_with_the_same_tokens_and_the_others_meanwhile(
    daemon: Daemon, alone: Outputs
) -> None:
    async def scene(decoder: Decoder) -> None:
        generations, outputs = await begin(decoder)
        region = decoder.regions.pools["a"].region.lease_id
        await decoder.suspend("a")
        assert daemon.query(region)["state"] not in {"pending", "active", "draining"}
        assert decoder.moves.suspended["a"] > 0
        others = {name: generation for name, generation in generations.items() if name[0] != "a"}
        assert await rest(others, outputs) == {name: alone[name] for name in others}
        late = submit(decoder, "a")
        assert not generations["a"].reason
        await decoder.resume("a")
        assert decoder.moves.suspended == {}
        of_a = {name: generations[name] for name in generations if name[0] == "a"}
        assert await rest(of_a, outputs) == {name: alone[name] for name in of_a}
        assert await read(late) == alone["a"]
        assert replays(generations) == {}

    play(daemon, scene)


def refused_once(monkeypatch: pytest.MonkeyPatch, regions: TenantRegions) -> None:
    """Let the lease have no room for the next region."""
    open_replacement, refusals = regions.open_replacement, iter([CapacityExceeded("no room for both")])

    async def open_or_refuse(tenant: TenantConfig) -> BlockPool:
        for refusal in refusals:
            raise refusal
        return await open_replacement(tenant)

    monkeypatch.setattr(regions, "open_replacement", open_or_refuse)


@pytest.mark.parametrize("has_room", [True, False], ids=["to another file and rename", "in its place"])
def test_a_tenant_that_moves_has_another_region_and_the_same_tokens(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    async def scene(decoder: Decoder) -> None:
        generations, outputs = await begin(decoder)
        before = decoder.regions.pools["a"].region.lease_id
        if not has_room:
            refused_once(monkeypatch, decoder.regions)
        await decoder.move_tenant("a")
        assert decoder.regions.pools["a"].region.lease_id != before
        assert await rest(generations, outputs) == alone
        assert (replays(generations), decoder.moves.count) == ({}, 1)

    play(daemon, scene)


def test_regions_of_a_limited_life_are_left_before_their_ends(daemon: Daemon, alone: Outputs) -> None:
    """They count as about to end all the time here, so that it does not depend on the host's speed."""

    async def part() -> None:
        settings = replace(SETTINGS, region_life_s=60)
        async with Decoder.open(RandomCheckpoint(LIGHT, 1), TENANTS, settings, address=daemon.address) as decoder:
            assert not decoder.regions._renewals
            decoder.regions.move_margin_s = 60.0
            generations, outputs = await begin(decoder)
            while decoder.moves.count < 2 * len(TENANTS):  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.01)
            assert await rest(generations, outputs) == alone
            assert replays(generations) == {}
            decoder.regions.move_margin_s = 0.0

    asyncio.run(part())


async def refuse_to_load(*_: object) -> None:
    raise EngineDecodeFailed("the copy failed")


@pytest.mark.parametrize("is_suspended", [True, False], ids=["resume", "move"])
def test_sequences_whose_blocks_did_not_arrive_are_replayed(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch, is_suspended: bool
) -> None:
    async def scene(decoder: Decoder) -> None:
        generations, outputs = await begin(decoder)
        if is_suspended:
            await decoder.suspend("a")
        else:
            refused_once(monkeypatch, decoder.regions)
        going_on = decoder.resume if is_suspended else decoder.move_tenant
        monkeypatch.setattr(decoder.engine, "load_pool", refuse_to_load)
        with pytest.raises(EngineDecodeFailed):
            await going_on("a")
        assert await rest(generations, outputs) == alone
        assert set(replays(generations)) <= {"a", "a too"}

    play(daemon, scene)


def test_a_region_that_was_revoked_can_t_be_moved_and_is_replayed(daemon: Daemon, alone: Outputs) -> None:
    async def scene(decoder: Decoder) -> None:
        generations, outputs = await begin(decoder)
        daemon.revoke(decoder.regions.pools["a"].region.lease_id)
        with pytest.raises((RegionRevoked, RegionFreed, RequestRejected)):
            await decoder.move_tenant("a")
        assert await rest(generations, outputs) == alone
        assert set(replays(generations)) <= {"a", "a too"}
        assert decoder.moves.count == 0

    play(daemon, scene)


def test_a_tenant_suspended_as_the_engine_was_lost_is_replayed_behind_its_resume(
    daemon: Daemon, alone: Outputs
) -> None:
    async def scene(decoder: Decoder) -> None:
        generations, outputs = await begin(decoder)
        await decoder.suspend("a")
        daemon.revoke(decoder.engine.lease.lease_id)
        others = {name: generation for name, generation in generations.items() if name[0] != "a"}
        assert await rest(others, outputs) == {name: alone[name] for name in others}
        await decoder.resume("a")
        of_a = {name: generations[name] for name in generations if name[0] == "a"}
        assert await rest(of_a, outputs) == {name: alone[name] for name in of_a}

    play(daemon, scene)


def test_what_can_t_be_suspended_or_resumed_is_told(daemon: Daemon) -> None:
    async def scene(decoder: Decoder) -> None:
        with pytest.raises(RequestRejected, match="no tenant"):
            await decoder.suspend("nobody")
        with pytest.raises(RequestRejected, match="not suspended"):
            await decoder.resume("a")
        await decoder.suspend("a")
        with pytest.raises(RequestRejected, match="is suspended"):
            await decoder.suspend("a")
        with pytest.raises(RequestRejected, match="is suspended"):
            await decoder.move_tenant("a")
        await decoder.resume("a")

    play(daemon, scene)


def test_a_lease_without_room_leaves_a_tenant_suspended(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(decoder: Decoder) -> None:
        generations, outputs = await begin(decoder)
        await decoder.suspend("a")
        refused_once(monkeypatch, decoder.regions)
        with pytest.raises(CapacityExceeded):
            await decoder.resume("a")
        await decoder.resume("a")
        assert await rest(generations, outputs) == alone
        assert replays(generations) == {}

    play(daemon, scene)


def test_what_a_heavier_tenant_preempts_has_the_same_tokens(daemon: Daemon, alone: Outputs) -> None:
    async def part() -> list[list[Emitted]]:
        tenants = [TenantConfig("a", 2, 12, weight=1), TenantConfig("b", 2, 12, weight=2)]
        settings = replace(SETTINGS, max_sequences=1, preempts=True)
        async with Decoder.open(RandomCheckpoint(LIGHT, 1), tenants, settings, address=daemon.address) as decoder:
            light = submit(decoder, "a")
            first = await anext(light)
            heavy = submit(decoder, "b")
            outputs = await asyncio.gather(read(heavy), read(light))
            assert (heavy.replays, light.replays) == (0, 1)
            return [outputs[0], [first, *outputs[1]]]

    assert asyncio.run(part()) == [alone["b"], alone["a"]]


@pytest.mark.parametrize("life_s", [0.0, -1.0, 0.01, float("nan")])
def test_a_region_s_life_that_is_too_short_is_refused(life_s: float) -> None:
    with pytest.raises(ValueError, match="region_life_s"):
        DecoderSettings(region_life_s=life_s)
