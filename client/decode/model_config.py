"""The shape of a model, and the limits of the engine's kernels."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.errors import InvalidRequest

HEAD_WIDTHS: Final = (32, 64, 80, 96, 128, 256)
"""The widths of heads that attention kernels are compiled for."""

MAX_SHARE: Final = 16
"""Maximum number of query heads per key head: the number of rows of an attention kernel's tile."""

COLUMNS_STEP: Final = 32
"""Every linear's number of columns must be a multiple of this, the number of values in a block of Q8_0."""

MIN_NORM_EPSILON: Final = 2.0**-126
"""Minimum value that RMS norms add under the root: the smallest normal f32 (IEEE 754)."""

MAX_LAYERS: Final = 1024
"""Maximum number of layers, so that a file's number can't cause a list of tensors that fills the host's memory."""

MAX_CONTEXT: Final = 1 << 24
"""Maximum number of positions, so that a file's number can't cause an enormous table."""

MAX_EXPERTS: Final = 256
"""Maximum number of experts of a layer: the number of lanes of the kernels that choose and gather experts."""

MAX_CHOSEN: Final = 16
"""Maximum number of experts that compute one row, a limit of the kernel that chooses them."""

MAX_SIZE: Final = 1 << 24
"""Limit of every other size. Products of two sizes fit in 64 bits, and indexes within a row in 32 bits."""


class Family(StrEnum):
    """The families of models that the engine computes, by their names in config.json and GGUF."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    QWEN3_MOE = "qwen3_moe"
    PHI3 = "phi3"
    GEMMA3 = "gemma3"


class Gate(StrEnum):
    """Activations of a feed-forward layer's gate. The names are parts of kernels' names."""

    SILU = "silu"
    GELU = "gelu"
    """GELU's approximation by tanh."""


