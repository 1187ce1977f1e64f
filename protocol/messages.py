"""The bodies of all messages on the wire. Each is a frozen dataclass; its fields also define the encoding.

`operations.py` says which operation has which body. An error reply has an `ErrorBody`, whatever its operation.
"""

from dataclasses import Field
from typing import Any, ClassVar

from gpulease.protocol import limits
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.primitives import (
    I16,
    LEASE_PARAMETERS,
    REPORT,
    TLVS,
    U8,
    U16,
    U32,
    U64,
    U128,
    LeaseParameter,
    Record,
    Tlv,
    list_of,
    optional,
    sized_bytes,
    text,
    wire,
)


class Body:
    """The base of all payloads of frames, which are dataclasses."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


# --- every operation ---
# Every reply may be an error reply instead; its body is the same for all operations.


@dataclass(frozen=True, slots=True)
class Empty(Body):
    """A payload of no bytes: the request or the reply consists of its header."""


@dataclass(frozen=True, slots=True)
class ErrorBody(Body):
    """The reason of a failure: a message for people, and `ErrorTlv`s for programs."""

    message: str = wire(text(limits.MAX_ERROR_TEXT_BYTES))
    details: tuple[Tlv, ...] = wire(TLVS)


# --- the connection ---
# A connection begins with Hello, and a session or a submit with Attach or GpuSubmit. Their options are TLVs, so a later
# version can add one that older peers skip.


@dataclass(frozen=True, slots=True)
class Hello(Body):
    """The first request on a connection. `features` are the bits that the client offers; none exists yet."""

    features: int = wire(U32)
    agent: str = wire(text())
    options: tuple[Tlv, ...] = wire(TLVS)


@dataclass(frozen=True, slots=True)
class HelloReply(Body):
    """The daemon's name, the `features` agreed on, and the largest payload that it accepts in a session frame."""

    features: int = wire(U32)
    agent: str = wire(text())
    max_payload_bytes: int = wire(U32)
    options: tuple[Tlv, ...] = wire(TLVS)


@dataclass(frozen=True, slots=True)
class Ping(Body):
    """A request that changes nothing: its reply has the same number, so a sender can match the two."""

    nonce: int = wire(U64)


@dataclass(frozen=True, slots=True)
class Attach(Body):
    """Make this connection the session of the header's session id. No control request may follow."""

    options: tuple[Tlv, ...] = wire(TLVS)


@dataclass(frozen=True, slots=True)
class AttachReply(Body):
    """The worker's description of the session.

    The `options` are its abilities, and the shared memory that it provides.
    """

    slice_bytes: int = wire(U64)
    driver: str = wire(text())
    card_uuid: str = wire(text())
    options: tuple[Tlv, ...] = wire(TLVS)


# --- the node ---
# Requests to the broker about the node as a whole. The sender needs no lease.


@dataclass(frozen=True, slots=True)
class InventoryEntry:
    """A card in 36 bytes: its UUID's 128 bits, resource type, `InventoryFlag`s, total bytes and grantable bytes."""

    id: int = wire(U128)
    type: int = wire(U16)
    flags: int = wire(U16)
    capacity_bytes: int = wire(U64)
    available_bytes: int = wire(U64)


@dataclass(frozen=True, slots=True)
class Inventory(Body):
    """All cards; `details` is a list of maps in the same order (name, uuid, index, leases, fenced_bytes ...)."""

    entries: tuple[InventoryEntry, ...] = wire(list_of(Record(InventoryEntry), 0xFFFF))
    details: Any = wire(REPORT)


@dataclass(frozen=True, slots=True)
class Report(Body):
    """A msgpack value: a map for LEASE_QUERY and HEALTH, a list of maps for LEASE_LIST_ACTIVE."""

    report: Any = wire(REPORT)


@dataclass(frozen=True, slots=True)
class Metrics(Body):
    """The node's metrics for an HTTP server to pass on: the media type, and the text, which is never truncated."""

    content_type: str = wire(text())
    exposition: str = wire(text(limits.MAX_METRICS_BYTES))


@dataclass(frozen=True, slots=True)
class Drain(Body):
    """Grant no more leases, and end those that remain in `within_ms` milliseconds; operators only."""

    within_ms: int = wire(U32)


