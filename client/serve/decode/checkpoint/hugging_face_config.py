"""The shape of a model by its config.json, as transformers' LlamaConfig, Qwen2Config and Qwen3Config read it."""

from typing import Final

from gpulease.client.serve.decode.checked_file import Members, shown
from gpulease.client.serve.decode.decode_errors import ModelRejected
from gpulease.client.serve.decode.model_config import Family, ModelConfig, RopeScaling, check_config

ARCHITECTURES: Final = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
}
"""Families by what config.json says of its class."""

DEFAULT_ROPE_THETA: Final = 10_000.0
DEFAULT_NORM_EPSILON: Final = 1e-6


def hugging_face_config(said: Members, generation: Members | None, begin_token: int | None) -> ModelConfig:
    """Read config.json. Raises ModelRejected for a model that the engine does not compute.

    Args:
        said: Its members.
        generation: Those of generation_config.json, which names more end tokens; None where there is no such file.
        begin_token: The token that the tokenizer puts before a prompt.
    """
    family = _family(said)
    _check_computed(said, family)
    width, heads = said.whole("hidden_size"), said.whole("num_attention_heads")
    if said.values.get("head_dim") is None and (heads < 1 or width % heads):
        raise ModelRejected(f"{said.where}: hidden_size {width} is no multiple of {heads} heads, and head_dim missing")
    theta, scaling = _rotary(said)
    ends = said.tokens("eos_token_id") + (generation.tokens("eos_token_id") if generation else ())
    config = ModelConfig(
        family=family,
        layers=said.whole("num_hidden_layers"),
        width=width,
        heads=heads,
        key_heads=said.whole("num_key_value_heads", heads),
        head_width=said.whole("head_dim", width // max(heads, 1)),
        inner_width=said.whole("intermediate_size"),
        vocabulary=said.whole("vocab_size"),
        context=said.whole("max_position_embeddings"),
        rope_theta=theta,
        norm_epsilon=said.number("rms_norm_eps", DEFAULT_NORM_EPSILON),
        is_tied=said.flag("tie_word_embeddings", False),
        rope_scaling=scaling,
        has_bias=family is Family.QWEN2,
        has_head_norm=family is Family.QWEN3,
        begin_token=begin_token,
        end_tokens=tuple(dict.fromkeys(ends)),
    )
    check_config(config, said.where)
    return config


def _family(said: Members) -> Family:
    name = said.text("model_type", "")
    try:
        family = Family(name)
    except ValueError:
        raise ModelRejected(f"{said.where}: model_type {shown(name)} is none of {', '.join(Family)}") from None
    architectures = said.values.get("architectures")
    if architectures is not None and architectures != [ARCHITECTURES[family]]:
        raise ModelRejected(f"{said.where}: architectures {shown(str(architectures))} is not [{ARCHITECTURES[family]}]")
    return family


def _check_computed(said: Members, family: Family) -> None:
    """Raise ModelRejected for what transformers computes and the engine does not."""
    activation = said.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelRejected(f"{said.where}: hidden_act {shown(activation)} is not silu")
    # Qwen2 has biases of q, k and v without saying so; these flags add others.
    for flag in ("attention_bias", "mlp_bias"):
        if said.flag(flag, False) and not (family is Family.QWEN2 and flag == "attention_bias"):
            raise ModelRejected(f"{said.where}: {flag} is true; the engine computes no such biases of a {family} model")
    kinds = said.values.get("layer_types") or []
    windowed = said.flag("use_sliding_window", False) and said.values.get("sliding_window") is not None
    if windowed or not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ModelRejected(f"{said.where}: a sliding window is in use; the engine attends to all positions")
    if said.values.get("quantization_config") is not None:
        raise ModelRejected(f"{said.where}: quantization_config is there; of packed weights the engine reads GGUF's")
    if said.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelRejected(f"{said.where}: partial_rotary_factor is not 1; the engine turns whole heads")


def _rotary(said: Members) -> tuple[float, RopeScaling | None]:
    """The base, and how it is stretched. Newer files have both in `rope_parameters`."""
    parameters = said.object("rope_parameters")
    theta = (parameters or said).number("rope_theta", DEFAULT_ROPE_THETA)
    scaling = parameters or said.object("rope_scaling")
    if scaling is None:
        return theta, None
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ModelRejected(f"{scaling.where}: rope_type {shown(kind)} is neither default nor llama3")
    found = RopeScaling(
        scaling.number("factor"),
        scaling.number("low_freq_factor"),
        scaling.number("high_freq_factor"),
        scaling.whole("original_max_position_embeddings"),
    )
    if not (found.factor >= 1 and 0 < found.low_frequency_factor < found.high_frequency_factor):
        raise ModelRejected(
            f"{scaling.where}: factor {found.factor}, from {found.low_frequency_factor} to"
            f" {found.high_frequency_factor}, stretches nothing"
        )
    if found.original_context < 1:
        raise ModelRejected(f"{scaling.where}: original_max_position_embeddings is {found.original_context}")
    return theta, found
