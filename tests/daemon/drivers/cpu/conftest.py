import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from gpulease.daemon.drivers.cpu.context import CpuContext
from gpulease.daemon.drivers.cpu.driver import CpuDriver
from gpulease.daemon.drivers.cpu.image import CpuModule

VECTORS = Path(__file__).parents[4] / "vectors" / "gpu"
SLICE_BYTES = 64 << 20

# How an operand of each width is held and moved.
REGISTERS = {"u8": "b16", "s8": "b16", "pred": "pred"}


@pytest.fixture
def vector() -> Callable[[str], bytes]:
    return lambda name: (VECTORS / name).read_bytes()


@pytest.fixture
def context() -> Iterator[CpuContext]:
    before = threading.active_count()
    opened = CpuDriver().open_context("", SLICE_BYTES)
    yield opened
    opened.close()
    assert threading.active_count() == before


@pytest.fixture(scope="module")
def lasting() -> Iterator[CpuContext]:
    """A context for a whole file's tests; they take it as `resting`, which leaves no thread behind."""
    opened = CpuDriver().open_context("", SLICE_BYTES)
    yield opened
    opened.close()


@pytest.fixture
def resting(lasting: CpuContext) -> Iterator[CpuContext]:
    yield lasting
    assert lasting.rest()


def instruction_ptx(body: str, operands: Sequence[str], result: str) -> str:
    """A kernel that runs `body` on %a, %b, %c of each row and keeps %d."""
    names = "abcd"[: len(operands)]
    registers = [(n, t) for n, t in zip(names, operands, strict=True)] + [("d", result)]
    declared = "".join(f".reg .{REGISTERS.get(t, t)} %{n};\n" for n, t in registers)
    loads = "".join(_load(n, t, 8 * k) for k, (n, t) in enumerate(zip(names, operands, strict=True)))
    return f"""
.version 8.0
.target sm_75
.address_size 64
.visible .entry row(.param .u64 rows, .param .u64 results)
{{
    .reg .b32 %i, %s, %t;
    .reg .b64 %p, %q, %w;
    .reg .pred %x, %y;
    {declared}
    mov.u32 %i, %tid.x;
    ld.param.u64 %p, [rows];
    ld.param.u64 %q, [results];
    mad.wide.u32 %p, %i, 32, %p;
    mad.wide.u32 %q, %i, 8, %q;
    {loads}
    {body}
    st.global.{"u8" if result == "pred" else result} [%q], {"%s" if result == "pred" else "%d"};
    ret;
}}
"""


def _load(name: str, kind: str, offset: int) -> str:
    if kind == "pred":
        return f"ld.global.u32 %t, [%p+{offset}];\nsetp.ne.u32 %{name}, %t, 0;\n"
    return f"ld.global.{kind} %{name}, [%p+{offset}];\n"


Rows = Sequence[tuple[int, ...]]


@pytest.fixture
def compute(resting: CpuContext) -> Iterator[Callable[[str, Sequence[str], str, Rows], list[int]]]:
    """Runs one instruction on rows of bit patterns; the results' bit patterns."""
    modules: dict[str, CpuModule] = {}
    rows_at, results_at = resting.mem_alloc(32 * 1024), resting.mem_alloc(8 * 1024)

    def run(body: str, operands: Sequence[str], result: str, rows: Rows) -> list[int]:
        if result == "pred":
            body += "\nselp.u32 %s, 1, 0, %d;"
        text = instruction_ptx(body, operands, result)
        if text not in modules:
            modules[text] = resting.module_load(text.encode())
        data = b"".join(b"".join(v.to_bytes(8, "little") for v in (*row, 0, 0, 0, 0)[:4]) for row in rows)
        resting.mem_write(rows_at, memoryview(data))
        out = bytearray(8 * len(rows))
        resting.mem_write(results_at, memoryview(bytes(out)))
        pointers = rows_at.to_bytes(8, "little") + results_at.to_bytes(8, "little")
        resting.launch(modules[text].kernels["row"], (1, 1, 1), (len(rows), 1, 1), 0, pointers, 0)
        resting.mem_read(results_at, memoryview(out))
        return [int.from_bytes(out[8 * k : 8 * k + 8], "little") for k in range(len(rows))]

    yield run
    for module in modules.values():
        resting.module_unload(module)
    resting.mem_free(rows_at)
    resting.mem_free(results_at)
