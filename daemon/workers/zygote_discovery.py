"""Finds the zygotes that an earlier daemon left, and their workers.

All functions block, for a bounded time: they run before the daemon listens.
"""

import contextlib
import os
import select
import signal
import socket
import time
from dataclasses import field
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.contract.control_page import PageState, Transfer, park_on, state_of, transfer_on
from gpulease.daemon.contract.message_fields import MalformedMessage, Message, parse_message
from gpulease.daemon.contract.messages import (
    HANDOVER,
    HANDOVER_MESSAGES,
    ZYGOTE_NAME,
    EndedWorker,
    HandoverDone,
    LivingWorker,
    ZygoteIntroduction,
    ZygoteTaken,
)
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.host.cannot_start import CannotStart
from gpulease.daemon.host.ipc import ChannelClosed, close_all, receive_message
from gpulease.daemon.host.processes import has_ended, name_of
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.peer_credentials import UCRED_BYTES, parse_ucred

ANSWER_TIMEOUT_S: Final = 30.0
"""Longest time for a zygote to send one message. It answers in milliseconds, but its imports take seconds when it
starts."""

TAKEN_TIMEOUT_S: Final = 10.0
"""Longest time for which an earlier daemon may keep a zygote's channel after it has released the state's lock."""

END_TIMEOUT_S: Final = 10.0
"""Longest wait for the end of a killed zygote."""

_PAUSE_S: Final = 0.02
_NO_PAGE: Final = PageState(None, 0, 0)


class CannotAdopt(CannotStart):
    """Running sessions of an earlier daemon can't be taken over, so this daemon must not grant their memory."""


class _ZygoteGone(Exception):
    pass


class _HasBroker(Exception):
    pass


class _ZygoteHangs(Exception):
    pass


@dataclass(slots=True)
class FoundWorker:
    """A worker of a zygote that was found.

    Attributes:
        serial: The worker's number in that zygote.
        fds: Its pidfd, its two pages and the broker's end of its channel; None if it has ended.
        reason: How it ended; None while it lives.
        last_page: The state of its lease's page when it was reaped; None while it lives.
        overran: Description of the kernel because of which the zygote ended its lease; "" for none.
        last_transfer: What the worker last claimed about its session; None while it lives, or if its zygote does not
          report that.
    """

    serial: int
    spec: WorkerSpec
    pid: int
    fds: tuple[int, int, int, int] | None
    reason: str | None = None
    last_page: PageState | None = None
    overran: str = ""
    last_transfer: Transfer | None = None

    def page(self) -> PageState:
        """Return the latest state that a broker, or the zygote, wrote on the page of its lease."""
        return self.last_page or _NO_PAGE if self.fds is None else state_of(self.fds[1])

    def transfer(self) -> Transfer | None:
        """Return its present report about its session; None if it has ended and its zygote does not report that."""
        return self.last_transfer if self.fds is None else transfer_on(self.fds[2])

    def park_number(self) -> int:
        """Return the number of the park that the worker reports for its session; 0 if there is none."""
        return 0 if self.fds is None else park_on(self.fds[2])


@dataclass(slots=True)
class FoundZygote:
    """A zygote that was found; its channel and descriptors belong to this process.

    Attributes:
        path: The socket at which it listens.
        sandbox: The sandbox settings of its workers, as on its command line.
        findings: The sandbox measures that its workers are under.
        wipes_heap: Whether it and its workers overwrite memory that they free.
        build: The code that it runs, as in `host.version.own_build`; "" if it does not report that.
        answers_pings: Whether it answers a Ping.
        pid: Its process id; 0 if it does not report that.
    """

    path: Path
    channel: socket.socket
    pidfd: int
    version: str
    driver: str
    sandbox: str
    findings: list[dict[str, Any]]
    workers: list[FoundWorker] = field(default_factory=list)
    wipes_heap: bool = False
    build: str = ""
    answers_pings: bool = False
    pid: int = 0

    def close(self) -> None:
        """Release the zygote, which keeps its workers."""
        self.channel.close()
        os.close(self.pidfd)
        for worker in self.workers:
            # The zygote has descriptors of its own. A worker that has ended has none here.
            close_all(list(worker.fds or ()))
            worker.fds = None


def find_zygotes(folder: Path) -> list[FoundZygote]:
    """Return all zygotes that listen in a folder, and remove the sockets of dead ones. Raises CannotAdopt."""
    zygotes: list[FoundZygote] = []
    try:
        # Each zygote listens at a socket of its own, and sends its workers when a broker connects.
        for path in sorted(folder.glob("*.sock")):
            zygote = _find(path)
            if zygote is not None:
                zygotes.append(zygote)
    # If the start fails, leave every zygote to the next attempt.
    except BaseException:
        for zygote in zygotes:
            zygote.close()
        raise
    return zygotes


def _find(path: Path) -> FoundZygote | None:
    deadline_s = time.monotonic() + TAKEN_TIMEOUT_S
    # An earlier daemon may still hold the channel for a moment, so try for TAKEN_TIMEOUT_S.
    while True:
        try:
            return _connect(path)
        except _ZygoteGone:
            # The zygote is dead, and its workers died with it.
            path.unlink(missing_ok=True)
            return None
        except _HasBroker:
            if time.monotonic() > deadline_s:
                raise CannotAdopt(f"another gpuleased has the sessions of {path}", hint="Stop it first.") from None
            time.sleep(_PAUSE_S)


