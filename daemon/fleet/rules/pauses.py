"""Pauses of the whole machine, as far as its own readings show them.

The clocks of a virtual machine that is paused, migrated or restored from a snapshot stand still meanwhile, its horizon
with them, and other nodes serve its names. Readings can show that afterwards, each where the hypervisor has it:

- The host's clock, which the hypervisor passes on, went further than this machine's.
- A processor was stolen for longer than this machine's clock went on: Xen counts a pause so.

A suspension that the machine's kernel takes part in is no such pause: CLOCK_BOOTTIME, the horizon's clock, counts it.

A machine whose generation id is another was restored from a snapshot, or copied (VM Generation ID, Linux 6.10 and
later): nobody knows for how long it stood still, and another one may run with all that this one knows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

NS_PER_TICK: Final = 10_000_000
"""Nanoseconds of a clock tick of /proc/stat (proc(5); USER_HZ is 100 on all architectures that gpuleased runs on)."""


@dataclass(frozen=True, slots=True)
class MachineReading:
    """What a machine's clocks and counters said at one moment.

    Attributes:
        began_ns: CLOCK_BOOTTIME before the others were read.
        ended_ns: CLOCK_BOOTTIME behind them.
        host_ns: The host's clock; None: the hypervisor does not pass it on.
        stolen_ns: By processor, for how long the hypervisor has run something else in its place.
        generations: How often the machine's generation id has changed, as far as the kernel said so.
    """

    began_ns: int
    ended_ns: int
    host_ns: int | None = None
    stolen_ns: Mapping[str, int] = field(default_factory=dict)
    generations: int = 0


def missed_ns(before: MachineReading, now: MachineReading) -> int | None:
    """Return for how long the machine's clocks surely stood still between two readings; None: nobody knows how long.

    A reader that is held up between its looks makes the result smaller, never larger.
    """
    if now.generations != before.generations:
        return None
    own_ns = now.ended_ns - before.began_ns
    others_ns = [stolen - before.stolen_ns[cpu] for cpu, stolen in now.stolen_ns.items() if cpu in before.stolen_ns]
    if before.host_ns is not None and now.host_ns is not None:
        others_ns.append(now.host_ns - before.host_ns)
    return max((other_ns - own_ns for other_ns in others_ns if other_ns > own_ns), default=0)


def stolen_of(stat: bytes) -> dict[str, int]:
    """Return the stolen time of each processor, in nanoseconds, from the text of /proc/stat; {} if it has none."""
    found = {}
    for line in stat.splitlines():
        words = line.split()
        if words and words[0].startswith(b"cpu") and words[0] != b"cpu" and len(words) > 8 and words[8].isdigit():
            found[words[0].decode()] = int(words[8]) * NS_PER_TICK
    return found


def is_new_generation(uevent: bytes) -> bool:
    """Return whether a message of the kernel's says that the machine's generation id is another."""
    return b"NEW_VMGENID=1" in uevent.split(b"\0")
