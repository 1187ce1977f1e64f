"""The lines that a decoder logs, with their fields: each loss and each recovery has one, and no tenant fills a disk."""

import asyncio
import logging

import pytest

from gpulease.client.core.lease import LeaseHandle
from gpulease.client.decode.decode_log import LINE_EVERY_S, LINES_AT_ONCE, MAX_TEXT_CHARACTERS, DecodeLog
from gpulease.client.decode.engine.engine import BlockPool, DecodeEngine
from gpulease.client.decode.supervisor import engine_losses, tenant_regions
from gpulease.client.decode.supervisor.decoder import Decoder
from gpulease.client.errors import CapacityExceeded, Denied, InvalidRequest, Revoked
from gpulease.protocol.lease_ids import lease_text
from helpers.daemon import Daemon
from helpers.decode.decode_lines import lines_of
from helpers.decode.decoder_rig import PROMPTS, Outputs, outputs_around, play, read, submit


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpulease.decode")


def test_a_lost_region_its_successor_and_each_replay_have_a_line(
    daemon: Daemon, alone: Outputs, caplog: pytest.LogCaptureFixture
) -> None:
    regions: list[str] = []

    async def scene(decoder: Decoder) -> None:
        async def revoke() -> None:
            regions.append(lease_text(decoder.regions.pools["b"].region.lease_id))
            daemon.revoke(decoder.regions.pools["b"].region.lease_id)

        assert await outputs_around(decoder, revoke) == alone
        regions.append(lease_text(decoder.regions.pools["b"].region.lease_id))
        assert decoder.rebinds == 1

    play(daemon, scene)
    (lost,) = lines_of(caplog, "region_lost")
    assert (lost["tenant"], lost["region"], lost["reason"], lost["sequences"]) == ("b", regions[0], "Revoked", 1)
    assert f"region {regions[0]} was revoked" in str(lost["cause"])
    (reopened,) = lines_of(caplog, "region_reopened")
    assert reopened == {"tenant": "b", "region": regions[1]}
    (rebound,) = lines_of(caplog, "rebound")
    prompt_tokens, latency_s = rebound.pop("prompt_tokens"), rebound.pop("latency_s")
    assert isinstance(prompt_tokens, int)
    assert prompt_tokens >= len(PROMPTS["b"])
    assert isinstance(latency_s, float)
    assert latency_s > 0
    names = {"old_request": "request-2", "new_request": "request-2.1"}
    assert rebound == {"tenant": "b", **names, "reason": "Revoked", "lost": "region"}


