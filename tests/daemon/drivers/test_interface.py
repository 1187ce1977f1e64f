"""Images with managed variables are refused at load, kernels that synchronise their grid at launch."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.daemon.drivers.interface import Dim3, ImageRejected, KernelStep, LaunchRejected, refuse_managed_text
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.translate.cooperative import confirm_by_text

IMAGES = Path(__file__).parent / "images"
HEAD = ".version 8.0\n.target sm_75\n.address_size 64\n"
KERNEL = ".visible .entry k() { ret; }"
ONE: Dim3 = (1, 1, 1)


@pytest.fixture
def context() -> Iterator[CpuContext]:
    opened = CpuContext(64 << 20)
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "declared",
    [
        ".global .attribute(.managed) .align 4 .u32 m;",
        ".visible .global .attribute(.managed) .u32 m;",
        ".extern .global .attribute(.managed) .u32 m;",
        ".weak .global .attribute(.managed) .u32 m;",
        ".common .global .attribute(.managed) .u32 m;",
        ".global .align 4 .attribute ( .managed ) .u32 m;",
        ".attribute(.managed) .global .u32 m;",
        ".global\n.attribute\n(\n.managed\n)\n.u32 m;",
        ".global .attribute/* .u32 x; */(/**/.managed/*\n*/) // y\n.u32 m;",
        ".global .attribute(.unified(19, 95), .managed) .u32 m;",
        ".global .attribute(.managed) .v4 .f32 m[3];",
        "// a comment goes on \\\n.global .attribute(.managed) .u32 m;",
        "/* /* */ .global .attribute(.managed) .u32 m; /* */",
        '.file 1 "a\\" .global .attribute(.managed) .u32 m;',
        ".visible .entry f() { .global .attribute(.managed) .u32 m; ret; }",
    ],
)
def test_a_managed_variable_is_refused_however_it_is_written(declared: str) -> None:
    """Each but the one with `.unified` is PTX that ptxas 13.0 makes a managed variable of."""
    with pytest.raises(ImageRejected, match="the variable 'm' is __managed__") as caught:
        refuse_managed_text(f"{HEAD}{declared}\n{KERNEL}".encode())
    assert "mem_alloc" in caught.value.hint


@pytest.mark.parametrize(
    "declared",
    [
        "// .global .attribute(.managed) .u32 m;",
        "/* .global .attribute(.managed)\n.u32 m; */",
        '.file 1 ".attribute(.managed)"',
        ".global .u32 managed;",
    ],
)
def test_what_only_looks_like_one_is_loaded(context: CpuContext, declared: str) -> None:
    context.module_load(f"{HEAD}{declared}\n{KERNEL}".encode())


@pytest.mark.parametrize("text", [b"/*" * (1 << 19), b'"' * ((1 << 20) + 1), b"/" * (1 << 20)])
def test_hostile_text_is_looked_through_once(text: bytes) -> None:
    """What is never closed hides the attribute, as it does from ptxas; a second look at each byte would take hours."""
    refuse_managed_text(text + b".managed")


def test_the_embedded_driver_refuses_what_nvcc_makes_of_a_managed_variable(context: CpuContext) -> None:
    with pytest.raises(ImageRejected, match="the variable 'counter' is __managed__") as caught:
        context.module_load((IMAGES / "managed.sm75.ptx").read_bytes())
    assert (IMAGES / "managed.sm75.ptx").read_text().splitlines()[caught.value.line - 1].endswith("counter;")


@pytest.mark.parametrize("name", ["launches.sm75.ptx", "launches.sm90.ptx"])
def test_only_kernels_that_synchronise_their_grid_are_refused(context: CpuContext, name: str) -> None:
    module = context.module_load((IMAGES / name).read_bytes())
    buffer = context.mem_alloc(4096)
    params = buffer.to_bytes(8, "little")
    for kernel in module.kernels.values():
        if kernel.name in ("grid_sync", "grid_sync_in_call"):
            with pytest.raises(LaunchRejected, match=f"kernel {kernel.name} needs a cooperative launch"):
                context.launch(kernel, ONE, (32, 1, 1), 0, params, 1)
            with pytest.raises(LaunchRejected):
                context.graph([KernelStep(kernel, ONE, ONE, 0, params)])
            assert context.native().record(kernel, ONE, ONE, 0) is None
        else:
            context.launch(kernel, ONE, (32, 1, 1), 0, params, 1)
            context.sync()
    assert len(module.kernels) == 7


@pytest.mark.parametrize(
    ("name", "kernels"), [("guards.sm75.ptx", 19), ("guards.sm90.ptx", 19), ("unoptimised.sm75.ptx", 2)]
)
def test_a_kernel_that_guards_its_synchronisation_or_traps_for_another_reason_runs(
    context: CpuContext, name: str, kernels: int
) -> None:
    module = context.module_load((IMAGES / name).read_bytes())
    buffer = context.mem_alloc(4096)
    for kernel in module.kernels.values():
        params = (buffer.to_bytes(8, "little") + bytes([8, 0, 0, 0]))[: kernel.parameter_bytes]
        if kernel.name.startswith("needs_"):
            with pytest.raises(LaunchRejected, match=f"kernel {kernel.name} needs a cooperative launch"):
                context.launch(kernel, ONE, (32, 1, 1), 0, params, 1)
        else:
            context.launch(kernel, ONE, (32, 1, 1), 0, params, 1)
            context.sync()
    assert len(module.kernels) == kernels


READS = """
    .reg .pred %p<5>;
    .reg .b32 %r<5>;
    .reg .b64 %rd<5>;
    .local .b64 kept;
    mov.u32 %r1, %envreg1;
    mov.u32 %r2, %envreg2;
    mov.b64 %rd1, {%r2, %r1};
