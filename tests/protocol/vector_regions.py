"""The conversations about regions and about a lease's size."""

from gpulease.protocol import Failure, Opcode, RevokeOutcome, Status
from gpulease.protocol import messages as m
from gpulease.protocol.codec import build_body
from gpulease.protocol.opcodes import Phase, SessionOption
from gpulease.protocol.primitives import Tlv

from .vector_messages import EXPIRES, LEASE, POINTER, REGION
from .vector_script import SLICE, Script, launch

TOLD = (Tlv(SessionOption.REGIONS, (2 << 20).to_bytes(4, "big")), Tlv(SessionOption.REGION_REFUSED, b""))
FLIPPED_NS = 1_000_000_000


def regions() -> Script:
    """A region is opened, named by launches, revoked; its launches fail once with the cause, then FENCED."""
    script = Script(
        "A region is revoked: the next launch that names it fails with the cause, later ones with FENCED, and the "
        "session goes on."
    )
    for connection in ("control", "operator"):
        script.hello(connection)
    script.grant()
    script.attach(told=TOLD)
    granted = m.RegionGrant(REGION, 1, 4 << 20, 60_000, EXPIRES, POINTER, 3, 1)
    script.call("control", Opcode.REGION_OPEN, m.RegionOpen(LEASE, 3 << 20, 60_000, "bob"), granted)
    watched = script.ask("control", Opcode.REGION_WATCH, m.LeaseRef(LEASE))
    script.reply("control", watched, m.Empty())
    heard = script.ask("control", Opcode.LEASE_SUBSCRIBE, m.LeaseSubscribe(REGION))
    script.reply("control", heard, m.Empty())
    script.tell("control", heard, m.LeaseEvent(REGION, 1, 0, Phase.ACTIVE, 54_000, 1, "", ""))
    script.load()
    script.call("session", Opcode.REGION_SET, m.RegionSet((m.RegionRef(3, 1),)), m.Handle(1), LEASE)
    plain = launch("scale", "00000040")
    script.ask("session", Opcode.LAUNCH_IN, launch_in(plain, 1, 4096), session_id=LEASE, quiet=True)
    revoked = script.ask("operator", Opcode.LEASE_REVOKE, m.LeaseRevoke(REGION, "maintenance"))
    failed = script.ask("session", Opcode.LAUNCH_IN, launch_in(plain, 1, 4097), session_id=LEASE, quiet=True)
    why = "the region was revoked: maintenance"
    first = refusal(Status.REVOKED, why, failed, "scale")
    script.refuse("session", script.ask("session", Opcode.SYNC, m.Empty(), session_id=LEASE), first)
    event = m.RegionEvent(REGION, 1, 0, Status.REVOKED, "scale", 0, 4097, FLIPPED_NS, FLIPPED_NS + 20_000)
    script.tell("control", watched, event)
    script.tell("control", heard, m.LeaseEvent(REGION, 2, 0, Phase.ENDED, 0, 1, "revoked", why))
    again = script.ask("session", Opcode.LAUNCH_IN, launch_in(plain, 1, 4097), session_id=LEASE)
    script.refuse("session", again, refusal(Status.FENCED, "the region has ended", None, "scale"))
    script.reply("operator", revoked, m.LeaseRevoked(RevokeOutcome.TORN_DOWN))
    script.ask("session", Opcode.LAUNCH, plain, session_id=LEASE, quiet=True, comment="names no region")
    script.call("session", Opcode.SYNC, m.Empty(), m.Empty(), LEASE)
    script.ask(
        "session",
        Opcode.REGION_REFUSED,
        m.RegionRefusal(3, 1, "scale", 4097),
        session_id=LEASE,
        quiet=True,
        comment="the client refuses a launch by the region's word",
    )
    script.tell(
        "control",
        watched,
        m.RegionEvent(REGION, 2, 0, Status.FENCED, "scale", 0, 4097, FLIPPED_NS, FLIPPED_NS + 30_000),
    )
    script.call("session", Opcode.REGION_SET_FREE, m.Handle(1), m.Empty(), LEASE)
    script.call("session", Opcode.REGION_RELEASE, m.Handle(POINTER), m.Empty(), LEASE)
    script.call("control", Opcode.LEASE_UNSUBSCRIBE, m.LeaseUnsubscribe(watched), m.Empty())
    script.call("control", Opcode.LEASE_FREE, m.LeaseRef(LEASE), m.Empty())
    return script