@dataclass(frozen=True, slots=True)
class CardDrain(Body):
    """Drain one card, by its UUID or index, as `Drain` does the node; without `within_ms`, end its drain.

    For operators only.
    """

    device: str = wire(text())
    within_ms: int | None = wire(optional(U32))


@dataclass(frozen=True, slots=True)
class DrainStatus(Body):
    """Milliseconds until the drain ends the remaining leases, None without a drain; the number of active leases."""

    left_ms: int | None = wire(optional(U32))
    leases: int = wire(U32)


@dataclass(frozen=True, slots=True)
class FenceClear(Body):
    """Grant fenced bytes again, of one card (UUID or index) or of all; operators only."""

    device: str | None = wire(optional(text()))


@dataclass(frozen=True, slots=True)
class FenceCleared(Body):
    """The number of cleared slices: of leases, and of warm contexts without a lease."""

    count: int = wire(U32)


# --- a fleet's directory ---
# Requests to a directory, which grants nothing: the tenant then requests a lease from the nodes that it names.


@dataclass(frozen=True, slots=True)
class Place(Body):
    """Ask a fleet's directory which nodes may grant a lease of `size_bytes`; the client then sends them LEASE_ALLOC.

    `labels` are texts `KEY=VALUE` that a node must have. `device` is a card's UUID or index. `tried` are the ids of
    nodes that have already refused.
    """

    size_bytes: int = wire(U64)
    exclusivity: int = wire(U8)
    name: str = wire(text())
    labels: tuple[str, ...] = wire(list_of(text(), limits.MAX_LABELS))
    device: str | None = wire(optional(text()))
    tried: tuple[str, ...] = wire(list_of(text(), limits.MAX_TRIED))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node of a fleet, and its addresses in the order in which to try them."""

    node_id: str = wire(text())
    addresses: tuple[str, ...] = wire(list_of(text(), limits.MAX_NODE_ADDRESSES))


@dataclass(frozen=True, slots=True)
class Placement(Body):
    """The nodes to ask, in order. `holder` is the node that serves the name; None if none does, or if it is secret.

    The directory's data may be seconds old, so each node decides for itself. `nodes` is the number of the fleet's
    nodes. `why` says why no node is a candidate; "" if any is.
    """

    candidates: tuple[Candidate, ...] = wire(list_of(Record(Candidate), limits.MAX_CANDIDATES))
    holder: str | None = wire(optional(text()))
    nodes: int = wire(U32)
    why: str = wire(text())


# --- leases ---
# A lease's life: LEASE_ALLOC, renewals, and its free or revocation. Times are in milliseconds from the message on,
# because the two clocks differ.


@dataclass(frozen=True, slots=True)
class LeaseAlloc(Body):
    """Ask for `size_bytes` for `ttl_ms`, waiting up to `wait_ms` for room. `device` is a card's UUID or index."""

    resource_type: int = wire(U16)
    size_bytes: int = wire(U64)
    ttl_ms: int = wire(U32)
    wait_ms: int = wire(U32)
    device: str | None = wire(optional(text()))
    parameters: tuple[LeaseParameter, ...] = wire(LEASE_PARAMETERS)


@dataclass(frozen=True, slots=True)
class LeaseGrant(Body):
    """A granted lease. `expires_at_unix_s` is for display; the daemon's deadline is monotonic, `ttl_ms` from now."""

    lease_id: int = wire(U128)
    generation: int = wire(U64)
    size_bytes: int = wire(U64)
    ttl_ms: int = wire(U32)
    expires_at_unix_s: int = wire(U64)
    exclusivity: int = wire(U8)
    card_uuid: str = wire(text())


@dataclass(frozen=True, slots=True)
class LeaseRenew(Body):
    """Make a lease last at least `ttl_ms` from now."""

    lease_id: int = wire(U128)
    ttl_ms: int = wire(U32)


@dataclass(frozen=True, slots=True)
class LeaseRenewed(Body):
    """The lease's new generation and time left."""

    generation: int = wire(U64)
    ttl_ms: int = wire(U32)
    expires_at_unix_s: int = wire(U64)


@dataclass(frozen=True, slots=True)
class LeaseRef(Body):
    """The id of a lease, for requests such as LEASE_FREE and LEASE_QUERY."""

    lease_id: int = wire(U128)


