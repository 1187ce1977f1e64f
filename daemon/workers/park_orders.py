"""Delivers parking orders to workers and the answers to the lease table, and polls which sessions are in use.

A tenant may have compromised its worker. An answer counts only for the worker's own lease and with the number of the
last order, or of one that an earlier daemon gave. Its bytes are bounded by the lease's slice. Bytes that the worker
claims to have released count only once the card shows them free.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from typing import Final

from gpulease.daemon.contract import messages
from gpulease.daemon.contract.control_page import SESSION_USES, Counter, sealed_memory
from gpulease.daemon.contract.message_fields import Message
from gpulease.daemon.host.ipc import ChannelClosed, send_message
from gpulease.daemon.host.periodic_task import PeriodicTask
from gpulease.daemon.leases import events
from gpulease.daemon.leases.events import Event
from gpulease.daemon.leases.parking import host_bytes_of
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.audit.records import clean_text
from gpulease.daemon.workers.registry import MAX_REASON_CHARS, Workers
from gpulease.protocol.time_units import NS_PER_MS

USE_ROUND_S: Final = 0.25
"""Seconds between two polls for the use of parkable sessions. A poll reads some words of shared memory. A session may
be parked by up to this time later than its idle time requires."""

STAY_AGAIN_S: Final = 0.05
"""Seconds before an order to stay is sent again if the worker's channel was full."""

_IS_FULL: Final = "its worker accepts no orders now"

_IS_EARLIER: Final = "its worker is of an earlier version and must be replaced first (gpulease upgrade-workers)"


