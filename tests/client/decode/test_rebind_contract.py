"""The contract of rebinding: a tenant is revoked at any step, the others are unaffected, and it continues.

One decoder serves all moments of a test. Each moment is met exactly: a step's start waits until the region has ended.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

import pytest

from gpulease.client.decode.decode_errors import CompletionReason
from gpulease.client.decode.decode_requests import TenantConfig
from gpulease.client.decode.engine.engine import BlockPool, DecodeEngine
from gpulease.client.decode.scheduler.cell_rate import CellRate
from gpulease.client.decode.supervisor.decoder import Decoder
from gpulease.client.decode.supervisor.generation import Emitted, Generation
from gpulease.client.decode.supervisor.serving_engine import ServingEngine
from helpers.daemon import Daemon
from helpers.decode.decoder_rig import HOT, Recorder, before_step, opened, read
from helpers.decode.engine_rig import GREEDY

PROMPTS = {"a": [7, 1, 9], "b": list(range(100, 120)), "c": list(range(300, 309)), "d": list(range(40, 73))}
TOKENS = 16
"""So many that every sequence begins another block of positions on the way."""

STEPS = range(1, TOKENS + 2)
"""The steps of a quiet run."""

Outputs = dict[str, list[Emitted]]
End = Callable[[Daemon, Decoder, str], Awaitable[None]]


@asynccontextmanager
async def unlimited(daemon: Daemon, heard: Recorder) -> AsyncIterator[Decoder]:
    """A decoder without a practical limit on how often its tenants lose their regions."""
    async with opened(daemon, heard) as decoder:
        for tenant in decoder.scheduler.tenants.values():
            tenant.limiter = CellRate(1, 0.0)
        yield decoder


def submit_all(decoder: Decoder) -> dict[str, Generation]:
    """Submit every prompt. Tenant b's tokens depend on a seed, too; `check_moment` ends its region in every way."""
    return {
        name: decoder.submit(prompt, max_tokens=TOKENS, tenant_id=name, sampling=HOT if name == "b" else GREEDY)
        for name, prompt in PROMPTS.items()
    }


async def outputs_of(generations: dict[str, Generation]) -> Outputs:
    return dict(zip(generations, await asyncio.gather(*map(read, generations.values())), strict=True))


async def by_operator(daemon: Daemon, decoder: Decoder, name: str) -> None:
    daemon.revoke(decoder.regions.pools[name].region.lease_id)


async def by_tenant_s_free(_: Daemon, decoder: Decoder, name: str) -> None:
    await decoder.regions.pools[name].region.free()


async def by_quota(_: Daemon, decoder: Decoder, name: str) -> None:
    """Whoever holds the engine's lease ends what is over the tenant's quota; a daemon's quotas bound new leases."""
    await decoder.regions.pools[name].region.revoke("over its quota")


async def by_cancel(_: Daemon, decoder: Decoder, name: str) -> None:
    """The holder of the region's lease cancels it before it has ended otherwise."""
    await decoder.regions.pools[name].region.cancel()


async def by_ttl(daemon: Daemon, decoder: Decoder, name: str) -> None:
    # On a busy host, a renewal may have been late already. The tenant then has its next region soon.
    while name not in decoder.regions.pools:  # noqa: ASYNC110  # nothing else tells of it
        await asyncio.sleep(0.01)
    region = decoder.regions.pools[name].region
    await decoder.regions._renewals[name].stop()
    await asyncio.to_thread(daemon.wait_for_end, region.lease_id)


ENDS: list[End] = [by_operator, by_tenant_s_free, by_cancel, by_quota]
"""Every way of a region's end but its time, which takes seconds."""


def engine_of(daemon: Daemon, decoder: Decoder) -> list[object]:
    """What no rebind may change: process, lease, session, weights, graphs."""
    engine, lease = decoder.engine, decoder._supervisor.serving.lease
    weights = engine.forward.weights
    return [daemon.worker_pid(lease.lease_id), lease.lease_id, engine.session, weights, dict(engine._graphs)]


def missed_steps(heard: Recorder, generation: Generation) -> int:
    """Count the computed steps that had no token of a sequence, between its first and its last."""
    has = [any(token.request.request_id == generation.request_id for token in step.tokens) for step in heard.steps]
    first, last = has.index(True), len(has) - has[::-1].index(True)
    return has[first:last].count(False)


