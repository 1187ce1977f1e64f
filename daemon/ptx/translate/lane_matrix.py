"""Matrix instructions for all lanes of a warp at once, with the same results as those in matrix.py.

A register is a vector with a word of every lane. For an operand, the registers are put into the function's memory one
after another, where native/warp_matrix.ll reads and writes whole matrices.
"""

from collections.abc import Sequence

from gpulease.daemon.ptx.native.library import LOAD_ROWS, STORE_ROWS, TURN_MATRIX, WARPS_WHOLE
from gpulease.daemon.ptx.native.structures import Access
from gpulease.daemon.ptx.parse.syntax import SCALARS, Instruction, Operand, Scalar, Space
from gpulease.daemon.ptx.translate.access import (
    fail_unless,
    record_fault,
    shared_offset,
    window_base,
)
from gpulease.daemon.ptx.translate.forms import Modifiers
from gpulease.daemon.ptx.translate.ir import LIKELY, Value, constant
from gpulease.daemon.ptx.translate.lane_registers import LaneRegisters
from gpulease.daemon.ptx.translate.matrix import (
    ROW_BYTES,
    call_native,
    product_of,
    registers_of,
    row_is_valid,
)

MATRICES = frozenset(("mma", "ldmatrix", "stmatrix", "movmatrix"))

_WORD = SCALARS["b32"]
_EVERYONE = -1


def translate_matrices(t: LaneRegisters, i: Instruction, m: Modifiers) -> None:
    """Translate a matrix instruction. It is a fault if a lane is missing, because that lane can no longer arrive."""
    group = t.ir.cast("zext", t.mask, "i64")
    is_whole = t.ir.compare("icmp eq", t.mask, _EVERYONE)
    fail_unless(t, is_whole, Access.PART_OF_WARP, Space.GENERIC, group, 0)
    match i.opcode:
        case "mma":
            _multiply(t, i, m)
        case "ldmatrix":
            _load(t, i, m)
        case "stmatrix":
            _store(t, i, m)
        case _:
            _turn(t, i)


def _multiply(t: LaneRegisters, i: Instruction, m: Modifiers) -> None:
    product = product_of(i, m)
    # The operands are D, A, B, C. Put A, B and C into memory, multiply, and load D.
    counts = (product.counts[-1], *product.counts[:-1])
    parts = [registers_of(t, operand, count) for operand, count in zip(i.operands, counts, strict=True)]
    rooms = [_room(t, name, part, product.scalar) for name, part in zip("dabc", parts, strict=True)]
    for room, part in zip(rooms[1:], parts[1:], strict=True):
        _lay_out(t, room, part, product.scalar)
    call_native(t, WARPS_WHOLE + product.function, [*rooms[1:], rooms[0], *product.details])
    _take_up(t, rooms[0], parts[0], product.scalar)


def _load(t: LaneRegisters, i: Instruction, m: Modifiers) -> None:
    into = registers_of(t, i.operands[0], int(m["count"][1:]))
    # Check the addresses of all rows before the function reads any of them.
    offsets, room = _offsets(t, i.operands[1], m, Access.LOAD), _room(t, "a", into, _WORD)
    _move_rows(t, LOAD_ROWS, offsets, room, m)
    _take_up(t, room, into, _WORD)


def _store(t: LaneRegisters, i: Instruction, m: Modifiers) -> None:
    shown = registers_of(t, i.operands[1], int(m["count"][1:]))
    room = _room(t, "a", shown, _WORD)
    _lay_out(t, room, shown, _WORD)
    _move_rows(t, STORE_ROWS, _offsets(t, i.operands[0], m, Access.STORE), room, m)


def _turn(t: LaneRegisters, i: Instruction) -> None:
    into, source = (_room(t, name, (i.operands[0],), _WORD) for name in "da")
    _lay_out(t, source, (i.operands[1],), _WORD)
    call_native(t, TURN_MATRIX, [source, into])
    _take_up(t, into, (i.operands[0],), _WORD)


def _move_rows(t: LaneRegisters, function: str, offsets: Value, room: Value, m: Modifiers) -> None:
    count, turned = constant("i64", int(m["count"][1:])), constant("i1", int("trans" in m))
    call_native(t, function, [window_base(t, Space.SHARED), offsets, room, count, turned])


def _offsets(t: LaneRegisters, operand: Operand, m: Modifiers, access: Access) -> Value:
    """Store the lanes' offsets in shared memory, and check those that are used. Returns a pointer to the offsets."""
    ir = t.ir
    address = shared_offset(t, operand, is_generic="space" not in m)
    offsets = t.room("addresses", ir.wide_type("i64"))
    ir.raw(f"store {ir.whole(address)}, {offsets}")
    valid = ir.mask_of(row_is_valid(t, address, int(m["count"][1:])))
    # A fault reports the first lane with a row that may not be accessed, and the row's address.
    fault, fine = ir.fresh("fault"), ir.fresh("fine")
    ir.branch_if(ir.compare("icmp eq", valid, _EVERYONE), fine, fault, extra=LIKELY)
    ir.block(fault)
    bad = ir.intrinsic("llvm.cttz.i32", "i32", ir.binary("xor", valid, -1), constant("i1", 0))
    place = ir.offset(offsets, ir.binary("shl", ir.cast("zext", bad, "i64"), 3))
    record_fault(t, access, Space.SHARED, ir.load("i64", place), ROW_BYTES)
    t.fail_lane(bad)
    ir.block(fine)
    return offsets


def _room(t: LaneRegisters, name: str, part: Sequence[Operand], scalar: Scalar) -> Value:
    """Reserve memory for the registers of an operand, for all lanes."""
    return t.room(f"matrix.{name}.{len(part)}.{scalar.bits}", f"[{len(part)} x {t.ir.wide_type(f'i{scalar.bits}')}]")


def _lay_out(t: LaneRegisters, room: Value, part: Sequence[Operand], scalar: Scalar) -> None:
    for number, register in enumerate(part):
        value = t.ir.whole(t.read(register, scalar))
        t.ir.raw(f"store {value}, {_place(t, room, number, scalar)}")


def _take_up(t: LaneRegisters, room: Value, part: Sequence[Operand], scalar: Scalar) -> None:
    kind = f"i{scalar.bits}"
    for number, register in enumerate(part):
        load = f"load {t.ir.wide_type(kind)}, {_place(t, room, number, scalar)}"
        t.write(register, scalar, t.ir.wide_value(kind, load))


def _place(t: LaneRegisters, room: Value, number: int, scalar: Scalar) -> Value:
    return t.ir.offset(room, t.ir.lanes * scalar.size * number)
