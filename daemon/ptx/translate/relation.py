"""`set`, and comparisons of .f16 and .bf16 (PTX ISA sections 9.7.6.1 and 9.7.7)."""

from gpulease.daemon.ptx.parse.syntax import PREDICATE, Instruction, Pair
from gpulease.daemon.ptx.translate.comparison import (
    COMBINE,
    FLOAT_CONDITIONS,
    INTEGER_CONDITIONS,
    UNSIGNED_CONDITIONS,
    condition_of,
    write_pair,
)
from gpulease.daemon.ptx.translate.floating import flush
from gpulease.daemon.ptx.translate.formats import FORMATS, decode, flush_narrow
from gpulease.daemon.ptx.translate.forms import BITS, SIGNED, UNSIGNED, Family, Modifiers
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator

FAMILY = Family("Set, half precision comparison", "9.7.6.1, 9.7.7")

_FLOAT = tuple(FLOAT_CONDITIONS)
_WORDS = ("u32", "s32")
_SHORT = ("u16", "s16", *_WORDS)

# What represents true, by the type of the result.
_TRUE = {
    **{kind: (1 << int(kind[1:])) - 1 for kind in _SHORT},
    "f16": 0x3C00,
    "bf16": 0x3F80,
    "f16x2": 0x3C00,
    "bf16x2": 0x3F80,
    "f32": 0x3F800000,
}


@FAMILY.form("setp.cmp{.ftz}.source", 3, cmp=_FLOAT, source=("f16", "f16x2"))
@FAMILY.form("setp.cmp.bool{.ftz}.source", 4, cmp=_FLOAT, bool=COMBINE, source=("f16", "f16x2"))
@FAMILY.form("setp.cmp.source", 3, cmp=_FLOAT, source=("bf16", "bf16x2"))
@FAMILY.form("setp.cmp.bool.source", 4, cmp=_FLOAT, bool=COMBINE, source=("bf16", "bf16x2"))
def set_predicate(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`setp` of 16-bit floats: p|q get the result and its opposite, for a pair its two results, the lower first."""
    results = _compare(t, i, m)
    if len(results) == 1:
        results.append(t.ir.invert(results[0]))
    elif not isinstance(i.operands[0], Pair):
        raise t.problem("comparing pairs has two results")
    write_pair(t, i.operands[0], *(_combine(t, i, m, result) for result in results))


@FAMILY.form("set.cmp.into.source", 3, cmp=("eq", "ne"), into=(*_WORDS, "f32"), source=BITS)
@FAMILY.form("set.cmp.bool.into.source", 4, cmp=("eq", "ne"), bool=COMBINE, into=(*_WORDS, "f32"), source=BITS)
@FAMILY.form("set.cmp.into.source", 3, cmp=INTEGER_CONDITIONS, into=(*_WORDS, "f32"), source=SIGNED)
@FAMILY.form("set.cmp.bool.into.source", 4, cmp=INTEGER_CONDITIONS, bool=COMBINE, into=(*_WORDS, "f32"), source=SIGNED)
@FAMILY.form("set.cmp.into.source", 3, cmp=UNSIGNED_CONDITIONS, into=(*_WORDS, "f32"), source=UNSIGNED)
@FAMILY.form(
    "set.cmp.bool.into.source", 4, cmp=UNSIGNED_CONDITIONS, bool=COMBINE, into=(*_WORDS, "f32"), source=UNSIGNED
)
@FAMILY.form("set.cmp{.ftz}.into.source", 3, cmp=_FLOAT, into=(*_WORDS, "f32"), source=("f32",))
@FAMILY.form("set.cmp.bool{.ftz}.into.source", 4, cmp=_FLOAT, bool=COMBINE, into=(*_WORDS, "f32"), source=("f32",))
@FAMILY.form("set.cmp.into.source", 3, cmp=_FLOAT, into=(*_WORDS, "f32"), source=("f64",))
@FAMILY.form("set.cmp.bool.into.source", 4, cmp=_FLOAT, bool=COMBINE, into=(*_WORDS, "f32"), source=("f64",))
@FAMILY.form("set.cmp{.ftz}.into.source", 3, cmp=_FLOAT, into=(*_SHORT, "f16"), source=("f16",))
@FAMILY.form("set.cmp.bool{.ftz}.into.source", 4, cmp=_FLOAT, bool=COMBINE, into=(*_SHORT, "f16"), source=("f16",))
@FAMILY.form("set.cmp.into.source", 3, cmp=_FLOAT, into=(*_SHORT, "bf16"), source=("bf16",))
@FAMILY.form("set.cmp.bool.into.source", 4, cmp=_FLOAT, bool=COMBINE, into=(*_SHORT, "bf16"), source=("bf16",))
@FAMILY.form("set.cmp{.ftz}.into.source", 3, cmp=_FLOAT, into=(*_WORDS, "f16x2"), source=("f16x2",))
@FAMILY.form("set.cmp.bool{.ftz}.into.source", 4, cmp=_FLOAT, bool=COMBINE, into=(*_WORDS, "f16x2"), source=("f16x2",))
@FAMILY.form("set.cmp.into.source", 3, cmp=_FLOAT, into=(*_WORDS, "bf16x2"), source=("bf16x2",))
@FAMILY.form("set.cmp.bool.into.source", 4, cmp=_FLOAT, bool=COMBINE, into=(*_WORDS, "bf16x2"), source=("bf16x2",))
def set_number(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`set`: all ones or 1.0 for true, 0 for false; for a pair each half is a result."""
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
    """Compare; return the result, or one result for each number of a pair."""
    source, scalar, ir = m["source"], m.scalar("source"), t.ir
    operands = [t.read(i.operands[n], scalar) for n in (1, 2)]
    layout = FORMATS.get(source.removesuffix("x2"))
    if layout is None or source == "f32":
        # Types that LLVM compares itself; the others are compared as doubles, exactly.
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
