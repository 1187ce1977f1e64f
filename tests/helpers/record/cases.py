"""Whole kernels to run both on a real card and on the embedded driver, and how far their results may differ."""

import base64
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpulease.daemon.drivers.interface import Context, Dim3, DriverKernel, DriverModule

Array = np.ndarray[Any, np.dtype[Any]]

VECTORS: Final = Path(__file__).parents[3] / "vectors" / "gpu"
RECORD: Final = VECTORS / "parity" / "workloads.json"


@dataclass(frozen=True, slots=True)
class Bound:
    """How far two correct results may differ, with the reason.

    Attributes:
        relative: Fraction of the greater result, in addition to `absolute`.
        absolute: In the unit of the results.
        because: The reason for the difference; "" if there is none.
    """

    relative: float = 0.0
    absolute: float = 0.0
    because: str = ""


EXACT: Final = Bound()
"""The same bits, except the payload of a double's NaN, which PTX leaves open."""


@dataclass(frozen=True, slots=True)
class Result:
    """An array that is read back, and how far it may differ from the card's.

    With `is_bf16`, its 16-bit integers are bf16.
    """

    before: Array
    bound: Bound = EXACT
    is_bf16: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One launch. `kernel` is its name, or a part of the name that no other kernel of the image contains."""

    name: str
    images: tuple[str, ...]
    kernel: str
    grid: Dim3
    block: Dim3
    arguments: tuple[Array | Result | bytes, ...]
    shared: int = 0

    @property
    def results(self) -> tuple[Result, ...]:
        return tuple(argument for argument in self.arguments if isinstance(argument, Result))

    @property
    def fingerprint(self) -> int:
        """A checksum of all inputs. A record is valid for these inputs only."""
        sum_ = zlib.crc32(repr((self.kernel, self.grid, self.block, self.shared)).encode())
        for argument in self.arguments:
            held = argument.before if isinstance(argument, Result) else argument
            sum_ = zlib.crc32(held if isinstance(held, bytes) else held.tobytes(), sum_)
        return sum_


def image(name: str) -> bytes:
    """Return a PTX file of the vectors, as its compiler wrote it."""
    return (VECTORS / f"{name}.ptx").read_bytes()


def run(context: Context, module: DriverModule, case: Case) -> list[Array]:
    """Launch a kernel, and return the arrays of its results."""
    kernel = _kernel(module, case.kernel)
    params = bytearray(kernel.parameter_bytes)
    placed: list[tuple[int, Array | None]] = []
    for argument, slot in zip(case.arguments, kernel.parameters, strict=True):
        value = argument
        if not isinstance(value, bytes):
            array = value.before if isinstance(value, Result) else value
            address = context.mem_alloc(array.nbytes)
            context.mem_write(address, memoryview(array.tobytes()))
            placed.append((address, array if isinstance(value, Result) else None))
            value = address.to_bytes(8, "little")
        assert len(value) == slot.size
        params[slot.offset : slot.offset + slot.size] = value
    context.launch(kernel, case.grid, case.block, case.shared, bytes(params), 1)
    results = []
    for address, before in placed:
        if before is not None:
            held = bytearray(before.nbytes)
            context.mem_read(address, memoryview(held))
            results.append(np.frombuffer(held, before.dtype).reshape(before.shape))
        context.mem_free(address)
    return results


def _kernel(module: DriverModule, part: str) -> DriverKernel:
    if part in module.kernels:
        return module.kernels[part]
    (kernel,) = (kernel for name, kernel in module.kernels.items() if part in name)
    return kernel


def differences(result: Result, got: Array, wanted: Array) -> list[str]:
    """Describe at most five places where two results differ too much."""
    bound = result.bound
    left, right = (_numbers(array, result) for array in (got, wanted))
    if left.dtype.kind != "f":
        wrong = got != wanted
    elif bound == EXACT:
        wrong = _bits(got) != _bits(wanted)
        if got.dtype == np.float64:
            wrong &= ~(np.isnan(got) & np.isnan(wanted))
    else:
        with np.errstate(all="ignore"):
            room = bound.absolute + bound.relative * np.maximum(np.abs(left), np.abs(right))
            near = np.abs(left - right) <= room
        near[np.isinf(left) | np.isinf(right)] = False
        wrong = ~(near | (left == right) | (np.isnan(left) & np.isnan(right)))
    places = np.flatnonzero(wrong.ravel())
    return [f"[{at}]: {left.ravel()[at]!r}, the card gave {right.ravel()[at]!r}" for at in places[:5]]


def _numbers(array: Array, result: Result) -> Array:
    if result.is_bf16:
        return (array.astype("u4") << 16).view("f4").astype("f8")
    with np.errstate(all="ignore"):  # For signalling NaNs.
        return array.astype("f8") if array.dtype.kind == "f" else array


def _bits(array: Array) -> Array:
    return array.view(f"u{array.dtype.itemsize}")


# --- The card's record ------------------------------------------------------------------------------------------


def packed(arrays: Iterable[Array]) -> list[str]:
    return [base64.b64encode(zlib.compress(array.tobytes(), 9)).decode() for array in arrays]


def unpacked(case: Case, texts: list[str]) -> list[Array]:
    return [
        np.frombuffer(zlib.decompress(base64.b64decode(text)), result.before.dtype).reshape(result.before.shape)
        for text, result in zip(texts, case.results, strict=True)
    ]


def read_record() -> dict[str, Any]:
    """Return the card's results of each case: {"fingerprint": ..., "results": {image: arrays as text}}."""
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record
