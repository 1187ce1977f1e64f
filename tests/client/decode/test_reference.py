"""The numpy reference: causal, exact to the precision it runs in, and different where a family differs."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.client.decode.model_config import RopeScaling
from helpers.decode.agreement import compare
from helpers.decode.made_models import FOLDER_MODELS, SMALL_LLAMA, SMALL_MODELS, random_tensors
from helpers.decode.reference import Reference, frequencies

MAX_F32_ERROR = 1e-4
"""Bound for logits near one, after sums of 512 products each: measured 1e-6 to 4e-6."""

PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, SMALL_LLAMA.vocabulary, 24)]


made = cache(random_tensors)


@pytest.mark.parametrize("name", FOLDER_MODELS)
def test_f32_is_near_f64(name: str) -> None:
    config = FOLDER_MODELS[name]
    tensors = made(config)
    found = compare(Reference(config, tensors, np.float64).logits(PROMPT), Reference(config, tensors).logits(PROMPT))
    assert found.worst_error < MAX_F32_ERROR


@pytest.mark.parametrize("name", FOLDER_MODELS)
def test_later_tokens_change_no_earlier_logits(name: str) -> None:
    config = FOLDER_MODELS[name]
    model = Reference(config, made(config), np.float64)
    np.testing.assert_allclose(model.logits(PROMPT)[:10], model.logits(PROMPT[:10]), atol=1e-12)


def test_a_token_s_place_matters() -> None:
    model = Reference(SMALL_LLAMA, made(SMALL_LLAMA))
    one, other = model.logits([1, 2, 3])[-1], model.logits([2, 1, 3])[-1]
    assert np.abs(one - other).max() > 0.01


@pytest.mark.parametrize("name", ["q_proj.bias", "k_proj.bias", "v_proj.bias", "q_norm.weight", "k_norm.weight"])
def test_biases_and_head_norms_matter(name: str) -> None:
    config = SMALL_MODELS["qwen2" if name.endswith("bias") else "qwen3"]
    tensors = made(config)
    changed = {key: -tensor if key.endswith(name) else tensor for key, tensor in tensors.items()}
    one, other = Reference(config, tensors).logits(PROMPT[:8]), Reference(config, changed).logits(PROMPT[:8])
    assert np.abs(one - other).max() > 0.01


def test_a_window_hides_what_is_before_it() -> None:
    """Through two layers with windows of 20, a row's logits depend only on the last 39 tokens."""
    config = FOLDER_MODELS["mistral"]
    model = Reference(config, made(config))
    one, other = [*PROMPT, *PROMPT], [9, *PROMPT[1:], *PROMPT]
    difference = np.abs(model.logits(one) - model.logits(other)).max(-1)
    assert (difference[:39] > 0).all()
    assert not difference[39:].any()


def test_greedy_is_the_argmax_of_each_prefix() -> None:
    model = Reference(SMALL_LLAMA, made(SMALL_LLAMA))
    tokens = [*PROMPT[:5], *model.greedy([PROMPT[:5]], 6)[0]]
    assert model.logits(tokens).argmax(-1)[4:-1].tolist() == tokens[5:]


SCALINGS = st.builds(RopeScaling, st.floats(1, 32), st.just(1.0), st.floats(1.5, 8), st.sampled_from([64, 256, 8192]))


@settings(max_examples=30)
@given(SCALINGS)
def test_stretched_wavelengths_lie_between_the_plain_ones_and_all_stretched(scaling: RopeScaling) -> None:
    plain = frequencies(SMALL_LLAMA)
    stretched = frequencies(replace(SMALL_LLAMA, rope_scaling=scaling))
    assert ((stretched <= plain * (1 + 1e-12)) & (stretched >= plain / scaling.factor * (1 - 1e-12))).all()
    turns = scaling.original_context * plain / (2 * np.pi)
    assert (stretched[turns > scaling.high_frequency_factor] == plain[turns > scaling.high_frequency_factor]).all()
    slow = turns < scaling.low_frequency_factor
    np.testing.assert_allclose(stretched[slow], plain[slow] / scaling.factor)
