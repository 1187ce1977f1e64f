from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.interface import ImageRejected, Parameter
from gpulease.daemon.drivers.ptx.context import CpuContext
from gpulease.daemon.drivers.ptx.limits import MAX_IMAGE_BYTES

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
