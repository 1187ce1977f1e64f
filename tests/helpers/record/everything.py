"""All cases that run on a real card for comparison, and the PTX of their images."""

from typing import Final

from helpers.record import approximations, atomics, matrices, warps
from helpers.record.cases import Case, image
from helpers.record.kernels import kernel_cases
from helpers.record.triton import triton_cases

WRITTEN: Final = {
    "warps": warps.PTX,
    "matrices": matrices.PTX,
    "atomics": atomics.PTX,
    "approximations": approximations.PTX,
}
"""PTX that is generated here for single instructions, by image name."""


def all_cases() -> tuple[Case, ...]:
    return (
        *kernel_cases(),
        *(case for case, _ in triton_cases()),
        *warps.warp_cases(),
        *matrices.matrix_cases(),
        *atomics.atomic_cases(),
        *approximations.approximation_cases(),
    )


def ptx_of(name: str) -> bytes:
    """Return an image's PTX, with a version that drivers of CUDA 13.0 accept. It uses nothing newer."""
    return WRITTEN[name].encode() if name in WRITTEN else image(name).replace(b".version 9.5", b".version 9.0")
