"""The workers as the broker sees them: one record each, from the spawn to the reaped process.

A worker is known by the number of its lease, or warm context; that may change until its end was told.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.contract.control_page import BrokerPage
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.host.ipc import ChannelClosed, close_all, receive_message
from gpulease.daemon.host.processes import has_ended, name_of
from gpulease.daemon.leases import (
    Cause,
    Event,
    SessionCondemned,
    SessionFaulted,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.audit.records import clean_text
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.daemon.workers.worker import Ended, Worker
from gpulease.daemon.workers.zygote_client import Zygote, Zygotes
from gpulease.daemon.workers.zygote_discovery import FoundWorker, FoundZygote
from gpulease.protocol.opcodes import Status
from gpulease.protocol.ring import Wanted

MAX_REASON_CHARS: Final = 1000
"""Of what a worker says of its end. Stops one that was taken over from filling the books, which are kept for thousands
of leases, and the audit log."""

MAX_LAST_WORDS: Final = 300
"""Of a worker that has ended: what fits a channel. Stops one that was taken over, and gave its end of the channel to
its tenant, from being listened to for as long as that one goes on."""


class Workers:
    """All workers, and the zygotes that make them.

    Args:
        folder: Where zygotes listen for the next broker; None if they are to die with this one.
        wipes_heap: Whether workers overwrite what they free of their own memory.
        grace_ns: How long work in flight may go on after a lease has expired.
    """

    def __init__(
        self,
        driver: str,
        sandbox: SandboxSettings | None = None,
        folder: Path | None = None,
        wipes_heap: bool = False,
        grace_ns: int = 0,
    ) -> None:
        self._grace_ns = grace_ns
        self._deliver: Callable[[Event], None] = _not_delivered
        self._workers: dict[int, Worker] = {}
        self._being_born: dict[int, Worker] = {}
        self._by_serial: dict[tuple[Zygote, int], Worker] = {}
        self._ended_workers: dict[int, Ended] = {}
        # Of reaped workers: the lease or warm context whose fence holds their bytes, and the card, by process id.
        self._fenced: dict[int, tuple[int, str]] = {}
        self._found: dict[tuple[Zygote, int], FoundWorker] = {}
        self._on_look: Callable[[int], None] = lambda lease_id: None  # start-up's sessions run nothing
        self._on_end: Callable[[Worker], None] = lambda worker: None
        self._on_scrubbed: Callable[[Worker, str, int], None] = lambda *_: None
        self._on_connections: Callable[[int], None] = lambda lease_id: None
        self._on_guest: Callable[[int, int, bool], None] = lambda *_: None
        self.wipes_heap = wipes_heap
        self._zygotes = Zygotes(
            driver, self._on_zygote_message, self._on_zygote_exit, sandbox or SandboxSettings(), folder, wipes_heap
        )

    def deliver_to(self, deliver: Callable[[Event], None]) -> None:
        """Who is told what happens to workers from now on."""
        self._deliver = deliver

    def look_with(self, look: Callable[[int], None], weigh: Callable[[Worker, str, int], None]) -> None:
        """Who is told of leases whose context may have grown, and of workers scrubbed, or not, and why."""
        self._on_look, self._on_scrubbed = look, weigh

    def tell_of_connections(
        self, on_connections: Callable[[int], None], on_guest: Callable[[int, int, bool], None]
    ) -> None:
        """Who is told of leases whose sessions may have other connections than before, and of guests handed over.

        `on_guest`: called with the lease, the mark of the guest's token and whether the worker let the guest in.
        """
        self._on_connections, self._on_guest = on_connections, on_guest

    def tell_of_ends(self, on_end: Callable[[Worker], None]) -> None:
        """Who is told of each worker that has ended, while its page can still be read."""
        self._on_end = on_end

    @property
    def can_start(self) -> bool:
        """Whether there is a zygote to make workers."""
        return self._zygotes.now.is_running

    def findings(self) -> list[dict[str, Any]]:
        """The measures of the workers' sandbox: whether each is on, and how far it goes or why it is not."""
        return self._zygotes.now.findings

    async def start(self, found: Sequence[FoundZygote] = ()) -> None:
        """Take over the zygotes of an earlier daemon, and start one if none of them can make workers here.

        Raises ZygoteBroken.
        """
        for one in found:
            zygote = self._zygotes.take_over(one)
            self._found |= {(zygote, worker.serial): worker for worker in one.workers}
        await self._zygotes.start()

    async def stop(self) -> None:
        """End the zygotes and every worker that is left."""
        await self._zygotes.stop()
        for worker in list(self._workers.values()):
            worker.kill()
            self._forget(worker)

    async def leave(self) -> None:
        """Go, and leave zygotes and workers to the next broker; where there is nothing to leave, end the zygotes.

        One that waits for nobody would keep the daemon's standard error open, and who reads it waiting, for a minute.
        """
        if not (self._workers or self._being_born or self._found or self._ended_workers):
            await self.stop()
            return
        await self._zygotes.leave()
        for worker in list(self._workers.values()):
            self._forget(worker)

    # --- an earlier daemon's ---

    def found(self) -> list[FoundWorker]:
        """Those of an earlier daemon, alive or reaped, until each is adopted."""
        return list(self._found.values())

    def adopt(self, found: FoundWorker, lease_id: int) -> None:
        """Know an earlier daemon's worker by a lease's number, or a warm context's, from now on."""
        ((zygote, serial),) = [key for key, worker in self._found.items() if worker is found]
        del self._found[zygote, serial]
        if found.fds is None or found.reason is not None:
            close_all(list(found.fds or ()))
            self._ended_workers[lease_id] = Ended(lease_id, found.pid, zygote, serial)
            return
        spec = replace(found.spec, lease_id=lease_id)
        worker = Worker.adopted(spec, found.pid, found.fds, zygote, serial)
        self._workers[lease_id] = self._by_serial[zygote, serial] = worker
        asyncio.get_running_loop().add_reader(worker.channel, self._on_worker_message, worker)
        if not zygote.is_running:
            self._watch_orphan(worker)

    def remember_ended(self, lease_id: int, pid: int) -> None:
        """A lease's worker ended with the zygote it came from, before this daemon began."""
        self._ended_workers.setdefault(lease_id, Ended(lease_id, pid))

    def serving(self) -> list[Worker]:
        """Those that have said that they are ready and were not ordered dead."""
        return [worker for worker in self._workers.values() if worker.is_ready and not worker.is_killed]

    def worker(self, lease_id: int) -> Worker | None:
        """The worker of that number."""
        return self._workers.get(lease_id)

    def pid(self, lease_id: int) -> int:
        """The worker's process id, 0 if there is none."""
        return 0 if (worker := self._workers.get(lease_id)) is None else worker.pid

    def is_alive(self, lease_id: int) -> bool:
        """Whether the worker's process runs: one that is dead is told of only once it was reaped."""
        if (worker := self._workers.get(lease_id)) is None or worker.pidfd < 0:
            return worker is not None
        return not has_ended(worker.pidfd)

    def pids(self) -> set[int]:
        """The process ids of all workers that live, have ended and are not settled, or whose bytes a fence holds."""
        ended = {one.pid for one in self._ended_workers.values()}
        return {worker.pid for worker in self._workers.values()} | ended | self._fenced.keys()

    def ended_pid(self, lease_id: int) -> int:
        """The process id of a worker that has ended; 0 if it never had one."""
        return 0 if (ended := self._ended_workers.get(lease_id)) is None else ended.pid

    def settle(self, lease_id: int) -> None:
        """A worker's bytes are proved back, or fenced: nothing need be known of it any more."""
        ended = self._ended_workers.pop(lease_id, None)
        if ended is not None and ended.zygote is not None:
            ended.zygote.forget(ended.serial)

    def fence(self, number: int, card_uuid: str, charged_to: int) -> None:
        """Count a reaped worker's process as the daemon's own while the card lists it: a fence holds its bytes.

        There are as many as fences at most, and one more for a lease's submit. A process that runs under that number
        by now is a stranger's. `charged_to`: the fenced lease, or warm context.
        """
        pid = self.ended_pid(number)
        if pid and not name_of(pid):
            self._fenced[pid] = charged_to, card_uuid

    def end_fences(self, numbers: Collection[int]) -> None:
        """An operator has cleared the fences of these leases and warm contexts: nothing holds their bytes any more."""
        self._fenced = {pid: fence for pid, fence in self._fenced.items() if fence[0] not in numbers}
        for number in numbers:
            # One that was reaped only after it was fenced was not settled.
            self.settle(number)

    def see_listed(self, card_uuid: str, pids: Collection[int]) -> None:
        """Forget fenced workers' processes that the card does not list."""
        self._fenced = {pid: fence for pid, fence in self._fenced.items() if fence[1] != card_uuid or pid in pids}

    def page(self, lease_id: int) -> BrokerPage | None:
        """The worker's control page."""
        return None if (worker := self._workers.get(lease_id)) is None else worker.page

    def rename(self, from_id: int, to_id: int) -> None:
        """Know a worker by another number, whether it lives or has ended."""
        if (worker := self._workers.pop(from_id, None)) is not None:
            worker.spec = replace(worker.spec, lease_id=to_id)
            self._workers[to_id] = worker
        if (ended := self._ended_workers.pop(from_id, None)) is not None:
            ended.lease_id = to_id
            self._ended_workers[to_id] = ended

    def recycle(self, lease_id: int, warm_id: int) -> None:
        """A lease's worker is scrubbed: it has no lease and another page from now on."""
        if (worker := self._workers.get(lease_id)) is not None:
            # What the page that goes has counted is that lease's.
            self._on_end(worker)
        self.rename(lease_id, warm_id)
        if worker is not None and not worker.become_warm():
            # The next broker would take it for another's: no lease may have it.
            self.kill(warm_id)

    def spawn(self, spec: WorkerSpec) -> None:
        """Have a worker made, or have the one that was made ahead for this lease, or submit, take it.

        `WorkerReady` or `WorkerExited` follows; of a worker made ahead that hangs, nothing.
        """
        if (made := self._workers.get(spec.lease_id)) is not None:
            made.take_lease(spec)
            return
        if spec.lease_id in self._ended_workers:
            # One made ahead that has just died, which is about to be told.
            return
        try:
            worker, theirs = Worker.to_be(spec, self._zygotes.now)
        except OSError as error:
            self._not_started(spec, error)
            return
        self._workers[spec.lease_id] = self._being_born[spec.lease_id] = worker
        with theirs:
            try:
                self._zygotes.now.spawn(spec, theirs.fileno(), worker.page.fds, worker.channel.fileno())
                worker.page.let_go()
            except ChannelClosed as error:
                self._ended(worker, f"could not be started: {error}")
                return
            except OSError as error:
                self._ended(worker, f"could not be started: {error.strerror}", is_busy=True)
                return
        asyncio.get_running_loop().add_reader(worker.channel, self._on_worker_message, worker)

    def _not_started(self, spec: WorkerSpec, error: OSError) -> None:
        log_event(LogEvent.WORKER_NOT_STARTED, lease_id=spec.of_lease, reason=error.strerror)
        ended = WorkerExited(spec.lease_id, f"could not be started: {error.strerror}", is_busy=True)
        asyncio.get_running_loop().call_soon(self._post, ended)

    def set_deadline(self, lease_id: int, deadline_ns: int, generation: int) -> None:
        """Write the deadline where the worker reads it."""
        if (worker := self._workers.get(lease_id)) is not None:
            worker.set_deadline(deadline_ns, generation, self._grace_ns)

    def refuse(self, lease_id: int, status: Status, reason: str = "", cause: str = "") -> None:
        """Have the worker answer everything with `status` and that reason, and say so to whoever is connected.

        `cause` is for the next broker.
        """
        if (worker := self._workers.get(lease_id)) is not None:
            worker.refuse(status, reason, cause)

    def give_grace(self, lease_id: int, until_ns: int) -> None:
        """Write until when work in flight may go on in a worker that refuses more, for its zygote to read."""
        if (worker := self._workers.get(lease_id)) is not None:
            worker.page.give_grace(until_ns)

    def kill(self, lease_id: int) -> None:
        """End the worker whatever it is doing; `WorkerExited` follows."""
        if (worker := self._workers.get(lease_id)) is None:
            exited = WorkerExited(lease_id, "there was no process", is_by_daemon=True)
            asyncio.get_running_loop().call_soon(self._post, exited)
            return
        worker.is_killed = True
        worker.kill()

    def attach(
        self, lease_id: int, sock_fd: int, request_id: int, rest: bytes, wanted: Wanted, guest: Guest | None = None
    ) -> bool:
        """Hand a tenant's socket, or a guest's, to the lease's worker; False if the worker can't take it now."""
        worker = self._workers.get(lease_id)
        if worker is None or not worker.hand_over(sock_fd, request_id, rest, wanted, guest):
            return False
        self._on_connections(lease_id)
        return True

    # --- what the zygote and the workers say ---

    def _on_zygote_message(self, zygote: Zygote, message: dict[str, Any], fds: list[int]) -> None:
        match message:
            case {"op": "spawned", "lease": str(number), "pid": int(pid), "serial": int(serial)} if len(fds) <= 1:
                self._born(zygote, self._being_born.pop(int(number, 16)), pid, serial, fds)
                return
            case {"op": "no_fork", "lease": str(number), "reason": str(reason)}:
                self._ended(self._being_born[int(number, 16)], reason)
            case {"op": "exited", "serial": int(serial), "reason": str(reason)}:
                if (worker := self._by_serial.get((zygote, serial))) is not None:
                    if message.get("is_overdue") is True:
                        self._was_overdue(worker, str(message.get("overran", "")))
                    self._ended(worker, reason)
                elif (found := self._found.get((zygote, serial))) is not None:
                    found.reason, found.overran = reason, str(message.get("overran", ""))
        close_all(fds)

    def _was_overdue(self, worker: Worker, overran: str) -> None:
        """Its zygote has ended it while this process hung: by the deadline, which the lease table has, or a kernel."""
        worker.is_killed = True
        if overran:
            self._post(SessionCondemned(worker.spec.lease_id, Cause.KERNEL_TIMEOUT, overran))

    def _born(self, zygote: Zygote, worker: Worker, pid: int, serial: int, fds: list[int]) -> None:
        worker.serial, worker.pid, worker.pidfd = serial, pid, fds[0] if fds else -1
        self._by_serial[zygote, serial] = worker
        if worker.is_killed:
            worker.kill()
        if worker.is_ready:
            self._post(WorkerReady(worker.spec.lease_id))

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
        self._take_word(worker, message)

    def _take_word(self, worker: Worker, message: dict[str, Any]) -> None:
        lease_id = worker.spec.lease_id
        match message:
            case {"op": "attached"}:
                # Never below zero, whatever a worker says.
                worker.hand_overs = max(0, worker.hand_overs - 1)
                if isinstance(mark := message.get("guest"), int):
                    self._on_guest(lease_id, mark, message.get("is_in") is True)
                self._on_connections(lease_id)
            case {"op": "left"}:
                self._on_connections(lease_id)
            case {"op": "look"}:
                self._on_look(lease_id)
            case {"op": "ready"}:
                worker.is_ready = True
                if worker.pid:
                    # Else what it holds could not be told from others' bytes: the zygote says at once who it is.
                    self._post(WorkerReady(lease_id))
            case {"op": "scrubbed", "doubt": str(doubt), "held": int(held_bytes)}:
                self._on_scrubbed(worker, clean_text(doubt, MAX_REASON_CHARS), held_bytes)
            case {"op": "failed", "reason": str(reason)}:
                self._post(WorkerFailed(lease_id, clean_text(reason, MAX_REASON_CHARS)))
            case {"op": "faulted", "reason": str(reason)} if worker.faults_first():
                self._post(SessionFaulted(lease_id, clean_text(reason, MAX_REASON_CHARS)))

    def _on_zygote_exit(self, zygote: Zygote) -> None:
        for worker in [worker for worker in self._workers.values() if worker.zygote is zygote]:
            if worker.pidfd < 0:
                self._ended(worker, "the zygote died before it could start the worker")
            else:
                self._watch_orphan(worker)

    def _watch_orphan(self, worker: Worker) -> None:
        asyncio.get_running_loop().add_reader(worker.pidfd, self._reap_orphan, worker)

    def _reap_orphan(self, worker: Worker) -> None:
        """A dead zygote's worker died with its parent; it is this process's child, or init's if an earlier daemon's.

        See processes.adopt_orphans.
        """
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED)
        self._ended(worker, "was killed with the zygote it came from")

    # --- ends ---

    def _post(self, event: Event) -> None:
        self._deliver(event)

    def _ended(self, worker: Worker, reason: str, *, is_busy: bool = False) -> None:
        self._take_last_words(worker)
        self._on_end(worker)
        self._forget(worker)
        lease_id = worker.spec.lease_id
        ended = Ended(lease_id, worker.pid, worker.zygote if worker.serial else None, worker.serial)
        self._ended_workers[lease_id] = ended
        asyncio.get_running_loop().call_soon(self._tell_end, ended, *worker.end_of(reason), is_busy)

    def _take_last_words(self, worker: Worker) -> None:
        """Why it ended, if it said so itself: the zygote may be heard first."""
        with contextlib.suppress(BlockingIOError, ChannelClosed):
            for _ in range(MAX_LAST_WORDS):
                message, fds = receive_message(worker.channel)
                close_all(fds)
                if message.get("op") in ("failed", "faulted"):
                    self._take_word(worker, message)

    def _tell_end(self, ended: Ended, reason: str, is_by_daemon: bool, is_busy: bool) -> None:
        """By the number it is known by now: until this was told, its lease may have been given another worker."""
        self._post(WorkerExited(ended.lease_id, reason, is_by_daemon, is_busy))

    def _forget(self, worker: Worker) -> None:
        del self._workers[worker.spec.lease_id]
        self._being_born.pop(worker.born_as, None)
        self._by_serial.pop((worker.zygote, worker.serial), None)
        worker.close()


def _not_delivered(event: Event) -> None:
    log_event(LogEvent.DAEMON_FAULT, doing=f"telling nobody of {event!r}")
