"""Loads a checkpoint into a session's memory, in the layouts that the kernels read.

All weights are planes of one allocation, because a card's driver takes up to a millisecond for each allocation. The
content of the allocation is the image (`_CardImage`). The planes that have the same bytes as the file come first in the
image, one after another, and are filled through a few windows. A window is an array of the session's arena, from which
the card copies directly. Several threads fill a window in parallel, each one part, from the page cache. The card copies
two windows at the same time, each in a separate stream, so that the bus never waits for the host. The same threads
convert everything else (norms, tables, weights in other encodings), which is then written from ordinary memory. So,
apart from the page cache, the host's memory never contains more of the model than a few windows and chunks.
"""

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from queue import SimpleQueue
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
from gpulease.client.decode.checkpoint.weights import LayerWeights, Layout, Linear, ModelWeights, Plane
from gpulease.client.errors import AllocFailed, GpuLeaseError
from gpulease.client.handles import Buffer

CHUNK_BYTES: Final = 8 << 20
"""Size, on the card, of the converted rows that one job writes: large enough to make the fixed cost of a copy small,
small enough for a smooth progress bar."""

WINDOW_BYTES: Final = 16 << 20
"""Size of a window. A card's bus copies it in about 0.35 ms. With larger windows, the threads and the card wait longer
for each other (H200's host, 2.5 GB: 6 windows of 16 MiB take 81 to 101 ms, 4 of 32 MiB 119 to 135)."""

PART_BYTES: Final = 4 << 20
"""Size of the part of a window that one thread fills: large enough that little time is spent waiting for the
interpreter's lock, small enough that a window is soon full (parts of 8 MiB take a fifth longer)."""

COPIES: Final = 2
"""Number of windows that the card copies at the same time. While the host waits for the first, the card continues with
the second."""

WINDOWS: Final = 6
"""Number of windows: the card copies some while threads fill the others. The first use of each costs the host new
pages, which the card's driver must register.
"""

READERS: Final = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
"""Number of threads that read and convert. If all copy from the page cache, each reaches 5 GB/s, and a card's bus
carries 50; 12 threads load no faster."""

ALIGNMENT_BYTES: Final = 256
"""Alignment of planes in the image, the same as of a card's allocations (CUDA C++ Programming Guide, "Device Memory
Accesses")."""

PAGE_BYTES: Final = 2 << 20
"""Page size of the card's memory. Allocations of more than 1 MiB take whole pages."""

Planes = tuple[NDArray[Any], ...]


@dataclass(frozen=True, slots=True)
class _SourceSection:
    """Rows of a target that come from one tensor.

    Attributes:
        rows: The number of rows.
        planes: Returns rows [begin, end) as values for each of the target's planes.
        file_rows: The rows in a file, if the first plane has the same bytes as the file.
    """

    rows: int
    planes: Callable[[int, int], Planes]
    file_rows: FileRows | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """Planes of the image, and the rows that fill them, one section after another.

    Attributes:
        row_bytes: Size of a row in each plane.
        sections: The rows.
        layout: The layout of a linear's planes.
        columns: The number of columns of a linear.
    """

    row_bytes: tuple[int, ...]
    sections: tuple[_SourceSection, ...]
    layout: Layout = Layout.BF16
    columns: int = 0

    @property
    def rows(self) -> int:
        return sum(section.rows for section in self.sections)

    def is_of_file(self, plane: int) -> bool:
        """Return whether a plane has the same bytes as a file."""
        return plane == 0 and all(section.file_rows is not None for section in self.sections)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a file's rows, which a thread copies from byte `begin` of the rows to byte `at` of a window."""

    file_rows: FileRows
    begin: int
    at: int
    size_bytes: int


