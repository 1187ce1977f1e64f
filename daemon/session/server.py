"""The worker's loops, which serve the broker's channel and the connections that the broker passes on.

`SessionServer` serves a lease's session in one thread with one poll(2). Between requests the worker sleeps in the
kernel and costs nothing. While the worker waits inside the driver, it checks the control page; if it does not notice
the lease's end in time, the broker kills it with SIGKILL. The worker never waits for a peer: if a peer does not read,
the peer's connection is paused (see `SendBuffer`).

`SubmitServer` serves a submit: one connection and one run of a kernel. A session of the same lease may run at the same
time, in another process. A submit ends when either side closes the connection, or when the broker orders its end.
"""

import contextlib
import select
import socket
import time
from collections import deque
from dataclasses import replace
from functools import lru_cache
from typing import Final

from gpulease.daemon.contract.control_page import MAX_CONNECTIONS, PageFds, show_why_stays
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.contract.message_fields import MalformedMessage, Message, parse_message
from gpulease.daemon.contract.messages import (
    TO_WORKER,
    AdoptOrder,
    Attached,
    AttachOrder,
    CopyAheadOrder,
    EndRegionOrder,
    EndSession,
    Faulted,
    ForwardRevokedReport,
    ImagedReport,
    LastLeft,
    LatencyWord,
    LeaveOrder,
    LeaveRefusedReport,
    MemoryGrew,
    OpenRegionOrder,
    ParkMemoryOrder,
    ParkOrder,
    RefuseReturn,
    RegionsPage,
    ResizeSliceOrder,
    ReturnFailedReport,
    ReturnOrder,
    Scrub,
    StayOrder,
)
from gpulease.daemon.contract.session_image import ConnectionState, UnreadableImage
from gpulease.daemon.drivers.interface import DriverError, ImageMismatch
from gpulease.daemon.host.ipc import ChannelClosed, close_all, receive_message, send_message
from gpulease.daemon.session.connection import (
    ALONE_QUANTUM_NS,
    ALONE_WAIT_NS,
    NO_WAIT_S,
    QUANTUM_NS,
    RING_LAYOUT,
    SHARED_WAIT_NS,
    UNSENT_BYTES,
    AttachedConnection,
    ConnectionLost,
    RingWire,
    SendBuffer,
    WorkerSpinPolicy,
    can_share,
    ring_for,
)
from gpulease.daemon.session.image import CantLeave
from gpulease.daemon.session.image_channel import ConnectionFds, ReceivedImage, send_image
from gpulease.daemon.session.memory_operations import MAX_ARENA_BYTES, SessionArena
from gpulease.daemon.session.native.layout import Outcome
from gpulease.daemon.session.parking import HELD_POLL_MS
from gpulease.daemon.session.replies import refusal_of
from gpulease.daemon.session.session import Session
from gpulease.daemon.session.stream_operations import DEFAULT
from gpulease.protocol.codec import build_body
from gpulease.protocol.counts import counted
from gpulease.protocol.errors import FramingError
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.framing import FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES, RETAINED_BUFFER_BYTES
from gpulease.protocol.messages import AttachReply
from gpulease.protocol.opcodes import Flag, Opcode, SessionOption, Status
from gpulease.protocol.operations import SPECS
from gpulease.protocol.primitives import Tlv
from gpulease.protocol.ring import SharedMemoryGrant, SharedMemoryRequest
from gpulease.protocol.time_units import NS_PER_MS

BUFFERS_BYTES: Final = MAX_PAYLOAD_BYTES + (16 << 20)
"""Maximum memory of incomplete frames that all connections of a session may hold: one frame of the largest size, and
many small ones. Stops a lease of one byte from taking a gigabyte of the host's memory."""

MAX_SLEEP_MS: Final = 5000
"""Longest sleep of the worker. After it, the worker drops connections that have kept half a frame for too long, and
updates its heartbeat for the broker."""

READS_PER_ROUND: Final = 16
"""Maximum number of buffers that the worker receives from one connection before it serves the other connections and the
broker."""

MAX_UNSENT: Final = 4096
"""Maximum number of messages about regions that wait while the broker's socket is full. Beyond that number, refusals
are dropped, because a tenant can cause them at will."""

ORDER_POLL_NS: Final = 400_000
"""Time for which the worker polls its connections and the broker without sleeping, in nanoseconds, after a bell that
comes without a request. A client rings such a bell before it asks the broker for something that the broker will order
from this worker. A wake-up takes tens of microseconds, and the driver's first call after it takes twice as long as
usual."""

ATTACH_POLL_NS: Final = 2_000_000
"""Time for which the worker polls the broker without sleeping after it reported its context ready, in nanoseconds. Most
tenants open their session as soon as they have the lease, and so within a millisecond or two."""

RETRY_MS: Final = 10
"""Longest sleep while messages about regions wait for room in the broker's socket."""

SHOW_AGAIN_MS: Final = 250
"""Time between two checks of why a session can't leave its process, so that not every request waits for a check."""

_LAUNCHES: Final = frozenset({int(Opcode.LAUNCH), int(Opcode.LAUNCH_IN)})
_SYNC: Final = int(Opcode.SYNC)
_USE_TOKEN: Final = int(Opcode.USE_TOKEN)

_CONDITIONAL: Final = {SessionOption.REGIONS, SessionOption.OWN_MEMORY, SessionOption.USE_TOKEN}
"""Abilities that some sessions lack, or that a client must request in ATTACH."""

_SERVED: Final = tuple(
    Tlv(ability, b"") for ability in sorted({spec.ability for spec in SPECS.values() if spec.ability} - _CONDITIONAL)
)
"""Abilities of every session, as ATTACH's reply names them: options without a value."""


