"""Arithmetic on .f16, .bf16 and pairs of them (PTX ISA sections 9.7.4, 9.7.3.21 and 9.7.3.22).

Each operand is converted to a double. Products are exact there, and sums are exact or rounded to odd (formats.py). Then
the result is rounded once, to nearest even. If the result is NaN, its bits are 0x7fff.
"""

from collections.abc import Callable

from gpulease.daemon.ptx.parse.syntax import SCALARS, Instruction
from gpulease.daemon.ptx.translate.approximate import function_of, real
from gpulease.daemon.ptx.translate.floating import saturate
from gpulease.daemon.ptx.translate.formats import (
    FORMATS,
    Format,
    decode,
    encode,
    flush_narrow,
    round_to,
    sum_to_odd,
)
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator

FAMILY = InstructionFamily("Half precision", "9.7.4")

_F64 = SCALARS["f64"]
_F16 = ("f16", "f16x2")
_BF16 = ("bf16", "bf16x2")
_ALL = _F16 + _BF16

# A function that computes the bits of a result from the bits of the operands, for single numbers of the format `kind`.
Lane = Callable[..., Value]


@FAMILY.form("add|sub|mul{.rn}{.ftz}{.sat}.type", 3, type=_F16)
@FAMILY.form("add|sub|mul{.rn}.type", 3, type=_BF16)
def binary(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    def calculate(left: Value, right: Value) -> Value:
        # The product of two such numbers is exact as a double, but a sum may not be.
        if i.opcode == "mul":
            return t.ir.binary("fmul", left, right)
        return sum_to_odd(t, left, t.ir.unary("fneg", right) if i.opcode == "sub" else right)

    each_lane(t, i, m, 2, rounded(t, m, calculate))


@FAMILY.form("fma.rn{.ftz}{.sat}.type", 4, type=_F16)
@FAMILY.form("fma.rn{.ftz}.relu.type", 4, type=_F16)
@FAMILY.form("fma.rn{.relu}.type", 4, type=_BF16)
def fused(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute a product, which is exact as a double, and a sum, with one rounding."""

    def calculate(left: Value, right: Value, added: Value) -> Value:
        return sum_to_odd(t, t.ir.binary("fmul", left, right), added)

    each_lane(t, i, m, 3, rounded(t, m, calculate))


@FAMILY.form("ex2.approx.type", 2, type=_F16)
@FAMILY.form("ex2.approx.ftz.type", 2, type=_BF16)
@FAMILY.form("tanh.approx.type", 2, type=_ALL)
def function(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute the function in nearly double precision, and round the result.

    This is within the ISA's bounds of the error: for f16 and bf16, 2^-9.9 and 2^-7 (ex2), 2^-10.987 and 2^-8 (tanh).
    """
    each_lane(t, i, m, 1, rounded(t, m, lambda value: function_of(t, i.opcode, value)))


@FAMILY.form("neg|abs{.ftz}.type", 2, type=_F16)
@FAMILY.form("neg|abs.type", 2, type=_BF16)
def sign(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Flip or clear the sign bit. The ISA does not define this for NaN; as on an H100, the result is 0x7fff."""

    def lane(bits: Value, kind: Format) -> Value:
        bits = _flushed(t, m, bits, kind)
        magnitude = t.ir.binary("and", bits, 0x7FFF)
        result = t.ir.binary("xor", bits, 0x8000) if i.opcode == "neg" else magnitude
        is_nan = t.ir.compare("icmp ugt", magnitude, kind.infinity)
        return t.ir.select(is_nan, constant(bits.type, kind.nan), result)

    each_lane(t, i, m, 1, lane)


@FAMILY.form("min|max{.ftz}{.NaN}.type", 3, type=_F16)
@FAMILY.form("min|max{.NaN}.type", 3, type=_BF16)
@FAMILY.form("min|max{.ftz}{.NaN}.xorsign.abs.type", 3, type=_F16)
@FAMILY.form("min|max{.NaN}.xorsign.abs.type", 3, type=_BF16)
def minimum_maximum(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Return the smaller or larger operand.

    If one operand is NaN, the result is the other one; with .NaN, it is NaN. +0 is greater than -0. With .xorsign.abs,
    magnitudes are compared, and the sign of the result is that of the product.
    """

    def lane(left: Value, right: Value, kind: Format) -> Value:
        left, right = _flushed(t, m, left, kind), _flushed(t, m, right, kind)
        return least_or_most(t, i.opcode, m, (left, right), kind)

    each_lane(t, i, m, 2, lane)


def each_lane(t: OperandTranslator, i: Instruction, m: Modifiers, count: int, lane: Lane) -> None:
    """Apply `lane` to `count` operands, or separately to the two numbers of pairs, and write the result."""
    kind, ir = m["type"], t.ir
    scalar, layout = SCALARS[kind], FORMATS[kind.removesuffix("x2")]
    operands = [t.read(i.operands[n], scalar) for n in range(1, count + 1)]
    if scalar.bits == 16:
        t.write(i.operands[0], scalar, lane(*operands, kind=layout))
        return
    # For pairs, extract both halves, and put the results back at their places.
    result = constant("i32", 0)
    for shift in (0, 16):
        parts = (ir.cast("trunc", ir.binary("lshr", operand, shift), "i16") for operand in operands)
        wide = ir.cast("zext", lane(*parts, kind=layout), "i32")
        result = ir.binary("or", result, ir.binary("shl", wide, shift))
    t.write(i.operands[0], scalar, result)


def rounded(t: OperandTranslator, m: Modifiers, calculate: Lane) -> Lane:
    """Return a function of bits for a function of doubles. It converts the operands and rounds the result.

    It also applies .ftz to the operands and the result, and .sat and .relu to the result.
    """

    def lane(*operands: Value, kind: Format) -> Value:
        flushes = "ftz" in m
        numbers = [decode(t, bits, kind) for bits in operands]
        if flushes:
            numbers = [flush_narrow(t, number, kind) for number in numbers]
        # This is the only rounding. The steps before it are exact or round to odd, and the steps after it select
        # numbers that the format has.
        value = round_to(t, calculate(*numbers), kind, "rn")
        if flushes:
            value = flush_narrow(t, value, kind)
        if "sat" in m:
            value = saturate(t, _F64, value)
        # "ole" is false for NaN, so .relu keeps NaN.
        if "relu" in m:
            is_below = t.ir.compare("fcmp ole", value, real("double", 0.0))
            value = t.ir.select(is_below, real("double", 0.0), value)
        return encode(t, value, kind)

    return lane


def least_or_most(t: OperandTranslator, opcode: str, m: Modifiers, operands: tuple[Value, ...], kind: Format) -> Value:
    """Return the bits of the smaller or larger of two numbers, according to the modifiers (see minimum_maximum)."""
    ir = t.ir
    left, right = operands
    # With .xorsign, the result has the sign of the product, and only magnitudes are compared.
    flipped = ir.binary("and", ir.binary("xor", left, right), kind.sign)
    if "xorsign" in m:
        left, right = (ir.binary("and", bits, kind.sign - 1) for bits in operands)
    left_is_nan, right_is_nan = (
        ir.compare("icmp ugt", ir.binary("and", bits, kind.sign - 1), kind.infinity) for bits in (left, right)
    )
    # Complement the magnitude of negative numbers. Then the bits, as integers, have the order of the numbers, with -0
    # before +0.
    ordered = [
        ir.binary("xor", bits, ir.binary("lshr", ir.binary("ashr", bits, kind.bits - 1), 1)) for bits in (left, right)
    ]
    wins = ir.compare("icmp slt" if opcode == "min" else "icmp sgt", *ordered)
    result = ir.select(wins, left, right)
    nan = constant(left.type, kind.nan)
    # With .NaN, the result is NaN if either operand is NaN; without it, only if both are.
    if "NaN" in m:
        is_nan = ir.binary("or", left_is_nan, right_is_nan)
    else:
        result = ir.select(right_is_nan, left, ir.select(left_is_nan, right, result))
        is_nan = ir.binary("and", left_is_nan, right_is_nan)
    if "xorsign" in m:
        result = ir.binary("or", result, flipped)
    return ir.select(is_nan, nan, result)


def _flushed(t: OperandTranslator, m: Modifiers, bits: Value, kind: Format) -> Value:
    """Flush a number, given by its bits, if it is subnormal and the instruction has .ftz."""
    if "ftz" not in m:
        return bits
    magnitude = t.ir.binary("and", bits, kind.sign - 1)
    is_small = t.ir.compare("icmp ult", magnitude, 1 << kind.digits)
    return t.ir.select(is_small, t.ir.binary("and", bits, kind.sign), bits)
