"""Chooses the tile that computes a linear layer, by the step's rows, the weight's shape and the card.

The choice changes a step's time, but never the bits of its results (kernels/triton_source.py). The rules are the
fastest on an H200.
"""

import math
from functools import cache
from typing import Final

from gpulease.client.decode.engine.kernel_library import manifest

SM_80: Final = "sm_80"
"""Architecture of the kernels that every later card and the embedded driver can run."""

SM_90A: Final = "sm_90a"
"""Architecture of the kernels that only cards of compute capability 9.0 can run (PTX ISA, `.target`)."""

ENOUGH_PROGRAMS: Final = 96
"""Minimum number of programs of a launch for which the larger of two tiles is chosen. With fewer, too many of 132
multiprocessors would be idle."""

ENOUGH_WAITING_PROGRAMS: Final = 200
"""The same for steps of at most 64 rows. Their programs wait for memory, so each multiprocessor needs several."""


MULTIPROCESSORS: Final = 132
"""Multiprocessors of an H100 or H200. Each runs one program of an `IN_TURNS` kernel at a time."""

IN_TURNS: Final = "_in_turns"
"""Suffix of kernel functions in which each program computes several tiles, one after the other. The results have the
same bits as those of the function without the suffix.
"""

VECTOR: Final = 16
"""Columns that `IN_TURNS` kernels store at once. The number of the result's columns must be a multiple of this."""


def target_of(driver: str, compute_capability: int) -> str:
    """Return the architecture of a session's kernels. The embedded driver has no wgmma."""
    return SM_90A if driver == "cuda" and compute_capability == 90 else SM_80


@cache
def tile_of(function: str, target: str, rows: int, columns: int, parts: int) -> str:
    """Return the name of the kernel that computes `function` fastest.

    Args:
        function: `linear_bf16`, `linear_silu_bf16` and so on.
        target: The card's architecture, SM_80 or SM_90A.
        rows: Rows of the step.
        columns: Columns of the result.
        parts: Number of parts of the result's sums.
    """
    smallest, *others = tiles_of(function, SM_80)
    target_tiles = tiles_of(function, target) if target != SM_80 else []
    # For few rows, or without kernels for this architecture, use the smallest of the tiles that have room for all rows.
    if rows <= _rows(smallest) or not target_tiles:
        return next((name for name in (smallest, *others) if _rows(name) >= rows), others[-1])
    # Otherwise choose among the tiles for the card's architecture, in ascending size.
    small, medium, large = target_tiles
    # Larger tiles read the weights less often, if they still fill the card.
    if rows <= _rows(small):
        return medium if _programs(medium, rows, columns) * parts >= ENOUGH_WAITING_PROGRAMS else small
    in_turns = tiles_of(function + IN_TURNS, target) if columns % VECTOR == 0 else []
    if in_turns and _programs(in_turns[-1], rows, columns) * parts >= ENOUGH_PROGRAMS:
        # In these kernels some warps copy while others multiply. If there are more tiles than multiprocessors, and few
        # are left for the last turn, smaller tiles can be faster. Two turns of a smaller tile are faster than one turn
        # of a tile twice its size, because the second turn begins while the first one ends.
        return min(reversed(in_turns), key=lambda name: _longest_turns(name, rows, columns, parts))
    return large if _programs(large, rows, columns) * parts >= ENOUGH_PROGRAMS else medium


def tiles_of(function: str, target: str) -> list[str]:
    """Return the names of the kernels of a function for an architecture, smaller tiles first."""
    kernels = manifest().kernels
    # A function is compiled for several tiles; the manifest has an entry for each.
    names = [name for name, facts in kernels.items() if facts.kernel == function and facts.target == target]
    return sorted(names, key=lambda name: (_rows(name), kernels[name].constants["BN"]))


def grid_of(name: str, rows: int, columns: int) -> tuple[int, int]:
    """Return the grid of a tile's launch. Programs that read the same weights are adjacent, to share the cache.

    Args:
        name: The tile's kernel.
        rows: Rows of the step.
        columns: Columns of the result.
    """
    tile = manifest().kernels[name].constants
    return -(-rows // tile["BM"]), -(-columns // tile["BN"])


def linear_grid(name: str, rows: int, columns: int, parts: int) -> tuple[int, ...]:
    """Return the grid of a linear's launch.

    There is one program for each tile and part. For `IN_TURNS` kernels there are at most MULTIPROCESSORS programs.
    """
    if "COPIERS" not in manifest().kernels[name].constants:
        return (*grid_of(name, rows, columns), parts)
    return (min(_programs(name, rows, columns) * parts, MULTIPROCESSORS),)


def _longest_turns(name: str, rows: int, columns: int, parts: int) -> tuple[int, bool]:
    """Return the most columns that a multiprocessor computes in all turns, and whether it has only one turn."""
    turns = -(-_programs(name, rows, columns) * parts // MULTIPROCESSORS)
    return turns * manifest().kernels[name].constants["BN"], turns == 1


def _rows(name: str) -> int:
    return manifest().kernels[name].constants["BM"]


def _programs(name: str, rows: int, columns: int) -> int:
    return math.prod(grid_of(name, rows, columns))
