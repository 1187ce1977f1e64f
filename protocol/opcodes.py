"""The numbers on the wire: operations, header flags, statuses, and the public constants that belong to them."""

from enum import IntEnum, IntFlag
from typing import Final

GPU_RESOURCE_TYPE: Final = 0x0005
"""The resource type of a GPU in LEASE_ALLOC and in an inventory entry."""


class Opcode(IntEnum):
    """The operations. 0x0200, 0x020A and 0x0601-0x0607 are public numbers; the others are this product's."""

    # The connection: served by broker and worker, GPU_SUBMIT by a submit's worker.
    HELLO = 0x0001
    ATTACH = 0x0002
    PING = 0x0003
    GOODBYE = 0x0004
    GPU_SUBMIT = 0x0005
    # The node, its cards and its leases: served by the broker.
    GET_INVENTORY = 0x0100
    LEASE_ALLOC = 0x0200
    LEASE_RENEW = 0x0201
    LEASE_FREE = 0x0202
    LEASE_QUERY = 0x0203
    LEASE_LIST_ACTIVE = 0x0204
    LEASE_SUBSCRIBE = 0x0205
    LEASE_UNSUBSCRIBE = 0x0206
    LEASE_EVENT = 0x0207
    LEASE_REVOKE = 0x020A
    FENCE_CLEAR = 0x020B
    DRAIN = 0x020C
    DRAIN_CANCEL = 0x020D
    METRICS = 0x020E
    HEALTH = 0x020F
    REGION_OPEN = 0x0210
    REGION_CANCEL = 0x0211
    LEASE_RESIZE = 0x0212
    REGION_WATCH = 0x0213
    REGION_EVENT = 0x0214
    LEASE_NOTE = 0x0215
    PLACE = 0x0216
    FLEET_LIST = 0x0217
    LEASE_PARK = 0x0218
    LEASE_MOVE = 0x0219
    CARD_DRAIN = 0x021A
    # Tokens: served by the broker.
    CAPABILITY_ISSUE = 0x0300
    CAPABILITY_PRESENT = 0x0301
    CAPABILITY_AUDIENCE = 0x0302
    CAPABILITY_REVOKE = 0x0303
    # Sessions: served by a session's worker, never by the broker.
    MEM_ALLOC = 0x0601
    MEM_FREE = 0x0602
    MEM_WRITE = 0x0603
    MEM_READ = 0x0604
    MODULE_LOAD = 0x0605
    LAUNCH = 0x0606
    SYNC = 0x0607
    MODULE_UNLOAD = 0x0608
    ARENA_WRITE = 0x0609
    ARENA_READ = 0x060A
    STREAM_CREATE = 0x060B
    STREAM_DESTROY = 0x060C
    STREAM_SELECT = 0x060D
    STREAM_WAIT = 0x060E
    STREAM_SYNC = 0x060F
    GRAPH_CREATE = 0x0610
    GRAPH_LAUNCH = 0x0611
    GRAPH_DESTROY = 0x0612
    SUBMIT_RUN = 0x0613
    MODULE_PARAMETERS = 0x0614
    REGION_SET = 0x0615
    REGION_SET_FREE = 0x0616
    REGION_RELEASE = 0x0617
    LAUNCH_IN = 0x0618
    GRAPH_LAUNCH_IN = 0x0619
    MODULE_VARIABLE = 0x061A
    MODULE_FIGURES = 0x061B
    EVENT_RECORD = 0x061C
    EVENT_ELAPSED = 0x061D
    EVENT_DESTROY = 0x061E
    PRINTED = 0x061F
    LAUNCH_WITH = 0x0620
    MEM_REUSE = 0x0621
    MEM_KEEP = 0x0622
    MEM_KEPT = 0x0623
    MEM_RESET = 0x0624
    REGION_REFUSED = 0x0625
    USE_TOKEN = 0x0626


class Flag(IntFlag):
    """The bits of the header's flags byte. Every other bit is refused."""

    REPLY = 0x01
    QUIET = 0x02


KNOWN_FLAGS: Final = int(Flag.REPLY | Flag.QUIET)


class Status(IntEnum):
    """The header's status: 0 in requests and successful replies. -1 to -6 are the public host error numbers."""

    # The public host errors, then this product's: -16 to -24 of any request, -32 to -37 of a session.
    OK = 0
    DISCONNECTED = -1
    LEASE_EXPIRED = -2
    FENCED = -3
    CAPACITY_EXCEEDED = -4
    UNSUPPORTED = -5
    REVOKED = -6
    INVALID_REQUEST = -16
    NOT_FOUND = -17
    DENIED = -18
    BUSY = -19
    INTERNAL = -20
    LEASE_FREED = -21
    DRAINED = -22
    TIMED_OUT = -23
    CANCELLED = -24
    SESSION_FAILED = -32
    ALLOC_FAILED = -33
    INVALID_HANDLE = -34
    LOAD_FAILED = -35
    LAUNCH_FAILED = -36
    SYNC_FAILED = -37


class Exclusivity(IntEnum):
    """The other leases that may share a lease's card; one byte. 4-254 are refused as unknown, 255 is never valid."""

    SHARED = 0
    SESSION_EXCLUSIVE = 1
    DEVICE_EXCLUSIVE = 2
    PARTITION_EXCLUSIVE = 3


class Waiting(IntEnum):
    """How client and worker wait for each other, and the worker for the card; one byte. Other values are refused.

    SPIN answers soonest and costs a core while there is traffic. With BLOCK both sides sleep and cost no core.
    """

    SPIN = 0
    YIELD = 1
    BLOCK = 2


