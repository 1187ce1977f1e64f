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


def two_to_the(x: Array) -> Array:
    """Compute the kernels' `exp2` in the same f32 operations."""
    x = np.where(np.isnan(x), np.float32(-127), np.clip(x, np.float32(-127), np.float32(126)))
    whole = (x + np.float32(12582912)) - np.float32(12582912)
    f, p = x - whole, np.float32(1.5403530e-4)
    for term in (1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1):
        p = p * f + np.float32(term)
    return np.where(x < -126, np.float32(0), p * np.exp2(whole).astype(np.float32))


def telling(quotient: Array, next_to: float) -> Array:
    """Return f32 factors that make a quotient's last bit visible in bf16; NaN where there is none.

    The quotient's product with its factor is on one side of 1 + 2^-8, the middle between two bf16. The product of the
    quotient's neighbour, towards `next_to`, is on the other side.
    """
    middle, neighbour = np.float32(1 + 2.0**-8), np.nextafter(quotient, np.copysign(np.float32(next_to), quotient))
    found = np.full_like(quotient, np.nan)
    at = (middle / quotient).view(np.int32)
    for step in range(-4, 5):
        factor = (at + step).view(np.float32)
        found = np.where((quotient * factor > middle) != (neighbour * factor > middle), factor, found)
    return found


@pytest.mark.parametrize("kernel", ["silu", "gelu"])
@np.errstate(all="ignore")
def test_a_gate_divides_with_one_rounding(rig: KernelRig, kernel: str) -> None:
    """A gate divided by its denominator is rounded to the nearest f32, although kernels compute it by multiplications.

    If the denominator is just below 2, as it is for gates near 2^-23, its reciprocal is close to a tie.
    """
    rng = np.random.default_rng(1)
    signs = np.array([[1], [-1]], np.float32)
    near = (np.int32(0x33800000) + np.arange(-300, 2**24, 8191, dtype=np.int32)).view(np.float32)
    tie = np.concatenate([np.float32(place).view(np.int32) + np.arange(-600, 600) for place in (2.0**-24, 2.0**-23)])
    wide = (2.0 ** rng.uniform(-120, 8, 12_000)).astype(np.float32)
    one = rng.normal(0, 4, 12_000).astype(np.float32)
    gates = np.concatenate([near, tie.astype(np.int32).view(np.float32), wide, one])
    gate = (signs * gates[: len(gates) // 512 * 512]).ravel()
    twice = (
        gate
        if kernel == "silu"
        else (gate + gate * gate * gate * np.float32(0.044715)) * np.float32(1.5957691216057308)
    )
    quotient = gate / (1 + two_to_the(twice * np.float32(-1.4426950408889634)))
    for next_to in (0, np.inf):
        up = telling(quotient, next_to)
        tells = np.isfinite(up)
        assert tells.mean() > 0.5
        up = np.where(tells, up, np.float32(1))
        rows = gate.reshape(-1, 512), up.reshape(-1, 512)
        parts = np.ascontiguousarray(np.concatenate(rows, 1)[None])
        x = np.zeros(rows[0].shape, np.uint16)
        rig.launch(kernel, (len(x), 1), x=x, parts=parts, splits=1, stride=parts.size, F=512)
        assert (x.ravel() == bf16(quotient * up)).all()


@pytest.mark.parametrize("kernel", ["silu", "gelu"])
@np.errstate(all="ignore")
def test_a_gate_keeps_zeros_infinities_and_nan(rig: KernelRig, kernel: str) -> None:
    gate = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-38, 3e38, -3e38, 88, -88], np.float32)
    twice = (
        gate
        if kernel == "silu"
        else (gate + gate * gate * gate * np.float32(0.044715)) * np.float32(1.5957691216057308)
    )
    quotient = gate / (1 + two_to_the(twice * np.float32(-1.4426950408889634)))
    # F is a multiple of 16, as every launch has it.
    parts = np.zeros((1, 1, 32), np.float32)
    parts[0, 0, : len(gate)], parts[0, 0, 16:] = gate, 1
    x = np.zeros((1, 16), np.uint16)
    rig.launch(kernel, (1, 1), x=x, parts=parts, splits=1, stride=32, F=16)
    found, expected = floats(x)[0, : len(gate)], floats(bf16(quotient))
    assert np.array_equal(found, expected, equal_nan=True)
    assert (np.signbit(found) == np.signbit(expected))[~np.isnan(expected)].all()


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
