"""The sandbox's measures, the needs of processes, the operator's settings, and system calls that Python lacks."""

import ctypes
import json
import os
from enum import Enum
from pathlib import Path
from typing import Any, Final

from gpulease.protocol.fast_dataclass import dataclass

_LIBC = ctypes.CDLL(None, use_errno=True)


def system_call(number: int, *arguments: int) -> int:
    """Make the system call with this number. Raises OSError."""
    # ctypes keeps a separate errno for its own calls (use_errno), which no other call overwrites.
    result: int = _LIBC.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@dataclass(frozen=True, slots=True)
class SandboxNeeds:
    """The paths, ports and memory that a driver's workers, or another process of the daemon, need inside the sandbox.

    Paths that do not exist are skipped, because a driver lists many paths that some hosts lack.

    Attributes:
        readable: Files, and folders with everything in them.
        devices: Device nodes for open and ioctl.
        own_process: Whether a worker uses its own folder under /proc, to read it and to set the names of its threads.
        kept: Descriptors, open in the zygote, of folders in which workers may make, read and remove files.
        writable: Paths of other folders in which workers may do so.
        private_bytes: The host memory that a worker may take; None if its slice is in host memory.
        tcp_ports: Ports that the process connects to over TCP. If there are any, the process may have TCP and UDP
          sockets, but accepts no connection.
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
        """Whether workers may write to any folder. If not, the filter hides the calls that change folders."""
        return bool(self.kept or self.writable)


class Measure(Enum):
    """The measures that restrict a worker, in the order in which they are applied.

    Attributes:
        DESCRIPTORS: The worker keeps its channel, its pages and the log, and no other open descriptor.
        USER: The worker runs as another user than the daemon, in only the groups that the devices need.
        CAPABILITIES: The worker has no capability and can gain none.
        PRIVILEGES: No program that the worker executes gains privileges.
        INSPECTION: Other workers can't trace the worker or open its memory, and the kernel never dumps its core.
        LIMITS: The worker's use of the host's resources is limited.
        FILES: The worker can open the driver's paths and nothing else.
        DEVICES: The worker can call ioctl only on the driver's devices.
        NETWORK: The worker can't connect or bind TCP sockets; a process with `tcp_ports` can connect to these ports.
        SCOPE: The worker can't reach an outside process by a signal or an abstract socket.
        SYSCALLS: The worker can make only the system calls that it needs.
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


class SandboxUnavailable(Exception):
    """A worker can't be sandboxed as the operator demands.

    Attributes:
        hint: A sentence about what the operator can do.
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
        detail: What the measure restricts, or the reason why it is off.
    """

    measure: Measure
    is_on: bool
    detail: str

    def to_message(self) -> dict[str, Any]:
        """Return the finding as a message, for the broker and the inventory."""
        return {"measure": self.measure.value, "on": self.is_on, "detail": self.detail}


SANDBOX_MODES: Final = ("available", "required")
"""Values of the setting `sandbox`: apply the measures that the host supports, or refuse to start if one is missing."""

ALWAYS_ON: Final = frozenset({Measure.DESCRIPTORS, Measure.PRIVILEGES})
"""Measures that can't be left out: other measures depend on them, and no driver works better without them."""


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """The operator's settings of the sandbox.

    Attributes:
        is_required: Whether the daemon refuses to start if a measure is unavailable.
        user: The workers' user; None for the default user if the daemon is root, else for the daemon's own user.
        without: Measures that the operator has left out.
    """

    is_required: bool = False
    user: str | None = None
    without: frozenset[Measure] = frozenset()

    def to_text(self) -> str:
        """Return the settings as a command-line argument."""
        # Sort, so that equal settings have equal texts, because a zygote with other settings is not reused.
        without = sorted(measure.value for measure in self.without)
        return json.dumps({"required": self.is_required, "user": self.user, "without": without})

    @classmethod
    def from_text(cls, text: str) -> "SandboxSettings":
        values = json.loads(text)
        return cls(values["required"], values["user"], frozenset(map(Measure, values["without"])))
