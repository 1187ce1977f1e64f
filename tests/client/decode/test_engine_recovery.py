"""A decoder that loses its whole engine, or moves: all requests continue with the same tokens on another lease."""

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpulease.client.decode.checkpoint import RandomCheckpoint
from gpulease.client.decode.decode_errors import CompletionReason, EngineDecodeFailed, ModelRejected, NoModelLoaded
from gpulease.client.decode.decode_requests import SamplingParameters
from gpulease.client.decode.engine.engine import DecodeEngine
from gpulease.client.decode.openai.api_keys import ApiKeys
from gpulease.client.decode.page.decode_page import DecodePage
from gpulease.client.decode.row_records import Rows
from gpulease.client.decode.supervisor import engine_losses
from gpulease.client.decode.supervisor.decode_audit import ComputedBy, DecodeAudit
from gpulease.client.decode.supervisor.decoder import Decoder
from gpulease.client.decode.supervisor.engine_lifecycle import Effect, Isolating
from gpulease.client.decode.supervisor.generation import Generation
from gpulease.client.decode.supervisor.serving_engine import ServingEngine
from gpulease.client.errors import (
    Busy,
    CapacityExceeded,
    Denied,
    Disconnected,
    Drained,
    GpuLeaseError,
    GpuSessionFailed,
    InvalidRequest,
    Revoked,
    Unsupported,
    Untrusted,
)
from helpers.audit_log import check_whole, config, records, stop
from helpers.daemon import Daemon
from helpers.decode.decode_lines import lines_of
from helpers.decode.decoder_rig import (
    PROMPTS,
    SETTINGS,
    TENANTS,
    TOKENS,
    Gate,
    Outputs,
    Recorder,
    no_new_steps,
    one_by_one,
    opened,
    outputs_around,
    play,
    read,
    submit,
)
from helpers.decode.random_models import LIGHT
from helpers.lasting import LastingDaemon

pytestmark = pytest.mark.usefixtures("_decode_kernels")

Loss = Callable[[Daemon, Decoder], Awaitable[None]]


async def revoke_lease(daemon: Daemon, decoder: Decoder) -> None:
    daemon.revoke(decoder._supervisor.serving.lease.lease_id)


async def free_lease(_: Daemon, decoder: Decoder) -> None:
    with no_new_steps(decoder):
        await decoder._supervisor.serving.lease.free()


async def kill_worker(daemon: Daemon, decoder: Decoder) -> None:
    """Kill the process that has the context, as a fault of a kernel would end it."""
    daemon.allowed_trouble.append("worker")
    os.kill(daemon.worker_pid(decoder._supervisor.serving.lease.lease_id), signal.SIGKILL)


@pytest.mark.parametrize("lose", [revoke_lease, pytest.param(free_lease, marks=pytest.mark.exhaustive)])
def test_everybody_goes_on_with_the_same_tokens_after_the_loss_of_the_engine(
    daemon: Daemon, alone: Outputs, lose: Loss
) -> None:
    heard = Recorder()

    async def scene(decoder: Decoder) -> None:
        lost = decoder._supervisor.serving
        assert await outputs_around(decoder, lambda: lose(daemon, decoder)) == alone
        assert decoder._supervisor.serving.lease.lease_id != lost.lease.lease_id
        assert await one_by_one(decoder) == alone

    play(daemon, scene, heard)
    (rebuilt,) = heard.rebuilt
    assert (rebuilt.is_known, rebuilt.is_planned) == (True, False)
    assert rebuilt.took_s > 0
    assert heard.rebinds
    assert all(report.is_engine_scoped for report in heard.rebinds)
    assert len(heard.finished) == 2 * len(PROMPTS)


