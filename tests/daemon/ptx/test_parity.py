"""Bit for bit what a real card gave, for every instruction it was asked that the ISA defines exactly."""

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from gpulease.daemon.ptx import image
from gpulease.daemon.ptx.context import CpuContext
from helpers.parity import Spelled, results_of, spelled_instructions
from helpers.rows import RESULT_BYTES, mixed_rows_ptx, rows_bytes

pytestmark = pytest.mark.exhaustive

PARITY: Final = Path(__file__).parents[3] / "vectors" / "gpu" / "parity"
RECORDED: Final = PARITY / "instructions.json"
OPEN: Final = PARITY / "open_differences.txt"

# How many instructions share a kernel.
TOGETHER: Final = 16


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORDED.read_text())
    return record


def run(context: CpuContext, some: Sequence[Spelled]) -> list[list[str]]:
    """What the embedded driver gives for each of some instructions, which come in groups of the same types."""
    groups = [list(group) for _, group in itertools.groupby(some, key=types_of)]
    texts = [([spelled.body for spelled in group], *types_of(group[0])) for group in groups]
    row_count = len(some[0].rows())
    rows = b"".join(rows_bytes(group[0].rows()) for group in groups)
    out = bytearray(row_count * RESULT_BYTES * len(some))
    rows_at, results_at = context.mem_alloc(len(rows)), context.mem_alloc(len(out))
    context.mem_write(rows_at, memoryview(rows))
    module = context.module_load(mixed_rows_ptx(texts, row_count).encode())
    params = rows_at.to_bytes(8, "little") + results_at.to_bytes(8, "little")
    context.launch(module.kernels["row"], (1, 1, 1), (row_count, 1, 1), 0, params, 1)
    context.mem_read(results_at, memoryview(out))
    for address in (rows_at, results_at):
        context.mem_free(address)
    context.module_unload(module)
    given = bytes(out)
    return [results_of(column_of(given, number, len(some)), spelled.result) for number, spelled in enumerate(some)]


def column_of(results: bytes, number: int, count: int) -> bytes:
    """One instruction's results, of those of `count` instructions row by row."""
    starts = range(number * RESULT_BYTES, len(results), count * RESULT_BYTES)
    return b"".join(results[start : start + RESULT_BYTES] for start in starts)


def types_of(spelled: Spelled) -> tuple[tuple[str, ...], str]:
    return spelled.operands, spelled.result


def together(some: Sequence[Spelled]) -> Iterator[list[Spelled]]:
    """Instructions that share a kernel, those of the same types in a row, and not too many for it to be optimised."""
    ordered = sorted(some, key=types_of)
    yield from (ordered[k : k + TOGETHER] for k in range(0, len(ordered), TOGETHER))


def representatives(some: Iterable[Spelled]) -> list[Spelled]:
    """The instructions of one opcode without those of which each type and modifier was in an earlier one."""
    seen: set[str] = set()
    chosen = []
    for spelled in some:
        parts = set(spelled.text.split("."))
        if not parts <= seen:
            chosen.append(spelled)
            seen |= parts
    return chosen


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


@pytest.fixture
def compile_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No code that is kept is taken: it could be the other code of a kernel."""
    monkeypatch.setenv("GPULEASE_CPU_CACHE", "")
    image.forget_code()


def differing(context: CpuContext, some: Sequence[Spelled], results: Mapping[str, Any]) -> dict[str, list[str]]:
    """The instructions for which the embedded driver and the card differ, each with its rows."""
    found: dict[str, list[str]] = {}
    for group in together(some):
        for spelled, given in zip(group, run(context, group), strict=True):
            if rows := differing_rows(spelled, given, results[spelled.text]["values"].split()):
                found[spelled.text] = rows
    return found


def exact_of(opcode: str, results: Mapping[str, Any]) -> list[Spelled]:
    return [spelled for spelled in BY_OPCODE[opcode] if spelled.text in results and is_exact(spelled)]


def surprises_of(differences: Mapping[str, list[str]], known: Collection[str]) -> str:
    rows = [row for text, rows in differences.items() if text not in known for row in rows]
    return "\n".join(rows[:20])


def known_of(opcode: str) -> set[str]:
    return {line for line in OPEN.read_text().split("\n") if line.startswith(opcode + ".")}


@pytest.mark.usefixtures("compile_anew", "optimised")
@pytest.mark.parametrize("opcode", BY_OPCODE)
def test_every_form_gives_what_the_card_gave(resting: CpuContext, recorded: dict[str, Any], opcode: str) -> None:
    """But for the forms known to differ, which must be exactly those: one that is mended leaves the list."""
    known = known_of(opcode)
    differences = differing(resting, exact_of(opcode, recorded["results"]), recorded["results"])
    assert not (surprises := surprises_of(differences, known)), surprises
    assert known <= set(differences), f"no longer different: {sorted(known - set(differences))}"


@pytest.mark.usefixtures("compile_anew", "first_code")
@pytest.mark.parametrize("opcode", BY_OPCODE)
def test_first_code_gives_the_same(resting: CpuContext, recorded: dict[str, Any], opcode: str) -> None:
    """Both codes come from the same IR, so one form with each type and modifier shows what only the first code does."""
    some = representatives(exact_of(opcode, recorded["results"]))
    differences = differing(resting, some, recorded["results"])
    assert not (surprises := surprises_of(differences, known_of(opcode))), surprises
