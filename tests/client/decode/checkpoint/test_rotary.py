import math
from dataclasses import replace

import numpy as np

from gpulease.client.decode.checkpoint.rotary import divisors_of, rotary_tables
from gpulease.client.decode.model_config import LinearScaling, RopeScaling
from helpers.made_models import LLAMA

STRETCHED = replace(LLAMA, head_width=64, rope_theta=500_000.0, rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192))


def transformers_rule(frequency: float, scaling: RopeScaling) -> float:
    """_compute_llama3_parameters of transformers, line by line, for one frequency."""
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
    divisors = divisors_of(STRETCHED)
    np.testing.assert_allclose(frequencies / divisors, wanted, rtol=1e-12)
    assert divisors[0] == 1
    assert divisors[-1] == 32
    assert any(1 < d < 32 for d in divisors)


def test_a_linear_scaling_divides_every_frequency() -> None:
    linear = replace(LLAMA, rope_scaling=LinearScaling(4.0))
    assert (divisors_of(linear) == 4).all()
    # As if each position were a quarter of it.
    scaled, plain = rotary_tables(linear, divisors_of(linear), 0, 41), rotary_tables(LLAMA, divisors_of(LLAMA), 0, 11)
    for table, quarter in zip(scaled, plain, strict=True):
        np.testing.assert_allclose(table[::4], quarter, atol=1e-7)


def test_nothing_is_stretched_without_saying_so() -> None:
    assert (divisors_of(LLAMA) == 1).all()


def test_tables_are_the_nearest_f32_of_each_cosine_and_sine() -> None:
    cosines, sines = rotary_tables(LLAMA, divisors_of(LLAMA), 100, 103)
    assert cosines.shape == sines.shape == (3, 16)
    for position in range(3):
        for i in range(16):
            angle = (100 + position) * 10_000.0 ** -(2 * i / 32)
            assert cosines[position, i] == np.float32(math.cos(angle))
            assert sines[position, i] == np.float32(math.sin(angle))


def test_tables_of_parts_are_parts_of_the_table() -> None:
    whole = rotary_tables(STRETCHED, divisors_of(STRETCHED), 0, 50)
    parts = [rotary_tables(STRETCHED, divisors_of(STRETCHED), at, at + 10) for at in range(0, 50, 10)]
    for table, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert (np.concatenate(pieces) == table).all()
