"""The shape of a model: what its config.json or its GGUF metadata say, checked."""

from dataclasses import dataclass
from enum import StrEnum


class Family(StrEnum):
    """Families of models that the engine computes."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of rotary embeddings ("rope_type": "llama3")."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model.

    Attributes:
        family: The model's family.
        layers: Number of layers.
        width: Values of a token between layers (hidden_size).
        heads: Query heads.
        key_heads: Key and value heads; divides `heads`.
        head_width: Values of a head.
        inner_width: Values between gate, up and down (intermediate_size).
        vocabulary: Number of tokens.
        context: Positions the model was made for.
        rope_theta: Base of the rotary embeddings' wavelengths.
        rope_scaling: How they are stretched; None if they are not.
        norm_epsilon: What RMS norms add under the root.
        is_tied: Whether the head's weights are the embedding's.
        has_bias: Whether q, k and v have biases (Qwen2).
        has_head_norm: Whether q and k are normalised by head (Qwen3).
        begin_token: The token that a prompt begins with; None if it begins without one.
        end_tokens: Tokens that end a sequence.
    """

    family: Family
    layers: int
    width: int
    heads: int
    key_heads: int
    head_width: int
    inner_width: int
    vocabulary: int
    context: int
    rope_theta: float
    norm_epsilon: float
    is_tied: bool
    rope_scaling: RopeScaling | None = None
    has_bias: bool = False
    has_head_norm: bool = False
    begin_token: int | None = None
    end_tokens: tuple[int, ...] = ()
