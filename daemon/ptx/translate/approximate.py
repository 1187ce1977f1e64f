"""Approximate functions of f32 and f64 (PTX ISA section 9.7.3).

Each is computed in double precision and rounded once, so its error is far below the ISA's bound. The results for zeros,
infinities and NaN are those in the ISA's tables. The approximations of a GPU differ in the last bits. 2^x is computed
by arithmetic instead of a call of a library, because LLVM can vectorise arithmetic over the threads of a loop.
"""

import math
import struct

from gpulease.daemon.ptx.parse.syntax import SCALARS, Instruction
from gpulease.daemon.ptx.translate.floating import read_float, write_float
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator

# The highest power of r in the series of 2^r. For |r| <= 1/2, the remainder is below 2^-36.
_DEGREE = 9

# If this is added to a double with a magnitude below 2^51, the low bits of the sum are the nearest integer.
_ROUNDER = 1.5 * 2.0**52

# Exponents are clamped to this magnitude. Beyond it, a power is 0 or infinity as an f32; up to it, it is a normal f64.
_LIMIT = 300.0

_BIAS = 1023
_EXPONENT_SHIFT = 52


def real(type_name: str, number: float) -> Value:
    """Return an exact float constant. LLVM writes constants of both types by the bits of a double."""
    return Value(type_name, f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}")


def power_of_two(t: OperandTranslator, value: Value) -> Value:
    """Compute 2^value of a double, correct to 36 bits. NaN stays NaN."""
    ir = t.ir
    # Clamp the value. NaN passes unchanged, because comparisons with it are false.
    low, high = real("double", -_LIMIT), real("double", _LIMIT)
    value = ir.select(ir.compare("fcmp ogt", value, high), high, value)
    value = ir.select(ir.compare("fcmp olt", value, low), low, value)
    # Split the value into the nearest integer and a fraction of at most 1/2.
    shifted = ir.binary("fadd", value, real("double", _ROUNDER))
    fraction = ir.binary("fsub", value, ir.binary("fsub", shifted, real("double", _ROUNDER)))
    # Compute the series of 2^fraction by Horner's rule.
    result = real("double", _coefficient(_DEGREE))
    for power in range(_DEGREE - 1, -1, -1):
        result = ir.intrinsic("llvm.fma.f64", "double", result, fraction, real("double", _coefficient(power)))
    # Put the integer into the exponent's bits. The higher bits, such as those of _ROUNDER, are shifted out.
    whole_part = ir.cast("bitcast", shifted, "i64")
    scale = ir.binary("shl", ir.binary("add", whole_part, constant("i64", _BIAS)), _EXPONENT_SHIFT)
    return ir.binary("fmul", result, ir.cast("bitcast", scale, "double"))


def _coefficient(power: int) -> float:
    return math.log(2.0) ** power / math.factorial(power)


FAMILY = InstructionFamily("Approximate functions", "9.7.3")

_F32 = SCALARS["f32"]
_F64 = SCALARS["f64"]
# For these, LLVM calls the host's mathematical library.
_LIBRARY = {"lg2": "llvm.log2.f64", "sin": "llvm.sin.f64", "cos": "llvm.cos.f64", "tanh": "llvm.tanh.f64"}

# 2^126 as an f32's bits: for larger divisors, div.approx does not scale (section 9.7.3.8).
_LARGEST_DIVISOR = 0x7E800000
_INFINITY = 0x7F800000

# The .ftz forms of f64 use only the upper 32 bits. This is the mask of these bits, and half a unit of the lowest one.
_UPPER = -(1 << 32)
_HALF_UNIT = 1 << 31
_F64_INFINITY = 0x7FF << 52
_SMALLEST_NORMAL_F64 = 1 << 52
_F64_MAGNITUDE = (1 << 63) - 1
_F64_NAN = 0x7FF80000_00000000


