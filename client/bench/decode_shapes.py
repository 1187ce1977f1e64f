"""Shapes of models with which the decode engine is measured; their weights are random."""

from typing import Final

from gpulease.client.decode import Family, ModelConfig

SHAPES: Final = {
    "two-layers": ModelConfig(Family.LLAMA, 2, 64, 4, 2, 32, 128, 512, 2048, 10_000.0, 1e-5, is_tied=True),
    "llama-1b": ModelConfig(Family.LLAMA, 16, 2048, 32, 8, 64, 8192, 128256, 131072, 500_000.0, 1e-5, is_tied=True),
    "qwen3-0.6b": ModelConfig(
        Family.QWEN3, 28, 1024, 16, 8, 128, 3072, 151936, 40960, 1e6, 1e-6, is_tied=True, has_head_norm=True
    ),
    "llama-8b": ModelConfig(Family.LLAMA, 32, 4096, 32, 8, 128, 14336, 128256, 131072, 500_000.0, 1e-5, is_tied=False),
}
"""The shapes of Llama-3.2-1B, Qwen3-0.6B and Llama-3.1-8B, and one for a machine without a card."""
