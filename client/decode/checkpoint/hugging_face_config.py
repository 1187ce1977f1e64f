"""The shape of a model from its config.json, read like transformers' configs of its families."""

from typing import Any, Final

from gpulease.client.decode.checked_file import Members, quoted_value
from gpulease.client.decode.checkpoint.hugging_face_keys import CONFIG_KEYS, GENERATION_KEYS, IMAGE_MODEL_KEYS
from gpulease.client.decode.checkpoint.hugging_face_rotary import FULL, SLIDING, layered_rotary_of, rotary_of
from gpulease.client.decode.checkpoint.tensors import gemma_embedding_scale
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.file_keys import used_members
from gpulease.client.decode.model_config import MAX_LAYERS, Experts, Family, Gate, ModelConfig, check_config
from gpulease.client.texts import quoted

MISTRAL: Final = "mistral"
"""The `model_type` of a Llama with a sliding window."""

GEMMA3_TEXT: Final = "gemma3_text"
"""The `model_type` of a Gemma 3 that reads no images."""

GEMMA3_IMAGES: Final = "gemma3"
"""The `model_type` of a Gemma 3 that reads images. Its `text_config` describes its text part, of type GEMMA3_TEXT."""

TYPES: Final[dict[str, tuple[Family, str]]] = {
    Family.LLAMA: (Family.LLAMA, "LlamaForCausalLM"),
    Family.QWEN2: (Family.QWEN2, "Qwen2ForCausalLM"),
    Family.QWEN3: (Family.QWEN3, "Qwen3ForCausalLM"),
    Family.QWEN3_MOE: (Family.QWEN3_MOE, "Qwen3MoeForCausalLM"),
    MISTRAL: (Family.LLAMA, "MistralForCausalLM"),
    Family.PHI3: (Family.PHI3, "Phi3ForCausalLM"),
    GEMMA3_TEXT: (Family.GEMMA3, "Gemma3ForCausalLM"),
    GEMMA3_IMAGES: (Family.GEMMA3, "Gemma3ForConditionalGeneration"),
}
"""For each `model_type`, the family, and the class that config.json names."""

DEFAULT_NORM_EPSILON: Final = 1e-6
PHI3_NORM_EPSILON: Final = 1e-5
HEAD_WIDTHS: Final = {Family.QWEN3: 128, Family.GEMMA3: 256}
KEY_HEADS: Final[dict[str, int]] = {Family.QWEN2: 32, Family.QWEN3: 32, MISTRAL: 8, GEMMA3_TEXT: 4, Family.QWEN3_MOE: 4}
DEFAULT_EXPERTS: Final = 128
DEFAULT_CHOSEN: Final = 8
DEFAULT_EXPERT_WIDTH: Final = 768
GEMMA3_TEXT_DEFAULTS: Final[dict[str, Any]] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}
"""Defaults of members that all files of other families contain. Files of a Gemma 3 with images omit its class's
defaults."""

GEMMA3_END_TOKEN: Final = 1
GEMMA3_SCORE_DIVISOR: Final = 256.0
GEMMA3_PATTERN: Final = 6
DEFAULT_WINDOW: Final = 4096
DEFAULT_FULL_LAYERS: Final = 28
"""The classes' defaults for members that a file leaves out."""

WINDOWED: Final = (MISTRAL, Family.PHI3, GEMMA3_TEXT)
"""Types of models that have windows without a switch."""

LAYER_TYPES: Final = (FULL, SLIDING)


