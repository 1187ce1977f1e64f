"""Maps elements of matrices to the lanes of a warp (PTX ISA section 9.7.15.5, the figures of `mma`), and moves them.

All shapes follow one rule. A and B are divided into tiles of 8 rows (for B: columns) by 4 words. Lane 4g + t has word t
of row g in each tile. The tiles of A are numbered first down the rows, those of B along a column. C is divided into
tiles of 8 by 8, and a lane has the two elements 2t and 2t + 1 of row g in each tile. The ISA does not define the layout
of `wmma` fragments. This driver uses the same layout for them.

For each kind of matrix, there is one function with a loop that loads or stores a lane's elements.
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

# Number of bits of an element, by type.
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "f32": 32, "s32": 32, "f64": 64}


@dataclass(frozen=True, slots=True)
class Tiles:
    """The division of the matrices of one shape and type into tiles.

    Attributes:
        m: Number of rows of A and C.
        n: Number of columns of B and C.
        k: Number of columns of A and of rows of B.
        per_word: Number of elements in a word of A and B. A word has 4 bytes, or 8 for f64.
    """

    m: int
    n: int
    k: int
    per_word: int

    @property
    def rows(self) -> int:
        """The number of tiles into which the rows of A and C are divided."""
        return self.m // _EIGHT

    @property
    def columns(self) -> int:
        """The number of tiles into which the columns of B and C are divided."""
        return self.n // _EIGHT

    @property
    def chunks(self) -> int:
        """The number of words that a lane has in a row of A or in a column of B."""
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
        """Return the positions of a lane's elements in "a", "b" or "c", in order.

        A position is a pair: the distance from row g (in B: column g), and the distance from word t along the row (in
        B: down the column), both in elements.
        """
        # In C, a lane has two neighbouring elements of each tile.
        if part == "c":
            return [
                (_EIGHT * (n // 2 % self.rows), n % 2 + _EIGHT * (n // (2 * self.rows))) for n in range(self.results)
            ]
        width = _LANES_OF_ROW * self.per_word
        # In A and B, a lane has one word of each tile, with `per_word` elements.
        elements = []
        for word in range(self.a_words if part == "a" else self.b_words):
            if part == "a":
                chunk, tile = divmod(word, self.rows)
            else:
                tile, chunk = divmod(word, self.chunks)
            elements += [(_EIGHT * tile, width * chunk + n) for n in range(self.per_word)]
        return elements


def tiles_of(shape: str, kind: str) -> Tiles:
    """Return the division of a shape such as `m16n8k16`. `kind`: the element type of A and B, or of C for C alone."""
    match = _SHAPE.fullmatch(shape)
    assert match is not None, shape
    m, n, k = map(int, match.groups())
    return Tiles(m, n, k, max(1, 32 // BITS[kind]))


_ROOM, _START, _STEP = Value("ptr", "%room"), Value("i64", "%start"), Value("i64", "%step")
_COUNTER = Value("ptr", "%counter")

# The result of the functions that are defined below: whether all accesses were allowed, and the first address that was
# not allowed.
_RESULT = "{ i1, i64 }"


@dataclass(frozen=True, slots=True)
class Passage:
    """Moves the elements of one kind of matrix between memory and the lanes.

    Attributes:
        tiles: The division into tiles.
        part: "a", "b" or "c".
        layout: "row" if the matrix is stored row by row, "col" if column by column.
        type: The type of the elements.
    """

    tiles: Tiles
    part: str
    layout: str
    type: str

    @property
    def size(self) -> int:
        return BITS[self.type] // 8

    @property
    def default_stride(self) -> int:
        """The distance between two rows (with "col": columns), in elements, if the instruction does not give it."""
        tiles = self.tiles
        rows, columns = {"a": (tiles.m, tiles.k), "b": (tiles.k, tiles.n), "c": (tiles.m, tiles.n)}[self.part]
        return columns if self.layout == "row" else rows

    @property
    def _groups_are_near(self) -> bool:
        """Whether neighbouring elements in memory belong to lanes with different g, rather than with different t."""
        return (self.layout == "row") == (self.part == "b")

    def first(self, ir: IrWriter, address: Value, step: Value, lane: Value) -> Value:
        """Return the address of the lane's first element, at row g and word t. `step`: bytes between two rows."""
        width = 2 if self.part == "c" else self.tiles.per_word
        group = ir.cast("zext", ir.binary("lshr", lane, 2), "i64")
        word = ir.binary("mul", ir.cast("zext", ir.binary("and", lane, 3), "i64"), width)
        near, far = (group, word) if self._groups_are_near else (word, group)
        along = ir.binary("add", address, ir.binary("mul", near, self.size))
        return ir.binary("add", along, ir.binary("mul", far, step))

    def call(
        self, t: "ThreadTranslator", space: Space, room: Value, start: Value, step: Value, *, stores: bool
    ) -> Value:
        """Move the lane's elements between memory, from `start` on, and `room`. Returns a value of type _RESULT."""
        # Use one function for each kind of matrix and space. The size of the local window is a constant in it.
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
        # Put the distances into a table in the module. A loop over it is far shorter than a list of all accesses.
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
        # The function returns at the first address that may not be accessed, or when all elements were moved.
        ir.block("stop")
        ir.ret_value(ir.value(_RESULT, f"insertvalue {_RESULT} zeroinitializer, {address}, 1"))
        ir.block("done")
        ir.ret_value(Value(_RESULT, "{ i1 true, i64 0 }"))
        signature = ", ".join(map(str, (LAUNCH, ENVIRONMENT, LOCAL, _ROOM, _START, _STEP)))
        ir.require("\n".join([f"define internal {_RESULT} @{name}({signature}) noinline {{", *ir.lines[1:], "}"]))
