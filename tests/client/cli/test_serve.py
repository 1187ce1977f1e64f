"""`gpulease serve gateway`: its refusals before it serves; tests/behaviour has the serving."""

import pytest
from click.testing import CliRunner

from gpulease.client.bench.gateway_load import request_figures
from gpulease.client.cli.__main__ import main
from gpulease.client.cli.bench import _request_table
from gpulease.client.serve.gateway.settings import EXAMPLE
from helpers.daemon import Daemon


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "--models FILE"),
        (["--models", "nowhere.toml"], 1, "nowhere.toml"),
        (["--models", str(EXAMPLE), "--listen", "tcp:0.0.0.0:80"], 1, "where only this host can connect"),
        (
            ["--models", str(EXAMPLE), "--listen", "tcp:127.0.0.1:0", "--store", "redis://x"],
            1,
            "a store must be sqlite:PATH or postgresql://HOST/DATABASE, not",
        ),
        (["--demo", "--max-in-flight", "0"], 2, "max-in-flight"),
    ],
)
def test_what_it_refuses(words: list[str], status: int, said: str) -> None:
    done = CliRunner().invoke(main, ["serve", "gateway", *words], env={"GPULEASE_ADDRESS": "unix:/nowhere"})
    assert (done.exit_code, said in done.output) == (status, True), done.output


def test_bench_counts_requests(daemon: Daemon) -> None:
    figures = request_figures(daemon.address, 0.05, has_pool=True)
    assert set(figures) == {"1 at a time", "4 at a time", "8 at a time", "alone, pool full"}
    assert figures["1 at a time"]["per_s"] > 0
    assert "8 at a time" in _request_table({"fresh contexts": figures})