def hugging_face_config(members: Members, generation: Members | None, begin_token: int | None) -> ModelConfig:
    """Return the shape that config.json describes. Raises ModelRejected for a model that the engine can't compute.

    Args:
        members: The members of config.json.
        generation: The members of generation_config.json, which names more end tokens; None without such a file.
        begin_token: The token that the tokenizer puts before a prompt.
    """
    # Read the type first, because it decides which table of keys applies.
    kind = _model_type(members)
    if kind == GEMMA3_IMAGES:
        members, kind = _text_config(members), GEMMA3_TEXT
    family = TYPES[kind][0]
    members = used_members(members, CONFIG_KEYS[kind])
    # The head width is named, or else the class's default, which for Llama and Qwen2 is the width over the heads.
    width, heads = members.whole("hidden_size"), members.whole("num_attention_heads")
    head_width = members.whole("head_dim", HEAD_WIDTHS.get(family, width // max(heads, 1)))
    is_shared = members.values.get("head_dim") is None and family not in HEAD_WIDTHS
    if heads < 1 or (is_shared and width % heads):
        raise ModelRejected(
            f"{members.where}: hidden_size {width} must be a multiple of {heads} heads if head_dim is missing"
        )
    # A missing member has a default in some classes. In every class, null means as many as query heads.
    is_left_out = kind in KEY_HEADS and "num_key_value_heads" not in members.values
    key_heads = KEY_HEADS[kind] if is_left_out else members.whole("num_key_value_heads", heads)
    is_gemma = family is Family.GEMMA3
    rotary = layered_rotary_of(members) if is_gemma else rotary_of(members, head_width, is_phi3=family is Family.PHI3)
    layers = members.whole("num_hidden_layers")
    # As in transformers' generate(): the end tokens of generation_config.json, if any, otherwise config.json's.
    end_tokens = used_members(generation, GENERATION_KEYS).tokens("eos_token_id") if generation else ()
    end_tokens = end_tokens or members.tokens("eos_token_id")
    if is_gemma and not end_tokens and "eos_token_id" not in members.values:
        end_tokens = (GEMMA3_END_TOKEN,)
    config = ModelConfig(
        family=family,
        layers=layers,
        width=width,
        heads=heads,
        key_heads=key_heads,
        head_width=head_width,
        inner_width=members.whole("intermediate_size"),
        vocabulary=members.whole("vocab_size"),
        context=members.whole("max_position_embeddings"),
        rope_theta=rotary.theta,
        norm_epsilon=members.number(
            "rms_norm_eps", PHI3_NORM_EPSILON if family is Family.PHI3 else DEFAULT_NORM_EPSILON
        ),
        is_tied=members.flag("tie_word_embeddings", is_gemma),
        rope_scaling=rotary.scaling,
        has_bias=family is Family.QWEN2,
        has_head_norm=family in (Family.QWEN3, Family.QWEN3_MOE, Family.GEMMA3),
        begin_token=begin_token,
        end_tokens=tuple(dict.fromkeys(end_tokens)),
        windows=_windows(members, kind, layers),
        turned_width=rotary.turned_width,
        gate=Gate.GELU if is_gemma else Gate.SILU,
        has_outer_norms=is_gemma,
        embedding_scale=gemma_embedding_scale(width) if is_gemma else None,
        score_divisor=members.number("query_pre_attn_scalar", GEMMA3_SCORE_DIVISOR) if is_gemma else None,
        local_rope_theta=rotary.local_theta,
        experts=_experts(members, layers) if family is Family.QWEN3_MOE else None,
    )
    check_config(config, members.where)
    return config


def _text_config(members: Members) -> Members:
    """Return the members that describe the text part of a Gemma 3 with images, in the form of a GEMMA3_TEXT."""
    members = used_members(members, IMAGE_MODEL_KEYS)
    text = members.object("text_config")
    if text is None:
        raise ModelRejected(f"{members.where}: text_config is missing")
    if (name := text.text("model_type", GEMMA3_TEXT)) != GEMMA3_TEXT:
        raise ModelRejected(f"{text.where}: model_type must be {GEMMA3_TEXT}, not {quoted(name)}")
    # Members around the text part take precedence over members in it, so both must agree.
    is_tied = members.flag("tie_word_embeddings", True)
    if text.flag("tie_word_embeddings", is_tied) is not is_tied:
        raise ModelRejected(f"{text.where}: tie_word_embeddings must be {is_tied}, as next to it")
    around = {"tie_word_embeddings": is_tied}
    if members.values.get("eos_token_id") is not None:
        around["eos_token_id"] = members.values["eos_token_id"]
    text_members = {key: value for key, value in text.values.items() if key != "architectures"}
    return Members(GEMMA3_TEXT_DEFAULTS | text_members | around, text.where)


def _experts(members: Members, layers: int) -> Experts | None:
    """Return a Qwen3-MoE's experts; None if no layer has any."""
    # transformers 5 writes a different name than older versions, and reads both.
    names = [name for name in ("num_experts", "num_local_experts") if members.values.get(name) is not None]
    counts = [members.whole(name) for name in names] or [DEFAULT_EXPERTS]
    if len(set(counts)) > 1:
        raise ModelRejected(f"{members.where}: num_experts is {counts[0]}, and num_local_experts {counts[1]}")
    step = members.whole("decoder_sparse_step", 1)
    if step < 1:
        raise ModelRejected(f"{members.where}: decoder_sparse_step must be at least 1, not {step}")
    dense_layers = members.items("mlp_only_layers")
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in dense_layers):
        raise ModelRejected(
            f"{members.where}: mlp_only_layers must be numbers of layers, not {quoted_value(dense_layers)}"
        )
    if not 1 <= layers <= MAX_LAYERS:
        return None
    # As in transformers: every step-th layer has experts, except the layers that are listed.
    only = set(dense_layers)
    dense = tuple(layer for layer in range(layers) if layer in only or (layer + 1) % step)
    if counts[0] == 0 or len(dense) == layers:
        return None
    return Experts(
        counts[0],
        members.whole("num_experts_per_tok", DEFAULT_CHOSEN),
        members.whole("moe_intermediate_size", DEFAULT_EXPERT_WIDTH),
        members.flag("norm_topk_prob", False),
        dense,
    )


def _windows(members: Members, kind: str, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window; () if none has one."""
    if kind == Family.LLAMA or not 1 <= layers <= MAX_LAYERS:
        return ()
    # A Qwen has windows only if `use_sliding_window` is true: in the layers of a list or, without the list, in the
    # layers from max_window_layers on. A Gemma has windows in the layers of such a list or, without it, in all layers
    # except every sixth; the file may give another interval.
    is_qwen = kind in (Family.QWEN2, Family.QWEN3)
    kinds = members.items("layer_types") if is_qwen or kind == GEMMA3_TEXT else []
    if kinds and (len(kinds) != layers or not all(isinstance(name, str) and name in LAYER_TYPES for name in kinds)):
        raise ModelRejected(
            f"{members.where}: layer_types must be {layers} of {' and '.join(LAYER_TYPES)}, not {quoted_value(kinds)}"
        )
    if kind == GEMMA3_TEXT and not kinds:
        pattern = members.whole("sliding_window_pattern", GEMMA3_PATTERN)
        if pattern < 1:
            raise ModelRejected(f"{members.where}: sliding_window_pattern must be at least 1, not {pattern}")
        kinds = [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
    if kind not in WINDOWED and not members.flag("use_sliding_window", False):
        if SLIDING in kinds:
            raise ModelRejected(
                f"{members.where}: layer_types must be without {SLIDING} if use_sliding_window is false"
            )
        return ()
    # null means no window. A missing member has a default in some classes.
    if members.values.get("sliding_window") is None and (kind == Family.PHI3 or "sliding_window" in members.values):
        if SLIDING in kinds:
            raise ModelRejected(
                f"{members.where}: sliding_window must be a number of positions if layer_types has {SLIDING}"
            )
        return ()
    window = members.whole("sliding_window", DEFAULT_WINDOW)
    if kind in (MISTRAL, Family.PHI3, Family.QWEN3_MOE):
        return (window,) * layers
    full = members.whole("max_window_layers", DEFAULT_FULL_LAYERS)
    has_window = [name == SLIDING for name in kinds] or [layer >= full for layer in range(layers)]
    return tuple(window if is_windowed else None for is_windowed in has_window) if any(has_window) else ()


def _model_type(members: Members) -> str:
    name = members.text("model_type", "")
    if name not in TYPES:
        raise ModelRejected(f"{members.where}: model_type must be one of {', '.join(TYPES)}, not {quoted(name)}")
    # A model with the right type but another class, such as a classifier, has other weights.
    architectures = members.values.get("architectures")
    if architectures is not None and architectures != [TYPES[name][1]]:
        raise ModelRejected(f"{members.where}: architectures {quoted(str(architectures))} is not [{TYPES[name][1]}]")
    return name
