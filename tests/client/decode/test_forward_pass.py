"""A step's kernels read and write only their own rows' places in the tenants' regions."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.decode.checkpoint import RandomCheckpoint
from gpulease.client.decode.checkpoint.weight_loader import load_weights
from gpulease.client.decode.decode_errors import RequestRejected
from gpulease.client.decode.engine import forward_pass
from gpulease.client.decode.engine.engine import MAX_STEPS, lease_bytes
from gpulease.client.decode.engine.forward_pass import (
    HEAD_ROWS,
    LAUNCH_BYTES,
    LEAST_SHARED,
    MAX_PROGRAMS,
    MAX_SPLITS,
    ForwardPass,
    StepKind,
    StepLimits,
    UnevenTiles,
    block_bytes,
    buckets_of,
    buffer_sizes,
    excess_launches,
    head_rows_of,
    layer_bytes,
    parts_of,
)
from gpulease.client.decode.model_config import Gate, KvDtype, ModelConfig
from gpulease.client.decode.row_records import PAGE, ROW, Results, Rows
from helpers.decode.engine_rig import BLOCKS, GREEDY, EngineRig, RunningRig, Seat
from helpers.decode.random_models import EXPERTS, GEMMA, GEMMA_IN_PARTS, TINY

BLOCK = block_bytes(TINY)
NAN = b"\xff\xff"
OWN_BLOCKS = 4
"""Number of blocks that the rows of these tests declare for their region; the rest of the pool is other memory."""

FIRST, SECOND = Seat(0, 0, 0, (2, 1)), Seat(1, 1, 1, (0, 3))


def places(
    seats: Sequence[tuple[Seat, int]], tenant: int, size_bytes: int
) -> np.ndarray[tuple[int], np.dtype[np.bool]]:
    """Return which bytes of a tenant's region hold keys and values of these positions."""
    found = np.zeros(size_bytes, bool)
    head_bytes = 2 * TINY.head_width
    for seat, position in seats:
        for plane in range(TINY.layers * 2 * TINY.key_heads if seat.tenant == tenant else 0):
            at = seat.blocks[position // PAGE] * BLOCK + (plane * PAGE + position % PAGE) * head_bytes
            found[at : at + head_bytes] = True
    return found


async def fill(rig: EngineRig, tenant: int, data: bytes) -> None:
    region = rig.pools[tenant].region
    await rig.engine.session.mem_write(region, 0, data * (region.size_bytes // len(data)))


async def changed(rig: EngineRig, tenant: int) -> "np.ndarray[tuple[int], np.dtype[np.bool]]":
    """Return which bytes of a region were overwritten, because they are not NAN any more."""
    values = np.frombuffer(await rig.memory(tenant), np.uint16) != np.frombuffer(NAN, np.uint16)[0]
    return np.repeat(values, 2)


def record(rig: EngineRig, seat: Seat, position: int, token: int = 3) -> Rows:
    return rig.row(seat, GREEDY, position, token)


def test_a_step_writes_its_rows_places_and_nothing_else(tiny: RunningRig) -> None:
    """Three rows are padded to four: the fourth has what the step before left there, a row of the other region."""

    async def part(rig: EngineRig) -> None:
        rows = [record(rig, FIRST, 0), record(rig, SECOND, 0), record(rig, SECOND, 1), record(rig, SECOND, 2)]
        for _ in range(2):
            await rig.compute(np.concatenate(rows), (0, 1))
        for tenant in (0, 1):
            await fill(rig, tenant, NAN)
        tables = await rig.tables()
        written = [(FIRST, 1), (SECOND, 1), (FIRST, 2)]
        await rig.compute(np.concatenate([record(rig, *place) for place in written]), (0, 1))
        for tenant in (0, 1):
            expected = places(written, tenant, rig.pools[tenant].region.size_bytes)
            assert expected.any()
            np.testing.assert_array_equal(await changed(rig, tenant), expected)
        assert await rig.tables() == tables

    tiny.run(part)


@pytest.mark.parametrize("block", [OWN_BLOCKS, BLOCKS - 1, BLOCKS, 2**31 - 1, -1, -(2**31)])
def test_a_row_whose_block_is_outside_of_its_region_writes_nothing(tiny: RunningRig, block: int) -> None:
    async def part(rig: EngineRig) -> None:
        for tenant in (0, 1):
            await fill(rig, tenant, NAN)
        row = record(rig, FIRST, 0)
        row["block"], row["blocks"] = block, OWN_BLOCKS
        beside = record(rig, SECOND, 0)
        await rig.compute(np.concatenate([row, beside]), (0, 1))
        assert not (await changed(rig, 0)).any()
        np.testing.assert_array_equal(await changed(rig, 1), places([(SECOND, 0)], 1, rig.pools[1].region.size_bytes))

    tiny.run(part)


async def behind_a_page(rig: EngineRig, entry: int, memory: bytes) -> tuple[Results, bytes]:
    """Result and logits of a row of the second page, while the first page's entry is `entry`.

    The row's region has OWN_BLOCKS blocks; the pool's blocks behind them are filled with `memory`.
    """
    seat = Seat(0, 0, 2, (1, 2))
    await fill(rig, 0, memory)
    outside = record(rig, seat, 0)
    outside["block"], outside["blocks"] = entry, OWN_BLOCKS
    await rig.compute(outside)
    rows = [record(rig, seat, PAGE + number, number) for number in range(3)]
    for row in rows:
        row["blocks"] = OWN_BLOCKS
    results = await rig.compute(np.concatenate(rows))
    return results, (await rig.engine.logits(len(rows))).tobytes()


def test_an_entry_outside_of_the_region_reads_as_nothing(tiny: RunningRig) -> None:
    """The entry's memory exists, in the same pool; whatever it holds, the bits are the same as without the entry."""

    async def part(rig: EngineRig) -> None:
        entries = [-1, OWN_BLOCKS, BLOCKS - 1, BLOCKS, 2**31 - 1, -(2**31)]
        fillings = [NAN, b"\x80\x3f", np.random.default_rng(0).bytes(64)]
        found = [await behind_a_page(rig, entry, memory) for entry in entries for memory in fillings]
        assert {(results.tobytes(), logits) for results, logits in found} == {(found[0][0].tobytes(), found[0][1])}
        assert not np.isnan(np.frombuffer(found[0][1], np.float32)).any()
        within = [await behind_a_page(rig, 3, memory) for memory in fillings[1:]]
        assert found[0][1] not in {logits for _, logits in within}

    tiny.run(part)


def test_a_padded_row_is_nobody_s(tiny: RunningRig) -> None:
    """The padding's record names a block, a row of the tables and a token; none of them is read or written."""

    async def part(rig: EngineRig) -> None:
        engine, forward = rig.engine, rig.engine.forward
        await fill(rig, 0, NAN)
        rows = np.concatenate([record(rig, FIRST, 0), record(rig, FIRST, 17)])
        await rig.compute(rows[:1])
        await fill(rig, 0, NAN)
        tables = await rig.tables()
        rows["position"][1], rows["block"][1], rows["token"][1] = -1, 3, 2**31 - 1
        given = engine.session.empty(2, ROW)
        given[:] = rows
        async with engine.session.record() as graph:
            await engine.session.mem_write(forward.rows, 0, given)
            await forward.launch(2)
        await graph.launch(regions=await engine.session.region_set([rig.pools[0].region]))
        await engine.session.sync()
        np.testing.assert_array_equal(await changed(rig, 0), places([(FIRST, 0)], 0, rig.pools[0].region.size_bytes))
        assert await rig.tables() == tables

    tiny.run(part)


# --- Sizes. ---


@given(rows=st.integers(1, 300_000), columns=st.integers(1, 4096).map(lambda groups: 32 * groups))
def test_the_parts_of_a_sum_are_few_and_cover_it_once(rows: int, columns: int) -> None:
    splits, chunk = parts_of(rows, columns)
    assert 1 <= splits <= MAX_SPLITS
    assert (splits - 1) * chunk < columns <= splits * chunk
    assert splits == 1 or -(-rows // 64) * splits <= MAX_PROGRAMS
    assert chunk % 256 == 0


@given(st.integers(1, 1000))
def test_every_number_of_rows_has_a_bucket_less_than_twice_its_size(max_rows: int) -> None:
    buckets = buckets_of(max_rows)
    assert list(buckets) == sorted(set(buckets))
    for rows in range(1, max_rows + 1):
        assert rows <= next(bucket for bucket in buckets if bucket >= rows) < 2 * rows
    assert buckets[-1] == max_rows
    # A large step has fewer padded rows than a tile of the largest linears.
    assert all(after - before <= 128 for before, after in pairwise(buckets))


def test_only_large_steps_have_kernels_for_prompts(tiny: RunningRig) -> None:
    async def part(rig: EngineRig) -> None:
        forward = rig.engine.forward
        most = (MAX_PROGRAMS - 1) // TINY.key_heads
        assert forward.kinds(most) == [StepKind(False), StepKind(True)]
        for kind in forward.kinds(most + 1):
            names = {launch.name for launch in forward.launches(most + 1, kind) if launch.name.startswith("attend")}
            assert names == {"attend_prompt_32" if kind.has_prompts else "attend_whole_32"}
        assert {kind.has_prompts for kind in forward.kinds(most + 1)} == {False, True}

    tiny.run(part)


def test_steps_of_prompts_compute_the_head_for_as_few_rows_as_hold_those_with_results(tiny: RunningRig) -> None:
    async def part(rig: EngineRig) -> None:
        forward, rows = rig.engine.forward, 256
        (kind,) = [kind for kind in forward.kinds(rows) if kind.head_rows is not None]
        assert kind == StepKind(has_prompts=True, head_rows=64)
        *launches, head, scan, sample = forward.launches(rows, kind)
        assert (head.values["parts"], head.values["R"], scan.grid[0], sample.grid) == (forward.logits, 64, 64, (64,))
        # Everything before the head is computed for every row.
        whole = list(forward.launches(rows, kind._replace(head_rows=None)))[:-3]
        assert [one.grid for one in launches] == [one.grid for one in whole]

    tiny.run(part)
    assert [head_rows_of(chosen, 256) for chosen in (0, 1, 64, 65, 256)] == [64, 64, 64, None, None]
    assert [head_rows_of(chosen, 384) for chosen in (64, 65, 256, 257)] == [64, 256, 256, None]
    assert head_rows_of(1, 64) is None


@pytest.mark.parametrize("excess", [0, 1])
def test_a_model_with_many_launches_has_no_graphs_for_fewer_logits(
    tiny: RunningRig, monkeypatch: pytest.MonkeyPatch, excess: int
) -> None:
    async def part(rig: EngineRig) -> None:
        forward = rig.engine.forward
        graphs = [(rows, kind) for rows in buckets_of(forward.limits.max_rows) for kind in forward.kinds(rows)]
        recorded = sum(len(list(forward.launches(rows, kind))) for rows, kind in graphs)
        monkeypatch.setattr(forward_pass, "MAX_RECORDED_LAUNCHES", recorded - excess)
        other = ForwardPass(rig.engine.session, forward.weights, forward.limits)
        monkeypatch.setattr(other, "_buffers", forward._buffers)
        assert [kind.head_rows for kind in other.kinds(256)] == [None] * 4 + [64] * (1 - excess)

    tiny.run(part)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TINY, id="tiny"),
        pytest.param(GEMMA, id="windows"),
        pytest.param(GEMMA_IN_PARTS, id="windows and sums in parts"),
        pytest.param(EXPERTS, id="experts"),
    ],
)
def test_as_many_launches_are_counted_as_the_graphs_have(
    tiny: RunningRig, monkeypatch: pytest.MonkeyPatch, config: ModelConfig
) -> None:
    """Of sequences that may be long: some steps are cut into spans, in buckets of any size."""

    async def part(rig: EngineRig) -> None:
        limits, session = StepLimits(512, 4, 8000), rig.engine.session
        weights = await load_weights(session, RandomCheckpoint(config, 1), positions=160)
        forward = ForwardPass(session, weights, limits)
        monkeypatch.setattr(forward, "_buffers", defaultdict(lambda: rig.engine.forward.rows))
        graphs = [(rows, kind) for rows in buckets_of(limits.max_rows) for kind in forward.kinds(rows)]
        assert {32, 64, 128, 256, 384, 512} <= {rows for rows, kind in graphs if kind.is_cut}
        recorded = sum(len(list(forward.launches(rows, kind))) for rows, kind in graphs)
        gates = sum(launch.name in set(Gate) for launch in forward.launches(1))
        assert forward_pass._recorded_launches(config, limits, HEAD_ROWS, gates) == recorded
        assert forward_pass._recorded_launches(config, limits, HEAD_ROWS) >= recorded

    tiny.run(part)


def test_small_steps_have_kernels_for_long_prompts_alone(tiny: RunningRig) -> None:
    async def part(rig: EngineRig) -> None:
        forward = ForwardPass(rig.engine.session, rig.engine.forward.weights, StepLimits(256, 4, 8000))
        # A tile of this model has 16 rows.
        plain, cut = [StepKind(False), StepKind(True)], StepKind(has_prompts=True, is_cut=True)
        assert [forward.kinds(rows) for rows in (16, 32, 128)] == [plain, [*plain, cut], [*plain, cut]]

    tiny.run(part)


def test_the_lease_counts_the_launches_of_graphs_beyond_those_that_need_no_room(
    tiny: RunningRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def part(rig: EngineRig) -> None:
        forward, checkpoint = rig.engine.forward, RandomCheckpoint(TINY, 1)
        limits = forward.limits
        # Without graphs for fewer logits, like a model that exceeds the limit.
        kinds = [
            (rows, kind) for rows in buckets_of(limits.max_rows) for kind in forward.kinds(rows) if not kind.head_rows
        ]
        recorded = sum(len(list(forward.launches(rows, kind))) for rows, kind in kinds)
        counted = lease_bytes(checkpoint, limits, [])
        monkeypatch.setattr(forward_pass, "MAX_RECORDED_LAUNCHES", 0)
        needed = (lease_bytes(checkpoint, limits, []) - counted) / (MAX_STEPS * LAUNCH_BYTES)
        assert recorded <= needed <= 1.5 * recorded

    tiny.run(part)


def test_a_model_of_many_layers_needs_a_larger_lease_for_its_graphs() -> None:
    """Llama-3.1-70B's layers and heads: over 800 launches in each of 21 graphs."""
    config = replace(TINY, layers=80, heads=64, key_heads=8)
    assert excess_launches(config, StepLimits(64, 64, 4096)) > 0
    assert excess_launches(replace(config, layers=32), StepLimits(64, 64, 4096)) == 0


def test_a_position_in_fp8_has_a_byte_for_each_value_and_one_for_each_scale() -> None:
    config = replace(TINY, kv_dtype=KvDtype.FP8)
    assert layer_bytes(config) == 2 * config.key_heads * PAGE * (config.head_width + 1)
    assert block_bytes(config) == config.layers * layer_bytes(config)
    # The loads of 16 bytes are aligned.
    assert layer_bytes(config) % 16 == 0


def test_a_block_has_its_positions_keys_and_values_of_all_layers() -> None:
    assert layer_bytes(TINY) == 2 * TINY.key_heads * PAGE * TINY.head_width * 2
    assert block_bytes(TINY) == TINY.layers * layer_bytes(TINY)


def test_buffers_grow_with_rows_and_tables_alone_and_logits_have_room_for_every_part() -> None:
    few, many = (buffer_sizes(TINY, StepLimits(rows, 6, 160)) for rows in (16, 32))
    assert {name for name in few if many[name] != 2 * few[name]} == {"tables", "entries", "masks"}
    wide = replace(TINY, width=1056)
    assert parts_of(wide.vocabulary, wide.width)[0] == 2
    assert buffer_sizes(wide, StepLimits(1, 1, 16))["logits"] == 2 * wide.vocabulary * 4


def test_attention_s_parts_have_room_for_the_rows_that_are_few_enough_to_be_cut() -> None:
    sizes = [buffer_sizes(TINY, StepLimits(rows, 6, 1000))["totals"] for rows in (1, 131, 132, 500)]
    assert TINY.key_heads == 2
    assert sizes == [sizes[0] * rows for rows in (1, 131, 131, 131)]


def test_long_sequences_have_room_for_the_parts_of_some_rows_of_large_steps() -> None:
    """Room for 64 rows, or for as many as the largest number of parts allows; at least what small steps need."""
    config = replace(TINY, heads=8, key_heads=8)
    shapes = [(32, 8000), (33, 8000), (256, 3072), (256, 8000), (256, 32_000), (256, 128_000)]
    sums = [buffer_sizes(config, StepLimits(rows, 6, positions))["sums"] / (4 * 8) for rows, positions in shapes]
    assert sums == [32 * 63, 33 * 63, 32 * 24, 64 * 63, 64 * 250, 32 * 1000]


def uneven_rows(*tiles: tuple[int, int]) -> Rows:
    """Return rows of sequences, each with this many adjacent rows up to a position."""
    rows = np.zeros(sum(count for count, _ in tiles), ROW)
    rows["table"] = np.repeat(np.arange(len(tiles)), [count for count, _ in tiles])
    rows["position"] = np.concatenate([np.arange(last - count, last) + 1 for count, last in tiles])
    return rows


LLAMA_3B: Final = replace(TINY, heads=24, key_heads=8)
"""The step's tiles have ten rows; a card computes 33 tiles at a time."""


@pytest.mark.parametrize(
    ("rows", "is_uneven"),
    [
        pytest.param([(1, 128)] * 64, False, id="short"),
        pytest.param([(1, 32_000), *[(1, 128)] * 63], True, id="one is long"),
        pytest.param([(1, 3000), *[(1, 12)] * 63], False, id="one is not long enough"),
        pytest.param([(1, 32_000)] * 64, False, id="all are long"),
        pytest.param([*[(1, 128)] * 64, (56, 31_000)], True, id="a prompt of few tiles"),
        pytest.param([*[(1, 128)] * 64, (448, 31_000)], False, id="a prompt of many tiles"),
        pytest.param([*[(1, 128)] * 64, (128, 31_000)], False, id="a prompt with more parts than places"),
        pytest.param([(512, 4511)], False, id="a prompt alone"),
    ],
)
def test_steps_are_cut_into_spans_if_few_of_their_sequences_are_far_longer(
    rows: list[tuple[int, int]], is_uneven: bool
) -> None:
    of_step = uneven_rows(*rows)
    begins = of_step["table"][1:] != of_step["table"][:-1]
    tiles = UnevenTiles.of(LLAMA_3B, StepLimits(512, 64, 40_000))
    assert tiles.are_in(of_step["position"], begins) == is_uneven


@pytest.mark.parametrize(
    ("rows", "is_cut"),
    [
        pytest.param([(1, 31_000)] * 7, False, id="none of a prompt"),
        pytest.param([(1, 31_000)] * 7 + [(2, 31_000)], False, id="few of a prompt"),
        pytest.param([(1, 31_000)] * 7 + [(9, 31_000)], True, id="as many of a prompt"),
        pytest.param([(1, 128)] * 20 + [(2, 31_000)], True, id="few of the only long prompt"),
        pytest.param([(16, 2000)], False, id="not long enough"),
    ],
)
def test_small_steps_are_cut_into_spans_if_their_rows_share_what_they_read(
    rows: list[tuple[int, int]], is_cut: bool
) -> None:
    of_step = uneven_rows(*rows)
    begins = of_step["table"][1:] != of_step["table"][:-1]
    tiles = UnevenTiles.of(LLAMA_3B, StepLimits(512, 64, 40_000))
    assert tiles.are_in(of_step["position"], begins, LEAST_SHARED) == is_cut


def test_buffers_that_kernels_can_t_index_are_refused() -> None:
    config = replace(TINY, heads=32, key_heads=8, head_width=128)
    assert buffer_sizes(config, StepLimits(256, 1, 4096))
    with pytest.raises(RequestRejected, match="bytes for totals alone"):
        buffer_sizes(config, StepLimits(512, 1, 1 << 20))


def test_a_recording_lets_other_tasks_of_its_loop_have_their_turns(
    tiny: RunningRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with several models records one model's steps while it plans another's."""
    monkeypatch.setattr(forward_pass, "LAUNCHES_PER_TURN", 4)
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def part(rig: EngineRig) -> None:
        other = asyncio.create_task(take_turns())
        async with rig.engine.session.record():
            await rig.engine.forward.launch(1)
        other.cancel()
        assert turns >= len(list(rig.engine.forward.launches(1))) // 4 > 3

    tiny.run(part)
