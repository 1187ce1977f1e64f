"""The decode engine's linears in Gluon, for cards of compute capability 9.0; see `build.py`.

Some warps copy while others multiply. Triton's own pipeline can't do that: there every warp does both. The rules of
`triton_source.py` hold: products run over K in ascending order, in the same matrix instructions, so the bits are those
of `linear_bf16`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gpulease.client.decode.kernels.triton_source import gated, gelu_gated


@gluon.jit
def place_of(tile, R, N, K, chunk, BM: gl.constexpr, BN: gl.constexpr):
    """Return a tile's first row and column, its part of the sums, and where that begins and ends.

    Tiles of the same weights are adjacent, so that the cache serves them.
    """
    row_tiles = gl.cdiv(R, BM)
    column_tiles = gl.cdiv(N, BN)
    part = tile // (row_tiles * column_tiles)
    begin = part * chunk
    return tile % row_tiles * BM, tile // row_tiles % column_tiles * BN, part, begin, gl.minimum(begin + chunk, K)


@gluon.jit
def copy_tiles(
    x, w, R, N, K, chunk, xs, ws, filled, emptied, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, COPIERS: gl.constexpr,
):  # fmt: skip
    """Copy this program's tiles of x and w to shared memory, stage after stage, as they become empty."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [COPIERS, 1], [1, 0])
    along_rows: gl.constexpr = gl.SliceLayout(1, layout)
    k = gl.arange(0, BK, gl.SliceLayout(0, layout))
    tiles = gl.cdiv(R, BM) * gl.cdiv(N, BN) * gl.cdiv(K, chunk)
    i = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column, _part, begin, end = place_of(tile, R, N, K, chunk, BM, BN)
        # Rows beyond the last are the last again: what they give is not stored.
        r = gl.minimum(gl.arange(0, BM, along_rows), R - 1 - row)
        n = gl.minimum(gl.arange(0, BN, along_rows), N - 1 - column)
        x_at = r[:, None] * K + k[None, :]
        w_at = n[:, None] * K + k[None, :]
        its_x = x + row * K
        its_w = w + column.to(gl.int64) * K
        for at in range(begin, end, BK):
            stage = i % STAGES
            # A stage is empty at first, so the first wait is for the phase before.
            mbarrier.wait(emptied.index(stage), (i // STAGES & 1) ^ 1)
            inside = (k < end - at)[None, :]
            async_copy.async_load(xs.index(stage), its_x + at + x_at, mask=inside)
            async_copy.async_load(ws.index(stage), its_w + at + w_at, mask=inside)
            async_copy.mbarrier_arrive(filled.index(stage), increment_count=False)
            i += 1


@gluon.jit
def multiply_tiles(
    parts, R, N, K, chunk, xs, ws, filled, emptied, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Multiply what has been copied, and store this program's tiles of the sums."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    tiles = gl.cdiv(R, BM) * gl.cdiv(N, BN) * gl.cdiv(K, chunk)
    i = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column, part, begin, end = place_of(tile, R, N, K, chunk, BM, BN)
        total = gl.zeros((BM, BN), gl.float32, layout)
        for at in range(begin, end, BK):
            stage = i % STAGES
            mbarrier.wait(filled.index(stage), i // STAGES & 1)
            fence_async_shared()
            total = warpgroup_mma(xs.index(stage), ws.index(stage).permute((1, 0)), total, is_async=True)
            # All products except this one are done, so the stage of the previous product is empty.
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(emptied.index((i + STAGES - 1) % STAGES), count=1, pred=at > begin)
            i += 1
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(emptied.index((i + STAGES - 1) % STAGES), count=1)
        r = row + gl.arange(0, BM, gl.SliceLayout(1, layout))
        n = column + gl.arange(0, BN, gl.SliceLayout(0, layout))
        # 64 bits for the part's offset: several parts of many rows exceed 2^31 values.
        to = part.to(gl.int64) * R * N + r[:, None] * N + n[None, :]
        gl.store(parts + to, total, mask=(r < R)[:, None] & (n < N)[None, :])


@gluon.jit
def linear_bf16_in_turns(
    parts, x, w, R, N, K, chunk, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, COPIERS: gl.constexpr, COPIER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute what `linear_bf16` does, to the bit. N is a multiple of 16.

    There may be fewer programs than tiles. Each program computes one tile after another, and copies the next tile's
    data while it stores a result. WARPS warps multiply, COPIERS further warps copy, through STAGES stages of shared
    memory.
    """
    shared: gl.constexpr = gl.NVMMASharedLayout(2 * BK, 16, 2)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], shared)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], shared)
    filled = mbarrier.allocate_mbarrier(batch=STAGES)
    emptied = mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        # Every copying thread reports that its copies are done; one thread reports for all that multiply.
        mbarrier.init(filled.index(stage), 32 * COPIERS)
        mbarrier.init(emptied.index(stage), 1)
    gl.barrier()
    gl.warp_specialize(
        [
            (multiply_tiles, (parts, R, N, K, chunk, xs, ws, filled, emptied, BM, BN, BK, STAGES, WARPS)),
            (copy_tiles, (x, w, R, N, K, chunk, xs, ws, filled, emptied, BM, BN, BK, STAGES, COPIERS)),
        ],
        [COPIERS],
        [COPIER_REGISTERS],
    )


@gluon.jit
def copy_gated_tiles(
    x, w, R, F, K, xs, gates, ups, filled, emptied, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, COPIERS: gl.constexpr,
):  # fmt: skip
    """Copy this program's tiles of x, gate and up to shared memory, stage after stage, as they become empty."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [COPIERS, 1], [1, 0])
    along_rows: gl.constexpr = gl.SliceLayout(1, layout)
    k = gl.arange(0, BK, gl.SliceLayout(0, layout))
    tiles = gl.cdiv(R, BM) * gl.cdiv(F, BN)
    i = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column, _part, _begin, _end = place_of(tile, R, F, K, K, BM, BN)
        # Rows beyond the last are the last again: what they give is not stored.
        r = gl.minimum(gl.arange(0, BM, along_rows), R - 1 - row)
        n = gl.minimum(gl.arange(0, BN, along_rows), F - 1 - column)
        x_at = r[:, None] * K + k[None, :]
        w_at = n[:, None] * K + k[None, :]
        its_x = x + row * K
        its_gate = w + column.to(gl.int64) * K
        its_up = its_gate + F.to(gl.int64) * K
        for at in range(0, K, BK):
            stage = i % STAGES
            # A stage is empty at first, so the first wait is for the phase before.
            mbarrier.wait(emptied.index(stage), (i // STAGES & 1) ^ 1)
            inside = (k < K - at)[None, :]
            async_copy.async_load(xs.index(stage), its_x + at + x_at, mask=inside)
            async_copy.async_load(gates.index(stage), its_gate + at + w_at, mask=inside)
            async_copy.async_load(ups.index(stage), its_up + at + w_at, mask=inside)
            async_copy.mbarrier_arrive(filled.index(stage), increment_count=False)
            i += 1


@gluon.jit
def multiply_gated_tiles(
    y, R, F, K, xs, gates, ups, filled, emptied, gate_function: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Multiply what has been copied, and store this program's tiles of the gated values."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    tiles = gl.cdiv(R, BM) * gl.cdiv(F, BN)
    i = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column, _part, _begin, _end = place_of(tile, R, F, K, K, BM, BN)
        gate = gl.zeros((BM, BN), gl.float32, layout)
        up = gl.zeros((BM, BN), gl.float32, layout)
        for at in range(0, K, BK):
            stage = i % STAGES
            mbarrier.wait(filled.index(stage), i // STAGES & 1)
            fence_async_shared()
            gate = warpgroup_mma(xs.index(stage), gates.index(stage).permute((1, 0)), gate, is_async=True)
            up = warpgroup_mma(xs.index(stage), ups.index(stage).permute((1, 0)), up, is_async=True)
            # All but these two products are done, so the stage of those before is empty.
            gate, up = warpgroup_mma_wait(2, deps=[gate, up])
            mbarrier.arrive(emptied.index((i + STAGES - 1) % STAGES), count=1, pred=at > 0)
            i += 1
        gate, up = warpgroup_mma_wait(0, deps=[gate, up])
        mbarrier.arrive(emptied.index((i + STAGES - 1) % STAGES), count=1)
        r = row + gl.arange(0, BM, gl.SliceLayout(1, layout))
        n = column + gl.arange(0, BN, gl.SliceLayout(0, layout))
        to = r[:, None] * F + n[None, :]
        gl.store(y + to, gate_function(gate, up), mask=(r < R)[:, None] & (n < F)[None, :])


@gluon.jit
def gated_in_turns(
    y, x, w, R, F, K, gate_function: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, COPIERS: gl.constexpr, COPIER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Multiply by gate and up, the halves of w [2 F, K], and gate the products; see `linear_bf16_in_turns`."""
    shared: gl.constexpr = gl.NVMMASharedLayout(2 * BK, 16, 2)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], shared)
    gates = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], shared)
    ups = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], shared)
    filled = mbarrier.allocate_mbarrier(batch=STAGES)
    emptied = mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), 32 * COPIERS)
        mbarrier.init(emptied.index(stage), 1)
    gl.barrier()
    gl.warp_specialize(
        [
            (
                multiply_gated_tiles,
                (y, R, F, K, xs, gates, ups, filled, emptied, gate_function, BM, BN, BK, STAGES, WARPS),
            ),
            (copy_gated_tiles, (x, w, R, F, K, xs, gates, ups, filled, emptied, BM, BN, BK, STAGES, COPIERS)),
        ],
        [COPIERS],
        [COPIER_REGISTERS],
    )


@gluon.jit
def linear_silu_bf16_in_turns(
    y, x, w, R, F, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    COPIERS: gl.constexpr, COPIER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute what `linear_silu_bf16` does, to the bit."""
    gated_in_turns(y, x, w, R, F, K, gated, BM, BN, BK, STAGES, WARPS, COPIERS, COPIER_REGISTERS)


@gluon.jit
def linear_gelu_bf16_in_turns(
    y, x, w, R, F, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    COPIERS: gl.constexpr, COPIER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute what `linear_gelu_bf16` does, to the bit."""
    gated_in_turns(y, x, w, R, F, K, gelu_gated, BM, BN, BK, STAGES, WARPS, COPIERS, COPIER_REGISTERS)
