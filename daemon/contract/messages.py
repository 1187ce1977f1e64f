"""The messages between broker, zygote and workers, and those that every helper process has.

    from      to           messages                                             descriptors that go with them
    broker    zygote       WorkerSpec: fork a worker                            its channel, its two pages; of a zygote
                                                                                that outlives its broker also the
                                                                                broker's end of the channel
                           LeaseChanged, WorkerForgotten, Ping, Retire
                           PagesRenewed                                         the worker's two new pages
    zygote    broker       Preloaded or Broken, once
                           WorkerForked                                         the worker's pidfd
                           ForkFailed, WorkerReaped, Pong
    zygote    next broker  ZygoteTaken, or:
                           ZygoteIntroduction                                   the zygote's pidfd
                           LivingWorker, for each                               pidfd, two pages, channel's broker end
                           EndedWorker, for each; then HandoverDone
    broker    worker       WorkerSpec: take this lease                          (only to a warm worker)
                           Attach                                               a tenant's socket
                           Scrub                                                the next two pages
                           EndSession
                           RegionsPage                                          the regions page, read-only
                           OpenRegion, EndRegion, ResizeSlice
                           ParkMemory                                           host memory, unless it is to be dropped
                           Park, Return, RefuseReturn
                           Leave                                                a channel for the session's image
                           Stay
                           Adopt                                                a channel with a session's image
                           LatencyWord                                          its memory, read-only unless it is own
    worker    broker       Ready, Failed, Scrubbed, Attached, LastLeft, MemoryGrew, Faulted
                           RegionOpened, RegionRefused, RegionEnded, RegionStuck, RegionReleased, ForwardRevoked,
                           SliceResized
                           Parked, ParkRefused, ReturnWanted, Returned, ReturnFailed
                           Imaged, LeaveRefused
    worker    broker       by the channel of Leave, and from there by that of Adopt:
                           ImageMemory                                          the image, the session's host memory
                           ImageConnection, for each                            its socket, its ring and the arena
    broker    helper       Ping
    helper    broker       Prepared, Ready or Broken, once each; Pong

The helpers are the fleet process, the remote tenants' acceptor and the web process. The rest of their messages is in
fleet/fleet_messages.py, remote/remote_messages.py and web/web_messages.py.

Each message is one msgpack map (see host/ipc.py). A broker that starts takes over the zygotes and workers of an earlier
version, so an op, a key and a type never change their meaning: a different meaning gets another HANDOVER.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Final

from gpulease.daemon.contract.control_page import MAX_LATENCY_WORDS, PageState
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.contract.message_fields import (
    BYTES,
    FLAG,
    LEASE_NUMBER,
    TEXT,
    U64,
    FieldKind,
    Flag,
    LeaseNumber,
    Message,
    Pid,
    Serial,
    Text,
    converted,
    inline,
    integer,
    listed,
    messages_of,
    nested,
    one_of,
    row,
)
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.opcodes import Status

HANDOVER: Final = 3
"""Version of these messages. A broker can't take over a zygote that introduces itself with another one."""

MAX_IMAGE_CONNECTIONS: Final = 64
"""Most connections of a session that leaves its process. Bounds the descriptors that a cold-parked session holds in the
broker, and what waits in a channel without a reader."""

ZYGOTE_NAME: Final = "gpul-zygote"
"""Name of a zygote's process, for ps(1). A broker kills no process with another name."""

Spec = Annotated[WorkerSpec, nested(WorkerSpec)]
InlineSpec = Annotated[WorkerSpec, inline(WorkerSpec)]


def _findings(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(finding, dict) for finding in value):
        raise ValueError("they must be a list of maps")
    return value


Findings = Annotated[list[dict[str, Any]], FieldKind(_findings)]
"""Measures of the sandbox, each as returned by `MeasureFinding.to_message`."""


# --- broker to zygote; a request for a worker is a WorkerSpec ---


@dataclass(frozen=True, slots=True)
class LeaseChanged(Message):
    """A worker that was made ahead of its lease has taken a lease, or a submit."""

    # An op is part of the hand-over, so it keeps its first name, whatever the class is called.
    OP: ClassVar[str] = "lease"
    spec: InlineSpec
    serial: Serial


