"""A tensor of a model's files, read by rows: as bf16, as f32, or as the planes of a packed linear.

GGML's types and their blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.checkpoint.weights import Layout
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.model_config import MAX_SIZE


class TensorType(StrEnum):
    """The encodings of tensors' values in files, by their names in GGML and safetensors."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q8_0 = "Q8_0"
    Q4_K = "Q4_K"
    Q6_K = "Q6_K"
    FP8 = "FP8"
    AWQ = "AWQ"


BLOCKS: Final = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q8_0: (32, 34),
    TensorType.Q4_K: (256, 144),
    TensorType.Q6_K: (256, 210),
}
"""For each type with blocks, the number of values in a block and the block's bytes."""

GROUP: Final = 128
"""Number of adjacent columns that share one scale in a row of FP8 or AWQ."""

PACKED: Final = {
    TensorType.Q8_0: Layout.Q8_0,
    TensorType.Q4_K: Layout.Q4_K,
    TensorType.FP8: Layout.FP8,
    TensorType.AWQ: Layout.AWQ,
}
"""The types that kernels read without conversion, and their layouts."""

SLICE_VALUES: Final = 1 << 17
"""Number of values that are converted together: few enough to stay in a core's cache between the conversion's steps."""

RowReader = Callable[[int, int], NDArray[np.uint8]]
"""Returns the bytes of rows [begin, end) as [end - begin, bytes of a row], as a view if possible.

A `FileRows` can also copy them to given memory.
"""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a checkpoint.

    Attributes:
        name: Its name in Hugging Face's checkpoints.
        shape: Rows and columns, or, for a vector, columns. Rows are in Hugging Face's order.
        kind: The encoding of its values.
        read: Returns the bytes of its rows.
        factors: For FP8 and AWQ, readers of the rows' other planes, which files store apart from the values.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorType
    read: RowReader
    factors: tuple[RowReader, ...] = ()

    @property
    def rows(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def columns(self) -> int:
        return self.shape[-1]

    def f32(self, begin: int, end: int) -> NDArray[np.float32]:
        """Return rows [begin, end) as f32 [end - begin, columns]."""
        if self.kind is TensorType.FP8:
            return fp8_values(*self.planes(begin, end))
        if self.kind is TensorType.AWQ:
            return awq_values(*self.planes(begin, end))
        data = self.read(begin, end)
        if self.kind is TensorType.F32:
            return data.view(np.float32)
        if self.kind is TensorType.F16:
            return data.view(np.float16).astype(np.float32)
        if self.kind is TensorType.BF16:
            # bf16 is the upper half of an f32.
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return _dequantised(data, self.kind)

    def bf16(self, begin: int, end: int) -> NDArray[np.uint16]:
        """Return rows [begin, end) as bf16 [end - begin, columns], rounded to nearest, ties to even.

        If the tensor is bf16 already, this is a view of the result of `read`.
        """
        if self.kind is TensorType.BF16:
            return self.read(begin, end).view(np.uint16)
        # Convert in slices that fit a core's cache, instead of making an f32 copy of the whole chunk.
        result = np.empty((end - begin, self.columns), np.uint16)
        step = max(1, SLICE_VALUES // self.columns)
        for at in range(begin, end, step):
            result[at - begin : at - begin + step] = rounded_to_bf16(self.f32(at, min(at + step, end)))
        return result

    def planes(self, begin: int, end: int) -> tuple[NDArray[Any], ...]:
        """Return rows [begin, end) as the packed planes of `weights.Linear`.

        Raises KeyError for a type without planes.
        """
        data = self.read(begin, end)
        match PACKED[self.kind]:
            case Layout.Q8_0:
                return q8_0_planes(data)
            case Layout.Q4_K:
                return q4_k_planes(data)
            case Layout.FP8:
                return data, self.factors[0](begin, end).view(np.float32)
            case _:
                scales, zeros = (factors(begin, end) for factors in self.factors)
                return data, scales.view(np.float16), zeros


def plane_bytes(kind: TensorType, columns: int) -> tuple[int, ...]:
    """Return the size of a row in each plane of a packed type. Raises KeyError for another type."""
    match PACKED[kind]:
        case Layout.Q8_0:
            # K values, and an f16 scale per 32 of them.
            return columns, columns // 16
        case Layout.Q4_K:
            # K / 2 bytes of values, two f16 factors per 256, a scale and a minimum per 32.
            return columns // 2, columns // 64, columns // 16
        case Layout.FP8:
            # K values, and an f32 scale per 128.
            return columns, -(-columns // GROUP) * 4
        case _:
            # K / 2 bytes of values, an f16 scale and a zero point per 128.
            return columns // 2, columns // GROUP * 2, columns // GROUP


def reordered_heads(rows: RowReader, order: NDArray[np.int64]) -> RowReader:
    """Return a reader of q's or k's rows, in which row i of each head is row order[i] of that head in `rows`."""
    width = len(order)

    def read(begin: int, end: int) -> NDArray[np.uint8]:
        places = np.arange(begin, end)
        place = places % width
        # Rows change places only within a head, so read all heads that contain rows of the range.
        first, last = begin // width * width, -(-end // width) * width
        ordered: NDArray[np.uint8] = rows(first, last)[places - place + order[place] - first]
        return ordered

    return read


def row_bytes(kind: TensorType, columns: int, name: str) -> int:
    """Return the size of a row. Raises ModelRejected, which names the tensor `name`, if rows end inside a block."""
    # A row of a quantised tensor must consist of whole blocks, so that rows can be read separately.
    values, nbytes = BLOCKS[kind]
    if columns % values:
        raise ModelRejected(
            f"{name}: the number of columns must be a multiple of {values}, the values in a block of {kind}, not "
            f"{columns}"
        )
    return columns // values * nbytes


def rounded_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bf16, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    # Adding 0x7FFF, plus 1 if the last bit that remains is set, carries into that bit exactly if the dropped half
    # rounds up.
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    result = rounded.astype(np.uint16)
    if (missing := np.isnan(values)).any():
        # The sum above may turn a NaN into an infinity, so set all NaNs to the quiet NaN.
        result[missing] = 0x7FC0
    return result


def q8_0_planes(data: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    """Split rows of Q8_0, blocks of an f16 scale and 32 bytes, into values i8 [R, K] and scales f16 [R, K / 32]."""
    # A block of Q8_0: 2 bytes of scale, then 32 values.
    blocks = data.reshape(data.shape[0], -1, 34)
    values = blocks[:, :, 2:].reshape(data.shape[0], -1).view(np.int8)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)
    return values, scales.reshape(data.shape[0], -1)


def q4_k_planes(data: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    """Split rows of Q4_K: a block has two f16 factors, 12 bytes with eight 6-bit scales and minimums, and 128 bytes.

    Values u8 [R, K / 2] are the file's bytes. Factors are f16 [R, K / 256, 2]; steps, u8 [R, K / 32, 2], have each
    group's scale and minimum.

    The 12 bytes are packed as get_scale_min_k4 in ggml-quants.c reads them. The first four have the scales of groups 0
    to 3 in their low 6 bits, the next four the minimums of these groups. The last four have the low 4 bits of the
    scale and the minimum of groups 4 to 7; their high 2 bits are the top bits of the first eight bytes.
    """
    # A block of Q4_K: 4 bytes of factors, 12 bytes of scales and minimums, 128 bytes of values.
    rows = data.shape[0]
    blocks = data.reshape(rows, -1, 144)
    values = blocks[:, :, 16:].reshape(rows, -1)
    factors = np.ascontiguousarray(blocks[:, :, :4]).view(np.float16)
    first, second, last = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    # Unpack each scale and minimum to a byte, because the kernel reads groups in any order.
    steps = np.empty((rows, blocks.shape[1], 8, 2), np.uint8)
    steps[:, :, :4, 0] = first & 63
    steps[:, :, :4, 1] = second & 63
    steps[:, :, 4:, 0] = (last & 15) | (first >> 6 << 4)
    steps[:, :, 4:, 1] = (last >> 4) | (second >> 6 << 4)
    return values, factors, steps.reshape(rows, -1, 2)


def fp8_values(values: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the values of FP8's planes: float8 e4m3, times a scale for each GROUP of columns."""
    # Put the byte's bits into an f32, which then is the value times 2^-120 (OCP OFP8: a bias of 7, and 0x7F is NaN).
    bits = (values & np.uint32(128)) << np.uint32(24) | (values & np.uint32(127)) << np.uint32(20)
    with np.errstate(invalid="ignore", over="ignore"):
        unscaled = np.where(values & 127 == 127, np.float32(np.nan), bits.view(np.float32) * np.float32(2.0**120))
        result: NDArray[np.float32] = unscaled * np.repeat(scales, GROUP, 1)[:, : values.shape[1]]
    return result


def awq_values(values: NDArray[np.uint8], scales: NDArray[np.float16], zeros: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the values of AWQ's planes: 4 bits minus a zero point, times a scale, for each GROUP of columns."""
    pairs = values.reshape(len(values), -1, 1, 32)
    unpacked = np.concatenate([pairs & 15, pairs >> 4], 2).reshape(len(values), -1, GROUP).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return ((unpacked - zeros[:, :, None]) * scales[:, :, None].astype(np.float32)).reshape(len(values), -1)


def gemma_embedding_scale(width: int) -> float:
    """Return the square root of the width, rounded to bf16: transformers rounds it to the embedding's type."""
    words = rounded_to_bf16(np.array([math.sqrt(min(max(width, 0), MAX_SIZE))], np.float32)).astype(np.uint32) << 16
    return float(words.view(np.float32)[0])


def with_one_added(tensor: Tensor) -> Tensor:
    """Return a tensor with 1 added to each value, in f32: Gemma's files contain norm weights minus 1."""

    def read(begin: int, end: int) -> NDArray[np.uint8]:
        return (tensor.f32(begin, end) + np.float32(1)).view(np.uint8)

    return Tensor(tensor.name, tensor.shape, TensorType.F32, read)


def _dequantised(data: NDArray[np.uint8], kind: TensorType) -> NDArray[np.float32]:
    # Import this late, because a checkpoint without quantised tensors does not need gguf.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    # Pass the data as one row: the library processes 16 rows together, which is slow if they are short. Suppress
    # warnings about infinite scales in a broken file.
    with np.errstate(invalid="ignore", over="ignore"):
        values: NDArray[np.float32] = dequantize(data.reshape(1, -1), GGMLQuantizationType[kind.name])
    return values.reshape(data.shape[0], -1)
