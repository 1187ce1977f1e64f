"""Functions in which threads wait become part of the kernels that call them."""

import pytest

from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.limits import MAX_WATCHING_INSTRUCTIONS
from helpers.calling import DOUBLE, INT, PROTOTYPE, call, function, image, run

pytestmark = pytest.mark.exhaustive

ROTATE = """
    .shared .align 4 .b8 sh[32];
    shl.b32 %r2, %r0, 2; mov.u32 %r3, sh; add.u32 %r3, %r3, %r2; st.shared.u32 [%r3], %r0;
    bar.sync 0;
    xor.b32 %r2, %r2, 28; mov.u32 %r3, sh; add.u32 %r3, %r3, %r2; ld.shared.u32 %r1, [%r3];
"""


def test_functions_with_barriers_are_inlined(context: CpuContext) -> None:
    module = function("mirror", ROTATE) + function("outer", call("mirror") + "bar.sync 0; add.u32 %r1, %r1, 1;")
    body = f"""
    mov.u32 %r4, own; st.shared.u32 [%r4], 77;
    {call("outer")} {call("double", "%r1", "%r5")} {call("outer", "%r0", "%r2")}
    add.u32 %r1, %r5, %r2; ld.shared.u32 %r2, [%r4]; add.u32 %r1, %r1, %r2;
    """
    assert run(context, module + DOUBLE, body) == [3 * (8 - k) + 77 for k in range(8)]


def test_an_inlined_function_may_return_early_and_be_guarded(context: CpuContext) -> None:
    module = function("some", "st.param.b32 [r], 5; setp.gt.u32 %p1, %r0, 5; @%p1 ret; bar.sync 0; mov.u32 %r1, 6;")
    body = "mov.u32 %r1, 9; setp.gt.u32 %p0, %r0, 3;" + call("some", guard="@%p0")
    assert run(context, module, body) == [0] * 4 + [6, 6, 5, 5]


def test_what_is_passed_is_kept_across_a_barrier(context: CpuContext) -> None:
    body = """.param .b32 p; .param .b32 q; st.param.b32 [p], %r0; bar.sync 0;
    call (q), double, (p); bar.sync 0; ld.param.b32 %r1, [q];"""
    assert run(context, DOUBLE, body) == [2 * k for k in range(8)]


TURNS = ".global .u32 turn;" + function(
    "await",
    "mov.u64 %d1, turn; AGAIN: ld.volatile.global.u32 %r1, [%d1]; setp.ne.u32 %p0, %r1, %r0; @%p0 bra AGAIN;",
)
NEXT = "mov.u64 %d4, turn; add.u32 %r5, %r1, 1; st.volatile.global.u32 [%d4], %r5;"


def test_a_thread_waits_in_a_function_for_memory_that_a_later_one_writes(context: CpuContext) -> None:
    module = TURNS + function("outer", call("await"))
    body = f"sub.u32 %r2, 7, %r0; {call('outer', '%r2')} {NEXT}"
    assert run(context, module, body) == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("reason", ["calls itself", "is long", "computes its parameter's address"])
def test_loops_that_watch_memory_are_called_where_they_can_t_be_inlined(context: CpuContext, reason: str) -> None:
    hinder = {
        "calls itself": "setp.gt.u32 %p1, %r0, 99; @!%p1 bra OUT;" + call("outer") + "OUT:",
        "is long": "add.u32 %r3, %r3, 1;" * MAX_WATCHING_INSTRUCTIONS,
        "computes its parameter's address": "mov.b64 %d2, a; ld.param.u32 %r3, [%d2];",
    }[reason]
    module = f".func {INT.format('outer')};" + TURNS + function("outer", hinder + call("await"))
    assert run(context, module, call("outer") + NEXT) == list(range(8))


def test_barriers_in_functions_that_call_themselves_are_refused(context: CpuContext) -> None:
    module = f".func {INT.format('deep')};" + function("deep", "bar.sync 0;" + call("deep"))
    with pytest.raises(ImageRejected, match="deep waits for other threads and calls itself"):
        context.module_load(image(module, call("deep")))
    module = function("waits", "bar.sync 0;")
    with pytest.raises(ImageRejected, match="called through a pointer is not supported"):
        context.module_load(image(module, f"{PROTOTYPE} mov.u64 %d4, waits;" + call("%d4", behind=", proto")))


@pytest.mark.parametrize("barrier", ["", "bar.sync 0;"])
def test_calls_of_calls_are_refused_in_little_time(context: CpuContext, barrier: str) -> None:
    module = f".func f0() {{ {barrier} ret; }}"
    module += "".join(f".func f{k}() {{ {f'call f{k - 1};' * 9} ret; }}\n" for k in range(1, 40))
    if barrier:
        with pytest.raises(ImageRejected, match="too many calls"):
            context.module_load(image(module, "call f39;"))
    else:
        context.module_load(image(module, "call f2;"))
    deep = f".func f0() {{ {barrier} ret; }}"
    deep += "".join(f".func f{k}() {{ call f{k - 1}; ret; }}\n" for k in range(1, 2000))
    if barrier:
        with pytest.raises(ImageRejected, match="waits for other threads"):
            context.module_load(image(deep, "call f1999;"))


LABELS = ", ".join(["L"] * 4000)


@pytest.mark.parametrize(
    ("inside", "calls"),
    [
        ("trap;" * 9000, 9000),
        (f"T: .branchtargets {LABELS}; {'brx.idx %r0, T;' * 7} L:", 2000),
        ("".join(f"mov.u32 %r{n}, 1;" for n in range(9)), 3000),
        (" ".join(f"{{ .reg .b32 %a{n}; mov.u32 %a{n}, 1; }}" for n in range(4000)), 20),
    ],
)
def test_calls_that_would_become_gigabytes_are_refused_before(context: CpuContext, inside: str, calls: int) -> None:
    module = f".func f() {{ .reg .b32 %r<9>; bar.sync 0; {inside} ret; }}"
    with pytest.raises(ImageRejected, match="too many calls"):
        context.module_load(image(module, "call f;" * calls))
