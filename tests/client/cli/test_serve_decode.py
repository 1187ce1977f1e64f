"""`gpulease serve decode`: its refusals before it serves."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpulease.client.cli.__main__ import main
from gpulease.client.serve.decode.openai_http.decode_settings import EXAMPLE


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "say CONFIG, or try --demo"),
        ([str(EXAMPLE), "--demo"], 2, "say CONFIG, or try --demo"),
        (["nowhere.toml"], 1, "nowhere.toml"),
        ([str(EXAMPLE), "--listen", "tcp:0.0.0.0:80"], 1, "where this host alone can connect"),
    ],
)
def test_what_it_refuses(words: list[str], status: int, said: str) -> None:
    done = CliRunner().invoke(main, ["serve", "decode", *words], env={"GPULEASE_ADDRESS": "unix:/nowhere"})
    assert (done.exit_code, said in done.output) == (status, True), done.output
    assert "Traceback" not in done.output


def test_audit_is_not_left_out_silently(tmp_path: Path) -> None:
    config = tmp_path / "decode.toml"
    config.write_text(EXAMPLE.read_text().replace("audit = false", "audit = true"))
    done = CliRunner().invoke(main, ["serve", "decode", str(config)])
    assert (done.exit_code, "audit = true" in done.output) == (1, True), done.output


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "gpulease.client.serve.http.uvicorn_server", raising=False)
    done = CliRunner().invoke(main, ["serve", "decode", "--demo"])
    assert (done.exit_code, "pip install '.[serve,decode]' in gpulease's repository" in done.output) == (1, True)
