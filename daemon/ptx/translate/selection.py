"""Selection and tests: testp, slct, prmt with a mode, fns, cnot, and variants of min and max for floats.

PTX ISA sections 9.7.3.1, 9.7.6.4, 9.7.9.7, 9.7.1.17, 9.7.8.5, 9.7.3.11 and 9.7.3.12.
"""

from gpulease.daemon.ptx.parse.syntax import PREDICATE, SCALARS, Instruction
from gpulease.daemon.ptx.translate.approximate import real
from gpulease.daemon.ptx.translate.floating import flush, read_float
from gpulease.daemon.ptx.translate.formats import F32
from gpulease.daemon.ptx.translate.forms import BITS, FLOATS, INTEGERS, InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.half import least_or_most
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator

FAMILY = InstructionFamily("Further selection", "9.7.3.1, 9.7.6.4, 9.7.9.7")

_F32 = SCALARS["f32"]
_WORD = SCALARS["b32"]
_TESTS = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")

# By mode and by the low two bits of c: the numbers of the bytes of b:a that are the result, lowest first.
_BYTES = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


@FAMILY.form("testp.test.type", 2, test=_TESTS, type=FLOATS)
def test_property(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute whether a number belongs to a class. Zero is a normal number."""
    scalar, ir = m.scalar(), t.ir
    digits = 23 if scalar.bits == 32 else 52
    # Each class is a range of the magnitude, as an integer.
    top = (1 << (scalar.bits - 1 - digits)) - 1
    bits = t.to_bits(t.read(i.operands[1], scalar), scalar)
    magnitude = ir.binary("and", bits, (1 << (scalar.bits - 1)) - 1)
    infinity, normal = top << digits, 1 << digits
    # For zero, this wraps to the largest integer, so zero is not in the subnormal range.
    above_zero = ir.binary("sub", magnitude, 1)
    result = {
        "finite": lambda: ir.compare("icmp ult", magnitude, infinity),
        "infinite": lambda: ir.compare("icmp eq", magnitude, infinity),
        "number": lambda: ir.compare("icmp ule", magnitude, infinity),
        "notanumber": lambda: ir.compare("icmp ugt", magnitude, infinity),
        "normal": lambda: ir.compare("icmp ult", magnitude, infinity),
        "subnormal": lambda: ir.compare("icmp ult", above_zero, normal - 1),
    }[m["test"]]()
    if m["test"] == "normal":
        result = ir.binary("and", result, ir.compare("icmp uge", above_zero, normal - 1))
    t.write(i.operands[0], PREDICATE, result)


@FAMILY.form("slct.type.s32", 4, type=(*BITS, *INTEGERS, *FLOATS))
@FAMILY.form("slct{.ftz}.type.f32", 4, type=(*BITS, *INTEGERS, *FLOATS))
def select_by_sign(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Return a if c >= 0, otherwise b. For -0 the comparison is true, for NaN it is false."""
    scalar = m.scalar()
    left, right = (t.read(i.operands[n], scalar) for n in (1, 2))
    if "s32" in m:
        chosen = t.ir.compare("icmp sge", t.read(i.operands[3], SCALARS["s32"]), 0)
    else:
        value = t.read(i.operands[3], _F32)
        value = flush(t, value) if "ftz" in m else value
        chosen = t.ir.compare("fcmp oge", value, real("float", 0.0))
    t.write(i.operands[0], scalar, t.ir.select(chosen, left, right))


@FAMILY.form("prmt.b32.mode", 4, mode=tuple(_BYTES))
def permute(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Select four of the eight bytes of b:a, according to the mode and the low two bits of c."""
    ir = t.ir
    low, high, choice = (t.read(i.operands[n], _WORD) for n in (1, 2, 3))
    wide = [ir.resize(value, "i64", signed=False) for value in (low, high)]
    joined = ir.binary("or", ir.binary("shl", wide[1], 32), wide[0])
    choice = ir.binary("and", choice, 3)
    result = constant("i32", 0)
    # The bits of c are known only when the kernel runs, so select the shift of each byte among four constants.
    for position in range(4):
        shift = constant("i64", 8 * _BYTES[m["mode"]][3][position])
        for number in (2, 1, 0):
            other = constant("i64", 8 * _BYTES[m["mode"]][number][position])
            shift = ir.select(ir.compare("icmp eq", choice, number), other, shift)
        byte = ir.binary("and", ir.cast("trunc", ir.binary("lshr", joined, shift), "i32"), 0xFF)
        result = ir.binary("or", result, ir.binary("shl", byte, 8 * position))
    t.write(i.operands[0], _WORD, result)


@FAMILY.form("fns.b32", 4)
def find_nth_set(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Return the position of the c-th set bit of a from bit b on, or all ones if there is none.

    The search goes upwards, or downwards if c is negative.
    """
    ir = t.ir
    mask, start, count = (t.read(i.operands[n], _WORD) for n in (1, 2, 3))
    # To search downwards, search the reversed mask upwards.
    is_down = ir.compare("icmp slt", count, 0)
    count = ir.intrinsic("llvm.abs.i32", "i32", count, constant("i1", 0))
    mask = ir.select(is_down, ir.intrinsic("llvm.bitreverse.i32", "i32", mask), mask)
    begin = ir.select(is_down, ir.binary("sub", constant("i32", 31), start), start)
    is_inside = ir.compare("icmp ult", start, 32)
    shift = ir.binary("and", begin, 31)
    only = ir.binary("shl", constant("i32", 1), shift)
    # With a count of 0, only the start bit itself counts.
    is_one = ir.compare("icmp eq", count, 0)
    kept = ir.select(is_one, only, ir.binary("shl", constant("i32", -1), shift))
    remaining = ir.binary("and", mask, ir.select(is_inside, kept, constant("i32", 0)))
    # Clear the lowest set bit count - 1 times. More than 32 times is never necessary.
    for dropped in range(1, 33):
        without = ir.binary("and", remaining, ir.binary("sub", remaining, 1))
        remaining = ir.select(ir.compare("icmp ugt", count, dropped), without, remaining)
    place = ir.intrinsic("llvm.cttz.i32", "i32", remaining, constant("i1", 0))
    place = ir.select(is_down, ir.binary("sub", constant("i32", 31), place), place)
    place = ir.select(ir.compare("icmp eq", remaining, 0), constant("i32", -1), place)
    # The magnitude of -2^31 does not fit 32 bits, and the ISA does not define the result. An H100 gives 0.
    is_least = ir.compare("icmp eq", count, -(1 << 31))
    t.write(i.operands[0], _WORD, ir.select(is_least, constant("i32", 0), place))


@FAMILY.form("cnot.type", 2, type=BITS)
def logical_not(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    scalar = m.scalar()
    is_zero = t.ir.compare("icmp eq", t.read(i.operands[1], scalar), 0)
    t.write(i.operands[0], scalar, t.ir.cast("zext", is_zero, f"i{scalar.bits}"))


@FAMILY.form("min|max{.ftz}.NaN.f32", 3)
@FAMILY.form("min|max{.ftz}{.NaN}.xorsign.abs.f32", 3)
def minimum_maximum(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Return the smaller or larger operand, with .NaN or .xorsign.abs (see half.minimum_maximum)."""
    operands = [t.to_bits(read_float(t, i, n, _F32, m), _F32) for n in (1, 2)]
    result: Value = least_or_most(t, i.opcode, m, (operands[0], operands[1]), F32)
    t.write(i.operands[0], _F32, result)
