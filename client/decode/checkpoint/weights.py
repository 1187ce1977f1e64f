"""Handles of a model's weights in a session's memory, in the layouts that the kernels read."""

from dataclasses import dataclass
from enum import StrEnum

from gpulease.client.decode.model_config import ModelConfig
from gpulease.client.handles import Buffer


class Layout(StrEnum):
    """Layouts of a linear's weights in memory. The names are parts of kernels' names."""

    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_K = "q4_k"
    FP8 = "fp8"
    AWQ = "awq"


@dataclass(frozen=True, slots=True)
class Plane:
    """A part of the allocation that contains a model.

    Attributes:
        buffer: The allocation.
        offset: The offset of the plane in the allocation, in bytes.
        size_bytes: The plane's size.
    """

    buffer: Buffer
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Linear:
    """Weights [rows, columns] of y = x W^T.

    Attributes:
        layout: The layout of `planes`.
        rows: Number of values of y.
        columns: Number of values of x; a multiple of 32, for Q4_K of 256, for AWQ of 128.
        planes: Planes in the order of the kernel's parameters. The layout decides them:

    - BF16: w [rows, columns] bf16.
    - Q8_0: w [rows, columns] i8; scales [rows, columns / 32] f16.
    - Q4_K: w [rows, columns / 2] u8; scales [rows, columns / 256, 2] f16, GGML's d and dmin; steps [rows, columns / 32,
      2] u8, each group's 6-bit scale and minimum. In w, byte i of each group of 64 values has value i in its low four
      bits and value i + 32 in the high ones, as in GGML's blocks.
    - FP8: w [rows, columns] float8 e4m3; scales [rows, ceil(columns / 128)] f32.
    - AWQ: w as for Q4_K; scales [rows, columns / 128] f16; zeros [rows, columns / 128] u8.
    """

    layout: Layout
    rows: int
    columns: int
    planes: tuple[Plane, ...]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's weights. Norms and biases are f32.

    Attributes:
        attention_norm: [width].
        qkv: Rows of q, then k, then v, with each head's values in Hugging Face's order (halves, not pairs, are
            rotated).
        qkv_bias: [rows of qkv], or None.
        q_norm: [head_width], or None.
        k_norm: [head_width], or None.
        output: The attention's output projection.
        inner_norm: [width].
        gate_up: Rows of gate, then up; with experts, these rows of each expert, one expert after another.
        down: The projection back to `width`; with experts, the projections of all experts, one after another.
        attention_outer_norm: [width], of the attention's output; None if the model has none.
        inner_outer_norm: [width], of the output of `down`; None if the model has none.
        router: The linear that scores the layer's experts; None if the layer has no experts.
    """

    attention_norm: Plane
    qkv: Linear
    qkv_bias: Plane | None
    q_norm: Plane | None
    k_norm: Plane | None
    output: Linear
    inner_norm: Plane
    gate_up: Linear
    down: Linear
    attention_outer_norm: Plane | None = None
    inner_outer_norm: Plane | None = None
    router: Linear | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A loaded model.

    Attributes:
        config: Its shape.
        embedding: [vocabulary, width] bf16.
        layers: Its layers.
        norm: [width] f32, before the head.
        head: Rows are tokens. If the head is tied to the embedding, its plane is `embedding`.
        cosines: [positions, head_width / 2] f32.
        sines: [positions, head_width / 2] f32.
        size_bytes: Size of the whole model in memory.
        local_tables: Cosines and sines for layers with a window, if they have a different base.
    """

    config: ModelConfig
    embedding: Plane
    layers: tuple[LayerWeights, ...]
    norm: Plane
    head: Linear
    cosines: Plane
    sines: Plane
    size_bytes: int
    local_tables: tuple[Plane, Plane] | None = None

    def rotary_tables(self, layer: int) -> tuple[Plane, Plane]:
        """Return the cosines and sines of a layer. Layers with a window may have their own."""
        if self.local_tables is not None and self.config.is_local(layer):
            return self.local_tables
        return self.cosines, self.sines
