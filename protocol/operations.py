"""The operations: one `OperationSpec` for each opcode, with every fact about it that more than one module needs.

All other places derive such facts from these specifications, or a test compares them: the codec's bodies, the states of
a connection, the permissions of tokens, the worker's dispatch and the abilities it announces, the watchdog's patience,
the client's acknowledgements, and the tables of `README.md`. Define a new operation here first; a missing fact is an
error when this module is imported.
"""

from collections.abc import Iterator
from enum import Flag, auto
from types import MappingProxyType
from typing import Final

from gpulease.protocol import messages as m
from gpulease.protocol.capabilities import ALL_PERMISSIONS, SESSION_PERMISSIONS, Permission
from gpulease.protocol.connection_states import TRANSITIONS, State, WireTrigger
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.opcodes import Opcode, SessionOption, Status


class Trait(Flag):
    """Further properties of an operation.

    Of control operations:
        READ_ONLY: It changes nothing, so a peer with read-only access may send it.
        OPERATORS: Only operators may send it.
        AWAITS_SESSION: It may need a parked session back. In that case its reply waits for the session's return, which
            may wait for room as an acquire does.

    Of session operations:
        IN_STREAM: It acts in the stream that STREAM_SELECT chose.
        WAITS_IN_DRIVER: It may block inside the driver, where polling is impossible: for a kernel, while the driver's
            queue is full, or for a compiler. The lease's deadline bounds it, and compilers have a bound of their own.
            An operation that polls, as SYNC does, does not have this trait: if a worker is silent during it, the worker
            hangs.
        SETTLES: Its reply means that everything before it has ended, in all streams. SETTLES_ALONE: Its reply means the
            same while the session has only the default stream.
        RECORDED: It can be a node of a launch graph.
        WARMED_UP: Every tenant needs it, so a warm worker has executed it once before its first lease.
    """

    NONE = 0
    READ_ONLY = auto()
    OPERATORS = auto()
    AWAITS_SESSION = auto()
    IN_STREAM = auto()
    WAITS_IN_DRIVER = auto()
    SETTLES = auto()
    SETTLES_ALONE = auto()
    RECORDED = auto()
    WARMED_UP = auto()


_CONTROL_TRAITS: Final = Trait.READ_ONLY | Trait.OPERATORS | Trait.AWAITS_SESSION


@dataclass(frozen=True, slots=True)
class Needs:
    """The permissions that a token must have for an operation: all of them, or with `any_suffices` one of them."""

    permissions: Permission
    any_suffices: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSpec:
    """The facts about one operation.

    Attributes:
        op: Its number.
        request: The body of its request; Empty also for an operation without requests.
        reply: The body of its successful reply; of an event, or of GOODBYE, the body of what the daemon sends.
        trigger: The event that its request is in the connection's state table; None for an operation without requests.
        needs: What a token must permit. On a control connection the lease's own tenant needs no token, unless the
            daemon demands one.
        traits: Its further properties.
        ability: The option in ATTACH's reply by which a worker says that it serves the operation. A client must not
            send the operation if the option is missing: the worker is older. None: every worker serves it.
        driver_failure: The status of its reply if the driver fails without a more specific status.
        events: The operation of the events that follow a subscribing operation's reply.
        does: What it does, in one sentence of the specification's table.
    """

    op: Opcode
    request: type[m.Body]
    reply: type[m.Body]
    trigger: WireTrigger | None
    needs: Needs
    traits: Trait
    ability: SessionOption | None
    driver_failure: Status
    events: Opcode | None
    does: str

    @property
    def states(self) -> tuple[State, ...]:
        """The states of a connection in which it may be requested."""
        return tuple(state for state in State if self.trigger is not None and (state, self.trigger) in TRANSITIONS)

    @property
    def is_session(self) -> bool:
        """Whether a session's worker serves it, and not the broker; such a request may be quiet."""
        return self.trigger is WireTrigger.SESSION_REQUEST


