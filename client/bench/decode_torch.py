"""Times of a plain torch loop with a model's shape, recorded as a CUDA graph.

    python -m gpulease.client.bench.decode_torch SHAPE BATCH,... CONTEXT,...

Linear layers use cuBLAS, and attention is torch's. The keys and values of each sequence are contiguous. Sampling takes
the highest logit. This is the loop that a user without an engine would write.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F

from gpulease.client.bench.decode_shapes import SHAPES
from gpulease.client.bench.decode_steps import numbers_of
from gpulease.client.bench.figures import print_figures
from gpulease.client.decode import ModelConfig

WARM_STEPS: Final = 3
STEPS: Final = 20


def _weights(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / math.sqrt(shape[-1])


class TorchModel:
    """A model of a shape, with random weights and one rotary table, as a user would write it in torch."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        width, heads = config.width, config.heads * config.head_width
        # Join weights as engines do: queries, keys and values in one matrix, gate and up in another.
        columns = heads + 2 * config.key_heads * config.head_width
        shapes = ((columns, width), (width, heads), (2 * config.inner_width, width), (width, config.inner_width))
        self.layers = [[_weights(*shape) for shape in shapes] for _ in range(config.layers)]
        self.embedding = _weights(config.vocabulary, width)
        self.norm = torch.ones(width, device="cuda", dtype=torch.bfloat16)
        half = config.head_width // 2
        self.cosines, self.sines = _weights(half), _weights(half)

    def rotate(self, x: Any) -> Any:
        """Apply the rotary embedding of one position."""
        half = self.config.head_width // 2
        left, right = x[..., :half], x[..., half:]
        rotated_left = torch.addcmul(left * self.cosines, right, self.sines, value=-1)
        return torch.cat([rotated_left, torch.addcmul(right * self.cosines, left, self.sines)], -1)

    def normalise(self, x: Any) -> Any:
        """The RMS norm of each row, with the model's epsilon."""
        return F.rms_norm(x, (self.config.width,), self.norm, self.config.norm_epsilon)

    def step(self, tokens: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """Replace each token with its sequence's next one. Tokens are at the last position of `keys` and `values`."""
        config, batch = self.config, len(tokens)
        heads, key_heads, inner = config.heads, config.key_heads, config.inner_width
        h = self.embedding[tokens]
        for (qkv, output, gate_up, down), key, value in zip(self.layers, keys, values, strict=True):
            y = F.linear(self.normalise(h), qkv).view(batch, heads + 2 * key_heads, 1, config.head_width)
            # Rotate queries and keys in one pass, which takes half as many kernels as two passes.
            q, k = self.rotate(y[:, : heads + key_heads]).split([heads, key_heads], 1)
            # Store the new key and value at the last position; attention reads all positions.
            key[:, :, -1:], value[:, :, -1:] = k, y[:, heads + key_heads :]
            attended = F.scaled_dot_product_attention(q, key, value, enable_gqa=True)
            h = h + F.linear(attended.reshape(batch, -1), output)
            gates = F.linear(self.normalise(h), gate_up)
            h = h + F.linear(F.silu(gates[:, :inner]) * gates[:, inner:], down)
        # Write in place, so that a graph's next replay reads the new tokens.
        tokens.copy_(F.linear(self.normalise(h), self.embedding).argmax(-1))


def model_step_s(model: TorchModel, batch: int, context: int) -> float:
    """Return seconds per step of the model, as a CUDA graph."""
    config = model.config
    shape = (batch, config.key_heads, context, config.head_width)
    # Make random keys and values of `context` positions for each layer.
    caches = [
        [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(config.layers)] for _ in range(2)
    ]
    tokens = torch.zeros(batch, dtype=torch.long, device="cuda")
    return step_s(recorded(lambda: model.step(tokens, *caches)), torch.cuda.synchronize)


def step_s(step: Callable[[], object], fence: Callable[[], object]) -> float:
    """Return seconds per call of `step`, over STEPS calls after WARM_STEPS."""
    for _ in range(WARM_STEPS):
        step()
    # Wait for everything before the clock starts, and again before it stops.
    fence()
    begin_s = time.perf_counter()
    for _ in range(STEPS):
        step()
    fence()
    return (time.perf_counter() - begin_s) / STEPS


def recorded(step: Callable[[], object]) -> Callable[[], object]:
    """Record a step as a CUDA graph, and return its replay."""
    # Warm up on another stream, as CUDA graphs in torch require.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], object] = graph.replay
    return replay


if __name__ == "__main__":
    name, batches, contexts = sys.argv[1:]
    # Use no memory for gradients.
    with torch.no_grad():
        model = TorchModel(SHAPES[name])
        for context in numbers_of(contexts):
            for batch in numbers_of(batches):
                took_s = model_step_s(model, batch, context)
                figure = {"figure": "torch", "shape": name, "batch": batch, "context": context}
                print_figures(figure | {"ms": took_s * 1e3, "tokens_per_s": batch / took_s})
