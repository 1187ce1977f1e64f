"""The messages between broker, zygote and workers, and those that every helper process has.

    from      to           messages                                             descriptors that go with them
    broker    zygote       WorkerSpec: fork a worker                            its channel and its two pages; if the
                                                                                zygote outlives its broker, also the
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
                           ParkMemory                                           host memory; none to drop what it has
                           Park, Return, RefuseReturn
                           Leave                                                a channel for the session's image
                           Stay
                           Adopt                                                a channel with a session's image
                           LatencyWord                                          its memory, read-only for other sessions
    worker    broker       Ready, Failed, Scrubbed, Attached, LastLeft, MemoryGrew, Faulted
                           RegionOpened, RegionRefused, RegionEnded, RegionStuck, RegionReleased, ForwardRevoked,
                           SliceResized
                           Parked, ParkRefused, ReturnWanted, Returned, ReturnFailed
                           Imaged, LeaveRefused
    worker    broker       through the channel of Leave; the broker forwards them through the channel of Adopt:
                           ImageMemory                                          the image, the session's host memory
                           ImageConnection, for each                            its socket, its ring and the arena
    broker    helper       Ping
    helper    broker       Prepared, Ready or Broken, once each; Pong

The helpers are the fleet process, the remote tenants' acceptor and the web process. Their other messages are in
fleet/fleet_messages.py, remote/remote_messages.py and web/web_messages.py.

Each message is one msgpack map (see host/ipc.py). A broker that starts takes over the zygotes and workers of an earlier
version, so an op, a key and a type never change their meaning. A different meaning requires another HANDOVER.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Final

from gpulease.daemon.contract.control_page import MAX_LATENCY_WORDS, PageState, Transfer
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
"""Version of these messages. A broker can't take over a zygote that introduces itself with another version."""

MAX_LENT_PAGES: Final = 256
"""Maximum number of descriptors of pages that a session lends to its next worker. They pass through the broker, which
has a bounded number of descriptors. A session's other pages go through its host memory."""

MAX_IMAGE_CONNECTIONS: Final = 64
"""Maximum number of connections of a session that leaves its process. It bounds the descriptors that the broker holds
for a cold-parked session, and the messages in a channel that nothing reads yet."""

ZYGOTE_NAME: Final = "gpul-zygote"
"""Name of a zygote's process, for ps(1). A broker kills no process with another name."""

Spec = Annotated[WorkerSpec, nested(WorkerSpec)]
InlineSpec = Annotated[WorkerSpec, inline(WorkerSpec)]


def _findings(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(finding, dict) for finding in value):
        raise ValueError("they must be a list of maps")
    return value


Findings = Annotated[list[dict[str, Any]], FieldKind(_findings)]
"""Findings about the sandbox's measures, each as `MeasureFinding.to_message` returns it."""


# --- broker to zygote; a request for a worker is a WorkerSpec ---


@dataclass(frozen=True, slots=True)
class LeaseChanged(Message):
    """A worker that was made ahead of its lease has taken a lease, or a submit."""

    # An op is part of the handover, so it keeps its original name even if the class is renamed.
    OP: ClassVar[str] = "lease"
    spec: InlineSpec
    serial: Serial


@dataclass(frozen=True, slots=True)
class PagesRenewed(Message):
    """A worker was scrubbed: it has no lease now, and it has new control pages."""

    OP: ClassVar[str] = "renew"
    spec: InlineSpec
    serial: Serial


@dataclass(frozen=True, slots=True)
class WorkerForgotten(Message):
    """A reaped worker's bytes are proved free, so the zygote no longer needs to report it to a later broker."""

    OP: ClassVar[str] = "forget"
    serial: Serial


