"""GGUF files of test models, in every quantisation that the decode engine reads.

The layouts are GGML's (ggml-quants.c), which the gguf library can read. The library quantises blocks of 32 values.
Superblocks of 256 values are quantised here in a simple way: each group by its own smallest and largest value.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from gpulease.client.decode.model_config import Family, LinearScaling, ModelConfig, RopeScaling
from helpers.decode.made_models import F32
from helpers.decode.reference import frequencies
from helpers.made_models import stacked

Bytes = npt.NDArray[np.uint8]

ARCHITECTURES = {
    Family.LLAMA: gguf.MODEL_ARCH.LLAMA,
    Family.QWEN2: gguf.MODEL_ARCH.QWEN2,
    Family.QWEN3: gguf.MODEL_ARCH.QWEN3,
    Family.QWEN3_MOE: gguf.MODEL_ARCH.QWEN3MOE,
    Family.GEMMA3: gguf.MODEL_ARCH.GEMMA3,
}
SUPERBLOCK = 256


def _nearest(values: F32, lowest: int, highest: int) -> npt.NDArray[np.int32]:
    return np.clip(np.rint(values), lowest, highest).astype(np.int32)


def _over(values: F32, divisors: F32) -> F32:
    quotients: F32 = np.divide(
        values, divisors, out=np.zeros_like(values), where=np.broadcast_to(divisors != 0, values.shape)
    )
    return quotients


def quantise_q4_k(values: F32) -> Bytes:
    """Return superblocks of 144 bytes. The rows' length must be a multiple of 256.

    Each superblock has d and dmin (f16), eight 6-bit scales and minima, and 4-bit steps. A value is d scale step - dmin
    minimum.
    """
    groups = values.reshape(-1, 8, 32)
    least = np.minimum(groups.min(-1), 0)
    scales, minima = (groups.max(-1) - least) / np.float32(15), -least
    d = (scales.max(-1, keepdims=True) / 63).astype(np.float16)
    dmin = (minima.max(-1, keepdims=True) / 63).astype(np.float16)
    scale = _nearest(_over(scales, d.astype(np.float32)), 0, 63)
    minimum = _nearest(_over(minima, dmin.astype(np.float32)), 0, 63)
    shift = (dmin.astype(np.float32) * minimum)[..., None]
    steps = _nearest(_over(groups + shift, (d.astype(np.float32) * scale)[..., None]), 0, 15)
    low, high = slice(0, 4), slice(4, 8)
    packed = [
        d.view(np.uint8),
        dmin.view(np.uint8),
        scale[:, low] | scale[:, high] >> 4 << 6,
        minimum[:, low] | minimum[:, high] >> 4 << 6,
        scale[:, high] & 15 | (minimum[:, high] & 15) << 4,
        (steps[:, 0::2] | steps[:, 1::2] << 4).reshape(-1, 128),
    ]
    return np.concatenate([part.astype(np.uint8) for part in packed], 1).reshape(*values.shape[:-1], -1)


def quantise_q6_k(values: F32) -> Bytes:
    """Return superblocks of 210 bytes. The rows' length must be a multiple of 256.

    Each superblock has 6-bit steps around 32, sixteen signed scales, and d (f16). A value is d scale (step - 32).
    """
    groups = values.reshape(-1, 16, 16)
    furthest = np.take_along_axis(groups, np.abs(groups).argmax(-1, keepdims=True), -1)[..., 0]
    scales = furthest / np.float32(-32)
    d = (np.abs(scales).max(-1, keepdims=True) / 127).astype(np.float16)
    scale = _nearest(_over(scales, d.astype(np.float32)), -128, 127)
    steps = _nearest(_over(groups, (d.astype(np.float32) * scale)[..., None]), -32, 31) + 32
    # Each half has four runs of 32 steps. The low four bits of runs 0 and 1 share bytes with those of runs 2 and 3; the
    # high two bits of all four runs follow.
    runs = steps.reshape(-1, 2, 4, 32)
    packed = [
        (runs[:, :, :2] & 15 | (runs[:, :, 2:] & 15) << 4).reshape(-1, 128),
        (runs >> 4 << np.array([0, 2, 4, 6])[:, None]).sum(2).reshape(-1, 64),
        scale.astype(np.int8).view(np.uint8),
        d.view(np.uint8),
    ]
    return np.concatenate([part.astype(np.uint8) for part in packed], 1).reshape(*values.shape[:-1], -1)


OWN: Mapping[Type, Callable[[F32], Bytes]] = {Type.Q4_K: quantise_q4_k, Type.Q6_K: quantise_q6_k}


def quantise(values: F32, kind: Type) -> npt.NDArray[np.generic]:
    """Return `values` as a GGUF file stores them: F32, F16, or bytes."""
    if kind is Type.F32:
        return values
    if kind in OWN:
        return OWN[kind](values)
    quantised: npt.NDArray[np.generic] = gguf.quantize(values, kind)
    return quantised


def kept(values: F32, kind: Type) -> F32:
    """Return the values, in f32, that a reader gets from a matrix that is stored as `kind`."""
    values = np.ascontiguousarray(gguf.dequantize(quantise(values, kind), kind), np.float32)
    return values


def kept_tensors(tensors: Mapping[str, F32], kind: Type) -> dict[str, F32]:
    """Return a model's tensors as a reader gets them from a file of `write_gguf`.

    Matrices were stored as `kind`, the other tensors as f32.
    """
    return {
        name: kept(tensor, kind) if tensor.ndim == 2 and not name.endswith("mlp.gate.weight") else tensor
        for name, tensor in tensors.items()
    }


def _paired(tensor: F32, heads: int) -> F32:
    """Return the rows of each head with its two halves interleaved.

    llama.cpp rotates neighbouring rows of Llama's q and k.
    """
    halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, F32],
    kind: Type = Type.F32,
    tokenizer: Path | None = None,
) -> None:
    """Write a model's tensors as llama.cpp's converter does, with matrices stored as `kind`.

    Args:
        path: The file to write.
        config: The model's shape.
        tensors: The model's tensors, by their Hugging Face names.
        kind: The type in which matrices are stored. Norms and biases are always f32.
        tokenizer: The model's tokenizer.json, a byte-level BPE; without one, the file has made-up tokens.
    """
    architecture = ARCHITECTURES[config.family]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_shape(writer, config)
    _add_tokens(writer, config, tokenizer)
    names = gguf.get_tensor_name_map(architecture, config.layers)
    if isinstance(config.rope_scaling, RopeScaling):
        plain = config.rope_theta ** (-np.arange(0, config.head_width, 2) / config.head_width)
        writer.add_tensor("rope_freqs.weight", (plain / frequencies(config)).astype(np.float32))
    for name, tensor in stacked(tensors).items():
        stem, _, ending = name.rpartition(".")
        if config.family is Family.LLAMA and stem.endswith(("q_proj", "k_proj")):
            tensor = _paired(tensor, config.heads if stem.endswith("q_proj") else config.key_heads)
        if config.family is Family.GEMMA3 and stem.endswith("norm"):
            # Add 1 as llama.cpp's converter does (Gemma3Model.norm_shift).
            tensor = tensor + np.float32(1)
        told = f"{names.get_name(stem)}.{ending}"
        # Like llama.cpp's converter, store the router in f32, and also vectors.
        if tensor.ndim > 1 and not stem.endswith("mlp.gate"):
            writer.add_tensor(told, quantise(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(told, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_vocab_size(config.vocabulary)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.inner_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.key_heads)
    writer.add_key_length(config.head_width)
    writer.add_value_length(config.head_width)
    writer.add_rope_dimension_count(config.head_width)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    if config.family is Family.GEMMA3:
        writer.add_sliding_window(next(window for window in config.windows if window is not None))
        writer.add_sliding_window_pattern(config.windows.index(None) + 1)
        if config.local_rope_theta is not None:
            writer.add_rope_freq_base_swa(config.local_rope_theta)
        if isinstance(config.rope_scaling, LinearScaling):
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(config.rope_scaling.factor)
    if config.experts is not None:
        writer.add_expert_count(config.experts.count)
        writer.add_expert_used_count(config.experts.chosen)
        writer.add_expert_feed_forward_length(config.experts.width)


def _add_tokens(writer: gguf.GGUFWriter, config: ModelConfig, tokenizer: Path | None) -> None:
    tokens, merges = [f"<{number}>" for number in range(config.vocabulary)], [("<", "0")]
    if tokenizer is not None:
        model = json.loads(tokenizer.read_text())["model"]
        tokens, merges = sorted(model["vocab"], key=model["vocab"].__getitem__), model["merges"]
    kinds = [
        gguf.TokenType.CONTROL if token in config.end_tokens else gguf.TokenType.NORMAL for token in range(len(tokens))
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_add_bos_token(config.begin_token is not None)
    if config.begin_token is not None:
        writer.add_bos_token_id(config.begin_token)
    writer.add_eos_token_id(config.end_tokens[0])
