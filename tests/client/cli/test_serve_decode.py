"""`gpulease serve decode`: its refusals before it serves."""

import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpulease.client.cli.__main__ import main
from gpulease.client.decode import TINY_MODEL
from gpulease.client.decode.openai.decode_settings import EXAMPLE
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler
from helpers.daemon import Daemon


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "give CONFIG, or try --demo"),
        ([str(EXAMPLE), "--demo"], 2, "give CONFIG, or try --demo"),
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
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        done = CliRunner().invoke(main, ["serve", "decode", str(config), "--listen", f"unix:{tmp_path}/s"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert (done.exit_code, "a fault of its own, ZeroDivisionError" in done.output) == (1, True), done.output


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "gpulease.client.http.uvicorn_server", raising=False)
    done = CliRunner().invoke(main, ["serve", "decode", "--demo"])
    assert (done.exit_code, "pip install '.[serve,decode]' in gpulease's repository" in done.output) == (1, True)
