"""Changes kernels so that a graph may start them before the previous launch has ended.

A kernel may read weights and a step's rows while the previous launch ends, because no launch of the step changes them.
All other reads and all writes come after the kernel's wait for that launch. So the results are the same.
"""

import re
from typing import Final

WAIT: Final = "\tgriddepcontrol.wait;"

PERMIT: Final = "\tgriddepcontrol.launch_dependents;"
"""After this statement the next launch may start, once all blocks of this one have begun."""

EARLY_READS: Final = '\t.pragma "gpulease.early_reads";'
"""Declares that no launch of a graph writes the memory that this kernel reads before it waits (client/README.md)."""

_DECLARATION: Final = re.compile(r"\s*\.(?:reg|shared|local)\b")

_COPY: Final = re.compile(r"\tcp\.async\.c[ag]\.shared\.global\S* \[ %\w+ \+ \d+ \], \[ (%rd\d+) \+ \d+ \].*;")

_COMMIT: Final = "\tcp.async.commit_group;"

_LAST_COPIES: Final = "\tcp.async.wait_group \t0;"
"""The wait for all copies, which Triton puts after a loop."""

_LOAD: Final = re.compile(r"\t(?:@!?%p\d+ )?ld\.global\.\S+ (.*), \[ (%rd\d+) \+ \d+ \];")

_PARAMETER: Final = re.compile(r"\tld\.param\.b64 \t(%rd\d+), \[\w+_param_(\d+)\];")

_WIDE: Final = re.compile(r"\t[a-z]\S+ \t(%rd\d+), (.*);")
"""A statement that computes a 64-bit number."""

_PLAIN: Final = re.compile(
    r"\t(?:mov|cvt|add|sub|mul|mad|div|rem|neg|min|max|and|or|xor|not|shl|shr|bfe|prmt|setp|selp|ld\.param)\.\S+ .*;"
)
"""A statement that neither accesses memory nor branches."""

_REGISTER: Final = re.compile(r"%rd\d+")
"""A 64-bit register, which may hold an address."""


def starting_early(ptx: bytes, unwritten: frozenset[int], *, permits_first: bool) -> bytes:
    """Return a kernel for compute capability 9.0 that a graph may start before the previous launch has ended.

    Args:
        ptx: The kernel as compiled by Triton.
        unwritten: The indexes of the parameters whose memory no launch of a graph writes. The kernel's first reads of
            this memory come before its wait.
        permits_first: Whether the next launch may start as soon as this one's blocks have begun. Otherwise it starts
            later: after the last copy to shared memory, or after the blocks' end if the kernel has no such copies.
    """
    lines = ptx.decode().replace(".target sm_80\n", ".target sm_90\n").split("\n")
    begin = lines.index("{") + 1
    while _DECLARATION.match(lines[begin]):
        begin += 1
    before, after, end = _first_reads(lines, begin, unwritten)
    statements = [*before, WAIT, *after, *lines[end:]]
    if before:
        statements.insert(0, EARLY_READS)
    if permits_first:
        statements.insert(0, PERMIT)
    elif _LAST_COPIES in statements:
        statements.insert(statements.index(_LAST_COPIES), PERMIT)
    return "\n".join([*lines[:begin], *statements]).encode()


def _first_reads(lines: list[str], begin: int, unwritten: frozenset[int]) -> tuple[list[str], list[str], int]:
    """Divide a kernel's first statements into those before and those after its wait; also return the end's line.

    Before the wait, statements may only compute, and read the memory of the `unwritten` parameters. If a pipeline
    copies memory, only the copies of its first stage come before the wait. More copies would delay the previous launch
    (measured on an H200). Both lists are empty if no read may come before the wait.
    """
    before: list[str] = []
    after: list[str] = []
    # `allowed` are the registers with addresses of unwritten memory, `others` those with addresses of other memory.
    allowed: set[str] = set()
    others: set[str] = set()
    has_reads = copies = has_first_stage = False
    for end in range(begin, len(lines)):
        line = lines[end]
        if copy := _COPY.fullmatch(line):
            # A group of copies is complete only if all earlier copies are. So an early copy may belong to any later
            # group: the kernel may wait longer than necessary, but always until the copy is complete.
            is_allowed = copy[1] in allowed
            has_first_stage |= not is_allowed and copies
            is_early = is_allowed and not has_first_stage
            (before if is_early else after).append(line)
            copies |= is_early
            has_reads |= is_early
            continue
        if line == _COMMIT:
            after.append(line)
            continue
        if (load := _LOAD.fullmatch(line)) and load[2] in allowed and not after:
            # The loaded value may be an address of memory that a launch may write.
            others.update(_REGISTER.findall(load[1]))
            has_reads = True
        elif not _PLAIN.fullmatch(line):
            break
        elif parameter := _PARAMETER.fullmatch(line):
            (allowed if int(parameter[2]) in unwritten else others).add(parameter[1])
        elif wide := _WIDE.fullmatch(line):
            sources = set(_REGISTER.findall(wide[2]))
            if sources & others:
                others.add(wide[1])
            elif sources & allowed:
                allowed.add(wide[1])
        before.append(line)
    return (before, after, end) if has_reads else ([], [], begin)