# The permissions that operations share, named by what a token must permit.
_NOTHING: Final = Needs(Permission(0))
_ANY: Final = Needs(ALL_PERMISSIONS, any_suffices=True)
_ANY_OF_SESSION: Final = Needs(SESSION_PERMISSIONS, any_suffices=True)
_ALL_OF_SESSION: Final = Needs(SESSION_PERMISSIONS)
_SUBMIT: Final = Needs(Permission.TASKLET_SUBMIT)
_READ: Final = Needs(Permission.MEM_READ)
_WRITE: Final = Needs(Permission.MEM_WRITE)


def _control(
    op: Opcode,
    request: type[m.Body],
    reply: type[m.Body],
    needs: Needs,
    traits: Trait,
    does: str,
    trigger: WireTrigger | None = WireTrigger.CONTROL_REQUEST,
    events: Opcode | None = None,
) -> OperationSpec:
    """Return the specification of an operation that the broker serves, or that the daemon sends without a request."""
    return OperationSpec(
        op=op,
        request=request,
        reply=reply,
        trigger=trigger,
        needs=needs,
        traits=traits,
        ability=None,
        driver_failure=Status.INTERNAL,
        events=events,
        does=does,
    )


def _session(
    op: Opcode,
    request: type[m.Body],
    reply: type[m.Body],
    needs: Needs,
    traits: Trait,
    does: str,
    *,
    ability: SessionOption | None,
    driver_failure: Status,
) -> OperationSpec:
    """Return the specification of an operation that a session's worker serves."""
    return OperationSpec(
        op=op,
        request=request,
        reply=reply,
        trigger=WireTrigger.SESSION_REQUEST,
        needs=needs,
        traits=traits,
        ability=ability,
        driver_failure=driver_failure,
        events=None,
        does=does,
    )


