"""Filters of system calls as the kernel takes them: classic BPF over struct seccomp_data (seccomp(2))."""

import struct
from collections.abc import Iterable
from typing import Final

Code = list[tuple[int, int, int, int]]
"""Instructions: operation, instructions to skip if true, if false, constant (struct sock_filter)."""

# struct seccomp_data: the call's number, the architecture, the instruction pointer, six arguments of 8 bytes.
_NUMBER_AT: Final = 0
_ARCHITECTURE_AT: Final = 4
_ARGUMENTS_AT: Final = 16

_LOAD: Final = 0x20
_AND: Final = 0x54
_IF_EQUAL: Final = 0x15
_IF_NOT_LESS: Final = 0x35
_RETURN: Final = 0x06

ALLOW: Final = 0x7FFF0000
KILL: Final = 0x80000000
"""SECCOMP_RET_KILL_PROCESS: ends the process as an uncaught SIGSYS would."""

_FAIL: Final = 0x00050000

X32_BIT: Final = 0x40000000
"""Set in the numbers of the x32 ABI, which are other calls to a filter that looks at numbers alone."""


def fail(errno: int) -> int:
    """The call is not made and gives this error."""
    return _FAIL | errno


def result(action: int) -> Code:
    """The end."""
    return [(_RETURN, 0, 0, action)]


def head(architecture: int) -> Code:
    """Kill what calls by another ABI than the process's own; then have the call's number ready."""
    return [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IF_EQUAL, 1, 0, architecture),
        *result(KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_NOT_LESS, 0, 1, X32_BIT),
        *result(KILL),
    ]


def on(number: int, then: Code) -> Code:
    """What to do about one call; `then` ends in a result."""
    return [(_IF_EQUAL, 0, len(then), number), *then]


def beyond(number: int, action: int) -> Code:
    """What to do about calls with higher numbers."""
    return [(_IF_NOT_LESS, 0, 1, number + 1), *result(action)]


def if_argument(place: int, values: Iterable[int], then: int, otherwise: int, mask: int = 0xFFFFFFFF) -> Code:
    """By the low half of an argument, which is all that the kernel looks at of an int."""
    code: Code = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * place), (_AND, 0, 0, mask)]
    for value in values:
        code += [(_IF_EQUAL, 0, 1, value & 0xFFFFFFFF), *result(then)]
    return code + result(otherwise)


def unless_argument(place: int, value: int, then: int) -> Code:
    """Go on if the low half of an argument is this value."""
    return [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * place), (_IF_EQUAL, 1, 0, value), *result(then)]


def unless_null(place: int, then: int) -> Code:
    """Go on if an argument is a null pointer: both halves are zero."""
    halves = (_ARGUMENTS_AT + 8 * place, _ARGUMENTS_AT + 8 * place + 4)
    return [step for at in halves for step in ((_LOAD, 0, 0, at), (_IF_EQUAL, 1, 0, 0), *result(then))]


def assemble(code: Code) -> bytes:
    """As struct sock_filter[]."""
    return b"".join(struct.pack("=HBBI", *step) for step in code)
