"""Atomic operations (PTX ISA section 9.7.13, "atom" and "red").

Shared memory belongs to one block, and one host thread runs all threads of the block. So a load, the operation and a
store are enough there. Other host threads may access global memory, so the host's atomic instructions are used for it.
Both ways order all accesses, so nothing more is needed for orderings and scopes.

Sums of 16-bit floats (PTX ISA section 9.7.4, "add") are computed in f32 and rounded again. The result is the correctly
rounded sum, because f32 has more than twice the precision.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpulease.daemon.ptx.native.structures import Access
from gpulease.daemon.ptx.parse.syntax import (
    SCALARS,
    Address,
    DeclaredVariable,
    Instruction,
    Operand,
    Scalar,
    Space,
    Vector,
)
from gpulease.daemon.ptx.translate.access import checked_pointer, window_base, window_limit
from gpulease.daemon.ptx.translate.floating import finish, flush
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import FALSE, TRUE, IrWriter, Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

# The NaN that CUDA uses in both 16-bit formats.
_NAN = 0x7FFF


def by_halves(ir: IrWriter, add: Callable[[IrWriter, Value, Value], Value], left: Value, right: Value) -> Value:
    """Apply `add` to an i16, or separately to the two halves of an i32."""
    if left.type == "i16":
        return add(ir, left, right)
    low = add(ir, ir.cast("trunc", left, "i16"), ir.cast("trunc", right, "i16"))
    high = add(ir, *(ir.cast("trunc", ir.binary("lshr", value, 16), "i16") for value in (left, right)))
    return ir.binary("or", ir.binary("shl", ir.cast("zext", high, "i32"), 16), ir.cast("zext", low, "i32"))


def add_f16(ir: IrWriter, left: Value, right: Value) -> Value:
    """Add two .f16, rounded to nearest even. Subnormals are not flushed."""
    wide = [ir.cast("fpext", ir.cast("bitcast", value, "half"), "float") for value in (left, right)]
    total = ir.binary("fadd", *wide)
    rounded = ir.cast("bitcast", ir.cast("fptrunc", total, "half"), "i16")
    return ir.select(ir.compare("fcmp uno", total, total), constant("i16", _NAN), rounded)


def add_bf16(ir: IrWriter, left: Value, right: Value) -> Value:
    """Add two .bf16, rounded to nearest even. Subnormals are not flushed."""
    # A .bf16 is the upper half of an f32.
    shifted = [ir.binary("shl", ir.cast("zext", value, "i32"), 16) for value in (left, right)]
    wide = [ir.cast("bitcast", value, "float") for value in shifted]
    total = ir.binary("fadd", *wide)
    bits = ir.cast("bitcast", total, "i32")
    # To round half to even, add just under half a unit, plus the lowest bit that is kept.
    odd = ir.binary("and", ir.binary("lshr", bits, 16), 1)
    rounded = ir.binary("lshr", ir.binary("add", bits, ir.binary("add", odd, 0x7FFF)), 16)
    return ir.select(ir.compare("fcmp uno", total, total), constant("i16", _NAN), ir.cast("trunc", rounded, "i16"))


_ORDERS = ("relaxed", "acquire", "release", "acq_rel")
_RED_ORDERS = ("relaxed", "release")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_SPACES = ("global", "shared", "shared::cta", "shared::cluster")

FAMILY = InstructionFamily("Atomic operations", "9.7.13", order=_ORDERS, scope=_SCOPES, space=_SPACES)

_TYPES = {
    "add": ("u32", "s32", "u64", "f32", "f64"),
    "min": ("u32", "s32", "u64", "s64"),
    "max": ("u32", "s32", "u64", "s64"),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "inc": ("u32",),
    "dec": ("u32",),
}
_HALF_TYPES = ("f16", "bf16", "f16x2", "bf16x2")

# Types of the registers that contain operands of these types.
_HELD = {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}

# Computes the new value from the old one. Both are integers of the operand's width.
Update = Callable[[Value], Value]


def _forms(function: Callable[["ThreadTranslator", Instruction, Modifiers], None]) -> None:
    """Register all spellings of the operations with one operand."""
    for operation, types in _TYPES.items():
        _register(function, f".{operation}.type", type=types)
    _register(function, ".add.noftz.type", type=_HALF_TYPES)


def _register(
    function: Callable[["ThreadTranslator", Instruction, Modifiers], None], suffix: str, **choices: tuple[str, ...]
) -> None:
    for opcode, arity, orders in (("atom", 3, _ORDERS), ("red", 2, _RED_ORDERS)):
        # Cooperative groups write order, scope and space after the operation, Triton before it. ptxas accepts both.
        template = f"{opcode}{{.order}}{{.scope}}{{.space}}{suffix}"
        FAMILY.form(template, arity, writes=opcode == "atom", order=orders, **choices)(function)


def combine(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Combine the old value with an operand, and store the result. `atom` also returns the old value."""
    place, source = i.operands[-2:]
    into = i.operands[0] if i.opcode == "atom" else None
    kind = m["type"]
    scalar = SCALARS[_HELD.get(kind, kind)]
    operation = next(name for name in _TYPES if name in i.modifiers)
    operand = t.to_bits(t.read(source, scalar), scalar)
    pointer = checked_pointer(t, place, _space(m), scalar.size, Access.ATOMIC)
    update = _update(t, operation, kind, m, operand, _flushes(t, place, m, pointer))
    before = _apply(t, _space_of(t, place, m), pointer, operand, _NATIVE.get((operation, kind), ""), update)
    if into is not None:
        t.write(into, scalar, t.from_bits(before, scalar))