_ALL: Final = (
    # The connection's own operations. HELLO and PING need no permission, because they disclose nothing about any lease.
    _control(
        Opcode.HELLO,
        m.Hello,
        m.HelloReply,
        _NOTHING,
        Trait.NONE,
        "the first frame: agrees on a version, exchanges features and names",
        trigger=WireTrigger.HELLO,
    ),
    # Any permission of a session opens the session. From then on each request is checked against the needs of its
    # operation.
    _control(
        Opcode.ATTACH,
        m.Attach,
        m.AttachReply,
        _ANY_OF_SESSION,
        Trait.NONE,
        "makes this connection the session that the header names",
        trigger=WireTrigger.ATTACH,
    ),
    _control(
        Opcode.PING,
        m.Ping,
        m.Ping,
        _NOTHING,
        Trait.READ_ONLY,
        "checks that the peer is alive",
        trigger=WireTrigger.PING,
    ),
    # It has no trigger, because no state of a connection accepts it as a request.
    _control(
        Opcode.GOODBYE,
        m.Empty,
        m.ErrorBody,
        _NOTHING,
        Trait.NONE,
        "only ever sent by the daemon, see [goodbye](#goodbye)",
        trigger=None,
    ),
    _control(
        Opcode.GPU_SUBMIT,
        m.GpuSubmit,
        m.AttachReply,
        _SUBMIT,
        Trait.NONE,
        "makes this connection a [submit](#submits) on the lease that the header names",
        trigger=WireTrigger.ATTACH,
    ),
    # The node and its leases. Any peer may send some of these operations, without a token; the broker decides what they
    # show of other tenants' leases.
    _control(
        Opcode.GET_INVENTORY, m.Empty, m.Inventory, _NOTHING, Trait.READ_ONLY, "returns the cards; any peer may send it"
    ),
    _control(
        Opcode.LEASE_ALLOC, m.LeaseAlloc, m.LeaseGrant, Needs(Permission.LEASE_ALLOC), Trait.NONE, "grants a lease"
    ),
    _control(
        Opcode.LEASE_RENEW,
        m.LeaseRenew,
        m.LeaseRenewed,
        Needs(Permission.LEASE_RENEW),
        Trait.NONE,
        "extends a lease; one that has ended can't be renewed",
    ),
    _control(
        Opcode.LEASE_FREE,
        m.LeaseRef,
        m.Empty,
        Needs(Permission.LEASE_FREE),
        Trait.NONE,
        "ends a lease; the reply comes when its memory is proved free",
    ),
    _control(
        Opcode.LEASE_QUERY,
        m.LeaseRef,
        m.Report,
        _ANY,
        Trait.READ_ONLY,
        "returns one lease's state; any peer may send it",
    ),
    _control(
        Opcode.LEASE_LIST_ACTIVE,
        m.Empty,
        m.Report,
        _NOTHING,
        Trait.READ_ONLY,
        "returns all live leases; any peer may send it",
    ),
    _control(
        Opcode.LEASE_SUBSCRIBE,
        m.LeaseSubscribe,
        m.Empty,
        _ANY,
        Trait.READ_ONLY,
        "subscribes to a lease's [phases](#events)",
        events=Opcode.LEASE_EVENT,
    ),
    _control(Opcode.LEASE_UNSUBSCRIBE, m.LeaseUnsubscribe, m.Empty, _NOTHING, Trait.READ_ONLY, "ends a subscription"),
    _control(
        Opcode.LEASE_EVENT,
        m.Empty,
        m.LeaseEvent,
        _NOTHING,
        Trait.NONE,
        "only ever sent by the daemon, see [events](#events)",
        trigger=None,
    ),
    # The reply waits for the teardown, so that it says whether the bytes are free or fenced.
    _control(
        Opcode.LEASE_REVOKE,
        m.LeaseRevoke,
        m.LeaseRevoked,
        Needs(Permission.REVOKE),
        Trait.NONE,
        "ends any lease whatever it is doing; the reply comes when the outcome is certain",
    ),
    # A request that only operators may send needs no permission, and no token can permit it: the trait decides.
    _control(
        Opcode.FENCE_CLEAR,
        m.FenceClear,
        m.FenceCleared,
        _NOTHING,
        Trait.OPERATORS,
        "allows fenced bytes to be granted again",
    ),
    _control(
        Opcode.DRAIN,
        m.Drain,
        m.DrainStatus,
        _NOTHING,
        Trait.OPERATORS,
        "refuses new leases, and ends the remaining ones by a deadline",
    ),
    _control(Opcode.DRAIN_CANCEL, m.Empty, m.DrainStatus, _NOTHING, Trait.OPERATORS, "ends a drain"),
    _control(
        Opcode.METRICS,
        m.Empty,
        m.Metrics,
        _NOTHING,
        Trait.READ_ONLY | Trait.OPERATORS,
        "returns the node's metrics, for Prometheus",
    ),
    _control(
        Opcode.HEALTH,
        m.Empty,
        m.Report,
        _NOTHING,
        Trait.READ_ONLY,
        "returns whether the daemon can [grant leases](#health); any peer on its host may send it",
    ),
    # Regions, the size of a lease, and notes for the audit log.
    _control(
        Opcode.REGION_OPEN,
        m.RegionOpen,
        m.RegionGrant,
        Needs(Permission.REGION),
        Trait.AWAITS_SESSION,
        "opens a [region](#regions) of a lease",
    ),
    _control(
        Opcode.REGION_CANCEL,
        m.RegionCancel,
        m.Empty,
        Needs(Permission.REGION),
        Trait.NONE,
        "makes launches that name a region be refused, or accepted again; the region does not end",
    ),
    _control(
        Opcode.LEASE_RESIZE,
        m.LeaseResize,
        m.LeaseResize,
        Needs(Permission.LEASE_ALLOC),
        Trait.AWAITS_SESSION,
        "makes a lease larger or smaller while it runs",
    ),
    _control(
        Opcode.REGION_WATCH,
        m.LeaseRef,
        m.Empty,
        _ANY,
        Trait.READ_ONLY,
        "subscribes to launches that [regions refuse](#refused-launches)",
        events=Opcode.REGION_EVENT,
    ),
    _control(
        Opcode.REGION_EVENT,
        m.Empty,
        m.RegionEvent,
        _NOTHING,
        Trait.NONE,
        "only ever sent by the daemon, see [refused launches](#refused-launches)",
        trigger=None,
    ),
    # The reply waits for the disk: a note that is acknowledged survives the loss of the machine's power.
    _control(
        Opcode.LEASE_NOTE,
        m.LeaseNote,
        m.Empty,
        _NOTHING,
        Trait.NONE,
        "writes a [tenant's record](#notes) to the audit log; the reply comes when it is on disk",
    ),
    # A fleet: these two are served by its directories, and by no node.
    _control(
        Opcode.PLACE,
        m.Place,
        m.Placement,
        _NOTHING,
        Trait.NONE,
        "a [fleet's directory](#fleets) names the nodes to ask for a lease",
    ),
    _control(
        Opcode.FLEET_LIST,
        m.Empty,
        m.Report,
        _NOTHING,
        Trait.NONE,
        "returns the nodes and names of a [fleet](#fleets), in its directory's view",
    ),
    _control(
        Opcode.LEASE_PARK,
        m.LeaseRef,
        m.ParkedSession,
        Needs(Permission.LEASE_FREE),
        Trait.AWAITS_SESSION,
        "moves the bytes of a lease's session to the host's memory; its next operation [brings them back](#parking)",
    ),
    _control(
        Opcode.LEASE_MOVE,
        m.LeaseMove,
        m.MovedSession,
        Needs(Permission.LEASE_FREE),
        Trait.AWAITS_SESSION,
        "moves a lease's session to [another card](#moving), or entirely to the host's memory, so that nothing is left "
        "on the card",
    ),
    _control(
        Opcode.CARD_DRAIN,
        m.CardDrain,
        m.DrainStatus,
        _NOTHING,
        Trait.OPERATORS,
        "drains [one card](#events) of the node, or ends that drain",
    ),
    # Tokens. These need no permission: the broker checks the sender.
    _control(
        Opcode.CAPABILITY_ISSUE,
        m.CapabilityIssue,
        m.CapabilityGrant,
        _NOTHING,
        Trait.NONE,
        "issues a [token](#tokens) with which others can use a lease",
    ),
    _control(
        Opcode.CAPABILITY_PRESENT,
        m.CapabilityPresent,
        m.CapabilityHeld,
        _NOTHING,
        Trait.NONE,
        "presents a token, which applies to this connection from then on",
    ),
    _control(
        Opcode.CAPABILITY_AUDIENCE,
        m.Empty,
        m.Audience,
        _NOTHING,
        Trait.NONE,
        "returns this peer's identity on this node, for tokens to be issued to it; any peer may send it",
    ),
    _control(
        Opcode.CAPABILITY_REVOKE,
        m.CapabilityRevoke,
        m.Empty,
        _NOTHING,
        Trait.NONE,
        "ends one token at once; for the lease's tenant, and operators",
    ),
    # A session's memory. MEM_ALLOC may wait in the driver; MEM_WRITE and MEM_READ copy through the socket or the ring.
    _session(
        Opcode.MEM_ALLOC,
        m.MemAlloc,
        m.Handle,
        _WRITE,
        Trait.WAITS_IN_DRIVER | Trait.WARMED_UP,
        "allocates in the slice",
        ability=None,
        driver_failure=Status.ALLOC_FAILED,
    ),
    _session(
        Opcode.MEM_FREE,
        m.Handle,
        m.Empty,
        _WRITE,
        Trait.WARMED_UP,
        "frees an allocation",
        ability=None,
        driver_failure=Status.SESSION_FAILED,
    ),
    _session(
        Opcode.MEM_WRITE,
        m.MemWrite,
        m.Empty,
        _WRITE,
        Trait.IN_STREAM | Trait.RECORDED | Trait.WARMED_UP,
        "copies into an allocation",
        ability=None,
        driver_failure=Status.SESSION_FAILED,
    ),
    # A read waits for everything before it in its own stream. Its reply says that all earlier work has ended only while
    # the session has no other stream.
    _session(
        Opcode.MEM_READ,
        m.MemRead,
        m.Data,
        _READ,
        Trait.IN_STREAM | Trait.SETTLES_ALONE | Trait.WARMED_UP,
        "copies out of an allocation, after everything queued before",
        ability=None,
        driver_failure=Status.SESSION_FAILED,
    ),
    # Modules and launches. A driver compiles PTX inside MODULE_LOAD, and a full queue blocks a launch.
    _session(
        Opcode.MODULE_LOAD,
        m.ModuleLoad,
        m.ModuleLoaded,
        _SUBMIT,
        Trait.WAITS_IN_DRIVER | Trait.WARMED_UP,
        "compiles and loads a module",
        ability=None,
        driver_failure=Status.LOAD_FAILED,
    ),
    _session(
        Opcode.LAUNCH,
        m.Launch,
        m.Empty,
        _SUBMIT,
        Trait.IN_STREAM | Trait.WAITS_IN_DRIVER | Trait.RECORDED | Trait.WARMED_UP,
        "queues a kernel; the reply says that it is queued, not that it ran",
        ability=None,
        driver_failure=Status.LAUNCH_FAILED,
    ),
    # SYNC polls, so it does not have WAITS_IN_DRIVER: a worker that does not answer during a SYNC hangs, and is killed.
    _session(
        Opcode.SYNC,
        m.Empty,
        m.Empty,
        _ANY_OF_SESSION,
        Trait.SETTLES | Trait.WARMED_UP,
        "waits until everything queued has run, in all streams",
        ability=None,
        driver_failure=Status.SYNC_FAILED,
    ),
    _session(
        Opcode.MODULE_UNLOAD,
        m.Handle,
        m.Empty,
        _SUBMIT,
        Trait.WARMED_UP,
        "unloads a module",
        ability=None,
        driver_failure=Status.SESSION_FAILED,
    ),
    # Copies through the arena: the bytes are in shared memory, and the request contains their place.
    _session(
        Opcode.ARENA_WRITE,
        m.ArenaCopy,
        m.Empty,
        _WRITE,
        Trait.IN_STREAM | Trait.WAITS_IN_DRIVER | Trait.RECORDED,
        "MEM_WRITE of bytes in the [arena](#shared-memory)",
        ability=None,
        driver_failure=Status.SESSION_FAILED,
    ),
    _session(
        Opcode.ARENA_READ,
        m.ArenaCopy,
        m.Empty,
        _READ,
        Trait.IN_STREAM | Trait.WAITS_IN_DRIVER | Trait.SETTLES_ALONE | Trait.RECORDED,
        "MEM_READ into the arena",
        ability=None,
        driver_failure=Status.SESSION_FAILED,
    ),
    # Streams. STREAM_SELECT can't be skipped after a failure: all later requests depend on it.
    _session(
        Opcode.STREAM_CREATE,
        m.Empty,
        m.Handle,
        _SUBMIT,
        Trait.WAITS_IN_DRIVER,
        "makes a [stream](#streams)",
        ability=None,
        driver_failure=Status.ALLOC_FAILED,
    ),
    _session(
        Opcode.STREAM_DESTROY,
        m.Handle,
        m.Empty,
        _SUBMIT,
        Trait.NONE,
        "releases a stream, without waiting for the operations in it",
        ability=None,
        driver_failure=Status.SESSION_FAILED,
    ),
    _session(
        Opcode.STREAM_SELECT,
        m.Handle,
        m.Empty,
        _ANY_OF_SESSION,
        Trait.NONE,
        "later operations on this connection go to that stream; never skipped",
        ability=None,
        driver_failure=Status.SESSION_FAILED,
    ),
    _session(
        Opcode.STREAM_WAIT,
        m.StreamWait,
        m.Empty,
        _SUBMIT,
        Trait.WAITS_IN_DRIVER,
        "orders one stream after another",
        ability=None,
        driver_failure=Status.SESSION_FAILED,
    ),
    _session(
        Opcode.STREAM_SYNC,
        m.Handle,
        m.Empty,
        _ANY_OF_SESSION,
        Trait.NONE,
        "waits until everything queued in that stream has run",
        ability=None,
        driver_failure=Status.SYNC_FAILED,
    ),
    # Launch graphs need all permissions of a session: their nodes may copy as well as launch.
    _session(
        Opcode.GRAPH_CREATE,
        m.GraphCreate,
        m.Handle,
        _ALL_OF_SESSION,
        Trait.NONE,
        "makes a [launch graph](#launch-graphs); none of it is executed",
        ability=None,
        driver_failure=Status.LAUNCH_FAILED,
    ),
    _session(
        Opcode.GRAPH_LAUNCH,
        m.GraphLaunch,
        m.Empty,
        _ALL_OF_SESSION,
        Trait.IN_STREAM,
        "queues all of a graph; the reply says that it is queued",
        ability=None,
        driver_failure=Status.LAUNCH_FAILED,
    ),
    _session(
        Opcode.GRAPH_DESTROY,
        m.Handle,
        m.Empty,
        _ALL_OF_SESSION,
        Trait.NONE,
        "frees a graph",
        ability=None,
        driver_failure=Status.SESSION_FAILED,
    ),
    # The only operation of a submit. A quiet one would lose the outputs, which are in its reply.
    _session(
        Opcode.SUBMIT_RUN,
        m.SubmitRun,
        m.SubmitDone,
        _SUBMIT,
        Trait.WAITS_IN_DRIVER,
        "runs one kernel, on a submit's connection, and returns its outputs; refused if it is quiet",
        ability=None,
        driver_failure=Status.ALLOC_FAILED,
    ),
    # From here on each operation has an ability, because a worker of an earlier version does not serve it.
    _session(
        Opcode.MODULE_PARAMETERS,
        m.Handle,
        m.ModuleParameters,
        _SUBMIT,
        Trait.NONE,
        "returns the types of a module's parameters",
        ability=SessionOption.PARAMETER_TYPES,
        driver_failure=Status.SESSION_FAILED,
    ),
    # Regions.
    _session(
        Opcode.REGION_SET,
        m.RegionSet,
        m.Handle,
        _SUBMIT,
        Trait.NONE,
        "names the [regions](#regions) that launches will touch",
        ability=SessionOption.REGIONS,
        driver_failure=Status.SESSION_FAILED,
    ),
    _session(
        Opcode.REGION_SET_FREE,
        m.Handle,
        m.Empty,
        _SUBMIT,
        Trait.NONE,
        "deletes a region set",
        ability=SessionOption.REGIONS,
        driver_failure=Status.SESSION_FAILED,
    ),
    # All permissions: the addresses belong to the whole session, not to the connection that asks.
    _session(
        Opcode.REGION_RELEASE,
        m.Handle,
        m.Empty,
        _ALL_OF_SESSION,
        Trait.NONE,
        "releases an ended region's addresses",
        ability=SessionOption.REGIONS,
        driver_failure=Status.SESSION_FAILED,
    ),
    _session(
        Opcode.LAUNCH_IN,
        m.LaunchIn,
        m.Empty,
        _SUBMIT,
        Trait.IN_STREAM | Trait.WAITS_IN_DRIVER,
        "LAUNCH, if every region of a set is active",
        ability=SessionOption.REGIONS,
        driver_failure=Status.LAUNCH_FAILED,
    ),
    _session(
        Opcode.GRAPH_LAUNCH_IN,
        m.GraphLaunchIn,
        m.Empty,
        _ALL_OF_SESSION,
        Trait.IN_STREAM,
        "GRAPH_LAUNCH, if every region of a set is active",
        ability=SessionOption.REGIONS,
        driver_failure=Status.LAUNCH_FAILED,
    ),
    # Facts about a module's parts.
    _session(
        Opcode.MODULE_VARIABLE,
        m.VariableName,
        m.Variable,
        _SUBMIT,
        Trait.NONE,
        "finds a variable of a module",
        ability=SessionOption.MODULE_DETAILS,
        driver_failure=Status.SESSION_FAILED,
    ),
    _session(
        Opcode.MODULE_FIGURES,
        m.Handle,
        m.ModuleFigures,
        _SUBMIT,
        Trait.NONE,
        "returns the resources of a module's kernels",
        ability=SessionOption.MODULE_DETAILS,
        driver_failure=Status.SESSION_FAILED,
    ),
    # Times of a stream.
    _session(
        Opcode.EVENT_RECORD,
        m.EventRecord,
        m.Empty,
        _SUBMIT,
        Trait.NONE,
        "records a stream's [time](#events-of-a-stream)",
        ability=SessionOption.EVENTS,
        driver_failure=Status.SESSION_FAILED,
    ),
    _session(
        Opcode.EVENT_ELAPSED,
        m.EventPair,
        m.Elapsed,
        _SUBMIT,
        Trait.NONE,
        "waits for two events, and returns the time between them",
        ability=SessionOption.EVENTS,
        driver_failure=Status.SESSION_FAILED,
    ),
    _session(
        Opcode.EVENT_DESTROY,
        m.Handle,
        m.Empty,
        _SUBMIT,
        Trait.NONE,
        "deletes an event",
        ability=SessionOption.EVENTS,
        driver_failure=Status.SESSION_FAILED,
    ),
    # Output of kernels, and launches with attributes.
    _session(
        Opcode.PRINTED,
        m.Empty,
        m.Printed,
        _SUBMIT,
        Trait.NONE,
        "waits as SYNC does, and returns what kernels have printed",
        ability=SessionOption.PRINTED,
        driver_failure=Status.SESSION_FAILED,
    ),
    _session(
        Opcode.LAUNCH_WITH,
        m.LaunchWith,
        m.Empty,
        _SUBMIT,
        Trait.IN_STREAM | Trait.WAITS_IN_DRIVER,
        "LAUNCH, [cooperatively or in clusters](#launches-with-attributes)",
        ability=SessionOption.LAUNCH_WITH,
        driver_failure=Status.LAUNCH_FAILED,
    ),
    # Allocations that are reused, or that outlive their connection.
    _session(
        Opcode.MEM_REUSE,
        m.Handle,
        m.Empty,
        _WRITE,
        Trait.WAITS_IN_DRIVER,
        "[frees an allocation and allocates as many bytes in its place](#reusing-allocations)",
        ability=SessionOption.MEM_REUSE,
        driver_failure=Status.SESSION_FAILED,
    ),
    _session(
        Opcode.MEM_KEEP,
        m.MemKeep,
        m.Empty,
        _WRITE,
        Trait.NONE,
        "[keeps an allocation](#the-end-of-a-connection) beyond its connection's end, or takes one that is kept",
        ability=SessionOption.OWN_MEMORY,
        driver_failure=Status.SESSION_FAILED,
    ),
    _session(
        Opcode.MEM_KEPT,
        m.Empty,
        m.KeptBuffers,
        _ANY_OF_SESSION,
        Trait.NONE,
        "lists the kept allocations",
        ability=SessionOption.OWN_MEMORY,
        driver_failure=Status.SESSION_FAILED,
    ),
    # It needs all permissions, because it frees objects that other connections left behind.
    _session(
        Opcode.MEM_RESET,
        m.Empty,
        m.Freed,
        _ALL_OF_SESSION,
        Trait.SETTLES,
        "waits as SYNC does, and frees everything that no connection owns",
        ability=SessionOption.OWN_MEMORY,
        driver_failure=Status.SESSION_FAILED,
    ),
    # The client's report of a refusal that it made without the worker.
    # Any permission: each connection that may launch or copy can be refused, and must be able to report that.
    _session(
        Opcode.REGION_REFUSED,
        m.RegionRefusal,
        m.Empty,
        _ANY_OF_SESSION,
        Trait.NONE,
        "reports a launch or copy that the client [refused](#refused-launches) because of a region",
        ability=SessionOption.REGION_REFUSED,
        driver_failure=Status.SESSION_FAILED,
    ),
    # Any permission: each token may be given up for the other.
    _session(
        Opcode.USE_TOKEN,
        m.Handle,
        m.Empty,
        _ANY_OF_SESSION,
        Trait.NONE,
        "serves the connection's later requests by its [second token](#a-second-token), or as before",
        ability=SessionOption.USE_TOKEN,
        driver_failure=Status.SESSION_FAILED,
    ),
)


