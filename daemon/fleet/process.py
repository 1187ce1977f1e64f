"""The fleet process's event loop: it executes the effects of `Member`, which decides, and passes events to it.

A heartbeat is sent only after the broker has written the last membership deadline to the control pages and the
heartbeat's mark to the journal. So a node with a hanging broker sends no heartbeats, and its names become free.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Sequence
from secrets import token_hex
from typing import Any, Final, assert_never

from gpulease.daemon.contract.control_page import boot_ns
from gpulease.daemon.contract.message_fields import Message, expect_message, request_of
from gpulease.daemon.contract.messages import LivenessPing, Pong, Ready
from gpulease.daemon.fleet.etcd.client import EtcdClient
from gpulease.daemon.fleet.etcd.transactions import Outcome, TransactionRejected, Unknown
from gpulease.daemon.fleet.fleet_messages import (
    TO_FLEET,
    CertificatesRenewed,
    HorizonSet,
    LiveClaimsPart,
    StoreMeasured,
    ToFleet,
)
from gpulease.daemon.fleet.live_claims import LiveParts
from gpulease.daemon.fleet.machine_readings import MachineReadings
from gpulease.daemon.fleet.rules.fleet_events import (
    Answered,
    ArmFleetTimer,
    Ask,
    ClaimDropped,
    ClaimEnded,
    ClaimGiven,
    ClaimRefusal,
    ClaimRefused,
    ClaimWanted,
    Compact,
    Effect,
    EndClaimed,
    Event,
    FleetTimerFired,
    Joined,
    KeepMark,
    MarkKept,
    MoveHorizon,
    Note,
    Noted,
    Paused,
    QuotaDropped,
    QuotaEnded,
    QuotaGiven,
    QuotaRefused,
    QuotaWanted,
    RecordChanged,
    RecordsUnreadable,
    Remembered,
    Started,
    Stopped,
    Stopping,
)
from gpulease.daemon.fleet.rules.member import MAX_FAULT_CHARS, Member
from gpulease.daemon.fleet.rules.node_claims import RETRY_AFTER_MS
from gpulease.daemon.fleet.rules.pauses import missed_ns
from gpulease.daemon.host.cancellation import cancel_all
from gpulease.daemon.host.ipc import ChannelClosed, Outbox, close_all, receive_message, send_message
from gpulease.daemon.host.periodic_task import PeriodicTask
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.protocol.time_units import NS_PER_S

MESSAGES_PER_TURN: Final = 64
"""Maximum number of the broker's messages in one turn of the loop. One per turn was too slow for tenants' requests."""

SIZES_S: Final = 60.0
"""Seconds between checks of etcd's database sizes. A fleet takes hours to fill 2 GiB."""

_IS_COMPACTED: Final = "has been compacted"
"""Part of etcd's error text if the history has already been removed."""

MAX_SLEEP_S: Final = 1.0
"""Maximum seconds of the loop's timer. The loop's clock stops while the host is suspended, but the rules' clock does
not.
"""

INSTANCE_BYTES: Final = 8
"""Number of random bytes that distinguish this process's writes from the node's other writes."""

READING_S: Final = 0.25
"""Seconds between readings of the machine's clocks. A pause is noticed within this time."""

LEAST_PAUSE_NS: Final = 50_000_000
"""Minimum difference in nanoseconds that counts as a pause. /proc/stat counts in hundredths of a second."""


