"""The decode engine: a model on a lease. One step computes rows of several tenants' sequences together.

A step is one launch of a graph. The launch names the regions of the rows' tenants, and the step begins only if all of
these regions are valid. Two steps may be in flight: the host plans the second while the card computes the first. So the
host may not have a row's token yet. The card then takes the token from the result of the previous step.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from gpulease.client.aio import GpuLease, GpuSession, Region, RegionSet
from gpulease.client.aio.graphs import Graph
from gpulease.client.aio.streams import Stream
from gpulease.client.decode.checkpoint import Checkpoint
from gpulease.client.decode.checkpoint.weight_loader import load_weights, size_bytes
from gpulease.client.decode.decode_errors import EngineDecodeFailed, NoModelLoaded, RequestRejected
from gpulease.client.decode.engine.forward_pass import (
    LAUNCH_BYTES,
    LEAST_SHARED,
    ForwardPass,
    StepKind,
    StepLimits,
    UnevenTiles,
    block_bytes,
    buckets_of,
    buffer_sizes,
    excess_launches,
    head_rows_of,
    parts_of,
)
from gpulease.client.decode.engine.linear_tiles import target_of
from gpulease.client.decode.model_config import check_positions
from gpulease.client.decode.pooling import f32_of_bf16
from gpulease.client.decode.row_records import (
    ENTRY,
    GUIDE,
    MAX_RANKS,
    NO_MASK,
    NO_ROW,
    NO_TARGET,
    PAGE,
    RANKED,
    RESULT,
    ROW,
    Results,
    Rows,
    StepGuidance,
    bytes_of,
    mask_words,
)
from gpulease.client.errors import RegionFailed

MAX_STEPS: Final = 2
"""Maximum number of steps in flight: one is being computed, and one waits. The maximum is 1 for a worker on another
host. There is no shared memory then, so separate requests before and after the graph copy rows and results.
"""

MAX_REGION_SETS: Final = 256
"""Maximum number of region sets that the engine caches, one for each combination of tenants in a step. The oldest set
is dropped, and created again when needed. A worker has room for more."""

COPY_BYTES: Final = 8 << 20
"""Size of one copy of blocks, in bytes. A step waits for at most one such copy, 0.2 ms on a card's bus."""

MAX_COPY_TRIES: Final = 100
"""Maximum number of tries to copy blocks. A try fails only if a region ended during the copy."""


SPARE_BYTES: Final = 64 << 20
"""Lease memory, in bytes, for the kernels' code and for the scratch memory of regions that have ended."""

UNSET: Final = np.array((0, 0.0, 0.0, 1.0), RESULT)
"""The result of a row without logits. The logarithm of a probability can be computed from it as from any other result.
"""

REGION_GRANULE_BYTES: Final = 2 << 20
"""On a card, a region's size is a multiple of this many bytes."""