def _mistakes() -> Iterator[str]:
    """Yield the contradictions in the table above."""
    # The table must have each opcode once, in the opcodes' order: generated tables follow it.
    if [spec.op for spec in _ALL] != list(Opcode):
        missing = ", ".join(op.name for op in Opcode if op not in {spec.op for spec in _ALL})
        displaced = next(
            (spec.op.name for spec, op in zip(_ALL, Opcode, strict=False) if spec.op is not op), "the last"
        )
        mistake = f"missing: {missing}" if missing else f"the first in the wrong place: {displaced}"
        yield f"every opcode must have one specification, in the opcodes' order; {mistake}"
    for spec in _ALL:
        # Peers of any version find out from the number alone whether the broker or a worker serves an operation.
        if (0x0600 <= spec.op < 0x0700) != spec.is_session:
            yield f"{spec.op.name}: the numbers of session operations, and no others, must be 0x0600 to 0x06ff"
        # A trait of the other kind would have no effect.
        if spec.traits & (_CONTROL_TRAITS if spec.is_session else ~_CONTROL_TRAITS):
            yield f"{spec.op.name}: {spec.traits} are not all traits of such an operation"
        # A bar would end the table's cell.
        if not spec.does or "|" in spec.does:
            yield f"{spec.op.name}: what it does must be a sentence for a table's cell, not {spec.does!r}"


