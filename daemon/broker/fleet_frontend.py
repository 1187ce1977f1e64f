"""The broker's side of the fleet process: claims of names and of quota bytes, membership deadline, and node record.

The broker requests claims before it admits claimed leases, and reports the leases' ends. It receives the membership
deadline and posts it to the lease table as an event. No claim is lost when a fleet process dies: its successor gets a
list of the live leases.
"""

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Final, NamedTuple, assert_never

from gpulease.daemon.broker.name_claims import (
    NameAnswer,
    NameGranted,
    NameRequest,
    QuotaAnswer,
    QuotaGranted,
    QuotaRequest,
)
from gpulease.daemon.contract.control_page import boot_ns
from gpulease.daemon.contract.messages import Ready
from gpulease.daemon.fleet.etcd.endpoints import BadEtcdSettings
from gpulease.daemon.fleet.etcd.etcd_certificates import Stamp, certificate_files, certificate_stamps, open_certificates
from gpulease.daemon.fleet.etcd.transactions import StoreSize
from gpulease.daemon.fleet.fleet_messages import (
    FROM_FLEET,
    CertificatesRenewed,
    FleetStart,
    FromFleet,
    HorizonSet,
    StoreMeasured,
    ToFleet,
)
from gpulease.daemon.fleet.live_claims import parts_of
from gpulease.daemon.fleet.records.fleet_records import CardRecord
from gpulease.daemon.fleet.records.fleet_settings import FleetSettings, Isolated
from gpulease.daemon.fleet.rules.fleet_events import (
    ClaimDropped,
    ClaimEnded,
    ClaimGiven,
    ClaimRefusal,
    ClaimRefused,
    ClaimWanted,
    DaemonMark,
    EndClaimed,
    FleetIdentity,
    Joined,
    KeepMark,
    LiveClaims,
    MarkKept,
    MoveHorizon,
    Note,
    Noted,
    QuotaDropped,
    QuotaEnded,
    QuotaGiven,
    QuotaRefused,
    QuotaWanted,
    RecordChanged,
    RecordsUnreadable,
    Remembered,
    Stopped,
    Stopping,
)
from gpulease.daemon.host.ipc import ChannelClosed, close_all
from gpulease.daemon.host.periodic_task import PeriodicTask
from gpulease.daemon.host.socket_activation import CannotListen
from gpulease.daemon.host.version import VERSION
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import Event
from gpulease.daemon.leases.membership_events import ClaimsLost, MembershipDeadlineMoved
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.rate_limit import LINE_EVERY_S, RateLimit
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.journal import Journal, MembershipRow
from gpulease.daemon.record.metrics.gauges import FleetFacts
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.daemon.web.fleet_membership import FleetMembership
from gpulease.daemon.workers.helper_process import ChildKind, ChildProcess
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S

RECORD_S: Final = 1.0
"""Time between two checks for a change of the node's record. A changed record is sent with the next heartbeat."""

CERTIFICATES_S: Final = 5.0
"""Time between two checks for renewed certificates for etcd. They are renewed hours before the old ones expire."""

ETCD_PART: Final = 15
"""One request to etcd may take 1 / ETCD_PART of the horizon, so that it can be repeated several times before the
membership deadline."""

STORE_PART: Final = 0.8
"""Fraction of etcd's quota above which the operator is warned. Without compaction, a busy fleet then has hours left."""

STOP_S: Final = 5.0
"""Time within which the process may delete the claims of a node that stops: there may be thousands, and it deletes a
thousand a second. After the membership deadline, other nodes that claim the names delete the rest."""

MAX_CLAIMS: Final = 1_024
"""Maximum number of claims of names, and of quota bytes, that may wait at a node: as many of each as its process
accepts."""

MAX_CLAIMS_PER_TENANT: Final = 64
"""Maximum number of waiting claims of one tenant. Stops a tenant from using up the node's requests to etcd: while a
name is taken, it is requested every second."""

MAX_UNSENT: Final = 4 * MAX_CLAIMS
"""Maximum number of messages that may wait until the process reads them; beyond that, claims are refused. While a
process hangs, tenants that request and disconnect again must not fill the broker's memory."""


class _PendingClaim(NamedTuple):
    """A claim that is not answered yet.

    Attributes:
        tenant: The tenant that claims.
        drop: The message that cancels it.
        results: Counts the results of such claims.
        refusal: A clause that says what can't be done while the process is not available.
    """

    on_answer: Callable[[Any], None]
    tenant: str
    drop: type[ClaimDropped] | type[QuotaDropped]
    results: Counter[str]
    refusal: str


