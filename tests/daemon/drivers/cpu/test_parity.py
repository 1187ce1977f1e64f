"""Bit for bit what a real card gave, for every instruction it was asked that the ISA defines exactly."""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from gpulease.daemon.drivers.cpu.context import CpuContext
from helpers.parity import (
    RESULT_BYTES,
    ROW_BYTES,
    ROWS,
    Spelled,
    instructions_ptx,
    results_of,
    rows_bytes,
    spelled_instructions,
)

PARITY: Final = Path(__file__).parents[4] / "vectors" / "gpu" / "parity"
RECORDED: Final = PARITY / "instructions.json"
OPEN: Final = PARITY / "open_differences.txt"
BATCH: Final = 16


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORDED.read_text())
    return record


def run(context: CpuContext, alike: list[Spelled]) -> list[list[str]]:
    """What the embedded driver gives for each of some instructions of the same types."""
    size = ROWS * RESULT_BYTES
    rows = context.mem_alloc(ROWS * ROW_BYTES)
    results = context.mem_alloc(len(alike) * size)
    context.mem_write(rows, memoryview(rows_bytes(alike[0].rows())))
    module = context.module_load(instructions_ptx(alike).encode())
    params = rows.to_bytes(8, "little") + results.to_bytes(8, "little")
    context.launch(module.kernels["row"], (1, 1, 1), (ROWS, 1, 1), 0, params, 1)
    out = bytearray(len(alike) * size)
    context.mem_read(results, memoryview(out))
    for address in (rows, results):
        context.mem_free(address)
    context.module_unload(module)
    return [results_of(bytes(out[at : at + size]), alike[0].result) for at in range(0, len(out), size)]


def differing_rows(spelled: Spelled, ours: list[str], wanted: list[str]) -> list[str]:
    """Where the embedded driver and the card do not agree, in words."""
    return [
        f"{spelled.text} {[f'{value:x}' for value in row]}: {got}, the card gave {expected}"
        for row, got, expected in zip(spelled.rows(), ours, wanted, strict=True)
        if got != expected
    ]


def in_batches(instructions: list[Spelled]) -> Iterator[list[Spelled]]:
    """Those of the same types together: a kernel for each of them would take most of this file's time."""
    by_types: dict[tuple[tuple[str, ...], str], list[Spelled]] = defaultdict(list)
    for spelled in instructions:
        by_types[spelled.operands, spelled.result].append(spelled)
    for alike in by_types.values():
        for first in range(0, len(alike), BATCH):
            yield alike[first : first + BATCH]


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


@pytest.mark.parametrize("opcode", BY_OPCODE)
def test_every_form_gives_what_the_card_gave(resting: CpuContext, recorded: dict[str, Any], opcode: str) -> None:
    """But for the forms known to differ, which must be exactly those: one that is mended leaves the list."""
    known = {line for line in OPEN.read_text().split("\n") if line.startswith(opcode + ".")}
    differing: dict[str, list[str]] = {}
    results = recorded["results"]
    for alike in in_batches(
        [spelled for spelled in BY_OPCODE[opcode] if spelled.text in results and is_exact(spelled)]
    ):
        for spelled, ours in zip(alike, run(resting, alike), strict=True):
            if rows := differing_rows(spelled, ours, results[spelled.text]["values"].split()):
                differing[spelled.text] = rows
    surprises = [row for text, rows in differing.items() if text not in known for row in rows]
    assert not surprises, "\n".join(surprises[:20])
    assert known <= set(differing), f"no longer different: {sorted(known - set(differing))}"