@dataclass(frozen=True, slots=True)
class PagesRenewed(Message):
    """A worker was scrubbed: it has no lease, and other control pages."""

    OP: ClassVar[str] = "renew"
    spec: InlineSpec
    serial: Serial


@dataclass(frozen=True, slots=True)
class WorkerForgotten(Message):
    """A reaped worker's bytes are proved free, so no broker needs to know it any more."""

    OP: ClassVar[str] = "forget"
    serial: Serial


@dataclass(frozen=True, slots=True)
class Retire(Message):
    """The zygote must end with the last of its workers."""

    OP: ClassVar[str] = "retire"


@dataclass(frozen=True, slots=True)
class LivenessPing(Message):
    """The broker asks whether the process lives."""

    OP: ClassVar[str] = "ping"


# --- zygote to broker ---


@dataclass(frozen=True, slots=True)
class Preloaded(Message):
    """The zygote has loaded the driver and can fork workers. `findings`: the measures of the workers' sandbox."""

    OP: ClassVar[str] = "preloaded"
    findings: Annotated[list[dict[str, Any]], FieldKind(_findings, key="sandbox")]


@dataclass(frozen=True, slots=True)
class HelperBroken(Message):
    """The process can't do its work: a zygote can never fork a worker, a helper can't serve.

    Attributes:
        reason: Sentence for the operator; a clause from a helper.
        hint: What the operator can do; "" for nothing.
    """

    OP: ClassVar[str] = "broken"
    reason: Text
    hint: Text = ""


@dataclass(frozen=True, slots=True)
class Pong(Message):
    OP: ClassVar[str] = "pong"


@dataclass(frozen=True, slots=True)
class WorkerForked(Message):
    OP: ClassVar[str] = "spawned"
    lease_id: LeaseNumber
    pid: Pid
    serial: Serial


@dataclass(frozen=True, slots=True)
class ForkFailed(Message):
    """A worker could not be forked; `reason` is a clause for the log."""

    OP: ClassVar[str] = "no_fork"
    lease_id: LeaseNumber
    reason: Text


@dataclass(frozen=True, slots=True)
class WorkerReaped(Message):
    """A worker has ended.

    Attributes:
        lease_id: The lease or warm context for which the worker was made.
        reason: How it ended, in words.
        is_overdue: The zygote killed it because its broker hung; None if not.
        overran: The kernel for which it was killed, in words; "" if the deadline was the reason. None unless overdue.
    """

    OP: ClassVar[str] = "exited"
    lease_id: LeaseNumber
    serial: Serial
    reason: Text
    is_overdue: Annotated[bool | None, FLAG.optional()] = None
    overran: Annotated[str | None, TEXT.optional()] = None


# --- zygote to the next broker ---


@dataclass(frozen=True, slots=True)
class ZygoteTaken(Message):
    """The zygote has a broker already, so this connection is refused."""

    OP: ClassVar[str] = "taken"


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteIntroduction(Message):
    """A zygote introduces itself.

    Attributes:
        build: Which code it runs, by `host.version.own_build`; "" from a version that has only one build.
        handover: Its HANDOVER.
        sandbox: The sandbox settings of its workers, as on its command line.
        findings: The measures its workers are under.
        wipes_heap: Whether it and its workers overwrite memory that they free.
        answers_pings: Whether it answers a Ping.
    """

    OP: ClassVar[str] = "zygote"
    version: Text
    build: Text = ""
    handover: Annotated[int, U64]
    pid: Pid = 0
    driver: Text
    sandbox: Text
    findings: Findings
    wipes_heap: Flag = False
    answers_pings: Flag = False


@dataclass(frozen=True, slots=True)
class LivingWorker(Message):
    """A worker that has not ended. `overran`: the kernel for which the zygote ended its lease, "" if it did not."""

    OP: ClassVar[str] = "worker"
    serial: Serial
    pid: Pid
    spec: Spec
    overran: Text = ""


def _page(value: Any) -> PageState:
    word, deadline_ns, generation = value
    check = U64.parse
    return PageState(None if word is None else Status(word), check(deadline_ns), check(generation))


def _page_map(page: PageState) -> tuple[Status | None, int, int]:
    return page.word, page.deadline_ns, page.generation


