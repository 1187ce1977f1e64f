"""The bodies of tokens' operations; see `messages`.

The bodies of launch graphs; see `messages`.

The bodies of leases' events, of drains and of fences; see `messages`.

The bodies of what an operator, or a program of theirs, asks of the node as a whole; see `messages`.

The bodies of submits; see `messages`.

Every body on the wire: one frozen dataclass each, which is also its construct definition.

All are named here, wherever they stand.

`BODIES` says which class a frame's payload is, by operation and direction. An error reply's payload is `ErrorBody`
whatever its operation.
"""

from dataclasses import dataclass
from typing import Any, Final

from gpulease.protocol import limits
from gpulease.protocol.opcodes import Opcode
from gpulease.protocol.primitives import (
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


@dataclass(frozen=True, slots=True)
class CapabilityIssue:
    """Ask for a token: `Permission` bits, whose it is to be (empty: the asker's own), a nonce (0: any)."""

    lease_id: int = wire(U128)
    permissions: int = wire(U32)
    audience: bytes = wire(sized_bytes(limits.AUDIENCE_BYTES))
    ttl_ms: int = wire(U32)
    nonce: int = wire(U128)


@dataclass(frozen=True, slots=True)
class CapabilityGrant:
    """A token. `public_key` is the signer's: with it a holder can narrow the token without asking anybody."""

    token: bytes = wire(sized_bytes(limits.MAX_TOKEN_BYTES))
    public_key: bytes = wire(sized_bytes(limits.PUBLIC_KEY_BYTES))
    generation: int = wire(U64)
    ttl_ms: int = wire(U32)
    expires_at_unix_s: int = wire(U64)


@dataclass(frozen=True, slots=True)
class CapabilityPresent:
    """A token that is to count for the rest of this control connection."""

    token: bytes = wire(sized_bytes(limits.MAX_TOKEN_BYTES))


@dataclass(frozen=True, slots=True)
class CapabilityHeld:
    """What a presented token permits, all its narrowings taken into account."""

    lease_id: int = wire(U128)
    permissions: int = wire(U32)
    generation: int = wire(U64)
    ttl_ms: int = wire(U32)
    expires_at_unix_s: int = wire(U64)


@dataclass(frozen=True, slots=True)
class CapabilityRevoke:
    """End one token, and what was narrowed from it: `token`, or if that is empty the one of that lease and nonce."""

    lease_id: int = wire(U128)
    nonce: int = wire(U128)
    token: bytes = wire(sized_bytes(limits.MAX_TOKEN_BYTES))


@dataclass(frozen=True, slots=True)
class Audience:
    """The name that this node has for the peer: who is to get a token tells it to whoever asks for one."""

    audience: bytes = wire(sized_bytes(limits.AUDIENCE_BYTES))


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One operation of a graph, with the body it has as a request: LAUNCH, MEM_WRITE, ARENA_WRITE or ARENA_READ."""

    op: int = wire(U16)
    body: bytes = wire(sized_bytes(limits.MAX_GRAPH_NODE_BYTES))


@dataclass(frozen=True, slots=True)
class GraphParameter:
    """Something each GRAPH_LAUNCH says anew: a `ParameterKind`, and how many bytes of a launch's arguments it is."""

    name: str = wire(text(limits.MAX_PARAMETER_NAME_BYTES))
    kind: int = wire(U8)
    size_bytes: int = wire(U32)


@dataclass(frozen=True, slots=True)
class GraphPlace:
    """An argument that is a parameter's: numbers of the parameter and the node, and where the node's `args` have it."""

    parameter: int = wire(U16)
    node: int = wire(U16)
    at: int = wire(U32)


@dataclass(frozen=True, slots=True)
class GraphCreate:
    """A sequence to be done again and again. `buffers` are the allocations its launches have pointers to."""

    nodes: tuple[GraphNode, ...] = wire(list_of(Record(GraphNode), limits.MAX_GRAPH_NODES))
    buffers: tuple[int, ...] = wire(list_of(U64, limits.MAX_GRAPH_HANDLES))
    parameters: tuple[GraphParameter, ...] = wire(list_of(Record(GraphParameter), limits.MAX_GRAPH_PARAMETERS))
    places: tuple[GraphPlace, ...] = wire(list_of(Record(GraphPlace), limits.MAX_GRAPH_PLACES))


@dataclass(frozen=True, slots=True)
class GraphLaunch:
    """Do a graph's nodes in order. `args` has its parameters' values; a buffer's is handle and offset, 8 bytes each."""

    graph: int = wire(U64)
    args: bytes = wire(sized_bytes(limits.MAX_ARGUMENT_BYTES))


@dataclass(frozen=True, slots=True)
class LeaseSubscribe:
    """Hear of a lease's phases; lease 0: of every lease that LEASE_LIST_ACTIVE would show this peer."""

    lease_id: int = wire(U128)


@dataclass(frozen=True, slots=True)
class LeaseUnsubscribe:
    """Hear no more. `subscription` is the request id of the LEASE_SUBSCRIBE."""

    subscription: int = wire(U64)


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    """Where a lease stands now. `sequence` counts a subscription's events from 1, the `lost` ones before this too."""

    lease_id: int = wire(U128)
    sequence: int = wire(U64)
    lost: int = wire(U64)
    phase: int = wire(U8)
    left_ms: int = wire(U32)
    generation: int = wire(U64)
    cause: str = wire(text())
    reason: str = wire(text())


@dataclass(frozen=True, slots=True)
class Drain:
    """Let nobody in, and end what is left in so many milliseconds; operators only."""

    within_ms: int = wire(U32)


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """Time until the drain ends what is left, None if there is no drain; active leases."""

    left_ms: int | None = wire(optional(U32))
    leases: int = wire(U32)


@dataclass(frozen=True, slots=True)
class FenceClear:
    """Grant fenced bytes again, of one card (UUID or index) or of all; operators only."""

    device: str | None = wire(optional(text()))


@dataclass(frozen=True, slots=True)
class FenceCleared:
    """How many fenced slices were let go: those of leases, and of contexts that had none yet."""

    count: int = wire(U32)


@dataclass(frozen=True, slots=True)
class Metrics:
    """The node's metrics as an HTTP server passes them on: the media type, and the text, which is never cut short."""

    content_type: str = wire(text())
    exposition: str = wire(text(limits.MAX_METRICS_BYTES))


@dataclass(frozen=True, slots=True)
class GpuSubmit:
    """Make this connection a submit on the lease whose id the header carries, a context of its own for one kernel.

    The last control request of a connection. `timeout_ms` is how long the submit may take, from the reply on.
    """

    timeout_ms: int = wire(U32)
    options: tuple[Tlv, ...] = wire(TLVS)


@dataclass(frozen=True, slots=True)
class SubmitArgument:
    """One argument, an `ArgumentKind`: `data` of a VALUE, INPUT or INOUT; `size_bytes` of an OUTPUT, else 0."""

    kind: int = wire(U8)
    size_bytes: int = wire(U64)
    data: bytes = wire(sized_bytes(limits.MAX_PAYLOAD_BYTES))


@dataclass(frozen=True, slots=True)
class SubmitRun:
    """Load an image, run one kernel of it and answer its outputs; once on a connection."""

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
class SubmitDone:
    """What the OUTPUT and INOUT arguments held when the kernel had ended, in their order."""

    outputs: tuple[bytes, ...] = wire(list_of(sized_bytes(limits.MAX_SUBMIT_OUTPUT_BYTES), limits.MAX_SUBMIT_ARGUMENTS))


@dataclass(frozen=True, slots=True)
class Empty:
    """No bytes at all."""


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """Why a request failed, for a person, and `ErrorTlv`s for a program."""

    message: str = wire(text(limits.MAX_ERROR_TEXT_BYTES))
    details: tuple[Tlv, ...] = wire(TLVS)


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of each side. `features` are the bits offered (request) or agreed on (reply); none exists yet."""

    features: int = wire(U32)
    agent: str = wire(text())
    options: tuple[Tlv, ...] = wire(TLVS)


@dataclass(frozen=True, slots=True)
class HelloReply:
    """What the daemon is. `max_payload_bytes` bounds what it takes in a session frame."""

    features: int = wire(U32)
    agent: str = wire(text())
    max_payload_bytes: int = wire(U32)
    options: tuple[Tlv, ...] = wire(TLVS)


@dataclass(frozen=True, slots=True)
class Attach:
    """Make this connection the session whose id the header carries. The last control request of a connection."""

    options: tuple[Tlv, ...] = wire(TLVS)


@dataclass(frozen=True, slots=True)
class AttachReply:
    """The session as its worker sees it."""

    slice_bytes: int = wire(U64)
    driver: str = wire(text())
    card_uuid: str = wire(text())
    options: tuple[Tlv, ...] = wire(TLVS)


@dataclass(frozen=True, slots=True)
class Ping:
    """A number that comes back."""

    nonce: int = wire(U64)


@dataclass(frozen=True, slots=True)
class InventoryEntry:
    """One card, 36 bytes: its UUID's 128 bits, the resource type, `InventoryFlag`s, bytes in all and grantable now."""

    id: int = wire(U128)
    type: int = wire(U16)
    flags: int = wire(U16)
    capacity_bytes: int = wire(U64)
    available_bytes: int = wire(U64)


@dataclass(frozen=True, slots=True)
class Inventory:
    """All cards; `details` is a list of maps in the same order (name, uuid, index, leases, fenced_bytes ...)."""

    entries: tuple[InventoryEntry, ...] = wire(list_of(Record(InventoryEntry), 0xFFFF))
    details: Any = wire(REPORT)


@dataclass(frozen=True, slots=True)
class LeaseAlloc:
    """Ask for `size_bytes` for `ttl_ms`, waiting up to `wait_ms` for room. `device` is a card's UUID or index."""

    resource_type: int = wire(U16)
    size_bytes: int = wire(U64)
    ttl_ms: int = wire(U32)
    wait_ms: int = wire(U32)
    device: str | None = wire(optional(text()))
    parameters: tuple[LeaseParameter, ...] = wire(LEASE_PARAMETERS)


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """What was granted. `expires_at_unix_s` is for people: the daemon's deadline is monotonic, `ttl_ms` from now."""

    lease_id: int = wire(U128)
    generation: int = wire(U64)
    size_bytes: int = wire(U64)
    ttl_ms: int = wire(U32)
    expires_at_unix_s: int = wire(U64)
    exclusivity: int = wire(U8)
    card_uuid: str = wire(text())


@dataclass(frozen=True, slots=True)
class LeaseRenew:
    """Make a lease last at least `ttl_ms` from now."""

    lease_id: int = wire(U128)
    ttl_ms: int = wire(U32)


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """The lease's new generation and time left."""

    generation: int = wire(U64)
    ttl_ms: int = wire(U32)
    expires_at_unix_s: int = wire(U64)


@dataclass(frozen=True, slots=True)
class LeaseRef:
    """A lease, by its id alone: LEASE_FREE, LEASE_QUERY."""

    lease_id: int = wire(U128)


@dataclass(frozen=True, slots=True)
class LeaseRevoke:
    """End a lease whatever it is doing; operators only."""

    lease_id: int = wire(U128)
    reason: str = wire(text())


@dataclass(frozen=True, slots=True)
class LeaseRevoked:
    """A `RevokeOutcome`, sent when it is a fact."""

    outcome: int = wire(U8)


@dataclass(frozen=True, slots=True)
class Report:
    """A msgpack value: the map of LEASE_QUERY or HEALTH, LEASE_LIST_ACTIVE's list of maps."""

    report: Any = wire(REPORT)


@dataclass(frozen=True, slots=True)
class MemAlloc:
    """Bytes of the slice wanted."""

    size_bytes: int = wire(U64)


@dataclass(frozen=True, slots=True)
class Handle:
    """A device pointer (of MEM_ALLOC, MEM_FREE), module (MODULE_...), stream (STREAM_...) or graph (GRAPH_...)."""

    handle: int = wire(U64)


@dataclass(frozen=True, slots=True)
class MemWrite:
    """Bytes to put at `offset` of an allocation."""

    handle: int = wire(U64)
    offset: int = wire(U64)
    data: bytes = wire(sized_bytes(limits.MAX_DATA_BYTES))


@dataclass(frozen=True, slots=True)
class MemRead:
    """Which bytes of an allocation are wanted, at most MAX_DATA_BYTES."""

    handle: int = wire(U64)
    offset: int = wire(U64)
    length: int = wire(U64)


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes read."""

    data: bytes = wire(sized_bytes(limits.MAX_DATA_BYTES))


@dataclass(frozen=True, slots=True)
class ArenaCopy:
    """Which bytes of an allocation and of the session's arena: from one to the other, as the operation says."""

    handle: int = wire(U64)
    offset: int = wire(U64)
    arena_offset: int = wire(U64)
    length: int = wire(U64)


@dataclass(frozen=True, slots=True)
class StreamWait:
    """What is put in `stream` from now on comes after all that was put in `other` so far."""

    stream: int = wire(U64)
    other: int = wire(U64)


@dataclass(frozen=True, slots=True)
class ModuleLoad:
    """PTX text or a cubin."""

    image: bytes = wire(sized_bytes(limits.MAX_PAYLOAD_BYTES))


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """A kernel of a module: its name, the most threads a block may have, its parameters' sizes in bytes."""

    name: str = wire(text(limits.MAX_KERNEL_NAME_BYTES))
    max_threads_per_block: int = wire(U32)
    parameter_sizes: tuple[int, ...] = wire(list_of(U32, limits.MAX_ARGUMENTS))


@dataclass(frozen=True, slots=True)
class ModuleLoaded:
    """The module's handle and its kernels."""

    module: int = wire(U64)
    kernels: tuple[KernelEntry, ...] = wire(list_of(Record(KernelEntry), limits.MAX_KERNELS))


@dataclass(frozen=True, slots=True)
class ModuleParameters:
    """The types of a module's parameters: by kernel, in ModuleLoaded's order, one `ParameterType` byte a parameter.

    A kernel of which nothing is told has no bytes.
    """

    types: tuple[bytes, ...] = wire(list_of(sized_bytes(limits.MAX_ARGUMENTS), limits.MAX_KERNELS))


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel to queue. `args` are the arguments' little-endian bytes without gaps, `arg_sizes` their sizes."""

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


Body = (
    Empty
    | ErrorBody
    | Hello
    | HelloReply
    | Attach
    | AttachReply
    | Ping
    | Inventory
    | LeaseAlloc
    | LeaseGrant
    | LeaseRenew
    | LeaseRenewed
    | LeaseRef
    | LeaseRevoke
    | LeaseRevoked
    | LeaseSubscribe
    | LeaseUnsubscribe
    | LeaseEvent
    | Drain
    | DrainStatus
    | Metrics
    | FenceClear
    | FenceCleared
    | CapabilityIssue
    | CapabilityGrant
    | CapabilityPresent
    | CapabilityHeld
    | CapabilityRevoke
    | Audience
    | Report
    | MemAlloc
    | Handle
    | MemWrite
    | MemRead
    | Data
    | ArenaCopy
    | StreamWait
    | ModuleLoad
    | ModuleLoaded
    | ModuleParameters
    | Launch
    | GraphCreate
    | GraphLaunch
    | GpuSubmit
    | SubmitRun
    | SubmitDone
)

BODIES: Final[dict[Opcode, tuple[type[Body], type[Body]]]] = {
    Opcode.HELLO: (Hello, HelloReply),
    Opcode.ATTACH: (Attach, AttachReply),
    Opcode.PING: (Ping, Ping),
    Opcode.GOODBYE: (Empty, Empty),
    Opcode.GPU_SUBMIT: (GpuSubmit, AttachReply),
    Opcode.GET_INVENTORY: (Empty, Inventory),
    Opcode.LEASE_ALLOC: (LeaseAlloc, LeaseGrant),
    Opcode.LEASE_RENEW: (LeaseRenew, LeaseRenewed),
    Opcode.LEASE_FREE: (LeaseRef, Empty),
    Opcode.LEASE_QUERY: (LeaseRef, Report),
    Opcode.LEASE_LIST_ACTIVE: (Empty, Report),
    Opcode.LEASE_SUBSCRIBE: (LeaseSubscribe, Empty),
    Opcode.LEASE_UNSUBSCRIBE: (LeaseUnsubscribe, Empty),
    Opcode.LEASE_EVENT: (Empty, LeaseEvent),
    Opcode.LEASE_REVOKE: (LeaseRevoke, LeaseRevoked),
    Opcode.FENCE_CLEAR: (FenceClear, FenceCleared),
    Opcode.DRAIN: (Drain, DrainStatus),
    Opcode.DRAIN_CANCEL: (Empty, DrainStatus),
    Opcode.METRICS: (Empty, Metrics),
    Opcode.HEALTH: (Empty, Report),
    Opcode.CAPABILITY_ISSUE: (CapabilityIssue, CapabilityGrant),
    Opcode.CAPABILITY_PRESENT: (CapabilityPresent, CapabilityHeld),
    Opcode.CAPABILITY_AUDIENCE: (Empty, Audience),
    Opcode.CAPABILITY_REVOKE: (CapabilityRevoke, Empty),
    Opcode.MEM_ALLOC: (MemAlloc, Handle),
    Opcode.MEM_FREE: (Handle, Empty),
    Opcode.MEM_WRITE: (MemWrite, Empty),
    Opcode.MEM_READ: (MemRead, Data),
    Opcode.MODULE_LOAD: (ModuleLoad, ModuleLoaded),
    Opcode.LAUNCH: (Launch, Empty),
    Opcode.SYNC: (Empty, Empty),
    Opcode.MODULE_UNLOAD: (Handle, Empty),
    Opcode.ARENA_WRITE: (ArenaCopy, Empty),
    Opcode.ARENA_READ: (ArenaCopy, Empty),
    Opcode.STREAM_CREATE: (Empty, Handle),
    Opcode.STREAM_DESTROY: (Handle, Empty),
    Opcode.STREAM_SELECT: (Handle, Empty),
    Opcode.STREAM_WAIT: (StreamWait, Empty),
    Opcode.STREAM_SYNC: (Handle, Empty),
    Opcode.GRAPH_CREATE: (GraphCreate, Handle),
    Opcode.GRAPH_LAUNCH: (GraphLaunch, Empty),
    Opcode.GRAPH_DESTROY: (Handle, Empty),
    Opcode.SUBMIT_RUN: (SubmitRun, SubmitDone),
    Opcode.MODULE_PARAMETERS: (Handle, ModuleParameters),
}
"""(request, reply) of each operation. Two are never asked for: GOODBYE, an error reply to request 0 that says why the
daemon is about to close the connection, and LEASE_EVENT, which it sends whenever there is something to tell, as a reply
to the LEASE_SUBSCRIBE."""
