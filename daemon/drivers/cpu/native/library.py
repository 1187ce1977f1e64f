"""What the code of kernels calls; it must be there before any of that is linked."""

from gpulease.daemon.drivers.cpu.native.block import block_code
from gpulease.daemon.drivers.cpu.native.matrix import matrix_code


def bind_library() -> None:
    """Let kernels find all of it, whether they were compiled in this process or not. Starts no thread."""
    block_code()
    matrix_code()
