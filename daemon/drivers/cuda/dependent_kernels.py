"""Finds in PTX the kernels that may start while the launch before them ends (PTX ISA, griddepcontrol).

A kernel that executes griddepcontrol.wait before it touches memory gives the same results if its blocks start while the
launch before it still runs: they wait at that instruction until that launch is complete and its writes are visible. So
a graph begins such a launch early, which shortens the time between two kernels. The PTX shows which kernels do that;
for machine code alone nothing is begun early.

Before the wait, a kernel may read memory of which its tenant states that no launch of the graph writes it
(EARLY_READS). If that is not true, only this tenant's results are wrong.

All threads of such a kernel wait, so it ends only after the launch before it has ended. So what comes next needs to
wait for this kernel alone.

The wait makes writes visible to reads for which the memory consistency model holds. It does not hold for textures,
surfaces and ld.global.nc (PTX ISA, Scope and applicability of the model): their memory must not change while a kernel
runs, and it would if the kernel started early. Images that read so have no kernels that start early.
"""

import re
from typing import Final

_WAIT: Final = b"griddepcontrol.wait"

EARLY_READS: Final = b'.pragma "gpulease.early_reads"'
"""States that no launch of a graph writes what the kernel reads between this statement and its wait. Compilers ignore
it."""

_MAY_READ: Final = b"%early_reads"
"""Replaces EARLY_READS before strings are left out. No instruction has this form."""

_LEFT_OUT: Final = re.compile(rb'//[^\n]*|/\*.*?(?:\*/|\Z)|"(?:[^"\\\n]++|\\.)*+"', re.DOTALL)
"""Comments and strings, both of which may contain anything."""

_ENTRY: Final = re.compile(rb"\.entry\s++([\w$%]++)\s*+(?:\([^()]*+\))?+[^{};]*+\{")
"""A kernel's head, with the brace that begins its body. It never backtracks, so that its time is linear."""

_HARMLESS: Final = re.compile(
    rb"(?:@!?%[\w$]+\s+)?(?:(?:mov|cvt|cvta|add|sub|mul|mad|div|rem|neg|min|max|and|or|xor|not|shl|shr|bfe|prmt|setp|selp"
    rb"|ld\.param|cp\.async\.bulk\.prefetch|griddepcontrol\.launch_dependents)(?:\.[\w.:]+)?"
    rb"|prefetch(?:\.global)?\.L[12](?:::\w+)?)(?:\s[^{};:]*)?"
)
"""A statement that neither reads nor writes memory, except for parameters, and does not branch. Its operands have no
colon, which would make its first word a label. prefetch.tensormap reads memory, and its result is used after the
wait."""

_READING: Final = re.compile(
    rb"(?:@!?%[\w$]+\s+)?(?:ld\.global|cp\.async\.(?:c[ag]\.shared\.global|commit_group))[\w.:]*(?:\s[^;]*)?"
)
"""A statement that reads global memory, and writes at most shared memory and registers."""

_UNORDERED: Final = re.compile(
    rb"\bld(?:\.[\w:]+)*\.nc\b|\b(?:ldu|tex|tld4|suld|sust|sured)\.|\.(?:tex|texref|surfref|samplerref)\b"
)
"""Statements that access memory as if nothing else wrote it while the kernel runs."""

MAX_STATEMENTS: Final = 1024
"""Maximum number of statements of a kernel that are read for the wait. Stops an image from taking long to load."""


def waiting_kernels(ptx: bytes) -> frozenset[str]:
    """Return the kernels of PTX that wait for the launch before them before they access memory.

    Reads by kernels with EARLY_READS do not count.
    """
    if _WAIT not in ptx:
        return frozenset()
    text = _LEFT_OUT.sub(b" ", ptx.replace(EARLY_READS, _MAY_READ))
    if _UNORDERED.search(text):
        return frozenset()
    return frozenset(head[1].decode() for head in _ENTRY.finditer(text) if _waits(text, head.end()))


def _waits(text: bytes, at: int) -> bool:
    may_read = False
    for _ in range(MAX_STATEMENTS):
        end = text.find(b";", at)
        if end < 0:
            return False
        statement = text[at:end].strip()
        # Every thread must reach the wait, so it has no guard.
        if statement == _WAIT:
            return True
        if statement == _MAY_READ:
            may_read = True
        elif not (
            statement.startswith(b".reg")
            or _HARMLESS.fullmatch(statement)
            or (may_read and _READING.fullmatch(statement))
        ):
            return False
        at = end + 1
    return False
