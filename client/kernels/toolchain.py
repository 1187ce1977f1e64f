"""Facts of all compilers: the architecture they compile for, and the errors of one that is missing or says no."""

import re
from typing import Any, Final

from gpulease.client.errors import InvalidRequest, LoadFailed, Unsupported
from gpulease.client.texts import quoted
from gpulease.protocol import Failure, Status

DEFAULT_ARCH: Final = 80
"""Compute capability compiled for unless a caller says another: every card since 2020 and the embedded driver take it,
as PTX runs on newer cards."""

MIN_ARCH: Final = 75
"""Oldest capability that NVRTC 13 compiles for."""

MAX_ARCH: Final = 121
"""Newest capability of NVRTC 13.0."""

_LINE: Final = re.compile(r"\((\d+)\): (?:catastrophic )?error|\bat (\d+):\d+:|^File \".*\", line (\d+):", re.MULTILINE)


def checked_arch(arch: Any) -> int:
    """Return the capability to compile for; None is DEFAULT_ARCH. Raises InvalidRequest for anything but a number."""
    if arch is None:
        return DEFAULT_ARCH
    if type(arch) is not int or not MIN_ARCH <= arch <= MAX_ARCH:
        raise InvalidRequest(
            f"arch {quoted(arch)} is not a compute capability from {MIN_ARCH} to {MAX_ARCH}",
            "Give the number alone, 90 for a card of compute capability 9.0",
        )
    return arch


def missing(tool: str, extra: str) -> Unsupported:
    """Make the error of a compiler that is not installed: its name, and the extra that has it."""
    return Unsupported(f"{tool} is not installed", f"In gpulease's folder: pip install '.[{extra}]'")


def compile_error(what: str, log: str, first: str = "") -> LoadFailed:
    """Make the error of a source that does not compile.

    Args:
        what: The source.
        log: All that the compiler said.
        first: What the message says of it; the log's first error, or its last line, if "".
    """
    log = log.replace("\0", "").strip()
    found = _LINE.search(log)
    line = int(found[1] or found[2] or found[3]) if found else 0
    first = first or next((text for text in log.splitlines() if "error" in text), log.rpartition("\n")[2])
    message = f"{what} does not compile: {first.strip()}"
    return LoadFailed(message, "", Failure(Status.LOAD_FAILED, message, log=log, line=line))
