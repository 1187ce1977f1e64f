"""Linears on a card whose programs each compute several tiles: their results equal those of the smallest tile, bit for
bit.
"""

import asyncio

import numpy as np
import pytest

from gpulease.client.aio import GpuBuilder, GpuSession
from gpulease.client.decode.engine.forward_pass import parts_of
from gpulease.client.decode.engine.kernel_library import KernelLaunch, KernelLibrary, manifest
from gpulease.client.decode.engine.linear_tiles import IN_TURNS, SM_90A, linear_grid, target_of, tiles_of
from helpers.daemon import Daemon

pytestmark = pytest.mark.gpu

SMALLEST = "linear_bf16_16"

SHAPES = [(100, 3072, 2048), (256, 3072, 2048), (513, 2048, 4096), (257, 9216, 1040), (1, 512, 528)]
"""Rows, and the weight's rows and columns. There are fewer tiles than programs and more; tiles with missing rows; one
part and several; and a last part that is no multiple of a tile's depth.
"""


@pytest.mark.parametrize(("rows", "outputs", "columns"), SHAPES)
def test_programs_that_take_turns_give_the_smallest_tile_s_bits(
    daemon: Daemon, rows: int, outputs: int, columns: int
) -> None:
    rng = np.random.default_rng(rows)
    # Random f32 numbers of many magnitudes, of which the upper halves are used.
    x, w = (
        (rng.normal(0, 1, shape) * 2.0 ** rng.integers(-3, 4, (shape[0], 1))).astype(np.float32)
        for shape in ((rows, columns), (outputs, columns))
    )
    splits, chunk = parts_of(outputs, columns)

    async def computed() -> dict[str, bytes]:
        async with (
            GpuBuilder(daemon.address).min_vram(1 << 30).acquire() as lease,
            GpuSession(lease) as session,
        ):
            if target_of("cuda", session.compute_capability) != SM_90A:
                pytest.skip("these kernels are for cards of compute capability 9.0")
            library = KernelLibrary(session)
            buffers = [await session.mem_alloc(numbers.nbytes // 2) for numbers in (x, w)]
            for buffer, numbers in zip(buffers, (x, w), strict=True):
                await session.mem_write(buffer, 0, (numbers.view(np.uint32) >> 16).astype(np.uint16))
            size = splits * rows * outputs * 4
            parts = await session.mem_alloc(size)
            found = {}
            for name in (SMALLEST, *tiles_of("linear_bf16" + IN_TURNS, SM_90A)):
                await library.load(name)
                # Fill the result with NaNs, so that a value which a kernel does not write is detected.
                await session.mem_write(parts, 0, np.full(size, 0xFF, np.uint8))
                grid = linear_grid(name, rows, outputs, splits)
                values = {"parts": parts, "x": buffers[0], "w": buffers[1]}
                await library.launch(KernelLaunch(name, grid, **values, R=rows, N=outputs, K=columns, chunk=chunk))
                await session.sync()
                found[name] = bytes(await session.mem_read(parts, 0, size))
            return found

    found = asyncio.run(computed())
    assert len(found) == 1 + sum(facts.kernel == "linear_bf16" + IN_TURNS for facts in manifest().kernels.values())
    expected = np.frombuffer(found.pop(SMALLEST), np.uint32)
    assert not np.isnan(expected.view(np.float32)).any()
    for name, parts_bytes in found.items():
        assert (np.frombuffer(parts_bytes, np.uint32) != expected).sum() == 0, name