@dataclass(frozen=True, slots=True)
class EndedWorker(Message):
    """A worker that was reaped and not forgotten.

    Attributes:
        reason: How it ended, in words.
        overran: The kernel for which the zygote ended its lease; "" if it did not.
        page: The last state of its lease's page, without the cause; None if it was not read.
        cause: The cause on that page.
    """

    OP: ClassVar[str] = "ended"
    serial: Serial
    pid: Pid
    reason: Text
    spec: Spec
    overran: Text = ""
    page: Annotated[PageState | None, converted(_page, _page_map).optional()] = None
    cause: Annotated[str | None, TEXT.optional()] = None

    @property
    def last_page(self) -> PageState | None:
        """The last state of the lease's page, with the cause."""
        return None if self.page is None else self.page._replace(cause=self.cause or "")


@dataclass(frozen=True, slots=True)
class HandoverDone(Message):
    """The zygote has reported all its workers: what follows on the channel are ordinary messages."""

    OP: ClassVar[str] = "told"


# --- broker to worker; the lease of a warm worker is a WorkerSpec ---


@dataclass(frozen=True, slots=True)
class AttachOrder(Message):
    """A tenant's connection, or a guest's, for the worker's session.

    Attributes:
        request_id: The id of the request that the worker must answer.
        rest: Bytes that the tenant sent after that request.
        ring: Whether the tenant asks for a ring.
        arena_bytes: Size of the arena that the tenant asks for; 0 for none.
        is_stranger: Whether the tenant may be another than the lease's; True from a broker that does not send it.
        guest: The terms of the guest's token; None for the lease's own tenant.
        owns: What the connection makes in the session must end with it.
        client_pid: The client's process on this host; 0 if that is not known.
        words: Whether the tenant asks for the session's words.
    """

    OP: ClassVar[str] = "attach"
    request_id: Annotated[int, U64]
    rest: Annotated[bytes, BYTES]
    ring: Flag
    arena_bytes: Annotated[int, U64.named("arena")]
    is_stranger: Flag = True
    guest: Annotated[Guest | None, converted(Guest.from_message, Guest.to_message).or_nil()] = None
    owns: Flag = False
    client_pid: Pid = 0
    words: Flag = False


@dataclass(frozen=True, slots=True)
class Scrub(Message):
    """The lease is over: scrub the context for another lease."""

    OP: ClassVar[str] = "scrub"


@dataclass(frozen=True, slots=True)
class EndSession(Message):
    """The lease is over: read the page, and send the connections the reason."""

    OP: ClassVar[str] = "end"


@dataclass(frozen=True, slots=True)
class RegionsPage(Message):
    """The session's regions page; a broker that took the worker over sends another one.

    The worker reads the earlier page a last time first: a region that had ended there has ended.
    """

    OP: ClassVar[str] = "regions"


@dataclass(frozen=True, slots=True)
class LatencyWord(Message):
    """The latency word of a session of the card, in place of an earlier one with the same number.

    The worker maps it until its session ends. It obeys the word once its lease's page has the bit of this number.

    Attributes:
        number: The word's number and bit, less than `control_page.MAX_LATENCY_WORDS`.
        is_own: It is this session's own word, which the worker writes.
    """

    OP: ClassVar[str] = "latency"
    number: Annotated[int, integer(0, MAX_LATENCY_WORDS - 1)]
    is_own: Flag


@dataclass(frozen=True, slots=True)
class OpenRegionOrder(Message):
    """Map memory for a region; the worker answers with RegionOpened or RegionRefused."""

    OP: ClassVar[str] = "region"
    region_id: LeaseNumber
    slot: Annotated[int, U64]
    number: Annotated[int, U64]
    size_bytes: Annotated[int, U64.named("size")]


@dataclass(frozen=True, slots=True)
class EndRegionOrder(Message):
    """A region's word shows that it has ended: wait for its launches, remove its memory, and answer.

    The worker answers with RegionEnded, or with RegionStuck if a launch that named it has not ended after `grace_ms`.
    """

    OP: ClassVar[str] = "end_region"
    region_id: LeaseNumber
    grace_ms: Annotated[int, U64.named("grace")]