@dataclass(frozen=True, slots=True)
class LeaseRevoke(Body):
    """End a lease even while work is in flight; operators only."""

    lease_id: int = wire(U128)
    reason: str = wire(text())


@dataclass(frozen=True, slots=True)
class LeaseRevoked(Body):
    """A `RevokeOutcome`, sent once the teardown has ended."""

    outcome: int = wire(U8)


@dataclass(frozen=True, slots=True)
class LeaseSubscribe(Body):
    """Subscribe to a lease's phases. Lease 0 stands for every lease that LEASE_LIST_ACTIVE shows this peer."""

    lease_id: int = wire(U128)


@dataclass(frozen=True, slots=True)
class LeaseUnsubscribe(Body):
    """End a subscription. `subscription` is the request id of its LEASE_SUBSCRIBE."""

    subscription: int = wire(U64)


@dataclass(frozen=True, slots=True)
class LeaseEvent(Body):
    """A lease's present phase. `sequence` numbers a subscription's events from 1, including those `lost`."""

    lease_id: int = wire(U128)
    sequence: int = wire(U64)
    lost: int = wire(U64)
    phase: int = wire(U8)
    left_ms: int = wire(U32)
    generation: int = wire(U64)
    cause: str = wire(text())
    reason: str = wire(text())


# --- regions ---
# A region is a part of a lease's memory with its own end. The broker opens and ends it; the session's words show this
# to the session's worker and its clients.


@dataclass(frozen=True, slots=True)
class RegionOpen(Body):
    """Open a region of `size_bytes` in the active lease `lease_id`, for `tenant`; "" means the sender.

    The size is rounded up to the session's granularity, and charged to the lease's slice.
    """

    lease_id: int = wire(U128)
    size_bytes: int = wire(U64)
    ttl_ms: int = wire(U32)
    tenant: str = wire(text())


@dataclass(frozen=True, slots=True)
class RegionGrant(Body):
    """An open region, itself a lease. `slot` and `number` name it in region sets; `address` is its device address."""

    lease_id: int = wire(U128)
    generation: int = wire(U64)
    size_bytes: int = wire(U64)
    ttl_ms: int = wire(U32)
    expires_at_unix_s: int = wire(U64)
    address: int = wire(U64)
    slot: int = wire(U16)
    number: int = wire(U32)


@dataclass(frozen=True, slots=True)
class RegionCancel(Body):
    """Refuse launches that name a region (`is_cancelled` 1), or accept them again (0). The region does not end."""

    lease_id: int = wire(U128)
    is_cancelled: int = wire(U8)


@dataclass(frozen=True, slots=True)
class LeaseResize(Body):
    """Give a running lease's slice another size. Also the reply, with the new size."""

    lease_id: int = wire(U128)
    size_bytes: int = wire(U64)


@dataclass(frozen=True, slots=True)
class ParkedSession(Body):
    """A parked lease's session, with the number of its bytes that are in the host's memory."""

    lease_id: int = wire(U128)
    moved_bytes: int = wire(U64)


@dataclass(frozen=True, slots=True)
class LeaseMove(Body):
    """Move a parkable lease's session to another card, by its UUID or index. None: only to the host's memory."""

    lease_id: int = wire(U128)
    device: str | None = wire(optional(text()))


@dataclass(frozen=True, slots=True)
class MovedSession(Body):
    """A moved session: the card that its lease is on, the bytes of its pages, and the time that the move took."""

    lease_id: int = wire(U128)
    card_uuid: str = wire(text())
    moved_bytes: int = wire(U64)
    took_us: int = wire(U64)


@dataclass(frozen=True, slots=True)
class LeaseNote(Body):
    """Write a record about a lease or region to the node's audit log: `note` is one JSON object in canonical form."""

    lease_id: int = wire(U128)
    note: bytes = wire(sized_bytes(limits.MAX_NOTE_BYTES))


@dataclass(frozen=True, slots=True)
class RegionEvent(Body):
    """A launch was refused because a region that it named had ended or was cancelled.

    `lease_id` is the region's, `status` is the refusal's, `site` is the launch's index in its burst or graph, and
    `position` is the number that the client passed with the launch. `flipped_ns` and `seen_ns` are times on the host's
    monotonic clock: when the broker changed the region's word, and when the session noticed the change. `sequence`
    numbers a subscription's events from 1, including those `lost`.
    """

    lease_id: int = wire(U128)
    sequence: int = wire(U64)
    lost: int = wire(U64)
    status: int = wire(I16)
    kernel: str = wire(text(limits.MAX_KERNEL_NAME_BYTES))
    site: int = wire(U32)
    position: int = wire(U64)
    flipped_ns: int = wire(U64)
    seen_ns: int = wire(U64)


