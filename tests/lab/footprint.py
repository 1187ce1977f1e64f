"""Memory, descriptors and threads of the daemon's processes, read from /proc (proc(5))."""

import os
import socket
import time
from pathlib import Path
from typing import Final

from gpulease.client.console.private_daemon import children_of
from gpulease.protocol.address import UnixAddress, parse_address
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.peer_credentials import UCRED_BYTES, parse_ucred

LOOKS: Final = 3
"""Number of samples of descriptors and threads. The smallest is used, because a closing connection lingers briefly."""

LOOK_S: Final = 0.1

_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Footprint:
    """The footprint of one process. RSS and PSS are in KiB; PSS is 0 if this user may not read it."""

    rss_kib: int
    pss_kib: int
    fds: int
    threads: int


@dataclass(frozen=True, slots=True)
class Footprints:
    """The broker, its zygotes and its workers at one moment."""

    broker: Footprint
    zygote: Footprint
    workers: int
    worker_pss_kib: float

    def series(self) -> dict[str, float]:
        """Return all figures, by the names under which reports show their series."""
        series = {
            f"{name} {what}": float(getattr(footprint, field))
            for name, footprint in (("broker", self.broker), ("zygote", self.zygote))
            for what, field in (
                ("RSS, KiB", "rss_kib"),
                ("PSS, KiB", "pss_kib"),
                ("fds", "fds"),
                ("threads", "threads"),
            )
        }
        return series | {"workers": float(self.workers), "worker PSS, mean KiB": self.worker_pss_kib}


def broker_pid(address: str) -> int:
    """Return the pid of the process that listens at a Unix socket.

    The kernel records which process called listen(2) (unix(7), SO_PEERCRED). Raises ValueError for another address.
    """
    parsed = parse_address(address)
    # Another host's processes can't be read from here.
    if not isinstance(parsed, UnixAddress):
        raise ValueError(f"the address must be a Unix socket, so of a daemon of this host, not {address}")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(parsed.path)
        return parse_ucred(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED_BYTES)).pid


def footprints_of(broker: int) -> Footprints:
    """Read the processes of an idle daemon by its broker's pid. Raises OSError if one has ended or is not readable."""
    # The broker has one zygote; its workers are the zygote's children.
    (zygote,) = [pid for pid, name in children_of(broker) if name == "gpul-zygote"]
    workers = [pid for pid, _ in children_of(zygote)]
    shares = [_pss_kib(pid) for pid in workers]
    mean_kib = sum(shares) / len(shares) if shares else 0.0
    return Footprints(footprint_of(broker), footprint_of(zygote), len(workers), mean_kib)


def footprint_of(pid: int) -> Footprint:
    """Read one process. Raises OSError if it has ended or is not readable."""
    looks = []
    for look in range(LOOKS):
        time.sleep(LOOK_S if look else 0)
        looks.append((len(os.listdir(_PROC / str(pid) / "fd")), len(os.listdir(_PROC / str(pid) / "task"))))
    # A descriptor or thread that is being closed is in some samples only.
    fds, threads = map(min, zip(*looks, strict=True))
    return Footprint(rss_kib(pid), _pss_kib(pid), fds, threads)


def rss_kib(pid: int) -> int:
    """Return a process's resident memory in KiB. Raises OSError if it has ended or belongs to another user."""
    return _field_kib(pid, "status", "VmRSS")


def _pss_kib(pid: int) -> int:
    # The PSS of another user's process is not readable. RSS is.
    try:
        return _field_kib(pid, "smaps_rollup", "Pss")
    except OSError:
        return 0


def _field_kib(pid: int, file: str, name: str) -> int:
    for line in (_PROC / str(pid) / file).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0
