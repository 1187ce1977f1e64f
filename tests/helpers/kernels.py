"""PTX for tests: the main job, kernels that never end, and kernels that fault."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from gpulease.client import Buffer, GpuSession, KernelArgs, Module, Stream

PTX: Final = Path(__file__).parents[2] / "vectors" / "gpu"
TRANSFORM: Final = (PTX / "transform.sm75.ptx").read_bytes()
FAULTS: Final = (PTX / "faults.sm75.ptx").read_bytes()

BLOCK: Final = [256, 1, 1]


def grid_for(n: int) -> list[int]:
    """Return the grid with as many blocks as n threads need."""
    return [(n + 255) // 256, 1, 1]


def scale_args(buffer: Buffer, n: int, factor: float = 2.0) -> KernelArgs:
    """Return the arguments of `scale`. Those of `bias` have the same layout."""
    return KernelArgs().push_buffer(buffer).push_u32(n).push_f32(factor)


def packed_scale_args(address: int, n: int, factor: float = 2.0) -> tuple[bytes, tuple[int, ...]]:
    """Return the arguments of `scale` as raw bytes, and their sizes."""
    return struct.pack("<QIf", address, n, factor), (8, 4, 4)


def numbers(n: int) -> NDArray[np.float32]:
    """Return 0, 1, 2 and so on."""
    return np.arange(n, dtype=np.float32)


def floats(data: Any) -> NDArray[np.float32]:
    """Return bytes that were read from a device as numbers."""
    return np.frombuffer(data, dtype=np.float32)


def check_main_job(session: GpuSession, n: int = 1000) -> None:
    """Upload numbers, multiply them by 2, add 10 in the same buffer, and read them back. Fails if one is wrong."""
    buffer = session.mem_alloc(4 * n)
    session.mem_write(buffer, 0, numbers(n))
    module = session.module_load(TRANSFORM)
    session.launch(module, "scale", grid_for(n), BLOCK, scale_args(buffer, n, 2.0))
    session.launch(module, "bias", grid_for(n), BLOCK, scale_args(buffer, n, 10.0))
    session.sync()
    np.testing.assert_array_equal(floats(session.mem_read(buffer, 0, 4 * n)), numbers(n) * 2 + 10)
    session.module_unload(module)
    session.mem_free(buffer)


class Neighbour:
    """Another tenant's session, whose results must be correct whatever happens in the session under test."""

    def __init__(self, session: GpuSession, n: int = 512) -> None:
        self.rounds = 0
        self._session, self._n = session, n
        self._buffer = session.mem_alloc(4 * n)
        self._module = session.module_load(TRANSFORM)

    def check(self) -> bool:
        """Do one round of work. Fails if a number is wrong. Returns True, so that it can be part of a condition."""
        self.rounds += 1
        self._session.mem_write(self._buffer, 0, numbers(self._n) + self.rounds)
        args = scale_args(self._buffer, self._n, 3.0)
        self._session.launch(self._module, "scale", grid_for(self._n), BLOCK, args)
        data = self._session.mem_read(self._buffer, 0, 4 * self._n)
        np.testing.assert_array_equal(floats(data), (numbers(self._n) + self.rounds) * 3)
        return True


def start_endless(session: GpuSession, stream: Stream | None = None) -> tuple[Module, Buffer]:
    """Launch a kernel that only the end of its lease stops."""
    module = session.module_load(FAULTS)
    flag = session.mem_alloc(4)
    session.launch(module, "endless", [1], [1], KernelArgs().push_buffer(flag), stream=stream)
    return module, flag


def launch_for_ever(session: GpuSession, module: Module, buffer: Buffer) -> NoReturn:
    args = KernelArgs().push_buffer(buffer).push_u32(1).push_u32(7)
    while True:
        session.launch(module, "fill_u32", [1], [1], args)


def start_stray_store(session: GpuSession, module: Module, buffer: Buffer, byte_offset: int = 1 << 40) -> int:
    """Launch a kernel that stores far outside of all memory. Returns the launch's number."""
    args = KernelArgs().push_buffer(buffer).push_u64(byte_offset)
    return session.launch(module, "stray_store", [1], [1], args)


@contextmanager
def fill_u32(session: GpuSession, buffer: Buffer, n: int) -> Iterator[Any]:
    """Yield a function that queues a fill of `buffer` with a value. The module is loaded during the block."""
    module = session.module_load(FAULTS)

    def launch(value: int) -> int:
        args = KernelArgs().push_buffer(buffer).push_u32(n).push_u32(value)
        return session.launch(module, "fill_u32", grid_for(n), BLOCK, args)

    yield launch
    session.module_unload(module)


VARIABLES: Final = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .const .align 4 .b8 weights[32];
.visible .global .align 4 .u32 count = 7;
.visible .global .align 4 .b8 table[32];
.visible .entry weigh(.param .u64 out)
{
.reg .b32 %t, %v, %one; .reg .b64 %at, %out, %w, %c;
mov.u32 %t, %tid.x; mul.wide.u32 %at, %t, 4;
mov.u64 %w, weights; add.s64 %w, %w, %at; ld.const.b32 %v, [%w];
ld.param.u64 %out, [out]; cvta.to.global.u64 %out, %out; add.s64 %out, %out, %at; st.global.b32 [%out], %v;
mov.u64 %c, count; atom.global.add.u32 %one, [%c], 1;
ret;
}
.visible .entry tile()
{
.shared .align 4 .b8 rows[4096];
.reg .b64 %a; .reg .b32 %v;
mov.u64 %a, rows; mov.u32 %v, 1; st.shared.u32 [%a], %v;
ret;
}
"""
"""Variables in constant and device memory. `weigh` copies eight floats of `weights`, and counts its threads."""
