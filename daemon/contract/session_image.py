"""The image of a parked session: all that another worker needs to continue the session, except bytes in host memory.

A worker packs the image, the broker keeps it without reading it, and another worker of the same lease unpacks it. The
image records everything that must be equal in the other process: addresses, numbers and handles that the tenant's data
may contain. If the image can't represent a part of a session, the session can't leave its process
(`LeaveRefusedReport`), and can only be parked warm.

Holders are numbered: UNHELD, LEASE, then one for each connection, from FIRST_CONNECTION on.
"""

from typing import Any, Final, NamedTuple, Self

import msgpack

IMAGE_VERSIONS: Final = frozenset({1, 2, 3, 4})
"""The versions that workers adopt. The broker refuses other versions, and the session then stays in its worker.

Version 2 adds each connection's events, and the bytes that it has received and its worker has not served. Version 3
adds regions. Version 4 adds the machine code of modules. A worker writes the lowest version that can hold its session,
so that workers of earlier daemons can adopt it.
"""

MAX_CODE_BYTES: Final = 32 << 20
"""Maximum size of the machine code in an image, in bytes. Modules whose code would exceed it are compiled again."""

MAX_IMAGE_BYTES: Final = 320 << 20
"""Maximum size of an image, in bytes. Modules' images, of which a session may have 256 MiB, and graphs are most of
it."""

UNHELD: Final = 0
LEASE: Final = 1
FIRST_CONNECTION: Final = 2


class UnreadableImage(ValueError):
    """The bytes are not an image of this version."""


class ModuleState(NamedTuple):
    """A loaded module.

    Attributes:
        image: The image that the tenant loaded.
        place: Where the driver put the module: addresses and numbers that must be the same in the other process.
        variables: Address and size of each variable that the tenant has looked up.
        code: The machine code that the driver has compiled from the image, so that the next process need not compile it
            again; b"" for none.
    """

    number: int
    image: bytes
    place: tuple[int, ...]
    holder: int
    variables: tuple[tuple[int, int], ...]
    code: bytes = b""


class AllocationState(NamedTuple):
    address: int
    size_bytes: int
    holder: int


class GraphState(NamedTuple):
    """A graph, as its GRAPH_CREATE request described it."""

    number: int
    payload: bytes
    holder: int


class RingState(NamedTuple):
    """The worker's counters of a ring: bytes taken, bytes put in, the peer's last known, and the last sync answered."""

    requests_head: int
    replies_tail: int
    replies_head: int
    answered: int


class ConnectionState(NamedTuple):
    """A connection; its socket and its ring travel as descriptors.

    Attributes:
        pid: The client's process; 0 if unknown.
        owns: Whether everything that the connection makes ends with the connection.
        streams: The numbers of its streams on the wire, without the default stream.
        selected: The number of the selected stream.
        ring: The state of its ring; None if it has no ring.
        unread: Bytes that the worker has received and not served: requests that wait for the session's return.
        events: The number of each event, which the client uses too, and its time in nanoseconds.
    """

    pid: int
    owns: bool
    streams: tuple[int, ...]
    selected: int
    ring: RingState | None
    has_arena: bool
    unread: bytes = b""
    events: tuple[tuple[int, int], ...] = ()


class RegionImage(NamedTuple):
    """A region that the session has mapped, or that one of its region sets names.

    Attributes:
        region_id: Its id, big-endian.
        kept_bytes: Bytes that stay mapped in its place after its memory was removed.
        ended: The word that ended it, and the time of that word; None while it has not ended.
        is_reported: Whether a refusal has reported how it ended.
        is_removed: Whether its memory was removed.
        is_released: Whether its address was also released, so that only region sets still name it.
    """

    region_id: bytes
    slot: int
    number: int
    address: int
    size_bytes: int
    kept_bytes: int
    ended: tuple[int, int] | None
    is_reported: bool
    is_removed: bool
    is_released: bool


class RegionSetState(NamedTuple):
    """A region set, with the position of each of its regions in `RegionStates.regions`."""

    handle: int
    members: tuple[int, ...]
    holder: int


