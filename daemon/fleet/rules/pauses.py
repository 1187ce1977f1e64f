"""Detects pauses of the whole machine from readings of its clocks and counters.

While a virtual machine is paused, migrated or restored from a snapshot, its clocks stop. Its membership deadline then
seems to be in the future, although other nodes may already serve its names. Two readings can show the pause afterwards,
if the hypervisor provides them:

- The host's clock, which the hypervisor exposes, has advanced further than this machine's.
- The stolen time of a processor has grown by more than this machine's clock advanced. Xen counts a pause in this way.

A suspension by the machine's own kernel does not count, because CLOCK_BOOTTIME, the deadline's clock, includes it.

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
        stolen_ns: The time for which the hypervisor did not run a processor that was ready to run, by processor.
        generation_changes: Number of changes of the machine's generation id that the kernel has reported.
    """

    began_ns: int
    ended_ns: int
    host_ns: int | None = None
    stolen_ns: Mapping[str, int] = field(default_factory=dict)
    generation_changes: int = 0


def missed_ns(before: MachineReading, now: MachineReading) -> int | None:
    """Return the minimum time for which the clocks stopped between two readings; None if the time is unknown.

    A delay between readings can only make the result smaller.
    """
    if now.generation_changes != before.generation_changes:
        return None
    # Use the longest time that may have passed on this machine's clock, which gives the shortest possible pause.
    elapsed_ns = now.ended_ns - before.began_ns
    # Collect how far each clock that runs during a pause has advanced. Skip processors without an earlier reading.
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
