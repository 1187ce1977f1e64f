"""Measure the error of the kernels' 2^x through `combine`; it must be small."""

import numpy as np
import pytest
from numpy.typing import NDArray

from helpers.decode_kernels import KernelRig, floats, step_rows

RELATIVE_ERROR = 2.5e-7
ULP = 2.0**-23


def powers(rig: KernelRig, exponents: NDArray[np.float32]) -> NDArray[np.float64]:
    """2^x for x up to 0, to 9 bits more than an f32 has.

    A head's first split has a total of -2^x as numpy has it, and a sum of 1; the second has 1 and 0, and its top is x.
    """
    heads, width = 128, 32
    x = np.resize(exponents, (-(-len(exponents) // heads), heads))
    exact = np.exp2(x.astype(np.float64)).astype(np.float32)
    totals = np.stack([-exact, np.ones_like(exact)], 2)[..., None].repeat(width, 3)
    tops = np.stack([np.zeros_like(x), x], 2)
    sums = np.broadcast_to(np.array([1, 0], np.float32), tops.shape).copy()
    found = np.zeros((*x.shape, width), np.uint16)
    rows = step_rows(len(x), position=200)
    rig.launch(
        "combine_32", x.shape, x=found, totals=np.ascontiguousarray(totals), tops=tops, sums=sums, rows=rows,
        H=heads, splits=2,
    )  # fmt: skip
    flat: NDArray[np.float64] = (exact.astype(np.float64) + floats(found[..., 0])).ravel()[: len(exponents)]
    return flat


def near(value: float, count: int) -> NDArray[np.float32]:
    """Return an f32 and its neighbours, `count` on each side, in ascending order."""
    bits = np.float32(value).view(np.int32) + np.arange(-count, count + 1, dtype=np.int32)
    return np.sort(bits.view(np.float32))


def relative_error(rig: KernelRig, x: NDArray[np.float32]) -> float:
    return float(abs(powers(rig, x) / np.exp2(x.astype(np.float64)) - 1).max())


def test_the_error_is_within_its_bound(rig: KernelRig) -> None:
    assert relative_error(rig, np.linspace(-126, 0, 12_001).astype(np.float32)) < RELATIVE_ERROR


@pytest.mark.exhaustive
def test_the_error_is_within_its_bound_at_many_places(rig: KernelRig) -> None:
    x = -np.random.default_rng(0).uniform(0, 2, 400_000).astype(np.float32)
    assert relative_error(rig, x) < RELATIVE_ERROR


@pytest.mark.parametrize("border", [-0.5, -1.5, -2.5, -125.5])
def test_it_rises_across_the_borders_of_its_reduction(rig: KernelRig, border: float) -> None:
    """Rounding alone may make it fall, by one unit in the last place of an f32."""
    found = powers(rig, near(border, 500))
    assert (np.diff(found) >= -ULP * found[1:]).all()
    assert found[:501].max() <= found[501:].min() * (1 + ULP)


def test_its_ends(rig: KernelRig) -> None:
    x = np.array([0, -0.0, -1, -126, -126.00001, -127, -1e30, -np.inf], np.float32)
    exact = np.exp2(x.astype(np.float64)).astype(np.float32).astype(np.float64)
    found = powers(rig, x)
    assert found[:4].tolist() == [1, 1, 0.5, 2.0**-126]
    # The kernel returns 0 below 2^-126: the difference is minus the exact power, to the 8 bits of bf16.
    assert (abs(found[4:]) <= exact[4:] / 256).all()
