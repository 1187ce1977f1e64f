"""The decode engine's kernels in Triton. Developers compile them ahead of time; see `build.py`.

A row's result depends only on that row's inputs. It has the same bits in every batch and with every size of tile. Three
rules ensure this:

- Each program adds products in ascending order of K. A linear's sum is divided into `splits` parts, a number that
  depends only on the weight's shape. The next kernel adds the parts in ascending order.
- Attention divides a sequence into splits of `SPLIT` positions, and `combine` adds the splits in ascending order.
- No kernel uses atomics. A padded row has position -1 and writes nothing into a sequence.

A card and the embedded driver give the same bits. The kernels use only IEEE operations that round to nearest, and the
tensor core's products, which the embedded driver adds in a card's order. `exp2`, division and the square root are
computed from these operations.

In shapes, R is the number of rows of a step, D the model's width, H the number of query heads, G of key heads, DH a
head's width, F the inner width, and V the size of the vocabulary.

A tile's sides are powers of two. If DH is not a power of two, the tile's columns from DH on are masked, and add zero to
every sum.
"""

import triton
import triton.language as tl

# A row's record in the step's plan: 16 words of 32 bits (`client/decode/row_records.py`).
WORDS = tl.constexpr(16)
TOKEN = tl.constexpr(0)
SOURCE = tl.constexpr(1)
POSITION = tl.constexpr(2)
TABLE = tl.constexpr(3)
BLOCK = tl.constexpr(4)
BLOCKS = tl.constexpr(5)
BASE = tl.constexpr(6)
SEED = tl.constexpr(8)
TOP_K = tl.constexpr(10)
INVERSE_TEMPERATURE = tl.constexpr(11)
TOP_P = tl.constexpr(12)
DEPTH = tl.constexpr(13)
SHARED = tl.constexpr(14)
SHARED_BLOCKS = tl.constexpr(15)
REGION_SHIFT = tl.constexpr(21)

# A row's record in a guided step has 8 words. An entry of its list of tokens has 4 words.
GUIDE_WORDS = tl.constexpr(8)
FIRST = tl.constexpr(0)
COUNT = tl.constexpr(1)
MASK = tl.constexpr(2)
RANKS = tl.constexpr(3)
TARGET = tl.constexpr(4)
ENTRY_WORDS = tl.constexpr(4)
ENTRY_TOKEN = tl.constexpr(0)
ADDEND = tl.constexpr(1)
DIVISOR = tl.constexpr(2)
SUBTRAHEND = tl.constexpr(3)

# A span's record has 8 words, of which 6 are used. A row's cut has 2 words.
SPAN_WORDS = tl.constexpr(8)
FIRST_ROW = tl.constexpr(0)
ROWS = tl.constexpr(1)
FIRST_SPLIT = tl.constexpr(2)
END_SPLIT = tl.constexpr(3)
PLACE = tl.constexpr(4)
SPLITS = tl.constexpr(5)
CUT_WORDS = tl.constexpr(2)

RESULT_WORDS = tl.constexpr(4)
PAGE = tl.constexpr(16)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp2(x):
    """Return 2^x for x from -126 to 126, by Cody and Waite's reduction and a polynomial of degree 6.

    An x below -126 gives 0. An x above 126, infinity included, gives 2^126. NaN gives 0. The relative error is at most
    2.5e-7, measured against float64. Where x increases, the result decreases by at most one unit in the last place.
    """
    x = tl.minimum(tl.maximum(x, -127.0), 126.0)
    # Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, by IEEE addition alone.
    shifted = x + 12582912.0
    whole = shifted - 12582912.0
    f = x - whole
    # Horner's scheme, each product and sum rounded separately: a fused multiply-add would give other bits.
    p = 1.5403530e-4
    p = p * f + 1.3333558e-3
    p = p * f + 9.6181291e-3
    p = p * f + 5.5504109e-2
    p = p * f + 2.4022651e-1
    p = p * f + 6.9314718e-1
    p = p * f + 1.0
    # The lowest bits of `shifted` contain `whole`. Shifted into the exponent's bits, they give 2^whole.
    scale = ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where(x < -126.0, 0.0, p * scale)


@triton.jit
def exp2_fp8(x):
    """Return 2^x for x up to 126, with a polynomial of degree 4 and fused sums: faster than `exp2`, and less exact.

    An x below -126.5 gives 0. NaN gives 0. The relative error is at most 3e-6, measured against float64.
    """
    # Clamped at -127, the scale below is 0.
    x = tl.maximum(x, -127.0)
    shifted = x + 12582912.0
    f = x - (shifted - 12582912.0)
    p = tl.fma(f, 9.5828301e-3, 5.5906400e-2)
    p = tl.fma(p, f, 2.4024099e-1)
    p = tl.fma(p, f, 6.9312420e-1)
    p = tl.fma(p, f, 1.0)
    return p * ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def added(parts, splits, stride, offsets, mask):
    """Return the sums of a linear's parts [splits, ...] at `offsets`, added in ascending order."""
    # The order of the parts is part of the result: every kernel that reads them adds from 0 up.
    total = tl.load(parts + offsets, mask=mask, other=0.0)
    for s in range(1, splits):
        total += tl.load(parts + s * stride + offsets, mask=mask, other=0.0)
    return total


@triton.jit
def load_parts(parts, splits, stride, offsets, mask):
    """Begin to load the parts of a linear's sums, at most 8 (`MAX_SPLITS`), without waiting for any of them."""
    loaded = (tl.load(parts + offsets, mask=mask, other=0.0),)
    for s in tl.static_range(1, 8):
        # Triton unrolls this loop, so it permits a longer tuple in each turn.
        part = tl.load(parts + s * stride + offsets, mask=mask & (splits > s), other=0.0)
        loaded += (part,)  # type: ignore[assignment]
    return loaded


@triton.jit
def added_parts(loaded, parts, splits, stride, offsets, mask):
    """Return the sums of the parts that `load_parts` loaded, with the same bits as `added`.

    This is faster than `added`, which waits for some parts before it loads the next ones.
    """
    total = loaded[0]
    for s in tl.static_range(1, 8):
        # A missing part is skipped. To add 0 for it could change the sign of a zero.
        total = tl.where(splits > s, total + loaded[s], total)
    # Here the parts may be a row's experts, of which there may be more than 8.
    for s in range(8, splits):
        total += tl.load(parts + s * stride + offsets, mask=mask, other=0.0)
    return total


