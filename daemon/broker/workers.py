"""The workers as the broker sees them: one record each, from the spawn to the reaped process.

A worker is known by the number of its lease, or of its warm context; that number may change during its life, and after
it, until its end was told.
"""

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from gpulease.daemon.broker.zygote import Zygote, ZygoteBroken
from gpulease.daemon.channel import ChannelClosed, channel_pair, close_all, receive_message, send_message
from gpulease.daemon.core import Event, SessionFaulted, WorkerExited, WorkerFailed, WorkerReady
from gpulease.daemon.sandbox.settings import SandboxSettings
from gpulease.daemon.worker.guests import Guest
from gpulease.daemon.worker.page import BrokerPage
from gpulease.daemon.worker.spec import WorkerSpec
from gpulease.protocol.opcodes import Status
from gpulease.protocol.sharing import Wanted

ZYGOTE_RESTART_DELAY_S: Final = 1.0
"""Between the death of a zygote and the next start: one that dies at once must not be restarted in a busy loop."""

MAX_HAND_OVERS: Final = 16
"""Sockets on their way to a worker that is too busy to take them. They count as nobody's connections meanwhile."""

_log = logging.getLogger("gpulease.workers")


@dataclass(slots=True)
class Worker:
    """One worker, or one to be. `pid` is 0 until the zygote said that it has forked it.

    Attributes:
        born_as: The number the zygote knows it by.
    """

    spec: WorkerSpec
    page: BrokerPage
    channel: socket.socket
    pid: int = 0
    pidfd: int = -1
    is_ready: bool = False
    is_killed: bool = False
    hand_overs: int = 0
    born_as: int = 0


