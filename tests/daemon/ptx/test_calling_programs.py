"""Programs with functions, printing and assertions, and those of other compilers than nvcc."""

import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpulease.daemon.drivers.interface import KernelFault
from gpulease.daemon.ptx.context import CpuContext

VECTORS = Path(__file__).parents[3] / "vectors" / "gpu"
NAMES = ["calls.sm75", "calls.sm80", "calls.sm90", "calls.debug.sm75"]

Run = Callable[..., list[int]]


@pytest.fixture(scope="module", params=NAMES)
def image(request: pytest.FixtureRequest) -> bytes:
    return (VECTORS / f"{request.param}.ptx").read_bytes()


@pytest.fixture
def run(context: CpuContext, image: bytes) -> Run:
    kernels = context.module_load(image).kernels

    def launch(name: str, *numbers: int, threads: int = 32) -> list[int]:
        address = context.mem_alloc(4 * threads)
        params = struct.pack("<Q", address) + b"".join(struct.pack("<i", n) for n in numbers)
        context.launch(kernels[name], (1, 1, 1), (threads, 1, 1), 0, params, 1)
        into = bytearray(4 * threads)
        context.mem_read(address, memoryview(into))
        return list(struct.unpack(f"<{threads}i", into))

    return launch


def fib(n: int) -> int:
    return n if n < 2 else fib(n - 1) + fib(n - 2)


def test_recursion(run: Run) -> None:
    assert run("recursion", 9) == [fib(9 + k % 3) * 2 + k % 2 for k in range(32)]


def test_structures(run: Run) -> None:
    assert run("structures", 3) == [k + 3 + int(4.5 * k) + 5 for k in range(32)]


def test_pointers_to_functions(run: Run) -> None:
    assert run("pointed", 3) == [k * 3 + 4 if k & 1 else k + 3 + 2 for k in range(32)]


def test_a_barrier_in_a_function(run: Run) -> None:
    assert run("meeting") == [2 * k + 1 for k in range(32)]


def test_a_switch(run: Run) -> None:
    def chosen(k: int) -> int:
        return {0: 5, 1: k * 3, 2: 7, 3: (k - 9) ^ 1, 4: 1, 5: k // 3}.get(k & 7, -k)

    assert run("choose") == [chosen(k) for k in range(32)]


def test_endless_recursion_overflows(run: Run) -> None:
    with pytest.raises(KernelFault, match="stack overflow by thread"):
        run("overflow")
    assert len(run("meeting")) == 32


def test_printing(context: CpuContext, image: bytes) -> None:
    texts: list[tuple[str, str]] = []
    context.printed = lambda kernel, text: texts.append((kernel, text))
    kernel = context.module_load(image).kernels["print"]
    context.launch(kernel, (1, 1, 1), (3, 1, 1), 0, struct.pack("<i", -1), 1)
    context.sync()
    lines = [f"-1 {c}bc {0.5 * k:5.2f}|{-(1 << 33):<4}|x\n5 values\n" for k, c in enumerate("abc")]
    assert texts == [("print", "".join(lines))]


def test_an_assertion(context: CpuContext, image: bytes) -> None:
    kernel = context.module_load(image).kernels["asserted"]
    context.launch(kernel, (1, 1, 1), (8, 1, 1), 0, struct.pack("<i", 5), 1)
    with pytest.raises(KernelFault, match=r"assertion failed: calls.cu:\d+: .*asserted.*too many.* thread \(5,0,0\)"):
        context.sync()


def array(context: CpuContext, values: "np.ndarray[tuple[int], np.dtype[np.generic]]") -> tuple[int, bytes]:
    """The values in device memory, and numba's parameters for them."""
    address = context.mem_alloc(values.nbytes)
    context.mem_write(address, values.data.cast("B"))
    return address, struct.pack("<7Q", 0, 0, len(values), values.itemsize, address, len(values), values.itemsize)


def numba(context: CpuContext, name: str, params: bytes, threads: int) -> None:
    (kernel,) = context.module_load((VECTORS / f"numba.{name}.sm80.ptx").read_bytes()).kernels.values()
    context.launch(kernel, (1, 1, 1), (threads, 1, 1), 0, params, 1)
    context.sync()


def test_numba_s_saxpy(context: CpuContext) -> None:
    x, y = np.arange(50, dtype="f4"), np.ones(50, "f4")
    (_, given_x), (at, given_y) = array(context, x), array(context, y)
    numba(context, "saxpy", struct.pack("<if", 40, 2.5) + given_x + given_y, 64)
    into = np.empty_like(y)
    context.mem_read(at, into.data.cast("B"))
    assert np.array_equal(into, np.where(np.arange(50) < 40, x * np.float32(2.5) + y, y))


def test_numba_s_loops(context: CpuContext) -> None:
    x = np.arange(1, 31, dtype="i8")
    (_, given), (at, results) = array(context, x), array(context, np.zeros_like(x))
    numba(context, "steps", given + results, 64)
    into = np.empty_like(x)
    context.mem_read(at, into.data.cast("B"))

    def steps(n: int) -> int:
        return 0 if n == 1 else 1 + steps(n // 2 if n % 2 == 0 else 3 * n + 1)

    assert into.tolist() == [steps(k) for k in range(1, 31)]


def test_numba_s_shared_memory(context: CpuContext) -> None:
    x = np.arange(100, dtype="f4")
    at, given = array(context, x)
    numba(context, "reverse", given, 100)
    into = np.empty_like(x)
    context.mem_read(at, into.data.cast("B"))
    assert np.array_equal(into, x[::-1])


def test_numba_s_print(context: CpuContext) -> None:
    texts: list[str] = []
    context.printed = lambda kernel, text: texts.append(text)
    _, given = array(context, np.array([1.5, -2], "f4"))
    numba(context, "report", given, 2)
    assert texts == ["value 0 1.500000\nvalue 1 -2.000000\n"]


@pytest.mark.parametrize(("kind", "mangled"), [("f4", "powersIf"), ("i8", "powersIx")])
def test_nvrtc_s_templates(context: CpuContext, kind: str, mangled: str) -> None:
    kernels = context.module_load((VECTORS / "nvrtc.sm90.ptx").read_bytes()).kernels
    (kernel,) = (kernel for name, kernel in kernels.items() if re.search(mangled, name))
    x = np.arange(20).astype(kind)
    at, _ = array(context, x)
    context.launch(kernel, (1, 1, 1), (32, 1, 1), 0, struct.pack("<Qi", at, len(x)), 1)
    into = np.empty_like(x)
    context.mem_read(at, into.data.cast("B"))
    assert into.tolist() == [k ** (k % 5) for k in range(20)]
