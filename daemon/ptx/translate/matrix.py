"""Matrices in the registers of a warp's lanes: `mma`, `ldmatrix`, `stmatrix`, `movmatrix` (PTX ISA section 9.7.15.5).

All 32 lanes must take part. In a partial warp, these instructions are a fault. Where the ISA does not define the
arithmetic, it is an H100's (native/matrix.ll).

In an exchange, each thread stores words that the other threads of the warp can read: it "shows" these words. For
several consecutive `mma`, there is only one exchange: the first one also shows the operands of the others.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpulease.daemon.ptx.native.library import BYTES, DOUBLES, FLOATS, KINDS, LANES_PART
from gpulease.daemon.ptx.native.structures import Access
from gpulease.daemon.ptx.parse.syntax import SCALARS, Instruction, Operand, Register, Scalar, Space, Vector
from gpulease.daemon.ptx.translate.access import fail_unless, is_valid, pointer_at, shared_offset
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.fragments import Tiles, tiles_of
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.wait_points import kept_words, lane, meet, own_room, shown_words
from gpulease.protocol.fast_dataclass import dataclass

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

_WORD = SCALARS["b32"]
_DOUBLE = SCALARS["b64"]
_HALVES = ("m16n8k8", "m16n8k16")
_BYTES = ("s8", "u8")
_ACCUMULATED = ("f16", "f32")

# Maximum number of bytes that an exchange of `mma` shows (wait_points.py), and of instructions that share an exchange.
_SHOWN_BYTES = 128
_MOST_AT_ONCE = 16

# The offset of D in the thread's room, after C.
_RESULTS_AT = 32

# Size of a row of the 8 x 8 matrices with elements of 16 bits, which are loaded and stored.
ROW_BYTES = 16
_COUNTS = ("x1", "x2", "x4")
_SPACES = ("shared", "shared::cta")

FAMILY = InstructionFamily("Matrices", "9.7.15.5", count=_COUNTS, space=_SPACES)


def _shape(i: Instruction) -> str:
    """Return the modifier with the shape, such as m16n8k8."""
    return next(modifier for modifier in i.modifiers if modifier[0] == "m")


@dataclass(frozen=True, slots=True)
class Product:
    """A kind of matrix product, for the functions of native/matrix.ll and native/warp_matrix.ll.

    Attributes:
        scalar: The type of a register.
        function: The end of the name of the function that computes the product.
        counts: The numbers of registers that a lane has of A, B, C and D.
        details: The function's last arguments: the shape, then arguments that only this function has.
    """

    scalar: Scalar
    function: str
    counts: tuple[int, int, int, int]
    details: tuple[Value, ...]


@FAMILY.form("mma.sync.aligned.shape.row.col.d.a.f16.c", 4, shape=_HALVES, d=_ACCUMULATED, a=("f16",), c=_ACCUMULATED)
@FAMILY.form("mma.sync.aligned.shape.row.col.d.a.bf16.c", 4, shape=_HALVES, d=("f32",), a=("bf16",), c=("f32",))
@FAMILY.form(
    "mma.sync.aligned.shape.row.col.d.a.tf32.c", 4, shape=("m16n8k4", "m16n8k8"), d=("f32",), a=("tf32",), c=("f32",)
)
@FAMILY.form(
    "mma.sync.aligned.m16n8k32.row.col.d.a.b.c", 4, d=("f32",), a=("e4m3", "e5m2"), b=("e4m3", "e5m2"), c=("f32",)
)
@FAMILY.form(
    "mma.sync.aligned.shape.row.col{.satfinite}.s32.a.b.s32",
    4,
    shape=("m8n8k16", "m16n8k16", "m16n8k32"),
    a=_BYTES,
    b=_BYTES,
)
@FAMILY.form("mma.sync.aligned.shape.row.col.f64.f64.f64.f64", 4, shape=("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"))
def multiply_parts(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Compute D = AB + C. Sums of bytes wrap or, with .satfinite, saturate. For f64, each step is fused."""
    multiply(t, i.operands, product_of(i, m))