class ParkOrders:
    """Delivers orders about parking to workers, and their answers to the lease table.

    Args:
        table: The lease table.
        workers: The workers.
        allowance_bytes: Bytes by which a worker's pages may exceed its slice.
        post: Called with each answer, as an event.
        moves_modules: Whether the variables of modules may have other addresses in workers of another zygote, as with
            the CUDA driver.
    """

    def __init__(
        self,
        table: LeaseTable,
        workers: Workers,
        allowance_bytes: int,
        post: Callable[[Event], None],
        *,
        moves_modules: bool,
    ) -> None:
        self._moves_modules = moves_modules
        self._table = table
        self._workers = workers
        self._allowance_bytes = allowance_bytes
        self._post = post
        # Workers that have not received their order to stay yet.
        self._stays: set[int] = set()
        # The counters of each watched session, as of the last poll.
        self._uses: dict[int, tuple[int, ...]] = {}
        # Why each session can't leave its process, according to its worker at the last poll; absent without a reason.
        self._stays_claimed: dict[int, str] = {}
        self._rounds = PeriodicTask(self._poll_claims, USE_ROUND_S, self._on_fault)

    def start(self) -> None:
        """From now on poll which sessions are used. Later calls do nothing."""
        self._rounds.start()

    async def stop(self) -> None:
        await self._rounds.stop()

    # --- orders ---

    def give_memory(self, order: events.GiveParkMemory) -> None:
        """Give a worker host memory for its session. Without it the worker refuses to park, with that reason."""
        size_bytes = host_bytes_of(order.host_bytes + self._allowance_bytes)
        # The file is sparse: parts that the session does not fill take no memory. It lasts as long as the worker's
        # mapping, so it ends with the worker, even if this process is killed.
        with contextlib.suppress(OSError):
            fd = sealed_memory("gpulease-park", size_bytes)
            try:
                self._send(order.lease_id, messages.ParkMemoryOrder(size_bytes), fd)
            finally:
                os.close(fd)

    def drop_memory(self, order: events.DropParkMemory) -> None:
        self._send(order.lease_id, messages.ParkMemoryOrder())

    def copy_ahead(self, order: events.CopyAhead) -> None:
        # A worker that does not receive this order, or does not support it, copies everything when it parks its
        # session.
        self._send(order.lease_id, messages.CopyAheadOrder())

    def park(self, order: events.ParkSession) -> None:
        until_ns = time.monotonic_ns() + order.grace_ms * NS_PER_MS
        if not self._send(order.lease_id, messages.ParkOrder(order.number, until_ns, order.in_place)):
            self._post(events.SessionParkRefused(order.lease_id, order.number, _IS_FULL))

    def bring_back(self, order: events.ReturnSession) -> None:
        if not self._send(order.lease_id, messages.ReturnOrder(order.number)):
            self._post(events.SessionReturnFailed(order.lease_id, order.number, _IS_FULL))

    def refuse_return(self, order: events.RefuseWaitingOperations) -> None:
        # A worker that does not receive this asks again within a second.
        self._send(order.lease_id, messages.RefuseReturn(order.number, order.reason))

    def leave(self, order: events.LeaveSession) -> None:
        """Order a worker to send its session's image. Posts SessionStays if that can't begin."""
        # An order to stay from the previous park is still waiting, and would end this one.
        if order.lease_id in self._stays:
            self._post(events.SessionStays(order.lease_id, order.number, _IS_FULL, is_lasting=False))
            return
        # The worker runs another version: if its session did not fit a worker of this version, the lease would end.
        # Only an upgrade, which keeps the worker, is allowed.
        worker = self._workers.worker(order.lease_id)
        if self._moves_modules and not order.is_upgrade and worker is not None and worker.earlier_version:
            self._post(events.SessionStays(order.lease_id, order.number, _IS_EARLIER, is_lasting=False))
            return
        try:
            channel = self._workers.images.begin(order.lease_id, order.number, in_place=order.in_place)
        except OSError as error:
            self._post(events.SessionStays(order.lease_id, order.number, str(error), is_lasting=False))
            return
        with channel:
            if not self._send(
                order.lease_id, messages.LeaveOrder(order.number, order.carries, order.by_ring), channel.fileno()
            ):
                self._workers.images.discard(order.lease_id)
                self._post(events.SessionStays(order.lease_id, order.number, _IS_FULL, is_lasting=False))

    def keep_image(self, effect: events.LeaseLeft) -> None:
        self._workers.keep_image(effect.lease.lease_id)

    def stay(self, order: events.StaySession) -> None:
        """Order a worker to serve its session again. Until it has the order, it serves no client."""
        if self._send(order.lease_id, messages.StayOrder(order.number)):
            self._stays.discard(order.lease_id)
            self._workers.images.stay(order.lease_id, self._workers.worker(order.lease_id))
        else:
            self._stays.add(order.lease_id)
            asyncio.get_running_loop().call_later(STAY_AGAIN_S, self._stay_again, order)

    def _stay_again(self, order: events.StaySession) -> None:
        # The order may have been sent by now, because the worker reported its image late.
        if order.lease_id in self._stays:
            self.stay(order)

    def adopt(self, order: events.AdoptSession) -> None:
        """Send a cold session's image to its new worker. If that fails, post the event that ends the return."""
        worker = self._workers.worker(order.lease_id)
        # If the worker has ended, that ends the lease anyway.
        if worker is not None and not self._workers.images.adopt(order.lease_id, order.number, worker, order.refusal):
            self._workers.images.on_mismatch(order.lease_id, worker)
            reason = "its image can't be sent to its new worker"
            self._post(events.SessionReturnFailed(order.lease_id, order.number, reason, is_mismatch=True))

    def watch_clients(self, order: events.WatchClients) -> None:
        self._workers.images.watch_later(order.lease_id)

    def _send(self, lease_id: int, message: Message, fd: int = -1) -> bool:
        """Send an order. Returns False if it can't be sent now. A lease without a worker needs no order."""
        worker = self._workers.worker(lease_id)
        if worker is None:
            return True
        try:
            send_message(worker.channel, message.to_map(), (fd,) if fd >= 0 else ())
        except BlockingIOError:
            return False
        except ChannelClosed:
            # The zygote reports the worker's end, and the lease ends with it.
            return True
        return True

    # --- answers ---

    def on_message(self, lease_id: int, message: messages.ParkReport) -> None:
        lease = self._table.get(lease_id)
        # Orders' numbers are increasing times: after a number from the future, the next might not fit a message.
        if lease is None or message.number > time.monotonic_ns():
            return
        match message:
            case messages.ParkedReport():
                moved_bytes = min(message.moved_bytes, lease.size_bytes + self._allowance_bytes)
                kept_bytes = min(message.kept_bytes, lease.size_bytes)
                ahead_bytes = min(message.ahead_bytes, moved_bytes)
                self._post(
                    events.SessionParked(
                        lease_id, message.number, moved_bytes, kept_bytes, message.in_place, ahead_bytes
                    )
                )
            case messages.ParkRefusedReport():
                reason = clean_text(message.reason, MAX_REASON_CHARS)
                lacks_memory = message.why is messages.ParkRefusal.NO_MEMORY
                self._post(events.SessionParkRefused(lease_id, message.number, reason, lacks_memory=lacks_memory))
            case messages.ReturnWantedReport():
                self._post(events.ReturnWanted(lease_id, message.number))
            case messages.ReturnedReport():
                moved_bytes = min(message.moved_bytes, lease.size_bytes + self._allowance_bytes)
                self._workers.images.on_adopted(lease_id, self._workers.worker(lease_id))
                self._post(events.SessionReturned(lease_id, message.number, moved_bytes))
            case messages.ReturnFailedReport():
                reason = clean_text(message.reason, MAX_REASON_CHARS)
                images, worker = self._workers.images, self._workers.worker(lease_id)
                (images.on_mismatch if message.is_mismatch else images.on_adopted)(lease_id, worker)
                self._post(events.SessionReturnFailed(lease_id, message.number, reason, message.is_mismatch))
            case messages.ImagedReport():
                if not self._workers.images.on_imaged(lease_id, message):
                    self.stay(events.StaySession(lease_id, message.number))
            case messages.LeaveRefusedReport():
                reason = clean_text(message.reason, MAX_REASON_CHARS)
                self._workers.images.stay(lease_id, self._workers.worker(lease_id))
                self._post(events.SessionStays(lease_id, message.number, reason, message.is_lasting))

    # --- claims on the workers' pages ---

    async def _poll_claims(self) -> None:
        self._poll_uses()
        self._poll_stays()

    def _poll_uses(self) -> None:
        used: list[int] = []
        uses: dict[int, tuple[int, ...]] = {}
        for lease_id in self._table.parking.watched():
            worker = self._workers.worker(lease_id)
            if worker is None:
                continue
            uses[lease_id] = tuple(worker.page.counter(counter) for counter in SESSION_USES)
            # A long-running kernel counts as use, too.
            if uses[lease_id] != self._uses.get(lease_id) or worker.page.counter(Counter.KERNEL_SINCE_NS):
                used.append(lease_id)
        self._uses = uses
        if used:
            self._post(events.SessionsUsed(tuple(used)))

    def _poll_stays(self) -> None:
        reasons: dict[int, str] = {}
        for lease_id in self._table.parking.leases():
            worker = self._workers.worker(lease_id)
            if worker is not None and (reason := worker.page.why_stays()):
                reasons[lease_id] = reason
        former, self._stays_claimed = self._stays_claimed, reasons
        for lease_id in former.keys() | reasons.keys():
            if (reason := reasons.get(lease_id, "")) != former.get(lease_id, ""):
                self._post(events.StayClaimed(lease_id, clean_text(reason, MAX_REASON_CHARS)))

    def _on_fault(self, error: Exception) -> None:
        log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="polling the workers' claims about their sessions")