class RegionStates(NamedTuple):
    """The regions of a session that has had any.

    Attributes:
        launches_begun: Number of launches since the last wait that was answered. A refusal names its launch by this
          number.
    """

    regions: tuple[RegionImage, ...]
    sets: tuple[RegionSetState, ...]
    last_set: int
    launches_begun: int


class SessionImage(NamedTuple):
    """A session.

    Attributes:
        number: The number of its park.
        driver: The driver's name, and the compute capability and CUDA version of the card that the session left.
        context: The driver's own record of the parked memory.
        moved_bytes: Bytes of the session in host memory.
        kept: Name and handle of each allocation that is kept by name.
        arena_bytes: The arena's size; 0 if there is none.
        printed: Output of kernels that no client has requested yet, and whether some of it was lost.
        counters: The control page's counters, by number.
        kept_bytes: Bytes that were charged for the kernels' local memory.
        regions: None if the session has never had a region.
    """

    lease_id: int
    number: int
    driver: tuple[str, int, int]
    context: bytes
    moved_bytes: int
    modules: tuple[ModuleState, ...]
    last_module: int
    allocations: tuple[AllocationState, ...]
    kept: tuple[tuple[str, int], ...]
    graphs: tuple[GraphState, ...]
    last_graph: int
    last_stream: int
    connections: tuple[ConnectionState, ...]
    arena_bytes: int
    printed: tuple[bytes, bool]
    counters: tuple[tuple[int, int], ...]
    kept_bytes: int
    regions: RegionStates | None = None

    @property
    def version(self) -> int:
        """The version in which the image is written."""
        if any(module.code for module in self.modules):
            return 4
        if self.regions is not None:
            return 3
        return 2 if any(connection.unread or connection.events for connection in self.connections) else 1

    def to_bytes(self) -> bytes:
        fields: list[Any] = list(self._replace(lease_id=0))
        if self.version < 3:
            # Versions 1 and 2 have no regions.
            del fields[_REGIONS]
        if self.version < 4:
            # In versions 1 to 3, modules have no code.
            fields[_MODULES] = [module[:-1] for module in self.modules]
        if self.version == 1:
            # In version 1, connections have no `unread` and no `events`.
            fields[_CONNECTIONS] = [connection[:-2] for connection in self.connections]
        packed: bytes = msgpack.packb((self.version, *fields, self.lease_id.to_bytes(16, "big")))
        return packed

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        """Read an image of any version in IMAGE_VERSIONS. Raises UnreadableImage."""
        try:
            version, _, *fields, lease_id = msgpack.unpackb(data, use_list=False, max_bin_len=MAX_IMAGE_BYTES)
            if version not in IMAGE_VERSIONS:
                raise ValueError(f"its version must be at most {max(IMAGE_VERSIONS)}, not {version}")
            return cls(int.from_bytes(lease_id, "big"), *fields)._typed()
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
            raise UnreadableImage(f"the image can't be read: {error}") from None

    def _typed(self) -> Self:
        """Convert the records to their types, which msgpack does not preserve."""
        return self._replace(
            modules=_each(ModuleState, self.modules),
            allocations=_each(AllocationState, self.allocations),
            graphs=_each(GraphState, self.graphs),
            connections=tuple(
                connection._replace(ring=None if connection.ring is None else RingState(*connection.ring))
                for connection in _each(ConnectionState, self.connections)
            ),
            regions=None if self.regions is None else _typed_regions(*self.regions),
        )


_MODULES: Final = SessionImage._fields.index("modules")
_CONNECTIONS: Final = SessionImage._fields.index("connections")
_REGIONS: Final = SessionImage._fields.index("regions")


def _typed_regions(regions: Any, sets: Any, last_set: int, launches_begun: int) -> RegionStates:
    return RegionStates(_each(RegionImage, regions), _each(RegionSetState, sets), last_set, launches_begun)


def _each(kind: Any, rows: Any) -> Any:
    return tuple(kind(*row) for row in rows)
