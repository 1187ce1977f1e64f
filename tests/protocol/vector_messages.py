"""The cases of `vectors/messages/`: for each message its smallest, a typical and its largest instance."""

from typing import Any

from gpulease.protocol import Exclusivity, Opcode, Status, limits
from gpulease.protocol import messages as m
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import HEADER
from gpulease.protocol.lease_options import (
    EXCLUSIVITY,
    LABELS,
    LATENCY,
    LEASE_NAME,
    MAX_KERNEL,
    REQUEST_ID,
    WAITING,
    WEIGHT,
)
from gpulease.protocol.opcodes import (
    GPU_RESOURCE_TYPE,
    ArgumentKind,
    ErrorTlv,
    Flag,
    InventoryFlag,
    ParameterKind,
    ParameterType,
    Phase,
    RevokeOutcome,
    Waiting,
)
from gpulease.protocol.operations import HANDING_OVER, SPECS
from gpulease.protocol.primitives import LeaseParameter, Tlv

from .encodings import BODY_CLASSES, fields_of
from .vector_json import body_to_json, bytes_to_json, frame, header_to_json

LEASE = 0x0123456789ABCDEF_FEDCBA9876543210
REGION = 0x00112233445566778899AABBCCDDEEFF
CARD = 0x8B1E0F5C6A3D4E72_9C5B0A1F2E3D4C5B
CARD_UUID = "GPU-8b1e0f5c-6a3d-4e72-9c5b-0a1f2e3d4c5b"
EXPIRES = 1_790_000_120
U32, U64, U128 = 2**32 - 1, 2**64 - 1, 2**128 - 1
AUDIENCE = bytes(range(limits.AUDIENCE_BYTES))
POINTER = 0x7F8C_2000_0000
NAMED = (
    LeaseParameter(LEASE_NAME.tag, b"model-a"),
    LeaseParameter(LABELS.tag, b"zone=a,tier=gold"),
    LeaseParameter(REQUEST_ID.tag, bytes(range(16))),
)
TIMED = (LeaseParameter(WEIGHT.tag, b"\0\3"), LeaseParameter(LATENCY.tag, b"\1"))
SHARED = LeaseParameter(EXCLUSIVITY.tag, bytes([Exclusivity.SHARED]))
BOUNDED = LeaseParameter(MAX_KERNEL.tag, (2500).to_bytes(4, "big"))
BLOCKING = LeaseParameter(WAITING.tag, bytes([Waiting.BLOCK]))
LONG_TEXT = "x" * limits.MAX_TEXT_BYTES
ALL_TLVS = (Tlv(255, b""),) * limits.MAX_TLVS
CARD_DETAILS = {"name": "Embedded", "uuid": CARD_UUID, "index": 0, "leases": 1, "fenced_bytes": 0}
LEASE_MAP = {"lease_id": f"{LEASE:032x}", "state": "active", "size_bytes": 64 << 20, "remaining_ms": 119_000}
SCALE_ARGS = POINTER.to_bytes(8, "little") + (1024).to_bytes(4, "little") + bytes.fromhex("00000040")

