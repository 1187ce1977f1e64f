"""Trains the tiny model that the decode engine's tests run: `PYTHONPATH=.dev python -m tests.lab.train_tiny_model`.

The model is a Llama of 459,392 parameters. It is trained on the help texts of the running Python (pydoc_data), so
another version of Python gives another model. All random numbers have a fixed seed. The files written are Hugging
Face's: config.json, model.safetensors (bf16), tokenizer.json, tokenizer_config.json. A tool for developers; it needs
jax.
"""

import argparse
import hashlib
import math
import platform
import pydoc_data.topics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from safetensors.flax import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gpulease.client.decode.sample_models import TINY_MODEL
from gpulease.protocol.json_text import indented_json

LAYERS: Final = 2
WIDTH: Final = 128
HEADS: Final = 4
KEY_HEADS: Final = 2
HEAD_WIDTH: Final = 32
INNER_WIDTH: Final = 384
VOCABULARY: Final = 512
CONTEXT: Final = 256
ROPE_THETA: Final = 10_000.0
NORM_EPSILON: Final = 1e-5
END: Final = "<|end|>"
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

SEED: Final = 0
TRAINING_SHARE: Final = 0.95
BATCH: Final = 16
WARM_UP_STEPS: Final = 50
PEAK_RATE: Final = 4e-3
LAST_RATE_SHARE: Final = 0.02
WEIGHT_DECAY: Final = 1.0
FIRST_DECAY: Final = 0.9
SECOND_DECAY: Final = 0.98
STEPS_BETWEEN_LINES: Final = 100

Weights: TypeAlias = dict[str, jax.Array]
"""Tensors in f32 by their names in Hugging Face's files. A linear's weights are [outputs, inputs]."""

Tokens: TypeAlias = npt.NDArray[np.int32]


def topics() -> list[str]:
    """Return the texts of the standard library's help, in the order of their names."""
    return [text for _, text in sorted(pydoc_data.topics.topics.items())]


def trained_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE of 512 tokens; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokens_of(tokenizer: Tokenizer, texts: list[str]) -> Tokens:
    """Return the tokens of all texts, with the end token after each."""
    end = tokenizer.token_to_id(END)
    return np.array([token for text in texts for token in [*tokenizer.encode(text).ids, end]], np.int32)


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's tensors by their names in Hugging Face's files."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (WIDTH,),
            f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_WIDTH, WIDTH),
            f"{layer}.self_attn.k_proj.weight": (KEY_HEADS * HEAD_WIDTH, WIDTH),
            f"{layer}.self_attn.v_proj.weight": (KEY_HEADS * HEAD_WIDTH, WIDTH),
            f"{layer}.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_WIDTH),
            f"{layer}.post_attention_layernorm.weight": (WIDTH,),
            f"{layer}.mlp.gate_proj.weight": (INNER_WIDTH, WIDTH),
            f"{layer}.mlp.up_proj.weight": (INNER_WIDTH, WIDTH),
            f"{layer}.mlp.down_proj.weight": (WIDTH, INNER_WIDTH),
        }
    return shapes | {"model.norm.weight": (WIDTH,)}


def first_weights(random: np.random.Generator) -> Weights:
    """Return initial weights: ones for norms, and for the rest normal values that keep activations near one."""
    weights = {}
    for name, shape in shapes().items():
        if len(shape) == 1:
            weights[name] = jnp.ones(shape)
        else:
            scale = 0.02 if "embed" in name else shape[1] ** -0.5
            # The residual adds two outputs per layer, so their weights are smaller (GPT-2's initialisation).
            scale /= math.sqrt(2 * LAYERS) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            weights[name] = jnp.array(random.standard_normal(shape) * scale, jnp.float32)
    return weights


def _normed(values: jax.Array, weight: jax.Array) -> jax.Array:
    return values * jax.lax.rsqrt((values * values).mean(-1, keepdims=True) + NORM_EPSILON) * weight


