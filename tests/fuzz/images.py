"""Whole images on the embedded driver: PTX through LLVM to native code, daemon/ptx/image.py and kernel_code.py.

The invariant. Whatever text a tenant loads:

- it becomes code, or is refused by an ImageRejected before any is made; the compiler is never given what it can't take,
  never ends the process, and takes no more time than the text's length and a constant allow;
- code that was kept and is read back is the same image;
- the image's facts are within the driver's limits: what a launch may ask of it is bounded before it is launched.
"""

import time
from collections.abc import Iterator

from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.ptx import limits
from gpulease.daemon.ptx.image import TranslatedImage, translate_image
from gpulease.daemon.ptx.kernel_code import compile_source

from . import ptx_texts

MAX_BYTES = 2048
SECONDS = 20.0
"""Of this thread's own time, on a host that is slow."""

SLICE = 1 << 20


def check(data: bytes) -> None:
    begun_s = time.thread_time()
    try:
        image = translate_image(data, slice_bytes=SLICE)
        for part in image.parts:
            assert compile_source(part)
    except ImageRejected as error:
        assert str(error)
        return
    finally:
        assert time.thread_time() - begun_s < SECONDS
    assert TranslatedImage.from_bytes(image.to_bytes()) == image
    assert sum(variable.size for variable in image.variables) <= SLICE
    for kernel in image.kernels:
        assert 0 <= kernel.part < len(image.parts)
        assert 1 <= kernel.max_threads_per_block <= limits.MAX_THREADS_PER_BLOCK
        assert 0 <= kernel.static_shared_bytes <= limits.MAX_SHARED_BYTES
        assert kernel.needs.fit(kernel.max_threads_per_block)
        for parameter in kernel.parameters:
            assert 0 <= parameter.offset <= parameter.offset + parameter.size <= kernel.parameter_bytes


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Words and lines only: nothing else gets as far as the compiler."""
    return ptx_texts.mutate(data, max_size, seed)


def seeds() -> Iterator[bytes]:
    for seed in ptx_texts.seeds():
        if len(seed) <= MAX_BYTES:
            yield seed