@triton.jit
def quotient(a, b):
    """Return a / b for a gate a and its denominator b, from 1 to 2^126, rounded to nearest like `div_rn`.

    `div_rn` is not used because the driver compiles it to a call. In a function with calls, the driver runs wgmma
    instructions one by one. The results were compared with a division's for all 2^32 gates, for SiLU and for GELU.
    """
    # Newton's iteration for 1 / b. The bits of b give the first guess, and each step squares the error.
    r = (0x7EF311C3 - b.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    r = tl.fma(r, tl.fma(-b, r, 1.0), r)
    r = tl.fma(r, tl.fma(-b, r, 1.0), r)
    r = tl.fma(r, tl.fma(-b, r, 1.0), r)
    # For b just below 2, the last step's sum is a tie that would be rounded down, although 1 / b is above the tie.
    r = tl.fma(r, tl.fma(-b, r, 1.0) * 1.0000002, r)
    # The remainder is exact. If it is 0, or NaN because a is infinite, the first quotient is right.
    q = a * r
    rest = tl.fma(-b, q, a)
    return tl.where(tl.abs(rest) > 0.0, tl.fma(rest, r, q), q)


@triton.jit
def gated(gate, up):
    """Return SiLU(gate) * up, rounded to bf16: gate / (1 + e^-gate) * up."""
    return (quotient(gate, 1.0 + exp2(gate * -LOG2_E)) * up).to(tl.bfloat16)


@triton.jit
def gelu_gated(gate, up):
    """Return GELU(gate) * up, rounded to bf16. GELU is the approximation by tanh.

    0.5 (1 + tanh(u)) is 1 / (1 + e^-2u), with u = sqrt(2 / pi) (gate + 0.044715 gate^3).
    """
    twice = (gate + gate * gate * gate * 0.044715) * 1.5957691216057308
    return (quotient(gate, 1.0 + exp2(twice * -LOG2_E)) * up).to(tl.bfloat16)


@triton.jit
def embed(h, table, rows, results, tables, D, table_blocks, scale, BLOCK_D: tl.constexpr):
    """Write each row's embedding to h, and the number of the row's block into its sequence's block table.

    If `scale` is not None, the embedding is multiplied by it.
    """
    row = tl.program_id(0)
    record = rows + row * WORDS
    position = tl.load(record + POSITION)
    source = tl.load(record + SOURCE)
    # If SOURCE is -1, the record has the token. Otherwise the host did not know the token yet, and the token is the
    # result of row SOURCE of the step before. That step has ended, because the two steps' streams are ordered.
    token = tl.load(record + TOKEN)
    if source >= 0:
        token = tl.load(results + source * RESULT_WORDS)
    if position >= 0:
        # Every row writes its own entry. Rows of one block write the same value, so their order does not matter.
        entry = tl.load(record + TABLE) * table_blocks + position // PAGE
        tl.store(tables + entry, tl.load(record + BLOCK))
    for d in range(0, D, BLOCK_D):
        c = d + tl.arange(0, BLOCK_D)
        # A padded row (position -1) gets zeros, and so never reads a token from a record that was not filled in.
        v = tl.load(table + token.to(tl.int64) * D + c, mask=(c < D) & (position >= 0), other=0.0)
        if scale is None:
            tl.store(h + row * D + c, v.to(tl.float32), mask=c < D)
        else:
            tl.store(h + row * D + c, v.to(tl.float32) * scale, mask=c < D)


@triton.jit
def add_to_residual(h, parts, splits, stride, at, mask):
    """Add a linear's parts to the residual, in place; return it."""
    v = tl.load(h + at, mask=mask, other=0.0)
    # The first norm of a step has no linear before it (splits 0): then `embed` has written the residual.
    if splits > 0:
        v += added_parts(load_parts(parts, splits, stride, at, mask), parts, splits, stride, at, mask)
        tl.store(h + at, v, mask=mask)
    return v


@triton.jit
def norm_scale(squares, D, eps):
    """Return 1 / rms of a row, from the squares of its values."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(squares, 0), D.to(tl.float32)) + eps))


@triton.jit
def add_rmsnorm(x, h, parts, weight, splits, stride, D, eps, BLOCK_D: tl.constexpr):
    """Add a linear's parts to the residual h, in place, and normalise it: x = bf16(h / rms(h) * weight).

    A row that fits into one block of BLOCK_D values is read once. A wider row is read twice.
    """
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK_D)
    # A branch on a runtime value, the same for all rows: it depends on the model's width alone.
    if D <= BLOCK_D:
        m = c < D
        w = tl.load(weight + c, mask=m, other=0.0)
        v = add_to_residual(h, parts, splits, stride, row * D + c, m)
        scale = norm_scale(v * v, D, eps)
        tl.store(x + row * D + c, (v * scale * w).to(tl.bfloat16), mask=m)
    else:
        # First pass: update the residual, and add the squares lane by lane in ascending blocks.
        squares = tl.zeros((BLOCK_D,), tl.float32)
        for d in range(0, D, BLOCK_D):
            v = add_to_residual(h, parts, splits, stride, row * D + d + c, d + c < D)
            squares += v * v
        scale = norm_scale(squares, D, eps)
        for d in range(0, D, BLOCK_D):
            at, m = row * D + d + c, d + c < D
            v = tl.load(h + at, mask=m, other=0.0) * scale
            w = tl.load(weight + d + c, mask=m, other=0.0)
            tl.store(x + at, (v * w).to(tl.bfloat16), mask=m)


@triton.jit
def norm_add_rmsnorm(x, h, parts, outer, weight, splits, stride, D, eps, BLOCK_D: tl.constexpr):
    """Normalise a linear's sums, add the result to the residual h in place, and normalise the residual.

    h += sum / rms(sum) * outer, then x = bf16(h / rms(h) * weight). A row that fits into one block of BLOCK_D values is
    read once. For a wider row, the parts and h are read twice.
    """
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK_D)
    if D <= BLOCK_D:
        m = c < D
        w = tl.load(weight + c, mask=m, other=0.0)
        o = tl.load(outer + c, mask=m, other=0.0)
        before = tl.load(h + row * D + c, mask=m, other=0.0)
        at = row * D + c
        v = added_parts(load_parts(parts, splits, stride, at, m), parts, splits, stride, at, m)
        v = before + v * norm_scale(v * v, D, eps) * o
        tl.store(h + row * D + c, v, mask=m)
        scale = norm_scale(v * v, D, eps)
        tl.store(x + row * D + c, (v * scale * w).to(tl.bfloat16), mask=m)
    else:
        # First pass: the squares of the parts' sums, lane by lane in ascending blocks.
        squares = tl.zeros((BLOCK_D,), tl.float32)
        for d in range(0, D, BLOCK_D):
            v = added(parts, splits, stride, row * D + d + c, d + c < D)
            squares += v * v
        scale = norm_scale(squares, D, eps)
        # Second pass: update the residual, and add its squares.
        squares = tl.zeros((BLOCK_D,), tl.float32)
        for d in range(0, D, BLOCK_D):
            at, m = row * D + d + c, d + c < D
            o = tl.load(outer + d + c, mask=m, other=0.0)
            v = added(parts, splits, stride, at, m) * scale * o
            v = tl.load(h + at, mask=m, other=0.0) + v
            tl.store(h + at, v, mask=m)
            squares += v * v
        scale = norm_scale(squares, D, eps)
        for d in range(0, D, BLOCK_D):
            at, m = row * D + d + c, d + c < D
            v = tl.load(h + at, mask=m, other=0.0) * scale
            w = tl.load(weight + d + c, mask=m, other=0.0)
            tl.store(x + at, (v * w).to(tl.bfloat16), mask=m)


@triton.jit
def rows_tile(x, r, k, R, K, end):
    """Load the rows r and columns k of x [R, K]. Rows from R on and columns from `end` on are 0."""
    return tl.load(x + r[:, None] * K + k[None, :], mask=(r < R)[:, None] & (k < end)[None, :], other=0.0)


@triton.jit
def store_part(parts, total, r, n, R, N):
    """Store a tile of this program's part of the sums."""
    # The part's offset has 64 bits, because several parts of many rows exceed 2^31 values.
    at = tl.program_id(2).to(tl.int64) * R * N + r[:, None] * N + n[None, :]
    tl.store(parts + at, total, mask=(r < R)[:, None] & (n < N)[None, :])


@triton.jit
def linear_bf16(parts, x, w, R, N, K, chunk, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """parts[s] = x @ w.T over the s-th `chunk` of K. x [R, K] and w [N, K] are bf16, parts [splits, R, N] f32."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    begin = tl.program_id(2) * chunk
    end = tl.minimum(begin + chunk, K)
    total = tl.zeros((BM, BN), tl.float32)
    for k0 in range(begin, end, BK):
        k = k0 + tl.arange(0, BK)
        a = rows_tile(x, r, k, R, K, end)
        m = (n < N)[None, :] & (k < end)[:, None]
        b = tl.load(w + n[None, :].to(tl.int64) * K + k[:, None], mask=m, other=0.0)
        total = tl.dot(a, b, total)
    store_part(parts, total, r, n, R, N)


@triton.jit
def gate_and_up(x, w, r, n, R, F, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Return the rows r and columns n of x times gate and of x times up. w [2 F, K] has gate's rows, then up's."""
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        # One tile of x serves both products, which halves its reads.
        a = rows_tile(x, r, k, R, K, K)
        m = (n < F)[None, :] & (k < K)[:, None]
        at = n[None, :].to(tl.int64) * K + k[:, None]
        # Both sums run over all of K in ascending order, as in the two separate kernels.
        gate = tl.dot(a, tl.load(w + at, mask=m, other=0.0), gate)
        up = tl.dot(a, tl.load(w + F.to(tl.int64) * K + at, mask=m, other=0.0), up)
    return gate, up


@triton.jit
def linear_silu_bf16(y, x, w, R, F, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Multiply x by gate and up, the halves of w [2 F, K], and write the gated products to y [R, F] bf16.

    The result has the same bits as that of linear_bf16 in one part, followed by `silu`.
    """
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    gate, up = gate_and_up(x, w, r, n, R, F, K, BM, BN, BK)
    tl.store(y + r[:, None] * F + n[None, :], gated(gate, up), mask=(r < R)[:, None] & (n < F)[None, :])


@triton.jit
def linear_gelu_bf16(y, x, w, R, F, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """linear_silu_bf16 with `gelu_gated`. The result has the same bits as linear_bf16 in one part, then `gelu`."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    gate, up = gate_and_up(x, w, r, n, R, F, K, BM, BN, BK)
    tl.store(y + r[:, None] * F + n[None, :], gelu_gated(gate, up), mask=(r < R)[:, None] & (n < F)[None, :])


@triton.jit
def linear_q8_0(parts, x, w, scales, R, N, K, chunk, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """linear_bf16 on weights of GGML's Q8_0: w [N, K] int8 in blocks of 32, scales [N, K / 32] f16."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    begin = tl.program_id(2) * chunk
    end = tl.minimum(begin + chunk, K)
    total = tl.zeros((BM, BN), tl.float32)
    wide = n[None, :].to(tl.int64)
    for k0 in range(begin, end, BK):
        k = k0 + tl.arange(0, BK)
        m = (n < N)[None, :] & (k < end)[:, None]
        a = rows_tile(x, r, k, R, K, end)
        # Dequantised in f32 and rounded once to bf16: the same weight that a bf16 linear of this model would have.
        q = tl.load(w + wide * K + k[:, None], mask=m, other=0).to(tl.float32)
        d = tl.load(scales + wide * (K // 32) + (k // 32)[:, None], mask=m, other=0.0).to(tl.float32)
        total = tl.dot(a, (q * d).to(tl.bfloat16), total)
    store_part(parts, total, r, n, R, N)


@triton.jit
def linear_q4_k(parts, x, w, scales, steps, R, N, K, chunk, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """linear_bf16 on weights of GGML's Q4_K: blocks of 256 values, in 8 groups of 32.

    w [N, K / 2] has two values per byte: of each group of 64 values, byte i has values i and i + 32. steps [N, K / 32,
    2] has each group's scale and minimum as u8; scales [N, K / 256, 2] has each block's f16 factors for both.
    """
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    begin = tl.program_id(2) * chunk
    end = tl.minimum(begin + chunk, K)
    total = tl.zeros((BM, BN), tl.float32)
    wide = n[None, :].to(tl.int64)
    for k0 in range(begin, end, BK):
        k = k0 + tl.arange(0, BK)
        m = (n < N)[None, :] & (k < end)[:, None]
        a = rows_tile(x, r, k, R, K, end)
        # Unpack: the low four bits of a byte are the value in the first half of 64, the high ones that in the second.
        pair = tl.load(w + wide * (K // 2) + (k // 64 * 32 + k % 32)[:, None], mask=m, other=0).to(tl.int32)
        q = ((pair >> (k // 32 % 2 * 4)[:, None]) & 15).to(tl.float32)
        group = steps + (wide * (K // 32) + (k // 32)[:, None]) * 2
        factors = scales + (wide * (K // 256) + (k // 256)[:, None]) * 2
        # As ggml dequantises: d * scale * q - dmin * min, in f32, then one rounding to bf16.
        d = tl.load(factors, mask=m, other=0.0).to(tl.float32) * tl.load(group, mask=m, other=0).to(tl.float32)
        least = tl.load(factors + 1, mask=m, other=0.0).to(tl.float32)
        least = least * tl.load(group + 1, mask=m, other=0).to(tl.float32)
        total = tl.dot(a, (d * q - least).to(tl.bfloat16), total)
    store_part(parts, total, r, n, R, N)


@triton.jit
def e4m3(byte):
    """Return the value of a float8 e4m3 (OCP OFP8: bias 7, no infinities, 0x7F and 0xFF are NaN) as f32, exactly."""
    # Read as f32, these bits are the value times 2^-120, even if it is subnormal. So one exact product gives the value.
    bits = ((byte & 128) << 24) | ((byte & 127) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((byte & 127) == 127, float("nan"), value)


@triton.jit
def linear_fp8(parts, x, w, scales, R, N, K, chunk, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """linear_bf16 on weights of float8 e4m3: w [N, K] u8, scales [N, ceil(K / 128)] f32, one for 128 columns of a row.

    BK divides 128, and `chunk` is a multiple of 128 if there are several parts.
    """
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    begin = tl.program_id(2) * chunk
    end = tl.minimum(begin + chunk, K)
    total = tl.zeros((BM, BN), tl.float32)
    wide = n[None, :].to(tl.int64)
    for k0 in range(begin, end, BK):
        k = k0 + tl.arange(0, BK)
        m = (n < N)[None, :] & (k < end)[:, None]
        a = rows_tile(x, r, k, R, K, end)
        q = e4m3(tl.load(w + wide * K + k[:, None], mask=m, other=0).to(tl.int32))
        # All columns of the tile have the same scale of a row. As in linear_q8_0, one rounding to bf16.
        d = tl.load(scales + wide * tl.cdiv(K, 128) + k0 // 128, mask=(n < N)[None, :], other=0.0)
        total = tl.dot(a, (q * d).to(tl.bfloat16), total)
    store_part(parts, total, r, n, R, N)


@triton.jit
def linear_awq(parts, x, w, scales, zeros, R, N, K, chunk, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """linear_bf16 on weights of AWQ: 4 bits, and for each 128 columns of a row a scale and a zero point.

    w [N, K / 2] has two values per byte, as in linear_q4_k. scales [N, K / 128] f16, zeros [N, K / 128] u8. BK divides
    128, and `chunk` is a multiple of 128 if there are several parts.
    """
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    begin = tl.program_id(2) * chunk
    end = tl.minimum(begin + chunk, K)
    total = tl.zeros((BM, BN), tl.float32)
    wide = n[None, :].to(tl.int64)
    for k0 in range(begin, end, BK):
        k = k0 + tl.arange(0, BK)
        m = (n < N)[None, :] & (k < end)[:, None]
        a = rows_tile(x, r, k, R, K, end)
        pair = tl.load(w + wide * (K // 2) + (k // 64 * 32 + k % 32)[:, None], mask=m, other=0).to(tl.int32)
        q = (pair >> (k // 32 % 2 * 4)[:, None]) & 15
        group = wide * (K // 128) + k0 // 128
        z = tl.load(zeros + group, mask=(n < N)[None, :], other=0).to(tl.int32)
        d = tl.load(scales + group, mask=(n < N)[None, :], other=0.0).to(tl.float32)
        # The difference and its product with the scale are exact in f32; one rounding to bf16.
        total = tl.dot(a, ((q - z).to(tl.float32) * d).to(tl.bfloat16), total)
    store_part(parts, total, r, n, R, N)


@triton.jit
def normalised(low, high, weight, i, valid, eps, HALF: tl.constexpr):
    """Divide heads by their root mean square, and multiply by the weight: Qwen3's norm of q and k.

    `low` and `high` [heads, HALF] are the two halves of each head's values.
    """
    # The order of a sum over HALF lanes is fixed, so the number of heads in a program does not change it.
    squares = tl.div_rn(tl.sum(low * low + high * high, 1), 2.0 * HALF)
    scale = tl.div_rn(1.0, tl.sqrt_rn(squares + eps))[:, None]
    weight = weight.to(tl.pointer_type(tl.float32))
    first = tl.load(weight + i, mask=valid, other=0.0)
    second = tl.load(weight + HALF + i, mask=valid, other=0.0)
    return low * scale * first, high * scale * second


@triton.jit
def e4m3_scale(low, high, valid):
    """Return the scale of each head's values [heads, HALF], in two halves, as the exponent of an f32.

    The scale is the smallest power of two with which the head's values fit into e4m3. The largest value of e4m3 is 448
    = 1.75 * 2^8. A head with an infinite value or a NaN gets 255, the exponent of infinity.
    """
    # As integers, the bits of magnitudes have the order of the magnitudes, and the maximum is exact in any order.
    both = tl.maximum(low.to(tl.int32, bitcast=True) & 0x7FFFFFFF, high.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    most = tl.minimum(tl.max(tl.where(valid, both, 0), 1), 0x7F800000)[:, None]
    # Digits above 1.75 carry into the exponent. A scale of 2^-126 is the smallest normal one.
    exponent = tl.maximum(((most + 0x1FFFFF) >> 23) - 8, 1)
    return tl.where(most == 0x7F800000, 255, exponent)


@triton.jit
def e4m3_of(value, exponent):
    """Round value / 2^(exponent - 127) to the nearest float8 e4m3, ties to even; return its byte. NaN becomes 448."""
    value = value * ((254 - tl.minimum(exponent, 253)) << 23).to(tl.float32, bitcast=True)
    size = tl.minimum(tl.abs(value), 448.0)
    # To add and subtract a number whose last digit is e4m3's last digit rounds to that digit. Below 2^-6, e4m3's last
    # digit is that of its subnormals.
    least = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    rounder = (least + (20 << 23)).to(tl.float32, bitcast=True)
    nearest = (size + rounder) - rounder
    # The inverse of `e4m3`: an exact product with 2^-120 moves the value's digits to the byte's bits.
    byte = (nearest * 7.52316384526264e-37).to(tl.int32, bitcast=True) >> 20
    return byte | ((value.to(tl.int32, bitcast=True) >> 24) & 128)


@triton.jit
def store_e4m3(place, i, head, first, second, slot, valid, written, HALF: tl.constexpr):
    """Store the halves of heads [heads, HALF] at position `slot` of their pages as float8 e4m3, with a scale each.

    `place` is the address of each head's page. A page has PAGE rows of HALF words, then PAGE scales. Word i of a row
    has value i in its low byte and value HALF + i in its high byte. So a kernel unpacks a tile of words to two tiles of
    values, the lower and the upper half of the head.
    """
    exponent = e4m3_scale(first, second, valid)
    word = e4m3_of(first, exponent) | (e4m3_of(second, exponent) << 8)
    to = (place + slot * (2 * HALF)).to(tl.pointer_type(tl.int16))
    tl.store(to + i, word.to(tl.int16), mask=written)
    scales = (place + PAGE * 2 * HALF + slot).to(tl.pointer_type(tl.uint8))
    is_head = (head >= 0) & (tl.max(written.to(tl.int32), 1)[:, None] > 0)
    tl.store(scales, exponent.to(tl.uint8), mask=is_head)


@triton.jit
def rope_append(
    q, parts, bias, q_norm, k_norm, cosines, sines, rows, splits, stride, layer_bytes, block_bytes, H, G,
    has_bias, has_norm, eps, HALF: tl.constexpr, HEADS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Add qkv's parts and bias, rotate q and k by the row's position, and write k and v into the row's block.

    Each program computes HEADS heads of one row. The row's region has BLOCKS blocks and begins at the address BASE.
    Nothing is written to a block outside it. If FP8 is not None, k and v are written as `store_e4m3` writes them.
    """
    row = tl.program_id(0)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    valid = (head < H + 2 * G) & (i < HALF)
    record = rows + row * WORDS
    position = tl.load(record + POSITION)
    block = tl.load(record + BLOCK)
    base = tl.load((record + BASE).to(tl.pointer_type(tl.int64)))
    # The guard between tenants: a row writes only to a block inside its own region.
    inside = (position >= 0) & (block >= 0) & (block < tl.load(record + BLOCKS))
    # A padded row reads the table at position 0, and its result is not stored in any region.
    place = tl.maximum(position, 0) * HALF + i
    if triton.next_power_of_2(HALF) == HALF:
        c = tl.load(cosines + place)
        s = tl.load(sines + place)
    else:
        c = tl.load(cosines + place, mask=i < HALF, other=0.0)
        s = tl.load(sines + place, mask=i < HALF, other=0.0)
    columns = head * 2 * HALF + i
    at = row * ((H + 2 * G) * 2 * HALF) + columns
    # Step 1: complete qkv's sums and add the bias. The rotation combines the two halves of a head, so both are loaded.
    low_parts = load_parts(parts, splits, stride, at, valid)
    high_parts = load_parts(parts, splits, stride, at + HALF, valid)
    low = added_parts(low_parts, parts, splits, stride, at, valid)
    high = added_parts(high_parts, parts, splits, stride, at + HALF, valid)
    if has_bias > 0:
        low += tl.load(bias + columns, mask=valid, other=0.0)
        high += tl.load(bias + columns + HALF, mask=valid, other=0.0)
    # Step 2: normalise and rotate q and k. The heads from H + G on are v, which is not changed.
    turned = valid & (head < H + G)
    if has_norm > 0:
        weight = tl.where(head < H, q_norm.to(tl.int64), k_norm.to(tl.int64))
        low_norm, high_norm = normalised(low, high, weight, i, turned, eps, HALF)
        low = tl.where(turned, low_norm, low)
        high = tl.where(turned, high_norm, high)
    first = tl.where(turned, low * c - high * s, low)
    second = tl.where(turned, high * c + low * s, high)
    # Step 3: store q in a buffer of the step, and k and v, the heads numbered after q, in the row's block.
    query = q.to(tl.int64) + (row * H + head) * (4 * HALF)
    if FP8:
        to = query.to(tl.pointer_type(tl.bfloat16))
        tl.store(to + i, first.to(tl.bfloat16), mask=valid & (head < H))
        tl.store(to + HALF + i, second.to(tl.bfloat16), mask=valid & (head < H))
        page = base + block.to(tl.int64) * block_bytes + layer_bytes + (head - H) * (PAGE * (2 * HALF + 1))
        written = valid & (head >= H) & inside
        store_e4m3(page, i, head, first, second, position % PAGE, valid, written, HALF)
        return
    cached = base + block.to(tl.int64) * block_bytes + layer_bytes + ((head - H) * PAGE + position % PAGE) * (4 * HALF)
    to = tl.where(head < H, query, cached).to(tl.pointer_type(tl.bfloat16))
    written = valid & ((head < H) | inside)
    tl.store(to + i, first.to(tl.bfloat16), mask=written)
    tl.store(to + HALF + i, second.to(tl.bfloat16), mask=written)


@triton.jit
def within(mask, d, DH: tl.constexpr):
    """Return a mask without the lanes beyond DH, if there are any."""
    if triton.next_power_of_2(DH) != DH:
        mask = mask & (d < DH)
    return mask


@triton.jit
def query_tile(q, row, H, G, g, DH: tl.constexpr, HEADS: tl.constexpr):
    """Load the query heads [HEADS, DH] of a row that share the key head g."""
    heads = tl.arange(0, HEADS)
    share = H // G
    d = tl.arange(0, triton.next_power_of_2(DH))
    # A matrix instruction has HEADS rows. Rows without a head are 0 and read no memory.
    at = row * H * DH + (g * share + heads)[:, None] * DH + d[None, :]
    return tl.load(q + at, mask=within((heads < share)[:, None], d[None, :], DH), other=0.0)


@triton.jit
def regions_of(record, block_bytes):
    """Return address and number of blocks of the row's own region, the shared region's address, and the sum of blocks.

    Shared blocks are numbered after the row's own blocks. So the shared address is returned less the size of the row's
    own region.
    """
    base = tl.load((record + BASE).to(tl.pointer_type(tl.int64)))
    blocks = tl.load(record + BLOCKS)
    # A region's address is a multiple of 2 MiB. The record has the address divided by 2 MiB, which fits into one word.
    shared = tl.load(record + SHARED).to(tl.int64) << REGION_SHIFT
    return base, blocks, shared - blocks.to(tl.int64) * block_bytes, blocks + tl.load(record + SHARED_BLOCKS)


@triton.jit
def attend_tile(
    total, top, weights, query, table, base, blocks, shared, readable, j, first, length, layer_bytes, block_bytes, g, G,
    scale, DH: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Add BT positions from j on to the results: totals [HEADS, DH], highest scores [HEADS], sums of weights [HEADS].

    A number in the block table is that of a block of the row's region if it is less than `blocks`, and else of the
    shared region if it is less than `readable`. Blocks outside both regions add nothing. Positions before `first` add
    nothing.
    """
    d = tl.arange(0, triton.next_power_of_2(DH))
    p = j + tl.arange(0, BT)
    # The guard between tenants: a position whose block is in neither of the row's two regions is not read, and has
    # weight 0.
    block = tl.load(table + p // PAGE, mask=p < length, other=-1)
    seen = (block >= 0) & (block < readable)
    if first is not None:
        seen = seen & (p >= first)
    place = tl.where(block < blocks, base, shared) + block.to(tl.int64) * block_bytes + layer_bytes
    place += ((g * PAGE + p % PAGE) * DH * 2).to(tl.int64)
    # Load the keys [DH, BT] and values [BT, DH] of the same positions. A block has its values G * PAGE * DH elements
    # after its keys.
    keys = tl.multiple_of(place.to(tl.pointer_type(tl.bfloat16)), 16)
    k = tl.load(keys[None, :] + d[:, None], mask=within(seen[None, :], d[:, None], DH), other=0.0)
    values = keys + G * PAGE * DH
    v = tl.load(values[:, None] + d[None, :], mask=within(seen[:, None], d[None, :], DH), other=0.0)
    # Online softmax (flash attention): keep the highest score so far, and rescale the earlier sums by the difference.
    # The lowest score is -1e30, because the difference of two infinities would be NaN.
    score = tl.where(seen[None, :], tl.dot(query, k) * scale, -1e30)
    higher = tl.maximum(top, tl.max(score, 1))
    e = tl.where(seen[None, :], exp2(score - higher[:, None]), 0.0)
    shrink = exp2(top - higher)
    # Weights are rounded to bf16 for the product, but their sum stays f32.
    total = tl.dot(e.to(tl.bfloat16), v, total * shrink[:, None])
    weights = weights * shrink + tl.sum(e, 1)
    return total, higher, weights


@triton.jit
def attend(
    totals, tops, sums, q, rows, tables, layer_bytes, block_bytes, table_blocks, H, G, splits, scale, window,
    DH: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Compute the attention of one row's heads that share a key head, split by split (flash-decoding).

    Splits begin at multiples of SPLIT positions. The splits of a row and key head are dealt out among several programs
    in turn. If `window` is not None, a row sees only the last `window` positions, its own included. Splits without any
    of these positions are skipped.

    Writes each split's unnormalised totals [R, H, splits, DH], highest scores `tops` and sums of weights `sums` [R, H,
    splits].
    """
    row = tl.program_id(0)
    g = tl.program_id(1)
    record = rows + row * WORDS
    length = tl.load(record + POSITION) + 1
    heads = tl.arange(0, HEADS)
    d = tl.arange(0, triton.next_power_of_2(DH))
    valid = heads < H // G
    base, blocks, shared, readable = regions_of(record, block_bytes)
    table = tables + tl.load(record + TABLE) * table_blocks
    query = query_tile(q, row, H, G, g, DH, HEADS)
    first = None
    begin = tl.program_id(2)
    if window is not None:
        # Only the row's own position decides what the row sees, so its bits do not depend on other rows.
        first = tl.maximum(length - window, 0)
        begin += first // SPLIT
    # A split's bits do not depend on which program computes it.
    for split in range(begin, tl.cdiv(length, SPLIT), tl.num_programs(2)):
        total = tl.zeros((HEADS, triton.next_power_of_2(DH)), tl.float32)
        top = tl.full((HEADS,), -1e30, tl.float32)
        weights = tl.zeros((HEADS,), tl.float32)
        # Tiles of BT positions in ascending order. BT divides SPLIT, so a tile never crosses into the next split.
        for j in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, length), BT):
            total, top, weights = attend_tile(
                total, top, weights, query, table, base, blocks, shared, readable, j, first, length, layer_bytes,
                block_bytes, g, G, scale, DH, BT,
            )  # fmt: skip
        # `combine` uses these three results to rescale the split.
        at = (row * H + g * (H // G) + heads) * splits + split
        tl.store(totals + at[:, None] * DH + d[None, :], total, mask=within(valid[:, None], d[None, :], DH))
        tl.store(tops + at, top, mask=valid)
        tl.store(sums + at, weights, mask=valid)


@triton.jit
def highest(a, b):
    """The higher of two numbers, for scans."""
    return tl.maximum(a, b)


@triton.jit
def combine(
    x, totals, tops, sums, rows, H, splits, window, cuts,
    DH: tl.constexpr, SPLIT: tl.constexpr, LANES: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Add each head's splits in ascending order, and write the results to x [R, H, DH] bf16.

    If `window` is not None, only the splits inside the window are added. If `cuts` is not None, the splits come from
    `attend_spans`, and rows that it did not cut are not changed.

    A long context has many splits. Then the factors of LANES splits are computed together, and the totals of UNROLLED
    splits are loaded together. The splits are still added one after the other, so the bits are the same.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, triton.next_power_of_2(DH))
    length = tl.load(rows + row * WORDS + POSITION) + 1
    if cuts is None:
        at = (row * H + head) * splits
    else:
        place = tl.load(cuts + row * CUT_WORDS)
        if place < 0:
            return
        at = place * H + head * tl.load(cuts + row * CUT_WORDS + 1)
    top = tl.full((), -1e30, tl.float32)
    weights = tl.zeros((1,), tl.float32)
    total = tl.zeros((triton.next_power_of_2(DH),), tl.float32)
    begin = 0
    if window is not None:
        begin = tl.maximum(length - window, 0) // SPLIT
    end = tl.cdiv(length, SPLIT)
    if end - begin < UNROLLED:
        # Load all splits before the first is added, so that the kernel waits for memory only once. The loop has a fixed
        # length. After the last split it adds -0 to the total, which changes no bit.
        its_tops, its_sums, its_totals = (), (), ()
        for i in tl.static_range(UNROLLED - 1):
            inside = begin + i < end
            its_tops += (tl.load(tops + at + begin + i, mask=inside, other=-1e30),)  # type: ignore[assignment]
            its_sums += (tl.load(sums + at + begin + i, mask=inside, other=0.0),)  # type: ignore[assignment]
            within_head = inside & (d < DH)
            its_total = tl.load(totals + (at + begin + i) * DH + d, mask=within_head, other=-0.0)
            its_totals += (its_total,)  # type: ignore[assignment]
        for i in tl.static_range(UNROLLED - 1):
            # The same rescaling as within a split, in ascending order of splits.
            higher = tl.maximum(top, its_tops[i])
            shrink = exp2(top - higher)
            its = exp2(its_tops[i] - higher)
            total = total * shrink + its_totals[i] * its
            weights = weights * shrink + its_sums[i] * its
            top = higher
    else:
        lanes = tl.arange(0, LANES)
        for first in range(begin, end, LANES):
            s = first + lanes
            # Compute the highest score up to and including each split, and the highest before each split. Maxima are
            # exact in any order.
            its_top = tl.load(tops + at + s, mask=s < end, other=-1e30)
            last_top = tl.load(tops + at + s - 1, mask=(lanes > 0) & (s <= end), other=-1e30)
            higher = tl.maximum(tl.associative_scan(its_top, 0, highest), top)
            shrink = exp2(tl.maximum(tl.associative_scan(last_top, 0, highest), top) - higher)
            its = exp2(its_top - higher)
            its_weights = tl.load(sums + at + s, mask=s < end, other=0.0) * its
            for i in range(0, tl.minimum(end - first, LANES), UNROLLED):
                for j in tl.static_range(UNROLLED):
                    # After the last split, the loop adds -0 to the total, which changes no bit.
                    inside = first + i + j < end
                    if triton.next_power_of_2(DH) != DH:
                        inside = inside & (d < DH)
                    part = tl.load(totals + (at + first + i + j) * DH + d, mask=inside, other=-0.0)
                    lane = tl.full((1,), i + j, tl.int32)
                    less = tl.gather(shrink, lane, 0)
                    total = total * less + part * tl.gather(its, lane, 0)
                    weights = weights * less + tl.gather(its_weights, lane, 0)
            top = tl.max(higher, 0)
    # A padded row has weight 0 and total 0, and is divided by 1.
    result = tl.div_rn(total, tl.where(weights > 0.0, weights, 1.0))
    if triton.next_power_of_2(DH) == DH:
        tl.store(x + (row * H + head) * DH + d, result.to(tl.bfloat16))
    else:
        tl.store(x + (row * H + head) * DH + d, result.to(tl.bfloat16), mask=d < DH)


@triton.jit
def attend_whole(
    x, q, rows, tables, layer_bytes, block_bytes, table_blocks, H, G, scale, window,
    DH: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Compute in one program, with the same bits, what `attend` and `combine` compute: x [R, H, DH] bf16.

    This kernel is for steps of many rows, which fill the card although no sequence is divided among several programs.
    """
    row = tl.program_id(0)
    g = tl.program_id(1)
    record = rows + row * WORDS
    length = tl.load(record + POSITION) + 1
    heads = tl.arange(0, HEADS)
    d = tl.arange(0, triton.next_power_of_2(DH))
    base, blocks, shared, readable = regions_of(record, block_bytes)
    table = tables + tl.load(record + TABLE) * table_blocks
    query = query_tile(q, row, H, G, g, DH, HEADS)
    # There are two levels of sums, as in `attend` and `combine`: over the current split, and over all splits.
    all_total = tl.zeros((HEADS, triton.next_power_of_2(DH)), tl.float32)
    all_top = tl.full((HEADS,), -1e30, tl.float32)
    all_weights = tl.zeros((HEADS,), tl.float32)
    total, top, weights = all_total, all_top, all_weights
    first = None
    begin = 0
    if window is not None:
        first = tl.maximum(length - window, 0)
        begin = first // SPLIT * SPLIT
    for j in range(begin, length, BT):
        total, top, weights = attend_tile(
            total, top, weights, query, table, base, blocks, shared, readable, j, first, length, layer_bytes,
            block_bytes, g, G, scale, DH, BT,
        )  # fmt: skip
        # At the end of a split or of the sequence, add the split's sums to the whole as `combine` does, and begin the
        # next split.
        if ((j + BT) % SPLIT == 0) | (j + BT >= length):
            higher = tl.maximum(all_top, top)
            shrink = exp2(all_top - higher)
            its = exp2(top - higher)
            # The same products and sums as in `combine`, in the same order, so the bits are equal.
            all_total = all_total * shrink[:, None] + total * its[:, None]
            all_weights = all_weights * shrink + weights * its
            all_top = higher
            total = tl.zeros((HEADS, triton.next_power_of_2(DH)), tl.float32)
            top = tl.full((HEADS,), -1e30, tl.float32)
            weights = tl.zeros((HEADS,), tl.float32)
    result = tl.div_rn(all_total, tl.where(all_weights > 0.0, all_weights, 1.0)[:, None])
    at = (row * H + g * (H // G) + heads)[:, None] * DH + d[None, :]
    tl.store(x + at, result.to(tl.bfloat16), mask=within((heads < H // G)[:, None], d[None, :], DH))


@triton.jit
def summed_as_rows(e, LANES: tl.constexpr, BT: tl.constexpr, WARPS: tl.constexpr):
    """Add the BT weights of each lane of e [LANES, BT] in the order in which `attend_tile` adds the weights of a row.

    In `attend_tile` the compiler chose the order. It adds pairs of adjacent positions, then the values of one thread,
    then those of the thread's quad, then those of the warps. Each warp has 8 positions of every 8 * WARPS.

    Here every sum is over an axis of length two. A sum of two values does not depend on their order, so the bits are
    the same in any layout.
    """
    if BT == 128:
        # The axes are the bits of a position: 6 and 5 select the value of a thread, 4 and 3 the warp, 2 and 1 the lane
        # of a quad, 0 the value of a pair.
        b = tl.sum(tl.reshape(e, (LANES, 2, 2, 2, 2, 2, 2, 2)), 7)
        b = tl.sum(tl.sum(b, 2), 1)
        b = tl.sum(tl.sum(b, 3), 3)
    elif BT == 64:
        b = tl.sum(tl.reshape(e, (LANES, 2, 2, 2, 2, 2, 2)), 6)
        b = tl.sum(b, 1)
        b = tl.sum(tl.sum(b, 3), 3)
    elif WARPS == 1:
        # One thread has all four groups of 8 positions.
        b = tl.sum(tl.reshape(e, (LANES, 2, 2, 2, 2, 2)), 5)
        b = tl.sum(tl.sum(b, 2), 1)
    else:
        b = tl.sum(tl.reshape(e, (LANES, 2, 2, 2, 2, 2)), 5)
        b = tl.sum(tl.sum(b, 3), 3)
    return tl.sum(tl.sum(b, 1), 1)


@triton.jit
def attend_rows(
    x, totals, tops, sums, q, tables, number, base, blocks, shared, readable, row, count, its, mine, position,
    first_split, end_split, place, splits, layer_bytes, block_bytes, table_blocks, H, G, g, scale, window,
    DH: tl.constexpr, SPLIT: tl.constexpr, BT: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute the attention of a tile: `count` rows of one sequence, from `row` on.

    `its` [LANES] is each lane's row, and `mine` [LANES] is true for lanes in use.

    If `totals` is None, the function computes all splits and writes x [R, H, DH] bf16. Otherwise it computes the splits
    from `first_split` up to `end_split`, exclusive. Then it writes x if `place` is -1. If not, it writes the splits'
    results as `attend` does, `splits` of them for each row, from index `place` on.
    """
    share = H // G
    lanes = tl.arange(0, LANES)
    d = tl.arange(0, triton.next_power_of_2(DH))
    at = (its * H + g * share + lanes % share)[:, None] * DH + d[None, :]
    query = tl.load(q + at, mask=within(mine[:, None], d[None, :], DH), other=0.0)
    table = tables + number * table_blocks
    # Turn 0 computes all rows together. If it reads an infinite value or a NaN that some row must not see, each row is
    # computed again in a turn of its own. The value has weight 0 for that row, but 0 times infinity is NaN.
    turn = 0
    turns = 1
    while turn < turns:
        active = mine & ((turn == 0) | (its == row + turn - 1))
        length = tl.where(active, position, -1) + 1
        most = tl.max(length, 0)
        all_total = tl.zeros((LANES, triton.next_power_of_2(DH)), tl.float32)
        all_top = tl.full((LANES,), -1e30, tl.float32)
        all_weights = tl.zeros((LANES,), tl.float32)
        total, top, weights = all_total, all_top, all_weights
        # Every row sees the positions from `seen_from` up to `seen_to`, exclusive.
        seen_to = tl.min(tl.where(active, length, most), 0)
        seen_from = 0
        first = tl.zeros((LANES,), tl.int32)
        begin = 0
        if window is not None:
            first = tl.maximum(length - window, 0)
            seen_from = tl.max(first, 0)
            least = tl.min(tl.where(active, first, seen_from), 0)
            begin = least // SPLIT * SPLIT
        end = most
        if totals is not None:
            begin = first_split * SPLIT
            end = tl.minimum(most, end_split * SPLIT)
        for j in range(begin, end, BT):
            p = j + tl.arange(0, BT)
            # Load as in `attend_tile`, but every position that some row of the tile sees. `seen` then selects each
            # row's positions.
            block = tl.load(table + p // PAGE, mask=p < most, other=-1)
            known = (block >= 0) & (block < readable)
            if window is not None:
                known = known & (p >= least)
            memory = tl.where(block < blocks, base, shared) + block.to(tl.int64) * block_bytes + layer_bytes
            memory += ((g * PAGE + p % PAGE) * DH * 2).to(tl.int64)
            keys = tl.multiple_of(memory.to(tl.pointer_type(tl.bfloat16)), 16)
            k = tl.load(keys[None, :] + d[:, None], mask=within(known[None, :], d[:, None], DH), other=0.0)
            values = keys + G * PAGE * DH
            v = tl.load(values[:, None] + d[None, :], mask=within(known[:, None], d[None, :], DH), other=0.0)
            seen = known[None, :] & (p[None, :] < length[:, None])
            if window is not None:
                seen = seen & (p[None, :] >= first[:, None])
            score = tl.where(seen, tl.dot(query, k) * scale, -1e30)
            higher = tl.maximum(top, tl.max(score, 1))
            e = tl.where(seen, exp2(score - higher[:, None]), 0.0)
            shrink = exp2(top - higher)
            total = tl.dot(e.to(tl.bfloat16), v, total * shrink[:, None])
            weights = weights * shrink + summed_as_rows(e, LANES, BT, WARPS)
            top = higher
            if (turn == 0) & ((j + BT > seen_to) | (j < seen_from)):
                finite = (v.to(tl.int16, bitcast=True) & 0x7F80) != 0x7F80
                if tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0:
                    turns = 1 + count
            # At the end of a split or of the longest row, add the split as in `attend_whole`. Rows that have ended or
            # not begun add nothing.
            if ((j + BT) % SPLIT == 0) | (j + BT >= end):
                if totals is not None:
                    part = ((place + (its - row) * splits) * H + (g * share + lanes % share) * splits) + j // SPLIT
                    kept = active & (place >= 0)
                    part_at = part[:, None] * DH + d[None, :]
                    tl.store(totals + part_at, total, mask=within(kept[:, None], d[None, :], DH))
                    tl.store(tops + part, top, mask=kept)
                    tl.store(sums + part, weights, mask=kept)
                over = tl.maximum(all_top, top)
                shrink = exp2(all_top - over)
                its_share = exp2(top - over)
                all_total = all_total * shrink[:, None] + total * its_share[:, None]
                all_weights = all_weights * shrink + weights * its_share
                all_top = over
                total = tl.zeros((LANES, triton.next_power_of_2(DH)), tl.float32)
                top = tl.full((LANES,), -1e30, tl.float32)
                weights = tl.zeros((LANES,), tl.float32)
        written = active
        if totals is not None:
            written = active & (place < 0)
        result = tl.div_rn(all_total, tl.where(all_weights > 0.0, all_weights, 1.0)[:, None])
        tl.store(x + at, result.to(tl.bfloat16), mask=within(written[:, None], d[None, :], DH))
        turn += 1


@triton.jit
def unpacked(words):
    """Convert 16-bit words of two float8 e4m3 each to two tiles of bf16, the low bytes and the high bytes, exactly.

    Placed among a bf16's bits, a byte's bits are the value times 2^-120, as in `e4m3`. One exact product then gives the
    value. The bytes of NaN, which `e4m3_of` never returns, give 480.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 s, t, c, z;
        mov.b32 c, 0x7b807b80;
        mov.b32 z, 0x80008000;
        shl.b32 s, $2, 8;
        and.b32 s, s, 0x80008000;
        shl.b32 t, $2, 4;
        and.b32 t, t, 0x07f007f0;
        or.b32 s, s, t;
        fma.rn.bf16x2 $0, s, c, z;
        and.b32 s, $2, 0x80008000;
        shr.b32 t, $2, 4;
        and.b32 t, t, 0x07f007f0;
        or.b32 s, s, t;
        fma.rn.bf16x2 $1, s, c, z;
        }
        """,
        "=r,=r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def attend_prompt(
    x, q, rows, tables, layer_bytes, block_bytes, table_blocks, R, H, G, scale, window,
    DH: tl.constexpr, SPLIT: tl.constexpr, BT: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute what `attend_whole` does, to the bit, for tiles of adjacent rows of one sequence: x [R, H, DH] bf16.

    The rows of a tile share the loads of keys and values. A tile begins where the sequence changes, and at every
    multiple of the tile's number of rows. There is a program for every row, but only the first row's program of a tile
    does any work. Each lane is a query head of a row. WARPS is the number of warps of `attend_whole`, which decides the
    order of its sums.
    """
    row = tl.program_id(0)
    g = tl.program_id(1)
    share = H // G
    count = LANES // share
    record = rows + row * WORDS
    number = tl.load(record + TABLE)
    base, blocks, shared, readable = regions_of(record, block_bytes)
    # The previous row decides whether this row begins a tile. Reads are checked against one pair of regions for a whole
    # tile, so the rows of a tile must have the same regions, too.
    if row % count > 0:
        its_base, its_blocks, its_shared, its_readable = regions_of(record - WORDS, block_bytes)
        same = (tl.load(record - WORDS + TABLE) == number) & (its_base == base) & (its_blocks == blocks)
        if same & (its_shared == shared) & (its_readable == readable):
            return
    lanes = tl.arange(0, LANES)
    its = row + lanes // share
    after = tl.minimum((row // count + 1) * count, R)
    near = rows + its * WORDS
    inside = its < after
    other = tl.load(near + TABLE, mask=inside, other=0) != number
    other |= tl.load(near + BLOCKS, mask=inside, other=0) != blocks
    other |= tl.load((near + BASE).to(tl.pointer_type(tl.int64)), mask=inside, other=0) != base
    other |= tl.load(near + SHARED, mask=inside, other=0) != tl.load(record + SHARED)
    other |= tl.load(near + SHARED_BLOCKS, mask=inside, other=0) != tl.load(record + SHARED_BLOCKS)
    # The tile ends before the first row of another sequence.
    mine = its < tl.min(tl.where(inside & other, its, after), 0)
    position = tl.load(near + POSITION, mask=mine, other=-1)
    attend_rows(
        x, None, None, None, q, tables, number, base, blocks, shared, readable, row, count, its, mine, position, 0, 0,
        -1, 0, layer_bytes, block_bytes, table_blocks, H, G, g, scale, window, DH, SPLIT, BT, LANES, WARPS,
    )  # fmt: skip


@triton.jit
def differ(one, other, mask):
    """Return where two rows' records differ in sequence or regions, so that the rows can't be in the same tile."""
    different = tl.load(one + TABLE, mask=mask, other=0) != tl.load(other + TABLE, mask=mask, other=0)
    different |= tl.load(one + BLOCKS, mask=mask, other=0) != tl.load(other + BLOCKS, mask=mask, other=0)
    one_base, other_base = (one + BASE).to(tl.pointer_type(tl.int64)), (other + BASE).to(tl.pointer_type(tl.int64))
    different |= tl.load(one_base, mask=mask, other=0) != tl.load(other_base, mask=mask, other=0)
    different |= tl.load(one + SHARED, mask=mask, other=0) != tl.load(other + SHARED, mask=mask, other=0)
    different |= tl.load(one + SHARED_BLOCKS, mask=mask, other=0) != tl.load(other + SHARED_BLOCKS, mask=mask, other=0)
    return different


@triton.jit
def cut_spans(
    spans,
    cuts,
    rows,
    R,
    S,
    count,
    room,
    whole_splits,
    least_splits,
    max_spans,
    SPLIT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Divide the attention of a step's rows, at most LANES, into spans for `attend_spans`. One program does all of it.

    A tile has up to `count` adjacent rows of one sequence, as in `attend_prompt`. A tile with more than `whole_splits`
    splits is cut into spans of at least `least_splits` splits, so that the step has about `max_spans` spans. Every
    other tile is one span.

    A cut tile stores one part for each row and split. There is room for `room` parts. A tile for which too little room
    is left is not cut. S is at least R + `max_spans`.

    Writes S records to `spans`, those of cut tiles first. A record has six numbers: the tile's first row, its number of
    rows, the span's first split, the split after its last, the index of the tile's parts or -1 if it is not cut, and
    the tile's number of splits. Records that are not used get the row -1. For each row, `cuts` gets the index of the
    row's parts and its tile's number of splits.
    """
    i = tl.arange(0, LANES)
    inside = i < R
    record = rows + i * WORDS
    position = tl.load(record + POSITION, mask=inside, other=-1)
    begins = (i % count == 0) | differ(record, record - WORDS, inside & (i % count > 0))
    ends = ((i + 1) % count == 0) | (i + 1 == R) | differ(record, record + WORDS, i + 1 < R)
    ends = ends & inside
    # Compute each row's first row of its tile, and the most splits of a row so far. Neither number decreases within a
    # tile. So both are packed into one word, and one scan for the maximum computes both.
    first = tl.associative_scan(tl.where(begins, i, 0), 0, highest)
    both = tl.associative_scan((first << 16) | tl.cdiv(position + 1, SPLIT), 0, highest)
    # From here on, the values of each tile's last row are those of the tile.
    splits = both & 0xFFFF
    tile_rows = i - first + 1
    is_long = ends & (splits > whole_splits)
    places = tl.where(is_long, tile_rows * splits, 0)
    behind = tl.cumsum(places, 0)
    is_cut = is_long & (behind <= room)
    place = tl.where(is_cut, behind - places, -1)
    span_splits = tl.maximum(least_splits, tl.cdiv(tl.sum(tl.where(is_cut, splits, 0), 0), max_spans))
    its_spans = tl.where(is_cut, tl.cdiv(splits, span_splits), 0)
    cut = tl.sum(its_spans, 0)
    whole = ends & (its_spans == 0)
    number = tl.where(is_cut, tl.cumsum(its_spans, 0) - its_spans, cut + tl.cumsum(whole.to(tl.int32), 0) - 1)
    for s in range(tl.maximum(tl.max(its_spans, 0), 1)):
        mask = (s < its_spans) | (whole & (s == 0))
        at = spans + (number + s) * SPAN_WORDS
        begin = s * span_splits
        tl.store(at + FIRST_ROW, first, mask=mask)
        tl.store(at + ROWS, tile_rows, mask=mask)
        tl.store(at + FIRST_SPLIT, begin, mask=mask)
        tl.store(at + END_SPLIT, tl.where(is_cut, tl.minimum(begin + span_splits, splits), splits), mask=mask)
        tl.store(at + PLACE, place, mask=mask)
        tl.store(at + SPLITS, splits, mask=mask)
    for s in range(cut + tl.sum(whole.to(tl.int32), 0), S, LANES):
        tl.store(spans + (s + i) * SPAN_WORDS + FIRST_ROW, -1, mask=s + i < S)
    for r in range(count):
        at = cuts + (first + r) * CUT_WORDS
        mask = ends & (r < tile_rows)
        tl.store(at, tl.where(is_cut, place + r * splits, -1), mask=mask)
        tl.store(at + 1, splits, mask=mask)


@triton.jit
def attend_spans(
    x, totals, tops, sums, q, rows, tables, spans, layer_bytes, block_bytes, table_blocks, H, G, scale,
    DH: tl.constexpr, SPLIT: tl.constexpr, BT: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute what `attend_prompt` does, to the bit, with several programs for each long tile that `cut_spans` has cut.

    The results of uncut tiles are written to x. The parts of cut tiles are written for `combine`. Tiles of one row are
    skipped, because `attend_row_spans` computes them.
    """
    g = tl.program_id(0)
    span = spans + tl.program_id(1) * SPAN_WORDS
    row = tl.load(span + FIRST_ROW)
    tile_rows = tl.load(span + ROWS)
    if (row < 0) | (tile_rows == 1):
        return
    share = H // G
    its = row + tl.arange(0, LANES) // share
    mine = its < row + tile_rows
    # All rows of a tile are of the same sequence and regions.
    record = rows + row * WORDS
    base, blocks, shared, readable = regions_of(record, block_bytes)
    position = tl.load(rows + its * WORDS + POSITION, mask=mine, other=-1)
    attend_rows(
        x, totals, tops, sums, q, tables, tl.load(record + TABLE), base, blocks, shared, readable, row, LANES // share,
        its, mine, position, tl.load(span + FIRST_SPLIT), tl.load(span + END_SPLIT), tl.load(span + PLACE),
        tl.load(span + SPLITS), layer_bytes, block_bytes, table_blocks, H, G, g, scale, None, DH, SPLIT, BT, LANES,
        WARPS,
    )  # fmt: skip


@triton.jit
def attend_row_spans(
    x, totals, tops, sums, q, rows, tables, spans, layer_bytes, block_bytes, table_blocks, H, G, scale,
    DH: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Compute what `attend_spans` does, to the bit, for tiles of one row. These need only HEADS lanes."""
    g = tl.program_id(0)
    span = spans + tl.program_id(1) * SPAN_WORDS
    row = tl.load(span + FIRST_ROW)
    if (row < 0) | (tl.load(span + ROWS) != 1):
        return
    place = tl.load(span + PLACE)
    record = rows + row * WORDS
    length = tl.load(record + POSITION) + 1
    heads = tl.arange(0, HEADS)
    d = tl.arange(0, triton.next_power_of_2(DH))
    valid = heads < H // G
    base, blocks, shared, readable = regions_of(record, block_bytes)
    table = tables + tl.load(record + TABLE) * table_blocks
    query = query_tile(q, row, H, G, g, DH, HEADS)
    # Two levels of sums, as in `attend_whole`. For a cut sequence, only the sums within the current split are used.
    all_total = tl.zeros((HEADS, triton.next_power_of_2(DH)), tl.float32)
    all_top = tl.full((HEADS,), -1e30, tl.float32)
    all_weights = tl.zeros((HEADS,), tl.float32)
    total, top, weights = all_total, all_top, all_weights
    parts = place * H + (g * (H // G) + heads) * tl.load(span + SPLITS)
    end = tl.minimum(tl.load(span + END_SPLIT) * SPLIT, length)
    for j in range(tl.load(span + FIRST_SPLIT) * SPLIT, end, BT):
        total, top, weights = attend_tile(
            total, top, weights, query, table, base, blocks, shared, readable, j, None, length, layer_bytes,
            block_bytes, g, G, scale, DH, BT,
        )  # fmt: skip
        if ((j + BT) % SPLIT == 0) | (j + BT >= end):
            if place >= 0:
                at = parts + j // SPLIT
                tl.store(totals + at[:, None] * DH + d[None, :], total, mask=within(valid[:, None], d[None, :], DH))
                tl.store(tops + at, top, mask=valid)
                tl.store(sums + at, weights, mask=valid)
            else:
                higher = tl.maximum(all_top, top)
                shrink = exp2(all_top - higher)
                its = exp2(top - higher)
                all_total = all_total * shrink[:, None] + total * its[:, None]
                all_weights = all_weights * shrink + weights * its
                all_top = higher
            total = tl.zeros((HEADS, triton.next_power_of_2(DH)), tl.float32)
            top = tl.full((HEADS,), -1e30, tl.float32)
            weights = tl.zeros((HEADS,), tl.float32)
    if place < 0:
        result = tl.div_rn(all_total, tl.where(all_weights > 0.0, all_weights, 1.0)[:, None])
        at = (row * H + g * (H // G) + heads)[:, None] * DH + d[None, :]
        tl.store(x + at, result.to(tl.bfloat16), mask=within(valid[:, None], d[None, :], DH))


@triton.jit
def silu(x, parts, splits, stride, F, BLOCK_F: tl.constexpr):
    """Add the parts of gate and up, [splits, R, 2 F] with gate first, and write SiLU(gate) * up to x [R, F]."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    m = c < F
    gate = added(parts, splits, stride, row * 2 * F + c, m)
    up = added(parts, splits, stride, row * 2 * F + F + c, m)
    tl.store(x + row * F + c, gated(gate, up), mask=m)


@triton.jit
def gelu(x, parts, splits, stride, F, BLOCK_F: tl.constexpr):
    """Do what `silu` does, with `gelu_gated`."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    m = c < F
    gate = added(parts, splits, stride, row * 2 * F + c, m)
    up = added(parts, splits, stride, row * 2 * F + F + c, m)
    tl.store(x + row * F + c, gelu_gated(gate, up), mask=m)


@triton.jit
def route(experts, shares, parts, rows, splits, stride, E, K, is_normalised, LANES: tl.constexpr, PLACES: tl.constexpr):
    """Choose each row's K likeliest of E experts, likeliest first, and compute their shares.

    `parts` are the router's logits [splits, R, E]. Of equally likely experts, the lowest is chosen. Shares [R, K] are
    probabilities over all experts, or over the chosen ones if `is_normalised`. A padded row's experts [R, K] are -1. E
    is at most LANES, and K at most PLACES.
    """
    row = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    places = tl.arange(0, PLACES)
    logits = added(parts, splits, stride, row * E + lanes, lanes < E)
    # NaN is unequal to itself. Experts with NaN are chosen last, so each place gets a valid expert, whatever the logits
    # are.
    numbers = tl.where((lanes < E) & (logits == logits), logits, -float("inf"))
    weights = tl.where(lanes < E, exp2((numbers - tl.max(numbers, 0)) * LOG2_E), 0.0)
    total = tl.sum(weights, 0)
    free = tl.where(lanes < E, 1, 0)
    chosen = tl.full((PLACES,), -1, tl.int32)
    their = tl.zeros((PLACES,), tl.float32)
    all_chosen = tl.zeros((), tl.float32)
    for place in range(K):
        best = tl.max(tl.where(free > 0, numbers, -float("inf")), 0)
        found = tl.min(tl.where((free > 0) & (numbers == best), lanes, LANES), 0)
        share = tl.div_rn(tl.sum(tl.where(lanes == found, weights, 0.0), 0), total)
        chosen = tl.where(places == place, found, chosen)
        their = tl.where(places == place, share, their)
        # Add in the order of the places, which depends on this row alone.
        all_chosen += share
        free = tl.where(lanes == found, 0, free)
    if is_normalised > 0:
        their = tl.div_rn(their, all_chosen)
    chosen = tl.where(tl.load(rows + row * WORDS + POSITION) >= 0, chosen, -1)
    tl.store(experts + row * K + places, chosen, mask=places < K)
    tl.store(shares + row * K + places, their, mask=places < K)


@triton.jit
def group(pairs, tiles, experts, P, E, T, rows_per_tile, LANES: tl.constexpr, BLOCK_P: tl.constexpr):
    """Group the pairs of rows and experts into T tiles. A tile has one expert, and up to `rows_per_tile` pairs.

    `experts` [P] has each pair's expert, or -1 for none. Program e of E writes the tiles of expert e: `tiles` [T] gets
    e, and `pairs` [T, rows_per_tile] gets the pairs in ascending order, followed by -1. The remaining tiles get -1. T
    is at least P // rows_per_tile plus the number of experts that have a pair. E is at most LANES.

    The tile and row in which a pair is placed depend on the other rows, but its result does not, because each row of a
    tile is computed independently.
    """
    e = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    i = tl.arange(0, BLOCK_P)
    # Step 1: count the pairs of all experts, to find where this program's tiles begin. Every program counts all of
    # them.
    counts = tl.zeros((LANES,), tl.int32)
    for p in range(0, P, BLOCK_P):
        its = tl.load(experts + p + i, mask=p + i < P, other=-1)
        counts += tl.sum((its[:, None] == lanes[None, :]).to(tl.int32), 0)
    its_tiles = (counts + rows_per_tile - 1) // rows_per_tile
    begin = tl.sum(tl.where(lanes < e, its_tiles, 0), 0)
    end = begin + tl.sum(tl.where(lanes == e, its_tiles, 0), 0)
    # Step 2: write this expert's pairs in their order.
    to = pairs + begin * rows_per_tile
    done = tl.zeros((), tl.int32)
    for p in range(0, P, BLOCK_P):
        own = (tl.load(experts + p + i, mask=p + i < P, other=-1) == e).to(tl.int32)
        tl.store(to + done + tl.cumsum(own, 0) - own, p + i, mask=own > 0)
        done += tl.sum(own, 0)
    # Step 3: fill the last tile.
    for at in range(done, (end - begin) * rows_per_tile, BLOCK_P):
        tl.store(to + at + i, -1, mask=at + i < (end - begin) * rows_per_tile)
    for tile in range(begin, end):
        tl.store(tiles + tile, e)
    # The last expert's program marks the tiles that are not used.
    if e == E - 1:
        for tile in range(end, T):
            tl.store(tiles + tile, -1)


@triton.jit
def experts_silu_bf16(y, x, w, pairs, tiles, R, F, K, C, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """linear_silu_bf16 for each pair of a row and an expert: y [R C, F] bf16, by pairs.

    x [R, K], w [E, 2 F, K]; a row has C pairs. `pairs` and `tiles` are what `group` wrote for tiles of BM rows. A
    pair's bits are those of linear_silu_bf16 on its expert's weights.
    """
    tile = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    e = tl.load(tiles + tile)
    if e >= 0:
        pair = tl.load(pairs + tile * BM + tl.arange(0, BM))
        # A row of the tile without a pair reads row R of x, which is beyond the last one and so reads as 0.
        r = tl.where(pair >= 0, pair // C, R)
        gate, up = gate_and_up(x, w + e.to(tl.int64) * 2 * F * K, r, n, R, F, K, BM, BN, BK)
        tl.store(y + pair[:, None] * F + n[None, :], gated(gate, up), mask=(pair >= 0)[:, None] & (n < F)[None, :])


@triton.jit
def experts_bf16(parts, y, w, shares, pairs, tiles, R, N, K, C, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Multiply each pair's values by its expert's weights and its share: parts [C, R, N] f32.

    y [R C, K] bf16, w [E, N, K], shares [R C]. An expert's index among the experts of its row is the index of its part,
    so the next kernel adds a row's parts in the row's order. A pair without an expert writes nothing.
    """
    tile = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    e = tl.load(tiles + tile)
    if e >= 0:
        pair = tl.load(pairs + tile * BM + tl.arange(0, BM))
        r = tl.where(pair >= 0, pair, R * C)
        total = tl.zeros((BM, BN), tl.float32)
        wide = e.to(tl.int64) * N * K + n[None, :].to(tl.int64) * K
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            a = rows_tile(y, r, k, R * C, K, K)
            m = (n < N)[None, :] & (k < K)[:, None]
            total = tl.dot(a, tl.load(w + wide + k[:, None], mask=m, other=0.0), total)
        total = total * tl.load(shares + pair, mask=pair >= 0, other=0.0)[:, None]
        at = (pair % C).to(tl.int64) * R * N + (pair // C) * N
        tl.store(parts + at[:, None] + n[None, :], total, mask=(pair >= 0)[:, None] & (n < N)[None, :])


@triton.jit
def ordered(x):
    """Return floats' bits as integers that have the same order."""
    # Adding 0 turns -0 into 0. As integers, negative floats have the reverse order, so all of their bits but the sign
    # are flipped.
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def kept(parts, splits, stride, row, V, c, threshold, top, inverse):
    """Return which of the tokens c have a logit that reaches the threshold, and their weights, 0 for the others.

    A weight is e^((logit - top) * inverse), where `inverse` is the inverse temperature.
    """
    logits = added(parts, splits, stride, row * V + c, c < V)
    weights = exp2((logits - top) * inverse * LOG2_E)
    chosen = (c < V) & (ordered(logits) >= threshold)
    return chosen, tl.where(chosen, weights, 0.0)


@triton.jit
def uniform(seed, position):
    """Return a random number of 24 bits in [0, 1), by Philox4x32-10."""
    # The number depends only on seed and position, so a token that is computed again is chosen by the same number.
    first, _, _, _ = tl.philox(seed, position, 0, 0, 0)
    return (first.to(tl.uint32, bitcast=True) >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def scan(bests, tokens, totals, parts, splits, stride, V, blocks, BLOCK_V: tl.constexpr):
    """Find each block's highest logit, the lowest token that has it, and the sum of e^(logit - highest) over the block.

    `bests`, `tokens` and `totals` are [R, blocks]. A block with only NaN gets -infinity, token 0 and sum 0.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    c = block * BLOCK_V + tl.arange(0, BLOCK_V)
    logits = added(parts, splits, stride, row * V + c, c < V)
    # NaN is unequal to itself, and is never the highest.
    numbers = tl.where((c < V) & (logits == logits), logits, -float("inf"))
    best = tl.max(numbers, 0)
    # Of tokens with equal logits, take the lowest, so that the choice does not depend on the lanes' arrangement.
    token = tl.min(tl.where((numbers == best) & (c < V), c, 2147483647), 0)
    weights = exp2((numbers - best) * LOG2_E)
    at = row * blocks + block
    tl.store(bests + at, best)
    tl.store(tokens + at, tl.where(best > -float("inf"), token, 0))
    tl.store(totals + at, tl.sum(tl.where(c < V, weights, 0.0), 0))


@triton.jit
def merged(bests, tokens, totals, row, blocks, LANES: tl.constexpr):
    """Merge what `scan` found in a row: the lowest token with the highest logit, the logit, the sum over all tokens."""
    lanes = tl.arange(0, LANES)
    # First pass: the highest logit. The maximum is exact in any order.
    best = tl.full((LANES,), -float("inf"), tl.float32)
    for b in range(0, blocks, LANES):
        best = tl.maximum(best, tl.load(bests + row * blocks + b + lanes, mask=b + lanes < blocks, other=-float("inf")))
    top = tl.max(best, 0)
    # Second pass: the lowest token with that logit, and the sum, rescaled from each block's highest logit to the row's.
    token = tl.full((LANES,), 2147483647, tl.int32)
    total = tl.zeros((LANES,), tl.float32)
    for b in range(0, blocks, LANES):
        at = row * blocks + b + lanes
        mask = b + lanes < blocks
        own = tl.load(bests + at, mask=mask, other=-float("inf"))
        found = tl.load(tokens + at, mask=mask, other=2147483647)
        token = tl.minimum(token, tl.where(own == top, found, 2147483647))
        total += tl.load(totals + at, mask=mask, other=0.0) * exp2((own - top) * LOG2_E)
    return tl.min(token, 0), top, tl.sum(total, 0)


@triton.jit
def total_kept(parts, splits, stride, row, V, threshold, top, inverse, BLOCK_V: tl.constexpr):
    """Return the sum of the kept tokens' weights, and the number of kept tokens."""
    # Weights are added lane by lane over ascending blocks, and then over the lanes. This order depends only on the
    # vocabulary's size.
    total = tl.zeros((BLOCK_V,), tl.float32)
    count = tl.zeros((BLOCK_V,), tl.int32)
    for v in range(0, V, BLOCK_V):
        c = v + tl.arange(0, BLOCK_V)
        chosen, weights = kept(parts, splits, stride, row, V, c, threshold, top, inverse)
        total += weights
        count += chosen.to(tl.int32)
    return tl.sum(total, 0), tl.sum(count, 0)


@triton.jit
def count_kept(parts, splits, stride, row, V, threshold, BLOCK_V: tl.constexpr):
    """Return the number of tokens with logits that reach a threshold."""
    count = tl.zeros((BLOCK_V,), tl.int32)
    for v in range(0, V, BLOCK_V):
        c = v + tl.arange(0, BLOCK_V)
        logits = added(parts, splits, stride, row * V + c, c < V)
        count += ((c < V) & (ordered(logits) >= threshold)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def raised(threshold, bit):
    """Return a threshold raised by one bit, counted from the sign bit."""
    # Bit 0 is the sign. There the search tries 0 instead of the least integer.
    return tl.where(bit == 0, 0, threshold | (1 << (31 - bit)))


@triton.jit
def top_k_threshold(parts, splits, stride, row, V, limit, top_k, BLOCK_V: tl.constexpr):
    """Return a threshold that keeps the `top_k` highest logits, and the number of tokens that reach it.

    It is the highest threshold that at least `top_k` tokens reach, or any that exactly `top_k` tokens reach. `limit` is
    the highest logit in the order of `ordered`. No threshold above it is tried.
    """
    # A binary search over the bits of the ordered logits, highest bit first: at most 32 counts, without sorting the
    # vocabulary. It ends early once exactly `top_k` tokens reach the threshold.
    threshold = tl.full((), -2147483648, tl.int32)
    count = V
    bit = tl.zeros((), tl.int32)
    while (bit < 32) & (count != top_k):
        # A threshold above the highest logit would keep nothing.
        trial = raised(threshold, bit)
        if trial <= limit:
            reached = count_kept(parts, splits, stride, row, V, trial, BLOCK_V)
            if reached >= top_k:
                threshold = trial
                count = reached
        bit += 1
    return threshold, count


@triton.jit
def top_p_threshold(parts, splits, stride, row, V, limit, lowest, count, enough, top, inverse, BLOCK_V: tl.constexpr):
    """Return the highest threshold whose kept weights sum to `enough`, or a lower one that keeps the same tokens.

    The threshold is at least `lowest`, which `count` tokens reach.
    """
    # The search is that of `top_k_threshold`, by weight instead of count. `count` tokens reach `found`, and `fewer`
    # tokens reach the lowest threshold known to be too high. Once these numbers differ by one, no threshold in between
    # changes the choice.
    found = tl.full((), -2147483648, tl.int32)
    fewer = tl.zeros((), tl.int32)
    bit = tl.zeros((), tl.int32)
    while (bit < 32) & (count - fewer > 1):
        trial = raised(found, bit)
        if trial <= limit:
            higher = tl.maximum(trial, lowest)
            weight, reached = total_kept(parts, splits, stride, row, V, higher, top, inverse, BLOCK_V)
            if weight >= enough:
                found = trial
                count = reached
            else:
                fewer = reached
        bit += 1
    return tl.maximum(found, lowest)


@triton.jit
def choose(parts, splits, stride, row, V, threshold, top, inverse, wanted, BLOCK_V: tl.constexpr):
    """Return the first kept token at which the sum of weights so far exceeds `wanted`; -1 if rounding leaves none."""
    # Inverse transform sampling: add the kept weights in ascending blocks until their sum exceeds `wanted`.
    before = tl.zeros((), tl.float32)
    chosen = tl.full((), -1, tl.int32)
    v = tl.zeros((), tl.int32)
    while (v < V) & (chosen < 0):
        c = v + tl.arange(0, BLOCK_V)
        _, w = kept(parts, splits, stride, row, V, c, threshold, top, inverse)
        # The prefix sums are computed only for a block in which the sum exceeds `wanted`.
        behind = before + tl.sum(w, 0)
        if behind > wanted:
            # If rounding of the prefix sums leaves no token in this block, the next block is searched.
            here = tl.min(tl.where((before + tl.cumsum(w, 0) > wanted) & (w > 0.0), c, 2147483647), 0)
            chosen = tl.where(here < V, here, chosen)
        before = behind
        v += BLOCK_V
    return chosen


@triton.jit
def sampled(record, parts, splits, stride, row, V, likeliest, top, BLOCK_V: tl.constexpr):
    """Return the token that a row's sampling chooses from its logits.

    If INVERSE_TEMPERATURE is 0, the result is `likeliest`. Otherwise the kernel keeps the TOP_K highest logits, or all
    for 0. It drops those more than DEPTH below the highest, or none for 0. Of the rest, it keeps the fewest that
    together have TOP_P of the rest's probability. Equal logits are kept or dropped together. A random number, which
    depends only on seed and position, then chooses one of the kept tokens.
    """
    token = likeliest
    position = tl.load(record + POSITION)
    inverse = tl.load((record + INVERSE_TEMPERATURE).to(tl.pointer_type(tl.float32)))
    least = tl.full((), -2147483648, tl.int32)
    if (inverse > 0.0) & (position >= 0):
        # Step 1: top_k. Without it every token is kept.
        threshold = least
        count = V
        limit = ordered(top)
        top_k = tl.load(record + TOP_K)
        if (top_k > 0) & (top_k < V):
            threshold, count = top_k_threshold(parts, splits, stride, row, V, limit, top_k, BLOCK_V)
        # Step 2: min_p, which the host has converted to a distance from the highest logit.
        depth = tl.load((record + DEPTH).to(tl.pointer_type(tl.float32)))
        if depth > 0.0:
            threshold = tl.maximum(threshold, ordered(top - depth))
        total, count = total_kept(parts, splits, stride, row, V, threshold, top, inverse, BLOCK_V)
        top_p = tl.load((record + TOP_P).to(tl.pointer_type(tl.float32)))
        # Step 3: top_p of the remaining probability.
        if top_p < 1.0:
            enough = total * top_p
            threshold = top_p_threshold(
                parts, splits, stride, row, V, limit, threshold, count, enough, top, inverse, BLOCK_V
            )
            total, _ = total_kept(parts, splits, stride, row, V, threshold, top, inverse, BLOCK_V)
        # Step 4: choose a token by the random number. If rounding leaves none, the likeliest token is taken.
        seed = tl.load((record + SEED).to(tl.pointer_type(tl.int64)))
        wanted = uniform(seed, position) * total
        chosen = choose(parts, splits, stride, row, V, threshold, top, inverse, wanted, BLOCK_V)
        token = tl.where(chosen < 0, likeliest, chosen)
    return token


@triton.jit
def store_result(results, row, token, logit, top, everything):
    out = results + row * RESULT_WORDS
    tl.store(out, token)
    floats = (out + 1).to(tl.pointer_type(tl.float32))
    tl.store(floats, logit)
    tl.store(floats + 1, top)
    tl.store(floats + 2, everything)


@triton.jit
def sample(
    results, parts, rows, bests, tokens, totals, splits, stride, V, blocks, BLOCK_V: tl.constexpr, LANES: tl.constexpr
):
    """Choose each row's token from its logits [splits, R, V] and from the results of `scan`.

    A result has the token, its logit, the highest logit, and the sum of e^(logit - highest). From these the host
    computes the logarithm of the token's probability at temperature 1, without any filter.
    """
    row = tl.program_id(0)
    # Padded rows get the likeliest token, as in greedy sampling.
    likeliest, top, everything = merged(bests, tokens, totals, row, blocks, LANES)
    token = sampled(rows + row * WORDS, parts, splits, stride, row, V, likeliest, top, BLOCK_V)
    logit = added(parts, splits, stride, row * V + token, token < V)
    store_result(results, row, token, logit, top, everything)


@triton.jit
def guide(
    guided, bests, tokens, parts, guides, entries, masks, splits, stride, V, blocks, mask_words,
    BLOCK_V: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the logits from which each row chooses to `guided` [R, V], and each block's highest logit and its token.

    MASK is the index of a row's mask, or -1 for none. A mask has a bit for each allowed token. The other tokens get
    -infinity.

    A row has COUNT entries from index FIRST on, each for a different token. An entry changes the token's logit in three
    steps: ADDEND is added; the sum is divided by DIVISOR if the sum is above 0, and multiplied by DIVISOR otherwise;
    SUBTRAHEND is subtracted.

    A row with neither mask nor entries chooses from its own logits, to the bit.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    begin = block * BLOCK_V
    c = begin + tl.arange(0, BLOCK_V)
    record = guides + row * GUIDE_WORDS
    logits = added(parts, splits, stride, row * V + c, c < V)
    mask = tl.load(record + MASK)
    words = tl.load(masks + mask * mask_words + c // 32, mask=(c < V) & (mask >= 0), other=-1)
    logits = tl.where(((words >> (c % 32)) & 1) != 0, logits, -float("inf"))
    tl.store(guided + row * V + c, logits, mask=c < V)
    count = tl.load(record + COUNT)
    if count > 0:
        # The entries are loaded by other lanes than those that stored the block, so wait until all stores are done.
        tl.debug_barrier()
        first = tl.load(record + FIRST)
        lanes = tl.arange(0, LANES)
        for e in range(0, count, LANES):
            entry = entries + (first + e + lanes) * ENTRY_WORDS
            token = tl.load(entry + ENTRY_TOKEN, mask=e + lanes < count, other=-1)
            here = (token >= begin) & (token < begin + BLOCK_V) & (token < V)
            addend = tl.load((entry + ADDEND).to(tl.pointer_type(tl.float32)), mask=here, other=0.0)
            divisor = tl.load((entry + DIVISOR).to(tl.pointer_type(tl.float32)), mask=here, other=1.0)
            less = tl.load((entry + SUBTRAHEND).to(tl.pointer_type(tl.float32)), mask=here, other=0.0)
            value = tl.load(guided + row * V + token, mask=here, other=0.0) + addend
            value = tl.where(value > 0.0, tl.div_rn(value, divisor), value * divisor) - less
            tl.store(guided + row * V + token, value, mask=here)
        tl.debug_barrier()
        logits = tl.load(guided + row * V + c, mask=c < V, other=-float("inf"))
    # As in `scan`, NaN is never the highest, and of equal logits the lowest token is taken.
    numbers = tl.where((c < V) & (logits == logits), logits, -float("inf"))
    best = tl.max(numbers, 0)
    token = tl.min(tl.where((numbers == best) & (c < V), c, 2147483647), 0)
    tl.store(bests + row * blocks + block, best)
    tl.store(tokens + row * blocks + block, tl.where(best > -float("inf"), token, 0))


@triton.jit
def sample_guided(
    results, guided, bests, tokens, parts, guides, rows, own_bests, own_tokens, own_totals, splits, stride, V, blocks,
    BLOCK_V: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Choose each row's token from its guided logits. The result has the token's probability by the row's own logits.

    `own_bests`, `own_tokens` and `own_totals` are the results of `scan` for the row's own logits. If a row's TARGET is
    not -1, the result has the logit of the token TARGET instead of the chosen token's. In this way a prompt's tokens
    are scored.
    """
    row = tl.program_id(0)
    likeliest, top, _ = merged(bests, tokens, own_totals, row, blocks, LANES)
    token = sampled(rows + row * WORDS, guided, 1, stride, row, V, likeliest, top, BLOCK_V)
    _, own_top, everything = merged(own_bests, own_tokens, own_totals, row, blocks, LANES)
    target = tl.load(guides + row * GUIDE_WORDS + TARGET)
    shown = tl.where(target < 0, token, target)
    logit = added(parts, splits, stride, row * V + shown, shown < V)
    store_result(results, row, token, logit, own_top, everything)


@triton.jit
def rank(
    ranked, parts, guides, bests, tokens, splits, stride, V, blocks,
    BLOCK_V: tl.constexpr, LANES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Write each row's RANKS likeliest tokens and their logits to `ranked` [R, PLACES, 2].

    Equal logits are ordered by token, lowest first. `bests` and `tokens` are the results of `scan`, for at most LANES
    blocks. If fewer than RANKS of a row's logits are above -infinity, the remaining places get the logit -infinity.
    """
    row = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    at = row * blocks + lanes
    best = tl.load(bests + at, mask=lanes < blocks, other=-float("inf"))
    token = tl.load(tokens + at, mask=lanes < blocks, other=2147483647)
    for place in range(tl.load(guides + row * GUIDE_WORDS + RANKS)):
        top = tl.max(best, 0)
        found = tl.min(tl.where(best == top, token, 2147483647), 0)
        out = ranked + (row * PLACES + place) * 2
        tl.store(out, found)
        tl.store((out + 1).to(tl.pointer_type(tl.float32)), top)
        # Only the block that contained this token changes. Its next best token is the best of the tokens that come
        # after this one in the order.
        block = found // BLOCK_V
        c = block * BLOCK_V + tl.arange(0, BLOCK_V)
        logits = added(parts, splits, stride, row * V + c, c < V)
        behind = (c < V) & ((logits < top) | ((logits == top) & (c > found)))
        numbers = tl.where(behind, logits, -float("inf"))
        its = tl.max(numbers, 0)
        its_token = tl.min(tl.where(behind & (numbers == its), c, 2147483647), 0)
        best = tl.where(lanes == block, its, best)
        token = tl.where(lanes == block, its_token, token)