class FleetFrontend:
    """The node's membership in a fleet.

    Args:
        settings: The `[fleet]` table.
        sandbox: The operator's settings of the sandbox.
        table: The leases.
        cards: The node's cards.
        post: Posts an event to the lease table.
        journal: The journal, which keeps the node's membership for a restarted daemon.
        addresses: Returns where tenants reach the node, unless the settings define it.
        update_page: Sends the web process a message about the membership.
    """

    def __init__(
        self,
        settings: FleetSettings,
        sandbox: SandboxSettings,
        table: LeaseTable,
        cards: Iterable[Card],
        post: Callable[[Event], None],
        journal: Journal,
        addresses: Callable[[], Sequence[str]],
        update_page: Callable[[FleetMembership], None],
    ) -> None:
        # The operator's settings, and the parts of the daemon that this object uses or notifies.
        self._settings = settings
        self._table = table
        self._partitions = frozenset(card.uuid for card in cards if card.is_partition)
        self._post = post
        self._addresses = addresses
        self._update_page = update_page
        self._journal = journal
        # The last process's reports: the membership, its deadline, and problems for the operator.
        self._membership = journal.membership or MembershipRow()
        self._membership_deadline_boot_ns = 0
        self._is_lost = False
        self._has_begun = False
        self._refused = ""
        self._unanswered = ""
        self._clock = ""
        """A message for operators about this node's clock."""
        self._unreadable = ""
        """A message for operators about values in etcd that can't be read."""
        self._unreadable_of_previous = self._unreadable_count = 0
        """Number of unreadable values that earlier fleet processes found, and number that the present one found."""
        self._unreadable_lines = RateLimit(LINE_EVERY_S)
        self._beats = self._fenced = 0
        self._store = StoreSize("", 0, settings.etcd_quota_bytes)
        self._placements: Counter[str] = Counter()
        self._quota_claims: Counter[str] = Counter()
        # Claims that wait for an answer, by number, and their count per tenant.
        self._numbers = 0
        self._waiting: dict[int, _PendingClaim] = {}
        self._waiting_of: Counter[str] = Counter()
        # The record that was sent to the process last, so that only changes are sent.
        self._sent_record: RecordChanged | None = None
        self._files = certificate_files(settings.ca, settings.key, settings.certificate)
        self._sent_stamps: tuple[Stamp, ...] = ()
        # The process, and the tasks that keep it up to date.
        self._process = ChildProcess(
            _fleet_kind(sandbox), self._begin, self._on_message, self._on_end, on_unhandled=self._on_unhandled
        )
        self._stopped = asyncio.Event()
        self._record_task = PeriodicTask(self._send_record, RECORD_S, _log_fault)
        self._certificates_task = PeriodicTask(self._send_certificates, CERTIFICATES_S, _log_fault)

    async def start(self) -> None:
        """Start the process. It joins the fleet once etcd answers. Raises CannotListen."""
        # A node without an address still joins: it serves its own tenants, but the directory sends it no others.
        if not self._reached_at():
            log_event(LogEvent.FLEET_NO_ADDRESS)
        await self._process.start()
        self._record_task.start()
        if self._files:
            self._certificates_task.start()

    async def stop(self) -> None:
        """Let the process release the claims of leases that have ended, and stop it.

        Leases that continue without the daemon stay claimed. If none is left, the node leaves the fleet.
        """
        await self._record_task.stop()
        await self._certificates_task.stop()
        # Cancel waiting claims first; otherwise their answers would be claims without a lease.
        for number in list(self._waiting):
            self._drop(number)
        # If etcd has not answered before the membership deadline, it will not answer now.
        if not self.is_isolated and self._send(Stopping()):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._stopped.wait()
        await self._process.stop()

    # --- requests of the broker ---

    @property
    def node_id(self) -> str:
        return self._settings.node or os.uname().nodename

    @property
    def is_isolated(self) -> bool:
        """Return whether the membership deadline has passed: etcd can't be reached, or the node has not joined yet."""
        # The deadline is 0 until the node has joined, and again once the fleet has declared it dead.
        return boot_ns() >= self._membership_deadline_boot_ns

    @property
    def labels(self) -> Mapping[str, str]:
        return self._settings.labels

    def refusal(self) -> Failure | None:
        if self._settings.isolated is Isolated.SERVE or not self.is_isolated:
            return None
        return self._isolated("no new lease is granted")

    def problem(self) -> str:
        """Return a problem of the fleet that an operator should know about; "" if there is none."""
        # The database's size matters only while etcd answers; otherwise there are worse problems.
        trouble = self._trouble() if self.is_isolated else self._store_warning()
        return "; ".join(filter(None, (trouble, self._unreadable, self._clock)))

    def _store_warning(self) -> str:
        """Return advice for the operator before etcd's database is full; "" if it is far from full."""
        store = self._store
        if store.size_bytes < STORE_PART * store.quota_bytes:
            return ""
        return (
            f"etcd at {store.endpoint} uses {store.size_bytes / store.quota_bytes:.0%} of its quota of "
            f"{store.quota_bytes} bytes; beyond the quota, all named leases end. Check that its history "
            "is compacted (history_s of [fleet]), run `etcdctl defrag` at each member, or raise "
            "--quota-backend-bytes"
        )

    def _note_store_size(self, store: StoreSize) -> None:
        """Record the size of etcd's largest database; log it once when it approaches its quota."""
        # Compare with the previous size, so that one line is logged each time the threshold is crossed.
        warned = bool(self._store_warning())
        self._store = store._replace(quota_bytes=store.quota_bytes or self._settings.etcd_quota_bytes)
        if (warning := self._store_warning()) and not warned:
            log_event(LogEvent.FLEET_STORE_LARGE, reason=warning)

    def _trouble(self) -> str:
        # Report the first of these: a problem of the journal, the fleet's refusal, a problem of etcd.
        if problem := self._journal.problem():
            return (
                "this node is cut off from its fleet because heartbeats are recorded in the journal first, "
                f"and {problem}"
            )
        etcd = ", ".join(self._settings.etcd)
        if self._refused:
            return f"this node has not joined its fleet: {self._refused}"
        if not self._membership_deadline_boot_ns:
            return f"this node has not joined its fleet: etcd at {etcd} {self._unanswered or 'has not admitted it yet'}"
        return f"this node is cut off from its fleet: etcd at {etcd} {self._unanswered or 'has not answered in time'}"

    def _isolated(self, denied: str) -> Failure:
        hint = "Try another node of the fleet, or retry after this node's operator fixes the problem."
        return Failure(Status.BUSY, f"{denied}: {self._trouble()}", hint=hint)

    def figures(self) -> FleetFacts:
        left_s = (self._membership_deadline_boot_ns - boot_ns()) / NS_PER_S
        unreadable = self._unreadable_of_previous + self._unreadable_count
        claims, quota_claims = dict(self._placements), dict(self._quota_claims)
        counts = self._beats, self._fenced, claims, quota_claims, unreadable
        return FleetFacts(left_s, *counts, self._store.size_bytes, self._store.quota_bytes)

    def membership(self) -> FleetMembership:
        """Return the part of the membership that the web page shows."""
        return FleetMembership(self.node_id, self._membership_deadline_boot_ns, self._fenced)

    def claim_name(self, request: NameRequest, on_answer: Callable[[NameAnswer], None]) -> Callable[[], None]:
        """Claim a name; `on_answer` is called once, later. Returns a function that cancels the claim."""
        denied = f"the name {request.name!r} can't be claimed"
        waiting = _PendingClaim(on_answer, request.tenant, ClaimDropped, self._placements, denied)
        lease, until_ns = f"{request.lease_id:032x}", boot_ns() + request.wait_ms * NS_PER_MS
        return self._send_claim(
            waiting, lambda number: ClaimWanted(number, request.name, lease, request.tenant, until_ns)
        )

    def claim_quota(self, request: QuotaRequest, on_answer: Callable[[QuotaAnswer], None]) -> Callable[[], None]:
        """Claim bytes of a tenant's quota, as `claim_name` claims a name."""
        denied = f"tenant {request.tenant!r} has a fleet quota, which can't be checked"
        waiting = _PendingClaim(on_answer, request.tenant, QuotaDropped, self._quota_claims, denied)
        lease, until_ns = f"{request.lease_id:032x}", boot_ns() + request.wait_ms * NS_PER_MS
        return self._send_claim(
            waiting, lambda number: QuotaWanted(number, request.tenant, request.size_bytes, lease, until_ns)
        )

    def _send_claim(
        self, waiting: _PendingClaim, request: Callable[[int], ClaimWanted | QuotaWanted]
    ) -> Callable[[], None]:
        # Refuse a claim beyond the bounds without asking. Answer in the loop's next turn, because callers expect no
        # answer before this method returns.
        if (excess := self._excess(waiting.tenant)) is not None:
            waiting.results[ClaimRefusal.BUSY.value] += 1
            return asyncio.get_running_loop().call_soon(waiting.on_answer, excess).cancel
        self._numbers += 1
        number = self._numbers
        self._waiting[number] = waiting
        self._waiting_of[waiting.tenant] += 1
        # The process is not available, so no answer would ever come.
        if not self._send(request(number)):
            failure = self._isolated(waiting.refusal)
            asyncio.get_running_loop().call_soon(self._answer, number, failure, ClaimRefusal.ISOLATED.value)
        return lambda: self._drop(number)

    def _excess(self, tenant: str) -> Failure | None:
        """Return why one more claim can't wait; None if it can."""
        # Check the tenant's own bound first, because its refusal has a hint for the tenant.
        if self._waiting_of[tenant] >= MAX_CLAIMS_PER_TENANT:
            text = (
                f"tenant {tenant!r} has {MAX_CLAIMS_PER_TENANT} claims waiting at this node, the maximum for one tenant"
            )
            return Failure(Status.BUSY, text, hint="Wait for one of them to be answered.")
        if len(self._waiting) >= MAX_CLAIMS or self._process.unsent >= MAX_UNSENT:
            return _failure(ClaimRefusal.BUSY, "too many claims wait at this node")
        return None

    def release(self, name: str, epoch: int) -> None:
        """Report that the lease with that claim has ended and its memory is proved free."""
        # If the message can't be sent, no fleet process runs; the next one gets all live claims when it starts.
        self._send(ClaimEnded(name, epoch))
        self._send_all_ended()

    def on_fenced(self) -> None:
        """Report a fenced lease: it may have been the last lease that prevented a fenced node from joining again."""
        self._send_all_ended()

    def give_back(self, tenant: str, lease_id: int) -> None:
        """Report that the lease with those bytes has ended and its memory is proved free."""
        # As in `release`: the next process deletes every claim that is not among the live ones.
        self._send(QuotaEnded(tenant, f"{lease_id:032x}"))
        self._send_all_ended()

    def _drop(self, number: int) -> None:
        if (waiting := self._take(number)) is not None:
            self._send(waiting.drop(number))

    def _take(self, number: int) -> _PendingClaim | None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            self._waiting_of[waiting.tenant] -= 1
            if not self._waiting_of[waiting.tenant]:
                del self._waiting_of[waiting.tenant]
        return waiting

    def _answer(self, number: int, answer: NameGranted | QuotaGranted | Failure, result: str) -> bool:
        """Answer the acquire that waits for a claim; returns whether there is one."""
        waiting = self._take(number)
        if waiting is None:
            return False
        waiting.results[result] += 1
        try:
            waiting.on_answer(answer)
        except Exception:
            # This is a bug of ours. Other claims must still be answered. This acquire would get no other answer, so
            # refuse it, which also ends its unused claim.
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="handling the fleet's answer to a claim")
            if not isinstance(answer, Failure):
                waiting.on_answer(_failure(ClaimRefusal.UNKNOWN, "the daemon failed while handling the fleet's answer"))
        return True

    # --- the process ---

    async def _begin(self) -> None:
        # Step 1: send everything that the process needs to connect: the settings, the earlier process's membership, and
        # the certificates as open files, because its sandbox can't open any.
        settings = self._settings
        member = self._membership
        # The journal records an epoch as soon as it is granted, but the store's revision only from time to time.
        revision = max(member.revision, self._table.highest_epoch - member.epoch_base)
        start = FleetStart(
            etcd=tuple(settings.etcd),
            files=tuple(self._files),
            node=self.node_id,
            horizon_s=settings.horizon_s,
            history_s=settings.history_s,
            timeout_s=settings.horizon_s / ETCD_PART,
            incarnation=member.incarnation,
            identity=FleetIdentity(
                member.cluster_id, member.generation, revision, member.epoch_base, member.is_restored
            ),
            mark=DaemonMark(member.beat, member.run, member.entered),
        )
        try:
            fds, self._sent_stamps = await asyncio.to_thread(open_certificates, self._files)
        except BadEtcdSettings as error:
            raise CannotListen(f"{_BROKEN}: {error}") from None
        try:
            self._process.send(start, tuple(fds))
        finally:
            close_all(fds)
        self._has_begun = True
        # Step 2: once it is ready, send the node's record, then the live claims. It deletes all other claims.
        await self._process.expect(Ready)
        self._sent_record = None
        await self._send_record()
        quotas = {f"{lease_id:032x}": tenant for lease_id, tenant in self._table.counted().items()}
        self._send_live_claims(LiveClaims(self._table.claims(), quotas))

    def _on_end(self) -> None:
        # Answer every claim that waits: the next process has no record of them. Send no message from now on, because
        # the first message to the next process must be its settings.
        self._has_begun = False
        self._unreadable_of_previous += self._unreadable_count
        self._unreadable_count, self._unreadable, self._clock = 0, "", ""
        failure = _failure(ClaimRefusal.UNKNOWN, "the node's fleet process ended before it answered")
        for number in list(self._waiting):
            self._answer(number, failure, ClaimRefusal.UNKNOWN.value)

    def _send(self, message: ToFleet, fds: Sequence[int] = ()) -> bool:
        """Send a message. Returns whether there is a process to read it.

        A process that is slow to read is not ended, because that would end the leases of all names.
        """
        if not self._has_begun:
            # The process has not begun. Its first message must be its settings, followed by the live leases.
            return False
        try:
            self._process.send_in_turn(message, tuple(fds))
        except (ChannelClosed, OSError):
            # The process is gone, or this process has no descriptor left to keep those of a message that has to wait.
            return False
        return True

    def _send_live_claims(self, claims: LiveClaims) -> None:
        for message in parts_of(claims):
            self._send(message)

    def _send_all_ended(self) -> None:
        """After the claims were lost, report once that no claimed lease is left, so that the node may join again.

        A fenced lease counts as ended here, because a fence can last for days.
        """
        if self._is_lost and not self._table.has_claimed_lease:
            # An empty list says that no claimed lease is alive, so the process deletes every claim of this node.
            self._is_lost = False
            self._send_live_claims(LiveClaims())

    async def _send_record(self) -> None:
        # Send the record only if it has changed, because the next heartbeat then writes the whole record to etcd.
        record = self._record()
        if record != self._sent_record and self._send(record):
            self._sent_record = record

    async def _send_certificates(self) -> None:
        """Send the files of the certificates if one of them has changed."""
        try:
            if await asyncio.to_thread(certificate_stamps, self._files) == self._sent_stamps:
                return
            fds, names = await asyncio.to_thread(open_certificates, self._files)
        except BadEtcdSettings:
            return  # A file is being replaced, or no descriptor is left: the process keeps its earlier files.
        try:
            # Record them only if they were sent, so that otherwise the next round tries again.
            if self._send(CertificatesRenewed(tuple(self._files)), fds):
                self._sent_stamps = names
        finally:
            # The message has its own duplicates.
            close_all(fds)

    def _reached_at(self) -> list[str]:
        return list(self._settings.addresses or self._addresses())

    def _record(self) -> RecordChanged:
        # The directory chooses a node by free bytes per card, labels and addresses. A drained card counts as having
        # none free. If all cards are drained, so is the node.
        cards = tuple(
            CardRecord(
                card.uuid,
                card.name,
                card.capacity_bytes,
                card.available_bytes,
                card.leases,
                card.uuid in self._partitions,
            )
            for card in self._table.cards()
        )
        return RecordChanged(
            tuple(self._reached_at()), dict(self._settings.labels), cards, self._table.grants_nothing, VERSION
        )

    # --- messages of the process ---

    def _on_unhandled(self, number: int) -> None:
        """Refuse the acquire that waits for an answer that can't be read, because it would get no other answer."""
        failure = _failure(ClaimRefusal.UNKNOWN, "the answer of the node's fleet process can't be read")
        self._answer(number, failure, ClaimRefusal.UNKNOWN.value)

    def _on_message(self, message: FromFleet, fds: list[int]) -> None:
        match message:
            case MoveHorizon():
                self._move_membership_deadline(message.horizon_ns)
            case Joined():
                self._join(message)
            case Remembered():
                self._remember(_with_identity(self._membership, message.identity))
            case KeepMark():
                # A join or heartbeat is sent to etcd once the journal has its mark: a restarted daemon must have a
                # record of each that etcd may have.
                self._remember(_with_mark(self._membership, message.mark))
                self._journal.once_kept(partial(self._on_mark_kept, message.mark.beat))
            case Stopped():
                self._stop(has_left=message.has_left)
            case StoreMeasured():
                self._note_store_size(message.store)
            case EndClaimed():
                self._on_membership_lost(message.text)
            case ClaimGiven():
                if not self._answer(message.request, NameGranted(message.epoch), "given"):
                    # The claim was cancelled while the answer was on its way.
                    self.release(message.name, message.epoch)
            case QuotaGiven():
                if not self._answer(message.request, QuotaGranted(), "given"):
                    self.give_back(message.tenant, int(message.lease_id, 16))
            case ClaimRefused():
                failure = _failure(message.why, self._refusal_of(message), message.retry_after_ms)
                self._answer(message.request, failure, message.why.value)
            case QuotaRefused():
                failure = _quota_failure(message.why, self._refusal_of(message), message.retry_after_ms)
                self._answer(message.request, failure, message.why.value)
            case Noted():
                self._note(message)
            case RecordsUnreadable():
                self._count_unreadable(message.count, message.text)
            case _:
                assert_never(message)

    def _on_mark_kept(self, beat: int) -> None:
        self._send(MarkKept(beat))

    def _refusal_of(self, refused: ClaimRefused | QuotaRefused) -> str:
        """Return the sentence for the tenant.

        If the node is cut off, this process has a more precise reason than the fleet's rules.
        """
        waiting = self._waiting.get(refused.request)
        if waiting is None or refused.why is not ClaimRefusal.ISOLATED or not self.is_isolated:
            return refused.text
        return f"{waiting.refusal}: {self._trouble()}"

    def _note(self, noted: Noted) -> None:
        # An acknowledged heartbeat is counted and not logged: there is one every few seconds.
        note, text = noted.note, noted.text
        if note is Note.BEAT:
            self._beats += 1
            self._unanswered = ""
        elif note is Note.FAULT:
            log_event(LogEvent.DAEMON_FAULT, doing=text)
        elif note not in _NOTED_ELSEWHERE:
            if note is Note.CLOCK:
                self._clock = text
            elif note is Note.REFUSED:
                self._refused = text
            elif note in _UNANSWERED:
                self._unanswered = f"{_UNANSWERED[note]}: {text}{_advice(text)}"
            node, name = noted.node_id or None, noted.name or None
            log_event(LogEvent.FLEET_NOTED, what=note.value, reason=text, node=node, lease_name=name)

    def _count_unreadable(self, count: int, text: str) -> None:
        # Log only an increase; the count falls when somebody repairs a value.
        if count > self._unreadable_count and (suppressed := self._unreadable_lines.admit()) is not None:
            log_event(LogEvent.FLEET_UNREADABLE, reason=text, suppressed=suppressed or None)
        self._unreadable_count, self._unreadable = count, text

    def _join(self, joined: Joined) -> None:
        log_event(LogEvent.FLEET_JOINED, node=self.node_id, incarnation=joined.incarnation)
        self._refused = ""
        membership = _with_identity(MembershipRow(joined.incarnation), joined.identity)
        self._remember(_with_mark(membership, joined.mark))

    def _remember(self, membership: MembershipRow) -> None:
        self._membership = membership
        self._journal.remember_membership(membership)

    def _stop(self, *, has_left: bool) -> None:
        if has_left:
            # The next process then joins at once, and need not find out first that the node has left the fleet.
            self._membership = replace(self._membership, incarnation=0)
            self._journal.remember_membership(self._membership)
        self._stopped.set()

    def _move_membership_deadline(self, membership_deadline_boot_ns: int) -> None:
        # Keep it on CLOCK_BOOTTIME, and convert it for the table's timers, which use the monotonic clock.
        self._membership_deadline_boot_ns = membership_deadline_boot_ns
        self._post(
            MembershipDeadlineMoved(
                time.monotonic_ns() + membership_deadline_boot_ns - boot_ns(), membership_deadline_boot_ns
            )
        )
        self._send(HorizonSet())
        self._update_page(self.membership())

    def _on_membership_lost(self, reason: str) -> None:
        log_event(LogEvent.FLEET_FENCED, reason=reason)
        self._fenced += 1
        # A process that starts before the last claimed lease has ended must not continue with this membership.
        self._remember(replace(self._membership, incarnation=0))
        self._membership_deadline_boot_ns, self._is_lost = 0, True
        self._post(ClaimsLost(reason))
        self._update_page(self.membership())
        # An acquire that waits for bytes may already have its name, by one of the lost claims.
        failure = _failure(ClaimRefusal.ISOLATED, f"the fleet has declared this node dead: {reason}")
        for number, waiting in list(self._waiting.items()):
            if waiting.drop is QuotaDropped:
                self._send(QuotaDropped(number))
                self._answer(number, failure, ClaimRefusal.ISOLATED.value)
        self._send_all_ended()


