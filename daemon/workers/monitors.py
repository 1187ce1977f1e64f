"""Monitors of the workers: kernels that run too long, memory beyond the slice, dead workers' bytes, the scrub.

`KernelWatchdog` finds kernels, compilations and silence that last too long. `MemoryMonitor` compares the memory that a
session holds with the memory that was admitted. `Reclaimer` proves that a dead worker's bytes are free,
`BytesProver` that a live one has returned bytes. `CardWatch` polls the memory that others hold on a card.
`Recycler` has a worker scrubbed after its lease, and measures it before its next lease.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from gpulease.daemon.contract.control_page import BrokerPage, Counter, for_reading, overran
from gpulease.daemon.contract.messages import Scrub
from gpulease.daemon.gpus.source import POLL_ERRORS, CardReading, CardSource, CardsUnavailable
from gpulease.daemon.host.cancellation import cancel_all
from gpulease.daemon.host.ipc import ChannelClosed, send_message
from gpulease.daemon.host.periodic_task import PeriodicTask
from gpulease.daemon.leases.events import (
    CardPolled,
    Event,
    ProveRegion,
    ReclaimProved,
    RegionProved,
    SessionCondemned,
    WorkerReady,
    WorkerScrubbed,
    WorkerUnlisted,
)
from gpulease.daemon.leases.model import Cause, LeaseState, WorkerKind, kind_of
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.worker import Worker
from gpulease.protocol.back_off import back_off_s
from gpulease.protocol.counts import counted
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.operations import Trait, having
from gpulease.protocol.time_units import NS_PER_S

UNRESPONSIVE_AFTER_S: Final = 30.0
"""Longest time without a heartbeat from a worker: six times its longest sleep, because hosts may be under heavy
load."""

LONGEST_ROUND_S: Final = 2.0
"""If more time than this passes between two rounds, the excess counts against no worker: this process was stopped, or
frozen with its container, and perhaps the workers as well."""

ROUND_S: Final = 1.0
"""Seconds between two rounds of a monitor. The kernels' watchdog runs more often if kernels may run only for a shorter
time.

