"""The most memory that this process and its children can use: the host's memory, and the limit of control groups.

Control groups are described in the kernel's "Control Group v2" (memory.max) and in its documents of version 1
(memory.limit_in_bytes). A limit of any group above a process's own applies to that process, too.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_LIMIT_FILES: Final = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}
"""The file with a group's limit, by the type of its file system."""


class MemoryLimit(NamedTuple):
    """An amount of memory.

    Attributes:
        size_bytes: The amount.
        source: What sets the limit, as a phrase.
    """

    size_bytes: int
    source: str


def host_memory() -> MemoryLimit:
    """Return the host's memory. It may grow and shrink: a virtual machine's memory, or a host's memory modules."""
    return MemoryLimit(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "this host's memory")


def group_memory_limit(proc: Path = Path("/proc/self")) -> MemoryLimit | None:
    """Return the lowest limit of the control groups of the process whose folder in /proc is `proc`; None for none."""
    return min(_group_limits(proc), key=lambda limit: limit.size_bytes, default=None)


def _group_limits(proc: Path) -> Iterator[MemoryLimit]:
    for kind, mount, own in _memory_groups(proc):
        for group in (own, *own.parents):
            file = group / _LIMIT_FILES[kind]
            # "max" is no limit, the root of version 2 has no such file, and a container may hide a group above its own.
            with suppress(OSError, ValueError):
                yield MemoryLimit(int(file.read_text()), f"the limit in {file}")
            if group == mount:
                break


def _memory_groups(proc: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield each hierarchy that may limit memory: its type, where it is mounted, and the process's group in it.

    The formats are those of proc_pid_mountinfo(5) and cgroups(7).
    """
    try:
        mounts = (proc / "mountinfo").read_text().splitlines()
        groups = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
    except OSError:
        return
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, mount = (_unescaped(field) for field in before.split(" ")[3:5])
        if kind not in _LIMIT_FILES or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        controller = "memory" if kind == "cgroup" else ""
        for _, controllers, path in groups:
            if controller in controllers.split(","):
                # A container may see its group as the mount's root, but the group's path as the host names it.
                below = os.path.relpath(path, root)
                yield kind, Path(mount), Path(mount) if below.startswith("..") else Path(mount, below)


def _unescaped(field: str) -> str:
    for character in " \t\n\\":
        field = field.replace(f"\\{ord(character):03o}", character)
    return field
