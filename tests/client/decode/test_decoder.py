"""The decoder: tenants share its steps, and each gets the same tokens as alone, whatever happens to the others."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gpulease.client.decode.checkpoint import RandomCheckpoint, weight_loader
from gpulease.client.decode.decode_errors import CompletionReason, NoModelLoaded, RequestRejected, WaitedTooLong
from gpulease.client.decode.decode_requests import TenantConfig
from gpulease.client.decode.engine import engine, forward_pass
from gpulease.client.decode.engine.engine import BlockPool
from gpulease.client.decode.engine.forward_pass import head_rows_of
from gpulease.client.decode.engine.kernel_library import KernelLaunch, KernelLibrary
from gpulease.client.decode.supervisor import tenant_moves
from gpulease.client.decode.supervisor.decoder import Decoder
from gpulease.client.decode.supervisor.generation import Emitted
from gpulease.client.errors import CapacityExceeded, Denied
from helpers.daemon import Daemon
from helpers.decode.decode_lines import lines_of
from helpers.decode.decoder_rig import (
    PROMPTS,
    SETTINGS,
    TOKENS,
    Outputs,
    no_new_steps,
    opened,
    outputs_around,
    play,
    read,
    submit,
    together,
)
from helpers.decode.random_models import LIGHT
from helpers.waiting import PATIENCE_S


def test_tenants_have_the_tokens_together_that_they_have_alone(daemon: Daemon, alone: Outputs) -> None:
    """The log-probabilities are equal, too, and the tenants share steps."""

    async def scene(decoder: Decoder) -> None:
        assert await together(decoder) == alone
        assert decoder.steps < sum(len(prompt) + TOKENS for prompt in PROMPTS.values()) / 2

    play(daemon, scene)
    for name, output in alone.items():
        positions = [emitted.position for emitted in output]
        assert positions == list(range(len(PROMPTS[name]), len(PROMPTS[name]) + TOKENS))
        assert all(emitted.log_probability < 0 for emitted in output)


def test_tenants_have_the_same_tokens_where_steps_of_prompts_compute_few_logits(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of more than two rows count as large here. One tenant loses its region between them."""
    monkeypatch.setattr(forward_pass, "_split_rows", lambda rows, config: min(rows, 2))
    monkeypatch.setattr(forward_pass, "HEAD_ROWS", (2, 4))
    used: set[int | None] = set()

    def noted(chosen: int, rows: int) -> int | None:
        used.add(head_rows_of(chosen, rows))
        return head_rows_of(chosen, rows)

    monkeypatch.setattr(engine, "head_rows_of", noted)

    async def scene(decoder: Decoder) -> None:
        assert await outputs_around(decoder, lambda: revoke(daemon, decoder, "b")) == alone

    play(daemon, scene)
    assert {2, 4} <= used


# --- Regions that end. ---


async def revoke(daemon: Daemon, decoder: Decoder, name: str) -> None:
    daemon.revoke(decoder.regions.pools[name].region.lease_id)


async def revoke_as_the_lease_s_tenant(_: Daemon, decoder: Decoder, name: str) -> None:
    await decoder.regions.pools[name].region.revoke("because")


async def free(_: Daemon, decoder: Decoder, name: str) -> None:
    await decoder.regions.pools[name].region.free()


async def cancel(_: Daemon, decoder: Decoder, name: str) -> None:
    await decoder.regions.pools[name].region.cancel()


End = Callable[[Daemon, Decoder, str], Awaitable[None]]


@dataclass
class Told:
    """What a tenant received after its region ended.

    Attributes:
        output: Its tokens.
        reason: Why its generation ended.
        replays: How often it was replayed.
    """

    output: list[Emitted]
    reason: CompletionReason | None
    replays: int


async def interrupted(decoder: Decoder, name: str, after: int, end: Callable[[], Awaitable[None]]) -> Told:
    """Read a tenant's output, and end its region behind so many of its tokens, before the rest is computed."""
    generation, output = submit(decoder, name), []
    if not after:
        with no_new_steps(decoder):
            await end()
    async for emitted in generation:
        output.append(emitted)
        if len(output) == after:
            with no_new_steps(decoder):
                await end()
    return Told(output, generation.reason, generation.replays)


