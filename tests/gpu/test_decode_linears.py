"""Linears on a card whose programs each compute several tiles: their results equal those of the smallest tile, bit for
bit.
"""

import asyncio

import numpy as np
import pytest

from gpulease.client.aio import GpuBuilder, GpuSession
from gpulease.client.decode.engine.forward_pass import parts_of
from gpulease.client.decode.engine.kernel_library import KernelLaunch, KernelLibrary, Value
from gpulease.client.decode.engine.linear_tiles import IN_TURNS, SM_80, SM_90A, linear_grid, target_of, tiles_of
from helpers.daemon import Daemon

pytestmark = pytest.mark.gpu

SHAPES = [(100, 3072, 2048), (256, 3072, 2048), (513, 2048, 4096), (257, 9216, 1040), (1, 512, 528)]
"""Rows, and the weight's rows and columns. There are fewer tiles than programs and more; tiles with missing rows; one
part and several; and a last part that is no multiple of a tile's depth.
"""


@pytest.mark.parametrize("function", ["linear_bf16", "linear_silu_bf16", "linear_gelu_bf16"])
@pytest.mark.parametrize(("rows", "outputs", "columns"), SHAPES)
def test_programs_that_take_turns_give_the_smallest_tile_s_bits(
    daemon: Daemon, function: str, rows: int, outputs: int, columns: int
) -> None:
    is_gated = function != "linear_bf16"
    rng = np.random.default_rng(rows)
    # Random f32 numbers of many magnitudes, of which the upper halves are used.
    x, w = (
        (rng.normal(0, 1, shape) * 2.0 ** rng.integers(-3, 4, (shape[0], 1))).astype(np.float32)
        for shape in ((rows, columns), ((1 + is_gated) * outputs, columns))
    )
    splits, chunk = (1, columns) if is_gated else parts_of(outputs, columns)
    smallest, *turning = tiles_of(function, SM_80)[0], *tiles_of(function + IN_TURNS, SM_90A)
    assert turning

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
            size = splits * rows * outputs * (2 if is_gated else 4)
            result = await session.mem_alloc(size)
            found = {}
            for name in (smallest, *turning):
                await library.load(name)
                # Fill the result with NaNs, so that a value which a kernel does not write is detected.
                await session.mem_write(result, 0, np.full(size, 0xFF, np.uint8))
                grid = linear_grid(name, rows, outputs, splits)
                values: dict[str, Value] = {"x": buffers[0], "w": buffers[1], "R": rows, "K": columns}
                if is_gated:
                    values |= {"y": result, "F": outputs}
                else:
                    values |= {"parts": result, "N": outputs, "chunk": chunk}
                await library.launch(KernelLaunch(name, grid, **values))
                await session.sync()
                found[name] = bytes(await session.mem_read(result, 0, size))
            return found

    found = asyncio.run(computed())
    expected = np.frombuffer(found.pop(smallest), np.uint16)
    # The exponent of a bf16, or of the upper half of an f32, is not that of a NaN.
    assert ((expected if is_gated else expected[1::2]) & 0x7F80 != 0x7F80).all()
    for name, result_bytes in found.items():
        assert (np.frombuffer(result_bytes, np.uint16) != expected).sum() == 0, name
