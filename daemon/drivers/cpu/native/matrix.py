"""The code of matrix.ll, compiled once per process, for kernels to call."""

from functools import cache
from importlib.resources import files

from gpulease.daemon.drivers.cpu import native
from gpulease.daemon.native.compiler import NativeCode, bind_symbol
from gpulease.daemon.native.kept_code import load_ir

MULTIPLY_FLOATS = "gpulease_multiply_floats"
MULTIPLY_BYTES = "gpulease_multiply_bytes"
MULTIPLY_DOUBLES = "gpulease_multiply_doubles"

# How MULTIPLY_FLOATS numbers the types of A and B.
KINDS = ("f16", "bf16", "tf32", "e4m3", "e5m2")


@cache
def matrix_code() -> NativeCode:
    """Compile and let IR find it. Starts no thread."""
    code = load_ir(files(native).joinpath("matrix.ll").read_text("ascii"))
    for name in (MULTIPLY_FLOATS, MULTIPLY_BYTES, MULTIPLY_DOUBLES):
        bind_symbol(name, code.address(name))
    return code
