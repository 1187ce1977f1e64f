"""A row's bits do not depend on the other rows, or on its blocks, steps and chunks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.client.decode.checkpoint import RandomCheckpoint, open_model
from gpulease.client.decode.decode_requests import SamplingParameters
from gpulease.client.decode.engine import forward_pass
from gpulease.client.decode.engine.engine import UNSET, DecodeEngine
from gpulease.client.decode.engine.forward_pass import StepKind, StepLimits, parts_of
from gpulease.client.decode.engine.kernel_library import KernelLaunch, KernelLibrary, manifest
from gpulease.client.decode.model_config import KvDtype, ModelConfig
from gpulease.client.decode.row_records import Rows
from helpers.daemon import Daemon
from helpers.decode.engine_rig import GREEDY, EngineRig, Line, MixedStep, RunningRig, Seat, running
from helpers.decode.mixed_schedules import schedules
from helpers.decode.random_models import (
    BIASED,
    EXPERTS,
    FP8_KEYS,
    FP8_WINDOWS,
    GEMMA,
    GEMMA_IN_PARTS,
    HEAD_NORMS,
    SHARED_KEYS,
    TINY,
    WIDE,
    WINDOWS,
)
from helpers.made_models import LLAMA, write_folder
from helpers.packed_models import PACKINGS, packed_entries, write_packed_folder

TABLES = 6
NUCLEUS = SamplingParameters(temperature=0.8, top_p=0.9, top_k=50, seed=7)
HOT = SamplingParameters(temperature=1.5, seed=2**64 - 1)
SHAPES = [(3, 9, GREEDY), (17, 4, NUCLEUS), (33, 7, HOT)]
LONG = (129, 6, NUCLEUS)


@pytest.fixture(scope="module")
def lines(tiny: RunningRig) -> list[Line]:
    return tiny.run(lambda rig: rig.lines([*SHAPES, LONG]))


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_rows_have_the_bits_that_they_have_alone(tiny: RunningRig, lines: list[Line], data: st.DataObject) -> None:
    tiny.mix(lines, data.draw(schedules(lines[: len(SHAPES)], TABLES, 16, 16)))


def chunked(seat: Seat, length: int, chunk: int, *, is_awaited: bool) -> list[MixedStep]:
    """Return the positions of a line from 0 on, divided into steps of this many."""
    begins = range(0, length, chunk)
    steps = [tuple((seat, at) for at in range(begin, min(begin + chunk, length))) for begin in begins]
    return [MixedStep(rows, is_awaited) for rows in steps]


def test_attention_over_several_splits_has_the_bits_that_it_has_alone(tiny: RunningRig, lines: list[Line]) -> None:
    long = lines[-1]
    assert len(long) > manifest().split
    seat = Seat(len(SHAPES), 1, 4, tuple(range(11, -1, -1)))
    tiny.mix(lines, chunked(seat, len(long), 16, is_awaited=True))


@pytest.mark.parametrize("chunk", [5, *(pytest.param(rows, marks=pytest.mark.exhaustive) for rows in (1, 16))])
def test_a_replay_into_another_pool_goes_on_with_the_same_bits(tiny: RunningRig, lines: list[Line], chunk: int) -> None:
    """The replay knows all tokens, including the emitted ones; the last rows take theirs from the step before."""
    line = lines[2]
    kept = line.prompt + 3
    seat = Seat(2, 1, 0, (9, 2, 20))
    replay = chunked(seat, kept, chunk, is_awaited=True)
    tiny.mix(lines, [*replay, *(MixedStep(((seat, at),), False) for at in range(kept, len(line)))])


def test_the_same_seed_and_position_give_the_same_token_in_any_batch(tiny: RunningRig, lines: list[Line]) -> None:
    """Rows of one step differ only in their sampling: each has the same token as in a step of its own."""

    async def tokens(rig: EngineRig) -> None:
        samplings = [GREEDY, NUCLEUS, HOT, *(SamplingParameters(temperature=2.0, seed=seed) for seed in range(9))]
        rows = [rig.row(rig.seat(), sampling, 0, 5) for sampling in samplings]
        alone = [int((await rig.compute(row))["token"][0]) for row in rows]
        together = await rig.compute(np.concatenate([*rows, *rows[:4]]))
        assert together["token"].tolist() == alone + alone[:4]
        assert len(set(alone)) > 4

    tiny.run(tokens)


def try_model(daemon: Daemon, config: ModelConfig, rows: int = 16, *, is_served: bool = False) -> None:
    """Two lines of a model, alone and then together in both pools, in two orders."""
    with running(daemon.address, RandomCheckpoint(config, 1), StepLimits(rows, 4, 64)) as rig:
        lines = rig.run(lambda rig: rig.lines([(20, 3, NUCLEUS), (2, 4, GREEDY)]))
        first, second, third = Seat(0, 0, 3, (7, 1)), Seat(1, 0, 0, (5,)), Seat(0, 1, 1, (0, 9))
        steps = [
            MixedStep((*((first, at) for at in range(12, -1, -1)), (second, 0))),
            MixedStep(((second, 1), *((first, at) for at in range(13, 20)), (third, 0)), False),
            MixedStep(((first, 20), (second, 2)), True),
            MixedStep(((second, 3), (first, 21), *((third, at) for at in range(1, 14))), True),
        ]
        rig.mix(lines, steps)
        if is_served:
            rig.mix(lines, steps, is_served=True)
            rig.run(lambda rig: check_pooled(rig, first))


async def check_pooled(rig: EngineRig, seat: Seat) -> None:
    """A prompt's rows after the last norm are in the caller's order, whichever of the rows has a result."""
    rows = np.concatenate([rig.row(seat, GREEDY, at, 5 + at) for at in range(7)])
    normed = []
    for chosen in (None, np.array([6])):
        await rig.engine.start(rows, [rig.pools[seat.tenant]], chosen=chosen, is_pooled=True)
        results = await rig.engine.finish()
        assert rig.engine.normed is not None
        normed.append(rig.engine.normed)
    assert np.count_nonzero(results == UNSET) == 6
    every, last = normed
    np.testing.assert_array_equal(last, every)
    assert len(np.unique(every, axis=0)) == len(rows)


def test_sums_of_the_wide_model_are_in_parts() -> None:
    shapes = [(2 * WIDE.inner_width, WIDE.width), (WIDE.width, WIDE.inner_width), (WIDE.vocabulary, WIDE.width)]
    assert [parts_of(*shape) for shape in shapes] == [(2, 768), (2, 512), (2, 768)]


@pytest.mark.parametrize("config", [BIASED, WIDE, FP8_KEYS], ids=["biases of qkv", "sums in parts", "keys in FP8"])
def test_a_model_has_the_bits_that_it_has_alone(shared_daemon: Daemon, config: ModelConfig) -> None:
    try_model(shared_daemon, config)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched or recorded. Steps of more than two rows count as large."""
    monkeypatch.setattr(forward_pass, "_split_rows", lambda rows, config: min(rows, 2))
    launched: list[str] = []
    launch = KernelLibrary.launch

    async def noted(library: KernelLibrary, wanted: KernelLaunch) -> None:
        launched.append(wanted.name)
        await launch(library, wanted)

    monkeypatch.setattr(KernelLibrary, "launch", noted)
    return launched


