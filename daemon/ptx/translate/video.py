"""Video instructions on words of 32 bits, and on their halves and bytes (PTX ISA section 9.7.18).

Selectors, which select, reorder or mask parts of operands (`.b0`, `.h10`), are not supported. CUDA C++ has no functions
that use them.
"""

from collections.abc import Callable

from gpulease.daemon.ptx.parse.syntax import SCALARS, Instruction
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers, Translate
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator

_WORD = SCALARS["b32"]
_BOTH = ("u32", "s32")
_CONDITIONS = {"eq": "eq", "ne": "ne", "lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"}

FAMILY = InstructionFamily(
    "Video instructions", "9.7.18", into=_BOTH, left=_BOTH, right=_BOTH, condition=tuple(_CONDITIONS)
)

_SIMPLE = ("vadd", "vsub", "vabsdiff", "vmin", "vmax")
_LANES = ("2", "4")

# The type of all intermediate results. Sums and differences of 32-bit numbers, signed or not, fit.
_WIDE = "i64"


def simple(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute `vadd`, `vsub` and so on for words. A second operation may add c, or select the smaller or larger."""
    ir, is_signed = t.ir, m["into"] == "s32"
    left, right = _whole(t, i, 1, m["left"]), _whole(t, i, 2, m["right"])
    # The widened operands may be signed or unsigned. The result is clamped only with .sat.
    value = _calculate(t, i.opcode, left, right)
    if "sat" in m:
        value = _clamp(t, value, 32, signed=is_signed)
    result = ir.cast("trunc", value, "i32")
    if "second" in m:
        result = _second(t, m["second"], result, t.read(i.operands[3], _WORD), signed=is_signed)
    t.write(i.operands[0], _WORD, result)


@FAMILY.form("vset.left.right.condition", 3)
def compare(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Return 1 if the condition is true, otherwise 0."""
    left, right = _whole(t, i, 1, m["left"]), _whole(t, i, 2, m["right"])
    t.write(i.operands[0], _WORD, t.ir.cast("trunc", _holds(t, m["condition"], left, right), "i32"))


@FAMILY.form("vshl|vshr.into.left.u32.mode", 3, mode=("clamp", "wrap"))
def shift(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Shift by b bits. b is reduced modulo 32 or clamped to 32."""
    ir = t.ir
    value, distance = _whole(t, i, 1, m["left"]), _whole(t, i, 2, "u32")
    if m["mode"] == "wrap":
        distance = ir.binary("and", distance, 31)
    else:
        distance = ir.intrinsic(f"llvm.umin.{_WIDE}", _WIDE, distance, constant(_WIDE, 32))
    result = ir.binary("shl" if i.opcode == "vshl" else "ashr", value, distance)
    t.write(i.operands[0], _WORD, ir.cast("trunc", result, "i32"))


def lanes(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute `vadd2`, `vadd4` and so on for each half or byte. With .add, return the sum of these results and c."""

    def lane(left: Value, right: Value, bits: int) -> Value:
        value = _calculate(t, i.opcode[:-1], left, right)
        return _clamp(t, value, bits, signed=m["into"] == "s32") if "sat" in m else value

    _each_lane(t, i, m, lane)


@FAMILY.form("vset2|vset4.left.right.condition{.add}", 4)
def compare_lanes(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Return 1 or 0 for each half or byte. With .add, return the number of ones plus c."""
    _each_lane(t, i, m, lambda left, right, bits: _holds(t, m["condition"], left, right))


def _register(name: str, suffix: str, arity: int, translate: Translate) -> None:
    template = f"{name}.into.left.right{suffix}"
    FAMILY.form(template, arity, second=("add", "min", "max"))(translate)


# Each instruction has a form with .sat, and one with a second operation or a sum.
for _name in _SIMPLE:
    _register(_name, "{.sat}", 3, simple)
    _register(_name, "{.sat}.second", 4, simple)
for _name in (*_SIMPLE, "vavrg"):
    for _lanes in _LANES:
        _register(_name + _lanes, "{.sat}", 4, lanes)
        _register(_name + _lanes, ".add", 4, lanes)


def _each_lane(t: OperandTranslator, i: Instruction, m: Modifiers, lane: Callable[[Value, Value, int], Value]) -> None:
    ir, bits = t.ir, 32 // int(i.opcode[-1])
    left, right, third = (t.read(i.operands[n], _WORD) for n in (1, 2, 3))
    # Without .add, the third operand is ignored. It would only be used for masked parts, which are not supported.
    result = third if "add" in m else constant("i32", 0)
    for start in range(0, 32, bits):
        parts = _part(t, left, start, bits, m["left"]), _part(t, right, start, bits, m["right"])
        value = ir.cast("trunc", lane(*parts, bits), "i32")
        if "add" in m:
            result = ir.binary("add", result, value)
        else:
            cut = ir.binary("and", value, (1 << bits) - 1)
            result = ir.binary("or", result, ir.binary("shl", cut, start))
    t.write(i.operands[0], _WORD, result)


def _calculate(t: OperandTranslator, name: str, left: Value, right: Value) -> Value:
    ir = t.ir
    match name:
        case "vadd":
            return ir.binary("add", left, right)
        case "vsub":
            return ir.binary("sub", left, right)
        case "vabsdiff":
            return ir.intrinsic(f"llvm.abs.{_WIDE}", _WIDE, ir.binary("sub", left, right), constant("i1", 0))
        case "vavrg":
            # A half is rounded away from 0.
            total = ir.binary("add", left, right)
            carry = ir.cast("zext", ir.compare("icmp sge", total, 0), _WIDE)
            return ir.binary("ashr", ir.binary("add", total, carry), 1)
    return ir.intrinsic(f"llvm.s{name[1:]}.{_WIDE}", _WIDE, left, right)


def _second(t: OperandTranslator, operation: str, value: Value, third: Value, *, signed: bool) -> Value:
    if operation == "add":
        return t.ir.binary("add", value, third)
    return t.ir.intrinsic(f"llvm.{'s' if signed else 'u'}{operation}.i32", "i32", value, third)


def _holds(t: OperandTranslator, condition: str, left: Value, right: Value) -> Value:
    return t.ir.cast("zext", t.ir.compare(f"icmp {_CONDITIONS[condition]}", left, right), _WIDE)


def _clamp(t: OperandTranslator, value: Value, bits: int, *, signed: bool) -> Value:
    low = -(1 << bits - 1) if signed else 0
    value = t.ir.intrinsic(f"llvm.smax.{_WIDE}", _WIDE, value, constant(_WIDE, low))
    return t.ir.intrinsic(f"llvm.smin.{_WIDE}", _WIDE, value, constant(_WIDE, low + (1 << bits) - 1))


def _whole(t: OperandTranslator, i: Instruction, position: int, kind: str) -> Value:
    return t.ir.resize(t.read(i.operands[position], _WORD), _WIDE, signed=kind == "s32")


def _part(t: OperandTranslator, word: Value, start: int, bits: int, kind: str) -> Value:
    part = t.ir.cast("trunc", t.ir.binary("lshr", word, start), f"i{bits}")
    return t.ir.resize(part, _WIDE, signed=kind == "s32")