class KvDtype(StrEnum):
    """Types in which the engine stores attention's keys and values (the KV cache)."""

    BF16 = "bf16"
    FP8 = "fp8"
    """Float8 e4m3, with a power of two as the scale of each head of each position."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's scaling of rotary embeddings ("rope_type": "llama3"); `rotary.rotation_of` has the rule."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Scaling of rotary embeddings that divides every frequency by the factor ("rope_type": "linear")."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN's scaling of rotary embeddings ("rope_type": "yarn"); `rotary.rotation_of` has the rule.

    Attributes:
        factor: The divisor of the slow frequencies.
        beta_fast: Frequencies that turn more often than this within the original context stay unchanged.
        beta_slow: Frequencies that turn less often than this are divided by the whole factor.
        original_context: Number of positions that the model was trained for before the scaling.
        attention_factor: The factor by which cosines and sines are multiplied.
        is_truncated: Whether the range of frequencies between the two betas is widened to whole pairs.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_context: int
    attention_factor: float
    is_truncated: bool = True


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE's scaling of rotary embeddings ("rope_type": "longrope"): each frequency has a separate divisor.

    Attributes:
        short: Divisors for sequences of up to `original_context` positions.
        long: Divisors for longer sequences.
        original_context: Number of positions that the model was trained for before the scaling.
        attention_factor: The factor by which cosines and sines are multiplied.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    attention_factor: float


AnyScaling = RopeScaling | LinearScaling | YarnScaling | LongScaling


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer: feed-forward parts, of which each row uses only a few.

    Attributes:
        count: Number of experts of a layer.
        chosen: Number of experts that compute one row.
        width: Number of values between an expert's gate, up and down (moe_intermediate_size).
        is_normalised: Whether the shares of a row's experts add up to 1.
        dense_layers: The layers without experts, in ascending order: they have one feed-forward part for all rows.
    """

    count: int
    chosen: int
    width: int
    is_normalised: bool
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model.

    Attributes:
        family: The model's family.
        layers: Number of layers.
        width: Number of values of a token between layers (hidden_size).
        heads: Number of query heads.
        key_heads: Number of key heads, and of value heads; divides `heads`.
        head_width: Number of values of a head.
        inner_width: Number of values between gate, up and down (intermediate_size).
        vocabulary: Number of tokens in the vocabulary.
        context: Number of positions that the model was made for, as in the file (max_position_embeddings,
            context_length). With scaled rotary embeddings, this number already includes the scaling.
        rope_theta: Base of the rotary embeddings' wavelengths.
        rope_scaling: How the rotary embeddings are scaled; None if they are not scaled.
        norm_epsilon: The value that RMS norms add under the root.
        is_tied: Whether the head uses the embedding's weights.
        has_bias: Whether q, k and v have biases (Qwen2).
        has_head_norm: Whether q and k are normalised by head (Qwen3).
        begin_token: The token that every prompt begins with; None if there is none.
        end_tokens: Tokens that end a sequence.
        windows: Each layer's window: the number of positions, its own included, that a row attends to; None for all
            earlier positions. Empty if no layer has a window.
        turned_width: How many values of a head are rotated by the position, the first in Hugging Face's order; None:
            all.
        gate: The activation of the gate.
        has_outer_norms: Whether the results of attention and of the feed-forward part are normalised before they are
            added to the residual (Gemma 3).
        embedding_scale: The factor by which the embedding's values are multiplied; None if they are not.
        score_divisor: Attention scores are divided by the root of this number; None: of `head_width`.
        local_rope_theta: The base of the rotary embeddings, which are not scaled, of layers with a window; None if all
            layers have the same rotary embeddings.
        experts: The experts of layers with experts; None if no layer has experts.
        kv_dtype: The type in which keys and values are stored. It is not in the model's files.
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
    rope_scaling: AnyScaling | None = None
    has_bias: bool = False
    has_head_norm: bool = False
    begin_token: int | None = None
    end_tokens: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()
    turned_width: int | None = None
    gate: Gate = Gate.SILU
    has_outer_norms: bool = False
    embedding_scale: float | None = None
    score_divisor: float | None = None
    local_rope_theta: float | None = None
    experts: Experts | None = None
    kv_dtype: KvDtype = KvDtype.BF16

    @property
    def turned_pairs(self) -> int:
        """The number of pairs of a head's values that are rotated by the position."""
        return (self.turned_width or self.head_width) // 2

    def window(self, layer: int, positions: int) -> int | None:
        """Return a layer's window; None if it has none, or if sequences of `positions` positions do not exceed it."""
        window = self.windows[layer] if self.windows else None
        return None if window is None or window >= positions else window

    def experts_of(self, layer: int) -> Experts | None:
        """Return a layer's experts; None if the layer has one feed-forward part for all rows."""
        return self.experts if self.experts and layer not in self.experts.dense_layers else None

    def is_local(self, layer: int) -> bool:
        """Return whether a layer uses the rotary embeddings with the base `local_rope_theta`."""
        return self.local_rope_theta is not None and bool(self.windows) and self.windows[layer] is not None


