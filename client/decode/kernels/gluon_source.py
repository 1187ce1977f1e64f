"""The decode engine's kernels in Gluon: linears for cards of compute capability 9.0, and attention; see `build.py`.

In the linears, some warps copy while others multiply. In Triton's own pipeline, every warp does both. Attention begins
its copies before it needs them, and places positions so that sums need few exchanges between threads.

These kernels use the same matrix instructions as `linear_bf16`, `attend` and `attend_whole` in `triton_source.py`, and
add in the same order. So their results have the same bits.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gpulease.client.decode.kernels.triton_source import (
    END_SPLIT,
    FIRST_ROW,
    FIRST_SPLIT,
    PAGE,
    PLACE,
    POSITION,
    ROWS,
    SPAN_WORDS,
    SPLITS,
    TABLE,
    WORDS,
    differ,
    exp2,
    exp2_fp8,
    gated,
    gelu_gated,
    regions_of,
    unpacked,
)


@gluon.jit
def place_of(tile, R, N, K, chunk, BM: gl.constexpr, BN: gl.constexpr):
    """Return a tile's first row and column, its part of the sums, and the part's begin and end (exclusive) in K.

    Tiles that read the same weights have adjacent numbers, so that the weights are still in the cache.
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
    """Multiply the copied tiles, and store this program's tiles of the sums."""
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
            # All products but the one just started are done, so the stage of the previous product is empty.
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
    data while it stores a result. WARPS warps multiply. COPIERS additional warps copy into STAGES stages of shared
    memory.
    """
    shared: gl.constexpr = gl.NVMMASharedLayout(2 * BK, 16, 2)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], shared)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], shared)
    filled = mbarrier.allocate_mbarrier(batch=STAGES)
    emptied = mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        # `filled` counts every copying thread. `emptied` counts one thread, which reports for all threads that
        # multiply.
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
    x, w, R, F, K, xs, ws, filled, emptied, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
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
            async_copy.async_load(ws.index(stage).slice(0, BN), its_gate + at + w_at, mask=inside)
            async_copy.async_load(ws.index(stage).slice(BN, BN), its_up + at + w_at, mask=inside)
            async_copy.mbarrier_arrive(filled.index(stage), increment_count=False)
            i += 1


@gluon.jit
def multiply_gated_tiles(
    y, R, F, K, xs, ws, filled, emptied, gate_function: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Multiply the copied tiles, and store this program's tiles of the gated values."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 2 * BN, 16])
    tiles = gl.cdiv(R, BM) * gl.cdiv(F, BN)
    i = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column, _part, _begin, _end = place_of(tile, R, F, K, K, BM, BN)
        # Gate and up in one product, which reads x from shared memory once.
        total = gl.zeros((BM, 2 * BN), gl.float32, layout)
        for at in range(0, K, BK):
            stage = i % STAGES
            mbarrier.wait(filled.index(stage), i // STAGES & 1)
            fence_async_shared()
            total = warpgroup_mma(xs.index(stage), ws.index(stage).permute((1, 0)), total, is_async=True)
            # All products but the one just started are done, so the stage of the previous product is empty.
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(emptied.index((i + STAGES - 1) % STAGES), count=1, pred=at > 0)
            i += 1
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(emptied.index((i + STAGES - 1) % STAGES), count=1)
        gate, up = gl.split(gl.permute(gl.reshape(total, (BM, 2, BN)), (0, 2, 1)))
        value = gate_function(gate, up)
        r = row + gl.arange(0, BM, gl.SliceLayout(1, value.type.layout))
        n = column + gl.arange(0, BN, gl.SliceLayout(0, value.type.layout))
        to = r[:, None] * F + n[None, :]
        gl.store(y + to, value, mask=(r < R)[:, None] & (n < F)[None, :])


@gluon.jit
def gated_in_turns(
    y, x, w, R, F, K, gate_function: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, COPIERS: gl.constexpr, COPIER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Multiply x by gate and up, the halves of w [2 F, K], and write the gated products to y [R, F]."""
    shared: gl.constexpr = gl.NVMMASharedLayout(2 * BK, 16, 2)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], shared)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * BN, BK], shared)
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
                (y, R, F, K, xs, ws, filled, emptied, gate_function, BM, BN, BK, STAGES, WARPS),
            ),
            (copy_gated_tiles, (x, w, R, F, K, xs, ws, filled, emptied, BM, BN, BK, STAGES, COPIERS)),
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


@gluon.jit
def position_of(row, BT: gl.constexpr):
    """Return the position, from 0 to BT - 1, whose key is in this row of the tile.

    With this order, sums of weights are added first within a thread, then within a warp, and last over several warps;
    see `summed_by_place`.
    """
    # Bit 3 of the row moves behind the bits of the warps: to bit 4 or 5.
    if BT == 32:
        return (row & 7) | (row & 16) >> 1 | (row & 8) << 1
    return (row & 71) | (row & 48) >> 1 | (row & 8) << 2


