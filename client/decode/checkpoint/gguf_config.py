"""The shape of a model from a GGUF file's metadata, read as llama.cpp reads it (load_hparams in llama-model.cpp)."""

from dataclasses import replace
from typing import Final

from gpulease.client.decode.checked_file import Members
from gpulease.client.decode.checkpoint.gguf_keys import GGUF_FAMILIES, GGUF_KEYS
from gpulease.client.decode.checkpoint.tensors import gemma_embedding_scale
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.file_keys import used_members
from gpulease.client.decode.model_config import (
    MAX_LAYERS,
    Experts,
    Family,
    Gate,
    LinearScaling,
    ModelConfig,
    check_config,
)
from gpulease.client.decode.text.gguf_special_tokens import begin_token, end_tokens
from gpulease.client.texts import quoted

DEFAULT_ROPE_THETA: Final = 10_000.0
PATTERN: Final = "attention.sliding_window_pattern"
DEFAULT_PATTERN: Final = 6
LAYERS_OF_27B: Final = 62


def gguf_config(metadata: Members, vocabulary: int, is_tied: bool) -> ModelConfig:
    """Return the shape that the metadata describes. Raises ModelRejected for a model that the engine can't compute.

    Args:
        metadata: The metadata.
        vocabulary: Rows of the embedding.
        is_tied: Whether the file has no separate weights for the head.
    """
    # The architecture comes first, because it is the prefix of the model's other keys.
    name = metadata.text("general.architecture")
    if name not in GGUF_FAMILIES:
        allowed = f"general.architecture must be one of {', '.join(GGUF_FAMILIES)}"
        raise ModelRejected(f"{metadata.where}: {allowed}, not {quoted(name)}")
    family = GGUF_FAMILIES[name]
    # From here on only keys that the table declares as used are visible.
    metadata = used_members(metadata, GGUF_KEYS[family])
    at = f"{name}."
    width, heads = metadata.whole(f"{at}embedding_length"), metadata.whole(f"{at}attention.head_count")
    if f"{at}attention.key_length" not in metadata.values and (heads < 1 or width % heads):
        raise ModelRejected(f"{metadata.where}: embedding_length {width} must be a multiple of {heads} heads")
    # The engine has one width for keys, values and rotation. A file that names other widths is refused.
    head_width = metadata.whole(f"{at}attention.key_length", width // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := metadata.whole(f"{at}{key}", head_width)) != head_width:
            raise ModelRejected(f"{metadata.where}: {at}{key} is {value}, and heads are {head_width} wide")
    inner_width, experts = metadata.whole(f"{at}feed_forward_length"), None
    if family is Family.QWEN3_MOE:
        # In llama.cpp's graph of this family, every layer has experts, whose shares add up to 1.
        chosen = metadata.whole(f"{at}expert_used_count")
        width_of_one = metadata.whole(f"{at}expert_feed_forward_length", inner_width // max(chosen, 1))
        experts = Experts(metadata.whole(f"{at}expert_count"), chosen, width_of_one, is_normalised=True)
    layers = metadata.whole(f"{at}block_count")
    config = ModelConfig(
        family=family,
        layers=layers,
        width=width,
        heads=heads,
        key_heads=metadata.whole(f"{at}attention.head_count_kv", heads),
        head_width=head_width,
        inner_width=inner_width,
        vocabulary=vocabulary,
        context=metadata.whole(f"{at}context_length"),
        rope_theta=metadata.number(f"{at}rope.freq_base", DEFAULT_ROPE_THETA),
        norm_epsilon=metadata.number(f"{at}attention.layer_norm_rms_epsilon"),
        is_tied=is_tied,
        # GGUF has no keys for these two, which follow from the family.
        has_bias=family is Family.QWEN2,
        has_head_norm=family in (Family.QWEN3, Family.QWEN3_MOE, Family.GEMMA3),
        begin_token=begin_token(metadata),
        end_tokens=end_tokens(metadata),
        experts=experts,
    )
    if family is Family.GEMMA3:
        config = _gemma_3(metadata, at, config)
    check_config(config, metadata.where)
    return config


def _gemma_3(metadata: Members, at: str, config: ModelConfig) -> ModelConfig:
    """Add the settings that only llama.cpp's Gemma 3 has."""
    window, pattern = (
        metadata.whole(f"{at}attention.sliding_window", 0),
        metadata.whole(f"{at}{PATTERN}", DEFAULT_PATTERN),
    )
    if pattern < 1:
        raise ModelRejected(f"{metadata.where}: {at}{PATTERN} must be at least 1, not {pattern}")
    windows: list[int | None] = []
    if window > 0 and 1 <= config.layers <= MAX_LAYERS:
        windows = [window if (layer + 1) % pattern else None for layer in range(config.layers)]
    # The scaling applies to the layers without a window.
    kind = metadata.text(f"{at}rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ModelRejected(f"{metadata.where}: {at}rope.scaling.type must be none or linear, not {quoted(kind)}")
    factor = metadata.number(f"{at}rope.scaling.factor", metadata.number(f"{at}rope.scale_linear", 0.0)) or 1.0
    if not factor >= 1:
        raise ModelRejected(
            f"{metadata.where}: {at}rope.scaling.factor must be at least 1, or 0 for none, not {factor}"
        )
    # These files have no key for the divisor of attention scores. Only in the 27B model does it differ from the heads'
    # width.
    is_27b = config.layers == LAYERS_OF_27B
    return replace(
        config,
        windows=tuple(windows) if any(windows) else (),
        rope_scaling=LinearScaling(factor) if kind == "linear" and factor != 1 else None,
        local_rope_theta=metadata.number(f"{at}rope.freq_base_swa", DEFAULT_ROPE_THETA),
        gate=Gate.GELU,
        has_outer_norms=True,
        embedding_scale=gemma_embedding_scale(config.width),
        score_divisor=float(config.width // config.heads if is_27b and config.heads > 0 else config.head_width),
    )
