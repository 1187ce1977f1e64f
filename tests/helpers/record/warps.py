"""Launches of single warp operations on rows of operands, a warp for each row (PTX ISA 9.7.9 and 9.7.13)."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from helpers.record.cases import Array, Case, Result
from helpers.record.inputs import Draw, zeros

_ROWS: Final = 40
_LANES: Final = 32
_WORDS: Final = 4
_PREDICATE: Final = "selp.u64 %s, 1, 0, %p;"

# Instructions that set %d, and %s if they yield a predicate, from %a. Some also use %b, %c and the warp's %mask.
_BODIES: Final = {
    **{
        f"shfl.{mode}": f"shfl.sync.{mode}.b32 %r|%p, %x, %b, %c, %mask; cvt.u64.u32 %d, %r; {_PREDICATE}"
        for mode in ("up", "down", "bfly", "idx")
    },
    **{
        f"vote.{mode}": f"setp.ne.u32 %q, %x, 0; vote.sync.{mode}.pred %p, %q, %mask; {_PREDICATE}"
        for mode in ("all", "any", "uni")
    },
    "vote.ballot": "setp.ne.u32 %q, %x, 0; vote.sync.ballot.b32 %r, %q, %mask; cvt.u64.u32 %d, %r;",
    "match.any.b32": "match.any.sync.b32 %r, %x, %mask; cvt.u64.u32 %d, %r;",
    "match.any.b64": "match.any.sync.b64 %r, %a, %mask; cvt.u64.u32 %d, %r;",
    "match.all.b32": f"match.all.sync.b32 %r|%p, %x, %mask; cvt.u64.u32 %d, %r; {_PREDICATE}",
    "match.all.b64": f"match.all.sync.b64 %r|%p, %a, %mask; cvt.u64.u32 %d, %r; {_PREDICATE}",
    **{
        f"redux.{operation}.{kind}": f"redux.sync.{operation}.{kind} %r, %x, %mask; cvt.u64.u32 %d, %r;"
        for operation, kinds in (
            ("add", ("u32", "s32")),
            ("min", ("u32", "s32")),
            ("max", ("u32", "s32")),
            ("and", ("b32",)),
            ("or", ("b32",)),
            ("xor", ("b32",)),
        )
        for kind in kinds
    },
    "elect": f"elect.sync %r|%p, %mask; cvt.u64.u32 %d, %r; {_PREDICATE}",
}


def _ptx() -> str:
    kernels = "".join(_kernel(name.replace(".", "_"), body) for name, body in _BODIES.items())
    return f".version 8.0\n.target sm_90\n.address_size 64\n{kernels}"


def _kernel(name: str, body: str) -> str:
    """Return a kernel in which lanes outside the mask exit. Each other lane has its own words of the rows."""
    return f"""
.visible .entry {name}(.param .u64 rows, .param .u64 results)
{{
    .reg .b64 %a, %d, %s, %from, %to, %word;
    .reg .b32 %r, %x, %b, %c, %mask, %i, %n;
    .reg .pred %p, %q;
    mov.u32 %i, %ctaid.x; mov.u32 %n, %tid.x; mad.lo.u32 %i, %i, {_LANES}, %n;
    ld.param.u64 %from, [rows]; ld.param.u64 %to, [results];
    mad.wide.u32 %from, %i, {8 * _WORDS}, %from; mad.wide.u32 %to, %i, 16, %to;
    ld.global.u64 %a, [%from]; cvt.u32.u64 %x, %a;
    ld.global.u64 %word, [%from+8]; cvt.u32.u64 %b, %word;
    ld.global.u64 %word, [%from+16]; cvt.u32.u64 %c, %word;
    ld.global.u64 %word, [%from+24]; cvt.u32.u64 %mask, %word;
    mov.u64 %d, 0; mov.u64 %s, 0;
    shr.u32 %n, %mask, %n; and.b32 %n, %n, 1; setp.eq.u32 %q, %n, 0;
    @%q ret;
    {body}
    st.global.u64 [%to], %d; st.global.u64 [%to+8], %s;
    ret;
}}
"""


PTX: Final = _ptx()


def warp_cases() -> Iterator[Case]:
    for name in _BODIES:
        rows = _shuffled(name) if name.startswith("shfl") else _agreed(name)
        results = Result(zeros(_ROWS, _LANES, 2, kind="u8"))
        yield Case(f"warp.{name}", ("warps",), name.replace(".", "_"), (_ROWS, 1, 1), (_LANES, 1, 1), (rows, results))


def _shuffled(name: str) -> Array:
    """Return rows for all lanes.

    The first ones have all widths that are powers of two, with their clamps; the others have any bits.
    """
    d = Draw(name)
    rows = zeros(_ROWS, _LANES, _WORDS, kind="u8")
    rows[..., 0] = np.arange(_ROWS * _LANES).reshape(_ROWS, _LANES) + 7
    rows[..., 1] = d.integers(_ROWS, 1, low=0, high=40)
    rows[::3, :, 1] = d.integers(len(rows[::3]), _LANES, low=0, high=1 << 31)
    clamp = 0 if name == "shfl.up" else 31
    widths = 1 << np.arange(6)
    rows[:18, :, 2] = np.tile((32 - widths) << 8 | clamp, 3)[:, None]
    rows[18:, :, 2] = d.integers(_ROWS - 18, 1, low=0, high=1 << 13)
    rows[..., 3] = 0xFFFFFFFF
    return rows


def _agreed(name: str) -> Array:
    """Return rows with masks of all kinds. Values are few, so that lanes agree; for reductions they are any bits."""
    d = Draw(name)
    rows = zeros(_ROWS, _LANES, _WORDS, kind="u8")
    if name.startswith("redux"):
        rows[..., 0] = d.bits(_ROWS, _LANES)
    else:
        rows[..., 0] = d.integers(_ROWS, _LANES, low=0, high=3, kind="u8") * np.uint64(0x1_0000_0001)
        rows[::2, :, 0] = d.integers(len(rows[::2]), 1, low=0, high=2)
        rows[1::8, :5, 0] += np.uint64(1 << 40)
    masks = d.bits(_ROWS) | np.uint32(1) << d.integers(_ROWS, low=0, high=32, kind="u4")
    masks[:6] = (0xFFFFFFFF, 1, 1 << 31, 0xFFFF0000, 0x55555555, 0x7FFFFFFF)
    rows[..., 3] = masks[:, None]
    return rows
