"""A session's tenant, what it knows, and the bodies of its requests: see `sessions`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpulease.daemon.contract.control_page import BrokerPage
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.image import CpuModule
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.memory_operations import GRANULE_BYTES
from gpulease.daemon.session.session import Session
from gpulease.protocol import messages as m
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import FrameReader
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.opcodes import Opcode, Status
from gpulease.protocol.operations import SPECS
from helpers.kernels import FAULTS, TRANSFORM
from helpers.session_rig import GAPS

from .draws import Draws

SLICE = 1 << 20
ALL = (1 << 64) - 1

SIZES = (64, 1, 4096, 100_000, SLICE // 2, SLICE, SLICE + 1, 0, ALL)
OFFSETS = (0, 0, 1, 60, 64, 4095, ALL)
LENGTHS = (0, 1, 4, 64, 65, 4096, 100_000, ALL)
IMAGES = (TRANSFORM, FAULTS, GAPS, b"", TRANSFORM[:400], TRANSFORM.replace(b"ret", b"rat"), b"\x7fELF", GAPS + b"\0\0")
KERNELS = ("scale", "bias", "gaps", "fill_u32", "stray_store", "misaligned", "nope", "")
"""Names of kernels that end, and names that do not exist."""

VARIABLES = ("coefficients", "nope", "", "scale")

DIMS = (1, 1, 2, 32, 0, 1025, 1 << 31, (1 << 32) - 1)
"""Grid and block sizes.

