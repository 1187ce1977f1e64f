"""The sandbox's measures, the driver's needs, the operator's settings, and system calls that Python lacks."""

import ctypes
import json
import os
from enum import Enum
from pathlib import Path
from typing import Any, Final

from gpulease.protocol.fast_dataclass import dataclass

_LIBC = ctypes.CDLL(None, use_errno=True)


def system_call(number: int, *arguments: int) -> int:
    """Call the kernel by a system call's number. Raises OSError."""
    # ctypes keeps errno of this thread apart (use_errno), so no other call can overwrite it.
    result: int = _LIBC.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@dataclass(frozen=True, slots=True)
class SandboxNeeds:
    """The paths, ports and memory that a driver's workers, or another process of the daemon, need inside the sandbox.

    Paths that do not exist are skipped, because a driver tries many paths that a host need not have.

    Attributes:
        readable: Files, and folders with everything in them.
        devices: Device nodes for open and ioctl.
        own_process: Whether a worker uses its own folder under /proc, to read it and to name its threads.
        kept: Descriptors, open in the zygote, of folders where workers may make, read and remove files.
        writable: Paths of such folders.
        private_bytes: The host memory that a worker may take; None if its slice is in host memory.
        tcp_ports: Ports that the process connects to over TCP. With any, it may have sockets of TCP and UDP; it accepts
          no connection.
    """

    readable: tuple[Path, ...] = ()
    devices: tuple[Path, ...] = ()
    own_process: bool = False
    kept: tuple[int, ...] = ()
    writable: tuple[Path, ...] = ()
    private_bytes: int | None = None
    tcp_ports: tuple[int, ...] = ()

    @property
    def writes_files(self) -> bool:
        """Whether workers may write to any folder; if not, the filter hides the calls that change a folder."""
        return bool(self.kept or self.writable)


class Measure(Enum):
    """The measures against a worker, in the order in which they are taken.

    Attributes:
        DESCRIPTORS: The worker keeps its channel, its pages and the log, and no other open descriptor.
        USER: The worker runs as a user of the workers' own, in the groups that the devices need and no others.
        CAPABILITIES: The worker has no capability and can gain none.
        PRIVILEGES: No program that the worker runs gains privileges.
        INSPECTION: Other workers can't trace it or open its memory, and the kernel writes no core of it.
        LIMITS: Bounds on its use of the host's resources.
        FILES: The worker opens the driver's paths and nothing else.
        DEVICES: The worker makes no ioctl on devices other than the driver's.
        NETWORK: The worker can't connect or bind TCP; a process with `tcp_ports` connects to those.
        SCOPE: The worker can't reach an outside process by a signal or an abstract socket.
        SYSCALLS: The worker makes the system calls that it needs and no others.
    """

    DESCRIPTORS = "descriptors"
    USER = "user"
    CAPABILITIES = "capabilities"
    PRIVILEGES = "no_new_privs"
    INSPECTION = "undumpable"
    LIMITS = "limits"
    FILES = "files"
    DEVICES = "device_calls"
    NETWORK = "network"
    SCOPE = "scope"
    SYSCALLS = "syscalls"


class SandboxBroken(Exception):
    """A worker can't be sandboxed as the operator demands.

    Attributes:
        hint: A sentence that says what the operator can do.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class MeasureFinding:
    """The state of one measure on this host.

    Attributes:
        measure: The measure.
        is_on: Whether it applies to every worker.
        detail: Its extent, or the reason why it is off.
    """

    measure: Measure
    is_on: bool
    detail: str

    def to_message(self) -> dict[str, Any]:
        """Return the finding as a message, for the broker and the inventory."""
        return {"measure": self.measure.value, "on": self.is_on, "detail": self.detail}


MODES: Final = ("available", "required")

ALWAYS_ON: Final = frozenset({Measure.DESCRIPTORS, Measure.PRIVILEGES})
"""Measures on which others depend, and that no driver has a reason to omit."""


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """The operator's settings of the sandbox.

    Attributes:
        is_required: Whether the daemon refuses to start where a measure is unavailable.
        user: The workers' user; None for the default user if the daemon is root, otherwise for the daemon's own user.
        without: Measures that the operator omits.
    """

    is_required: bool = False
    user: str | None = None
    without: frozenset[Measure] = frozenset()

    def to_text(self) -> str:
        """Return the settings as an argument of a command line."""
        # Sorted, so that equal settings have equal texts: a zygote with other settings is not reused.
        without = sorted(measure.value for measure in self.without)
        return json.dumps({"required": self.is_required, "user": self.user, "without": without})

    @classmethod
    def from_text(cls, text: str) -> "SandboxSettings":
        values = json.loads(text)
        return cls(values["required"], values["user"], frozenset(map(Measure, values["without"])))