@dataclass(frozen=True, slots=True)
class ResizeSliceOrder(Message):
    """Give the session a slice of another size; the worker answers with SliceResized."""

    OP: ClassVar[str] = "resize"
    size_bytes: Annotated[int, U64.named("size")]


# --- parking: broker to worker ---
# The broker numbers the parks of a session, each with a larger number than all before it, and every message but
# ParkMemoryOrder carries such a number. The worker ignores an order about another park than the one that it is in, and
# the broker a report. Both sides may repeat: an order that was carried out before is answered again, so a broker that
# takes a worker over may simply order what it wants.


@dataclass(frozen=True, slots=True)
class ParkMemoryOrder(Message):
    """Host memory for the session's bytes, a sealed memfd of that size, in place of what the worker had for them.

    The worker maps it, and prepares it for fast copies between requests. It keeps it, parked or not, until the next of
    these orders; one without a descriptor makes it drop what it has. While the session is parked the order is ignored.
    The memory lives as long as the broker's descriptor or the worker's mapping. The worker does not reply.
    """

    OP: ClassVar[str] = "park_memory"
    size_bytes: Annotated[int, U64.named("size")] = 0


@dataclass(frozen=True, slots=True)
class ParkOrder(Message):
    """Copy the session's pages to its host memory, and release them; the worker answers with Parked or ParkRefused.

    Attributes:
        number: The park's number.
        until_ns: Until when what the session has launched may run, on the monotonic clock. After it, the worker begins
            no copy and refuses.
    """

    OP: ClassVar[str] = "park"
    number: Annotated[int, U64]
    until_ns: Annotated[int, U64.named("until")]


@dataclass(frozen=True, slots=True)
class ReturnOrder(Message):
    """Take pages, copy the session's bytes back, and go on; the worker answers with Returned or ReturnFailed."""

    OP: ClassVar[str] = "return"
    number: Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class RefuseReturn(Message):
    """No room was found: the requests that wait are refused as BUSY, with `reason`, and the session stays parked.

    A later request asks again.
    """

    OP: ClassVar[str] = "no_return"
    number: Annotated[int, U64]
    reason: Text


# A parked session may leave its process, too. Its image goes through a channel that the broker makes for it, and waits
# in the broker until another worker adopts it. The worker that sent it serves nothing from then on: it is killed, or
# ordered to stay.


@dataclass(frozen=True, slots=True)
class LeaveOrder(Message):
    """Send the parked session's image through the channel that comes with this, and serve no connection from then on.

    The worker answers with Imaged, once everything is in the channel, or with LeaveRefused. If `carries`, the session
    returns in another process at once: requests that wait for that are in the image, and do not keep it here.
    """

    OP: ClassVar[str] = "leave"
    number: Annotated[int, U64]
    carries: Annotated[bool, FLAG] = False


@dataclass(frozen=True, slots=True)
class StayOrder(Message):
    """Forget the image that was sent, and serve the session again, parked as before. The worker does not reply."""

    OP: ClassVar[str] = "stay"
    number: Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class AdoptOrder(Message):
    """Become the worker of a session: its image is in the channel that comes with this, complete.

    The worker then brings the session back, and answers with Returned or ReturnFailed.

    Attributes:
        refusal: Why it must leave the session parked instead, and answer with ReturnFailed; None to bring it back.
    """

    OP: ClassVar[str] = "adopt"
    number: Annotated[int, U64]
    connections: Annotated[int, integer(0, MAX_IMAGE_CONNECTIONS)]
    refusal: Annotated[str | None, TEXT.optional()] = None


@dataclass(frozen=True, slots=True)
class ImageMemory(Message):
    """The image, and the host memory that has the session's bytes: two sealed memfds of these sizes.

    `version`: That of the image (`session_image.IMAGE_VERSIONS`). Workers from before images had several leave it out.
    """

    OP: ClassVar[str] = "image"
    image_bytes: Annotated[int, U64.named("image")]
    host_bytes: Annotated[int, U64.named("host")]
    version: Annotated[int, U64] = 1


