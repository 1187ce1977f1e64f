"""Detects pauses of the whole machine, as far as the machine's own readings show them.

While a virtual machine is paused, migrated or restored from a snapshot, its clocks stop. So its membership deadline
does not come closer, although other nodes may already serve its names. Afterwards two readings can show the pause, if
the hypervisor provides them:

- The host's clock, which the hypervisor exposes, has advanced further than this machine's.
- The stolen time of a processor has grown by more than this machine's clock advanced. Xen counts a pause in this way.

A suspension in which the machine's own kernel takes part is not such a pause: CLOCK_BOOTTIME, the deadline's clock,
counts it.

A machine with a changed generation id was restored from a snapshot, or copied (VM Generation ID, Linux 6.10 and later).
The length of the pause is then unknown, and another machine may be running with the same state.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Final

from gpulease.protocol.fast_dataclass import dataclass

NS_PER_TICK: Final = 10_000_000
"""Nanoseconds of a clock tick of /proc/stat (proc(5); USER_HZ is 100 on all architectures that gpuleased runs on)."""


@dataclass(frozen=True, slots=True)
class MachineReading:
    """Readings of a machine's clocks and counters at one moment.

    Attributes:
        began_ns: CLOCK_BOOTTIME before the other readings.
        ended_ns: CLOCK_BOOTTIME after the other readings.
        host_ns: The host's clock; None if the hypervisor does not expose it.
        stolen_ns: By processor, the time for which the hypervisor ran something else instead.
        generation_changes: How many changes of the machine's generation id the kernel has reported.
    """

    began_ns: int
    ended_ns: int
    host_ns: int | None = None
    stolen_ns: Mapping[str, int] = field(default_factory=dict)
    generation_changes: int = 0


def missed_ns(before: MachineReading, now: MachineReading) -> int | None:
    """Return the minimum time for which the clocks stopped between two readings; None if the time is unknown.

    A delay of the reader makes the result smaller, never larger.
    """
    if now.generation_changes != before.generation_changes:
        return None
    # Use the longest time that can have passed on this machine's clock, so that the difference is the shortest pause.
    elapsed_ns = now.ended_ns - before.began_ns
    # Collect how far each clock that runs during a pause has advanced. Processors that were added meanwhile have no
    # earlier reading.
    outside_ns = [stolen - before.stolen_ns[cpu] for cpu, stolen in now.stolen_ns.items() if cpu in before.stolen_ns]
    if before.host_ns is not None and now.host_ns is not None:
        outside_ns.append(now.host_ns - before.host_ns)
    return max((advance_ns - elapsed_ns for advance_ns in outside_ns if advance_ns > elapsed_ns), default=0)


def stolen_of(stat: bytes) -> dict[str, int]:
    """Return the stolen time of each processor, in nanoseconds, from the text of /proc/stat; {} if it has none."""
    stolen = {}
    for line in stat.splitlines():
        # Fields of a line `cpuN`: user, nice, system, idle, iowait, irq, softirq, steal (proc(5)).
        words = line.split()
        if words and words[0].startswith(b"cpu") and words[0] != b"cpu" and len(words) > 8 and words[8].isdigit():
            stolen[words[0].decode()] = int(words[8]) * NS_PER_TICK
    return stolen


def is_new_generation(uevent: bytes) -> bool:
    """Return whether a kernel message reports a new generation id of the machine."""
    return b"NEW_VMGENID=1" in uevent.split(b"\0")
