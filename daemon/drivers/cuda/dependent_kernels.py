"""Recognize in PTX the kernels that may start while the launch before them ends (PTX ISA, griddepcontrol).

A kernel that executes griddepcontrol.wait before it touches memory gives the same results if its blocks start while
the launch before it still runs: they wait at that instruction until that launch is complete and its writes are visible.
So a graph begins such a launch early, and the time between two kernels falls. The PTX shows which kernels do that; for
machine code alone nothing is begun early.
"""

import re
from typing import Final

_WAIT: Final = b"griddepcontrol.wait"

_COMMENT: Final = re.compile(rb"//[^\n]*|/\*.*?\*/", re.DOTALL)

_ENTRY: Final = re.compile(rb"\.entry\s+([\w$%]+)\s*(?:\([^()]*\))?[^{};]*\{")
"""A kernel's head, with the brace that begins its body."""

_HARMLESS: Final = re.compile(
    rb"(?:@!?%[\w$]+\s+)?(?:mov|cvt|cvta|add|sub|mul|mad|min|max|and|or|not|shl|shr|setp|selp|ld\.param|prefetch"
    rb"|cp\.async\.bulk\.prefetch|griddepcontrol\.launch_dependents)(?:\.[\w.:]+)?(?:\s[^{};]*)?"
)
"""A statement that neither reads nor writes memory, except for parameters, and does not branch."""

MAX_STATEMENTS: Final = 256
"""Most statements of a kernel that are read for the wait. Stops an image from taking long to load."""


def waiting_kernels(ptx: bytes) -> frozenset[str]:
    """Return the kernels of PTX that wait for the launch before them ahead of everything that touches memory."""
    if _WAIT not in ptx:
        return frozenset()
    text = _COMMENT.sub(b" ", ptx)
    return frozenset(head[1].decode() for head in _ENTRY.finditer(text) if _waits(text, head.end()))


def _waits(text: bytes, at: int) -> bool:
    for _ in range(MAX_STATEMENTS):
        end = text.find(b";", at)
        if end < 0:
            return False
        statement = text[at:end].strip()
        # Every thread must reach the wait, so it has no guard.
        if statement == _WAIT:
            return True
        if not statement.startswith(b".reg") and not _HARMLESS.fullmatch(statement):
            return False
        at = end + 1
    return False
