"""Hostile code in the sandbox, attempt by attempt, and each layer without the one in front of it.

Where the kernel lacks a measure the tests of what it stops are skipped; the daemon would say so.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

Imprisoned = Callable[..., dict[str, Any]]

BY_FILES = {
    "read /etc/passwd": "EACCES",
    "list /": "EACCES",
    "read a file anybody may": "EACCES",
    "write a file anybody may": "EACCES",
    "make a file": "EACCES",
    "make a named socket": "EACCES",
    "write to /dev/shm": "EACCES",
    "write to /tmp": "EACCES",
    "read a sibling's memory": "EACCES",
    "read a sibling's map": "EACCES",
    "list a sibling's files": "EACCES",
}

BY_SYSCALLS = {
    "make a folder": "ENOENT",
    "remove a file": "ENOENT",
    "rename a file": "ENOENT",
    "truncate a file": "EPERM",
    "a TCP socket": "EPERM",
    "an IPv6 socket": "EPERM",
    "a raw socket": "EPERM",
    "a netlink socket": "EPERM",
    "a vsock": "EPERM",
    "a datagram to somebody's socket": "EPERM",
    "a pair of datagram sockets": "EPERM",
    "connect to an abstract socket": "ENOENT",
    "exec": "EPERM",
    "exec from memory": "EPERM",
    "execveat": "EPERM",
    "fork": "EPERM",
    "vfork": "EPERM",
    "clone without a thread": "EPERM",
    "clone of a namespace": "EPERM",
    "clone3": "ENOSYS",
    "unshare": "SIGSYS",
    "setns": "SIGSYS",
    "ptrace a sibling": "SIGSYS",
    "process_vm_readv": "SIGSYS",
    "process_vm_writev": "SIGSYS",
    "kill a sibling": "EPERM",
    "kill its parent": "EPERM",
    "kill everybody": "EPERM",
    "tgkill a sibling": "EPERM",
    "tkill a sibling": "EPERM",
    "queue a signal": "EPERM",
    "pidfd_open": "EPERM",
    "pidfd_send_signal": "EPERM",
    "pidfd_getfd": "EPERM",
    "a signal by fcntl": "EPERM",
    "type into the terminal": "EPERM",
    "outlive its parent": "EPERM",
    "be dumpable again": "EPERM",
    "a sibling's limits": "EPERM",
    "its own limits": "EPERM",
    "setrlimit": "EPERM",
    "a sibling's affinity": "EPERM",
    "a sibling's priority": "EPERM",
    "a sibling's scheduler": "EPERM",
    "a sibling's io priority": "EPERM",
    "be root again": "EPERM",
    "join a group": "EPERM",
    "mount": "SIGSYS",
    "chroot": "SIGSYS",
    "bpf": "SIGSYS",
    "a kernel module": "SIGSYS",
    "kexec": "SIGSYS",
    "reboot": "SIGSYS",
    "an old call that is a new one by x32": "SIGSYS",
    "a later kernel's call": "ENOSYS",
    "io_uring": "ENOSYS",
    "personality": "EPERM",
    "userfaultfd": "EPERM",
    "perf_event_open": "EPERM",
    "keyctl": "EPERM",
    "add_key": "EPERM",
    "open_by_handle_at": "EPERM",
    "kcmp": "EPERM",
    "shmget": "EPERM",
    "mq_open": "EPERM",
    "inotify_init1": "EPERM",
    "memfd_secret": "EPERM",
    "quotactl": "EPERM",
    "migrate_pages": "EPERM",
    "process_madvise": "EPERM",
    "mknod": "EPERM",
    "chmod": "EPERM",
    "link": "EPERM",
    "splice": "EPERM",
    "sendfile": "EPERM",
    "mount_setattr": "EPERM",
}

BY_LIMITS = {
    "10,000 descriptors": "EMFILE",
    "a file of 2 GiB in memory": "EFBIG",
    "a page of locked memory more than allowed": "ENOMEM",
}

BEHIND_THE_FILTER = {
    # By Landlock.
    "read /etc/passwd": ("EACCES", "files"),
    "make a folder": ("EACCES", "files"),
    "remove a file": ("EACCES", "files"),
    "rename a file": ("EACCES", "files"),
    "truncate a file": ("EACCES", "files"),
    "exec": ("EACCES", "files"),
    "kill a sibling": ("EPERM", "scope"),
    "tgkill a sibling": ("EPERM", "scope"),
    "queue a signal": ("EPERM", "scope"),
    "connect to an abstract socket": ("EPERM", "scope"),
    # By no other process of the user being traceable.
    "ptrace a sibling": ("EPERM", "undumpable"),
    # By having no privileges.
    "be root again": ("EPERM", "user"),
    "join a group": ("EPERM", "capabilities"),
    "a raw socket": ("EPERM", "capabilities"),
}

HARMLESS = (
    "a thread",
    "shared memory",
    "a socket pair",
    "a signal to itself",
    "its own limits, read",
    "its name",
    "random bytes",
    "the log",
    "memory to run code in",
)


def needs(found: dict[str, Any], *measures: str) -> None:
    off = [finding for finding in found["findings"] if not finding["on"] and finding["measure"] in measures]
    if off:
        pytest.skip(f"this host has it off: {off}")


def outcomes_of(found: dict[str, Any], attempts: Iterable[str]) -> dict[str, str]:
    return {attempt: found["outcomes"][attempt] for attempt in attempts}


@pytest.mark.exhaustive
def test_what_landlock_stops(imprisoned: Imprisoned) -> None:
    found = imprisoned()
    needs(found, "files", "syscalls")
    assert outcomes_of(found, BY_FILES) == BY_FILES


@pytest.mark.exhaustive
def test_what_the_filter_stops(imprisoned: Imprisoned) -> None:
    found = imprisoned()
    needs(found, "syscalls")
    assert outcomes_of(found, BY_SYSCALLS) == BY_SYSCALLS


def test_what_limits_stop(imprisoned: Imprisoned) -> None:
    found = imprisoned()
    needs(found, "syscalls")
    assert outcomes_of(found, BY_LIMITS) == BY_LIMITS


@pytest.mark.exhaustive
def test_what_a_worker_may_do(imprisoned: Imprisoned) -> None:
    found = imprisoned()
    needs(found, "syscalls")
    assert outcomes_of(found, HARMLESS) == dict.fromkeys(HARMLESS, "done")


@pytest.mark.exhaustive
@pytest.mark.parametrize("attempt", BEHIND_THE_FILTER)
def test_what_is_stopped_without_the_filter_too(imprisoned: Imprisoned, attempt: str) -> None:
    found = imprisoned(("syscalls",), tuple(BEHIND_THE_FILTER))
    outcome, measure = BEHIND_THE_FILTER[attempt]
    needs(found, measure)
    assert found["outcomes"][attempt] == outcome


@pytest.mark.parametrize("attempt", ["read a sibling's memory", "read a sibling's map", "list a sibling's files"])
def test_workers_of_one_user_are_closed_to_each_other_without_landlock(imprisoned: Imprisoned, attempt: str) -> None:
    found = imprisoned(
        ("syscalls", "files"), ("read a sibling's memory", "read a sibling's map", "list a sibling's files")
    )
    assert found["outcomes"][attempt] == "EACCES"


def test_the_sibling_lives(imprisoned: Imprisoned) -> None:
    found = imprisoned()
    needs(found, "syscalls")
    assert found["sibling is alive"]


def test_what_the_layers_are_for(imprisoned: Imprisoned) -> None:
    """The attempts are real: without what stops them they succeed."""
    names = ("kill a sibling", "a TCP socket", "connect to an abstract socket", "make a named socket")
    found = imprisoned(("syscalls", "scope"), names[:3])
    assert found["outcomes"] == dict.fromkeys(names[:3], "done")
    assert not found["sibling is alive"]
