"""The filter of system calls: those that a worker has a use for (seccomp(2)).

An allow-list, not a deny-list: what one worker can do to another of the same user (limits, priority, affinity, signals
by many ways) is spread over two dozen calls, and each new kernel has more. The list is what workers were seen to call
on an H100 and with the embedded driver, and what else the C library, Python and threads may call for the same ends.
What is not on it fails with EPERM, which callers know how to live with; calls that nothing honest makes end the
process; calls newer than this list do not exist, so that the C library takes the older ones.

The program is our own, because it is small and depends on the worker's process id; a library for it would be one more
that a GPU host need not have. Pages may be made executable: the embedded driver's kernels are compiled in the worker.
"""

import ctypes
import errno
import os
import platform
import socket
import struct
from typing import Final

from gpulease.daemon.sandbox.bpf import (
    ALLOW,
    KILL,
    Code,
    assemble,
    beyond,
    fail,
    head,
    if_argument,
    on,
    result,
    unless_argument,
    unless_null,
)
from gpulease.daemon.sandbox.call_numbers import NEWEST, X86_64
from gpulease.daemon.sandbox.kernel import prctl
from gpulease.daemon.sandbox.operations import ALLOWED, FATAL, FOR_FILES, UNKNOWN

MACHINE: Final = "x86_64"
"""The one that there is a filter for, as platform.machine() has it."""

_X86_64: Final = 0xC000003E
"""AUDIT_ARCH_X86_64 of linux/audit.h."""

_PR_SET_SECCOMP: Final = 22
_MODE_FILTER: Final = 2

_DENY: Final = fail(errno.EPERM)
_ABSENT: Final = fail(errno.ENOSYS)

_NOT_THERE: Final = result(fail(errno.ENOENT))

_CLONE_THREAD: Final = 0x00010000
_CLONE_NAMESPACES: Final = 0x7E020080
"""CLONE_NEWTIME, _NEWNS, and _NEWCGROUP to _NEWNET."""

_TERMINAL_INPUT: Final = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: typing into the terminal that the daemon was started from."""

_SIGNAL_OWNERS_BY_IOCTL: Final = (0x8901, 0x8902)
_SIGNAL_OWNERS_BY_FCNTL: Final = (8, 10, 15)
"""FIOSETOWN and SIOCSPGRP; F_SETOWN, F_SETSIG and F_SETOWN_EX: having the kernel send a signal of one's choice to any
process of the same user when a descriptor becomes ready."""

_PRCTL: Final = (15, 16, 0x53564D41)
"""PR_SET_NAME, PR_GET_NAME, PR_SET_VMA. Not PR_SET_PDEATHSIG, which would let it outlive its zygote, nor
PR_SET_DUMPABLE."""

_SOCKET_KIND: Final = 0xF
"""Of a socket's type; the rest of it are flags."""


class NoFilter(Exception):
    """There is no filter for this machine; the message says why."""


def install(*, writes_files: bool) -> None:
    """Put this process under the filter; no_new_privs must be set. Raises NoFilter and OSError."""
    program = filter_for(os.getpid(), writes_files=writes_files)
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog.
    head_of_it = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(head_of_it))


def filter_for(pid: int, *, writes_files: bool) -> bytes:
    """The filter of the process of that id. Raises NoFilter."""
    machine = platform.machine()
    if machine != MACHINE:
        raise NoFilter(f"there is no filter for {machine}, only for {MACHINE}")
    code = head(_X86_64)
    for name, then in _by_arguments(pid, writes_files=writes_files).items():
        code += on(X86_64[name], then)
    for names, action in (
        (ALLOWED, ALLOW),
        (FOR_FILES if writes_files else (), ALLOW),
        (FATAL, KILL),
        (UNKNOWN, _ABSENT),
    ):
        for name in names:
            code += on(X86_64[name], result(action))
    return assemble(code + beyond(NEWEST, _ABSENT) + result(_DENY))


def _by_arguments(pid: int, *, writes_files: bool) -> dict[str, Code]:
    """Calls that are allowed for some ends; first, because some of them are the most frequent.

    And those that CUDA makes in vain, and gives up if they fail by anything but there being no such file.
    """
    of_itself = (pid,)
    unix = unless_argument(0, socket.AF_UNIX, _DENY)
    # A datagram socket could be written to anybody's; one of the two others only to whom it is connected.
    pair = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
    return {
        "ioctl": if_argument(1, (*_TERMINAL_INPUT, *_SIGNAL_OWNERS_BY_IOCTL), _DENY, ALLOW),
        "fcntl": if_argument(1, _SIGNAL_OWNERS_BY_FCNTL, _DENY, ALLOW),
        # Threads, and no processes. clone3 can't be looked into, so it is said not to exist.
        "clone": if_argument(0, (_CLONE_THREAD,), ALLOW, _DENY, _CLONE_THREAD | _CLONE_NAMESPACES),
        "socket": unix + if_argument(1, (socket.SOCK_SEQPACKET,), ALLOW, _DENY, _SOCKET_KIND),
        "socketpair": unix + if_argument(1, pair, ALLOW, _DENY, _SOCKET_KIND),
        # As if there were none: CUDA asks for an MPS daemon this way, and does without.
        "connect": _NOT_THERE,
        "kill": if_argument(0, of_itself, ALLOW, _DENY),
        "tgkill": if_argument(0, of_itself, ALLOW, _DENY),
        "rt_tgsigqueueinfo": if_argument(0, of_itself, ALLOW, _DENY),
        "sched_setaffinity": if_argument(0, (0, pid), ALLOW, _DENY),
        "prlimit64": unless_null(2, _DENY) + if_argument(0, (0, pid), ALLOW, _DENY),
        "prctl": if_argument(0, _PRCTL, ALLOW, _DENY),
        **dict.fromkeys(() if writes_files else FOR_FILES, _NOT_THERE),
        "symlink": _NOT_THERE,
    }
