"""The forward pass of a step: its buffers, and its kernels in order, recorded once for each number of rows.

R rows go through the model together. The residual h [R, width] is f32. A linear reads bf16 and writes f32 parts
[splits, R, rows of the weight], which the next kernel adds. The number of splits depends only on the weight's shape,
never on R, so a row's bits are the same in every step (kernels/triton_source.py).
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from gpulease.client.aio import GpuSession
from gpulease.client.decode.checkpoint.weights import LayerWeights, Layout, Linear, ModelWeights, Plane
from gpulease.client.decode.decode_errors import RequestRejected
from gpulease.client.decode.engine.kernel_library import KernelLaunch, KernelLibrary, ManifestKernel, Value, manifest
from gpulease.client.decode.engine.linear_tiles import SM_80, SM_90A, grid_of, linear_grid, tile_of, tiles_of
from gpulease.client.decode.model_config import Experts, KvDtype, ModelConfig
from gpulease.client.decode.row_records import ENTRY, GUIDE, MAX_RANKS, PAGE, RANKED, RESULT, ROW, mask_words
from gpulease.client.handles import Buffer

MAX_PROGRAMS: Final = 264
"""Maximum number of programs of a linear's launch, each for 64 columns and one part of the sums. The sums are divided
into more parts as long as the launch has no more programs than this: two for each of an H100's 132 multiprocessors."""

MAX_SPLITS: Final = 8
"""Maximum number of parts of a sum. Each part is written to memory and read again."""

LEAST_CHUNK: Final = 384
"""Minimum number of columns in one part. With fewer, writing and reading the part would take longer than the parallel
sum saves."""

CHUNK_STEP: Final = 256
"""A part's number of columns is a multiple of this, and so of Q4_K's block and of every tile's depth."""

BUCKET_STEP: Final = 128
"""Difference in rows between the buckets of large steps. The largest tiles have this many rows, so a smaller difference
would save no time. Measured on an H200 with Llama-3.2-1B's shape: 160, 192 and 256 rows of a prompt take 2.2, 2.3 and
2.4 ms; 320, 384 and 512 rows take 3.8, 4.0 and 4.8 ms."""

HEAD_ROWS: Final = (64, 256)
"""In a step with prompts, few rows need logits. The head is computed for the smallest of these numbers of rows that is
enough, or else for all rows. Up to 64 rows, to read the head's weights takes longer than to multiply by them. Each
number needs one more graph for every larger bucket."""

LAUNCH_BYTES: Final = 8 << 10
"""Estimate of the card's memory for one recorded launch, in bytes. Five graphs of 69 to 149 launches on an H200 took 6
to 12 KB for each launch, in pages of 2 MiB."""

MAX_RECORDED_LAUNCHES: Final = 11_000
"""Maximum number of launches in one set of a model's graphs. Each of the two steps in flight has one set. A worker may
use 176 MiB on an NVIDIA card in addition to its lease, and two sets of this size fit into that.

A model that would exceed the limit has no graphs for HEAD_ROWS. If it still exceeds the limit, it needs a larger lease
(`excess_launches`)."""

MAX_ATTENTION_PROGRAMS: Final = 8 * 132
"""Maximum number of programs of a launch that computes attention in parts: eight for each of an H100's multiprocessors.
The launch has this number, rounded up to a multiple of rows times key heads."""

MIN_CUT_POSITIONS: Final = 3072
"""A step's attention is cut into spans only if its longest sequence has at least this many positions."""

UNEVENNESS: Final = 1
"""A step's attention is cut into spans only if its longest tile has more than this many equal shares of positions. An
equal share is the positions of all tiles, times the key heads, divided by MAX_PROGRAMS."""

LEAST_SHARED: Final = 1.5
"""A step of few rows is cut into spans only if the positions of its rows, added up, are at least this many times the
positions of its tiles.

Otherwise each row reads its sequence in parts, which is faster than a tile of one row. Measured on an H200 with
Llama-3.2-1B's shape and 32,000 positions: in parts, 0.29 ms for each row; in tiles, 0.28 ms for each tile and 0.07 ms
for each row."""

WHOLE_SPLITS: Final = 16
"""Maximum number of splits of a tile that is not cut into spans. One program computes this many in little more time
than it would take to cut and combine them."""

SPAN_SPLITS: Final = 8
"""Number of splits of a span, unless that makes too many spans. With more, a span's program would take longer than the
program of a short sequence. With fewer, too much of the program's time would be its start and end."""

MAX_SPANS: Final = 256
"""Maximum number of spans of a step, for all of its tiles together."""

PLACED_ROWS: Final = 64
"""A step with spans (`cut_spans`) has room for the parts of this many rows of the maximum length, unless MAX_SPAN_PARTS
allows fewer."""

MAX_SPAN_PARTS: Final = 16_384
"""Maximum number of attention parts for which a step with spans has room. There is one part for each row and split.
With 32 heads, a part takes 8 KB of the card's memory for heads of width 64, and 17 KB for width 128.
"""

