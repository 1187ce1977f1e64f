"""The GGUF files that tests write: the library reads back what was written, up to each type's rounding."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.decode.gguf_files import SUPERBLOCK, kept, kept_tensors, quantise, write_gguf
from helpers.decode.made_models import F32, SMALL_LLAMA, SMALL_MODELS, random_tensors

STEPS = {Type.F16: 2048, Type.BF16: 256, Type.Q8_0: 254, Type.Q4_0: 15, Type.Q4_1: 15, Type.Q5_0: 31}
"""Least number of steps between the smallest and the largest value of a block."""


def values_of(seed: int, rows: int = 3, scale: float = 1.0) -> F32:
    return (np.random.default_rng(seed).standard_normal((rows, 2 * SUPERBLOCK)) * scale).astype(np.float32)


@pytest.mark.parametrize("kind", STEPS, ids=lambda kind: kind.name)
def test_the_library_s_kinds_are_near(kind: Type) -> None:
    values = values_of(0)
    assert np.abs(kept(values, kind) - values).max() < 2 * np.abs(values).max() / STEPS[kind]


@pytest.mark.parametrize(("kind", "steps"), [(Type.Q4_K, 15), (Type.Q6_K, 62)], ids=["Q4_K", "Q6_K"])
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-3, 1.0, 30.0]))
def test_superblocks_are_near(kind: Type, steps: int, seed: int, scale: float) -> None:
    values = values_of(seed, scale=scale)
    # Half a step, and the error of scales of six and eight bits: at most two steps of the largest group.
    assert np.abs(kept(values, kind) - values).max() < 2 * np.abs(values).max() * 2 / steps


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q6_K], ids=lambda kind: kind.name)
def test_superblocks_keep_what_they_can_tell(kind: Type) -> None:
    values = kept(values_of(1), kind)
    np.testing.assert_allclose(kept(values, kind), values, atol=2e-3 * np.abs(values).max())


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q6_K], ids=lambda kind: kind.name)
def test_zeros_stay_zeros(kind: Type) -> None:
    zeros = np.zeros((2, SUPERBLOCK), np.float32)
    assert (kept(zeros, kind) == 0).all()


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q6_K], ids=lambda kind: kind.name)
def test_each_group_has_its_own_scale(kind: Type) -> None:
    """Groups of very different sizes in one superblock: a mix-up of scales, minima or steps is far off."""
    values = values_of(2) * np.repeat(np.linspace(0.2, 1, 16), 32).astype(np.float32)
    assert np.abs(kept(values, kind) - values).mean() < 0.08


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_file_has_every_tensor_and_the_shape(name: str, tmp_path: Path) -> None:
    config = SMALL_MODELS[name]
    tensors = random_tensors(config)
    write_gguf(tmp_path / "made.gguf", config, tensors, Type.Q4_K)
    reader = gguf.GGUFReader(tmp_path / "made.gguf")
    extra = 1 if config.rope_scaling else 0
    assert len(reader.tensors) == len(tensors) + extra
    assert reader.fields[f"{config.family}.attention.key_length"].contents() == config.head_width
    kinds = {tensor.tensor_type for tensor in reader.tensors}
    assert kinds == {Type.F32, Type.Q4_K}
    read = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    back = kept_tensors(tensors, Type.Q4_K)
    np.testing.assert_array_equal(read["blk.1.ffn_down.weight"], back["model.layers.1.mlp.down_proj.weight"])
    np.testing.assert_array_equal(read["output_norm.weight"], back["model.norm.weight"])


def test_llama_s_heads_are_written_in_pairs(tmp_path: Path) -> None:
    tensors = random_tensors(SMALL_LLAMA)
    write_gguf(tmp_path / "made.gguf", SMALL_LLAMA, tensors)
    read = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "made.gguf").tensors}
    rows = tensors["model.layers.0.self_attn.k_proj.weight"]
    half = SMALL_LLAMA.head_width // 2
    np.testing.assert_array_equal(read["blk.0.attn_k.weight"][:4], rows[[0, half, 1, half + 1]])
    np.testing.assert_array_equal(read["blk.0.attn_v.weight"], tensors["model.layers.0.self_attn.v_proj.weight"])


def test_f32_is_kept_as_it_is() -> None:
    values = values_of(3)
    assert (quantise(values, Type.F32) == values).all()