class FleetProcess:
    """A fleet member, connected to etcd and to the broker.

    Args:
        member: The rules, with the node's state.
        client: The client for etcd.
        channel: The broker's channel.
        on_files: Called with the names and descriptors of certificate files that the broker has opened again.
        readings: Clocks and counters that show pauses of the machine.
    """

    def __init__(
        self,
        member: Member,
        client: EtcdClient,
        channel: socket.socket,
        on_files: Callable[[Sequence[str], list[int]], None],
        readings: MachineReadings,
    ) -> None:
        self._member = member
        self._client = client
        self._channel = channel
        self._on_files = on_files
        self._readings = readings
        self._last_reading = readings.read()
        self._outbox = Outbox(channel)
        self._live = LiveParts()
        self._timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None
        self._due_ns: int | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._unset_horizons = 0
        self._pending_beat: int | None = None
        """The number of a heartbeat whose mark is durable, while it waits for HorizonSet."""
        self._not_compacted = ""
        self._size_task = PeriodicTask(self._report_size, SIZES_S, _log_size_fault)
        self._ended = asyncio.Event()
        self._handlers = self._effect_handlers()

    async def run(self) -> None:
        """Serve until the broker is gone or a bug in the rules raises an exception.

        After a bug, the broker answers all waiting requests and starts another process, which continues the membership.
        """
        loop = asyncio.get_running_loop()
        # Step 1: be ready. The broker sends the record and the live claims now.
        self._channel.setblocking(False)
        loop.add_reader(self._channel, self._read)
        self._send(Ready())
        # Step 2: start the rules, the check for pauses, and the report of etcd's size.
        self._post(Started())
        self._read_machine()
        self._size_task.start(at_once=True)
        try:
            # Step 3: serve in callbacks until the end.
            await self._ended.wait()
        finally:
            # Step 4: stop reading and writing. The next process continues from the journal.
            loop.remove_reader(self._channel)
            loop.remove_writer(self._channel)
            self._outbox.close()
            for timer in (self._timer, self._reading_timer):
                if timer is not None:
                    timer.cancel()
            await self._size_task.stop()
            await cancel_all(self._calls)

    # --- the rules ---

    def _post(self, event: Event) -> None:
        if self._ended.is_set():
            return
        try:
            for effect in self._member.handle(event, boot_ns()):
                self._handlers[type(effect)](effect)
        except Exception:
            # Effects and answers may be lost, so end. The broker starts another process.
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"handling {type(event).__name__} in the fleet")
            self._ended.set()

    def _effect_handlers(self) -> dict[type[Effect], Callable[[Any], None]]:
        return {
            Ask: self._ask,
            Compact: self._compact,
            ArmFleetTimer: self._arm,
            MoveHorizon: self._move_horizon,
            # All other effects are messages to the broker.
            **dict.fromkeys(
                (
                    Joined,
                    Remembered,
                    KeepMark,
                    EndClaimed,
                    ClaimGiven,
                    ClaimRefused,
                    QuotaGiven,
                    QuotaRefused,
                    Stopped,
                    Noted,
                    RecordsUnreadable,
                ),
                self._send,
            ),
        }

    def _ask(self, effect: Ask) -> None:
        self._begin(self._ask_etcd(effect))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _compact(self, effect: Compact) -> None:
        self._begin(self._compact_etcd(effect.revision))

    async def _compact_etcd(self, revision: int) -> None:
        try:
            outcome = await self._client.compact(revision)
        except Exception:
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="compacting etcd")
            return
        # It is not a failure if another node has removed the history.
        refusal = (
            outcome.reason if isinstance(outcome, TransactionRejected) and _IS_COMPACTED not in outcome.reason else ""
        )
        # The same failure may repeat every minute, so log it once.
        if refusal and refusal != self._not_compacted:
            self._send(Noted(Note.NOT_COMPACTED, refusal))
        self._not_compacted = refusal

    async def _report_size(self) -> None:
        """Report the member of etcd with the largest database."""
        largest = max(await self._client.sizes(), key=lambda size: size.size_bytes, default=None)
        if largest is not None:
            self._send(StoreMeasured(largest))

    async def _ask_etcd(self, effect: Ask) -> None:
        outcome: Outcome
        try:
            outcome = await self._client.do(effect.transaction)
        except Exception as error:
            # The rules wait for an outcome. Unknown is correct after any fault.
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="asking etcd")
            outcome = Unknown(f"a fault of this node's: {error}"[:MAX_FAULT_CHARS])
        self._post(Answered(effect.number, outcome))

    def _arm(self, effect: ArmFleetTimer) -> None:
        self._due_ns = effect.due_ns
        self._sleep()

    def _sleep(self) -> None:
        # There is one timer. The last effect replaces earlier ones.
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due_ns is not None:
            left_s = max(0, self._due_ns - boot_ns()) / NS_PER_S
            self._timer = asyncio.get_running_loop().call_later(min(left_s, MAX_SLEEP_S), self._wake)

    def _wake(self) -> None:
        self._timer = None
        # Send no heartbeat before the broker has set the last deadline, because the broker may hang.
        if self._due_ns is None or self._unset_horizons:
            return
        if boot_ns() < self._due_ns:
            self._sleep()
            return
        self._due_ns = None
        self._post(FleetTimerFired())

    def _move_horizon(self, effect: MoveHorizon) -> None:
        # `_wake` does nothing until the broker answers HorizonSet.
        self._unset_horizons += 1
        self._send(effect)

    # --- the machine ---

    def _read_machine(self) -> None:
        """Report a pause of the machine since the last check to the rules."""
        self._reading_timer = asyncio.get_running_loop().call_later(READING_S, self._read_machine)
        before, self._last_reading = self._last_reading, self._readings.read()
        # None means that the machine was restored or copied. The length of the pause is then unknown.
        missed = missed_ns(before, self._last_reading)
        if missed is None or missed >= LEAST_PAUSE_NS:
            self._post(Paused(missed, token_hex(INSTANCE_BYTES)))

    # --- the broker ---

    def _send(self, message: Message) -> None:
        try:
            self._outbox.send(message.to_map())
        except ChannelClosed:
            self._ended.set()
            return
        if len(self._outbox):
            asyncio.get_running_loop().add_writer(self._channel, self._flush)

    def _flush(self) -> None:
        try:
            self._outbox.flush()
        except ChannelClosed:
            self._ended.set()
        if not len(self._outbox) or self._ended.is_set():
            asyncio.get_running_loop().remove_writer(self._channel)

    def _read(self) -> None:
        """Read available messages, at most MESSAGES_PER_TURN, so that timers and etcd's answers are not delayed."""
        for _ in range(MESSAGES_PER_TURN):
            try:
                message, fds = receive_message(self._channel)
            except BlockingIOError:
                return
            except ChannelClosed:
                self._ended.set()
                return
            self._take_in(message, fds)

    def _take_in(self, received: dict[str, Any], fds: list[int]) -> None:
        try:
            self._take(expect_message(TO_FLEET, received), fds)
        except Exception as error:
            # The broker has another version or a bug. Skip the message and continue.
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"reading a message of the broker: {error}")
            self._refuse_unread(received)
        finally:
            close_all(fds)

    def _refuse_unread(self, received: dict[str, Any]) -> None:
        """Refuse a request that could not be read, so that its sender does not wait for an answer."""
        number = request_of(received)
        if number is None:
            return
        text = "this node's fleet process can't read the request: see the daemon's log"
        match received.get("op"):
            case ClaimWanted.OP:
                self._send(ClaimRefused(number, ClaimRefusal.REJECTED, text, RETRY_AFTER_MS))
            case QuotaWanted.OP:
                self._send(QuotaRefused(number, ClaimRefusal.REJECTED, text, RETRY_AFTER_MS))

    def _take(self, message: ToFleet, fds: list[int]) -> None:
        match message:
            case LivenessPing():
                with contextlib.suppress(BlockingIOError, ChannelClosed):
                    send_message(self._channel, Pong().to_map())
            case HorizonSet():
                self._unset_horizons -= 1
                self._sleep()
                self._post_pending_beat()
            case MarkKept():
                self._pending_beat = message.beat
                self._post_pending_beat()
            case LiveClaimsPart():
                if (claims := self._live.take(message)) is not None:
                    self._post(claims)
            case CertificatesRenewed():
                self._on_files(message.files, fds)
            case (
                ClaimWanted()
                | ClaimDropped()
                | ClaimEnded()
                | QuotaWanted()
                | QuotaDropped()
                | QuotaEnded()
                | RecordChanged()
                | Stopping()
            ):
                self._post(message)
            case _:
                assert_never(message)

    def _post_pending_beat(self) -> None:
        # Wait until the mark is durable and the deadline is on the control pages, in either order.
        if self._pending_beat is not None and not self._unset_horizons:
            beat, self._pending_beat = self._pending_beat, None
            self._post(MarkKept(beat))


def _log_size_fault(error: Exception) -> None:
    log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"asking etcd for its size: {error}")
