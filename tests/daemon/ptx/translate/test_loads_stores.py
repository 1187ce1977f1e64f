"""Every access is checked: what may be touched, and what ends the kernel."""

import re
from collections.abc import Callable, Sequence

import pytest

from gpulease.daemon.drivers.interface import ImageRejected, KernelFault
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.parse.parser import parse
from gpulease.daemon.ptx.translate.module import translate

Compute = Callable[[str, Sequence[str], str, Sequence[tuple[int, ...]]], list[int]]

TYPES = {"u8": 1, "s8": 1, "b8": 1, "u16": 2, "s16": 2, "b32": 4, "s32": 4, "f32": 4, "u64": 8, "f64": 8}


def kernel(body: str, module: str = "") -> bytes:
    return f"""
.version 8.0
.target sm_75
.address_size 64
{module}
.entry k(.param .u64 a, .param .u64 b)
{{
    .shared .align 8 .b8 sh[40];
    .local .align 8 .b8 lo[24];
    .reg .b16 %h<4>; .reg .b32 %r<8>; .reg .b64 %d<8>; .reg .f32 %f<8>; .reg .f64 %g<8>;
    ld.param.u64 %d0, [a];
    ld.param.u64 %d1, [b];
    {body}
    ret;
}}
""".encode()


def run(context: CpuContext, image: bytes, a: int, b: int = 0) -> None:
    module = context.module_load(image)
    params = (a % 2**64).to_bytes(8, "little") + (b % 2**64).to_bytes(8, "little")
    context.launch(module.kernels["k"], (1, 1, 1), (1, 1, 1), 0, params, 5)
    context.module_unload(module)


def fault(context: CpuContext, image: bytes, a: int, b: int = 0) -> KernelFault:
    with pytest.raises(KernelFault) as caught:
        run(context, image, a, b)
    return caught.value


REGISTER = {1: "%r1", 2: "%h1", 4: "%r1", 8: "%d7"}


