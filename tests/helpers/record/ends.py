"""Launches that fail or print, and the reports of the card and the embedded driver about each."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from gpulease.daemon.drivers.interface import Context, KernelFault
from helpers.record.cases import Case, Result, image, run
from helpers.record.inputs import zeros

_FAR_AWAY: Final = np.uint64(1 << 40).tobytes()

TRAP: Final = """
.version 8.0
.target sm_75
.address_size 64
.visible .entry stop(.param .u64 x) { .reg .pred %p; .reg .b64 %x; ld.param.u64 %x, [x]; trap; st.global.u64 [%x], %x; }
"""


@dataclass(frozen=True, slots=True)
class End:
    """A launch, and how it ends.

    Attributes:
        case: The launch.
        card: Words of the card's error; "" if the launch succeeds.
        ours: Words of the embedded driver's error.
    """

    case: Case
    card: str
    ours: str


def _case(image_name: str, kernel: str, threads: int, *arguments: Result | bytes) -> Case:
    return Case(f"end.{kernel}", (image_name,), kernel, (1, 1, 1), (threads, 1, 1), arguments)


def _word() -> Result:
    return Result(zeros(64))


ILLEGAL: Final = "an illegal memory access was encountered"

ENDS: Final = {
    end.case.kernel: end
    for end in (
        End(_case("faults.sm75", "stray_store", 1, _word(), _FAR_AWAY), ILLEGAL, "illegal address"),
        End(_case("faults.sm75", "stray_load", 1, _word(), _FAR_AWAY), ILLEGAL, "illegal address"),
        End(_case("faults.sm75", "misaligned", 1, _word()), "misaligned address", "misaligned"),
        End(
            _case("calls.sm75", "asserted", 8, np.int32(5).tobytes()),
            "device-side assert triggered",
            "assertion failed",
        ),
        End(_case("calls.sm75", "overflow", 1, _word()), ILLEGAL, "stack overflow"),
        End(_case("trap", "stop", 1, _word()), "unspecified launch failure", "trap"),
        End(_case("calls.sm75", "print", 3, np.int32(-1).tobytes()), "", ""),
    )
}


def ptx_of(name: str) -> bytes:
    return TRAP.encode() if name == "trap" else image(name)


def outcome(context: Context, end: End) -> str:
    """Return the error with which the launch ends; "" if it succeeds."""
    module = context.module_load(ptx_of(end.case.images[0]))
    try:
        run(context, module, end.case)
        context.sync()
    except KernelFault as fault:
        return str(fault)
    return ""
