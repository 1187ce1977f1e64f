"""2 to a power, written out as arithmetic: LLVM can run it on several threads of a loop at once, unlike a call."""

import math
import struct

from gpulease.daemon.drivers.cpu.translate.ir import Value, constant
from gpulease.daemon.drivers.cpu.translate.operands import OperandTranslator

# The series of 2^r to this power of r; what it leaves out is under 2^-36 for r within half.
_DEGREE = 9

# Added to a double of magnitude under 2^51 it leaves the nearest integer in the low bits.
_ROUNDER = 1.5 * 2.0**52

# Powers beyond are 0 and infinity as f32, far from the ends of f64.
_LIMIT = 300.0

_BIAS = 1023
_EXPONENT_SHIFT = 52


def real(type_name: str, number: float) -> Value:
    """A float constant, bit for bit: LLVM spells both types by the double's bits."""
    return Value(type_name, f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}")


def power_of_two(t: OperandTranslator, value: Value) -> Value:
    """2^value of a double, good to 36 bits; NaN stays NaN."""
    ir = t.ir
    low, high = real("double", -_LIMIT), real("double", _LIMIT)
    value = ir.select(ir.compare("fcmp ogt", value, high), high, value)
    value = ir.select(ir.compare("fcmp olt", value, low), low, value)
    shifted = ir.binary("fadd", value, real("double", _ROUNDER))
    rest = ir.binary("fsub", value, ir.binary("fsub", shifted, real("double", _ROUNDER)))
    result = real("double", _coefficient(_DEGREE))
    for power in range(_DEGREE - 1, -1, -1):
        result = ir.intrinsic("llvm.fma.f64", "double", result, rest, real("double", _coefficient(power)))
    # Bits above the exponent's fall off, those of the rounder's own among them.
    whole = ir.cast("bitcast", shifted, "i64")
    scale = ir.binary("shl", ir.binary("add", whole, constant("i64", _BIAS)), _EXPONENT_SHIFT)
    return ir.binary("fmul", result, ir.cast("bitcast", scale, "double"))


def _coefficient(power: int) -> float:
    return math.log(2.0) ** power / math.factorial(power)