async def lose_one(daemon: Daemon, decoder: Decoder, name: str, after: int, end: End) -> tuple[Told, Outputs]:
    """Return the outcome of a tenant that loses its region, and the other tenants' outputs, which were not replayed."""
    others = {other: submit(decoder, other) for other in PROMPTS if other != name}
    reads = asyncio.gather(*map(read, others.values()))
    told = await interrupted(decoder, name, after, lambda: end(daemon, decoder, name))
    outputs = dict(zip(others, await reads, strict=True))
    assert all(generation.replays == 0 for other, generation in others.items() if other[0] != name)
    return told, outputs


def check_recovery(daemon: Daemon, alone: Outputs, end: End, moments: list[tuple[str, int]]) -> None:
    """End regions of a decoder's tenants, each behind so many tokens: all have the tokens that they have alone."""

    async def scene(decoder: Decoder) -> None:
        session, pools = decoder.engine.session, dict(decoder.regions.pools)
        for count, (name, after) in enumerate(moments, 1):
            told, others = await lose_one(daemon, decoder, name, after, end)
            assert told == Told(alone[name], CompletionReason.MAX_TOKENS_REACHED, 1)
            assert others == {other: alone[other] for other in others}
            assert decoder.rebinds == count
        assert decoder.engine.session is session
        lost = {name for name, _ in moments}
        assert {name for name in pools if decoder.regions.pools[name] is not pools[name]} == lost

    play(daemon, scene)


def test_a_tenant_whose_region_ends_goes_on_with_the_same_tokens(daemon: Daemon, alone: Outputs) -> None:
    check_recovery(daemon, alone, revoke, [("a", 7)])


@pytest.mark.exhaustive
@pytest.mark.parametrize("end", [revoke, revoke_as_the_lease_s_tenant, free, cancel])
def test_a_region_may_end_at_any_step(daemon: Daemon, alone: Outputs, end: End) -> None:
    check_recovery(daemon, alone, end, [("a", 0), ("b", 3), ("d", 12)])


