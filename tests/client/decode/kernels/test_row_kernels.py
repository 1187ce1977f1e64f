"""Compare `embed`, `add_rmsnorm`, `norm_add_rmsnorm`, `silu` and `gelu` with numpy's float64."""

from typing import Any

import numpy as np
import pytest

from gpulease.client.decode.row_records import PAGE, RESULT
from helpers.decode_kernels import Array, KernelRig, bf16, floats, step_rows

HALF_PLACE = 2.0**-8 * 1.01
"""Largest relative error of a bf16 that was rounded once, plus 1 % for the f32 numbers before it."""


def added(parts: Array) -> Array:
    """Return the sum of f32 parts, added in ascending order."""
    total: Array = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


@pytest.mark.parametrize(("width", "scale"), [(32, None), (1024, None), (1030, None), (1030, 32.25)])
def test_embed_looks_up_tokens_and_results_and_writes_blocks(rig: KernelRig, width: int, scale: float | None) -> None:
    rng = np.random.default_rng(width)
    table = bf16(rng.normal(0, 1, (50, width)))
    rows = step_rows(
        5, token=[7, 49, 3, 0, 1], position=[0, 15, 16, 40, -1], table=[4, 0, 2, 1, 3], block=[9, 8, 7, 6, 5]
    )
    rows["source"][2:4] = 1, 0
    results = np.zeros(2, RESULT)
    results["token"] = 11, 12
    h, tables = np.full((5, width), np.nan, np.float32), np.full((5, 3), -5, np.int32)
    name, more = "embed", dict[str, Any]()
    if scale is not None:
        name, more = "embed_scaled", {"scale": scale}
    rig.launch(name, (5,), h=h, table=table, rows=rows, results=results, tables=tables, D=width, table_blocks=3, **more)
    # A product of two bf16 numbers is exact in f32.
    assert h[:4].astype(np.float64).tolist() == (floats(table[[7, 49, 12, 11]]) * (scale or 1)).tolist()
    assert not h[4].any()
    expected = np.full((5, 3), -5)
    for row in rows[:4]:
        expected[row["table"], row["position"] // PAGE] = row["block"]
    assert tables.tolist() == expected.tolist()


@pytest.mark.parametrize("block", [512, 2048, pytest.param(4096, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("width", "splits"), [(32, 0), (160, 1), (1024, 4), (2400, 3)])
def test_add_rmsnorm(rig: KernelRig, width: int, splits: int, block: int) -> None:
    rng = np.random.default_rng(width)
    h = rng.normal(0, 3, (4, width)).astype(np.float32)
    h[3] *= 1e-6
    parts = rng.normal(0, 1, (max(1, splits), 4, width)).astype(np.float32)
    parts[:, 3] *= 1e-6
    weight = rng.normal(1, 0.3, width).astype(np.float32)
    x = np.zeros((4, width), np.uint16)
    expected = h + added(parts) if splits else h.copy()
    rig.launch(
        f"add_rmsnorm_{block}", (4,), x=x, h=h, parts=parts, weight=weight, splits=splits, stride=4 * width, D=width,
        eps=1e-6,
    )  # fmt: skip
    assert h.tobytes() == expected.tobytes()
    exact = expected.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(1, keepdims=True) + 1e-6) * weight
    assert (abs(floats(x) - exact) <= HALF_PLACE * abs(exact)).all()


@pytest.mark.parametrize("block", [512, 2048, pytest.param(4096, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("width", "splits"), [(32, 1), (160, 2), (1040, 4), (2400, 3)])
def test_norm_add_rmsnorm(rig: KernelRig, width: int, splits: int, block: int) -> None:
    rng = np.random.default_rng(width)
    h = rng.normal(0, 3, (4, width)).astype(np.float32)
    parts = rng.normal(0, 5, (splits, 4, width)).astype(np.float32)
    h[3], parts[:, 3] = h[3] * 1e-6, parts[:, 3] * 1e-6
    weight, outer = rng.normal(1, 0.3, (2, width)).astype(np.float32)
    x = np.zeros((4, width), np.uint16)
    total, before = added(parts).astype(np.float64), h.astype(np.float64)
    rig.launch(
        f"norm_add_rmsnorm_{block}", (4,), x=x, h=h, parts=parts, outer=outer, weight=weight, splits=splits,
        stride=4 * width, D=width, eps=1e-6,
    )  # fmt: skip
    exact = before + total / np.sqrt((total**2).mean(1, keepdims=True) + 1e-6) * outer
    np.testing.assert_allclose(h, exact, rtol=2e-6, atol=2e-6)
    exact = exact / np.sqrt((exact**2).mean(1, keepdims=True) + 1e-6) * weight
    assert (abs(floats(x) - exact) <= HALF_PLACE * abs(exact) + 2e-6).all()


def test_a_norm_s_blocks_give_a_row_the_bits_that_it_has_alone(rig: KernelRig) -> None:
    rng = np.random.default_rng(0)
    h, parts = rng.normal(0, 1, (3, 704)).astype(np.float32), rng.normal(0, 1, (2, 3, 704)).astype(np.float32)
    weight, outer = rng.normal(1, 0.3, (2, 704)).astype(np.float32)
    together, x = h.copy(), np.zeros((3, 704), np.uint16)
    rest = {"outer": outer, "weight": weight, "splits": 2, "D": 704, "eps": 1e-6}
    rig.launch("norm_add_rmsnorm_512", (3,), x=x, h=together, parts=parts, stride=2112, **rest)
    for row in range(3):
        alone, its_x = h[[row]], np.zeros((1, 704), np.uint16)
        its_parts = np.ascontiguousarray(parts[:, [row]])
        rig.launch("norm_add_rmsnorm_512", (1,), x=its_x, h=alone, parts=its_parts, stride=704, **rest)
        assert (alone.tobytes(), its_x.tobytes()) == (together[row].tobytes(), x[row].tobytes())


@pytest.mark.parametrize(("inner", "splits"), [(32, 1), (512, 2), (1000, 4)])
def test_gelu(rig: KernelRig, inner: int, splits: int) -> None:
    rng = np.random.default_rng(inner)
    parts = rng.normal(0, 4, (splits, 3, 2 * inner)).astype(np.float32)
    parts[:, 2, :inner] *= 30
    parts[:, 2, :2] = [[0, 1e15 / splits]]
    x = np.zeros((3, inner), np.uint16)
    rig.launch("gelu", (3, -(-inner // 512)), x=x, parts=parts, splits=splits, stride=3 * 2 * inner, F=inner)
    total = added(parts).astype(np.float64)
    gate, up = total[:, :inner], total[:, inner:]
    twice = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    exact = gate * np.exp(-np.logaddexp(0, -twice)) * up
    # The relative error of e^-2u grows with its exponent, which is rounded to f32 and limited to 126.
    error = HALF_PLACE + 2.0**-22 * np.minimum(abs(twice), 90)
    assert (abs(floats(x) - exact) <= error * abs(exact) + 2.0**-125 * abs(gate * up)).all()


@pytest.mark.parametrize(("inner", "splits"), [(32, 1), (512, 2), (1000, 4)])
def test_silu(rig: KernelRig, inner: int, splits: int) -> None:
    rng = np.random.default_rng(inner)
    parts = rng.normal(0, 4, (splits, 3, 2 * inner)).astype(np.float32)
    parts[:, 2, :inner] *= 30
    parts[:, 2, :2] = [[0, 1e4 / splits]]
    x = np.zeros((3, inner), np.uint16)
    rig.launch("silu", (3, -(-inner // 512)), x=x, parts=parts, splits=splits, stride=3 * 2 * inner, F=inner)
    total = added(parts).astype(np.float64)
    gate, up = total[:, :inner], total[:, inner:]
    exact = gate * np.exp(-np.logaddexp(0, -gate)) * up
    # e^-gate is limited to 2^126, so results below gate / 2^126 are not exact.
    assert (abs(floats(x) - exact) <= HALF_PLACE * abs(exact) + 2.0**-125 * abs(gate * up)).all()


@pytest.mark.parametrize("kernel", ["add_rmsnorm_512", "silu"])
def test_parts_are_added_in_ascending_order(rig: KernelRig, kernel: str) -> None:
    """In f32, 1 added to 1e8 is lost; if 1e8 was subtracted before, it stays. So the order of the sum shows."""
    parts = np.zeros((3, 1, 64), np.float32)
    parts[:, 0, 0] = 1e8, -1e8, 1
    parts[:, 0, 1] = 1, 1e8, -1e8
    if kernel == "add_rmsnorm_512":
        h = np.zeros((1, 64), np.float32)
        x = np.zeros((1, 64), np.uint16)
        weight = np.ones(64, np.float32)
        rig.launch(kernel, (1,), x=x, h=h, parts=parts, weight=weight, splits=3, stride=64, D=64, eps=1e-6)
        assert h[0, :2].tolist() == [1, 0]
    else:
        parts[0, 0, 32:] = 1
        x = np.zeros((1, 32), np.uint16)
        rig.launch(kernel, (1, 1), x=x, parts=parts, splits=3, stride=64, F=32)
        assert abs(floats(x)[0, :2] - [0.7310586, 0]).max() < 0.002
