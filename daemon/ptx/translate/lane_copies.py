"""Asynchronous copies by many lanes at once (async_copies.py).

There is one function for each size. It copies for one lane after another. Neighbouring lanes usually copy from the same
granule, which is checked only once.
"""

from gpulease.daemon.ptx.native.structures import Access
from gpulease.daemon.ptx.parse.syntax import Instruction, Operand, Space
from gpulease.daemon.ptx.translate.access import (
    GRANULE_BYTES,
    RECORD_FAULT,
    SPACE_NUMBERS,
    address_in,
    global_is_valid,
    reach_global,
    window_base,
    window_limit,
)
from gpulease.daemon.ptx.translate.async_copies import bytes_taken, copied_bytes
from gpulease.daemon.ptx.translate.forms import Modifiers
from gpulease.daemon.ptx.translate.ir import LIKELY, NO_LANE, IrWriter, Value, constant
from gpulease.daemon.ptx.translate.lane_registers import LaneRegisters
from gpulease.daemon.ptx.translate.loads_stores import check_policy
from gpulease.daemon.ptx.translate.operand_values import ENVIRONMENT

# No number of bytes is equal to this. It means that no whole granule is known to be allocated.
_NO_SIZE = -1


def translate_copy(t: LaneRegisters, i: Instruction, m: Modifiers) -> bool:
    """Translate a `cp.async`. Returns False for any other instruction."""
    if i.opcode != "cp" or "into" not in m:
        return False
    size = copied_bytes(t, i, m)
    count = len(i.operands) - ("policy" in m)
    check_policy(t, i, m, 3 if count == 3 else 4)
    source_bytes = constant("i32", size) if count == 3 else bytes_taken(t, i.operands[3], size)
    # The function reads the addresses and sizes of the lanes from memory.
    into, source = (_laid_out(t, name, _address(t, i.operands[n], space)) for n, name, space in _ENDS)
    counts = _laid_out(t, "taken", source_bytes)
    name = _require_function(t, size)
    line = constant("i32", i.line)
    arguments = [
        ENVIRONMENT,
        window_base(t, Space.SHARED),
        window_limit(t, Space.SHARED),
        into,
        source,
        counts,
        t.mask,
        line,
    ]
    t.call_each(name, arguments)
    return True


_ENDS = ((0, "addresses", Space.SHARED), (1, "sources", Space.GLOBAL))


def _address(t: LaneRegisters, operand: Operand, space: Space) -> Value:
    address, is_known = address_in(t, operand, space)
    if is_known is not space:
        raise t.problem(f"an address in .{is_known.value} where one in .{space.value} is needed")
    return address


def _laid_out(t: LaneRegisters, name: str, value: Value) -> Value:
    """Store the values of the lanes to memory, one after another. Returns a pointer to them."""
    room = t.room(name, t.ir.wide_type(value.type))
    t.ir.raw(f"store {t.ir.whole(value)}, {room}")
    return room


def _require_function(t: LaneRegisters, size: int) -> str:
    mask_type = t.mask.type
    name, declarations = f"copy_{size}_{t.ir.lanes}", set[str]()
    body = IrWriter(declarations)
    _copy_each(body, size, mask_type)
    signature = (
        f"define internal i32 @{name}(ptr %environment, ptr %base, i64 %limit, ptr %into, ptr %from, ptr %taken,"
        f" {mask_type} %mask, i32 %line) noinline {{"
    )
    for definition in (*declarations, "\n".join([signature, "entry:", *body.lines, "}", ""])):
        t.ir.require(definition)
    return name


