"""Comparison and selection, including of .f16 and .bf16 (PTX ISA sections 9.7.6 and 9.7.7)."""

from gpulease.daemon.ptx.parse.syntax import PREDICATE, Instruction, Operand, Pair, Scalar
from gpulease.daemon.ptx.translate.floating import flush
from gpulease.daemon.ptx.translate.formats import FORMATS, decode, flush_narrow
from gpulease.daemon.ptx.translate.forms import BITS, FLOATS, INTEGERS, SIGNED, UNSIGNED, InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator

COMPARISON = InstructionFamily("Comparison and selection", "9.7.6")

# The conditions that end in u are true if either operand is NaN (section 9.3.1).
FLOAT_CONDITIONS = {
    **{name: f"fcmp o{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"{name}u": f"fcmp u{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "num": "fcmp ord",
    "nan": "fcmp uno",
}

# lo, ls, hi and hs are other names of the unsigned comparisons.
_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
INTEGER_CONDITIONS = ("eq", "ne", "lt", "le", "gt", "ge")
UNSIGNED_CONDITIONS = (*INTEGER_CONDITIONS, *_UNSIGNED_NAMES)
COMBINE = ("and", "or", "xor")
_UNSIGNED = tuple(name for name in INTEGERS if name[0] == "u")
_SIGNED = tuple(name for name in INTEGERS if name[0] == "s")


@COMPARISON.form("setp.cmp.type", 3, cmp=("eq", "ne"), type=BITS)
@COMPARISON.form("setp.cmp.bool.type", 4, cmp=("eq", "ne"), bool=COMBINE, type=BITS)
@COMPARISON.form("setp.cmp.type", 3, cmp=INTEGER_CONDITIONS, type=_SIGNED)
@COMPARISON.form("setp.cmp.bool.type", 4, cmp=INTEGER_CONDITIONS, bool=COMBINE, type=_SIGNED)
@COMPARISON.form("setp.cmp.type", 3, cmp=UNSIGNED_CONDITIONS, type=_UNSIGNED)
@COMPARISON.form("setp.cmp.bool.type", 4, cmp=UNSIGNED_CONDITIONS, bool=COMBINE, type=_UNSIGNED)
@COMPARISON.form("setp.cmp{.ftz}.type", 3, cmp=tuple(FLOAT_CONDITIONS), type=("f32",))
@COMPARISON.form("setp.cmp.bool{.ftz}.type", 4, cmp=tuple(FLOAT_CONDITIONS), bool=COMBINE, type=("f32",))
@COMPARISON.form("setp.cmp.type", 3, cmp=tuple(FLOAT_CONDITIONS), type=("f64",))
@COMPARISON.form("setp.cmp.bool.type", 4, cmp=tuple(FLOAT_CONDITIONS), bool=COMBINE, type=("f64",))
def set_predicate(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`setp`: p|q = (a cmp b) op c, (not (a cmp b)) op c (section 9.7.6.2)."""
    scalar = m.scalar()
    left, right = (t.read(i.operands[n], scalar) for n in (1, 2))
    if "ftz" in m:
        left, right = flush(t, left), flush(t, right)
    result = t.ir.compare(condition_of(m["cmp"], scalar), left, right)
    # The complement for the second destination is computed before the combination with c.
    other = t.ir.invert(result)
    if "bool" in m:
        with_this = t.read(i.operands[3], PREDICATE)
        result, other = (t.ir.binary(m["bool"], value, with_this) for value in (result, other))
    write_pair(t, i.operands[0], result, other)


@COMPARISON.form("selp.type", 4, type=(*BITS, *INTEGERS, *FLOATS))
def select(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Select one of two values by a predicate (section 9.7.6.3)."""
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


SET = InstructionFamily("Set, half precision comparison", "9.7.6.1, 9.7.7")

_FLOAT = tuple(FLOAT_CONDITIONS)
_WORDS = ("u32", "s32")
_SHORT = ("u16", "s16", *_WORDS)

# The value that represents true, by the type of the result.
_TRUE = {
    **{kind: (1 << int(kind[1:])) - 1 for kind in _SHORT},
    "f16": 0x3C00,
    "bf16": 0x3F80,
    "f16x2": 0x3C00,
    "bf16x2": 0x3F80,
    "f32": 0x3F800000,
}


@SET.form("setp.cmp{.ftz}.source", 3, cmp=_FLOAT, source=("f16", "f16x2"))
@SET.form("setp.cmp.bool{.ftz}.source", 4, cmp=_FLOAT, bool=COMBINE, source=("f16", "f16x2"))
@SET.form("setp.cmp.source", 3, cmp=_FLOAT, source=("bf16", "bf16x2"))
@SET.form("setp.cmp.bool.source", 4, cmp=_FLOAT, bool=COMBINE, source=("bf16", "bf16x2"))
def set_predicate_of_halves(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`setp` of 16-bit floats.

    For single numbers, p|q get the result and its complement. For pairs they get the results of the lower and the upper
    numbers.
    """
    results = _compare(t, i, m)
    if len(results) == 1:
        results.append(t.ir.invert(results[0]))
    elif not isinstance(i.operands[0], Pair):
        raise t.problem("comparing pairs has two results")
    write_pair(t, i.operands[0], *(_combine(t, i, m, result) for result in results))


@SET.form("set.cmp.into.source", 3, cmp=("eq", "ne"), into=(*_WORDS, "f32"), source=BITS)
@SET.form("set.cmp.bool.into.source", 4, cmp=("eq", "ne"), bool=COMBINE, into=(*_WORDS, "f32"), source=BITS)
@SET.form("set.cmp.into.source", 3, cmp=INTEGER_CONDITIONS, into=(*_WORDS, "f32"), source=SIGNED)
@SET.form("set.cmp.bool.into.source", 4, cmp=INTEGER_CONDITIONS, bool=COMBINE, into=(*_WORDS, "f32"), source=SIGNED)
@SET.form("set.cmp.into.source", 3, cmp=UNSIGNED_CONDITIONS, into=(*_WORDS, "f32"), source=UNSIGNED)
@SET.form("set.cmp.bool.into.source", 4, cmp=UNSIGNED_CONDITIONS, bool=COMBINE, into=(*_WORDS, "f32"), source=UNSIGNED)
@SET.form("set.cmp{.ftz}.into.source", 3, cmp=_FLOAT, into=(*_WORDS, "f32"), source=("f32",))
@SET.form("set.cmp.bool{.ftz}.into.source", 4, cmp=_FLOAT, bool=COMBINE, into=(*_WORDS, "f32"), source=("f32",))
@SET.form("set.cmp.into.source", 3, cmp=_FLOAT, into=(*_WORDS, "f32"), source=("f64",))
@SET.form("set.cmp.bool.into.source", 4, cmp=_FLOAT, bool=COMBINE, into=(*_WORDS, "f32"), source=("f64",))
@SET.form("set.cmp{.ftz}.into.source", 3, cmp=_FLOAT, into=(*_SHORT, "f16"), source=("f16",))
@SET.form("set.cmp.bool{.ftz}.into.source", 4, cmp=_FLOAT, bool=COMBINE, into=(*_SHORT, "f16"), source=("f16",))
@SET.form("set.cmp.into.source", 3, cmp=_FLOAT, into=(*_SHORT, "bf16"), source=("bf16",))
@SET.form("set.cmp.bool.into.source", 4, cmp=_FLOAT, bool=COMBINE, into=(*_SHORT, "bf16"), source=("bf16",))
@SET.form("set.cmp{.ftz}.into.source", 3, cmp=_FLOAT, into=(*_WORDS, "f16x2"), source=("f16x2",))
@SET.form("set.cmp.bool{.ftz}.into.source", 4, cmp=_FLOAT, bool=COMBINE, into=(*_WORDS, "f16x2"), source=("f16x2",))
@SET.form("set.cmp.into.source", 3, cmp=_FLOAT, into=(*_WORDS, "bf16x2"), source=("bf16x2",))
@SET.form("set.cmp.bool.into.source", 4, cmp=_FLOAT, bool=COMBINE, into=(*_WORDS, "bf16x2"), source=("bf16x2",))
def set_number(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`set`: write all ones or 1.0 for true, 0 for false. For pairs, each half of the destination gets a result."""
    results = _compare(t, i, m)
    scalar = m.scalar("into")
    kind = f"i{scalar.bits}"
    # A pair's results have half the width each.
    width = scalar.bits // len(results)
    true = constant(kind, _TRUE[m["into"]] & ((1 << width) - 1))
    bits = constant(kind, 0)
    for number, result in enumerate(results):
        part = t.ir.select(_combine(t, i, m, result), true, constant(kind, 0))
        bits = t.ir.binary("or", bits, t.ir.binary("shl", part, number * width))
    t.write(i.operands[0], scalar, bits)


def _compare(t: OperandTranslator, i: Instruction, m: Modifiers) -> list[Value]:
    """Compare two operands. Returns one result or, for pairs, two results, first for the lower halves."""
    source, scalar, ir = m["source"], m.scalar("source"), t.ir
    operands = [t.read(i.operands[n], scalar) for n in (1, 2)]
    layout = FORMATS.get(source.removesuffix("x2"))
    if layout is None or source == "f32":
        # LLVM can compare these types. The others are converted to doubles, which is exact.
        if "ftz" in m:
            operands = [flush(t, value) for value in operands]
        return [ir.compare(condition_of(m["cmp"], scalar), *operands)]
    results = []
    for shift in range(0, scalar.bits, 16):
        parts = [ir.resize(ir.binary("lshr", bits, shift), "i16", signed=False) for bits in operands]
        numbers = [decode(t, bits, layout) for bits in parts]
        if "ftz" in m:
            numbers = [flush_narrow(t, number, layout) for number in numbers]
        results.append(ir.compare(FLOAT_CONDITIONS[m["cmp"]], *numbers))
    return results


def _combine(t: OperandTranslator, i: Instruction, m: Modifiers, result: Value) -> Value:
    if "bool" not in m:
        return result
    return t.ir.binary(m["bool"], result, t.read(i.operands[3], PREDICATE))