# --- tokens ---
# A token gives its holder permissions on one lease.


@dataclass(frozen=True, slots=True)
class CapabilityIssue(Body):
    """Request a token with `Permission` bits. Audience b"" is the sender's own; nonce 0 lets the daemon choose one."""

    lease_id: int = wire(U128)
    permissions: int = wire(U32)
    audience: bytes = wire(sized_bytes(limits.AUDIENCE_BYTES))
    ttl_ms: int = wire(U32)
    nonce: int = wire(U128)


@dataclass(frozen=True, slots=True)
class CapabilityGrant(Body):
    """A token. `public_key` is the signer's; with it a holder can narrow the token offline."""

    token: bytes = wire(sized_bytes(limits.MAX_TOKEN_BYTES))
    public_key: bytes = wire(sized_bytes(limits.PUBLIC_KEY_BYTES))
    generation: int = wire(U64)
    ttl_ms: int = wire(U32)
    expires_at_unix_s: int = wire(U64)


@dataclass(frozen=True, slots=True)
class CapabilityPresent(Body):
    """A token that permits requests for the rest of this control connection."""

    token: bytes = wire(sized_bytes(limits.MAX_TOKEN_BYTES))


@dataclass(frozen=True, slots=True)
class CapabilityHeld(Body):
    """The permissions of a presented token, after all its narrowings."""

    lease_id: int = wire(U128)
    permissions: int = wire(U32)
    generation: int = wire(U64)
    ttl_ms: int = wire(U32)
    expires_at_unix_s: int = wire(U64)


@dataclass(frozen=True, slots=True)
class CapabilityRevoke(Body):
    """End a token and the tokens narrowed from it: `token`, or, if that is empty, the token of that lease and nonce."""

    lease_id: int = wire(U128)
    nonce: int = wire(U128)
    token: bytes = wire(sized_bytes(limits.MAX_TOKEN_BYTES))


@dataclass(frozen=True, slots=True)
class Audience(Body):
    """The node's name for the peer. A token's future holder gives it to the tenant who requests the token."""

    audience: bytes = wire(sized_bytes(limits.AUDIENCE_BYTES))


# --- memory and streams ---
# From here on the session's worker serves the requests. A handle is a number that this worker assigned.


@dataclass(frozen=True, slots=True)
class MemAlloc(Body):
    """Allocate this many bytes of the slice. The reply is a `Handle`, the device address."""

    size_bytes: int = wire(U64)


@dataclass(frozen=True, slots=True)
class Handle(Body):
    """A device pointer (of MEM_...), module (MODULE_...), stream (STREAM_...) or graph (GRAPH_...).

    Of USE_TOKEN, 1 for the second token, else 0.
    """

    handle: int = wire(U64)


@dataclass(frozen=True, slots=True)
class MemWrite(Body):
    """Write bytes at `offset` of an allocation."""

    handle: int = wire(U64)
    offset: int = wire(U64)
    data: bytes = wire(sized_bytes(limits.MAX_DATA_BYTES))


@dataclass(frozen=True, slots=True)
class MemRead(Body):
    """Read at most MAX_DATA_BYTES of an allocation."""

    handle: int = wire(U64)
    offset: int = wire(U64)
    length: int = wire(U64)


@dataclass(frozen=True, slots=True)
class Data(Body):
    """The bytes that MEM_READ asked for, exactly `length` of them."""

    data: bytes = wire(sized_bytes(limits.MAX_DATA_BYTES))


@dataclass(frozen=True, slots=True)
class ArenaCopy(Body):
    """Copy bytes between an allocation and the session's arena; the operation gives the direction."""

    handle: int = wire(U64)
    offset: int = wire(U64)
    arena_offset: int = wire(U64)
    length: int = wire(U64)


@dataclass(frozen=True, slots=True)
class MemKeep(Body):
    """Keep an allocation beyond its connection's end, under a name. "": it belongs to this connection from now on."""

    handle: int = wire(U64)
    name: str = wire(text(limits.MAX_KEPT_NAME_BYTES))


