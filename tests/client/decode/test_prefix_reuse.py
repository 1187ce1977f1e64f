"""Prompts that begin with computed blocks have the same tokens and probabilities, bit for bit, as without them."""

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.client import RegionRevoked
from gpulease.client.decode.checkpoint import RandomCheckpoint
from gpulease.client.decode.decode_errors import CompletionReason, RequestRejected
from gpulease.client.decode.decode_reports import DecoderObserver
from gpulease.client.decode.decode_requests import PromptRequest, SamplingParameters, SharedPrefix, TenantConfig
from gpulease.client.decode.openai.decode_metrics import DecodeMetrics
from gpulease.client.decode.supervisor.decoder import Decoder, DecoderSettings
from gpulease.client.decode.supervisor.generation import Emitted, Generation
from helpers.daemon import Daemon
from helpers.decode.decode_lines import lines_of
from helpers.decode.decoder_rig import Recorder, read
from helpers.decode.engine_rig import GREEDY, EngineRig, RunningRig
from helpers.decode.random_models import LIGHT, WINDOWED

SETTINGS = DecoderSettings(max_rows=24, prefill_rows=16, max_sequences=6, rebinds_at_once=1000)
HOT = SamplingParameters(temperature=0.9, seed=5)
TENANTS = [TenantConfig("a", 6, 24), TenantConfig("b", 6, 24)]


def opened(
    daemon: Daemon,
    options: DecoderSettings = SETTINGS,
    tenants: Sequence[TenantConfig] = TENANTS,
    *observers: DecoderObserver,
    prefixes: Sequence[SharedPrefix] = (),
) -> AbstractAsyncContextManager[Decoder]:
    model = RandomCheckpoint(LIGHT, 1)
    return Decoder.open(model, tenants, options, address=daemon.address, observers=observers, prefixes=prefixes)


def submit(decoder: Decoder, prompt: Sequence[int], most: int = 6, tenant: str = "a") -> Generation:
    """Submit a prompt. Some prompts' tokens are drawn; to draw them takes longer than any other kernel of a step."""
    sampling = HOT if prompt[0] % 3 == 0 else GREEDY
    return decoder.submit(prompt, max_tokens=most, tenant_id=tenant, sampling=sampling)


def tokens_of(seed: int, count: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, LIGHT.vocabulary) for _ in range(count)]


async def outputs(decoder: Decoder, prompts: Sequence[tuple[str, list[int]]], *, at_once: bool) -> list[list[Emitted]]:
    if at_once:
        return await asyncio.gather(*(read(submit(decoder, tokens, tenant=tenant)) for tenant, tokens in prompts))
    return [await read(submit(decoder, tokens, tenant=tenant)) for tenant, tokens in prompts]


def reused_by(decoder: Decoder) -> dict[str, int]:
    return {name: tenant.reused_tokens for name, tenant in decoder.scheduler.tenants.items()}


PROMPTS = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.integers(0, 1),  # which of two texts it begins with
        st.integers(0, 50),  # how much of that
        st.integers(1, 20),  # how many tokens of its own
        st.integers(0, 2),  # which ones
    ),
    min_size=2,
    max_size=6,
)


