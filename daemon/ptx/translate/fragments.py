"""Map elements of a matrix to the lanes of a warp (PTX ISA section 9.7.15.5, the figures of `mma`), and move them.

All shapes follow one rule. A matrix is cut into tiles of 8 rows (for B: columns) by 4 words; lane 4g + t has word t of
row g in each tile. In A, tiles are numbered downwards first, in B along the columns. C is cut into tiles of 8 by 8, and
a lane has the two elements 2t and 2t + 1 of row g in each. The ISA does not define the layout of `wmma` fragments; here
it is the same.

For each kind of matrix, one function with a loop loads or stores a lane's elements.
"""

import re
from typing import TYPE_CHECKING

from gpulease.daemon.ptx.native.structures import Access
from gpulease.daemon.ptx.parse.syntax import Space
from gpulease.daemon.ptx.translate.access import reach
from gpulease.daemon.ptx.translate.ir import IrWriter, Value, constant
from gpulease.daemon.ptx.translate.operand_values import ENVIRONMENT, LAUNCH, LOCAL, OperandTranslator
from gpulease.protocol.fast_dataclass import dataclass

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_EIGHT = 8
_LANES_OF_ROW = 4

# Bits of an element, by its type.
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "f32": 32, "s32": 32, "f64": 64}


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the matrices of one shape and type are divided into tiles.

    Attributes:
        m: Rows of A and C.
        n: Columns of B and C.
        k: Columns of A, rows of B.
        per_word: Elements in a word of A and B; a word has 4 bytes, for f64 8.
    """

    m: int
    n: int
    k: int
    per_word: int

    @property
    def rows(self) -> int:
        """The number of tiles that the rows of A and C make."""
        return self.m // _EIGHT

    @property
    def columns(self) -> int:
        """The number of tiles that the columns of B and C make."""
        return self.n // _EIGHT

    @property
    def chunks(self) -> int:
        """How many words a lane has of a row of A, or of a column of B."""
        return self.k // (_LANES_OF_ROW * self.per_word)

    @property
    def a_words(self) -> int:
        return self.rows * self.chunks

    @property
    def b_words(self) -> int:
        return self.columns * self.chunks

    @property
    def results(self) -> int:
        return 2 * self.rows * self.columns

    def elements(self, part: str) -> list[tuple[int, int]]:
        """Return a lane's elements of "a", "b" or "c" in order, as distances from row (of B: column) g and word t.

        The second distance is across the row (of B: down the column), in elements.
        """
        # In C a lane has two neighbouring elements of each tile.
        if part == "c":
            return [
                (_EIGHT * (n // 2 % self.rows), n % 2 + _EIGHT * (n // (2 * self.rows))) for n in range(self.results)
            ]
        width = _LANES_OF_ROW * self.per_word
        # In A and B a lane has one word of each tile, which is `per_word` elements wide.
        elements = []
        for word in range(self.a_words if part == "a" else self.b_words):
            if part == "a":
                chunk, tile = divmod(word, self.rows)
            else:
                tile, chunk = divmod(word, self.chunks)
            elements += [(_EIGHT * tile, width * chunk + n) for n in range(self.per_word)]
        return elements


def tiles_of(shape: str, kind: str) -> Tiles:
    """Return the division of a shape such as `m16n8k16` for the element type of A and B, or of C if only C is used."""
    match = _SHAPE.fullmatch(shape)
    assert match is not None, shape
    m, n, k = map(int, match.groups())
    return Tiles(m, n, k, max(1, 32 // BITS[kind]))


_ROOM, _START, _STEP = Value("ptr", "%room"), Value("i64", "%start"), Value("i64", "%step")
_COUNTER = Value("ptr", "%counter")

# The result of the functions below: whether all accesses were allowed, and the first address that was not.
_RESULT = "{ i1, i64 }"


@dataclass(frozen=True, slots=True)
class Passage:
    """A matrix "a", "b" or "c" of a product, stored by rows or columns, with elements of one type."""

    tiles: Tiles
    part: str
    layout: str
    type: str

    @property
    def size(self) -> int:
        return BITS[self.type] // 8

    @property
    def default_stride(self) -> int:
        """The distance from a row (column) to the next, in elements, when the instruction gives none."""
        tiles = self.tiles
        rows, columns = {"a": (tiles.m, tiles.k), "b": (tiles.k, tiles.n), "c": (tiles.m, tiles.n)}[self.part]
        return columns if self.layout == "row" else rows

    @property
    def _groups_are_near(self) -> bool:
        """Whether lanes of different groups g, rather than those of one group, have neighbouring elements."""
        return (self.layout == "row") == (self.part == "b")

    def first(self, ir: IrWriter, address: Value, step: Value, lane: Value) -> Value:
        """Return the address of the element at row g, word t of a matrix with rows that are `step` bytes apart."""
        width = 2 if self.part == "c" else self.tiles.per_word
        group = ir.cast("zext", ir.binary("lshr", lane, 2), "i64")
        word = ir.binary("mul", ir.cast("zext", ir.binary("and", lane, 3), "i64"), width)
        near, far = (group, word) if self._groups_are_near else (word, group)
        along = ir.binary("add", address, ir.binary("mul", near, self.size))
        return ir.binary("add", along, ir.binary("mul", far, step))

    def call(
        self, t: "ThreadTranslator", space: Space, room: Value, start: Value, step: Value, *, stores: bool
    ) -> Value:
        """Move the lane's elements, the first of them at `start`; returns whether all was allowed, and where not."""
        # One function for each kind of matrix and space; the local window's size is a constant in it.
        tiles = self.tiles
        kind = f"{self.part}.{self.layout}.{self.type}.{tiles.m}.{tiles.n}.{tiles.k}.{space.value}.{t.local_limit}"
        name = f"matrix.{'store' if stores else 'load'}.{kind}"
        self._define(t, name, space, stores=stores)
        arguments = ", ".join(map(str, (LAUNCH, ENVIRONMENT, LOCAL, room, start, step)))
        return t.ir.value(_RESULT, f"call {_RESULT} @{name}({arguments})")

    def _define(self, t: "ThreadTranslator", name: str, space: Space, *, stores: bool) -> None:
        inner = OperandTranslator(t.function, {}, IrWriter(t.declarations))
        inner.local_limit = t.local_limit
        ir, kind = inner.ir, f"i{8 * self.size}"
        elements = self.tiles.elements(self.part)
        distances = [(n, g) if self._groups_are_near else (g, n) for g, n in elements]
        # The distances are a table in the module: a loop over it is far shorter than the accesses written out.
        table = ", ".join(f"[2 x i64] [i64 {far}, i64 {self.size * near}]" for far, near in distances)
        ir.require(f"@{name}.places = internal constant [{len(distances)} x [2 x i64]] [{table}]")
        ir.block("entry")
        ir.emit(f"{_COUNTER.text} = alloca i64")
        ir.store(constant("i64", 0), _COUNTER)
        ir.block("each")
        number = ir.load("i64", _COUNTER)
        # Each iteration of the loop computes the address, checks it, and moves one element.
        entry = ir.offset(Value("ptr", f"@{name}.places"), ir.binary("shl", number, 4))
        far, near = ir.load("i64", entry), ir.load("i64", ir.offset(entry, 8))
        address = ir.binary("add", ir.binary("add", _START, ir.binary("mul", far, _STEP)), near)
        place = reach(inner, address, space, (self.size, Access.STORE if stores else Access.LOAD), "stop")
        held = ir.offset(_ROOM, ir.binary("mul", number, self.size))
        ir.store(ir.load(kind, held if stores else place), place if stores else held)
        following = ir.binary("add", number, 1)
        ir.store(following, _COUNTER)
        ir.branch_if(ir.compare("icmp ult", following, len(distances)), "each", "done")
        # The function ends in one of two ways: at the first address that may not be accessed, or with success.
        ir.block("stop")
        ir.ret_value(ir.value(_RESULT, f"insertvalue {_RESULT} zeroinitializer, {address}, 1"))
        ir.block("done")
        ir.ret_value(Value(_RESULT, "{ i1 true, i64 0 }"))
        signature = ", ".join(map(str, (LAUNCH, ENVIRONMENT, LOCAL, _ROOM, _START, _STEP)))
        ir.require("\n".join([f"define internal {_RESULT} @{name}({signature}) noinline {{", *ir.lines[1:], "}"]))
