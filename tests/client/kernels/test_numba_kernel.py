"""Numba's kernels are compiled for the arguments of a call, or for a signature, without a driver, and launched."""

import asyncio
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from gpulease.client import GpuSession, InvalidRequest, LaunchFailed, LoadFailed, Unsupported, aio
from helpers.daemon import Daemon

numba = pytest.importorskip("numba", reason="numba's kernels are not tried: pip install '.[numba]'")
cuda = pytest.importorskip("numba.cuda", reason="numba's kernels are not tried: pip install '.[numba]'")

from gpulease.client.examples import numba_stencil  # noqa: E402
from gpulease.client.kernels.numba_kernel import NumbaKernel  # noqa: E402


@cuda.jit
def add_to(x, value):
    i = cuda.grid(1)
    if i < x.size:
        x[i] += value


def weigh(out, matrix, weights, flag, shift):
    row = cuda.grid(1)
    if row < matrix.shape[0]:
        total = shift.imag
        for column in range(matrix.shape[1]):
            total += matrix[row, column] * weights[column % 2]
        out[row] = total if flag else -total


def total_of(out, x):
    held = cuda.shared.array(64, numba.float32)
    dynamic = cuda.shared.array(0, numba.int32)
    i = cuda.threadIdx.x
    held[i] = x[i]
    dynamic[i] = i
    cuda.syncthreads()
    step = 32
    while step:
        if i < step:
            held[i] += held[i + step]
        cuda.syncthreads()
        step //= 2
    if i == 0:
        out[0] = held[0] + dynamic[63]
    cuda.atomic.add(out, 1, 1.0)


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    # NVVM starts a thread when it first compiles, and keeps it.
    cuda.compile_ptx(lambda x: None, (numba.float32,), cc=(8, 0))


@pytest.fixture
def session(daemon: Daemon) -> Any:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        yield session


