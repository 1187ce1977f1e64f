"""Which kernels may start while the launch before them ends: those that wait before they touch memory."""

import pytest

from gpulease.client.decode.engine.kernel_library import starting_early
from gpulease.daemon.drivers.cuda.dependent_kernels import MAX_STATEMENTS, waiting_kernels

WAIT = "griddepcontrol.wait;"


def ptx(*bodies: str) -> bytes:
    kernels = (
        f".visible .entry k{n}(\n\t.param .u64 out\n)\n.reqntid 128\n{{\n{body}\nret;\n}}\n"
        for n, body in enumerate(bodies)
    )
    return ("\n.version 8.8\n.target sm_80\n.address_size 64\n" + "".join(kernels)).encode()


@pytest.mark.parametrize(
    "before",
    [
        "",
        ".reg .b64 %d<3>; .reg .pred %p;",
        "griddepcontrol.launch_dependents;",
        "ld.param.u64 %d1, [out]; cvta.to.global.u64 %d1, %d1; mov.u32 %r1, %ctaid.x; mad.lo.s32 %r1, %r1, %r2, %r3;",
        "/* st.global.u32 [%d1], 1; */ // another { line\n",
        "setp.lt.u32 %p, %r1, 64; @%p prefetch.global.L2 [%d1]; @!%p cp.async.bulk.prefetch.L2.global [%d1], 256;",
    ],
)
def test_what_may_come_before_the_wait(before: str) -> None:
    assert waiting_kernels(ptx(before + WAIT)) == {"k0"}


@pytest.mark.parametrize(
    "body",
    [
        "",
        "ld.global.u32 %r1, [%d1];" + WAIT,
        "st.shared.u32 [%r1], 1;" + WAIT,
        "atom.global.add.u32 %r1, [%d1], 1;" + WAIT,
        "call helper;" + WAIT,
        "@%p bra DONE;" + WAIT + "DONE:",
        "@%p " + WAIT,
        "{ .reg .b32 %r1; }" + WAIT,
        "ret; //" + WAIT,
        "/*" + WAIT + "*/",
        "mov.u32 %r1, 0;" * MAX_STATEMENTS + WAIT,
    ],
)
def test_what_may_not(body: str) -> None:
    assert waiting_kernels(ptx(body)) == frozenset()


def test_each_kernel_of_an_image_is_judged_by_itself() -> None:
    assert waiting_kernels(ptx(WAIT, "ld.global.u32 %r1, [%d1];" + WAIT, WAIT)) == {"k0", "k2"}


def test_the_decode_engine_s_kernels_start_early_on_cards_that_can() -> None:
    early = starting_early(ptx(""))
    assert waiting_kernels(early) == {"k0"}
    assert b".target sm_90\n" in early
    # wgmma needs the target that such a kernel has already.
    assert b".target sm_90a\n" in starting_early(ptx("").replace(b"sm_80", b"sm_90a"))