def prefixed(name: str, config: ModelConfig) -> str:
    """Return the name of attention's kernel for a model, from the first part of its name."""
    return f"{name}_fp8_{config.head_width}" if config.kv_dtype is KvDtype.FP8 else f"{name}_{config.head_width}"


@pytest.mark.parametrize(
    "config", [BIASED, *(pytest.param(other, marks=pytest.mark.exhaustive) for other in (SHARED_KEYS, FP8_KEYS))]
)
def test_rows_of_prompts_in_large_steps_have_the_bits_that_they_have_alone(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, launched: list[str], config: ModelConfig
) -> None:
    """Logits are computed for the rows that need them: for up to two, up to four, or all."""
    monkeypatch.setattr(forward_pass, "HEAD_ROWS", (2, 4))
    try_model(shared_daemon, config, is_served=True)
    assert prefixed("attend_prompt", config) in launched


def cut_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut every large step's sequences into spans of one split, however short they are."""
    for name, value in (("MIN_CUT_POSITIONS", 0), ("UNEVENNESS", 0), ("WHOLE_SPLITS", 0), ("SPAN_SPLITS", 1)):
        monkeypatch.setattr(forward_pass, name, value)


@pytest.mark.parametrize(
    "config",
    [
        BIASED,
        *(pytest.param(other, marks=pytest.mark.exhaustive) for other in (SHARED_KEYS, WINDOWS, FP8_KEYS, FP8_WINDOWS)),
    ],
)
def test_rows_of_sequences_that_are_cut_into_spans_have_the_bits_that_they_have_alone(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, launched: list[str], config: ModelConfig
) -> None:
    cut_everything(monkeypatch)
    try_model(shared_daemon, config)
    assert prefixed("attend_spans", config) in launched


@pytest.mark.parametrize("kv_dtype", [KvDtype.BF16, pytest.param(KvDtype.FP8, marks=pytest.mark.exhaustive)])
def test_spans_of_several_splits_have_the_bits_that_their_rows_have_alone(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, launched: list[str], kv_dtype: KvDtype
) -> None:
    """A prompt in chunks of two rows, which are small steps, and of 16, next to a sequence that decodes."""
    cut_everything(monkeypatch)
    checkpoint = RandomCheckpoint(replace(TINY, kv_dtype=kv_dtype), 1)
    with running(shared_daemon.address, checkpoint, StepLimits(16, TABLES, 160)) as rig:
        lines = rig.run(lambda rig: rig.lines([LONG, SHAPES[0]]))
        seat, beside = Seat(0, 1, 4, tuple(range(11, -1, -1))), Seat(1, 0, 0, (3,))
        steps = chunked(seat, len(lines[0]), 15, is_awaited=True)
        rig.mix(lines, [MixedStep((*step.rows, (beside, at % len(lines[1]))), True) for at, step in enumerate(steps)])
    assert "combine_spans_32" in launched


