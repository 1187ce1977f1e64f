"""The shape of a model by a GGUF file's metadata, as llama.cpp reads it (load_hparams in llama-model.cpp)."""

from typing import Final

from gpulease.client.serve.decode.checked_file import Members, shown
from gpulease.client.serve.decode.decode_errors import ModelRejected
from gpulease.client.serve.decode.model_config import Family, ModelConfig, check_config

DEFAULT_ROPE_THETA: Final = 10_000.0

END_TEXTS: Final = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"}
)
"""Control tokens that end a turn or a text; files name one or two of them as keys (llama-vocab.cpp knows the rest)."""

END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
CONTROL: Final = 3
"""A token's type that says that it is no text (LLAMA_TOKEN_TYPE_CONTROL)."""


def gguf_config(said: Members, vocabulary: int, is_tied: bool) -> ModelConfig:
    """Read the metadata. Raises ModelRejected for a model that the engine does not compute.

    Args:
        said: The metadata.
        vocabulary: Rows of the embedding.
        is_tied: Whether the file has no weights of a head.
    """
    name = said.text("general.architecture")
    try:
        family = Family(name)
    except ValueError:
        where = f"{said.where}: general.architecture {shown(name)}"
        raise ModelRejected(f"{where} is none of {', '.join(Family)}") from None
    at = f"{family}."
    width, heads = said.whole(f"{at}embedding_length"), said.whole(f"{at}attention.head_count")
    if f"{at}attention.key_length" not in said.values and (heads < 1 or width % heads):
        raise ModelRejected(f"{said.where}: embedding_length {width} is no multiple of {heads} heads")
    head_width = said.whole(f"{at}attention.key_length", width // max(heads, 1))
    _check_computed(said, at, head_width)
    if (parts := said.whole("split.count", 1)) > 1:
        raise ModelRejected(f"{said.where}: it is one of {parts} files; merge them with llama-gguf-split --merge")
    config = ModelConfig(
        family=family,
        layers=said.whole(f"{at}block_count"),
        width=width,
        heads=heads,
        key_heads=said.whole(f"{at}attention.head_count_kv", heads),
        head_width=head_width,
        inner_width=said.whole(f"{at}feed_forward_length"),
        vocabulary=vocabulary,
        context=said.whole(f"{at}context_length"),
        rope_theta=said.number(f"{at}rope.freq_base", DEFAULT_ROPE_THETA),
        norm_epsilon=said.number(f"{at}attention.layer_norm_rms_epsilon"),
        is_tied=is_tied,
        has_bias=family is Family.QWEN2,
        has_head_norm=family is Family.QWEN3,
        begin_token=begin_token(said),
        end_tokens=_end_tokens(said),
    )
    check_config(config, said.where)
    return config


def begin_token(said: Members) -> int | None:
    """The token before a prompt: llama.cpp's default depends on the vocabulary's kind, and a key says otherwise."""
    at = "tokenizer.ggml."
    default = said.text(f"{at}model", "") == "llama" or said.text(f"{at}pre", "") in ("llama3", "llama-bpe")
    if not said.flag(f"{at}add_bos_token", default) or f"{at}bos_token_id" not in said.values:
        return None
    return said.whole(f"{at}bos_token_id")


def _end_tokens(said: Members) -> tuple[int, ...]:
    ends = [token for key in END_KEYS for token in said.tokens(f"tokenizer.ggml.{key}")]
    texts, kinds = (said.items(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    ends += [
        token
        for token, (text, kind) in enumerate(zip(texts, kinds, strict=False))
        if kind == CONTROL and text in END_TEXTS
    ]
    return tuple(dict.fromkeys(ends))


def _check_computed(said: Members, at: str, head_width: int) -> None:
    """Raise ModelRejected for what llama.cpp computes and the engine does not."""
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := said.whole(f"{at}{key}", head_width)) != head_width:
            raise ModelRejected(f"{said.where}: {at}{key} is {found}, and heads are {head_width} wide")
    for key in ("expert_count", "attention.sliding_window"):
        if found := said.whole(f"{at}{key}", 0):
            raise ModelRejected(f"{said.where}: {at}{key} is {found}; the engine computes no such model")
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        kind = said.text(f"{at}rope.scaling.type", "linear")
        if kind != "none" and (factor := said.number(f"{at}{key}", 1.0)) != 1.0:
            raise ModelRejected(
                f"{said.where}: rotary embeddings are stretched by {kind}, {factor} times; the engine"
                " computes Llama 3's stretching alone"
            )
