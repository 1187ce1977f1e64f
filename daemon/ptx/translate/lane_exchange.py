"""Exchanges of values between the lanes of a warp, for all lanes at once (PTX ISA sections 9.7.9.6 and 9.7.13).

They have the same results as the exchanges in warp.py. uniformity.py ensures that all members of an exchange that have
not ended arrive at the exchange together, unless some of them wait at a barrier. Then the others would wait for them
forever, which is a fault.
"""

from collections.abc import Sequence

from gpulease.daemon.ptx.native.structures import Access, QueuedLaunch
from gpulease.daemon.ptx.parse.syntax import PREDICATE, SCALARS, Instruction, Integer, Operand, Space
from gpulease.daemon.ptx.translate.access import fail_unless
from gpulease.daemon.ptx.translate.forms import Modifiers
from gpulease.daemon.ptx.translate.ir import TRUE, IrWriter, Value, constant
from gpulease.daemon.ptx.translate.lane_access import is_private
from gpulease.daemon.ptx.translate.lane_matrix import MATRICES, translate_matrices
from gpulease.daemon.ptx.translate.lane_registers import LaneRegisters
from gpulease.daemon.ptx.translate.specials import WARP_THREADS
from gpulease.daemon.ptx.translate.uniformity import Kinds
from gpulease.daemon.ptx.translate.vectors import NotAsLanes, VectorWriter, is_wide
from gpulease.daemon.ptx.translate.wait_points import lane
from gpulease.daemon.ptx.translate.warp import has_lane, source_lane, two_results

# The instructions of this module, and the ones among them whose result is equal for all lanes.
EXCHANGES = MATRICES | {"shfl", "vote", "redux", "elect", "activemask"}
_SAME_FOR_ALL = ("vote", "redux", "activemask")

_WORD = SCALARS["b32"]

# For each reduction, the value of lanes that do not take part. It does not change the result.
_NEUTRAL = {"add": 0, "or": 0, "xor": 0, "umax": 0, "and": -1, "umin": -1, "smin": 2**31 - 1, "smax": -(2**31)}

# Computes the indices of 32 consecutive threads from a given one on, for warps that span several rows of a block.
_INDICES_IR = """
define internal void @indices(i32 %x, i32 %y, i32 %z, i32 %width, i32 %height, ptr %into) noinline {
entry:
  br label %next
next:
  %n = phi i64 [ 0, %entry ], [ %n.next, %next ]
  %tx = phi i32 [ %x, %entry ], [ %x.next, %next ]
  %ty = phi i32 [ %y, %entry ], [ %y.next, %next ]
  %tz = phi i32 [ %z, %entry ], [ %z.next, %next ]
  %x.at = getelementptr [3 x [32 x i32]], ptr %into, i64 0, i64 0, i64 %n
  %y.at = getelementptr [3 x [32 x i32]], ptr %into, i64 0, i64 1, i64 %n
  %z.at = getelementptr [3 x [32 x i32]], ptr %into, i64 0, i64 2, i64 %n
  store i32 %tx, ptr %x.at
  store i32 %ty, ptr %y.at
  store i32 %tz, ptr %z.at
  %x.more = add i32 %tx, 1
  %x.ends = icmp eq i32 %x.more, %width
  %x.next = select i1 %x.ends, i32 0, i32 %x.more
  %y.step = zext i1 %x.ends to i32
  %y.more = add i32 %ty, %y.step
  %y.ends = icmp eq i32 %y.more, %height
  %y.next = select i1 %y.ends, i32 0, i32 %y.more
  %z.step = zext i1 %y.ends to i32
  %z.next = add i32 %tz, %z.step
  %n.next = add i64 %n, 1
  %ends = icmp eq i64 %n.next, 32
  br i1 %ends, label %done, label %next
done:
  ret void
}
"""


def kinds_of(body: Sequence[Instruction]) -> Kinds:
    """Classify the instructions of a kernel by how lanes execute them."""
    exchanges = frozenset(n for n, i in enumerate(body) if i.opcode in EXCHANGES or "warp" in i.modifiers)
    common = frozenset(n for n in exchanges if body[n].opcode in _SAME_FOR_ALL)
    private = frozenset(n for n, i in enumerate(body) if is_private(i))
    barriers = frozenset(n for n, i in enumerate(body) if i.opcode in ("bar", "barrier")) - exchanges
    return Kinds(private | (exchanges - common), common, barriers, exchanges)