@dataclass(frozen=True, slots=True)
class Retire(Message):
    """The zygote must exit when the last of its workers has ended."""

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
    """The process can't do its work: a zygote can never fork a worker, or a helper can't serve.

    Attributes:
        reason: The reason for the operator: a sentence from a zygote, a clause from a helper.
        hint: What the operator can do; "" without a hint.
        is_misconfigured: True if a setting is the cause, so that another process would fail the same way; else None.
    """

    OP: ClassVar[str] = "broken"
    reason: Text
    hint: Text = ""
    is_misconfigured: Annotated[bool | None, FLAG.named("misconfigured").optional()] = None


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
        is_overdue: True if the zygote killed it because its broker hung; otherwise None.
        overran: The kernel because of which the zygote killed the worker, in words; "" if it killed the worker because
            of the deadline. None unless `is_overdue`.
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
        build: The build of the code that it runs, from `host.version.own_build`; "" from a version with only one build.
        handover: Its HANDOVER.
        sandbox: The sandbox settings of its workers, as on its command line.
        findings: The findings about the measures that its workers are under.
        wipes_heap: Whether the zygote and its workers overwrite memory that they free.
        answers_pings: Whether the zygote answers a Ping.
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
    """A worker that has not ended. `overran`: the kernel because of which the zygote ended its lease; "" for none."""

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
    """A worker that was reaped, and for which the zygote has received no WorkerForgotten.

    Attributes:
        reason: How it ended, in words.
        overran: The kernel because of which the zygote ended its lease; "" for none.
        page: The last state of its lease's page, without the cause; None if the page was not read.
        cause: The cause of the lease's end on that page.
        transfer: What the worker claimed about its session, see `Transfer`; None from an older zygote.
    """

    OP: ClassVar[str] = "ended"
    serial: Serial
    pid: Pid
    reason: Text
    spec: Spec
    overran: Text = ""
    page: Annotated[PageState | None, converted(_page, _page_map).optional()] = None
    cause: Annotated[str | None, TEXT.optional()] = None
    transfer: Annotated[Transfer | None, one_of(Transfer).optional()] = None

    @property
    def last_page(self) -> PageState | None:
        """The last state of the lease's page, with the cause."""
        return None if self.page is None else self.page._replace(cause=self.cause or "")


@dataclass(frozen=True, slots=True)
class HandoverDone(Message):
    """The zygote has reported all its workers. Only ordinary messages follow on the channel."""

    OP: ClassVar[str] = "told"


# --- broker to worker; the lease of a warm worker is a WorkerSpec ---


@dataclass(frozen=True, slots=True)
class AttachOrder(Message):
    """A connection of a tenant or a guest, for the worker's session.

    Attributes:
        request_id: The id of the request that the worker must answer.
        rest: Bytes that the tenant sent after that request.
        ring: Whether the tenant asks for a ring.
        arena_bytes: Size of the arena that the tenant asks for; 0 for none.
        is_stranger: Whether the client may belong to another tenant than the lease's; True from a broker that does not
          send it.
        guest: The terms of the guest's token; None for the lease's own tenant.
        owns: Whether everything that the connection makes in the session ends with the connection.
        client_pid: The client's process on this host; 0 if unknown.
        words: Whether the tenant asks for the session's words.
        second: The terms of the connection's second token; None if it has none.
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
    second: Annotated[Guest | None, converted(Guest.from_message, Guest.to_message).optional()] = None


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
    """The session's regions page. A broker that has taken the worker over sends a new page.

    Before it uses the new page, the worker reads the earlier page one last time: a region that had ended there has
    ended.
    """

    OP: ClassVar[str] = "regions"


@dataclass(frozen=True, slots=True)
class LatencyWord(Message):
    """The latency word of a session on the card. It replaces an earlier word with the same number.

    The worker maps the word until its session ends. It holds back for the word once its lease's page has the bit of
    this number.

    Attributes:
        number: The word's number, which is also the position of its bit; less than `control_page.MAX_LATENCY_WORDS`.
        is_own: Whether this is the session's own word, which the worker writes.
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

# The broker gives each park of a session a number that is larger than all earlier ones. Every message here except
# ParkMemoryOrder and CopyAheadOrder has the number of its park. The worker ignores an order that names another park
# than the current one, and the broker ignores such a report. Both sides may repeat messages. The worker answers an
# order again that it has already carried out, so a broker that takes a worker over can simply send the order for the
# state that it needs.


