"""Types of kernels' parameters from PTX text, and no types from text that can't be followed."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpulease.daemon.drivers.interface import Parameter
from gpulease.daemon.session.modules import parameter_types
from gpulease.protocol.opcodes import ParameterType as T

VECTORS = Path(__file__).parents[3] / "vectors" / "gpu"


@dataclass
class Listed:
    """A kernel as a driver lists it."""

    parameters: tuple[Parameter, ...]


def listed(**counts: int) -> Any:
    return {name: Listed((Parameter(0, 4),) * count) for name, count in counts.items()}


def told(text: str, **counts: int) -> list[list[T]]:
    return [[T(byte) for byte in types] for types in parameter_types(text.encode(), listed(**counts))]


def test_what_nvcc_writes() -> None:
    text = (VECTORS / "transform.sm80.ptx").read_text()
    assert told(text, scale=3, bias=3) == [[T.U64, T.U32, T.F32], [T.U64, T.U32, T.F32]]


def test_what_triton_writes() -> None:
    text = (VECTORS / "triton.add.sm80.ptx").read_text()
    assert told(text, add=6) == [[T.POINTER, T.POINTER, T.POINTER, T.U32, T.POINTER, T.POINTER]]


@pytest.mark.parametrize(
    ("parameter", "kind"),
    [
        (".param .s64 a", T.S64),
        (".param .align 8 .b8 a[16]", T.UNTOLD),
        (".param .v4 .f32 a", T.UNTOLD),
        (".param .b32 a", T.B32),
        (".param .u64 .ptr a", T.POINTER),
        (".param .made_up a", T.UNTOLD),
        ("/* .param .u32 a */ .param .f64 a // .u32", T.F64),
    ],
)
def test_a_parameter(parameter: str, kind: T) -> None:
    assert told(f".visible .entry k$1(\n{parameter}\n)\n{{}}", **{"k$1": 1}) == [[kind]]


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".entry other(.param .u32 a)",
        ".entry k(.param .u32 a, .param .u32 b)",
        "// .entry k(.param .u32 a)",
        "\0.entry k(.param .u32 a)",
    ],
)
def test_a_declaration_that_does_not_match_gives_no_types(text: str) -> None:
    assert told(text, k=1) == [[]]


def test_machine_code_gives_no_types() -> None:
    assert parameter_types(b"\x7fELF .entry k(.param .u32 a)", listed(k=1)) == (b"",)


@pytest.mark.parametrize("piece", ["/*", ".entry k(", ".entry ", ".entry k" + " ", "(", "//", ".entry " + "k" * 50])
def test_hostile_text_takes_time_in_proportion(piece: str) -> None:
    """A hundred times the text takes no more than a thousand times the time."""

    def seconds(size: int) -> float:
        text = (piece * (size // len(piece))).encode()
        started = time.process_time()
        for _ in range(3):
            parameter_types(text, listed(k=1))
        return time.process_time() - started

    assert seconds(1_000_000) < 1000 * max(seconds(10_000), 1e-3)
