"""`gpulease serve decode`: its refusals before it serves."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpulease.client.cli.__main__ import main
from gpulease.client.cli.serve_decode import prefixes_reload
from gpulease.client.cli.settings_reload import SettingsReload
from gpulease.client.decode import TINY_MODEL, Decoder, open_model
from gpulease.client.decode.openai.decode_settings import EXAMPLE, load_decode_settings
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler
from gpulease.client.decode.supervisor.background_tasks import BackgroundTasks
from gpulease.client.decode.supervisor.decoder import positions_of
from helpers.daemon import Daemon


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "give CONFIG, or use --demo"),
        ([str(EXAMPLE), "--demo"], 2, "give CONFIG, or use --demo"),
        (["nowhere.toml"], 1, "nowhere.toml"),
        ([str(EXAMPLE), "--listen", "tcp:0.0.0.0:80"], 1, "where only this host can connect"),
    ],
)
def test_what_it_refuses(words: list[str], status: int, said: str) -> None:
    done = CliRunner().invoke(main, ["serve", "decode", *words], env={"GPULEASE_ADDRESS": "unix:/nowhere"})
    assert (done.exit_code, said in done.output) == (status, True), done.output
    assert "Traceback" not in done.output


def test_a_daemon_without_an_audit_log_gets_no_audited_server(shared_daemon: Daemon, tmp_path: Path) -> None:
    config = tmp_path / "decode.toml"
    text = EXAMPLE.read_text().replace("audit = false", f'audit = true\naddress = "{shared_daemon.address}"')
    config.write_text(text.replace("../../tiny", str(TINY_MODEL)).replace("max_rows = 64", "max_rows = 32"))
    done = CliRunner().invoke(main, ["serve", "decode", str(config), "--listen", f"unix:{tmp_path}/s"])
    assert (done.exit_code, "keeps no audit log" in done.output) == (1, True), done.output


def test_a_decoder_that_fails_by_a_fault_of_its_own_ends_the_process_with_an_error(
    shared_daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its unit starts it again; a server that answers 503 for ever would be a healthy process to it."""

    def broken(_: object, now: float) -> None:
        raise ZeroDivisionError(now)

    monkeypatch.setattr(ContinuousBatchScheduler, "plan", broken)
    config = tmp_path / "decode.toml"
    text = EXAMPLE.read_text().replace("audit = false", f'audit = false\naddress = "{shared_daemon.address}"')
    config.write_text(text.replace("../../tiny", str(TINY_MODEL)).replace("max_rows = 64", "max_rows = 32"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        done = CliRunner().invoke(main, ["serve", "decode", str(config), "--listen", f"unix:{tmp_path}/s"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert (done.exit_code, "an internal error, ZeroDivisionError" in done.output) == (1, True), done.output


def test_a_reload_shares_the_file_s_prefixes_and_a_mistake_changes_nothing(
    shared_daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, checkpoint = tmp_path / "decode.toml", open_model(TINY_MODEL)
    text = EXAMPLE.read_text().replace("../../tiny", str(TINY_MODEL)).replace("max_rows = 64", "max_rows = 16")
    prompt = list(range(3, 45))
    many_models = f'[pool]\nmemory = "1GiB"\n[models.a]\nmodel = "{TINY_MODEL}"\n' + text[text.index("[tenants.") :]
    prefix = f"\n[prefixes.numbers]\ntokens = {prompt}\n"

    async def part() -> None:
        path.write_text(text)
        settings, tasks = load_decode_settings(path), BackgroundTasks()
        opened = Decoder.open(checkpoint, settings.tenants, settings.decoder, address=shared_daemon.address)
        async with opened as decoder:

            async def output() -> list[int]:
                generation = decoder.submit([*prompt, 7], max_tokens=20, tenant_id="ann")
                return [emitted.token async for emitted in generation]

            async def reload(changed: str) -> None:
                path.write_text(changed)
                caplog.clear()
                os.kill(os.getpid(), signal.SIGHUP)
                async with asyncio.timeout(60):
                    while "reloaded" not in caplog.text:  # noqa: ASYNC110  # the log has no event
                        await asyncio.sleep(0.01)

            expected = await output()
            reloading = SettingsReload(path, tasks)
            with contextlib.closing(reloading):
                reloading.begin(prefixes_reload(decoder, positions_of(checkpoint, settings.decoder), path, settings))
                # A request that is in progress continues in the engine that has the prefix.
                under_way = asyncio.create_task(output())
                await reload(text + prefix)
                assert await under_way == expected == await output()
                assert list(decoder.scheduler.prefixes) == ["numbers"]
                assert "need a restart" not in caplog.text
                for changed, said in (
                    (prefix, "tenants must be given"),
                    (text + prefix.replace("[3,", "[9999,"), "0 to"),
                    (many_models, " must have model, and no [models.NAME]"),
                ):
                    await reload(changed)
                    assert "not reloaded" in caplog.text
                    assert said in caplog.text
                    assert list(decoder.scheduler.prefixes) == ["numbers"]
                await reload(text.replace("max_concurrent = 8", "max_concurrent = 9"))
                assert "only [prefixes] is read again" in caplog.text
                assert decoder.scheduler.prefixes == {}
                assert await output() == expected
        await tasks.stop()

    with caplog.at_level("INFO", "gpulease.decode"):
        asyncio.run(part())