def test_a_killed_worker_is_nobody_s_fault_and_everybody_goes_on_together(
    daemon: Daemon, alone: Outputs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gpulease.decode")
    heard = Recorder()

    async def scene(decoder: Decoder) -> None:
        assert await outputs_around(decoder, lambda: kill_worker(daemon, decoder)) == alone

    play(daemon, scene, heard)
    (rebuilt,) = heard.rebuilt
    assert (rebuilt.is_known, rebuilt.is_planned) == (True, False)
    assert all(report.is_engine_scoped for report in heard.rebinds)
    assert lines_of(caplog, "suspects_isolated") == []
    (lost,) = lines_of(caplog, "engine_lost")
    assert "was killed by SIGKILL" in str(lost["cause"])
    assert lost["under_way"] != 0


@pytest.mark.parametrize("lose", [revoke_lease, pytest.param(kill_worker, marks=pytest.mark.exhaustive)])
def test_an_engine_that_is_lost_as_soon_as_it_is_there_is_followed_by_another_each_time(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lose: Loss
) -> None:
    monkeypatch.setattr(engine_losses, "FIRST_PAUSE_S", 1e-4)
    caplog.set_level(logging.INFO, "gpulease.decode")
    heard = Recorder()

    async def scene(decoder: Decoder) -> None:
        for number in range(1, 8):
            await lose(daemon, decoder)
            # Nothing else reports the loss while nobody sends a request.
            decoder._supervisor.engine_failed(decoder._supervisor.serving, Revoked("it is gone"))
            while len(heard.rebuilt) < number:  # noqa: ASYNC110  # nothing else tells of it
                await asyncio.sleep(0.01)
        assert await read(submit(decoder, "a")) == alone["a"]

    play(daemon, scene, heard)
    assert [line["losses"] for line in lines_of(caplog, "engine_lost")] == list(range(1, 8))


@pytest.mark.parametrize("lose", [revoke_lease, kill_worker, pytest.param(free_lease, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("over", ["unix", pytest.param("tcp", marks=pytest.mark.exhaustive)])
def test_an_idle_decoder_has_its_next_engine_before_the_next_request(
    over: str, daemon: Daemon, alone: Outputs, lose: Loss, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gpulease.decode")
    heard = Recorder()

    async def scene(decoder: Decoder) -> None:
        await lose(daemon, decoder)
        while not heard.rebuilt:  # noqa: ASYNC110  # nothing else tells of it
            await asyncio.sleep(0.01)
        generation = submit(decoder, "a")
        assert await read(generation) == alone["a"]
        assert generation.replays == 0

    play(daemon.address if over == "unix" else daemon.tcp_address, scene, heard)
    (lost,), (opened_again,) = lines_of(caplog, "engine_lost"), lines_of(caplog, "engine_opened")
    assert lost["known"]
    assert lost["under_way"] == 0
    assert opened_again["cause"] == lost["cause"]


def test_a_request_right_behind_an_idle_decoder_s_loss_is_served(daemon: Daemon, alone: Outputs) -> None:
    async def scene(decoder: Decoder) -> None:
        await revoke_lease(daemon, decoder)
        assert await read(submit(decoder, "a")) == alone["a"]

    play(daemon, scene)


def test_an_unknown_error_of_the_engine_is_taken_for_its_loss_and_said_to_be_unknown(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, start, calls = Recorder(), DecodeEngine.start, []

    async def broken(engine: DecodeEngine, rows: Rows, pools: Any, *others: Any, **options: Any) -> int:
        calls.append(engine)
        if len(calls) == 7:
            raise KeyError("a mistake of ours")
        return await start(engine, rows, pools, *others, **options)

    async def scene(decoder: Decoder) -> None:
        assert await outputs_around(decoder, lambda: asyncio.sleep(0)) == alone
        assert decoder.engine is not calls[0]

    monkeypatch.setattr(DecodeEngine, "start", broken)
    play(daemon, scene, heard)
    assert [(report.is_known, report.cause) for report in heard.rebuilt] == [(False, "KeyError: 'a mistake of ours'")]


# --- A request that ends engines. ---

POISON = 666
"""The seed of a poisoned request: its rows end the engine that computes them."""


def poison(monkeypatch: pytest.MonkeyPatch, position: int) -> list[int]:
    """Let rows of poisoned requests from a position on end the engine. Returns the rows of the steps that did."""
    start, fatal = DecodeEngine.start, []

    async def poisoned(engine: DecodeEngine, rows: Rows, pools: Any, *others: Any, **options: Any) -> int:
        if ((rows["seed"] == POISON) & (rows["position"] >= position)).any():
            fatal.append(len(set(rows["table"].tolist())))
            raise GpuSessionFailed("a kernel failed")
        return await start(engine, rows, pools, *others, **options)

    monkeypatch.setattr(DecodeEngine, "start", poisoned)
    return fatal


def submit_poison(decoder: Decoder, tenant: str) -> Generation:
    return decoder.submit([1, 2, 3], max_tokens=12, tenant_id=tenant, sampling=SamplingParameters(seed=POISON))


@pytest.mark.parametrize("position", [8, pytest.param(0, marks=pytest.mark.exhaustive)])
def test_a_request_that_ends_an_engine_alone_is_given_up_and_everybody_else_goes_on(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    heard, fatal = Recorder(), poison(monkeypatch, position)

    async def scene(decoder: Decoder) -> None:
        generations = {name: submit(decoder, name) for name in PROMPTS if name != "a too"}
        fatal_one = submit_poison(decoder, "a")
        outputs = await asyncio.gather(*map(read, generations.values()))
        assert dict(zip(generations, outputs, strict=True)) == {name: alone[name] for name in generations}
        with pytest.raises(EngineDecodeFailed, match="alone"):
            await read(fatal_one)
        assert fatal_one.reason is CompletionReason.ENGINE_ERROR

    play(daemon, scene, heard)
    assert len(fatal) == len(heard.rebuilt) <= 4, "halves of four: once with everybody, with two, alone twice at most"
    assert fatal[0] > 1
    assert fatal[-1] == 1
    assert sorted(report.reason for report in heard.finished) == sorted(
        [CompletionReason.ENGINE_ERROR] + [CompletionReason.MAX_TOKENS_REACHED] * (len(PROMPTS) - 1)
    )


@pytest.mark.exhaustive
def test_each_of_several_requests_that_end_engines_is_given_up(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, 0)

    async def scene(decoder: Decoder) -> None:
        fatal = [submit_poison(decoder, tenant) for tenant in "abcd"]
        assert await read(submit(decoder, "a")) == alone["a"]
        for generation in fatal:
            with pytest.raises(EngineDecodeFailed):
                await read(generation)

    play(daemon, scene)


@pytest.mark.parametrize("is_current", [True, False], ids=["computed alone", "waiting for its turn"])
def test_a_suspended_tenant_s_suspect_keeps_nobody_waiting_and_is_computed_alone_later(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch, is_current: bool
) -> None:
    fatal, has_begun = poison(monkeypatch, 8), asyncio.Event()

    async def scene(decoder: Decoder) -> None:
        life = decoder._supervisor.life
        isolate_next = life.isolate_next

        def isolate_first() -> list[Effect[ServingEngine]]:
            effects = isolate_next()
            if isinstance(life.phase, Isolating) and not has_begun.is_set():
                # Nothing is computed until the tenant is suspended.
                decoder.scheduler.hold("a")
                decoder.scheduler.hold("b")
                has_begun.set()
            return effects

        monkeypatch.setattr(life, "isolate_next", isolate_first)
        if is_current:
            fatal_one, honest = submit_poison(decoder, "b"), submit(decoder, "a")
        else:
            honest, fatal_one = submit(decoder, "a"), submit_poison(decoder, "b")
        await has_begun.wait()
        assert (life.isolation.current == (fatal_one.request_id,)) == is_current
        await decoder.suspend("b")
        decoder.scheduler.resume("a")
        decoder._steps.wake()
        assert await read(honest) == alone["a"]
        assert await read(submit(decoder, "c")) == alone["c"]
        assert len(fatal) == 1
        await decoder.resume("b")
        with pytest.raises(EngineDecodeFailed, match="alone"):
            await read(fatal_one)

    play(daemon, scene)
    assert fatal[1:] == [1]


# --- A daemon that is killed. ---


def test_a_daemon_that_is_killed_and_comes_back_gives_a_fresh_lease_and_the_audit_goes_on(
    start_daemon: Callable[..., Daemon], alone: Outputs, tmp_path: Path
) -> None:
    folder = tmp_path / "log"
    first = start_daemon(config=config(folder))
    first.allowed_trouble.append("worker")
    heard, audit = Recorder(), DecodeAudit(ComputedBy("tiny", "0" * 64, "1" * 64, True))
    decoders: list[Decoder] = []
    page = DecodePage(lambda: decoders[0], bytes(32), "tiny", ApiKeys({}))

    async def part() -> None:
        async with (
            opened(first, heard, audit, page.observer) as decoder,
            audit.writing(lambda: decoder._supervisor.serving.lease),
        ):
            decoders.append(decoder)
            lost = decoder._supervisor.serving.lease.lease_id

            async def restart() -> None:
                first.kill()
                again.append(start_daemon(config=config(folder), folder=first.folder))

            assert await outputs_around(decoder, restart) == alone
            assert decoder._supervisor.serving.lease.lease_id != lost
            while audit.written < len(PROMPTS):  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.01)
            state = page.observer.state()
            assert {tenant["id"]: tenant["rebinds"] > 0 for tenant in state["tenants"]} == dict.fromkeys("abcd", True)

    again: list[Daemon] = []
    asyncio.run(part())
    (rebuilt,) = heard.rebuilt
    assert (rebuilt.is_known, rebuilt.is_planned) == (True, False)
    assert {report.tenant_id for report in heard.rebinds} == set("abcd")
    assert all(report.is_engine_scoped for report in heard.rebinds)
    assert audit.lost == 0
    stop(again[0])
    check_whole(folder)
    notes = [record["data"]["note"] for record in records(folder) if record["kind"] == "note"]
    ended = {note["request"]: note for note in notes if "output" in note}
    assert len(ended) == len(PROMPTS)
    assert all(note["output"]["count"] == TOKENS for note in ended.values())


@pytest.mark.exhaustive
def test_a_daemon_that_keeps_its_leases_is_killed_and_nobody_is_replayed(
    start_lasting: Callable[..., LastingDaemon], alone: Outputs
) -> None:
    lasting, heard = start_lasting(), Recorder()

    async def scene(decoder: Decoder) -> None:
        lease = decoder._supervisor.serving.lease.lease_id

        async def restart() -> None:
            lasting.restart()

        assert await outputs_around(decoder, restart) == alone
        assert decoder._supervisor.serving.lease.lease_id == lease
        lasting.now.revoke(decoder.regions.pools["b"].region.lease_id)
        assert await read(submit(decoder, "b")) == alone["b"]

    play(lasting.now, scene, heard)
    assert heard.rebuilt == []
    assert {report.tenant_id for report in heard.rebinds} == {"b"}


# --- While there is no engine. ---


async def lose(daemon: Daemon, decoder: Decoder, gate: Gate) -> dict[str, Generation]:
    """Requests lose their engine while they run; the next engine is opened only when the test permits it."""
    generations = {name: submit(decoder, name) for name in PROMPTS}
    await anext(generations["a"])
    await revoke_lease(daemon, decoder)
    await gate.is_asked.wait()
    return generations


def test_requests_are_taken_and_cancelled_while_there_is_no_engine(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(decoder: Decoder) -> None:
        gate = Gate(monkeypatch)
        generations = await lose(daemon, decoder, gate)
        generations["b"].cancel()
        late = decoder.submit([1], max_tokens=1, tenant_id="c")
        assert generations["b"].reason is CompletionReason.CANCELLED
        gate.may_open.set()
        assert await read(generations["c"]) == alone["c"]
        assert await read(generations["a"]) == alone["a"][1:]
        assert len(await read(late)) == 1

    play(daemon, scene)


def test_an_engine_is_asked_for_again_while_the_daemon_is_away_or_has_no_room(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_losses, "FIRST_PAUSE_S", 0.001)

    async def scene(decoder: Decoder) -> None:
        gate = Gate(monkeypatch)
        gate.may_open.set()
        gate.errors = [Disconnected("it is away"), CapacityExceeded("it is full")]
        generations = await lose(daemon, decoder, gate)
        assert await read(generations["b"]) == alone["b"]
        assert not gate.errors

    play(daemon, scene)


REFUSALS = [
    Disconnected,
    Denied,
    Busy,
    CapacityExceeded,
    Drained,
    InvalidRequest,
    Revoked,
    Unsupported,
    Untrusted,
    ModelRejected,
    GpuSessionFailed,
    GpuLeaseError,
    OSError,
    MemoryError,
]
"""What may prevent the opening of an engine: the daemon, the fleet, the host, the model's files."""


def test_another_engine_is_asked_for_longer_than_every_limit_whatever_refuses_it(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that waited for the engine end with an error, and later ones are served."""
    caplog.set_level(logging.INFO, "gpulease.decode")
    heard, kinds = Recorder(), REFUSALS * 3
    tries = len(kinds)
    monkeypatch.setattr(engine_losses, "REPLAY_WAIT_S", 0.0)
    monkeypatch.setattr(engine_losses, "MAX_PAUSE_S", 1e-3)

    async def scene(decoder: Decoder) -> None:
        decoder.scheduler.settings = replace(decoder.scheduler.settings, replay_wait_s=0.0)
        gate = Gate(monkeypatch)
        gate.errors = [kind("it can't be had") for kind in reversed(kinds)]
        generation = decoder.submit([1, 2, 3], max_tokens=20, tenant_id="a", wait_s=0.01)
        await anext(generation)
        await revoke_lease(daemon, decoder)
        with pytest.raises(EngineDecodeFailed, match="none took its place") as lost:
            await read(generation)
        assert "it can't be had" not in str(lost.value), "what the daemon says is the operator's to know"
        while gate.errors:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.001)
        outage = decoder.outage
        assert outage is not None
        assert (outage.cause, outage.tries, outage.refusal) == (Revoked, tries, kinds[-1])
        told = outage.report(outage.since + 312.34, 1_000_000_000.0)
        assert told == {
            "since": "2001-09-09T01:41:27+00:00",
            "seconds": 312.3,
            "cause": "Revoked",
            "tries": tries,
            "refusal": kinds[-1].__name__,
        }
        gate.may_open.set()
        assert await read(submit(decoder, "b")) == alone["b"]
        assert decoder.outage is None

    play(daemon, scene, heard)
    assert next(report.reason for report in heard.finished) is CompletionReason.ENGINE_ERROR
    refused = lines_of(caplog, "engine_refused")
    assert [line["tries"] for line in refused] == [*range(1, 9), 12, 24, 36]
    for line in refused:
        kind = kinds[int(str(line["tries"])) - 1]
        assert str(line["cause"]).startswith(f"{kind.__name__}: it can't be had")
    (given_up,) = lines_of(caplog, "replay_given_up")
    assert given_up["tenant"] == "a"
    (opened_again,) = lines_of(caplog, "engine_opened")
    assert opened_again["tries"] == tries + 1


def test_losses_in_a_row_do_not_keep_requests_waiting_for_ever(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_losses, "FIRST_PAUSE_S", 1e-4)
    monkeypatch.setattr(engine_losses, "REPLAY_WAIT_S", 0.5)

    async def lost(engine: DecodeEngine, rows: Rows, pools: Any, *others: Any, **options: Any) -> int:
        raise Revoked("for good")

    async def scene(decoder: Decoder) -> None:
        decoder.scheduler.settings = replace(decoder.scheduler.settings, replay_wait_s=0.0)
        monkeypatch.setattr(DecodeEngine, "start", lost)
        with pytest.raises(EngineDecodeFailed, match="none took its place"):
            await read(decoder.submit([1, 2, 3], max_tokens=20, tenant_id="a", wait_s=0.01))

    play(daemon, scene)


@pytest.mark.exhaustive
def test_a_daemon_that_is_away_for_longer_than_every_limit_is_used_as_soon_as_it_is_back(
    start_daemon: Callable[..., Daemon], alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_losses, "REPLAY_WAIT_S", 0.05)
    monkeypatch.setattr(engine_losses, "MAX_PAUSE_S", 0.05)
    first = start_daemon()
    first.allowed_trouble.append("worker")

    async def scene(decoder: Decoder) -> None:
        decoder.scheduler.settings = replace(decoder.scheduler.settings, replay_wait_s=0.0)
        generation = decoder.submit([1, 2, 3], max_tokens=20, tenant_id="a", wait_s=0.05)
        await anext(generation)
        first.kill()
        with pytest.raises(EngineDecodeFailed, match="none took its place"):
            await read(generation)
        while (outage := decoder.outage) is None or outage.refusal is not Disconnected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not decoder.is_serving
        waiting = submit(decoder, "b")
        start_daemon(folder=first.folder)
        assert await read(waiting) == alone["b"]
        assert decoder.is_serving

    play(first, scene)


def test_a_move_finds_an_engine_elsewhere_while_none_can_be_had_here(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_losses, "FIRST_PAUSE_S", 1e-3)

    async def scene(decoder: Decoder) -> None:
        gate = Gate(monkeypatch)
        gate.refuses = {decoder._supervisor._address: Denied("not here")}
        gate.may_open.set()
        generation = submit(decoder, "a")
        await anext(generation)
        await revoke_lease(daemon, decoder)
        await gate.is_asked.wait()
        # The same daemon, by another name.
        await decoder.move(str(daemon.address).replace("unix:/", "unix://", 1))
        assert await read(generation) == alone["a"][1:]

    play(daemon, scene)


def test_a_fault_of_the_decoder_itself_ends_it_and_is_logged(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error comes while there is no engine, so it is the decoder's own fault, and another engine would not help."""

    async def scene(decoder: Decoder) -> None:
        def broken(_: float) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(decoder.scheduler, "plan", broken)
        with pytest.raises(EngineDecodeFailed, match="ZeroDivisionError"):
            await read(submit(decoder, "a"))
        await decoder.wait_ended()
        with pytest.raises(EngineDecodeFailed):
            decoder.check_alive()
        with pytest.raises(EngineDecodeFailed):
            submit(decoder, "a")
        with pytest.raises(EngineDecodeFailed):
            await decoder.move()
        # The engine that is being opened closes again; the task that watches regions continues.
        while len(decoder._supervisor._tasks._tasks) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    play(daemon, scene)
    assert len(lines_of(caplog, "decoder_failed")) == 1
    assert "Traceback" in caplog.text


def test_leaving_the_block_while_there_is_no_engine_leaves_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def part() -> None:
        async with opened(daemon) as decoder:
            generations = await lose(daemon, decoder, Gate(monkeypatch))
        with pytest.raises(NoModelLoaded):
            await read(generations["b"])

    asyncio.run(part())


# --- Moves. ---


def test_the_load_moves_to_another_lease_and_nobody_notices(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Recorder()

    async def scene(decoder: Decoder) -> None:
        old, gate = decoder._supervisor.serving, Gate(monkeypatch, opens_before=True)
        move = asyncio.create_task(decoder.move())
        await gate.is_asked.wait()

        async def let_it_move() -> None:
            gate.may_open.set()

        assert await outputs_around(decoder, let_it_move) == alone
        await move
        assert decoder._supervisor.serving is not old
        assert not old.lease.is_alive
        assert len([lease for lease in daemon.leases() if not lease.get("parent")]) == 1

    play(daemon, scene, heard)
    assert [(report.is_known, report.is_planned) for report in heard.rebuilt] == [(True, True)]
    assert {report.reason for report in heard.rebinds} == {CompletionReason.PREEMPTED}
    assert all(len(report.emitted) == TOKENS for report in heard.finished)


@pytest.mark.exhaustive
def test_the_load_moves_to_another_daemon_and_stays_there(daemon: Daemon, alone: Outputs) -> None:
    other = Daemon()
    try:
        other.wait_until_it_answers()

        async def scene(decoder: Decoder) -> None:
            assert await outputs_around(decoder, lambda: decoder.move(other.address)) == alone
            assert daemon.leases() == []
            # The next loss is handled where the load is now.
            assert await outputs_around(decoder, lambda: revoke_lease(other, decoder)) == alone
            assert decoder._supervisor.serving.lease.address == other.address

        play(daemon, scene)
    finally:
        other.stop()


def test_a_move_that_finds_no_room_changes_nothing(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(decoder: Decoder) -> None:
        gate, old = Gate(monkeypatch), decoder._supervisor.serving
        gate.errors = [CapacityExceeded("it is full")]

        async def fail_to_move() -> None:
            with pytest.raises(CapacityExceeded):
                await decoder.move()

        assert await outputs_around(decoder, fail_to_move) == alone
        assert decoder._supervisor.serving is old

    play(daemon, scene)


def test_an_engine_that_is_lost_while_the_load_is_about_to_move_is_replaced_by_the_new_one(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Recorder()

    async def scene(decoder: Decoder) -> None:
        gate = Gate(monkeypatch)
        move = asyncio.create_task(decoder.move())
        generations = await lose(daemon, decoder, gate)
        gate.may_open.set()
        await move
        assert await read(generations["b"]) == alone["b"]

    play(daemon, scene, heard)
    assert [report.is_planned for report in heard.rebuilt] == [False]


def test_leaving_the_block_while_the_load_is_about_to_move_leaves_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def part() -> None:
        model, address = RandomCheckpoint(LIGHT, 1), daemon.address
        async with Decoder.open(model, TENANTS, SETTINGS, address=address) as decoder:
            gate = Gate(monkeypatch)
            move = asyncio.create_task(decoder.move())
            await gate.is_asked.wait()
        with pytest.raises(NoModelLoaded):
            await move
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(part())


def test_a_move_that_is_cancelled_at_the_hand_over_frees_the_old_lease(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(decoder: Decoder) -> None:
        supervisor = decoder._supervisor
        old, change = supervisor.serving, supervisor.change
        move = asyncio.create_task(decoder.move())

        def change_and_cancel() -> None:
            change()
            if supervisor.serving is not old:
                # As if the caller had given up a moment ago: `move` cancels its task now, before that task runs again.
                (moving,) = (task for task in supervisor._tasks._tasks if "EngineSupervisor._move" in str(task))
                moving.cancel()

        monkeypatch.setattr(supervisor, "change", change_and_cancel)
        with pytest.raises(asyncio.CancelledError):
            await move
        assert not old.lease.is_alive
        assert await read(submit(decoder, "a")) == alone["a"]

    play(daemon, scene)
