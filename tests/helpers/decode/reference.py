"""Forward passes of the decode engine's model families in numpy, written only from the papers' formulas.

Tensors have the names and layouts of Hugging Face's files. In f64, the same code measures the error of the f32
reference.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpulease.client.decode.model_config import (
    Family,
    Gate,
    LinearScaling,
    LongScaling,
    ModelConfig,
    YarnScaling,
)

Array = npt.NDArray[np.floating[Any]]
Tensors = Mapping[str, npt.NDArray[np.float32]]

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"

MIN_CHOICE_MARGIN = 0.05
"""Smallest margin of a choice of experts that is not close, in a router's logits with a deviation of 1. It is about
twice the error that values rounded to bf16 between linears cause.
"""


def linears_of(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of a layer's linears, as [outputs, inputs]."""
    queries, keys = config.heads * config.head_width, config.key_heads * config.head_width
    parts, inner = ["mlp"], config.inner_width
    linears = {}
    if (experts := config.experts_of(layer)) is not None:
        parts, inner = [f"mlp.experts.{expert}" for expert in range(experts.count)], experts.width
        linears["mlp.gate"] = (experts.count, config.width)
    for part in parts:
        linears |= {f"{part}.{name}_proj": (inner, config.width) for name in ("gate", "up")}
        linears[f"{part}.down_proj"] = (config.width, inner)
    return {
        **linears,
        "self_attn.q_proj": (queries, config.width),
        "self_attn.k_proj": (keys, config.width),
        "self_attn.v_proj": (keys, config.width),
        "self_attn.o_proj": (config.width, queries),
    }


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors, by name."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocabulary, config.width), NORM: (config.width,)}
    if not config.is_tied:
        shapes[HEAD] = (config.vocabulary, config.width)
    for number in range(config.layers):
        layer = f"model.layers.{number}"
        norms = ["input", "post_attention"]
        if config.has_outer_norms:
            norms += ["pre_feedforward", "post_feedforward"]
        shapes |= {f"{layer}.{name}_layernorm.weight": (config.width,) for name in norms}
        for name, shape in linears_of(config, number).items():
            shapes[f"{layer}.{name}.weight"] = shape
            if config.has_bias and name[-6] in "qkv":
                shapes[f"{layer}.{name}.bias"] = shape[:1]
        if config.has_head_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (config.head_width,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (config.head_width,)
    return shapes


def frequencies(config: ModelConfig, *, is_long: bool = False) -> npt.NDArray[np.float64]:
    """Return the angle per position of each pair of a head's values, in radians, with scaled rotary embeddings applied.

    Args:
        config: The model.
        is_long: Whether to use LongRoPE's divisors for long sequences.
    """
    width = config.turned_width or config.head_width
    plain: npt.NDArray[np.float64] = config.rope_theta ** (-np.arange(0, width, 2) / width)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    if isinstance(scaling, LongScaling):
        stretches: npt.NDArray[np.float64] = np.array(scaling.long if is_long else scaling.short)
        return plain / stretches
    if isinstance(scaling, YarnScaling):
        ends = [
            width * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        ]
        first, last = (math.floor(ends[0]), math.ceil(ends[1])) if scaling.is_truncated else ends
        first, last = max(first, 0), min(last, width - 1)
        ramp = np.clip((np.arange(len(plain)) - first) / max(last - first, 0.001), 0, 1)
        ramped: npt.NDArray[np.float64] = plain / scaling.factor * ramp + plain * (1 - ramp)
        return ramped
    turns = scaling.original_context * plain / (2 * np.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    stretched: npt.NDArray[np.float64] = kept * plain + (1 - kept) * plain / scaling.factor
    return stretched


def _normed(values: Array, weight: Array, epsilon: float) -> Array:
    normed: Array = values / np.sqrt((values * values).mean(-1, keepdims=True) + values.dtype.type(epsilon)) * weight
    return normed


def _gelu(values: Array) -> Array:
    """Compute GELU with its tanh approximation."""
    root = values.dtype.type(math.sqrt(2 / math.pi))
    shares: Array = (1 + np.tanh(root * (values + values.dtype.type(0.044715) * values**3))) / 2
    return values * shares


def _turned(heads: Array, config: ModelConfig, *, is_long: bool, is_local: bool) -> Array:
    if is_local:
        assert config.local_rope_theta is not None
        config = replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
    angles = np.outer(np.arange(len(heads)), frequencies(config, is_long=is_long))[:, None]
    scaling = config.rope_scaling
    factor = scaling.attention_factor if isinstance(scaling, YarnScaling | LongScaling) else 1.0
    cosines, sines = (factor * table(angles).astype(heads.dtype) for table in (np.cos, np.sin))
    # Values after the rotated ones are not changed.
    turned, kept = np.split(heads, [2 * angles.shape[-1]], -1)
    low, high = np.split(turned, 2, -1)
    return np.concatenate([low * cosines - high * sines, high * cosines + low * sines, kept], -1)


class Reference:
    """A model in numpy. It has no cache and no blocks: each call computes every position.

    Attributes:
        kept: Rounds the inputs of linears, q, k and v, like an engine that stores them with fewer bits.
        is_long: Whether sequences are computed with LongRoPE's divisors for long sequences.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Tensors,
        dtype: type[np.floating[Any]] = np.float32,
        kept: Callable[[Array], Array] = lambda values: values,
        *,
        is_long: bool = False,
    ) -> None:
        self.kept = kept
        self.is_long = is_long
        self._config = config
        self._tensors: dict[str, Array] = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
        # By layer, for each row of the last computation: the router's score of the last chosen expert minus the score
        # of the next one.
        self._choice_margins: list[Array] = []

    def rows(self, token_ids: Sequence[int]) -> Array:
        """Return the rows [tokens, width] after the last norm, for every position."""
        self._choice_margins = []
        values = self._tensors[EMBEDDING][np.asarray(token_ids)]
        if self._config.embedding_scale is not None:
            values = values * values.dtype.type(self._config.embedding_scale)
        for number in range(self._config.layers):
            windows = self._config.windows
            values = self._layer(f"model.layers.{number}", values, windows[number] if windows else None)
        return self._normed(NORM, values)

    def logits(self, token_ids: Sequence[int]) -> Array:
        """Return the logits [tokens, vocabulary] of every position."""
        head = self._tensors[EMBEDDING if self._config.is_tied else HEAD]
        logits: Array = self.kept(self.rows(token_ids)) @ head.T
        return logits

    def are_close(self, token_ids: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return for each position whether its choice of experts is close.

        It is close if in some layer the last chosen expert's margin is less than `MIN_CHOICE_MARGIN`.
        """
        self.rows(token_ids)
        close: npt.NDArray[np.bool_] = np.zeros(len(token_ids), bool)
        for margins in self._choice_margins:
            close |= margins < MIN_CHOICE_MARGIN
        return close

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the `count` likeliest next tokens of each prompt. End tokens do not end the decoding."""
        outputs = []
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(count):
                tokens.append(int(self.logits(tokens)[-1].argmax()))
            outputs.append(tokens[len(prompt) :])
        return outputs

    def _layer(self, layer: str, values: Array, window: int | None) -> Array:
        attended = self._attended(layer, self._normed(f"{layer}.input_layernorm.weight", values), window)
        if not self._config.has_outer_norms:
            values = values + attended
            return values + self._inner(layer, self._normed(f"{layer}.post_attention_layernorm.weight", values))
        values = values + self._normed(f"{layer}.post_attention_layernorm.weight", attended)
        inner = self._inner(layer, self._normed(f"{layer}.pre_feedforward_layernorm.weight", values))
        return values + self._normed(f"{layer}.post_feedforward_layernorm.weight", inner)

    def _normed(self, name: str, values: Array) -> Array:
        weight = self._tensors[name]
        # Gemma's files contain norm weights minus 1.
        return _normed(
            values, 1 + weight if self._config.family is Family.GEMMA3 else weight, self._config.norm_epsilon
        )

    def _inner(self, layer: str, values: Array) -> Array:
        experts = self._config.experts_of(int(layer.rpartition(".")[2]))
        if experts is None:
            return self._fed_forward(f"{layer}.mlp", values)
        logits = self._linear(f"{layer}.mlp.gate", values)
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        order = np.argsort(-shares, -1, kind="stable")
        chosen = order[:, : experts.chosen]
        if experts.chosen < experts.count:
            scores = np.take_along_axis(logits, order, -1)
            self._choice_margins.append(scores[:, experts.chosen - 1] - scores[:, experts.chosen])
        total = np.zeros_like(values)
        for row, its in enumerate(chosen):
            weights = shares[row, its] / (shares[row, its].sum() if experts.is_normalised else 1)
            for expert, weight in zip(its, weights, strict=True):
                total[row] += weight * self._fed_forward(f"{layer}.mlp.experts.{expert}", values[[row]])[0]
        return total

    def _fed_forward(self, part: str, values: Array) -> Array:
        gate, up = self._linear(f"{part}.gate_proj", values), self._linear(f"{part}.up_proj", values)
        gated = _gelu(gate) if self._config.gate is Gate.GELU else gate / (1 + np.exp(-gate))
        return self._linear(f"{part}.down_proj", gated * up)

    def _linear(self, name: str, values: Array) -> Array:
        projected: Array = self.kept(values) @ self._tensors[f"{name}.weight"].T
        bias = self._tensors.get(f"{name}.bias")
        return projected if bias is None else projected + bias

    def _heads(self, layer: str, name: str, values: Array) -> Array:
        """Return q, k or v as [positions, heads, head width], normalised if the model has such a norm."""
        heads = self._linear(f"{layer}.self_attn.{name}_proj", values)
        heads = heads.reshape(len(values), -1, self._config.head_width)
        norm = f"{layer}.self_attn.{name}_norm.weight"
        return self._normed(norm, heads) if norm in self._tensors else heads

    def _attended(self, layer: str, values: Array, window: int | None) -> Array:
        count, group = len(values), self._config.heads // self._config.key_heads
        is_local = window is not None and self._config.local_rope_theta is not None
        q, k = (
            self.kept(_turned(self._heads(layer, name, values), self._config, is_long=self.is_long, is_local=is_local))
            for name in "qk"
        )
        k = k.repeat(group, 1)
        v = self.kept(self._heads(layer, "v", values)).repeat(group, 1)
        scores = np.einsum("ihd,jhd->hij", q, k) / values.dtype.type(
            math.sqrt(self._config.score_divisor or self._config.head_width)
        )
        scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
        if window is not None:
            scores[:, np.tril(np.ones((count, count), bool), -window)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", shares, v).reshape(count, -1)
        return self._linear(f"{layer}.self_attn.o_proj", mixed)
