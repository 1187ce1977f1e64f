"""What the gate tells the broker of a relay whose peer is known."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from gpulease.daemon.relay.naming import MAX_SERIAL_CHARS, are_bounded

MAX_PID: Final = 1 << 22
"""The largest number a process can have (proc_sys_kernel(5), pid_max). A larger one would be none for pidfd_open(2)."""

MAX_PEER_CHARS: Final = 128
"""Of an address and a port."""

_SERIAL: Final = re.compile(f"-?[0-9A-F]{{1,{MAX_SERIAL_CHARS}}}")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A relay, where its peer is, the names in its certificate, and that one's serial number, in hexadecimal."""

    pid: int
    peer: str
    names: tuple[str, ...]
    serial: str

    @classmethod
    def from_message(cls, message: Mapping[Any, Any]) -> Self | None:
        """None for what no gate says: it would be kept, and told to the next gate and to the next daemon."""
        match message:
            case {"pid": pid, "peer": str(peer), "names": list(names), "serial": str(serial)} if (
                is_pid(pid)
                and len(peer) <= MAX_PEER_CHARS
                and all(isinstance(name, str) for name in names)
                and are_bounded(names)
                and _SERIAL.fullmatch(serial)
            ):
                return cls(pid, peer, tuple(names), serial)
        return None


def is_pid(number: object) -> bool:
    """Whether it can be a process's."""
    return type(number) is int and 0 < number <= MAX_PID