def _connect(path: Path) -> FoundZygote:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # connect(2) waits while the backlog is full, so it needs a time limit as well.
        channel.settimeout(ANSWER_TIMEOUT_S)
        try:
            channel.connect(str(path))
        except (ConnectionError, FileNotFoundError):
            raise _ZygoteGone from None
        except OSError as error:
            # The zygote hangs, and its backlog is full of clients that wait to be accepted.
            raise CannotAdopt(
                f"the zygote of {path} can't be reached: {error.strerror or error}",
                hint="Kill the zygote, and start again.",
            ) from None
        channel.settimeout(None)
        try:
            # If a zygote accepts and then sends nothing, it hangs, and its leases could not be ended. So kill it.
            return _take_over(channel, path)
        except _ZygoteHangs:
            _kill_listener(channel, path)
            raise _ZygoteGone from None
    except BaseException:
        channel.close()
        raise


def _take_over(channel: socket.socket, path: Path) -> FoundZygote:
    """Read a zygote's introduction, and then all its workers."""
    zygote = _introduced(channel, path)
    try:
        # The zygote's workers follow, one message each, with their descriptors.
        while not _add_worker(zygote):
            pass
    except BaseException:
        zygote.close()
        raise
    return zygote


def _introduced(channel: socket.socket, path: Path) -> FoundZygote:
    answer, fds = _receive(channel)
    if answer.get("op") == ZygoteTaken.OP:
        raise _HasBroker
    # The hand-over has an unknown version: the sessions are running, but this daemon can't read their state. Refuse to
    # start.
    own = _parsed(answer)
    if not isinstance(own, ZygoteIntroduction) or own.handover != HANDOVER or len(fds) != 1:
        close_all(fds)
        raise CannotAdopt(
            f"sessions of gpuleased {answer.get('version')} are running, which this version can't take over",
            hint=f"Start that version, or end the sessions: kill {answer.get('pid')}.",
        )
    return FoundZygote(
        path,
        channel,
        fds[0],
        own.version,
        own.driver,
        own.sandbox,
        own.findings,
        wipes_heap=own.wipes_heap,
        build=own.build,
        answers_pings=own.answers_pings,
        pid=own.pid,
    )


def _add_worker(zygote: FoundZygote) -> bool:
    """Read one message of the hand-over; return True after the last one."""
    answer, fds = _receive(zygote.channel)
    match _parsed(answer):
        case LivingWorker() as living if len(fds) == 4:
            pidfd, lease, claims, end = fds
            worker = FoundWorker(
                living.serial, living.spec, living.pid, (pidfd, lease, claims, end), overran=living.overran
            )
            zygote.workers.append(worker)
        case EndedWorker() as ended:
            close_all(fds)
            worker = FoundWorker(
                ended.serial,
                ended.spec,
                ended.pid,
                None,
                ended.reason,
                ended.last_page,
                ended.overran,
                ended.transfer,
            )
            zygote.workers.append(worker)
        case HandoverDone():
            close_all(fds)
            return True
        # Fewer than four descriptors arrived: the kernel drops those that this process has no room for (unix(7),
        # SCM_RIGHTS).
        case _:
            close_all(fds)
            raise CannotAdopt(
                "this process has no file descriptors left for the remaining sessions",
                hint="Raise the limit on open files (LimitNOFILE of systemd.exec(5), ulimit -n).",
            )
    return False


def _parsed(answer: dict[str, Any]) -> Message | None:
    """Return a zygote's message; None for one that only another version supports."""
    with contextlib.suppress(MalformedMessage):
        return parse_message(HANDOVER_MESSAGES, answer)
    return None


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    # Limit the time for each message: a zygote that hangs in the middle of its report must not block the start.
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    if not poll.poll(ANSWER_TIMEOUT_S * 1000):
        raise _ZygoteHangs
    try:
        return receive_message(channel)
    except ChannelClosed:
        raise _ZygoteGone from None


def _kill_listener(channel: socket.socket, path: Path) -> None:
    """Kill a zygote that hangs, and with it its workers, because no other process could end their leases."""
    # The peer's credentials are those of the process that called listen(2) last (unix(7), SO_PEERCRED): the zygote.
    pid = parse_ucred(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED_BYTES)).pid
    hint = "Find out which program listens there, end it, and start again."
    try:
        # Open the pidfd before the name is checked, so that the check is of the process that is killed.
        pidfd = os.pidfd_open(pid)
    except OSError:
        raise CannotAdopt(f"the zygote of {path} does not answer", hint=hint) from None
    try:
        if name_of(pid) != ZYGOTE_NAME:
            raise CannotAdopt(f"process {pid} listens on {path}, but is not a zygote", hint=hint)
        log_event(LogEvent.ZYGOTE_HUNG, zygote_pid=pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        # The zygote's workers die with it (PR_SET_PDEATHSIG), so their bytes become free.
        if not has_ended(pidfd, END_TIMEOUT_S):
            raise CannotAdopt(f"zygote {pid} hangs, and can't be killed", hint="Restart the host.")
    finally:
        os.close(pidfd)
