"""Moves, packing, conversion of addresses, and the space and block of an address (PTX ISA section 9.7.9).

A cluster always has one block here, so the address in another block of the cluster is the address itself.
"""

from gpulease.daemon.ptx.parse.syntax import PREDICATE, SCALARS, Instruction, Scalar, Space, Symbol, Vector
from gpulease.daemon.ptx.translate.access import window_base, window_limit
from gpulease.daemon.ptx.translate.forms import BITS, FLOATS, INTEGERS, InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator, bits_type

MOVEMENT = InstructionFamily("Moves and address conversion", "9.7.9")

_SPACES = ("global", "const", "shared", "shared::cta", "shared::cluster", "local")
_WINDOWS = (Space.SHARED, Space.LOCAL)
_POINTER = SCALARS["u64"]
_WORD = SCALARS["b32"]


@MOVEMENT.form("mov.type", 2, type=("pred", *BITS, *INTEGERS, *FLOATS))
def move(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Move a register, constant, special register or address; or pack or unpack a vector."""
    scalar = m.scalar()
    into, source = i.operands
    if isinstance(into, Vector):
        _unpack(t, scalar, into, i)
    elif isinstance(source, Vector):
        _pack(t, scalar, source, i)
    else:
        t.write(into, scalar, t.read(source, scalar))


@MOVEMENT.form("prmt.b32", 4)
def permute(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Select any four of the eight bytes of b:a, and replace a byte with its sign where required (section 9.7.9.7)."""
    low, high, choices = (t.read(i.operands[n], _WORD) for n in (1, 2, 3))
    low, high = t.ir.cast("zext", low, "i64"), t.ir.cast("zext", high, "i64")
    # Join the operands into a 64-bit number. Each nibble of the selector selects one byte of it.
    joined = t.ir.binary("or", t.ir.binary("shl", high, 32), low)
    result = constant("i32", 0)
    for number in range(4):
        choice = t.ir.binary("lshr", choices, 4 * number)
        shift = t.ir.binary("shl", t.ir.binary("and", choice, 7), 3)
        shifted = t.ir.binary("lshr", joined, t.ir.cast("zext", shift, "i64"))
        byte = t.ir.cast("trunc", shifted, "i8")
        # If the nibble's top bit is set, replace the byte with copies of the byte's top bit.
        is_sign = t.ir.compare("icmp ne", t.ir.binary("and", choice, 8), 0)
        byte = t.ir.select(is_sign, t.ir.binary("ashr", byte, 7), byte)
        placed = t.ir.binary("shl", t.ir.cast("zext", byte, "i32"), 8 * number)
        result = t.ir.binary("or", result, placed)
    t.write(i.operands[0], _WORD, result)


@MOVEMENT.form("cvta.space.u64", 2, space=_SPACES)
def to_generic(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Convert an address in a space to a generic address."""
    space = Space(m["space"].split("::")[0])
    source = i.operands[1]
    if isinstance(source, Symbol) and source.variable.space is not space:
        raise t.problem(f"{source.variable.name[:60]} does not lie in .{space.value}")
    # Global and constant addresses are generic addresses. For an offset in a window, add the window's host address.
    address = t.read(source, _POINTER)
    if space in _WINDOWS:
        base = t.ir.cast("ptrtoint", window_base(t, space), "i64")
        address = t.ir.binary("add", address, base)
    t.write(i.operands[0], _POINTER, address)


@MOVEMENT.form("cvta.to.space.u64", 2, space=_SPACES)
def from_generic(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Convert a generic address to an address in a space. If it is not in that space, the result is meaningless."""
    space = Space(m["space"].split("::")[0])
    address = t.read(i.operands[1], _POINTER)
    if space in _WINDOWS:
        base = t.ir.cast("ptrtoint", window_base(t, space), "i64")
        address = t.ir.binary("sub", address, base)
    t.write(i.operands[0], _POINTER, address)


def _unpack(t: OperandTranslator, scalar: Scalar, into: Vector, i: Instruction) -> None:
    part = _part(t, scalar, into)
    # The first element has the lowest bits.
    packed = t.to_bits(t.read(i.operands[1], scalar), scalar)
    for number, element in enumerate(into.elements):
        shifted = t.ir.binary("lshr", packed, number * part.bits)
        t.write(element, part, t.ir.resize(shifted, f"i{part.bits}", signed=False))


def _pack(t: OperandTranslator, scalar: Scalar, source: Vector, i: Instruction) -> None:
    part = _part(t, scalar, source)
    packed = constant(f"i{scalar.bits}", 0)
    for number, element in enumerate(source.elements):
        wide = t.ir.resize(t.read(element, part), packed.type, signed=False)
        packed = t.ir.binary("or", packed, t.ir.binary("shl", wide, number * part.bits))
    t.write(i.operands[0], scalar, t.from_bits(packed, scalar))


def _part(t: OperandTranslator, scalar: Scalar, vector: Vector) -> Scalar:
    """Return the type of one element. Raises ImageRejected unless the vector has two or four elements that fit."""
    count = len(vector.elements)
    if count not in (2, 4) or scalar.bits // count not in (8, 16, 32):
        raise t.problem(f".{scalar.name} does not divide into {count} parts")
    return bits_type(scalar.bits // count)


PLACEMENT = InstructionFamily("Places of addresses", "9.7.9")

_RANK = SCALARS["u32"]


@PLACEMENT.form("isspacep.space", 2, space=("global", "shared", "shared::cta", "shared::cluster", "local"))
def lies_in(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute whether a generic address is in a space. An address that is in no window is global."""
    space = Space(m["space"].split("::")[0])
    address = t.read(i.operands[1], _POINTER)
    if space in _WINDOWS:
        t.write(i.operands[0], PREDICATE, _is_in(t, address, space))
        return
    shared, local = (_is_in(t, address, window) for window in _WINDOWS)
    t.write(i.operands[0], PREDICATE, t.ir.invert(t.ir.binary("or", shared, local)))


def _is_in(t: OperandTranslator, address: Value, space: Space) -> Value:
    base = t.ir.cast("ptrtoint", window_base(t, space), "i64")
    # One unsigned comparison is enough, because an address below the window wraps to a huge offset.
    return t.ir.compare("icmp ult", t.ir.binary("sub", address, base), window_limit(t, space))


@PLACEMENT.form("mapa{.space}.type", 3, space=("shared::cluster",), type=("u32", "u64"))
def of_block(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`mapa`: return the corresponding address in a block of the cluster, which is here the address itself."""
    scalar = m.scalar()
    source = i.operands[1]
    if isinstance(source, Symbol) and (source.variable.space is not Space.SHARED or "space" not in m):
        raise t.problem(f"{source.variable.name[:60]} has no such address in .shared::cluster")
    # Read the operand only to refuse a wrong one.
    t.read(i.operands[2], _RANK)
    t.write(i.operands[0], scalar, t.read(source, scalar))


@PLACEMENT.form("getctarank{.space}.type", 2, space=("shared::cluster",), type=("u32", "u64"))
def block_of(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """`getctarank`: return the block of the cluster to which an address belongs, which is always block 0."""
    t.read(i.operands[1], m.scalar())
    t.write(i.operands[0], _RANK, constant("i32", 0))