class HelloRequestOption(IntEnum):
    """The types of the options in HELLO.

    LINE_END, the bytes 0D 0A 0D 0A: a daemon skips it. An HTTP server takes it for the end of a request, and answers.
    """

    LINE_END = 1


class HelloOption(IntEnum):
    """The types of the options in HELLO's reply.

    KEEPS_LEASES, without a value: leases outlive the daemon's process, so a client that loses the daemon reconnects.
    WARNING, a text for tenants that acquire a lease, for example that the cards are emulated.
    """

    KEEPS_LEASES = 1
    WARNING = 2


class SubmitOption(IntEnum):
    """The types of the options in GPU_SUBMIT's reply.

    NUMBER: the submit's number in the lease's report, a u64. TYPED_VALUES, without a value: TYPED_VALUE is supported.
    """

    NUMBER = 32
    TYPED_VALUES = 34


class SessionOption(IntEnum):
    """The types of the options in ATTACH's reply that name the session's abilities.

    `operations.py` says which operations an ability announces. All have an empty value except two. REGIONS, a u32:
    regions begin and end at multiples of this many bytes. CARD, a u16 and a u32: the card's compute capability, 90 for
    9.0, and the version of CUDA that its driver has, 13000 for 13.0; 0 for no CUDA driver.
    SYNC_WORD: the ring has the words by which a sync needs no frame, and the connection is the only one that can launch
    in the session. OWN_MEMORY, if ATTACH requested it: the connection's objects end with it, unless they are kept.
    USE_TOKEN, if ATTACH carried a second token: the connection may use it.
    """

    PARAMETER_TYPES = 33
    REGIONS = 35
    CARD = 36
    MODULE_DETAILS = 37
    EVENTS = 38
    PRINTED = 39
    LAUNCH_WITH = 40
    SYNC_WORD = 41
    MEM_REUSE = 42
    OWN_MEMORY = 43
    REGION_REFUSED = 44
    USE_TOKEN = 45


class LaunchFlag(IntFlag):
    """The flags of a LAUNCH_WITH. COOPERATIVE: all blocks run at the same time, or none."""

    COOPERATIVE = 1


class ParameterType(IntEnum):
    """A kernel parameter's type as PTX declares it, by PTX's own names; one byte.

    UNTOLD: the image does not name the type, or it is an array or a vector. POINTER: an integer declared as a pointer.
    """

    UNTOLD = 0
    B8 = 1
    B16 = 2
    B32 = 3
    B64 = 4
    U8 = 5
    U16 = 6
    U32 = 7
    U64 = 8
    S8 = 9
    S16 = 10
    S32 = 11
    S64 = 12
    F16 = 13
    F16X2 = 14
    F32 = 15
    F64 = 16
    POINTER = 17

    @property
    def text(self) -> str:
        """The type as PTX writes it, such as ".f32"."""
        return "a pointer (.ptr)" if self is ParameterType.POINTER else f".{self.name.lower()}"

    def clashes_with(self, other: "ParameterType") -> bool:
        """Return whether one is a float and the other an integer or a pointer; sizes and signs are not compared."""
        # Types of bits (.b32) match everything, so they are in neither set.
        return (self in _FLOATS and other in _INTEGERS) or (self in _INTEGERS and other in _FLOATS)


_FLOATS: Final = frozenset({ParameterType.F16, ParameterType.F32, ParameterType.F64})
_INTEGERS: Final = frozenset({*map(ParameterType, range(ParameterType.U8, ParameterType.F16)), ParameterType.POINTER})


class RevokeOutcome(IntEnum):
    """The outcome of LEASE_REVOKE.

    TORN_DOWN: the lease has ended, and its memory is proved free. FENCED: it has ended, but the memory is not proved
    free, and is not granted again until an operator clears the fence.
    """

    TORN_DOWN = 0
    FENCED = 1
    NOT_FOUND = 2


class Phase(IntEnum):
    """The phase of a lease on its way to its end; one byte."""

    ACTIVE = 0
    WARNING = 1
    GRACE = 2
    TEARDOWN = 3
    ENDED = 4


class ParameterKind(IntEnum):
    """The kind of a launch graph's parameter; one byte, others are refused."""

    VALUE = 0
    BUFFER = 1


class ArgumentKind(IntEnum):
    """The kind of a submit's argument; one byte, others are refused.

    VALUE: the kernel gets the bytes themselves. For the other kinds it gets a pointer to memory on the card.
    INPUT: the memory holds the sent bytes. OUTPUT: it begins as zeros, and the reply returns it. INOUT: both.
    """

    VALUE = 0
    INPUT = 1
    OUTPUT = 2
    INOUT = 3


TYPED_VALUE: Final = 0x20
"""The kind of a submit's VALUE if the client gives its type: TYPED_VALUE plus a `ParameterType` other than UNTOLD."""


class InventoryFlag(IntFlag):
    """The flag bits of an inventory entry. FENCED: some of its bytes are fenced. The daemon never sets DEGRADED."""

    FENCED = 0x0001
    DEGRADED = 0x0002


class ErrorTlv(IntEnum):
    """The types of the TLVs that follow an error's text. Unknown types are skipped."""

    HINT = 1
    FAILED_REQUEST_ID = 2
    FAILED_OP = 3
    KERNEL = 4
    ADDRESS = 5
    LOG = 6
    LINE = 7
    REGION = 8
    SITE = 9
    FLIPPED_NS = 10
    POSITION = 11
