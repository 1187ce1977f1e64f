"""Rates at which a model's files reach the card: from the page cache, and cold, compared with copies of memory.

    python -m gpulease.client.bench.checkpoint_load PATH|SHAPE

PATH is a model's folder or GGUF file. For a SHAPE of decode_shapes, a folder of random weights is written to the folder
for temporary files, and deleted afterwards. Uses the running daemon, or a private one. Prints one JSON object per
figure; `cpu_s` is this process's CPU time. A cold file is one that the kernel was asked to drop from its cache
(posix_fadvise(2), POSIX_FADV_DONTNEED). The kernel may decline, and always does on a file system in memory.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from gpulease.client.aio import Buffer, GpuBuilder, GpuLease, GpuSession
from gpulease.client.aio.driver import AsyncOpening
from gpulease.client.bench.decode_shapes import SHAPES
from gpulease.client.bench.figures import print_figures
from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.decode import ModelConfig, RandomCheckpoint, open_model
from gpulease.client.decode.checkpoint import Checkpoint
from gpulease.client.decode.checkpoint.model_tensors import model_tensors
from gpulease.client.decode.checkpoint.tensor_file import TensorFile
from gpulease.client.decode.checkpoint.weight_loader import WINDOW_BYTES, load_weights, size_bytes

COPIED_BYTES: Final = 1 << 30
ARENA_BYTES: Final = 1 << 28
"""Size of an array in the arena, which has 1 GiB for all arrays."""

READERS: Final = (1, 4, 8)
ROUNDS: Final = 3
LEASE_S: Final = 600
POSITIONS: Final = 128
ROWS_AT_ONCE: Final = 4096

FAMILIES: Final = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


async def measure(address: str, path: Path) -> None:
    """Print the rates of copies, loads from warm and from cold files, and reads of a model's largest file."""
    checkpoint = open_model(path)
    await _print_copies(address)
    # Prepare the cache before each round, because the previous load has filled it.
    for state in ("warm", "cold"):
        for _ in range(ROUNDS):
            for file in _files(path):
                _prepare(file, is_cold=state == "cold")
            await _print_load(address, checkpoint, path, state)
    # Do this last: a file just written may be cached in larger pieces than one that was read.
    largest = max(_files(path), key=lambda file: file.stat().st_size)
    if largest.stat().st_size >= WINDOW_BYTES:
        print_reads(largest)


def _lease(address: str, size: int) -> AsyncOpening[GpuLease]:
    return GpuBuilder(address).min_vram(size).lease_secs(LEASE_S).acquire()


def warm_load_figures(address: str, shape: str) -> dict[str, float]:
    """GB/s of loading a shape's files from the page cache, and of copying ordinary memory: the best of ROUNDS."""

    async def measure_both(path: Path) -> dict[str, float]:
        # Read each file once, so that all of it is in the page cache.
        checkpoint = open_model(path)
        moved = sum(file.stat().st_size for file in _files(path))
        for file in _files(path):
            _prepare(file, is_cold=False)
        loads = [await _load_rate(address, checkpoint, path) for _ in range(ROUNDS)]
        # Copy the same number of bytes from ordinary memory: no load can be faster.
        async with _lease(address, moved) as lease, GpuSession(lease) as session:
            buffer, ordinary = await session.mem_alloc(moved), np.ones(moved, np.uint8)
            copies = [await _copy_rate(session, buffer, ordinary) for _ in range(ROUNDS)]
        best = [max(one["gb_per_s"] for one in rates) for rates in (loads, copies)]
        return dict(zip(("gb_per_s", "copy_gb_per_s"), best, strict=True))

    with written(shape) as path:
        return asyncio.run(measure_both(path))


async def _print_copies(address: str) -> None:
    """Print the rates of copies of ordinary memory, and of an array in the arena."""
    async with _lease(address, COPIED_BYTES) as lease, GpuSession(lease) as session:
        buffer = await session.mem_alloc(COPIED_BYTES)
        ordinary, shared = np.ones(COPIED_BYTES, np.uint8), session.empty(ARENA_BYTES, np.uint8)
        # Touch every page, because memory that was never written causes a page fault at its first copy.
        shared[:] = 1
        for name, values in (("ordinary memory", ordinary), ("the arena", shared)):
            figure = {"figure": "mem_write", "of": name, "bytes": values.nbytes}
            print_figures(figure | await _copy_rate(session, buffer, values))


async def _copy_rate(session: GpuSession, buffer: Buffer, values: "np.typing.NDArray[np.uint8]") -> dict[str, float]:
    """Return the rate of one copy to the card, after another one that pins the staging memory."""

    async def write() -> None:
        await session.mem_write(buffer, 0, values)
        await session.sync()

    await write()
    return await _rate(write, values.nbytes)


