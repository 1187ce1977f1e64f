"""The filter of a worker's system calls (seccomp(2)): an allow-list, as a classic BPF program over struct seccomp_data.

It is an allow-list because there are two dozen calls by which a worker can harm another worker of the same user (by
changing its limits, priority or affinity, or by one of several calls that send signals), and new kernels add more. The
list contains the calls that workers made on an H100 and with the embedded driver, and further calls of the C library,
Python and threads for the same purposes. Most other calls fail with EPERM, which callers can handle. Calls that have an
older substitute, and calls newer than this list, fail with ENOSYS, so that the C library falls back to older ones. A
call that no honest worker makes ends the process.

The program is built without a library such as libseccomp: it is small, it depends on the worker's process id, and a GPU
host need not have that library. Pages may become executable, because the embedded driver compiles its kernels in the
worker.
"""

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from gpulease.daemon.host.processes import prctl

Code = list[tuple[int, int, int, int]]
"""Instructions (struct sock_filter): operation, instructions to skip if true and if false, constant."""

# struct seccomp_data: the call's number, the architecture, the instruction pointer, and six arguments of 8 bytes.
_NUMBER_AT: Final = 0
_ARCHITECTURE_AT: Final = 4
_ARGUMENTS_AT: Final = 16

# BPF_LD|BPF_W|BPF_ABS, BPF_ALU|BPF_AND|BPF_K, BPF_JMP|BPF_JEQ|BPF_K, BPF_JMP|BPF_JGE|BPF_K and BPF_RET|BPF_K.
_LOAD: Final = 0x20
_AND: Final = 0x54
_IF_EQUAL: Final = 0x15
_IF_NOT_LESS: Final = 0x35
_RETURN: Final = 0x06

# Actions (SECCOMP_RET_*). An error's number is in the low 16 bits of _FAIL.
ALLOW: Final = 0x7FFF0000
KILL: Final = 0x80000000
"""SECCOMP_RET_KILL_PROCESS: ends the process like an uncaught SIGSYS."""

_FAIL: Final = 0x00050000

X32_BIT: Final = 0x40000000
"""The bit that marks calls of the x32 ABI. Without it, the same number can mean a different call."""


def fail(errno: int) -> int:
    """Return the action that skips the call and returns this error."""
    return _FAIL | errno


def result(action: int) -> Code:
    """Return the instruction that returns an action from the filter."""
    return [(_RETURN, 0, 0, action)]


def head(architecture: int) -> Code:
    """Return instructions that end the process if the call is of another ABI, and otherwise load the call's number."""
    return [
        # Numbers have a meaning only within one ABI, so calls of another ABI are handled before any comparison.
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IF_EQUAL, 1, 0, architecture),
        *result(KILL),
        # The x32 ABI has the same architecture value; a bit of the number distinguishes it.
        (_LOAD, 0, 0, _NUMBER_AT),
        (_IF_NOT_LESS, 0, 1, X32_BIT),
        *result(KILL),
    ]


def on(number: int, action: Code) -> Code:
    """Return the instructions for the call with this number; `action` ends in a result."""
    return [(_IF_EQUAL, 0, len(action), number), *action]


def beyond(number: int, action: int) -> Code:
    """Return the instructions for calls with numbers above this one."""
    return [(_IF_NOT_LESS, 0, 1, number + 1), *result(action)]


def if_argument(place: int, values: Iterable[int], then: int, otherwise: int, mask: int = 0xFFFFFFFF) -> Code:
    """Return a branch on the low half of an argument, because the kernel reads only that half of an int."""
    code: Code = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * place), (_AND, 0, 0, mask)]
    for value in values:
        # Each comparison jumps over its own result if it fails.
        code += [(_IF_EQUAL, 0, 1, value & 0xFFFFFFFF), *result(then)]
    return code + result(otherwise)


def unless_argument(place: int, values: tuple[int, ...], mask: int = 0xFFFFFFFF) -> Code:
    """Return instructions that continue if the low half of an argument is one of these values, and deny otherwise."""
    code: Code = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * place), (_AND, 0, 0, mask)]
    # A match jumps past the last instruction of this part; otherwise the next comparison follows.
    code += [(_IF_EQUAL, len(values) - number, 0, value) for number, value in enumerate(values)]
    return code + result(_DENY)


def unless_null(place: int, then: int) -> Code:
    """Return instructions that continue if an argument is a null pointer: both halves are zero."""
    # Classic BPF loads 32 bits at a time, and a pointer has 64.
    halves = (_ARGUMENTS_AT + 8 * place, _ARGUMENTS_AT + 8 * place + 4)
    return [step for at in halves for step in ((_LOAD, 0, 0, at), (_IF_EQUAL, 1, 0, 0), *result(then))]