@dataclass(frozen=True, slots=True)
class ImageConnection(Message):
    """A connection of the session: its socket, its ring if it has one, and the arena if it has that."""

    OP: ClassVar[str] = "image_connection"
    has_ring: Annotated[bool, FLAG.named("ring")]
    has_arena: Annotated[bool, FLAG.named("arena")]


# --- worker to broker ---


@dataclass(frozen=True, slots=True)
class RegionOpenedReport(Message):
    """A region's memory is mapped at this device address, and zero."""

    OP: ClassVar[str] = "region_opened"
    region_id: LeaseNumber
    address: Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class RegionRefusedReport(Message):
    """A region can't be opened; `reason` is a sentence for its tenant."""

    OP: ClassVar[str] = "region_refused"
    region_id: LeaseNumber
    reason: Text


@dataclass(frozen=True, slots=True)
class RegionEndedReport(Message):
    """Nothing in the session can reach a region's memory any more.

    Attributes:
        freed_bytes: Bytes that were released to the card.
        kept_bytes: Bytes that stay mapped in the region's place until the session releases its address.
        shown_bytes: By how many bytes the driver's free figure grew meanwhile; other processes change it, too.
    """

    OP: ClassVar[str] = "region_ended"
    region_id: LeaseNumber
    freed_bytes: Annotated[int, U64.named("freed")]
    kept_bytes: Annotated[int, U64.named("kept")]
    shown_bytes: Annotated[int, integer(-(1 << 63), (1 << 63) - 1).named("shown")]


@dataclass(frozen=True, slots=True)
class RegionStuckReport(Message):
    """A region's memory can't be removed; `reason` is a clause for its tenant and the log."""

    OP: ClassVar[str] = "region_stuck"
    region_id: LeaseNumber
    reason: Text


@dataclass(frozen=True, slots=True)
class RegionReleasedReport(Message):
    """The session released an ended region's address; its last bytes went back to the card."""

    OP: ClassVar[str] = "region_released"
    region_id: LeaseNumber


@dataclass(frozen=True, slots=True)
class ForwardRevokedReport(Message):
    """A launch was refused because of a region that it named.

    Attributes:
        status: The refusal's status, as the positive number.
        kernel: The kernel, "" for a graph of several.
        site: Number of the launch in its burst or graph.
        position: The position that the launch carried.
        flipped_ns: When the broker changed the word, on the monotonic clock.
        seen_ns: When the worker saw it.
        told_ns: When the worker replied with the refusal, or learned that the client had raised it; 0 if the tenant has
            not asked yet.
    """

    OP: ClassVar[str] = "forward_revoked"
    region_id: LeaseNumber
    status: Annotated[int, U64]
    kernel: Text
    site: Annotated[int, U64]
    position: Annotated[int, U64]
    flipped_ns: Annotated[int, U64.named("flipped")]
    seen_ns: Annotated[int, U64.named("seen")]
    told_ns: Annotated[int, U64.named("told")] = 0


@dataclass(frozen=True, slots=True)
class SliceResizedReport(Message):
    """The session's slice has that size; `doubt` says why it is not the size asked for, "" if it is."""

    OP: ClassVar[str] = "resized"
    size_bytes: Annotated[int, U64.named("size")]
    doubt: Text


class ParkRefusal(Enum):
    """Why a session was not parked. Its bytes are where they were, and it continues.

    Attributes:
        RUNNING: Something that it launched had not ended in time.
        REGIONS: One of its regions is being opened or ended.
        NO_MEMORY: It has no host memory, or too little: `ParkRefusedReport.needed_bytes` says how much it needs.
        NOT_PARKABLE: Its lease is not parkable.
        LOST: Its context is lost.
        OVER: The lease ended meanwhile.
        FAILED: The driver refused a call.
    """

    RUNNING = "running"
    REGIONS = "regions"
    NO_MEMORY = "no_memory"
    NOT_PARKABLE = "not_parkable"
    LOST = "lost"
    OVER = "over"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ParkedReport(Message):
    """The session's bytes are in its host memory, and its pages are released to the card.

    Attributes:
        moved_bytes: Bytes of the pages; those of regions, too.
        shown_bytes: By how many bytes the driver's free figure grew meanwhile; other processes change it, too.
        waited_ns: Time for what was in flight.
        copied_ns: Time for the copy, and for host memory that was not prepared.
        released_ns: Time to unmap and release the pages.
        kept_bytes: Bytes charged to the slice that stay on the card: modules, kernels' local memory, streams, graphs.
    """

    OP: ClassVar[str] = "parked"
    number: Annotated[int, U64]
    moved_bytes: Annotated[int, U64.named("moved")]
    shown_bytes: Annotated[int, integer(-(1 << 63), (1 << 63) - 1).named("shown")]
    waited_ns: Annotated[int, U64.named("waited")]
    copied_ns: Annotated[int, U64.named("copied")]
    released_ns: Annotated[int, U64.named("released")]
    kept_bytes: Annotated[int, U64.named("kept")] = 0