@gluon.jit
def summed_by_place(e, HEADS: gl.constexpr, BT: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr):
    """Return the sums that `summed_as_rows` returns, for weights e [BT, HEADS] in the order of `position_of`."""
    if BT == 128:
        # Bits of a position: 6, 4, 3, 5, 2, 1, 0.
        b = gl.sum(gl.reshape(e, (2, 2, 2, 2, 2, 2, 2, HEADS)), 6)
        b = gl.sum(gl.sum(b, 3), 0)
        b = gl.sum(gl.sum(b, 2), 2)
    else:
        # Bits of a position: 3, 4, 2, 1, 0.
        b = gl.sum(gl.reshape(e, (2, 2, 2, 2, 2, HEADS)), 4)
        b = gl.permute(gl.sum(gl.sum(b, 2), 2), (1, 0, 2))
    # The four sums of a head in one thread.
    warps: gl.constexpr = [[0, 0, 0], [0, 0, 0]] if WARPS == 4 else [[0, 0, 0]] if WARPS == 2 else []
    gathered: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]], [[0, 0, 2], [0, 0, 4], [0, 0, 0], [0, 0, 0], [0, 0, 0]], warps, [],
        [2, 2, HEADS],
    )  # fmt: skip
    b = gl.convert_layout(b, gathered)
    return gl.convert_layout(gl.sum(gl.sum(b, 0), 0), layout)


