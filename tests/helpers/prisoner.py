"""`python -m helpers.prisoner FOLDER WITHOUT ONLY`: attempts what an attacker's code in a compiler process might
attempt.

Each attempt runs in a forked process that first enters the sandbox, except the measures in WITHOUT. WITHOUT and ONLY
are JSON lists; an empty ONLY selects all attempts. The output is JSON with the outcome of each attempt: the name of an
error such as "EPERM"; "SIGSYS" if the process was killed; or "done" if nothing prevented it. Some attempts would do
harm if nothing prevented them, so without the filter of system calls only the attempts in ONLY run.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpulease.daemon.host.processes import prctl
from gpulease.daemon.sandbox.measures import Measure, SandboxNeeds, SandboxSettings, system_call
from gpulease.daemon.sandbox.resource_limits import MAX_LOCKED_BYTES
from gpulease.daemon.sandbox.syscall_filter import X86_64
from gpulease.daemon.sandbox.trial import prepare

CLONE_NEWUSER = 0x10000000
PTRACE_ATTACH = 16
F_SETSIG = 10
TIOCSTI = 0x5412


def call(name: str, *arguments: int) -> Callable[[], Any]:
    return lambda: system_call(X86_64[name] if name in X86_64 else OTHER_CALLS[name], *arguments)


OTHER_CALLS = {
    "execve": 59,
    "execveat": 322,
    "fork": 57,
    "vfork": 58,
    "pidfd_open": 434,
    "pidfd_getfd": 438,
    "pidfd_send_signal": 424,
    "tkill": 200,
    "rt_sigqueueinfo": 129,
    "setpriority": 141,
    "sched_setscheduler": 144,
    "ioprio_set": 251,
    "setrlimit": 160,
    "setuid": 105,
    "setgroups": 116,
    "personality": 135,
    "userfaultfd": 323,
    "perf_event_open": 298,
    "keyctl": 250,
    "add_key": 248,
    "open_by_handle_at": 304,
    "kcmp": 312,
    "shmget": 29,
    "mq_open": 240,
    "inotify_init1": 294,
    "memfd_secret": 447,
    "quotactl": 179,
    "migrate_pages": 256,
    "process_madvise": 440,
    "mknod": 133,
    "chmod": 90,
    "link": 86,
    "splice": 275,
    "sendfile": 40,
    "mount_setattr": 442,
    "cachestat": 451,
}


def datagram_to(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"x", path)


def connect_unix(address: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(address)


def run_from_memory() -> None:
    fd = os.memfd_create("program")
    os.write(fd, b"#!/bin/true\n")
    os.execve(fd, ["program"], {})


def own_signal_to(pid: int) -> None:
    reading, _ = os.pipe()
    fcntl.fcntl(reading, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(reading, fcntl.F_SETOWN, pid)


def name_of(name: str) -> int:
    buffer = ctypes.create_string_buffer(name.encode())
    NAMES.append(buffer)
    return ctypes.addressof(buffer)


NAMES: list[Any] = []


Attempts = dict[str, Callable[[], Any]]


def attempts(sibling: int, folder: Path, listening: str) -> Attempts:
    """Return all attempts by name.

    Args:
        sibling: Another worker's process.
        folder: A folder that everyone may access.
        listening: The address of an abstract socket.
    """
    zeros = (ctypes.c_uint64 * 32)()
    NAMES.append(zeros)
    at_zeros = ctypes.addressof(zeros)
    outright: Attempts = {name: call(name, 0, 0, 0, 0, 0) for name in DENIED_OUTRIGHT}
    return (
        on_files(sibling, folder)
        | on_sockets(listening)
        | on_programs(at_zeros)
        | on_processes(sibling, at_zeros)
        | on_the_host(at_zeros)
        | outright
    )


def on_files(sibling: int, folder: Path) -> Attempts:
    return {
        "read /etc/passwd": lambda: open("/etc/passwd").read(),
        "list /": lambda: os.listdir("/"),
        "read a file anybody may": lambda: (folder / "readable").read_text(),
        "write a file anybody may": lambda: (folder / "writable").write_text("x"),
        "make a file": lambda: (folder / "new").write_text("x"),
        "make a folder": lambda: (folder / "made").mkdir(),
        "remove a file": lambda: (folder / "writable").unlink(),
        "rename a file": lambda: (folder / "writable").rename(folder / "renamed"),
        "truncate a file": lambda: os.truncate(folder / "writable", 0),
        "make a named socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).bind(str(folder / "sock")),
        "write to /dev/shm": lambda: Path("/dev/shm/gpulease-test").write_text("x"),
        "write to /tmp": lambda: Path("/tmp/gpulease-test").write_text("x"),
        "read own environment": lambda: open("/proc/self/environ", "rb").read(),
        "read a sibling's memory": lambda: open(f"/proc/{sibling}/mem", "rb").read(1),
        "read a sibling's map": lambda: open(f"/proc/{sibling}/maps").read(),
        "list a sibling's files": lambda: os.listdir(f"/proc/{sibling}/fd"),
    }


def on_sockets(listening: str) -> Attempts:
    return {
        "a TCP socket": lambda: socket.socket(socket.AF_INET),
        "an IPv6 socket": lambda: socket.socket(socket.AF_INET6),
        "a raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        "a netlink socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
        "a vsock": lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM),
        "a datagram to somebody's socket": lambda: datagram_to("/dev/log"),
        "a pair of datagram sockets": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
        "connect to an abstract socket": lambda: connect_unix(listening),
    }


def on_programs(at_zeros: int) -> Attempts:
    shell = name_of("/bin/sh")
    return {
        "exec": lambda: os.execve("/bin/sh", ["sh", "-c", "exit 0"], {}),
        "exec from memory": run_from_memory,
        "execveat": call("execveat", -100, shell, at_zeros, at_zeros, 0),
        "fork": os.fork,
        "vfork": call("vfork"),
        "clone without a thread": call("clone", signal.SIGCHLD, 0, 0, 0, 0),
        "clone of a namespace": call("clone", CLONE_NEWUSER | signal.SIGCHLD, 0, 0, 0, 0),
        "clone3": call("clone3", at_zeros, 64),
        "unshare": call("unshare", CLONE_NEWUSER),
        "setns": call("setns", 0, 0),
    }


def on_processes(sibling: int, at_zeros: int) -> Attempts:
    return {
        "ptrace a sibling": call("ptrace", PTRACE_ATTACH, sibling, 0, 0),
        "process_vm_readv": call("process_vm_readv", sibling, at_zeros, 1, at_zeros, 1, 0),
        "process_vm_writev": call("process_vm_writev", sibling, at_zeros, 1, at_zeros, 1, 0),
        "kill a sibling": lambda: os.kill(sibling, signal.SIGKILL),
        "kill its parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
        "kill everybody": lambda: os.kill(-1, 0),
        "tgkill a sibling": call("tgkill", sibling, sibling, signal.SIGKILL),
        "tkill a sibling": call("tkill", sibling, signal.SIGKILL),
        "queue a signal": call("rt_sigqueueinfo", sibling, signal.SIGKILL, at_zeros),
        "pidfd_open": call("pidfd_open", sibling, 0),
        "pidfd_send_signal": call("pidfd_send_signal", 0, signal.SIGKILL, 0, 0),
        "pidfd_getfd": call("pidfd_getfd", 0, 0, 0),
        "a signal by fcntl": lambda: own_signal_to(sibling),
        "type into the terminal": lambda: fcntl.ioctl(0, TIOCSTI, b"x"),
        "outlive its parent": lambda: prctl(1, 0),
        "be dumpable again": lambda: prctl(4, 1),
        "a sibling's limits": call("prlimit64", sibling, resource.RLIMIT_NOFILE, at_zeros, 0),
        "its own limits": call("prlimit64", 0, resource.RLIMIT_NOFILE, at_zeros, 0),
        "setrlimit": call("setrlimit", resource.RLIMIT_NOFILE, at_zeros),
        "a sibling's affinity": lambda: os.sched_setaffinity(sibling, {0}),
        "a sibling's priority": call("setpriority", 0, sibling, 19),
        "a sibling's scheduler": call("sched_setscheduler", sibling, 5, at_zeros),
        "a sibling's io priority": call("ioprio_set", 1, sibling, 0x6000),
    }


def on_the_host(at_zeros: int) -> Attempts:
    shell = name_of("/bin/sh")
    return {
        "be root again": lambda: os.setuid(0),
        "join a group": lambda: os.setgroups([0]),
        "mount": call("mount", shell, shell, shell, 0, 0),
        "chroot": call("chroot", shell),
        "bpf": call("bpf", 0, at_zeros, 64),
        "a kernel module": call("init_module", at_zeros, 0, shell),
        "kexec": call("kexec_load", 0, 0, 0, 0),
        "reboot": call("reboot", 0, 0, 0, 0),
        "an old call that is a new one by x32": lambda: system_call(0x40000000 | 39),
        "a later kernel's call": call("cachestat", 0, 0, 0, 0),
        "io_uring": call("io_uring_setup", 4, at_zeros),
        "10,000 descriptors": lambda: [os.dup(0) for _ in range(10_000)],
        "a file of 2 GiB in memory": lambda: os.ftruncate(os.memfd_create("large"), 2 << 30),
        "a page of locked memory more than allowed": lambda: _lock(MAX_LOCKED_BYTES + mmap.PAGESIZE),
    }


DENIED_OUTRIGHT = (
    "personality",
    "userfaultfd",
    "perf_event_open",
    "keyctl",
    "add_key",
    "open_by_handle_at",
    "kcmp",
    "shmget",
    "mq_open",
    "inotify_init1",
    "memfd_secret",
    "quotactl",
    "migrate_pages",
    "process_madvise",
    "mknod",
    "chmod",
    "link",
    "splice",
    "sendfile",
    "mount_setattr",
)


def harmless() -> Attempts:
    return {
        "a thread": lambda: _joined(threading.Thread(target=time.sleep, args=(0.001,))),
        "shared memory": lambda: os.ftruncate(os.memfd_create("arena", os.MFD_ALLOW_SEALING), 1 << 30),
        "a socket pair": lambda: socket.socketpair(),
        "a signal to itself": lambda: os.kill(os.getpid(), 0),
        "its own limits, read": lambda: resource.getrlimit(resource.RLIMIT_STACK),
        "its name": lambda: prctl(15, name_of("gpul-name")),
        "random bytes": lambda: os.urandom(8),
        "the log": lambda: sys.stderr.write(""),
        "memory to run code in": _run_made_code,
    }


def _joined(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


def _run_made_code() -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\xb8\x2a\x00\x00\x00\xc3")
    function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    if function() != 42:
        raise OSError(errno.EFAULT, "the code did not run")


def _lock(size_bytes: int) -> int:
    page = mmap.mmap(-1, size_bytes)
    return system_call(X86_64["mlock"], ctypes.addressof(ctypes.c_char.from_buffer(page)), size_bytes)


def outcome_of(attempt: Callable[[], Any], enter: Callable[[tuple[int, ...], int], None]) -> str:
    """Return the outcome of an attempt in a forked process that has entered the sandbox."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = b"?"
        try:
            enter((writing,), os.getppid())
            own = os.getpid()
            attempt()
            if os.getpid() == own:
                said = b"done"
        except OSError as error:
            said = errno.errorcode[error.errno or 0].encode()
        finally:
            os.write(writing, said)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else told


