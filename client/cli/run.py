"""`gpulease run`: a lease for as long as a program runs.

The program finds the daemon by GPULEASE_ADDRESS and the lease by GPULEASE_LEASE_ID; `GpuSession.attach()` reads both.
The lease's id, and no token, because a token opens one connection and lasts for five minutes at most: a program may
open as many sessions as its lease lets it, one after the other, and so may the programs that it starts.
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

from gpulease.client.cli.drain import milliseconds_of
from gpulease.client.cli.endings import end_by, fail
from gpulease.client.engine.request import LEASE_ID_VARIABLE
from gpulease.client.errors import Disconnected, GpuLeaseError
from gpulease.client.sync.events import LeaseEvents
from gpulease.protocol import Phase
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.sizes import parse_size

if TYPE_CHECKING:
    # Not at run time: numpy comes with it, and its threads must start behind `_block`.
    from gpulease.client.sync.public import GpuLease

EXIT_LEASE_ENDED: Final = 124
"""The lease ended before the program; timeout(1) says the same of a program that took too long."""

EXIT_NOT_STARTED: Final = 126
EXIT_NO_PROGRAM: Final = 127
"""A program that can't be started, and one that is not there, as env(1) and shells have them."""

KILL_AFTER_S: Final = 10.0
"""How long a program has, once its lease has ended and it was sent SIGTERM, before it is killed."""

UNHEARD_S: Final = 5.0
"""How long past its deadline a lease is taken for alive while the daemon does not say that it has ended."""

ORPHAN_S: Final = 60.0
"""How long the lease stays once nobody is connected to it, because this process was killed. Longer than a daemon takes
to be started anew: until `_watch` has found it again, the lease has only the connections of the program's sessions."""

GIVE_BACK_S: Final = 5.0
"""How long the lease's end is waited for once the program has ended."""

FORWARDED: Final = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_LEASE_ENDED: Final = signal.SIGRTMIN
"""Sent by a thread of this process to its main thread."""

_AWAITED: Final = frozenset({*FORWARDED, signal.SIGCHLD, _LEASE_ENDED})