"""


@pytest.mark.parametrize(
    ("body", "needs"),
    [
        ("setp.eq.u64 %p1, %rd1, 0; @%p1 trap; ret;", True),
        ("setp.eq.u64 %p1, %rd1, 0; @!%p1 trap; ret;", False),
        ("setp.ne.u64 %p1, %rd1, 0; @%p1 bra on; bra.uni stop; stop: trap; on: ret;", True),
        ("setp.ne.u64 %p1, %rd1, 0; @!%p1 ret; trap;", False),
        ("setp.ne.u64 %p1, %rd1, 0; @%p1 ret; trap;", True),
        # A trap of its own, whatever the address.
        (
            "setp.ne.u64 %p1, %rd1, 0; @%p1 bra on; on: mov.u32 %r3, %tid.x; setp.eq.u32 %p2, %r3, 99; @%p2 trap; ret;",
            False,
        ),
        # Its predicate is made of both, or written on two ways.
        ("setp.ne.u64 %p1, %rd1, 0; setp.eq.u32 %p2, %r3, 99; and.pred %p3, %p1, %p2; @%p3 trap; ret;", False),
        ("setp.eq.u64 %p1, %rd1, 0; setp.eq.u32 %p2, %r3, 99; or.pred %p3, %p1, %p2; @%p3 trap; ret;", True),
        (
            "setp.eq.u64 %p1, %rd1, 0; mov.u32 %r3, 1; @%p1 mov.u32 %r3, 2; setp.eq.u32 %p2, %r3, 2; @%p2 trap; ret;",
            True,
        ),
        # Through memory, where it is not followed.
        ("st.local.u64 [kept], %rd1; ld.local.u64 %rd2, [kept]; setp.eq.u64 %p1, %rd2, 0; @%p1 trap; ret;", True),
    ],
)
def test_a_trap_counts_if_the_barriers_address_decides_it(context: CpuContext, body: str, needs: bool) -> None:
    module = context.module_load(f"{HEAD}.visible .entry k() {{ {READS} {body} }}".encode())
    assert module.kernels["k"].is_cooperative is needs


def test_what_machine_code_seems_to_need_is_asked_of_its_text() -> None:
    """Text that can't be read proves nothing."""
    text = (IMAGES / "guards.sm90.ptx").read_bytes()
    found = frozenset({"needs_valid", "runs_asks_twice"})
    assert confirm_by_text(text, found) == {"needs_valid"}
    assert confirm_by_text(text + b"(", found) == found
    assert confirm_by_text(b"\xff" + text, found) == found


@pytest.mark.parametrize("behind", [b"\0.managed x", b"\0(", b"\0\xff", b"\0\0"])
def test_nothing_behind_the_first_nul_is_read(context: CpuContext, behind: bytes) -> None:
    """As libcuda takes an image: as a C string."""
    assert context.module_load(f"{HEAD}{KERNEL}".encode() + behind).kernels.keys() == {"k"}
    with pytest.raises(ImageRejected, match="'m' is __managed__"):
        context.module_load(f"{HEAD}.global .attribute(.managed) .u32 m;{KERNEL}".encode() + behind)
