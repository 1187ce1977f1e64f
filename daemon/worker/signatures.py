"""The types of kernels' parameters, as an image's PTX text declares them (PTX ISA sections 5.1.6 and 11.1).

The drivers know the sizes of parameters, not their types: machine code has none. A client uses the types to refuse a
float where an integer is wanted. They decide nothing here: text that can't be followed has untold types.
"""

import re
from collections.abc import Mapping
from typing import Final

from gpulease.daemon.drivers.interface import Kernel
from gpulease.protocol.opcodes import ParameterType

_ELF: Final = b"\x7fELF"
_COMMENT: Final = re.compile(rb"//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_ENTRY: Final = re.compile(rb"\.entry\s+([\w$%]+)\s*\(([^()]*)\)")
_WORD: Final = re.compile(rb"\.\w+|\[")
_SCALARS: Final = {
    f".{kind.name.lower()}".encode(): kind
    for kind in ParameterType
    if kind not in (ParameterType.UNTOLD, ParameterType.POINTER)
}
_VECTORS: Final = frozenset({b".v2", b".v4", b"["})


def parameter_types(image: bytes, kernels: Mapping[str, Kernel]) -> tuple[bytes, ...]:
    """By kernel, in their order, one `ParameterType` a parameter; nothing of a kernel whose text says something else.

    Takes time in proportion to the image.
    """
    declared: dict[str, bytes] = {}
    if not image.startswith(_ELF):
        # The drivers read PTX to its NUL.
        text = _COMMENT.sub(b" ", image.partition(b"\0")[0])
        declared = {match[1].decode(): _types_of(match[2]) for match in _ENTRY.finditer(text)}
    return tuple(
        types if len(types := declared.get(name, b"")) == len(kernel.parameters) else b""
        for name, kernel in kernels.items()
    )


def _types_of(parameters: bytes) -> bytes:
    return bytes(map(_type_of, parameters.split(b","))) if parameters.strip() else b""


def _type_of(parameter: bytes) -> ParameterType:
    words = _WORD.findall(parameter)
    kinds = [_SCALARS[word] for word in words if word in _SCALARS]
    if len(kinds) != 1 or not _VECTORS.isdisjoint(words):
        return ParameterType.UNTOLD
    return ParameterType.POINTER if b".ptr" in words else kinds[0]
