"""Chooses a function's compiler: Triton's for the result of `@triton.jit`, numba's for any other function."""

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
    """Wrap a function for its compiler.

    Args:
        function: The function.
        types: For Triton, types by parameter. For numba, the signature.
        arch: The compute capability to compile for.
        cuda: The CUDA version of the card's driver, 13000 for 13.0; 0 if unknown.

    Raises InvalidRequest, or Unsupported if the compiler is not installed.
    """
    if isinstance(function, str | bytes):
        raise InvalidRequest("kernel: it must be a function, not a string", "CUDA C goes to session.compile")
    # Check the module of the function's type, so that Triton need not be imported to recognise its functions.
    if type(function).__module__.startswith("triton."):
        if types is not None and not isinstance(types, Mapping):
            raise InvalidRequest(f"kernel: types must be a map, not {quoted(types)}", 'Pass types={"x": "*fp32"}')
        return TritonKernel(function, types, arch, cuda)
    if isinstance(types, Mapping):
        raise InvalidRequest(
            "kernel: numba's types must be a signature, not a map", 'Pass types="void(float32, float32[:])"'
        )
    return NumbaKernel(function, types, arch)
