"""Compare the kernels of experts with numpy, and a pair's bits among different other pairs."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpulease.client.decode.engine.kernel_library import manifest
from helpers.decode_kernels import Array, KernelRig, bf16, floats, step_rows

COUNT = 11
WIDTH, INNER, CHOSEN = 96, 64, 3


def routed(
    rig: KernelRig, parts: Array, chosen: int, *, is_normalised: bool = False, positions: Any = 0
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the experts of rows and their shares, from the router's logits in parts [splits, R, E]."""
    splits, rows, count = parts.shape
    experts, shares = np.full((rows, chosen), -7, np.int32), np.full((rows, chosen), np.nan, np.float32)
    rig.launch(
        "route", (rows,), experts=experts, shares=shares, parts=parts, rows=step_rows(rows, position=positions),
        splits=splits, stride=rows * count, E=count, K=chosen, is_normalised=int(is_normalised),
    )  # fmt: skip
    return experts, shares


def grouped(rig: KernelRig, experts: NDArray[np.int32], count: int, size: int) -> tuple[Array, Array]:
    """The tiles' experts, and their pairs [T, size]; all memory is other than -1 before."""
    most = experts.size // size + min(count, experts.size)
    tiles, pairs = np.full(most, -9, np.int32), np.full((most, size), -9, np.int32)
    rig.launch(
        "group", (count,), pairs=pairs, tiles=tiles, experts=experts.ravel(), P=experts.size, E=count, T=most,
        rows_per_tile=size,
    )  # fmt: skip
    return tiles, pairs


@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize(("count", "chosen", "splits"), [(1, 1, 1), (11, 3, 2), (128, 8, 4), (256, 16, 1)])
def test_a_row_s_experts_are_the_likeliest(
    rig: KernelRig, count: int, chosen: int, splits: int, is_normalised: bool
) -> None:
    parts = np.random.default_rng(count).normal(0, 2, (splits, 5, count)).astype(np.float32)
    experts, shares = routed(rig, parts, chosen, is_normalised=is_normalised, positions=[3, 0, -1, 7, 9])
    logits = parts.astype(np.float64).sum(0)
    wanted = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    order = np.argsort(-logits, -1)[:, :chosen]
    wanted = np.take_along_axis(wanted, order, -1)
    if is_normalised:
        wanted /= wanted.sum(-1, keepdims=True)
    assert experts[[0, 1, 3, 4]].tolist() == order[[0, 1, 3, 4]].tolist()
    # A padded row has no experts.
    assert experts[2].tolist() == [-1] * chosen
    np.testing.assert_allclose(shares, wanted, rtol=4e-6)


