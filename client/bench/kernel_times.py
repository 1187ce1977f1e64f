"""Times of kernels on a lease, compared with numpy's for the same result in the same run."""

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
"""Number of samples of kernels that take microseconds."""

IMAGES: Final = 3
"""Number of images that each of two workers loads."""

MATRIX: Final = 256
TILE: Final = 16
VALUES: Final = 1 << 20
ROWS, COLUMNS = 256, 1024
THREADS: Final = 256
SMALL: Final = 32

Array = np.ndarray[Any, np.dtype[np.float32]]
Figures = dict[str, float]


class WrongResult(GpuLeaseError):
    """A kernel's result differs from numpy's by more than the tolerance, so its time is not reported."""


@dataclass(frozen=True, slots=True)
class KernelWork:
    """A kernel's launch and its reference.

    Attributes:
        operands: float32 arrays that the kernel reads; its arguments begin with the array that it writes.
        numbers: Arguments after the arrays.
        numpy: Computes the same result from the same arrays.
        flop: Number of floating-point operations, for kernels whose time they dominate; else 0.
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
    """Median milliseconds of each kernel, of numpy, and of loading images: first, and again in another worker."""
    # Random comments make each image new to every cache.
    images = [kernels_ptx() + f"\n// {secrets.token_hex(16)}\n".encode() for _ in range(IMAGES)]
    # A new lease has another worker, whose first load shows whether a cache outlives a worker.
    with _session(address) as session:
        cold = [_load_ms(session, image) for image in images]
    with _session(address) as session:
        reloads = [_load_ms(session, image) for image in images]
        module = session.module_load(kernels_ptx())
        figures = {name: _measure(session, module, work) for name, work in works().items()}
    return figures | {
        "load_cold": {"leased_ms": percentile(cold, 50)},
        "load_again": {"leased_ms": percentile(reloads, 50)},
    }


@contextmanager
def _session(address: str) -> Iterator[GpuSession]:
    """Open a session with a separate worker on card 0."""
    builder = GpuBuilder(address).device("0").min_vram(SLICE_BYTES).lease_secs(600)
    with builder.acquire() as lease, GpuSession(lease) as session:
        yield session


def _load_ms(session: GpuSession, image: bytes) -> float:
    (span,) = timed_us(lambda: session.module_load(image), 1)
    return span / 1e3


def kernels_ptx() -> bytes:
    """PTX compiled by nvcc from kernels.cu in this folder."""
    return files("gpulease.client.bench").joinpath("kernels.ptx").read_bytes()


def works() -> dict[str, KernelWork]:
    """Return the measured kernels by name, each with its operands and with numpy's way to compute the same."""
    rng = np.random.default_rng(1)

    def drawn(*shape: int) -> Array:
        # Draw from a normal distribution, so that sums taken in another order stay within the tolerance.
        return rng.standard_normal(shape, np.float32)

    left, right, rows = drawn(MATRIX, MATRIX), drawn(MATRIX, MATRIX), drawn(ROWS, COLUMNS)
    x, y, weight, bias = drawn(VALUES), drawn(VALUES), drawn(COLUMNS), drawn(COLUMNS)
    few_x, few_y = x[:SMALL], y[:SMALL]
    # Choose kernels in which the arithmetic, the memory or the launch itself dominates.
    return {
        "matmul": KernelWork(
            kernel="matmul",
            grid=(MATRIX // TILE, MATRIX // TILE),
            block=(TILE, TILE),
            into=np.zeros_like(left),
            operands=(left, right),
            numbers=(MATRIX,),
            numpy=lambda: left @ right,
            flop=2 * MATRIX**3,
        ),
        "saxpy": KernelWork(
            "saxpy", (VALUES // THREADS,), (THREADS,), y, (x,), (VALUES, 2.5), lambda: y + np.float32(2.5) * x
        ),
        "softmax": KernelWork(
            "softmax",
            (ROWS,),
            (THREADS,),
            np.zeros_like(rows),
            (rows,),
            (COLUMNS,),
            lambda: _softmax(rows),
            shared_bytes=4 * THREADS,
        ),
        "layernorm": KernelWork(
            "layernorm",
            (ROWS,),
            (THREADS,),
            np.zeros_like(rows),
            (rows, weight, bias),
            (COLUMNS,),
            lambda: _layernorm(rows, weight, bias),
        ),
        "small": KernelWork(
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


class Prepared:
    """A kernel ready to launch: its arrays are on the card, and its arguments are packed."""

    def __init__(self, session: GpuSession, module: Module, work: KernelWork) -> None:
        # Pack the arguments once, because they are the same for each launch.
        self._session, self._module, self._work = session, module, work
        self._expected = work.numpy()
        self._buffers = [_upload(session, array) for array in (work.into, *work.operands)]
        self._args = KernelArgs()
        for buffer in self._buffers:
            self._args.push_buffer(buffer)
        for number in work.numbers:
            self._args = self._args.push_u32(number) if isinstance(number, int) else self._args.push_f32(number)

    def launch(self) -> None:
        """Launch the kernel and wait until it has finished."""
        work = self._work
        self._session.launch(
            self._module, work.kernel, work.grid, work.block, self._args, shared_bytes=work.shared_bytes
        )
        self._session.sync()

    def check(self) -> None:
        """Launch the kernel on its initial values.

        Raises WrongResult unless the result agrees with numpy's within rtol = atol = 1e-3.
        """
        # Write the initial values again, because earlier launches may have changed them.
        self._session.mem_write(self._buffers[0], 0, self._work.into)
        self.launch()
        output = np.empty_like(self._work.into)
        self._session.mem_read(self._buffers[0], 0, output.nbytes, into=output)
        if not np.allclose(output, self._expected, rtol=1e-3, atol=1e-3):
            raise WrongResult(f"kernel {self._work.kernel} is off by up to {abs(output - self._expected).max()}")

    def free(self) -> None:
        """Free the arrays on the card. After that, `launch` can't be called."""
        for buffer in self._buffers:
            self._session.mem_free(buffer)


def _measure(session: GpuSession, module: Module, work: KernelWork) -> Figures:
    """Time each launch with its wait, then numpy.

    Raises WrongResult unless the first launch's result agrees with numpy's within rtol = atol = 1e-3.
    """
    prepared = Prepared(session, module, work)
    prepared.check()
    leased, numpy = (percentile(timed_us(action, work.samples), 50) / 1e3 for action in (prepared.launch, work.numpy))
    prepared.free()
    figures = {"leased_ms": leased, "numpy_ms": numpy, "ratio": leased / numpy}
    # A rate per core allows comparing embedded drivers on different hosts.
    if work.flop:
        rate = work.flop / leased / 1e6
        figures |= {"gflop_s": rate, "gflop_s_per_core": rate / len(os.sched_getaffinity(0))}
    return figures


def _upload(session: GpuSession, array: Array) -> Buffer:
    buffer = session.mem_alloc(array.nbytes)
    session.mem_write(buffer, 0, array)
    return buffer