@gluon.jit
def copy_positions(
    keys, values, table, base, blocks, shared, readable, j, first, length, offset, span, block_bytes, DH: gl.constexpr,
    BT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Begin to copy BT positions from j on: keys at `offset` bytes of a block, values `span` elements after them."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    d = gl.arange(0, DH, gl.SliceLayout(0, layout))
    p = j + gl.arange(0, BT, gl.SliceLayout(1, layout))
    block = gl.load(table + p // PAGE, mask=p < length, other=-1)
    # The guard between tenants, as in `attend_tile`.
    seen = (block >= 0) & (block < readable)
    if first is not None:
        seen = seen & (p >= first)
    at = gl.where(block < blocks, base, shared) + block.to(gl.int64) * block_bytes + offset
    at += (p % PAGE * DH * 2).to(gl.int64)
    source = gl.multiple_of(at.to(gl.pointer_type(gl.bfloat16)), 16)[:, None] + d[None, :]
    async_copy.async_load(keys, source, mask=seen[:, None])
    async_copy.async_load(values, source + span, mask=seen[:, None])


@gluon.jit
def seen_of(table, readable, j, first, length, BT: gl.constexpr, layout: gl.constexpr):
    """Return which positions from j on are seen, in the order of `position_of`."""
    p = j + position_of(gl.arange(0, BT, layout), BT)
    block = gl.load(table + p // PAGE, mask=p < length, other=-1)
    seen = (block >= 0) & (block < readable)
    if first is not None:
        seen = seen & (p >= first)
    return seen


@gluon.jit
def attended_tile(
    keys, values, query, seen, scale, DH: gl.constexpr, HEADS: gl.constexpr, BT: gl.constexpr, WARPS: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """Return the results of a split that is one tile: totals [DH, HEADS], highest scores, sums of weights."""
    if BT == 32:
        rows = keys.reshape([2, 2, 8, DH]).permute((1, 0, 2, 3)).reshape([BT, DH])
    else:
        rows = keys.reshape([2, 2, 4, 8, DH]).permute((0, 2, 1, 3, 4)).reshape([BT, DH])
    k = rows.load(gl.DotOperandLayout(0, mma, 2))
    score = mma_v2(k, query, gl.zeros((BT, HEADS), gl.float32, mma)) * scale
    score = gl.where(seen[:, None], score, -1e30)
    top = gl.maximum(gl.max(score, 0), -1e30)
    e = gl.where(seen[:, None], exp2(score - top[None, :]), 0.0)
    # In the order of positions.
    if BT == 32:
        ordered = gl.reshape(gl.permute(gl.reshape(e.to(gl.bfloat16), (2, 2, 8, HEADS)), (1, 0, 2, 3)), (BT, HEADS))
    else:
        ordered = gl.reshape(
            gl.permute(gl.reshape(e.to(gl.bfloat16), (2, 4, 2, 8, HEADS)), (0, 2, 1, 3, 4)), (BT, HEADS)
        )
    share = gl.convert_layout(ordered, gl.DotOperandLayout(1, mma, 2))
    v = values.permute((1, 0)).load(gl.DotOperandLayout(0, mma, 2))
    total = mma_v2(v, share, gl.zeros((DH, HEADS), gl.float32, mma))
    return total, top, summed_by_place(e, HEADS, BT, WARPS, gl.SliceLayout(0, mma))


@gluon.jit
def added_split(all_total, all_top, all_weights, total, top, weights):
    """Add a split to the whole, as `combine` does."""
    higher = gl.maximum(all_top, top)
    shrink = exp2(all_top - higher)
    its = exp2(top - higher)
    return all_total * shrink[None, :] + total * its[None, :], higher, all_weights * shrink + weights * its


@gluon.jit
def attend_whole_ahead(
    x, q, rows, tables, layer_bytes, block_bytes, table_blocks, H, G, scale, window,
    DH: gl.constexpr, HEADS: gl.constexpr, SPLIT: gl.constexpr, SHORT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Compute what `attend_whole` does, to the bit, and copy keys and values before they are needed: x [R, H, DH] bf16.

    Each program computes HEADS of the heads that share a key head. If at most SHORT positions are left at the end of a
    sequence, they are read as a tile of SHORT positions. The other positions of the split would have weight 0. This
    tile and the first split are copied at the same time, since a short sequence takes little longer than one read.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    per_head: gl.constexpr = gl.SliceLayout(0, mma)
    per_position: gl.constexpr = gl.SliceLayout(1, mma)
    operand: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    keys = gl.allocate_shared_memory(gl.bfloat16, [SPLIT, DH], swizzled)
    values = gl.allocate_shared_memory(gl.bfloat16, [SPLIT, DH], swizzled)
    short_keys = gl.allocate_shared_memory(gl.bfloat16, [SHORT, DH], swizzled)
    short_values = gl.allocate_shared_memory(gl.bfloat16, [SHORT, DH], swizzled)
    row = gl.program_id(0)
    g = gl.program_id(1)
    record = rows + row * WORDS
    length = gl.load(record + POSITION) + 1
    base, blocks, shared, readable = regions_of(record, block_bytes)
    table = tables + gl.load(record + TABLE) * table_blocks
    first = None
    begin = 0
    if window is not None:
        first = gl.maximum(length - window, 0)
        begin = first // SPLIT * SPLIT
    end = length
    if (length % SPLIT <= SHORT) & (length - length % SPLIT >= begin):
        end = length - length % SPLIT
    # `offset`: bytes from the block to the head's keys. `span`: elements from a key to its value.
    offset = (layer_bytes + g * PAGE * DH * 2).to(gl.int64)
    span = G * PAGE * DH
    if begin < end:
        copy_positions(
            keys, values, table, base, blocks, shared, readable, begin, first, length, offset, span, block_bytes, DH,
            SPLIT, WARPS,
        )  # fmt: skip
    async_copy.commit_group()
    if end < length:
        copy_positions(
            short_keys, short_values, table, base, blocks, shared, readable, end, first, length, offset, span,
            block_bytes, DH, SHORT, WARPS,
        )  # fmt: skip
    async_copy.commit_group()
    # Heads by their number among those of the key head.
    share = H // G
    first_head = gl.program_id(2) * HEADS
    query_head = first_head + gl.arange(0, HEADS, gl.SliceLayout(0, operand))
    query_d = gl.arange(0, DH, gl.SliceLayout(1, operand))
    at = (row * H + g * share + query_head)[None, :] * DH + query_d[:, None]
    query = gl.load(q + at, mask=(query_head < share)[None, :] & (query_d < DH)[:, None], other=0.0)
    all_total = gl.zeros((DH, HEADS), gl.float32, mma)
    all_top = gl.full((HEADS,), -1e30, gl.float32, per_head)
    all_weights = gl.zeros((HEADS,), gl.float32, per_head)
    for j in range(begin, end, SPLIT):
        seen = seen_of(table, readable, j, first, length, SPLIT, per_position)
        if j == begin:
            async_copy.wait_group(1)
        else:
            async_copy.wait_group(0)
        gl.barrier()
        total, top, weights = attended_tile(keys, values, query, seen, scale, DH, HEADS, SPLIT, WARPS, mma)
        if j + SPLIT < end:
            gl.barrier()
            copy_positions(
                keys, values, table, base, blocks, shared, readable, j + SPLIT, first, length, offset, span,
                block_bytes, DH, SPLIT, WARPS,
            )  # fmt: skip
            async_copy.commit_group()
        if j == begin:
            # The first split: the sums before it are 0, and adding 0 makes a zero of a negative one.
            all_total, all_top, all_weights = total + 0.0, top, weights
        else:
            all_total, all_top, all_weights = added_split(all_total, all_top, all_weights, total, top, weights)
    if end < length:
        # The rest of the sequence is its last split.
        seen = seen_of(table, readable, end, first, length, SHORT, per_position)
        async_copy.wait_group(0)
        gl.barrier()
        total, top, weights = attended_tile(short_keys, short_values, query, seen, scale, DH, HEADS, SHORT, WARPS, mma)
        all_total, all_top, all_weights = added_split(all_total, all_top, all_weights, total, top, weights)
    result = gl.div_rn(all_total, gl.where(all_weights > 0.0, all_weights, 1.0)[None, :])
    head = first_head + gl.arange(0, HEADS, per_head)
    d = gl.arange(0, DH, per_position)
    to = (row * H + g * share + head)[None, :] * DH + d[:, None]
    gl.store(x + to, result.to(gl.bfloat16), mask=(head < share)[None, :] & (d < DH)[:, None])


@gluon.jit
def attend_ahead(
    totals, tops, sums, q, rows, tables, layer_bytes, block_bytes, table_blocks, H, G, splits, scale, window,
    DH: gl.constexpr, HEADS: gl.constexpr, SPLIT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Compute what `attend` does, to the bit, and copy keys and values before they are needed.

    A program computes HEADS of the heads that share a key head, so there are as many programs for each of those.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    per_head: gl.constexpr = gl.SliceLayout(0, mma)
    per_position: gl.constexpr = gl.SliceLayout(1, mma)
    operand: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    keys = gl.allocate_shared_memory(gl.bfloat16, [SPLIT, DH], swizzled)
    values = gl.allocate_shared_memory(gl.bfloat16, [SPLIT, DH], swizzled)
    row = gl.program_id(0)
    share = H // G
    groups = gl.cdiv(share, HEADS)
    g = gl.program_id(1) // groups
    record = rows + row * WORDS
    length = gl.load(record + POSITION) + 1
    base, blocks, shared, readable = regions_of(record, block_bytes)
    table = tables + gl.load(record + TABLE) * table_blocks
    first = None
    begin = gl.program_id(2)
    if window is not None:
        first = gl.maximum(length - window, 0)
        begin += first // SPLIT
    turn = gl.num_programs(2)
    # `offset`: bytes from the block to the head's keys. `span`: elements from a key to its value.
    offset = (layer_bytes + g * PAGE * DH * 2).to(gl.int64)
    span = G * PAGE * DH
    if begin * SPLIT < length:
        copy_positions(
            keys, values, table, base, blocks, shared, readable, begin * SPLIT, first, length, offset, span,
            block_bytes, DH, SPLIT, WARPS,
        )  # fmt: skip
    async_copy.commit_group()
    # Heads by their number among those of the key head.
    first_head = gl.program_id(1) % groups * HEADS
    query_head = first_head + gl.arange(0, HEADS, gl.SliceLayout(0, operand))
    query_d = gl.arange(0, DH, gl.SliceLayout(1, operand))
    at = (row * H + g * share + query_head)[None, :] * DH + query_d[:, None]
    query = gl.load(q + at, mask=(query_head < share)[None, :] & (query_d < DH)[:, None], other=0.0)
    head = first_head + gl.arange(0, HEADS, per_head)
    d = gl.arange(0, DH, per_position)
    for split in range(begin, gl.cdiv(length, SPLIT), turn):
        seen = seen_of(table, readable, split * SPLIT, first, length, SPLIT, per_position)
        async_copy.wait_group(0)
        gl.barrier()
        total, top, weights = attended_tile(keys, values, query, seen, scale, DH, HEADS, SPLIT, WARPS, mma)
        following = (split + turn) * SPLIT
        if following < length:
            gl.barrier()
            copy_positions(
                keys, values, table, base, blocks, shared, readable, following, first, length, offset, span,
                block_bytes, DH, SPLIT, WARPS,
            )  # fmt: skip
            async_copy.commit_group()
        # A split's unnormalised sum, its highest score and its sum of weights: what `combine` needs to rescale it.
        to = (row * H + g * share + head) * splits + split
        gl.store(totals + to[None, :] * DH + d[:, None], total, mask=(head < share)[None, :] & (d < DH)[:, None])
        gl.store(tops + to, top, mask=head < share)
        gl.store(sums + to, weights, mask=head < share)


@gluon.jit
def summed_by_position(e, LANES: gl.constexpr, BT: gl.constexpr):
    """Return the sums of weights e [BT, LANES] over the positions, in an order that depends on BT alone.

    In a row's program, bit 3 of a position selects one of two adjacent rows of a thread, and bits 0 to 2 are those of
    the lane. Every sum is over an axis of length two. A sum of two values does not depend on their order, so the bits
    are the same in any layout.
    """
    # Axes are the bits of a position, the highest first.
    if BT == 128:
        b = gl.sum(gl.sum(gl.sum(gl.reshape(e, (2, 2, 2, 2, 2, 2, 2, LANES)), 3), 0), 0)
        b = gl.sum(gl.sum(gl.sum(b, 3), 2), 1)
    elif BT == 64:
        b = gl.sum(gl.reshape(e, (2, 2, 2, 2, 2, 2, LANES)), 2)
        b = gl.sum(gl.sum(gl.sum(gl.sum(b, 4), 3), 2), 1)
    else:
        b = gl.sum(gl.reshape(e, (2, 2, 2, 2, 2, LANES)), 1)
        b = gl.sum(gl.sum(gl.sum(b, 3), 2), 1)
    return gl.sum(b, 0)


@gluon.constexpr_function
def layout_of_words(pages, words, warps):
    """Return the layout [pages, PAGE, words] in which threads copy tiles of 16-bit words, 16 bytes at a time.

    A warp copies whole pages, if there are as many pages as warps, so that its threads look up few pages.
    """
    chunks, slots = (words // 8).bit_length() - 1, 4
    # A thread has the first 8 words. The other bits of a word and some of a position are those of the lane.
    spread = min(slots, 5 - chunks)
    own = max(pages // warps, 1).bit_length() - 1
    page_bits = [[1 << bit, 0, 0] for bit in range(pages.bit_length() - 1)]
    position_bits = [[0, 1 << bit, 0] for bit in range(slots)]
    word_bits = [[0, 0, 1 << bit] for bit in range(3 + chunks)]
    # Warps without a page of their own copy the same as others.
    warp_bits = page_bits[own:] + [[0, 0, 0]] * (warps.bit_length() - 1 - len(page_bits[own:]))
    return gl.DistributedLinearLayout(
        word_bits[:3] + position_bits[spread:] + page_bits[:own],
        word_bits[3:] + position_bits[:spread],
        warp_bits,
        [],
        [pages, 1 << slots, words],
    )


@gluon.constexpr_function
def layout_of_scales(pages, warps):
    """Return the layout [pages, PAGE / 2] in which threads copy the scales of a page each, 16 bytes."""
    lanes = [[1 << bit, 0] for bit in range(pages.bit_length() - 1)]
    lanes += [[0, 0]] * (5 - len(lanes))
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]], lanes, [[0, 0]] * (warps.bit_length() - 1), [], [pages, 8]
    )


@gluon.jit
def pages_fp8(
    table, base, blocks, shared, readable, j, least, most, offset, block_bytes, COUNT: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Return the addresses of COUNT pages of keys (`store_e4m3`) from position j on, and whether they may be read.

    Pages without a position from `least` up to `most`, exclusive, may not be read, and neither may blocks outside both
    regions: the guard between tenants.
    """
    page = gl.arange(0, COUNT, layout)
    at = j + page * PAGE
    block = gl.load(table + j // PAGE + page, mask=(at < most) & (at + PAGE > least), other=-1)
    at = gl.where(block < blocks, base, shared) + block.to(gl.int64) * block_bytes + offset
    return gl.multiple_of(at.to(gl.pointer_type(gl.int16)), 16), (block >= 0) & (block < readable)


@gluon.jit
def copy_fp8(
    keys, values, key_scales, value_scales, table, base, blocks, shared, readable, j, least, most, offset, span,
    block_bytes, DH: gl.constexpr, BT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Begin to copy BT positions from j on, and their scales: keys at `offset` bytes of a block, values `span` after.

    Whole pages are copied. What may not be read becomes 0, also its scales, and no stored position has a scale of 0.
    """
    HALF: gl.constexpr = DH // 2
    W: gl.constexpr = keys.shape[1]
    PAGES: gl.constexpr = BT // PAGE
    layout: gl.constexpr = layout_of_words(PAGES, W, WARPS)
    per_page: gl.constexpr = layout_of_scales(PAGES, WARPS)
    pages, is_inside = pages_fp8(
        table, base, blocks, shared, readable, j, least, most, offset, block_bytes, PAGES,
        gl.SliceLayout(1, gl.SliceLayout(2, layout)),
    )  # fmt: skip
    slot = gl.arange(0, PAGE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    i = gl.arange(0, W, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    source = pages[:, None, None] + (slot[None, :, None] * HALF + i[None, None, :])
    mask = is_inside[:, None, None]
    if W != HALF:
        mask = mask & (i < HALF)[None, None, :]
    async_copy.async_load(keys.reshape([PAGES, PAGE, W]), source, mask=mask)
    async_copy.async_load(values.reshape([PAGES, PAGE, W]), source + span // 2, mask=mask)
    pages, is_inside = pages_fp8(
        table, base, blocks, shared, readable, j, least, most, offset, block_bytes, PAGES, gl.SliceLayout(1, per_page)
    )
    source = pages[:, None] + (PAGE * HALF + gl.arange(0, PAGE // 2, gl.SliceLayout(0, per_page)))[None, :]
    async_copy.async_load(key_scales, source, mask=is_inside[:, None])
    async_copy.async_load(value_scales, source + span // 2, mask=is_inside[:, None])


@gluon.jit
def scale_of(exponents, BT: gl.constexpr, layout: gl.constexpr):
    """Return the scales [BT] of exponents in shared memory as f32."""
    bytes_: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return (exponents.reinterpret(gl.uint8, [BT], bytes_).load(layout).to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def attend_fp8_lanes(
    x, totals, tops, sums, q, rows, tables, row, end_row, per_row, first_head, begin, turn, end_split, place, splits,
    layer_bytes, block_bytes, table_blocks, H, G, g, scale, window, DH: gl.constexpr, LANES: gl.constexpr,
    SPLIT: gl.constexpr, BT: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr, SIDES: gl.constexpr,
    IS_ONE_ROW: gl.constexpr,
):  # fmt: skip
    """Compute attention on keys and values in float8 e4m3 for LANES query heads of the key head g, of adjacent rows.

    There are `per_row` lanes for each row from `row` up to `end_row`, exclusive, for its query heads from `first_head`
    on among those of the key head. The rows are of one sequence and have the same regions.

    The splits are `begin`, `begin + turn` and so on, up to `end_split`, exclusive. If `totals` is not None and `place`
    is not negative, each split's results are written as `attend` does, `splits` of them for each row and head, from
    index `place` on. If x is not None and `place` is negative, the sum of the splits is written to x [R, H, DH] bf16.

    A row sees `window` positions up to its own, or all if `window` is None. STAGES tiles of BT positions are in shared
    memory: one is computed while the others are copied. The rows of a matrix instruction are positions, since most
    models have few query heads for each key head. A 16-bit word has a value of each half of a head, so queries and
    totals are in two tiles each. A key's scale multiplies the position's score, and a value's scale the position's
    weight. So a value that a row does not see adds 0, even if it is infinite.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS // SIDES, SIDES], [16, 8])
    per_lane: gl.constexpr = gl.SliceLayout(0, mma)
    per_position: gl.constexpr = gl.SliceLayout(1, mma)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    HALF: gl.constexpr = DH // 2
    W: gl.constexpr = triton.next_power_of_2(HALF)
    # Each 8 rows that a thread group reads at once are in different banks.
    phases: gl.constexpr = min(W // 8, 8)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 8 // phases, phases, [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    keys = gl.allocate_shared_memory(gl.int16, [STAGES, BT, W], swizzled)
    values = gl.allocate_shared_memory(gl.int16, [STAGES, BT, W], swizzled)
    key_scales = gl.allocate_shared_memory(gl.int16, [STAGES, BT // PAGE, PAGE // 2], flat)
    value_scales = gl.allocate_shared_memory(gl.int16, [STAGES, BT // PAGE, PAGE // 2], flat)
    share = H // G
    record = rows + row * WORDS
    base, blocks, shared, readable = regions_of(record, block_bytes)
    table = tables + gl.load(record + TABLE) * table_blocks
    lane = gl.arange(0, LANES, per_lane)
    its = row + lane // per_row
    head = g * share + first_head + lane % per_row
    mine = (its < end_row) & (first_head + lane % per_row < share)
    if IS_ONE_ROW:
        most = gl.load(record + POSITION) + 1
        lengths = most
    else:
        lengths = gl.load(rows + its * WORDS + POSITION, mask=mine, other=-1) + 1
        most = gl.max(lengths, 0)
    firsts = lengths * 0
    least = 0
    if window is not None:
        firsts = gl.maximum(lengths - window, 0)
        least = firsts if IS_ONE_ROW else gl.min(gl.where(lengths > 0, firsts, most), 0)
        begin += least // SPLIT
    end_split = gl.minimum(end_split, gl.cdiv(most, SPLIT))
    # The last split has only the tiles up to the last position.
    TILES: gl.constexpr = SPLIT // BT
    count = gl.maximum(gl.cdiv(end_split - begin, turn), 0)
    last = begin + (count - 1) * turn
    tiles = count * TILES
    if TILES > 1:
        tiles -= gl.maximum((last + 1) * SPLIT - most, 0) // BT * gl.minimum(count, 1)
    # `offset`: bytes from the block to the head's keys. `span`: bytes from a key to its value.
    offset = (layer_bytes + g * PAGE * (DH + 1)).to(gl.int64)
    span = G * PAGE * (DH + 1)
    for n in gl.static_range(STAGES - 1):
        j = (begin + n // TILES * turn) * SPLIT + n % TILES * BT
        copy_fp8(
            keys.index(n), values.index(n), key_scales.index(n), value_scales.index(n), table, base, blocks, shared,
            readable, j, least, gl.where(n < tiles, most, 0), offset, span, block_bytes, DH, BT, WARPS,
        )  # fmt: skip
        async_copy.commit_group()
    query_lane = gl.arange(0, LANES, gl.SliceLayout(0, right))
    query_row = row + query_lane // per_row
    query_head = first_head + query_lane % per_row
    query_i = gl.arange(0, W, gl.SliceLayout(1, right))
    at = (query_row * H + g * share + query_head)[None, :] * DH + query_i[:, None]
    mask = ((query_row < end_row) & (query_head < share))[None, :] & (query_i < HALF)[:, None]
    q_low = gl.load(q + at, mask=mask, other=0.0)
    q_high = gl.load(q + at + HALF, mask=mask, other=0.0)
    i = gl.arange(0, W, per_position)
    low = gl.zeros((W, LANES), gl.float32, mma)
    high = gl.zeros((W, LANES), gl.float32, mma)
    top = gl.full((LANES,), -1e30, gl.float32, per_lane)
    weights = gl.zeros((LANES,), gl.float32, per_lane)
    all_low, all_high, all_top, all_weights = low, high, top, weights
    for n in range(tiles):
        async_copy.wait_group(STAGES - 2)
        gl.barrier()
        split = begin + n // TILES * turn
        p = split * SPLIT + n % TILES * BT + gl.arange(0, BT, per_position)
        stage = n % STAGES
        k_low, k_high = unpacked(keys.index(stage).load(left))
        k_scale = scale_of(key_scales.index(stage), BT, per_position)
        v_scale = scale_of(value_scales.index(stage), BT, per_position)
        score = mma_v2(k_low, q_low, gl.zeros((BT, LANES), gl.float32, mma))
        score = mma_v2(k_high, q_high, score)
        # Copy a tile to the stage of the tile that was computed last. Its copies and the products above overlap.
        ahead = n + STAGES - 1
        j = (begin + ahead // TILES * turn) * SPLIT + ahead % TILES * BT
        free = ahead % STAGES
        copy_fp8(
            keys.index(free), values.index(free), key_scales.index(free), value_scales.index(free), table, base,
            blocks, shared, readable, j, least, gl.where(ahead < tiles, most, 0), offset, span, block_bytes, DH, BT,
            WARPS,
        )  # fmt: skip
        async_copy.commit_group()
        # A scale of 0 belongs to a position that was not copied.
        if IS_ONE_ROW:
            seen = (k_scale != 0.0) & (p < lengths) & (p >= firsts)
            v_scale = gl.where(seen, v_scale, 0.0)
            seen = seen[:, None]
        else:
            seen = (k_scale != 0.0)[:, None] & (p[:, None] < lengths[None, :]) & (p[:, None] >= firsts[None, :])
        # The lowest `top` is -1e30. So the weight of a position that is not seen is 0.
        score = gl.where(seen, score * (k_scale * scale)[:, None], -2e30)
        higher = gl.maximum(gl.max(score, 0), top)
        e = exp2_fp8(score - higher[None, :])
        # For the product, weights are multiplied by the values' scales and rounded to bf16. The sum of the weights
        # stays f32.
        scaled = e * v_scale[:, None]
        if not IS_ONE_ROW:
            scaled = gl.where(seen, scaled, 0.0)
        scaled = gl.convert_layout(scaled.to(gl.bfloat16), right)
        v_low, v_high = unpacked(values.index(stage).permute((1, 0)).load(left))
        if TILES > 1:
            shrink = exp2_fp8(top - higher)
            low = low * shrink[None, :]
            high = high * shrink[None, :]
            weights = weights * shrink
        low = mma_v2(v_low, scaled, low)
        high = mma_v2(v_high, scaled, high)
        weights += gl.convert_layout(summed_by_position(e, LANES, BT), per_lane)
        top = higher
        if ((n + 1) % TILES == 0) | (n + 1 == tiles):
            if totals is not None:
                part = (place + (its - row) * splits) * H + head * splits + split
                kept = mine & (place >= 0)
                to = totals + part[None, :] * DH + i[:, None]
                stored = kept[None, :] & (i < HALF)[:, None]
                gl.store(to, low, mask=stored)
                gl.store(to + HALF, high, mask=stored)
                gl.store(tops + part, top, mask=kept)
                gl.store(sums + part, weights, mask=kept)
            if x is not None:
                # Add the split to the whole, as `combine` does.
                over = gl.maximum(all_top, top)
                shrink = exp2(all_top - over)
                its_share = exp2(top - over)
                all_low = all_low * shrink[None, :] + low * its_share[None, :]
                all_high = all_high * shrink[None, :] + high * its_share[None, :]
                all_weights = all_weights * shrink + weights * its_share
                all_top = over
            low = gl.zeros((W, LANES), gl.float32, mma)
            high = gl.zeros((W, LANES), gl.float32, mma)
            top = gl.full((LANES,), -1e30, gl.float32, per_lane)
            weights = gl.zeros((LANES,), gl.float32, per_lane)
    if x is not None:
        divisor = gl.where(all_weights > 0.0, all_weights, 1.0)[None, :]
        to = x + (its * H + head)[None, :] * DH + i[:, None]
        stored = (mine & (place < 0))[None, :] & (i < HALF)[:, None]
        gl.store(to, gl.div_rn(all_low, divisor).to(gl.bfloat16), mask=stored)
        gl.store(to + HALF, gl.div_rn(all_high, divisor).to(gl.bfloat16), mask=stored)


@gluon.jit
def attend_fp8(
    totals, tops, sums, q, rows, tables, layer_bytes, block_bytes, table_blocks, H, G, splits, scale, window,
    DH: gl.constexpr, HEADS: gl.constexpr, SPLIT: gl.constexpr, BT: gl.constexpr, WARPS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """`attend` for keys and values in float8 e4m3. A program computes HEADS of the heads that share a key head.

    Without a window, `window` is at least every sequence's length.
    """
    row = gl.program_id(0)
    groups = gl.cdiv(H // G, HEADS)
    attend_fp8_lanes(
        None, totals, tops, sums, q, rows, tables, row, row + 1, HEADS, gl.program_id(1) % groups * HEADS,
        gl.program_id(2), gl.num_programs(2), splits, row * splits, splits, layer_bytes, block_bytes, table_blocks, H,
        G, gl.program_id(1) // groups, scale, window, DH, HEADS, SPLIT, BT, WARPS, STAGES, 1, True,
    )  # fmt: skip


@gluon.jit
def attend_whole_fp8(
    x, q, rows, tables, layer_bytes, block_bytes, table_blocks, H, G, scale, window,
    DH: gl.constexpr, HEADS: gl.constexpr, SPLIT: gl.constexpr, BT: gl.constexpr, WARPS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """`attend_whole` for keys and values in float8 e4m3, with a window as in `attend_fp8`."""
    row = gl.program_id(0)
    attend_fp8_lanes(
        x, None, None, None, q, rows, tables, row, row + 1, HEADS, gl.program_id(2) * HEADS, 0, 1, 1 << 30, -1, 0,
        layer_bytes, block_bytes, table_blocks, H, G, gl.program_id(1), scale, window, DH, HEADS, SPLIT, BT, WARPS,
        STAGES, 1, True,
    )  # fmt: skip


@gluon.jit
def attend_prompt_fp8(
    x, q, rows, tables, layer_bytes, block_bytes, table_blocks, R, H, G, scale, window,
    DH: gl.constexpr, SPLIT: gl.constexpr, BT: gl.constexpr, LANES: gl.constexpr, WARPS: gl.constexpr,
    STAGES: gl.constexpr, SIDES: gl.constexpr,
):  # fmt: skip
    """`attend_prompt` for keys and values in float8 e4m3, with a window as in `attend_fp8`."""
    row = gl.program_id(0)
    count = LANES // (H // G)
    # A tile begins where `differ` says, or at a multiple of `count`.
    if row % count > 0:
        record = rows + row * WORDS
        if not differ(record, record - WORDS, True):
            return
    after = gl.minimum((row // count + 1) * count, R)
    its = row + gl.arange(0, LANES, gl.BlockedLayout([1], [32], [WARPS], [0]))
    inside = (its < after) & (its > row)
    record = rows + its * WORDS
    ends = inside & differ(record, record - WORDS, inside)
    end_row = gl.min(gl.where(ends, its, after), 0)
    attend_fp8_lanes(
        x, None, None, None, q, rows, tables, row, end_row, H // G, 0, 0, 1, 1 << 30, -1, 0, layer_bytes, block_bytes,
        table_blocks, H, G, gl.program_id(1), scale, window, DH, LANES, SPLIT, BT, WARPS, STAGES, SIDES, False,
    )  # fmt: skip


@gluon.jit
def attend_spans_fp8(
    x, totals, tops, sums, q, rows, tables, spans, layer_bytes, block_bytes, table_blocks, H, G, scale,
    DH: gl.constexpr, SPLIT: gl.constexpr, BT: gl.constexpr, LANES: gl.constexpr, WARPS: gl.constexpr,
    STAGES: gl.constexpr, SIDES: gl.constexpr,
):  # fmt: skip
    """`attend_spans` for keys and values in float8 e4m3, and also for tiles of one row."""
    span = spans + gl.program_id(1) * SPAN_WORDS
    row = gl.load(span + FIRST_ROW)
    if row < 0:
        return
    attend_fp8_lanes(
        x, totals, tops, sums, q, rows, tables, row, row + gl.load(span + ROWS), H // G, 0,
        gl.load(span + FIRST_SPLIT), 1, gl.load(span + END_SPLIT), gl.load(span + PLACE), gl.load(span + SPLITS),
        layer_bytes, block_bytes, table_blocks, H, G, gl.program_id(0), scale, None, DH, LANES, SPLIT, BT, WARPS,
        STAGES, SIDES, False,
    )  # fmt: skip