def open_warp(opening: VectorWriter) -> None:
    """Write code that computes the indices and numbers of a warp's threads from the indices of its first thread."""
    # Step 1: compute the threads' numbers in their block.
    launch = Value("ptr", "%launch")
    first = [Value("i32", f"%tid.{axis}") for axis in "xyz"]
    width, height = (_size(opening, launch, axis) for axis in range(2))
    rows = opening.binary("add", opening.binary("mul", first[2], height), first[1])
    flat = opening.binary("add", opening.binary("mul", rows, width), first[0])
    # A warp begins at a multiple of 32. LLVM recognises this only if it is written in this way.
    start = opening.binary("shl", opening.binary("lshr", flat, 5), 5)
    opening.raw(f"%wide.flat = or {opening.whole(start)}, {opening.each('i32').text}")
    # Step 2: compute whether all lanes are in the same row as the first one. `%given` has a bit for each thread that
    # exists, so its leading zeros are the lanes beyond the block's last thread.
    absent = opening.intrinsic("llvm.ctlz.i32", "i32", Value("i32", "%given"), constant("i1", 0))
    last = opening.binary("sub", opening.binary("add", first[0], 32), absent)
    in_row = opening.compare("icmp ule", last, width)
    opening.require(_INDICES_IR)
    opening.emit("%indices = alloca [3 x [32 x i32]], align 64")
    opening.branch_if(in_row, "row", "rows")
    # In one row, x increases, and y and z are the same for all lanes.
    opening.block("row")
    along = opening.wide_value("i32", f"add {opening.whole(first[0])}, {opening.each('i32').text}")
    near = [along, opening.widen(first[1]), opening.widen(first[2])]
    opening.branch("placed")
    # In several rows, a loop computes all three indices.
    opening.block("rows")
    opening.emit(f"call void @indices({', '.join(map(str, (*first, width, height)))}, ptr %indices)")
    far = []
    for axis in range(3):
        place = opening.offset(Value("ptr", "%indices"), 128 * axis)
        far.append(opening.wide_value("i32", f"load <32 x i32>, {place}"))
    opening.branch("placed")
    opening.block("placed")
    for name, one, other in zip("xyz", near, far, strict=True):
        opening.raw(f"%wide.tid.{name} = phi <32 x i32> [ {one.text}, %row ], [ {other.text}, %rows ]")


def _size(opening: IrWriter, launch: Value, axis: int) -> Value:
    return opening.load("i32", opening.offset(launch, QueuedLaunch.block.offset + 4 * axis))


def translate_exchange(t: LaneRegisters, i: Instruction, m: Modifiers) -> None:
    """Translate an exchange of the lanes that take part. Raises NotAsLanes if the mask varies."""
    match i.opcode:
        case "shfl":
            _shuffle(t, i, m)
        case "vote":
            _vote(t, i, m)
        case "redux":
            _reduce(t, i, m)
        case "elect":
            _elect(t, i)
        case "activemask":
            # The active lanes are those that execute this instruction together.
            t.write(i.operands[0], _WORD, t.mask)
        case opcode if opcode in MATRICES:
            _await(t, constant("i32", -1))
            translate_matrices(t, i, m)
        case _:
            _meet(t, i.operands[0])


def _meet(t: LaneRegisters, operand: Operand) -> Value:
    """Return the members that have not ended. It is a fault if one is missing, or if a lane here is not a member."""
    ir = t.ir
    members = t.read(operand, _WORD)
    # If the lanes have different masks, there are several exchanges at once.
    if is_wide(members):
        raise NotAsLanes
    wide, blamed = ir.cast("zext", members, "i64"), ir.blamed
    outside = ir.binary("and", t.mask, ir.binary("xor", members, -1))
    # A fault reports the first lane that is not in its own mask.
    ir.blamed = ir.intrinsic("llvm.cttz.i32", "i32", outside, constant("i1", 0))
    fail_unless(t, ir.compare("icmp eq", outside, 0), Access.NO_MEMBER, Space.GENERIC, wide, 0)
    ir.blamed = blamed
    return _await(t, members)


def _await(t: LaneRegisters, members: Value) -> Value:
    """Return the lanes that are here. It is a fault if a member that has not ended is missing."""
    ir, wide = t.ir, t.ir.cast("zext", members, "i64")
    missing = ir.binary("and", ir.binary("and", members, t.alive()), ir.binary("xor", t.mask, -1))
    fail_unless(t, ir.compare("icmp eq", missing, 0), Access.EXCHANGE, Space.GENERIC, wide, 0)
    return t.mask