A session that holds more than it should is found within a round; polling it takes 0.1 ms. If a program outside the
daemon takes memory, the card's capacity is reduced within a round; until then leases may be promised more than the card
has. That poll takes 0.3 ms."""

MIN_ROUND_S: Final = 0.01
"""Shortest time between two rounds, in seconds."""

_KNOWN_WAITS: Final = having(Trait.WAITS_IN_DRIVER)

_ROUNDS_PER_BOUND: Final = 8


@dataclass(slots=True)
class _LastHeartbeat:
    """The last heartbeat on a worker's page.

    Attributes:
        polled_ns: The heartbeat: the time at which the worker last polled.
        since_ns: When this process first read this heartbeat, plus the time for which it was stopped since then.
        compiling_since_ns: When the worker's compilation began, as its page says; 0 without one.
        away_ns: For how long this process was stopped since it first found that compilation.
    """

    polled_ns: int
    since_ns: int
    compiling_since_ns: int = 0
    away_ns: int = 0


class KernelWatchdog:
    """Condemns sessions that take too long.

    Args:
        workers: The workers.
        post: Called with each `SessionCondemned`.
        max_load_s: How long an image may compile.
    """

    def __init__(self, workers: Workers, post: Callable[[Event], None], max_load_s: int) -> None:
        self._max_load_ns = max_load_s * NS_PER_S
        self._workers = workers
        self._post = post
        self._last_heartbeats: dict[int, _LastHeartbeat] = {}
        self._last_round_ns: int | None = None
        self._rounds = PeriodicTask(self._check_now, self._pause_s)

    def start(self) -> None:
        """Check all workers from now on; later calls do nothing."""
        self._rounds.start()

    async def stop(self) -> None:
        await self._rounds.stop()

    def check_all(self, now_ns: int) -> None:
        """Check every worker once, and condemn the sessions that must end."""
        # Drop the entries of workers that have ended; otherwise they would accumulate.
        serving = {worker.spec.lease_id: worker for worker in self._workers.serving()}
        for lease_id in self._last_heartbeats.keys() - serving.keys():
            del self._last_heartbeats[lease_id]
        # Don't count time in which this process was stopped against any worker.
        last_round_ns = now_ns if self._last_round_ns is None else self._last_round_ns
        away_ns = max(0, now_ns - last_round_ns - int(LONGEST_ROUND_S * NS_PER_S))
        for last in self._last_heartbeats.values():
            last.since_ns += away_ns
            last.away_ns += away_ns
        self._last_round_ns = now_ns
        for lease_id, worker in serving.items():
            verdict = self._verdict(worker, now_ns, away_ns)
            if verdict is not None:
                self._post(SessionCondemned(lease_id, *verdict))

    async def _check_now(self) -> None:
        self.check_all(time.monotonic_ns())

    def _pause_s(self) -> float:
        # Do eight rounds within the shortest bound, so that a kernel is found at most an eighth too late.
        bounds = [worker.spec.max_kernel_ms / 1000 for worker in self._workers.serving() if worker.spec.max_kernel_ms]
        return max(MIN_ROUND_S, min([ROUND_S, *(bound / _ROUNDS_PER_BOUND for bound in bounds)]))

    def _verdict(self, worker: Worker, now_ns: int, round_away_ns: int) -> tuple[Cause, str] | None:
        """Return why a worker's session must end, if it must.

        `round_away_ns`: For how long this process was stopped since the last round.
        """
        # Rule 1: by the worker's own figures, one kernel has run for longer than the lease allows.
        polled_ns, since_ns = (
            worker.page.counter(counter) for counter in (Counter.LAST_POLL_NS, Counter.KERNEL_SINCE_NS)
        )
        if reason := overran(polled_ns, since_ns, worker.spec.max_kernel_ms):
            return Cause.KERNEL_TIMEOUT, reason
        # Rule 2: a compilation takes too long. It can't be interrupted, so the worker shows no heartbeat during it, and
        # only its length counts.
        compiling_since_ns = worker.page.counter(Counter.COMPILING_SINCE_NS)
        last = self._last_heartbeats.get(worker.spec.lease_id)
        # A compilation that the last round did not find has begun since that round.
        away_ns = round_away_ns
        if last is not None and last.compiling_since_ns == compiling_since_ns:
            away_ns = last.away_ns
        if compiling_since_ns and now_ns - compiling_since_ns - away_ns >= self._max_load_ns:
            return Cause.LOAD_TIMEOUT, f"an image took more than {self._max_load_ns // NS_PER_S} s to compile"
        # Rule 3: the heartbeat has stopped. Operations that are known to wait inside the driver are exempt, because
        # rules 1 and 2 and the lease's deadline bound them.
        waits = compiling_since_ns or worker.page.counter(Counter.DOING) in _KNOWN_WAITS
        if last is None or polled_ns != last.polled_ns or waits:
            self._last_heartbeats[worker.spec.lease_id] = _LastHeartbeat(polled_ns, now_ns, compiling_since_ns, away_ns)
        elif now_ns - last.since_ns >= UNRESPONSIVE_AFTER_S * NS_PER_S:
            return Cause.UNRESPONSIVE, f"it showed no sign of life for {(now_ns - last.since_ns) / NS_PER_S:.1f} s"
        return None


PAUSE_S: Final = 0.01
"""Pause between two polls of one session. Stops a tenant that loads one module after the other from keeping the card's
driver busy with listing processes. Memory that a session takes during the pause is found that much later."""


FAILED_POLL_PAUSE_S: Final = 0.2
"""Pause before a session is polled again if the card gave no figure, in seconds."""

MAX_FAILED_POLLS: Final = 5
"""Number of polls in a row without a figure from the card after which a session is ended. A driver may fail once and
recover. But a session with unknown memory must end within about a second, because nothing would stop it from taking
another lease's bytes.
"""


class MemoryMonitor:
    """Condemns sessions that hold more of their card than was admitted.

    Allocations are counted before they are made, and the memory of modules and the local memory of kernels are computed
    in advance (drivers/cuda). The monitor checks these against the card's figure for the process. It polls when the
    driver may have taken more, and once a second. It also polls scrubbed contexts that wait for their next lease. A
    session that holds too much is ended as OVER_SLICE. If the card gives no figure for a session in MAX_FAILED_POLLS
    polls, it is ended as UNMEASURED.

    Args:
        table: The leases.
        source: The cards.
        workers: The workers.
        post: Called with each `SessionCondemned`.
    """

    def __init__(self, table: LeaseTable, source: CardSource, workers: Workers, post: Callable[[Event], None]) -> None:
        self._table = table
        self._source = source
        self._workers = workers
        self._post = post
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._again: set[int] = set()
        self._failed_polls: dict[int, int] = {}
        self._rounds = PeriodicTask(self._poll_all, lambda: ROUND_S)

    def start(self) -> None:
        """Poll all sessions from now on, if the driver lets one take more than it is given. Later calls do nothing."""
        if self._source.reserve_bytes:
            self._rounds.start()

    def poll(self, lease_id: int) -> None:
        """Poll a session. If this is called again during the poll, poll again."""
        # Do only one poll of a session at a time, then repeat it: the growth may have come after the card was read.
        if lease_id in self._tasks:
            self._again.add(lease_id)
            return
        task = asyncio.get_running_loop().create_task(self._poll_and_pause(lease_id))
        self._tasks[lease_id] = task
        task.add_done_callback(lambda _: self._done(lease_id))

    async def stop(self) -> None:
        tasks = [*self._tasks.values()]
        self._again.clear()
        for task in tasks:
            task.cancel()
        await self._rounds.stop()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll_all(self) -> None:
        for lease in self._table.snapshots():
            if lease.state is LeaseState.ACTIVE:
                self.poll(lease.lease_id)
        # Submits and recycled contexts have processes of their own, which have also run a tenant's kernels.
        for submit in self._table.submits.snapshots():
            self.poll(submit.submit_id)
        for context in self._table.warming():
            if context.is_recycled:
                # The context's process ran a tenant's kernels, so its own report that it is scrubbed proves nothing.
                self.poll(context.warm_id)

    def _done(self, lease_id: int) -> None:
        del self._tasks[lease_id]
        if lease_id in self._again:
            self._again.discard(lease_id)
            self.poll(lease_id)
        else:
            self._failed_polls.pop(lease_id, None)

    async def _poll_and_pause(self, lease_id: int) -> None:
        await self._poll(lease_id)
        await asyncio.sleep(FAILED_POLL_PAUSE_S if lease_id in self._failed_polls else PAUSE_S)

    async def _poll(self, lease_id: int) -> None:
        # The session may have ended since the poll was requested. Or it continues in another process that has no
        # context yet, so that the card does not list the process.
        place, pid = self._table.submits.may_hold(lease_id), self._workers.context_pid(lease_id)
        if place is None or not pid:
            return
        card_uuid, allowed = place
        park = self._table.parking.of(lease_id)
        try:
            # Poll in a thread, because the driver's library blocks, especially if the card is busy.
            held_bytes = await asyncio.to_thread(self._source.process_bytes, card_uuid, pid)
        except CardsUnavailable as error:
            # Tolerate some failures. If the lease has ended, its polls stop at the first check above.
            failed = self._failed_polls[lease_id] = self._failed_polls.get(lease_id, 0) + 1
            if failed < MAX_FAILED_POLLS:
                self._again.add(lease_id)
                return
            log_kind, cause, reason = LogEvent.WORKER_UNMEASURED, Cause.UNMEASURED, str(error)
        else:
            self._failed_polls.pop(lease_id, None)
            if held_bytes <= allowed:
                return
            # During the poll the lease was resized, or its session left its card or returned, so the figures don't
            # match.
            if (self._table.submits.may_hold(lease_id), self._table.parking.of(lease_id)) != (place, park):
                self._again.add(lease_id)
                return
            log_kind, cause = LogEvent.WORKER_OVER_SLICE, Cause.OVER_SLICE
            reason = (
                f"the card shows {held_bytes} bytes for its process; {allowed} were admitted, including the context"
            )
        # A worker that ended during the poll has left the card; `WorkerExited` follows.
        if self._workers.is_alive(lease_id):
            owner_id = self._table.submits.lease_of(lease_id) or lease_id
            log_event(
                log_kind,
                lease_id=owner_id if kind_of(owner_id) is WorkerKind.LEASE else 0,
                reason=reason,
            )
            self._post(SessionCondemned(lease_id, cause, reason))


FIRST_POLL_DELAY_S: Final = 0.002
"""Pause between the first poll of a card and the second. The driver releases bytes some milliseconds after the reap (74
ms were seen for 60 GiB), so polls are close together at first and then become rarer."""

MAX_POLL_DELAY_S: Final = 0.1
"""Longest time between two polls: the lease table fences the slice when its own timer runs out, and polls cost time."""


FIRST_ROUND_TIMEOUT_S: Final = 5.0
"""Longest time for the poll before the daemon listens. A driver that hangs must not prevent tenants from using leases
that continue. On a card that was not read by then, nothing is granted until it is read."""


class UnlistedSince:
    """The polls of a card since it stopped listing one process, and their figures for `WorkerUnlisted`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since_ns: int | None = None
        self._least_bytes = 0

    def missing(self, reading: CardReading, polled_ns: int) -> str:
        """Record a poll. Returns why the bytes are not proved free; "" if the card does not list the process."""
        # The card lists the process (again), so earlier polls without it do not count: start again.
        if (held_bytes := reading.processes.get(self._pid)) is not None:
            self._since_ns = None
            return f"NVML still lists process {self._pid} with {held_bytes} bytes"
        if self._since_ns is None:
            self._since_ns, self._least_bytes = polled_ns, reading.unowned_bytes
        # Keep the smallest figure: bytes that other programs take during the polls must not count as the worker's.
        self._least_bytes = min(self._least_bytes, reading.unowned_bytes)
        return ""

    def event(self, lease_id: int, card_uuid: str, reading: CardReading, polled_ns: int) -> WorkerUnlisted:
        """Return the event for the lease table about the last poll."""
        since_ns = polled_ns if self._since_ns is None else self._since_ns
        return WorkerUnlisted(lease_id, card_uuid, reading.unowned_bytes, self._least_bytes, since_ns, polled_ns)


