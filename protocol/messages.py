"""Every body on the wire: one frozen dataclass each, which is also its construct definition.

All are named here, wherever they stand.

`BODIES` says which class a frame's payload is, by operation and direction. An error reply's payload is `ErrorBody`
whatever its operation.
"""

from dataclasses import dataclass
from typing import Any, Final

from gpulease.protocol import limits
from gpulease.protocol.capability_messages import Audience as Audience
from gpulease.protocol.capability_messages import CapabilityGrant as CapabilityGrant
from gpulease.protocol.capability_messages import CapabilityHeld as CapabilityHeld
from gpulease.protocol.capability_messages import CapabilityIssue as CapabilityIssue
from gpulease.protocol.capability_messages import CapabilityPresent as CapabilityPresent
from gpulease.protocol.capability_messages import CapabilityRevoke as CapabilityRevoke
from gpulease.protocol.graph_messages import GraphCreate as GraphCreate
from gpulease.protocol.graph_messages import GraphLaunch as GraphLaunch
from gpulease.protocol.graph_messages import GraphNode as GraphNode
from gpulease.protocol.graph_messages import GraphParameter as GraphParameter
from gpulease.protocol.graph_messages import GraphPlace as GraphPlace
from gpulease.protocol.lease_messages import Drain as Drain
from gpulease.protocol.lease_messages import DrainStatus as DrainStatus
from gpulease.protocol.lease_messages import FenceClear as FenceClear
from gpulease.protocol.lease_messages import FenceCleared as FenceCleared
from gpulease.protocol.lease_messages import LeaseEvent as LeaseEvent
from gpulease.protocol.lease_messages import LeaseSubscribe as LeaseSubscribe
from gpulease.protocol.lease_messages import LeaseUnsubscribe as LeaseUnsubscribe
from gpulease.protocol.node_messages import Metrics as Metrics
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
from gpulease.protocol.submit_messages import GpuSubmit as GpuSubmit
from gpulease.protocol.submit_messages import SubmitArgument as SubmitArgument
from gpulease.protocol.submit_messages import SubmitDone as SubmitDone
from gpulease.protocol.submit_messages import SubmitRun as SubmitRun


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