def _log_fault(error: Exception) -> None:
    log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"keeping the fleet process up to date: {error}")


def _with_identity(membership: MembershipRow, identity: FleetIdentity) -> MembershipRow:
    return replace(membership, **_fields_of(identity))


def _with_mark(membership: MembershipRow, mark: DaemonMark) -> MembershipRow:
    return replace(membership, **_fields_of(mark))


def _fields_of(part: FleetIdentity | DaemonMark) -> dict[str, Any]:
    """Return the fields of a part of a membership by name. `MembershipRow` has the same names."""
    return {field.name: getattr(part, field.name) for field in fields(part)}


_NOTED_ELSEWHERE: Final = frozenset({Note.JOINED, Note.FENCED})
"""Notes that have a log event of their own."""

_UNANSWERED: Final = {
    Note.REJECTED: "refuses this node's record",
    Note.BEAT_UNKNOWN: "has not answered in time",
}
"""The reason why etcd does not have the node's record, as a clause."""

_ADVICE: Final = {
    "permission denied": "give the etcd user of this node's certificate permission to read and write /gpulease/v1/",
    "certificate": "check ca, certificate and key of [fleet], and their expiry dates",
    "handshake": "check ca, certificate and key of [fleet], and their expiry dates",
}
"""Hints for operators about errors of etcd, or of the connection to it, by words in the error's text. An error about
space already contains the advice."""