@dataclass(frozen=True, slots=True)
class ParkRefusedReport(Message):
    """The session is not parked.

    Attributes:
        why: The kind of reason.
        reason: The reason, a clause for the log.
        needed_bytes: The least size of its host memory.
    """

    OP: ClassVar[str] = "park_refused"
    number: Annotated[int, U64]
    why: Annotated[ParkRefusal, one_of(ParkRefusal)]
    reason: Text
    needed_bytes: Annotated[int, U64.named("needed")]


@dataclass(frozen=True, slots=True)
class ReturnWantedReport(Message):
    """A request waits for the parked session. Repeated every second while it does; the worker answers no request."""

    OP: ClassVar[str] = "return_wanted"
    number: Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class ReturnedReport(Message):
    """The session's bytes are on the card again.

    Attributes:
        moved_bytes: Bytes of its pages.
        mapped_ns: Time to take and map the pages.
        copied_ns: Time for the copy.
    """

    OP: ClassVar[str] = "returned"
    number: Annotated[int, U64]
    moved_bytes: Annotated[int, U64.named("moved")]
    mapped_ns: Annotated[int, U64.named("mapped")]
    copied_ns: Annotated[int, U64.named("copied")]


@dataclass(frozen=True, slots=True)
class ReturnFailedReport(Message):
    """The session could not return; `reason` is a clause for the log.

    It is parked as before, and holds nothing of the card; or its context is lost, which Faulted reports.

    Attributes:
        is_mismatch: The worker could not adopt the session's image: something would not be what or where it was.
    """

    OP: ClassVar[str] = "return_failed"
    number: Annotated[int, U64]
    reason: Text
    is_mismatch: Annotated[bool, FLAG.named("mismatch")] = False


@dataclass(frozen=True, slots=True)
class ParkedRegion:
    """A region of a session that has left its process.

    Attributes:
        at: Its place in the session's host memory.
        kept_bytes: Bytes that stay in its place when it ends.
    """

    region_id: int
    at: int
    size_bytes: int
    kept_bytes: int


PARKED_REGION: Final = row(ParkedRegion, region_id=LEASE_NUMBER, at=U64, size_bytes=U64, kept_bytes=U64)


@dataclass(frozen=True, slots=True)
class ImagedReport(Message):
    """The session's image is in the channel of LeaveOrder; with its size in bytes and the number of its connections.

    Attributes:
        is_awaited: Requests wait for the session's return.
        regions: Those that have not ended: the broker wipes the bytes of those that end while no worker has them.
    """

    OP: ClassVar[str] = "imaged"
    number: Annotated[int, U64]
    image_bytes: Annotated[int, U64.named("image")]
    connections: Annotated[int, integer(0, MAX_IMAGE_CONNECTIONS)]
    is_awaited: Annotated[bool, FLAG.named("awaited")] = False
    regions: Annotated[tuple[ParkedRegion, ...], listed(PARKED_REGION, MAX_REGIONS)] = ()


