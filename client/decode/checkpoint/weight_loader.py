"""Loads a checkpoint into a session's memory, in the layouts that the kernels read.

Theory of operation. First the sizes of all tensors are added up. Then the buffers are allocated, and meanwhile rows are
copied, in chunks, to those that exist. Threads prepare the next few chunks while others are copied. Rows that are bf16
in a file are copied to windows, arrays of the session's arena, which the card reads itself; a few such copies are in
flight, each in a stream, so that the bus never waits for the host. Rows of other types are converted. So only a few
chunks of the model are in the host's memory at a time, besides the page cache, and several threads share its page
faults.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpulease.client.aio import GpuSession, Stream
from gpulease.client.decode.checkpoint.contract import Checkpoint
from gpulease.client.decode.checkpoint.model_tensors import (
    EMBEDDING,
    HEAD,
    NORM,
    ROUTER,
    feed_forward_parts,
    layer_prefix,
)
from gpulease.client.decode.checkpoint.rotary import local_rotary_tables, rotary_tables
from gpulease.client.decode.checkpoint.tensor_file import FileRows
from gpulease.client.decode.checkpoint.tensors import PACKED, Tensor, TensorType, plane_bytes
from gpulease.client.decode.checkpoint.weights import LayerWeights, Layout, Linear, ModelWeights
from gpulease.client.decode.model_config import ModelConfig
from gpulease.client.errors import AllocFailed, GpuLeaseError
from gpulease.client.handles import Buffer

CHUNK_BYTES: Final = 8 << 20
"""Bytes of a chunk on the card: enough that the fixed cost of a copy is small, few enough for a smooth progress bar."""

WINDOW_BYTES: Final = 16 << 20
"""The same for rows that are copied unchanged from a file. A card's bus copies such a chunk in some 0.3 ms, and
requesting the copy takes a tenth of that."""

AHEAD: Final = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
"""Chunks that are read or converted ahead of the copies, each in a thread. It bounds their memory and cores."""

COPIES: Final = 3
"""Windows that the card copies at a time. While the host waits for the first, and fills its window again, the card
continues with the others."""

IN_STREAM_FROM_BYTES: Final = 1 << 20
"""Smallest copy that is left in flight: a smaller one is done sooner than a stream could be waited for."""

PAGE_BYTES: Final = 2 << 20
SHARING_BYTES: Final = 1 << 20
STEP_BYTES: Final = 512
"""A card gives an allocation of more than `SHARING_BYTES` its own pages of `PAGE_BYTES`. Smaller ones share pages, in
multiples of `STEP_BYTES`."""

Planes = tuple[NDArray[Any], ...]

_TablesMaker = Callable[[int, int], tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Returns the cosines and sines of positions [begin, end)."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Buffers to be allocated, and the rows that fill them, one tensor after the other.

    Attributes:
        row_bytes: Bytes of a row in each buffer.
        tensors: The tensors that the rows belong to.
        planes: Returns a tensor's rows [begin, end) as values for each buffer.
        is_as_read: Whether the first buffer's are the unchanged bytes of the tensors' files.
    """

    row_bytes: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    planes: Callable[[Tensor, int, int], Planes]
    is_as_read: bool

    @property
    def rows(self) -> int:
        return sum(tensor.rows for tensor in self.tensors)

    @property
    def sizes(self) -> list[int]:
        return [self.rows * nbytes for nbytes in self.row_bytes]

    def rows_of(self, tensor: Tensor) -> FileRows | None:
        """Return a tensor's rows in its file if the first buffer gets them unchanged; None if they are converted."""
        return tensor.read if self.is_as_read and isinstance(tensor.read, FileRows) else None

    def chunks(self, buffers: tuple[Buffer, ...]) -> Iterator["_Chunk"]:
        """Yield the target's rows in chunks of whole rows, with their places in the buffers."""
        before = 0
        for tensor in self.tensors:
            most = CHUNK_BYTES if self.rows_of(tensor) is None else WINDOW_BYTES
            step = max(1, most // sum(self.row_bytes))
            # Chunks never cross tensors, because each tensor may be in another file.
            for begin in range(0, tensor.rows, step):
                end = min(begin + step, tensor.rows)
                offsets = tuple((before + begin) * nbytes for nbytes in self.row_bytes)
                yield _Chunk(self, buffers, offsets, tensor, begin, end)
            before += tensor.rows


@dataclass(frozen=True, slots=True)
class _Chunk:
    target: _Target
    buffers: tuple[Buffer, ...]
    offsets: tuple[int, ...]
    tensor: Tensor
    begin: int
    end: int

    @property
    def file_rows(self) -> FileRows | None:
        return self.target.rows_of(self.tensor)

    def planes(self) -> Planes:
        return self.target.planes(self.tensor, self.begin, self.end)


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """A chunk that a thread prepares, and the window with its values; None for converted values."""

    chunk: _Chunk
    planes: asyncio.Future[Planes]
    window: NDArray[np.uint8] | None


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A copy of a window in flight, alone in its stream."""

    stream: Stream
    window: NDArray[np.uint8]
    size_bytes: int


def size_bytes(checkpoint: Checkpoint, *, packed: bool = True, positions: int) -> int:
    """Return the card memory that `load_weights` takes, rounded like a card rounds allocations, to size a lease."""
    # Small allocations share pages; large ones are rounded up to whole pages of their own.
    own = shared = 0
    for size in _buffer_sizes(checkpoint, packed, positions):
        if size > SHARING_BYTES:
            own += -(-size // PAGE_BYTES) * PAGE_BYTES
        else:
            shared += -(-size // STEP_BYTES) * STEP_BYTES
    return own + (-(-shared // PAGE_BYTES) + 1) * PAGE_BYTES


async def load_weights(
    session: GpuSession,
    checkpoint: Checkpoint,
    *,
    packed: bool = True,
    positions: int,
    progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Load a model. On any failure, all buffers are freed.

    Args:
        session: The session that gets the weights into its memory.
        checkpoint: The model.
        packed: Leave weights of a type in PACKED as they are if all weights that are fused into one linear have that
            type. Otherwise they become bf16.
        positions: Positions of the tables of cosines and sines.
        progress: Called after every chunk with the bytes that are on the card and the bytes in all.

    Raises AllocFailed if the lease has no room for the model, ModelRejected for a file that became shorter, and the
    session's errors.
    """
    # Refuse a lease that is too small before the first byte is read: a large model takes minutes.
    wanted = size_bytes(checkpoint, packed=packed, positions=positions)
    if wanted > session.slice_bytes:
        raise AllocFailed(
            f"{checkpoint.name} takes {wanted:,} bytes; the lease has {session.slice_bytes:,}",
            "Acquire a lease of at least the model's bytes, and those of its sequences",
        )
    # A request for memory takes a card's driver some 0.1 ms, so files are read and copied meanwhile.
    loader = _Loader(session, progress, sum(_buffer_sizes(checkpoint, packed, positions)))
    filling = asyncio.ensure_future(loader.fill())
    try:
        weights = await loader.load(checkpoint, packed, positions, wanted)
        await filling
    except BaseException:
        filling.cancel()
        await asyncio.wait([filling])
        # Retrieve its error: if both failed, only the first failure is raised.
        if not filling.cancelled():
            filling.exception()
        await loader.free()
        raise
    return weights


class _Loader:
    """A load in progress: the buffers that were allocated, and the chunks that are still to be copied."""

    def __init__(self, session: GpuSession, progress: Callable[[int, int], None] | None, total_bytes: int) -> None:
        self._session = session
        self._progress = progress
        self._buffers: list[Buffer] = []
        # The chunks of each target whose buffers are allocated; None behind the last one.
        self._chunks: asyncio.Queue[Iterator[_Chunk] | None] = asyncio.Queue()
        # Free windows, of WINDOW_BYTES each. There are as many as chunks ahead, and those being copied.
        self._windows: list[NDArray[np.uint8]] = []
        # Copies of windows in flight, the oldest first, and the streams without one.
        self._copies: deque[_Copy] = deque()
        self._streams: list[Stream] = []
        self._total_bytes, self._done_bytes = total_bytes, 0

    async def load(self, checkpoint: Checkpoint, packed: bool, positions: int, size: int) -> ModelWeights:
        """Allocate all buffers, and queue the chunks that fill them."""
        config = checkpoint.config
        # The embedding is always bf16: a row of it is looked up, not multiplied.
        embedding = (await self._make(_bf16_of(checkpoint.tensor(EMBEDDING))))[0]
        layers = tuple([await self._layer(checkpoint, layer, packed) for layer in range(config.layers)])
        norm = (await self._make(_f32_of(checkpoint.tensor(NORM))))[0]
        # A tied head reads the embedding's buffer, so its weights are loaded once, and stay bf16.
        if config.is_tied:
            head = Linear(Layout.BF16, config.vocabulary, config.width, (embedding,))
        else:
            head = await self._linear(_linear_of((checkpoint.tensor(HEAD),), packed))
        # The tables are small and computed here, so they are written at once.
        rotation, local_tables = checkpoint.rotation(positions), None
        cosines, sines = await self._tables(config, positions, partial(rotary_tables, config, rotation))
        if config.local_rope_theta is not None:
            local_tables = await self._tables(config, positions, partial(local_rotary_tables, config))
        self._chunks.put_nowait(None)
        return ModelWeights(config, embedding, layers, norm, head, cosines, sines, size, local_tables)

    async def fill(self) -> None:
        """Copy all chunks, in order, as `load` queues them, while threads prepare up to AHEAD more."""
        ahead: deque[_Made] = deque()
        try:
            while (chunks := await self._chunks.get()) is not None:
                for chunk in chunks:
                    # Keep AHEAD chunks in preparation while the oldest one is copied; copies begin in order.
                    ahead.append(self._begin(chunk))
                    if len(ahead) > AHEAD:
                        await self._write(ahead.popleft())
            while ahead:
                await self._write(ahead.popleft())
            while self._copies:
                self._streams.append(await self._end_copy())
        finally:
            for made in ahead:
                # After a failure, retrieve the other threads' errors: only the first one is raised.
                if not made.planes.cancel() and not made.planes.cancelled():
                    made.planes.exception()
            await self._end_copies()

    async def _end_copies(self) -> None:
        """Wait for the copies that a failure has left in flight, and free the streams and the windows."""
        for stream in [copy.stream for copy in self._copies] + self._streams:
            # The failure itself is raised already. A session that is lost has nothing in flight.
            with suppress(GpuLeaseError):
                await stream.sync()
                await stream.close()
        self._copies.clear()
        self._streams.clear()
        # Free their room in the arena.
        self._windows.clear()

    async def free(self) -> None:
        """Free all buffers. Errors are ignored, because a lost session has freed them already."""
        for buffer in self._buffers:
            with suppress(GpuLeaseError):
                await self._session.mem_free(buffer)

    # --- what to allocate ---

    async def _layer(self, checkpoint: Checkpoint, layer: int, packed: bool) -> LayerWeights:
        # The same targets as `size_bytes` counted, so the lease's size and the load can't disagree.
        parts = _layer_targets(checkpoint, layer, packed)

        async def vector(name: str) -> Buffer | None:
            return (await self._make(parts[name]))[0] if name in parts else None

        attention_norm, inner_norm = await vector("attention_norm"), await vector("inner_norm")
        assert attention_norm is not None
        assert inner_norm is not None
        return LayerWeights(
            attention_norm=attention_norm,
            qkv=await self._linear(parts["qkv"]),
            qkv_bias=await vector("qkv_bias"),
            q_norm=await vector("q_norm"),
            k_norm=await vector("k_norm"),
            output=await self._linear(parts["output"]),
            inner_norm=inner_norm,
            gate_up=await self._linear(parts["gate_up"]),
            down=await self._linear(parts["down"]),
            attention_outer_norm=await vector("attention_outer_norm"),
            inner_outer_norm=await vector("inner_outer_norm"),
            router=await self._linear(parts["router"]) if "router" in parts else None,
        )

    async def _linear(self, target: _Target) -> Linear:
        # All tensors of a packed target have one type (`_linear_of`), so the first one's decides the layout.
        first = target.tensors[0]
        layout = PACKED[first.kind] if target.planes is _packed else Layout.BF16
        return Linear(layout, target.rows, first.columns, await self._make(target))

    async def _make(self, target: _Target) -> tuple[Buffer, ...]:
        buffers = tuple([await self._alloc(size) for size in target.sizes])
        self._chunks.put_nowait(target.chunks(buffers))
        return buffers

    async def _alloc(self, size: int) -> Buffer:
        buffer = await self._session.mem_alloc(size)
        self._buffers.append(buffer)
        return buffer

    # --- copies ---

    def _begin(self, chunk: _Chunk) -> "_Made":
        """Start a thread that prepares a chunk's values, in a window if they are copied unchanged."""
        rows = chunk.file_rows
        if rows is None:
            return _Made(chunk, asyncio.ensure_future(asyncio.to_thread(chunk.planes)), None)
        # Reuse a free window. A single row can be larger than WINDOW_BYTES, and then needs a larger one.
        size = (chunk.end - chunk.begin) * chunk.target.row_bytes[0]
        has_room = self._windows and self._windows[-1].nbytes >= size
        window = self._windows.pop() if has_room else self._session.empty(max(size, WINDOW_BYTES), np.uint8)

        def read() -> Planes:
            # In a thread: page faults and the copy release the interpreter's lock.
            rows.fill(chunk.begin, window[:size])
            return (window[:size], *chunk.planes()[1:])

        return _Made(chunk, asyncio.ensure_future(asyncio.to_thread(read)), window)

    async def _write(self, made: "_Made") -> None:
        chunk, planes = made.chunk, await made.planes
        in_stream = made.window is not None and planes[0].nbytes >= IN_STREAM_FROM_BYTES
        copies = list(zip(chunk.buffers, chunk.offsets, planes, strict=True))
        for buffer, offset, plane in copies[in_stream:]:
            await self._copy(buffer, offset, plane)
        if made.window is None:
            return
        if not in_stream:
            self._windows.append(made.window)
            return
        # Each copy in flight has a stream, because a wait for a stream waits for all of its copies.
        if self._streams:
            stream = self._streams.pop()
        elif len(self._copies) < COPIES:
            stream = await self._session.stream()
        else:
            stream = await self._end_copy()
        # From here on `_end_copies` waits for the copy, even if this call is cancelled.
        buffer, offset, values = copies[0]
        self._copies.append(_Copy(stream, made.window, values.nbytes))
        await self._session.mem_write(buffer, offset, values, stream)

    async def _end_copy(self) -> Stream:
        """Wait for the oldest copy in flight; returns its stream."""
        copy = self._copies[0]
        await copy.stream.sync()
        # The card no longer reads the window, so a later chunk may use it.
        self._windows.append(copy.window)
        self._copies.popleft()
        self._count(copy.size_bytes)
        return copy.stream

    async def _tables(self, config: ModelConfig, positions: int, made: _TablesMaker) -> tuple[Buffer, Buffer]:
        """Allocate tables of cosines and sines, and fill them by `made`, which has positions [begin, end)."""
        size = _table_bytes(config, positions)
        buffers = await self._alloc(size), await self._alloc(size)
        # In chunks: the f64 intermediates of a long context would take several times the tables' memory.
        step = max(1, CHUNK_BYTES // (config.head_width // 2 * 8))
        for begin in range(0, positions, step):
            for buffer, table in zip(buffers, made(begin, min(begin + step, positions)), strict=True):
                await self._copy(buffer, begin * table.shape[1] * 4, table)
        return buffers

    async def _copy(self, buffer: Buffer, offset: int, values: NDArray[Any]) -> None:
        await self._session.mem_write(buffer, offset, values)
        self._count(values.nbytes)

    def _count(self, size_bytes: int) -> None:
        """Report bytes that are on the card now."""
        self._done_bytes += size_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


# --- from tensors to targets ---


def _buffer_sizes(checkpoint: Checkpoint, packed: bool, positions: int) -> list[int]:
    sizes = [size for target in _model_targets(checkpoint, packed) for size in target.sizes]
    pairs = 1 if checkpoint.config.local_rope_theta is None else 2
    return sizes + 2 * pairs * [_table_bytes(checkpoint.config, positions)]


def _model_targets(checkpoint: Checkpoint, packed: bool) -> Iterator[_Target]:
    config = checkpoint.config
    yield _bf16_of(checkpoint.tensor(EMBEDDING))
    for layer in range(config.layers):
        yield from _layer_targets(checkpoint, layer, packed).values()
    yield _f32_of(checkpoint.tensor(NORM))
    if not config.is_tied:
        yield _linear_of((checkpoint.tensor(HEAD),), packed)


def _layer_targets(checkpoint: Checkpoint, layer: int, packed: bool) -> dict[str, _Target]:
    config, at = checkpoint.config, layer_prefix(layer)

    def tensors(*names: str) -> tuple[Tensor, ...]:
        return tuple(checkpoint.tensor(f"{at}{name}") for name in names)

    # Behind attention, Gemma 3 has the outer norm by the name that other families' inner norm has.
    inner_norm = "pre_feedforward_layernorm.weight" if config.has_outer_norms else "post_attention_layernorm.weight"
    parts, inner = [part for part, _ in feed_forward_parts(config, layer)], ("gate", "up")
    # Experts have kernels for bf16 alone.
    packed_inner = packed and config.experts_of(layer) is None
    targets = {
        "attention_norm": _f32_of(*tensors("input_layernorm.weight")),
        "qkv": _linear_of(tensors(*(f"self_attn.{name}_proj.weight" for name in "qkv")), packed),
        "output": _linear_of(tensors("self_attn.o_proj.weight"), packed),
        "inner_norm": _f32_of(*tensors(inner_norm)),
        "gate_up": _linear_of(
            tensors(*(f"{part}{name}_proj.weight" for part in parts for name in inner)), packed_inner
        ),
        "down": _linear_of(tensors(*(f"{part}down_proj.weight" for part in parts)), packed_inner),
    }
    if config.experts_of(layer) is not None:
        targets["router"] = _bf16_of(*tensors(ROUTER))
    if config.has_outer_norms:
        targets["attention_outer_norm"] = _f32_of(*tensors("post_attention_layernorm.weight"))
        targets["inner_outer_norm"] = _f32_of(*tensors("post_feedforward_layernorm.weight"))
    if config.has_bias:
        targets["qkv_bias"] = _f32_of(*tensors(*(f"self_attn.{name}_proj.bias" for name in "qkv")))
    if config.has_head_norm:
        targets["q_norm"] = _f32_of(*tensors("self_attn.q_norm.weight"))
        targets["k_norm"] = _f32_of(*tensors("self_attn.k_norm.weight"))
    return targets


def _linear_of(tensors: tuple[Tensor, ...], packed: bool) -> _Target:
    # Tensors that are fused into one linear have one kernel, so they stay packed only if all have the same packed type.
    kinds = {tensor.kind for tensor in tensors}
    kind = kinds.pop()
    if not packed or kinds or kind not in PACKED:
        return _bf16_of(*tensors)
    return _Target(plane_bytes(kind, tensors[0].columns), tensors, _packed, is_as_read=kind is TensorType.FP8)


def _bf16_of(*tensors: Tensor) -> _Target:
    # Rows that are bf16 in the file need no conversion, so they are copied as they are.
    is_as_read = all(tensor.kind is TensorType.BF16 for tensor in tensors)
    return _Target((tensors[0].columns * 2,), tensors, _bf16, is_as_read)


def _f32_of(*tensors: Tensor) -> _Target:
    """Return the target of vectors that are placed one after the other.

    Each value counts as a row, so that vectors of different lengths fit into one buffer.
    """
    as_rows = tuple(Tensor(t.name, (t.columns, 1), t.kind, t.read) for t in tensors)
    return _Target((4,), as_rows, _f32_vector, is_as_read=False)


def _packed(tensor: Tensor, begin: int, end: int) -> Planes:
    return tensor.planes(begin, end)


def _bf16(tensor: Tensor, begin: int, end: int) -> Planes:
    return (tensor.bf16(begin, end),)


def _f32_vector(tensor: Tensor, begin: int, end: int) -> Planes:
    return (tensor.f32(0, 1)[0, begin:end],)


def _table_bytes(config: ModelConfig, positions: int) -> int:
    return positions * (config.head_width // 2) * 4