def test_of_equal_logits_the_lowest_expert_is_chosen_and_nan_last(rig: KernelRig) -> None:
    nan, infinity = np.nan, np.inf
    logits = [[1, 2, 2, 1, 2], [nan, 1, nan, 0, nan], [nan] * 5, [-infinity] * 5, [0, 0, infinity, 0, 0]]
    experts, shares = routed(rig, np.array([logits], np.float32), 4)
    assert experts.tolist() == [[1, 2, 4, 0], [1, 3, 0, 2], [0, 1, 2, 3], [0, 1, 2, 3], [2, 0, 1, 3]]
    assert shares[1, 2:].tolist() == [0, 0]


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize(("count", "rows", "chosen"), [(1, 1, 1), (11, 40, 3), (256, 3, 16), (7, 130, 2)])
def test_each_pair_is_in_a_tile_of_its_expert(rig: KernelRig, count: int, rows: int, chosen: int, size: int) -> None:
    rng = np.random.default_rng(rows)
    experts = np.argsort(rng.random((rows, count)), -1)[:, :chosen].astype(np.int32)
    experts[rows // 2] = -1
    tiles, pairs = grouped(rig, experts, count, size)
    found = []
    for expert, its in zip(tiles, pairs, strict=True):
        if expert >= 0:
            members = its[its >= 0]
            assert len(members)
            # The pairs come first, in ascending order; -1 fills the rest of a tile.
            assert its.tolist() == [*members, *[-1] * (size - len(members))]
            assert (experts.ravel()[members] == expert).all()
            found += members.tolist()
    assert sorted(found) == np.flatnonzero(experts.ravel() >= 0).tolist()
    # The tiles in use come first, in the order of their experts.
    used = tiles[tiles >= 0]
    assert (tiles[len(used) :] == -1).all()
    assert (np.diff(used) >= 0).all()
    assert found == [pair for expert in range(count) for pair in np.flatnonzero(experts.ravel() == expert)]


def computed(
    rig: KernelRig, size: int, x: Array, experts: NDArray[np.int32], shares: Array, weights: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Return the gated values [R C, F] in bf16 and the parts [C, R, N] of rows with these experts."""
    gate_up, down = weights
    (rows, width), chosen, (count, inner) = x.shape, experts.shape[1], (len(down), down.shape[2])
    tiles, pairs = grouped(rig, experts, count, size)
    y, parts = np.zeros((rows * chosen, inner), np.uint16), np.full((chosen, rows, width), np.nan, np.float32)
    columns = [manifest().kernels[f"{name}_{size}"].constants["BN"] for name in ("experts_silu_bf16", "experts_bf16")]
    rig.launch(
        f"experts_silu_bf16_{size}", (len(tiles), -(-inner // columns[0])), y=y, x=x, w=gate_up, pairs=pairs,
        tiles=tiles, R=rows, F=inner, K=width, C=chosen,
    )  # fmt: skip
    rig.launch(
        f"experts_bf16_{size}", (len(tiles), -(-width // columns[1])), parts=parts, y=y, w=down,
        shares=np.ascontiguousarray(shares), pairs=pairs, tiles=tiles, R=rows, N=width, K=inner, C=chosen,
    )  # fmt: skip
    return y, parts


@pytest.fixture(scope="module")
def weights() -> tuple[Array, Array]:
    rng = np.random.default_rng(8)
    gate_up = bf16(rng.normal(0, WIDTH**-0.5, (COUNT, 2 * INNER, WIDTH)))
    return gate_up, bf16(rng.normal(0, INNER**-0.5, (COUNT, WIDTH, INNER)))


def test_experts_are_dense_layers_to_the_bit(rig: KernelRig, weights: tuple[Array, Array]) -> None:
    """The gated values of each pair are those of linear_silu_bf16; its part is that of linear_bf16, times its share."""
    rng = np.random.default_rng(9)
    x, shares = bf16(rng.normal(0, 1, (4, WIDTH))), rng.random((4, CHOSEN)).astype(np.float32)
    experts = np.argsort(rng.random((4, COUNT)), -1)[:, :CHOSEN].astype(np.int32)
    y, parts = computed(rig, 16, x, experts, shares, weights)
    for row in range(4):
        for place, expert in enumerate(experts[row]):
            gated, part = np.zeros((1, INNER), np.uint16), np.zeros((1, 1, WIDTH), np.float32)
            rig.launch("linear_silu_bf16_16", (1, 2), y=gated, x=x[[row]], w=weights[0][expert], R=1, F=INNER, K=WIDTH)
            rig.launch(
                "linear_bf16_16", (1, 2, 1), parts=part, x=gated, w=weights[1][expert], R=1, N=WIDTH, K=INNER,
                chunk=INNER,
            )  # fmt: skip
            assert y[row * CHOSEN + place].tobytes() == gated.tobytes()
            assert parts[place, row].tobytes() == (part * shares[row, place]).tobytes()
    assert floats(y).any()


@pytest.mark.parametrize("size", [16, pytest.param(64, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(3, 16))]
)
def test_a_row_s_bits_are_those_that_it_has_alone(
    rig: KernelRig, weights: tuple[Array, Array], seed: int, size: int
) -> None:
    """The other rows and their experts differ: often few experts, and some rows without any."""
    rng = np.random.default_rng(seed)
    rows, few = int(rng.integers(2, 41)), int(rng.integers(CHOSEN, COUNT + 1))
    x, shares = bf16(rng.normal(0, 1, (rows, WIDTH))), rng.random((rows, CHOSEN)).astype(np.float32)
    experts = np.argsort(rng.random((rows, few)), -1)[:, :CHOSEN].astype(np.int32)
    experts[rng.random(rows) < 0.2] = -1
    _, together = computed(rig, size, x, experts, shares, weights)
    for row in rng.permutation(rows)[:4]:
        _, alone = computed(rig, 16, x[[row]], experts[[row]], shares[[row]], weights)
        assert alone[:, 0].tobytes() == np.ascontiguousarray(together[:, row]).tobytes()