There are none between small and far too large ones, because kernels with them would take long.
"""

ARG_SIZES = ((8, 4, 4), (8, 8), (4, 8, 1), (8,), (), (16,), (8, 4), (4,) * 40)
Body = Callable[["Tenant", Draws], Any]


@dataclass
class Tenant:
    """A session, and what its tenant knows about it.

    Attributes:
        numbers: The numbers that it has received: of allocations, modules, streams and graphs.
        contents: The contents of its allocations, as long as no kernel has run.
        own_modules: The context's own modules, which are in no ledger.
        own_sizes: The context's own allocations: bytes by address.
    """

    session: Session
    context: CpuContext
    ledger: Ledger
    page: BrokerPage
    own_modules: frozenset[CpuModule]
    own_sizes: Mapping[int, int]
    reader: FrameReader = field(default_factory=lambda: FrameReader(MAX_PAYLOAD_BYTES))
    numbers: list[int] = field(default_factory=lambda: [1])
    contents: dict[int, bytearray] = field(default_factory=dict)
    is_known: bool = True
    last_id: int = 0
    end: Status | None = None

    def number(self, draws: Draws) -> int:
        way = draws.byte()
        return ALL >> way % 64 if way >= 250 else self.numbers[way % len(self.numbers)]


def launch(tenant: Tenant, draws: Draws) -> m.Launch:
    dims = [draws.pick(DIMS) for _ in range(3)]
    grid, block = (dims[0], 1, dims[1] if draws.chance(4) else 1), (dims[2], 1, 1)
    args = b"".join(
        (
            tenant.number(draws).to_bytes(8, "little"),
            (draws.byte() % 70).to_bytes(4, "little"),
            draws.take(4),
        )
    )
    sizes = draws.pick(ARG_SIZES)
    args = args.ljust(sum(sizes), b"\0")[: sum(sizes)] if not draws.chance(16) else args
    return m.Launch(
        tenant.number(draws), draws.pick(KERNELS), *grid, *block, draws.pick((0, 0, 64, 49153)), args, sizes
    )


def mem_write(tenant: Tenant, draws: Draws) -> m.MemWrite:
    return m.MemWrite(tenant.number(draws), draws.pick(OFFSETS), draws.sized(80) * draws.pick((1, 1, 2, 800)))


def arena_copy(tenant: Tenant, draws: Draws) -> m.ArenaCopy:
    at = draws.pick((0, 1, 4096, GRANULE_BYTES, GRANULE_BYTES - 1, ALL))
    return m.ArenaCopy(tenant.number(draws), draws.pick(OFFSETS), at, draws.pick(LENGTHS))


NODES: tuple[tuple[Opcode, Body], ...] = (
    (Opcode.LAUNCH, launch),
    (Opcode.MEM_WRITE, mem_write),
    (Opcode.ARENA_WRITE, arena_copy),
    (Opcode.ARENA_READ, arena_copy),
    (Opcode.SYNC, lambda tenant, draws: m.Empty()),
)


def graph_create(tenant: Tenant, draws: Draws) -> m.GraphCreate:
    nodes = []
    for _ in range(draws.below(6)):
        op, build = draws.pick(NODES)
        nodes.append(m.GraphNode(op, build_body(build(tenant, draws))))
    buffers = tuple(tenant.number(draws) for _ in range(draws.below(3)))
    parameters = tuple(
        m.GraphParameter("p" * draws.below(3), draws.below(3), draws.pick((4, 8, 8, 0, 1, 32765)))
        for _ in range(draws.below(4))
    )
    places = tuple(
        m.GraphPlace(draws.below(4), draws.below(6), draws.pick((0, 8, 12, 4, 1, 32764))) for _ in range(draws.below(5))
    )
    return m.GraphCreate(tuple(nodes), buffers, parameters, places)


def graph_launch(tenant: Tenant, draws: Draws) -> m.GraphLaunch:
    values = b"".join(
        tenant.number(draws).to_bytes(8, "little") + draws.pick(OFFSETS).to_bytes(8, "little")
        for _ in range(draws.below(3))
    )
    return m.GraphLaunch(tenant.number(draws), values + draws.sized(12))


def launch_in(tenant: Tenant, draws: Draws) -> m.LaunchIn:
    plain = launch(tenant, draws)
    shape = {name: getattr(plain, name) for name in plain.__slots__}
    return m.LaunchIn(**shape, region_set=tenant.number(draws), position=draws.number(8))


def launch_with(tenant: Tenant, draws: Draws) -> m.LaunchWith:
    plain = launch(tenant, draws)
    shape = {name: getattr(plain, name) for name in plain.__slots__}
    names = ("flags", "cluster_x", "cluster_y", "cluster_z")
    shape |= {name: draws.pick((0, 1, 2, 1 << 31)) for name in names}
    return m.LaunchWith(**shape, region_set=draws.pick((0, tenant.number(draws))), position=draws.number(8))


def graph_launch_in(tenant: Tenant, draws: Draws) -> m.GraphLaunchIn:
    plain = graph_launch(tenant, draws)
    return m.GraphLaunchIn(plain.graph, plain.args, tenant.number(draws), draws.number(8))


def region_set(tenant: Tenant, draws: Draws) -> m.RegionSet:
    return m.RegionSet(
        tuple(m.RegionRef(draws.pick((0, 1, 255, 65535)), draws.below(3)) for _ in range(draws.below(4)))
    )


def region_refusal(tenant: Tenant, draws: Draws) -> m.RegionRefusal:
    slot, number = draws.pick((0, 1, 255, 65535)), draws.below(3)
    return m.RegionRefusal(slot, number, draws.pick(("", "scale", "k" * 256)), draws.number(8))


def handle(tenant: Tenant, draws: Draws) -> m.Handle:
    return m.Handle(tenant.number(draws))


BODIES: dict[int, Body] = {
    Opcode.PING: lambda tenant, draws: m.Ping(draws.number(8)),
    Opcode.MEM_ALLOC: lambda tenant, draws: m.MemAlloc(draws.pick(SIZES)),
    Opcode.MEM_WRITE: mem_write,
    Opcode.MEM_READ: lambda tenant, draws: m.MemRead(tenant.number(draws), draws.pick(OFFSETS), draws.pick(LENGTHS)),
    Opcode.MODULE_LOAD: lambda tenant, draws: m.ModuleLoad(draws.pick(IMAGES)),
    Opcode.MEM_KEEP: lambda tenant, draws: m.MemKeep(tenant.number(draws), draws.pick(("", "a", "b"))),
    Opcode.LAUNCH: launch,
    Opcode.ARENA_WRITE: arena_copy,
    Opcode.ARENA_READ: arena_copy,
    Opcode.STREAM_WAIT: lambda tenant, draws: m.StreamWait(tenant.number(draws), tenant.number(draws)),
    Opcode.EVENT_RECORD: lambda tenant, draws: m.EventRecord(tenant.number(draws), draws.below(3)),
    Opcode.EVENT_ELAPSED: lambda tenant, draws: m.EventPair(draws.below(3), draws.below(3)),
    Opcode.MODULE_VARIABLE: lambda tenant, draws: m.VariableName(tenant.number(draws), draws.pick(VARIABLES)),
    Opcode.GRAPH_CREATE: graph_create,
    Opcode.GRAPH_LAUNCH: graph_launch,
    Opcode.REGION_SET: region_set,
    Opcode.REGION_REFUSED: region_refusal,
    Opcode.LAUNCH_IN: launch_in,
    Opcode.LAUNCH_WITH: launch_with,
    Opcode.GRAPH_LAUNCH_IN: graph_launch_in,
    **{op: handle for op, spec in SPECS.items() if spec.is_session and spec.request is m.Handle},
}
