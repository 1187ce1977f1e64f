"""Arithmetic on .f16, .bf16 and pairs of them (PTX ISA sections 9.7.4, 9.7.3.21 and 9.7.3.22).

Each number becomes a double, in which sums, products and their sums are exact or rounded to odd; then the result is
rounded once, to nearest even. A NaN result is 0x7fff.
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

# A function from the operands' bits to the result's, for one number of the format `kind`.
Lane = Callable[..., Value]


@FAMILY.form("add{.rn}{.ftz}{.sat}.type", 3, type=_F16)
@FAMILY.form("sub{.rn}{.ftz}{.sat}.type", 3, type=_F16)
@FAMILY.form("mul{.rn}{.ftz}{.sat}.type", 3, type=_F16)
@FAMILY.form("add{.rn}.type", 3, type=_BF16)
@FAMILY.form("sub{.rn}.type", 3, type=_BF16)
@FAMILY.form("mul{.rn}.type", 3, type=_BF16)
def binary(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    def calculate(left: Value, right: Value) -> Value:
        # The product of two such numbers is exact in a double; a sum may not be.
        if i.opcode == "mul":
            return t.ir.binary("fmul", left, right)
        return sum_to_odd(t, left, t.ir.unary("fneg", right) if i.opcode == "sub" else right)

    each_lane(t, i, m, 2, rounded(t, m, calculate))


@FAMILY.form("fma.rn{.ftz}{.sat}.type", 4, type=_F16)
@FAMILY.form("fma.rn{.ftz}.relu.type", 4, type=_F16)
@FAMILY.form("fma.rn{.relu}.type", 4, type=_BF16)
def fused(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`fma`: the product, exact in a double, and the sum with one rounding."""

    def calculate(left: Value, right: Value, added: Value) -> Value:
        return sum_to_odd(t, t.ir.binary("fmul", left, right), added)

    each_lane(t, i, m, 3, rounded(t, m, calculate))


