"""Code that a program gives in the wrong place, or by its path, is refused with the place where it goes."""

from pathlib import Path
from typing import Any

import pytest

from gpulease.client.code_texts import cuda_c_of, image_of
from gpulease.client.console.transform import transform_ptx
from gpulease.client.core.submits import SubmissionBase
from gpulease.client.errors import InvalidRequest

CUDA_C = 'extern "C" __global__ void f(float *x) { x[0] = 1; }'


@pytest.mark.parametrize("given", ["saxpy.ptx", "build/a kernel.CUBIN", Path("saxpy.ptx"), Path("no_extension")])
def test_a_path_is_no_image(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"is the path of a file.*read_bytes"):
        image_of(given, "module_load")
    with pytest.raises(InvalidRequest, match="is the path of a file"):
        SubmissionBase("f", given)


def test_a_path_is_no_source() -> None:
    with pytest.raises(InvalidRequest, match=r"is the path of a file.*read_text"):
        cuda_c_of("kernels/saxpy.cu", "compile")


@pytest.mark.parametrize("given", [CUDA_C, CUDA_C.encode(), memoryview(CUDA_C.encode())])
def test_cuda_c_is_no_image(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"must be PTX or a binary, not CUDA C.*session\.compile"):
        image_of(given, "module_load")


def test_ptx_is_no_source() -> None:
    with pytest.raises(InvalidRequest, match=r"must be CUDA C, not PTX.*session\.module_load"):
        cuda_c_of(transform_ptx().decode(), "compile")
    with pytest.raises(InvalidRequest, match="must be a string of CUDA C"):
        cuda_c_of(CUDA_C.encode(), "compile")


@pytest.mark.parametrize(
    "code",
    [
        transform_ptx(),
        b"// made of __global__ functions\n.version 8.0\n.target sm_80\n",
        b"\x7fELF __global__",
        b"\x50\xed\x55\xba __device__",
        b"something that only the driver can judge",
    ],
)
def test_what_may_be_an_image_goes_to_the_driver_as_it_is(code: bytes) -> None:
    assert image_of(code, "module_load") == code


def test_cuda_c_with_ptx_in_it_is_a_source() -> None:
    inline = CUDA_C + "\n// what was made of it:\n.version 8.0\n"
    assert cuda_c_of(inline, "compile") == inline