@pytest.mark.exhaustive
def test_random_prompts_have_the_tokens_that_they_have_without_reuse(daemon: Daemon) -> None:
    """In any order and company, with chunks cut elsewhere, after the end of a region, and after a move."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        reusing = runner.run(stack.enter_async_context(opened(daemon)))
        plain = runner.run(stack.enter_async_context(opened(daemon, replace(SETTINGS, reuses_prefixes=False))))

        @settings(max_examples=12, deadline=None)
        @given(drawn=PROMPTS, at_once=st.booleans(), event=st.sampled_from(["", "", "revoke", "move"]))
        def check(drawn: list[tuple[str, int, int, int, int]], at_once: bool, event: str) -> None:
            prompts = [
                (tenant, tokens_of(text, 60)[:shared] + tokens_of(10 + own, count))
                for tenant, text, shared, count, own in drawn
            ]

            async def part() -> None:
                # After a few revocations in a row, the limiter lets the tenant wait for its next region.
                if event == "revoke" and "a" in reusing.regions.pools:
                    # If no prompt was this tenant's since an earlier revocation, its pool may still have that region.
                    with suppress(RegionRevoked):
                        await reusing.regions.pools["a"].region.revoke("because")
                elif event == "move" and "a" in reusing.regions.pools:
                    await reusing.move_tenant("a")
                expected = await outputs(plain, prompts, at_once=at_once)
                assert await outputs(reusing, prompts, at_once=at_once) == expected

            runner.run(part())

        try:
            check()
        finally:
            runner.run(stack.aclose())
        assert sum(reused_by(reusing).values()) > 100
        assert sum(reused_by(plain).values()) == 0


def play(daemon: Daemon, scene: Callable[[Decoder], Coroutine[Any, Any, None]], *arguments: Any) -> None:
    async def part() -> None:
        async with opened(daemon, *arguments) as decoder:
            await scene(decoder)

    asyncio.run(part())


def test_a_prompt_begins_behind_what_its_tenant_s_sequences_computed(daemon: Daemon) -> None:
    """Behind an answer, too, as the next turn of a chat does; never with another tenant's blocks."""
    prompt = tokens_of(1, 40)

    async def scene(decoder: Decoder) -> None:
        first = submit(decoder, prompt, most=12)
        answer = [emitted.token for emitted in await read(first)]
        assert first.reused_tokens == 0
        again = submit(decoder, prompt)
        await read(again)
        assert again.reused_tokens == 32
        # 40 tokens and 11 answered ones have keys and values: three full blocks.
        turn = submit(decoder, [*prompt, *answer, *tokens_of(2, 9)])
        await read(turn)
        assert turn.reused_tokens == 48
        # The last token's row is computed in any case.
        whole = submit(decoder, prompt[:32])
        await read(whole)
        assert whole.reused_tokens == 16
        other = submit(decoder, prompt, tenant="b")
        await read(other)
        assert other.reused_tokens == 0
        scored = decoder.submit(prompt, max_tokens=2, tenant_id="a", ranks=1, scores_prompt=True)
        await read(scored)
        assert (scored.reused_tokens, len(scored.prompt_scores)) == (0, 39)

    play(daemon, scene)


def test_prompts_that_come_together_are_computed_once(daemon: Daemon) -> None:
    """The others wait for the first one's blocks, as the choices of one request do."""
    recorder = Recorder()

    async def scene(decoder: Decoder) -> None:
        prompt = tokens_of(3, 100)
        generations = [submit(decoder, prompt) for _ in range(4)]
        found = await asyncio.gather(*map(read, generations))
        assert found == [found[0]] * 4
        assert [generation.reused_tokens for generation in generations] == [0, 96, 96, 96]
        assert sum(step.rows - step.decode_rows for step in recorder.steps) == 100 + 3 * 4
        # The first one ends before it has computed all of it: another one takes over.
        other = [submit(decoder, tokens_of(4, 100)) for _ in range(2)]
        computed = decoder.scheduler.tenants["a"].live[other[0].request_id]
        while not computed.filled:  # noqa: ASYNC110  # steps report no chunks of prompts
            await asyncio.sleep(0)
        other[0].cancel()
        assert len(await read(other[1])) == 6
        # Two tenants share the engine's busy time, all of it.
        await asyncio.gather(*(read(submit(decoder, tokens_of(5, 9), tenant=tenant)) for tenant in "ab"))
        parts = [tenant.gpu_s for tenant in decoder.scheduler.tenants.values()]
        assert all(parts)
        assert sum(parts) == pytest.approx(sum(step.took_s for step in recorder.steps))

    play(daemon, scene, SETTINGS, TENANTS, recorder)


def test_the_end_of_a_region_takes_its_blocks(daemon: Daemon) -> None:
    prompt = tokens_of(5, 40)

    async def scene(decoder: Decoder) -> None:
        expected = await read(submit(decoder, prompt))
        assert decoder.scheduler.tenants["a"].blocks.cached == 2
        metrics = DecodeMetrics("ab", lambda: decoder)

        def value(name: str) -> float | None:
            return metrics.registry.get_sample_value(f"gpulease_decode_{name}", {"tenant": "a"})

        assert (value("blocks_used"), value("blocks_kept"), value("blocks")) == (0, 2, 24)
        assert (value("reused_prompt_tokens_total"), value("evicted_blocks_total")) == (0, 0)
        daemon.revoke(decoder.regions.pools["a"].region.lease_id)
        after = submit(decoder, prompt)
        assert await read(after) == expected
        assert after.reused_tokens == 0
        again = submit(decoder, prompt)
        assert await read(again) == expected
        assert again.reused_tokens == 32
        assert (value("reused_prompt_tokens_total"), value("evicted_blocks_total")) == (64, 0)
        assert value("gpu_seconds_total") == decoder.scheduler.tenants["a"].gpu_s > 0
        # A region that is left behind takes along what lives, and nothing else.
        lives = submit(decoder, tokens_of(6, 20), most=30)
        await anext(lives)
        # It computes nothing before the move, so it lives until then.
        decoder.scheduler.hold("a")
        await decoder.move_tenant("a")
        moved = submit(decoder, prompt)
        assert await read(moved) == expected
        assert moved.reused_tokens == 0
        same = submit(decoder, tokens_of(6, 20))
        assert (await read(same))[1:] == (await read(lives))[:5]
        assert same.reused_tokens == 16

    play(daemon, scene)


