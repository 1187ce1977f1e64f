"""Joins two PTX texts: a kernel's, and that of the functions that the kernel calls."""

import re
from typing import Final

_HEADER: Final = re.compile(r"\.version\s+(\d+)\.(\d+)\s+\.target[^\n]*\s+\.address_size\s+\d+")

_RETURNED: Final = r"\.func\s*(?:\([^)]*\)\s*)?"
"""Matches the beginning of a function, with its return parameter in parentheses if it has one."""

_DECLARED: Final = re.compile(rf"\.extern\s+{_RETURNED}([\w$]+)\s*(?:\([^)]*\)\s*)?(?:\.noreturn\s*)?;")

_DEFINED: Final = re.compile(rf"\.visible\s+{_RETURNED}([\w$]+)\s*\(")

_OF_THE_DRIVER: Final = frozenset({"vprintf", "malloc", "free", "__assertfail"})
"""Functions that every CUDA driver provides (CUDA C++ Programming Guide, "System Calls" of the PTX interoperability
guide)."""


def joined(kernel: str, functions: str) -> str:
    """Put the functions of one text before the kernel of another, under the newer of the two PTX versions.

    Args:
        kernel: PTX of a kernel that declares the functions as `.extern`.
        functions: PTX for the same target that defines them.
    """
    # Remove the kernel's declarations, because a text must not both declare a function as `.extern` and define it.
    declared = set(_DECLARED.findall(functions)) | set(_DEFINED.findall(functions))
    without = _DECLARED.sub(lambda match: "" if match[1] in declared else match[0], kernel)
    # Keep only the header with the newer version, because each text may use everything that its version has.
    headers = [_HEADER.search(kernel), _HEADER.search(functions)]
    newest = max((header for header in headers if header), key=lambda header: (int(header[1]), int(header[2])))
    return f"{newest[0]}\n{_HEADER.sub('', functions)}\n{_HEADER.sub('', without)}"


def undefined(ptx: str) -> list[str]:
    """Return the sorted names of functions that a text declares, but that neither the text nor a driver defines."""
    return sorted(set(_DECLARED.findall(ptx)) - set(_DEFINED.findall(ptx)) - _OF_THE_DRIVER)
