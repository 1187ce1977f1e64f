"""Kernels whose threads work together, as nvcc writes them, against numpy."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.image import CpuKernel

Array = np.ndarray[Any, np.dtype[Any]]
Kernels = Mapping[str, CpuKernel]
ARCHITECTURES = ["sm75", "sm80", "sm90"]
RNG = np.random.default_rng(11)


class Team:
    """A module's kernels, run on arrays: each is copied in before and out after."""

    def __init__(self, context: CpuContext, architecture: str) -> None:
        path = Path(__file__).parents[3] / "vectors" / "gpu" / f"teamwork.{architecture}.ptx"
        self.context = context
        self.kernels: Kernels = context.module_load(path.read_bytes()).kernels

    def run(self, name: str, grid: int, block: int, *arguments: Array | int) -> list[Array]:
        kernel = self.kernels[name]
        params = bytearray(kernel.parameter_bytes)
        placed: list[tuple[int, Array]] = []
        for argument, slot in zip(arguments, kernel.parameters, strict=True):
            if isinstance(argument, int):
                struct.pack_into("<i", params, slot.offset, argument)
                continue
            address = self.context.mem_alloc(argument.nbytes)
            self.context.mem_write(address, argument.data.cast("B"))
            placed.append((address, argument))
            struct.pack_into("<Q", params, slot.offset, address)
        self.context.launch(kernel, (grid, 1, 1), (block, 1, 1), 0, bytes(params), 1)
        results = []
        for address, array in placed:
            results.append(np.empty_like(array))
            self.context.mem_read(address, results[-1].data.cast("B"))
            self.context.mem_free(address)
        return results


@pytest.fixture(scope="module", params=ARCHITECTURES)
def loaded(request: pytest.FixtureRequest, lasting: CpuContext) -> Team:
    return Team(lasting, request.param)


@pytest.fixture
def team(loaded: Team, resting: CpuContext) -> Team:
    return loaded


def integers(size: int, low: int = -50, high: int = 50) -> Array:
    return RNG.integers(low, high, size).astype("i4")


def zeros(size: int, kind: str = "i4") -> Array:
    return np.zeros(size, kind)


@pytest.mark.exhaustive
def test_warp_scan(team: Team) -> None:
    x = integers(4 * 96)
    _, sums, totals, greatest = team.run("warp_scan", 4, 96, x, *(zeros(x.size) for _ in range(3)))
    warps = x.reshape(-1, 32)
    assert np.array_equal(sums, warps.cumsum(1).ravel())
    assert np.array_equal(totals, np.repeat(warps.sum(1), 32))
    assert np.array_equal(greatest, np.repeat(warps.max(1), 32))


def test_segment_sums(team: Team) -> None:
    x = RNG.integers(-(2**60), 2**60, 64)
    assert np.array_equal(team.run("segment_sums", 1, 64, x, zeros(64, "i8"))[1], np.repeat(x.reshape(-1, 8).sum(1), 8))


@pytest.mark.parametrize("n", [1, 100, 500])
def test_compact(team: Team, n: int) -> None:
    x = integers(512)
    _, y, count = team.run("compact", 4, 128, x, zeros(512), zeros(1), n)
    kept = x[:n][x[:n] > 0]
    assert count[0] == kept.size
    assert np.array_equal(np.sort(y[: kept.size]), np.sort(kept))


def test_match_histogram(team: Team) -> None:
    x = integers(1000, 0, 7)
    _, bins = team.run("match_histogram", 3, 70, x, zeros(7), x.size)
    assert np.array_equal(bins, np.bincount(x, minlength=7))


@pytest.mark.parametrize("x", [integers(77, 0, 2), zeros(77), zeros(77) + 3], ids=["some", "none", "all"])
def test_block_votes(team: Team, x: Array) -> None:
    y = team.run("block_votes", 1, 77, x, zeros(3 * 77))[1].reshape(-1, 3)
    true = np.count_nonzero(x)
    assert (y[:, 0] == true).all()
    assert (y[:, 1:] != 0).tolist() == [[true == 77, true > 0]] * 77


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_producers_and_consumers(team: Team, rounds: int) -> None:
    x = integers(64 * rounds)
    y = team.run("producer_consumer", 1, 128, x, zeros(x.size), rounds)[1]
    assert np.array_equal(y.reshape(-1, 64), 2 * x.reshape(-1, 64)[:, ::-1])