@pytest.mark.exhaustive
def test_long_prompts_in_small_steps_have_the_bits_that_their_rows_have_alone(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    """A prompt in chunks of 31 rows, next to a sequence that decodes. Steps of up to 16 rows are not cut."""
    cut_everything(monkeypatch)
    monkeypatch.setattr(forward_pass, "_split_rows", lambda rows, config: min(rows, 32))
    kinds, kind_of = set(), DecodeEngine._kind_of

    def noted(engine: DecodeEngine, bucket: int, rows: Rows, *_: Any) -> StepKind:
        # As in a decoder, where steps with prompts say which results are used.
        kind = kind_of(engine, bucket, rows, None, np.arange(len(rows)))
        kinds.add((bucket, kind))
        return kind

    monkeypatch.setattr(DecodeEngine, "_kind_of", noted)
    with running(shared_daemon.address, RandomCheckpoint(TINY, 1), StepLimits(33, TABLES, 160)) as rig:
        lines = rig.run(lambda rig: rig.lines([LONG, SHAPES[0]]))
        seat, beside = Seat(0, 1, 4, tuple(range(11, -1, -1))), Seat(1, 0, 0, (3,))
        steps = chunked(seat, len(lines[0]), 31, is_awaited=True)
        steps = [MixedStep((*step.rows, (beside, at % len(lines[1]))), True) for at, step in enumerate(steps)]
        rig.mix(lines, steps)
    assert (32, StepKind(has_prompts=True, is_cut=True)) in kinds
    assert all(bucket == 32 for bucket, kind in kinds if kind.is_cut)


@pytest.mark.parametrize("method", ["awq", pytest.param("fp8", marks=pytest.mark.exhaustive)])
def test_packed_weights_have_the_bits_of_their_values_as_bf16(
    shared_daemon: Daemon, tmp_path: Path, method: str
) -> None:
    """The model with bf16 weights computes each line alone; the packed model computes it next to other lines."""
    config = replace(LLAMA, layers=1, width=128, heads=4, head_width=32, inner_width=384)
    entries, values = packed_entries(config, method)
    plain = open_model(write_folder(tmp_path / "plain", config, values))
    packed = open_model(write_packed_folder(tmp_path / "packed", config, entries, PACKINGS[method]))
    limits = StepLimits(16, 4, 64)
    with running(shared_daemon.address, plain, limits) as alone:
        lines = alone.run(lambda rig: rig.lines([(12, 2, NUCLEUS), (2, 2, GREEDY)]))
    first, second = Seat(0, 0, 3, (7, 1)), Seat(1, 1, 0, (5,))
    steps = [
        MixedStep((*((first, at) for at in range(10, -1, -1)), (second, 0))),
        MixedStep(((second, 1), (first, 11))),
        MixedStep(((first, 12), (second, 2))),
    ]
    with running(shared_daemon.address, packed, limits) as together:
        together.mix(lines, steps)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(SHARED_KEYS, id="64 wide, 3 a key"),
        pytest.param(WINDOWS, id="windows"),
        pytest.param(FP8_WINDOWS, id="windows, keys in FP8"),
        pytest.param(EXPERTS, id="experts"),
        pytest.param(GEMMA, id="Gemma 3"),
        pytest.param(GEMMA_IN_PARTS, id="Gemma 3, sums in parts"),
        pytest.param(HEAD_NORMS, id="128 wide, norms of heads", marks=pytest.mark.slow),
    ],
)
def test_other_layers_have_the_bits_that_they_have_alone(shared_daemon: Daemon, config: ModelConfig) -> None:
    try_model(shared_daemon, config)


@pytest.fixture(scope="module")
def large(shared_daemon: Daemon) -> Iterator[RunningRig]:
    with running(shared_daemon.address, RandomCheckpoint(TINY, 1), StepLimits(128, TABLES, 160)) as rig:
        yield rig


@pytest.mark.exhaustive
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_rows_have_their_bits_in_tiles_of_64_rows(large: RunningRig, lines: list[Line], data: st.DataObject) -> None:
    large.mix(lines, data.draw(schedules(lines, TABLES, 64, 64)))


@pytest.mark.exhaustive
def test_rows_have_their_bits_in_tiles_of_128_rows(large: RunningRig, lines: list[Line]) -> None:
    long = Seat(len(SHAPES), 0, 0, tuple(range(9)))
    other = Seat(1, 1, 1, (3, 0))
    rows = [*((long, at) for at in range(107)), *((other, at) for at in range(21))]
    large.mix(lines, [MixedStep(tuple(rows)), *(MixedStep(((long, at),)) for at in range(107, 131))])
