"""A worker that an attacker controls from its start: it tries to write its lease's page, and reports false claims.

Its `live` replaces the daemon's own worker function in a zygote, after the zygote's own preparations. As a program,
with a zygote's arguments, this file is a zygote in which workers for leases of HOSTILE_BYTES are hostile. The others
are not, so that the daemon's checks at its start succeed.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn

from gpulease.daemon.contract.control_page import PAGE_BYTES, Counter, PageFds, WorkerPage
from gpulease.daemon.contract.worker_spec import WorkerExit, WorkerSpec
from gpulease.daemon.drivers.interface import Driver
from gpulease.daemon.host.ipc import ChannelClosed, send_message
from gpulease.daemon.host.processes import set_name
from gpulease.daemon.native.addresses import address_of
from gpulease.daemon.sandbox.measures import system_call
from gpulease.daemon.sandbox.syscall_filter import X86_64
from gpulease.daemon.session import main
from gpulease.daemon.zygote import __main__ as zygote

HOSTILE_BYTES: Final = 3 << 20

MADV_REMOVE: Final = 9
PUNCH_HOLE: Final = 3
"""The flags FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of fallocate(2)."""

F_SEAL_FUTURE_WRITE: Final = 0x10
FOREVER: Final = b"\xff" * 7 + b"\x7f"
"""Bytes to write in place of a deadline or a generation: a very large number."""

WORD_BYTES: Final = 8
MOST_FDS: Final = 64

Attempts = dict[str, Callable[[], Any]]


def attempts(fds: PageFds, mapped_at: int) -> Attempts:
    """Return the attempts by name. If one succeeds, a deadline could then be written."""
    return on_mappings(fds.lease, mapped_at) | on_the_descriptor(fds.lease) | by_opening_it_anew(fds) | on_seals(fds)


def on_mappings(lease: int, mapped_at: int) -> Attempts:
    both = mmap.PROT_READ | mmap.PROT_WRITE
    return {
        "map it for writing": lambda: mmap.mmap(lease, PAGE_BYTES, prot=both),
        "make the mapping writable": lambda: system_call(X86_64["mprotect"], mapped_at, PAGE_BYTES, both),
        "punch the mapping": lambda: system_call(X86_64["madvise"], mapped_at, PAGE_BYTES, MADV_REMOVE),
    }


def on_the_descriptor(lease: int) -> Attempts:
    return {
        "write": lambda: os.write(lease, FOREVER),
        "write at the deadline": lambda: os.pwrite(lease, FOREVER, WORD_BYTES),
        "write several": lambda: os.pwritev(lease, [FOREVER, FOREVER], WORD_BYTES),
        "empty it": lambda: os.ftruncate(lease, 0),
        "enlarge it": lambda: os.ftruncate(lease, 2 * PAGE_BYTES),
        "punch it": lambda: system_call(X86_64["fallocate"], lease, PUNCH_HOLE, 0, PAGE_BYTES),
        "change how it is open": lambda: made_writable(lease),
        "a writable descriptor of it": lambda: writable_one_of(lease),
    }


def by_opening_it_anew(fds: PageFds) -> Attempts:
    lease = fds.lease
    return {
        "open it by its number": lambda: os.open(f"/proc/self/fd/{lease}", os.O_RDWR),
        "open it by its number, to write alone": lambda: os.open(f"/proc/self/fd/{lease}", os.O_WRONLY),
        "open it by its number, emptied": lambda: os.open(f"/proc/self/fd/{lease}", os.O_RDWR | os.O_TRUNC),
        "open it by the thread's number": lambda: os.open(f"/proc/thread-self/fd/{lease}", os.O_RDWR),
        "open it by /dev/fd": lambda: os.open(f"/dev/fd/{lease}", os.O_RDWR),
        "change its mode": lambda: os.fchmod(lease, 0o777),
        "change its mode by its name": lambda: os.chmod(f"/proc/self/fd/{lease}", 0o777),
        "change its owner": lambda: os.fchown(lease, os.geteuid(), os.getegid()),
        "truncate it by its name": lambda: os.truncate(f"/proc/self/fd/{lease}", 0),
    }


def on_seals(fds: PageFds) -> Attempts:
    seals = fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE
    return {
        "seal it": lambda: fcntl.fcntl(fds.lease, fcntl.F_ADD_SEALS, seals),
        # If one of these succeeded, the broker would die of SIGBUS, or the next broker could not map the worker's
        # claims.
        "seal the claims": lambda: fcntl.fcntl(fds.claims, fcntl.F_ADD_SEALS, seals),
        "empty the claims": lambda: os.ftruncate(fds.claims, 0),
    }


def made_writable(lease: int) -> int:
    fcntl.fcntl(lease, fcntl.F_SETFL, os.O_RDWR)
    return os.pwrite(lease, FOREVER, WORD_BYTES)


def writable_one_of(lease: int) -> int:
    """Return a writable descriptor of the page that the zygote has left open. Raises OSError if there is none."""
    for fd in range(MOST_FDS):
        try:
            is_it = os.path.samestat(os.fstat(fd), os.fstat(lease))
            if is_it and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                return fd
        except OSError:
            continue
    raise OSError(errno.EBADF, "there is none")


def outcome_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def live(spec: WorkerSpec, driver: Driver, channel: socket.socket, page_fds: PageFds) -> NoReturn:
    """Report that the worker is ready, then the attempts' outcomes. Repeat the attempts forever."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_name(f"gpul-{spec.lease_id:032x}")
    page = WorkerPage(page_fds)
    tried = attempts(page_fds, address_of(page.word))
    send_message(channel, {"op": "ready"})
    send_message(channel, {"op": "tried", "outcomes": {name: outcome_of(attempt) for name, attempt in tried.items()}})
    numbers = random.Random(spec.lease_id)
    while True:
        for attempt in tried.values():
            outcome_of(attempt)
        for at in range(PAGE_BYTES // WORD_BYTES):
            page.counters[at] = numbers.choice((0, 1, numbers.getrandbits(64), 2**64 - 1))
        # Claim that no kernel is running, even if one is.
        page.counters[Counter.KERNEL_SINCE_NS] = 0
        try:
            send_message(channel, {"op": "attached"})
        except (ChannelClosed, BlockingIOError):
            continue


def store(spec: WorkerSpec, driver: Driver, channel: socket.socket, page_fds: PageFds) -> NoReturn:
    """Report that the worker is ready, and store a deadline into the mapping of the page."""
    at = address_of(WorkerPage(page_fds).word)
    send_message(channel, {"op": "ready"})
    ctypes.memmove(at + WORD_BYTES, FOREVER, len(FOREVER))
    raise AssertionError("it was stored")


def live_by_size(spec: WorkerSpec, driver: Driver, channel: socket.socket, page_fds: PageFds) -> WorkerExit:
    """Be hostile if the lease has HOSTILE_BYTES."""
    if spec.size_bytes == HOSTILE_BYTES:
        live(spec, driver, channel, page_fds)
    return main.run_lease_worker(spec, driver, channel, page_fds)


if __name__ == "__main__":
    zygote.run_lease_worker = live_by_size  # type: ignore[attr-defined]
    sys.exit(zygote.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:])))
