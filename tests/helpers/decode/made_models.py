"""Models for tests of the decode engine: the tiny trained one, and random ones of every family."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

import gpulease.client.decode
from gpulease.client.decode.model_config import (
    Experts,
    Family,
    Gate,
    LinearScaling,
    LongScaling,
    ModelConfig,
    RopeScaling,
    YarnScaling,
)
from helpers.decode.reference import shapes_of
from helpers.safetensors_head import safetensors_head

TINY_FOLDER = Path(gpulease.client.decode.__path__[0]) / "tiny"

F32 = npt.NDArray[np.float32]


def rounded_to_bf16(values: F32) -> F32:
    """Return the nearest bf16 of each value as f32; ties go to even. The values must be finite."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def bf16_tensors(path: Path) -> dict[str, F32]:
    """Return the tensors of a safetensors file that contains only bf16, as f32."""
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    tensors = {}
    for name, entry in json.loads(whole[8:begin]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", name
        first, last = entry["data_offsets"]
        words = np.frombuffer(whole[begin + first : begin + last], "<u2").astype(np.uint32)
        tensors[name] = (words << 16).view(np.float32).reshape(entry["shape"])
    return tensors


def write_bf16_tensors(path: Path, tensors: Mapping[str, F32]) -> None:
    """Write a safetensors file in bf16. The values must be exact in bf16."""
    parts = [safetensors_head({name: ("BF16", tensor.shape) for name, tensor in tensors.items()})]
    for name, tensor in tensors.items():
        words = np.ascontiguousarray(tensor).view(np.uint32)
        assert not (words & 0xFFFF).any(), name
        parts.append((words >> 16).astype("<u2").tobytes())
    path.write_bytes(b"".join(parts))


def config_of(folder: Path) -> ModelConfig:
    """Return the shape of a Llama without scaled rotary embeddings, from its config.json."""
    told = json.loads((folder / "config.json").read_text())
    return ModelConfig(
        family=Family.LLAMA,
        layers=told["num_hidden_layers"],
        width=told["hidden_size"],
        heads=told["num_attention_heads"],
        key_heads=told["num_key_value_heads"],
        head_width=told["head_dim"],
        inner_width=told["intermediate_size"],
        vocabulary=told["vocab_size"],
        context=told["max_position_embeddings"],
        rope_theta=told["rope_theta"],
        norm_epsilon=told["rms_norm_eps"],
        is_tied=told["tie_word_embeddings"],
        begin_token=told["bos_token_id"],
        end_tokens=(told["eos_token_id"],),
    )


def tiny_model() -> tuple[ModelConfig, dict[str, F32]]:
    """Return the shape and the tensors of the trained model that ships with the engine."""
    return config_of(TINY_FOLDER), bf16_tensors(TINY_FOLDER / "model.safetensors")


SMALL_LLAMA = ModelConfig(
    family=Family.LLAMA,
    layers=2,
    width=256,
    heads=4,
    key_heads=2,
    head_width=64,
    inner_width=512,
    vocabulary=320,
    context=256,
    rope_theta=10_000.0,
    norm_epsilon=1e-5,
    is_tied=True,
    end_tokens=(0,),
)
"""A Llama with rows that are whole superblocks of 256 values, as K-quants require."""

SMALL_MODELS = {
    "llama": SMALL_LLAMA,
    "llama3": replace(SMALL_LLAMA, rope_theta=500_000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64), is_tied=False),
    "qwen2": replace(SMALL_LLAMA, family=Family.QWEN2, has_bias=True, norm_epsilon=1e-6),
    "qwen3": replace(SMALL_LLAMA, family=Family.QWEN3, has_head_norm=True, head_width=128, is_tied=False),
}
"""A small shape of every family, and one with Llama 3's scaled rotary embeddings."""

GGUF_MODELS = SMALL_MODELS | {
    "qwen3_moe": replace(
        SMALL_LLAMA,
        family=Family.QWEN3_MOE,
        has_head_norm=True,
        is_tied=False,
        experts=Experts(count=9, chosen=3, width=256, is_normalised=True),
    ),
    "gemma3": replace(
        SMALL_LLAMA,
        family=Family.GEMMA3,
        layers=3,
        heads=3,
        key_heads=1,
        rope_theta=1e6,
        rope_scaling=LinearScaling(8.0),
        norm_epsilon=1e-6,
        has_head_norm=True,
        windows=(17, 17, None),
        gate=Gate.GELU,
        has_outer_norms=True,
        embedding_scale=16.0,
        score_divisor=64.0,
        local_rope_theta=20_000.0,
    ),
}
"""Shapes of every family that GGUF files may contain."""