@dataclass(frozen=True, slots=True)
class KeptBuffer:
    """An allocation that is kept: its name, its device address, its size as allocated."""

    name: str = wire(text(limits.MAX_KEPT_NAME_BYTES))
    handle: int = wire(U64)
    size_bytes: int = wire(U64)


@dataclass(frozen=True, slots=True)
class KeptBuffers(Body):
    """All allocations that are kept, sorted by name."""

    buffers: tuple[KeptBuffer, ...] = wire(list_of(Record(KeptBuffer), limits.MAX_KEPT))


@dataclass(frozen=True, slots=True)
class Freed(Body):
    """How many bytes of the slice MEM_RESET freed, kept allocations included."""

    size_bytes: int = wire(U64)


@dataclass(frozen=True, slots=True)
class StreamWait(Body):
    """Order later work of `stream` after all work queued in `other` so far."""

    stream: int = wire(U64)
    other: int = wire(U64)


@dataclass(frozen=True, slots=True)
class EventRecord(Body):
    """Record when the work queued in a stream so far has run. The client chooses the number `event`."""

    stream: int = wire(U64)
    event: int = wire(U64)


@dataclass(frozen=True, slots=True)
class EventPair(Body):
    """Two recorded events, the earlier one first: EVENT_ELAPSED waits for both."""

    start: int = wire(U64)
    end: int = wire(U64)


@dataclass(frozen=True, slots=True)
class Elapsed(Body):
    """The time from one event to another, as the card measured it."""

    nanoseconds: int = wire(U64)


# --- modules and launches ---
# A module is loaded once; the replies contain what a client needs to check a launch before it sends it.


@dataclass(frozen=True, slots=True)
class ModuleLoad(Body):
    """An image to load: PTX as text, or a cubin. The worker recognises the format by the first bytes."""

    image: bytes = wire(sized_bytes(limits.MAX_PAYLOAD_BYTES))


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """A kernel of a module: its name, the most threads a block may have, its parameters' sizes in bytes."""

    name: str = wire(text(limits.MAX_KERNEL_NAME_BYTES))
    max_threads_per_block: int = wire(U32)
    parameter_sizes: tuple[int, ...] = wire(list_of(U32, limits.MAX_ARGUMENTS))


@dataclass(frozen=True, slots=True)
class ModuleLoaded(Body):
    """The module's handle and its kernels. Replies about all kernels of a module follow this order."""

    module: int = wire(U64)
    kernels: tuple[KernelEntry, ...] = wire(list_of(Record(KernelEntry), limits.MAX_KERNELS))


@dataclass(frozen=True, slots=True)
class ModuleParameters(Body):
    """The types of a module's parameters: for each kernel, in ModuleLoaded's order, one `ParameterType` per parameter.

    A kernel without type information has no bytes.
    """

    types: tuple[bytes, ...] = wire(list_of(sized_bytes(limits.MAX_ARGUMENTS), limits.MAX_KERNELS))


@dataclass(frozen=True, slots=True)
class VariableName(Body):
    """A variable that a module declares in device or constant memory, as PTX names it."""

    module: int = wire(U64)
    name: str = wire(text(limits.MAX_KERNEL_NAME_BYTES))


@dataclass(frozen=True, slots=True)
class Variable(Body):
    """The bytes of a module's variable: copies and launches take its address as an allocation's handle."""

    handle: int = wire(U64)
    size_bytes: int = wire(U64)


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """The resources of a kernel.

    Attributes:
        shared_bytes: Static shared memory per block.
        max_dynamic_shared_bytes: The most dynamic shared memory that a launch may request.
        registers: Registers per thread; 0 if the driver has none.
        local_bytes: Local memory per thread.
        constant_bytes: Constant memory that its module's code declares; 0 if the driver does not count it.
    """

    shared_bytes: int = wire(U32)
    max_dynamic_shared_bytes: int = wire(U32)
    registers: int = wire(U32)
    local_bytes: int = wire(U32)
    constant_bytes: int = wire(U32)


@dataclass(frozen=True, slots=True)
class ModuleFigures(Body):
    """The resources of a module's kernels, in ModuleLoaded's order."""

    kernels: tuple[KernelFigures, ...] = wire(list_of(Record(KernelFigures), limits.MAX_KERNELS))