@dataclass(frozen=True, slots=True)
class ParkMemoryOrder(Message):
    """Host memory for the session's bytes: a sealed memfd of that size. It replaces the worker's earlier host memory.

    The worker maps the memory and, between requests, prepares it for fast copies. It keeps the memory, parked or not,
    until the next such order. An order without a descriptor makes the worker drop its host memory. The worker ignores
    the order while the session is parked. The memory exists for as long as the broker's descriptor or the worker's
    mapping. The worker does not reply.
    """

    OP: ClassVar[str] = "park_memory"
    size_bytes: Annotated[int, U64.named("size")] = 0


@dataclass(frozen=True, slots=True)
class CopyAheadOrder(Message):
    """Copy the session's pages to its host memory while it is idle, because it may be parked soon.

    The session stays on the card, and the park copies what is left. If the session is used before the park, the worker
    forgets the copy, and waits for another such order. Workers of earlier versions ignore it. The worker does not
    reply.
    """

    OP: ClassVar[str] = "copy_ahead"


@dataclass(frozen=True, slots=True)
class ParkOrder(Message):
    """Copy the session's pages to its host memory, and release them; the worker answers with Parked or ParkRefused.

    Attributes:
        number: The park's number.
        until_ns: How long the worker waits for the session's launches to end, on the monotonic clock. If they run
            longer, the worker copies nothing and refuses.
        in_place: Whether the pages are to stay on the card, because the session moves directly to another card. A
            worker that can't lend its pages, such as one of an earlier version, parks the session as usual.
    """

    OP: ClassVar[str] = "park"
    number: Annotated[int, U64]
    until_ns: Annotated[int, U64.named("until")]
    in_place: Annotated[bool, FLAG] = False


@dataclass(frozen=True, slots=True)
class ReturnOrder(Message):
    """Take pages, copy the session's bytes back, and continue; the worker answers with Returned or ReturnFailed."""

    OP: ClassVar[str] = "return"
    number: Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class RefuseReturn(Message):
    """The broker found no room: the worker refuses the waiting requests as BUSY, with `reason`, and stays parked.

    A later request makes the worker ask for the return again.
    """

    OP: ClassVar[str] = "no_return"
    number: Annotated[int, U64]
    reason: Text


# A parked session may also leave its process. The worker sends the session's image through a channel that the broker
# made for it, and the broker keeps the image until another worker adopts it. After sending the image, the worker serves
# nothing until the broker kills it or orders it to stay.


@dataclass(frozen=True, slots=True)
class LeaveOrder(Message):
    """Send the parked session's image through the channel that comes with this order. Then serve no connection.

    The worker answers with Imaged once everything is in the channel, or with LeaveRefused. If `carries`, the session
    returns in another process at once. Requests that wait for the return are then part of the image, so the worker does
    not refuse because of them.

    Attributes:
        by_ring: Whether a session that is parked in place lends its pages through a ring, and not by descriptors,
            because the other card can't read this one's memory.
    """

    OP: ClassVar[str] = "leave"
    number: Annotated[int, U64]
    carries: Annotated[bool, FLAG] = False
    by_ring: Annotated[bool, FLAG] = False


@dataclass(frozen=True, slots=True)
class StayOrder(Message):
    """Forget the image that was sent, and serve the session again, parked as before. The worker does not reply."""

    OP: ClassVar[str] = "stay"
    number: Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class AdoptOrder(Message):
    """Become the worker of a session. The channel that comes with this order has the session's complete image.

    The worker then brings the session back, and answers with Returned or ReturnFailed.

    Attributes:
        refusal: Why the worker must leave the session parked and answer with ReturnFailed; None to bring it back.
    """

    OP: ClassVar[str] = "adopt"
    number: Annotated[int, U64]
    connections: Annotated[int, integer(0, MAX_IMAGE_CONNECTIONS)]
    refusal: Annotated[str | None, TEXT.optional()] = None


@dataclass(frozen=True, slots=True)
class ImageMemory(Message):
    """The image, and the session's host memory: two sealed memfds of these sizes.

    Attributes:
        version: The image's version (`session_image.IMAGE_VERSIONS`). Workers that support only version 1 do not send
            it.
        pages: How many descriptors of pages follow in ImagePages.
        in_place: Whether the former worker parked the session in place. If so, these pages contain their bytes, and the
            host memory contains only the bytes of the other pages.
        by_ring: Whether the one descriptor in ImagePages is of a ring (host/copy_ring.py), which the former worker
            fills with the bytes of all pages.
    """

    OP: ClassVar[str] = "image"
    image_bytes: Annotated[int, U64.named("image")]
    host_bytes: Annotated[int, U64.named("host")]
    version: Annotated[int, U64] = 1
    pages: Annotated[int, integer(0, MAX_LENT_PAGES)] = 0
    in_place: Annotated[bool, FLAG] = False
    by_ring: Annotated[bool, FLAG] = False