ERRORS = {
    "smallest": m.ErrorBody("", ()),
    "typical": m.ErrorBody(
        "kernel scale faulted at 0x7f8c30000000",
        (
            Tlv(ErrorTlv.HINT, b"check the index against the buffer's length"),
            Tlv(ErrorTlv.FAILED_REQUEST_ID, (41).to_bytes(8, "big")),
            Tlv(ErrorTlv.FAILED_OP, Opcode.LAUNCH.to_bytes(2, "big")),
            Tlv(ErrorTlv.KERNEL, b"scale"),
            Tlv(ErrorTlv.ADDRESS, (0x7F8C_3000_0000).to_bytes(8, "big")),
        ),
    ),
    "compiler log": m.ErrorBody(
        "the PTX does not compile",
        (
            Tlv(ErrorTlv.LOG, "line 7: unknown instruction `ad.f32` → error".encode()),
            Tlv(ErrorTlv.LINE, (7).to_bytes(4, "big")),
        ),
    ),
    "region": m.ErrorBody(
        "the region was revoked: maintenance",
        (
            Tlv(ErrorTlv.KERNEL, b"scale"),
            Tlv(ErrorTlv.REGION, REGION.to_bytes(16, "big")),
            Tlv(ErrorTlv.SITE, (3).to_bytes(4, "big")),
            Tlv(ErrorTlv.FLIPPED_NS, (1_000_000_000).to_bytes(8, "big")),
            Tlv(ErrorTlv.POSITION, (4096).to_bytes(8, "big")),
        ),
    ),
    "unknown details": m.ErrorBody("full", (Tlv(200, b"\x01\x02"), Tlv(ErrorTlv.HINT, b"wait"), Tlv(0, b""))),
    "largest text": m.ErrorBody("e" * limits.MAX_ERROR_TEXT_BYTES, ALL_TLVS),
}
ERROR_STATUSES = {
    "typical": Status.SYNC_FAILED,
    "compiler log": Status.LOAD_FAILED,
    "region": Status.REVOKED,
    "unknown details": Status.BUSY,
}

Cases = dict[str, tuple[m.Body, m.Body, m.Body]]
"""By message: smallest, typical, largest."""

