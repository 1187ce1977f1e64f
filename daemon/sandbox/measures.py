"""The measures by name, and what is found out about each."""

from dataclasses import dataclass
from enum import Enum
from typing import Any


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