async def check_moment(
    daemon: Daemon, decoder: Decoder, heard: Recorder, quiet: Outputs, number: int, end: End
) -> None:
    """End one tenant's region before a step: everybody's output is the quiet run's, and the others miss nothing."""
    engine, pools, name = engine_of(daemon, decoder), dict(decoder.regions.pools), "abcd"[number % 4]
    heard.steps.clear()
    with before_step(decoder, number, lambda: end(daemon, decoder, name)):
        generations = submit_all(decoder)
        assert await outputs_of(generations) == quiet, (number, name)
    if decoder.regions.pools.get(name) is pools.get(name):
        # It ended behind the last step that names it: the next one notices.
        assert await outputs_of(submit_all(decoder)) == quiet, (number, name)
    assert engine_of(daemon, decoder) == engine
    for other, generation in generations.items():
        if other != name:
            assert generation.replays == 0
            assert decoder.regions.pools[other] is pools[other]
            assert missed_steps(heard, generation) == 0


def check(daemon: Daemon, moments: Iterable[tuple[int, End]]) -> None:
    async def part() -> None:
        heard = Recorder()
        async with unlimited(daemon, heard) as decoder:
            quiet = await outputs_of(submit_all(decoder))
            for number, end in moments:
                await check_moment(daemon, decoder, heard, quiet, number, end)
        assert len(heard.revoked) >= len(heard.rebinds) > 0
        assert all(report.flip_to_report_s is None or report.flip_to_report_s > 0 for report in heard.revoked)

    asyncio.run(part())


def test_continuous_batch_scheduler_recovers_one_tenant_under_revocation(daemon: Daemon) -> None:
    check(daemon, [(1, by_operator), (4, by_quota), (6, by_tenant_s_free), (17, by_operator)])


