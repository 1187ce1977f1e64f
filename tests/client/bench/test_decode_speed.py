"""Each kernel of a step is timed, each step beside the bytes that it reads, and other ways to decode beside it."""

import subprocess
from typing import Any

import pytest

from gpulease.client.bench import decode_kernels, decode_speed, decode_steps
from gpulease.client.bench.decode_shapes import SHAPES
from gpulease.client.bench.decode_speed import DecodePlan, measure_decode, plan_for, step_figure, weight_bytes
from gpulease.client.bench.decode_steps import StepTime
from gpulease.client.decode.engine.linear_tiles import tiles_of
from helpers.daemon import Daemon


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFILL", "STEPS"):
        monkeypatch.setattr(decode_steps, name, 4)
    for name in ("KERNEL_LAUNCHES", "KERNEL_GRAPHS"):
        monkeypatch.setattr(decode_kernels, name, 2)
    # The embedded driver compiles each tile anew.
    monkeypatch.setattr(decode_kernels, "tiles_of", lambda function, target: tiles_of(function, target)[:1])


@pytest.mark.exhaustive
def test_every_launch_of_a_step_is_timed_and_other_ways_follow(daemon: Daemon, few_samples: None) -> None:
    figures: list[Any] = []
    said: list[str] = []
    plan = DecodePlan(("two-layers",), (1, 4), (20, 40))
    measure_decode(daemon.address, plan, figures.append, said.append)
    steps = [(figure["batch"], figure["context"]) for figure in figures if figure["figure"] == "step"]
    assert steps == [(1, 20), (4, 20), (1, 40), (4, 40)]
    kernels = [figure for figure in figures if figure["figure"] == "kernel" and figure["batch"] == 4]
    layers = SHAPES["two-layers"].layers
    assert sum(figure["launches"] for figure in kernels) == 8 * layers + 5
    assert all(figure["us"] > 0 for figure in kernels)
    linears = [figure for figure in figures if figure["figure"] == "invariance" and figure["batch"] == 4]
    assert [figure["linear"] for figure in linears] == [
        "256 x 64",
        "64 x 128",
        "128 x 64",
        "512 x 64",
        "all",
    ]
    assert all(figure["cost"] >= 0 for figure in linears)
    assert [figure["figure"] for figure in figures[-3:]] == ["direct", "torch", "transformers"]
    assert len(said) == 4


@pytest.mark.parametrize(("shape", "millions"), [("llama-1b", 1235), ("qwen3-0.6b", 595), ("llama-8b", 7504)])
def test_the_weights_that_a_step_reads_are_those_of_the_model(shape: str, millions: int) -> None:
    assert weight_bytes(SHAPES[shape]) // 2_000_000 == millions


def test_a_step_is_told_as_a_share_of_two_rates() -> None:
    figure = step_figure(8, 2e-3, 4_800_000_000, 4e12)
    assert figure["tokens_per_s"] == 4000
    assert figure["floor_ms"] == pytest.approx(1.2)
    assert (figure["share"], figure["share_of_4_8_tb_per_s"]) == pytest.approx((0.6, 0.5))


def test_another_way_is_told_as_a_ratio_of_the_lease_s_tokens_to_its_own() -> None:
    steps = {(8, 128): StepTime(2e-3, "abc")}
    figure = {"figure": "direct", "batch": 8, "context": 128, "ms": 1.9, "results": "abc"}
    beside = decode_speed._with_comparison(figure, steps)
    assert beside["leased_ratio"] == pytest.approx(0.95)
    assert beside["same_results"] is True
    assert "results" not in beside
    assert decode_speed._with_comparison(figure | {"results": "abd"}, steps)["same_results"] is False


def test_a_way_that_ends_badly_is_told_with_the_figures_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.CompletedProcess(
        [], 1, '{"figure": "torch", "ms": 1}\nnoise\n', "Traceback\nOutOfMemory: 80 GB\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: ended)
    told = list(decode_speed._figures_of("decode_torch", "llama-1b", "", plan_for("cuda", quick=True)))
    assert told == [
        {"figure": "torch", "ms": 1},
        {"figure": "torch", "shape": "llama-1b", "skipped": "OutOfMemory: 80 GB"},
    ]


@pytest.mark.parametrize("quick", [False, True])
def test_only_a_card_is_given_real_models_shapes(quick: bool) -> None:
    assert plan_for("cpu", quick=quick).shapes == ("two-layers",)
    assert "llama-1b" in plan_for("cuda", quick=quick).shapes
