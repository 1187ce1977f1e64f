"""Triton's functions are compiled for the arguments of a call, without a driver, and launched."""

import asyncio
from typing import Any

import numpy as np
import pytest

from gpulease.client import GpuSession, InvalidRequest, LaunchFailed, LoadFailed, aio
from helpers.daemon import Daemon

triton = pytest.importorskip("triton", reason="Triton's kernels are not tried: pip install '.[triton]'")

import triton.language as tl  # noqa: E402

from gpulease.client.examples import triton_matmul, triton_softmax  # noqa: E402
from gpulease.client.kernels.triton_kernel import TritonKernel  # noqa: E402

pytestmark = pytest.mark.usefixtures("_own_cache")


@pytest.fixture(scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@triton.jit
def fill(x, value, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, value, mask=at < n)


@triton.jit
def wrong(x):
    tl.store(x, missing)  # type: ignore[name-defined]  # noqa: F821


class Array:
    """As an array on the card shows itself."""

    def __init__(self, buffer: Any, dtype: Any, offset: int = 0) -> None:
        self.buffer, self.dtype, self.address = buffer, np.dtype(dtype), buffer.handle + offset


@pytest.fixture
def session(daemon: Daemon) -> Any:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        yield session


def test_softmax(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULEASE_ADDRESS", daemon.address)
    assert triton_softmax.run() < 1e-6


def test_matmul(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULEASE_ADDRESS", daemon.address)
    assert triton_matmul.run() < 1e-3


@pytest.mark.parametrize(("dtype", "value"), [("f4", 1.5), ("i4", 7), ("f8", np.float64(0.1)), ("i8", np.int64(2**40))])
def test_an_array_tells_its_type_and_a_scalar_its_own(session: Any, dtype: str, value: Any) -> None:
    buffer = session.mem_alloc(64)
    size = np.dtype(dtype).itemsize
    session.kernel(fill)[(1,)](Array(buffer, dtype, size), value, 2, BLOCK=4)
    found = np.frombuffer(session.mem_read(buffer, 0, 4 * size), dtype)
    assert found.tolist() == [0, value, value, 0]


def test_a_slice_of_an_array_on_the_card_is_taken_from_its_first_element(session: Any) -> None:
    array = session.zeros(5, "f4")
    session.kernel(fill)[(1,)](array[1:], 1.5, 2, BLOCK=4)
    assert array.numpy().tolist() == [0, 1.5, 1.5, 0, 0]


def test_a_stream_and_a_graph_take_it(session: Any) -> None:
    array = Array(session.mem_alloc(16), "f4")
    kernel = session.kernel(fill)
    with session.stream() as stream:
        kernel[(1,)](array, 1.0, 4, BLOCK=4, stream=stream)
    with session.record() as graph:
        kernel[(1,)](array, 2.0, 4, BLOCK=4)
    assert session.mem_read(array.buffer, 0, 16) == np.full(4, 1, "f4").tobytes()
    graph.launch()
    assert session.mem_read(array.buffer, 0, 16) == np.full(4, 2, "f4").tobytes()


def test_a_recording_loads_no_module(session: Any) -> None:
    array = Array(session.mem_alloc(16), "f4")
    with pytest.raises(InvalidRequest, match="module_load"), session.record():
        session.kernel(fill)[(1,)](array, 2.0, 4, BLOCK=4)


def test_the_asyncio_face(daemon: Daemon) -> None:
    async def main() -> bytes:
        async with (
            await aio.GpuBuilder(daemon.address).min_vram(1 << 20).acquire() as lease,
            aio.GpuSession(lease) as session,
        ):
            buffer = await session.mem_alloc(16)
            await session.kernel(fill, {"x": "*i32"})[(1,)](buffer, 5, 4, BLOCK=4)
            return bytes(await session.mem_read(buffer, 0, 16))

    assert asyncio.run(main()) == np.full(4, 5, "i4").tobytes()


def test_a_call_like_one_before_is_not_compiled_again(session: Any) -> None:
    kernel, array = TritonKernel(fill), Array(session.mem_alloc(16), "f4")
    first = kernel.prepared((1,), (array, 1.0, 4), {"BLOCK": 4}).compiled
    assert kernel.prepared((1,), (array, 2.0, 3), {"BLOCK": 4}).compiled is first
    assert kernel.prepared((1,), (array, 2.0, 3), {"BLOCK": 4, "num_warps": 2}).compiled.threads == 64


@pytest.mark.parametrize(
    ("arguments", "keywords", "said"),
    [
        (("buffer", 1.0, 4), {"BLOCK": 4}, "elements have no type"),
        (("array", 1.0), {"BLOCK": 4}, "missing 1 required positional argument: 'n'"),
        (("array", 1.0, 4), {"BLOCK": 4, "warps": 2}, "warps"),
        ((np.zeros(4), 1.0, 4), {"BLOCK": 4}, "host memory"),
        (("array", 2**70, 4), {"BLOCK": 4}, "fill"),
        (("array", np.complex64(1), 4), {"BLOCK": 4}, "fill"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(session: Any, arguments: Any, keywords: Any, said: str) -> None:
    buffer = session.mem_alloc(16)
    known = {"buffer": buffer, "array": Array(buffer, "f4")}
    given = [known[value] if isinstance(value, str) else value for value in arguments]
    with pytest.raises(LaunchFailed, match=said):
        session.kernel(fill)[(1,)](*given, **keywords)


def test_an_array_of_another_type_than_was_told_is_refused(session: Any) -> None:
    with pytest.raises(LaunchFailed, match=r"elements of fp64, but the kernel's parameter is \*fp32"):
        session.kernel(fill, {"x": "*fp32"})[(1,)](Array(session.mem_alloc(16), "f8"), 1.0, 4, BLOCK=4)


def test_what_does_not_compile_says_why(session: Any) -> None:
    with pytest.raises(LoadFailed, match="missing is not defined") as caught:
        session.kernel(wrong, {"x": "*fp32"})[(1,)](session.mem_alloc(16))
    assert caught.value.line == 2
    assert "tl.store(x, missing)" in caught.value.log


@pytest.mark.parametrize(
    ("function", "types", "said"),
    [(len, {}, "@triton.jit"), (fill, {"y": "*fp32"}, "no parameter y"), (fill, {"x": "fp32"}, "must be a pointer")],
)
def test_what_is_no_kernel_is_refused(function: Any, types: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        TritonKernel(function, types)


@pytest.mark.parametrize(("cuda", "version"), [(12080, "8.7"), (99000, None), (0, None)])
def test_the_ptx_is_of_a_version_that_the_driver_takes(session: Any, cuda: int, version: str | None) -> None:
    array = Array(session.mem_alloc(16), "f4")
    image = TritonKernel(fill, cuda=cuda).prepared((1,), (array, 1.0, 4), {"BLOCK": 4}).compiled.image
    own = TritonKernel(fill).prepared((1,), (array, 1.0, 4), {"BLOCK": 4}).compiled.image
    assert (f".version {version}\n" in image) if version else image == own


FACTOR = tl.constexpr(2)
SUMMAND = tl.constexpr(1)


@triton.jit
def plus_summand(value):
    return value + SUMMAND


@triton.jit
def transform(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, plus_summand(tl.load(x + at, mask=at < n) * FACTOR), mask=at < n)


@pytest.mark.parametrize("name", ["FACTOR", "SUMMAND"])
@pytest.mark.parametrize("is_new_kernel", [False, True])
def test_a_global_that_changes_is_refused_as_triton_does(
    session: Any, monkeypatch: pytest.MonkeyPatch, name: str, is_new_kernel: bool
) -> None:
    array, kernel = session.array(np.ones(4, "f4")), session.kernel(transform)
    kernel[(1,)](array, 4, BLOCK=4)
    assert array.numpy().tolist() == [3] * 4
    monkeypatch.setitem(globals(), name, tl.constexpr(10))
    with pytest.raises(
        LaunchFailed, match=rf"global variable {name} has changed since it was compiled, from .* to .*10"
    ):
        (session.kernel(transform) if is_new_kernel else kernel)[(1,)](array, 4, BLOCK=4)
    assert array.numpy().tolist() == [3] * 4
    monkeypatch.undo()
    kernel[(1,)](array, 4, BLOCK=4)
    assert array.numpy().tolist() == [7] * 4


@triton.jit
def apply(x, n, function: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, function(tl.load(x + at, mask=at < n)), mask=at < n)


def doubling() -> Any:
    @triton.jit
    def body(value):
        return value * 2

    return body


def adding() -> Any:
    @triton.jit
    def body(value):
        return value + 10

    body.__qualname__ = body.fn.__qualname__ = "doubling.<locals>.body"
    return body


def test_functions_of_one_name_among_the_constants_are_told_apart(session: Any) -> None:
    array, kernel = session.array(np.ones(4, "f4")), session.kernel(apply)
    for function in (doubling(), adding()):
        kernel[(1,)](array, 4, function, BLOCK=4)
    assert array.numpy().tolist() == [12] * 4


@pytest.mark.parametrize("grid", [(0,), (4, 0), (1, 2, 0), lambda meta: (meta["n"] // 8,)])
def test_an_empty_grid_is_nothing_to_do(session: Any, grid: Any) -> None:
    array = session.zeros(4, "f4")
    with session.record() as graph:
        array.fill(2)
        assert session.kernel(fill)[grid](array, 1.0, 4, BLOCK=4) == 0
    assert session.kernel(fill)[grid](array, 1.0, 4, BLOCK=4) == 0
    assert array.numpy().tolist() == [0] * 4
    graph.launch()
    assert array.numpy().tolist() == [2] * 4


def test_an_empty_grid_in_the_asyncio_face(daemon: Daemon) -> None:
    async def main() -> int:
        async with (
            await aio.GpuBuilder(daemon.address).min_vram(1 << 20).acquire() as lease,
            aio.GpuSession(lease) as session,
        ):
            array = await session.zeros(4, np.float32)
            return await session.kernel(fill)[(0,)](array, 5.0, 4, BLOCK=4)

    assert asyncio.run(main()) == 0


@pytest.mark.parametrize(
    ("grid", "said"),
    [((-1,), "must be from 1 to 4294967295, not -1"), (4, "must be a sequence of integers, not 4.*Write kernel")],
)
def test_a_grid_that_is_none_is_refused(session: Any, grid: Any, said: str) -> None:
    with pytest.raises(LaunchFailed, match=said):
        session.kernel(fill)[grid](session.zeros(4, "f4"), 1.0, 4, BLOCK=4)


def test_a_grid_s_function_gets_the_arguments_as_they_were_given(session: Any) -> None:
    array = session.zeros(8, "f4")
    session.kernel(fill)[lambda meta: (meta["x"].shape[0] // meta["BLOCK"],)](array, 1.0, 8, BLOCK=4)
    assert array.numpy().tolist() == [1] * 8


def test_what_triton_s_own_call_looks_at_is_looked_at(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    kernel, array, seen = TritonKernel(fill), session.zeros(4, "f4"), []
    monkeypatch.setattr(fill, "pre_run_hooks", [lambda *args, **keywords: seen.append((args, keywords["BLOCK"]))])
    first = kernel.prepared((1,), (array, 1.0, 4), {"BLOCK": 4}).compiled
    assert seen == [((array, 1.0, 4), 4)]
    monkeypatch.setattr(knobs.runtime, "debug", True)
    assert kernel.prepared((1,), (array, 1.0, 4), {"BLOCK": 4}).compiled is not first
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *args: ("key", "hash"))
    monkeypatch.setattr(knobs.runtime, "debug", False)
    assert kernel.prepared((1,), (array, 1.0, 4), {"BLOCK": 4}).compiled is not first


def test_an_interpreted_function_is_refused_by_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(InvalidRequest, match="TRITON_INTERPRET is set"):
        TritonKernel(triton.jit(fill.fn))