def check_config(config: ModelConfig, where: str) -> None:
    """Raise ModelRejected unless the engine's kernels can compute a model of this shape.

    Args:
        config: The shape that a file describes.
        where: The file's path, for the error.
    """
    sizes = {
        "layers": (config.layers, MAX_LAYERS),
        "hidden size": (config.width, MAX_SIZE),
        "query heads": (config.heads, MAX_SIZE),
        "key heads": (config.key_heads, MAX_SIZE),
        "inner size": (config.inner_width, MAX_SIZE),
        "vocabulary": (config.vocabulary, MAX_SIZE),
        "context": (config.context, MAX_CONTEXT),
    }
    # Check the sizes first, because the checks below divide by them.
    for name, (value, maximum) in sizes.items():
        if not 1 <= value <= maximum:
            raise ModelRejected(f"{where}: {name} must be 1 to {maximum}, not {value}")
    # Attention's kernels are compiled for these widths, and for up to MAX_SHARE query heads per key head.
    if config.head_width not in HEAD_WIDTHS:
        widths = ", ".join(map(str, HEAD_WIDTHS))
        raise ModelRejected(f"{where}: heads must be {widths} wide, not {config.head_width}")
    if config.heads % config.key_heads or config.heads // config.key_heads > MAX_SHARE:
        shares = f"{config.heads} query heads on {config.key_heads} key heads"
        raise ModelRejected(f"{where}: {shares}; each key head must have as many, {MAX_SHARE} at most")
    columns_of = {"hidden size": config.width, "inner size": config.inner_width}
    if (experts := config.experts) is not None:
        columns_of["experts' inner size"] = experts.width
        if not 1 <= experts.count <= MAX_EXPERTS:
            raise ModelRejected(f"{where}: experts must be 1 to {MAX_EXPERTS}, not {experts.count}")
        if not 1 <= experts.chosen <= min(experts.count, MAX_CHOSEN):
            maximum = min(experts.count, MAX_CHOSEN)
            raise ModelRejected(f"{where}: experts of a row must be 1 to {maximum}, not {experts.chosen}")
        if not 1 <= experts.width <= MAX_SIZE:
            raise ModelRejected(f"{where}: experts' inner size must be 1 to {MAX_SIZE}, not {experts.width}")
    for name, columns in columns_of.items():
        if columns % COLUMNS_STEP:
            raise ModelRejected(f"{where}: {name} must be a multiple of {COLUMNS_STEP}, not {columns}")
    if config.turned_width is not None and (
        config.turned_width % 2 or not 2 <= config.turned_width < config.head_width
    ):
        raise ModelRejected(
            f"{where}: partial_rotary_factor must rotate an even number of the {config.head_width} values of a head, "
            f"not {config.turned_width}"
        )
    if config.windows and len(config.windows) != config.layers:
        raise ModelRejected(f"{where}: {len(config.windows)} windows must be as many as the {config.layers} layers")
    if invalid := [window for window in config.windows if window is not None and window < 1]:
        raise ModelRejected(f"{where}: sliding_window must be at least 1, not {invalid[0]}")
    for theta in (config.rope_theta, config.local_rope_theta):
        # With a base near 0, the first pairs' frequencies would be infinite.
        if theta is not None and not 1 <= theta < math.inf:
            raise ModelRejected(f"{where}: the rotary embeddings' base must be at least 1 and finite, not {theta}")
    # The kernels use the reciprocal of the divisor's root as an f32, which must be neither 0 nor infinite.
    if config.score_divisor is not None and not 1 <= config.score_divisor <= MAX_SIZE:
        raise ModelRejected(f"{where}: query_pre_attn_scalar must be 1 to {MAX_SIZE}, not {config.score_divisor}")
    # The kernels add the epsilon as an f32. If it were 0, a row of zeros would be divided by zero.
    if not MIN_NORM_EPSILON <= config.norm_epsilon < 1:
        raise ModelRejected(
            f"{where}: the norms' epsilon (rms_norm_eps; in GGUF attention.layer_norm_rms_epsilon) must be at least"
            f" {MIN_NORM_EPSILON:.4g} and below 1, not {config.norm_epsilon:g}"
        )
    # Tokens are indexes of the embedding's rows, so a token beyond its end would read other memory.
    tokens = [*config.end_tokens, *([] if config.begin_token is None else [config.begin_token])]
    if out_of_range := [token for token in tokens if not 0 <= token < config.vocabulary]:
        raise ModelRejected(f"{where}: token {out_of_range[0]} is not in the vocabulary of {config.vocabulary}")


def check_positions(config: ModelConfig, positions: int) -> None:
    """Raise InvalidRequest if sequences may have more positions than the model was made for.

    A model was not trained beyond that number, and would emit noise without any error.
    """
    if positions > config.context:
        raise InvalidRequest(
            f"positions is {positions:,}; the model's own context has {config.context:,}",
            f"Set positions to {config.context} or less; it already includes scaled rotary embeddings",
        )