@FAMILY.form("ex2|lg2|sin|cos|rsqrt.approx{.ftz}.f32", 2)
@FAMILY.form("tanh.approx.f32", 2)
def through_double(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute a function in double precision and round to nearest even."""
    value = t.ir.cast("fpext", read_float(t, i, 1, _F32, m), "double")
    write_float(t, i, _F32, m, t.ir.cast("fptrunc", function_of(t, i.opcode, value), "float"))


@FAMILY.form("sqrt.approx{.ftz}.f32", 2)
def square_root(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute the correctly rounded result, which is within the ISA's bound."""
    value = read_float(t, i, 1, _F32, m)
    write_float(t, i, _F32, m, t.ir.intrinsic("llvm.sqrt.f32", "float", value))


@FAMILY.form("rcp.approx{.ftz}.f32", 2)
def reciprocal(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute the correctly rounded result, which is within the ISA's bound."""
    value = read_float(t, i, 1, _F32, m)
    write_float(t, i, _F32, m, t.ir.binary("fdiv", real("float", 1.0), value))


@FAMILY.form("div.full{.ftz}.f32", 3)
def divide_full(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute the correctly rounded result, which is within the ISA's bound."""
    left, right = (read_float(t, i, n, _F32, m) for n in (1, 2))
    write_float(t, i, _F32, m, t.ir.binary("fdiv", left, right))


@FAMILY.form("div.approx{.ftz}.f32", 3)
def divide(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute the correctly rounded result.

    As the ISA defines it, a finite divisor above 2^126 gives 0, or NaN for an infinite dividend.
    """
    ir = t.ir
    left, right = (read_float(t, i, n, _F32, m) for n in (1, 2))
    size = ir.binary("and", t.to_bits(right, _F32), 0x7FFFFFFF)
    is_large = ir.binary("and", ir.compare("icmp ugt", size, _LARGEST_DIVISOR), ir.compare("icmp ult", size, _INFINITY))
    # A card flushes the reciprocal of such a divisor to zero. So multiply by zero with the divisor's sign.
    nothing = ir.intrinsic("llvm.copysign.f32", "float", real("float", 0.0), right)
    result = ir.select(is_large, ir.binary("fmul", left, nothing), ir.binary("fdiv", left, right))
    write_float(t, i, _F32, m, result)


@FAMILY.form("rsqrt.approx.f64", 2)
def inverse_root(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute the result by two rounded operations, and correct most of their error."""
    ir = t.ir
    value = t.read(i.operands[1], _F64)
    root = ir.intrinsic("llvm.sqrt.f64", "double", value)
    first = ir.binary("fdiv", real("double", 1.0), root)
    # 1/sqrt(v) = first / sqrt(1 - e) with e = 1 - v*first^2. Compute e from the root, so that nothing overflows.
    lost = ir.intrinsic("llvm.fma.f64", "double", ir.unary("fneg", root), root, value)
    inexact = ir.intrinsic("llvm.fma.f64", "double", ir.unary("fneg", root), first, real("double", 1.0))
    relative = ir.binary("fmul", ir.binary("fmul", ir.binary("fmul", lost, first), first), real("double", -0.5))
    better = ir.intrinsic("llvm.fma.f64", "double", first, ir.binary("fadd", inexact, relative), first)
    magnitude = ir.binary("and", t.to_bits(value, _F64), _F64_MAGNITUDE)
    # Near the ends of the range, the correction would be inexact, so use the uncorrected value.
    low, high = 0x100 << 52, 0x700 << 52
    is_plain = ir.binary("and", ir.compare("icmp ugt", magnitude, low), ir.compare("icmp ult", magnitude, high))
    t.write(i.operands[0], _F64, ir.select(is_plain, better, first))


@FAMILY.form("rcp|rsqrt.approx.ftz.f64", 2)
def gross(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute from the upper 32 bits only, and keep only those of the result (sections 9.7.3.14 and 9.7.3.17)."""
    ir = t.ir
    bits = ir.binary("and", t.to_bits(t.read(i.operands[1], _F64), _F64), _UPPER)
    value = t.from_bits(_flush_f64(t, bits), _F64)
    if i.opcode == "rsqrt":
        value = ir.intrinsic("llvm.sqrt.f64", "double", value)
    bits = t.to_bits(ir.binary("fdiv", real("double", 1.0), value), _F64)
    magnitude = ir.binary("and", bits, _F64_MAGNITUDE)
    # Round to the upper half by adding half a unit. An infinity must not become NaN by this.
    rounded = ir.binary("and", ir.binary("add", bits, _HALF_UNIT), _UPPER)
    is_finite = ir.compare("icmp ult", magnitude, _F64_INFINITY)
    is_nan = ir.compare("icmp ugt", magnitude, _F64_INFINITY)
    result = ir.select(is_finite, _flush_f64(t, rounded), bits)
    t.write(i.operands[0], _F64, ir.select(is_nan, constant("i64", _F64_NAN), result))


def function_of(t: OperandTranslator, name: str, value: Value) -> Value:
    """Compute the function that an opcode names, for a double."""
    if name == "ex2":
        return power_of_two(t, value)
    if name == "rsqrt":
        root = t.ir.intrinsic("llvm.sqrt.f64", "double", value)
        return t.ir.binary("fdiv", real("double", 1.0), root)
    return t.ir.intrinsic(_LIBRARY[name], "double", value)


def _flush_f64(t: OperandTranslator, bits: Value) -> Value:
    """Flush a subnormal f64, given by its bits, to a zero of the same sign."""
    magnitude = t.ir.binary("and", bits, _F64_MAGNITUDE)
    sign = t.ir.binary("and", bits, -1 << 63)
    return t.ir.select(t.ir.compare("icmp ult", magnitude, _SMALLEST_NORMAL_F64), sign, bits)
