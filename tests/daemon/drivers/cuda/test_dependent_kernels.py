"""Which kernels may start while the launch before them ends: those that wait before they touch memory."""

import pytest

from gpulease.client.decode.engine.early_start import starting_early
from gpulease.client.decode.engine.kernel_library import early_image, manifest
from gpulease.daemon.drivers.cuda.dependent_kernels import MAX_STATEMENTS, waiting_kernels

WAIT = "griddepcontrol.wait;"
MAY_READ = '.pragma "gpulease.early_reads";'


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
        "prefetch.L1 [%d1]; prefetch.global.L2::evict_last [%d1];",
        MAY_READ,
        MAY_READ + "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d1+16]; @%p ld.global.u32 %r1, [%d1];",
        MAY_READ + "cp.async.cg.shared.global [ %r1 + 0 ], [ %d1 + 0 ], 0x10, %r2; cp.async.commit_group;",
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
        "@%p exit;" + WAIT,
        "@%p ret;" + WAIT,
        "mov : ld.global.u32 %r1, [%d1];" + WAIT,
        "cp.async.ca.shared.global [%r1], [%d1], 16;" + WAIT,
        "ld.param.u64 %d1, [out]; ld.u32 %r1, [%d1];" + WAIT,
        "prefetch.tensormap [%d1];" + WAIT,
        "ld.global.u32 %r1, [%d1];" + MAY_READ + WAIT,
        "// " + MAY_READ + "\nld.global.u32 %r1, [%d1];" + WAIT,
        "/* " + MAY_READ + " */ ld.global.u32 %r1, [%d1];" + WAIT,
        '.pragma "other";' + "ld.global.u32 %r1, [%d1];" + WAIT,
        MAY_READ + "st.global.u32 [%d1], 1;" + WAIT,
        MAY_READ + "st.shared.u32 [%r1], 1;" + WAIT,
        MAY_READ + "atom.global.add.u32 %r1, [%d1], 1;" + WAIT,
        MAY_READ + "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 16;" + WAIT,
        MAY_READ + "L: ld.global.u32 %r1, [%d1]; @%p bra L;" + WAIT,
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
    reading = "ld.global.u32 %r1, [%d1];" + WAIT
    assert waiting_kernels(ptx(MAY_READ + reading, reading)) == {"k0"}


@pytest.mark.parametrize(
    "read",
    [
        "ld.global.nc.u32 %r1, [%d1];",
        "ld.global.L1::no_allocate.nc.L2::128B.v4.u32 {%r1, %r2, %r3, %r4}, [%d1];",
        "ldu.global.u32 %r1, [%d1];",
        "tex.1d.v4.f32.s32 {%r1, %r2, %r3, %r4}, [%d1, {%r5}];",
        "tld4.r.2d.v4.f32.f32 {%r1, %r2, %r3, %r4}, [%d1, {%f5, %f6}];",
        "suld.b.1d.b32.trap %r1, [%d1, {%r5}];",
        "sust.b.1d.b32.trap [%d1, {%r5}], %r1;",
    ],
)
def test_no_kernel_starts_early_in_an_image_that_reads_without_regard_to_writes(read: str) -> None:
    """The wait does not order textures, surfaces and non-coherent loads, not even in functions that a kernel calls."""
    assert waiting_kernels(ptx(WAIT + read)) == waiting_kernels(ptx(MAY_READ + WAIT + read)) == frozenset()
    assert waiting_kernels(ptx(WAIT, read)) == frozenset()
    assert waiting_kernels(ptx(WAIT + "// " + read)) == {"k0"}


def test_strings_may_contain_anything() -> None:
    text = ptx(WAIT) + b'.file 1 "/a/*/\\".entry b{griddepcontrol.wait;"\n' + ptx(WAIT).replace(b"k0", b"k1")
    assert waiting_kernels(text) == {"k0", "k1"}


@pytest.mark.parametrize("filling", [b".entry a ", b".entry a" + b" " * 1000, b"/*", b"a"])
def test_an_image_is_read_once(filling: bytes) -> None:
    """Each of them took minutes when its text was read again from every place: a test of seconds would not end."""
    filler = filling * (3_000_000 // len(filling))
    assert waiting_kernels(ptx(WAIT) + b'.file 1 "' + filler + b'"\n.entry b' + b" " * 300_000 + b";") == {"k0"}
    assert waiting_kernels(ptx(WAIT) + b".entry " + b"b" * 300_000 + b";/*" + filler) == {"k0"}


def test_the_decode_engine_s_kernels_start_early_on_cards_that_can() -> None:
    early = starting_early(ptx(""), frozenset(), permits_first=True)
    assert waiting_kernels(early) == {"k0"}
    assert b".target sm_90\n" in early
    # wgmma needs the target that such a kernel has already.
    assert b".target sm_90a\n" in starting_early(ptx("").replace(b"sm_80", b"sm_90a"), frozenset(), permits_first=True)


def test_each_kernel_of_the_decode_engine_starts_early() -> None:
    for name, facts in manifest().kernels.items():
        assert waiting_kernels(early_image(name)) == {facts.kernel}, name
