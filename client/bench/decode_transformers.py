"""Times of transformers' own models with a static cache, one forward call per step.

    python -m gpulease.client.bench.decode_transformers SHAPE BATCH,... CONTEXT,...

Weights are random, in bf16; attention is torch's. Sampling takes the highest logit. Steps are first called one by one,
as `generate` does without compilation. Then all are measured again, each as a CUDA graph of such a call.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, StaticCache

from gpulease.client.bench.decode_shapes import SHAPES
from gpulease.client.bench.decode_steps import numbers_of
from gpulease.client.bench.decode_torch import STEPS, WARM_STEPS, recorded, step_s
from gpulease.client.bench.figures import print_figures
from gpulease.client.decode import Family, ModelConfig

SPARE_STEPS: Final = 8
"""Number of the cache's positions beyond those of timed steps: for the first step, and for recording."""

FAMILIES: Final = {Family.LLAMA: (LlamaConfig, LlamaForCausalLM), Family.QWEN3: (Qwen3Config, Qwen3ForCausalLM)}


def model_of(config: ModelConfig, device: str) -> Any:
    """Make transformers' model of a shape on a device."""
    settings, model = FAMILIES[config.family]
    model_settings = settings(
        vocab_size=config.vocabulary,
        hidden_size=config.width,
        intermediate_size=config.inner_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.key_heads,
        head_dim=config.head_width,
        max_position_embeddings=config.context,
        rms_norm_eps=config.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.is_tied,
        attn_implementation="sdpa",
    )
    # Make the weights in bf16 on the device, without a copy.
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        return model(model_settings).eval()


class StaticSteps:
    """Steps of a batch, each at the position after the previous one. The first is at `context`."""

    def __init__(self, model: Any, batch: int, context: int) -> None:
        """Make a cache with room for the steps, marked as filled up to `context`."""
        device = model.device
        self._model = model
        self.cache = StaticCache(config=model.config, max_cache_len=context + WARM_STEPS + STEPS + SPARE_STEPS)
        self.tokens = torch.zeros((batch, 1), dtype=torch.long, device=device)
        self._position = torch.full((1, 1), context, dtype=torch.long, device=device)
        # The cache allocates its tensors in the first step. Their contents do not affect a step's time.
        self.step()
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(context)

    def step(self) -> None:
        """Replace each token with its sequence's next one."""
        model_output = self._model(
            input_ids=self.tokens, past_key_values=self.cache, position_ids=self._position, use_cache=True
        )
        self.tokens.copy_(model_output.logits[:, -1].argmax(-1, keepdim=True))


def measure(shape: str, batches: Sequence[int], contexts: Sequence[int]) -> None:
    """Print a shape's figures."""
    model = model_of(SHAPES[shape], "cuda")
    # Measure graphs last, because a recording that fails makes the process's context unusable.
    steps_by_name: dict[str, Callable[[StaticSteps], Callable[[], object]]] = {
        "transformers": lambda steps: steps.step,
        "transformers_graph": lambda steps: recorded(steps.step),
    }
    for name, make_step in steps_by_name.items():
        for context in contexts:
            for batch in batches:
                took_s = step_s(make_step(StaticSteps(model, batch, context)), torch.cuda.synchronize)
                print_figures({"figure": name, "shape": shape, "batch": batch, "context": context, "ms": took_s * 1e3})


if __name__ == "__main__":
    shape, *lists = sys.argv[1:]
    if torch.cuda.is_available():
        with torch.no_grad():
            measure(shape, *map(numbers_of, lists))
    else:
        print_figures({"figure": "transformers", "shape": shape, "skipped": "torch sees no card"})
