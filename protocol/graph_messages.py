"""The bodies of launch graphs; see `messages`."""

from dataclasses import dataclass

from gpulease.protocol import limits
from gpulease.protocol.primitives import U8, U16, U32, U64, Record, list_of, sized_bytes, text, wire


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
