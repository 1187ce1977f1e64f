"""The tiles and numbers of parts that a linear is tried with."""

import pytest

from gpulease.client.bench.decode_kernels import described, variants, varied
from gpulease.client.decode.engine.kernel_library import KernelLaunch, manifest
from gpulease.client.decode.engine.linear_tiles import MULTIPROCESSORS, SM_80, SM_90A
from gpulease.client.handles import BorrowedBuffer


class Owner:
    """A session that lives."""

    is_alive = True


def buffer(size: int) -> BorrowedBuffer:
    return BorrowedBuffer(Owner(), 1, size)  # type: ignore[arg-type]


def linear(rows: int, parts: int, name: str = "linear_bf16_16") -> KernelLaunch:
    """A launch of 2048 x 8192 in four parts, with room for so many."""
    values = {"parts": buffer(parts * rows * 2048 * 4), "x": buffer(1), "w": buffer(1)}
    return KernelLaunch(name, (1, 32, 4), **values, R=rows, N=2048, K=8192, chunk=2048)


@pytest.mark.parametrize(("rows", "name"), [(1, "linear_bf16_16"), (64, "linear_bf16_16"), (256, "linear_bf16_128")])
def test_the_one_in_use_is_among_those_tried_and_all_cover_the_weight(rows: int, name: str) -> None:
    launch = linear(rows, 8, name)
    tried = list(variants(launch, SM_90A))
    assert described(launch) in map(described, tried)
    assert len({described(other) for other in tried}) == len(tried) == (8 if rows < 256 else 7) * 8
    for other in tried:
        tile, chunk = manifest().kernels[other.name].constants, other.values["chunk"]
        assert isinstance(chunk, int)
        if len(other.grid) == 1:
            # Programs that take turns at all tiles.
            assert 0 < other.grid[0] <= MULTIPROCESSORS
            continue
        down, across, parts = other.grid
        assert down * tile["BM"] >= rows
        assert across * tile["BN"] >= 2048
        assert parts * chunk >= 8192 > (parts - 1) * chunk


def test_no_more_parts_are_tried_than_the_buffer_has_room_for() -> None:
    assert {other.grid[2] for other in variants(linear(8, 4), SM_80)} == {1, 2, 3, 4}


def test_a_kernel_that_does_not_cut_its_sums_is_tried_by_tiles_alone() -> None:
    values = {"y": buffer(1), "x": buffer(1), "w": buffer(1)}
    launch = KernelLaunch("linear_silu_bf16_16", (1, 256), **values, R=8, F=8192, K=2048)
    assert [other.name for other in variants(launch, SM_80)] == [f"linear_silu_bf16_{tile}" for tile in (16, 64, 128)]


def test_a_variant_is_launched_on_each_layer_s_own_weights() -> None:
    first, second = linear(8, 4), linear(8, 4)
    other = next(one for one in variants(first, SM_80) if one.grid[2] == 2)
    launch = varied(second, other)
    assert (launch.name, launch.grid, launch.values["chunk"]) == (other.name, other.grid, 4096)
    assert launch.values["w"] is second.values["w"]
