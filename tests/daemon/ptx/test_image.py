from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.interface import ImageRejected, LaunchRejected, Parameter
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.image import TranslatedImage, translate_image
from gpulease.daemon.ptx.limits import MAX_IMAGE_BYTES
from gpulease.daemon.ptx.parse import parser

HEAD = b".version 8.0\n.target sm_75\n"


def test_kernels_tell_their_parameters(context: CpuContext, vector: Callable[[str], bytes]) -> None:
    kernels = context.module_load(vector("transform.sm90.ptx")).kernels
    assert sorted(kernels) == ["bias", "scale"]
    kernel = kernels["scale"]
    assert kernel.name == "scale"
    assert kernel.parameters == (Parameter(0, 8), Parameter(8, 4), Parameter(12, 4))
    assert kernel.parameter_bytes == 16
    assert kernel.max_threads_per_block == 1024


@pytest.mark.parametrize(("magic", "name"), [(b"\x7fELF", "cubin"), (b"\x50\xed\x55\xba", "fatbin")])
def test_binaries_are_refused_by_name(context: CpuContext, magic: bytes, name: str) -> None:
    with pytest.raises(ImageRejected, match=f"{name}: the embedded driver takes PTX text only"):
        context.module_load(magic + bytes(100))


def test_text_may_end_in_zeros(context: CpuContext) -> None:
    assert "k" in context.module_load(HEAD + b".entry k() { ret; }\0\0").kernels


def test_what_is_no_text_is_refused(context: CpuContext) -> None:
    with pytest.raises(ImageRejected) as caught:
        context.module_load(HEAD + b"\xff")
    assert caught.value.line == 3


def test_huge_images_are_refused(context: CpuContext) -> None:
    with pytest.raises(ImageRejected, match="more than"):
        context.module_load(bytes(MAX_IMAGE_BYTES + 1))


def test_variables_are_bounded_by_the_slice_and_freed(context: CpuContext) -> None:
    with pytest.raises(ImageRejected, match="the slice has"):
        context.module_load(HEAD + b".global .b8 x[67108865];")
    image = HEAD + b".global .b8 x[60000000]; .global .b8 nothing[0]; .entry k() { ret; }"
    for _ in range(20):
        context.module_unload(context.module_load(image))


def test_variables_of_many_modules_run_out(context: CpuContext) -> None:
    image = HEAD + b".global .b8 x[60000000];"
    for _ in range(5):
        context.module_load(image)
    with pytest.raises(ImageRejected, match="no memory"):
        context.module_load(image)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_random_bytes_are_only_ever_rejected(context: CpuContext, noise: bytes) -> None:
    with pytest.raises(ImageRejected):
        context.module_load(noise)


# Each is refused in another place: reading, linking, translating, and in a function that the kernel calls.
REFUSED = {
    "read": (".entry bad() { tex.2d.v4.f32.f32 {_, _, _, _}, [a, {0, 0}]; { } }", "the instruction tex.2d"),
    "directive": (".entry bad() .blocksareclusters { ret; }", "not supported"),
    "linked": (".func w() { bar.sync 0; call w; } .entry bad() { call w; ret; }", "calls itself"),
    "translated": (".entry bad() { .reg .b32 %r; add.cc.u16 %r, %r, 1; ret; }", "add.cc.u16 is not supported"),
    "called": (".func f() { wrong.u32; } .alias g, f; .func g(); .entry bad() { call g; ret; }", "wrong"),
}
GOOD = b"""
.entry good(.param .u64 out) { .reg .b64 %p; ld.param.u64 %p, [out]; st.global.u32 [%p], 7; ret; }
"""
ONE = (1, 1, 1)


@pytest.mark.parametrize("case", REFUSED)
def test_a_kernel_is_refused_at_its_launch_and_its_modules_others_run(context: CpuContext, case: str) -> None:
    text, said = REFUSED[case]
    kernels = context.module_load(HEAD + text.encode() + GOOD).kernels
    assert list(kernels) == ["bad", "good"]
    assert not context.compile_kernel(kernels["bad"], 1)
    with pytest.raises(LaunchRejected, match=said):
        context.launch(kernels["bad"], ONE, ONE, 0, b"", 1)
    out, found = context.mem_alloc(4), bytearray(4)
    context.launch(kernels["good"], ONE, ONE, 0, out.to_bytes(8, "little"), 2)
    context.mem_read(out, memoryview(found))
    assert found == (7).to_bytes(4, "little")


@pytest.mark.parametrize("case", REFUSED)
def test_an_image_is_refused_if_all_its_kernels_are(context: CpuContext, case: str) -> None:
    text, said = REFUSED[case]
    with pytest.raises(ImageRejected, match=said):
        context.module_load(HEAD + text.encode())


def test_a_kept_refusal_is_the_same(context: CpuContext) -> None:
    text = HEAD + REFUSED["translated"][0].encode() + GOOD
    image = translate_image(text, slice_bytes=1 << 20)
    assert TranslatedImage.from_bytes(image.to_bytes()) == image
    assert image.kernels[0].refusal is not None


def test_instructions_of_an_image_are_bounded_a_kernel(context: CpuContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser, "MAX_IMAGE_INSTRUCTIONS", 8)
    kernels = context.module_load(HEAD + GOOD + b".entry bad() { ret; ret; ret; ret; ret; ret; ret; }").kernels
    with pytest.raises(LaunchRejected, match="more than 8 instructions"):
        context.launch(kernels["bad"], ONE, ONE, 0, b"", 1)


LONG = "{head}.entry long(.param .u64 out, .param .b8 x[{size}]) {{ .reg .b64 %p; .reg .b32 %v; ld.param.u64 %p, [out];"
LONG += "ld.param.u32 %v, [x+{last}]; st.global.u32 [%p], %v; ret; }}"


def test_parameters_take_up_to_32764_bytes(context: CpuContext) -> None:
    text = LONG.format(head=".version 8.1\n.target sm_70\n", size=32_756, last=32_752)
    kernel = context.module_load(text.encode()).kernels["long"]
    out, found = context.mem_alloc(4), bytearray(4)
    for launch in range(3):
        params = out.to_bytes(8, "little") + bytes(32_752) + launch.to_bytes(4, "little")
        context.launch(kernel, ONE, ONE, 0, params, launch)
        context.mem_read(out, memoryview(found))
        assert found == params[-4:]


@pytest.mark.parametrize(
    ("head", "size"),
    [
        (".version 8.1\n.target sm_70\n", 32_760),
        (".version 8.0\n.target sm_70\n", 4348),
        (".version 8.1\n.target sm_61\n", 4348),
    ],
)
def test_longer_parameters_are_refused(context: CpuContext, head: str, size: int) -> None:
    with pytest.raises(ImageRejected, match="the parameters take more than"):
        context.module_load(LONG.format(head=head, size=size, last=0).encode())