def _advice(text: str) -> str:
    advice = next((advice_text for words, advice_text in _ADVICE.items() if words in text.lower()), "")
    return f": {advice}" if advice else ""


_HINTS: Final = {
    ClaimRefusal.TAKEN: "Wait until its lease has ended, or use another name.",
    ClaimRefusal.ISOLATED: "Try another node of the fleet.",
    ClaimRefusal.UNKNOWN: "Ask again. If the claim was made after all, it is deleted.",
    ClaimRefusal.REJECTED: "The fleet's operator must check etcd.",
    ClaimRefusal.STALE: "The fleet's operator must check etcd.",
    ClaimRefusal.BUSY: "Ask again in a moment, or ask another node.",
}

_QUOTA_HINTS: Final = {
    ClaimRefusal.TAKEN: "Free a lease on any node of the fleet, or wait until one has ended.",
    ClaimRefusal.TOO_LARGE: "Request less, or ask the fleet's operator to raise the quota with `gpulease fleet quota`.",
    ClaimRefusal.NO_QUOTA: "Ask the fleet's operator to set one with `gpulease fleet quota`.",
}
"""The hint for a tenant whose quota is used up; every other node would refuse it, too."""


def _failure(reason: ClaimRefusal, text: str, retry_after_ms: int = 0) -> Failure:
    hint = _HINTS[reason]
    if retry_after_ms:
        hint = f"Ask again in {retry_after_ms / 1000:.1f} s."
    return Failure(Status.BUSY, text, hint=hint)


def _quota_failure(reason: ClaimRefusal, text: str, retry_after_ms: int) -> Failure:
    if reason in _QUOTA_HINTS:
        return Failure(Status.DENIED, text, hint=_QUOTA_HINTS[reason])
    return _failure(reason, text, retry_after_ms)


_BROKEN: Final = "the fleet process can't serve"


def _fleet_kind(sandbox: SandboxSettings) -> ChildKind:
    return ChildKind(
        name="the fleet process",
        module="gpulease.daemon.fleet",
        sends=FROM_FLEET,
        broken=_BROKEN,
        died=LogEvent.FLEET_DIED,
        hung=LogEvent.FLEET_HUNG,
        not_started=LogEvent.FLEET_NOT_STARTED,
        back=LogEvent.FLEET_BACK,
        arguments=[sandbox.to_text()],
    )
