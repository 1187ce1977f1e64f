"""Whole images on the embedded driver: PTX through LLVM to native code, daemon/ptx/image.py and kernel_code.py.

The invariant. Whatever text a tenant loads:

- it becomes code, or is refused with ImageRejected before any code is made. The compiler never receives what it can't
  compile, never ends the process, and takes no more time than a constant plus a bound for the text's length;
- code that was stored and is read back is the same image;
- the image's figures are within the driver's limits, so that what a launch may use is limited before the launch.
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
"""Limit of this thread's own CPU time, on a slow host."""

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
    """Change only words and lines, because the compiler would not get other inputs."""
    return ptx_texts.mutate(data, max_size, seed)


def seeds() -> Iterator[bytes]:
    for seed in ptx_texts.seeds():
        if len(seed) <= MAX_BYTES:
            yield seed
