"""Rotary embeddings: frequencies, how Llama 3 stretches them, and the tables of cosines and sines."""

import math

import numpy as np
from numpy.typing import NDArray

from gpulease.client.serve.decode.model_config import ModelConfig


def divisors_of(config: ModelConfig) -> NDArray[np.float64]:
    """Divisors: what the config divides each of the head_width / 2 frequencies by.

    Llama 3's rule, as in transformers' _compute_llama3_parameters: wavelengths over original_context /
    low_frequency_factor are stretched by the factor, those under original_context / high_frequency_factor are not,
    and those between in part.
    """
    scaling = config.rope_scaling
    frequencies = frequencies_of(config)
    if scaling is None:
        return np.ones_like(frequencies)
    turns = scaling.original_context * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - share) / scaling.factor + share))


def frequencies_of(config: ModelConfig) -> NDArray[np.float64]:
    """The head_width / 2 frequencies, in radians a position, before any stretching."""
    return np.asarray(config.rope_theta ** -(np.arange(0, config.head_width, 2) / config.head_width))


def rotary_tables(
    config: ModelConfig, divisors: NDArray[np.float64], begin: int, end: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines [end - begin, head_width / 2] of positions [begin, end), computed in f64."""
    angles = np.outer(np.arange(begin, end), frequencies_of(config) / divisors)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