def product_of(i: Instruction, m: Modifiers) -> Product:
    """Return the kind of product that an `mma` computes."""
    if "f64" in i.modifiers:
        return of_doubles(tiles_of(_shape(i), "f64"))
    tiles = tiles_of(_shape(i), m["a"])
    if m["a"] in _BYTES:
        return of_bytes(tiles, m)
    return of_floats(tiles, (m["a"], m.get("b") or m["a"]), m["d"], m["c"])


def of_floats(tiles: Tiles, kinds: tuple[str, str], into: str, added: str) -> Product:
    """Return the description of a product of floats. `kinds`: the types of A and B. `into`, `added`: of D and C."""
    details = [constant("i32", KINDS.index(kind)) for kind in kinds]
    details += [constant("i1", int(kind == "f16")) for kind in (added, into)]
    # A register contains two .f16 elements of C or D.
    c, d = (tiles.results // (2 if kind == "f16" else 1) for kind in (added, into))
    return Product(_WORD, FLOATS, (tiles.a_words, tiles.b_words, c, d), (*sizes_of(tiles), *details))


def of_bytes(tiles: Tiles, m: Modifiers) -> Product:
    """Return the description of a product of bytes. The modifiers say whether A and B are signed."""
    flags = [constant("i1", int(flag)) for flag in (m["a"] == "s8", m["b"] == "s8", "satfinite" in m)]
    counts = (tiles.a_words, tiles.b_words, tiles.results, tiles.results)
    return Product(_WORD, BYTES, counts, (*sizes_of(tiles), *flags))


def of_doubles(tiles: Tiles) -> Product:
    """Return the description of a product of f64."""
    counts = (tiles.a_words, tiles.b_words, tiles.results, tiles.results)
    return Product(_DOUBLE, DOUBLES, counts, sizes_of(tiles))


def multiply(t: "ThreadTranslator", operands: Sequence[Operand], product: Product) -> None:
    """Show the thread's registers of A, B and C to the warp, and compute the thread's part of D."""
    scalar = product.scalar
    parts = [registers_of(t, operand, count) for operand, count in zip(operands[1:], product.counts[:3], strict=True)]
    # If an earlier `mma` has shown this one's A and B, store only C, which no other lane needs. Then there is no wait.
    offsets = t.shown_before.get(t.index)
    added = t.ir.offset(own_room(t), 0)
    if offsets is None:
        offsets, behind = _show(t, parts, scalar)
        added = t.ir.offset(kept_words(t, lane(t)), behind)
    else:
        for number, register in enumerate(parts[2]):
            t.ir.store(t.read(register, scalar), t.ir.offset(added, scalar.size * number))
    # The native function reads the words of all lanes, and writes D into this lane's room.
    frames, stride, offset = shown_words(t)
    words = t.ir.offset(frames, offset)
    into = t.ir.offset(own_room(t), _RESULTS_AT)
    step = constant("i64", scalar.size)
    arguments = [
        *(t.ir.offset(words, start) for start in offsets),
        stride,
        step,
        lane(t),
        added,
        into,
        *product.details,
    ]
    call_native(t, LANES_PART + product.function, arguments)
    take(t, registers_of(t, operands[0], product.counts[3]), scalar, at=_RESULTS_AT)


def call_native(t: "ThreadTranslator", function: str, arguments: Sequence[Value]) -> None:
    """Call a function of native/matrix.ll or native/warp_matrix.ll."""
    t.ir.require(f"declare void @{function}({', '.join(argument.type for argument in arguments)})")
    t.ir.emit(f"call void @{function}({', '.join(map(str, arguments))})")


def _show(t: "ThreadTranslator", parts: Sequence[Sequence[Operand]], scalar: Scalar) -> tuple[tuple[int, int], int]:
    """Show A, B and C, and A and B of later `mma`. Returns the offsets of A and B, and of C, in the shown words."""
    # Show the same registers only once, even if several products use them.
    left, right, added = (tuple(part) for part in parts)
    offsets: dict[tuple[Operand, ...], int] = {}
    end = _append(offsets, 0, (left, right), scalar)
    for index, following in _followers(t, scalar):
        behind = _append(wanted := dict(offsets), end, following, scalar)
        # C comes last, and must also fit.
        if behind > _SHOWN_BYTES - scalar.size * len(added):
            break
        offsets, end = wanted, behind
        t.shown_before[index] = offsets[following[0]], offsets[following[1]]
    shown = [register for part in offsets for register in part]
    meet(t, [t.read(register, scalar) for register in (*shown, *added)])
    return (offsets[left], offsets[right]), end


def _append(
    offsets: dict[tuple[Operand, ...], int], end: int, parts: Sequence[tuple[Operand, ...]], scalar: Scalar
) -> int:
    """Append the parts that have no offset yet. Returns the end of all parts."""
    for part in parts:
        if part not in offsets:
            offsets[part] = end
            end += scalar.size * len(part)
    return end


def _followers(t: "ThreadTranslator", scalar: Scalar) -> Iterator[tuple[int, tuple[tuple[Operand, ...], ...]]]:
    """Yield the `mma` that follow directly, if their A and B are already computed: index, and registers of A and B."""
    body, first = t.function.instructions, t.instruction
    written: set[Operand] = set()
    for index in range(t.index, min(t.index + _MOST_AT_ONCE, len(body))):
        i = body[index]
        # Stop at any other instruction, at a label, and at a guard, because lanes may separate there.
        is_alike = i.opcode == "mma" and i.guard is None and ("f64" in i.modifiers) == (scalar.bits == 64)
        if first is None or first.opcode != "mma" or not is_alike or (index > t.index and index in t.leaders):
            return
        vectors = [operand.elements if isinstance(operand, Vector) else () for operand in i.operands[:3]]
        if len(vectors) != 3 or not all(isinstance(register, Register) for part in vectors for register in part):
            return
        # Stop if a previous `mma` of the sequence writes the registers.
        if index > t.index:
            if not written.isdisjoint((*vectors[1], *vectors[2])):
                return
            yield index, (vectors[1], vectors[2])
        written.update(vectors[0])


def take(t: "ThreadTranslator", into: Sequence[Operand], scalar: Scalar, *, at: int = 0) -> None:
    """Load registers from the thread's room, from byte `at` on."""
    room = t.ir.offset(own_room(t), at)
    for number, register in enumerate(into):
        t.write(register, scalar, t.ir.load(f"i{scalar.bits}", t.ir.offset(room, scalar.size * number)))


def registers_of(t: "ThreadTranslator", operand: Operand, count: int) -> tuple[Operand, ...]:
    """Return the registers in an operand. Raises ImageRejected unless there are `count`."""
    elements = operand.elements if isinstance(operand, Vector) else (operand,)
    if len(elements) != count:
        raise t.problem(f"expected a vector of {count} registers")
    return elements


@FAMILY.form("ldmatrix.sync.aligned.m8n8.count{.trans}{.space}.b16", 2)
def load(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Load 8 x 8 matrices. Lanes 8n to 8n + 7 have the addresses of the rows of matrix n (section 9.7.15.5)."""
    ir, count = t.ir, int(m["count"][1:])
    into = registers_of(t, i.operands[0], count)
    # Each lane checks and shows the address of its row. No row is read before all addresses are checked.
    meet(t, [_row_address(t, i.operands[1], m, count, Access.LOAD)])
    own_lane = lane(t)
    group, part = ir.binary("lshr", own_lane, 2), ir.binary("and", own_lane, 3)
    # Lane 4g + t gets word t of row g; with .trans, it gets element g of rows 2t and 2t + 1.
    for number, register in enumerate(into):
        if "trans" not in m:
            row = _row(t, ir.binary("add", group, 8 * number))
            word = ir.load("i32", ir.offset(row, _bytes(t, part, 4)))
        else:
            first = ir.binary("add", ir.binary("shl", part, 1), 8 * number)
            rows = [_row(t, first), _row(t, ir.binary("add", first, 1))]
            halves = [ir.load("i16", ir.offset(row, _bytes(t, group, 2))) for row in rows]
            word = _pair(t, *halves)
        t.write(register, _WORD, word)


@FAMILY.form("stmatrix.sync.aligned.m8n8.count{.trans}{.space}.b16", 2, writes=False)
def store(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Store 8 x 8 matrices. Lane 8n + r stores row r of matrix n (section 9.7.15.5)."""
    ir, count = t.ir, int(m["count"][1:])
    words = [t.read(register, _WORD) for register in registers_of(t, i.operands[1], count)]
    # Each lane shows the address of its row, then its registers, one for each matrix.
    meet(t, [_row_address(t, i.operands[0], m, count, Access.STORE), *words])
    own_lane = lane(t)
    # Lanes beyond the matrices have no row to store.
    stores, done = ir.fresh("stores"), ir.fresh("stored")
    ir.branch_if(ir.compare("icmp ult", own_lane, 8 * count), stores, done)
    ir.block(stores)
    row, into = ir.binary("and", own_lane, 7), _row(t, own_lane)
    word_at = ir.binary("add", _bytes(t, ir.binary("lshr", own_lane, 3), 4), 8)
    # The words of a row are in four lanes. With .trans, its elements are halves of the words of eight lanes.
    if "trans" not in m:
        for part in range(4):
            holder = kept_words(t, ir.binary("add", ir.binary("shl", row, 2), part))
            ir.store(ir.load("i32", ir.offset(holder, word_at)), ir.offset(into, 4 * part))
    else:
        half_at = ir.binary("add", word_at, _bytes(t, ir.binary("and", row, 1), 2))
        for column in range(8):
            holder = kept_words(t, ir.binary("add", ir.binary("lshr", row, 1), 4 * column))
            ir.store(ir.load("i16", ir.offset(holder, half_at)), ir.offset(into, 2 * column))
    ir.block(done)


@FAMILY.form("movmatrix.sync.aligned.m8n8.trans.b16", 2)
def transpose(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Transpose an 8 x 8 matrix (section 9.7.15.5)."""
    ir = t.ir
    meet(t, [t.read(i.operands[1], _WORD)])
    # The two elements of the result's word are halves of two lanes' words.
    own_lane = lane(t)
    group, part = ir.binary("lshr", own_lane, 2), ir.binary("and", own_lane, 3)
    half_at = _bytes(t, ir.binary("and", group, 1), 2)
    first = ir.binary("add", ir.binary("shl", part, 3), ir.binary("lshr", group, 1))
    holders = [kept_words(t, first), kept_words(t, ir.binary("add", first, 4))]
    halves = [ir.load("i16", ir.offset(holder, half_at)) for holder in holders]
    t.write(i.operands[0], _WORD, _pair(t, *halves))


def _row_address(t: "ThreadTranslator", operand: Operand, m: Modifiers, count: int, access: Access) -> Value:
    """Return the offset of the thread's row in shared memory. If the row is used, the offset is checked."""
    address = shared_offset(t, operand, is_generic="space" not in m)
    fail_unless(t, row_is_valid(t, address, count), access, Space.SHARED, address, ROW_BYTES)
    return address


def row_is_valid(t: "ThreadTranslator", address: Value, count: int) -> Value:
    """Compute whether a row is in shared memory, or not used because there are only `count` matrices."""
    valid = is_valid(t, address, Space.SHARED, ROW_BYTES)
    if count < 4:
        valid = t.ir.binary("or", valid, t.ir.compare("icmp uge", lane(t), 8 * count))
    return valid


def _row(t: "ThreadTranslator", row: Value) -> Value:
    """Return a pointer to the row at the address that a lane showed. The lane has checked the address."""
    return pointer_at(t, t.ir.load("i64", kept_words(t, row)), Space.SHARED)


def _bytes(t: "ThreadTranslator", number: Value, size: int) -> Value:
    return t.ir.binary("mul", t.ir.cast("zext", number, "i64"), size)


def _pair(t: "ThreadTranslator", low: Value, high: Value) -> Value:
    wide = [t.ir.cast("zext", half, "i32") for half in (low, high)]
    return t.ir.binary("or", wide[0], t.ir.binary("shl", wide[1], 16))


def sizes_of(tiles: Tiles) -> tuple[Value, ...]:
    """Return the arguments of the functions of native/matrix.ll that describe a shape."""
    return tuple(constant("i32", number) for number in (tiles.rows, tiles.columns, tiles.chunks))