LAUNCHES_PER_TURN: Final = 8
"""Maximum number of launches in one turn of the event loop.

Recording a launch takes about 30 us of Python, and during a turn no step of another model is planned. A turn itself
costs about 10 us, and another model's step takes several turns.
"""

_SPAN_BYTES: Final = 8 * 4
"""Size of a span's record in bytes: eight 32-bit words (`cut_spans`)."""

_CUT_BYTES: Final = 2 * 4
"""Size of a row's cut in bytes: the index of the row's parts and its tile's number of splits, two 32-bit words
(`cut_spans`).
"""

MAX_BUFFER_BYTES: Final = 2 * (2**31 - 1)
"""Maximum size of one buffer, in bytes. Its values have at least two bytes, and kernels index them with 32-bit
integers.
"""

MAX_GUIDED_ROWS: Final = 64
"""Maximum number of rows of a step that have changed logits (ENTRY records) or a mask of allowed tokens. Each of these
rows needs memory for as many entries as a sequence may have tokens."""

MAX_BIASES: Final = 1024
"""Maximum number of tokens for which a request may change logits, in addition to those in its sequence."""


def parts_of(rows: int, columns: int) -> tuple[int, int]:
    """Return the number of parts of the sums of a linear [rows, columns], and the number of columns of each part.

    Both depend only on the weight's shape and never on the step, because the order of additions decides a result's last
    bits.
    """
    # Double the number of parts while all programs fit on the card at once and no part gets too short.
    splits = 1
    while 2 * splits <= MAX_SPLITS and -(-rows // 64) * 2 * splits <= MAX_PROGRAMS:
        if columns // (2 * splits) < LEAST_CHUNK:
            break
        splits *= 2
    chunk = chunk_of(columns, splits)
    return -(-columns // chunk), chunk


def chunk_of(columns: int, splits: int) -> int:
    """Return the number of columns of each part of a sum of at most `splits` parts."""
    return -(-columns // (splits * CHUNK_STEP)) * CHUNK_STEP


def buckets_of(max_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows to which steps are padded. The last one is `max_rows`.

    They are powers of two up to BUCKET_STEP, then multiples of it.
    """
    powers = (1 << i for i in range((min(max_rows, BUCKET_STEP + 1) - 1).bit_length()))
    return (*powers, *range(2 * BUCKET_STEP, max_rows, BUCKET_STEP), max_rows)


def head_rows_of(chosen: int, rows: int) -> int | None:
    """Return for how many of a step's rows the head is computed if `chosen` of them need logits; None for all."""
    return next((head_rows for head_rows in HEAD_ROWS if chosen <= head_rows < rows), None)


class StepKind(NamedTuple):
    """The properties of a step that decide, together with its number of rows, which kernels it runs.

    Attributes:
        is_guided: Whether the step also reads `guides`.
        has_prompts: Whether adjacent rows may belong to one sequence.
        head_rows: How many rows, from the first on, get logits and a token; None for all.
        is_cut: Whether the attention of long sequences is cut into spans. If it is true, `has_prompts` is true.
    """

    is_guided: bool = False
    has_prompts: bool = False
    head_rows: int | None = None
    is_cut: bool = False


PLAIN: Final = StepKind()


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The sizes for which the engine's buffers have room.

    Attributes:
        max_rows: Maximum number of rows of a step.
        tables: Maximum number of sequences that have a block table at the same time.
        positions: Maximum number of positions of a sequence.
    """

    max_rows: int
    tables: int
    positions: int

    @property
    def table_blocks(self) -> int:
        """Number of entries of a sequence's block table: one for each block of its `positions`."""
        return -(-self.positions // PAGE)

    @property
    def guided_rows(self) -> int:
        """Maximum number of rows of a step that have entries or a mask."""
        return min(self.max_rows, self.tables, MAX_GUIDED_ROWS)

    def entries(self, vocabulary: int) -> int:
        """Return a step's maximum number of entries: per guided row, one for each token and MAX_BIASES more."""
        return self.guided_rows * min(vocabulary, self.positions + MAX_BIASES)

    @property
    def splits(self) -> int:
        """Maximum number of parts into which a sequence's attention is cut."""
        return -(-self.positions // manifest().split)


@dataclass(frozen=True, slots=True)
class UnevenTiles:
    """Decides whether a step's attention is cut into spans, for a model and its buffers.

    Attributes:
        tile_rows: Maximum number of rows of a tile of a prompt.
        share: Maximum fraction of all tiles' positions that the longest tile may have in a step without spans.
        max_parts: Number of parts, one per row and split, for which a step has room.
    """

    tile_rows: int
    share: float
    max_parts: int

    @classmethod
    def of(cls, config: ModelConfig, limits: StepLimits) -> Self:
        return cls(_tile_rows(config), UNEVENNESS * config.key_heads / MAX_PROGRAMS, _max_parts(config, limits))

    def are_in(self, positions: "NDArray[np.int32]", begins: "NDArray[np.bool_]", least_shared: float = 1) -> bool:
        """Return whether a step is faster if the attention of long sequences is cut into spans.

        This is so if the longest tile takes longer than an equal share of the work, and the parts of all long tiles fit
        into the buffers. The results have the same bits in either case.

        Args:
            positions: The position of each row.
            begins: For each row but the first, whether it belongs to a different sequence than the previous row.
            least_shared: Minimum ratio of the rows' positions to their tiles' positions.
        """
        longest = int(positions.max())
        if longest < MIN_CUT_POSITIONS:
            return False
        rows: NDArray[np.intp] | None = None
        read_by_rows = int(positions.sum())
        # Each tile takes as long as its last row, which has the highest position. Without prompts, each row is a tile.
        if not begins.all():
            is_last = np.append(begins, True)
            is_last[self.tile_rows - 1 :: self.tile_rows] = True
            ends = is_last.nonzero()[0]
            positions, rows = positions[ends], np.diff(ends, prepend=-1)
        read_by_tiles = int(positions.sum())
        if longest <= self.share * (read_by_tiles + len(positions)) or read_by_rows < least_shared * read_by_tiles:
            return False
        # The number of splits of each row, less one.
        more = positions // manifest().split
        parts = more + 1 if rows is None else rows * (more + 1)
        return int(parts[more >= WHOLE_SPLITS].sum()) <= self.max_parts


def block_bytes(config: ModelConfig) -> int:
    """Return the size of one block of keys and values: [layers][k, v][key_heads][PAGE][head_width] bf16.

    In FP8, each head has [PAGE][head_width] float8 e4m3 and then [PAGE] scales, each an exponent of one byte.
    """
    return config.layers * layer_bytes(config)


def layer_bytes(config: ModelConfig) -> int:
    """Return the bytes of one layer's keys and values in a block."""
    position_bytes = config.head_width + 1 if config.kv_dtype is KvDtype.FP8 else 2 * config.head_width
    return 2 * config.key_heads * PAGE * position_bytes


def buffer_sizes(config: ModelConfig, limits: StepLimits) -> dict[str, int]:
    """Return the size of each of a step's buffers, in bytes.

    Raises RequestRejected if a buffer has more values than the kernels can index.
    """
    rows, heads = limits.max_rows, config.heads
    # Rows and columns of a layer's linears: qkv, output, gate_up, down. One buffer holds the parts of any of them.
    linears = [
        ((heads + 2 * config.key_heads) * config.head_width, config.width),
        (config.width, heads * config.head_width),
        (2 * config.inner_width, config.width),
        (config.width, config.inner_width),
    ]
    parts, gated, experts = 0, config.inner_width, dict[str, int]()
    if (moe := config.experts) is not None:
        # The router's sums have parts, and each of a row's experts writes one part.
        linears.append((moe.count, config.width))
        parts, gated = moe.chosen * config.width, max(gated, moe.chosen * moe.width)
        chosen = rows * moe.chosen
        tilings = [(_expert_tiles(moe, rows, expert_rows), expert_rows) for expert_rows in _expert_tile_rows()]
        experts = {
            "chosen": chosen * 4,
            "shares": chosen * 4,
            "tiles": max(tiles for tiles, _ in tilings) * 4,
            "pairs": max(tiles * expert_rows for tiles, expert_rows in tilings) * 4,
        }
    spans = {"spans": _most_spans(rows) * _SPAN_BYTES, "cuts": rows * _CUT_BYTES} if _cuts_spans(config, limits) else {}
    # If attention is computed in parts, each part has one f32 per head.
    attention = _max_parts(config, limits) * heads * 4
    # One set of buffers is enough, because the card runs the two steps in flight one after the other. Layers reuse it.
    sizes = {
        "h": rows * config.width * 4,
        "x": rows * max(config.width, heads * config.head_width) * 2,
        "gated": rows * gated * 2,
        "q": rows * heads * config.head_width * 2,
        "parts": rows * 4 * max(parts, *(parts_of(*shape)[0] * shape[0] for shape in linears)),
        "logits": rows * 4 * parts_of(config.vocabulary, config.width)[0] * config.vocabulary,
        "totals": attention * config.head_width,
        "tops": attention,
        "sums": attention,
        "bests": rows * _scanned_blocks(config) * 4,
        "best_tokens": rows * _scanned_blocks(config) * 4,
        "block_totals": rows * _scanned_blocks(config) * 4,
        "rows": rows * ROW.itemsize,
        "results": rows * RESULT.itemsize,
        "tables": limits.tables * limits.table_blocks * 4,
        # These are used only by steps with spans.
        **spans,
        # These are used only by models with experts.
        **experts,
        # These are used only by guided steps.
        "guided": rows * config.vocabulary * 4,
        "guided_bests": rows * _scanned_blocks(config) * 4,
        "guided_tokens": rows * _scanned_blocks(config) * 4,
        "ranked": rows * MAX_RANKS * RANKED.itemsize,
        "guides": rows * GUIDE.itemsize,
        "entries": limits.entries(config.vocabulary) * ENTRY.itemsize,
        "masks": limits.guided_rows * mask_words(config.vocabulary) * 4,
    }
    ranked_blocks = manifest().kernels["rank"].constants["LANES"]
    if _scanned_blocks(config) > ranked_blocks:
        max_candidates = ranked_blocks * manifest().kernels["scan"].constants["BLOCK_V"]
        raise RequestRejected(f"The vocabulary must have at most {max_candidates:,} tokens, not {config.vocabulary:,}")
    for name, size in sizes.items():
        # Check this before the lease is requested: in the kernels a larger index would wrap around.
        if size > MAX_BUFFER_BYTES:
            raise RequestRejected(
                f"{limits.max_rows} rows of {limits.positions} positions need {size:,} bytes for {name} "
                f"alone; a buffer can have at most {MAX_BUFFER_BYTES:,}",
                "Use fewer rows or positions",
            )
    return sizes


def excess_launches(config: ModelConfig, limits: StepLimits) -> int:
    """Return by how many launches one set of a model's graphs exceeds MAX_RECORDED_LAUNCHES, or 0."""
    return max(0, _recorded_launches(config, limits, ()) - MAX_RECORDED_LAUNCHES)


class ForwardPass:
    """The kernels that compute a step's rows with a model.

    Attributes:
        weights: The model.
        limits: The sizes for which the buffers have room.
        target: The architecture of the card's kernels (linear_tiles).
        library: The kernels, loaded by `prepare`.
    """

    def __init__(self, session: GpuSession, weights: ModelWeights, limits: StepLimits, target: str = SM_80) -> None:
        self.weights = weights
        self.limits = limits
        self.target = target
        self.library = KernelLibrary(session, starts_early=target == SM_90A)
        self._session = session
        self._buffers: dict[str, Buffer] = {}

    @property
    def rows(self) -> Buffer:
        """The step's rows: `max_rows` ROW records, which each step overwrites."""
        return self._buffers["rows"]

    @property
    def results(self) -> Buffer:
        """The step's results: RESULT records. The next step reads tokens there."""
        return self._buffers["results"]

    @property
    def tables(self) -> Buffer:
        """The block tables: [tables, table_blocks] i32."""
        return self._buffers["tables"]

    @property
    def guides(self) -> Buffer:
        """A guided step's GUIDE records, one for each row."""
        return self._buffers["guides"]

    @property
    def entries(self) -> Buffer:
        """A guided step's ENTRY records: changes of single logits, to which the guides refer."""
        return self._buffers["entries"]

    @property
    def masks(self) -> Buffer:
        """A guided step's masks: [masks, mask_words] u32."""
        return self._buffers["masks"]

    @property
    def ranked(self) -> Buffer:
        """A guided step's likeliest tokens: RANKED records [R, MAX_RANKS]."""
        return self._buffers["ranked"]

    @property
    def normed(self) -> Buffer:
        """The last step's rows after the last norm: [R, width] bf16. No kernel after the head reads this buffer."""
        return self._buffers["x"]

    @property
    def logits(self) -> Buffer:
        """The last step's logits, in parts: [splits, rows with logits, vocabulary] f32."""
        return self._buffers["logits"]

    async def prepare(self) -> None:
        """Allocate the buffers and load the kernels. Raises AllocFailed, LoadFailed."""
        # Allocate the buffers before recording the kernels, because the graphs contain the buffers' addresses.
        for name, size in buffer_sizes(self.weights.config, self.limits).items():
            self._buffers[name] = await self._session.mem_alloc(size)
        # Shapes and numbers of rows have different kernels. Load those of all buckets before graphs are recorded.
        for rows in buckets_of(self.limits.max_rows):
            for kind in self.kinds(rows):
                async for launch in self._in_turns(rows, kind):
                    await self.library.load(launch.name)

    def kinds(self, rows: int) -> list[StepKind]:
        """Return the kinds of steps of `rows` rows for which graphs are recorded."""
        return _kinds(rows, self.weights.config, self.limits, HEAD_ROWS if self._computes_few_logits else ())

    @cached_property
    def _computes_few_logits(self) -> bool:
        config = self.weights.config
        dense = [layer for index, layer in enumerate(self.weights.layers) if config.experts_of(index) is None]
        gates = sum(not _is_fused(layer.gate_up) for layer in dense)
        return _recorded_launches(config, self.limits, HEAD_ROWS, gates) <= MAX_RECORDED_LAUNCHES

    async def launch(self, rows: int, kind: StepKind = PLAIN) -> None:
        """Launch or record the kernels of a step of `rows` rows. They read the buffer `rows` and write `results`."""
        async for launch in self._in_turns(rows, kind):
            await self.library.launch(launch)

    async def _in_turns(self, rows: int, kind: StepKind) -> AsyncIterator[KernelLaunch]:
        """Yield `launches`, and let other tasks run after every LAUNCHES_PER_TURN launches.

        Recording a launch never waits, so without this other models' steps would be delayed.
        """
        for number, launch in enumerate(self.launches(rows, kind), 1):
            yield launch
            if number % LAUNCHES_PER_TURN == 0:
                await asyncio.sleep(0)

    def launches(self, rows: int, kind: StepKind = PLAIN) -> Iterator[KernelLaunch]:
        """Yield the launches of a step of `rows` rows, in their order."""
        config, b = self.weights.config, self._buffers
        width, limits = config.width, self.limits
        scaled: dict[str, Value] = {} if config.embedding_scale is None else {"scale": config.embedding_scale}
        yield KernelLaunch(
            "embed_scaled" if scaled else "embed", (rows,), h=b["h"], table=self.weights.embedding, rows=b["rows"],
            results=b["results"], tables=b["tables"], D=width, table_blocks=limits.table_blocks, **scaled,
        )  # fmt: skip
        if kind.is_cut:
            yield KernelLaunch(
                "cut_spans", (1,), spans=b["spans"], cuts=b["cuts"], rows=b["rows"], R=rows, S=_most_spans(rows),
                count=_tile_rows(config), room=_max_parts(config, limits), whole_splits=WHOLE_SPLITS,
                least_splits=SPAN_SPLITS, max_spans=MAX_SPANS,
            )  # fmt: skip
        # The norm after a linear adds the linear's parts to the residual. `before` is the number of these parts, and
        # `outer` the norm that is applied to their sum first. The first norm adds no parts, because `embed` writes the
        # residual.
        before, outer = 0, None
        for index, layer in enumerate(self.weights.layers):
            # Attention: norm, qkv, rotation and append, attend, output projection.
            yield self._normalise(rows, layer.attention_norm, before, outer)
            yield from self._attend(rows, index, layer, kind)
            yield self._linear(layer.output, rows, "x")
            # Feed-forward: norm (which adds the attention's output), gate and up, down projection.
            yield self._normalise(rows, layer.inner_norm, _splits(layer.output), layer.attention_outer_norm)
            experts = config.experts_of(index)
            if experts is None:
                yield from self._gate(rows, layer.gate_up)
                yield self._linear(layer.down, rows, "gated")
            else:
                yield from self._experts(rows, layer, experts)
            before, outer = experts.chosen if experts else _splits(layer.down), layer.inner_outer_norm
        # The last norm adds the last layer's output. Then come the head and the choice of tokens.
        yield self._normalise(rows, self.weights.norm, before, outer)
        head_rows = kind.head_rows or rows
        yield self._linear(self.weights.head, head_rows, "x", "logits")
        yield from self._sample(head_rows, is_guided=kind.is_guided)

    def _sample(self, rows: int, *, is_guided: bool) -> Iterator[KernelLaunch]:
        """Yield the launches that choose each row's token from the logits: a scan by blocks, then a choice by row.

        A guided step chooses from changed logits, and ranks the likeliest tokens.
        """
        b, vocabulary, blocks = self._buffers, self.weights.config.vocabulary, _scanned_blocks(self.weights.config)
        scanned: dict[str, Value] = {"bests": b["bests"], "tokens": b["best_tokens"], "totals": b["block_totals"]}
        logits: dict[str, Value] = {
            "parts": b["logits"], "splits": _splits(self.weights.head), "stride": rows * vocabulary, "V": vocabulary,
        }  # fmt: skip
        # The scan is a separate kernel, because it needs many programs per row to be fast.
        yield KernelLaunch("scan", (rows, blocks), **scanned, **logits, blocks=blocks)
        if not is_guided:
            yield KernelLaunch(
                "sample", (rows,), results=b["results"], rows=b["rows"], **scanned, **logits, blocks=blocks
            )
            return
        # Reported probabilities are computed from the unchanged logits, so the changed ones go to another buffer.
        chosen: dict[str, Value] = {
            "guided": b["guided"], "bests": b["guided_bests"], "tokens": b["guided_tokens"], "guides": b["guides"],
        }  # fmt: skip
        yield KernelLaunch(
            "guide", (rows, blocks), **chosen, entries=b["entries"], masks=b["masks"], **logits, blocks=blocks,
            mask_words=mask_words(vocabulary),
        )  # fmt: skip
        yield KernelLaunch(
            "sample_guided", (rows,), results=b["results"], rows=b["rows"], **chosen, **logits, blocks=blocks,
            own_bests=b["bests"], own_tokens=b["best_tokens"], own_totals=b["block_totals"],
        )  # fmt: skip
        yield KernelLaunch(
            "rank", (rows,), ranked=b["ranked"], guides=b["guides"], bests=b["bests"], tokens=b["best_tokens"],
            **logits, blocks=blocks,
        )  # fmt: skip

    def _normalise(self, rows: int, weight: Plane, before: int, outer: Plane | None) -> KernelLaunch:
        """Return the launch that adds a linear's `before` parts to h, and writes h's norm to x.

        If `outer` is not None, the parts' sum is normalised and multiplied by `outer` before it is added.
        """
        b, width = self._buffers, self.weights.config.width
        kind, extra_values = (
            ("add_rmsnorm", dict[str, Value]()) if outer is None else ("norm_add_rmsnorm", {"outer": outer})
        )
        return KernelLaunch(
            _norm_name(kind, self.weights.config), (rows,), x=b["x"], h=b["h"], parts=b["parts"], weight=weight,
            splits=before, stride=rows * width, D=width,
            eps=self.weights.config.norm_epsilon, **extra_values,
        )  # fmt: skip

    def _attend(self, rows: int, index: int, layer: LayerWeights, kind: StepKind) -> Iterator[KernelLaunch]:
        """Yield the launches that compute attention from h's norm in x, and write its output to x."""
        config, b, limits = self.weights.config, self._buffers, self.limits
        heads, key_heads, width = config.heads, config.key_heads, config.head_width
        # The place of this layer's keys and values within a block of a region.
        place: dict[str, Value] = {"layer_bytes": index * layer_bytes(config), "block_bytes": block_bytes(config)}
        yield self._linear(layer.qkv, rows, "x")
        # Rotate q and k, and write k and v into the rows' blocks, where attention reads the keys of all rows of this
        # step.
        is_fp8 = config.kv_dtype is KvDtype.FP8
        stored = f"fp8_{width}" if is_fp8 else f"{width}"
        rope = f"rope_append_{stored}"
        programs = -(-(heads + 2 * key_heads) // manifest().kernels[rope].constants["HEADS"])
        cosines, sines = self.weights.rotary_tables(index)
        yield KernelLaunch(
            rope, (rows, programs), q=b["q"], parts=b["parts"], bias=layer.qkv_bias,
            q_norm=layer.q_norm, k_norm=layer.k_norm, cosines=cosines, sines=sines,
            rows=b["rows"], splits=_splits(layer.qkv), stride=rows * layer.qkv.rows, **place, H=heads, G=key_heads,
            has_bias=int(layer.qkv_bias is not None), has_norm=int(layer.q_norm is not None),
            eps=config.norm_epsilon,
        )  # fmt: skip
        read: dict[str, Value] = {
            "q": b["q"], "rows": b["rows"], "tables": b["tables"], **place, "table_blocks": limits.table_blocks,
            "H": heads, "G": key_heads, "scale": math.log2(math.e) / math.sqrt(config.score_divisor or width),
        }  # fmt: skip
        # If no sequence can be longer than the window, the kernels without a window give the same bits.
        window = config.window(index, limits.positions)
        suffix, window_values = f"{width}", dict[str, Value]()
        if window is not None:
            suffix, window_values = f"window_{width}", {"window": window}
        combine = f"combine_{suffix}"
        if is_fp8:
            # These kernels always have a window; one of all positions gives the same bits as none.
            read_values = window_values or {"window": limits.positions}
            suffix = stored
        else:
            read_values = window_values
        # If sequences are short or rows are many, one program computes each row and key head. Otherwise each sequence
        # is divided into parts, so that a few rows fill the card. All of these kernels give the same bits.
        is_whole = rows > _split_rows(rows, config)
        parts: dict[str, Value] = {name: b[name] for name in ("totals", "tops", "sums")}
        if kind.is_cut and window is None:
            # One program per span and key head: long sequences have several spans.
            for name in _span_kernels(config):
                yield KernelLaunch(name, (key_heads, _most_spans(rows)), x=b["x"], **parts, spans=b["spans"], **read)
            yield KernelLaunch(
                f"combine_spans_{width}", (rows, heads), x=b["x"], **parts, rows=b["rows"], H=heads, cuts=b["cuts"]
            )
            return
        if is_whole and kind.has_prompts:
            # Adjacent rows of one sequence share the blocks that they read.
            yield KernelLaunch(f"attend_prompt_{suffix}", (rows, key_heads), x=b["x"], R=rows, **read, **read_values)
            return
        if limits.splits == 1 or is_whole:
            # One program per row, key head and HEADS of its query heads.
            whole = f"attend_whole_{suffix}"
            yield KernelLaunch(whole, (rows, key_heads, _head_groups(whole, config)), x=b["x"], **read, **read_values)
            return
        # The parts of a sequence's attention, which `combine` adds in ascending order.
        parts["splits"] = limits.splits
        programs = min(limits.splits, -(-MAX_ATTENTION_PROGRAMS // (rows * key_heads)))
        attend = f"attend_{suffix}"
        grid = (rows, key_heads * _head_groups(attend, config), programs)
        yield KernelLaunch(attend, grid, **parts, **read, **read_values)
        yield KernelLaunch(combine, (rows, heads), x=b["x"], **parts, rows=b["rows"], H=heads, **window_values)

    def _gate(self, rows: int, gate_up: Linear) -> Iterator[KernelLaunch]:
        """Yield the launches that compute gated values from h's norm in x: one if the sums have one part, else two."""
        b, inner, splits = self._buffers, self.weights.config.inner_width, _splits(gate_up)
        gate = self.weights.config.gate
        if _is_fused(gate_up):
            name = tile_of(f"linear_{gate}_bf16", self.target, rows, inner, 1)
            (plane,) = gate_up.planes
            shape = {"R": rows, "F": inner, "K": gate_up.columns}
            yield KernelLaunch(name, linear_grid(name, rows, inner, 1), y=b["gated"], x=b["x"], w=plane, **shape)
            return
        yield self._linear(gate_up, rows, "x")
        grid = (rows, -(-inner // manifest().kernels[gate].constants["BLOCK_F"]))
        # Gate and up are one linear, so each row of the linear's parts contains both, gate first.
        stride = rows * 2 * inner
        yield KernelLaunch(gate, grid, x=b["gated"], parts=b["parts"], splits=splits, stride=stride, F=inner)

    def _experts(self, rows: int, layer: LayerWeights, experts: Experts) -> Iterator[KernelLaunch]:
        """Yield the launches that compute the parts of each row's experts from h's norm in x."""
        assert layer.router is not None
        b, width, count = self._buffers, self.weights.config.width, experts.count
        # Rate the experts, and choose the experts of each row.
        yield self._linear(layer.router, rows, "x")
        yield KernelLaunch(
            "route", (rows,), experts=b["chosen"], shares=b["shares"], parts=b["parts"], rows=b["rows"],
            splits=_splits(layer.router), stride=rows * count, E=count, K=experts.chosen,
            is_normalised=int(experts.is_normalised),
        )  # fmt: skip
        # Gather the rows of each expert, so that its weights are read once per tile of rows. The number of tiles is the
        # maximum over all possible choices of experts; surplus tiles compute nothing.
        pairs, expert_rows = rows * experts.chosen, _rows_per_expert_tile(experts, rows)
        tiles = _expert_tiles(experts, rows, expert_rows)
        inputs: dict[str, Value] = {"pairs": b["pairs"], "tiles": b["tiles"]}
        yield KernelLaunch(
            "group", (count,), **inputs, experts=b["chosen"], P=pairs, E=count, T=tiles, rows_per_tile=expert_rows
        )
        # Compute gate and up, then down times the expert's share. The next norm adds a row's experts like parts of a
        # sum.
        gated, down = (f"{name}_{expert_rows}" for name in ("experts_silu_bf16", "experts_bf16"))
        (gate_plane,), (down_plane,) = layer.gate_up.planes, layer.down.planes
        yield KernelLaunch(
            gated, (tiles, grid_of(gated, 1, experts.width)[1]), y=b["gated"], x=b["x"], w=gate_plane, **inputs, R=rows,
            F=experts.width, K=width, C=experts.chosen,
        )  # fmt: skip
        yield KernelLaunch(
            down, (tiles, grid_of(down, 1, width)[1]), parts=b["parts"], y=b["gated"], w=down_plane,
            shares=b["shares"], **inputs, R=rows, N=width, K=experts.width, C=experts.chosen,
        )  # fmt: skip

    def _linear(self, linear: Linear, rows: int, x: str, parts: str = "parts") -> KernelLaunch:
        """Return the launch that multiplies buffer `x` by a linear's weights, and writes the parts of its sums."""
        splits, chunk = parts_of(linear.rows, linear.columns)
        name = tile_of(f"linear_{linear.layout}", self.target, rows, linear.rows, splits)
        # Kernels of different layouts have different parameters for the weights, between x and R.
        planes: dict[str, Value] = dict(zip(_planes(manifest().kernels[name]), linear.planes, strict=True))
        shape = {"R": rows, "N": linear.rows, "K": linear.columns}
        grid, b = linear_grid(name, rows, linear.rows, splits), self._buffers
        return KernelLaunch(name, grid, parts=b[parts], x=b[x], **planes, **shape, chunk=chunk)


def _kinds(rows: int, config: ModelConfig, limits: StepLimits, few: Iterable[int]) -> list[StepKind]:
    """Return the kinds of steps of `rows` rows, if steps with prompts may compute the head for only `few` rows."""
    cuts_spans = _cuts_spans(config, limits) and rows <= manifest().kernels["cut_spans"].constants["LANES"]
    if rows <= _split_rows(rows, config):
        kinds = [StepKind(is_guided) for is_guided in (False, True)]
        # Rows of a tile share the keys and values that they read. Steps smaller than this would save less than a graph
        # costs.
        return kinds + [StepKind(has_prompts=True, is_cut=True)] * (cuts_spans and rows >= 2 * _tile_rows(config))
    kinds = [StepKind(*flags) for flags in product((False, True), (False, True))]
    if cuts_spans:
        kinds += [StepKind(is_guided, has_prompts=True, is_cut=True) for is_guided in (False, True)]
    # Only prompts have rows without logits. Guided steps are too rare to have such graphs.
    return kinds + [StepKind(False, True, head_rows) for head_rows in few if head_rows < rows]


def _recorded_launches(config: ModelConfig, limits: StepLimits, few: Iterable[int], gates: int | None = None) -> int:
    """Return the number of launches in one set of graphs, if steps with prompts may compute the head for `few` rows.

    `gates` is the number of layers whose gate is a separate launch. If it is None, the result is the maximum for any
    layout of the weights.
    """
    full = sum(config.window(layer, limits.positions) is None for layer in range(config.layers))
    with_experts = sum(config.experts_of(layer) is not None for layer in range(config.layers))
    # A layer's launches are the norm, qkv, its rotation, the output, the second norm, and the feed-forward part: 2, or
    # 5 with experts. Outside the layers there are the embedding, the norm and the head.
    gates = config.layers - with_experts if gates is None else gates
    common = 3 + 7 * config.layers + 3 * with_experts + gates
    graphs = [(rows, kind) for rows in buckets_of(limits.max_rows) for kind in _kinds(rows, config, limits, few)]
    return sum(common + _varying_launches(config, limits, rows, kind, full) for rows, kind in graphs)


def _cuts_spans(config: ModelConfig, limits: StepLimits) -> bool:
    """Return whether the attention of some steps, those of many rows or long prompts, may be cut into spans."""
    if limits.positions <= MIN_CUT_POSITIONS or limits.max_rows <= _split_rows(limits.max_rows, config):
        return False
    return any(config.window(layer, limits.positions) is None for layer in range(config.layers))


def _max_parts(config: ModelConfig, limits: StepLimits) -> int:
    """Return for how many parts of attention a step has room. There is one part for each row and split."""
    parts = _split_rows(limits.max_rows, config) * limits.splits
    if not _cuts_spans(config, limits):
        return parts
    return max(parts, min(MAX_SPAN_PARTS, min(PLACED_ROWS, limits.max_rows) * limits.splits))


def _most_spans(rows: int) -> int:
    """Return the maximum number of spans of a step, in which each row may be a separate tile."""
    return rows + MAX_SPANS


def _span_kernels(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the kernels that compute spans: for tiles of several rows, then for tiles of one row."""
    if config.kv_dtype is KvDtype.FP8:
        # One kernel computes both.
        return (f"attend_spans_fp8_{config.head_width}",)
    return f"attend_spans_{config.head_width}", f"attend_row_spans_{config.head_width}"


def _tile_rows(config: ModelConfig) -> int:
    """Return the maximum number of rows of a prompt's tile: each lane computes one query head of one row."""
    lanes = manifest().kernels[_span_kernels(config)[0]].constants["LANES"]
    return lanes // (config.heads // config.key_heads)


def _varying_launches(config: ModelConfig, limits: StepLimits, rows: int, kind: StepKind, full: int) -> int:
    """Return a step's number of launches for attention, spans and tokens, if `full` layers see all positions."""
    # Attention takes one launch, or two if it is computed in parts. In steps with spans, a layer without a window takes
    # three launches, or two in FP8.
    attention = 1 if limits.splits == 1 or rows > _split_rows(rows, config) else 2
    more = 1 + (len(_span_kernels(config)) + 1 - attention) * full if kind.is_cut else 0
    return config.layers * attention + more + (4 if kind.is_guided else 2)


def _split_rows(rows: int, config: ModelConfig) -> int:
    """Return the maximum number of rows of a step whose attention is computed in parts.

    A step with more rows has enough programs without parts.
    """
    return min(rows, (MAX_PROGRAMS - 1) // config.key_heads)


def _head_groups(name: str, config: ModelConfig) -> int:
    """Return how many programs of an attention kernel compute the query heads of a key head."""
    return -(-(config.heads // config.key_heads) // manifest().kernels[name].constants["HEADS"])


def _expert_tile_rows() -> list[int]:
    """Return the numbers of rows that experts' tiles can have, in ascending order."""
    return [manifest().kernels[name].constants["BM"] for name in tiles_of("experts_bf16", SM_80)]


def _rows_per_expert_tile(experts: Experts, rows: int) -> int:
    """Return the number of rows of experts' tiles: the smallest one that is at least the average rows of an expert."""
    sizes = _expert_tile_rows()
    return next((size for size in sizes if size * experts.count >= rows * experts.chosen), sizes[-1])


def _expert_tiles(experts: Experts, rows: int, expert_rows: int) -> int:
    """Return the most tiles of `expert_rows` rows that `rows` rows can need, whichever experts they choose."""
    pairs = rows * experts.chosen
    # Each expert that any row has chosen may have one tile that is not full.
    return pairs // expert_rows + min(experts.count, pairs)


def _scanned_blocks(config: ModelConfig) -> int:
    """Return the number of blocks of the vocabulary, each of which one program scans."""
    return -(-config.vocabulary // manifest().kernels["scan"].constants["BLOCK_V"])


def _norm_name(kind: str, config: ModelConfig) -> str:
    """Return the name of the smallest kernel `kind` that reads a row in one block, or else of the largest one."""
    blocks = sorted(
        (facts.constants["BLOCK_D"], name) for name, facts in manifest().kernels.items() if facts.kernel == kind
    )
    return next((name for block, name in blocks if block >= config.width), blocks[-1][1])


def _splits(linear: Linear) -> int:
    """Return the number of parts of a linear's sums."""
    return parts_of(linear.rows, linear.columns)[0]


def _is_fused(gate_up: Linear) -> bool:
    """Whether a gate is applied to the sums of its linear before they are written."""
    # Sums that are not cut into parts are final.
    return gate_up.layout is Layout.BF16 and _splits(gate_up) == 1


def _planes(facts: ManifestKernel) -> tuple[str, ...]:
    """Return the names of the kernel parameters that are a linear's weights, between x and R."""
    return facts.parameters[2 : facts.parameters.index("R")]
