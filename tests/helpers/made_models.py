"""Tiny models with random weights, written as Hugging Face folders and as GGUF files."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

from gpulease.client.decode.checkpoint.gguf_file import GEMMA_LAYER, LAYER, TOP
from gpulease.client.decode.checkpoint.gguf_keys import GGUF_FAMILIES
from gpulease.client.decode.checkpoint.model_tensors import model_tensors
from gpulease.client.decode.checkpoint.tensors import BLOCKS, TensorType, rounded_to_bf16
from gpulease.client.decode.model_config import Experts, Family, Gate, LinearScaling, ModelConfig
from helpers.safetensors_head import safetensors_head

LLAMA: Final = ModelConfig(
    family=Family.LLAMA,
    layers=2,
    width=256,
    heads=8,
    key_heads=2,
    head_width=32,
    inner_width=512,
    vocabulary=64,
    context=128,
    rope_theta=10_000.0,
    norm_epsilon=2**-17,
    is_tied=False,
)
QWEN2: Final = replace(LLAMA, family=Family.QWEN2, is_tied=True, has_bias=True)
QWEN3: Final = replace(LLAMA, family=Family.QWEN3, head_width=64, has_head_norm=True)
PHI3: Final = replace(LLAMA, family=Family.PHI3)
MODELS: Final = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
GEMMA3: Final = replace(
    LLAMA,
    family=Family.GEMMA3,
    is_tied=True,
    has_head_norm=True,
    end_tokens=(1,),
    windows=(24, None),
    gate=Gate.GELU,
    has_outer_norms=True,
    embedding_scale=16.0,
    score_divisor=24.0,
    local_rope_theta=5_000.0,
)
QWEN3_MOE: Final = replace(
    LLAMA,
    family=Family.QWEN3_MOE,
    layers=3,
    head_width=64,
    has_head_norm=True,
    experts=Experts(count=6, chosen=2, width=64, is_normalised=True, dense_layers=(0, 2)),
)
ALL_EXPERTS: Final = replace(QWEN3_MOE, experts=Experts(count=6, chosen=2, width=64, is_normalised=True))
"""A model with experts in every layer, as in GGUF files."""

FOLDER_MODELS: Final = MODELS | {"phi3": PHI3, "gemma3": GEMMA3, "qwen3_moe": QWEN3_MOE}
"""Models that folders may contain: those of MODELS, and some that GGUF files may not contain in this form."""

Weights = dict[str, NDArray[np.float32]]


def random_weights(config: ModelConfig, seed: int = 0) -> Weights:
    """Return every tensor of a model by its Hugging Face name, with values that bf16 can represent exactly."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in model_tensors(config):
        values = rng.standard_normal(shape, np.float32)
        made[name] = (rounded_to_bf16(values).astype(np.uint32) << 16).view(np.float32)
    return made


# --- Folders. ---


def fused(config: ModelConfig, weights: Mapping[str, NDArray[np.float32]]) -> Weights:
    """Return the tensors as in Phi-3's files: q, k and v as one, gate and up as one. Other families' are unchanged."""
    if config.family is not Family.PHI3:
        return dict(weights)
    made: Weights = {}
    for name, values in weights.items():
        for ours, theirs in (("qkv", "qkv"), (("gate", "up"), "gate_up")):
            place = next((one for one in ours if f".{one}_proj.weight" in name), None)
            if place is not None:
                told = name.replace(f".{place}_proj.", f".{theirs}_proj.")
                made[told] = np.concatenate([made[told], values]) if told in made else values
                break
        else:
            made[name] = values
    return made


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the model's shape with the keys of config.json."""
    kinds = {
        Family.LLAMA: "Llama",
        Family.QWEN2: "Qwen2",
        Family.QWEN3: "Qwen3",
        Family.QWEN3_MOE: "Qwen3Moe",
        Family.PHI3: "Phi3",
        Family.GEMMA3: "Gemma3",
    }
    own: dict[str, Any] = {"model_type": str(config.family), "hidden_act": "silu"}
    if (experts := config.experts) is not None:
        own |= {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.chosen,
            "moe_intermediate_size": experts.width,
            "norm_topk_prob": experts.is_normalised,
            "decoder_sparse_step": 2 if experts.dense_layers else 1,
            "mlp_only_layers": [],
        }
    if config.family is Family.GEMMA3:
        own = {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": int(config.score_divisor or 0),
            "rope_local_base_freq": config.local_rope_theta,
            "sliding_window": next(window for window in config.windows if window is not None),
            "layer_types": [f"{'full' if window is None else 'sliding'}_attention" for window in config.windows],
        }
    return own | {
        "architectures": [f"{kinds[config.family]}ForCausalLM"],
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.inner_width,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.is_tied,
    }


def encoded(values: NDArray[np.float32], kind: str) -> bytes:
    """Return the bytes of values in one of the types of safetensors."""
    if kind == "BF16":
        return rounded_to_bf16(values).tobytes()
    return values.astype({"F16": np.float16, "F32": np.float32}[kind]).tobytes()


def write_safetensors(path: Path, weights: Mapping[str, NDArray[np.float32]], kind: str = "BF16") -> None:
    """Write a file according to the format's specification: a length, a JSON header, and the values."""
    head = safetensors_head({name: (kind, values.shape) for name, values in weights.items()})
    path.write_bytes(head + b"".join(encoded(values, kind) for values in weights.values()))