def cancelled_region() -> Script:
    """A cancel refuses a graph that names the region until it is taken back."""
    script = Script("A region is cancelled, and no graph that names it begins; the cancel is taken back.")
    script.hello("control")
    script.grant()
    script.attach(told=TOLD)
    granted = m.RegionGrant(REGION, 1, 2 << 20, 60_000, EXPIRES, POINTER, 0, 1)
    script.call("control", Opcode.REGION_OPEN, m.RegionOpen(LEASE, 2 << 20, 60_000, ""), granted)
    script.load()
    node = m.GraphNode(Opcode.LAUNCH, build_body(launch("scale", "00000040")))
    script.call("session", Opcode.GRAPH_CREATE, m.GraphCreate((node,), (), (), ()), m.Handle(1), LEASE)
    script.call("session", Opcode.REGION_SET, m.RegionSet((m.RegionRef(0, 1),)), m.Handle(1), LEASE)
    named = m.GraphLaunchIn(1, b"", 1, 7)
    script.call("control", Opcode.REGION_CANCEL, m.RegionCancel(REGION, 1), m.Empty())
    refused = Failure(
        Status.CANCELLED,
        "the region is cancelled",
        kernel="scale",
        region=REGION,
        site=0,
        flipped_ns=FLIPPED_NS,
        position=7,
    )
    script.refuse("session", script.ask("session", Opcode.GRAPH_LAUNCH_IN, named, session_id=LEASE), refused)
    script.call("control", Opcode.REGION_CANCEL, m.RegionCancel(REGION, 0), m.Empty())
    script.call("session", Opcode.GRAPH_LAUNCH_IN, named, m.Empty(), LEASE)
    return script


def resized() -> Script:
    """A lease grows, and is refused more than the card has."""
    script = Script("A lease grows while it runs; the card has no room for more, and it stays as it is.")
    script.hello("control")
    script.grant()
    script.call("control", Opcode.LEASE_RESIZE, m.LeaseResize(LEASE, 2 * SLICE), m.LeaseResize(LEASE, 2 * SLICE))
    full = Failure(Status.CAPACITY_EXCEEDED, "96 GiB wanted; 6 GiB can be granted", hint="ask for less")
    script.refuse("control", script.ask("control", Opcode.LEASE_RESIZE, m.LeaseResize(LEASE, 96 << 30)), full)
    return script


def parked() -> Script:
    """A session is parked, and its next operation brings it back; then the node has no host memory for it."""
    script = Script("A parkable lease is parked; its next operation brings it back. The host is full the second time.")
    script.hello("control")
    script.grant()
    script.attach()
    pointer = m.Handle(POINTER)
    script.call("session", Opcode.MEM_ALLOC, m.MemAlloc(4096), pointer, LEASE)
    script.call("control", Opcode.LEASE_PARK, m.LeaseRef(LEASE), m.ParkedSession(LEASE, 2 << 20))
    script.call("session", Opcode.MEM_READ, m.MemRead(POINTER, 0, 4), m.Data(bytes(4)), LEASE)
    full = Failure(Status.CAPACITY_EXCEEDED, "park_memory is in use", hint="use or free a parked lease first")
    script.refuse("control", script.ask("control", Opcode.LEASE_PARK, m.LeaseRef(LEASE)), full)
    return script


def moved() -> Script:
    """A session is moved to another card, and works on; then it can't leave its process."""
    script = Script("A parkable lease's session is moved to card 1. Later it has events, so it can't be moved.")
    script.hello("control")
    script.grant()
    moved = m.MovedSession(LEASE, "GPU-1", 2 << 20, 480_000)
    script.call("control", Opcode.LEASE_MOVE, m.LeaseMove(LEASE, "1"), moved)
    stays = Failure(Status.UNSUPPORTED, "the session can't leave its process", hint="it can be parked")
    script.refuse("control", script.ask("control", Opcode.LEASE_MOVE, m.LeaseMove(LEASE, None)), stays)
    return script


def noted() -> Script:
    """A tenant's notes: one is recorded, one is refused."""
    script = Script("A lease's tenant writes a record to the audit log; one with a float in it is refused.")
    script.hello("control")
    script.grant()
    script.call("control", Opcode.LEASE_NOTE, m.LeaseNote(LEASE, b'{"request":"7","tokens":24}'), m.Empty())
    refused = Failure(Status.INVALID_REQUEST, "the note is not canonical: 0.5 is not an integer", hint="write a text")
    script.refuse("control", script.ask("control", Opcode.LEASE_NOTE, m.LeaseNote(LEASE, b'{"x":0.5}')), refused)
    return script


def launch_in(plain: m.Launch, region_set: int, position: int) -> m.LaunchIn:
    same = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
    return m.LaunchIn(**same, region_set=region_set, position=position)


def refusal(status: Status, why: str, failed: int | None, kernel: str) -> Failure:
    """A launch's failure that is about the region."""
    return Failure(
        status,
        why,
        failed_request_id=failed,
        failed_op=None if failed is None else Opcode.LAUNCH_IN,
        kernel=kernel,
        region=REGION,
        site=0,
        flipped_ns=FLIPPED_NS,
        position=4097,
    )