def test_stencil(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPULEASE_ADDRESS", daemon.address)
    assert numba_stencil.run() < 1e-4


@pytest.mark.parametrize(("dtype", "value"), [("f4", 1.5), ("i4", 7), ("u1", np.uint8(3)), ("c8", 1 + 2j)])
def test_a_call_tells_its_types(session: Any, dtype: str, value: Any) -> None:
    array = session.array(np.arange(6, dtype=dtype))
    kernel = session.kernel(add_to)
    kernel[1, 32](array[1::2], value)
    wanted = np.arange(6).astype(dtype)
    wanted[1::2] += np.dtype(dtype).type(value)
    assert array.numpy().tolist() == wanted.tolist()


def test_strides_tuples_and_truths(session: Any) -> None:
    given = np.arange(24, dtype=np.float64).reshape(4, 6)
    matrix, out = session.array(given), session.zeros(4, np.float64)
    session.kernel(weigh)[(1, 1), (32, 1)](out, matrix[::-1, ::2], (2.0, 0.5), False, 5 + 3j)
    wanted = -(given[::-1, ::2] @ np.array([2, 0.5, 2]) + 3)
    assert out.numpy().tolist() == wanted.tolist()


def test_shared_memory_streams_and_graphs(session: Any) -> None:
    x, out = session.array(np.arange(64, dtype=np.float32)), session.zeros(2, np.float32)
    kernel = session.kernel(total_of)
    with session.stream() as stream:
        kernel[1, 64, stream, 256](out, x)
    assert out.numpy().tolist() == [2016 + 63, 64]
    with session.record() as graph:
        kernel[1, 64, 0, 256](out, x)
    graph.launch()
    assert out.numpy().tolist() == [2016 + 63, 128]


def test_a_signature_takes_what_fits(session: Any) -> None:
    array = session.zeros(4, np.float32)
    kernel = session.kernel(add_to, "void(float32[:], float32)")
    kernel[1, 4](array, 1)
    kernel[1, 4](array, np.float32(2))
    kernel[1, 4](array[::2], True)
    assert array.numpy().tolist() == [4, 3, 4, 3]


def test_a_call_like_one_before_is_not_compiled_again(session: Any) -> None:
    kernel, array = NumbaKernel(add_to), session.zeros(4, np.float32)
    first = kernel.prepared((1, 4), (array, 1.0), {}).compiled
    assert kernel.prepared((2, 8), (array, 2.0), {}).compiled is first
    assert kernel.prepared((1, 4), (array, 1), {}).compiled is not first


@cuda.jit(device=True)
def one_more(value):
    return value + 1


@cuda.jit
def twice_and_one(value):
    return one_more(2 * value)


@cuda.jit(device=True, forceinline=True)
def forced(value):
    return 2 * value + 1


@cuda.jit(device=True, inline="always")
def inlined(value):
    return 2 * value + 1


@numba.njit
def both(value, factor=2):
    return value * factor, 1


@numba.njit
def of_a_tuple(value):
    product, summand = both(value)
    return product + summand


@pytest.mark.parametrize("function", [twice_and_one, forced, inlined, of_a_tuple])
def test_a_kernel_calls_device_functions_without_a_driver(session: Any, function: Any) -> None:
    def kernel(x):
        i = cuda.grid(1)
        if i < x.size:
            x[i] = function(x[i])

    for dtype in (np.float32, np.int64):
        array = session.array(np.arange(5, dtype=dtype))
        session.kernel(cuda.jit(kernel))[1, 32](array)
        assert array.numpy().tolist() == [1, 3, 5, 7, 9]
    with pytest.raises(cuda.CudaSupportError):
        cuda.get_current_device()


@pytest.mark.parametrize(("signature", "is_device"), [("float32(float32)", True), ("void(float32)", False)])
def test_a_signature_in_the_decorator_fails_there_without_a_driver(signature: str, is_device: bool) -> None:
    """Numba compiles at once, before gpulease is asked: the guide names the error."""

    def function(value):
        return value if is_device else None

    with pytest.raises(cuda.CudaSupportError):
        cuda.jit(signature, device=is_device)(function)


def test_float16_is_computed(session: Any) -> None:
    @cuda.jit
    def kernel(x, y, least):
        i = cuda.grid(1)
        x[i] = one_more(x[i] * y[i]) / least
        if x[i] > least:
            x[i] = math.sqrt(x[i])

    x, y, least = np.linspace(0, 4, 32, dtype=np.float16), np.linspace(1, 2, 32, dtype=np.float16), np.float16(1.5)
    array = session.array(x)
    session.kernel(kernel)[1, 32](array, session.array(y), least)
    wanted = ((x * y).astype(np.float16) + np.float16(1)) / least
    wanted = np.where(wanted > least, np.sqrt(wanted), wanted)
    np.testing.assert_allclose(array.numpy(), wanted, rtol=2e-3)


def test_a_device_function_in_cuda_c_is_compiled_with_the_kernel(session: Any) -> None:
    source = cuda.CUSource('extern "C" __device__ int tripled(float *to, float value) { *to = 3 * value; return 0; }')
    tripled = cuda.declare_device("tripled", "float32(float32)", link=source)

    @cuda.jit
    def kernel(x):
        x[0] = tripled(x[0])

    array = session.array(np.ones(1, np.float32))
    session.kernel(kernel)[1, 1](array)
    assert array.numpy().tolist() == [3]


def test_what_needs_numba_s_linker_is_refused_by_name(session: Any) -> None:
    declared = cuda.declare_device("elsewhere", "float32(float32)")

    @cuda.jit
    def undefined(x):
        x[0] = declared(x[0])

    @cuda.jit
    def of_the_grid(x):
        cuda.cg.this_grid().sync()

    @cuda.jit(debug=True, opt=False)
    def debugged(x):
        x[0] = one_more(x[0])

    array = session.zeros(1, np.float32)
    for kernel, said in ((undefined, "elsewhere"), (of_the_grid, "cudaCGSynchronize"), (debugged, "debug=True")):
        with pytest.raises(Unsupported, match=said):
            session.kernel(kernel)[1, 1](array)


def test_lto_where_nvjitlink_is_installed_changes_no_answer(session: Any) -> None:
    kernel, array = cuda.jit(add_to.py_func), session.zeros(3, np.float32)
    kernel.targetoptions["lto"] = True
    session.kernel(kernel)[1, 32](array, np.float32(2))
    assert array.numpy().tolist() == [2] * 3


def test_an_empty_grid_is_refused_as_numba_does(session: Any) -> None:
    with pytest.raises(LaunchFailed, match="must be from 1 to 4294967295, not 0"):
        session.kernel(add_to)[0, 32](session.zeros(4, np.float32), 1.0)


def test_the_asyncio_face(daemon: Daemon) -> None:
    async def main() -> list[float]:
        async with (
            await aio.GpuBuilder(daemon.address).min_vram(1 << 20).acquire() as lease,
            aio.GpuSession(lease) as session,
        ):
            array = await session.zeros(3, np.float32)
            await session.kernel(add_to)[1, 4](array, 2.5)
            return list((await array.numpy()).tolist())

    assert asyncio.run(main()) == [2.5] * 3


@pytest.mark.parametrize(
    ("types", "arguments", "said"),
    [
        (None, ("array",), "takes 2 arguments; 1 were given"),
        (None, ("buffer", 1.0), "x is a buffer, whose elements have no type"),
        (None, (np.zeros(3), 1.0), "x is an array in host memory"),
        (None, ("array", "text"), "a launch can't take unicode_type"),
        ("void(float32[:], float32)", ("array", 1j), "value is complex128, but the signature declares float32"),
        ("void(float32[:], int32)", ("array", 1.5), "value is float64, but the signature declares int32"),
        ("void(float32[:], int32)", ("array", 2**40), "does not fit int32"),
        ("void(float32[:], float32)", ("array", np.float64(1)), "value is float64, but the signature declares float32"),
        ("void(float64[:], float32)", ("array", 1), "x is array(float32, 1d, C)"),
        ("void(float32[:, :], float32)", ("array", 1), "x is array(float32, 1d, C)"),
        ("void(float32, float32)", ("array", 1), "x is array(float32, 1d, C)"),
        ("void(float32[:])", ("array", 1), "its signature has 1 types, but 2 arguments"),
    ],
)
def test_arguments_that_do_not_fit(session: Any, types: Any, arguments: tuple[Any, ...], said: str) -> None:
    made = {"array": lambda: session.zeros(4, np.float32), "buffer": lambda: session.mem_alloc(16)}
    given = [made[value]() if isinstance(value, str) and value in made else value for value in arguments]
    with pytest.raises(LaunchFailed) as caught:
        session.kernel(add_to, types)[1, 4](*given)
    assert said in str(caught.value)


PLACES = (4, (1, 4, "stream"), (1, 4, 0, 0, 0), (1.5, 4), ("1", 4))


@pytest.mark.parametrize("place", [(4,), *(pytest.param(place, marks=pytest.mark.exhaustive) for place in PLACES)])
def test_a_place_that_is_none(session: Any, place: Any) -> None:
    with pytest.raises(LaunchFailed, match="launch of 'add_to'"):
        session.kernel(add_to)[place](session.zeros(4, np.float32), 1.0)


def test_what_is_no_kernel(session: Any) -> None:
    def wrong(x):
        x.nothing()

    with pytest.raises(LoadFailed, match="Unknown attribute 'nothing'") as caught:
        session.kernel(wrong)[1, 1](session.zeros(1, np.float32))
    assert caught.value.line == wrong.__code__.co_firstlineno + 1
    with pytest.raises(InvalidRequest, match="must be a signature of numba's"):
        session.kernel(add_to, "void(nothing)")
    with pytest.raises(InvalidRequest, match="must be a function of Triton"):
        session.kernel(7)
    with pytest.raises(InvalidRequest, match="goes to session"):
        session.kernel("text")
    with pytest.raises(InvalidRequest, match="a signature"):
        session.kernel(add_to, {"x": "*fp32"})
    with pytest.raises(Unsupported, match="'link'"):
        session.kernel(cuda.jit(link=["other.ptx"])(weigh))


def test_a_call_without_brackets_is_refused(session: Any) -> None:
    with pytest.raises(LaunchFailed, match=r"'add_to': the launch configuration is missing.*kernel\[blocks, threads\]"):
        session.kernel(add_to)(session.zeros(4, np.float32), 1.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_elements_that_numba_has_no_type_for_are_refused(session: Any, dtype: str) -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 is not tried: pip install '.[ml-dtypes]'")
    with pytest.raises(LaunchFailed, match=f"'add_to': x is an array of {dtype}.*Numba has no type"):
        session.kernel(add_to)[1, 32](session.array(np.arange(3), dtype), 1.0)


def test_numba_without_numba_cuda_is_reported_with_the_extra() -> None:
    """Numba's own folder `cuda`, without the package numba-cuda, has an older compiler."""
    program = (
        "import sys\n"
        "sys.meta_path[:] = [finder for finder in sys.meta_path if 'numba_cuda' not in type(finder).__module__]\n"
        "sys.modules.update({'numba.cuda.core': None})\n"
        "from gpulease.client.kernels.numba_kernel import NumbaKernel\n"
        "NumbaKernel(lambda x: None)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "Unsupported: numba-cuda is not installed. In gpulease's folder: pip install '.[numba]'" in ran.stderr