@FAMILY.form("ex2.approx.type", 2, type=_F16)
@FAMILY.form("ex2.approx.ftz.type", 2, type=_BF16)
@FAMILY.form("tanh.approx.type", 2, type=_ALL)
def function(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Rounded from near double precision, so within the ISA's bounds: 2^-9.9, 2^-7 (ex2), 2^-10.987, 2^-8 (tanh)."""
    each_lane(t, i, m, 1, rounded(t, m, lambda value: function_of(t, i.opcode, value)))


@FAMILY.form("neg{.ftz}.type", 2, type=_F16)
@FAMILY.form("abs{.ftz}.type", 2, type=_F16)
@FAMILY.form("neg.type", 2, type=_BF16)
@FAMILY.form("abs.type", 2, type=_BF16)
def sign(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Flip or clear the sign bit. The ISA does not define this for NaN: as on an H100, it becomes the canonical NaN."""

    def lane(bits: Value, kind: Format) -> Value:
        bits = _flushed(t, m, bits, kind)
        magnitude = t.ir.binary("and", bits, 0x7FFF)
        result = t.ir.binary("xor", bits, 0x8000) if i.opcode == "neg" else magnitude
        is_nan = t.ir.compare("icmp ugt", magnitude, kind.infinity)
        return t.ir.select(is_nan, constant(bits.type, kind.nan), result)

    each_lane(t, i, m, 1, lane)


@FAMILY.form("min{.ftz}{.NaN}.type", 3, type=_F16)
@FAMILY.form("min{.NaN}.type", 3, type=_BF16)
@FAMILY.form("min{.ftz}{.NaN}.xorsign.abs.type", 3, type=_F16)
@FAMILY.form("min{.NaN}.xorsign.abs.type", 3, type=_BF16)
@FAMILY.form("max{.ftz}{.NaN}.type", 3, type=_F16)
@FAMILY.form("max{.NaN}.type", 3, type=_BF16)
@FAMILY.form("max{.ftz}{.NaN}.xorsign.abs.type", 3, type=_F16)
@FAMILY.form("max{.NaN}.xorsign.abs.type", 3, type=_BF16)
def minimum_maximum(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """+0 is greater than -0. A number wins over a NaN, or loses with .NaN; .xorsign.abs compares magnitudes."""

    def lane(left: Value, right: Value, kind: Format) -> Value:
        left, right = _flushed(t, m, left, kind), _flushed(t, m, right, kind)
        return least_or_most(t, i.opcode, m, (left, right), kind)

    each_lane(t, i, m, 2, lane)


def each_lane(t: OperandTranslator, i: Instruction, m: Modifiers, count: int, lane: Lane) -> None:
    """Apply a function of bits to a number, or to each number of a pair, and write the result."""
    kind, ir = m["type"], t.ir
    scalar, layout = SCALARS[kind], FORMATS[kind.removesuffix("x2")]
    operands = [t.read(i.operands[n], scalar) for n in range(1, count + 1)]
    if scalar.bits == 16:
        t.write(i.operands[0], scalar, lane(*operands, kind=layout))
        return
    # A pair: take both halves out, and put the results back at their places.
    result = constant("i32", 0)
    for shift in (0, 16):
        parts = (ir.cast("trunc", ir.binary("lshr", operand, shift), "i16") for operand in operands)
        wide = ir.cast("zext", lane(*parts, kind=layout), "i32")
        result = ir.binary("or", result, ir.binary("shl", wide, shift))
    t.write(i.operands[0], scalar, result)


def rounded(t: OperandTranslator, m: Modifiers, calculate: Lane) -> Lane:
    """Wrap a function of doubles as one of bits: operands are flushed with .ftz, the result rounded and finished."""

    def lane(*operands: Value, kind: Format) -> Value:
        flushes = "ftz" in m
        numbers = [decode(t, bits, kind) for bits in operands]
        if flushes:
            numbers = [flush_narrow(t, number, kind) for number in numbers]
        # One rounding: the steps before it are exact or round to odd, and the steps after it choose among existing
        # numbers.
        value = round_to(t, calculate(*numbers), kind, "rn")
        if flushes:
            value = flush_narrow(t, value, kind)
        if "sat" in m:
            value = saturate(t, _F64, value)
        # "ole" is false for NaN, which .relu keeps.
        if "relu" in m:
            is_below = t.ir.compare("fcmp ole", value, real("double", 0.0))
            value = t.ir.select(is_below, real("double", 0.0), value)
        return encode(t, value, kind)

    return lane


def least_or_most(t: OperandTranslator, opcode: str, m: Modifiers, operands: tuple[Value, ...], kind: Format) -> Value:
    """Return the smaller or larger of two numbers' bits, as the modifiers demand."""
    ir = t.ir
    left, right = operands
    # The sign of the product, for .xorsign; then only magnitudes are compared.
    flipped = ir.binary("and", ir.binary("xor", left, right), kind.sign)
    if "xorsign" in m:
        left, right = (ir.binary("and", bits, kind.sign - 1) for bits in operands)
    left_is_nan, right_is_nan = (
        ir.compare("icmp ugt", ir.binary("and", bits, kind.sign - 1), kind.infinity) for bits in (left, right)
    )
    # Complement a negative number's magnitude: then the bits have the order of the numbers, with -0 before +0.
    ordered = [
        ir.binary("xor", bits, ir.binary("lshr", ir.binary("ashr", bits, kind.bits - 1), 1)) for bits in (left, right)
    ]
    wins = ir.compare("icmp slt" if opcode == "min" else "icmp sgt", *ordered)
    result = ir.select(wins, left, right)
    nan = constant(left.type, kind.nan)
    # With .NaN one NaN is enough for the result to be NaN, without it both must be.
    if "NaN" in m:
        is_nan = ir.binary("or", left_is_nan, right_is_nan)
    else:
        result = ir.select(right_is_nan, left, ir.select(left_is_nan, right, result))
        is_nan = ir.binary("and", left_is_nan, right_is_nan)
    if "xorsign" in m:
        result = ir.binary("or", result, flipped)
    return ir.select(is_nan, nan, result)


def _flushed(t: OperandTranslator, m: Modifiers, bits: Value, kind: Format) -> Value:
    """Return a subnormal's bits as a zero of its sign if the instruction has .ftz."""
    if "ftz" not in m:
        return bits
    magnitude = t.ir.binary("and", bits, kind.sign - 1)
    is_small = t.ir.compare("icmp ult", magnitude, 1 << kind.digits)
    return t.ir.select(is_small, t.ir.binary("and", bits, kind.sign), bits)