CONTROL: Cases = {
    "Hello": (m.Hello(0, "", ()), m.Hello(0, "gpulease 0.1.0", ()), m.Hello(U32, LONG_TEXT, ALL_TLVS)),
    "HelloReply": (
        m.HelloReply(0, "", 0, ()),
        m.HelloReply(0, "gpuleased 0.1.0", limits.MAX_PAYLOAD_BYTES, ()),
        m.HelloReply(U32, LONG_TEXT, U32, ALL_TLVS),
    ),
    "Attach": (m.Attach(()), m.Attach((Tlv(1, b"\x00"),)), m.Attach(ALL_TLVS)),
    "AttachReply": (
        m.AttachReply(0, "", "", ()),
        m.AttachReply(64 << 20, "cpu", CARD_UUID, ()),
        m.AttachReply(U64, LONG_TEXT, LONG_TEXT, ALL_TLVS),
    ),
    "Ping": (m.Ping(0), m.Ping(1), m.Ping(U64)),
    "Inventory": (
        m.Inventory((), []),
        m.Inventory((m.InventoryEntry(CARD, GPU_RESOURCE_TYPE, 0, 80 << 30, 60 << 30),), [CARD_DETAILS]),
        m.Inventory(
            (m.InventoryEntry(U128, 0xFFFF, InventoryFlag.FENCED | InventoryFlag.DEGRADED, U64, U64),) * 65535, None
        ),
    ),
    "LeaseAlloc": (
        m.LeaseAlloc(0, 0, 0, 0, None, ()),
        m.LeaseAlloc(GPU_RESOURCE_TYPE, 64 << 20, 120_000, 0, None, (SHARED, BOUNDED, BLOCKING, *NAMED)),
        m.LeaseAlloc(0xFFFF, U64, U32, U32, LONG_TEXT, (LeaseParameter(0xFFFF, b"\xee" * 960),) * limits.MAX_TLVS),
    ),
    "LeaseGrant": (
        m.LeaseGrant(0, 0, 0, 0, 0, 0, ""),
        m.LeaseGrant(LEASE, 1, 64 << 20, 120_000, EXPIRES, Exclusivity.SHARED, CARD_UUID),
        m.LeaseGrant(U128, U64, U64, U32, U64, 255, LONG_TEXT),
    ),
    "LeaseRenew": (m.LeaseRenew(0, 0), m.LeaseRenew(LEASE, 60_000), m.LeaseRenew(U128, U32)),
    "LeaseRenewed": (m.LeaseRenewed(0, 0, 0), m.LeaseRenewed(2, 60_000, EXPIRES), m.LeaseRenewed(U64, U32, U64)),
    "LeaseRef": (m.LeaseRef(0), m.LeaseRef(LEASE), m.LeaseRef(U128)),
    "LeaseRevoke": (m.LeaseRevoke(0, ""), m.LeaseRevoke(LEASE, "maintenance"), m.LeaseRevoke(U128, LONG_TEXT)),
    "LeaseRevoked": tuple(m.LeaseRevoked(outcome) for outcome in RevokeOutcome),  # type: ignore[dict-item]
    "LeaseSubscribe": (m.LeaseSubscribe(0), m.LeaseSubscribe(LEASE), m.LeaseSubscribe(U128)),
    "LeaseUnsubscribe": (m.LeaseUnsubscribe(0), m.LeaseUnsubscribe(3), m.LeaseUnsubscribe(U64)),
    "LeaseEvent": (
        m.LeaseEvent(0, 0, 0, 0, 0, 0, "", ""),
        m.LeaseEvent(LEASE, 2, 0, Phase.WARNING, 60_000, 1, "", "the node is being drained"),
        m.LeaseEvent(U128, U64, U64, 255, U32, U64, LONG_TEXT, LONG_TEXT),
    ),
    "Drain": (m.Drain(0), m.Drain(600_000), m.Drain(U32)),
    "CardDrain": (m.CardDrain("", None), m.CardDrain("1", 600_000), m.CardDrain(LONG_TEXT, U32)),
    "DrainStatus": (m.DrainStatus(None, 0), m.DrainStatus(600_000, 3), m.DrainStatus(U32, U32)),
    "Metrics": (
        m.Metrics("", ""),
        m.Metrics(
            "text/plain; version=0.0.4; charset=utf-8",
            f'# TYPE gpu_lease_active gauge\ngpu_lease_active{{UUID="{CARD_UUID}",tenant="ann"}} 3.0\n',
        ),
        m.Metrics(LONG_TEXT, "#" * limits.MAX_METRICS_BYTES),
    ),
    "FenceClear": (m.FenceClear(None), m.FenceClear(CARD_UUID), m.FenceClear(LONG_TEXT)),
    "FenceCleared": (m.FenceCleared(0), m.FenceCleared(1), m.FenceCleared(U32)),
    "CapabilityIssue": (
        m.CapabilityIssue(0, 0, b"", 0, 0),
        m.CapabilityIssue(LEASE, 0x18, AUDIENCE, 60_000, 0),
        m.CapabilityIssue(U128, U32, AUDIENCE, U32, U128),
    ),
    "CapabilityGrant": (
        m.CapabilityGrant(b"", b"", 0, 0, 0),
        m.CapabilityGrant(b"\x08\x01", AUDIENCE, 1, 60_000, EXPIRES),
        m.CapabilityGrant(b"\x12" * limits.MAX_TOKEN_BYTES, AUDIENCE, U64, U32, U64),
    ),
    "CapabilityPresent": (
        m.CapabilityPresent(b""),
        m.CapabilityPresent(b"\x08\x01"),
        m.CapabilityPresent(b"\x12" * limits.MAX_TOKEN_BYTES),
    ),
    "CapabilityHeld": (
        m.CapabilityHeld(0, 0, 0, 0, 0),
        m.CapabilityHeld(LEASE, 0x18, 1, 59_000, EXPIRES),
        m.CapabilityHeld(U128, U32, U64, U32, U64),
    ),
    "CapabilityRevoke": (
        m.CapabilityRevoke(0, 1, b""),
        m.CapabilityRevoke(LEASE, 0, b"\x08\x01"),
        m.CapabilityRevoke(U128, U128, b"\x12" * limits.MAX_TOKEN_BYTES),
    ),
    "Audience": (m.Audience(b""), m.Audience(AUDIENCE), m.Audience(b"\xff" * limits.AUDIENCE_BYTES)),
    "Report": (m.Report(None), m.Report(LEASE_MAP), m.Report([LEASE_MAP] * 20)),
}
SESSION: Cases = {
    "MemAlloc": (m.MemAlloc(0), m.MemAlloc(4096), m.MemAlloc(U64)),
    "Handle": (m.Handle(0), m.Handle(POINTER), m.Handle(U64)),
    "MemWrite": (
        m.MemWrite(0, 0, b""),
        m.MemWrite(POINTER, 16, bytes.fromhex("0000803f00000040")),
        m.MemWrite(U64, U64, b"\xa5" * limits.MAX_DATA_BYTES),
    ),
    "MemRead": (m.MemRead(0, 0, 0), m.MemRead(POINTER, 16, 8), m.MemRead(U64, U64, U64)),
    "Data": (m.Data(b""), m.Data(bytes.fromhex("0000803f00000040")), m.Data(b"\x5a" * limits.MAX_DATA_BYTES)),
    "ArenaCopy": (
        m.ArenaCopy(0, 0, 0, 0),
        m.ArenaCopy(POINTER, 16, 4096, 8),
        m.ArenaCopy(U64, U64, U64, U64),
    ),
    "MemKeep": (m.MemKeep(0, ""), m.MemKeep(POINTER, "weights"), m.MemKeep(U64, "n" * limits.MAX_KEPT_NAME_BYTES)),
    "KeptBuffers": (
        m.KeptBuffers(()),
        m.KeptBuffers((m.KeptBuffer("steps", POINTER, 16), m.KeptBuffer("weights", POINTER + 512, 1 << 20))),
        m.KeptBuffers((m.KeptBuffer("", U64, U64),) * limits.MAX_KEPT),
    ),
    "Freed": (m.Freed(0), m.Freed(16), m.Freed(U64)),
    "StreamWait": (m.StreamWait(0, 0), m.StreamWait(2, 1), m.StreamWait(U64, U64)),
    "ModuleLoad": (
        m.ModuleLoad(b""),
        m.ModuleLoad(b".version 6.3\n.target sm_75\n.address_size 64\n"),
        m.ModuleLoad(b"/" * (limits.MAX_PAYLOAD_BYTES - 4)),
    ),
    "ModuleLoaded": (
        m.ModuleLoaded(0, ()),
        m.ModuleLoaded(2, (m.KernelEntry("scale", 1024, (8, 4, 4)), m.KernelEntry("bias", 1024, (8, 4, 4)))),
        m.ModuleLoaded(U64, (m.KernelEntry("", U32, ()),) * limits.MAX_KERNELS),
    ),
    "ModuleParameters": (
        m.ModuleParameters(()),
        m.ModuleParameters((bytes([ParameterType.POINTER, ParameterType.U32, ParameterType.F32]), b"")),
        m.ModuleParameters((b"\x07" * limits.MAX_ARGUMENTS,) * 2),
    ),
    "EventRecord": (m.EventRecord(0, 0), m.EventRecord(1, 7), m.EventRecord(U64, U64)),
    "EventPair": (m.EventPair(0, 0), m.EventPair(7, 8), m.EventPair(U64, U64)),
    "Elapsed": (m.Elapsed(0), m.Elapsed(12_500_000), m.Elapsed(U64)),
    "Printed": (m.Printed(b"", 0), m.Printed(b"thread 3: 0.5\n", 0), m.Printed(b"\x0a" * limits.MAX_PRINTED_BYTES, 1)),
    "VariableName": (
        m.VariableName(0, ""),
        m.VariableName(2, "coefficients"),
        m.VariableName(U64, "v" * limits.MAX_KERNEL_NAME_BYTES),
    ),
    "Variable": (m.Variable(0, 0), m.Variable(POINTER, 1024), m.Variable(U64, U64)),
    "ModuleFigures": (
        m.ModuleFigures(()),
        m.ModuleFigures((m.KernelFigures(1024, 231_424, 40, 16, 256),)),
        m.ModuleFigures((m.KernelFigures(*(U32,) * 5),) * limits.MAX_KERNELS),
    ),
    "Launch": (
        m.Launch(0, "", 0, 0, 0, 0, 0, 0, 0, b"", ()),
        m.Launch(2, "scale", 4, 1, 1, 256, 1, 1, 0, SCALE_ARGS, (8, 4, 4)),
        m.Launch(
            U64,
            "k" * limits.MAX_KERNEL_NAME_BYTES,
            *(U32,) * 7,
            b"\x01" * limits.MAX_ARGUMENT_BYTES,
            (8,) * limits.MAX_ARGUMENTS,
        ),
    ),
}
GRAPHS: Cases = {
    "GraphCreate": (
        m.GraphCreate((), (), (), ()),
        m.GraphCreate(
            (
                m.GraphNode(Opcode.ARENA_WRITE, build_body(m.ArenaCopy(POINTER, 0, 4096, 16))),
                m.GraphNode(
                    Opcode.LAUNCH, build_body(m.Launch(2, "scale", 4, 1, 1, 256, 1, 1, 0, SCALE_ARGS, (8, 4, 4)))
                ),
            ),
            (POINTER,),
            (m.GraphParameter("x", ParameterKind.BUFFER, 8), m.GraphParameter("factor", ParameterKind.VALUE, 4)),
            (m.GraphPlace(0, 1, 0), m.GraphPlace(1, 1, 12)),
        ),
        m.GraphCreate(
            (m.GraphNode(0xFFFF, b"\xa5" * limits.MAX_GRAPH_NODE_BYTES),) * 60,
            (U64,) * limits.MAX_GRAPH_HANDLES,
            (m.GraphParameter("p" * limits.MAX_PARAMETER_NAME_BYTES, 255, U32),) * limits.MAX_GRAPH_PARAMETERS,
            (m.GraphPlace(0xFFFF, 0xFFFF, U32),) * limits.MAX_GRAPH_PLACES,
        ),
    ),
    "GraphLaunch": (
        m.GraphLaunch(0, b""),
        m.GraphLaunch(1, POINTER.to_bytes(8, "little") + bytes(8) + bytes.fromhex("00000040")),
        m.GraphLaunch(U64, b"\x01" * limits.MAX_ARGUMENT_BYTES),
    ),
}
REGIONS: Cases = {
    "RegionOpen": (
        m.RegionOpen(0, 0, 0, ""),
        m.RegionOpen(LEASE, 4 << 20, 60_000, "bob"),
        m.RegionOpen(U128, U64, U32, LONG_TEXT),
    ),
    "RegionGrant": (
        m.RegionGrant(0, 0, 0, 0, 0, 0, 0, 0),
        m.RegionGrant(REGION, 1, 4 << 20, 60_000, EXPIRES, POINTER, 3, 1),
        m.RegionGrant(U128, U64, U64, U32, U64, U64, 0xFFFF, U32),
    ),
    "RegionCancel": (m.RegionCancel(0, 0), m.RegionCancel(REGION, 1), m.RegionCancel(U128, 255)),
    "LeaseResize": (m.LeaseResize(0, 0), m.LeaseResize(LEASE, 96 << 20), m.LeaseResize(U128, U64)),
    "ParkedSession": (m.ParkedSession(0, 0), m.ParkedSession(LEASE, 96 << 20), m.ParkedSession(U128, U64)),
    "LeaseMove": (m.LeaseMove(0, None), m.LeaseMove(LEASE, "1"), m.LeaseMove(U128, "GPU-" + "f" * 200)),
    "MovedSession": (
        m.MovedSession(0, "", 0, 0),
        m.MovedSession(LEASE, "GPU-1", 96 << 20, 480_000),
        m.MovedSession(U128, "GPU-" + "f" * 200, U64, U64),
    ),
    "LeaseNote": (
        m.LeaseNote(0, b""),
        m.LeaseNote(REGION, b'{"request":"7","tokens":24}'),
        m.LeaseNote(U128, b"\xff" * limits.MAX_NOTE_BYTES),
    ),
    "Place": (
        m.Place(0, 0, "", (), None, ()),
        m.Place(8 << 30, Exclusivity.SHARED, "model-a", ("zone=a", "tier=gold"), None, ("node-7",)),
        m.Place(U64, 255, "x", ("k=v",) * limits.MAX_LABELS, "0", ("n",) * limits.MAX_TRIED),
    ),
    "Placement": (
        m.Placement((), None, 0, ""),
        m.Placement((m.Candidate("node-1", ("tls:gpu1.example:7443",)), m.Candidate("node-2", ())), "node-1", 5, ""),
        m.Placement(
            (m.Candidate("n", ("unix:/d",) * limits.MAX_NODE_ADDRESSES),) * limits.MAX_CANDIDATES,
            "n",
            U32,
            LONG_TEXT,
        ),
    ),
    "RegionEvent": (
        m.RegionEvent(0, 0, 0, 0, "", 0, 0, 0, 0),
        m.RegionEvent(REGION, 2, 1, Status.REVOKED, "scale", 3, 4096, 1_000_000_000, 1_000_050_000),
        m.RegionEvent(U128, U64, U64, -0x8000, "k" * limits.MAX_KERNEL_NAME_BYTES, U32, U64, U64, U64),
    ),
    "RegionSet": (
        m.RegionSet(()),
        m.RegionSet((m.RegionRef(3, 1), m.RegionRef(4, 2))),
        m.RegionSet((m.RegionRef(0xFFFF, U32),) * limits.MAX_REGIONS),
    ),
    "RegionRefusal": (
        m.RegionRefusal(0, 0, "", 0),
        m.RegionRefusal(3, 1, "scale", 4096),
        m.RegionRefusal(0xFFFF, U32, "k" * limits.MAX_KERNEL_NAME_BYTES, U64),
    ),
    "LaunchIn": (
        m.LaunchIn(0, "", 0, 0, 0, 0, 0, 0, 0, b"", (), 0, 0),
        m.LaunchIn(2, "scale", 4, 1, 1, 256, 1, 1, 0, SCALE_ARGS, (8, 4, 4), 1, 4096),
        m.LaunchIn(
            U64,
            "k" * limits.MAX_KERNEL_NAME_BYTES,
            *(U32,) * 7,
            b"\x01" * limits.MAX_ARGUMENT_BYTES,
            (8,) * limits.MAX_ARGUMENTS,
            U64,
            U64,
        ),
    ),
    "LaunchWith": (
        m.LaunchWith(0, "", 0, 0, 0, 0, 0, 0, 0, b"", (), 0, 0, 0, 0, 0, 0),
        m.LaunchWith(2, "scale", 4, 1, 1, 256, 1, 1, 0, SCALE_ARGS, (8, 4, 4), 1, 4096, 1, 2, 1, 1),
        m.LaunchWith(
            U64, "k" * 64, U32, U32, U32, U32, U32, U32, U32, b"\xff" * 64, (U32,), U64, U64, U32, U32, U32, U32
        ),
    ),
    "GraphLaunchIn": (
        m.GraphLaunchIn(0, b"", 0, 0),
        m.GraphLaunchIn(1, bytes.fromhex("00002041"), 1, 4096),
        m.GraphLaunchIn(U64, b"\x01" * limits.MAX_ARGUMENT_BYTES, U64, U64),
    ),
}
SUBMITS: Cases = {
    "GpuSubmit": (m.GpuSubmit(0, ()), m.GpuSubmit(30_000, ()), m.GpuSubmit(U32, ALL_TLVS)),
    "SubmitRun": (
        m.SubmitRun("", 0, 0, 0, 0, 0, 0, 0, (), b""),
        m.SubmitRun(
            "scale",
            *(4, 1, 1, 256, 1, 1, 0),
            (
                m.SubmitArgument(ArgumentKind.INOUT, 0, bytes.fromhex("0000803f00000040")),
                m.SubmitArgument(ArgumentKind.VALUE, 0, bytes.fromhex("02000000")),
                m.SubmitArgument(ArgumentKind.VALUE, 0, bytes.fromhex("00000040")),
            ),
            b".version 6.3\n.target sm_75\n.address_size 64\n",
        ),
        m.SubmitRun(
            "k" * limits.MAX_KERNEL_NAME_BYTES,
            *(U32,) * 7,
            (m.SubmitArgument(255, U64, b"\xa5" * 1024),) * limits.MAX_SUBMIT_ARGUMENTS,
            b"/" * (1 << 20),
        ),
    ),
    "SubmitDone": (
        m.SubmitDone(()),
        m.SubmitDone((bytes.fromhex("0000004000008040"),)),
        m.SubmitDone((b"\x5a" * limits.MAX_SUBMIT_OUTPUT_BYTES,)),
    ),
}
SIZES = ("smallest", "typical", "largest")
LATER: dict[str, list[tuple[str, m.Body]]] = {
    "LeaseAlloc": [("timed", m.LeaseAlloc(GPU_RESOURCE_TYPE, 64 << 20, 120_000, 0, None, TIMED))],
}
"""Cases that came after a body's first ones, for lease options that came later."""