class Reclaimer:
    """Polls a card for a dead worker's bytes until the lease table has its proof.

    Only `give_up` ends the polls, because the lease table decides how long to wait.
    """

    def __init__(self, source: CardSource, post: Callable[[Event], None]) -> None:
        self._source = source
        self._post = post
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def prove(self, lease_id: int, card_uuid: str, pid: int) -> None:
        """Post `WorkerUnlisted` at each poll that does not list the process.

        Without a process, post `ReclaimProved`.
        """
        task = asyncio.get_running_loop().create_task(self._poll(lease_id, card_uuid, pid))
        self._tasks[lease_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(lease_id, None))

    def give_up(self, lease_id: int) -> None:
        if (task := self._tasks.get(lease_id)) is not None:
            task.cancel()

    async def stop(self) -> None:
        await cancel_all(self._tasks.values())

    async def _poll(self, lease_id: int, card_uuid: str, pid: int) -> None:
        polls = 0
        unlisted = UnlistedSince(pid)
        # Without a process id the worker never existed, so its bytes are free.
        while pid:
            polled_ns = time.monotonic_ns()
            try:
                reading = await asyncio.to_thread(self._source.read, card_uuid)
            except POLL_ERRORS as error:
                # If no thread can be started, try again: memory may become free before the slice must be fenced.
                missing = f"the card can't be read: {error}"
            else:
                missing = unlisted.missing(reading, polled_ns)
                if not missing:
                    self._post(unlisted.event(lease_id, card_uuid, reading, polled_ns))
                    # If this completed the proof, the lease table has cancelled this task, which then ends here.
                    await asyncio.sleep(0)
                    missing = f"{reading.unowned_bytes} bytes more than at the start belong to no process"
            log_event(LogEvent.RECLAIM_AWAITED, lease_id=lease_id, reason=missing)
            await asyncio.sleep(back_off_s(polls, FIRST_POLL_DELAY_S, MAX_POLL_DELAY_S))
            polls += 1
        self._post(ReclaimProved(lease_id))


