"""What kernels cost through a lease, beside numpy for the same result in the same run."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

import numpy as np

from gpulease.client import GpuBuilder, GpuLeaseError, GpuSession, KernelArgs
from gpulease.client.bench.figures import percentile, timed_us
from gpulease.client.handles import Buffer, Module

SLICE_BYTES: Final = 64 << 20
SAMPLES: Final = 15
SHORT_SAMPLES: Final = 300
"""Of what takes microseconds."""

IMAGES: Final = 3
"""Loaded in each of two workers."""

MATRIX: Final = 256
TILE: Final = 16
VALUES: Final = 1 << 20
ROWS, COLUMNS = 256, 1024
THREADS: Final = 256
SMALL: Final = 32

Array = np.ndarray[Any, np.dtype[np.float32]]
Figures = dict[str, float]


class WrongResult(GpuLeaseError):
    """A kernel computed something else than numpy."""


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel's launch.

    Attributes:
        operands: The arrays it reads, behind the one it writes.
        numbers: What it takes behind those.
        numpy: The same result, from the same arrays.
        flop: Floating-point operations, if they are what it is about.
    """

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    into: Array
    operands: tuple[Array, ...]
    numbers: tuple[int | float, ...]
    numpy: Callable[[], Array]
    flop: int = 0
    shared_bytes: int = 0
    samples: int = SAMPLES


def kernel_figures(address: str) -> dict[str, Figures]:
    """Milliseconds of each kernel and of numpy, medians; and of loading them, the first time and in other workers."""
    # Images that nobody has seen.
    images = [kernels_ptx() + f"\n// {secrets.token_hex(16)}\n".encode() for _ in range(IMAGES)]
    with _session(address) as session:
        cold = [_load_ms(session, image) for image in images]
    with _session(address) as session:
        again = [_load_ms(session, image) for image in images]
        module = session.module_load(kernels_ptx())
        figures = {name: _measure(session, module, work) for name, work in _works().items()}
    return figures | {
        "load_cold": {"leased_ms": percentile(cold, 50)},
        "load_again": {"leased_ms": percentile(again, 50)},
    }


@contextmanager
def _session(address: str) -> Iterator[GpuSession]:
    """A worker of its own on card 0."""
    wanted = GpuBuilder(address).device("0").min_vram(SLICE_BYTES).lease_secs(600)
    with wanted.acquire() as lease, GpuSession(lease) as session:
        yield session


def _load_ms(session: GpuSession, image: bytes) -> float:
    (span,) = timed_us(lambda: session.module_load(image), 1)
    return span / 1e3


def kernels_ptx() -> bytes:
    """PTX made by nvcc from the kernels.cu beside it."""
    return files("gpulease.client.bench").joinpath("kernels.ptx").read_bytes()


def _works() -> dict[str, Work]:
    rng = np.random.default_rng(1)

    def drawn(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32)

    left, right, rows = drawn(MATRIX, MATRIX), drawn(MATRIX, MATRIX), drawn(ROWS, COLUMNS)
    x, y, weight, bias = drawn(VALUES), drawn(VALUES), drawn(COLUMNS), drawn(COLUMNS)
    few_x, few_y = x[:SMALL], y[:SMALL]
    return {
        "matmul": Work(
            "matmul",
            (MATRIX // TILE, MATRIX // TILE),
            (TILE, TILE),
            np.zeros_like(left),
            (left, right),
            (MATRIX,),
            lambda: left @ right,
            flop=2 * MATRIX**3,
        ),
        "saxpy": Work(
            "saxpy",
            (VALUES // THREADS,),
            (THREADS,),
            y,
            (x,),
            (VALUES, 2.5),
            lambda: y + np.float32(2.5) * x,
        ),
        "softmax": Work(
            "softmax",
            (ROWS,),
            (THREADS,),
            np.zeros_like(rows),
            (rows,),
            (COLUMNS,),
            lambda: _softmax(rows),
            shared_bytes=4 * THREADS,
        ),
        "layernorm": Work(
            "layernorm",
            (ROWS,),
            (THREADS,),
            np.zeros_like(rows),
            (rows, weight, bias),
            (COLUMNS,),
            lambda: _layernorm(rows, weight, bias),
        ),
        "small": Work(
            "saxpy",
            (1,),
            (SMALL,),
            few_y,
            (few_x,),
            (SMALL, 2.5),
            lambda: few_y + np.float32(2.5) * few_x,
            samples=SHORT_SAMPLES,
        ),
    }


def _softmax(rows: Array) -> Array:
    powers = np.exp(rows - rows.max(1, keepdims=True))
    result: Array = powers / powers.sum(1, keepdims=True)
    return result


def _layernorm(rows: Array, weight: Array, bias: Array) -> Array:
    centred = rows - rows.mean(1, keepdims=True)
    scale = 1 / np.sqrt((centred * centred).mean(1, keepdims=True) + np.float32(1e-5))
    result: Array = centred * scale * weight + bias
    return result


def _measure(session: GpuSession, module: Module, work: Work) -> Figures:
    """Each launch with its wait, then numpy; the first launch's result must be numpy's. Raises WrongResult."""
    buffers = [_upload(session, array) for array in (work.into, *work.operands)]
    args = KernelArgs()
    for buffer in buffers:
        args.push_buffer(buffer)
    for number in work.numbers:
        args = args.push_u32(number) if isinstance(number, int) else args.push_f32(number)

    def launch() -> None:
        session.launch(module, work.kernel, work.grid, work.block, args, shared_bytes=work.shared_bytes)
        session.sync()

    launch()
    found, wanted = np.empty_like(work.into), work.numpy()
    session.mem_read(buffers[0], 0, found.nbytes, into=found)
    if not np.allclose(found, wanted, rtol=1e-3, atol=1e-3):
        raise WrongResult(f"kernel {work.kernel} is off by up to {abs(found - wanted).max()}")
    leased, numpy = (percentile(timed_us(action, work.samples), 50) / 1e3 for action in (launch, work.numpy))
    for buffer in buffers:
        session.mem_free(buffer)
    figures = {"leased_ms": leased, "numpy_ms": numpy, "ratio": leased / numpy}
    if work.flop:
        rate = work.flop / leased / 1e6
        figures |= {"gflop_s": rate, "gflop_s_per_core": rate / len(os.sched_getaffinity(0))}
    return figures


def _upload(session: GpuSession, array: Array) -> Buffer:
    buffer = session.mem_alloc(array.nbytes)
    session.mem_write(buffer, 0, array)
    return buffer
