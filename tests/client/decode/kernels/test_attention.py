"""Compare `rope_append`, `attend` and `combine` with numpy's float64."""

import math
from typing import Any

import numpy as np
import pytest

from gpulease.client.decode.engine.kernel_library import manifest
from gpulease.client.decode.row_records import PAGE, SHARED_ALIGNMENT
from helpers.decode_kernels import Array, KernelRig, bf16, floats, step_rows

HALF_PLACE = 2.0**-8 * 1.01
"""Largest relative error of a bf16 that was rounded once, plus 1 % for the f32 numbers before it."""

LAYERS = 2
"""Layers of a block. The kernels are tried on the second one."""

LENGTHS = (1, 15, 16, 17, 127, 128, 129, 300)
EVERY_WIDTH = [
    32,
    *(pytest.param(width, marks=pytest.mark.exhaustive) for width in (64, 80, 96)),
    *(pytest.param(width, marks=pytest.mark.slow) for width in (128, 256)),
]
GROUPS = [3, *(pytest.param(group, marks=pytest.mark.exhaustive) for group in (1, 8, 16))]
WINDOW = 40
ATTENDS = [
    (32, None),
    (32, WINDOW),
    *(pytest.param(*kind, marks=pytest.mark.exhaustive) for kind in ((80, WINDOW), (96, None))),
    *(pytest.param(width, window, marks=pytest.mark.slow) for width in (64, 128, 256) for window in (None, WINDOW)),
]
"""Widths and windows of the attention's kernels, which all are one source (test_build.py compares them with it).

Its code differs where there is a window, and where a width is no power of two, so that a tile has masked columns; the
embedded driver compiles four to eight kernels for each pair. Engines run all widths (test_engine_references.py).
"""


def region_of(rng: np.random.Generator, blocks: int, key_heads: int, width: int) -> Array:
    """Return random blocks of bf16, [blocks, layers, keys and values, key heads, positions, width]."""
    return bf16(rng.normal(0, 1, (blocks, LAYERS, 2, key_heads, PAGE, width)))


def places(region: Array) -> dict[str, Any]:
    return {"layer_bytes": region[0, 0].nbytes, "block_bytes": region[0].nbytes}


# --- rope_append ---


def turned(values: Array, angles: Array) -> Array:
    """Return heads [..., width], with their halves turned by angles [..., width / 2]."""
    low, high = np.split(values, 2, axis=-1)
    c, s = np.cos(angles), np.sin(angles)
    return np.concatenate([low * c - high * s, high * c + low * s], -1)