def _copy_each(ir: IrWriter, size: int, mask_type: str) -> None:
    """Write the body of a function that copies for one lane after another.

    The function returns the first lane with an access that is not allowed, or NO_LANE.
    """
    kind, shift = f"i{8 * size}", size.bit_length() - 1
    # The loop's state is the remaining lanes, the granule that was checked last, and `size` if that whole granule is
    # allocated, otherwise _NO_SIZE.
    slots = ir.binary("lshr", Value("i64", "%limit"), shift)
    ir.block("head")
    ir.lines.append(f"  %left = phi {mask_type} [ %mask, %entry ], [ %rest, %next ]")
    ir.lines.append("  %granule = phi i64 [ 0, %entry ], [ %granule.next, %next ]")
    ir.lines.append(f"  %whole = phi i32 [ {_NO_SIZE}, %entry ], [ %whole.next, %next ]")
    left, granule, whole = Value(mask_type, "%left"), Value("i64", "%granule"), Value("i32", "%whole")
    # Load the operands of the next lane.
    lane = ir.intrinsic(f"llvm.cttz.{mask_type}", mask_type, left, constant("i1", 0))
    index = ir.resize(lane, "i64", signed=False)
    place = ir.load("i64", ir.offset(Value("ptr", "%into"), ir.binary("shl", index, 3)))
    address = ir.load("i64", ir.offset(Value("ptr", "%from"), ir.binary("shl", index, 3)))
    source_bytes = ir.load("i32", ir.offset(Value("ptr", "%taken"), ir.binary("shl", index, 2)))
    wide_bytes = ir.cast("zext", source_bytes, "i64")
    pointer = ir.offset(Value("ptr", "%base"), place)
    # Check alignment and bounds with one comparison. If a place is not aligned, the rotation moves its low bits to the
    # top, so that it is out of bounds.
    slot = ir.intrinsic("llvm.fshr.i64", "i64", place, place, constant("i64", shift))
    ir.branch_if(ir.compare("icmp ult", slot, slots), "inside", "outside", extra=LIKELY)
    ir.block("inside")
    # With one comparison, check that the granule is the one that was checked last, that the address is aligned, and
    # that all bytes are copied.
    differs = ir.binary("and", ir.binary("xor", address, granule), ~(GRANULE_BYTES - size))
    differs = ir.binary("or", differs, ir.cast("zext", ir.binary("xor", source_bytes, whole), "i64"))
    ir.branch_if(ir.compare("icmp eq", differs, 0), "known", "unknown")
    # If so, copy without another check.
    ir.block("known")
    known = ir.load(kind, ir.cast("inttoptr", address, "ptr"), extra=f", align {size}")
    ir.emit(f"store {known}, {pointer}, align {size}")
    ir.branch("next")
    # Otherwise, if there are bytes to copy, check this address and whether its whole granule is allocated.
    ir.block("unknown")
    ir.branch_if(ir.compare("icmp eq", source_bytes, 0), "none", "some")
    ir.block("none")
    ir.emit(f"store {kind} 0, {pointer}, align {size}")
    ir.branch("next")
    ir.block("some")
    valid = global_is_valid(ir, address, size, wide_bytes)
    own_granule = ir.binary("and", address, -GRANULE_BYTES)
    is_whole = global_is_valid(ir, own_granule, GRANULE_BYTES)
    checked_size = ir.select(is_whole, constant("i32", size), constant("i32", _NO_SIZE))
    source = reach_global(ir, address, valid, (size, Access.LOAD), "missing")
    # Bytes that are not copied become zeros.
    unwanted = ir.binary("sub", constant("i64", 8 * size), ir.binary("shl", wide_bytes, 3))
    mask = ir.binary("lshr", Value(kind, "-1"), ir.resize(unwanted, kind, signed=False))
    value = ir.load(kind, source, extra=f", align {size}")
    ir.emit(f"store {ir.binary('and', value, mask)}, {pointer}, align {size}")
    ir.block("copied")
    ir.branch("next")
    # There are two faults: the destination is outside of shared memory, or the source may not be read.
    _fail(ir, "outside", lane, place, (size, Access.STORE, SPACE_NUMBERS[Space.SHARED]))
    _fail(ir, "missing", lane, address, (size, Access.LOAD, SPACE_NUMBERS[Space.GLOBAL]))
    # Go to the next lane. What is known about the granule depends on the path to this point.
    ir.block("next")
    for current, fresh in ((granule, own_granule), (whole, checked_size)):
        ways = f"[ {current.text}, %known ], [ {current.text}, %none ], [ {fresh.text}, %copied ]"
        ir.lines.append(f"  {current.text}.next = phi {current.type} {ways}")
    ir.emit(f"%less = sub {left}, 1")
    ir.emit(f"%rest = and {left}, %less")
    ir.branch_if(ir.compare("icmp ne", Value(mask_type, "%rest"), 0), "head", "done")
    ir.block("done")
    ir.ret(NO_LANE)


def _fail(ir: IrWriter, label: str, lane: Value, address: Value, failure: tuple[int, Access, int]) -> None:
    """Write the block for a copy that is not allowed. It records the fault, and returns the lane."""
    ir.block(label)
    details = ", ".join(f"i32 {number}" for number in failure)
    ir.emit(f"call void @{RECORD_FAULT}({ENVIRONMENT}, {address}, {details}, i32 %line)")
    ir.ret_value(ir.resize(lane, "i32", signed=False))
