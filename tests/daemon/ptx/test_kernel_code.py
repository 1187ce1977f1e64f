"""Kernels are compiled when they are first launched, each by itself unless they share functions; images are refused
when they are loaded."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.daemon.drivers.interface import KernelStep, LaunchRejected, keep_waiting
from gpulease.daemon.native.compiler import BadIr, Effort, emit_object
from gpulease.daemon.ptx import image, kernel_code
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.kernel_code import PartCode, PartSource
from gpulease.daemon.ptx.limits import MAX_FIRST_CODE_THREADS
from gpulease.daemon.ptx.translate import module

ONE = (1, 1, 1)
HEAD = ".version 8.0\n.target sm_75\n.address_size 64\n"
STORES = """
.entry NAME(.param .u64 out)
{
    .reg .b64 %p;
    ld.param.u64 %p, [out];
    CALL
    st.global.u32 [%p], NUMBER;
    ret;
}
"""
SHARED = ".func nothing() { ret; }\n"


def storing(name: str, number: int, *, calls: bool = False) -> str:
    text = STORES.replace("NAME", name).replace("NUMBER", str(number))
    return text.replace("CALL", "call nothing;" if calls else "")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Effort]:
    """With which effort LLVM was used; this process holds no code, and has no cache."""
    efforts: list[Effort] = []

    def emit(text: str, effort: Effort) -> bytes:
        efforts.append(effort)
        return emit_object(text, effort)

    monkeypatch.setenv("GPULEASE_CPU_CACHE", "")
    monkeypatch.setattr(image, "_cached_code", type(image._cached_code)())
    monkeypatch.setattr(kernel_code, "emit_object", emit)
    return efforts


@pytest.fixture
def context() -> Iterator[CpuContext]:
    context = CpuContext(1 << 20)
    yield context
    context.close()


def run(context: CpuContext, kernel: image.CpuKernel) -> int:
    """Launch a kernel; what it stored."""
    out, found = context.mem_alloc(4), bytearray(4)
    context.launch(kernel, ONE, ONE, 0, out.to_bytes(8, "little"), 1)
    context.mem_read(out, memoryview(found))
    context.mem_free(out)
    return int.from_bytes(found, "little")


def test_a_kernel_is_compiled_at_its_first_launch_and_no_other_is(context: CpuContext, compiled: list[Effort]) -> None:
    kernels = context.module_load((HEAD + "".join(storing(f"k{n}", n) for n in range(9))).encode()).kernels
    counts = [len(compiled)]
    for number in (3, 3, 7):
        assert run(context, kernels[f"k{number}"]) == number
        counts.append(len(compiled))
    assert counts == [0, 1, 1, 2]


def test_kernels_that_share_functions_are_compiled_together(context: CpuContext, compiled: list[Effort]) -> None:
    text = HEAD + SHARED + "".join(storing(f"k{n}", n, calls=True) for n in range(3)) + storing("alone", 9)
    kernels = context.module_load(text.encode()).kernels
    assert [run(context, kernels[f"k{n}"]) for n in range(3)] == [0, 1, 2]
    assert len(compiled) == 1
    assert run(context, kernels["alone"]) == 9
    assert len(compiled) == 2


def test_a_graph_s_kernels_are_compiled_when_it_is_made_and_optimised_when_they_have_run_for_long(
    context: CpuContext, compiled: list[Effort]
) -> None:
    kernel = context.module_load((HEAD + storing("k", 5)).encode()).kernels["k"]
    out = context.mem_alloc(4)
    graph = context.graph([KernelStep(kernel, ONE, ONE, 0, out.to_bytes(8, "little"))])
    assert compiled == [Effort.FIRST]
    kernel.running.first_code_ns = 1
    graph.replay(1, keep_waiting)
    context.sync()
    assert compiled == [Effort.FIRST]
    # Its first code ran for a nanosecond or more.
    assert graph.due == [kernel]
    assert context.compile_kernel(kernel, 1)
    assert (compiled, graph.due) == ([Effort.FIRST, Effort.FEW], [])


def test_a_kernel_is_optimised_before_the_launch_that_follows_long_runs(
    context: CpuContext, compiled: list[Effort]
) -> None:
    kernel = context.module_load((HEAD + storing("k", 5)).encode()).kernels["k"]
    for left_ns in (kernel.running.first_code_ns, 1 << 60, 1):
        kernel.running.first_code_ns = left_ns
        assert run(context, kernel) == 5
        assert compiled == [Effort.FIRST]
    # Its first code ran for a nanosecond or more.
    assert kernel.is_due
    for _ in range(2):
        assert run(context, kernel) == 5
        assert compiled == [Effort.FIRST, Effort.FEW]
    assert kernel.running.first_code_ns == 0


@pytest.mark.parametrize(("simplified", "efforts"), [(1024, [Effort.LEAST, Effort.SOME]), (0, [Effort.LEAST])])
def test_a_kernel_of_many_accesses_is_simplified_after_long_runs(
    context: CpuContext,
    compiled: list[Effort],
    monkeypatch: pytest.MonkeyPatch,
    simplified: int,
    efforts: list[Effort],
) -> None:
    """One of more accesses than are simplified keeps its code."""
    monkeypatch.setattr(module, "MAX_LANE_INSTRUCTIONS", 0)
    monkeypatch.setattr(module, "MAX_OPTIMISED_ACCESSES", 0)
    monkeypatch.setattr(module, "MAX_SIMPLIFIED_ACCESSES", simplified)
    kernel = context.module_load((HEAD + storing("k", 5)).encode()).kernels["k"]
    assert run(context, kernel) == 5
    assert compiled == [Effort.LEAST]
    assert (kernel.running.first_code_ns > 0) == (len(efforts) > 1)
    if kernel.running.first_code_ns:
        kernel.running.first_code_ns = -1
    assert run(context, kernel) == 5
    assert compiled == efforts
    assert kernel.running.first_code_ns == 0


def test_launches_that_are_queued_already_run_the_optimised_code(context: CpuContext, compiled: list[Effort]) -> None:
    kernel = context.module_load((HEAD + storing("k", 5)).encode()).kernels["k"]
    out, found = context.mem_alloc(4), bytearray(4)
    record, is_shared = context.record(kernel, ONE, ONE, 0, out.to_bytes(8, "little"), 1)
    kernel.running.first_code_ns = -1
    assert context.compile_kernel(kernel, 1)
    assert compiled == [Effort.FIRST, Effort.FEW]
    # What the record was packed with is not run any more.
    entry = int.from_bytes(record[:8], "little")
    assert entry != kernel.running.entry
    context.submit((1).to_bytes(8, "little") + record[8:], is_shared)
    context.mem_read(out, memoryview(found))
    assert found[0] == 5


def test_a_large_launch_s_kernel_is_optimised_at_once(context: CpuContext, compiled: list[Effort]) -> None:
    text = (HEAD + storing("small", 4) + storing("large", 5)).encode()
    kernels = context.module_load(text).kernels
    assert context.compile_kernel(kernels["small"], MAX_FIRST_CODE_THREADS - 1)
    assert context.compile_kernel(kernels["large"], MAX_FIRST_CODE_THREADS)
    assert compiled == [Effort.FIRST, Effort.FEW]


def test_a_function_s_callers_are_compiled_once(context: CpuContext, compiled: list[Effort]) -> None:
    """The checks of the stack are made for the frames of one effort."""
    kernel = context.module_load((HEAD + SHARED + storing("k", 5, calls=True)).encode()).kernels["k"]
    assert run(context, kernel) == 5
    assert compiled == [Effort.FULL]
    assert (kernel.running.first_code_ns, kernel.is_due) == (0, False)


def test_code_that_another_process_has_optimised_is_taken_at_once(
    context: CpuContext, compiled: list[Effort], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPULEASE_CPU_CACHE", str(tmp_path / "kept"))
    text = (HEAD + storing("k", 5)).encode()
    for threads, optimised in ((1, False), (MAX_FIRST_CODE_THREADS, True), (1, True)):
        image.forget_code()
        kernel = context.module_load(text).kernels["k"]
        assert context.compile_kernel(kernel, threads)
        assert kernel.code.is_optimised == optimised
        assert run(context, kernel) == 5
    assert compiled == [Effort.FIRST, Effort.FEW]


def test_a_kernel_is_compiled_ahead_once(context: CpuContext, compiled: list[Effort]) -> None:
    kernel = context.module_load((HEAD + storing("k", 5)).encode()).kernels["k"]
    assert [context.compile_kernel(kernel, 1) for _ in range(3)] == [True, False, False]
    assert len(compiled) == 1
    assert run(context, kernel) == 5


def test_an_equal_kernel_of_another_module_of_the_image_is_not_compiled_again(
    context: CpuContext, compiled: list[Effort]
) -> None:
    text = (HEAD + storing("k", 5)).encode()
    for _ in range(2):
        assert run(context, context.module_load(text).kernels["k"]) == 5
    assert len(compiled) == 1


def test_what_llvm_refuses_is_a_launch_refused(context: CpuContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str, effort: Effort) -> bytes:
        raise BadIr("expected type")

    monkeypatch.setenv("GPULEASE_CPU_CACHE", "")
    monkeypatch.setattr(kernel_code, "emit_object", refuse)
    kernel = context.module_load((HEAD + storing("k", 123456)).encode()).kernels["k"]
    for _ in range(2):
        with pytest.raises(LaunchRejected, match="expected type"):
            context.launch(kernel, ONE, ONE, 0, bytes(8), 1)


@pytest.mark.usefixtures("compiled")
def test_code_of_modules_that_are_gone_is_bounded(context: CpuContext, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [context.module_load((HEAD + storing("k", n)).encode()) for n in range(4)]
    assert [run(context, module.kernels["k"]) for module in modules] == [0, 1, 2, 3]
    assert len(image._cached_code) == 4
    monkeypatch.setattr(image, "MAX_HELD_CODE_BYTES", modules[3].code.size_bytes)
    context.module_unload(modules[0])
    assert list(image._cached_code.values()) == [modules[3].code]
    # What is loaded still runs.
    assert run(context, modules[1].kernels["k"]) == 1


@pytest.mark.usefixtures("compiled")
def test_a_part_counts_with_its_source_and_its_code() -> None:
    source = PartSource.of("define i32 @f() {\n  ret i32 7\n}\n", Effort.LEAST, is_once=True)
    code = PartCode(source)
    assert (code.size_bytes, code.is_compiled) == (len(source.packed), False)
    assert code.address("f") == code.address("f") != 0
    assert code.is_compiled
    assert code.size_bytes > len(source.packed)
