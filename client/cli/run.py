"""`gpulease run`: run a program with a lease that ends with it.

The program finds the daemon by GPULEASE_ADDRESS and the lease by GPULEASE_LEASE_ID; `GpuSession.attach()` reads both.
The variable holds the lease's id, not a token: a token opens one connection and lasts for five minutes at most. A
program may open as many sessions as its lease allows, one after the other, and so may the programs that it starts.
"""

import errno
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NoReturn

import click

from gpulease.client.cli.lease_options import LeaseArguments, lease_options
from gpulease.client.console.exit_status import die_by_signal, fail
from gpulease.client.core.lease_request import LEASE_ID_VARIABLE
from gpulease.client.errors import Disconnected, GpuLeaseError
from gpulease.client.sync.events import LeaseEvents
from gpulease.protocol import Phase
from gpulease.protocol.address import ADDRESS_VARIABLE

if TYPE_CHECKING:
    # At run time this is imported only after `_block`, because it imports numpy, which starts threads.
    from gpulease.client.sync.public import GpuLease

EXIT_LEASE_ENDED: Final = 124
"""Exit status if the lease ended before the program. timeout(1) has the same for a program that took too long."""

EXIT_NOT_STARTED: Final = 126
EXIT_NO_PROGRAM: Final = 127
"""126: the program can't be started; 127: the program does not exist. env(1) and shells use the same."""

KILL_AFTER_S: Final = 10.0
"""Seconds from SIGTERM, which the program gets when its lease has ended, until it is killed."""

UNREPORTED_S: Final = 5.0
"""Seconds beyond its deadline for which a lease is presumed alive while the daemon does not report its end."""

ORPHAN_S: Final = 60.0
"""How long the lease lasts without a connection, in seconds, for example after this process was killed. Longer than a
daemon's restart: until `_watch` has reconnected, the program's sessions are the lease's only connections."""

GIVE_BACK_S: Final = 5.0
"""Seconds to wait for the lease's end after the program has ended."""

FORWARDED: Final = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_LEASE_ENDED: Final = signal.SIGRTMIN
"""The signal that `_watch`'s thread sends to the main thread."""

_AWAITED: Final = frozenset({*FORWARDED, signal.SIGCHLD, _LEASE_ENDED})


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@lease_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def run(lease_request: LeaseArguments, command: tuple[str, ...]) -> None:
    """Run CMD on a lease that ends with CMD and is not renewed.

    CMD opens a session with `GpuSession.attach()`. Exit status: CMD's, or the signal that ended it; 124 if the lease
    ended first, and `run` therefore ended CMD; 126 if CMD can't be started; 127 if it does not exist.
    """
    # Step 1: check that the program can be started before a lease is acquired for it.
    _check_program(command[0])
    usual = _block()
    # Import this after `_block`, because importing numpy starts threads, which must inherit the blocked signals.
    from gpulease.client.sync.public import GpuBuilder

    builder = lease_request.described_to(GpuBuilder()).orphan_secs(ORPHAN_S)
    # No lease exists yet, so an interrupt of the wait for room leaves nothing behind.
    signal.pthread_sigmask(signal.SIG_SETMASK, usual)
    lease = builder.acquire()
    program = _LeasedProgram(lease)
    try:
        _block()
        # Step 2: from here on a signal must reach the program, not end this process and leave the lease behind.
        status = program.run(command, usual)
    finally:
        _give_back(lease)
    # Keep signals blocked, because those that arrive after the program's end were meant for the program.
    if program.end_reason:
        sys.exit(EXIT_LEASE_ENDED)
    _end_as(status)


def _block() -> set[signal.Signals]:
    """Block the signals that `_wait` receives one by one. Returns the signals that were already blocked.

    A signal is blocked only if every thread of the process blocks it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return {signal.Signals(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)}


def _check_program(program: str) -> None:
    """End if the program can't be started; checked before acquiring a lease, as far as possible."""
    if shutil.which(program) is not None:
        return
    # Find out the reason, and report it in the shell's words: no such file, a folder, or not executable.
    path = program if os.path.dirname(program) else shutil.which(program, os.F_OK)
    try:
        os.stat(path or "")
    except OSError as error:
        _fail_to_start(program, error)
    number = errno.EISDIR if os.path.isdir(path or "") else errno.EACCES
    _fail_to_start(program, OSError(number, os.strerror(number)))


def _fail_to_start(program: str, error: OSError) -> NoReturn:
    if error.errno == errno.ENOENT:
        fail(f"{program}: program not found", EXIT_NO_PROGRAM)
    fail(f"{program}: {error.strerror}", EXIT_NOT_STARTED)


