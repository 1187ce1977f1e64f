"""Readings of this machine from which `rules.pauses` detects a pause of the whole machine."""

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Final

from gpulease.daemon.contract.control_page import boot_ns
from gpulease.daemon.fleet.rules.pauses import MachineReading, is_new_generation, stolen_of

HOST_CLOCKS: Final = frozenset({"KVM virtual PTP", "hyperv", "ptp_vmw"})
"""Names of PTP clocks with which hypervisors expose their host's clock (Linux: drivers/ptp, drivers/hv)."""

MAX_STAT_BYTES: Final = 1 << 20
"""Maximum bytes that are read of /proc/stat. With 4,096 processors, the processors' lines have 300 KiB."""

MAX_UEVENT_BYTES: Final = 1 << 16

_NETLINK_KOBJECT_UEVENT: Final = 15
"""The netlink protocol of the kernel's messages about devices (linux/netlink.h)."""

_KERNEL_GROUP: Final = 1
"""The multicast group to which the kernel itself writes these messages."""


class MachineReadings:
    """The open clocks and counters. Open them before the process enters the sandbox.

    Args:
        clocks: The kernel's folder of PTP clocks.
        devices: The folder of their devices.
        stat: The file with the processors' times.
    """

    def __init__(
        self,
        clocks: Path = Path("/sys/class/ptp"),
        devices: Path = Path("/dev"),
        stat: Path = Path("/proc/stat"),
    ) -> None:
        self._clock_fd = _open_host_clock(clocks, devices)
        self._stat_fd = _open(stat)
        self._uevents = _open_uevents()
        self._generation_changes = 0

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that the sandbox must leave open."""
        uevents_fd = None if self._uevents is None else self._uevents.fileno()
        return tuple(fd for fd in (self._clock_fd, self._stat_fd, uevents_fd) if fd is not None)

    def read(self) -> MachineReading:
        # Read the messages first, so that they belong to a pause before this reading.
        self._generation_changes += self._new_generation_changes()
        # Read this machine's clock before and after the other clocks.
        began_ns = boot_ns()
        host_ns, stolen_ns = None, {}
        if self._clock_fd is not None:
            with contextlib.suppress(OSError):
                # The clock id of a device is made from its descriptor (clock_getres(2), dynamic POSIX clocks).
                host_ns = time.clock_gettime_ns((~self._clock_fd << 3) | 3)
        if self._stat_fd is not None:
            with contextlib.suppress(OSError):
                stolen_ns = stolen_of(os.pread(self._stat_fd, MAX_STAT_BYTES, 0))
        return MachineReading(began_ns, boot_ns(), host_ns, stolen_ns, self._generation_changes)

    def close(self) -> None:
        for fd in (self._clock_fd, self._stat_fd):
            if fd is not None:
                os.close(fd)
        if self._uevents is not None:
            self._uevents.close()

    def _new_generation_changes(self) -> int:
        """Return how many new messages report a new generation id.

        A socket that overflows loses messages but stays usable.
        """
        count = 0
        with contextlib.suppress(OSError):
            while self._uevents is not None:
                count += is_new_generation(self._uevents.recv(MAX_UEVENT_BYTES))
        return count


def _open_host_clock(clocks: Path, devices: Path) -> int | None:
    for clock in sorted(clocks.glob("ptp*")):
        # Without a PTP clock that this user may open, only stolen time can show a pause.
        with contextlib.suppress(OSError):
            if (clock / "clock_name").read_text().strip() in HOST_CLOCKS:
                return _open(devices / clock.name)
    return None


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _open_uevents() -> socket.socket | None:
    """Return a socket for the kernel's messages about devices, if available."""
    uevents = None
    try:
        uevents = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_KOBJECT_UEVENT)
        # Only the kernel may write to this group.
        uevents.bind((0, _KERNEL_GROUP))
    except OSError:
        if uevents is not None:
            uevents.close()
        return None
    return uevents