@dataclass(frozen=True, slots=True)
class ImagePages(Message):
    """Some of the session's pages, which its former worker still holds, as descriptors that come with this message."""

    OP: ClassVar[str] = "image_pages"


@dataclass(frozen=True, slots=True)
class ImageConnection(Message):
    """A connection of the session. Its socket comes with it, and its ring and its arena if it has them."""

    OP: ClassVar[str] = "image_connection"
    has_ring: Annotated[bool, FLAG.named("ring")]
    has_arena: Annotated[bool, FLAG.named("arena")]


# --- worker to broker ---


@dataclass(frozen=True, slots=True)
class RegionOpenedReport(Message):
    """A region's memory is mapped at this device address and filled with zeros."""

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
        shown_bytes: By how many bytes the driver's figure of free memory grew during the operation. Other processes
          also change that figure.
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
    """The session released an ended region's address, and the region's last bytes are free on the card."""

    OP: ClassVar[str] = "region_released"
    region_id: LeaseNumber


@dataclass(frozen=True, slots=True)
class ForwardRevokedReport(Message):
    """A launch was refused because of a region that it named.

    Attributes:
        status: The number of the refusal's status without its minus sign.
        kernel: The kernel's name; "" for a graph of several kernels.
        site: Number of the launch in its burst or graph.
        position: The position that the launch passed; 0 without one.
        flipped_ns: When the broker changed the region's state word, on the monotonic clock.
        seen_ns: When the worker read the changed word.
        told_ns: When the worker replied with the refusal, or was notified that the client had raised it; 0 if the
            tenant has made no request since.
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
    """The session's slice now has this size. `doubt` is the reason why that is not the ordered size; "" if it is."""

    OP: ClassVar[str] = "resized"
    size_bytes: Annotated[int, U64.named("size")]
    doubt: Text


class ParkRefusal(Enum):
    """Why a session was not parked. Its bytes stay where they were, and it continues.

    Attributes:
        RUNNING: Something that it launched did not end in time.
        REGIONS: One of the session's regions is being opened or ended.
        NO_MEMORY: It has no host memory, or too little: `ParkRefusedReport.needed_bytes` is the amount that it needs.
        NOT_PARKABLE: Its lease is not parkable.
        LOST: Its context is lost.
        OVER: The lease has ended meanwhile.
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
        moved_bytes: Bytes of the pages, including those of regions.
        shown_bytes: By how many bytes the driver's figure of free memory grew during the operation. Other processes
          also change that figure.
        waited_ns: Time spent waiting for outstanding work.
        copied_ns: Time to copy the bytes, and to prepare host memory that was not prepared before.
        released_ns: Time to unmap and release the pages.
        kept_bytes: Bytes charged to the slice that stay on the card: modules, kernels' local memory, streams, graphs.
        in_place: Whether all bytes stay on the card, as ordered.
        ahead_bytes: Bytes of `moved_bytes` that were copied before the order.
    """

    OP: ClassVar[str] = "parked"
    number: Annotated[int, U64]
    moved_bytes: Annotated[int, U64.named("moved")]
    shown_bytes: Annotated[int, integer(-(1 << 63), (1 << 63) - 1).named("shown")]
    waited_ns: Annotated[int, U64.named("waited")]
    copied_ns: Annotated[int, U64.named("copied")]
    released_ns: Annotated[int, U64.named("released")]
    kept_bytes: Annotated[int, U64.named("kept")] = 0
    in_place: Annotated[bool, FLAG] = False
    ahead_bytes: Annotated[int, U64.named("ahead")] = 0


