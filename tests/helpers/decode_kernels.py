"""Launches the decode engine's kernels one at a time, on the embedded driver in this process."""

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.engine.kernel_library import early_image, image, manifest
from gpulease.client.decode.row_records import NO_ROW, ROW
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.image import CpuKernel

Array = NDArray[Any]

GUARD: Final = 64
"""Bytes before and after every array, which no kernel may write."""

_GUARD_BYTES: Final = bytes(range(0xA0, 0xA0 + GUARD))


class KernelRig:
    """Launches kernels with arguments by parameter name. Checks the guard bytes of every array after each launch.

    With `starts_early`, the kernels are those for cards of compute capability 9.0.
    """

    def __init__(self, context: CpuContext, *, starts_early: bool = False) -> None:
        self._context = context
        self._image = early_image if starts_early else image
        self._kernels: dict[str, CpuKernel] = {}
        # The allocations of placed arrays, by the arrays' addresses.
        self._allocations: dict[int, int] = {}

    def launch(self, name: str, grid: Sequence[int], regions: Sequence[tuple[int, Array]] = (), **values: Any) -> None:
        """Launch a kernel once. Afterwards the arrays contain the values that the kernel wrote.

        `values` are arrays, ints, floats, or None for a null pointer. `regions` are arrays at addresses that `place`
        returned.
        """
        facts = manifest().kernels[name]
        kernel = self._kernel(name)
        params = bytearray(kernel.parameter_bytes)
        placed: list[tuple[int, Array]] = []
        for parameter, slot in zip(facts.parameters, kernel.parameters, strict=False):
            value = values.pop(parameter)
            if isinstance(value, np.ndarray):
                placed.append((self.place(value), value))
                value = placed[-1][0]
            if isinstance(value, float):
                struct.pack_into("<f", params, slot.offset, value)
            else:
                params[slot.offset : slot.offset + slot.size] = (value or 0).to_bytes(slot.size, "little", signed=True)
        assert values == {}
        shape = (*grid, 1, 1)[:3]
        self._context.launch(
            kernel, (shape[0], shape[1], shape[2]), (facts.threads, 1, 1), facts.shared_bytes, bytes(params), 1
        )
        for address, array in (*placed, *regions):
            self._fetch(address, array)
        for address, _ in placed:
            self.release(address)

    def place(self, array: Array, alignment: int = 1) -> int:
        """Copy an array to the device, between guard bytes. Returns its address, which is valid until `release`."""
        assert array.flags.c_contiguous
        allocation = self._context.mem_alloc(array.nbytes + 2 * GUARD + alignment)
        address = -(-(allocation + GUARD) // alignment) * alignment
        self._allocations[address] = allocation
        self._context.mem_write(address - GUARD, memoryview(_GUARD_BYTES + array.tobytes() + _GUARD_BYTES))
        return address

    def release(self, address: int) -> None:
        self._context.mem_free(self._allocations.pop(address))

    def _fetch(self, address: int, array: Array) -> None:
        found = bytearray(array.nbytes + 2 * GUARD)
        self._context.mem_read(address - GUARD, memoryview(found))
        assert found[:GUARD] == found[-GUARD:] == _GUARD_BYTES, "a kernel wrote outside of an array"
        array[...] = np.frombuffer(found, array.dtype, array.size, GUARD).reshape(array.shape)

    def _kernel(self, name: str) -> CpuKernel:
        if name not in self._kernels:
            module = self._context.module_load(self._image(name))
            self._kernels[name] = module.kernels[manifest().kernels[name].kernel]
        return self._kernels[name]


def bf16(values: Array) -> NDArray[np.uint16]:
    """Return the bits of the nearest bf16 values; ties go to even. The values must be finite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return rounded


def floats(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def step_rows(count: int, **fields: Any) -> Array:
    """Return ROW records of known tokens at position 0, with the given fields changed."""
    rows = np.zeros(count, ROW)
    rows["source"] = NO_ROW
    for name, value in fields.items():
        rows[name] = value
    return rows