def _give_back(lease: "GpuLease") -> None:
    """Free the lease. A failure is reported on stderr and does not change the program's exit status."""
    # If the lease is freed or an error comes in time, `leave` changes this.
    problems = [f"its daemon did not answer within {GIVE_BACK_S:g} s"]

    def leave() -> None:
        try:
            with lease:
                pass
            problems.clear()
        except GpuLeaseError as error:
            problems[0] = str(error)

    # Free the lease in a thread, because freeing waits longer than this for a daemon that keeps leases over its
    # restart.
    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    # The lease ends at its deadline, or as an orphan, even if this takes longer.
    leaving.join(GIVE_BACK_S)
    if problems:
        click.echo(f"gpulease: lease {lease.lease_id_text} was not freed: {problems[0]}", err=True)


class _LeasedProgram:
    """A lease and the program that runs on it.

    Attributes:
        end_reason: Why the lease ended before the program; "" if it did not.
    """

    def __init__(self, lease: "GpuLease") -> None:
        self.end_reason = ""
        self._lease = lease
        self._deadline_s = time.monotonic() + lease.remaining_s
        self._reported_reason = ""
        self._has_ended = False
        self._pid = 0

    def run(self, command: tuple[str, ...], mask: Iterable[int]) -> int:
        """Run the program; returns its wait status, as waitpid(2) defines it.

        Args:
            command: The program and its arguments.
            mask: The signals that it blocks.
        """
        # Subscribe before the program starts, so that the lease's end is not missed.
        events = self._lease.events()
        # Use a daemon thread, because it waits for events until the process ends.
        threading.Thread(target=self._watch, args=(events,), daemon=True).start()
        try:
            self._pid = _start(command, self._environment(), mask)
            return self._wait()
        finally:
            self._has_ended = True
            events.close()

    def _environment(self) -> Mapping[str, str]:
        # The environment variables that GpuSession.attach() reads.
        return os.environ | {ADDRESS_VARIABLE: self._lease.address, LEASE_ID_VARIABLE: self._lease.lease_id_text}

    def _watch(self, events: LeaseEvents) -> None:
        """Wake the main thread when the daemon reports the lease's end. Returns if the daemon can't be reached."""
        while not self._has_ended:
            try:
                for event in events:
                    if event.phase in (Phase.TEARDOWN, Phase.ENDED):
                        self._reported_reason = event.reason or event.cause or "ended"
                        signal.pthread_kill(threading.main_thread().ident or 0, _LEASE_ENDED)
                        return
            except Disconnected:
                # The daemon has ended, or restarted. Try once to reach it.
                with suppress(GpuLeaseError):
                    # A restarted daemon counts this process as a connection only after this renewal. The renewal
                    # requests the time that is left, so it does not make the lease longer.
                    self._lease.renew(self._deadline_s - time.monotonic())
                    events = self._lease.events()
                    continue
            return

    def _wait(self) -> int:
        kill_s = 0.0
        while True:
            # In each round, check whether the program has ended. Then wait for a signal, at most until the lease is
            # certain to have ended or, after its end, until the program must be killed.
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return status
            now_s = time.monotonic()
            # After the lease's end and SIGTERM, the program has KILL_AFTER_S to clean up.
            if self.end_reason:
                if now_s >= kill_s:
                    self._send(signal.SIGKILL)
                left_s = max(0.0, kill_s - now_s) or KILL_AFTER_S
            else:
                left_s = max(0.0, self._deadline_s - now_s) + UNREPORTED_S
            # All awaited signals are blocked, so each is received here, one at a time, and none is lost between checks.
            signal_info = signal.sigtimedwait(_AWAITED, left_s)
            if signal_info is None or signal_info.si_signo == _LEASE_ENDED:
                if not self.end_reason:
                    kill_s = time.monotonic() + KILL_AFTER_S
                    self._report_end()
            elif signal_info.si_signo in FORWARDED and signal_info.si_code <= 0:  # sent by a process (sigaction(2))
                # Signals from the terminal reach the program directly. The kernel sends them, with a positive si_code.
                self._send(signal.Signals(signal_info.si_signo))

    def _report_end(self) -> None:
        # If the daemon has reported no reason, assume that the lease's time is up.
        self.end_reason = self._reported_reason or "its time is up"
        problem = f"lease {self._lease.lease_id_text} has ended ({self.end_reason})"
        click.echo(f"gpulease: {problem}: its program now gets SIGTERM, and SIGKILL {KILL_AFTER_S:g} s later", err=True)
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        # The program has not been reaped, so its pid can't belong to another process. It may run as another user, for
        # example with sudo.
        with suppress(PermissionError, ProcessLookupError):
            os.kill(self._pid, number)


def _start(command: tuple[str, ...], environment: Mapping[str, str], mask: Iterable[int]) -> int:
    try:
        # The program gets the signals that this process had blocked before; Python's own changes are undone.
        return os.posix_spawnp(
            command[0], command, environment, setsigmask=mask, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ)
        )
    except OSError as error:
        _fail_to_start(command[0], error)


def _end_as(status: int) -> NoReturn:
    """Exit with the program's status, or die by the signal that ended it."""
    # A negative code is the signal that ended the program.
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        sys.exit(code)
    # The program has already dumped its core.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    die_by_signal(signal.Signals(-code))