@pytest.mark.exhaustive
def test_a_tenant_may_lose_its_region_again_and_again(daemon: Daemon, alone: Outputs) -> None:
    """The region is lost as often as the limiter permits without a pause."""
    check_recovery(daemon, alone, revoke, [("b", 1), ("b", 6), ("b", 12)])


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_an_idle_tenant_has_its_next_region_before_its_next_request(
    over: str, daemon: Daemon, alone: Outputs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gpulease.decode")

    async def scene(decoder: Decoder) -> None:
        pools = dict(decoder.regions.pools)
        await revoke(daemon, decoder, "b")
        while not decoder.rebinds:  # noqa: ASYNC110  # nothing else tells of it
            await asyncio.sleep(0.01)
        generation = submit(decoder, "b")
        assert await read(generation) == alone["b"]
        assert (generation.replays, decoder.rebinds) == (0, 1)
        assert [name for name in pools if decoder.regions.pools[name] is not pools[name]] == ["b"]

    play(daemon if over == "unix" else daemon.tcp_address, scene)
    (lost,), (again,) = lines_of(caplog, "region_lost"), lines_of(caplog, "region_reopened")
    assert (lost["tenant"], lost["sequences"], again["tenant"]) == ("b", 0, "b")


def test_a_region_that_ends_behind_a_last_step_is_noticed_at_the_next_request(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end comes before the next check of idle tenants' regions."""
    monkeypatch.setattr(tenant_moves, "POLL_S", 1000.0)

    async def scene(decoder: Decoder) -> None:
        told, others = await lose_one(daemon, decoder, "b", TOKENS, revoke)
        assert told == Told(alone["b"], CompletionReason.MAX_TOKENS_REACHED, 0)
        assert others == {other: alone[other] for other in others}
        assert decoder.rebinds == 0
        generation = submit(decoder, "b")
        assert await read(generation) == alone["b"]
        assert (generation.replays, decoder.rebinds) == (1, 1)

    play(daemon, scene)


def test_two_tenants_may_lose_their_regions_at_once(daemon: Daemon, alone: Outputs) -> None:
    async def scene(decoder: Decoder) -> None:
        async def lose_both() -> None:
            await asyncio.gather(*(revoke_as_the_lease_s_tenant(daemon, decoder, name) for name in "bc"))

        others = [submit(decoder, name) for name in "acd"]
        told, *outputs = await asyncio.gather(interrupted(decoder, "b", 6, lose_both), *map(read, others))
        assert told == Told(alone["b"], CompletionReason.MAX_TOKENS_REACHED, 1)
        assert outputs == [alone[name] for name in "acd"]
        assert [generation.replays for generation in others] == [0, 1, 0]

    play(daemon, scene)


# --- Requests that end early, or never begin. ---


def test_a_cancelled_generation_ends_and_the_others_do_not_change(daemon: Daemon, alone: Outputs) -> None:
    async def scene(decoder: Decoder) -> None:
        other, generation = submit(decoder, "b"), submit(decoder, "a", 180)
        output = []
        async for emitted in generation:
            output.append(emitted)
            if len(output) == 3:
                generation.cancel()
                generation.cancel()
        assert generation.reason is CompletionReason.CANCELLED
        assert output[:3] == alone["a"][:3]
        asked = generation.request
        namesake = decoder.submit(
            asked.token_ids, max_tokens=3, sampling=asked.sampling, tenant_id="a", request_id=generation.request_id
        )
        generation.cancel()
        assert await read(namesake) == alone["a"][:3]
        # That request had nearly all of its tenant's blocks.
        assert await read(submit(decoder, "a")) == alone["a"]
        assert await read(other) == alone["b"]
        assert (decoder.scheduler.live_sequences, decoder.scheduler.waiting_requests) == (0, 0)

    play(daemon, scene)


def test_what_can_not_be_taken_is_refused_and_nothing_of_it_is_left(daemon: Daemon, alone: Outputs) -> None:
    async def scene(decoder: Decoder) -> None:
        for prompt, tenant in [([], "a"), ([LIGHT.vocabulary], "a"), ([-1], "a"), ([1], "nobody")]:
            with pytest.raises(RequestRejected):
                decoder.submit(prompt, max_tokens=4, tenant_id=tenant)
        for max_tokens in (0, -1):
            with pytest.raises(RequestRejected):
                submit(decoder, "a", max_tokens)
        with pytest.raises(RequestRejected, match="TooLarge"):
            await read(submit(decoder, "a", 12 * 16))
        assert len(decoder._ledger) == 0
        assert await read(submit(decoder, "a")) == alone["a"]

    play(daemon, scene)


def test_a_request_that_may_not_wait_is_refused_while_there_is_no_room(daemon: Daemon, alone: Outputs) -> None:
    async def scene(decoder: Decoder) -> None:
        # 10 of the region's 12 blocks, and one more.
        first = decoder.submit([3] * 150, max_tokens=20, tenant_id="a")
        refused = decoder.submit([1] * 20, max_tokens=100, tenant_id="a", wait_s=0)
        with pytest.raises(RequestRejected, match="PoolExhausted"):
            await read(refused)
        first.cancel()
        assert await read(submit(decoder, "a")) == alone["a"]

    play(daemon, scene)


# --- Ends. ---


def test_leaving_the_block_ends_the_generations_that_run(daemon: Daemon) -> None:
    async def part() -> None:
        async with opened(daemon) as decoder:
            generations = [submit(decoder, name, 100) for name in PROMPTS]
            async for _ in generations[0]:
                break
        for generation in generations:
            with pytest.raises(NoModelLoaded):
                await read(generation)
        with pytest.raises(NoModelLoaded):
            submit(decoder, "a")

    asyncio.run(part())


def test_leaving_the_block_while_a_region_is_opened_anew_leaves_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(decoder: Decoder) -> None:
        is_opening = asyncio.Event()

        async def open_pool(*_: object, **__: object) -> None:
            is_opening.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(decoder.engine, "open_pool", open_pool)
        async for _ in submit(decoder, "b"):
            await revoke(daemon, decoder, "b")
            break
        await is_opening.wait()

    play(daemon, scene)


def test_closing_regions_ends_every_renewal_though_it_is_cancelled(daemon: Daemon) -> None:
    async def scene(decoder: Decoder) -> None:
        renewals = [renewal._task for renewal in decoder.regions._renewals.values()]
        closing = asyncio.create_task(decoder.regions.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait((closing,))
        _, going_on = await asyncio.wait(renewals, timeout=PATIENCE_S)
        assert (closing.cancelled(), going_on) == (True, set())

    play(daemon, scene)


def test_a_tenant_waits_for_its_region_while_the_lease_has_no_room(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, alone: Outputs
) -> None:
    async def scene(decoder: Decoder) -> None:
        refusals = [CapacityExceeded("no room")] * 2
        opened = decoder.engine.open_pool

        async def open_pool(blocks: int, **how: Any) -> BlockPool:
            if refusals:
                raise refusals.pop()
            return await opened(blocks, **how)

        monkeypatch.setattr(decoder.engine, "open_pool", open_pool)
        told, _ = await lose_one(daemon, decoder, "b", 2, revoke)
        assert told == Told(alone["b"], CompletionReason.MAX_TOKENS_REACHED, 1)
        assert not refusals

    play(daemon, scene)


def test_a_request_that_waited_too_long_raises(daemon: Daemon) -> None:
    async def scene(decoder: Decoder) -> None:
        await decoder.suspend("a")
        late = decoder.submit([1, 2], max_tokens=4, tenant_id="a", wait_s=0.01)
        with pytest.raises(WaitedTooLong, match="it is suspended; the maximum waiting time has passed"):
            await read(late)
        assert late.reason is CompletionReason.DEADLINE_EXCEEDED

    play(daemon, scene)


def test_a_decoder_that_no_card_has_room_for_leaves_nothing(daemon: Daemon) -> None:
    async def part() -> None:
        large = [TenantConfig("a", 1, 1 << 20)]
        with pytest.raises(CapacityExceeded):
            async with Decoder.open(RandomCheckpoint(LIGHT, 1), large, SETTINGS, address=daemon.address):
                raise AssertionError("it was opened")
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(part())


def test_an_engine_of_the_latency_class_needs_the_operator_s_permission(daemon: Daemon) -> None:
    async def scene() -> None:
        settings = replace(SETTINGS, latency=True)
        with pytest.raises(Denied, match="may_latency"):
            async with Decoder.open(RandomCheckpoint(LIGHT, 1), (), settings, address=daemon.address):
                pass

    asyncio.run(scene())


def test_a_load_takes_short_turns_of_the_loop_and_lays_its_tensors_out_in_threads(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other models' steps are planned between these turns."""
    turn, launches_by_turn, layout_threads = 0, Counter[int](), set[int]()

    class Image(weight_loader._CardImage):
        def __init__(self, *arguments: Any) -> None:
            layout_threads.add(threading.get_ident())
            super().__init__(*arguments)

    class Library(KernelLibrary):
        async def launch(self, launch: KernelLaunch) -> None:
            launches_by_turn[turn] += 1
            await super().launch(launch)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def scene() -> None:
        counting = asyncio.create_task(count_turns())
        async with Decoder.open(RandomCheckpoint(LIGHT, 1), (), SETTINGS, address=daemon.address):
            counting.cancel()

    monkeypatch.setattr(weight_loader, "_CardImage", Image)
    monkeypatch.setattr(forward_pass, "KernelLibrary", Library)
    asyncio.run(scene())
    assert launches_by_turn.total() > 100
    assert max(launches_by_turn.values()) <= forward_pass.LAUNCHES_PER_TURN
    assert layout_threads
    assert threading.get_ident() not in layout_threads