def print_reads(path: Path) -> None:
    """Print the rates at which threads read a file from the page cache into windows, without a card."""
    _prepare(path, is_cold=False)
    file, size = TensorFile(path), path.stat().st_size // WINDOW_BYTES * WINDOW_BYTES

    def mapped(at: int, window: "np.typing.NDArray[np.uint8]") -> None:
        file.fill(at, window)

    def read(at: int, window: "np.typing.NDArray[np.uint8]") -> None:
        os.preadv(descriptor.fileno(), [window.data], at)

    with path.open("rb", buffering=0) as descriptor:
        for threads in READERS:
            # Read through the mapping, as the loader does, and by preadv(2) for comparison.
            for fill in (mapped, read):
                windows = [np.ones(WINDOW_BYTES, np.uint8) for _ in range(threads)]
                places = range(0, size, WINDOW_BYTES)
                begin_s = time.perf_counter()
                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(lambda at: fill(at, windows[at // WINDOW_BYTES % threads]), places))  # noqa: B023
                rate = size / (time.perf_counter() - begin_s) / 1e9
                print_figures({"figure": "read", "way": fill.__name__, "threads": threads, "gb_per_s": rate})


async def _print_load(address: str, checkpoint: Checkpoint, path: Path, state: str) -> None:
    """Print the rate of one load, on a separate lease."""
    print_figures({"figure": "load", "state": state, **await _load_rate(address, checkpoint, path)})


async def _load_rate(address: str, checkpoint: Checkpoint, path: Path) -> dict[str, float]:
    # A lease of exactly this model's size, as a decoder would take.
    size = size_bytes(checkpoint, positions=POSITIONS)
    async with _lease(address, size) as lease, GpuSession(lease) as session:

        async def load() -> None:
            await load_weights(session, checkpoint, positions=POSITIONS)
            await session.sync()

        moved = sum(file.stat().st_size for file in _files(path))
        return {"bytes": moved} | await _rate(load, moved)


async def _rate(work: Callable[[], Awaitable[None]], size: int) -> dict[str, float]:
    begin_s, cpu_began = time.perf_counter(), time.process_time()
    await work()
    took_s = time.perf_counter() - begin_s
    return {"s": took_s, "gb_per_s": size / took_s / 1e9, "cpu_s": time.process_time() - cpu_began}


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _prepare(path: Path, *, is_cold: bool) -> None:
    """Read a file into the page cache, or ask the kernel to drop it."""
    with path.open("rb", buffering=0) as file:
        if is_cold:
            # A page that was not written back can't be dropped.
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return
        into = bytearray(16 << 20)
        while file.readinto(into):
            pass


@contextlib.contextmanager
def written(shape: str) -> Iterator[Path]:
    """Write a folder of random weights of a shape; it is deleted after the block."""
    checkpoint = RandomCheckpoint(SHAPES[shape], 1)
    with tempfile.TemporaryDirectory(prefix="gpulease-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(_words(checkpoint.config)))
        entries, at = {}, 0
        # Write the header first: each tensor's offset follows from the sizes of the tensors before it.
        for tensor, sizes in model_tensors(checkpoint.config):
            end = at + int(np.prod(sizes)) * 2
            entries[tensor] = {"dtype": "BF16", "shape": sizes, "data_offsets": (at, end)}
            at = end
        header = json.dumps(entries).encode()
        # The header's length must be a multiple of 8 (safetensors).
        header += b" " * (-len(header) % 8)
        with (folder / "model.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for tensor, _ in model_tensors(checkpoint.config):
                # Write some rows at a time, because a tensor of a large shape does not fit in memory twice.
                rows = checkpoint.tensor(tensor)
                for begin in range(0, rows.rows, ROWS_AT_ONCE):
                    file.write(rows.bf16(begin, min(begin + ROWS_AT_ONCE, rows.rows)).data)
        yield folder


def _words(config: ModelConfig) -> dict[str, object]:
    """Return the content of a config.json that describes this shape."""
    return {
        "architectures": [FAMILIES[config.family]],
        "model_type": str(config.family),
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.inner_width,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.is_tied,
    }


def main(words: Sequence[str]) -> None:
    """Print the figures of the model that the argument names."""
    # A shape's files are written to a temporary folder that ends with this block.
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(written(words[0])) if words[0] in SHAPES else Path(words[0])
        address = running_address() or stack.enter_context(private_daemon("auto"))
        asyncio.run(measure(address, path))


if __name__ == "__main__":
    main(sys.argv[1:])
