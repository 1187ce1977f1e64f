"""Shapes of models with random weights. Each uses another kernel or path of the engine."""

from dataclasses import replace
from typing import Final

from gpulease.client.decode.model_config import Experts, Family, Gate, KvDtype, LinearScaling, ModelConfig

TINY: Final = ModelConfig(
    family=Family.LLAMA,
    layers=2,
    width=128,
    heads=4,
    key_heads=2,
    head_width=32,
    inner_width=384,
    vocabulary=512,
    context=256,
    rope_theta=10_000.0,
    norm_epsilon=1e-5,
    is_tied=True,
)

LIGHT: Final = replace(TINY, width=64, inner_width=96)
"""TINY's blocks and vocabulary in three quarters of its time: for tests of what happens between steps."""

SHARED_KEYS: Final = replace(
    TINY, layers=1, width=192, heads=3, key_heads=1, head_width=64, inner_width=256, vocabulary=160
)
"""Three query heads for each key head, 64 wide."""

WIDE: Final = replace(TINY, layers=1, width=1056, heads=2, key_heads=1, inner_width=1024, vocabulary=96)
"""The sums of every linear except the attention's output are split into parts, most of them unequal."""

SMALL: Final = replace(TINY, layers=1, width=64, heads=2, key_heads=1, inner_width=96, vocabulary=64, is_tied=False)
BIASED: Final = replace(SMALL, family=Family.QWEN2, has_bias=True)
HEAD_NORMS: Final = replace(SMALL, family=Family.QWEN3, head_width=128, has_head_norm=True)

FP8_KEYS: Final = replace(BIASED, kv_dtype=KvDtype.FP8)
"""Keys and values in FP8, with biases, which make some keys large."""

FP8_WINDOWS: Final = replace(SMALL, layers=2, windows=(None, 5), kv_dtype=KvDtype.FP8)

WINDOWS: Final = replace(SMALL, layers=2, windows=(None, 5))
"""One layer that sees all positions, and one that sees five."""

GEMMA: Final = replace(
    SMALL,
    family=Family.GEMMA3,
    layers=3,
    width=96,
    head_width=256,
    is_tied=True,
    rope_scaling=LinearScaling(8.0),
    has_head_norm=True,
    windows=(21, None, 21),
    gate=Gate.GELU,
    has_outer_norms=True,
    embedding_scale=9.8125,
    score_divisor=168.0,
    local_rope_theta=500.0,
)
"""Gemma 3's layers. One kernel computes both gate and up."""

GEMMA_IN_PARTS: Final = replace(GEMMA, layers=2, width=1056, inner_width=1024, head_width=32, windows=(21, None))
"""Gemma 3's layers with sums that are split into parts, and with norms of rows that some thread blocks do not have."""

EXPERTS: Final = replace(
    SMALL,
    family=Family.QWEN3_MOE,
    layers=3,
    width=96,
    head_width=32,
    has_head_norm=True,
    experts=Experts(count=7, chosen=3, width=64, is_normalised=True, dense_layers=(1,)),
)
"""Layers with experts, and one without."""

WIDTHS: Final = {f"heads {width} wide": replace(SMALL, head_width=width) for width in (80, 96, 256)}
WINDOWED: Final = {
    f"heads {width} wide, a window": replace(SMALL, head_width=width, windows=(21,))
    for width in (32, 64, 80, 96, 128, 256)
}
"""Heads of every width that no other model here has, and of all widths with a window that ends within a tile."""

MIDDLING: Final = replace(
    TINY, layers=4, width=576, heads=9, key_heads=3, head_width=64, inner_width=1536, vocabulary=4096
)
"""Four layers with the same shape as SmolLM2-135M's."""

FP8_WIDTHS: Final = {
    f"keys in FP8, heads {width} wide{', a window' if window else ''}": replace(
        SMALL, layers=2, head_width=width, windows=(None, window) if window else (), kv_dtype=KvDtype.FP8
    )
    for width, window in ((32, 0), (64, 0), (64, 21), (80, 21), (96, 0), (128, 0), (128, 21), (256, 0))
}
"""Keys and values in FP8, for heads of every width."""
