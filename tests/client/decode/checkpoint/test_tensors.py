from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpulease.client.decode.checkpoint.tensors import (
    BLOCKS,
    Tensor,
    TensorType,
    q4_k_planes,
    q8_0_planes,
    rounded_to_bf16,
    row_bytes,
)
from gpulease.client.decode.decode_errors import ModelRejected
from helpers.made_models import random_blocks

ROWS, COLUMNS = 24, 512


def tensor_of(data: NDArray[np.uint8], kind: TensorType) -> Tensor:
    return Tensor("a", (data.shape[0], COLUMNS), kind, lambda begin, end: data[begin:end])


def made(kind: TensorType) -> NDArray[np.uint8]:
    if BLOCKS[kind][0] > 1:
        return random_blocks(kind, ROWS, COLUMNS)
    values = np.random.default_rng(1).standard_normal((ROWS, COLUMNS), np.float32)
    data: NDArray[Any] = quantize(values, GGMLQuantizationType[kind.name])
    return data.view(np.uint8)


def reference(data: NDArray[np.uint8], kind: TensorType) -> NDArray[np.float32]:
    values: NDArray[np.float32] = dequantize(data, GGMLQuantizationType[kind.name])
    return values


def in_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits: NDArray[Any] = quantize(values, GGMLQuantizationType.BF16)
    return bits.view(np.uint16)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=64))
def test_rounding_is_to_the_nearest_and_ties_to_even(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    values[np.isnan(values)] = 0
    assert (rounded_to_bf16(values) == in_bf16(values)).all()


def test_a_tie_goes_to_the_even_neighbour() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF, 0x7F7FFFFF, 0xFF800000], np.uint32)
    assert [hex(int(b)) for b in rounded_to_bf16(bits.view(np.float32))] == [
        "0x3f80", "0x3f82", "0x3f81", "0x3f81", "0x7f80", "0xff80"
    ]  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(st.integers(1, (1 << 23) - 1), st.booleans())
def test_what_is_no_number_stays_none(mantissa: int, is_negative: bool) -> None:
    values = np.array([is_negative << 31 | 0x7F800000 | mantissa], np.uint32).view(np.float32)
    assert np.isnan((rounded_to_bf16(values).astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize("kind", BLOCKS)
def test_values_are_the_library_s_whatever_rows_are_asked_for(kind: TensorType) -> None:
    data = made(kind)
    wanted, tensor = reference(data, kind), tensor_of(data, kind)
    for begin, end in ((0, ROWS), (0, 1), (5, 12), (ROWS - 1, ROWS)):
        assert (tensor.f32(begin, end).view(np.uint32) == wanted[begin:end].view(np.uint32)).all()
        assert (tensor.bf16(begin, end) == in_bf16(wanted[begin:end])).all()


def test_bf16_is_the_file_s_own_memory() -> None:
    data = made(TensorType.BF16)
    assert np.shares_memory(tensor_of(data, TensorType.BF16).bf16(3, 9), data)


def test_q8_0_as_the_kernel_computes_it_has_the_bits_of_the_library_s_values() -> None:
    """Compute as linear_q8_0 does: multiply a value by its block's scale in f32, and round to bf16."""
    data = made(TensorType.Q8_0)
    values, scales = q8_0_planes(data)
    assert (values.shape, scales.shape) == ((ROWS, COLUMNS), (ROWS, COLUMNS // 32))
    assert (str(values.dtype), str(scales.dtype)) == ("int8", "float16")
    computed = values.astype(np.float32) * np.repeat(scales.astype(np.float32), 32, 1)
    assert (rounded_to_bf16(computed) == tensor_of(data, TensorType.Q8_0).bf16(0, ROWS)).all()


def test_q4_k_as_the_kernel_computes_it_has_the_bits_of_the_library_s_values() -> None:
    """Use the indices of linear_q4_k: for column k the byte and its half, the group k / 32 and the block k / 256."""
    data = made(TensorType.Q4_K)
    values, factors, steps = q4_k_planes(data)
    assert (values.shape, factors.shape, steps.shape) == (
        (ROWS, COLUMNS // 2), (ROWS, COLUMNS // 256, 2), (ROWS, COLUMNS // 32, 2)
    )  # fmt: skip
    k = np.arange(COLUMNS)
    q = (values[:, k // 64 * 32 + k % 32] >> (k // 32 % 2 * 4).astype(np.uint8)) & 15
    both = factors[:, k // 256].astype(np.float32) * steps[:, k // 32].astype(np.float32)
    computed = both[..., 0] * q.astype(np.float32) - both[..., 1]
    assert (computed == reference(data, TensorType.Q4_K)).all()
    assert (rounded_to_bf16(computed) == tensor_of(data, TensorType.Q4_K).bf16(0, ROWS)).all()


@pytest.mark.parametrize("kind", [TensorType.Q8_0, TensorType.Q4_K])
def test_planes_of_some_rows_are_those_rows_of_the_planes(kind: TensorType) -> None:
    tensor = tensor_of(made(kind), kind)
    for part, whole in zip(tensor.planes(3, 11), tensor.planes(0, ROWS), strict=True):
        assert (part == whole[3:11]).all()
        assert part.flags.c_contiguous


def test_a_row_that_ends_inside_a_block_is_refused() -> None:
    assert row_bytes(TensorType.Q4_K, 512, "a file: tensor a") == 288
    with pytest.raises(ModelRejected, match="a file: tensor a: the number of columns must be a multiple of 256"):
        row_bytes(TensorType.Q4_K, 288, "a file: tensor a")
