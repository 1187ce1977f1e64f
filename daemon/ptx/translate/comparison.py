"""Comparison and selection (PTX ISA section 9.7.6)."""

from gpulease.daemon.ptx.parse.syntax import PREDICATE, Instruction, Operand, Pair, Scalar
from gpulease.daemon.ptx.translate.floating import flush
from gpulease.daemon.ptx.translate.forms import BITS, FLOATS, INTEGERS, Family, Modifiers
from gpulease.daemon.ptx.translate.ir import Value
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator

FAMILY = Family("Comparison and selection", "9.7.6")

# Section 9.3.1: the conditions that end in u are true if either operand is NaN.
FLOAT_CONDITIONS = {
    **{name: f"fcmp o{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"{name}u": f"fcmp u{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "num": "fcmp ord",
    "nan": "fcmp uno",
}

# lo, ls, hi and hs are spellings of unsigned comparisons.
_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
INTEGER_CONDITIONS = ("eq", "ne", "lt", "le", "gt", "ge")
UNSIGNED_CONDITIONS = (*INTEGER_CONDITIONS, *_UNSIGNED_NAMES)
COMBINE = ("and", "or", "xor")
_UNSIGNED = tuple(name for name in INTEGERS if name[0] == "u")
_SIGNED = tuple(name for name in INTEGERS if name[0] == "s")


@FAMILY.form("setp.cmp.type", 3, cmp=("eq", "ne"), type=BITS)
@FAMILY.form("setp.cmp.bool.type", 4, cmp=("eq", "ne"), bool=COMBINE, type=BITS)
@FAMILY.form("setp.cmp.type", 3, cmp=INTEGER_CONDITIONS, type=_SIGNED)
@FAMILY.form("setp.cmp.bool.type", 4, cmp=INTEGER_CONDITIONS, bool=COMBINE, type=_SIGNED)
@FAMILY.form("setp.cmp.type", 3, cmp=UNSIGNED_CONDITIONS, type=_UNSIGNED)
@FAMILY.form("setp.cmp.bool.type", 4, cmp=UNSIGNED_CONDITIONS, bool=COMBINE, type=_UNSIGNED)
@FAMILY.form("setp.cmp{.ftz}.type", 3, cmp=tuple(FLOAT_CONDITIONS), type=("f32",))
@FAMILY.form("setp.cmp.bool{.ftz}.type", 4, cmp=tuple(FLOAT_CONDITIONS), bool=COMBINE, type=("f32",))
@FAMILY.form("setp.cmp.type", 3, cmp=tuple(FLOAT_CONDITIONS), type=("f64",))
@FAMILY.form("setp.cmp.bool.type", 4, cmp=tuple(FLOAT_CONDITIONS), bool=COMBINE, type=("f64",))
def set_predicate(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`setp`: p|q = (a cmp b) op c, (not (a cmp b)) op c (section 9.7.6.2)."""
    scalar = m.scalar()
    left, right = (t.read(i.operands[n], scalar) for n in (1, 2))
    if "ftz" in m:
        left, right = flush(t, left), flush(t, right)
    result = t.ir.compare(condition_of(m["cmp"], scalar), left, right)
    # The second destination gets the complement before the combination, not after it.
    other = t.ir.invert(result)
    if "bool" in m:
        with_this = t.read(i.operands[3], PREDICATE)
        result, other = (t.ir.binary(m["bool"], value, with_this) for value in (result, other))
    write_pair(t, i.operands[0], result, other)


@FAMILY.form("selp.type", 4, type=(*BITS, *INTEGERS, *FLOATS))
def select(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`selp`: one of two values by a predicate (section 9.7.6.3)."""
    scalar = m.scalar()
    left, right = (t.read(i.operands[n], scalar) for n in (1, 2))
    t.write(i.operands[0], scalar, t.ir.select(t.read(i.operands[3], PREDICATE), left, right))


def condition_of(name: str, scalar: Scalar) -> str:
    if scalar.is_float:
        return FLOAT_CONDITIONS[name]
    name = _UNSIGNED_NAMES.get(name, name)
    if name in ("eq", "ne"):
        return f"icmp {name}"
    return f"icmp {'s' if scalar.is_signed else 'u'}{name}"


def write_pair(t: OperandTranslator, destination: Operand, result: Value, other: Value) -> None:
    """Write both results of a comparison, or the first if there is only one destination."""
    if isinstance(destination, Pair):
        t.write(destination.first, PREDICATE, result)
        t.write(destination.second, PREDICATE, other)
    else:
        t.write(destination, PREDICATE, result)