def _shuffle(t: LaneRegisters, i: Instruction, m: Modifiers) -> None:
    ir = t.ir
    distance, bounds = i.operands[2:4]
    # For a butterfly with a constant distance, use a shuffle with constant indices.
    if m["mode"] == "bfly" and isinstance(distance, Integer) and bounds == Integer(WARP_THREADS - 1):
        _cross(t, i, distance.value % WARP_THREADS)
        return
    # Otherwise, each lane reads another lane's word from memory. The gather gives 0 for lanes that do not take part.
    shown = t.read(i.operands[1], _WORD)
    source, inside = source_lane(t, m["mode"], t.read(i.operands[2], _WORD), t.read(i.operands[3], _WORD))
    group = _meet(t, i.operands[4])
    is_there = has_lane(t, group, source)
    room = t.room("shown", ir.wide_type("i32"))
    ir.raw(f"store {ir.whole(shown)}, {room}")
    pointers = ir.wide_value("ptr", f"getelementptr i32, {room}, {ir.whole(source)}")
    flags, kind, many = ir.wide_type("i1"), ir.wide_type("i32"), ir.wide_type("ptr")
    name = f"llvm.masked.gather.v{ir.lanes}i32.v{ir.lanes}p0"
    # The alignment is an operand, as in `_Access._move_together` (lane_access.py).
    ir.require(f"declare {kind} @{name}({many}, i32, {flags}, {kind})")
    arguments = f"{many} {pointers.text}, i32 4, {ir.whole(is_there)}, {kind} zeroinitializer"
    result, predicate = two_results(i.operands[0])
    t.write(result, _WORD, ir.wide_value("i32", f"call {kind} @{name}({arguments})"))
    if predicate is not None:
        t.write(predicate, PREDICATE, inside)


def _cross(t: LaneRegisters, i: Instruction, distance: int) -> None:
    """Exchange values between lanes with numbers that differ by a constant XOR. Lanes that do not take part give 0."""
    ir = t.ir
    shown = t.read(i.operands[1], _WORD)
    at_barrier = ir.flags_of(_meet(t, i.operands[4]))
    order = ", ".join(f"i32 {lane ^ distance}" for lane in range(WARP_THREADS))

    def crossed(value: Value) -> Value:
        kind = ir.wide_type(value.type)
        picked = f"shufflevector {ir.whole(value)}, {kind} poison, <{WARP_THREADS} x i32> <{order}>"
        return ir.wide_value(value.type, picked)

    result, predicate = two_results(i.operands[0])
    t.write(result, _WORD, crossed(ir.select(at_barrier, shown, constant("i32", 0))))
    if predicate is not None:
        t.write(predicate, PREDICATE, TRUE)


def _vote(t: LaneRegisters, i: Instruction, m: Modifiers) -> None:
    ir = t.ir
    flag = t.read(i.operands[1], PREDICATE)
    group = _meet(t, i.operands[2])
    # The ballot is the vector of flags as an integer, without lanes that do not take part.
    ballot = ir.binary("and", ir.mask_of(flag), group)
    if "ballot" in i.modifiers:
        t.write(i.operands[0], _WORD, ballot)
        return
    every, none = ir.compare("icmp eq", ballot, group), ir.compare("icmp eq", ballot, 0)
    results = {"all": every, "any": ir.invert(none), "uni": ir.binary("or", every, none)}
    t.write(i.operands[0], PREDICATE, results[m["mode"]])


def _reduce(t: LaneRegisters, i: Instruction, m: Modifiers) -> None:
    ir, scalar, operation = t.ir, m.scalar(), m["op"]
    if operation in ("min", "max"):
        operation = ("s" if scalar.is_signed else "u") + operation
    value = t.read(i.operands[1], scalar)
    flags = ir.flags_of(_meet(t, i.operands[2]))
    # Lanes that do not take part get a value that does not change the result. Then LLVM reduces the vector.
    held = ir.select(flags, value, constant("i32", _NEUTRAL[operation]))
    name, kind = f"llvm.vector.reduce.{operation}.v{ir.lanes}i32", ir.wide_type("i32")
    ir.require(f"declare i32 @{name}({kind})")
    result = Value("i32", f"%{ir.fresh()}")
    ir.raw(f"{result.text} = call i32 @{name}({ir.whole(held)})")
    t.write(i.operands[0], scalar, result)


def _elect(t: LaneRegisters, i: Instruction) -> None:
    ir = t.ir
    leader = ir.intrinsic("llvm.cttz.i32", "i32", _meet(t, i.operands[1]), constant("i1", 0))
    result, predicate = two_results(i.operands[0])
    t.write(result, _WORD, leader)
    if predicate is not None:
        t.write(predicate, PREDICATE, ir.compare("icmp eq", lane(t), leader))
