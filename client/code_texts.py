"""Recognises the kind of code that a program passes: PTX, a binary, CUDA C or, by mistake, the path of a file."""

import os
import re
from typing import Any, Final

from gpulease.client.errors import InvalidRequest
from gpulease.client.memory_views import readable_bytes
from gpulease.client.texts import quoted, utf8

_BINARY: Final = (b"\x7fELF", b"\x50\xed\x55\xba")
"""The first bytes of a cubin and of a fat binary (ELF's magic; `fatBinaryHeader` in CUDA's fatbinary_section.h)."""

# Every PTX module begins with this directive, after comments (PTX ISA, ".version").
_PTX: Final = re.compile(rb"^\s*\.version\s", re.MULTILINE)

# These words declare kernels and their helpers in CUDA C. PTX has neither.
_CUDA_C: Final = re.compile(rb"\b__(?:global|device)__\b")

# A path is one line without the marks of code, with one of the usual endings.
_PATH: Final = re.compile(r"[^\n;{}]+\.(?:ptx|cubin|fatbin|cu|cuh|c|cpp|txt)", re.IGNORECASE)


def image_of(image: Any, operation: str) -> bytes:
    """Return the bytes of PTX text or a binary. Raises InvalidRequest for a path, CUDA C, and other types."""
    _check_path(image, operation, 'Give what is in the file: pathlib.Path("...").read_bytes()')
    code = utf8(image, operation) if isinstance(image, str) else bytes(readable_bytes(image, operation))
    if not code.startswith(_BINARY) and _CUDA_C.search(code) and not _PTX.search(code):
        raise InvalidRequest(
            f"{operation}: the image must be PTX or a binary, not CUDA C", "Compile it: session.compile(source)"
        )
    return code


def cuda_c_of(source: Any, operation: str) -> str:
    """Return the text of a CUDA C source. Raises InvalidRequest for a path, PTX, and other types."""
    _check_path(source, operation, 'Give what is in the file: pathlib.Path("...").read_text()')
    if not isinstance(source, str):
        raise InvalidRequest(f"{operation}: the source must be a string of CUDA C, not {quoted(source)}")
    if _PTX.search(utf8(source, operation)) and not _CUDA_C.search(source.encode()):
        raise InvalidRequest(
            f"{operation}: the source must be CUDA C, not PTX", "Load it as it is: session.module_load(image)"
        )
    return source


def _check_path(path: Any, operation: str, hint: str) -> None:
    # Never open a path here: on a shared host, the caller must decide what is read.
    if isinstance(path, os.PathLike) or (isinstance(path, str) and _PATH.fullmatch(path.strip())):
        raise InvalidRequest(f"{operation}: {quoted(path)} is the path of a file", hint)
