"""Exchanges of values between the threads of a warp (PTX ISA sections 9.7.9.6 and 9.7.13, the forms with ".sync").

The member mask contains the lanes that take part. Members that have ended or do not exist are not awaited. It is a
fault if a thread is not in its own mask, or if a member never arrives. The ISA does not define the value of a lane that
does not exist; here it is 0.
"""

from typing import TYPE_CHECKING

from gpulease.daemon.ptx.native.library import REDUCE_WORDS, REDUCTIONS, SAME_WORDS
from gpulease.daemon.ptx.parse.syntax import PREDICATE, SCALARS, Instruction, Operand, Pair
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import TRUE, Value, constant
from gpulease.daemon.ptx.translate.specials import WARP_THREADS
from gpulease.daemon.ptx.translate.wait_points import exchange, gather, lane, shown_words, word_of

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

FAMILY = InstructionFamily("Warp operations", "9.7.9, 9.7.13")

_WORD = SCALARS["b32"]
_MODES = ("up", "down", "bfly", "idx")


@FAMILY.form("shfl.sync.mode.b32", 5, mode=_MODES)
def shuffle(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Return the value of another lane (section 9.7.9.6), or the thread's own value if that lane is out of range."""
    ir = t.ir
    word = t.read(i.operands[1], _WORD)
    source, inside = source_lane(t, m["mode"], t.read(i.operands[2], _WORD), t.read(i.operands[3], _WORD))
    # Lane and flag are needed after the wait, when the operands may no longer exist. So show them with the value.
    packed = ir.binary("or", source, ir.binary("shl", ir.cast("zext", inside, "i32"), 5))
    shown = ir.binary("or", ir.binary("shl", ir.cast("zext", packed, "i64"), 32), ir.cast("zext", word, "i64"))
    group, _ = exchange(t, i.operands[4], [shown])
    # After the wait, the thread's own word has the lane to read, and that lane's word has the value.
    packed = ir.cast("trunc", ir.binary("lshr", word_of(t, lane(t)), 32), "i32")
    source = ir.binary("and", packed, WARP_THREADS - 1)
    is_there = has_lane(t, group, source)
    value = ir.cast("trunc", word_of(t, ir.select(is_there, source, lane(t))), "i32")
    result, predicate = two_results(i.operands[0])
    t.write(result, _WORD, ir.select(is_there, value, constant("i32", 0)))
    if predicate is not None:
        t.write(predicate, PREDICATE, ir.compare("icmp ugt", packed, WARP_THREADS - 1))


def source_lane(t: "ThreadTranslator", mode: str, distance: Value, limits: Value) -> tuple[Value, Value]:
    """Return the lane to read, and whether it is in range, by the algorithm in section 9.7.9.6."""
    ir, own_lane = t.ir, lane(t)
    distance = ir.binary("and", distance, 31)
    clamp = ir.binary("and", limits, 31)
    # The second byte of c divides the warp into segments. The first byte limits the lane within a segment.
    segment = ir.binary("and", ir.binary("lshr", limits, 8), 31)
    outside = ir.binary("xor", segment, 31)
    first = ir.binary("and", own_lane, segment)
    last = ir.binary("or", first, ir.binary("and", clamp, outside))
    match mode:
        case "up":
            source = ir.binary("sub", own_lane, distance)
            inside = ir.compare("icmp sge", source, last)
        case "down":
            source = ir.binary("add", own_lane, distance)
            inside = ir.compare("icmp sle", source, last)
        case "bfly":
            source = ir.binary("xor", own_lane, distance)
            inside = ir.compare("icmp sle", source, last)
        case _:
            source = ir.binary("or", first, ir.binary("and", distance, outside))
            inside = ir.compare("icmp sle", source, last)
    return ir.select(inside, source, own_lane), inside


@FAMILY.form("vote.sync.mode.pred", 3, mode=("all", "any", "uni"))
def vote(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Return whether a predicate is true for all members, for any, or equal for all (section 9.7.13)."""
    ir = t.ir
    group, ballot = exchange(t, i.operands[2], flag=t.read(i.operands[1], PREDICATE))
    every, none = ir.compare("icmp eq", ballot, group), ir.compare("icmp eq", ballot, 0)
    results = {"all": every, "any": ir.invert(none), "uni": ir.binary("or", every, none)}
    t.write(i.operands[0], PREDICATE, results[m["mode"]])


@FAMILY.form("vote.sync.ballot.b32", 3)
def ballot_of(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Return the predicates of the members as a mask."""
    _, ballot = exchange(t, i.operands[2], flag=t.read(i.operands[1], PREDICATE))
    t.write(i.operands[0], _WORD, ballot)


@FAMILY.form("bar.warp.sync", 1, writes=False)
def warp_barrier(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    exchange(t, i.operands[0])


@FAMILY.form("activemask.b32", 1)
def active_mask(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Return the lanes that are at this instruction when no other thread of the warp can run."""
    t.write(i.operands[0], _WORD, gather(t))


@FAMILY.form("elect.sync", 2)
def elect(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Choose the first member. Return its lane, and whether it is the thread's own."""
    group, _ = exchange(t, i.operands[1])
    leader = t.ir.intrinsic("llvm.cttz.i32", "i32", group, TRUE)
    result, predicate = two_results(i.operands[0])
    t.write(result, _WORD, leader)
    if predicate is not None:
        t.write(predicate, PREDICATE, t.ir.compare("icmp eq", leader, lane(t)))


@FAMILY.form("match.any.sync.type", 3, type=("b32", "b64"))
def match_any(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Return the members with the same value as this thread."""
    _, same = _match(t, i, m)
    t.write(i.operands[0], _WORD, same)


@FAMILY.form("match.all.sync.type", 3, type=("b32", "b64"))
def match_all(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Return all members and true if they have the same value, otherwise 0 and false."""
    group, same = _match(t, i, m)
    agree = t.ir.compare("icmp eq", group, same)
    result, predicate = two_results(i.operands[0])
    t.write(result, _WORD, t.ir.select(agree, group, constant("i32", 0)))
    if predicate is not None:
        t.write(predicate, PREDICATE, agree)


def _match(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> tuple[Value, Value]:
    ir = t.ir
    group, _ = exchange(t, i.operands[2], [t.read(i.operands[1], m.scalar())])
    frames, stride, offset = shown_words(t)
    same = ir.intrinsic(SAME_WORDS, "i32", frames, stride, group, offset, word_of(t, lane(t)))
    return group, same


@FAMILY.form("redux.sync.op.type", 3, op=("add", "min", "max"), type=("u32", "s32"))
@FAMILY.form("redux.sync.op.type", 3, op=("and", "or", "xor"), type=("b32",))
def reduce(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Combine the values of the members (section 9.7.13)."""
    scalar, operation = m.scalar(), m["op"]
    if operation in ("min", "max"):
        operation = ("s" if scalar.is_signed else "u") + operation
    group, _ = exchange(t, i.operands[2], [t.read(i.operands[1], scalar)])
    # Native code combines the values in the members' frames.
    frames, stride, offset = shown_words(t)
    number = constant("i32", REDUCTIONS.index(operation))
    t.write(i.operands[0], scalar, t.ir.intrinsic(REDUCE_WORDS, "i32", frames, stride, group, offset, number))


def has_lane(t: "ThreadTranslator", group: Value, lane: Value) -> Value:
    return t.ir.cast("trunc", t.ir.binary("lshr", group, lane), "i1")


def two_results(operand: Operand) -> tuple[Operand, Operand | None]:
    """Split `d|p` into two destinations. For `d` alone, the second is None."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)