class BytesProver:
    """Polls a live session's process on a card until it holds no more than it may.

    This proves that the bytes of an ended region, of a park or of a smaller lease are free.
    Only `give_up`, or the session's end, ends the polls, because the lease table decides how long to wait.

    Args:
        allowed_bytes: Returns the bytes that the session of a lease may hold now. They can exceed the order's figure:
          once another region is proved, the session may have taken its bytes, and the lease may have grown.
    """

    def __init__(
        self,
        source: CardSource,
        workers: Workers,
        post: Callable[[Event], None],
        allowed_bytes: Callable[[int], int],
    ) -> None:
        self._source = source
        self._workers = workers
        self._post = post
        self._allowed_bytes = allowed_bytes
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def prove(self, order: ProveRegion) -> None:
        """Post `RegionProved` once the process holds no more than the order allows. A later order replaces this one."""
        self.give_up(order.region_id)
        task = asyncio.get_running_loop().create_task(self._poll(order))
        self._tasks[order.region_id] = task
        task.add_done_callback(lambda _: self._drop(order.region_id, task))

    def give_up(self, region_id: int) -> None:
        if (task := self._tasks.pop(region_id, None)) is not None:
            task.cancel()

    async def stop(self) -> None:
        await cancel_all(self._tasks.values())

    def _drop(self, region_id: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(region_id) is task:
            del self._tasks[region_id]

    async def _poll(self, order: ProveRegion) -> None:
        polls = 0
        while pid := self._workers.pid(order.lease_id):
            try:
                held_bytes = await asyncio.to_thread(self._source.process_bytes, order.card_uuid, pid)
            except POLL_ERRORS as error:
                missing = f"the card can't be read: {error}"
            else:
                # For a region, other changes may have raised the allowance by now. For a resize, only the order's
                # figure counts.
                allowed = order.allowed_bytes
                if order.region_id != order.lease_id:
                    allowed = max(allowed, self._allowed_bytes(order.lease_id))
                if held_bytes <= allowed:
                    self._post(RegionProved(order.region_id))
                    return
                missing = f"the card reports {held_bytes} bytes for its session, not {allowed}"
            log_event(LogEvent.RECLAIM_AWAITED, lease_id=order.region_id, reason=missing)
            await asyncio.sleep(back_off_s(polls, FIRST_POLL_DELAY_S, MAX_POLL_DELAY_S))
            polls += 1


class CardWatch:
    """Reports to the lease table, once a second, how much memory others than the daemon's workers hold per card.

    Cards are polled independently: one that does not answer delays no other.
    """

    def __init__(
        self, source: CardSource, card_uuids: Sequence[str], workers: Workers, post: Callable[[Event], None]
    ) -> None:
        self._source = source
        self._workers = workers
        self._post = post
        self._rounds = {
            card_uuid: PeriodicTask(partial(self._poll, card_uuid), lambda: ROUND_S) for card_uuid in card_uuids
        }
        # Why each card could not be read, as long as no poll has succeeded.
        self._unread = dict.fromkeys(card_uuids, f"no answer within {FIRST_ROUND_TIMEOUT_S:g} s")

    async def start(self) -> None:
        """Poll now and once a second from then on, on cards where others can hold memory."""
        if not self._source.has_others:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ROUND_TIMEOUT_S):
                await asyncio.gather(*map(self._poll, self._rounds))
        for card_uuid, reason in self._unread.items():
            log_event(LogEvent.CARD_UNREAD, card=card_uuid, reason=reason)
        for rounds in self._rounds.values():
            rounds.start()

    async def stop(self) -> None:
        for rounds in self._rounds.values():
            await rounds.stop()

    async def _poll(self, card_uuid: str) -> None:
        # If a card can't be read now, it is read a second later; its proofs wait until then.
        try:
            await self._read(card_uuid)
        except POLL_ERRORS as error:
            if card_uuid in self._unread:
                self._unread[card_uuid] = str(error)
        except Exception:
            # This is a bug of ours. Continue to poll: otherwise memory that others hold would be granted.
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"polling card {card_uuid}")

    async def _read(self, card_uuid: str) -> None:
        # Read the daemon's workers before the poll: one that ends during it may still be in the card's figures.
        own, polled_ns = self._workers.pids(), time.monotonic_ns()
        reading = await asyncio.to_thread(self._source.read, card_uuid)
        # Add workers that started during the poll.
        own |= self._workers.pids()
        self._workers.on_processes_listed(card_uuid, reading.processes.keys())
        self._unread.pop(card_uuid, None)
        self._post(CardPolled(card_uuid, reading.unowned_bytes, reading.outside_bytes(own), polled_ns))


