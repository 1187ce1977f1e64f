import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from gpulease.daemon.ptx import image
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.driver import CpuDriver
from gpulease.daemon.ptx.image import CpuModule
from helpers.rows import RESULT_BYTES, ROW_BYTES, rows_bytes, rows_ptx

VECTORS = Path(__file__).parents[3] / "vectors" / "gpu"
SLICE_BYTES = 64 << 20


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
    """Yield a context for all tests of a file. Tests use it as `resting`, which leaves no thread behind."""
    opened = CpuDriver().open_context("", SLICE_BYTES)
    yield opened
    opened.close()


@pytest.fixture
def resting(lasting: CpuContext) -> Iterator[CpuContext]:
    yield lasting
    assert lasting.rest()


@pytest.fixture
def optimised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimise kernels before their first launch, like those that run for long."""
    monkeypatch.setattr(image, "MAX_FIRST_CODE_THREADS", 0)


@pytest.fixture
def first_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimise no kernel before its first launch, however large the launch is."""
    monkeypatch.setattr(image, "MAX_FIRST_CODE_THREADS", sys.maxsize)


Rows = Sequence[tuple[int, ...]]

# The most that the kernels of `rows` read and write: 1024 rows, and 128 results for each.
ROWS_BYTES = ROW_BYTES * 1024
RESULTS_BYTES = RESULT_BYTES * 1024 * 128


ComputeAll = Callable[..., dict[str, list[int]]]


@pytest.fixture
def compute_all(resting: CpuContext) -> Iterator[ComputeAll]:
    """Return a function that runs instructions on rows of bit patterns. It returns the results' bit patterns by
    instruction.
    """
    modules: dict[str, CpuModule] = {}
    rows_at, results_at = resting.mem_alloc(ROWS_BYTES), resting.mem_alloc(RESULTS_BYTES)

    def run(
        bodies: Iterable[str], operands: Sequence[str], result: str, rows: Rows, module: str = ""
    ) -> dict[str, list[int]]:
        bodies = list(bodies)
        text = rows_ptx(bodies, operands, result, module)
        if text not in modules:
            modules[text] = resting.module_load(text.encode())
        resting.mem_write(rows_at, memoryview(rows_bytes(rows)))
        found = np.zeros((len(rows), len(bodies)), "<u8")
        resting.mem_write(results_at, memoryview(found.tobytes()))
        pointers = rows_at.to_bytes(8, "little") + results_at.to_bytes(8, "little")
        resting.launch(modules[text].kernels["row"], (1, 1, 1), (len(rows), 1, 1), 0, pointers, 0)
        resting.mem_read(results_at, found.data.cast("B"))
        return dict(zip(bodies, found.T.tolist(), strict=True))

    yield run
    for module in modules.values():
        resting.module_unload(module)
    resting.mem_free(rows_at)
    resting.mem_free(results_at)


@pytest.fixture
def compute(compute_all: ComputeAll) -> Callable[[str, Sequence[str], str, Rows], list[int]]:
    """Return a function that runs one instruction on rows of bit patterns, and returns the results' bit patterns."""
    return lambda body, operands, result, rows: compute_all([body], operands, result, rows)[body]
