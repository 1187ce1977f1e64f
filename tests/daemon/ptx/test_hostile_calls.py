"""Mangled programs with calls, printing and tables of functions: refused, or loaded; nothing else."""

import random
import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.interface import ImageRejected, KernelFault
from gpulease.daemon.native.compiler import Effort, emit_object
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.parse.parser import parse
from gpulease.daemon.ptx.translate.module import translate

VECTORS = Path(__file__).parents[3] / "vectors" / "gpu"
SMALL = """
.version 8.0
.target sm_75
.address_size 64
.extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 v);
.extern .func __assertfail(.param .b64 m, .param .b64 f, .param .b32 l, .param .b64 n, .param .b64 s);
.func (.param .b32 r) g(.param .b32 a);
.global .align 8 .u64 table[2] = {g, generic(x)+4};
.global .align 1 .b8 x[8] = {37, 115, 10, 0, 0xFF(table), 1};
.shared .align 4 .u32 sh;
.func (.param .b32 r) w(.param .b32 a)
{
    .shared .u32 own; .local .align 8 .b8 lo[16]; .reg .b32 %r<4>; .reg .pred %p;
    ld.param.u32 %r1, [a]; st.shared.u32 [own], %r1; st.local.u32 [lo+8], %r1;
    bar.sync 0;
    setp.eq.u32 %p, %r1, 3; @%p exit;
    ld.shared.u32 %r2, [own]; st.param.b32 [r+0], %r2; ret;
}
.func (.param .b32 r) g(.param .b32 a)
{
    .reg .b32 %r<4>; .reg .pred %p; .local .align 4 .b8 lo[8];
    ld.param.u32 %r1, [a]; setp.eq.u32 %p, %r1, 0; @%p ret; sub.u32 %r1, %r1, 1;
    { .param .b32 p; .param .b32 q; st.param.b32 [p], %r1; call (q), g, (p); ld.param.b32 %r2, [q]; }
    st.param.b32 [r], %r2; ret;
}
.entry k(.param .u64 a, .param .u32 n)
{
    .reg .b32 %r<8>; .reg .b64 %d<8>; .reg .pred %p;
    .param .b32 p; .param .b32 q; .param .b64 s; .param .b64 t;
    P: .callprototype (.param .b32 _) _ (.param .b32 _);
    C: .calltargets g;
    T: .branchtargets A, B;
    ld.param.u32 %r1, [n]; st.param.b32 [p+0], %r1;
    call.uni (q), w, (p); ld.param.b32 %r2, [q];
    mov.u64 %d1, table; ld.global.u64 %d2, [%d1]; call (q), %d2, (p), P;
    setp.ne.u32 %p, %r2, 0; @%p call (q), g, (p);
    brx.idx %r2, T;
    A: st.param.b64 [s], %d1; st.param.b64 [t], %d2; call (q), vprintf, (s, t);
    B: st.param.b64 [s], 1; call __assertfail, (s, s, p, s, t);
}
"""
TOKENS = re.compile(r"\s+|[\w$%.:]+|.")
SPARE = [";", ",", "(", ")", "{", "}", "g", "w", "p", "q", "P", "T", "sh", "%r1", "%d1", "%p", "call", "ret", ".param"]
SPARE += [".b32", ".b64", ".shared", ".local", "table", "vprintf", "st.param.b32", "ld.param.u32", "[", "]", "+", "64"]


def mangled(text: str, seed: int) -> str:
    rng = random.Random(seed)
    tokens = TOKENS.findall(text)
    for _ in range(rng.randrange(1, 4)):
        at, other = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        match rng.randrange(5):
            case 0:
                tokens.pop(at)
            case 1:
                tokens.insert(at, tokens[at])
            case 2:
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case 3:
                tokens[at] = rng.choice(SPARE)
            case _:
                tokens.insert(at, rng.choice(SPARE))
    return "".join(tokens)


def loads(text: str) -> bool:
    """Whether it is taken; what is taken must be IR that LLVM takes."""
    try:
        parts = translate(parse(text))
    except ImageRejected:
        return False
    for part in parts:
        emit_object(part.text, Effort.LEAST)
    return True


def test_the_program_loads_as_it_is() -> None:
    assert loads(SMALL)


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32))
def test_a_mangled_program_is_rejected_or_loads(seed: int) -> None:
    loads(mangled(SMALL, seed))


@pytest.mark.exhaustive
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["calls.sm75", "calls.debug.sm75", "numba.report.sm80"]))
def test_a_mangled_file_is_rejected_or_loads(seed: int, name: str) -> None:
    loads(mangled((VECTORS / f"{name}.ptx").read_text(), seed))


@pytest.mark.parametrize("number", [0, 1, 3, 40])
def test_hostile_values_fault_at_most(context: CpuContext, number: int) -> None:
    context.printed = lambda kernel, text: None
    kernel = context.module_load(SMALL.encode()).kernels["k"]
    context.launch(kernel, (2, 1, 1), (33, 1, 1), 0, bytes(8) + number.to_bytes(8, "little")[:4], 1)
    with suppress(KernelFault):
        context.sync()