@pytest.mark.exhaustive
def test_a_tenant_is_recovered_at_every_step_and_by_every_end(daemon: Daemon) -> None:
    """Ends take turns, four steps each, one a tenant; the first step, one within and the last have all of them."""
    moments = [(number, ENDS[number // len(PROMPTS) % len(ENDS)]) for number in STEPS]
    moments += [(number, end) for number in (STEPS[0], STEPS[9], STEPS[-1]) for end in ENDS]
    check(daemon, moments)


@pytest.mark.exhaustive
def test_a_tenant_is_recovered_whose_time_is_up(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this tenant's regions are short, because a busy host may renew short ones too late."""
    open_pool = DecodeEngine.open_pool

    async def open_short(engine: DecodeEngine, blocks: int, *, tenant: str | None, ttl_secs: float) -> BlockPool:
        return await open_pool(engine, blocks, tenant=tenant, ttl_secs=2.0 if tenant == "b" else ttl_secs)

    monkeypatch.setattr(DecodeEngine, "open_pool", open_short)
    monkeypatch.setattr("gpulease.client.core.lease.RENEW_AT", 0.1)
    # Otherwise its sequences move before that.
    monkeypatch.setattr("gpulease.client.decode.supervisor.tenant_regions.MOVE_MARGIN_S", 0.0)
    check(daemon, [(number, by_ttl) for number in (1, 9, STEPS[-1])])


# --- Reports. ---


def test_a_rebind_and_its_cause_are_reported(daemon: Daemon) -> None:
    async def part() -> None:
        heard = Recorder()
        async with unlimited(daemon, heard) as decoder:
            lost = decoder.regions.pools["b"].region.lease_id
            with before_step(decoder, 12, lambda: by_operator(daemon, decoder, "b")):
                generations = submit_all(decoder)
                outputs = await outputs_of(generations)
            found = decoder.regions.pools["b"].region.lease_id
        (revoked,), (rebind,) = heard.revoked, heard.rebinds
        assert (revoked.lease_id, revoked.tenant_id) == (lost, "b")
        assert revoked.kv_position is not None
        assert revoked.flip_to_report_s is not None
        assert revoked.flip_to_report_s > 0
        first_id = generations["b"].request_id
        assert (rebind.old_request_id, rebind.new_request_id) == (first_id, f"{first_id}.1")
        assert (rebind.tenant_id, rebind.reason, rebind.is_engine_scoped) == ("b", CompletionReason.REVOKED, False)
        attempts = [emitted.attempt for emitted in outputs["b"]]
        assert rebind.prompt_tokens == len(PROMPTS["b"]) + attempts.count(0)
        assert attempts == sorted(attempts)
        assert set(attempts) == {0, 1}
        reports = {report.tenant_id: report for report in heard.finished}
        assert len(heard.finished) == len(reports) == 4
        for name, report in reports.items():
            assert list(report.prompt) == PROMPTS[name]
            assert list(report.emitted) == [emitted.token for emitted in outputs[name]]
            assert report.reason is CompletionReason.MAX_TOKENS_REACHED
            assert report.replays == (name == "b")
            assert report.first_token_at is not None
            assert report.submitted_at < report.first_token_at < report.ended_at
            assert 0 < report.compute_s <= report.ended_at - report.submitted_at
        assert reports["b"].region_id == found
        assert len(heard.steps) == decoder.steps
        assert sum(len(step.tokens) for step in heard.steps) == 4 * TOKENS

    asyncio.run(part())


def test_a_client_that_hangs_up_has_no_row_in_the_next_step(daemon: Daemon) -> None:
    async def part() -> None:
        heard = Recorder()
        async with unlimited(daemon, heard) as decoder:
            generations = submit_all(decoder)
            async for _ in generations["b"]:
                generations["b"].cancel()
                heard.steps.clear()
                break
            await read(generations["a"])
            gone = generations["b"].request_id
            assert not [token for step in heard.steps for token in step.tokens if token.request.request_id == gone]
            # Two steps at most were under way, with its row.
            assert all(step.decode_rows <= 3 for step in heard.steps[2:])

    asyncio.run(part())


# --- Storms. ---


async def revoke_all(daemon: Daemon, decoder: Decoder) -> None:
    for name in PROMPTS:
        if name in decoder.regions.pools:
            await by_operator(daemon, decoder, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [1, 2, 14])
def test_all_tenants_may_be_revoked_at_once(daemon: Daemon, number: int) -> None:
    """The first steps are of prompts."""

    async def part() -> None:
        async with unlimited(daemon, Recorder()) as decoder:
            quiet = await outputs_of(submit_all(decoder))
            engine = engine_of(daemon, decoder)
            with before_step(decoder, number, lambda: revoke_all(daemon, decoder)):
                generations = submit_all(decoder)
                assert await outputs_of(generations) == quiet
            assert [generation.replays for generation in generations.values()] == [1] * 4
            assert engine_of(daemon, decoder) == engine

    asyncio.run(part())


@pytest.mark.exhaustive
def test_a_region_may_be_revoked_as_soon_as_it_is_opened(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    async def part() -> None:
        async with unlimited(daemon, Recorder()) as decoder:
            quiet = await outputs_of(submit_all(decoder))
            again, opened_one = [True, True], decoder._supervisor.region_opened

            def region_opened(serving: ServingEngine, tenant: TenantConfig, pool: BlockPool) -> None:
                if again:
                    again.pop()
                    daemon.revoke(pool.region.lease_id)
                opened_one(serving, tenant, pool)

            monkeypatch.setattr(decoder._supervisor, "region_opened", region_opened)
            with before_step(decoder, 12, lambda: by_operator(daemon, decoder, "b")):
                generations = submit_all(decoder)
                assert await outputs_of(generations) == quiet
            assert [generation.replays for generation in generations.values()] == [0, 3, 0, 0]

    asyncio.run(part())


@pytest.mark.exhaustive
def test_everybody_has_the_same_tokens_in_a_storm(daemon: Daemon) -> None:
    """One region after another is revoked, one every 50 ms, while requests come and go."""

    async def part() -> None:
        heard = Recorder()
        async with unlimited(daemon, heard) as decoder:
            quiet = await outputs_of(submit_all(decoder))
            engine = engine_of(daemon, decoder)

            async def storm() -> None:
                for number in range(25):
                    name = "abcd"[number % 4]
                    if name in decoder.regions.pools:
                        await asyncio.to_thread(daemon.revoke, decoder.regions.pools[name].region.lease_id)
                    await asyncio.sleep(0.05)

            task = asyncio.create_task(storm())
            while not task.done():
                assert await outputs_of(submit_all(decoder)) == quiet
            await task
            assert engine_of(daemon, decoder) == engine
        assert heard.rebinds
        assert not heard.rebuilt

    asyncio.run(part())