@dataclass(frozen=True, slots=True)
class Printed(Body):
    """What kernels have printed since the last request. `is_lost` is 1 if some of it is missing, else 0."""

    data: bytes = wire(sized_bytes(limits.MAX_PRINTED_BYTES))
    is_lost: int = wire(U8)


@dataclass(frozen=True, slots=True)
class Launch(Body):
    """Queue a kernel. `args` are the arguments' little-endian bytes without gaps, `arg_sizes` their sizes."""

    module: int = wire(U64)
    kernel: str = wire(text(limits.MAX_KERNEL_NAME_BYTES))
    grid_x: int = wire(U32)
    grid_y: int = wire(U32)
    grid_z: int = wire(U32)
    block_x: int = wire(U32)
    block_y: int = wire(U32)
    block_z: int = wire(U32)
    shared_bytes: int = wire(U32)
    args: bytes = wire(sized_bytes(limits.MAX_ARGUMENT_BYTES))
    arg_sizes: tuple[int, ...] = wire(list_of(U32, limits.MAX_ARGUMENTS))


# --- graphs ---
# A graph's nodes are requests of other operations, recorded as they would be sent.


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A recorded operation of a graph, with its request body."""

    op: int = wire(U16)
    body: bytes = wire(sized_bytes(limits.MAX_GRAPH_NODE_BYTES))


@dataclass(frozen=True, slots=True)
class GraphParameter:
    """A value that each GRAPH_LAUNCH sets: a `ParameterKind`, and its size among a launch's argument bytes."""

    name: str = wire(text(limits.MAX_PARAMETER_NAME_BYTES))
    kind: int = wire(U8)
    size_bytes: int = wire(U32)


@dataclass(frozen=True, slots=True)
class GraphPlace:
    """An argument that takes a parameter's value: the parameter, the node, and the offset in the node's `args`."""

    parameter: int = wire(U16)
    node: int = wire(U16)
    at: int = wire(U32)


@dataclass(frozen=True, slots=True)
class GraphCreate(Body):
    """Record a sequence of operations once, to launch it many times. `buffers` are the allocations its launches use."""

    nodes: tuple[GraphNode, ...] = wire(list_of(Record(GraphNode), limits.MAX_GRAPH_NODES))
    buffers: tuple[int, ...] = wire(list_of(U64, limits.MAX_GRAPH_HANDLES))
    parameters: tuple[GraphParameter, ...] = wire(list_of(Record(GraphParameter), limits.MAX_GRAPH_PARAMETERS))
    places: tuple[GraphPlace, ...] = wire(list_of(Record(GraphPlace), limits.MAX_GRAPH_PLACES))


@dataclass(frozen=True, slots=True)
class GraphLaunch(Body):
    """Run a graph's nodes in order. `args` has the parameters' values; a buffer's is handle and offset, as two u64."""

    graph: int = wire(U64)
    args: bytes = wire(sized_bytes(limits.MAX_ARGUMENT_BYTES))


# --- launches in regions ---
# A region set is made once, so that a launch names any number of regions by one number.


@dataclass(frozen=True, slots=True)
class RegionRef:
    """A region by its slot, and the slot's number when the region was opened: a later region has another number."""

    slot: int = wire(U16)
    number: int = wire(U32)


@dataclass(frozen=True, slots=True)
class RegionSet(Body):
    """Name the regions that launches will touch, once for many launches."""

    regions: tuple[RegionRef, ...] = wire(list_of(Record(RegionRef), limits.MAX_REGIONS))


@dataclass(frozen=True, slots=True)
class RegionRefusal(Body):
    """Report that the client refused a launch or copy because of a region's word, so that others are notified.

    `slot` and `number` name the region as in `RegionRef`; `kernel` is "" for a copy and for a graph of several kernels;
    `position` is the number that the client passed with the launch.
    """

    slot: int = wire(U16)
    number: int = wire(U32)
    kernel: str = wire(text(limits.MAX_KERNEL_NAME_BYTES))
    position: int = wire(U64)


