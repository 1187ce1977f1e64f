"""Compare `linear` of each layout and tile with numpy's float64, and bit for bit with the other tiles."""

from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from gpulease.client.decode.checkpoint.tensors import q4_k_planes, q8_0_planes
from gpulease.client.decode.engine.kernel_library import manifest
from gpulease.client.decode.model_config import Gate
from helpers.decode_kernels import Array, KernelRig, bf16, floats
from helpers.packed_models import E4M3, e4m3_codes

TILES = (16, 64, 128)
Planes = dict[str, Any]


def multiplied(rig: KernelRig, layout: str, tile: int, x: Array, planes: Planes, rows: int, chunk: int = 0) -> Array:
    """parts [splits, R, N] of bf16 x [R, K] and a weight of N rows; one part of all columns if `chunk` is 0."""
    name = f"linear_{layout}_{tile}"
    constants = manifest().kernels[name].constants
    count, columns = x.shape
    chunk = chunk or columns
    splits = -(-columns // chunk)
    parts = np.full((splits, count, rows), np.nan, np.float32)
    grid = (-(-count // constants["BM"]), -(-rows // constants["BN"]), splits)
    rig.launch(name, grid, parts=parts, x=x, **planes, R=count, N=rows, K=columns, chunk=chunk)
    return parts


def random_bf16(rng: np.random.Generator, *shape: int) -> NDArray[np.uint16]:
    return bf16(rng.normal(0, 1, shape))


def check_close(parts: Array, x: Array, w: Array, chunk: int) -> None:
    """Compare each part with float64.

    A tensor core cuts the sum of 16 products and what is there already behind 25 bits of the largest: the error is at
    most 2^-24 of the sum of the products' sizes for each 16 columns.
    """
    for part, begin in zip(parts, range(0, x.shape[1], chunk), strict=True):
        a, b = floats(x[:, begin : begin + chunk]), floats(w[:, begin : begin + chunk])
        bound = (-(-a.shape[1] // 16)) * 2.0**-24 * (abs(a) @ abs(b).T)
        assert (abs(part - a @ b.T) <= bound).all()


@pytest.mark.parametrize(("rows", "columns", "count"), [(1, 32, 1), (65, 96, 17), (130, 256, 33)])
def test_bf16_is_float64_s_within_rounding(rig: KernelRig, rows: int, columns: int, count: int) -> None:
    rng = np.random.default_rng(rows)
    x, w = random_bf16(rng, count, columns), random_bf16(rng, rows, columns)
    check_close(multiplied(rig, "bf16", 16, x, {"w": w}, rows), x, w, columns)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout", ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("q8_0", "q4_k", "fp8", "awq"))]
)
def test_all_tiles_give_equal_bits(rig: KernelRig, layout: str) -> None:
    """The last tiles of rows and of columns, and the last part, are incomplete."""
    rng = np.random.default_rng(2)
    x = random_bf16(rng, 130, 768)
    planes, _ = random_weight(rng, layout, 70, 768)
    first, *others = [multiplied(rig, layout, tile, x, planes, 70, 512) for tile in TILES]
    for other in others:
        assert other.tobytes() == first.tobytes()


def test_a_row_s_bits_are_those_that_it_has_alone(rig: KernelRig) -> None:
    rng = np.random.default_rng(3)
    x, w = random_bf16(rng, 20, 160), random_bf16(rng, 64, 160)
    together = multiplied(rig, "bf16", 16, x, {"w": w}, 64)[0]
    for row in (0, 15, 16, 19):
        assert multiplied(rig, "bf16", 16, x[row : row + 1], {"w": w}, 64).tobytes() == together[row].tobytes()


def test_parts_are_those_of_their_columns_alone(rig: KernelRig) -> None:
    """The last part has fewer columns."""
    rng = np.random.default_rng(4)
    x, w = random_bf16(rng, 5, 1120), random_bf16(rng, 40, 1120)
    parts = multiplied(rig, "bf16", 16, x, {"w": w}, 40, 512)
    assert len(parts) == 3
    check_close(parts, x, w, 512)
    for part, begin in zip(parts, (0, 512, 1024), strict=True):
        its = {"w": np.ascontiguousarray(w[:, begin : begin + 512])}
        alone = multiplied(rig, "bf16", 16, np.ascontiguousarray(x[:, begin : begin + 512]), its, 40)
        assert part.tobytes() == alone[0].tobytes()


def test_sums_over_columns_ascend(rig: KernelRig) -> None:
    """In f32, 1 added to 2^40 is lost; if 2^40 was subtracted before, it stays. So the order of the sum shows."""
    x = bf16(np.ones((1, 64)))
    w = np.zeros((2, 64))
    w[0, [0, 16, 32]] = 1, 2.0**40, -(2.0**40)
    w[1, [0, 16, 32]] = 2.0**40, -(2.0**40), 1
    assert multiplied(rig, "bf16", 16, x, {"w": bf16(w)}, 2).tolist() == [[[0, 1]]]


# --- packed weights ---


def random_weight(rng: np.random.Generator, layout: str, rows: int, columns: int) -> tuple[Planes, Array]:
    """Return the random planes of a weight, and its values as bf16 by gguf or by the format's definition."""
    if layout == "bf16":
        w = random_bf16(rng, rows, columns)
        return {"w": w}, w
    if layout in ("fp8", "awq"):
        return random_fp8(rng, rows, columns) if layout == "fp8" else random_awq(rng, rows, columns)
    kind = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_k": gguf.GGMLQuantizationType.Q4_K}[layout]
    values, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // values, nbytes), np.uint8)
    factors = 1 if layout == "q8_0" else 2
    halves = (rng.normal(0, 0.01, (rows, columns // values, factors))).astype(np.float16)
    blocks[:, :, : 2 * factors] = halves.view(np.uint8)
    data = blocks.reshape(rows, -1)
    planes = q8_0_planes(data) if layout == "q8_0" else q4_k_planes(data)
    names = ("w", "scales") if layout == "q8_0" else ("w", "scales", "steps")
    named = {name: np.ascontiguousarray(plane) for name, plane in zip(names, planes, strict=True)}
    return named, bf16(gguf.dequantize(data, kind))


def random_fp8(rng: np.random.Generator, rows: int, columns: int) -> tuple[Planes, Array]:
    """Return the codes nearest to normally distributed values, with a scale for each 128 columns of a row."""
    codes = e4m3_codes(rng, rows, columns)
    scales = rng.normal(0, 0.01, (rows, -(-columns // 128))).astype(np.float32)
    values = E4M3[codes] * np.repeat(scales, 128, 1)[:, :columns]
    return {"w": codes, "scales": scales}, bf16(values)


def random_awq(rng: np.random.Generator, rows: int, columns: int) -> tuple[Planes, Array]:
    """Return values of 4 bits minus a zero point, times a scale for each 128 columns of a row."""
    codes = rng.integers(0, 16, (rows, columns), np.uint8)
    zeros = rng.integers(0, 16, (rows, columns // 128), np.uint8)
    scales = rng.normal(0, 0.01, zeros.shape).astype(np.float16)
    halves = codes.reshape(rows, -1, 2, 32)
    packed = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, -1)
    values = (codes.astype(np.float32) - np.repeat(zeros, 128, 1)) * np.repeat(scales.astype(np.float32), 128, 1)
    return {"w": packed, "scales": scales, "zeros": zeros}, bf16(values)


def test_every_code_of_fp8_has_its_value(rig: KernelRig) -> None:
    """A sum with a NaN is NaN, so each of the two codes for NaN has its own row."""
    codes = np.arange(256, dtype=np.uint8).reshape(8, 32)
    w = np.concatenate([np.where(codes & 127 == 127, 0, codes), np.zeros((2, 32), np.uint8)])
    w[8:, 0] = 0x7F, 0xFF
    picked = multiplied(rig, "fp8", 16, bf16(np.eye(32)), {"w": w, "scales": np.ones((10, 1), np.float32)}, 10)[0].T
    assert picked[:8].tolist() == np.where(np.isnan(E4M3), 0, E4M3).reshape(8, 32).tolist()
    assert np.isnan(picked[8:, 0]).all()


def check_packed(rig: KernelRig, layout: str, tile: int, count: int, rows: int, columns: int) -> None:
    """Compare every value, with rows of x that select one each, and sums with random x."""
    rng = np.random.default_rng(columns)
    planes, w = random_weight(rng, layout, rows, columns)
    picked = multiplied(rig, layout, tile, bf16(np.eye(columns)), planes, rows, 256)
    assert picked.sum(0).T.tolist() == floats(w).tolist()
    x = random_bf16(rng, count, columns)
    check_close(multiplied(rig, layout, tile, x, planes, rows, 256), x, w, 256)


@pytest.mark.parametrize(
    ("layout", "columns"),
    [("q8_0", 288), ("fp8", 288), ("awq", 384), pytest.param("q4_k", 512, marks=pytest.mark.exhaustive)],
)
def test_packed_weights_are_their_format_s_values_rounded_to_bf16(rig: KernelRig, layout: str, columns: int) -> None:
    check_packed(rig, layout, 16, 3, 70, columns)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tile", [16, *(pytest.param(rows, marks=pytest.mark.slow) for rows in TILES if rows > 16)])
@pytest.mark.parametrize(
    ("layout", "columns"),
    [("q8_0", 32), ("q8_0", 544), ("q4_k", 256), ("q4_k", 768), ("fp8", 32), ("fp8", 544), ("awq", 128), ("awq", 640)],
)
def test_packed_weights_of_many_shapes_are_their_format_s_values(
    rig: KernelRig, layout: str, columns: int, tile: int
) -> None:
    for count, rows in ((1, 1), (tile + 1, 65)):
        check_packed(rig, layout, tile, count, rows, columns)


@pytest.mark.parametrize("tile", [16, *(pytest.param(tile, marks=pytest.mark.exhaustive) for tile in (64, 128))])
@pytest.mark.parametrize("gate", Gate)
def test_gated_values_have_the_bits_of_linear_and_gate(rig: KernelRig, gate: Gate, tile: int) -> None:
    """The last tiles of rows, columns and depth are incomplete."""
    rng = np.random.default_rng(5)
    count, inner, columns = 20, 40, 176
    x, w = random_bf16(rng, count, columns), random_bf16(rng, 2 * inner, columns)
    parts = multiplied(rig, "bf16", 16, x, {"w": w}, 2 * inner)
    expected, found = np.zeros((2, count, inner), np.uint16)
    rig.launch(gate, (count, 1), x=expected, parts=parts, splits=1, stride=count * 2 * inner, F=inner)
    name = f"linear_{gate}_bf16_{tile}"
    constants = manifest().kernels[name].constants
    grid = (-(-count // constants["BM"]), -(-inner // constants["BN"]))
    rig.launch(name, grid, y=found, x=x, w=w, R=count, F=inner, K=columns)
    assert expected.any()
    assert found.tobytes() == expected.tobytes()