def _size_of(ctx: click.Context, param: click.Parameter, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise click.BadParameter(f"{error}.", ctx, param) from None


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.option("--vram", "vram_bytes", required=True, callback=_size_of, help="Device memory: 4GiB, 512MiB.")
@click.option(
    "--for",
    "ttl_ms",
    callback=milliseconds_of,
    default="10m",
    show_default=True,
    help="The lease's time: 30s, 2h.",
)
@click.option("--wait", "wait_ms", callback=milliseconds_of, default="0s", show_default=True, help="For room.")
@click.option("--device", help="The card's UUID or index; any that has room without it.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def run(vram_bytes: int, ttl_ms: int, wait_ms: int, device: str | None, command: tuple[str, ...]) -> None:
    """Run CMD with a lease of its own, which ends with it and is not renewed.

    CMD opens a session with `GpuSession.attach()`. Exit status: CMD's, or the signal that ended it; 124 if the lease
    ended first, and CMD was ended for that; 126 and 127 if CMD can't be started or is not there.
    """
    _check_program(command[0])
    usual = _block()
    # Now, behind `_block`: numpy starts threads when it is imported, and they inherit what is blocked.
    from gpulease.client.sync.public import GpuBuilder

    builder = GpuBuilder().min_vram(vram_bytes).lease_secs(ttl_ms / 1000).timeout(wait_ms / 1000).orphan_secs(ORPHAN_S)
    if device is not None:
        builder.device(device)
    # There is no lease to leave behind yet: whoever waits for room can interrupt it.
    signal.pthread_sigmask(signal.SIG_SETMASK, usual)
    lease = builder.acquire()
    held = _Held(lease)
    try:
        _block()
        status = held.run(command, usual)
    finally:
        _give_back(lease)
    # They stay blocked: what comes after the program's end was meant for the program.
    if held.why_ended:
        sys.exit(EXIT_LEASE_ENDED)
    _end_as(status)


def _block() -> set[signal.Signals]:
    """Have signals wait until `_wait` takes them one by one, and return what was blocked before.

    A signal is blocked only if every thread of the process blocks it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return {signal.Signals(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)}


def _check_program(program: str) -> None:
    """End if the program can't be started: before there is a lease, as far as that can be told."""
    if shutil.which(program) is not None:
        return
    where = program if os.path.dirname(program) else shutil.which(program, os.F_OK)
    try:
        os.stat(where or "")
    except OSError as error:
        _fail_to_start(program, error)
    number = errno.EISDIR if os.path.isdir(where or "") else errno.EACCES
    _fail_to_start(program, OSError(number, os.strerror(number)))


def _fail_to_start(program: str, error: OSError) -> NoReturn:
    if error.errno == errno.ENOENT:
        fail(f"{program}: there is no such program", EXIT_NO_PROGRAM)
    fail(f"{program}: {error.strerror}", EXIT_NOT_STARTED)


def _give_back(lease: "GpuLease") -> None:
    """Free the lease. The program's exit status stands, whatever becomes of that: it is told on stderr."""
    said = [f"its daemon did not answer within {GIVE_BACK_S:g} s"]

    def leave() -> None:
        try:
            with lease:
                pass
            said.clear()
        except GpuLeaseError as error:
            said[0] = str(error)

    # Freeing waits longer than this for a daemon that keeps leases over its restart.
    leaving = threading.Thread(target=leave, daemon=True)
    leaving.start()
    leaving.join(GIVE_BACK_S)
    if said:
        click.echo(f"gpulease: lease {lease.lease_id_text} was not given back: {said[0]}", err=True)


class _Held:
    """A lease and the program that runs on it.

    Attributes:
        why_ended: Why the lease ended before the program; "" if it did not.
    """

    def __init__(self, lease: "GpuLease") -> None:
        self.why_ended = ""
        self._lease = lease
        self._deadline_s = time.monotonic() + lease.remaining_s
        self._heard = ""
        self._has_ended = False
        self._pid = 0

    def run(self, command: tuple[str, ...], mask: Iterable[int]) -> int:
        """The program's wait status, as waitpid(2) has it. `mask`: the signals that it has blocked."""
        events = self._lease.events()
        threading.Thread(target=self._watch, args=(events,), daemon=True).start()
        try:
            self._pid = _start(command, self._environment(), mask)
            return self._wait()
        finally:
            self._has_ended = True
            events.close()

    def _environment(self) -> Mapping[str, str]:
        return os.environ | {ADDRESS_VARIABLE: self._lease.address, LEASE_ID_VARIABLE: self._lease.lease_id_text}

    def _watch(self, events: LeaseEvents) -> None:
        """Wake the main thread when the lease has ended. A daemon that goes away for good says nothing of it."""
        while not self._has_ended:
            try:
                for event in events:
                    if event.phase in (Phase.TEARDOWN, Phase.ENDED):
                        self._heard = event.reason or event.cause or "ended"
                        signal.pthread_kill(threading.main_thread().ident or 0, _LEASE_ENDED)
                        return
            except Disconnected:
                with suppress(GpuLeaseError):
                    # A daemon that was started anew knows of no connection of this process's until it renews.
                    # Its deadline stays where it was.
                    self._lease.renew(self._deadline_s - time.monotonic())
                    events = self._lease.events()
                    continue
            return

    def _wait(self) -> int:
        kill_s = 0.0
        while True:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return status
            now_s = time.monotonic()
            if self.why_ended:
                if now_s >= kill_s:
                    self._send(signal.SIGKILL)
                left_s = max(0.0, kill_s - now_s) or KILL_AFTER_S
            else:
                left_s = max(0.0, self._deadline_s - now_s) + UNHEARD_S
            found = signal.sigtimedwait(_AWAITED, left_s)
            if found is None or found.si_signo == _LEASE_ENDED:
                if not self.why_ended:
                    kill_s = time.monotonic() + KILL_AFTER_S
                    self._tell_of_the_end()
            elif found.si_signo in FORWARDED and found.si_code <= 0:  # sent by a process (sigaction(2))
                # What the terminal sends (a positive si_code: the kernel's) reaches the program by itself.
                self._send(signal.Signals(found.si_signo))

    def _tell_of_the_end(self) -> None:
        self.why_ended = self._heard or "its time is up"
        about = f"lease {self._lease.lease_id_text} has ended ({self.why_ended})"
        click.echo(f"gpulease: {about}: its program gets SIGTERM, and SIGKILL {KILL_AFTER_S:g} s later", err=True)
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        # It was not waited for, so its number is still its own. It may have become another user's, as sudo does.
        with suppress(PermissionError, ProcessLookupError):
            os.kill(self._pid, number)


def _start(command: tuple[str, ...], environment: Mapping[str, str], mask: Iterable[int]) -> int:
    try:
        return os.posix_spawnp(
            command[0], command, environment, setsigmask=mask, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ)
        )
    except OSError as error:
        _fail_to_start(command[0], error)


def _end_as(status: int) -> NoReturn:
    """End with the program's exit status, or by the signal that ended it."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        sys.exit(code)
    # The program has left its core already.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    end_by(signal.Signals(-code))