def write_folder(
    folder: Path,
    config: ModelConfig,
    weights: Weights,
    *,
    kind: str = "BF16",
    files: int = 1,
    says: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model as transformers does. `says` changes members of config.json; None removes a member."""
    folder.mkdir(exist_ok=True)
    weights = fused(config, weights)
    said = config_json(config) | dict(says or {})
    (folder / "config.json").write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    if files == 1:
        write_safetensors(folder / "model.safetensors", weights, kind)
        return folder
    places = {name: f"model-{number % files + 1:05}-of-{files:05}.safetensors" for number, name in enumerate(weights)}
    for file in set(places.values()):
        write_safetensors(folder / file, {name: weights[name] for name in weights if places[name] == file}, kind)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


# --- GGUF files. ---


def gguf_name(name: str, *, is_gemma: bool = False) -> str:
    """Return GGUF's name of a tensor with this Hugging Face name."""
    for theirs, ours in TOP.items():
        if ours == name:
            return theirs
    if ".mlp.experts." in name:
        _, _, layer, _, _, part, _ = name.split(".")
        return f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.weight"
    _, _, layer, part = name.split(".", 3)
    part, _, end = part.rpartition(".")
    (theirs,) = [theirs for theirs, ours in (GEMMA_LAYER if is_gemma else LAYER).items() if ours == part]
    return f"blk.{layer}.{theirs}.{end}"


def permuted(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Return a Llama's q or k in the order in which llama.cpp's converter writes it (LlamaModel.permute)."""
    rows, columns = values.shape
    return values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def random_blocks(kind: TensorType, rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return rows of a quantised type: all bits are random, except the scales, which are small numbers.

    It is for types to which the gguf library can't quantise.
    """
    rng = np.random.default_rng(seed)
    values, nbytes = BLOCKS[kind]
    blocks = rng.integers(0, 256, (rows, columns // values, nbytes), np.uint8)
    scales = {TensorType.Q4_K: (0, 2), TensorType.Q6_K: (208,), TensorType.Q4_1: (0, 2)}.get(kind, (0,))
    for at in scales:
        numbers = rng.uniform(-0.1, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = numbers[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def stacked(weights: Mapping[str, NDArray[np.float32]]) -> Weights:
    """Return the tensors, with those of a layer's experts stacked in one, named without the expert's number."""
    made: dict[str, list[NDArray[np.float32]]] = {}
    for name, values in weights.items():
        made.setdefault(re.sub(r"experts\.\d+", "experts", name), []).append(values)
    return {name: np.stack(values) if ".experts." in name else values[0] for name, values in made.items()}


def architecture(config: ModelConfig) -> str:
    """Return the name of a model's architecture in GGUF files."""
    return next(name for name, family in GGUF_FAMILIES.items() if family is config.family)


def gguf_metadata(config: ModelConfig) -> dict[str, Any]:
    """Return the model's shape with the keys of a GGUF file."""
    at = f"{architecture(config)}."
    more: dict[str, Any] = {}
    if config.experts is not None:
        more = {
            f"{at}expert_count": config.experts.count,
            f"{at}expert_used_count": config.experts.chosen,
            f"{at}expert_feed_forward_length": config.experts.width,
        }
    if config.family is Family.GEMMA3:
        more = {
            f"{at}attention.sliding_window": next(window for window in config.windows if window is not None),
            f"{at}attention.sliding_window_pattern": config.windows.index(None) + 1,
            f"{at}rope.freq_base_swa": config.local_rope_theta,
        }
        if isinstance(config.rope_scaling, LinearScaling):
            more |= {f"{at}rope.scaling.type": "linear", f"{at}rope.scaling.factor": config.rope_scaling.factor}
    return more | {
        f"{at}block_count": config.layers,
        f"{at}context_length": config.context,
        f"{at}embedding_length": config.width,
        f"{at}feed_forward_length": config.inner_width,
        f"{at}attention.head_count": config.heads,
        f"{at}attention.head_count_kv": config.key_heads,
        f"{at}attention.key_length": config.head_width,
        f"{at}attention.value_length": config.head_width,
        f"{at}rope.freq_base": config.rope_theta,
        f"{at}attention.layer_norm_rms_epsilon": config.norm_epsilon,
    }


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: Weights,
    *,
    kind: TensorType = TensorType.BF16,
    kinds: Mapping[str, TensorType] | None = None,
    says: Mapping[str, Any] | None = None,
    more: Iterable[tuple[str, NDArray[np.float32]]] = (),
) -> Path:
    """Write a model as llama.cpp's converter does.

    Args:
        path: The file to write.
        config: The model's shape.
        weights: Tensors by their Hugging Face names.
        kind: The type of the matrices. Vectors are F32.
        kinds: Other types for some tensors, by the ends of their names.
        says: Changes of the metadata; None removes a key.
        more: Further tensors, by their GGUF names.
    """
    writer = GGUFWriter(path, architecture(config))
    for key, value in (gguf_metadata(config) | dict(says or {})).items():
        if value is not None:
            _add(writer, key, value)
    for name, values in stacked(weights).items():
        if config.family is Family.GEMMA3 and name.endswith("norm.weight"):
            # Add 1 as llama.cpp's converter does (Gemma3Model.norm_shift).
            values = values + np.float32(1)
        its = TensorType.F32 if values.ndim == 1 else kind
        its = next((other for end, other in (kinds or {}).items() if name.endswith(end)), its)
        heads = {"q": config.heads, "k": config.key_heads}.get(name.rpartition("_proj")[0][-1:])
        if config.family is Family.LLAMA and heads and values.ndim > 1:
            values = permuted(values, heads)
        number = GGMLQuantizationType[its.name]
        if its in (TensorType.Q4_K, TensorType.Q6_K):
            data: NDArray[Any] = random_blocks(its, values.shape[0], values.shape[1], len(name))
        else:
            data = quantize(values, number)
        writer.add_tensor(gguf_name(name, is_gemma=config.family is Family.GEMMA3), data, raw_dtype=number)
    for name, values in more:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