SCRUB_PROOF_NS: Final = 5 * NS_PER_S
"""Time for the poll of the card after a worker's answer that its context is scrubbed. The poll takes less than a
millisecond, but a busy host may run its thread late."""


class Recycler:
    """Measures warm contexts before their first lease, has them scrubbed after each lease, and compares their memory.

    Args:
        source: The cards.
        workers: The workers.
        post: Called with `WorkerReady`, once a context's memory was measured, and with `WorkerScrubbed`.
    """

    def __init__(self, source: CardSource, workers: Workers, post: Callable[[Event], None]) -> None:
        self._source = source
        self._workers = workers
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()

    def on_fresh(self, worker: Worker) -> None:
        """Measure a warm context that has run nothing, as the baseline for later scrubs, and post `WorkerReady`."""
        self._start(self._measure(worker))

    def scrub(self, lease_id: int) -> None:
        """Order a worker to scrub its context; `WorkerScrubbed` follows unless it does not answer."""
        worker = self._workers.worker(lease_id)
        if worker is None:
            return
        try:
            # The worker maps the next lease's page during the scrub. The current page still shows the lease that ends.
            worker.next_page = page = BrokerPage()
            # Pass it read-only, like every page that a worker gets.
            lease_fd = for_reading(page.fds.lease)
            try:
                send_message(worker.channel, Scrub().to_map(), (lease_fd, page.fds.claims))
            finally:
                os.close(lease_fd)
        except (OSError, ChannelClosed) as error:
            doubt = f"it could not be queried: {error}"
            asyncio.get_running_loop().call_soon(self._post, WorkerScrubbed(lease_id, doubt))

    def on_scrubbed(self, worker: Worker, doubt: str, held_bytes: int) -> None:
        """Process a worker's answer: `doubt` is "" if the context is clean; `held_bytes`, what it counts as its own."""
        if worker.next_page is None or worker.has_answered:
            return  # No scrub was ordered, or the worker has answered before.
        worker.has_answered = True
        # A connection that waits in the channel belongs to the old lease, and would be served after the scrub.
        if not doubt and (held_bytes or worker.hand_overs):
            doubt = f"it still has {held_bytes} bytes and {counted(worker.hand_overs, 'connection')}"
        self._start(self._prove(worker, worker.spec.lease_id, doubt))

    def kill_put_off_until_ns(self, lease_id: int) -> int:
        """Return until when the kill of a worker is put off, although the time for its scrub is over; 0 if it is not.

        It is put off once, by SCRUB_PROOF_NS, if the worker has answered: then only the poll of the card is late.
        """
        worker = self._workers.worker(lease_id)
        if worker is None or not worker.has_answered or worker.is_proof_awaited:
            return 0
        worker.is_proof_awaited = True
        return time.monotonic_ns() + SCRUB_PROOF_NS

    async def stop(self) -> None:
        await cancel_all(self._tasks)

    async def _measure(self, worker: Worker) -> None:
        lease_id = worker.spec.lease_id
        # A context that can't be measured serves one lease, and is not scrubbed.
        with contextlib.suppress(*POLL_ERRORS):
            card_uuid, pid = worker.spec.card_uuid, worker.pid
            worker.own_bytes = await asyncio.to_thread(self._source.process_bytes, card_uuid, pid)
        self._post(WorkerReady(lease_id))

    async def _prove(self, worker: Worker, lease_id: int, doubt: str) -> None:
        if not doubt:
            try:
                held_bytes = await asyncio.to_thread(self._source.process_bytes, worker.spec.card_uuid, worker.pid)
            except POLL_ERRORS as error:
                doubt = f"the card can't be read: {error}"
            else:
                # The worker's report is not enough: by the card's figure, it must also hold no more than before its
                # first lease.
                if worker.hand_overs:
                    doubt = "a connection was passed to it meanwhile"
                elif worker.own_bytes is None or held_bytes > worker.own_bytes:
                    doubt = f"the card reports {held_bytes} bytes for its process, not {worker.own_bytes}"
        self._post(WorkerScrubbed(lease_id, doubt))

    def _start(self, reading: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(reading)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
