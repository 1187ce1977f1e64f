"""Floating-point arithmetic (PTX ISA section 9.7.3).

As on a GPU, every result is correctly rounded to nearest even. Operations are never contracted: a `mul` and an `add` in
PTX are rounded separately. Other rounding modes are in directed.py, approximations in approximate.py.
"""

from gpulease.daemon.ptx.parse.syntax import SCALARS, Instruction, Scalar
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator, ir_type

FAMILY = InstructionFamily("Floating point", "9.7.3")

_F32 = SCALARS["f32"]
_F64 = SCALARS["f64"]

# If the result of a single-precision operation is NaN, it is this NaN (CUDA C++ Programming Guide, "Floating-Point
# Standard"). The ISA does not define which NaN double-precision operations give, so they give the host's.
_CANONICAL_NAN = 0x7FFFFFFF

# The mask of an f32's bits except for the sign, and the bits of infinity. Larger magnitudes are NaN.
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000

_OPERATIONS = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}


@FAMILY.form("add|sub|mul{.rn}{.ftz}{.sat}.f32", 3)
@FAMILY.form("div.rn{.ftz}.f32", 3)
def binary_f32(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute in f32 with one rounding to nearest even."""
    left, right = (read_float(t, i, n, _F32, m) for n in (1, 2))
    write_float(t, i, _F32, m, t.ir.binary(_OPERATIONS[i.opcode], left, right))


@FAMILY.form("add|sub|mul{.rn}.f64", 3)
@FAMILY.form("div.rn.f64", 3)
def binary_f64(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute in f64 with one rounding to nearest even."""
    left, right = (read_float(t, i, n, _F64, m) for n in (1, 2))
    write_float(t, i, _F64, m, t.ir.binary(_OPERATIONS[i.opcode], left, right))


@FAMILY.form("fma|mad.rn{.ftz}{.sat}.f32", 4)
@FAMILY.form("fma|mad.rn.f64", 4)
def fused(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute product and sum with one rounding. `mad` is the same since sm_20."""
    scalar = _last_scalar(i)
    operands = [read_float(t, i, n, scalar, m) for n in (1, 2, 3)]
    write_float(t, i, scalar, m, t.ir.intrinsic(f"llvm.fma.f{scalar.bits}", ir_type(scalar), *operands))


@FAMILY.form("sqrt.rn{.ftz}.f32", 2)
@FAMILY.form("sqrt.rn.f64", 2)
def square_root(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    scalar = _last_scalar(i)
    value = read_float(t, i, 1, scalar, m)
    write_float(t, i, scalar, m, t.ir.intrinsic(f"llvm.sqrt.f{scalar.bits}", ir_type(scalar), value))


@FAMILY.form("rcp.rn{.ftz}.f32", 2)
@FAMILY.form("rcp.rn.f64", 2)
def reciprocal(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    scalar = _last_scalar(i)
    one = float_constant(t, scalar, 1.0)
    write_float(t, i, scalar, m, t.ir.binary("fdiv", one, read_float(t, i, 1, scalar, m)))


@FAMILY.form("neg|abs{.ftz}.f32", 2)
@FAMILY.form("neg|abs.f64", 2)
def sign(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Flip or clear the sign bit.

    The ISA does not define the result for NaN. As on an H100, a NaN of f64 stays, and one of f32 becomes canonical.
    """
    scalar = _last_scalar(i)
    value = read_float(t, i, 1, scalar, m)
    # Change the bits, because LLVM's fneg and fabs may change a NaN.
    bits = t.to_bits(value, scalar)
    sign_bit = 1 << (scalar.bits - 1)
    result = t.ir.binary("xor", bits, sign_bit) if i.opcode == "neg" else t.ir.binary("and", bits, sign_bit - 1)
    nan = bits if scalar.bits == 64 else constant("i32", _CANONICAL_NAN)
    is_nan = t.ir.compare("fcmp uno", value, value)
    t.write(i.operands[0], scalar, t.ir.select(is_nan, nan, result))


@FAMILY.form("min|max{.ftz}.f32", 3)
@FAMILY.form("min|max.f64", 3)
def minimum_maximum(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Return the smaller or larger operand (sections 9.7.3.11 and 9.7.3.12).

    If one operand is NaN, the result is the other one. +0 is greater than -0.
    """
    scalar, ir = _last_scalar(i), t.ir
    left, right = (read_float(t, i, n, scalar, m) for n in (1, 2))
    # First assume that both are numbers. Then correct the result for equal operands, and then for NaN.
    wins = ir.compare("fcmp olt" if i.opcode == "min" else "fcmp ogt", left, right)
    result = ir.select(wins, left, right)
    # Equal numbers have equal bits, except for zeros. `or` gives -0 if either is -0, `and` gives +0 if either is +0.
    merge = "or" if i.opcode == "min" else "and"
    bits = ir.binary(merge, t.to_bits(left, scalar), t.to_bits(right, scalar))
    result = ir.select(ir.compare("fcmp oeq", left, right), t.from_bits(bits, scalar), result)
    result = ir.select(ir.compare("fcmp uno", right, right), left, result)
    write_float(t, i, scalar, m, ir.select(ir.compare("fcmp uno", left, left), right, result))


@FAMILY.form("copysign.type", 3, type=("f32", "f64"))
def copy_sign(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    scalar = m.scalar()
    sign_bit = 1 << (scalar.bits - 1)
    source, magnitude = (t.to_bits(t.read(i.operands[n], scalar), scalar) for n in (1, 2))
    sign = t.ir.binary("and", source, sign_bit)
    t.write(i.operands[0], scalar, t.ir.binary("or", sign, t.ir.binary("and", magnitude, sign_bit - 1)))


def read_float(t: OperandTranslator, i: Instruction, position: int, scalar: Scalar, m: Modifiers) -> Value:
    """Read a float operand. If the instruction has .ftz, subnormals are flushed to zero."""
    value = t.read(i.operands[position], scalar)
    return flush(t, value) if "ftz" in m else value


def write_float(t: OperandTranslator, i: Instruction, scalar: Scalar, m: Modifiers, value: Value) -> None:
    """Finish a result (see `finish`), and write it."""
    t.write(i.operands[0], scalar, finish(t, scalar, m, value))


def finish(t: OperandTranslator, scalar: Scalar, m: Modifiers, value: Value) -> Value:
    """Apply to a rounded result what its modifiers and type require.

    .ftz flushes subnormals, .sat clamps to [0, 1], and without .sat a NaN of f32 becomes the canonical one. The NaN is
    replaced as an integer: LLVM treats all NaN as equal, so it could remove a selection between floats.
    """
    # In the ISA's order, .ftz applies to the rounded result, and .sat after that.
    if "ftz" in m and scalar == _F32:
        value = flush(t, value)
    if "sat" in m:
        return saturate(t, scalar, value)
    if scalar != _F32:
        return value
    bits = t.to_bits(value, _F32)
    is_nan = t.ir.compare("icmp ugt", t.ir.binary("and", bits, _MAGNITUDE), _INFINITY)
    return t.ir.select(is_nan, constant("i32", _CANONICAL_NAN), bits)


def flush(t: OperandTranslator, value: Value) -> Value:
    """Flush a subnormal f32 to a zero of the same sign (section 9.7.3, ".ftz")."""
    magnitude = t.ir.intrinsic("llvm.fabs.f32", "float", value)
    smallest_normal = t.from_bits(constant("i32", 0x00800000), _F32)
    zero = t.ir.intrinsic("llvm.copysign.f32", "float", float_constant(t, _F32, 0.0), value)
    return t.ir.select(t.ir.compare("fcmp olt", magnitude, smallest_normal), zero, value)


def saturate(t: OperandTranslator, scalar: Scalar, value: Value) -> Value:
    """Clamp to [0.0, 1.0]; NaN and -0 become +0 (section 9.7.3, ".sat")."""
    zero, one = (float_constant(t, scalar, number) for number in (0.0, 1.0))
    # "ogt" is false for NaN and for -0, so for both the constant is selected.
    positive = t.ir.select(t.ir.compare("fcmp ogt", value, zero), value, zero)
    return t.ir.select(t.ir.compare("fcmp olt", positive, one), positive, one)


def float_constant(t: OperandTranslator, scalar: Scalar, number: float) -> Value:
    """Return a constant. `number` must be exact in decimal notation, such as 0.0 or 1.0."""
    return Value(ir_type(scalar), f"{number:e}")


def _last_scalar(i: Instruction) -> Scalar:
    return next(SCALARS[modifier] for modifier in i.modifiers if modifier in SCALARS)