class SessionServer:
    """Serves one session until the broker's channel closes or the broker orders a scrub.

    Attributes:
        next_pages: The control pages for the next lease, if the session is to be scrubbed; otherwise None.
    """

    def __init__(
        self,
        channel: socket.socket,
        session: Session,
        welcome: AttachReply,
        *,
        is_shared: bool,
        spin_policy: WorkerSpinPolicy | None = None,
    ) -> None:
        self._channel = channel
        self._session = session
        self._spin_policy = spin_policy or WorkerSpinPolicy()
        self._welcome = welcome
        self._max_connections = MAX_CONNECTIONS if is_shared else 1
        self._connections: dict[int, AttachedConnection] = {}
        # Descriptors of the connections that have requests left to serve.
        self._ready: set[int] = set()
        self._poll = select.poll()
        self._has_reported_lost = False
        self._has_reported_left = True
        self.next_pages: PageFds | None = None
        # Messages about regions that wait because the broker's socket was full.
        self._unsent: deque[Message] = deque()
        # The broker's other messages that arrived while the session waited for launches, each with its descriptors.
        self._received: deque[tuple[Message | None, list[int]]] = deque()
        # Whether the session's image was sent: then another process may serve its connections.
        self._has_left = False
        # While the session is parked: descriptors of the connections that sent something, and the orders of the broker
        # that have to wait for the session's return.
        self._held: set[int] = set()
        self._held_orders: deque[tuple[Message | None, list[int]]] = deque()
        # The time (time.monotonic_ns()) of the last check of why the session can't leave its process.
        self._shown_ns = 0
        # Whether the worker may poll instead of sleeping, and until when it does so now, on time.monotonic_ns().
        self._may_poll = self._spin_policy.spins_when_quiet and not self._spin_policy.yields
        self._poll_until_ns = 0
        session.on_wait = self._serve_regions

    def run(self) -> None:
        """Serve. Returns when the broker is gone or orders a scrub."""
        self._channel.setblocking(False)
        self._poll.register(self._channel, select.POLLIN)
        # Build the reply to the usual request in advance.
        usual = SharedMemoryGrant(RING_LAYOUT, MAX_ARENA_BYTES, words=True)
        self._reply_body(usual, owns=True, has_word=self._has_sync_word, has_second=False)
        served_ns = time.monotonic_ns()
        if self._may_poll:
            self._poll_until_ns = served_ns + ATTACH_POLL_NS
        while True:
            # Step 1: update the heartbeat, and check the connections' deadlines.
            self._session.poll()
            if self._has_left:
                # Serve only the broker: it kills this process, or lets the session stay. The next process may be
                # copying the session's pages out of a ring.
                pause_ms = self._session.parking.pump()
                self._poll.poll(MAX_SLEEP_MS if pause_ms is None else pause_ms)
                if not self._serve_broker():
                    return
                continue
            timeout_ms = self._check_connections()
            # Step 2: prepare each ring for sleep. A ring that has bytes, or room, keeps the worker awake.
            awake = [candidate for candidate in self._connections.values() if candidate.fd not in self._held]
            for connection in awake:
                is_asleep = connection.fd not in self._ready and connection.wire.prepare_sleep(
                    for_room=connection.is_paused
                )
                if not is_asleep:
                    self._ready.add(connection.fd)
            # Step 3: sleep, or only poll if there is work. An idle session prepares for a park before it sleeps.
            if not (self._ready or self._received) or self._session.parking.is_releasing:
                for pause_ms in (self._session.parking.prepare(served_ns), self._show_why_stays()):
                    timeout_ms = timeout_ms if pause_ms is None else min(timeout_ms, pause_ms)
            ready_fds = {fd for fd, _ in self._await_events(timeout_ms)}
            self._session.pacer.poll()
            for connection in awake:
                connection.wire.end_sleep(connection.fd in ready_fds)
                # A bell without a request announces that the broker is about to send an order.
                if connection.fd in ready_fds and self._may_poll and connection.wire.is_empty:
                    self._poll_until_ns = time.monotonic_ns() + ORDER_POLL_NS
            # Step 4: serve the broker first, because it may have ended the lease.
            if (self._channel.fileno() in ready_fds or self._received) and not self._serve_broker():
                return
            # From now on another process may serve the session, so this process must not read from the connections.
            if self._has_left:
                self._send_reports()
                continue
            # Step 5: serve each connection that has work, for one turn.
            ready_fds |= self._ready
            self._ready.clear()
            for fd in ready_fds & self._connections.keys():
                self._serve(self._connections[fd])
                served_ns = time.monotonic_ns()
            # Step 6: release what ended connections and regions have left, and report to the broker.
            self._session.ended.advance()
            self._session.regions.advance()
            self._check_parked()
            self._send_reports()

    def _await_events(self, timeout_ms: int) -> list[tuple[int, int]]:
        """Return what poll(2) reports within `timeout_ms`. While polling saves time, do not sleep."""
        if self._poll_until_ns and not (self._ready or self._received) and self._session.pacer.nap_s() is None:
            until_ns = min(self._poll_until_ns, time.monotonic_ns() + timeout_ms * NS_PER_MS)
            while (now_ns := time.monotonic_ns()) < until_ns:
                if events := self._poll.poll(0):
                    return events
            if now_ns >= self._poll_until_ns:
                self._poll_until_ns = 0
        return self._poll.poll(self._sleep_ms(timeout_ms))

    def _sleep_ms(self, timeout_ms: int) -> int:
        """Return how long to sleep in poll(2): at most `timeout_ms`, and not at all if there is work or a nap is over.

        While the card works, the worker naps for less than a millisecond, to see when the work ends.
        """
        if self._ready or self._received:
            return 0
        nap_s = self._session.pacer.nap_s()
        if nap_s is None or nap_s * 1000 >= timeout_ms:
            return timeout_ms
        # A paused connection waits for room to send, which only poll(2) reports.
        if any(connection.is_paused for connection in self._connections.values()):
            return max(1, int(nap_s * 1000))
        # A nap needs select(2), which counts microseconds; poll(2) then reports the events.
        select.select([self._channel.fileno(), *self._connections], [], [], nap_s)
        return 0

    def _check_connections(self) -> int:
        """Drop connections that have kept memory here for too long; return how long to sleep at most, in ms."""
        now_s = time.monotonic()
        # Drop connections that have left half a frame, or an unread reply, here for too long.
        for connection in list(self._connections.values()):
            # While the session is parked, it is not the client's fault that its requests are held.
            if connection.fd in self._held:
                continue
            if connection.overdue(now_s) is not None:
                self._drop_overdue(connection)
            # The penalty for a pause is over: replies to this connection may wait for room again.
            elif not connection.is_paused and 0 < connection.no_wait_until_s < now_s:
                connection.no_wait_until_s = 0.0
                self._set_waits()
        self._drop_expired_guests()
        self._report_left()
        # Sleep until the earliest due time; if there is none, until the heartbeat is due after MAX_SLEEP_MS.
        sleep_ms = self._session.watch.next_poll_in_ms() or MAX_SLEEP_MS
        if self._unsent:
            sleep_ms = min(sleep_ms, RETRY_MS)
        if self._waits_for_return:
            sleep_ms = min(sleep_ms, HELD_POLL_MS)
        for end_ms in (self._session.regions.poll_ms(time.monotonic_ns()), self._session.ended.sleep_ms()):
            sleep_ms = sleep_ms if end_ms is None else min(sleep_ms, end_ms)
        return sleep_ms

    def _drop_overdue(self, connection: AttachedConnection) -> None:
        """Drop a connection that has kept memory here for too long, unless only this process was late.

        This process may have been stopped, or may have waited inside the driver for another connection. Then the rest
        of the frame may have arrived, or the peer may have read, before this process could notice.
        """
        if self._session.is_away and not connection.is_paused:
            # Half a frame alone must not bring a parked session back; only bytes that arrived after it do. The rest of
            # the frame is read after the return, and its timeout starts again.
            try:
                self._session.switch_to(connection.streams, connection.holder)
                has_come = connection.wire.receive(connection.receive_buffer)
                if has_come:
                    self._hold(connection)
            except (ConnectionLost, FramingError) as lost:
                self._drop(connection, lost)
                return
        else:
            self._serve(connection)
        if connection.fd not in self._connections or connection.fd in self._held:
            return
        error = connection.overdue(time.monotonic())
        if error is not None:
            self._drop(connection, error)

    def _drop_expired_guests(self) -> None:
        """Drop connections whose token has expired, because they count towards the session's limit on connections."""
        for connection in list(self._connections.values()):
            if connection.guest is not None and not self._session.is_held_by(connection.guest):
                refusal = refusal_of(Status.DENIED)
                self._drop(connection, FramingError(refusal.message, refusal.status), refusal)

    # --- the broker ---

    def _serve_broker(self) -> bool:
        while True:
            try:
                # First serve the messages that were set aside while the session waited inside the driver.
                message, fds = self._received.popleft() if self._received else receive(self._channel)
            except BlockingIOError:
                return True
            except ChannelClosed:
                return False
            if self._serve_region(message, fds) or self._serve_parking(message, fds):
                continue
            match message:
                # With a descriptor: a connection that the broker has checked.
                case AttachOrder() as attach if len(fds) == 1:
                    self._session.prepare_connection(is_stranger=attach.is_stranger)
                    self._attach(socket.socket(fileno=fds.pop()), attach)
                case AttachOrder() as attach:
                    # The socket was lost because this process had no descriptor left. Its peer sees it closed.
                    self._report_attach(attach, is_in=False)
                # The session is over, and another lease may follow, whose pages came with the message: return with
                # them.
                case Scrub() if len(fds) == 2:
                    self._send_goodbyes()
                    self.next_pages = PageFds(*fds)
                    return False
                case EndSession():
                    self._send_goodbyes()
                case LatencyWord() as word:
                    self._session.use_latency_word(word, fds)
                    for connection in self._connections.values():
                        self._spin_for_latency(connection)
            close_all(fds)

    def _spin_for_latency(self, connection: AttachedConnection) -> None:
        if self._session.pacer.has_own_word and isinstance(connection.wire, RingWire):
            connection.wire.spin_longer()

    def _serve_region(self, message: Message | None, fds: list[int]) -> bool:
        """Serve a message about regions or the slice, and close its descriptors. Returns False for another message."""
        regions = self._session.regions
        match message:
            case RegionsPage():
                if len(fds) == 1:
                    regions.use_page(*fds)
            case OpenRegionOrder() | ResizeSliceOrder() if self._session.is_away:
                # This order needs the driver, so it waits for the return.
                self._held_orders.append((message, fds))
                return True
            case OpenRegionOrder():
                # A region needs room, which ended connections may still hold.
                self._session.ended.advance(now=True)
                regions.open(message)
                self._set_waits()
            case EndRegionOrder():
                # If the order to open this region still waits for the session's return, drop it; then there is nothing
                # to end.
                self._forget_opening(message.region_id)
                regions.end(message)
            case ResizeSliceOrder():
                regions.resize(message)
                self._welcome = replace(self._welcome, slice_bytes=self._session.slice_bytes)
            case _:
                return False
        close_all(fds)
        self._send_reports()
        return True

    def _serve_parking(self, message: Message | None, fds: list[int]) -> bool:
        """Serve a message about parking, and close its descriptors. Returns False for any other message."""
        parking = self._session.parking
        match message:
            case ParkMemoryOrder():
                parking.use_memory(message, fds)
            case CopyAheadOrder():
                parking.begin_ahead()
            case ParkOrder():
                self._stay()
                if self._serve_before_park(message):
                    parking.park(message)
            case LeaveOrder():
                self._leave(message, fds)
            case StayOrder():
                self._stay()
            case AdoptOrder():
                self._adopt(message, fds)
            case ReturnOrder():
                self._stay()
                parking.bring_back(message)
                # Report to the broker before the clients are answered: they may ask for another park at once.
                self._send_reports()
                if not parking.is_parked:
                    self._release_held()
            case RefuseReturn():
                if parking.refuse_return(message):
                    self._release_held()
            case _:
                return False
        close_all(fds)
        self._send_reports()
        return True

    def _serve_before_park(self, order: ParkOrder) -> bool:
        """Serve the requests that clients sent before a park: they would otherwise bring the session back at once.

        Returns False if that took so long that the park was refused.
        """
        if self._session.is_away:
            return True
        # Put the order into the queue from which `_serve_regions` refuses it if a request waits inside the driver for
        # too long.
        self._received.appendleft((order, []))
        for connection in list(self._connections.values()):
            connection.wire.end_sleep(True)
            self._serve(connection)
        is_due = bool(self._received) and self._received[0][0] is order
        if is_due:
            self._received.popleft()
        return is_due

    # --- a parked session ---

    @property
    def _waits_for_return(self) -> bool:
        return bool(self._held or self._held_orders)

    def _forget_opening(self, region_id: int) -> None:
        """Drop the order to open this region, if the order waits for the session's return."""
        self._held_orders = deque(
            (order, fds)
            for order, fds in self._held_orders
            if not (isinstance(order, OpenRegionOrder) and order.region_id == region_id)
        )

    def _hold(self, connection: AttachedConnection) -> None:
        """Receive from a connection of a parked session; its requests wait for the return."""
        if connection.fd in self._held:
            return
        # A client that waits by polling the ring's word must send a request instead. If the connection has ended,
        # `receive` raises, because that does not require the session's return.
        connection.decline_awaited()
        if connection.receive_buffer.is_mid_frame or connection.wire.receive(connection.receive_buffer):
            self._held.add(connection.fd)
            self._poll.unregister(connection.fd)

    def _check_parked(self) -> None:
        """Ask the broker for the session's return if requests wait for it. After the lease's end, refuse these."""
        if not self._waits_for_return:
            return
        if self._session.refusal() is not None:
            self._release_held()
        elif self._session.parking.is_parked:
            self._session.parking.want()

    def _release_held(self) -> None:
        """Serve the requests that waited for the session's return; if it can't return, they are refused."""
        # Put the held orders, in order, before the broker's other messages.
        self._received.extendleft(reversed(self._held_orders))
        self._held_orders.clear()
        self._session.parking.forget_wish()
        held, self._held = self._held, set()
        for fd in held:
            connection = self._connections[fd]
            self._poll.register(fd, connection.wire.events(for_room=connection.is_paused))
            self._ready.add(fd)
            connection.received_at_s = time.monotonic()
            try:
                self._session.switch_to(connection.streams, connection.holder)
                if not connection.is_paused:
                    self._serve_frames(connection, may_hold=False)
            except (ConnectionLost, FramingError) as error:
                self._drop(connection, error)

    # --- leaving the process ---

    def _leave(self, order: LeaveOrder, fds: list[int]) -> None:
        """Send the image of the parked session and stop serving its connections, or report why that is not possible."""
        parking = self._session.parking
        try:
            image_bytes, has_waiting = self._send_image(order, fds)
        except CantLeave as refusal:
            parking.report(LeaveRefusedReport(order.number, str(refusal), refusal.is_lasting))
        except (OSError, ValueError, ChannelClosed) as error:
            parking.report(LeaveRefusedReport(order.number, f"its image can't be sent: {error}", False))
        else:
            self._has_left = True
            parking.note_left()
            for fd in self._connections.keys() - self._held:
                self._poll.unregister(fd)
            self._ready.clear()
            regions = self._session.parts.parked_regions()
            parking.report(ImagedReport(order.number, image_bytes, len(self._connections), has_waiting, regions))

    def _send_image(self, order: LeaveOrder, fds: list[int]) -> tuple[int, bool]:
        """Send the session's image to the channel in `fds`; return its size, and whether requests wait for the return.

        Raises CantLeave, and the errors of `send_image`.
        """
        parking = self._session.parking
        memory, report = parking.leave(order)
        if len(fds) != 1 or self._has_left:
            raise CantLeave("it is no longer in the park that this order belongs to", is_lasting=False)
        # Step 1: no request may be waiting, unless the session returns at once. A client that sends a request from now
        # on rings the bell, which the broker notices.
        if self._held_orders or self._received or (self._held and not order.carries):
            raise CantLeave("requests wait for its return", is_lasting=False)
        quiet = [self._check_quiet(connection, carries=order.carries) for connection in self._connections.values()]
        self._session.check_leave()
        # Step 2: collect the image, and the descriptors of the memory that clients share.
        arena = self._session.arena.opened
        times_of = self._session.parts.streams.event_times
        try:
            states = [
                (_state_of(connection, times_of(connection.streams)), connection.holder)
                for connection in self._connections.values()
            ]
        except DriverError as error:
            raise CantLeave(str(error), is_lasting=True) from None
        driver = self._welcome.driver
        connections = [
            ConnectionFds(
                connection.fd,
                connection.wire.fd if isinstance(connection.wire, RingWire) else -1,
                arena.fd if connection.has_arena and arena is not None else -1,
            )
            for connection in self._connections.values()
        ]
        # Step 3: send them. A session that is parked in place lends its pages, which the image then describes.
        in_place = parking.is_in_place
        pages = parking.lend_pages(by_ring=order.by_ring)
        try:
            image = self._session.parts.export(self._session.lease_id, order.number, driver, report.moved_bytes, states)
            image_bytes = send_image(
                fds[0],
                image,
                (memory.fd, len(memory.view)),
                connections,
                pages,
                in_place=in_place,
                by_ring=in_place and order.by_ring,
            )
        except BaseException:
            parking.end_lending()
            raise
        finally:
            close_all(pages)
        return image_bytes, not all(quiet)

    def _check_quiet(self, connection: AttachedConnection, *, carries: bool) -> bool:
        """Make the client ring the bell from now on, if it has a ring. Returns whether it has no waiting request.

        Raises CantLeave for a connection that another process can't serve.
        """
        if why := _why_connection_stays(connection):
            raise CantLeave(why, is_lasting=True)
        connection.wire.end_sleep(True)
        is_empty = connection.wire.prepare_sleep(for_room=False) and not _has_event(connection.sock)
        is_quiet = is_empty and not connection.receive_buffer.is_mid_frame
        if connection.is_paused or not (is_quiet or carries):
            raise CantLeave("a client has sent a request, or has disconnected", is_lasting=False)
        return is_quiet

    def _count_connections(self) -> None:
        self._session.count_connections(len(self._connections))
        resources = self._session.parts.resources
        resources.has_changed = resources.shows_pages

    def _show_why_stays(self) -> int | None:
        """Show the broker why the session can't leave its process, if that may have changed.

        Returns the number of milliseconds after which to call this again; None if not before another request.
        """
        resources = self._session.parts.resources
        if not resources.has_changed:
            return None
        now_ns = time.monotonic_ns()
        if (wait_ns := self._shown_ns + SHOW_AGAIN_MS * NS_PER_MS - now_ns) > 0:
            return -(-wait_ns // NS_PER_MS)
        self._shown_ns, resources.has_changed = now_ns, False
        by_clients = filter(None, map(_why_connection_stays, self._connections.values()))
        show_why_stays(resources.counters, next(by_clients, "") or self._session.parts.why_stays())
        return None

    def _stay(self) -> None:
        """Serve the connections again, because no worker adopts the session's image."""
        if not self._has_left:
            return
        self._has_left = False
        self._session.parking.end_lending()
        self._session.parking.note_serves()
        for connection in self._connections.values():
            if connection.fd in self._held:
                continue
            self._poll.register(connection.fd, connection.wire.events(for_room=connection.is_paused))
            self._ready.add(connection.fd)
        # The broker has wiped the regions that ended while the session was away, and does not order their ends again.
        self._session.regions.end_by_page()

    def _adopt(self, order: AdoptOrder, fds: list[int]) -> None:
        """Become the worker of a session that has left another process, and bring it back."""
        parking = self._session.parking
        try:
            if len(fds) != 1 or self._connections:
                raise UnreadableImage("the image did not arrive")
            received = ReceivedImage(fds[0], order.connections)
            try:
                self._take_over(order.number, received)
            finally:
                received.close()
        except (DriverError, Refused, UnreadableImage, OSError) as error:
            # The session is incomplete in this process, so serve no request of it.
            self._has_left = True
            parking.report(ReturnFailedReport(order.number, str(error), True))
            return
        if order.refusal:
            parking.note_serves()
            # The session's bytes do not fit. Report that; the broker then orders this worker to refuse the waiting
            # requests.
            parking.report(ReturnFailedReport(order.number, order.refusal, False))
            self._send_reports()
            return
        parking.bring_back(ReturnOrder(order.number))
        self._has_left = parking.is_misfit
        if not parking.is_misfit:
            parking.note_serves()
        # Report before anything is served: if this process dies, the broker must be able to tell whether the session
        # was complete.
        self._send_reports()
        if not parking.is_parked:
            self._release_held()

    def _take_over(self, number: int, received: ReceivedImage) -> None:
        """Restore the session of an image, in the parked state. Raises DriverError, UnreadableImage or OSError."""
        session, image = self._session, received.image
        # Step 1: check that the image is of this lease and this driver.
        if image.lease_id != session.lease_id or image.driver[0] != self._welcome.driver:
            raise UnreadableImage("the image belongs to another session, or to another driver")
        if image.driver[1] != session.compute_capability:
            raise ImageMismatch(
                f"it ran on a card of compute capability {image.driver[1] / 10}, not {session.compute_capability / 10}"
            )
        # Step 2: restore its connections, which are served once everything is restored.
        connections: list[AttachedConnection] = []
        for state, descriptors in zip(image.connections, received.connections, strict=True):
            sock = socket.socket(fileno=received.take(descriptors.sock))
            sock.setblocking(False)
            connection = AttachedConnection(sock, state.unread, session.pinned_buffers, self._spin_policy)
            connections.append(connection)
            connection.client_pid, connection.owns = state.pid, state.owns
            connection.holder = session.begin_connection(state.pid, owns=state.owns)
            if state.ring is not None and descriptors.ring >= 0:
                ring = RingWire(sock, self._spin_policy, received.take(descriptors.ring), state.ring)
                connection.wire = ring
                self._spin_for_latency(connection)
            connection.has_arena = state.has_arena
            if descriptors.arena >= 0:
                session.arena.adopt(received.take(descriptors.arena), image.arena_bytes)
        # Step 3: restore the parked memory, and everything that refers to it.
        holders = [connection.holder for connection in connections]
        session.parking.adopt(
            number,
            received.host_fd,
            received.host_bytes,
            image,
            lambda: session.parts.restore_graphs(image, holders),
            [received.take(fd) for fd in list(received.pages)] if received.in_place else None,
            by_ring=received.by_ring,
        )
        rows = zip(image.connections, connections, strict=True)
        session.parts.restore(image, [(state, taken.streams, taken.holder) for state, taken in rows])
        session.adopted(0 if image.regions is None else image.regions.launches_begun)
        # Step 4: serve its clients again.
        for connection in connections:
            self._connections[connection.fd] = connection
            # Hold a connection if the image has bytes of it that were received and not served: whole requests, or part
            # of one. They wait for the session's return, as they did in the previous process. Until then its socket is
            # not polled.
            if connection.receive_buffer.is_mid_frame:
                self._held.add(connection.fd)
                continue
            self._poll.register(connection.fd, connection.wire.events(for_room=False))
            self._ready.add(connection.fd)
        session.count_connections(len(connections))
        self._has_reported_left = not connections
        self._set_waits()

    # --- regions, while the session waits ---

    def _serve_regions(self) -> None:
        """Serve the broker's messages about regions while the session waits for launches. Queue all other messages.

        A region must not wait for launches that do not use it. An order to park that has waited for too long is
        refused.
        """
        if not (self._session.regions.had_any or self._session.parking.is_parkable):
            return
        with contextlib.suppress(BlockingIOError, ChannelClosed):
            while True:
                message, fds = receive(self._channel)
                if not self._serve_region(message, fds):
                    self._received.append((message, fds))
        parks = [message for message, _ in self._received if isinstance(message, ParkOrder)]
        for late in [park for park in parks if self._session.parking.refuse_late(park)]:
            self._received = deque((message, fds) for message, fds in self._received if message is not late)
        self._session.regions.advance()
        self._send_reports()

    def _send_reports(self) -> None:
        """Send the reports that are due to the broker. Messages about regions wait until the channel has room."""
        if self._session.take_growth():
            report(self._channel, MemoryGrew())
        # Report a lost session once, as soon as the socket has room.
        if self._session.lost is not None and not self._has_reported_lost:
            self._has_reported_lost = report(self._channel, Faulted(self._session.lost.message))
        # Drop refusals when the queue is full, because a tenant can cause them at will. Keep everything else.
        for message in self._session.take_reports():
            if not isinstance(message, ForwardRevokedReport) or len(self._unsent) < MAX_UNSENT:
                self._unsent.append(message)
        while self._unsent and report(self._channel, self._unsent[0]):
            self._unsent.popleft()

    def _attach(self, sock: socket.socket, attach: AttachOrder) -> None:
        sock.setblocking(False)
        connection = AttachedConnection(
            sock, attach.rest, self._session.pinned_buffers, self._spin_policy, attach.guest, attach.second
        )
        # Drop ended connections first, because they must not make the session look full.
        self._drop_ended()
        failure = self._admission_failure()
        if failure is not None:
            # Report the refusal before the reply, because the peer may try again at once.
            self._report_attach(attach, is_in=False)
            with contextlib.suppress(ConnectionLost):
                lease_id = self._session.lease_id
                connection.wire.send(
                    failure.to_frame(Opcode.ATTACH, request_id=attach.request_id, session_id=lease_id), 0
                )
            connection.wire.close()
            return
        # From now on the connection counts, also on the control page, which the broker reads.
        connection.client_pid, connection.owns = attach.client_pid, attach.owns
        connection.holder = self._session.begin_connection(attach.client_pid, owns=attach.owns)
        try:
            self._connections[connection.fd] = connection
            self._count_connections()
            self._poll.register(sock, select.POLLIN)
            self._set_waits()
            self._send_attach_reply(connection, attach)
        except ConnectionLost as error:
            self._drop(connection, error)
            self._report_attach(attach, is_in=False)
            return
        self._report_attach(attach, is_in=True)
        # Most clients send their first request soon.
        if self._may_poll:
            self._poll_until_ns = time.monotonic_ns() + ORDER_POLL_NS
        # The client may have sent requests after ATTACH, which the broker has passed on.
        try:
            self._session.switch_to(connection.streams, connection.holder)
            self._serve_frames(connection)
        except (ConnectionLost, FramingError) as error:
            self._drop(connection, error)
        if self._session.parking.is_parked:
            # The client's first request is about to come, so ask for the return now.
            self._session.parking.want()

    def _drop_ended(self) -> None:
        """Serve what earlier peers sent before they closed, then drop them: they must not block a new connection."""
        for connection in list(self._connections.values()):
            if connection.fd not in self._held:
                connection.wire.end_sleep(True)
                self._serve(connection)
        self._drop_expired_guests()

    def _admission_failure(self) -> Failure | None:
        """Return the failure with which a new connection is refused; None if it may attach."""
        failure = self._session.refusal()
        if failure is None and len(self._connections) >= self._max_connections:
            is_shared = self._max_connections > 1
            failure = Failure(
                Status.BUSY,
                f"the session has {counted(len(self._connections), 'connection')}, the maximum for its "
                "exclusivity class",
                hint="Close one of them first." if is_shared else "Close it first, or acquire the lease as SHARED.",
            )
        return failure

    def _report_attach(self, attach: AttachOrder, *, is_in: bool) -> None:
        """Report whether a socket that the broker passed on is attached. If not, its tokens may be used again."""
        mark, second_mark = (None if guest is None else guest.mark for guest in (attach.guest, attach.second))
        has_token = mark is not None or second_mark is not None
        report(self._channel, Attached(mark, is_in if has_token else None, second_mark))

    def _send_attach_reply(self, connection: AttachedConnection, attach: AttachOrder) -> None:
        """Reply to ATTACH, with the shared memory that the client asks for, where the session can provide it.

        After the reply, all bytes go through the ring if there is one. Raises ConnectionLost.
        """
        # Give the client the ring, arena and page of words that it asked for. Guests and remote clients get less.
        memory_request = SharedMemoryRequest(attach.ring, attach.arena_bytes)
        ring, arena = (
            ring_for(connection.sock, memory_request, self._spin_policy),
            self._arena_for(connection, memory_request),
        )
        words_fd = self._session.regions.page_fd if attach.words and can_share(connection.sock) else -1
        memory_grant = SharedMemoryGrant(
            None if ring is None else ring.layout, 0 if arena is None else arena.size_bytes, words_fd >= 0
        )
        # A client may wait by polling the ring's word only if it is the lease's owner, on this host, and has the
        # session's only connection: native code answers the word without a check.
        has_word = ring is not None and not connection.has_token and self._has_sync_word
        has_second = attach.second is not None
        body = self._reply_body(memory_grant, owns=attach.owns, has_word=has_word, has_second=has_second)
        header = {"request_id": attach.request_id, "session_id": self._session.lease_id, "flags": int(Flag.REPLY)}
        frame = build_frame(Opcode.ATTACH, body, **header)
        # Send the descriptors with the frame, in the order in which the options name them.
        fds = [shared.fd for shared in (ring, arena) if shared is not None] + [words_fd] * memory_grant.words
        try:
            # The socket has room, because nothing was sent on it since the peer read the last reply.
            sent = socket.send_fds(connection.sock, [frame], fds, socket.MSG_NOSIGNAL)
        except OSError:
            sent = 0
        # After a frame that was sent only in part, nothing else can be sent: the connection is lost.
        if sent != len(frame):
            if ring is not None:
                ring.close()
            raise ConnectionLost("the peer is gone, or does not read its replies")
        # From now on the socket is only the bell.
        connection.has_arena = arena is not None
        if ring is not None:
            ring.offered(keeps_fd=self._session.parking.is_parkable)
            connection.wire = ring
            self._set_waits()
            self._spin_for_latency(connection)

    @property
    def _has_sync_word(self) -> bool:
        return self._max_connections == 1 and self._session.is_native

    def _reply_body(self, memory_grant: SharedMemoryGrant, *, owns: bool, has_word: bool, has_second: bool) -> bytes:
        """Return the body of ATTACH's reply."""
        session = self._session
        card = session.compute_capability.to_bytes(2, "big") + session.cuda_version.to_bytes(4, "big")
        has = (
            (SessionOption.SYNC_WORD, has_word),
            (SessionOption.OWN_MEMORY, owns),
            (SessionOption.USE_TOKEN, has_second),
        )
        abilities = tuple(option for option, is_there in has if is_there)
        return _attach_reply_body(self._welcome, memory_grant, card, abilities, session.region_granule_bytes)

    def _arena_for(self, connection: AttachedConnection, memory_request: SharedMemoryRequest) -> SessionArena | None:
        """Return the session's arena, if the client asks for it and may have it; otherwise None.

        Only one connection at a time may have the arena, because two clients would use the same bytes. A guest may not
        have it, because an earlier client, perhaps of another tenant, may still map it.
        """
        is_refused = connection.guest is not None or any(other.has_arena for other in self._connections.values())
        if not memory_request.arena_bytes or is_refused or not can_share(connection.sock):
            return None
        try:
            return self._session.arena.open(memory_request.arena_bytes)
        except OSError:
            return None

    def _send_goodbyes(self) -> None:
        """Send every peer the reason for the session's end, and drop it: the process is about to be killed."""
        # Another process serves the session and these connections: bytes from this process would corrupt their streams.
        if self._has_left:
            return
        failure = self._session.refusal() or Failure(Status.SESSION_FAILED, "the session has ended")
        for connection in list(self._connections.values()):
            self._drop(connection, FramingError(failure.message, failure.status), failure)

    # --- requests ---

    def _serve(self, connection: AttachedConnection) -> None:
        # Make this connection's streams and holder the session's current ones.
        self._session.switch_to(connection.streams, connection.holder)
        try:
            # First send a paused connection the rest of its reply. If some is still left, serve none of its requests.
            if connection.send_buffer is not None:
                self._resume(connection, connection.send_buffer)
            for portion in range(READS_PER_ROUND):
                if connection.is_paused:
                    return
                # While a region opens or ends, serve one portion, so that the broker's next message is read soon. But
                # after a refused launch the tenant is about to ask for the reason, and that answer comes first.
                if portion and self._session.regions.is_moving() and not self._session.keeps_failure:
                    break
                if self._session.is_away:
                    self._hold(connection)
                    return
                # Let native code serve first. It leaves the requests that it can't serve in the reader.
                outcome = connection.serve_ring(self._session.serve_ring)
                if outcome is Outcome.QUANTUM_OVER:
                    break
                if connection.reader.is_mid_frame and outcome is not None:
                    self._serve_frames(connection)
                elif outcome in (Outcome.WAKE_READER, Outcome.WAKE_WRITER):
                    continue
                # Native code has spun for requests once: read the broker's next message before it spins again.
                elif outcome is Outcome.IDLE and connection.spins_left and self._session.regions.is_moving():
                    break
                elif connection.receive():
                    # A buffer that grew for a large frame counts against the session's bound.
                    if len(connection.reader.buffer) > RETAINED_BUFFER_BYTES:
                        self._check_buffers()
                    self._serve_frames(connection)
                else:
                    return
            # The connection has used its whole turn and may have sent more: it gets another turn after the others.
            self._ready.add(connection.fd)
        except (ConnectionLost, FramingError) as error:
            self._drop(connection, error)

    def _check_buffers(self) -> None:
        """Raise FramingError if the incomplete frames of all connections take too much memory."""
        buffered_bytes = sum(len(connection.reader.buffer) for connection in self._connections.values())
        if buffered_bytes > BUFFERS_BYTES:
            raise FramingError(
                f"the session's connections hold {buffered_bytes} bytes of unfinished frames; at most "
                f"{BUFFERS_BYTES} are allowed for all connections together",
                Status.BUSY,
            )

    @property
    def _spins_per_reply(self) -> int:
        # A session with regions spins on its ring once, not twice: the broker's orders are read only after the spins.
        spins = self._spin_policy.spins_per_reply
        return min(spins, 1) if self._session.regions.had_any and not self._spin_policy.yields else spins

    def _serve_frames(self, connection: AttachedConnection, *, may_hold: bool = True) -> None:
        """Serve all requests that have arrived completely. Raises ConnectionLost or FramingError."""
        if may_hold and self._session.is_away:
            self._hold(connection)
            return
        if connection.has_token:
            self._serve_by_tokens(connection)
        else:
            self._serve_owner(connection)
        if connection.receive_buffer.is_mid_frame:
            connection.received_at_s = time.monotonic()
        # While a failure is kept, native code does not answer the ring's word.
        if self._session.keeps_failure:
            connection.decline_awaited()
            connection.spins_left = self._spins_per_reply
        else:
            self._send_reports()

    def _serve_owner(self, connection: AttachedConnection) -> None:
        """Serve the requests of a connection of the lease's owner, without a token.

        Where possible, skip the parsing of launches and syncs.
        """
        reader, session, receive_buffer = connection.reader, self._session, connection.receive_buffer
        # Take all launches that have arrived in one call, a SYNC without making a frame, and the rest as frames.
        while reader.start != reader.end or receive_buffer.has_write:
            reply: bytes | memoryview | None = None
            op = reader.peek_op()
            if op in _LAUNCHES:
                session.take_launches(reader)
                op = reader.peek_op()
            if op == _SYNC:
                reply = session.take_sync(reader)
            if reply is None:
                frame = receive_buffer.next_frame()
                if frame is None:
                    break
                reply = session.handle(frame)
            if reply is not None:
                connection.spins_left = self._spins_per_reply
                if not self._send(connection, reply):
                    break

    def _serve_by_tokens(self, connection: AttachedConnection) -> None:
        """Serve the requests of a connection with a token. Check the token before each."""
        session, streams = self._session, connection.streams
        while (frame := connection.receive_buffer.next_frame()) is not None:
            # Decide for each request anew, because a USE_TOKEN may be among them.
            guest = connection.second if streams.uses_second_token else connection.guest
            # USE_TOKEN is permitted by any token, and also leaves one that has ended.
            if guest is None or frame.op == _USE_TOKEN:
                reply = session.handle(frame)
            else:
                with session.serving(guest):
                    reply = guest.refuse(frame) or session.handle(frame)
                if frame.flags and guest is connection.second:
                    self._check_second(guest)
            if reply is not None:
                connection.spins_left = self._spins_per_reply
                if not self._send(connection, reply):
                    break

    def _check_second(self, guest: Guest) -> None:
        """Raise FramingError if the second token has ended: a quiet request was then skipped.

        Nothing would report that once the connection no longer uses the token.
        """
        if not self._session.is_held_by(guest):
            refusal = refusal_of(Status.DENIED)
            raise FramingError(refusal.message, refusal.status)

    def _report_left(self) -> None:
        """Make the broker read the control page once the last connection has ended."""
        if not self._has_reported_left and not self._connections:
            self._has_reported_left = report(self._channel, LastLeft())

    # --- replies ---

    def _send(self, connection: AttachedConnection, data: bytes | memoryview) -> bool:
        """Send a reply. Returns False if only a part was sent: the connection is now paused. Raises ConnectionLost."""
        # Usually all of it fits at once.
        unsent = connection.wire.send(data, connection.wait_ns)
        if unsent is None:
            return True
        # Pause the connection: keep the rest, and poll for room in place of requests.
        connection.send_buffer = SendBuffer(unsent)
        connection.no_wait_until_s = time.monotonic() + NO_WAIT_S
        self._set_waits()
        self._poll.modify(connection.fd, connection.wire.events(for_room=True))
        # Bound the sum for all peers, because each could leave the largest reply unread.
        buffered_bytes = sum(len(other.send_buffer.unsent) for other in self._connections.values() if other.send_buffer)
        if buffered_bytes > UNSENT_BYTES:
            raise ConnectionLost(f"{buffered_bytes} bytes of replies were not read by the session's peers")
        return False

    def _resume(self, connection: AttachedConnection, send_buffer: SendBuffer) -> None:
        """Continue to send the bytes that the peer has not read.

        Once everything is sent, serve its waiting requests.
        """
        unsent = connection.wire.send(send_buffer.unsent, 0)
        if unsent is not None:
            send_buffer.update(unsent)
            return
        connection.send_buffer = None
        self._poll.modify(connection.fd, connection.wire.events(for_room=False))
        self._set_waits()
        self._serve_frames(connection)

    def _set_waits(self) -> None:
        """Set how long each connection may keep the others and the broker waiting.

        There are two bounds: how long a reply waits for room in the connection (not at all shortly after a pause), and
        the quantum for which native code serves the connection.
        """
        is_alone = len(self._connections) == 1
        quantum_ns = ALONE_QUANTUM_NS if is_alone and not self._session.regions.had_any else QUANTUM_NS
        for connection in self._connections.values():
            connection.wire.set_quantum(quantum_ns)
            may_wait = not connection.no_wait_until_s
            connection.wait_ns = ALONE_WAIT_NS if is_alone else SHARED_WAIT_NS if may_wait else 0

    def _drop(self, connection: AttachedConnection, error: Exception, failure: Failure | None = None) -> None:
        # A paused connection has half a reply on the wire, so no other frame can follow.
        if isinstance(error, FramingError) and not connection.is_paused:
            failure = failure or Failure(error.status, str(error))
            connection.wire.send_final(failure.to_frame(Opcode.GOODBYE, request_id=0))
        # Forget the connection; the objects that it held are released in the background.
        if self._connections.pop(connection.fd, None) is not None:
            if connection.fd in self._held:
                self._held.discard(connection.fd)
            else:
                self._poll.unregister(connection.fd)
            self._set_waits()
            self._count_connections()
            self._session.end_connection(connection.streams, connection.holder, is_last=not self._connections)
            self._has_reported_left = bool(self._connections)
        connection.receive_buffer.close()
        connection.wire.close()


@lru_cache(maxsize=16)
def _attach_reply_body(
    welcome: AttachReply,
    memory_grant: SharedMemoryGrant,
    card: bytes,
    abilities: tuple[SessionOption, ...],
    granule_bytes: int,
) -> bytes:
    """Return the body of ATTACH's reply with all its options.

    Cached, because it is the same for most connections, also of the leases that this process serves one after another.
    """
    options = (*memory_grant.to_options(), *_SERVED, Tlv(SessionOption.CARD, card))
    options += tuple(Tlv(ability, b"") for ability in abilities)
    if granule_bytes:
        options += (Tlv(SessionOption.REGIONS, granule_bytes.to_bytes(4, "big")),)
    return build_body(replace(welcome, options=options))


def _why_connection_stays(connection: AttachedConnection) -> str:
    """Return why another process could not serve a connection; "" if one could."""
    if connection.has_token:
        return "a client is connected to it with a token"
    if isinstance(connection.wire, RingWire) and connection.wire.fd < 0:
        return "a client has a ring that can't be passed on"
    return ""


def _state_of(connection: AttachedConnection, events: tuple[tuple[int, int], ...]) -> ConnectionState:
    """Return the record of a quiet connection for another process. `events` are those of its streams."""
    streams = connection.streams
    return ConnectionState(
        connection.client_pid,
        connection.owns,
        tuple(number for number in streams.known if number != DEFAULT),
        streams.selected,
        connection.wire.state() if isinstance(connection.wire, RingWire) else None,
        connection.has_arena,
        connection.receive_buffer.unread(),
        events,
    )


def _has_event(sock: socket.socket) -> bool:
    """Return whether a socket has bytes to read, or its peer has gone."""
    poll = select.poll()
    poll.register(sock, select.POLLIN | _GONE)
    return bool(poll.poll(0))


def report(channel: socket.socket, message: Message) -> bool:
    """Send the broker a message that may be lost. Returns False if the broker is gone or its socket is full."""
    try:
        send_message(channel, message.to_map())
    except (ChannelClosed, BlockingIOError):
        return False
    return True


def receive(channel: socket.socket) -> tuple[Message | None, list[int]]:
    """Return the broker's next message (None if this version does not support it) and its descriptors.

    If an AttachOrder is malformed, its descriptor is closed and an order without one is returned, which the caller
    refuses. Raises ChannelClosed or BlockingIOError.
    """
    message, fds = receive_message(channel)
    try:
        return parse_message(TO_WORKER, message), fds
    except MalformedMessage as error:
        close_all(fds)
        return (AttachOrder(0, b"", ring=False, arena_bytes=0) if error.op == AttachOrder.OP else None), []


# --- submits ---

HANDOVER_S: Final = 10.0
"""Longest time for which a submit's worker waits for its connection, after it reported that it is ready. If the broker
dies in this time, no connection comes, and the next broker is not aware that one is due."""

_GONE: Final = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class PeerGone(Exception):
    pass


class SubmitIsOver(Exception):
    """The broker has ended the submit, because the time of the lease or of the submit has expired."""


class SubmitServer:
    def __init__(self, channel: socket.socket, session: Session, welcome: AttachReply) -> None:
        self._channel = channel
        self._session = session
        self._welcome = welcome
        self._guest: Guest | None = None
        self._reader = FrameReader(MAX_PAYLOAD_BYTES)

    def run(self) -> None:
        """Wait for the connection and serve it; returns when the submit is over."""
        self._channel.setblocking(False)
        try:
            sock = self._await_connection()
            if sock is not None:
                with sock:
                    self._serve(sock)
        except ChannelClosed:
            return

    def _await_connection(self) -> socket.socket | None:
        until_s = time.monotonic() + HANDOVER_S
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while (left_s := until_s - time.monotonic()) > 0:
            # Update the heartbeat while waiting: without it the broker kills the worker.
            self._session.poll()
            if not poll.poll(left_s * 1000):
                continue
            try:
                message, fds = receive(self._channel)
            except BlockingIOError:
                continue
            match message:
                case AttachOrder() as attach if len(fds) == 1:
                    report(self._channel, Attached())
                    self._guest = attach.guest
                    return self._welcome_client(socket.socket(fileno=fds.pop()), attach.request_id, attach.rest)
                case AttachOrder() | EndSession():
                    # The socket was lost in transit, or the submit ended before it began.
                    close_all(fds)
                    return None
                case LatencyWord() as word:
                    self._session.use_latency_word(word, fds)
            close_all(fds)
        return None

    def _welcome_client(self, sock: socket.socket, request_id: int, rest: bytes) -> socket.socket:
        sock.setblocking(False)
        # Bytes that the client sent after its request came through the broker.
        self._reader.receive_data(rest)
        reply = build_frame(
            Opcode.GPU_SUBMIT,
            build_body(self._welcome),
            request_id=request_id,
            session_id=self._session.lease_id,
            flags=Flag.REPLY,
        )
        # The socket has room, because nothing has been sent on it since the peer read the last reply. If the peer is
        # gone, the next poll notices.
        with contextlib.suppress(OSError):
            sock.send(reply)
        return sock

    def _serve(self, sock: socket.socket) -> None:
        submit = self._session.submit
        # The session polls this while the kernel runs: a client that disconnects ends its submit.
        hung_up = select.poll()
        hung_up.register(sock, select.POLLRDHUP)
        submit.is_peer_gone = lambda: any(event & _GONE for _, event in hung_up.poll(0))
        submit.on_growth = self._report_growth
        try:
            # A submit runs once at most; earlier frames carry the run's inputs.
            while not submit.is_spent:
                while (frame := self._reader.next_frame()) is not None and not submit.is_spent:
                    guest = self._guest
                    with self._session.serving(guest) if guest is not None else contextlib.nullcontext():
                        reply = (guest.refuse(frame) if guest is not None else None) or self._session.handle(frame)
                    if (lost := self._session.lost) is not None:
                        report(self._channel, Faulted(lost.message))
                    if reply is not None:
                        self._send(sock, memoryview(reply))
                if not submit.is_spent:
                    self._receive(sock)
        except SubmitIsOver:
            self._send_goodbye(sock, self._session.refusal() or Failure(Status.SESSION_FAILED, "the submit was ended"))
        except FramingError as error:
            self._send_goodbye(sock, Failure(error.status, str(error)))
        except PeerGone:
            return

    def _report_growth(self) -> None:
        report(self._channel, MemoryGrew())

    def _receive(self, sock: socket.socket) -> None:
        self._wait(sock, select.POLLIN)
        try:
            count = sock.recv_into(self._reader.get_buffer())
        except BlockingIOError:
            return
        except OSError:
            raise PeerGone from None
        if not count:
            raise PeerGone
        self._reader.buffer_updated(count)

    def _send(self, sock: socket.socket, data: memoryview) -> None:
        while data:
            try:
                data = data[sock.send(data, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._wait(sock, select.POLLOUT)
            except OSError:
                raise PeerGone from None

    def _wait(self, sock: socket.socket, event: int) -> None:
        """Wait for an event on the socket.

        Raises SubmitIsOver, ChannelClosed, or FramingError if the guest's token is no longer valid.
        """
        poll = select.poll()
        # Poll both the broker and the client, as either may end the submit.
        poll.register(self._channel, select.POLLIN)
        poll.register(sock, event)
        while True:
            self._session.poll()
            # A token may expire or be revoked while its bearer waits.
            if self._guest is not None and not self._session.is_held_by(self._guest):
                refusal = refusal_of(Status.DENIED)
                raise FramingError(refusal.message, refusal.status)
            ready_fds = {fd for fd, _ in poll.poll(MAX_SLEEP_MS)}
            if self._channel.fileno() in ready_fds:
                self._receive_order()
            if sock.fileno() in ready_fds:
                return

    def _receive_order(self) -> None:
        try:
            message, fds = receive(self._channel)
        except BlockingIOError:
            return
        if isinstance(message, LatencyWord):
            self._session.use_latency_word(message, fds)
        close_all(fds)
        if isinstance(message, EndSession):
            raise SubmitIsOver

    def _send_goodbye(self, sock: socket.socket, failure: Failure) -> None:
        with contextlib.suppress(OSError):
            sock.send(failure.to_frame(Opcode.GOODBYE, request_id=0), socket.MSG_NOSIGNAL)
