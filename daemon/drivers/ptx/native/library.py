"""The code that kernels call: block.ll and matrix.ll, each compiled once per process before any kernel is linked."""

from functools import cache
from importlib.resources import files

from gpulease.daemon.drivers.ptx import native
from gpulease.daemon.native.code_cache import load_ir
from gpulease.daemon.native.compiler import NativeCode, bind_symbol

RELEASE_WARP = "gpulease_release_warp"
SETTLE_BLOCK = "gpulease_settle_block"
SAME_WORDS = "gpulease_same_words"
REDUCE_WORDS = "gpulease_reduce_words"

# How REDUCE_WORDS numbers what it can do.
REDUCTIONS = ("add", "and", "or", "xor", "umin", "umax", "smin", "smax")

DECLARATIONS = (
    f"declare i1 @{RELEASE_WARP}(ptr, i32, i64, i64)",
    f"declare i32 @{SETTLE_BLOCK}(ptr, ptr, i32, i64)",
)


@cache
def block_code() -> NativeCode:
    """Compile and let IR find it. Starts no thread."""
    code = load_ir(files(native).joinpath("block.ll").read_text("ascii"))
    for name in (RELEASE_WARP, SETTLE_BLOCK, SAME_WORDS, REDUCE_WORDS):
        bind_symbol(name, code.address(name))
    return code


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


def bind_library() -> None:
    """Let kernels find all of it, whether they were compiled in this process or not. Starts no thread."""
    block_code()
    matrix_code()
