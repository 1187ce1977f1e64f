"""Each kernel of a step is timed, and each step beside the bytes that it reads."""

import asyncio
import json

import pytest

from gpulease.client.bench import decode_speed
from gpulease.client.bench.decode_shapes import SHAPES
from gpulease.client.bench.decode_speed import measure, weight_bytes
from helpers.daemon import Daemon


@pytest.mark.exhaustive
def test_every_launch_of_a_step_is_timed(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PREFILL", "STEPS", "KERNEL_LAUNCHES", "KERNEL_GRAPHS"):
        monkeypatch.setattr(decode_speed, name, 4)
    asyncio.run(measure(daemon.address, "two-layers", (1, 4), (20, 40)))
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    steps = [(figure["batch"], figure["context"]) for figure in figures if figure["figure"] == "step"]
    assert steps == [(1, 20), (4, 20), (1, 40), (4, 40)]
    kernels = [figure for figure in figures if figure["figure"] == "kernel" and figure["batch"] == 4]
    layers = SHAPES["two-layers"].layers
    assert sum(figure["launches"] for figure in kernels) == 10 * layers + 4
    assert all(figure["us"] > 0 for figure in kernels)


@pytest.mark.parametrize(("shape", "millions"), [("llama-1b", 1235), ("qwen3-0.6b", 595), ("llama-8b", 7504)])
def test_the_weights_that_a_step_reads_are_those_of_the_model(shape: str, millions: int) -> None:
    assert weight_bytes(SHAPES[shape]) // 2_000_000 == millions