def lease_bytes(checkpoint: Checkpoint, limits: StepLimits, pools: Iterable[int], *, packed: bool = True) -> int:
    """Return the bytes that an engine's lease needs. `pools` has the number of blocks of each region.

    Raises RequestRejected if a step with these limits has more values than the kernels can index, and InvalidRequest
    for more positions than the model's context.
    """
    check_positions(checkpoint.config, limits.positions)
    # The lease holds the weights, a step's buffers and every region, rounded up as by the daemon.
    granules = [-(-blocks * block_bytes(checkpoint.config) // REGION_GRANULE_BYTES) for blocks in pools]
    weights = size_bytes(checkpoint, packed=packed, positions=limits.positions)
    buffers = sum(buffer_sizes(checkpoint.config, limits).values())
    # Graphs of models with very many layers need more memory than a worker may use in addition to its lease.
    graphs = MAX_STEPS * LAUNCH_BYTES * excess_launches(checkpoint.config, limits)
    return weights + buffers + graphs + sum(granules) * REGION_GRANULE_BYTES + SPARE_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class BlockPool:
    """A region with `blocks` blocks of one tenant's keys and values."""

    region: Region
    blocks: int


@dataclass(frozen=True, slots=True)
class _RowOrder:
    """The order of a step's rows on the card. Rows with results come first.

    Attributes:
        results: The number of rows with results.
        rows: The caller's row at each index of this order.
        indexes: For each of the caller's rows, its index in this order.
    """

    results: int
    rows: "NDArray[np.intp]"
    indexes: "NDArray[np.intp]"

    @classmethod
    def of(cls, chosen: "NDArray[np.intp]", count: int) -> Self:
        """Return the order of `count` rows of which the rows `chosen` have results."""
        # Rows without results keep their order, so that adjacent rows of a prompt stay adjacent.
        rows = np.concatenate([chosen, np.delete(np.arange(count), chosen)])
        return cls(len(chosen), rows, np.argsort(rows))


@dataclass(slots=True)
class _StartedStep:
    number: int
    rows: int
    order: _RowOrder | None
    is_guided: bool
    is_pooled: bool

    @property
    def results(self) -> int:
        """The number of rows with results. Without an `order`, all rows have results."""
        return self.rows if self.order is None else self.order.results


@dataclass(slots=True)
class _GuideArrays:
    """Arrays in the arena from and to which a guided step copies. Each of the two steps in flight has one set."""

    guides: Rows
    entries: Rows
    masks: "NDArray[np.uint32]"
    ranked: Rows


class DecodeEngine:
    """A model on a lease, opened by `await DecodeEngine.open(...)`. `close` ends its session, but not the lease.

    Attributes:
        lease: The engine's lease.
        session: The engine's session.
        limits: Maximum numbers of rows, sequences and positions.
        max_steps: Maximum number of steps in progress: MAX_STEPS, or 1 in a session without shared memory.
        ranked: The likeliest tokens of the step that `finish` returned last, RANKED records [rows, MAX_RANKS]; None if
            that step had no guidance.
        normed: The rows after the last norm, f32 [rows, width], of the step that `finish` returned last; None if that
            step was not pooled.
    """

    def __init__(self, lease: GpuLease, session: GpuSession, forward: ForwardPass) -> None:
        self.session = session
        self.max_steps = MAX_STEPS if session.shares_memory else 1
        self.limits = forward.limits
        self.lease = lease
        self._forward: ForwardPass | None = forward
        self._uneven = UnevenTiles.of(forward.weights.config, self.limits)
        self._buckets = buckets_of(self.limits.max_rows)
        # Graphs by bucket of rows, parity and kind. Even and odd steps have separate streams, rows and results.
        self._graphs: dict[tuple[int, int, StepKind], Graph] = {}
        self._guide_arrays: list[_GuideArrays] = []
        self._prefix_arrays: list[NDArray[np.int32]] = []
        # Arrays by parity, for each parity that has had a pooled step.
        self._normed_arrays: dict[int, NDArray[np.uint16]] = {}
        self.normed: NDArray[np.float32] | None = None
        self.ranked: Rows | None = None
        self._sets: dict[frozenset[BlockPool], RegionSet] = {}
        self._streams: list[Stream] = []
        self._rows: list[Rows] = []
        self._results: list[Results] = []
        self._steps: deque[_StartedStep] = deque()
        # The row order of the step that was started last. The next step's rows take tokens from its rows.
        self._order: _RowOrder | None = None
        self._next = 1
        # `_refused` is the error of the earliest step that did not begin, until `finish` raises it.
        self._refused: RegionFailed | None = None
        self._refusals = 0

    @classmethod
    async def open(
        cls,
        lease: GpuLease,
        checkpoint: Checkpoint,
        limits: StepLimits,
        *,
        packed: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """Open a session on the lease, load the model and the kernels, and record a graph for each number of rows.

        Args:
            lease: The lease; the caller renews and frees it.
            checkpoint: The model (`open_model`).
            limits: Maximum numbers of rows, sequences and positions.
            packed: Whether quantised weights stay packed if kernels can read them packed.
            progress: Called with the number of bytes loaded so far and the total number.

        Raises ModelRejected, AllocFailed, InvalidRequest for more positions than the model's context, or the error that
        ended the lease. After an error nothing stays open.
        """
        check_positions(checkpoint.config, limits.positions)
        async with AsyncExitStack() as stack:
            # If a later statement fails, the stack closes everything that was opened before.
            session = await GpuSession(lease)
            stack.push_async_callback(session.close)
            weights = await load_weights(
                session, checkpoint, packed=packed, positions=limits.positions, progress=progress
            )
            forward = ForwardPass(session, weights, limits, target_of(session.driver, session.compute_capability))
            await forward.prepare()
            engine = cls(lease, session, forward)
            stack.push_async_callback(engine.close)
            # Recording needs loaded kernels and allocated buffers, because graphs contain their addresses.
            await engine._record()
            stack.pop_all()
        return engine

    @property
    def forward(self) -> ForwardPass:
        """The model's kernels. Raises NoModelLoaded after `close`."""
        if self._forward is None:
            raise NoModelLoaded("The engine is closed", "Open one with DecodeEngine.open")
        return self._forward

    async def _record(self) -> None:
        session, forward, rows = self.session, self.forward, self.limits.max_rows
        for parity in range(self.max_steps):
            self._streams.append(await session.stream())
            # These arrays are in the arena. The graphs contain their addresses, and the card accesses them directly.
            rows_in, result_rows = session.empty(rows, ROW), session.empty(rows, RESULT)
            rows_in[:] = np.zeros(1, ROW)
            rows_in["position"] = NO_ROW
            self._rows.append(rows_in)
            self._results.append(result_rows)
            vocabulary = forward.weights.config.vocabulary
            arrays = _GuideArrays(
                session.empty(rows, GUIDE),
                session.empty(self.limits.entries(vocabulary), ENTRY),
                session.empty((self.limits.guided_rows, mask_words(vocabulary)), np.uint32),
                session.empty((rows, MAX_RANKS), RANKED),
            )
            self._guide_arrays.append(arrays)
            # Each new sequence has a row, so a step has no more new sequences than rows.
            prefix_rows = min(rows, self.limits.tables)
            self._prefix_arrays.append(session.empty((prefix_rows, self.limits.table_blocks), np.int32))
            # Record a graph for each bucket and kind of step: copy the rows in, run the kernels, copy the results out.
            # Without shared memory, `start` and `_fetch` do the copies.
            for bucket in self._buckets:
                for kind in forward.kinds(bucket):
                    async with session.record() as graph:
                        if session.shares_memory:
                            await session.mem_write(forward.rows, 0, rows_in[:bucket])
                        await forward.launch(bucket, kind)
                        if session.shares_memory:
                            results = result_rows[: kind.head_rows or bucket]
                            await session.mem_read(forward.results, 0, results.nbytes, into=results)
                            if kind.is_guided:
                                ranked = arrays.ranked[:bucket]
                                await session.mem_read(forward.ranked, 0, ranked.nbytes, into=ranked)
                    self._graphs[bucket, parity, kind] = graph

    @property
    def vocabulary(self) -> int:
        return self.forward.weights.config.vocabulary

    # --- the tenants' blocks ---

    @property
    def remaining_s(self) -> float:
        """Seconds until the engine's lease ends, by this machine's monotonic clock."""
        return self.lease.remaining_s

    async def open_pool(self, blocks: int, *, tenant: str | None = None, ttl_secs: float | None = None) -> BlockPool:
        """Open a region of `blocks` blocks of keys and values, of 16 positions each.

        Raises CapacityExceeded while the lease has no room, and the errors of `GpuLease.region`.
        """
        size_bytes = blocks * block_bytes(self.forward.weights.config)
        region = await self.lease.region(size_bytes, tenant=tenant, ttl_secs=ttl_secs)
        return BlockPool(region, blocks)

    async def close_pool(self, pool: BlockPool) -> None:
        """End a pool's region and release its addresses. No step in flight may name it."""
        # Cached sets that name the region can no longer be launched.
        for pools in [pools for pools in self._sets if pool in pools]:
            del self._sets[pools]
        for _ in range(MAX_COPY_TRIES):
            try:
                await pool.region.close()
            except RegionFailed as error:
                # The error may be the refusal of an earlier step. `finish` will raise it, so try this request again.
                if not self._keep_refusal(error):
                    raise
            else:
                return

    async def save_pool(self, pool: BlockPool, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Copy blocks of a pool to the host's memory. Returns them as [blocks, bytes of a block].

        Steps that name other pools may continue, but no step in flight may name this one. Raises RegionFailed if the
        pool ended, RequestRejected for a block outside the pool, EngineDecodeFailed if other pools keep ending
        meanwhile, or the error that ended the session.
        """
        # The array need not be initialised: every byte is overwritten, or an error is raised.
        contents = np.empty((len(blocks), block_bytes(self.forward.weights.config)), np.uint8)
        session = self.session

        async def read(offset: int, rows: NDArray[np.uint8]) -> None:
            await session.mem_read(pool.region, offset, rows.nbytes, into=rows)

        await self._copy(pool, blocks, contents, read)
        return contents

    async def load_pool(self, pool: BlockPool, blocks: Sequence[int], kept: NDArray[np.uint8]) -> None:
        """Copy the result of `save_pool` into blocks of a pool. Raises the errors of `save_pool`."""
        expected = len(blocks), block_bytes(self.forward.weights.config)
        if kept.shape != expected or kept.dtype != np.uint8 or not kept.flags.c_contiguous:
            raise RequestRejected(
                f"Blocks must be uint8 {expected}, not {kept.dtype} {kept.shape}", "Give saved blocks"
            )
        session = self.session

        async def write(offset: int, rows: NDArray[np.uint8]) -> None:
            await session.mem_write(pool.region, offset, rows)

        await self._copy(pool, blocks, kept, write)

    async def _copy(
        self,
        pool: BlockPool,
        blocks: Sequence[int],
        contents: NDArray[np.uint8],
        copy: Callable[[int, NDArray[np.uint8]], Awaitable[None]],
    ) -> None:
        """Copy blocks, one run of adjacent blocks after another.

        After refusing a step, the worker skips requests without replies until it has reported the refusal. If that
        happens during the copy, some blocks may not have been copied. So all blocks are copied again.
        """
        if blocks and not 0 <= min(blocks) <= max(blocks) < pool.blocks:
            raise RequestRejected(
                f"A block is not one of the pool's {pool.blocks}", "Use numbers of blocks in the pool"
            )
        # A pass over the blocks is valid only if the number of refusals is the same before and after it.
        size_bytes = contents.shape[1]
        for _ in range(MAX_COPY_TRIES):
            refusals = self._refusals
            try:
                for first, last in _runs(blocks, max(1, COPY_BYTES // size_bytes)):
                    await copy(blocks[first] * size_bytes, contents[first:last])
                # The worker reports only at this wait whether it skipped copies.
                await self.session.default_stream.sync()
            except RegionFailed as error:
                if error.lease_id == pool.region.lease_id:
                    raise
                self._keep_refusal(error)
            if refusals == self._refusals:
                return
        raise EngineDecodeFailed(f"Blocks could not be copied in {MAX_COPY_TRIES} tries: regions ended in each")

    async def fill_pool(self, pool: BlockPool, tokens: Sequence[int]) -> None:
        """Compute these tokens' keys and values at a sequence's first positions, into the pool's blocks in order.

        No step may be in flight, and no sequence may use the first row of the block tables. Raises RequestRejected for
        more tokens than the pool's blocks or a sequence have room for, and the errors of `start` and `finish`.
        """
        max_tokens = min(pool.blocks * PAGE, self.limits.positions)
        if len(tokens) > max_tokens or self._steps:
            raise RequestRejected(f"A pool can be filled with at most {max_tokens} tokens, while no step is under way")
        for first in range(0, len(tokens), self.limits.max_rows):
            part = tokens[first : first + self.limits.max_rows]
            rows: Rows = np.zeros(len(part), ROW)
            rows["token"], rows["source"] = part, NO_ROW
            rows["position"] = np.arange(first, first + len(part))
            rows["block"] = rows["position"] // PAGE
            rows["blocks"], rows["base"] = pool.blocks, pool.region.address
            await self.start(rows, [pool], chosen=np.zeros(0, np.intp))
            await self.finish()

    # --- steps ---

    @property
    def steps_under_way(self) -> int:
        """The number of steps that were started and are not finished."""
        return len(self._steps)

    async def start(
        self,
        rows: Rows,
        pools: Iterable[BlockPool],
        guidance: StepGuidance | None = None,
        prefixes: Sequence[tuple[int, Sequence[int]]] = (),
        *,
        chosen: "NDArray[np.intp] | None" = None,
        is_pooled: bool = False,
    ) -> int:
        """Start a step after the steps in flight, and do not wait for it. Returns the step's number.

        Args:
            rows: ROW records, `limits.max_rows` at most. `source` must be a row of the previous step that has a result.
            pools: The pools of the rows' sequences.
            guidance: Changes logits, restricts tokens or requests the likeliest tokens. Rows without a guide are not
                affected.
            prefixes: For each sequence that begins with blocks that earlier steps computed: its row of the block
                tables, and the numbers of these blocks. The step itself adds only the entries of its rows' positions.
            chosen: The rows that must have results, or None for all rows. Other rows' results may be unset, which saves
                time. With guidance, all rows have results.
            is_pooled: Whether `finish` sets `normed`.

        Raises RequestRejected for too many rows, entries, masks, prefixes or steps, RegionFailed if a pool ended,
        NoModelLoaded after `close`, or the error that ended the session. After an error this step is not in flight, but
        earlier steps still are.
        """
        count, max_rows = len(rows), self.forward.limits.max_rows
        if not 0 < count <= max_rows:
            raise RequestRejected(f"A step must have 1 to {max_rows} rows, not {count}")
        if len(self._steps) >= self.max_steps:
            raise RequestRejected(
                f"{self.max_steps} steps are already in progress, the maximum", "Await `finish` first"
            )
        # A step in flight was refused. This step needs its tokens, so it can't start.
        if self._refused is not None:
            raise self._refused
        # The two steps in flight alternate between two streams and two sets of arrays.
        number, parity = self._next, self._next % self.max_steps
        bucket = self._bucket(count)
        rows_in, stream = self._rows[parity], self._streams[parity]
        kind = self._kind_of(bucket, rows, guidance, chosen)
        order = None if chosen is None or kind.head_rows is None else _RowOrder.of(chosen, count)
        # A graph has a constant number of rows. Pad the step to the bucket with rows that compute nothing.
        bytes_of(rows_in[:count])[:] = bytes_of(rows if order is None else rows.take(order.rows))
        if self._order is not None:
            # Convert the sources to the order of the previous step's rows on the card.
            sources = rows_in["source"][:count]
            has_source = sources >= 0
            sources[has_source] = self._order.indexes[sources[has_source]]
        if count < bucket:
            rows_in["position"][count:bucket] = NO_ROW
            rows_in["source"][count:bucket] = NO_ROW
        if guidance is not None:
            self._check_guidance(guidance, count)
        if prefixes:
            self._check_prefixes(prefixes)
        # Append the step before its launch, because a copy of blocks in another task may receive its refusal.
        self._steps.append(_StartedStep(number, count, order, guidance is not None, is_pooled))
        try:
            region_set = await self._region_set(frozenset(pools))
            if self.session.shares_memory:
                # The card orders the two streams' steps; the host does not wait.
                await stream.wait_for(self._streams[1 - parity])
            else:
                # The worker is on another host: send the rows now, before the launch on the same stream.
                await self.session.mem_write(self.forward.rows, 0, rows_in[:bucket], stream=stream)
            if guidance is not None:
                await self._send(guidance, parity, count, bucket)
            if prefixes:
                await self._write_tables(prefixes, parity)
            # If the launch is refused, the error's `position` identifies the step.
            graph = self._graphs[bucket, parity, kind]
            await graph.launch(stream=stream, regions=region_set, position=number)
            if is_pooled and self.session.shares_memory:
                # Read the rows before the next step writes the same buffer.
                await self._read_normed(parity, count)
        except BaseException as error:
            # The step did not start. If the error is the refusal of the previous step, `_keep_refusal` keeps it for
            # `finish`.
            self._steps.pop()
            if isinstance(error, RegionFailed):
                self._keep_refusal(error)
            raise
        self._next += 1
        self._order = order
        return number

    def _check_guidance(self, guidance: StepGuidance, count: int) -> None:
        arrays = self._guide_arrays[0]
        if len(guidance.guides) != count:
            raise RequestRejected(f"A step of {count} rows must have {count} guides, not {len(guidance.guides)}")
        if len(guidance.entries) > len(arrays.entries) or len(guidance.masks) > len(arrays.masks):
            raise RequestRejected(
                f"A step must have at most {len(arrays.entries)} entries and {len(arrays.masks)} masks, not"
                f" {len(guidance.entries)} and {len(guidance.masks)}"
            )

    def _check_prefixes(self, prefixes: Sequence[tuple[int, Sequence[int]]]) -> None:
        max_prefixes, positions = self._prefix_arrays[0].shape
        if len(prefixes) > max_prefixes:
            raise RequestRejected(f"A step must have at most {max_prefixes} prefixes, not {len(prefixes)}")
        for table, blocks in prefixes:
            if not 0 <= table < self.limits.tables or len(blocks) > positions:
                raise RequestRejected(f"A prefix must have a table below {self.limits.tables} and {positions} blocks")

    async def _write_tables(self, prefixes: Sequence[tuple[int, Sequence[int]]], parity: int) -> None:
        """Write block tables on the step's stream, after the previous step and before the launch."""
        array, forward, entry_bytes = self._prefix_arrays[parity], self.forward, np.dtype(np.int32).itemsize
        for place, (table, blocks) in enumerate(prefixes):
            entries = array[place, : len(blocks)]
            entries[:] = blocks
            offset = table * self.limits.table_blocks * entry_bytes
            await self.session.mem_write(forward.tables, offset, entries, stream=self._streams[parity])

    async def _send(self, guidance: StepGuidance, parity: int, count: int, bucket: int) -> None:
        """Copy a step's guidance to the card on the step's stream, after the previous step and before the launch."""
        arrays, stream = self._guide_arrays[parity], self._streams[parity]
        bytes_of(arrays.guides[:count])[:] = bytes_of(guidance.guides)
        # Padding rows have no guidance.
        padding = arrays.guides[count:bucket]
        padding["count"] = padding["ranks"] = 0
        padding["mask"], padding["target"] = NO_MASK, NO_TARGET
        forward, session = self.forward, self.session
        await session.mem_write(forward.guides, 0, arrays.guides[:bucket], stream=stream)
        # Copy only the entries and masks in use. The host does not wait for copies of arrays in the arena.
        if entries := len(guidance.entries):
            bytes_of(arrays.entries[:entries])[:] = bytes_of(guidance.entries)
            await session.mem_write(forward.entries, 0, arrays.entries[:entries], stream=stream)
        if masks := len(guidance.masks):
            arrays.masks[:masks] = guidance.masks
            await session.mem_write(forward.masks, 0, arrays.masks[:masks], stream=stream)

    async def finish(self) -> Results:
        """Wait for the oldest step in flight. Returns RESULT records, one for each of its rows.

        Results of rows that were not `chosen` are unset.

        Raises RegionFailed, with the `lease_id` of the pool that ended, or the error that ended the session. After
        these errors no step is in flight: neither this step nor a later one began. Raises RequestRejected if no step is
        in flight.
        """
        if not self._steps:
            raise RequestRejected("No step is in progress", "Call `start` first")
        step = self._steps[0]
        parity = step.number % self.max_steps
        try:
            await self._wait(parity)
            # The next step's refusal is raised only by the next `finish`.
            if self._refused is not None and (self._refused.position or 0) <= step.number:
                raise self._refused
            if not self.session.shares_memory:
                await self._fetch(parity, step)
        except BaseException:
            self._steps.clear()
            self._refused = None
            raise
        self._steps.popleft()
        # The step after the next writes the same arrays, so return copies.
        self.ranked = _copy_of(self._guide_arrays[parity].ranked[: step.rows]) if step.is_guided else None
        self.normed = None
        if step.is_pooled:
            normed = self._normed_arrays[parity][: step.rows]
            self.normed = f32_of_bf16(normed if step.order is None else normed[step.order.indexes])
        results = self._results[parity][: step.results]
        if step.order is None:
            return _copy_of(results)
        # Restore the caller's order. Rows without results get UNSET, the record appended after the results.
        return np.append(results, UNSET).take(np.minimum(step.order.indexes, len(results)))

    async def _fetch(self, parity: int, step: _StartedStep) -> None:
        """Read a step's results in a session without shared memory, where the step's graph can't copy them."""
        results, stream = self._results[parity][: step.results], self._streams[parity]
        if step.results:
            await self.session.mem_read(self.forward.results, 0, results.nbytes, into=results, stream=stream)
        if step.is_guided:
            ranked = self._guide_arrays[parity].ranked[: step.rows]
            await self.session.mem_read(self.forward.ranked, 0, ranked.nbytes, into=ranked, stream=stream)
        if step.is_pooled:
            await self._read_normed(parity, step.rows)

    async def _read_normed(self, parity: int, rows: int) -> None:
        """Copy a step's rows after the last norm, on the step's stream."""
        array = self._normed_arrays.get(parity)
        if array is None:
            shape = self.limits.max_rows, self.forward.weights.config.width
            array = self._normed_arrays[parity] = self.session.empty(shape, np.uint16)
        part = array[:rows]
        await self.session.mem_read(self.forward.normed, 0, part.nbytes, into=part, stream=self._streams[parity])

    async def _wait(self, parity: int) -> None:
        try:
            await self._streams[parity].sync()
        except RegionFailed as error:
            self._keep_refusal(error)
            if self._refused is None:
                raise
            # The first wait may raise the refusal of a later step. Steps before that one still end, so wait again.
            await self._streams[parity].sync()

    def _keep_refusal(self, error: RegionFailed) -> bool:
        """Keep a step's refusal until `finish` raises it. Returns False if the error is not about a step in flight.

        If two steps are refused, only the refusal of the earlier one is kept. `finish` then also drops the later step.
        """
        self._refusals += 1
        number = error.position
        # The error may belong to another request, for example a copy of a pool that has ended.
        if number is None or all(step.number != number for step in self._steps):
            return False
        if self._refused is None or number < (self._refused.position or 0):
            self._refused = error
        return True

    async def logits(self, rows: int) -> "NDArray[np.float32]":
        """Read the logits [rows, vocabulary] of the last step.

        `rows` is the step's number of rows. All of them must have results, and no step may be in flight.
        """
        forward = self.forward
        vocabulary = forward.weights.config.vocabulary
        bucket = self._bucket(rows)
        splits, _ = parts_of(vocabulary, forward.weights.config.width)
        parts = np.empty((splits, bucket, vocabulary), np.float32)
        await self.session.mem_read(forward.logits, 0, parts.nbytes, into=parts)
        # Add the parts in ascending order, like the kernels, so that the logits have the same bits as on the card.
        total = parts[0, :rows]
        for part in parts[1:]:
            total += part[:rows]
        return total

    async def close(self) -> None:
        """End the engine's session, and with it the model, but not the lease."""
        if self._forward is not None:
            self._forward = None
            self._steps.clear()
            # Graphs and arrays refer to the arena. Until they are dropped, its memory is mapped and its descriptor
            # open.
            self._graphs.clear()
            self._rows.clear()
            self._results.clear()
            self._guide_arrays.clear()
            self._prefix_arrays.clear()
            self._normed_arrays.clear()
            await self.session.close()

    def _kind_of(
        self, bucket: int, rows: Rows, guidance: StepGuidance | None, chosen: "NDArray[np.intp] | None"
    ) -> StepKind:
        kind, with_prompts = StepKind(guidance is not None), StepKind(guidance is not None, has_prompts=True)
        cut = StepKind(guidance is not None, has_prompts=True, is_cut=True)
        # A step with prompts has `chosen`. So a small step without `chosen` needs no search for long sequences.
        is_large = (bucket, 0, with_prompts) in self._graphs
        may_be_cut = (is_large or chosen is not None) and (bucket, 0, cut) in self._graphs
        if not is_large and not may_be_cut:
            return kind
        tables = rows["table"]
        begins = tables[1:] != tables[:-1]
        # Small steps already compute attention in parts. Cut them into spans only if rows share the blocks that they
        # read.
        least_shared = 1 if is_large else LEAST_SHARED
        if may_be_cut and self._uneven.are_in(rows["position"], begins, least_shared):
            return cut
        if not is_large or begins.all():
            return kind
        if chosen is None or guidance is not None:
            return with_prompts
        few = with_prompts._replace(head_rows=head_rows_of(len(chosen), bucket))
        return few if (bucket, 0, few) in self._graphs else with_prompts

    def _bucket(self, rows: int) -> int:
        return self._buckets[bisect_left(self._buckets, rows)]

    async def _region_set(self, pools: frozenset[BlockPool]) -> RegionSet:
        # Steps of the same tenants name the same set, so it usually exists already.
        region_set = self._sets.get(pools)
        if region_set is None:
            if len(self._sets) >= MAX_REGION_SETS:
                del self._sets[next(iter(self._sets))]
            region_set = self._sets[pools] = await self.session.region_set(pool.region for pool in pools)
        return region_set


def _copy_of(records: Rows) -> Rows:
    return bytes_of(records).copy().view(records.dtype)


def _runs(blocks: Sequence[int], max_blocks: int) -> Iterator[tuple[int, int]]:
    """Divide blocks into runs of at most `max_blocks` adjacent blocks.

    Yields each run's first index, and the index after its last.
    """
    first = 0
    # A run ends at a gap, at `max_blocks` blocks, or at the end of the list.
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1 or index - first == max_blocks:
            yield first, index
            first = index
