"""Element-wise kernels of CuPy's kind: types and shapes are the arguments', results are numpy's."""

import asyncio
from typing import Any

import numpy as np
import pytest

from gpulease.client import GpuSession, InvalidRequest, LaunchFailed, LoadFailed, RegionRevoked, aio
from helpers.daemon import Daemon
from helpers.nvrtc import needs_nvrtc
from helpers.region_scene import REGION_BYTES, SLICE_BYTES

pytestmark = needs_nvrtc

SQUARE = ("T x, T y", "T z", "z = (x - y) * (x - y)", "squared_difference")


@pytest.fixture
def session(daemon: Daemon) -> Any:
    with daemon.builder(SLICE_BYTES).acquire() as lease, GpuSession(lease) as session:
        yield session


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i2", "u8"])
def test_a_letter_is_any_type(session: Any, dtype: str) -> None:
    x, y = np.arange(12, dtype=dtype).reshape(3, 4), np.full((3, 4), 2, dtype)
    found = session.elementwise(*SQUARE)(session.array(x), session.array(y))
    assert found.dtype == x.dtype
    assert found.numpy().tolist() == ((x - y) ** 2).tolist()


def test_shapes_are_broadcast_over_strides(session: Any) -> None:
    given = np.arange(48, dtype=np.float32).reshape(2, 4, 6)
    x, row = session.array(given), session.array(np.arange(3, dtype=np.float32))
    out = session.zeros((2, 4, 6), np.float32)
    kernel = session.elementwise(*SQUARE)
    assert kernel(x[:, ::-1, ::2], row, out[:, :, 1::2]).shape == (2, 4, 3)
    wanted = np.zeros_like(given)
    wanted[:, :, 1::2] = (given[:, ::-1, ::2] - np.arange(3, dtype=np.float32)) ** 2
    assert out.numpy().tolist() == wanted.tolist()
    assert kernel(x[0, 0, 5], row[:1]).numpy().tolist() == [25]
    assert kernel(x[:, :0], 1).shape == (2, 0, 6)


def test_raw_arrays_sizes_and_several_outputs(session: Any) -> None:
    given = np.arange(6, dtype=np.int32).reshape(2, 3)
    operation = "int other = _ind.size() - 1 - i; z = x[other] + y; w = (double)x.size() / x.shape()[0] * CUT"
    kernel = session.elementwise("raw T x, U y", "T z, float64 w", operation, "both", preamble="#define CUT 0.5")
    z, w = kernel(session.array(given), 10, size=6)
    assert z.numpy().tolist() == [15, 14, 13, 12, 11, 10]
    assert w.numpy().tolist() == [1.5] * 6
    z, _ = kernel(session.array(np.repeat(given, 2, axis=1))[:, ::2], np.uint8(1), size=6)
    assert z.numpy().tolist() == [6, 5, 4, 3, 2, 1]
    out = session.zeros(3, np.float32)
    session.elementwise("T x", "raw T z", "z[2 - i] = x")(session.array(np.arange(3, dtype=np.float32)), out)
    assert out.numpy().tolist() == [2, 1, 0]


def test_streams_and_graphs(session: Any) -> None:
    x, out = session.array(np.arange(4, dtype=np.float32)), session.zeros(4, np.float32)
    kernel = session.elementwise("T x, T a", "T z", "z += a * x", "add_scaled")
    with session.stream() as stream:
        kernel(x, 1, out, stream=stream)
    with session.record() as graph:
        kernel(x, 2, out)
    graph.launch()
    assert out.numpy().tolist() == [0, 3, 6, 9]


def test_a_recording_makes_no_array_and_compiles_nothing(session: Any) -> None:
    kernel, x = session.elementwise(*SQUARE), session.zeros(4, np.float32)
    for arguments in ((x, x), (x, x, x)):
        with pytest.raises(InvalidRequest, match="record"), session.record():
            kernel(*arguments)


def test_a_call_runs_only_while_its_region_goes_on(session: Any) -> None:
    region = session.lease.region(REGION_BYTES)
    regions, x = session.region_set([region]), session.array(np.arange(4, dtype=np.float32))
    kernel = session.elementwise("T x", "T z", "z = x + 1")
    kernel(x, x, regions=regions)
    session.sync()
    region.revoke("it is wanted")
    with pytest.raises(RegionRevoked) as refused:
        kernel(x, x, regions=regions, position=7)
    assert (refused.value.position, refused.value.kernel) == (7, "kernel")
    assert x.numpy().tolist() == [1, 2, 3, 4]


def test_types_are_compiled_once(session: Any) -> None:
    kernel, x = session.elementwise(*SQUARE), session.array(np.arange(4, dtype=np.float32))
    for array in (x, x[::2], session.zeros((2, 2), np.float32)):
        kernel(array, 1.0)
    assert len(kernel._operation._modules) == 1
    kernel(session.zeros((4, 4), np.float32)[:, :2], 1.0)
    assert len(kernel._operation._modules) == 2


def test_the_asyncio_face(daemon: Daemon) -> None:
    async def main() -> Any:
        async with (
            await aio.GpuBuilder(daemon.address).min_vram(1 << 20).acquire() as lease,
            aio.GpuSession(lease) as session,
        ):
            kernel = session.elementwise("T x", "T z", "z = 2 * x")
            return (await (await kernel(await session.array([1.5, 2]))).numpy()).tolist()

    assert asyncio.run(main()) == [3, 4]


@pytest.mark.parametrize(
    ("parts", "arguments", "said"),
    [
        (SQUARE, ("f4",), "takes 2 arguments, or 3 with its outputs; 1 were given"),
        (SQUARE, ("f4", "f8"), "y has elements of float64, the kernel's are T is float32"),
        (SQUARE, ("f4", np.float64(1)), "y has elements of float64"),
        (SQUARE, ("i4", 1.5), "y: .* a number that fits an array of int32"),
        (SQUARE, ("f4", np.zeros(3)), "y is an array in host memory"),
        (SQUARE, ("f4", None), "y must be an array on the card or a number, not None"),
        (SQUARE, ("f4", 1, 2), "z must be an array on the card, not 2"),
        (SQUARE, ("c8", "c8"), "x: such kernels have no elements of complex64"),
        (SQUARE, (1, 2), "no array determines the size"),
        (("T x", "T z", "z = x"), ("f4", "one"), "z has the shape .1,., but the operation runs over .3,."),
        (("T x, T y", "T z", "z = x"), ("f4", "two"), "can't be combined"),
        (("T x", "U z", "z = x"), ("f4",), "no argument determines the type U"),
        (("float64 x", "T z", "z = x"), ("f4",), "x has elements of float32, the kernel's are float64"),
        (("T x", "raw T z", "z[i] = x"), ("f4",), "a raw output has no shape"),
    ],
)
def test_arguments_that_do_not_fit(session: Any, parts: Any, arguments: Any, said: str) -> None:
    made = {"one": lambda: session.zeros(1, "f4"), "two": lambda: session.zeros(2, "f4")} | {
        kind: lambda kind=kind: session.zeros(3, kind) for kind in ("f4", "f8", "i4", "c8")
    }
    given = [made[value]() if isinstance(value, str) else value for value in arguments]
    with pytest.raises(LaunchFailed, match=said):
        session.elementwise(*parts)(*given)


def test_an_error_of_the_compiler_names_the_operation_s_line(session: Any) -> None:
    kernel = session.elementwise("T x", "T z", "z = x;\nz = missing;", "wrong")
    with pytest.raises(LoadFailed, match=r"wrong\(2\): error.*missing") as caught:
        kernel(session.zeros(3, np.float32))
    assert caught.value.line == 2
