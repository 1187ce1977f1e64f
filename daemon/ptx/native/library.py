"""The native functions that kernels call: block.ll, matrix.ll, warp_matrix.ll. They are bound before any kernel."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from gpulease.daemon.native.code_cache import load_ir
from gpulease.daemon.native.compiler import NativeCode, bind_symbol
from gpulease.daemon.ptx import native

RELEASE_WARP = "gpulease_release_warp"
SETTLE_BLOCK = "gpulease_settle_block"
SAME_WORDS = "gpulease_same_words"
REDUCE_WORDS = "gpulease_reduce_words"

# The numbers of REDUCE_WORDS's operations.
REDUCTIONS = ("add", "and", "or", "xor", "umin", "umax", "smin", "smax")

DECLARATIONS = (
    f"declare i1 @{RELEASE_WARP}(ptr, i32, i64, i64)",
    f"declare i32 @{SETTLE_BLOCK}(ptr, ptr, i32, i64)",
)


@cache
def block_code() -> NativeCode:
    """Compile block.ll and bind its functions by name. Starts no thread."""
    return _bound("block.ll", (RELEASE_WARP, SETTLE_BLOCK, SAME_WORDS, REDUCE_WORDS))


# Prefixes of the functions of native/matrix.ll for one lane, and of native/warp_matrix.ll for a warp. The name of the
# operands' type follows.
LANES_PART = "gpulease_multiply_"
WARPS_WHOLE = "gpulease_warp_"
FLOATS, BYTES, DOUBLES = "floats", "bytes", "doubles"

# The types of A and B, in the order of their numbers in FLOATS.
KINDS = ("f16", "bf16", "tf32", "e4m3", "e5m2")

LOAD_ROWS = "gpulease_load_rows"
STORE_ROWS = "gpulease_store_rows"
TURN_MATRIX = "gpulease_turn_matrix"


@cache
def matrix_code() -> tuple[NativeCode, NativeCode]:
    """Compile the functions for products of matrices, and bind them by name. Starts no thread."""
    products = FLOATS, BYTES, DOUBLES
    lanes = _bound("matrix.ll", [LANES_PART + product for product in products])
    # The functions for warps call those for lanes, so bind them second.
    return lanes, _bound(
        "warp_matrix.ll", [*(WARPS_WHOLE + number for number in products), LOAD_ROWS, STORE_ROWS, TURN_MATRIX]
    )


def _bound(file: str, names: Sequence[str]) -> NativeCode:
    code = load_ir(files(native).joinpath(file).read_text("ascii"))
    for name in names:
        bind_symbol(name, code.address(name))
    return code


def bind_library() -> None:
    """Bind the whole library, for kernels compiled in this process or an earlier one. Starts no thread."""
    block_code()
    matrix_code()
