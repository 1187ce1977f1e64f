"""The shape of a model from a GGUF file's metadata, read like llama.cpp does (load_hparams in llama-model.cpp)."""

from typing import Final

from gpulease.client.decode.checked_file import Members
from gpulease.client.decode.checkpoint.gguf_keys import GGUF_FAMILIES, GGUF_KEYS
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.file_keys import judged
from gpulease.client.decode.model_config import Experts, Family, ModelConfig, check_config
from gpulease.client.decode.text.gguf_special_tokens import begin_token, end_tokens
from gpulease.client.texts import quoted

DEFAULT_ROPE_THETA: Final = 10_000.0


def gguf_config(said: Members, vocabulary: int, is_tied: bool) -> ModelConfig:
    """Return the shape that the metadata describes. Raises ModelRejected for a model that the engine can't compute.

    Args:
        said: The metadata.
        vocabulary: Rows of the embedding.
        is_tied: Whether the file has no separate weights for the head.
    """
    # The architecture comes first: it is also the prefix of the model's other keys.
    name = said.text("general.architecture")
    if name not in GGUF_FAMILIES:
        must = f"general.architecture must be one of {', '.join(GGUF_FAMILIES)}"
        raise ModelRejected(f"{said.where}: {must}, not {quoted(name)}")
    family = GGUF_FAMILIES[name]
    # From here on only keys that the table declares as used are visible.
    said = judged(said, GGUF_KEYS[family])
    at = f"{name}."
    width, heads = said.whole(f"{at}embedding_length"), said.whole(f"{at}attention.head_count")
    if f"{at}attention.key_length" not in said.values and (heads < 1 or width % heads):
        raise ModelRejected(f"{said.where}: embedding_length {width} must be a multiple of {heads} heads")
    # The engine has one width for keys, values and rotation; a file that names others is refused.
    head_width = said.whole(f"{at}attention.key_length", width // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := said.whole(f"{at}{key}", head_width)) != head_width:
            raise ModelRejected(f"{said.where}: {at}{key} is {found}, and heads are {head_width} wide")
    inner_width, experts = said.whole(f"{at}feed_forward_length"), None
    if family is Family.QWEN3_MOE:
        # llama.cpp's graph of this family has experts in every layer, with shares that add up to 1.
        chosen = said.whole(f"{at}expert_used_count")
        width_of_one = said.whole(f"{at}expert_feed_forward_length", inner_width // max(chosen, 1))
        experts = Experts(said.whole(f"{at}expert_count"), chosen, width_of_one, is_normalised=True)
    config = ModelConfig(
        family=family,
        layers=said.whole(f"{at}block_count"),
        width=width,
        heads=heads,
        key_heads=said.whole(f"{at}attention.head_count_kv", heads),
        head_width=head_width,
        inner_width=inner_width,
        vocabulary=vocabulary,
        context=said.whole(f"{at}context_length"),
        rope_theta=said.number(f"{at}rope.freq_base", DEFAULT_ROPE_THETA),
        norm_epsilon=said.number(f"{at}attention.layer_norm_rms_epsilon"),
        is_tied=is_tied,
        # GGUF has no keys for these two: they follow from the family.
        has_bias=family is Family.QWEN2,
        has_head_norm=family in (Family.QWEN3, Family.QWEN3_MOE),
        begin_token=begin_token(said),
        end_tokens=end_tokens(said),
        experts=experts,
    )
    check_config(config, said.where)
    return config
