"""Which elements of a matrix each lane of a warp holds (PTX ISA section 9.7.15.5, the figures of `mma`).

All shapes follow one rule. A matrix is cut into tiles of 8 rows (of B: columns) by 4 words; lane 4g + t has word t of
row g in each tile. Tiles are numbered downwards first in A, along the columns of B. Of C a lane has the two elements
2t and 2t + 1 of row g in tiles of 8 by 8. `wmma` leaves its fragments' layout open: they have the same here.
"""

import re
from dataclasses import dataclass

_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_EIGHT = 8
_LANES_OF_ROW = 4

# Bits of an element.
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "f32": 32, "s32": 32, "f64": 64}


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the matrices of one shape and type divide.

    Attributes:
        m: Rows of A and C.
        n: Columns of B and C.
        k: Columns of A, rows of B.
        per_word: Elements in a word of A and B; words are 4 bytes, of f64 8.
    """

    m: int
    n: int
    k: int
    per_word: int

    @property
    def rows(self) -> int:
        """Eights of rows of A and C."""
        return self.m // _EIGHT

    @property
    def columns(self) -> int:
        """Eights of columns of B and C."""
        return self.n // _EIGHT

    @property
    def chunks(self) -> int:
        """Words that a lane has of a row of A, or a column of B."""
        return self.k // (_LANES_OF_ROW * self.per_word)

    @property
    def a_words(self) -> int:
        """A lane's words of A."""
        return self.rows * self.chunks

    @property
    def b_words(self) -> int:
        """A lane's words of B."""
        return self.columns * self.chunks

    @property
    def results(self) -> int:
        """A lane's elements of C."""
        return 2 * self.rows * self.columns

    def elements(self, part: str) -> list[tuple[int, int]]:
        """A lane's elements of "a", "b" or "c" in order, as distances from row (of B: column) g and word t.

        The second is across the row (of B: down the column), in elements.
        """
        if part == "c":
            return [
                (_EIGHT * (n // 2 % self.rows), n % 2 + _EIGHT * (n // (2 * self.rows))) for n in range(self.results)
            ]
        width = _LANES_OF_ROW * self.per_word
        found = []
        for word in range(self.a_words if part == "a" else self.b_words):
            if part == "a":
                chunk, tile = divmod(word, self.rows)
            else:
                tile, chunk = divmod(word, self.chunks)
            found += [(_EIGHT * tile, width * chunk + n) for n in range(self.per_word)]
        return found


def tiles_of(shape: str, kind: str) -> Tiles:
    """The division of `m16n8k16` and its like for an element type of A and B; where only C matters, for its own."""
    found = _SHAPE.fullmatch(shape)
    assert found is not None, shape
    m, n, k = map(int, found.groups())
    return Tiles(m, n, k, max(1, 32 // BITS[kind]))
