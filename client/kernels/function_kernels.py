"""The choice of a function's compiler: Triton's for what `@triton.jit` made, numba's for any other."""

from collections.abc import Mapping
from typing import Any

from gpulease.client.errors import InvalidRequest
from gpulease.client.kernels.numba_kernel import NumbaKernel, Signature
from gpulease.client.kernels.prepared_launch import FunctionKernel
from gpulease.client.kernels.triton_kernel import TritonKernel
from gpulease.client.texts import quoted


def kernel_of(
    function: Any, types: Mapping[str, str] | Signature | None, arch: int | None, cuda: int
) -> FunctionKernel:
    """Take a function. Raises InvalidRequest, or Unsupported where its compiler is not installed.

    Args:
        function: The function.
        types: Of Triton by parameter, of numba the signature.
        arch: The compute capability to compile for.
        cuda: The version of CUDA that the card's driver has, 13000 for 13.0; 0 if it is not told.
    """
    if isinstance(function, str | bytes):
        raise InvalidRequest("kernel: a text is not a function", "Text of CUDA C goes to session.compile")
    if type(function).__module__.startswith("triton."):
        if types is not None and not isinstance(types, Mapping):
            raise InvalidRequest(f"kernel: types {quoted(types)} is not a map", 'Pass types={"x": "*fp32"}')
        return TritonKernel(function, types, arch, cuda)
    if isinstance(types, Mapping):
        raise InvalidRequest("kernel: numba's types are a signature", 'Pass types="void(float32, float32[:])"')
    return NumbaKernel(function, types, arch)