def test_a_region_whose_renewal_is_refused_is_logged_and_its_tenant_gets_another(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # It is renewed after a tenth of its duration, so long before its end, even on a busy host.
    monkeypatch.setattr(tenant_regions, "REGION_TTL_S", 2.0)
    monkeypatch.setattr("gpulease.client.core.lease.RENEW_AT", 0.1)
    monkeypatch.setattr(tenant_regions, "MOVE_MARGIN_S", 0.05)
    renew = LeaseHandle.renew

    async def scene(decoder: Decoder) -> None:
        refused = decoder.regions.pools["c"].region

        def renew_or_refuse(state: LeaseHandle, *arguments: object, **options: object) -> object:
            if state is refused._state:
                raise Denied("it is another tenant's")
            return renew(state, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(LeaseHandle, "renew", renew_or_refuse)
        pools = decoder.regions.pools
        while not lines_of(caplog, "region_renewal_refused"):  # noqa: ASYNC110  # nothing else tells of it
            await asyncio.sleep(0.02)
        while "c" not in pools or pools["c"].region is refused:
            assert await read(submit(decoder, "c")) == alone["c"]
        assert decoder.rebinds > 0

    play(daemon, scene)
    (line,) = lines_of(caplog, "region_renewal_refused")
    assert line["tenant"] == "c"
    assert str(line["cause"]).startswith("Denied: it is another tenant's")


@pytest.mark.parametrize("kind", [Denied, InvalidRequest])
def test_a_tenant_whose_region_is_refused_waits_for_it_alone(
    daemon: Daemon,
    alone: Outputs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[Denied | InvalidRequest],
) -> None:
    monkeypatch.setattr(engine_losses, "MAX_PAUSE_S", 1e-3)
    open_pool, refusals = DecodeEngine.open_pool, [kind("not for this tenant")] * 20

    async def open_or_refuse(engine: DecodeEngine, *arguments: object, **options: object) -> BlockPool:
        if refusals:
            raise refusals.pop()
        return await open_pool(engine, *arguments, **options)  # type: ignore[arg-type]

    async def scene(decoder: Decoder) -> None:
        serving = decoder._supervisor.serving

        async def revoke() -> None:
            monkeypatch.setattr(DecodeEngine, "open_pool", open_or_refuse)
            daemon.revoke(decoder.regions.pools["b"].region.lease_id)

        assert await outputs_around(decoder, revoke) == alone
        assert decoder._supervisor.serving is serving, "the others' engine goes on"

    play(daemon, scene)
    assert [line["tries"] for line in lines_of(caplog, "region_refused")] == [*range(1, 9), 12]
    assert lines_of(caplog, "engine_lost") == []


def test_a_region_without_room_for_long_is_logged_and_had_in_the_end(
    daemon: Daemon, alone: Outputs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tenant_regions, "REGION_RETRY_S", 1e-3)
    monkeypatch.setattr(engine_losses, "MAX_PAUSE_S", 1e-3)
    open_pool, refusals = DecodeEngine.open_pool, [CapacityExceeded("no room")] * (tenant_regions.NO_ROOM_TRIES + 3)

    async def open_or_refuse(engine: DecodeEngine, *arguments: object, **options: object) -> BlockPool:
        if refusals:
            raise refusals.pop()
        return await open_pool(engine, *arguments, **options)  # type: ignore[arg-type]

    async def scene(decoder: Decoder) -> None:
        monkeypatch.setattr(DecodeEngine, "open_pool", open_or_refuse)
        daemon.revoke(decoder.regions.pools["b"].region.lease_id)
        assert await read(submit(decoder, "b")) == alone["b"]

    play(daemon, scene)
    assert [line["tries"] for line in lines_of(caplog, "region_refused")] == [51, 52, 53]


# --- The bound. ---


def test_lines_of_one_event_and_tenant_are_bounded_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    log = DecodeLog(lambda: now[0])
    for number in range(10 * LINES_AT_ONCE):
        log.info("rebound", tenant="ann", number=number)
    log.info("rebound", tenant="bob", number=0)
    log.info("region_lost", tenant="ann")
    assert len(caplog.records) == LINES_AT_ONCE + 2
    caplog.clear()
    now[0] += LINE_EVERY_S
    log.info("rebound", tenant="ann", number=1)
    log.info("rebound", tenant="ann", number=2)
    assert lines_of(caplog, "rebound") == [{"tenant": "ann", "number": 1, "suppressed": 9 * LINES_AT_ONCE}]


def test_a_hostile_text_neither_ends_a_line_nor_fills_it(caplog: pytest.LogCaptureFixture) -> None:
    log = DecodeLog()
    log.info("rebound", tenant="ann", old_request="x\ny\x1b[31m \u2028level=error", latency_s=1 / 3, count=3)
    log.info("rebound", tenant="ann", old_request="é" * 100_000)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == r'rebound tenant=ann old_request="x\ny\u001b[31m \u2028level=error" latency_s=0.333 count=3'
    assert len(second) < 10 * MAX_TEXT_CHARACTERS
    assert second.isprintable()
    assert second.isascii()


def test_an_error_of_the_library_is_a_warning_and_any_other_has_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = DecodeLog()
    log.failure("engine_lost", Revoked("maintenance"), losses=1)
    try:
        raise KeyError("ours")
    except KeyError as error:
        log.failure("engine_lost", error)
    known, unknown = caplog.records
    assert (known.levelname, "Revoked: maintenance" in known.getMessage()) == ("WARNING", True)
    assert "Traceback" not in known.getMessage()
    assert (unknown.levelname, unknown.exc_info) == ("ERROR", None), "a record keeps no error, and so no engine"
    assert "KeyError" in unknown.getMessage()
    assert "Traceback" in unknown.getMessage()