def _turned(heads: jax.Array) -> jax.Array:
    """Rotate the two halves of each head of [batch, positions, heads, head width] by the position."""
    # As in Hugging Face's Llama: the two halves of a head are rotated against each other.
    frequencies = ROPE_THETA ** (-np.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
    angles = np.outer(np.arange(heads.shape[1]), frequencies)[:, None]
    cosines, sines = jnp.cos(angles), jnp.sin(angles)
    low, high = heads[..., : HEAD_WIDTH // 2], heads[..., HEAD_WIDTH // 2 :]
    return jnp.concatenate([low * cosines - high * sines, high * cosines + low * sines], -1)


def _attended(weights: Weights, layer: str, values: jax.Array) -> jax.Array:
    batch, positions = values.shape[:2]

    def heads(name: str, count: int) -> jax.Array:
        projected = values @ weights[f"{layer}.self_attn.{name}_proj.weight"].T
        return projected.reshape(batch, positions, count, HEAD_WIDTH)

    # Grouped-query attention: each key head serves several query heads.
    group = HEADS // KEY_HEADS
    q = _turned(heads("q", HEADS))
    k = jnp.repeat(_turned(heads("k", KEY_HEADS)), group, 2)
    v = jnp.repeat(heads("v", KEY_HEADS), group, 2)
    # The causal mask: a position attends to itself and to earlier ones.
    later = jnp.triu(jnp.full((positions, positions), -1e9), 1)
    shares = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(HEAD_WIDTH) + later)
    mixed = jnp.einsum("bhij,bjhd->bihd", shares, v).reshape(batch, positions, -1)
    return mixed @ weights[f"{layer}.self_attn.o_proj.weight"].T


def logits(weights: Weights, tokens: jax.Array) -> jax.Array:
    """Return logits [batch, positions, vocabulary] f32 of tokens [batch, positions]."""
    values = weights["model.embed_tokens.weight"][tokens]
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        values += _attended(weights, layer, _normed(values, weights[f"{layer}.input_layernorm.weight"]))
        inner = _normed(values, weights[f"{layer}.post_attention_layernorm.weight"])
        gate = jax.nn.silu(inner @ weights[f"{layer}.mlp.gate_proj.weight"].T)
        up = inner @ weights[f"{layer}.mlp.up_proj.weight"].T
        values += (gate * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
    # The head is tied to the embedding.
    return _normed(values, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T


def loss(weights: Weights, rows: jax.Array) -> jax.Array:
    """Return the mean of -ln(probability) of each token except the first in rows [batch, positions + 1]."""
    chances = jax.nn.log_softmax(logits(weights, rows[:, :-1]))
    return -jnp.take_along_axis(chances, rows[:, 1:, None], -1).mean()


def rate(step: jax.Array, steps: jax.Array) -> jax.Array:
    """Return the learning rate of a step: a linear warm-up, then a cosine decay."""
    fall = 0.5 * (1 + jnp.cos(jnp.pi * step / steps))
    return PEAK_RATE * jnp.minimum(1.0, step / WARM_UP_STEPS) * (LAST_RATE_SHARE + (1 - LAST_RATE_SHARE) * fall)


def _updated(
    weights: Weights, first: Weights, second: Weights, rows: jax.Array, step: jax.Array, steps: jax.Array
) -> tuple[Weights, Weights, Weights, jax.Array]:
    """Make one step of AdamW (arXiv 1711.05101)."""
    value, slopes = jax.value_and_grad(loss)(weights, rows)
    first = {name: FIRST_DECAY * first[name] + (1 - FIRST_DECAY) * slope for name, slope in slopes.items()}
    second = {name: SECOND_DECAY * second[name] + (1 - SECOND_DECAY) * slope**2 for name, slope in slopes.items()}
    speed = rate(step, steps)
    new = {}
    for name, weight in weights.items():
        # The moments begin at zero; dividing corrects their bias.
        mean, square = first[name] / (1 - FIRST_DECAY**step), second[name] / (1 - SECOND_DECAY**step)
        # Norms are not decayed.
        decay = WEIGHT_DECAY if weight.ndim == 2 else 0.0
        new[name] = weight - speed * (mean / (jnp.sqrt(square) + 1e-8) + decay * weight)
    return new, first, second, value


def batches(tokens: Tokens, random: np.random.Generator) -> Iterator[Tokens]:
    """Yield rows [BATCH, CONTEXT + 1] that begin at random tokens, without end."""
    while True:
        # A row has one more token than the context: its last token is only predicted.
        starts = random.integers(0, len(tokens) - CONTEXT - 1, BATCH)
        yield np.stack([tokens[start : start + CONTEXT + 1] for start in starts])


def mean_loss(weights: Weights, tokens: Tokens) -> float:
    """Return the mean loss over all whole contexts of `tokens`."""
    starts = range(0, len(tokens) - CONTEXT - 1, CONTEXT)
    rows = np.stack([tokens[start : start + CONTEXT + 1] for start in starts])
    return float(np.mean([float(_loss_of(weights, row[None])) for row in rows]))


_loss_of = jax.jit(loss)
_update = jax.jit(_updated)


def train(training: Tokens, validation: Tokens, steps: int, seconds: float) -> Weights:
    """Train for `steps` steps, or until `seconds` have passed; print the losses on the way."""
    random = np.random.default_rng(SEED)
    weights = first_weights(random)
    first = second = {name: jnp.zeros_like(weight) for name, weight in weights.items()}
    print(f"parameters {sum(weight.size for weight in weights.values()):,}", flush=True)
    # The time limit is for quick trials; the published model ran all of its steps.
    began = time.monotonic()
    for step, rows in enumerate(batches(training, random), 1):
        weights, first, second, value = _update(weights, first, second, rows, float(step), float(steps))
        passed = time.monotonic() - began
        is_final = step == steps or passed > seconds
        if step == 1 or step % STEPS_BETWEEN_LINES == 0 or is_final:
            line = f"step {step:5}  loss {float(value):.3f}  validation loss {mean_loss(weights, validation):.3f}"
            print(f"{line}  {passed:.0f} s", flush=True)
        if is_final:
            break
    return weights


def write(folder: Path, weights: Weights, tokenizer: Tokenizer) -> None:
    """Write the model's files in Hugging Face's formats. The weights are written as they are given."""
    end = tokenizer.token_to_id(END)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "head_dim": HEAD_WIDTH,
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": INNER_WIDTH,
        "max_position_embeddings": CONTEXT,
        "mlp_bias": False,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KEY_HEADS,
        "rms_norm_eps": NORM_EPSILON,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
    }
    text = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(indented_json(config) + "\n")
    (folder / "tokenizer_config.json").write_text(indented_json(text) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the decode engine's tiny model.")
    parser.add_argument("--steps", type=int, default=1_500, help=f"steps of {BATCH} rows of {CONTEXT} tokens")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after these, before all steps")
    parser.add_argument("--to", type=Path, default=Path(TINY_MODEL), help="the folder to write")
    arguments = parser.parse_args()
    texts = topics()
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    print(
        f"python {platform.python_version()}, jax {jax.__version__}, steps {arguments.steps:,} of {BATCH} x {CONTEXT}"
    )
    print(f"text: {len(texts)} topics, {sum(map(len, texts)):,} characters, sha256 {digest}")
    # The last texts are for validation, so neither the tokenizer nor the weights see them.
    ends = np.cumsum([len(text) for text in texts])
    cut = int(np.searchsorted(ends, TRAINING_SHARE * ends[-1]))
    tokenizer = trained_tokenizer(texts[:cut])
    training, validation = tokens_of(tokenizer, texts[:cut]), tokens_of(tokenizer, texts[cut:])
    characters = sum(map(len, texts[cut:])) / len(validation)
    print(f"tokens: {len(training):,} to train on, {len(validation):,} to validate, {characters:.2f} characters each")
    weights = train(training, validation, arguments.steps, arguments.seconds)
    # Report the loss of the weights that are written, which bf16 has rounded.
    rounded = {name: weight.astype(jnp.bfloat16) for name, weight in weights.items()}
    write(arguments.to, rounded, tokenizer)
    last = mean_loss({name: weight.astype(jnp.float32) for name, weight in rounded.items()}, validation)
    print(f"validation loss of the weights in bf16 {last:.4f} ({last / math.log(2) / characters:.3f} bits a character)")


if __name__ == "__main__":
    main()