def documents() -> dict[str, dict[str, Any]]:
    bodies: dict[str, list[tuple[str, m.Body]]] = {
        name: list(zip(SIZES, cases, strict=True))
        for name, cases in (CONTROL | SESSION | GRAPHS | REGIONS | SUBMITS).items()
    }
    for name, cases in LATER.items():
        bodies[name] += cases
    bodies["Empty"] = [("only", m.Empty())]
    bodies["ErrorBody"] = list(ERRORS.items())
    return {_file_name(name): _document(name, bodies[name]) for name in BODY_CLASSES}


def _document(name: str, bodies: list[tuple[str, m.Body]]) -> dict[str, Any]:
    kind = BODY_CLASSES[name]
    return {
        "kind": "message",
        "message": name,
        "fields": [{"name": field, "encoding": str(encoding)} for field, encoding in fields_of(kind).items()],
        "cases": [case for size, body in bodies for case in _cases(size, body)],
    }


def _cases(size: str, body: m.Body) -> list[dict[str, Any]]:
    """One case for each operation and direction that carries the body; the largest for one of them only."""
    uses = _uses(type(body))[: 1 if size == "largest" else None]
    return [_case(size, body, op, is_reply) for op, is_reply in uses]


def _uses(kind: type[m.Body]) -> list[tuple[Opcode, bool]]:
    if kind is m.ErrorBody:
        return [(Opcode.SYNC, True)]
    pairs = [
        (spec.op, is_reply)
        for spec in SPECS.values()
        for is_reply, body in ((False, spec.request), (True, spec.reply))
        if body is kind
    ]
    never = {(Opcode.GOODBYE, False), (Opcode.GOODBYE, True), (Opcode.LEASE_EVENT, False), (Opcode.REGION_EVENT, False)}
    return [use for use in pairs if use not in never]


def _case(size: str, body: m.Body, op: Opcode, is_reply: bool) -> dict[str, Any]:
    is_error = isinstance(body, m.ErrorBody)
    extremes = {"smallest": (1, 0), "only": (1, 0), "largest": (U64, U128)}
    request_id, session_id = extremes.get(size, (7, LEASE if op >= Opcode.MEM_ALLOC or op in HANDING_OVER else 0))
    wire = frame(
        op,
        body,
        flags=int(Flag.REPLY) if is_reply else 0,
        status=ERROR_STATUSES.get(size, Status.INTERNAL) if is_error else 0,
        request_id=request_id,
        session_id=session_id,
    )
    return {
        "name": size,
        "op": op.name,
        "direction": "reply" if is_reply else "request",
        "header": header_to_json(wire[: HEADER.sizeof()]),
        "body": body_to_json(body),
        "wire": bytes_to_json(wire),
    }


def _file_name(name: str) -> str:
    return "".join("_" + letter.lower() if letter.isupper() else letter for letter in name).lstrip("_")
