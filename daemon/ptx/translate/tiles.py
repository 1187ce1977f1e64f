"""Matrices that a whole warp loads, multiplies and stores: `wmma` (PTX ISA section 9.7.15.4).

A fragment is the part of a matrix in the registers of one lane. The ISA does not define its layout; here it is the same
as for `mma` (fragments.py). A fragment of A or B with .f16 may have more registers than needed. Then the other
registers are copies of the first ones, so that a kernel may apply an operation to all registers of a fragment.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpulease.daemon.ptx.native.structures import Access
from gpulease.daemon.ptx.parse.syntax import Instruction, Operand, Space, Vector
from gpulease.daemon.ptx.translate.access import address_in, fail_unless
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.fragments import BITS, Passage, tiles_of
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.matrix import (
    multiply,
    of_bytes,
    of_doubles,
    of_floats,
    registers_of,
    take,
)
from gpulease.daemon.ptx.translate.operand_values import bits_type
from gpulease.daemon.ptx.translate.wait_points import lane, meet, own_room

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

_SHAPES = ("m16n16k16", "m32n8k16", "m8n32k16")
_BYTES = ("s8", "u8")
_ACCUMULATED = ("f16", "f32")

FAMILY = InstructionFamily("Warp-wide matrices", "9.7.15.4", shape=_SHAPES, left=("row", "col"), right=("row", "col"))

# A fragment of A or B with .f16 has this many registers, for all shapes.
_HALF_REGISTERS = 8

# The kinds of fragments: matrices, shapes and types.
_FRAGMENTS = (
    (("a", "b"), _SHAPES, ("f16", "bf16", *_BYTES)),
    (("a", "b"), ("m16n16k8",), ("tf32",)),
    (("a", "b", "c"), ("m8n8k4",), ("f64",)),
    (("c",), _SHAPES, ("f16", "f32", "s32")),
    (("c",), ("m16n16k8",), ("f32",)),
)


def load(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Load each lane's elements of a matrix."""
    part, kind = m["part"], m["type"]
    tiles, scalar = tiles_of(m["shape"], kind), bits_type(max(32, BITS[kind]))
    count = len(tiles.elements(part)) * BITS[kind] // scalar.bits
    is_padded = kind == "f16" and part != "c"
    into = registers_of(t, i.operands[0], _HALF_REGISTERS if is_padded else count)
    _pass(t, i.operands[1:], Passage(tiles, part, m["layout"], kind), m, ())
    # In a padded fragment, load the same elements several times.
    for start in range(0, len(into), count):
        take(t, into[start : start + count], scalar)


def store(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Store each lane's elements of a matrix."""
    kind = m["type"]
    tiles, scalar = tiles_of(m["shape"], kind), bits_type(max(32, BITS[kind]))
    count = tiles.results * BITS[kind] // scalar.bits
    values = [t.read(register, scalar) for register in registers_of(t, i.operands[1], count)]
    _pass(t, (i.operands[0], *i.operands[2:]), Passage(tiles, "c", m["layout"], kind), m, values)


def _register(parts: tuple[str, ...], shapes: tuple[str, ...], types: tuple[str, ...]) -> None:
    suffix = ".sync.aligned.layout.shape{.space}.type"
    places = {"layout": ("row", "col"), "space": ("global", "shared", "shared::cta")}
    choices = {"shape": shapes, "type": types, **places}
    FAMILY.form(f"wmma.load.part{suffix}", (2, 3), writes=True, part=parts, **choices)(load)
    if "c" in parts:
        FAMILY.form(f"wmma.store.d{suffix}", (2, 3), writes=False, **choices)(store)


for _fragment in _FRAGMENTS:
    _register(*_fragment)


def _pass(
    t: "ThreadTranslator", place: Sequence[Operand], passage: Passage, m: Modifiers, values: Sequence[Value]
) -> None:
    """Wait for the warp, then load the thread's elements into its room, or store `values` if there are any."""
    ir = t.ir
    declared_space = Space(m.get("space").split("::")[0] or "generic")
    address, space = address_in(t, place[0], declared_space)
    if space not in (Space.GENERIC, Space.GLOBAL, Space.SHARED):
        raise t.problem(f"a matrix must be in .global or .shared memory, not in .{space.value}")
    # Without a stride, the matrix is dense.
    stride = constant("i32", passage.default_stride)
    if len(place) > 1:
        stride = t.read(place[1], t.WORD)
    step = ir.binary("mul", ir.cast("zext", stride, "i64"), passage.size)
    # Registers are not kept across the wait, so store the first element's address, the step and the values in the room.
    meet(t, [passage.first(ir, address, step, lane(t)), step, *values])
    room = own_room(t)
    start, step = (ir.load("i64", ir.offset(room, distance)) for distance in (0, 8))
    if values:
        room = ir.offset(room, 16)
    done = passage.call(t, space, room, start, step, stores=bool(values))
    # The function stops at the first element that may not be accessed.
    valid, bad = ir.value("i1", f"extractvalue {done}, 0"), ir.value("i64", f"extractvalue {done}, 1")
    fail_unless(t, valid, Access.STORE if values else Access.LOAD, space, bad, passage.size)


@FAMILY.form("wmma.mma.sync.aligned.left.right.shape.d.c", 4, d=_ACCUMULATED, c=_ACCUMULATED)
def multiply_halves(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Compute D = AB + C for .f16. The registers of A and B that are copies of others are ignored."""
    tiles = tiles_of(m["shape"], "f16")
    parts = [registers_of(t, operand, _HALF_REGISTERS) for operand in i.operands[1:3]]
    left, right = (Vector(part[:count]) for part, count in zip(parts, (tiles.a_words, tiles.b_words), strict=True))
    multiply(t, (i.operands[0], left, right, i.operands[3]), of_floats(tiles, ("f16", "f16"), m["d"], m["c"]))


@FAMILY.form("wmma.mma.sync.aligned.left.right.shape.f32.a.bf16.f32", 4, a=("bf16",))
@FAMILY.form("wmma.mma.sync.aligned.left.right.shape.f32.a.tf32.f32", 4, shape=("m16n16k8",), a=("tf32",))
def multiply_floats(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Compute D = AB + C for .bf16 or .tf32, with sums in f32."""
    multiply(t, i.operands, of_floats(tiles_of(m["shape"], m["a"]), (m["a"], m["a"]), "f32", "f32"))


@FAMILY.form("wmma.mma.sync.aligned.left.right.shape.s32.a.b.s32{.satfinite}", 4, a=_BYTES, b=_BYTES)
def multiply_bytes(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Compute D = AB + C for bytes. Sums wrap or, with .satfinite, saturate."""
    multiply(t, i.operands, of_bytes(tiles_of(m["shape"], m["a"]), m))


@FAMILY.form("wmma.mma.sync.aligned.left.right.m8n8k4.f64.f64.f64.f64{.rn}", 4)
def multiply_doubles(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Compute D = AB + C for f64, by fused multiplications and additions."""
    multiply(t, i.operands, of_doubles(tiles_of("m8n8k4", "f64")))
