import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpulease.client.decode.checked_file import Members
from gpulease.client.decode.checkpoint.hugging_face_config import hugging_face_config
from gpulease.client.decode.checkpoint.rotary import (
    Floats,
    frequencies_of,
    long_attention_factor,
    rotary_tables,
    rotation_of,
    yarn_attention_factor,
)
from gpulease.client.decode.model_config import LinearScaling, LongScaling, ModelConfig, RopeScaling, YarnScaling
from helpers.made_models import LLAMA, config_json

STRETCHED = replace(LLAMA, head_width=64, rope_theta=500_000.0, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192))


YARN = replace(STRETCHED, rope_scaling=YarnScaling(4.0, 32.0, 1.0, 4096, 1.25))
LONG = replace(LLAMA, rope_scaling=LongScaling((1.5,) * 16, tuple(map(float, range(2, 18))), 64, 1.25))


def divisors(config: ModelConfig, positions: int = 128) -> Floats:
    return rotation_of(config, positions).divisors


def tables(config: ModelConfig, begin: int, end: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return rotary_tables(config, rotation_of(config, 128), begin, end)


def transformers_rule(frequency: float, scaling: RopeScaling) -> float:
    """Compute one frequency by `_compute_llama3_parameters` of transformers, line by line."""
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_context / scaling.high_frequency_factor:
        return frequency
    if wavelength > scaling.original_context / scaling.low_frequency_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_context / wavelength - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def test_llama_3_stretches_as_in_transformers() -> None:
    frequencies = [500_000.0 ** -(i / 64) for i in range(0, 64, 2)]
    assert isinstance(STRETCHED.rope_scaling, RopeScaling)
    wanted = [transformers_rule(f, STRETCHED.rope_scaling) for f in frequencies]
    found = divisors(STRETCHED)
    np.testing.assert_allclose(frequencies / found, wanted, rtol=1e-12)
    assert found[0] == 1
    assert found[-1] == 32
    assert any(1 < d < 32 for d in found)


def test_a_linear_scaling_divides_every_frequency() -> None:
    linear = replace(LLAMA, rope_scaling=LinearScaling(4.0))
    assert (divisors(linear) == 4).all()
    # A factor of 4 has the effect of a quarter of each position.
    scaled, plain = tables(linear, 0, 41), tables(LLAMA, 0, 11)
    for table, quarter in zip(scaled, plain, strict=True):
        np.testing.assert_allclose(table[::4], quarter, atol=1e-7)


def test_nothing_is_stretched_without_saying_so() -> None:
    assert (divisors(LLAMA) == 1).all()


def test_tables_are_the_nearest_f32_of_each_cosine_and_sine() -> None:
    cosines, sines = tables(LLAMA, 100, 103)
    assert cosines.shape == sines.shape == (3, 16)
    for position in range(3):
        for i in range(16):
            angle = (100 + position) * 10_000.0 ** -(2 * i / 32)
            assert cosines[position, i] == np.float32(math.cos(angle))
            assert sines[position, i] == np.float32(math.sin(angle))


def test_tables_of_parts_are_parts_of_the_table() -> None:
    whole = tables(STRETCHED, 0, 50)
    parts = [tables(STRETCHED, at, at + 10) for at in range(0, 50, 10)]
    for table, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert (np.concatenate(pieces) == table).all()


@pytest.mark.parametrize("is_truncated", [True, False])
def test_yarn_s_ramp_is_as_in_transformers(is_truncated: bool) -> None:
    scaling = YarnScaling(4.0, 32.0, 1.0, 4096, 1.25, is_truncated=is_truncated)
    found = divisors(replace(YARN, rope_scaling=scaling))
    low, high = (64 * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(500_000.0)) for turns in (32.0, 1.0))
    if is_truncated:
        low, high = math.floor(low), math.ceil(high)
    for pair, divisor in enumerate(found):
        ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
        np.testing.assert_allclose(1 / divisor, ramp / 4 + 1 - ramp, rtol=1e-12)
    assert found[0] == 1
    assert found[-1] == 4


def test_yarn_s_ramp_has_a_slope_where_its_ends_meet() -> None:
    """No pair makes a whole turn within the original context, so both ends of the ramp are at the first pair."""
    assert divisors(replace(YARN, rope_scaling=YarnScaling(4.0, 32.0, 1.0, 6, 1.0))).tolist() == [1.0, *[4.0] * 31]


def test_longrope_s_divisors_are_those_of_the_engine_s_positions() -> None:
    assert divisors(LONG, 64).tolist() == [1.5] * 16
    assert divisors(LONG, 65).tolist() == [float(divisor) for divisor in range(2, 18)]


@pytest.mark.parametrize("config", [YARN, LONG])
def test_an_attention_factor_multiplies_both_tables(config: ModelConfig) -> None:
    rotation = rotation_of(config, 128)
    assert rotation.attention_factor == 1.25
    plain = rotary_tables(config, replace(rotation, attention_factor=1.0), 0, 9)
    for table, without in zip(rotary_tables(config, rotation, 0, 9), plain, strict=True):
        np.testing.assert_allclose(table, 1.25 * without, rtol=2.5e-7)


def test_attention_factors_are_those_that_transformers_infers() -> None:
    assert math.isclose(yarn_attention_factor(4.0, 0.0, 0.0), 0.1 * math.log(4) + 1)
    assert yarn_attention_factor(4.0, 0.707, 0.0) == yarn_attention_factor(4.0, 0.0, 0.0)
    assert math.isclose(yarn_attention_factor(40.0, 1.0, 0.5), (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1))
    assert math.isclose(long_attention_factor(32.0, 4096), math.sqrt(1 + math.log(32) / math.log(4096)))
    assert yarn_attention_factor(1.0, 0.0, 0.0) == long_attention_factor(0.5, 4096) == 1


TOLD: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, not truncated": {
        "factor": 8.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.5,
        "truncate": False,
        "original_max_position_embeddings": 512,
    },
    "longrope": {
        "short_factor": [1.0 + place / 16 for place in range(16)],
        "long_factor": [2.0 + place for place in range(16)],
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("positions", [64, 128])
def test_transformers_turns_alike(name: str, positions: int) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    pytest.importorskip("torch")
    told = {"rope_type": name.partition(",")[0], "rope_theta": 5e5, **TOLD[name]}
    config = hugging_face_config(Members(config_json(LLAMA) | {"rope_parameters": told}, "config.json"), None, None)
    rotation = rotation_of(config, positions)
    its = transformers.LlamaConfig(**config_json(LLAMA) | {"rope_parameters": told})
    rule = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[told["rope_type"]]
    frequencies, factor = rule(its, device="cpu", seq_len=positions)
    np.testing.assert_allclose(frequencies_of(config) / rotation.divisors, frequencies.numpy(), rtol=1e-6)
    assert math.isclose(rotation.attention_factor, factor)


def test_values_that_stay_are_turned_by_nothing() -> None:
    config = replace(LONG, turned_width=16, rope_scaling=LongScaling((2.0,) * 8, (2.0,) * 8, 64, 1.25))
    cosines, sines = tables(config, 5, 9)
    assert (cosines[:, 8:] == 1).all()
    assert not sines[:, 8:].any()
    whole = tables(replace(LLAMA, head_width=16), 0, 9)[1]
    np.testing.assert_allclose(sines[1::2, :8], 1.25 * whole[3:5], atol=1e-6)