def assemble(code: Code) -> bytes:
    """Return the program as struct sock_filter[]."""
    # A 16-bit operation, two 8-bit jumps and a 32-bit constant, in the host's byte order.
    return b"".join(struct.pack("=HBBI", *step) for step in code)


NEWEST: Final = 450
"""The newest call that this list takes into account: set_mempolicy_home_node of Linux 5.17."""

X86_64: Final = MappingProxyType(
    {
        "read": 0,
        "write": 1,
        "open": 2,
        "close": 3,
        "stat": 4,
        "fstat": 5,
        "lstat": 6,
        "poll": 7,
        "lseek": 8,
        "mmap": 9,
        "mprotect": 10,
        "munmap": 11,
        "brk": 12,
        "rt_sigaction": 13,
        "rt_sigprocmask": 14,
        "rt_sigreturn": 15,
        "ioctl": 16,
        "pread64": 17,
        "pwrite64": 18,
        "readv": 19,
        "writev": 20,
        "access": 21,
        "pipe": 22,
        "select": 23,
        "sched_yield": 24,
        "mremap": 25,
        "msync": 26,
        "mincore": 27,
        "madvise": 28,
        "dup": 32,
        "dup2": 33,
        "nanosleep": 35,
        "getpid": 39,
        "socket": 41,
        "connect": 42,
        "accept": 43,
        "sendto": 44,
        "recvfrom": 45,
        "sendmsg": 46,
        "recvmsg": 47,
        "shutdown": 48,
        "bind": 49,
        "listen": 50,
        "getsockname": 51,
        "getpeername": 52,
        "socketpair": 53,
        "setsockopt": 54,
        "getsockopt": 55,
        "clone": 56,
        "exit": 60,
        "kill": 62,
        "uname": 63,
        "fcntl": 72,
        "flock": 73,
        "ftruncate": 77,
        "getcwd": 79,
        "rename": 82,
        "mkdir": 83,
        "unlink": 87,
        "symlink": 88,
        "readlink": 89,
        "gettimeofday": 96,
        "getrlimit": 97,
        "getrusage": 98,
        "sysinfo": 99,
        "times": 100,
        "ptrace": 101,
        "getuid": 102,
        "getgid": 104,
        "geteuid": 107,
        "getegid": 108,
        "getppid": 110,
        "getpgrp": 111,
        "getgroups": 115,
        "getresuid": 118,
        "getresgid": 120,
        "rt_sigpending": 127,
        "rt_sigtimedwait": 128,
        "rt_sigsuspend": 130,
        "sigaltstack": 131,
        "statfs": 137,
        "fstatfs": 138,
        "sched_getparam": 143,
        "sched_getscheduler": 145,
        "sched_get_priority_max": 146,
        "sched_get_priority_min": 147,
        "mlock": 149,
        "munlock": 150,
        "pivot_root": 155,
        "prctl": 157,
        "arch_prctl": 158,
        "chroot": 161,
        "mount": 165,
        "umount2": 166,
        "swapon": 167,
        "swapoff": 168,
        "reboot": 169,
        "iopl": 172,
        "ioperm": 173,
        "init_module": 175,
        "delete_module": 176,
        "gettid": 186,
        "time": 201,
        "futex": 202,
        "sched_setaffinity": 203,
        "sched_getaffinity": 204,
        "getdents64": 217,
        "set_tid_address": 218,
        "restart_syscall": 219,
        "fadvise64": 221,
        "clock_gettime": 228,
        "clock_getres": 229,
        "clock_nanosleep": 230,
        "exit_group": 231,
        "epoll_wait": 232,
        "epoll_ctl": 233,
        "tgkill": 234,
        "mbind": 237,
        "set_mempolicy": 238,
        "get_mempolicy": 239,
        "kexec_load": 246,
        "openat": 257,
        "mkdirat": 258,
        "newfstatat": 262,
        "unlinkat": 263,
        "renameat": 264,
        "readlinkat": 267,
        "faccessat": 269,
        "pselect6": 270,
        "ppoll": 271,
        "unshare": 272,
        "set_robust_list": 273,
        "utimensat": 280,
        "epoll_pwait": 281,
        "fallocate": 285,
        "accept4": 288,
        "eventfd2": 290,
        "epoll_create1": 291,
        "dup3": 292,
        "pipe2": 293,
        "rt_tgsigqueueinfo": 297,
        "prlimit64": 302,
        "setns": 308,
        "getcpu": 309,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "finit_module": 313,
        "renameat2": 316,
        "getrandom": 318,
        "memfd_create": 319,
        "kexec_file_load": 320,
        "bpf": 321,
        "membarrier": 324,
        "mlock2": 325,
        "statx": 332,
        "rseq": 334,
        "io_uring_setup": 425,
        "io_uring_enter": 426,
        "io_uring_register": 427,
        "clone3": 435,
        "close_range": 436,
        "faccessat2": 439,
        "futex_waitv": 449,
    }
)


