"""Sums of 16-bit floating-point numbers, on their bits, for atomics (PTX ISA section 9.7.4, "add").

Both are made exactly or with more than twice the precision in f32 first, so rounding once more rounds right.
"""

from collections.abc import Callable

from gpulease.daemon.drivers.cpu.translate.ir import IrWriter, Value, constant

# CUDA's one NaN of each.
_NAN = 0x7FFF


def by_halves(ir: IrWriter, add: Callable[[IrWriter, Value, Value], Value], left: Value, right: Value) -> Value:
    """One sum of i16, or two of the halves of i32."""
    if left.type == "i16":
        return add(ir, left, right)
    low = add(ir, ir.cast("trunc", left, "i16"), ir.cast("trunc", right, "i16"))
    high = add(ir, *(ir.cast("trunc", ir.binary("lshr", value, 16), "i16") for value in (left, right)))
    return ir.binary("or", ir.binary("shl", ir.cast("zext", high, "i32"), 16), ir.cast("zext", low, "i32"))


def add_f16(ir: IrWriter, left: Value, right: Value) -> Value:
    """To nearest even, subnormals kept."""
    wide = [ir.cast("fpext", ir.cast("bitcast", value, "half"), "float") for value in (left, right)]
    total = ir.binary("fadd", *wide)
    rounded = ir.cast("bitcast", ir.cast("fptrunc", total, "half"), "i16")
    return ir.select(ir.compare("fcmp uno", total, total), constant("i16", _NAN), rounded)


def add_bf16(ir: IrWriter, left: Value, right: Value) -> Value:
    """To nearest even, subnormals kept."""
    shifted = [ir.binary("shl", ir.cast("zext", value, "i32"), 16) for value in (left, right)]
    wide = [ir.cast("bitcast", value, "float") for value in shifted]
    total = ir.binary("fadd", *wide)
    bits = ir.cast("bitcast", total, "i32")
    odd = ir.binary("and", ir.binary("lshr", bits, 16), 1)
    rounded = ir.binary("lshr", ir.binary("add", bits, ir.binary("add", odd, 0x7FFF)), 16)
    return ir.select(ir.compare("fcmp uno", total, total), constant("i16", _NAN), ir.cast("trunc", rounded, "i16"))
