"""Finding the zygotes that an earlier daemon left, and what they keep of its sessions.

Everything here blocks, with bounds: it is done before the daemon listens.
"""

import contextlib
import os
import select
import signal
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.contract.control_page import PageState, state_of
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.host.ipc import ChannelClosed, close_all, receive_message
from gpulease.daemon.host.processes import has_ended, name_of
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.zygote.handover import HANDOVER, ZYGOTE_NAME
from gpulease.protocol.opcodes import Status

ANSWER_TIMEOUT_S: Final = 30.0
"""For a zygote to tell what it has. It answers in milliseconds; one that was just started imports for some seconds."""

TAKEN_TIMEOUT_S: Final = 10.0
"""For the daemon before this one, which let go of the state's lock, to be gone from its zygotes too."""

END_TIMEOUT_S: Final = 10.0
"""For a zygote that was killed to be gone."""

_PAUSE_S: Final = 0.02
_NO_PAGE: Final = PageState(None, 0, 0)
_UCRED: Final = struct.Struct("3i")


class CannotAdopt(Exception):
    """Sessions of an earlier daemon live on and can't be taken over: this one must not grant what they hold.

    Attributes:
        hint: What the operator can do, a sentence.
    """

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class _Gone(Exception):
    """The zygote ended."""


class _Taken(Exception):
    """It has another broker."""


class _Hung(Exception):
    """It does not answer."""


@dataclass(slots=True)
class FoundWorker:
    """One worker as its zygote tells of it.

    Attributes:
        serial: Its number in that zygote.
        fds: Its pidfd, its two pages and the broker's end of its channel; None if it has ended.
        reason: How it ended; None while it has not.
        last_page: What its page said then; None while it has not.
        overran: What is to be said of a kernel for which its zygote ended its lease, "" if it did not.
    """

    serial: int
    spec: WorkerSpec
    pid: int
    fds: tuple[int, int, int, int] | None
    reason: str | None = None
    last_page: PageState | None = None
    overran: str = ""

    def page(self) -> PageState:
        """What a broker last wrote on its page."""
        return self.last_page or _NO_PAGE if self.fds is None else state_of(self.fds[1])


@dataclass(slots=True)
class FoundZygote:
    """One zygote, this process's from now on.

    Attributes:
        sandbox: How its workers were to be shut in, as on its command line.
        findings: Which measures they are under.
        wipes_heap: Whether they overwrite what they free of their own memory.
        build: Which code it runs, as `gpulease.daemon.host.version` names it; "" if it does not say.
        answers_pings: Whether it is to be asked if it lives.
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
        """Let it go again: it keeps its workers."""
        self.channel.close()
        os.close(self.pidfd)
        for worker in self.workers:
            close_all(list(worker.fds or ()))
            worker.fds = None


def find_zygotes(folder: Path) -> list[FoundZygote]:
    """All that listen in a folder; what is left of others is removed. Raises CannotAdopt."""
    found: list[FoundZygote] = []
    try:
        for path in sorted(folder.glob("*.sock")):
            zygote = _find(path)
            if zygote is not None:
                found.append(zygote)
    except BaseException:
        for zygote in found:
            zygote.close()
        raise
    return found


def _find(path: Path) -> FoundZygote | None:
    until = time.monotonic() + TAKEN_TIMEOUT_S
    while True:
        try:
            return _connect(path)
        except _Gone:
            path.unlink(missing_ok=True)
            return None
        except _Taken:
            if time.monotonic() > until:
                raise CannotAdopt(f"another gpuleased has the sessions behind {path}", hint="Stop it first.") from None
            time.sleep(_PAUSE_S)


def _connect(path: Path) -> FoundZygote:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.settimeout(ANSWER_TIMEOUT_S)
        try:
            channel.connect(str(path))
        except (ConnectionError, FileNotFoundError):
            raise _Gone from None
        except OSError as error:
            # For one, its line of those who wait is full, so nobody takes them.
            raise CannotAdopt(
                f"the zygote behind {path} can't be reached: {error.strerror or error}",
                hint="Kill it, and start again.",
            ) from None
        channel.settimeout(None)
        try:
            return _listen_to(channel, path)
        except _Hung:
            _kill_listener(channel, path)
            raise _Gone from None
    except BaseException:
        channel.close()
        raise


def _listen_to(channel: socket.socket, path: Path) -> FoundZygote:
    message, fds = _hear(channel)
    if message.get("op") == "taken":
        raise _Taken
    if message.get("handover") != HANDOVER or len(fds) != 1:
        close_all(fds)
        raise CannotAdopt(
            f"sessions of gpuleased {message.get('version')} live on, which this version can't take over",
            hint=f"Start that version, or end them: kill {message.get('pid')}.",
        )
    version, driver, sandbox = (str(message[name]) for name in ("version", "driver", "sandbox"))
    zygote = FoundZygote(path, channel, fds[0], version, driver, sandbox, list(message["findings"]))
    # Zygotes of before there was recycling do not say it.
    zygote.wipes_heap = message.get("wipes_heap") is True
    # Nor their build those of before a version could have several.
    zygote.build = str(message.get("build", ""))
    zygote.pid = int(message.get("pid", 0))
    zygote.answers_pings = message.get("answers_pings") is True
    try:
        while (message := _take(channel, zygote))["op"] != "told":
            pass
    except BaseException:
        zygote.close()
        raise
    return zygote


def _take(channel: socket.socket, zygote: FoundZygote) -> dict[str, Any]:
    message, fds = _hear(channel)
    # A zygote of an earlier version does not say it.
    overran = str(message.get("overran", ""))
    match message:
        case {"op": "worker", "serial": int(serial), "pid": int(pid), "spec": dict(spec)} if len(fds) == 4:
            pidfd, lease, claims, end = fds
            known = WorkerSpec.from_message(spec)
            worker = FoundWorker(serial, known, pid, (pidfd, lease, claims, end), overran=overran)
            zygote.workers.append(worker)
        case {"op": "ended", "serial": int(serial), "pid": int(pid), "spec": dict(spec), "reason": str(reason)}:
            word, deadline_ns, generation = message["page"]
            status = None if word is None else Status(word)
            last = PageState(status, deadline_ns, generation, cause=str(message.get("cause", "")))
            zygote.workers.append(FoundWorker(serial, WorkerSpec.from_message(spec), pid, None, reason, last, overran))
        case {"op": "told"}:
            pass
        case _:
            close_all(fds)
            raise CannotAdopt(
                "this process has no descriptors left for the sessions that live on",
                hint="Raise the limit on open files (LimitNOFILE of systemd.exec(5), ulimit -n).",
            )
    return message


def _hear(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    if not poll.poll(ANSWER_TIMEOUT_S * 1000):
        raise _Hung
    try:
        return receive_message(channel)
    except ChannelClosed:
        raise _Gone from None


def _kill_listener(channel: socket.socket, path: Path) -> None:
    """End a zygote that hangs, and with it its workers: nobody could end their leases."""
    pid, _, _ = _UCRED.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    hint = "Find out who listens there, end it, and start again."
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        raise CannotAdopt(f"the zygote behind {path} does not answer", hint=hint) from None
    try:
        if name_of(pid) != ZYGOTE_NAME:
            raise CannotAdopt(f"process {pid} listens at {path} and is no zygote", hint=hint)
        log_event(LogEvent.ZYGOTE_HUNG, zygote_pid=pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if not has_ended(pidfd, END_TIMEOUT_S):
            raise CannotAdopt(f"zygote {pid} hangs, and can't be killed", hint="Restart the host.")
    finally:
        os.close(pidfd)
