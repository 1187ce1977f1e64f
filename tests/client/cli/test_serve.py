"""`gpulease serve gateway`: its refusals before it serves; tests/behaviour has the serving."""

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from gpulease.client.bench import gateway_load
from gpulease.client.bench.figures import load_figures
from gpulease.client.bench.gateway_load import request_figures
from gpulease.client.cli.__main__ import main
from gpulease.client.cli.bench import _request_table
from gpulease.client.serve.gateway.settings import EXAMPLE
from helpers.daemon import Daemon
from helpers.recycling import PATIENT, SETTINGS


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
        (["--demo", "--store", "sqlite:kept.sqlite"], 2, "leave out --store"),
        (["--demo", "--queue-secs", "nan"], 2, "nan is not a finite number"),
        (["--demo", "--join-secs", "inf"], 2, "inf is not in the range"),
        (["--demo", "--body-secs", "1e308"], 2, "is not in the range"),
        (["--demo", "--keep-hours", "nan"], 2, "nan is not a finite number"),
    ],
)
def test_what_it_refuses(words: list[str], status: int, said: str) -> None:
    done = CliRunner().invoke(main, ["serve", "gateway", *words], env={"GPULEASE_ADDRESS": "unix:/nowhere"})
    assert (done.exit_code, said in done.output) == (status, True), done.output


def test_bench_counts_requests(daemon: Daemon) -> None:
    figures = request_figures(daemon.address, 0.05, has_pool=True, has_recycling=False)
    assert set(figures) == {"1 at a time", "4 at a time", "8 at a time", "alone, pool full"}
    assert figures["1 at a time"]["per_s"] > 0
    assert "8 at a time" in _request_table({"fresh contexts": figures})


def test_bench_times_reused_contexts_once_all_of_them_exist(
    start_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start_daemon(config=SETTINGS, faults=PATIENT)
    seconds, counts = 0.05, list[int]()

    def noted(ask: Callable[[], float], at_a_time: int, load_s: float) -> dict[str, Any]:
        if load_s == seconds:
            counts.append(daemon.inventory().details[0]["recycled_contexts"])
        return load_figures(ask, at_a_time, load_s)

    monkeypatch.setattr(gateway_load, "load_figures", noted)
    request_figures(daemon.address, seconds, has_pool=False, has_recycling=True)
    assert all(count >= needed for count, needed in zip(counts, gateway_load.AT_A_TIME, strict=True)), counts