_forms(combine)


def combine_vector(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Combine each element of a vector separately. The whole vector must be aligned."""
    place, source = i.operands[-2:]
    into = i.operands[0] if i.opcode == "atom" else None
    kind, count = m["type"], int(m["vec"][1:])
    scalar = SCALARS[_HELD.get(kind, kind)]
    sources, results = _elements(t, source, count), None if into is None else _elements(t, into, count)
    operands = [t.to_bits(t.read(element, scalar), scalar) for element in sources]
    # Check the whole vector once. Then make a separate atomic operation for each element, which the ISA allows.
    pointer = checked_pointer(t, place, Space.GLOBAL, scalar.size * count, Access.ATOMIC)
    for number, operand in enumerate(operands):
        update = _update(t, "add", kind, m, operand, TRUE)
        before = _apply(t, Space.GLOBAL, t.ir.offset(pointer, scalar.size * number), operand, "", update)
        if results is not None:
            t.write(results[number], scalar, t.from_bits(before, scalar))


for _rest, _vectors, _kinds in (
    (".add.vec.type", ("v2", "v4"), ("f32",)),
    (".add.noftz.vec.type", ("v2", "v4", "v8"), ("f16", "bf16")),
    (".add.noftz.vec.type", ("v2", "v4"), ("f16x2", "bf16x2")),
):
    _register(combine_vector, _rest, space=("global",), vec=_vectors, type=_kinds)


@FAMILY.form("atom{.order}{.scope}{.space}.exch.type", 3, type=("b32", "b64"))
def swap(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Store an operand, and return the old value."""
    scalar = m.scalar()
    operand = t.read(i.operands[2], scalar)
    pointer = checked_pointer(t, i.operands[1], _space(m), scalar.size, Access.ATOMIC)
    t.write(
        i.operands[0], scalar, _apply(t, _space_of(t, i.operands[1], m), pointer, operand, "xchg", lambda _: operand)
    )


@FAMILY.form("atom{.order}{.scope}{.space}.cas.type", 4, type=("b16", "b32", "b64"))
def compare_and_swap(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Store the second operand if the old value equals the first, and return the old value."""
    scalar, ir = m.scalar(), t.ir
    expected, operand = (t.read(i.operands[n], scalar) for n in (2, 3))
    pointer = checked_pointer(t, i.operands[1], _space(m), scalar.size, Access.ATOMIC)
    if _space_of(t, i.operands[1], m) is Space.SHARED:
        before = ir.load(f"i{scalar.bits}", pointer)
        ir.store(ir.select(ir.compare("icmp eq", before, expected), operand, before), pointer)
    else:
        before, _ = _exchange(t, pointer, expected, operand)
    t.write(i.operands[0], scalar, before)


def _update(t: OperandTranslator, operation: str, kind: str, m: Modifiers, operand: Value, flushes: Value) -> Update:
    """Return the function that computes the new value from the old one."""
    ir = t.ir
    match operation, kind:
        # `inc` and `dec` wrap at the operand (section 9.7.13, "atom").
        case "inc", _:
            return lambda old: ir.select(
                ir.compare("icmp uge", old, operand), constant("i32", 0), ir.binary("add", old, 1)
            )
        case "dec", _:
            return lambda old: ir.select(
                ir.binary("or", ir.compare("icmp eq", old, 0), ir.compare("icmp ugt", old, operand)),
                operand,
                ir.binary("sub", old, 1),
            )
        case _, "f32" | "f64":
            return lambda old: _add_float(t, SCALARS[kind], m, old, operand, flushes)
        case _, "f16" | "f16x2":
            return lambda old: by_halves(ir, add_f16, old, operand)
        case _, "bf16" | "bf16x2":
            return lambda old: by_halves(ir, add_bf16, old, operand)
        case "min" | "max", _:
            name = f"llvm.{'s' if kind[0] == 's' else 'u'}{operation}.{operand.type}"
            return lambda old: ir.intrinsic(name, operand.type, old, operand)
    return lambda old: ir.binary(operation, old, operand)


def _add_float(t: OperandTranslator, scalar: Scalar, m: Modifiers, old: Value, operand: Value, flushes: Value) -> Value:
    """Add floats, rounded to nearest even. For f32, subnormals are flushed in global memory, but not in shared."""
    ir = t.ir
    left, right = t.from_bits(old, scalar), t.from_bits(operand, scalar)
    exact = t.to_bits(finish(t, scalar, m, ir.binary("fadd", left, right)), scalar)
    if scalar.bits == 64 or flushes == FALSE:
        return exact
    # Whether the address is in shared memory may be known only at run time, so compute both sums.
    total = flush(t, ir.binary("fadd", flush(t, left), flush(t, right)))
    flushed = t.to_bits(finish(t, scalar, m, total), scalar)
    return ir.select(flushes, flushed, exact)


def _flushes(t: "ThreadTranslator", place: Operand, m: Modifiers, pointer: Value) -> Value:
    """Compute whether an f32 sum at an address flushes subnormals, which is so outside of shared memory."""
    space = _space_of(t, place, m)
    if space is not Space.GENERIC:
        return FALSE if space is Space.SHARED else TRUE
    base = t.ir.cast("ptrtoint", window_base(t, Space.SHARED), "i64")
    offset = t.ir.binary("sub", t.ir.cast("ptrtoint", pointer, "i64"), base)
    return t.ir.compare("icmp uge", offset, window_limit(t, Space.SHARED))


# LLVM's names of the operations that the host has. All others need a loop of compare-and-exchange.
_NATIVE = {
    (operation, kind): {"min": "umin", "max": "umax"}.get(operation, operation) if kind[0] != "s" else operation
    for operation in ("add", "min", "max", "and", "or", "xor")
    for kind in _TYPES[operation]
    if kind not in ("f32", "f64")
}


def _apply(t: OperandTranslator, space: Space, pointer: Value, operand: Value, native: str, update: Update) -> Value:
    """Change the value at an address atomically, and return the old value."""
    ir, kind = t.ir, operand.type
    # Case 1: shared memory, which no other host thread accesses.
    if space is Space.SHARED:
        before = ir.load(kind, pointer)
        ir.store(update(before), pointer)
        return before
    # Case 2: the host has an instruction for the operation.
    if native:
        return ir.value(kind, f"atomicrmw {native} {pointer}, {operand} seq_cst")
    # Case 3: compute the new value and compare-and-exchange, until no other thread has changed the value in between.
    start, again, done, seen = (ir.fresh(stem) for stem in ("start", "try", "tried", "seen"))
    ir.block(start)
    first = ir.value(kind, f"load atomic {kind}, {pointer} seq_cst, align {int(kind[1:]) // 8}")
    ir.block(again)
    # Name the value of a failed attempt in advance, because the phi that uses this value comes first.
    expected = ir.value(kind, f"phi {kind} [ {first.text}, %{start} ], [ %{seen}, %{again} ]")
    before, swapped = _exchange(t, pointer, expected, update(expected))
    ir.emit(f"%{seen} = freeze {before}")
    ir.branch_if(swapped, done, again)
    ir.block(done)
    return before


def _exchange(t: OperandTranslator, pointer: Value, expected: Value, new: Value) -> tuple[Value, Value]:
    ir = t.ir
    result = ir.value(f"{{ {new.type}, i1 }}", f"cmpxchg {pointer}, {expected}, {new} seq_cst seq_cst")
    return ir.value(new.type, f"extractvalue {result}, 0"), ir.value("i1", f"extractvalue {result}, 1")


def _space(m: Modifiers) -> Space:
    return Space(m.get("space").split("::")[0] or "generic")


def _space_of(t: OperandTranslator, place: Operand, m: Modifiers) -> Space:
    """Return the space of an access: that of the variable in its address, otherwise the instruction's."""
    if not isinstance(place, Address) or not isinstance(place.base, DeclaredVariable):
        return _space(m)
    if place.base.space not in (Space.GLOBAL, Space.SHARED):
        raise t.problem(f"atomic operations must be on .global or .shared memory, not on .{place.base.space.value}")
    return place.base.space


def _elements(t: OperandTranslator, operand: Operand, count: int) -> tuple[Operand, ...]:
    if not isinstance(operand, Vector) or len(operand.elements) != count:
        raise t.problem(f"expected a vector of {count} registers")
    return operand.elements
