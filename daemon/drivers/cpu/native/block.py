"""The code of block.ll, compiled once per process, for kernels to call."""

from functools import cache
from importlib.resources import files

from gpulease.daemon.drivers.cpu import native
from gpulease.daemon.native.compiler import NativeCode, bind_symbol
from gpulease.daemon.native.kept_code import load_ir

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