@pytest.mark.parametrize("options", ["neither", "bias", "norm", "both"])
@pytest.mark.parametrize("width", EVERY_WIDTH)
def test_rope_append(rig: KernelRig, width: int, options: str) -> None:
    rng = np.random.default_rng(width)
    heads, key_heads, splits, eps = 6, 2, 3, 1e-6
    count, all_heads = 4, heads + 2 * key_heads
    region = region_of(rng, 5, key_heads, width)
    before = region.copy()
    address = rig.place(region)
    rows = step_rows(count, position=[0, 17, 31, 90], block=[3, 0, 4, 1], blocks=5, base=address)
    parts = rng.normal(0, 1, (splits, count, all_heads, width)).astype(np.float32)
    has_bias, has_norm = options in ("bias", "both"), options in ("norm", "both")
    bias = rng.normal(0, 1, (all_heads, width)).astype(np.float32) if has_bias else None
    norms = rng.normal(1, 0.2, (2, width)).astype(np.float32) if has_norm else (None, None)
    angles = np.outer(np.arange(100), 100.0 ** -(np.arange(width // 2) / (width // 2)))
    q = np.zeros((count, heads, width), np.uint16)
    programs = -(-all_heads // manifest().kernels[f"rope_append_{width}"].constants["HEADS"])
    rig.launch(
        f"rope_append_{width}", (count, programs), regions=[(address, region)], q=q, parts=parts, bias=bias,
        q_norm=norms[0], k_norm=norms[1], cosines=np.cos(angles).astype(np.float32),
        sines=np.sin(angles).astype(np.float32), rows=rows, splits=splits, stride=parts[0].size, **places(region),
        H=heads, G=key_heads, has_bias=int(has_bias), has_norm=int(has_norm), eps=eps,
    )  # fmt: skip
    rig.release(address)
    exact = parts.astype(np.float64).sum(0) + (0 if bias is None else bias)
    for part, norm in ((slice(0, heads), norms[0]), (slice(heads, heads + key_heads), norms[1])):
        if norm is not None:
            exact[:, part] *= norm / np.sqrt((exact[:, part] ** 2).mean(-1, keepdims=True) + eps)
    turning = slice(0, heads + key_heads)
    exact[:, turning] = turned(exact[:, turning], angles[rows["position"]][:, None])
    written = [(row["block"], row["position"] % PAGE) for row in rows]
    keys = np.stack([region[block, 1, 0, :, place] for block, place in written])
    values = np.stack([region[block, 1, 1, :, place] for block, place in written])
    found = floats(np.concatenate([q, keys, values], 1))
    # Two products are added, and three parts of about 1; each is rounded to f32.
    assert (abs(found - exact) <= HALF_PLACE * abs(exact) + 2.0**-20).all()
    for block, place in written:
        before[block, 1, :, :, place] = region[block, 1, :, :, place]
    assert region.tobytes() == before.tobytes()


@pytest.mark.parametrize("block", [-1, 2, 2**31 - 1, -(2**31)])
def test_a_block_outside_of_the_region_is_not_written(rig: KernelRig, block: int) -> None:
    """The region is the first two of three blocks. A padded row writes no block either."""
    region = np.zeros((3, LAYERS, 2, 1, PAGE, 32), np.uint16)
    address = rig.place(region)
    rows = step_rows(2, position=[5, -1], block=[block, 0], blocks=2, base=address)
    table = np.ones((20, 16), np.float32)
    rig.launch(
        "rope_append_32", (2, 1), regions=[(address, region)], q=np.zeros((2, 1, 32), np.uint16),
        parts=np.ones((1, 2, 3, 32), np.float32), bias=None, q_norm=None, k_norm=None, cosines=table, sines=table,
        rows=rows, splits=1, stride=192, **places(region), H=1, G=1, has_bias=0, has_norm=0, eps=1e-6,
    )  # fmt: skip
    rig.release(address)
    assert not region.any()


# --- attend and combine ---


def attended(
    rig: KernelRig,
    q: Array,
    region: Array,
    rows: Array,
    tables: Array,
    splits: int,
    window: int | None = None,
    shared: Array | None = None,
) -> Array:
    """The attention's output [R, H, width] of bf16 queries: of `attend`, by two programs a row, and `combine`.

    `attend_whole`, `attend_prompt` and, without a window, `attend_spans` give the same bits. With a `window`, all are
    the kernels that have one. `shared` are the blocks of a region that the rows share.
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
    programs = min(splits, 2)
    kind = f"{width}" if window is None else f"window_{width}"
    seen: dict[str, Any] = {} if window is None else {"window": window}
    attend, whole_name = f"attend_{kind}", f"attend_whole_{kind}"
    groups, whole_groups = (
        -(-(heads // key_heads) // manifest().kernels[name].constants["HEADS"]) for name in (attend, whole_name)
    )
    rig.launch(
        attend, (count, key_heads * groups, programs), totals=totals, tops=tops, sums=sums, splits=splits, **read,
        **seen,
    )  # fmt: skip
    rig.launch(whole_name, (count, key_heads, whole_groups), x=whole, **read, **seen)
    rig.launch(f"attend_prompt_{kind}", (count, key_heads), x=prompt, R=count, **read, **seen)
    if window is None:
        # Cut every sequence of two splits or more into spans of one split, as long as there is room for their parts.
        for room in (count * splits // 2, count * splits):
            spanned = attended_in_spans(rig, rows, heads, key_heads, width, read, room)
            assert spanned.tobytes() == whole.tobytes()
    rig.release(address)
    if shared is not None:
        rig.release(shared_address)
    rig.launch(
        f"combine_{kind}", (count, heads), x=x, totals=totals, tops=tops, sums=sums, rows=rows, H=heads,
        splits=splits, **seen,
    )  # fmt: skip
    assert whole.tobytes() == x.tobytes()
    assert prompt.tobytes() == x.tobytes()
    return x


def cut(
    rig: KernelRig, rows: Array, tile_rows: int, room: int, *, whole: int = 1, least: int = 1, most: int = 64
) -> tuple[Array, Array]:
    """What `cut_spans` makes of rows: the spans [spans, 6 of 8 words], and each row's place and splits."""
    spans, cuts = np.full((len(rows) + most, 8), -2, np.int32), np.full((len(rows), 2), -2, np.int32)
    rig.launch(
        "cut_spans", (1,), spans=spans, cuts=cuts, rows=rows, R=len(rows), S=len(spans), count=tile_rows, room=room,
        whole_splits=whole, least_splits=least, max_spans=most,
    )  # fmt: skip
    return spans, cuts


def attended_in_spans(
    rig: KernelRig, rows: Array, heads: int, key_heads: int, width: int, read: dict[str, Any], room: int
) -> Array:
    """Return the attention's output of `attend_spans` and `combine`, with room for a number of parts."""
    count = len(rows)
    lanes = manifest().kernels[f"attend_spans_{width}"].constants["LANES"]
    spans, cuts = cut(rig, rows, lanes // (heads // key_heads), room)
    totals = np.full((max(room, 1), heads, width), np.nan, np.float32)
    tops, sums = np.full((2, max(room, 1), heads), np.nan, np.float32)
    x = np.full((count, heads, width), 0x7FC0, np.uint16)
    parts: dict[str, Any] = {"totals": totals, "tops": tops, "sums": sums}
    for name in (f"attend_spans_{width}", f"attend_row_spans_{width}"):
        rig.launch(name, (key_heads, len(spans)), x=x, **parts, spans=spans, **read)
    rig.launch(f"combine_spans_{width}", (count, heads), x=x, **parts, rows=rows, H=heads, cuts=cuts)
    return x


def exact_attention(q: Array, region: Array, table: Array, seen: Array) -> tuple[Array, Array]:
    """Return the outputs [H, width] of one row over the positions it sees, and the sum of the absolute products."""
    group = len(q) // region.shape[3]
    pages = floats(region[table[seen // PAGE], 1, :, :, seen % PAGE])
    keys, values = (pages[:, side].repeat(group, 1) for side in (0, 1))
    scores = np.einsum("hd,thd->ht", floats(q), keys) / math.sqrt(q.shape[1])
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    return np.einsum("ht,thd->hd", shares, values), np.einsum("ht,thd->hd", shares, abs(values))


def check_attention(found: Array, exact: Array, sizes: Array) -> None:
    """Compare outputs. The weights are rounded to bf16 before they are multiplied, and so is the output."""
    assert (abs(floats(found) - exact) <= 2 * HALF_PLACE * sizes).all()


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("width", "window"), [*ATTENDS, pytest.param(32, 128, marks=pytest.mark.exhaustive)])
def test_attention_of_every_length(rig: KernelRig, width: int, group: int, window: int | None) -> None:
    rng = np.random.default_rng(group)
    key_heads, blocks = 2, 60
    region = region_of(rng, blocks, key_heads, width)
    q = bf16(rng.normal(0, 2, (len(LENGTHS), group * key_heads, width)))
    tables = np.stack([rng.permutation(blocks)[:20] for _ in LENGTHS]).astype(np.int32)
    order = rng.permutation(len(LENGTHS))
    rows = step_rows(len(LENGTHS), position=np.array(LENGTHS) - 1, table=order, blocks=blocks)
    found = attended(rig, q, region, rows, tables, -(-320 // manifest().split), window)
    for row, length in enumerate(LENGTHS):
        seen = np.arange(max(0, length - window) if window else 0, length)
        exact, sizes = exact_attention(q[row], region, tables[order[row]], seen)
        check_attention(found[row], exact, sizes)


LONG_LENGTHS = (1, 2047, 2048, 4095, 4096, 4097, 16_385, 32_000)


@pytest.mark.exhaustive
@pytest.mark.parametrize("window", [None, 4096])
def test_attention_of_long_contexts(rig: KernelRig, window: int | None) -> None:
    """Around the numbers of parts from which on `combine` loads many at once, and the ends of those."""
    rng, blocks = np.random.default_rng(0), 2000
    region, count = region_of(rng, blocks, 1, 32), len(LONG_LENGTHS)
    q = bf16(rng.normal(0, 1, (count, 2, 32)))
    tables = np.stack([rng.permutation(blocks) for _ in LONG_LENGTHS]).astype(np.int32)
    rows = step_rows(count, position=np.array(LONG_LENGTHS) - 1, table=np.arange(count), blocks=blocks)
    found = attended(rig, q, region, rows, tables, -(-max(LONG_LENGTHS) // manifest().split), window)
    for row, length in enumerate(LONG_LENGTHS):
        exact, sizes = exact_attention(
            q[row], region, tables[row], np.arange(max(0, length - (window or length)), length)
        )
        check_attention(found[row], exact, sizes)


PROMPTS = [
    *((32, window, 3, has_others) for window in (None, 1) for has_others in (False, True)),
    *(
        pytest.param(32, window, group, has_others, marks=pytest.mark.exhaustive)
        for window, groups in ((None, (1, 8, 16)), (1, (1, 8, 16)), (WINDOW, (1, 3, 8, 16)))
        for group in groups
        for has_others in (False, True)
    ),
    pytest.param(80, WINDOW, 16, True, marks=pytest.mark.exhaustive),
    *(
        pytest.param(width, window, group, True, marks=pytest.mark.slow)
        for width in (64, 80, 96, 128, 256)
        for window in (None, WINDOW)
        for group in (3, 16)
    ),
]
"""Width, window, query heads per key head, and whether some values are infinities and NaNs: those are rows of some of
the prompts, so that cases with them try numbers, too. The wider kernels take seconds for each case."""

INFINITY, NAN = 0xFF80, 0x7FC0
OTHERS = [(2, 20, INFINITY), (2, 28, NAN), (3, 127, NAN), (3, 134, INFINITY)]
"""Infinities and NaNs among the values: prompt, position, value."""


@pytest.mark.parametrize(("width", "window", "group", "has_others"), PROMPTS)
def test_rows_of_prompts_have_the_bits_that_each_has_alone(
    rig: KernelRig, width: int, group: int, window: int | None, has_others: bool
) -> None:
    """Decoding rows, three prompts' rows and padded ones; with values that only some of a prompt's rows see.

    Of two prompts, some rows see an infinity or a NaN alone, later ones both.

    `attended` compares the kernel for tiles of such rows with the one for single rows.
    """
    rng = np.random.default_rng(group)
    runs = [(0, 200, 1), (1, 5, 1), (2, 0, 37), (3, 120, 21), (4, 300, 3)]
    table = np.concatenate([[number] * count for number, _, count in runs] + [[4] * 3])
    position = np.concatenate([begin + np.arange(count) for _, begin, count in runs] + [[-1] * 3])
    region, tables = region_of(rng, 60, 2, width), np.stack([rng.permutation(60)[:20] for _ in runs]).astype(np.int32)
    for number, at, value in OTHERS if has_others else ():
        region[tables[number][at // PAGE], 1, 1, :, at % PAGE] = value
    rows = step_rows(len(table), position=position, table=table, blocks=60)
    found = attended(rig, bf16(rng.normal(0, 2, (len(table), 2 * group, width))), region, rows, tables, 3, window)
    assert not found[-3:].any()


def tiles_of(rows: Array, tile_rows: int) -> list[tuple[int, int]]:
    """Return the tiles of a step: the first row of each, and the row after its last."""
    found, begin = [], 0
    for row in range(1, len(rows) + 1):
        owner = ["table", "base", "blocks", "shared", "shared_blocks"]
        if row % tile_rows == 0 or row == len(rows) or rows[owner][row] != rows[owner][begin]:
            found.append((begin, row))
            begin = row
    return found


@pytest.mark.parametrize("seed", range(6))
def test_spans_have_each_split_of_each_row_once(rig: KernelRig, seed: int) -> None:
    """A tile ends with its sequence, its regions or the limit of rows. Each tile that is cut has its own parts."""
    rng = np.random.default_rng(seed)
    count, tile_rows, split = int(rng.integers(1, 300)), int(rng.choice([2, 8, 10, 32])), manifest().split
    # The regions rarely change, so most tiles have several rows.
    regions = ("blocks", "base", "shared", "shared_blocks")
    fields = {name: np.cumsum(rng.random(count) < 0.02) % 2 for name in regions}
    position = np.where(rng.random(count) < 0.1, -1, rng.integers(0, 40 * split, count))
    rows = step_rows(count, position=position, table=np.cumsum(rng.random(count) < 0.2), **fields)
    whole, least, most = int(rng.integers(1, 9)), int(rng.integers(1, 9)), int(rng.integers(1, 64))
    room = int(rng.integers(0, 3 * count * 40))
    spans, cuts = cut(rig, rows, tile_rows, room, whole=whole, least=least, most=most)
    used = spans[: np.argmax(spans[:, 0] == -1)]
    assert (spans[len(used) :, 0] == -1).all()
    behind = 0
    cut_places = np.zeros(max(room, 1), int)
    for begin, end in tiles_of(rows, tile_rows):
        its = used[used[:, 0] == begin]
        splits = -(-(int(rows["position"][begin:end].max()) + 1) // split)
        behind += (end - begin) * splits if splits > whole else 0
        assert (its[:, 1] == end - begin).all()
        assert (its[:, 5] == splits).all()
        assert its[0, 2] == 0
        assert its[-1, 3] == splits
        assert (its[1:, 2] == its[:-1, 3]).all()
        if splits <= whole or behind > room:
            assert len(its) == 1
            assert its[0, 4] == -1
            assert (cuts[begin:end, 0] == -1).all()
            continue
        lengths = its[:, 3] - its[:, 2]
        assert (lengths >= 1).all()
        assert lengths[0] >= min(least, splits)
        place = its[0, 4]
        assert (its[:, 4] == place).all()
        assert cuts[begin:end].tolist() == [[place + row * splits, splits] for row in range(end - begin)]
        cut_places[place : place + (end - begin) * splits] += 1
    assert cut_places.max() <= 1
    is_cut = used[:, 4] >= 0
    assert len(used) <= count + most
    # The long spans come first, so none of them begins when all others have ended.
    assert not is_cut[np.argmin(is_cut) :].any() or is_cut.all()


def test_rows_of_two_regions_are_not_one_prompt_s(rig: KernelRig) -> None:
    """The tables are equal, and the region of the second half is that of the first without its last block."""
    rng = np.random.default_rng(4)
    region = region_of(rng, 3, 1, 32)
    q = bf16(rng.normal(0, 2, (8, 2, 32)))
    rows = step_rows(8, position=40, blocks=[3] * 4 + [2] * 4)
    found = attended(rig, q, region, rows, np.arange(3, dtype=np.int32)[None], 1)
    for row, blocks in enumerate(rows["blocks"]):
        exact, sizes = exact_attention(q[row], region, np.arange(3), np.arange(min(41, blocks * PAGE)))
        check_attention(found[row], exact, sizes)


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
        exact, sizes = exact_attention(q[row], region, table, seen)
        check_attention(found[row], exact, sizes)


@pytest.mark.parametrize(("width", "window"), ATTENDS)
def test_blocks_of_a_shared_region_give_the_bits_of_own_ones(rig: KernelRig, width: int, window: int | None) -> None:
    """The first row has 12 blocks of its own region, the second 5 of the shared region and 7 of its own."""
    rng = np.random.default_rng(width)
    blocks = region_of(rng, 12, 2, width)
    q = bf16(rng.normal(0, 2, (1, 6, width))).repeat(2, 0)
    tables = np.array([rng.permutation(12), np.zeros(12)], np.int32)
    shared, own = blocks[tables[0][:5]], blocks.copy()
    # The second row must not read the first blocks of its own region.
    own[tables[0][:5]] = 0x7FC0
    tables[1] = [*range(12, 17), *tables[0][5:]]
    rows = step_rows(2, position=180, table=[0, 1], blocks=12, shared_blocks=[0, 5])
    alone = attended(rig, q[:1], blocks, rows[:1], tables, 2, window)
    found = attended(rig, q[1:], own, rows[1:], tables, 2, window, shared)
    assert found.tobytes() == alone.tobytes()


def test_a_block_behind_the_shared_region_reads_as_nothing(rig: KernelRig) -> None:
    """A row may read 4 blocks of its own region and 2 of the shared one. Other blocks follow each of the two."""
    rng = np.random.default_rng(4)
    region, shared = region_of(rng, 6, 1, 32), region_of(rng, 4, 1, 32)
    q = bf16(rng.normal(0, 1, (2, 2, 32)))
    tables = np.array([[0, 4, 5, 6, 7, 3, 1, 2, -1, 2**31 - 1]] * 2, np.int32)
    rows = step_rows(2, position=159, table=[0, 1], blocks=4, shared_blocks=[2, 0])
    found = attended(rig, q, region, rows, tables, 2, None, shared)
    both = np.concatenate([region[:4], shared[:2]])
    for row, most in enumerate((6, 4)):
        seen = np.concatenate([np.arange(PAGE) + PAGE * i for i, block in enumerate(tables[row]) if 0 <= block < most])
        exact, sizes = exact_attention(q[row], both, tables[row], seen)
        check_attention(found[row], exact, sizes)


def test_a_padded_row_and_a_row_that_sees_nothing_are_zero(rig: KernelRig) -> None:
    region = region_of(np.random.default_rng(2), 2, 1, 32)
    rows = step_rows(2, position=[-1, 20], blocks=2)
    q = bf16(np.ones((2, 3, 32)))
    assert not attended(rig, q, region, rows, np.full((1, 2), 2, np.int32), 1).any()


def test_a_row_s_bits_depend_neither_on_its_neighbours_nor_on_its_pages(rig: KernelRig) -> None:
    rng = np.random.default_rng(3)
    region = region_of(rng, 12, 1, 32)
    q = bf16(rng.normal(0, 2, (3, 4, 32)))
    tables = np.arange(12, dtype=np.int32)[None].repeat(3, 0)
    rows = step_rows(3, position=[180, 140, 3], table=[0, 1, 2], blocks=12)
    together = attended(rig, q, region, rows, tables, 2)
    moved = rng.permutation(12)
    elsewhere = np.ascontiguousarray(region[np.argsort(moved)])
    alone = attended(rig, q[:1], elsewhere, rows[:1], moved.astype(np.int32)[None], 7)
    assert alone[0].tobytes() == together[0].tobytes()


@pytest.mark.parametrize("window", [1, 33, 200])
def test_a_window_s_bits_depend_on_the_row_s_position_alone(rig: KernelRig, window: int) -> None:
    """Rows alone, in company, behind other splits: the same bits; before the window's end, those without a window."""
    rng = np.random.default_rng(window)
    region = region_of(rng, 24, 1, 32)
    q = bf16(rng.normal(0, 2, (3, 4, 32)))
    tables = np.arange(24, dtype=np.int32)[None].repeat(3, 0)
    rows = step_rows(3, position=[380, window - 1, 129], table=[0, 1, 2], blocks=24)
    together = attended(rig, q, region, rows, tables, 3, window)
    for row in range(3):
        alone = attended(rig, q[row : row + 1], region, rows[row : row + 1], tables, 7, window)
        assert alone[0].tobytes() == together[row].tobytes()
    assert attended(rig, q[1:2], region, rows[1:2], tables, 3)[0].tobytes() == together[1].tobytes()


def test_what_is_before_a_window_is_not_read(rig: KernelRig) -> None:
    """A NaN that is read would show in every sum."""
    region = region_of(np.random.default_rng(5), 12, 1, 32)
    q = bf16(np.ones((1, 2, 32)))
    rows = step_rows(1, position=180, blocks=12)
    table = np.arange(12, dtype=np.int32)[None]
    found = attended(rig, q, region, rows, table, 2, 20)
    region[:10] = 0x7FC0
    assert attended(rig, q, region, rows, table, 2, 20).tobytes() == found.tobytes()


def test_a_score_far_below_the_others_counts_for_nothing_and_one_far_above_for_all(rig: KernelRig) -> None:
    """Scores of thousands: the weights stay finite, whichever split has the highest."""
    region = np.zeros((20, LAYERS, 2, 1, PAGE, 32), np.uint16)
    region[:, 1, 1] = bf16(np.arange(20.0)[:, None, None, None] * np.ones((1, PAGE, 32)))
    keys = np.zeros((20, PAGE, 32))
    keys[3, 5], keys[11, 2] = -200, 100
    region[:, 1, 0, 0] = bf16(keys)
    q = bf16(np.stack([np.full((1, 32), 50.0), np.full((1, 32), -50.0)]))
    rows = step_rows(2, position=300, blocks=20)
    found = floats(attended(rig, q, region, rows, np.arange(20, dtype=np.int32)[None], 3))
    assert (found[0] == 11).all()
    assert (found[1] == 3).all()
