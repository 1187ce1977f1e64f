"""Code shared by all compilers: the target architecture, and the errors for a missing compiler or an invalid source."""

import re
from typing import Any, Final

from gpulease.client.errors import InvalidRequest, LoadFailed, Unsupported
from gpulease.client.texts import quoted
from gpulease.protocol import Failure, Status

DEFAULT_ARCH: Final = 80
"""Compute capability to compile for by default. Every card since 2020 and the embedded driver can run it, because PTX
also runs on newer cards."""

MIN_ARCH: Final = 75
"""Oldest compute capability that NVRTC 13 compiles for."""

MAX_ARCH: Final = 121
"""Newest compute capability that NVRTC 13.0 compiles for."""

_PTX_OF_CUDA_12: Final = (80, 81, 82, 83, 84, 85, 85, 86, 87, 88)
"""The newest PTX versions that drivers of CUDA 12.0 to 12.9 accept, such as 84 for 8.4. For CUDA 13.x the version is
9.x (PTX ISA, "Release Notes", "PTX Release History")."""

_VERSION: Final = re.compile(r"^\s*\.version\s+(\d+)\.(\d+)", re.MULTILINE)

_LINE: Final = re.compile(r"\((\d+)\): (?:catastrophic )?error|\bat (\d+):\d+:|^File \".*\", line (\d+):", re.MULTILINE)


def checked_arch(arch: Any) -> int:
    """Return the compute capability to compile for; DEFAULT_ARCH for None. Raises InvalidRequest."""
    if arch is None:
        return DEFAULT_ARCH
    if type(arch) is not int or not MIN_ARCH <= arch <= MAX_ARCH:
        raise InvalidRequest(
            f"arch must be a compute capability from {MIN_ARCH} to {MAX_ARCH}, not {quoted(arch)}",
            "Give the number alone, 90 for a card of compute capability 9.0",
        )
    return arch


def ptx_version_of(cuda_version: int) -> int | None:
    """Return the newest PTX version that a driver accepts, as 90 for 9.0; None if unknown.

    Args:
        cuda_version: The driver's CUDA version, 13000 for 13.0; 0 if unknown.
    """
    # CUDA's number is 1000 times the major version plus 10 times the minor version.
    major, minor = cuda_version // 1000, cuda_version % 1000 // 10
    if major == 12:
        return _PTX_OF_CUDA_12[min(minor, len(_PTX_OF_CUDA_12) - 1)]
    return 90 + minor if major == 13 else None


def checked_version(image: bytes | str, cuda_version: int) -> bytes | str:
    """Return the image if the session's driver accepts its PTX version. Raises LoadFailed if the version is too new.

    Args:
        image: PTX text, or a cubin, which is returned unchecked.
        cuda_version: The driver's CUDA version, 13000 for 13.0; 0 if unknown.
    """
    most = ptx_version_of(cuda_version)
    # PTX text begins with the directive `.version`; a cubin has none.
    match = _VERSION.search(image if isinstance(image, str) else image[:4096].decode(errors="replace"))
    if most is None or match is None or 10 * int(match[1]) + int(match[2]) <= most:
        return image
    message = (
        f"the compiler writes PTX {match[1]}.{match[2]}, but the card's driver supports at most "
        f"{most // 10}.{most % 10}"
    )
    cuda = f"{cuda_version // 1000}.{cuda_version % 1000 // 10}"
    raise LoadFailed(message, f"Install the compiler's packages for CUDA {cuda}", Failure(Status.LOAD_FAILED, message))


def missing(tool: str, extra: str) -> Unsupported:
    """Return the error for a compiler that is not installed.

    Args:
        tool: The compiler's name.
        extra: The extra that installs the compiler.
    """
    return Unsupported(f"{tool} is not installed", f"In gpulease's folder: pip install '.[{extra}]'")


def compile_error(subject: str, log: str, first: str = "") -> LoadFailed:
    """Return the error for a source that does not compile.

    Args:
        subject: The source, for the message.
        log: The compiler's whole output.
        first: The summary for the message; if "", the log's first error, or its last line.
    """
    log = log.replace("\0", "").strip()
    # NVRTC, Triton and numba each write line numbers in a different form.
    match = _LINE.search(log)
    line = int(match[1] or match[2] or match[3]) if match else 0
    first = first or next((text for text in log.splitlines() if "error" in text), log.rpartition("\n")[2])
    message = f"{subject} does not compile: {first.strip()}"
    return LoadFailed(message, "", Failure(Status.LOAD_FAILED, message, log=log, line=line))