def main(folder: Path, without: list[str], only: list[str]) -> None:
    left_out = frozenset(map(Measure, without))
    plan, findings = prepare(SandboxSettings(without=left_out), SandboxNeeds(), lambda owner: ())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0gpulease-test-{os.getpid()}")
    listener.listen()
    ready, told = os.pipe()
    sibling = os.fork()
    if sibling == 0:
        os.close(ready)
        plan.enter((told,), os.getppid())
        os.write(told, b"r")
        while True:
            time.sleep(60)
    os.read(ready, 1)
    address = f"\0gpulease-test-{os.getpid()}"
    everything = attempts(sibling, folder, address) | harmless()
    has_filter = any(finding.measure is Measure.SYSCALLS and finding.is_on for finding in findings)
    names = only or (list(everything) if has_filter else [])
    outcomes = {name: outcome_of(everything[name], plan.enter) for name in names}
    # If a signal was sent to the sibling, wait until it has ended.
    time.sleep(0.1)
    is_alive = os.waitpid(sibling, os.WNOHANG) == (0, 0)
    if is_alive:
        os.kill(sibling, signal.SIGKILL)
        os.waitpid(sibling, 0)
    found = [finding.to_message() for finding in findings]
    print(json.dumps({"findings": found, "outcomes": outcomes, "sibling is alive": is_alive}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