ALLOWED: Final = (
    # Use of open descriptors and sockets, and waits for them.
    "read",
    "write",
    "readv",
    "writev",
    "pread64",
    "pwrite64",
    "close",
    "close_range",
    "lseek",
    "dup",
    "dup2",
    "dup3",
    "pipe",
    "pipe2",
    "eventfd2",
    "poll",
    "ppoll",
    "select",
    "pselect6",
    "epoll_create1",
    "epoll_ctl",
    "epoll_wait",
    "epoll_pwait",
    "recvmsg",
    "recvfrom",
    "sendmsg",
    "sendto",
    "shutdown",
    "getsockname",
    "getpeername",
    "getsockopt",
    "setsockopt",
    # CUDA creates an abstract socket, from which it passes descriptors.
    "bind",
    "listen",
    "accept",
    "accept4",
    # Memory shared with a client.
    "memfd_create",
    "ftruncate",
    "fallocate",
    # Private memory.
    "brk",
    "mmap",
    "munmap",
    "mremap",
    "mprotect",
    "madvise",
    "mincore",
    "msync",
    "mlock",
    "mlock2",
    "munlock",
    "membarrier",
    "get_mempolicy",
    "set_mempolicy",
    "mbind",
    # Files within Landlock's reach.
    "open",
    "openat",
    "stat",
    "lstat",
    "fstat",
    "newfstatat",
    "statx",
    "statfs",
    "fstatfs",
    "access",
    "faccessat",
    "faccessat2",
    "readlink",
    "readlinkat",
    "getdents64",
    "getcwd",
    "fadvise64",
    "flock",
    # Threads.
    "futex",
    "set_robust_list",
    "rseq",
    "set_tid_address",
    "arch_prctl",
    "sched_yield",
    "sched_getaffinity",
    "sched_getparam",
    "sched_getscheduler",
    "sched_get_priority_max",
    "sched_get_priority_min",
    "getcpu",
    "exit",
    "exit_group",
    # Signals to the worker itself.
    "rt_sigaction",
    "rt_sigprocmask",
    "rt_sigpending",
    "rt_sigtimedwait",
    "rt_sigsuspend",
    "rt_sigreturn",
    "sigaltstack",
    "restart_syscall",
    # Time.
    "clock_gettime",
    "clock_getres",
    "clock_nanosleep",
    "nanosleep",
    "gettimeofday",
    "time",
    "times",
    "getrusage",
    # The process's own attributes.
    "getpid",
    "getppid",
    "gettid",
    "getpgrp",
    "getuid",
    "geteuid",
    "getgid",
    "getegid",
    "getgroups",
    "getresuid",
    "getresgid",
    "getrlimit",
    "sysinfo",
    "uname",
    "getrandom",
)

FOR_FILES: Final = ("mkdir", "mkdirat", "unlink", "unlinkat", "rename", "renameat", "renameat2", "utimensat")
"""Calls for a folder of compiled code, if the operator gives workers one."""

FATAL: Final = (
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "bpf",
    "mount",
    "umount2",
    "pivot_root",
    "chroot",
    "setns",
    "unshare",
    "init_module",
    "finit_module",
    "delete_module",
    "kexec_load",
    "kexec_file_load",
    "reboot",
    "swapon",
    "swapoff",
    "iopl",
    "ioperm",
)
"""Calls that no driver, no library and no code of ours needs."""

UNKNOWN: Final = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register", "futex_waitv")
"""Calls that callers can do without on an older kernel."""


MACHINE: Final = "x86_64"
"""The only machine type with a filter, as platform.machine() names it."""

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
"""TIOCSTI and TIOCLINUX, which type into the terminal that the daemon was started from."""

_SIGNAL_OWNERS_BY_IOCTL: Final = (0x8901, 0x8902)
_SIGNAL_OWNERS_BY_FCNTL: Final = (8, 10, 15)
"""FIOSETOWN and SIOCSPGRP; F_SETOWN, F_SETSIG and F_SETOWN_EX. They make the kernel send a chosen signal to any process
of the same user when a descriptor becomes ready."""