@dataclass(frozen=True, slots=True)
class LeaveRefusedReport(Message):
    """The session can't leave its process; it is parked as before.

    Attributes:
        reason: Why, a clause for reports.
        is_lasting: Whether it is so because of what the session has, and not because it is busy now.
    """

    OP: ClassVar[str] = "leave_refused"
    number: Annotated[int, U64]
    reason: Text
    is_lasting: Annotated[bool, FLAG.named("lasting")]


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The process can do its work.

    A worker has its context: it can take connections, or a lease if it was made ahead of one. A helper serves.
    """

    OP: ClassVar[str] = "ready"


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """The worker could not open a context, and ends."""

    OP: ClassVar[str] = "failed"
    reason: Text


@dataclass(frozen=True, slots=True)
class Faulted(Message):
    OP: ClassVar[str] = "faulted"
    reason: Text


@dataclass(frozen=True, slots=True)
class Scrubbed(Message):
    """The worker has scrubbed its context.

    Attributes:
        doubt: Why the context is not clean; "" if it is.
        held_bytes: Bytes that the worker still counts as its own.
    """

    OP: ClassVar[str] = "scrubbed"
    doubt: Text
    held_bytes: Annotated[int, integer(-(1 << 63), (1 << 64) - 1).named("held")]


@dataclass(frozen=True, slots=True)
class Attached(Message):
    """The worker has taken a connection from its channel, and admitted it or not.

    Attributes:
        guest: The mark of the guest's token; None for the lease's own tenant.
        is_in: Whether the guest was admitted; None for the lease's own tenant.
    """

    OP: ClassVar[str] = "attached"
    guest: Annotated[int | None, U64.optional()] = None
    is_in: Annotated[bool | None, FLAG.optional()] = None


@dataclass(frozen=True, slots=True)
class LastLeft(Message):
    OP: ClassVar[str] = "left"


@dataclass(frozen=True, slots=True)
class MemoryGrew(Message):
    """The driver may hold more of the card for the worker: the broker must poll it."""

    OP: ClassVar[str] = "look"


# --- helper process to broker ---


@dataclass(frozen=True, slots=True)
class HelperPrepared(Message):
    """The helper has its settings, and serves once the broker has connected it."""

    OP: ClassVar[str] = "prepared"


# --- parsing ---

ToZygote = WorkerSpec | LeaseChanged | PagesRenewed | WorkerForgotten | Retire | LivenessPing
TO_ZYGOTE: Final[Mapping[str, type[ToZygote]]] = messages_of(ToZygote)

FromZygote = Preloaded | HelperBroken | Pong | WorkerForked | ForkFailed | WorkerReaped
FROM_ZYGOTE: Final[Mapping[str, type[FromZygote]]] = messages_of(FromZygote)

Handover = ZygoteTaken | ZygoteIntroduction | LivingWorker | EndedWorker | HandoverDone
HANDOVER_MESSAGES: Final[Mapping[str, type[Handover]]] = messages_of(Handover)

ToWorker = (
    WorkerSpec
    | AttachOrder
    | Scrub
    | EndSession
    | RegionsPage
    | OpenRegionOrder
    | EndRegionOrder
    | ResizeSliceOrder
    | ParkMemoryOrder
    | ParkOrder
    | ReturnOrder
    | RefuseReturn
    | LeaveOrder
    | StayOrder
    | AdoptOrder
    | LatencyWord
)
TO_WORKER: Final[Mapping[str, type[ToWorker]]] = messages_of(ToWorker)

FromWorker = (
    Ready
    | Failed
    | Faulted
    | Scrubbed
    | Attached
    | LastLeft
    | MemoryGrew
    | RegionOpenedReport
    | RegionRefusedReport
    | RegionEndedReport
    | RegionStuckReport
    | RegionReleasedReport
    | ForwardRevokedReport
    | SliceResizedReport
    | ParkedReport
    | ParkRefusedReport
    | ReturnWantedReport
    | ReturnedReport
    | ReturnFailedReport
    | ImagedReport
    | LeaveRefusedReport
)
FROM_WORKER: Final[Mapping[str, type[FromWorker]]] = messages_of(FromWorker)

ParkReport = (
    ParkedReport
    | ParkRefusedReport
    | ReturnWantedReport
    | ReturnedReport
    | ReturnFailedReport
    | ImagedReport
    | LeaveRefusedReport
)

ImageMessage = ImageMemory | ImageConnection
IMAGE_MESSAGES: Final[Mapping[str, type[ImageMessage]]] = messages_of(ImageMessage)

FromHelper = HelperPrepared | Ready | HelperBroken | Pong
FROM_HELPER: Final[Mapping[str, type[FromHelper]]] = messages_of(FromHelper)
