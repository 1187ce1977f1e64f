"""Kernels that run instructions on rows of operands, one row for each thread, and store every result.

Many instructions share one kernel, because compiling a module takes longer than running an instruction.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final

OPERAND_NAMES: Final = "abce"
ROW_BYTES: Final = 32
RESULT_BYTES: Final = 8

# The register types of some types. PTX has no registers of 8 bits, and few types for small floats.
_PACKED: Final = {"f16": "b16", "bf16": "b16", **dict.fromkeys(("f16x2", "bf16x2", "u16x2", "s16x2"), "b32")}
_REGISTERS: Final = {"u8": "b16", "s8": "b16", "b8": "b16", **_PACKED}

# An instruction in a kernel, the types of its operands and of its result, and a function that returns the right result.
Case = tuple[str, tuple[str, ...], str, Callable[..., int]]

# Instructions with the same types: their bodies, the types of their operands, and the type of their results.
Group = tuple[Sequence[str], Sequence[str], str]


def alike(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """Return groups of cases that can share a kernel, because their operands and results have the same types."""

    def types(case: Case) -> str:
        return f"{case[2]} of {', '.join(case[1])}"

    return {name: list(group) for name, group in itertools.groupby(sorted(cases, key=types), key=types)}


def rows_ptx(bodies: Sequence[str], operands: Sequence[str], result: str, module: str = "") -> str:
    """Return a module with a kernel `row` that runs each body separately on %a, %b, %c, %e of each row.

    The kernel stores each body's result %d (a predicate as 0 or 1) in the bodies' order. A body may use the words %s
    and %t, the pointer %w, and the predicates %x and %y. %p points to the row, %q to the row's first result, and %i is
    the row's number. `module` is placed before the kernel.
    """
    return mixed_rows_ptx([(bodies, operands, result)], 0, module)


def mixed_rows_ptx(groups: Sequence[Group], row_count: int, module: str = "") -> str:
    """Return a module like that of `rows_ptx`, for bodies of different types.

    Each group has `row_count` rows, which follow the rows of the group before it. A row's results contain those of all
    groups.
    """
    first, parts = 0, []
    for number, (bodies, operands, result) in enumerate(groups):
        parts.append(_group(bodies, operands, result, row_count * ROW_BYTES * number, RESULT_BYTES * first))
        first += len(bodies)
    kept = "\n".join(parts)
    return f""".version 8.0
.target sm_80
.address_size 64
{module}
.visible .entry row(.param .u64 rows, .param .u64 results)
{{
    .reg .b32 %i, %n;
    .reg .b64 %p, %q;
    mov.u32 %i, %tid.x;
    ld.param.u64 %p, [rows];
    ld.param.u64 %q, [results];
    mad.wide.u32 %p, %i, {ROW_BYTES}, %p;
    mad.wide.u32 %q, %i, {RESULT_BYTES * first}, %q;
{kept}
    ret;
}}
"""


def _group(bodies: Sequence[str], operands: Sequence[str], result: str, rows_at: int, results_at: int) -> str:
    pairs = list(zip(OPERAND_NAMES[: len(operands)], operands, strict=True))
    declared = "\n    ".join(f".reg .{_REGISTERS.get(kind, kind)} %{name};" for name, kind in pairs)
    loads = "\n    ".join(_load(name, kind, rows_at + RESULT_BYTES * k) for k, (name, kind) in enumerate(pairs))
    kept = "\n".join(_kept(body, result, results_at + RESULT_BYTES * k) for k, body in enumerate(bodies))
    return f"    {{\n    {declared}\n    {loads}\n{kept}\n    }}"


def _load(name: str, kind: str, offset: int) -> str:
    if kind == "pred":
        return f"ld.global.u32 %n, [%p+{offset}];\n    setp.ne.u32 %{name}, %n, 0;"
    return f"ld.global.{_PACKED.get(kind, kind)} %{name}, [%p+{offset}];"


def _kept(body: str, result: str, offset: int) -> str:
    store = f"st.global.{_PACKED.get(result, result)} [%q+{offset}], %d;"
    if result == "pred":
        store = f"selp.u32 %s, 1, 0, %d; st.global.u32 [%q+{offset}], %s;"
    return f"""    {{
        .reg .b32 %s, %t; .reg .b64 %w; .reg .pred %x, %y; .reg .{_REGISTERS.get(result, result)} %d;
        {body}
        {store}
    }}"""


def rows_bytes(rows: Sequence[Sequence[int]]) -> bytes:
    """Return rows as bytes in memory: each has four little-endian fields of 8 bytes."""
    return b"".join(b"".join(value.to_bytes(8, "little") for value in (*row, 0, 0, 0, 0)[:4]) for row in rows)
