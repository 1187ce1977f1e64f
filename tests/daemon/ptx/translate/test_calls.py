"""Functions: called, called again by themselves, called through pointers."""

import struct

import pytest

from gpulease.daemon.drivers.interface import ImageRejected, KernelFault
from gpulease.daemon.ptx.context import CpuContext
from helpers.calling import DOUBLE, HEAD, INT, PROTOTYPE, call, function, image, run

FIB = f".func {INT.format('fib')};" + function(
    "fib",
    f"""
    mov.u32 %r1, %r0; setp.lt.u32 %p0, %r0, 2; @%p0 bra END;
    sub.u32 %r2, %r0, 1; {call("fib", "%r2", "%r3")}
    sub.u32 %r2, %r0, 2; {call("fib", "%r2", "%r4")}
    add.u32 %r1, %r3, %r4;
    END:
    """,
)


@pytest.mark.parametrize("linkage", ["", ".visible", ".weak"])
def test_a_call_returns_its_result(context: CpuContext, linkage: str) -> None:
    module = function("double", "add.u32 %r1, %r0, %r0;", linkage)
    assert run(context, module, call("double")) == [2 * k for k in range(8)]


def test_a_guarded_call_happens_where_the_guard_says(context: CpuContext) -> None:
    body = "mov.u32 %r1, 9; setp.gt.u32 %p0, %r0, 3;" + call("double", guard="@%p0")
    assert run(context, DOUBLE, body) == [0, 0, 0, 0, 8, 10, 12, 14]


def test_functions_call_themselves(context: CpuContext) -> None:
    assert run(context, FIB, call("fib")) == [0, 1, 1, 2, 3, 5, 8, 13]


def test_functions_call_each_other(context: CpuContext) -> None:
    step = "mov.u32 %r1, {}; setp.eq.u32 %p0, %r0, 0; @%p0 bra END; sub.u32 %r2, %r0, 1; {} END:"
    module = f".func {INT.format('odd')};" + function("even", step.format(1, call("odd", "%r2")))
    module += function("odd", step.format(0, call("even", "%r2")))
    assert run(context, module, call("even")) == [1, 0] * 4


