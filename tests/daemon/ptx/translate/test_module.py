from types import ModuleType

import pytest

from gpulease.daemon.drivers.interface import ImageRejected, KernelFault
from gpulease.daemon.native.compiler import Effort
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.parse.parser import parse
from gpulease.daemon.ptx.translate import module, thread_body
from gpulease.daemon.ptx.translate.call_graph import link
from gpulease.daemon.ptx.translate.module import translate

HEAD = ".version 8.0\n.target sm_75\n"


def kernel(name: str, accesses: int) -> str:
    """Adds up so many numbers, with a barrier in the middle, and stores the sum behind them."""
    loads = [f"ld.global.u32 %x, [%p+{4 * k}]; add.u32 %s, %s, %x;\n" for k in range(accesses)]
    loads.insert(accesses // 2, "bar.sync 0;\n")
    return f"""
    .entry {name}(.param .u64 numbers)
    {{
        .reg .b32 %x, %s; .reg .b64 %p;
        ld.param.u64 %p, [numbers];
        {"".join(loads)}
        st.global.u32 [%p+{4 * accesses}], %s;
        ret;
    }}
    """


def test_large_kernels_are_compiled_plainly_and_quickly_and_run_alike(context: CpuContext) -> None:
    accesses = 2000
    module = context.module_load((HEAD + kernel("large", accesses) + kernel("small", 10)).encode())
    address = context.mem_alloc(4 * accesses + 4)
    context.mem_write(address, memoryview(b"\1\0\0\0" * accesses))
    params = address.to_bytes(8, "little")
    context.launch(module.kernels["large"], (1, 1, 1), (2, 1, 1), 0, params, 1)
    into = bytearray(4)
    context.mem_read(address + 4 * accesses, memoryview(into))
    assert int.from_bytes(into, "little") == accesses
    context.launch(module.kernels["large"], (1, 1, 1), (1, 1, 1), 0, (address + 4).to_bytes(8, "little"), 1)
    with pytest.raises(KernelFault, match="4-byte store"):
        context.sync(lambda: None)


@pytest.mark.parametrize("body", ["", "ret;", "L:", ".reg .pred %p; @%p ret;"])
def test_a_kernel_with_little_or_nothing_in_it(context: CpuContext, body: str) -> None:
    text = f".version 8.0\n.target sm_75\n.address_size 64\n.entry k() {{ {body} }}"
    context.launch(context.module_load(text.encode()).kernels["k"], (2, 1, 1), (33, 1, 1), 0, b"", 1)
    context.sync()


def test_kernels_that_call_nothing_are_parts_of_their_own() -> None:
    parts = translate(parse(HEAD + kernel("a", 2) + kernel("b", 3)))
    assert [list(part.runners) for part in parts] == [["a"], ["b"]]


def test_the_more_accesses_a_kernel_has_the_less_it_is_optimised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LANE_INSTRUCTIONS", 0)
    monkeypatch.setattr(module, "MAX_OPTIMISED_ACCESSES", 10)
    monkeypatch.setattr(module, "MAX_SIMPLIFIED_ACCESSES", 20)
    # The barrier and the store count, and so does the load of the parameter.
    counts = [most + more - 3 for most in (10, 20) for more in (0, 1)]
    efforts = [part.effort for count in counts for part in translate(parse(HEAD + kernel("k", count)))]
    assert efforts == [Effort.FULL, Effort.SOME, Effort.SOME, Effort.LEAST]


@pytest.mark.parametrize("most_accesses", [10, 100], ids=["simplified", "optimised"])
def test_a_kernel_of_too_many_lines_is_compiled_plainly(monkeypatch: pytest.MonkeyPatch, most_accesses: int) -> None:
    monkeypatch.setattr(module, "MAX_LANE_INSTRUCTIONS", 0)
    monkeypatch.setattr(module, "MAX_OPTIMISED_ACCESSES", most_accesses)
    image = parse(HEAD + kernel("k", 40))
    (part,) = translate(image)
    monkeypatch.setattr(module, "MAX_OPTIMISED_LINES", part.lines)
    assert [part.effort for part in translate(image)] == [part.effort] != [Effort.LEAST]
    monkeypatch.setattr(module, "MAX_OPTIMISED_LINES", part.lines - 1)
    assert [part.effort for part in translate(image)] == [Effort.LEAST]


def test_kernels_that_call_functions_are_one_part_and_share_its_optimising(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPTIMISED_CALLING_ACCESSES", 40)
    function = ".func once(.param .b32 a) { .reg .b32 %a; ld.param.b32 %a, [a]; ret; }\n"
    call = "{ .param .b32 given; st.param.b32 [given], 1; call once, (given); }"
    kernels = [kernel(f"k{n}", 15).replace("ret;", f"{call} ret;") for n in range(3)]
    optimised, plain = translate(parse(HEAD + ".address_size 64\n" + function + "".join(kernels)))
    assert (optimised.effort, plain.effort) == (Effort.FULL, Effort.LEAST)
    assert [list(part.runners) for part in (optimised, plain)] == [["k0", "k1"], ["k2"]]


@pytest.mark.exhaustive
def test_a_kernel_of_hundreds_of_waits_may_keep_hundreds_of_registers(context: CpuContext) -> None:
    count, waits = 250, 450
    adds = "".join(f"add.u32 %r{n}, %r{n}, {n};\n" for n in range(count))
    stores = "".join(f"st.shared.u32 [0], %r{n};\n" for n in range(count))
    text = f"{HEAD}.entry k() {{ .reg .b32 %r<{count}>; .shared .u32 x; {adds} {'bar.sync 1;' * waits} {stores} }}"
    assert context.module_load(text.encode()).kernels["k"].refusal is None


@pytest.mark.exhaustive
def test_what_all_waits_together_keep_is_bounded(context: CpuContext) -> None:
    """Each wait saves what is live there: many waits with many live registers would be gigabytes of code."""
    count, waits = 400, 800
    loads = "".join(f"ld.volatile.global.u32 %r{n}, [%p];\n" for n in range(count))
    stores = "".join(f"st.global.u32 [%p], %r{n};\n" for n in range(count))
    text = f"""
.version 8.0
.target sm_75
.address_size 64
.visible .entry greedy(.param .u64 at)
{{
    .reg .b32 %r<{count}>;
    .reg .b64 %p;
    ld.param.u64 %p, [at];
    {loads}
    {"bar.sync 0;" * waits}
    {stores}
    ret;
}}
"""
    with pytest.raises(ImageRejected, match="live at all waits together"):
        context.module_load(text.encode())


def test_registers_that_live_everywhere_are_bounded(context: CpuContext) -> None:
    count = 600
    body = "".join(
        f"L{n}: add.u32 %q{n}, %q{n * 31 % count}, %q{n * 17 % count}; setp.eq.u32 %p, %q{n * 13 % count}, 1;"
        f" @%p bra L{n * 7 % count};"
        for n in range(count)
    )
    stores = "".join(f"st.shared.u32 [0], %q{n};" for n in range(count))
    text = HEAD + f".entry k() {{ .reg .b32 %q<{count}>; .reg .pred %p; .shared .u32 x; {body} {stores} }}"
    with pytest.raises(ImageRejected, match="live where control flows together"):
        context.module_load(text.encode())


@pytest.mark.parametrize(("place", "share"), [(module, 4), (thread_body, 4)])
def test_lines_of_a_kernel_are_bounded(monkeypatch: pytest.MonkeyPatch, place: ModuleType, share: int) -> None:
    monkeypatch.setattr(module, "MAX_LANE_INSTRUCTIONS", 0)
    image = parse(HEAD + kernel("a", 40) + kernel("b", 40))
    lines = sum(part.text.count("\n") for part in translate(image))
    monkeypatch.setattr(place, "MAX_IR_LINES", lines // share)
    with pytest.raises(ImageRejected, match="steps"):
        translate(image)


def test_kernels_past_the_lines_of_an_image_are_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    image = link(parse(HEAD + kernel("a", 40) + kernel("b", 40) + kernel("c", 40)))
    lines = sum(part.text.count("\n") for part in translate(image))
    monkeypatch.setattr(module, "MAX_IMAGE_IR_LINES", lines // 2)
    assert [list(part.runners) for part in translate(image)] == [["a"]]
    assert list(image.refusals) == ["b", "c"]


def test_a_refused_kernel_leaves_nothing_with_those_it_shares_functions_with() -> None:
    function, bad = ".func f() { ret; }\n", ".func g() { .reg .b32 %r; add.cc.u16 %r, %r, 1; ret; }\n"
    kernels = [f".entry {name}() {{ {calls} ret; }}\n" for name, calls in (("a", "call f; call g;"), ("b", "call f;"))]
    image = link(parse(HEAD + ".address_size 64\n" + function + bad + "".join(kernels)))
    (part,) = translate(image)
    (alone,) = translate(parse(HEAD + ".address_size 64\n" + function + kernels[1]))
    assert part.text == alone.text
    assert "add.cc.u16" in str(image.refusals["a"])


@pytest.mark.exhaustive
def test_long_blocks_of_costly_instructions_compile_in_little_time(context: CpuContext) -> None:
    body = "sin.approx.f32 %f, %f; ex2.approx.f32 %f, %f;" * 2500
    text = f"{HEAD}.entry k() {{ .reg .f32 %f; .shared .f32 x; {body} st.shared.f32 [x], %f; }}"
    assert context.compile_kernel(context.module_load(text.encode()).kernels["k"], 1)