# Begins with the fields of `Launch`, so that the same code parses both (`fastpath.split_regions`).
@dataclass(frozen=True, slots=True)
class LaunchIn(Body):
    """A `Launch` that starts only if no region of the set has ended. If it is refused, the error has `position`."""

    module: int = wire(U64)
    kernel: str = wire(text(limits.MAX_KERNEL_NAME_BYTES))
    grid_x: int = wire(U32)
    grid_y: int = wire(U32)
    grid_z: int = wire(U32)
    block_x: int = wire(U32)
    block_y: int = wire(U32)
    block_z: int = wire(U32)
    shared_bytes: int = wire(U32)
    args: bytes = wire(sized_bytes(limits.MAX_ARGUMENT_BYTES))
    arg_sizes: tuple[int, ...] = wire(list_of(U32, limits.MAX_ARGUMENTS))
    region_set: int = wire(U64)
    position: int = wire(U64)


# Begins with the fields of `LaunchIn`, for the same reason.
@dataclass(frozen=True, slots=True)
class LaunchWith(Body):
    """A `Launch` with attributes; a `LaunchIn` too if `region_set` is not 0.

    Args:
        flags: `LaunchFlag` bits.
        cluster_x: Blocks per cluster in the first dimension; 0 in all three dimensions for no clusters.
    """

    module: int = wire(U64)
    kernel: str = wire(text(limits.MAX_KERNEL_NAME_BYTES))
    grid_x: int = wire(U32)
    grid_y: int = wire(U32)
    grid_z: int = wire(U32)
    block_x: int = wire(U32)
    block_y: int = wire(U32)
    block_z: int = wire(U32)
    shared_bytes: int = wire(U32)
    args: bytes = wire(sized_bytes(limits.MAX_ARGUMENT_BYTES))
    arg_sizes: tuple[int, ...] = wire(list_of(U32, limits.MAX_ARGUMENTS))
    region_set: int = wire(U64)
    position: int = wire(U64)
    flags: int = wire(U32)
    cluster_x: int = wire(U32)
    cluster_y: int = wire(U32)
    cluster_z: int = wire(U32)


@dataclass(frozen=True, slots=True)
class GraphLaunchIn(Body):
    """A `GraphLaunch` that starts only if no region of the set has ended; see `LaunchIn`."""

    graph: int = wire(U64)
    args: bytes = wire(sized_bytes(limits.MAX_ARGUMENT_BYTES))
    region_set: int = wire(U64)
    position: int = wire(U64)


# --- submits ---
# A submit is a job of one kernel in a process of its own: GPU_SUBMIT, SUBMIT_RUN, and the connection ends.


@dataclass(frozen=True, slots=True)
class GpuSubmit(Body):
    """Make this connection a submit on the lease of the header's session id: one kernel in a context of its own.

    GPU_SUBMIT is the last control request of a connection. `timeout_ms` bounds the submit's time, from the reply on.
    """

    timeout_ms: int = wire(U32)
    options: tuple[Tlv, ...] = wire(TLVS)


@dataclass(frozen=True, slots=True)
class SubmitArgument:
    """An argument: `kind` is an `ArgumentKind`, `data` is for VALUE, INPUT and INOUT, `size_bytes` is for OUTPUT."""

    kind: int = wire(U8)
    size_bytes: int = wire(U64)
    data: bytes = wire(sized_bytes(limits.MAX_PAYLOAD_BYTES))


@dataclass(frozen=True, slots=True)
class SubmitRun(Body):
    """Load an image, run one of its kernels, and reply with the outputs; sent once per connection."""

    kernel: str = wire(text(limits.MAX_KERNEL_NAME_BYTES))
    grid_x: int = wire(U32)
    grid_y: int = wire(U32)
    grid_z: int = wire(U32)
    block_x: int = wire(U32)
    block_y: int = wire(U32)
    block_z: int = wire(U32)
    shared_bytes: int = wire(U32)
    arguments: tuple[SubmitArgument, ...] = wire(list_of(Record(SubmitArgument), limits.MAX_SUBMIT_ARGUMENTS))
    image: bytes = wire(sized_bytes(limits.MAX_PAYLOAD_BYTES))


@dataclass(frozen=True, slots=True)
class SubmitDone(Body):
    """The contents of the OUTPUT and INOUT arguments after the kernel, in their order."""

    outputs: tuple[bytes, ...] = wire(list_of(sized_bytes(limits.MAX_SUBMIT_OUTPUT_BYTES), limits.MAX_SUBMIT_ARGUMENTS))