def test_a_short_region_serves_more_than_it_could_reserve_for(daemon: Daemon) -> None:
    """Requests of 5 blocks each at their longest, in a region of 8: all live at once, and each has its tokens."""
    prompts = [tokens_of(20 + number, 10) for number in range(6)]
    recorder = Recorder()

    async def scene(decoder: Decoder) -> None:
        alone = [await read(submit(decoder, prompt, most=70)) for prompt in prompts]
        generations = [submit(decoder, prompt, most=70) for prompt in prompts]
        assert len(decoder.scheduler.tenants["a"].live) >= 4
        assert await asyncio.gather(*map(read, generations)) == alone
        assert all(generation.reason is CompletionReason.MAX_TOKENS_REACHED for generation in generations)
        assert {generation.replays for generation in generations} != {0}
        assert decoder.scheduler.tenants["a"].evictions > 0

    play(daemon, scene, SETTINGS, [TenantConfig("a", 6, 8)], recorder)
    assert {rebind.reason for rebind in recorder.rebinds} == {CompletionReason.PREEMPTED}


def test_a_model_with_windows_has_the_same_tokens_in_fewer_blocks(daemon: Daemon) -> None:
    """Sequences of 8 blocks each at their longest, in a region of 12: each sees two of its blocks, and has three."""
    model = RandomCheckpoint(WINDOWED["heads 32 wide, a window"], 1)
    prompts = [[3 + number, *range(5, 15)] for number in range(4)]

    async def part() -> None:
        tenants = [TenantConfig("a", 6, 12)]
        options = replace(SETTINGS, positions=128)
        async with Decoder.open(model, tenants, options, address=daemon.address) as decoder:
            alone = [await read(submit(decoder, prompt, most=110)) for prompt in prompts]
            assert decoder.scheduler.tenants["a"].evictions > 0
            together = [submit(decoder, prompt, most=110) for prompt in prompts]
            assert await asyncio.gather(*map(read, together)) == alone
            assert [generation.replays for generation in together] == [0] * 4
            # The beginning of an answer may be kept, and may be a prompt again.
            turn = submit(decoder, [*prompts[0], *(emitted.token for emitted in alone[0][:60])])
            assert [emitted.token for emitted in await read(turn)] == [one.token for one in alone[0][60:66]]

    asyncio.run(part())


def test_prompts_with_different_salts_share_no_block(daemon: Daemon) -> None:
    """So the time to the first token shows a caller nothing about the prompts of others in its tenant."""
    prompt, short = tokens_of(15, 40), tokens_of(16, 10)

    async def part() -> None:
        async with opened(daemon, prefixes=[SharedPrefix("all", tuple(prompt))]) as decoder:

            async def ask(tokens: list[int], salt: str, most: int = 6) -> tuple[list[Emitted], int]:
                generation = decoder.submit(tokens, max_tokens=most, tenant_id="a", sampling=HOT, cache_salt=salt)
                return await read(generation), generation.reused_tokens

            plain = [await ask(prompt, salt) for salt in ("", "one", "two", "one", "")]
            assert [reused for _, reused in plain] == [32, 0, 0, 32, 32]
            assert all(output == plain[0][0] for output, _ in plain)
            # A prompt without a full block of its own: the blocks of its answer are salted, too.
            output, _ = await ask(short, "one", 30)
            longer = [*short, *(emitted.token for emitted in output)]
            assert [(await ask(longer, salt))[1] for salt in ("two", "", "one")] == [0, 0, 32]
            assert decoder.scheduler.prefix_requests["all"] == 2

    asyncio.run(part())
    with pytest.raises(RequestRejected, match="cache_salt must have at most 1024 characters"):
        PromptRequest("a", "x", (1,), HOT, 1, cache_salt="x" * 1025)