_PRCTL: Final = (15, 16, 0x53564D41)
"""PR_SET_NAME, PR_GET_NAME, PR_SET_VMA. PR_SET_PDEATHSIG and PR_SET_DUMPABLE are missing: the first would let a worker
outlive its zygote, and the second would make the worker traceable."""

_SOCKET_KIND: Final = 0xF
"""The bits of a socket's type; the other bits are flags."""


class NoFilter(Exception):
    """There is no filter for this machine, for the reason in the message."""


def install(*, writes_files: bool, connects: bool = False) -> None:
    """Install the filter in this process; no_new_privs must be set. Raises NoFilter and OSError."""
    # The process id is part of the program: calls that name a process may name only this one.
    program = filter_for(os.getpid(), writes_files=writes_files, connects=connects)
    # Both buffers must live until the call returns: the kernel copies the program from them.
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog.
    program_header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(program_header))


def filter_for(pid: int, *, writes_files: bool, connects: bool = False) -> bytes:
    """Return the filter for the process with the id `pid`. Raises NoFilter.

    Args:
        pid: The process's id.
        writes_files: Whether the process creates and removes files in its own folder.
        connects: Whether the process connects to others over the network; such a process does not listen.
    """
    machine = platform.machine()
    if machine != MACHINE:
        raise NoFilter(f"the machine must be {MACHINE} for a filter, not {machine}")
    # The order matters. Calls of another ABI come first; then calls that depend on their arguments, because some of
    # these are the most frequent; then the lists; and at the end all calls that are newer or unknown.
    code = head(_X86_64)
    by_arguments = _by_arguments(pid, writes_files=writes_files) | dict(_TO_CONNECT if connects else {})
    for name, then in by_arguments.items():
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
    """Return the instructions for calls that are allowed only with some arguments, by the calls' names."""
    own_pid = (pid,)
    unix = unless_argument(0, (socket.AF_UNIX,))
    # A datagram socket can send to any other socket; a stream or seqpacket socket, only to its peer.
    pair = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
    return {
        "ioctl": if_argument(1, (*_TERMINAL_INPUT, *_SIGNAL_OWNERS_BY_IOCTL), _DENY, ALLOW),
        "fcntl": if_argument(1, _SIGNAL_OWNERS_BY_FCNTL, _DENY, ALLOW),
        # Allow threads but no processes. A filter can't read clone3's arguments, so that call fails with ENOSYS.
        "clone": if_argument(0, (_CLONE_THREAD,), ALLOW, _DENY, _CLONE_THREAD | _CLONE_NAMESPACES),
        "socket": unix + if_argument(1, (socket.SOCK_SEQPACKET,), ALLOW, _DENY, _SOCKET_KIND),
        "socketpair": unix + if_argument(1, pair, ALLOW, _DENY, _SOCKET_KIND),
        # CUDA creates this socket to look for an MPS daemon, and works without one.
        "connect": _NOT_THERE,
        "kill": if_argument(0, own_pid, ALLOW, _DENY),
        "tgkill": if_argument(0, own_pid, ALLOW, _DENY),
        "rt_tgsigqueueinfo": if_argument(0, own_pid, ALLOW, _DENY),
        # 0 and the process's own id mean the calling process.
        "sched_setaffinity": if_argument(0, (0, pid), ALLOW, _DENY),
        "prlimit64": unless_null(2, _DENY) + if_argument(0, (0, pid), ALLOW, _DENY),
        "prctl": if_argument(0, _PRCTL, ALLOW, _DENY),
        **dict.fromkeys(() if writes_files else FOR_FILES, _NOT_THERE),
        # The driver tries to create links in a folder of compiled code, and continues if that fails.
        "symlink": _NOT_THERE,
    }


_TO_CONNECT: Final[Mapping[str, Code]] = MappingProxyType(
    {
        # Allow no local sockets, because with them the process could connect to the broker and other services.
        "socket": unless_argument(1, (socket.SOCK_STREAM, socket.SOCK_DGRAM), _SOCKET_KIND)
        + if_argument(0, (socket.AF_INET, socket.AF_INET6), ALLOW, _DENY),
        "connect": result(ALLOW),
        **dict.fromkeys(("listen", "accept", "accept4"), result(_DENY)),
    }
)
"""The instructions that replace a worker's instructions in a process that connects to others over the network."""
