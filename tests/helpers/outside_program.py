"""`python -m helpers.outside_program`: a program outside gpulease that uses managed memory until its stdin ends."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from helpers.daemon import python_environment

MANAGED_PTX: Final = b""".version 7.0
.target sm_75
.address_size 64
.visible .global .attribute(.managed) .align 4 .u32 shared_word;
.visible .entry touch()
{
    .reg .b32 %r<3>;
    ld.global.u32 %r1, [shared_word];
    add.u32 %r2, %r1, 1;
    st.global.u32 [shared_word], %r2;
    ret;
}
"""
"""One word of managed memory, and a kernel that increments it."""


@contextmanager
def outside_program() -> Iterator[int]:
    """Yield the program's process id when it has run a kernel. After the block, the program has ended."""
    command = [sys.executable, "-P", "-m", "helpers.outside_program"]
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=python_environment())
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == b"1\n"
        yield program.pid
    finally:
        program.kill()
        program.communicate()


def _use_managed_memory() -> None:
    import pycuda.driver as cuda  # Imported here, because only this process may create a context.

    cuda.init()
    context = cuda.Device(0).make_context()
    module = cuda.module_from_buffer(MANAGED_PTX)
    module.get_function("touch")(grid=(1, 1), block=(1, 1, 1))
    context.synchronize()
    pointer, size_bytes = module.get_global("shared_word")
    word = bytearray(size_bytes)
    cuda.memcpy_dtoh(word, pointer)
    print(int.from_bytes(word, "little"), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _use_managed_memory()