LONG, SHORT = SharedPrefix("long", tuple(tokens_of(8, 75))), SharedPrefix("short", tuple(tokens_of(8, 40)))
"""One that begins with the other's blocks."""


def test_a_prompt_of_any_tenant_begins_behind_the_shared_prefix_that_it_begins_with(daemon: Daemon) -> None:
    """Without any sequence of its tenant before it, with the tokens of a whole prompt, and without blocks for it."""
    cuts, own = (75, 70, 64, 40, 35, 20, 10), tokens_of(9, 7)
    prompts = [(tenant, [*LONG.token_ids[:cut], *own]) for tenant in "ab" for cut in cuts]

    async def part() -> None:
        async with opened(daemon, replace(SETTINGS, reuses_prefixes=False)) as plain:
            expected = await outputs(plain, prompts, at_once=False)
        async with opened(daemon, prefixes=[SHORT, LONG]) as sharing:
            assert await outputs(sharing, prompts[:7], at_once=False) == expected[:7]
            assert await outputs(sharing, prompts[7:], at_once=True) == expected[7:]
            every = [submit(sharing, tokens, tenant=tenant) for tenant, tokens in prompts[7:]]
            assert [await read(generation) for generation in every] == expected[7:]
            # At first the shared blocks alone; then those of the tenant's own sequences behind them, too.
            assert reused_by(sharing)["a"] == 64 + 64 + 64 + 32 + 32 + 16
            assert [generation.reused_tokens for generation in every] == [80, 64, 64, 32, 32, 16, 16]
            scored = sharing.submit(prompts[0][1], max_tokens=2, tenant_id="a", ranks=1, scores_prompt=True)
            await read(scored)
            assert (scored.reused_tokens, len(scored.prompt_scores)) == (0, 81)
            # A region of the operator's cannot be written: rows name blocks of their tenant's region alone.
            sequence = submit(sharing, prompts[0][1], most=20)
            await anext(sequence)
            (live,) = sharing.scheduler.tenants["a"].live.values()
            assert live.prefix == "long"
            assert live.blocks[:4] == [24, 25, 26, 27]
            assert all(block < 24 for block in live.blocks[4:])
            await sharing.move_tenant("a")
            assert (await read(sequence))[:5] == expected[0][1:]
            assert sequence.replays == 0

    asyncio.run(part())


@pytest.mark.parametrize("is_idle", [False, True], ids=["in use", "idle"])
def test_the_end_of_a_shared_prefix_s_region_ends_no_tenant_s(daemon: Daemon, is_idle: bool) -> None:
    """Sequences that use it are computed again, in their tenants' own regions; all others continue."""
    prompt, other = [*LONG.token_ids, *tokens_of(9, 7)], tokens_of(12, 30)
    recorder = Recorder()

    async def part() -> None:
        async with opened(daemon) as plain:
            expected = [await read(submit(plain, tokens, most=40)) for tokens in (prompt, other)]
        async with opened(daemon, SETTINGS, TENANTS, recorder, prefixes=[LONG]) as sharing:
            regions = {name: pool.region.lease_id for name, pool in sharing.regions.pools.items()}
            users = [] if is_idle else [submit(sharing, prompt, 40, tenant) for tenant in "aab"]
            apart = submit(sharing, other, 40, "a")
            first = [await anext(one) for one in (*users, apart)]
            _, pool = sharing.regions.prefixes["long"]
            daemon.revoke(pool.region.lease_id)
            for begin, user in zip(first, users, strict=False):
                assert [begin, *await read(user)] == expected[0]
                assert user.replays == 1
            assert [first[-1], *await read(apart)] == expected[1]
            assert apart.replays == 0
            # An idle decoder notices it, too.
            while sharing.regions.prefixes:  # noqa: ASYNC110  # nothing reports it to callers
                await asyncio.sleep(0.01)
            assert sharing.scheduler.prefixes == {}
            after = submit(sharing, prompt, 40, "b")
            assert await read(after) == expected[0]
            # No tenant has lost its region, or a permit for the next one.
            assert {name: pool.region.lease_id for name, pool in sharing.regions.pools.items()} == regions
            assert sharing.rebinds == 0
            assert {rebind.reason for rebind in recorder.rebinds} == ({CompletionReason.REVOKED} if users else set())

    asyncio.run(part())