SCALED_MODELS = {
    "linear": replace(SMALL_LLAMA, rope_scaling=LinearScaling(4.0)),
    "yarn": replace(SMALL_LLAMA, rope_scaling=YarnScaling(4.0, 8.0, 1.0, 64, 1.25, is_truncated=False)),
    "longrope": replace(
        SMALL_LLAMA,
        rope_scaling=LongScaling(
            tuple(1 + place / 64 for place in range(32)), tuple(1 + place / 4 for place in range(32)), 128, 1.125
        ),
    ),
}
"""Shapes with scaled rotary embeddings that only safetensors may have. Longrope's uses its divisors for long sequences
in engines with over 128 positions.
"""


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, F32]:
    """Return random weights, rounded to bf16.

    They keep values between layers near one. Norms and biases are not trivial.
    """
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes_of(config).items():
        values = random.standard_normal(shape)
        if "norm" in name:
            # Gemma's files contain norm weights minus 1.
            values = values / 4 + (config.family is not Family.GEMMA3)
        elif name.endswith("bias"):
            values /= 2
        else:
            values /= math.sqrt(shape[1])
        tensors[name] = rounded_to_bf16(values.astype(np.float32))
    return tensors


_HALF_WIDTH = 48
FOLDER_MODELS = SMALL_MODELS | {
    "phi3": replace(
        SMALL_LLAMA,
        family=Family.PHI3,
        width=288,
        heads=3,
        key_heads=1,
        head_width=96,
        is_tied=False,
        windows=(33, 33),
        rope_scaling=LongScaling(
            tuple(1 + place / 96 for place in range(_HALF_WIDTH)),
            tuple(1 + place / 6 for place in range(_HALF_WIDTH)),
            128,
            1.125,
        ),
    ),
    "phi3, partly turned": replace(
        SMALL_LLAMA,
        family=Family.PHI3,
        turned_width=48,
        rope_scaling=LongScaling(
            tuple(1 + place / 48 for place in range(24)), tuple(1 + place / 3 for place in range(24)), 128, 1.125
        ),
    ),
    "mistral": replace(SMALL_LLAMA, windows=(20, 20)),
    "qwen2 with windows": replace(
        SMALL_MODELS["qwen2"], width=160, heads=2, key_heads=2, head_width=80, windows=(None, 17)
    ),
    "gemma3": replace(
        SMALL_LLAMA,
        family=Family.GEMMA3,
        layers=3,
        width=288,
        heads=3,
        key_heads=1,
        head_width=96,
        inner_width=416,
        rope_theta=1e6,
        rope_scaling=LinearScaling(8.0),
        norm_epsilon=1e-6,
        has_head_norm=True,
        windows=(17, None, 17),
        gate=Gate.GELU,
        has_outer_norms=True,
        embedding_scale=17.0,
        score_divisor=80.0,
        local_rope_theta=10_000.0,
    ),
    "qwen3_moe": replace(
        SMALL_LLAMA,
        family=Family.QWEN3_MOE,
        layers=3,
        width=160,
        heads=3,
        key_heads=1,
        head_width=80,
        inner_width=224,
        has_head_norm=True,
        is_tied=False,
        experts=Experts(count=11, chosen=3, width=96, is_normalised=True, dense_layers=(1,)),
    ),
    "qwen3_moe, shares as they are": replace(
        SMALL_LLAMA,
        family=Family.QWEN3_MOE,
        layers=2,
        heads=2,
        key_heads=2,
        has_head_norm=True,
        experts=Experts(count=5, chosen=2, width=160, is_normalised=False),
    ),
    "256 wide": replace(SMALL_LLAMA, layers=1, heads=2, key_heads=1, head_width=256),
}
"""Shapes of every family and kind of attention that folders may contain. A Llama with windows is a Mistral."""