@dataclass(frozen=True, slots=True)
class ParkRefusedReport(Message):
    """The session is not parked.

    Attributes:
        why: The kind of reason.
        reason: The reason, a clause for the log.
        needed_bytes: The smallest host memory with which it can be parked.
    """

    OP: ClassVar[str] = "park_refused"
    number: Annotated[int, U64]
    why: Annotated[ParkRefusal, one_of(ParkRefusal)]
    reason: Text
    needed_bytes: Annotated[int, U64.named("needed")]


@dataclass(frozen=True, slots=True)
class ReturnWantedReport(Message):
    """A request waits for the parked session. The worker repeats this every second until it can serve the request."""

    OP: ClassVar[str] = "return_wanted"
    number: Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class ReturnedReport(Message):
    """The session's bytes are on the card again.

    Attributes:
        moved_bytes: Bytes of its pages.
        mapped_ns: Time to take and map the pages.
        copied_ns: Time to copy the bytes.
    """

    OP: ClassVar[str] = "returned"
    number: Annotated[int, U64]
    moved_bytes: Annotated[int, U64.named("moved")]
    mapped_ns: Annotated[int, U64.named("mapped")]
    copied_ns: Annotated[int, U64.named("copied")]


@dataclass(frozen=True, slots=True)
class ReturnFailedReport(Message):
    """The session could not return; `reason` is a clause for the log.

    Either the session is parked as before and holds none of its pages on the card, or its context is lost, which
    Faulted reports.

    Attributes:
        is_mismatch: Whether the worker could not adopt the session's image because something in it would be different,
            or at another address, in this process.
    """

    OP: ClassVar[str] = "return_failed"
    number: Annotated[int, U64]
    reason: Text
    is_mismatch: Annotated[bool, FLAG.named("mismatch")] = False


@dataclass(frozen=True, slots=True)
class ParkedRegion:
    """A region of a session that has left its process.

    Attributes:
        at: Its offset in the session's host memory.
        kept_bytes: Bytes that stay mapped in its place when it ends.
    """

    region_id: int
    at: int
    size_bytes: int
    kept_bytes: int


PARKED_REGION: Final = row(ParkedRegion, region_id=LEASE_NUMBER, at=U64, size_bytes=U64, kept_bytes=U64)


@dataclass(frozen=True, slots=True)
class ImagedReport(Message):
    """The session's image is in the channel of LeaveOrder.

    Attributes:
        connections: The number of connections in the image.
        is_awaited: Whether requests wait for the session's return.
        regions: The regions that have not ended. If one ends while no worker has the session, the broker wipes its
            bytes.
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
        reason: The reason, a clause for reports.
        is_lasting: Whether the reason is permanent, such as something that the session contains, and not only that it
            is busy now.
    """

    OP: ClassVar[str] = "leave_refused"
    number: Annotated[int, U64]
    reason: Text
    is_lasting: Annotated[bool, FLAG.named("lasting")]


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The process can do its work.

    A worker has its context: it can take connections, or a lease if it was made ahead of one. A helper can serve.
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
    """The worker has received a connection from its channel, and has admitted or refused it.

    Attributes:
        guest: The mark of the guest's token; None for the lease's own tenant.
        is_in: Whether a connection with a token was admitted; None for one without.
        second: The mark of the connection's second token; None if it has none.
    """

    OP: ClassVar[str] = "attached"
    guest: Annotated[int | None, U64.optional()] = None
    is_in: Annotated[bool | None, FLAG.optional()] = None
    second: Annotated[int | None, U64.optional()] = None


@dataclass(frozen=True, slots=True)
class LastLeft(Message):
    OP: ClassVar[str] = "left"


@dataclass(frozen=True, slots=True)
class MemoryGrew(Message):
    """The driver may hold more of the card's memory for the worker, so the broker must poll the card."""

    OP: ClassVar[str] = "look"


# --- helper process to broker ---


@dataclass(frozen=True, slots=True)
class HelperPrepared(Message):
    """The helper has its settings, and will serve once the broker has connected it."""

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
    | CopyAheadOrder
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

ImageMessage = ImageMemory | ImagePages | ImageConnection
IMAGE_MESSAGES: Final[Mapping[str, type[ImageMessage]]] = messages_of(ImageMessage)

FromHelper = HelperPrepared | Ready | HelperBroken | Pong
FROM_HELPER: Final[Mapping[str, type[FromHelper]]] = messages_of(FromHelper)