def test_another_engine_shares_the_prefixes_again(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    prompt = [*LONG.token_ids, *tokens_of(9, 7)]
    caplog.set_level(logging.INFO, "gpulease.decode")
    serving: list[Decoder] = []
    metrics = DecodeMetrics("ab", lambda: next(iter(serving), None))

    def value(name: str, **more: str) -> float | None:
        return metrics.registry.get_sample_value(f"gpulease_decode_prefix_{name}", {"prefix": "long", **more})

    def changes() -> list[float | None]:
        return [value("changes_total", kind=kind) for kind in ("load", "rebuild", "end")]

    async def part() -> None:
        async with opened(daemon, SETTINGS, TENANTS, metrics, prefixes=[LONG]) as decoder:
            serving.append(decoder)
            assert (value("requests_total"), value("reused_tokens_total"), changes()) == (0, 0, [1, 0, 0])
            expected = await read(submit(decoder, prompt))
            await read(submit(decoder, tokens_of(10, 20)))
            assert (value("requests_total"), value("reused_tokens_total")) == (1, 64)
            lives = submit(decoder, prompt, most=60)
            found = [await anext(lives)]
            await decoder.move()
            assert [*found, *await read(lives)][:6] == expected
            # A replay is the same request, and began behind the blocks once more; on a slow host all was over before.
            assert (value("requests_total"), changes()) == (2, [1, 1, 0])
            assert value("reused_tokens_total") == (2 + lives.replays) * 64
            daemon.revoke(decoder.engine.lease.lease_id)
            again = submit(decoder, prompt, tenant="b")
            assert await read(again) == expected
            assert again.reused_tokens == 64
            assert (value("requests_total"), changes()) == (3, [1, 2, 0])
            (shared,) = decoder.prefixes
            _, pool = decoder.regions.prefixes["long"]
            assert (shared.tokens, shared.region_bytes) == (64, pool.region.size_bytes)
            daemon.revoke(pool.region.lease_id)
            while decoder.regions.prefixes:  # noqa: ASYNC110  # nothing reports it to callers
                await asyncio.sleep(0.01)
            assert (value("requests_total"), value("bytes"), changes()) == (3, 0, [1, 2, 1])

    asyncio.run(part())
    (loaded,), rebuilt, (lost,) = (
        lines_of(caplog, event) for event in ("prefix_loaded", "prefix_rebuilt", "prefix_lost")
    )
    assert loaded | {"region": "", "bytes": 0} == {"prefix": "long", "region": "", "tokens": 64, "bytes": 0}
    assert len({line["region"] for line in (loaded, *rebuilt)}) == 3
    assert lost["region"] == rebuilt[-1]["region"]


@pytest.mark.parametrize(
    ("prefixes", "said"),
    [
        ([LONG, LONG], "different names, not long, long"),
        ([SharedPrefix("x", (LIGHT.vocabulary,) * 16)], "tokens of prefix x must be 0 to"),
        ([SharedPrefix("x", (1,) * 2048)], "prefix x must have fewer tokens than the"),
        ([SharedPrefix(f"x{n}", (1,) * 16) for n in range(255)], "at most 256 together, .* of a session, not 257"),
    ],
)
def test_prefixes_that_can_t_be_shared_are_refused_by_name(
    daemon: Daemon, prefixes: list[SharedPrefix], said: str
) -> None:
    async def part() -> None:
        async with opened(daemon, prefixes=prefixes):
            pass

    with pytest.raises(RequestRejected, match=said):
        asyncio.run(part())
    with pytest.raises(ValueError, match="prefix x must have at least 16 tokens, not 15"):
        SharedPrefix("x", (1,) * 15)


def test_an_engine_takes_prefixes_that_fit_its_tables(tiny: RunningRig) -> None:
    async def scene(rig: EngineRig) -> None:
        line = await rig.line(tokens_of(7, 40), 0)
        # Another table names the same blocks: a row behind them reads what the line's rows have written.
        seat = replace(rig.seat(), table=3)
        row = rig.row(seat, GREEDY, 39, line.tokens[39])
        await rig.engine.start(row, [rig.pools[0]], None, [(3, seat.blocks[:3])])
        assert (await rig.engine.finish())[0] == line.results[39]
        for bad in ([(6, [0])], [(-1, [0])], [(0, range(11))], [(0, [0])] * 7):
            with pytest.raises(RequestRejected):
                await rig.engine.start(row, [rig.pools[0]], None, bad)

    tiny.run(scene)