def test_each_call_has_local_variables_of_its_own(context: CpuContext) -> None:
    body = f"""
    .local .align 4 .b8 kept[20];
    mov.u64 %d0, kept; st.local.u32 [%d0+16], %r0;
    mov.u32 %r1, 0; setp.eq.u32 %p0, %r0, 0; @%p0 bra END;
    sub.u32 %r2, %r0, 1; {call("sum", "%r2", "%r3")}
    cvta.local.u64 %d2, %d0; ld.u32 %r4, [%d2+16]; add.u32 %r1, %r3, %r4;
    END:
    """
    module = f".func {INT.format('sum')};" + function("sum", body)
    assert run(context, module, call("sum")) == [k * (k + 1) // 2 for k in range(8)]


@pytest.mark.parametrize("local", ["", ".local .align 8 .b8 frame[512]; mov.u64 %d0, frame; st.local.u32 [%d0], %r0;"])
@pytest.mark.parametrize("barrier", ["", "bar.sync 0;"])
def test_endless_recursion_is_a_stack_overflow(context: CpuContext, local: str, barrier: str) -> None:
    body = f"{local} {call('deep', '%r0', '%r3')} add.u32 %r1, %r3, 1;"
    module = f".func {INT.format('deep')};" + function("deep", body)
    with pytest.raises(KernelFault, match="stack overflow by thread"):
        run(context, module, barrier + call("deep"))
    assert run(context, DOUBLE, call("double")) == [2 * k for k in range(8)]


def test_exit_in_a_function_ends_the_thread(context: CpuContext) -> None:
    module = function("leave", "setp.lt.u32 %p0, %r0, 3; @%p0 exit; mov.u32 %r1, 7;")
    module += function("through", call("leave"))
    assert run(context, module, call("through")) == [0, 0, 0] + [7] * 5


def test_a_fault_in_a_function_names_its_line(context: CpuContext) -> None:
    module = function("bad", "mov.u64 %d0, 64; ld.global.u32 %r1, [%d0];")
    with pytest.raises(KernelFault, match=r"illegal address 0x40 .* in kernel k, PTX line \d+"):
        run(context, module, call("bad"))


def test_structures_are_passed_by_value(context: CpuContext) -> None:
    module = """
    .func (.param .align 8 .b8 r[16]) swap(.param .align 8 .b8 a[16])
    {
        .reg .b32 %x; .reg .b64 %y, %z;
        ld.param.u64 %y, [a+8]; ld.param.u32 %x, [a]; mov.u64 %z, a; ld.param.u8 %x, [%z+1];
        st.param.v2.b64 [r+0], {%y, %y}; st.param.b32 [r+8], %x; ret;
    }
    """
    body = """
    .param .align 8 .b8 param0[16]; .param .align 8 .b8 retval0[16];
    add.u32 %r2, %r0, 0x300;
    st.param.b32 [param0+0], %r2; st.param.b64 [param0+8], 5;
    call.uni (retval0), swap, (param0);
    ld.param.b64 %d3, [retval0]; ld.param.b32 %r1, [retval0+8]; cvt.u32.u64 %r2, %d3; mad.lo.u32 %r1, %r2, 100, %r1;
    """
    assert run(context, module, body) == [503] * 8


TRIPLE = function("triple", "mul.lo.u32 %r1, %r0, 3;")
TABLE = f".func {INT.format('triple')}; .global .align 8 .u64 table[2] = {{double, triple}};"


@pytest.mark.parametrize("listing", [PROTOTYPE, "proto: .calltargets double, triple;"])
def test_functions_are_called_through_pointers(context: CpuContext, listing: str) -> None:
    body = f"""
    {listing}
    and.b32 %r2, %r0, 1; mul.wide.u32 %d2, %r2, 8; mov.u64 %d3, table; add.u64 %d3, %d3, %d2;
    ld.global.u64 %d4, [%d3];
    """
    assert run(context, DOUBLE + TABLE + TRIPLE, body + call("%d4", behind=", proto")) == [
        k * (3 if k & 1 else 2) for k in range(8)
    ]


def test_the_address_of_a_function_is_read_by_mov(context: CpuContext) -> None:
    body = f"{PROTOTYPE} mov.u64 %d4, double;" + call("%d4", behind=", proto")
    assert run(context, DOUBLE, body) == [2 * k for k in range(8)]


@pytest.mark.parametrize(
    "pointer",
    ["mov.u64 %d4, 0;", "mov.u64 %d4, double; add.u64 %d4, %d4, 8;", "mov.u64 %d4, %d0;", "mov.u64 %d4, other;"],
)
def test_a_call_of_what_is_no_such_function_faults(context: CpuContext, pointer: str) -> None:
    module = DOUBLE + ".func other(.param .b64 a) { ret; }"
    with pytest.raises(KernelFault, match=r"call through 0x[0-9a-f]+, which is not a function with these parameters"):
        run(context, module, f"{PROTOTYPE} {pointer}" + call("%d4", behind=", proto"))


def test_pointers_of_another_module_are_no_functions_here(context: CpuContext) -> None:
    body = f"{PROTOTYPE} mov.u64 %d4, double; st.global.u64 [%d0], %d4; mov.u32 %r1, 0; exit;"
    first = struct.pack("<8I", *run(context, DOUBLE, body + call("%d4", behind=", proto")))
    handle = int.from_bytes(first[:8], "little")
    with pytest.raises(KernelFault, match="not a function"):
        run(context, DOUBLE, f"{PROTOTYPE} mov.u64 %d3, double; mov.u64 %d4, {handle};" + call("%d4", behind=", proto"))


def test_functions_are_no_memory(context: CpuContext) -> None:
    with pytest.raises(ImageRejected, match="double is a function"):
        context.module_load(image(DOUBLE, "ld.u32 %r1, [double];"))
    with pytest.raises(KernelFault, match="illegal address"):
        run(context, DOUBLE, "mov.u64 %d4, double; ld.u32 %r1, [%d4];")


def test_aliases_are_other_names(context: CpuContext) -> None:
    module = f"{DOUBLE} .func {INT.format('twice')}; .alias twice, double;"
    assert run(context, module, call("twice")) == [2 * k for k in range(8)]


def test_shared_variables_are_the_same_for_kernels_and_functions(context: CpuContext) -> None:
    module = ".shared .align 4 .u32 common; .extern .shared .align 8 .b8 rest[];" + function(
        "add",
        """.shared .u32 mine; ld.shared.u32 %r1, [common]; add.u32 %r1, %r1, %r0; st.shared.u32 [mine], 4;
        ld.shared.u32 %r2, [rest+4]; add.u32 %r1, %r1, %r2;""",
    )
    body = f"""
    st.shared.u32 [own], 1000; st.shared.u32 [common], 50; st.shared.u32 [rest+4], 600;
    {call("add")} ld.shared.u32 %r2, [own]; add.u32 %r1, %r1, %r2;
    """
    assert run(context, module, body, shared=16) == [1650 + k for k in range(8)]


def test_indexed_branches(context: CpuContext) -> None:
    body = """
    targets: .branchtargets A, B, A, C;
    mov.u32 %r1, 5;
    @!%p3 brx.idx %r0, targets;
    A: mov.u32 %r1, 10; bra END;
    B: mov.u32 %r1, 20;
    C: add.u32 %r1, %r1, 1;
    END:
    """
    assert run(context, "", body, threads=4) == [10, 21, 10, 6]
    with pytest.raises(KernelFault, match="branch by the index 4, which is past its targets"):
        run(context, "", body, threads=5)
    assert run(context, "", body.replace("@!", "@"), threads=5) == [10] * 5
    alike = body.replace("mov.u32 %r1, 5;", "mov.u32 %r1, 5; mov.u32 %r0, 1;").replace("brx.idx", "brx.idx.uni")
    assert run(context, "", alike, threads=4) == [21] * 4


def test_only_nothing_can_be_freed(context: CpuContext) -> None:
    module = ".extern .func free(.param .b64 a);"
    body = ".param .b64 p; cvt.u64.u32 %d2, %r0; st.param.b64 [p], %d2; call free, (p); mov.u32 %r1, 3;"
    assert run(context, module, body, threads=1) == [3]
    with pytest.raises(KernelFault, match=r"free of 0x1, which no kernel has allocated, by thread \(1,0,0\)"):
        run(context, module, body, threads=2)


def test_break_points_fault(context: CpuContext) -> None:
    with pytest.raises(KernelFault, match="breakpoint"):
        run(context, "", "brkpt;")


@pytest.mark.parametrize(
    ("module", "body", "said"),
    [
        (DOUBLE, "call double;", "the sizes of the arguments and results"),
        (DOUBLE, ".param .b64 p; .param .b32 q; call (q), double, (p);", "the sizes of the arguments and results"),
        (DOUBLE, "call (%r1), double, (%r0);", r"must be \.param variables"),
        (DOUBLE, "call double, (double);", r"must be \.param variables"),
        ("", "call nowhere;", "nowhere is not a function"),
        ("", "call out;", "out is not a function"),
        (".extern .func free;", "call free;", "free is declared with other parameters than CUDA's"),
        (".extern .func calloc;", "call calloc;", "calloc is declared but defined nowhere"),
        (".extern .func f;", "mov.u64 %d1, f;", "f is declared but defined nowhere"),
        ("", "call %d1;", "needs a .callprototype"),
        ("", "P: call %d1, P;", "needs a .callprototype"),
        ("", f"{PROTOTYPE} .param .b32 p; call (p), %r1, (p), proto;", "%r1 is .b32"),
        ("", "brx.idx %r1, nowhere;", "unknown name nowhere"),
        ("", "T: .branchtargets nowhere; brx.idx %r1, T;", "unknown name nowhere"),
        ("", "T: .calltargets nowhere;", "must be declared"),
        ("", "st.param.u64 [out], %d1;", "a parameter can't be written"),
        ("", "st.u64 [out], %d1;", "a parameter can't be written"),
        ("", "st.param.u64 [%d1], %d1;", "a parameter can't be written"),
        ("", ".param .b32 p; mov.u64 %d1, p;", "address of p can't be taken"),
        (DOUBLE + DOUBLE, "", "double is declared twice"),
        (f".func double(.param .b64 a); {DOUBLE}", "", "declared with other parameters"),
        (".func f() .nonsense { ret; }", "", "'?.nonsense"),
        (".func (.reg .u32 r) f(.reg .u32 a) { ret; }", "", r"expected a \.param"),
        (".func a(); .alias a, b;", "", "an alias must be declared"),
        (".func f() { frobnicate; ret; }", "call f;", "frobnicate is not supported"),
        (".global .u64 x = y;", "", "address of y, which initialises"),
        (".extern .func f(); .global .u64 x = f;", "", "address of f, which initialises"),
        (".global .u32 y; .global .u32 x = y;", "", "does not fit a .u32"),
        (".global .u32 y; .global .u8 x = 0xFFF(y);", "", "a mask picks one byte"),
    ],
)
def test_refusals(context: CpuContext, module: str, body: str, said: str) -> None:
    with pytest.raises(ImageRejected, match=said):
        context.module_load(image(module, body))


def test_what_no_kernel_reaches_is_not_translated(context: CpuContext) -> None:
    context.module_load(image(".func f() { frobnicate; ret; }", ""))


LABELS = ", ".join(["L"] * 4000)


def test_indexed_branches_count_by_their_labels(context: CpuContext) -> None:
    branches = f"T: .branchtargets {LABELS}; {'brx.idx %r1, T;' * 9} L: ret;"
    with pytest.raises(ImageRejected, match="instructions and labels"):
        context.module_load(image("", branches))


def test_addresses_in_initialisers(context: CpuContext) -> None:
    module = """
    .global .align 4 .u32 v[4] = {1, 2, 3, 4};
    .global .align 8 .u64 p[3] = {generic(v)+4, v+12, generic(v+8)};
    .global .align 8 .b8 bytes[8] = {0xFF(v), 0xFF00(v), 0xFF0000(v), 0xFF000000(v), 0xFF00000000(v),
        0xFF0000000000(v), 0xFF000000000000(v), 0xFF00000000000000(generic(v))};
    """
    body = """
    ld.global.u64 %d2, [p]; ld.u32 %r2, [%d2]; ld.global.u64 %d2, [p+8]; ld.u32 %r3, [%d2];
    ld.global.u64 %d2, [p+16]; ld.u32 %r4, [%d2]; ld.global.u64 %d2, [bytes]; ld.u32 %r1, [%d2];
    mad.lo.u32 %r1, %r1, 10, %r2; mad.lo.u32 %r1, %r1, 10, %r3; mad.lo.u32 %r1, %r1, 10, %r4;
    """
    assert run(context, module, body, threads=1) == [1243]


@pytest.mark.exhaustive
def test_many_kernels_and_functions_take_little_time(context: CpuContext) -> None:
    chain = "".join(f".func f{k}() {{ call f{k + 1}; ret; }}\n" for k in range(2000))
    declared = "".join(f".func f{k}();\n" for k in range(2001)) + ".func f2000() { ret; }\n"
    kernels = "".join(f".entry e{k}() {{ call f{k}; ret; }}\n" for k in range(2000))
    with pytest.raises(ImageRejected, match="too many kernels call too many functions"):
        context.module_load((HEAD + declared + chain + kernels).encode())
