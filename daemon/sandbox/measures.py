"""System calls that Python has no name for.

What a driver's workers need of the host once they are shut in.

The measures by name, and what is found out about each.

What the operator wants of the sandbox.
"""

import ctypes
import json
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

_LIBC = ctypes.CDLL(None, use_errno=True)


def system_call(number: int, *arguments: int) -> int:
    """Raises OSError."""
    result: int = _LIBC.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def prctl(option: int, *arguments: int) -> int:
    """Ask the kernel something about this process. Raises OSError."""
    values = [*arguments, 0, 0, 0, 0][:4]
    result: int = _LIBC.prctl(option, *map(ctypes.c_ulong, values))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@dataclass(frozen=True, slots=True)
class Needs:
    """Paths that do not exist are passed over: a driver looks for many things that a host need not have.

    Attributes:
        readable: Files, and folders with all that is in them.
        devices: Device nodes to be opened and told things by ioctl.
        own_process: Whether a worker reads, and names its threads by, its own folder under /proc.
        kept: Descriptors, open in the zygote, of folders where workers may make, read and remove files.
        writable: Folders for the same, by path.
        private_bytes: What a worker may take of the host's memory for itself, None if its slice lies there.
    """

    readable: tuple[Path, ...] = ()
    devices: tuple[Path, ...] = ()
    own_process: bool = False
    kept: tuple[int, ...] = ()
    writable: tuple[Path, ...] = ()
    private_bytes: int | None = None

    @property
    def writes_files(self) -> bool:
        """Whether there is a folder it may write to."""
        return bool(self.kept or self.writable)


class Measure(Enum):
    """What is done to a worker, in the order it is done.

    Attributes:
        DESCRIPTORS: No descriptor that was open before but its channel, its pages and the log.
        USER: A user of the workers' own, in no group that the devices do not need.
        CAPABILITIES: None, and none to be had.
        PRIVILEGES: No program run from here gains any.
        INSPECTION: Other workers can't trace it or open its memory, and no core of it is written.
        LIMITS: On what it takes of the host.
        FILES: It opens what the driver needs, nothing else.
        DEVICES: It makes no ioctl on other devices than the driver's.
        NETWORK: No TCP, neither connecting nor binding.
        SCOPE: No signal and no abstract socket to anything outside.
        SYSCALLS: Those it has a use for, and no others.
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
    """A worker can't be shut in as the operator wants it.

    Attributes:
        hint: What the operator can do, a sentence.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Finding:
    """One measure on this host.

    Attributes:
        is_on: Whether every worker is under it.
        detail: How far it goes, or why it is off.
    """

    measure: Measure
    is_on: bool
    detail: str

    def to_message(self) -> dict[str, Any]:
        """As it travels, to the broker and in the inventory."""
        return {"measure": self.measure.value, "on": self.is_on, "detail": self.detail}


MODES: Final = ("available", "required")

ALWAYS_ON: Final = frozenset({Measure.DESCRIPTORS, Measure.PRIVILEGES})
"""What others rest on, and no driver can have a use for the lack of."""


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """How workers are to be shut in.

    Attributes:
        is_required: Whether the daemon is not to start where a measure can't be had.
        user: Who workers are to be; None for the default user if the daemon is root, and for its own user if not.
        without: Measures that the operator does without.
    """

    is_required: bool = False
    user: str | None = None
    without: frozenset[Measure] = frozenset()

    def to_text(self) -> str:
        """For a command line."""
        without = sorted(measure.value for measure in self.without)
        return json.dumps({"required": self.is_required, "user": self.user, "without": without})

    @classmethod
    def from_text(cls, text: str) -> "SandboxSettings":
        """As it came over a command line of ours."""
        found = json.loads(text)
        return cls(found["required"], found["user"], frozenset(map(Measure, found["without"])))
