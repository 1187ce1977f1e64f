"""Compare `rope_append` and attention on keys and values in float8 e4m3 with numpy's float64."""

import math
from typing import Any

import numpy as np
import pytest

from gpulease.client.decode.engine.kernel_library import manifest
from gpulease.client.decode.row_records import PAGE, SHARED_ALIGNMENT
from helpers.decode.e4m3 import E4M3, e4m3_codes, e4m3_exponents
from helpers.decode_kernels import Array, KernelRig, bf16, floats, step_rows

LAYERS = 2
"""Layers of a block. The kernels are tried on the second one."""

LENGTHS = (1, 15, 16, 17, 127, 128, 129, 300)
WINDOW = 40
NO_WINDOW = 1 << 20
SOME = [32, pytest.param(80, marks=pytest.mark.exhaustive)]
"""A width that is a power of two, and one that is not, so that a tile has masked columns: they differ in code."""
MOST = [*SOME, *(pytest.param(width, marks=pytest.mark.slow) for width in (64, 96, 128, 256))]
GROUPS = [3, *(pytest.param(group, marks=pytest.mark.exhaustive) for group in (1, 8, 16))]


def region_of(rng: np.random.Generator, blocks: int, key_heads: int, width: int, spread: float = 1.0) -> Array:
    """Return random pages [blocks, layers, keys and values, key heads, bytes of a page]."""
    shape = (blocks, LAYERS, 2, key_heads, PAGE)
    return pages_of(rng.normal(0, 1, (*shape, width)) * spread ** rng.normal(0, 1, (*shape, 1)))


def pages_of(values: Array) -> Array:
    """Return the pages [..., bytes] of values [..., PAGE, width]."""
    exponents = e4m3_exponents(values)
    codes = e4m3_codes(values, exponents)
    # The halves of a head take turns: value i, value width / 2 + i.
    low, high = np.split(codes, 2, axis=-1)
    words = np.stack([low, high], -1).reshape(*codes.shape[:-2], -1)
    return np.ascontiguousarray(np.concatenate([words, exponents[..., 0]], -1))


