"""All workers of a broker: a `Worker` object for each, from the request to the zygote until its process is reaped.

A worker is known by the number of its lease, submit or warm context. The number may change until its end is posted.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final, assert_never

from gpulease.daemon.contract import messages
from gpulease.daemon.contract.control_page import BrokerPage
from gpulease.daemon.contract.message_fields import MalformedMessage, Message, parse_message
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.host.ipc import ChannelClosed, close_all, receive_message
from gpulease.daemon.host.processes import has_ended, name_of
from gpulease.daemon.leases.events import (
    Event,
    SessionCondemned,
    SessionFaulted,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)
from gpulease.daemon.leases.model import Cause
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.audit.records import clean_text
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.daemon.workers.session_images import SessionImages
from gpulease.daemon.workers.worker import ReapedWorker, Worker
from gpulease.daemon.workers.zygote_client import ZygoteClient, Zygotes
from gpulease.daemon.workers.zygote_discovery import FoundWorker, FoundZygote
from gpulease.protocol.fast_dataclass import replace
from gpulease.protocol.opcodes import Status

MAX_REASON_CHARS: Final = 1000
"""Longest reason of a worker for its end, in characters. Stops a compromised worker from filling the audit log, and the
journal, which keeps reasons of thousands of leases."""

MAX_LAST_MESSAGES: Final = 300
"""Maximum number of messages that are read from a worker in a row, which is as many as fit its channel. A compromised
worker can give its end of the channel to its tenant, and the broker must not read for as long as that tenant sends."""


class Workers:
    """All workers, and the zygotes that fork them.

    Args:
        driver: The driver by which workers open their contexts.
        sandbox: The workers' sandbox; None for the default settings.
        folder: Where zygotes listen for the next broker; None if they must die with this one.
        wipes_heap: Whether workers overwrite memory that they free.
        grace_ns: How long work in flight may continue after a lease has expired.
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
        self._deliver: Callable[[Event], None] = _drop_event
        self._workers: dict[int, Worker] = {}
        # Workers that the zygote has not forked yet, by the number under which they were requested.
        self._unforked: dict[int, Worker] = {}
        self._by_serial: dict[tuple[ZygoteClient, int], Worker] = {}
        self._reaped: dict[int, ReapedWorker] = {}
        # For reaped workers with fenced bytes, by process id: the lease or warm context of the fence, and the card.
        self._fenced: dict[int, tuple[int, str]] = {}
        self._found_workers: dict[tuple[ZygoteClient, int], FoundWorker] = {}
        # Until the `set_...` methods are called, the only workers are those of the start-up, which run nothing.
        self._on_growth: Callable[[int], None] = lambda lease_id: None
        self._on_end: Callable[[Worker], None] = lambda worker: None
        self._on_fresh: Callable[[Worker], None] = lambda worker: None
        self._on_scrubbed: Callable[[Worker, str, int], None] = lambda *_: None
        self._on_connections: Callable[[int], None] = lambda lease_id: None
        self._on_guest: Callable[[int, int, bool], None] = lambda *_: None
        self._on_region: Callable[[int, Message], None] = lambda *_: None
        self._on_park: Callable[[int, messages.ParkReport], None] = lambda *_: None
        self.images = SessionImages(self._post)
        self.wipes_heap = wipes_heap
        self._zygotes = Zygotes(
            driver, self._on_zygote_message, self._on_zygote_exit, sandbox or SandboxSettings(), folder, wipes_heap
        )

    def deliver_to(self, deliver: Callable[[Event], None]) -> None:
        """Post events about workers to `deliver` from now on."""
        self._deliver = deliver

    def set_memory_listeners(
        self,
        on_growth: Callable[[int], None],
        on_fresh: Callable[[Worker], None],
        on_scrub: Callable[[Worker, str, int], None],
    ) -> None:
        """Set the callbacks about workers' memory.

        Args:
            on_growth: Called with a lease if its context may have grown.
            on_fresh: Called with a warm worker that is ready and whose memory must be measured before its first lease;
              must post its `WorkerReady`.
            on_scrub: Called with a worker that was scrubbed, the reason if it is not clean ("" if it is), and the bytes
              that it still counts as its own.
        """
        self._on_growth, self._on_fresh, self._on_scrubbed = on_growth, on_fresh, on_scrub

    def set_connection_listeners(
        self, on_connections: Callable[[int], None], on_guest: Callable[[int, int, bool], None]
    ) -> None:
        """Set the callbacks about connections.

        Args:
            on_connections: Called with a lease if its session's connections may have changed.
            on_guest: Called with a lease, the mark of a guest's token, and whether the worker admitted the guest.
        """
        self._on_connections, self._on_guest = on_connections, on_guest

    def set_region_listener(self, on_region: Callable[[int, Message], None]) -> None:
        """Set the callback for workers' messages about regions, or about the slice's size, with the lease."""
        self._on_region = on_region

    def set_park_listener(self, on_park: Callable[[int, messages.ParkReport], None]) -> None:
        """Set the callback for workers' messages about parking, with the lease."""
        self._on_park = on_park

    def set_end_listener(self, on_end: Callable[[Worker], None]) -> None:
        """Set the callback for each worker that has ended, called while its page can still be read."""
        self._on_end = on_end

    @property
    def can_start(self) -> bool:
        """Return whether there is a zygote to fork workers."""
        return self._zygotes.current.is_running

    def findings(self) -> list[dict[str, Any]]:
        """Return the measures of the workers' sandbox: for each, whether it is on, and its extent or why it is off."""
        return self._zygotes.current.findings

    async def start(self, zygotes: Sequence[FoundZygote] = ()) -> None:
        """Take over the zygotes of an earlier daemon, and start one if none of them can fork workers here.

        Raises ZygoteBroken.
        """
        for found_zygote in zygotes:
            zygote = self._zygotes.take_over(found_zygote)
            self._found_workers |= {(zygote, worker.serial): worker for worker in found_zygote.workers}
        await self._zygotes.start()

    async def stop(self) -> None:
        """End the zygotes and all remaining workers."""
        await self._zygotes.stop()
        self.images.close()
        for worker in list(self._workers.values()):
            worker.kill()
            self._remove(worker)

    async def leave(self) -> None:
        """Leave zygotes and workers to the next broker. Without workers, end the zygotes.

        An unused zygote would keep the daemon's standard error open for a minute, and a reader of it would wait.
        """
        if not (self._workers or self._unforked or self._found_workers or self._reaped):
            await self.stop()
            return
        await self._zygotes.leave()
        self.images.close()
        for worker in list(self._workers.values()):
            self._remove(worker)

    # --- workers of an earlier daemon ---

    def found_workers(self) -> list[FoundWorker]:
        """Return the workers of an earlier daemon, alive or reaped, that are not adopted yet."""
        return list(self._found_workers.values())

    def adopt(self, found_worker: FoundWorker, lease_id: int) -> None:
        """Take over an earlier daemon's worker under the number of a lease, or of a warm context."""
        ((zygote, serial),) = [key for key, worker in self._found_workers.items() if worker is found_worker]
        del self._found_workers[zygote, serial]
        # The worker ended before it was adopted: only its process id is needed, for the proof that its bytes are free.
        if found_worker.fds is None or found_worker.reason is not None:
            close_all(list(found_worker.fds or ()))
            self._reaped[lease_id] = ReapedWorker(lease_id, found_worker.pid, zygote, serial)
            return
        spec = replace(found_worker.spec, lease_id=lease_id)
        worker = Worker.adopt(spec, found_worker.pid, found_worker.fds, zygote, serial)
        self._workers[lease_id] = self._by_serial[zygote, serial] = worker
        asyncio.get_running_loop().add_reader(worker.channel, self._on_worker_message, worker)
        # The worker's zygote died during the hand-over, so only the pidfd reports the worker's end.
        if not zygote.is_running:
            self._watch_orphan(worker)

    def remember_ended(self, lease_id: int, pid: int) -> None:
        """Record a lease's worker that ended with its zygote before this daemon began."""
        self._reaped.setdefault(lease_id, ReapedWorker(lease_id, pid))

    def serving(self) -> list[Worker]:
        """Return the workers that are ready and not being killed."""
        workers = self._workers.values()
        return [worker for worker in workers if worker.is_ready and not (worker.is_killed or worker.has_left)]

    def worker(self, lease_id: int) -> Worker | None:
        return self._workers.get(lease_id)

    def pid(self, lease_id: int) -> int:
        """Return a worker's process id, 0 if there is none."""
        return 0 if (worker := self._workers.get(lease_id)) is None else worker.pid

    def context_pid(self, lease_id: int) -> int:
        """Return the process id of a worker that has its context; 0 if there is none, or not yet."""
        worker = self._workers.get(lease_id)
        return worker.pid if worker is not None and worker.is_ready else 0

    def is_alive(self, lease_id: int) -> bool:
        """Return whether a worker's process runs. The registry keeps a dead worker, too, until it is reaped."""
        if (worker := self._workers.get(lease_id)) is None or worker.pidfd < 0:
            return worker is not None
        return not has_ended(worker.pidfd)

    def pids(self) -> set[int]:
        """Return the process ids of all workers that run, are not proved free, or have bytes held by a fence."""
        ended = {reaped.pid for reaped in self._reaped.values()}
        return {worker.pid for worker in self._workers.values()} | ended | self._fenced.keys()

    def ended_pid(self, lease_id: int) -> int:
        """Return the process id of a worker that was reaped; 0 if it never had one."""
        return 0 if (ended := self._reaped.get(lease_id)) is None else ended.pid

    def settle(self, lease_id: int) -> None:
        """Forget a reaped worker after its bytes were proved free or fenced, and have its zygote forget it."""
        ended = self._reaped.pop(lease_id, None)
        if ended is not None and ended.zygote is not None:
            ended.zygote.forget(ended.serial)

    def fence(self, number: int, card_uuid: str, charged_to: int) -> None:
        """Count a reaped worker's process as the daemon's own while the card lists it, because a fence holds its bytes.

        Each fence has at most one such process, and a lease's fence one more for its submit. Another process that got
        the same id later does not count.

        Args:
            number: The worker's number.
            card_uuid: Its card.
            charged_to: The fenced lease, or warm context.
        """
        pid = self.ended_pid(number)
        if pid and not name_of(pid):
            self._fenced[pid] = charged_to, card_uuid

    def end_fences(self, numbers: Collection[int]) -> None:
        """Forget the processes of leases and warm contexts after an operator has cleared their fences."""
        self._fenced = {pid: fence for pid, fence in self._fenced.items() if fence[0] not in numbers}
        for number in numbers:
            # A worker that was reaped only after its lease was fenced is still registered.
            self.settle(number)

    def on_processes_listed(self, card_uuid: str, pids: Collection[int]) -> None:
        """Forget the processes of fenced workers that a card no longer lists. `pids`: the processes that it lists."""
        self._fenced = {pid: fence for pid, fence in self._fenced.items() if fence[1] != card_uuid or pid in pids}

    def earlier_version(self, lease_id: int) -> str:
        """Return the version of a lease's worker if it does not run this daemon's code, else ""."""
        return "" if (worker := self._workers.get(lease_id)) is None else worker.earlier_version

    def page(self, lease_id: int) -> BrokerPage | None:
        return None if (worker := self._workers.get(lease_id)) is None else worker.page

    def rename(self, from_id: int, to_id: int) -> None:
        """Give a worker another number, whether it lives or was reaped."""
        # If the worker dies during a renaming, it is in `_reaped`, and its end is posted under its new number.
        if (worker := self._workers.pop(from_id, None)) is not None:
            worker.spec = replace(worker.spec, lease_id=to_id)
            self._workers[to_id] = worker
        if (ended := self._reaped.pop(from_id, None)) is not None:
            ended.lease_id = to_id
            self._reaped[to_id] = ended

    def keep_image(self, lease_id: int) -> None:
        """Keep the image of a session before its worker ends."""
        worker = self._workers.get(lease_id)
        if worker is not None:
            # The page's counters belong to the lease, so report them while the worker has the lease's number.
            self._on_end(worker)
            worker.has_left = True
        self.images.keep(lease_id, worker)
        self._on_connections(lease_id)

    def recycle(self, lease_id: int, warm_id: int) -> None:
        """Turn a lease's scrubbed worker into a warm context; it gets another control page."""
        if (worker := self._workers.get(lease_id)) is not None:
            # The counters on the old page belong to that lease, so report them before the page is replaced.
            self._on_end(worker)
        self.rename(lease_id, warm_id)
        if worker is not None and not worker.become_warm():
            # The zygote was not notified, so the next broker would take this for the old lease's worker.
            self.kill(warm_id)

    def spawn(self, spec: WorkerSpec) -> None:
        """Request a worker's fork, or give the lease or submit to the warm worker with this number.

        `WorkerReady` or `WorkerExited` follows, unless a warm worker hangs.
        """
        if (warm := self._workers.get(spec.lease_id)) is not None:
            warm.take_lease(spec)
            return
        if spec.lease_id in self._reaped:
            # The warm worker has just died; `WorkerExited` is about to be posted.
            return
        try:
            # Step 1: make its pages and its channel.
            worker, peer_end = Worker.create(spec, self._zygotes.current)
        except OSError as error:
            self._not_started(spec, error)
            return
        # Register it before the request, because the zygote's answer may come during the call.
        self._workers[spec.lease_id] = self._unforked[spec.lease_id] = worker
        with peer_end:
            try:
                self._zygotes.current.spawn(spec, peer_end.fileno(), worker.page.fds, worker.channel.fileno())
                # The zygote has the pages now, and this process its mappings.
                worker.page.close_fds()
            except ChannelClosed as error:
                self._on_ended(worker, f"could not be started: {error}")
                return
            except OSError as error:
                # `is_busy`: no descriptor or no room for a message is a lack of resources, so the tenant may try again
                # soon.
                self._on_ended(worker, f"could not be started: {error.strerror}", is_busy=True)
                return
        asyncio.get_running_loop().add_reader(worker.channel, self._on_worker_message, worker)

    def _not_started(self, spec: WorkerSpec, error: OSError) -> None:
        # Post this in a later turn, because the caller is executing an effect, and logs that effect's event only
        # afterwards.
        asyncio.get_running_loop().call_soon(self._post_not_started, spec, str(error.strerror))

    def _post_not_started(self, spec: WorkerSpec, reason: str) -> None:
        log_event(LogEvent.WORKER_NOT_STARTED, lease_id=spec.of_lease, reason=reason)
        self._post(WorkerExited(spec.lease_id, f"could not be started: {reason}", is_busy=True))

    def set_deadline(self, lease_id: int, deadline_ns: int, generation: int) -> None:
        """Write a lease's deadline on its page, where the worker and the zygote read it."""
        if (worker := self._workers.get(lease_id)) is not None:
            worker.set_deadline(deadline_ns, generation, self._grace_ns)

    def set_membership_deadline(self, lease_id: int, membership_deadline_boot_ns: int) -> None:
        """Write a lease's membership deadline, on CLOCK_BOOTTIME, on its page."""
        if (worker := self._workers.get(lease_id)) is not None:
            worker.page.set_membership_deadline(membership_deadline_boot_ns)

    def refuse(self, lease_id: int, status: Status, reason: str = "", cause: str = "") -> None:
        """Make a worker answer everything with `status` and `reason`, and notify its connections.

        The next broker reads `cause`.
        """
        if (worker := self._workers.get(lease_id)) is not None:
            worker.refuse(status, reason, cause)
        self.images.refuse(lease_id, status, reason, cause)

    def set_grace_end(self, lease_id: int, until_ns: int) -> None:
        """Write on the page how long work in flight may continue in a worker that refuses new work.

        The zygote reads this as well, and kills the worker at that time.
        """
        if (worker := self._workers.get(lease_id)) is not None:
            worker.page.set_grace_end(until_ns)

    def kill(self, lease_id: int) -> None:
        # The lease table waits for WorkerExited after every kill, so post one if the worker has exited already.
        if (worker := self._workers.get(lease_id)) is None:
            exited = WorkerExited(lease_id, "it had no process", is_by_daemon=True)
            asyncio.get_running_loop().call_soon(self._post, exited)
            return
        worker.is_killed = True
        worker.kill()

    def attach(self, lease_id: int, sock_fd: int, attach: messages.AttachOrder) -> bool:
        """Send a tenant's socket, or a guest's, to the lease's worker.

        Returns False if the worker can't take it now.
        """
        if (is_held := self.images.hold(lease_id, sock_fd, attach)) is not None:
            return is_held
        worker = self._workers.get(lease_id)
        if worker is None or not worker.hand_over(sock_fd, attach):
            return False
        self._on_connections(lease_id)
        return True

    # --- messages of zygotes and workers ---

    def _on_zygote_message(self, zygote: ZygoteClient, message: messages.FromZygote, fds: list[int]) -> None:
        match message:
            # The pidfd may be missing, because this process had no descriptor left when the message arrived.
            case messages.WorkerForked(lease_id, pid, serial):
                if len(fds) <= 1:
                    self._on_forked(zygote, self._unforked.pop(lease_id), pid, serial, fds)
                    return
            case messages.ForkFailed(lease_id, reason):
                self._on_ended(self._unforked[lease_id], reason)
            case messages.WorkerReaped() as reaped:
                self._on_reaped(zygote, reaped)
            case messages.Preloaded() | messages.HelperBroken() | messages.Pong():
                # `ZygoteClient` handles these.
                pass
            case _:
                assert_never(message)
        close_all(fds)

    def _on_forked(self, zygote: ZygoteClient, worker: Worker, pid: int, serial: int, fds: list[int]) -> None:
        worker.serial, worker.pid, worker.pidfd = serial, pid, fds[0] if fds else -1
        self._by_serial[zygote, serial] = worker
        # The kill, or the worker's own report, may have come before the zygote's answer: handle it now.
        if worker.is_killed:
            worker.kill()
        if worker.is_ready:
            self._post_ready(worker)

    def _post_ready(self, worker: Worker) -> None:
        # Only contexts that are scrubbed between leases need the measurement, and only before their first lease. Set
        # the mark first, so that a second Ready does not start a second one.
        if self.wipes_heap and worker.spec.is_warm and not worker.is_measured:
            worker.is_measured = True
            self._on_fresh(worker)
        else:
            self._post(WorkerReady(worker.spec.lease_id))

    def _on_reaped(self, zygote: ZygoteClient, reaped: messages.WorkerReaped) -> None:
        overran = reaped.overran or ""
        # For a worker that was not adopted yet, only record the end; `adopt` posts it.
        if (worker := self._by_serial.get((zygote, reaped.serial))) is not None:
            if reaped.is_overdue:
                # The zygote killed the worker while this process hung. If the deadline was the reason, the lease table
                # notices that itself.
                worker.is_killed = True
                if overran:
                    self._post(SessionCondemned(worker.spec.lease_id, Cause.KERNEL_TIMEOUT, overran))
            self._on_ended(worker, reaped.reason)
        elif (found_worker := self._found_workers.get((zygote, reaped.serial))) is not None:
            found_worker.reason, found_worker.overran = reaped.reason, overran

    def read_arrived(self, worker_id: int) -> None:
        """Process what a worker and its zygote have sent and this process has not read yet.

        Call it before the lack of a worker's answer has consequences: this process may be the one that is late.
        """
        if (worker := self._workers.get(worker_id)) is None:
            return
        worker.zygote.read_arrived()
        # The zygote's messages may have ended the worker, and its own messages may give it another number.
        for _ in range(MAX_LAST_MESSAGES):
            if self._workers.get(worker.spec.lease_id) is not worker or not self._on_worker_message(worker):
                return

    def _on_worker_message(self, worker: Worker) -> bool:
        """Receive a message. Returns False if there was none."""
        try:
            message, fds = receive_message(worker.channel)
        except BlockingIOError:
            return False
        except ChannelClosed:
            # The zygote reports the worker's exit.
            asyncio.get_running_loop().remove_reader(worker.channel)
            return False
        close_all(fds)
        if (parsed := _parsed(message)) is not None:
            self._on_parsed(worker, parsed)
        return True

    def _on_parsed(self, worker: Worker, message: messages.FromWorker) -> None:
        lease_id = worker.spec.lease_id
        match message:
            case messages.Attached(mark, is_in, second_mark):
                # Never count below zero, because the worker's count may be false.
                worker.hand_overs = max(0, worker.hand_overs - 1)
                for token_mark in (mark, second_mark):
                    if token_mark is not None:
                        self._on_guest(lease_id, token_mark, is_in is True)
                self._on_connections(lease_id)
            case messages.LastLeft():
                self._on_connections(lease_id)
            case messages.MemoryGrew():
                self._on_growth(lease_id)
            case messages.Ready():
                worker.is_ready = True
                if worker.pid:
                    # Wait for the pid, because without it its bytes could not be distinguished from others'. The zygote
                    # sends it at once.
                    self._post_ready(worker)
            case messages.Scrubbed(doubt, held_bytes):
                self._on_scrubbed(worker, clean_text(doubt, MAX_REASON_CHARS), held_bytes)
            case (
                messages.RegionOpenedReport()
                | messages.RegionRefusedReport()
                | messages.RegionEndedReport()
                | messages.RegionStuckReport()
                | messages.RegionReleasedReport()
                | messages.ForwardRevokedReport()
                | messages.SliceResizedReport()
            ):
                self._on_region(lease_id, message)
            case (
                messages.ParkedReport()
                | messages.ParkRefusedReport()
                | messages.ReturnWantedReport()
                | messages.ReturnedReport()
                | messages.ReturnFailedReport()
                | messages.ImagedReport()
                | messages.LeaveRefusedReport()
            ):
                self._on_park(lease_id, message)
            case messages.Failed(reason):
                self._post(WorkerFailed(lease_id, clean_text(reason, MAX_REASON_CHARS)))
            case messages.Faulted(reason):
                if worker.on_fault():
                    self._post(SessionFaulted(lease_id, clean_text(reason, MAX_REASON_CHARS)))
            case _:
                assert_never(message)

    def _on_zygote_exit(self, zygote: ZygoteClient) -> None:
        # The kernel kills the workers with their zygote (PR_SET_PDEATHSIG), but no zygote is left to report that.
        for worker in [worker for worker in self._workers.values() if worker.zygote is zygote]:
            if worker.pidfd < 0:
                self._on_ended(worker, "the zygote died before it could start the worker")
            else:
                self._watch_orphan(worker)

    def _watch_orphan(self, worker: Worker) -> None:
        asyncio.get_running_loop().add_reader(worker.pidfd, self._reap_orphan, worker)

    def _reap_orphan(self, worker: Worker) -> None:
        """Reap a worker that the kernel killed with its zygote.

        By now it is this process's child (see processes.adopt_orphans), or init's if an earlier daemon started it.
        """
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED)
        self._on_ended(worker, "was killed together with its zygote")

    # --- ends ---

    def _post(self, event: Event) -> None:
        self._deliver(event)

    def _on_ended(self, worker: Worker, reason: str, *, is_busy: bool = False) -> None:
        # Read the reason and the counters before the page and the channel are closed.
        self._read_last_messages(worker)
        self._on_end(worker)
        # First take back the page with the words: if the session continues, its clients must not read an end there.
        self.images.on_lost(worker.spec.lease_id, worker)
        worker.note_end(reason)
        self._remove(worker)
        lease_id = worker.spec.lease_id
        reaped = ReapedWorker(lease_id, worker.pid, worker.zygote if worker.serial else None, worker.serial)
        self._reaped[lease_id] = reaped
        # Post this in a later turn, because the caller may be executing an effect of the lease table.
        asyncio.get_running_loop().call_soon(self._post_end, reaped, *worker.end_reason(reason), is_busy)

    def _read_last_messages(self, worker: Worker) -> None:
        """Read the last messages of an ended worker: the zygote's report of its exit may arrive before them.

        They may contain the reason for its end, or the report that it restored a session, which it may have served
        since.
        """
        with contextlib.suppress(BlockingIOError, ChannelClosed):
            for _ in range(MAX_LAST_MESSAGES):
                received, fds = receive_message(worker.channel)
                close_all(fds)
                message = _parsed(received)
                if isinstance(message, messages.Failed | messages.Faulted | messages.ReturnedReport):
                    self._on_parsed(worker, message)

    def _post_end(self, reaped: ReapedWorker, reason: str, is_by_daemon: bool, is_busy: bool) -> None:
        """Post a worker's end under its current number, which may have changed since the worker ended."""
        self._post(WorkerExited(reaped.lease_id, reason, is_by_daemon, is_busy))

    def _remove(self, worker: Worker) -> None:
        del self._workers[worker.spec.lease_id]
        # A later worker of the same lease may be waiting for its fork under this number.
        if self._unforked.get(worker.forked_for) is worker:
            del self._unforked[worker.forked_for]
        self._by_serial.pop((worker.zygote, worker.serial), None)
        worker.close()


def _parsed(message: dict[str, Any]) -> messages.FromWorker | None:
    """Return a worker's message; None if it is malformed or unknown. A worker may be compromised."""
    with contextlib.suppress(MalformedMessage):
        return parse_message(messages.FROM_WORKER, message)
    return None


def _drop_event(event: Event) -> None:
    log_event(LogEvent.DAEMON_FAULT, doing=f"discarding {event!r}")
