"""Kernels that use several families at once, as nvcc writes them, against numpy."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpulease.daemon.drivers.interface import KernelFault
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.image import CpuModule

# As users' longest kernels run; the tests of single instructions take the first code.
pytestmark = pytest.mark.usefixtures("optimised")

Array = np.ndarray[Any, np.dtype[Any]]
VECTORS = Path(__file__).parents[3] / "vectors" / "gpu"
RNG = np.random.default_rng(5)

# A loop that goes back by its place in a list while memory is watched: thread 1 lets thread 0 go on.
INDEXED_LOOP = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry indexed(.param .u64 into)
{
    .reg .pred %p;
    .reg .b32 %t, %v, %kept;
    .reg .b64 %at, %mine;
    ld.param.u64 %at, [into];
    mov.u32 %t, %tid.x;
    mad.wide.u32 %mine, %t, 4, %at;
    add.u32 %kept, %t, 5;
    setp.eq.u32 %p, %t, 1;
    @%p st.volatile.global.u32 [%at+8], 1;
LOOP:
    ld.volatile.global.u32 %v, [%at+8];
TARGETS: .branchtargets LOOP, DONE;
    brx.idx %v, TARGETS;
DONE:
    st.global.u32 [%mine], %kept;
    ret;
}
"""


@pytest.fixture(scope="module", params=["together.sm75", "together.debug.sm75"])
def module(request: pytest.FixtureRequest, lasting: CpuContext) -> CpuModule:
    return lasting.module_load((VECTORS / f"{request.param}.ptx").read_bytes())


@pytest.fixture
def context(resting: CpuContext, monkeypatch: pytest.MonkeyPatch) -> CpuContext:
    monkeypatch.setattr(resting, "printed", lambda kernel, text: None)
    return resting


def run(
    context: CpuContext, module: CpuModule, name: str, shape: tuple[int, int], *arguments: Array | int
) -> list[Array]:
    """The arrays as the kernel leaves them."""
    params, placed = b"", []
    for argument in arguments:
        if isinstance(argument, int):
            params += struct.pack("<i", argument)
            continue
        address = context.mem_alloc(argument.nbytes)
        context.mem_write(address, np.ascontiguousarray(argument).data.cast("B"))
        placed.append((address, argument))
        params += struct.pack("<Q", address)
    context.launch(module.kernels[name], (shape[0], 1, 1), (shape[1], 1, 1), 0, params, 1)
    context.sync()
    results = []
    for address, array in placed:
        results.append(np.empty(array.shape, array.dtype))
        context.mem_read(address, results[-1].data.cast("B"))
        context.mem_free(address)
    return results


def fib(n: int) -> int:
    return n if n < 2 else fib(n - 1) + fib(n - 2)


@pytest.mark.parametrize("threads", [32, 96])
def test_layernorm(context: CpuContext, module: CpuModule, threads: int) -> None:
    x, gain, bias = (RNG.normal(size=size).astype("f4") for size in ((3, 100), 100, 100))
    y = run(context, module, "layernorm", (3, threads), x, gain, bias, np.zeros_like(x), 100)[3]
    wide = x.astype("f8")
    scaled = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    assert np.allclose(y, scaled * gain + bias, rtol=1e-5, atol=1e-5)


def test_softmax(context: CpuContext, module: CpuModule) -> None:
    x = RNG.normal(size=(2, 77)).astype("f2")
    y = run(context, module, "softmax", (2, 64), x, np.zeros_like(x), 77)[1]
    powers = np.exp(x.astype("f8"))
    assert np.allclose(y.astype("f8"), powers / powers.sum(1, keepdims=True), rtol=2e-3)


def test_recursion_beside_barriers(context: CpuContext, module: CpuModule) -> None:
    (out,) = run(context, module, "recursion", (1, 64), np.zeros(64, "i4"), 6)
    found = [fib(6 + t % 5) for t in range(64)][::-1]
    odd = [sum(value & 1 for value in found[first : first + 32]) for first in (0, 32)]
    for t, value in enumerate(out):
        other = found[t] + fib(t % 7)
        assert value == other + fib(((other + 6) & 7) + t % 3) * 1000 + odd[t // 32] * 100000


def test_prints_where_threads_wait(context: CpuContext, module: CpuModule) -> None:
    texts: list[str] = []
    context.printed = lambda kernel, text: texts.append(text)
    run(context, module, "report", (1, 32), 30)
    lines = "".join(texts).splitlines()
    assert sorted(lines) == sorted([f"496 {'abc'[t % 3]}bc" for t in range(32)] + ["2 values"])
    with pytest.raises(KernelFault, match=r"assertion failed: together.cu:\d+: .*report.*too few"):
        run(context, module, "report", (1, 32), 31)


def test_a_stack_s_limit_where_threads_wait(context: CpuContext, module: CpuModule) -> None:
    with pytest.raises(KernelFault, match="stack overflow"):
        run(context, module, "overflow", (1, 32), np.zeros(32, "i4"))


@pytest.mark.exhaustive
def test_a_lock_that_a_function_takes(context: CpuContext, module: CpuModule) -> None:
    assert run(context, module, "locked", (1, 40), np.zeros(1, "i4"), np.zeros(1, "i4"))[0] == 40


def test_a_loop_by_index(context: CpuContext) -> None:
    indexed = context.module_load(INDEXED_LOOP)
    assert run(context, indexed, "indexed", (1, 2), np.zeros(3, "i4"))[0].tolist() == [5, 6, 1]