def values_of(pages: Array) -> Array:
    """Return the values [..., PAGE, width] of pages [..., bytes]."""
    width = pages.shape[-1] // PAGE - 1
    codes = pages[..., : PAGE * width].reshape(*pages.shape[:-1], PAGE, width // 2, 2)
    scales = 2.0 ** (pages[..., PAGE * width :].astype(float) - 127)
    scales[pages[..., PAGE * width :] == 255] = np.inf
    with np.errstate(invalid="ignore"):
        return np.concatenate([E4M3[codes[..., 0]], E4M3[codes[..., 1]]], -1) * scales[..., None]


def places(region: Array) -> dict[str, Any]:
    return {"layer_bytes": region[0, 0].nbytes, "block_bytes": region[0].nbytes}


# --- rope_append ---


def appended(rig: KernelRig, parts: Array, region: Array, rows: Array, heads: int, key_heads: int, width: int) -> Array:
    """Append rows that are not turned to the region. Returns q [rows, heads, width] bf16."""
    count = len(rows)
    address = rig.place(region)
    rows["base"] = address
    q = np.zeros((count, heads, width), np.uint16)
    name = f"rope_append_fp8_{width}"
    programs = -(-(heads + 2 * key_heads) // manifest().kernels[name].constants["HEADS"])
    turns = np.zeros((2, 100, width // 2), np.float32)
    turns[0] = 1
    rig.launch(
        name, (count, programs), regions=[(address, region)], q=q, parts=parts, bias=None, q_norm=None, k_norm=None,
        cosines=turns[0], sines=turns[1], rows=rows, splits=1, stride=parts.size, **places(region), H=heads,
        G=key_heads, has_bias=0, has_norm=0, eps=1e-6,
    )  # fmt: skip
    rig.release(address)
    return q


@pytest.mark.parametrize("width", MOST)
def test_rope_append_stores_the_nearest_e4m3_with_the_smallest_scale(rig: KernelRig, width: int) -> None:
    rng = np.random.default_rng(width)
    heads, key_heads, count = 6, 2, 8
    region = rng.integers(0, 256, (5, LAYERS, 2, key_heads, PAGE * (width + 1)), np.uint8)
    before = region.copy()
    rows = step_rows(
        count, position=[0, 17, 31, 90, 5, 6, 7, -1], block=[3, 0, 4, 1, 2, 2, 2, 2], blocks=[5] * 6 + [2, 5]
    )
    parts: Array = rng.normal(0, 1, (1, count, heads + 2 * key_heads, width)) * 10 ** rng.normal(
        0, 4, (1, count, 10, 1)
    )
    # Ties, numbers at both ends of the format, and zeros.
    parts[0, 0, heads:] = E4M3[rng.integers(0, 127, (4, width))] * 2.0**-30
    parts[0, 1, heads:] = (E4M3[rng.integers(0, 126, (4, width))] + 2.0**-10 * rng.integers(0, 3, (4, width))) * 4.0
    parts[0, 2, heads] = 0
    parts[0, 3, heads, 0], parts[0, 3, heads + 1, -1] = np.inf, np.nan
    parts[0, 4, heads:, 1] = np.array([448, 449, 464, 480]) * 2.0**60
    parts[0, 5, heads:] *= 2.0**-130
    # The turn by 0 may change the sign of a zero.
    parts = parts.astype(np.float32) + np.float32(0)
    q = appended(rig, parts, region, rows, heads, key_heads, width)
    assert q.tobytes() == bf16(parts[0, :, :heads]).tobytes()
    for row in range(count):
        block, slot = rows["block"][row], rows["position"][row] % PAGE
        if rows["position"][row] < 0 or block >= rows["blocks"][row]:
            continue
        values = parts[0, row, heads:].reshape(2, key_heads, 1, width).astype(np.float64)
        exponents = e4m3_exponents(values)
        stored = np.split(e4m3_codes(values, exponents)[:, :, 0], 2, axis=-1)
        finite = exponents[:, :, 0, 0] != 255
        words = before[block, 1, :, :, slot * width : (slot + 1) * width]
        words[finite] = np.stack(stored, -1).reshape(2, key_heads, width)[finite]
        # The bytes of a head with an infinity or a NaN do not matter.
        words[~finite] = region[block, 1, :, :, slot * width : (slot + 1) * width][~finite]
        before[block, 1, :, :, PAGE * width + slot] = exponents[:, :, 0, 0]
    assert region.tobytes() == before.tobytes()


# --- attention ---


def attended(
    rig: KernelRig,
    q: Array,
    region: Array,
    rows: Array,
    tables: Array,
    splits: int,
    window: int = NO_WINDOW,
    shared: Array | None = None,
) -> Array:
    """The attention's output [R, H, width] of bf16 queries: of `attend_fp8`, by two programs a row, and `combine`.

    `attend_whole_fp8`, `attend_prompt_fp8` and, without a window, `attend_spans_fp8` give the same bits.
    """
    count, heads, width = q.shape
    key_heads = region.shape[3]
    address = rig.place(region)
    rows["base"] = address
    if shared is not None:
        shared_address = rig.place(shared, SHARED_ALIGNMENT)
        rows["shared"] = shared_address // SHARED_ALIGNMENT
    totals = np.full((count, heads, splits, width), np.nan, np.float32)
    tops, sums = np.full((2, count, heads, splits), np.nan, np.float32)
    x, whole, prompt = np.zeros((3, count, heads, width), np.uint16)
    read: dict[str, Any] = {
        "q": q, "rows": rows, "tables": tables, **places(region), "table_blocks": tables.shape[1], "H": heads,
        "G": key_heads, "scale": math.log2(math.e) / math.sqrt(width),
    }  # fmt: skip
    # A program of these kernels computes some of the heads that share a key head.
    groups = -(-(heads // key_heads) // manifest().kernels[f"attend_fp8_{width}"].constants["HEADS"])
    rig.launch(
        f"attend_fp8_{width}", (count, key_heads * groups, min(splits, 2)), totals=totals, tops=tops, sums=sums,
        splits=splits, **read, window=window,
    )  # fmt: skip
    rig.launch(f"attend_whole_fp8_{width}", (count, key_heads, groups), x=whole, **read, window=window)
    rig.launch(f"attend_prompt_fp8_{width}", (count, key_heads), x=prompt, R=count, **read, window=window)
    if window == NO_WINDOW:
        for room in (count * splits // 2, count * splits):
            spanned = attended_in_spans(rig, rows, heads, key_heads, width, read, room)
            assert spanned.tobytes() == whole.tobytes()
    rig.release(address)
    if shared is not None:
        rig.release(shared_address)
    rig.launch(
        f"combine_window_{width}", (count, heads), x=x, totals=totals, tops=tops, sums=sums, rows=rows, H=heads,
        splits=splits, window=window,
    )  # fmt: skip
    assert whole.tobytes() == x.tobytes()
    assert prompt.tobytes() == x.tobytes()
    return x


def attended_in_spans(
    rig: KernelRig, rows: Array, heads: int, key_heads: int, width: int, read: dict[str, Any], room: int
) -> Array:
    """Return the attention's output of `attend_spans_fp8` and `combine`, with room for a number of parts."""
    count, name = len(rows), f"attend_spans_fp8_{width}"
    tile_rows = manifest().kernels[name].constants["LANES"] // (heads // key_heads)
    spans, cuts = np.full((count + 64, 8), -2, np.int32), np.full((count, 2), -2, np.int32)
    rig.launch(
        "cut_spans", (1,), spans=spans, cuts=cuts, rows=rows, R=count, S=len(spans), count=tile_rows, room=room,
        whole_splits=1, least_splits=1, max_spans=64,
    )  # fmt: skip
    totals = np.full((max(room, 1), heads, width), np.nan, np.float32)
    tops, sums = np.full((2, max(room, 1), heads), np.nan, np.float32)
    x = np.full((count, heads, width), 0x7FC0, np.uint16)
    parts: dict[str, Any] = {"totals": totals, "tops": tops, "sums": sums}
    rig.launch(name, (key_heads, len(spans)), x=x, **parts, spans=spans, **read)
    rig.launch(f"combine_spans_{width}", (count, heads), x=x, **parts, rows=rows, H=heads, cuts=cuts)
    return x


def check_attention(found: Array, q: Array, region: Array, table: Array, seen: Array) -> None:
    """Compare the outputs [H, width] of one row with those of the stored values over the positions that it sees."""
    group = len(q) // region.shape[3]
    pages = values_of(region[:, 1])[table[seen // PAGE], :, :, seen % PAGE]
    keys, values = (pages[:, side].repeat(group, 1) for side in (0, 1))
    scores = np.einsum("hd,thd->ht", floats(q), keys) / math.sqrt(q.shape[1])
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    exact = np.einsum("ht,thd->hd", shares, values)
    sizes = np.einsum("ht,thd->hd", shares, abs(values))
    # The weights are rounded to bf16 before they are multiplied, and so is the output.
    assert (abs(floats(found) - exact) <= 2 * 2.0**-8 * 1.01 * sizes).all()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("window", [NO_WINDOW, WINDOW])
@pytest.mark.parametrize("width", MOST)
def test_attention_of_every_length(rig: KernelRig, width: int, window: int, group: int) -> None:
    rng = np.random.default_rng(group)
    key_heads, blocks = 2, 60
    # The scales of positions differ by powers of ten.
    region = region_of(rng, blocks, key_heads, width, spread=3.0)
    q = bf16(rng.normal(0, 1, (len(LENGTHS), group * key_heads, width)))
    tables = np.stack([rng.permutation(blocks)[:20] for _ in LENGTHS]).astype(np.int32)
    order = rng.permutation(len(LENGTHS))
    rows = step_rows(len(LENGTHS), position=np.array(LENGTHS) - 1, table=order, blocks=blocks)
    found = attended(rig, q, region, rows, tables, -(-320 // manifest().split), window)
    for row, length in enumerate(LENGTHS):
        check_attention(found[row], q[row], region, tables[order[row]], np.arange(max(0, length - window), length))


@pytest.mark.parametrize("has_others", [False, True])
@pytest.mark.parametrize("window", [NO_WINDOW, WINDOW])
@pytest.mark.parametrize("width", MOST)
def test_rows_of_prompts_have_the_bits_that_each_has_alone(
    rig: KernelRig, width: int, window: int, has_others: bool
) -> None:
    """Decoding rows, three prompts' rows and padded ones; with infinities that only some of a prompt's rows see."""
    rng = np.random.default_rng(width)
    runs = [(0, 200, 1), (1, 5, 1), (2, 0, 37), (3, 120, 21), (4, 300, 3)]
    table = np.concatenate([[number] * count for number, _, count in runs] + [[4] * 3])
    position = np.concatenate([begin + np.arange(count) for _, begin, count in runs] + [[-1] * 3])
    region, tables = region_of(rng, 100, 2, width), rng.permutation(100).reshape(len(runs), 20).astype(np.int32)
    for number, at in ((2, 20), (3, 134)) if has_others else ():
        region[tables[number][at // PAGE], 1, 1, :, PAGE * width + at % PAGE] = 255
    rows = step_rows(len(table), position=position, table=table, blocks=100)
    q = bf16(rng.normal(0, 2, (len(table), 6, width)))
    found = attended(rig, q, region, rows, tables, 3, window)
    assert not found[-3:].any()
    # The first 20 rows of the third prompt do not see the infinity.
    assert np.isfinite(floats(found[:22])).all()
    assert np.isfinite(floats(found[22:])).all() != has_others
    for row in (0, 10, 45):
        alone = attended(rig, q[row : row + 1], region, rows[row : row + 1], tables, 3, window)
        assert alone.tobytes() == found[row].tobytes()


@pytest.mark.parametrize("width", SOME)
def test_blocks_of_a_shared_region_give_the_bits_of_own_ones(rig: KernelRig, width: int) -> None:
    """The first row has 12 blocks of its own region, the second 5 of the shared region and 7 of its own."""
    rng = np.random.default_rng(width)
    blocks = region_of(rng, 12, 2, width)
    q = bf16(rng.normal(0, 2, (1, 6, width))).repeat(2, 0)
    tables = np.array([rng.permutation(12), np.zeros(12)], np.int32)
    shared, own = blocks[tables[0][:5]], blocks.copy()
    # The second row must not read the first blocks of its own region.
    own[tables[0][:5]] = 0xFF
    tables[1] = [*range(12, 17), *tables[0][5:]]
    rows = step_rows(2, position=180, table=[0, 1], blocks=12, shared_blocks=[0, 5])
    alone = attended(rig, q[:1], blocks, rows[:1], tables, 2)
    found = attended(rig, q[1:], own, rows[1:], tables, 2, NO_WINDOW, shared)
    assert found.tobytes() == alone.tobytes()


def test_a_foreign_block_reads_as_nothing(rig: KernelRig) -> None:
    """The region is the first 8 of 10 blocks.

    For some pages, and for all of one split, the tables name other blocks.
    """
    rng = np.random.default_rng(1)
    region = region_of(rng, 10, 1, 32)
    q = bf16(rng.normal(0, 1, (2, 2, 32)))
    tables = np.array([[0, 8, 2, 9, 4, -1, 6, 7, -(2**31), 2**31 - 1], [8] * 8 + [3, 5]], np.int32)
    rows = step_rows(2, position=159, table=[0, 1], blocks=8)
    found = attended(rig, q, region, rows, tables, 2)
    for row, table in enumerate(tables):
        seen = np.concatenate([np.arange(PAGE) + PAGE * i for i, block in enumerate(table) if 0 <= block < 8])
        check_attention(found[row], q[row], region, table, seen)


def test_a_padded_row_and_a_row_that_sees_nothing_are_zero(rig: KernelRig) -> None:
    region = region_of(np.random.default_rng(2), 2, 1, 32)
    rows = step_rows(2, position=[-1, 20], blocks=2)
    q = bf16(np.ones((2, 3, 32)))
    assert not attended(rig, q, region, rows, np.full((1, 2), 2, np.int32), 1).any()


def test_every_byte_is_unpacked_to_its_value(rig: KernelRig) -> None:
    """A row that sees one position has that position's values, which bf16 has exactly."""
    codes = np.arange(256, dtype=np.uint8)
    codes[[0x7F, 0xFF]] = 0
    region = np.zeros((8, LAYERS, 2, 1, PAGE * 33), np.uint8)
    pages = codes.reshape(8, 32)
    region[:, 1, 1, 0, :32], region[:, 1, 1, 0, PAGE * 32] = pages, np.arange(1, 255, 32)
    region[:, 1, 0, 0, PAGE * 32] = 127
    rows = step_rows(8, position=0, table=np.arange(8), blocks=8)
    found = attended(rig, bf16(np.ones((8, 1, 32))), region, rows, np.arange(8, dtype=np.int32)[:, None], 1)
    exact = values_of(region[:, 1, 1, 0])[:, 0]
    # The smallest scales are below bf16's normal numbers, which the sum of one product still has.
    assert (floats(found[:, 0]) == floats(bf16(exact))).all()


def test_the_error_of_a_weight_is_within_its_bound(rig: KernelRig) -> None:
    """A row sees two positions with the scores 0 and x: the sum of their weights is 1 + 2^x."""
    heads, width = 8, 32
    values = np.zeros((1, LAYERS, 2, 1, PAGE, width))
    values[..., 0, 0] = 1
    region = pages_of(values)
    address = rig.place(region)
    rows = step_rows(1, position=1, blocks=1, base=address)
    q = np.zeros((1, heads, width), np.float32)
    q[0, :, 0] = -np.linspace(0.5, 1, heads)
    rounded = bf16(q)
    worst = 0.0
    for scale in np.linspace(0.01, 8, 60, dtype=np.float32).tolist():
        totals, tops = np.zeros((1, heads, 1, width), np.float32), np.zeros((1, heads, 1), np.float32)
        sums = np.zeros((1, heads, 1), np.float32)
        rig.launch(
            f"attend_fp8_{width}", (1, 1, 1), totals=totals, tops=tops, sums=sums, q=rounded, rows=rows,
            tables=np.zeros((1, 1), np.int32), **places(region), table_blocks=1, H=heads, G=1, splits=1, scale=scale,
            window=NO_WINDOW,
        )  # fmt: skip
        exact = np.exp2(floats(rounded)[0, :, 0] * scale)
        # The sum is rounded to 2^-23.
        worst = max(worst, float(((abs(sums[0, :, 0] - 1.0 - exact) - 2.0**-24) / exact).max()))
    rig.release(address)
    assert worst < 3e-6
