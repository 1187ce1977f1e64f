"""Tests the sandbox on this host's kernel: a forked process applies one measure after another.

A measure counts as on if the kernel accepted it and an attempt to break it failed. The zygote runs the test, before it
forks a worker, because it has only one thread and the privileges with which workers begin.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NoReturn

from gpulease.daemon.host.processes import exit_text, gain_no_privileges, never_dump
from gpulease.daemon.sandbox.landlock import (
    DEVICES_SINCE,
    FILES_SINCE,
    NETWORK_SINCE,
    SCOPE_SINCE,
    abi,
    restrict,
)
from gpulease.daemon.sandbox.measures import Measure, MeasureFinding, SandboxNeeds, SandboxSettings, SandboxUnavailable
from gpulease.daemon.sandbox.resource_limits import impose, in_words, limits_for, prefer_oom_kill
from gpulease.daemon.sandbox.sandbox_entry import BY_LANDLOCK, SandboxPlan
from gpulease.daemon.sandbox.syscall_filter import NoFilter, install
from gpulease.daemon.sandbox.worker_identity import (
    DEFAULT_USER,
    WorkerIdentity,
    become,
    bound_capabilities,
    drop_capabilities,
    identity_of,
    keep_only,
)

_KERNEL_OF_ABI: Final = {FILES_SINCE: "5.13", NETWORK_SINCE: "6.7", DEVICES_SINCE: "6.10", SCOPE_SINCE: "6.12"}

_ABI_OF: Final = {
    Measure.FILES: FILES_SINCE,
    Measure.DEVICES: DEVICES_SINCE,
    Measure.NETWORK: NETWORK_SINCE,
    Measure.SCOPE: SCOPE_SINCE,
}

_HIGHEST_PORT: Final = 65_535

_LEFT_OUT: Final = "left out by sandbox_without"


class _Missing(Exception):
    """This host lacks a measure, for the reason in the message."""


def prepare(
    settings: SandboxSettings, needs: SandboxNeeds, keep_for: Callable[[int], tuple[int, ...]]
) -> tuple[SandboxPlan, list[MeasureFinding]]:
    """Test the sandbox, and return the plan for workers and the findings. Raises SandboxUnavailable."""
    # Step 1: find the workers' user, and the folders to which this user must be able to write.
    identity, reason = _identity(settings, needs)
    needs = replace(needs, kept=keep_for(os.geteuid() if identity is None else identity.uid))
    # Step 2: try all measures in a child process, because none of them can be undone.
    findings = _try_out(settings, needs, identity, reason)
    # Step 3: decide whether the daemon may start without the missing measures. A user that the operator named must work
    # even if the sandbox is not required.
    off = [finding for finding in findings if not finding.is_on and finding.measure not in settings.without]
    for finding in off:
        if finding.measure is Measure.USER and settings.user is not None and identity is not None:
            raise SandboxUnavailable(
                f"workers can't run as {settings.user}: {finding.detail}", hint="Start the daemon as root."
            )
    if settings.is_required and off:
        missing = "; ".join(f"{finding.measure.value} ({finding.detail})" for finding in off)
        raise SandboxUnavailable(
            f"the sandbox is required, and this host lacks {missing}",
            hint='Name the missing measures in sandbox_without, or set sandbox = "available".',
        )
    return SandboxPlan(needs, identity, frozenset(finding.measure for finding in findings if finding.is_on)), findings


def _identity(settings: SandboxSettings, needs: SandboxNeeds) -> tuple[WorkerIdentity | None, str]:
    """Return the workers' user, or None and the reason. Raises SandboxUnavailable if `worker_user` is unusable."""
    if Measure.USER in settings.without:
        return None, _LEFT_OUT
    if settings.user is not None:
        identity = identity_of(settings.user, needs.devices)
        if identity.uid == os.geteuid():
            return None, "worker_user is the daemon's own"
        return identity, ""
    # Only root can change to another user.
    if os.geteuid() != 0:
        return None, f"the daemon is not root, so its workers run as its own user, {os.geteuid()}"
    try:
        return identity_of(DEFAULT_USER, needs.devices), ""
    except SandboxUnavailable as error:
        return None, f"{error}. {error.hint}"