def held_in(kind: str) -> str:
    return {"f32": "%f1", "f64": "%g1"}.get(kind, REGISTER[TYPES[kind]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("space", [".global", ""])
@pytest.mark.parametrize("operation", ["ld", "st"])
def test_global_accesses_are_checked_to_the_byte(context: CpuContext, kind: str, space: str, operation: str) -> None:
    size = TYPES[kind]
    address = context.mem_alloc(256 + size)
    operands = f"{held_in(kind)}, [%d0]" if operation == "ld" else f"[%d0], {held_in(kind)}"
    image = kernel(f"{operation}{space}.{kind} {operands};")
    for good in (address, address + 256 - size, address + 256):
        run(context, image, good)
    for bad in (address - size, address + 256 + size, 0, 2**63, 2**64 - size):
        error = fault(context, image, bad)
        assert error.address == bad
        assert f"illegal address {bad:#x} ({size}-byte {'load' if operation == 'ld' else 'store'})" in str(error)
        assert (error.tag, error.kernel, error.context_lost) == (5, "k", False)
    if size > 1:
        assert "misaligned address" in str(fault(context, image, address + 1))


def test_a_scalar_may_be_written_as_a_vector_of_one(context: CpuContext) -> None:
    address = context.mem_alloc(8)
    context.mem_write(address, memoryview(bytes(range(8))))
    run(context, kernel("ld.global.b32 { %r1 }, [ %d0 + 0 ]; st.global.b32 [ %d0 + 4 ], { %r1 };"), address)
    into = bytearray(8)
    context.mem_read(address, memoryview(into))
    assert into == bytes(range(4)) * 2
    with pytest.raises(ImageRejected, match="expected 1 register"):
        context.module_load(kernel("ld.global.b32 {%r1, %r2}, [%d0];"))


def test_vectors_are_one_access(context: CpuContext) -> None:
    address = context.mem_alloc(24)
    image = kernel("ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%d0]; st.global.v4.u32 [%d0], {%r1,%r2,%r3,%r4};")
    run(context, image, address)
    assert "(16-byte load)" in str(fault(context, image, address + 16))
    assert "misaligned" in str(fault(context, image, address + 8))


def test_cuda_s_own_shared_memory_lies_behind_the_kernel_s(context: CpuContext) -> None:
    text = "mov.u32 %r1, sh; mov.u32 %r2, %reserved_smem_offset_1; st.global.u32 [%d0], %r2;"
    text += "cvt.u32.u64 %r3, %d1; add.u32 %r3, %r2, %r3; st.shared.u32 [%r3], %r1;"
    address = context.mem_alloc(4)
    run(context, kernel(text), address, 284)
    into = bytearray(4)
    context.mem_read(address, memoryview(into))
    assert int.from_bytes(into, "little") == 48
    assert "4-byte store" in str(fault(context, kernel(text), address, 288))


def test_freed_memory_faults_and_comes_back_as_zeros(context: CpuContext) -> None:
    address = context.mem_alloc(100)
    image = kernel("mov.u32 %r1, 7; st.global.u32 [%d0], %r1;")
    run(context, image, address)
    context.mem_free(address)
    assert fault(context, image, address).address == address
    assert context.mem_alloc(100) == address
    into = bytearray(b"x" * 100)
    context.mem_read(address, memoryview(into))
    assert into == bytes(100)


@pytest.mark.parametrize(
    ("space", "name", "size"), [("shared", "sh", 40), ("local", "lo", 24), ("param", "a", 16)], ids=lambda v: str(v)
)
def test_windows_are_checked_to_the_byte(context: CpuContext, space: str, name: str, size: int) -> None:
    image = kernel(f"mov.u64 %d2, {name}; add.u64 %d2, %d2, %d0; ld.{space}.u32 %r1, [%d2];")
    for good in (0, size - 4):
        run(context, image, good)
    for bad in (size, size - 2, -4, 2**63, 2**64 - 4):
        error = fault(context, image, bad)
        assert re.search(f"(illegal|misaligned) {space} address", str(error))
    assert f"illegal {space} address {size:#x}" in str(fault(context, image, size))


@pytest.mark.parametrize("space", ["shared", "local"])
def test_generic_pointers_into_windows_are_checked_to_the_byte(context: CpuContext, space: str) -> None:
    name, size = {"shared": ("sh", 40), "local": ("lo", 24)}[space]
    image = kernel(f"mov.u64 %d2, {name}; cvta.{space}.u64 %d2, %d2; add.u64 %d2, %d2, %d0; st.u32 [%d2], %r1;")
    for good in (0, size - 4):
        run(context, image, good)
    for bad in (size, -4):
        assert "illegal address" in str(fault(context, image, bad))


def test_constant_addresses_outside_of_a_variable_fault_too(context: CpuContext) -> None:
    run(context, kernel("ld.shared.u32 %r1, [sh+36];"), 0)
    assert "illegal shared address 0x28" in str(fault(context, kernel("ld.shared.u32 %r1, [sh+40];"), 0))
    assert "illegal local address" in str(fault(context, kernel("st.local.u32 [lo+-4], %r1;"), 0))
    assert "illegal param address" in str(fault(context, kernel("ld.param.u32 %r1, [b+8];"), 0))


def test_a_module_s_variables_may_be_touched_and_nothing_beside_them(context: CpuContext) -> None:
    module = ".global .align 4 .u32 g[3] = {1, 2, 3}; .const .u32 c = 9;"
    image = kernel(
        "ld.global.u32 %r1, [g+8]; ld.const.u32 %r2, [c]; add.u32 %r1, %r1, %r2; st.global.u32 [%d0], %r1;", module
    )
    address = context.mem_alloc(4)
    run(context, image, address)
    into = bytearray(4)
    context.mem_read(address, memoryview(into))
    assert into[0] == 12
    assert "illegal" in str(fault(context, kernel("ld.global.u32 %r1, [g+12];", module), 0))


def test_loads_extend_and_stores_cut(compute: Compute) -> None:
    narrow = "st.global.u32 [%q], %a; ld.global.{} %d, [%q];"
    assert compute(narrow.format("s8"), ["u32"], "u32", [(0x80,), (0x17F,)]) == [0xFFFFFF80, 0x7F]
    assert compute(narrow.format("u16"), ["u32"], "u32", [(0x18000,)]) == [0x8000]
    wide = "mov.u32 %s, 0; st.global.u32 [%q], %s; st.global.u8 [%q], %a; ld.global.u32 %d, [%q];"
    assert compute(wide, ["u32"], "u32", [(0x1FF,)]) == [0xFF]


@pytest.mark.parametrize("order", ["volatile", "relaxed.gpu", "acquire.sys", "weak"])
def test_ordered_loads_read_what_is_there(compute: Compute, order: str) -> None:
    assert compute(f"ld.{order}.global.u32 %d, [%p];", ["u32"], "u32", [(77,)]) == [77]


def test_cache_hints_change_nothing(compute: Compute) -> None:
    for spelling in ("ld.global.nc.u32", "ld.global.cg.u32", "ld.global.nc.L1::evict_last.L2::128B.u32"):
        assert compute(f"{spelling} %d, [%p];", ["u32"], "u32", [(7,)]) == [7]


STRONG = {
    "ld.volatile.global.u32 %r1, [%d0]": "load atomic volatile i32, ptr X monotonic, align 4",
    "ld.relaxed.gpu.global.u64 %d7, [%d0]": "load atomic volatile i64, ptr X monotonic, align 8",
    "ld.acquire.cta.shared.u8 %r1, [sh]": "load atomic volatile i8, ptr X acquire, align 1",
    "ld.global.cv.f32 %f1, [%d0]": "load atomic volatile i32, ptr X monotonic, align 4",
    "st.volatile.u16 [%d0], %h1": "store atomic volatile i16 X, ptr X monotonic, align 2",
    "st.relaxed.sys.global.f64 [%d0], %g1": "store atomic volatile i64 X, ptr X monotonic, align 8",
    "st.release.gpu.global.u32 [%d0], %r1": "store atomic volatile i32 X, ptr X release, align 4",
    "atom.global.add.u32 %r1, [%d0], 5": "atomicrmw add ptr X, i32 5 seq_cst",
    "ld.global.u32 %r1, [%d0]": "load i32, ptr X, align 4",
    "st.weak.global.u32 [%d0], %r1": "store i32 X, ptr X, align 4",
}


@pytest.mark.parametrize("text", STRONG)
def test_strong_accesses_are_the_host_s_atomic_ones(text: str) -> None:
    (part,) = translate(parse(kernel(f"{text};").decode()))
    assert STRONG[text] in re.sub(r"%[\w.]+", "X", part.text)
