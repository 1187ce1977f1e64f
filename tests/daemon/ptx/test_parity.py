"""Bit for bit what a real card gave, for every instruction it was asked that the ISA defines exactly."""

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from gpulease.daemon.ptx import image
from gpulease.daemon.ptx.context import CpuContext
from helpers.parity import Spelled, results_of, spelled_instructions
from helpers.rows import RESULT_BYTES, ROW_BYTES, rows_bytes, rows_ptx

pytestmark = pytest.mark.exhaustive

PARITY: Final = Path(__file__).parents[3] / "vectors" / "gpu" / "parity"
RECORDED: Final = PARITY / "instructions.json"
OPEN: Final = PARITY / "open_differences.txt"

# How many instructions share a kernel.
TOGETHER: Final = 64


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORDED.read_text())
    return record


def run(context: CpuContext, group: Sequence[Spelled]) -> list[list[str]]:
    """What the embedded driver gives for each of some instructions with the same operands and result."""
    kind, row_count = group[0].result, len(group[0].rows())
    size = row_count * RESULT_BYTES * len(group)
    rows, results = context.mem_alloc(row_count * ROW_BYTES), context.mem_alloc(size)
    context.mem_write(rows, memoryview(rows_bytes(group[0].rows())))
    text = rows_ptx([spelled.body for spelled in group], group[0].operands, kind)
    module = context.module_load(text.encode())
    params = rows.to_bytes(8, "little") + results.to_bytes(8, "little")
    context.launch(module.kernels["row"], (1, 1, 1), (row_count, 1, 1), 0, params, 1)
    out = bytearray(size)
    context.mem_read(results, memoryview(out))
    for address in (rows, results):
        context.mem_free(address)
    context.module_unload(module)
    found = results_of(bytes(out), kind)
    return [found[number :: len(group)] for number in range(len(group))]


def groups(some: Sequence[Spelled]) -> Iterator[list[Spelled]]:
    """Instructions that can share a kernel, and not too many for it to be optimised."""

    def types(spelled: Spelled) -> tuple[tuple[str, ...], str]:
        return spelled.operands, spelled.result

    for _, alike in itertools.groupby(sorted(some, key=types), key=types):
        listed = list(alike)
        yield from (listed[k : k + TOGETHER] for k in range(0, len(listed), TOGETHER))


def differing_rows(spelled: Spelled, given: list[str], wanted: list[str]) -> list[str]:
    """Where the embedded driver and the card do not agree, in words."""
    return [
        f"{spelled.text} {[f'{value:x}' for value in row]}: {got}, the card gave {expected}"
        for row, got, expected in zip(spelled.rows(), given, wanted, strict=True)
        if got != expected
    ]


def opcode_of(spelled: Spelled) -> str:
    """What the instruction is called."""
    return spelled.text.partition(".")[0]


def is_exact(spelled: Spelled) -> bool:
    """Whether the ISA leaves no room: approximations have a bound of error instead."""
    return not {"approx", "full"} & set(spelled.text.split("."))


BY_OPCODE: Final = {
    opcode: list(group)
    for opcode, group in itertools.groupby(sorted(spelled_instructions(), key=opcode_of), key=opcode_of)
}


@pytest.fixture(params=["first code", "optimised"])
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled as for their first launches, or with all optimizations."""
    monkeypatch.setattr(image, "MAX_FIRST_CODE_THREADS", 0 if request.param == "optimised" else sys.maxsize)
    # Optimised code that is kept would be taken for the first.
    monkeypatch.setenv("GPULEASE_CPU_CACHE", "")
    image.forget_code()


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("opcode", BY_OPCODE)
def test_every_form_gives_what_the_card_gave(resting: CpuContext, recorded: dict[str, Any], opcode: str) -> None:
    """But for the forms known to differ, which must be exactly those: one that is mended leaves the list."""
    known = {line for line in OPEN.read_text().split("\n") if line.startswith(opcode + ".")}
    differing: dict[str, list[str]] = {}
    results = recorded["results"]
    for group in groups([spelled for spelled in BY_OPCODE[opcode] if spelled.text in results and is_exact(spelled)]):
        for spelled, given in zip(group, run(resting, group), strict=True):
            if rows := differing_rows(spelled, given, results[spelled.text]["values"].split()):
                differing[spelled.text] = rows
    surprises = [row for text, rows in differing.items() if text not in known for row in rows]
    assert not surprises, "\n".join(surprises[:20])
    assert known <= set(differing), f"no longer different: {sorted(known - set(differing))}"