def _try_out(
    settings: SandboxSettings, needs: SandboxNeeds, identity: WorkerIdentity | None, reason: str
) -> list[MeasureFinding]:
    # The child reports through a pipe. Its exit status shows whether it got that far.
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run_trial(settings, needs, identity, reason, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        findings = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise SandboxUnavailable(f"the process that tried the sandbox {exit_text(status)}")
    return [MeasureFinding(Measure(name), is_on, detail) for name, is_on, detail in json.loads(findings)]


def _run_trial(
    settings: SandboxSettings, needs: SandboxNeeds, identity: WorkerIdentity | None, reason: str, writing: int
) -> NoReturn:
    status = 1
    try:
        # The parent's event loop must not be woken by this process's signals.
        signal.set_wakeup_fd(-1)
        trials = _Trials(needs, identity, reason, writing)
        findings: list[tuple[str, bool, str]] = []
        # Test in the order in which a worker applies the measures: each trial runs under the earlier measures.
        for measure, attempt in trials.by_measure().items():
            if measure in settings.without:
                findings.append((measure.value, False, reason if measure is Measure.USER else _LEFT_OUT))
                continue
            try:
                findings.append((measure.value, True, attempt()))
            except (_Missing, NoFilter) as error:
                findings.append((measure.value, False, str(error)))
            except (OSError, ValueError) as error:
                findings.append((measure.value, False, f"the kernel refuses it: {error}"))
        # If the process that waits for the result has been killed, the pipe has no reader.
        with contextlib.suppress(BrokenPipeError):
            os.write(writing, json.dumps(findings).encode())
        status = 0
    except Exception:
        # Any other error is a bug, so its traceback goes to the log.
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
    finally:
        os._exit(status)


class _Trials:
    """The tests, one per measure. Each applies the measure, tries to break it, and returns its extent or raises."""

    def __init__(self, needs: SandboxNeeds, identity: WorkerIdentity | None, reason: str, writing: int) -> None:
        self._needs = needs
        self._identity = identity
        self._reason = reason
        self._writing = writing

    def by_measure(self) -> dict[Measure, Callable[[], str]]:
        """Return the trials in the order in which measures must be applied."""
        return {
            Measure.DESCRIPTORS: self._descriptors,
            Measure.USER: self._user,
            Measure.CAPABILITIES: self._capabilities,
            Measure.PRIVILEGES: self._privileges,
            Measure.INSPECTION: self._inspection,
            Measure.LIMITS: self._limits,
            Measure.FILES: self._files,
            Measure.DEVICES: lambda: self._landlock(Measure.DEVICES),
            Measure.NETWORK: self._network,
            Measure.SCOPE: self._scope,
            Measure.SYSCALLS: self._syscalls,
        }

    def _descriptors(self) -> str:
        keep_only((self._writing, *self._needs.kept))
        return "standard error, the channel, the control pages"

    def _user(self) -> str:
        # The next two calls need privileges that the process loses when it changes its user.
        prefer_oom_kill()
        bound_capabilities()
        if self._identity is None:
            raise _Missing(self._reason)
        become(self._identity)
        groups = ", ".join(map(str, self._identity.groups)) or "none"
        return f"{self._identity.name} ({self._identity.uid}), other groups: {groups}"

    def _capabilities(self) -> str:
        drop_capabilities()
        with open("/proc/self/status") as file:
            cap_lines = [line for line in file if line.startswith(("CapEff", "CapPrm", "CapInh", "CapAmb"))]
        if any(int(line.split()[1], 16) for line in cap_lines):
            raise _Missing("the kernel left some")
        return "none"

    def _privileges(self) -> str:
        gain_no_privileges()
        return "set"

    def _inspection(self) -> str:
        never_dump()
        return "set"

    def _limits(self) -> str:
        limits = limits_for(self._needs)
        impose(limits)
        return in_words(limits)

    def _landlock(self, measure: Measure) -> str:
        needed_abi = _ABI_OF[measure]
        try:
            # This fails if the kernel lacks Landlock, or has it but did not enable it.
            version = abi()
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
                raise _Missing("this kernel has no Landlock, or it is not enabled (lsm= on its command line)") from None
            raise
        if version < needed_abi:
            raise _Missing(
                f"Landlock ABI {needed_abi} (Linux {_KERNEL_OF_ABI[needed_abi]}) is needed; this is ABI {version}"
            )
        restrict(BY_LANDLOCK[measure], self._needs)
        return f"Landlock ABI {version}"

    def _files(self) -> str:
        detail = self._landlock(Measure.FILES)
        # Try to break the rule: a measure that the kernel accepts but ignores counts as off.
        _must_fail(lambda: os.listdir("/"))
        count = len(self._needs.readable) + len(self._needs.devices)
        return f"{detail}; the driver's {count} paths" if count else detail

    def _network(self) -> str:
        detail = self._landlock(Measure.NETWORK)
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET) as sock:
            # A process with ports may bind only to a port that the kernel chooses.
            port = _HIGHEST_PORT if self._needs.tcp_ports else 0
            _must_fail(lambda: sock.bind(("127.0.0.1", port)))
        return detail

    def _scope(self) -> str:
        detail = self._landlock(Measure.SCOPE)
        # Signal 0 only checks the permission. The parent is outside the scope.
        _must_fail(lambda: os.kill(os.getppid(), 0))
        return detail

    def _syscalls(self) -> str:
        install(writes_files=self._needs.writes_files, connects=bool(self._needs.tcp_ports))
        # Only the filter refuses this call, and no worker needs it.
        _must_fail(lambda: os.getpriority(os.PRIO_PROCESS, 0))
        return "an allow-list for x86_64"


def _must_fail(attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except PermissionError:
        return
    raise _Missing("the kernel accepted it, but it has no effect")