@dataclass(slots=True)
class _Window:
    """A range of the image that is filled through a window, and its parts, which threads fill."""

    offset: int
    size_bytes: int = 0
    parts: list[_Part] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of a section that must be converted, and their places in the image."""

    section: _SourceSection
    begin: int
    end: int
    offsets: tuple[int, ...]

    def values(self) -> list[tuple[int, NDArray[Any]]]:
        """Return the values of each plane that is not copied from a window, with their places."""
        planes = self.section.planes(self.begin, self.end)
        converted = slice(self.section.file_rows is not None, None)
        return list(zip(self.offsets[converted], planes[converted], strict=True))


class _CardImage:
    """The content of the allocation that holds a model: the place of each plane, and the source that fills it.

    Attributes:
        size_bytes: Size of the allocation.
        filled_bytes: Number of bytes that a load writes: everything but the gaps between planes.
    """

    def __init__(self, checkpoint: Checkpoint, packed: bool, positions: int) -> None:
        config = self._config = checkpoint.config
        # The embedding is always bf16: its rows are looked up, not multiplied.
        self._embedding = _bf16_of(checkpoint.tensor(EMBEDDING))
        self._layers = [_layer_targets(checkpoint, layer, packed) for layer in range(config.layers)]
        self._norm = _f32_of(checkpoint.tensor(NORM))
        # A tied head reads the embedding's plane, so its weights are loaded once, and stay bf16.
        self._head = None if config.is_tied else _linear_of((checkpoint.tensor(HEAD),), packed)
        # The cosines and sines; then those of layers with a window, if they have a different base.
        rotation = cache(lambda: checkpoint.rotation(positions))
        makers: list[Callable[[int, int], Planes]] = [lambda begin, end: rotary_tables(config, rotation(), begin, end)]
        if config.local_rope_theta is not None:
            makers.append(partial(local_rotary_tables, config))
        row_bytes = config.head_width // 2 * 4
        self._tables = [_Target((row_bytes, row_bytes), (_SourceSection(positions, maker),)) for maker in makers]
        self._place()

    def _place(self) -> None:
        """Assign an offset to each plane: first to planes with the same bytes as a file, then to all other planes."""
        layers = (target for layer in self._layers for target in layer.values())
        head = () if self._head is None else (self._head,)
        self._targets = (self._embedding, *layers, self._norm, *head, *self._tables)
        planes = [(target, plane) for target in self._targets for plane in range(len(target.row_bytes))]
        planes.sort(key=lambda pair: not pair[0].is_of_file(pair[1]))
        self._offsets: dict[tuple[_Target, int], int] = {}
        self.filled_bytes = end = 0
        for target, plane in planes:
            self._offsets[target, plane] = at = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            size = target.rows * target.row_bytes[plane]
            self.filled_bytes += size
            end = at + size
        self.size_bytes = end

    def weights(self, buffer: Buffer, size_bytes: int) -> ModelWeights:
        """Return the handles of the model in the allocation `buffer`."""

        def planes(target: _Target) -> tuple[Plane, ...]:
            return tuple(
                Plane(buffer, self._offsets[target, plane], target.rows * nbytes)
                for plane, nbytes in enumerate(target.row_bytes)
            )

        def linear(target: _Target) -> Linear:
            return Linear(target.layout, target.rows, target.columns, planes(target))

        def layer(targets: dict[str, _Target]) -> LayerWeights:
            def vector(name: str) -> Plane | None:
                return planes(targets[name])[0] if name in targets else None

            attention_norm, inner_norm = vector("attention_norm"), vector("inner_norm")
            assert attention_norm is not None
            assert inner_norm is not None
            return LayerWeights(
                attention_norm=attention_norm,
                qkv=linear(targets["qkv"]),
                qkv_bias=vector("qkv_bias"),
                q_norm=vector("q_norm"),
                k_norm=vector("k_norm"),
                output=linear(targets["output"]),
                inner_norm=inner_norm,
                gate_up=linear(targets["gate_up"]),
                down=linear(targets["down"]),
                attention_outer_norm=vector("attention_outer_norm"),
                inner_outer_norm=vector("inner_outer_norm"),
                router=linear(targets["router"]) if "router" in targets else None,
            )

        config, (embedding,) = self._config, planes(self._embedding)
        tied = Linear(Layout.BF16, config.vocabulary, config.width, (embedding,))
        (cosines, sines), *local = map(planes, self._tables)
        return ModelWeights(
            config,
            embedding,
            tuple(map(layer, self._layers)),
            planes(self._norm)[0],
            tied if self._head is None else linear(self._head),
            cosines,
            sines,
            size_bytes,
            (local[0][0], local[0][1]) if local else None,
        )

    def windows(self) -> Iterator[_Window]:
        """Yield the ranges that are copied from windows, in the image's order."""
        runs = sorted(self._file_runs(), key=lambda run: run[0])
        window: _Window | None = None
        for offset, rows, size in runs:
            position = 0
            while position < size:
                # If the window is full, or ends at a gap, begin another one.
                if (
                    window is None
                    or window.size_bytes == WINDOW_BYTES
                    or window.offset + window.size_bytes != (offset + position)
                ):
                    if window is not None:
                        yield window
                    window = _Window(offset + position)
                part = min(PART_BYTES, size - position, WINDOW_BYTES - window.size_bytes)
                window.parts.append(_Part(rows, position, window.size_bytes, part))
                window.size_bytes += part
                position += part
        if window is not None:
            yield window

    def _file_runs(self) -> Iterator[tuple[int, FileRows, int]]:
        """Yield the place and the size of each section that is copied from a window."""
        for target in self._targets:
            at = self._offsets[target, 0]
            for section in target.sections:
                size = section.rows * target.row_bytes[0]
                if section.file_rows is not None:
                    yield at, section.file_rows, size
                at += size

    def converted(self) -> Iterator[list[_Chunk]]:
        """Yield the chunks to convert, in lists of a single chunk or of at most CHUNK_BYTES together."""
        chunks: list[_Chunk] = []
        size = 0
        for target in self._targets:
            before = 0
            for section in target.sections:
                is_of_file = section.file_rows is not None
                nbytes = sum(target.row_bytes[is_of_file:])
                step = max(1, CHUNK_BYTES // nbytes) if nbytes else section.rows
                for begin in range(0, section.rows if nbytes else 0, step):
                    end = min(begin + step, section.rows)
                    if chunks and size + (end - begin) * nbytes > CHUNK_BYTES:
                        yield chunks
                        chunks, size = [], 0
                    places = enumerate(target.row_bytes)
                    offsets = tuple(self._offsets[target, plane] + (before + begin) * one for plane, one in places)
                    chunks.append(_Chunk(section, begin, end, offsets))
                    size += (end - begin) * nbytes
                before += section.rows
        if chunks:
            yield chunks


def size_bytes(checkpoint: Checkpoint, *, packed: bool = True, positions: int) -> int:
    """Return how many bytes of the card's memory `load_weights` needs, to size a lease."""
    return _page_bytes(_CardImage(checkpoint, packed, positions))


def _page_bytes(image: _CardImage) -> int:
    # Add one page, which the card's driver takes for the streams of the copies.
    return (-(-image.size_bytes // PAGE_BYTES) + 1) * PAGE_BYTES


async def load_weights(
    session: GpuSession,
    checkpoint: Checkpoint,
    *,
    packed: bool = True,
    positions: int,
    progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """Load a model. After any failure, its memory is freed.

    Args:
        session: The session into whose memory the weights are loaded.
        checkpoint: The model.
        packed: Whether weights of a type in PACKED stay packed, provided that all weights that are fused into one
            linear have that type. Other weights become bf16.
        positions: Number of positions in the tables of cosines and sines.
        progress: Called after every copy with the number of bytes loaded so far and the total number.

    Raises AllocFailed if the lease has no room for the model, ModelRejected for a file that became shorter, and the
    session's errors.
    """
    # Refuse a lease that is too small before reading anything, because reading a large model takes minutes. Make the
    # image in a thread: with thousands of tensors, it would otherwise delay the steps of other models.
    image = await asyncio.to_thread(_CardImage, checkpoint, packed, positions)
    image_bytes = _page_bytes(image)
    if image_bytes > session.slice_bytes:
        raise AllocFailed(
            f"{checkpoint.name} needs {image_bytes:,} bytes, but the lease has {session.slice_bytes:,}",
            "Acquire a lease with room for the model's bytes and those of its sequences",
        )
    buffer = await session.mem_alloc(image.size_bytes)
    loader = _Loader(session, buffer, image, progress)
    try:
        await loader.fill()
    except BaseException:
        # A lost session has already freed the buffer.
        with suppress(GpuLeaseError):
            await session.mem_free(buffer)
        raise
    finally:
        loader.close()
    return image.weights(buffer, image_bytes)


class _Readers:
    """Threads that fill windows and convert rows, for one load."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._steps: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_closed = False
        # Use daemon threads: a thread that waits for a disk must not keep the program from exiting.
        for _ in range(READERS):
            threading.Thread(target=self._work, name="gpulease-reader", daemon=True).start()

    def run(self, steps: Sequence[Callable[[], Any]]) -> "asyncio.Future[list[Any]]":
        """Run one or more steps in parallel. The future gets their results, or one step's error."""
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        results: list[Any] = [None] * len(steps)
        errors: list[BaseException] = []
        is_last = [True] + [False] * (len(steps) - 1)

        def run_one(number: int) -> None:
            try:
                results[number] = steps[number]()
            except BaseException as error:  # raised where the future is awaited
                errors.append(error)
            # A list's pop is atomic, so only the thread that finished the last step gets the first item.
            if is_last.pop():
                # The loop may have been closed by now.
                with suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(end)

        def end() -> None:
            if future.done():
                return
            if errors:
                future.set_exception(errors[0])
            else:
                future.set_result(results)

        for number in range(len(steps)):
            self._steps.put(partial(run_one, number))
        return future

    def close(self) -> None:
        """End the threads after their current steps."""
        self._is_closed = True
        for _ in range(READERS):
            self._steps.put(None)

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            if not self._is_closed:
                step()


@dataclass(frozen=True, slots=True, eq=False)
class _ReadJob:
    """A job of the readers: it fills a window, or converts values."""

    done: "asyncio.Future[list[Any]]"
    window: _Window | None = None
    memory: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A window's copy in flight. No other copy uses its stream."""

    stream: Stream
    memory: NDArray[np.uint8]
    size_bytes: int


class _Loader:
    """Fills one image: threads prepare windows of host memory, and the card copies these in order."""

    def __init__(
        self, session: GpuSession, buffer: Buffer, image: _CardImage, progress: Callable[[int, int], None] | None
    ) -> None:
        self._session = session
        self._buffer = buffer
        self._image = image
        self._progress = progress
        self._readers = _Readers()
        # The readers' jobs, the oldest first.
        self._jobs: deque[_ReadJob] = deque()
        # Windows that neither the readers nor the card use.
        self._free: list[NDArray[np.uint8]] = []
        # The copies in flight, the oldest first, and the streams without a copy.
        self._copies: deque[_Copy] = deque()
        self._streams: list[Stream] = []
        self._loaded_bytes = 0

    async def fill(self) -> None:
        """Fill the image, in order, while the readers prepare the next jobs."""
        works: Iterator[_Window | list[_Chunk]] = chain(self._image.converted(), self._image.windows())
        try:
            for work in works:
                # Windows that the card is using can't be filled, and converted values take memory, so limit the jobs.
                max_jobs = WINDOWS - COPIES if isinstance(work, _Window) else READERS
                while len(self._jobs) >= max_jobs:
                    await self._write(self._jobs.popleft())
                self._jobs.append(self._start_job(work))
            while self._jobs:
                await self._write(self._jobs.popleft())
            while self._copies:
                self._streams.append(await self._finish_copy())
        finally:
            await self._drain_copies()

    def close(self) -> None:
        """End the readers, and drop the jobs that they have not finished."""
        self._readers.close()
        for job in self._jobs:
            # After a failure, retrieve the other jobs' errors, because only the first is raised.
            if not job.done.cancel() and not job.done.cancelled():
                job.done.exception()
        self._jobs.clear()

    async def _drain_copies(self) -> None:
        """Wait for the copies that a failure has left in flight, and free the streams and the windows."""
        for stream in [copy.stream for copy in self._copies] + self._streams:
            # Ignore errors: the original failure is being raised, and a lost session has nothing in flight.
            with suppress(GpuLeaseError):
                await stream.sync()
                await stream.close()
        self._copies.clear()
        self._streams.clear()
        # This frees the windows' memory in the arena.
        self._free.clear()

    def _start_job(self, work: _Window | list[_Chunk]) -> _ReadJob:
        """Give the readers the parts of a window, or chunks to convert."""
        if not isinstance(work, _Window):
            return _ReadJob(self._readers.run([lambda: [value for chunk in work for value in chunk.values()]]))
        memory = self._free.pop() if self._free else self._session.empty(WINDOW_BYTES, np.uint8)
        steps = [
            partial(part.file_rows.fill, part.begin, memory[part.at : part.at + part.size_bytes]) for part in work.parts
        ]
        # Let the kernel read ahead, for files that are not in the page cache.
        first = work.parts[0]
        steps.append(partial(first.file_rows.read_ahead, first.begin, work.size_bytes))
        return _ReadJob(self._readers.run(steps), work, memory)

    async def _write(self, job: _ReadJob) -> None:
        results = await job.done
        if job.window is None or job.memory is None:
            for offset, values in results[0]:
                await self._session.mem_write(self._buffer, offset, values)
                self._count(values.nbytes)
            return
        # Each copy in flight needs a separate stream, because waiting for a stream waits for all of its copies.
        if self._streams:
            stream = self._streams.pop()
        elif len(self._copies) < COPIES:
            stream = await self._session.stream()
        else:
            stream = await self._finish_copy()
        # From here on `_drain_copies` waits for the copy, even if this call is cancelled.
        self._copies.append(_Copy(stream, job.memory, job.window.size_bytes))
        values = job.memory[: job.window.size_bytes]
        await self._session.mem_write(self._buffer, job.window.offset, values, stream)

    async def _finish_copy(self) -> Stream:
        """Wait for the oldest copy in flight. Returns its stream."""
        copy = self._copies[0]
        await copy.stream.sync()
        # The card no longer reads the window, so it may be filled again.
        self._free.append(copy.memory)
        self._copies.popleft()
        self._count(copy.size_bytes)
        return copy.stream

    def _count(self, size_bytes: int) -> None:
        """Count `size_bytes` that are now on the card, and report the progress."""
        self._loaded_bytes += size_bytes
        if self._progress is not None:
            self._progress(self._loaded_bytes, self._image.filled_bytes)


# --- from tensors to targets ---


def _layer_targets(checkpoint: Checkpoint, layer: int, packed: bool) -> dict[str, _Target]:
    config, at = checkpoint.config, layer_prefix(layer)

    def tensors(*names: str) -> tuple[Tensor, ...]:
        return tuple(checkpoint.tensor(f"{at}{name}") for name in names)

    # In Gemma 3, the outer norm of attention has the name of the inner norm in other families.
    inner_norm = "pre_feedforward_layernorm.weight" if config.has_outer_norms else "post_attention_layernorm.weight"
    parts, inner = [part for part, _ in feed_forward_parts(config, layer)], ("gate", "up")
    # Experts have kernels only for bf16.
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
    columns = tensors[0].columns
    # FP8's values have the same bytes in the file as on the card.
    sections = tuple(
        _SourceSection(part.rows, part.planes, _file_rows(part) if kind is TensorType.FP8 else None) for part in tensors
    )
    return _Target(plane_bytes(kind, columns), sections, PACKED[kind], columns)


def _bf16_of(*tensors: Tensor) -> _Target:
    def section(tensor: Tensor) -> _SourceSection:
        # Rows that are bf16 in the file are copied without conversion.
        file_rows = _file_rows(tensor) if tensor.kind is TensorType.BF16 else None
        return _SourceSection(tensor.rows, lambda begin, end: (tensor.bf16(begin, end),), file_rows)

    columns = tensors[0].columns
    return _Target((columns * 2,), tuple(map(section, tensors)), columns=columns)


def _file_rows(tensor: Tensor) -> FileRows | None:
    return tensor.read if isinstance(tensor.read, FileRows) else None


def _f32_of(*tensors: Tensor) -> _Target:
    """Return the target of vectors that are placed one after another.

    Each value counts as a row, so that vectors of different lengths fit into one plane.
    """

    def section(tensor: Tensor) -> _SourceSection:
        return _SourceSection(tensor.columns, lambda begin, end: (tensor.f32(0, 1)[0, begin:end],))

    return _Target((4,), tuple(map(section, tensors)))