def test_a_lock(team: Team) -> None:
    lock, counter = team.run("locked", 3, 90, zeros(1), zeros(1))
    assert (lock[0], counter[0]) == (0, 270)


def test_a_chain_against_the_order_of_threads(team: Team) -> None:
    assert team.run("chain", 1, 100, zeros(100))[0].tolist() == list(range(100, 0, -1))


def test_the_last_block(team: Team) -> None:
    x = integers(20 * 64)
    _, _, ticket, total = team.run("last_block_sum", 20, 64, x, zeros(20), zeros(1, "u4"), zeros(1))
    assert (ticket[0], total[0]) == (0, np.count_nonzero(x & 1))


def test_blocks_wait_for_those_before_them(team: Team) -> None:
    x = integers(9 * 40)
    y = team.run("look_back", 9, 40, x, zeros(9), zeros(9), zeros(x.size))[3].reshape(9, 40)
    blocks = x.reshape(9, 40)
    assert np.array_equal(y, blocks + np.concatenate([[0], blocks.sum(1).cumsum()[:-1]])[:, None])


def test_all_atomics(team: Team) -> None:
    w, d, f, g, h = zeros(8), zeros(8, "u8"), zeros(2, "f4"), zeros(1, "f8"), zeros(2, "f2")
    w[4], w[7] = -1, 0
    w, d, f, g, h = team.run("all_atomics", 3, 50, w, d, f, g, h)
    t = np.arange(150)
    assert w.tolist()[:4] == [t.sum(), -t.sum(), -149, 149]
    assert w.tolist()[4:] == [-1 & ~0xFFFF, -1, np.bitwise_xor.reduce(t), 101 - 150 % 101]
    assert d[:6].tolist() == [int(t.sum()) << 33, 149 << 40, (-149 << 35) % 2**64, 2**64 - 1, t.sum(), 15]
    assert (f.tolist(), g.tolist(), h.tolist()) == ([75, 149], [37.5], [150, 300])


def test_cooperative_groups(team: Team) -> None:
    x = integers(96, 0, 30)
    _, sums, scans, sizes = team.run("groups", 1, 96, x, zeros(96), zeros(96), zeros(96))
    tiles = x.reshape(-1, 8)
    assert np.array_equal(sums, np.repeat(tiles.sum(1), 8))
    assert np.array_equal(scans, (tiles.cumsum(1) - tiles).ravel())
    odd = x.reshape(-1, 32) & 1
    expected = np.where(odd, odd.sum(1)[:, None] * 100 + odd.cumsum(1) - 1, -1)
    assert np.array_equal(sizes, expected.ravel())


@pytest.mark.parametrize("warps", [2, 8])
def test_cooperative_groups_of_several_warps(team: Team, warps: int) -> None:
    x = integers(32 * warps)
    _, sums, ranks = team.run("wide_tiles", 2, x.size, x, zeros(x.size), zeros(x.size))
    assert np.array_equal(sums, np.repeat(x.reshape(-1, 64).sum(1), 64))
    assert ranks.tolist() == [t // 64 * 100 + t % 64 for t in range(x.size)]


def test_reductions(team: Team) -> None:
    if "reductions" not in team.kernels:
        pytest.skip("from compute_80 on")
    x = integers(64)
    y = team.run("reductions", 1, 64, x, zeros(6 * 64))[1].reshape(64, 6)
    for start in (0, 32):
        members = [t for t in range(start, start + 32) if t % 3 == 0]
        own, as_bits = x[members], x[members].view("u4")
        expected = [own.sum(), own.min(), as_bits.max().astype("i4")]
        expected += [operation.reduce(own) for operation in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)]
        assert (y[members] == expected).all()


@pytest.mark.parametrize("tiles", [1, 5])
def test_pipelined(team: Team, tiles: int) -> None:
    if "pipelined" not in team.kernels:
        pytest.skip("from compute_80 on")
    x = RNG.standard_normal((tiles, 64, 4)).astype("f4")
    y = team.run("pipelined", 1, 64, x, np.zeros_like(x), tiles)[1]
    expected = x.copy()
    expected[1:, 1::2, 3:] = 0  # 4 bytes of zeros behind what odd threads take, but in the first tile
    assert np.array_equal(y, expected[:, ::-1])