class Workers:
    """All workers, and the zygote that makes them."""

    def __init__(self, driver: str, sandbox: SandboxSettings | None = None) -> None:
        self._deliver: Callable[[Event], None] = _not_delivered
        self._workers: dict[int, Worker] = {}
        self._born: dict[int, Worker] = {}
        self._ended_workers: dict[int, Worker] = {}
        self._on_look: Callable[[int], None] = _not_looked
        self._driver = driver
        self._sandbox = sandbox or SandboxSettings()
        self._zygote = self._new_zygote()
        self._restart: asyncio.Task[None] | None = None

    def deliver_to(self, deliver: Callable[[Event], None]) -> None:
        """Who is told what happens to workers from now on."""
        self._deliver = deliver

    def look_with(self, look: Callable[[int], None]) -> None:
        """Who is told of leases whose context may have grown."""
        self._on_look = look

    def _new_zygote(self) -> Zygote:
        return Zygote(self._driver, self._on_zygote_message, self._on_zygote_exit, self._sandbox)

    def findings(self) -> list[dict[str, Any]]:
        """The measures of the workers' sandbox: whether each is on, and how far it goes or why it is not."""
        return self._zygote.findings

    async def start(self) -> None:
        """Start the zygote. Raises ZygoteBroken."""
        await self._zygote.start()

    async def stop(self) -> None:
        """End the zygote and every worker that is left."""
        if self._restart is not None:
            self._restart.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restart
        self._zygote.stop()
        for worker in list(self._workers.values()):
            self._kill(worker)
            self._forget(worker)

    def serving(self) -> list[Worker]:
        """Those that have said that they are ready and were not ordered dead."""
        return [worker for worker in self._workers.values() if worker.is_ready and not worker.is_killed]

    def pid(self, lease_id: int) -> int:
        """The worker's process id, 0 if there is none."""
        worker = self._workers.get(lease_id)
        return 0 if worker is None else worker.pid

    def is_alive(self, lease_id: int) -> bool:
        """Whether the worker's process runs: one that is dead is told of only once it was reaped."""
        worker = self._workers.get(lease_id)
        if worker is None or worker.pidfd < 0:
            return worker is not None
        return not _has_ended(worker.pidfd)

    def take_ended_pid(self, lease_id: int) -> int:
        """The process id of a worker that has ended, told once; 0 if it never had one."""
        worker = self._ended_workers.pop(lease_id, None)
        return 0 if worker is None else worker.pid

    def page(self, lease_id: int) -> BrokerPage | None:
        """The worker's control page."""
        worker = self._workers.get(lease_id)
        return None if worker is None else worker.page

    def rename(self, from_id: int, to_id: int) -> None:
        """Know a worker by another number, whether it lives or has ended."""
        for workers in (self._workers, self._ended_workers):
            if (worker := workers.pop(from_id, None)) is not None:
                worker.spec = replace(worker.spec, lease_id=to_id)
                workers[to_id] = worker

    def spawn(self, spec: WorkerSpec) -> None:
        """Have a worker made, or have the one that was made ahead for this lease take it.

        `WorkerReady` or `WorkerExited` follows; of a worker made ahead that hangs, nothing.
        """
        if (made := self._workers.get(spec.lease_id)) is not None:
            made.spec = spec
            with contextlib.suppress(ChannelClosed, BlockingIOError):
                send_message(made.channel, spec.to_message())
            return
        try:
            page = BrokerPage()
        except OSError as error:
            self._not_started(spec, error)
            return
        try:
            ours, theirs = channel_pair()
        except OSError as error:
            page.close()
            self._not_started(spec, error)
            return
        ours.setblocking(False)
        worker = Worker(spec, page, ours)
        self._workers[spec.lease_id] = self._born[spec.lease_id] = worker
        worker.born_as = spec.lease_id
        with theirs:
            try:
                self._zygote.spawn(spec, theirs.fileno(), page.fd)
            except (ChannelClosed, BlockingIOError) as error:
                self._ended(worker, f"could not be started: {error}")
                return
        asyncio.get_running_loop().add_reader(ours, self._on_worker_message, worker)

    def _not_started(self, spec: WorkerSpec, error: OSError) -> None:
        _log.warning("lease %032x: no worker can be started: %s", spec.lease_id, error.strerror)
        ended = WorkerExited(spec.lease_id, f"could not be started: {error.strerror}")
        asyncio.get_running_loop().call_soon(self._post, ended)

    def set_deadline(self, lease_id: int, deadline_ns: int, generation: int) -> None:
        """Write the deadline where the worker reads it."""
        if (worker := self._workers.get(lease_id)) is not None:
            worker.page.set_deadline(deadline_ns, generation)

    def refuse(self, lease_id: int, status: Status) -> None:
        """Have the worker answer everything with `status`, and say so to whoever is connected."""
        if (worker := self._workers.get(lease_id)) is None:
            return
        worker.page.refuse(status)
        # The word alone suffices; the message wakes a worker that sleeps, so that idle tenants learn why.
        with contextlib.suppress(ChannelClosed, BlockingIOError):
            send_message(worker.channel, {"op": "end"})

    def kill(self, lease_id: int) -> None:
        """End the worker whatever it is doing; `WorkerExited` follows."""
        worker = self._workers.get(lease_id)
        if worker is None:
            asyncio.get_running_loop().call_soon(self._post, WorkerExited(lease_id, "there was no process"))
            return
        worker.is_killed = True
        self._kill(worker)

    def attach(
        self, lease_id: int, sock_fd: int, request_id: int, rest: bytes, wanted: Wanted, guest: Guest | None = None
    ) -> bool:
        """Hand a tenant's socket, or a guest's, to the lease's worker; False if the worker can't take it now."""
        worker = self._workers.get(lease_id)
        if worker is None or worker.hand_overs >= MAX_HAND_OVERS:
            return False
        message = {"op": "attach", "request_id": request_id, "rest": rest}
        message |= {"ring": wanted.ring, "arena": wanted.arena_bytes}
        message["guest"] = None if guest is None else guest.to_message()
        try:
            send_message(worker.channel, message, (sock_fd,))
        except (ChannelClosed, BlockingIOError):
            return False
        worker.hand_overs += 1
        return True

    # --- what the zygote and the workers say ---

    def _on_zygote_message(self, message: dict[str, Any], fds: list[int]) -> None:
        worker = self._born.get(int(str(message.get("lease", "0")), 16))
        match message:
            case {"op": "spawned", "pid": int(pid)} if worker is not None and len(fds) <= 1:
                worker.pid, worker.pidfd = pid, fds[0] if fds else -1
                if worker.is_killed:
                    self._kill(worker)
            case {"op": "exited" | "no_fork", "reason": str(reason)} if worker is not None:
                close_all(fds)
                self._ended(worker, reason)
            case _:
                close_all(fds)

    def _on_worker_message(self, worker: Worker) -> None:
        try:
            message, fds = receive_message(worker.channel)
        except BlockingIOError:
            return
        except ChannelClosed:
            # Its exit is reported by whoever reaps it.
            asyncio.get_running_loop().remove_reader(worker.channel)
            return
        close_all(fds)
        lease_id = worker.spec.lease_id
        match message:
            case {"op": "attached"}:
                # Never below zero, whatever a worker says.
                worker.hand_overs = max(0, worker.hand_overs - 1)
            case {"op": "look"}:
                self._on_look(lease_id)
            case {"op": "ready"}:
                worker.is_ready = True
                self._post(WorkerReady(lease_id))
            case {"op": "failed", "reason": str(reason)}:
                self._post(WorkerFailed(lease_id, reason))
            case {"op": "faulted", "reason": str(reason)}:
                self._post(SessionFaulted(lease_id, reason))

    def _on_zygote_exit(self) -> None:
        _log.error("the zygote died: every session ends with it; it will be started again")
        for worker in list(self._workers.values()):
            if worker.pidfd < 0:
                self._ended(worker, "the zygote died before it could start the worker")
            else:
                asyncio.get_running_loop().add_reader(worker.pidfd, self._reap_orphan, worker)
        self._restart = asyncio.get_running_loop().create_task(self._restart_zygote())

    async def _restart_zygote(self) -> None:
        while True:
            await asyncio.sleep(ZYGOTE_RESTART_DELAY_S)
            self._zygote = self._new_zygote()
            try:
                await self._zygote.start()
            except ZygoteBroken as error:
                _log.error("the zygote can't be started: %s %s", error, error.hint)
                continue
            _log.info("the zygote is back")
            return

    def _reap_orphan(self, worker: Worker) -> None:
        """A dead zygote's worker is this process's child (see processes.adopt_orphans) and died with its parent."""
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED)
        self._ended(worker, "was killed with the zygote it came from")

    # --- ends ---

    def _post(self, event: Event) -> None:
        self._deliver(event)

    def _kill(self, worker: Worker) -> None:
        with contextlib.suppress(ProcessLookupError):
            if worker.pidfd >= 0:
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
            elif worker.pid:
                # Its pidfd did not get through for want of descriptors here. The zygote reaps it, and says so first.
                os.kill(worker.pid, signal.SIGKILL)

    def _ended(self, worker: Worker, reason: str) -> None:
        self._forget(worker)
        self._ended_workers[worker.spec.lease_id] = worker
        asyncio.get_running_loop().call_soon(self._tell_end, worker, reason)

    def _tell_end(self, worker: Worker, reason: str) -> None:
        """By the number it is known by now: until this was told, its lease may have been given another worker."""
        self._post(WorkerExited(worker.spec.lease_id, reason))

    def _forget(self, worker: Worker) -> None:
        del self._workers[worker.spec.lease_id], self._born[worker.born_as]
        asyncio.get_running_loop().remove_reader(worker.channel)
        worker.channel.close()
        worker.page.close()
        if worker.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(worker.pidfd)
            os.close(worker.pidfd)


def _has_ended(pidfd: int) -> bool:
    """A process file descriptor is readable from its process's end on (pidfd_open(2))."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _not_looked(lease_id: int) -> None:
    """Start-up's sessions run nothing."""


def _not_delivered(event: Event) -> None:
    _log.warning("nobody was told of %r", event)