if _found := list(_mistakes()):
    raise TypeError("; ".join(_found))

SPECS: Final = MappingProxyType({spec.op: spec for spec in _ALL})
"""The specifications by opcode, in the order of the opcodes."""

SESSION_OPCODES: Final = frozenset(spec.op for spec in _ALL if spec.is_session)
"""The operations of sessions. The broker refuses them; a worker refuses all others but PING."""

HANDING_OVER: Final = frozenset(spec.op for spec in _ALL if spec.trigger is WireTrigger.ATTACH)
"""The operations that pass the connection to another process. Each is its connection's last control request."""

EVENTS_OF: Final = {spec.op: spec.events for spec in _ALL if spec.events is not None}
"""The operations that begin a subscription, and those of its events."""


def having(trait: Trait) -> frozenset[Opcode]:
    """The operations with a single trait."""
    return frozenset(spec.op for spec in _ALL if trait in spec.traits)


# By number, for frames with unknown operations.
_IN_SESSION: Final = {int(spec.op): spec.needs for spec in _ALL if State.SESSION in spec.states}
_ANY_OF: Final = {op: needs.permissions for op, needs in _IN_SESSION.items() if needs.any_suffices}
_ALL_OF: Final = {op: needs.permissions for op, needs in _IN_SESSION.items() if not needs.any_suffices}


def missing_permission(op: int, permissions: Permission) -> Permission:
    """Return the permissions that a session's connection lacks for an operation; an empty set if it may do it.

    An unknown operation needs all permissions of a session.
    """
    if op in _ANY_OF:
        needed = _ANY_OF[op]
        return Permission(0) if needed & permissions else needed
    return _ALL_OF.get(op, SESSION_PERMISSIONS) & ~permissions
