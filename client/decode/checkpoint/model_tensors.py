"""The tensors of a model with a given config: their names in Hugging Face's checkpoints, and their shapes."""

from collections.abc import Iterable, Iterator
from typing import Final

from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.model_config import Family, ModelConfig
from gpulease.client.texts import quoted

EMBEDDING: Final = "model.embed_tokens.weight"
NORM: Final = "model.norm.weight"
HEAD: Final = "lm_head.weight"

ROUTER: Final = "mlp.gate.weight"
"""The name, within a layer, of the linear that scores its experts."""

IGNORED: Final = "rotary_emb.inv_freq"
"""Suffix of tensors in old checkpoints, which transformers ignores and computes itself. It also ignores the weights of
a head that is tied to the embedding, which some files contain."""


def layer_prefix(layer: int) -> str:
    """Return the prefix of the names of a layer's tensors."""
    return f"model.layers.{layer}."


def feed_forward_parts(config: ModelConfig, layer: int) -> list[tuple[str, int]]:
    """Return the prefix within the layer, and the inner width, of its feed-forward part, or of each expert's."""
    experts = config.experts_of(layer)
    if experts is None:
        return [("mlp.", config.inner_width)]
    return [(f"mlp.experts.{expert}.", experts.width) for expert in range(experts.count)]


def model_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each tensor that the engine reads."""
    width = config.width
    queries, keys = config.heads * config.head_width, config.key_heads * config.head_width
    yield EMBEDDING, (config.vocabulary, width)
    for layer in range(config.layers):
        at = layer_prefix(layer)
        yield f"{at}input_layernorm.weight", (width,)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{at}self_attn.{name}_proj.weight", (rows, width)
            if config.has_bias:
                yield f"{at}self_attn.{name}_proj.bias", (rows,)
        if config.has_head_norm:
            yield f"{at}self_attn.q_norm.weight", (config.head_width,)
            yield f"{at}self_attn.k_norm.weight", (config.head_width,)
        yield f"{at}self_attn.o_proj.weight", (width, queries)
        yield f"{at}post_attention_layernorm.weight", (width,)
        if config.has_outer_norms:
            yield f"{at}pre_feedforward_layernorm.weight", (width,)
            yield f"{at}post_feedforward_layernorm.weight", (width,)
        if (experts := config.experts_of(layer)) is not None:
            yield f"{at}{ROUTER}", (experts.count, width)
        for part, its_inner in feed_forward_parts(config, layer):
            yield f"{at}{part}gate_proj.weight", (its_inner, width)
            yield f"{at}{part}up_proj.weight", (its_inner, width)
            yield f"{at}{part}down_proj.weight", (width, its_inner)
    yield NORM, (width,)
    # A tied head is the embedding, so the file need not contain a head.
    if not config.is_tied:
        yield HEAD, (config.vocabulary, width)


def fused_tensors(config: ModelConfig) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the name of each tensor that contains several of the model's tensors, and their rows, in order.

    Files of Phi-3 have q, k and v in one tensor, and gate and up in another.
    """
    if config.family is not Family.PHI3:
        return
    queries, keys = config.heads * config.head_width, config.key_heads * config.head_width
    for layer in range(config.layers):
        at = layer_prefix(layer)
        rows = zip("qkv", (queries, keys, keys), strict=True)
        yield f"{at}self_attn.qkv_proj.weight", {f"{at}self_attn.{name}_proj.weight": count for name, count in rows}
        inner = dict.fromkeys((f"{at}mlp.gate_proj.weight", f"{at}mlp.up_proj.weight"), config.inner_width)
        yield f"{at}mlp.gate_up_proj.weight", inner


TEXT_PREFIXES: Final = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
IMAGE_PREFIXES: Final = ("vision_tower.", "multi_modal_projector.")
"""Prefixes of the tensors of a model with images, as transformers 4 and 5 write them."""


def text_name(name: str) -> str | None:
    """Return a tensor's name in the text part of a model with images; None if the tensor is only for images."""
    if name.removeprefix("model.").startswith(IMAGE_PREFIXES):
        return None
    for prefix, own_prefix in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return own_prefix + name.removeprefix(prefix)
    return name


def check_names(config: ModelConfig, names: Iterable[str], where: str) -> None:
    """Raise ModelRejected if a tensor is missing, or if the engine would ignore one.

    Without such a tensor, for example a bias that the family does not have, the engine would compute a different model.
    """
    # The head is always allowed: files of tied models may contain it, and it is ignored.
    present, expected = set(names), {HEAD}
    for name, _ in model_tensors(config):
        if name not in present:
            raise ModelRejected(f"{where}: tensor {name} is missing")
        expected.add(name)
    if unknown := sorted(name for name in present - expected if not name.endswith(IGNORED)):
        raise ModelRejected(
            f"{where}: tensor {quoted(unknown[0])} is not part of a {config.family} model as the engine computes it"
        )


def check_shape(config: ModelConfig, name: str, shape: tuple[int, ...], expected: tuple[int, ...], where: str) -> None:
    """Raise ModelRejected unless a tensor has the shape that the config requires."""
    if shape != expected:
        raise ModelRejected(
            f"{where}: tensor {name} must have the shape {list(expected)}, as in the config, not {list(shape)}"
        )
