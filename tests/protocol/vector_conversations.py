"""The files of `vectors/conversations/`: whole exchanges, step by step, that both peers replay."""

from dataclasses import replace
from typing import Any

from gpulease.protocol import Exclusivity, Failure, Opcode, RevokeOutcome, Status
from gpulease.protocol import messages as m
from gpulease.protocol.capabilities import AttachOption, Permission
from gpulease.protocol.codec import build_body
from gpulease.protocol.lease_options import ORPHAN
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE, HelloOption, ParameterKind, ParameterType, Phase, SessionOption
from gpulease.protocol.primitives import LeaseParameter, Tlv
from gpulease.protocol.ring import SharedMemoryGrant, SharedMemoryRequest

from .vector_messages import AUDIENCE, CARD, CARD_DETAILS, CARD_UUID, EXPIRES, LEASE, LEASE_MAP, POINTER
from .vector_regions import cancelled_region, moved, noted, parked, regions, resized
from .vector_script import KERNELS, MODULE, SLICE, WITH_VARIABLE, Script, X, Y, alloc, launch
from .vector_submits import submit, typed_submit


def main_job() -> Script:
    script = Script("Lease a slice, run scale and bias on one buffer, read the result, free the lease.")
    script.hello("control")
    script.grant()
    script.attach()
    script.call("session", Opcode.MEM_ALLOC, m.MemAlloc(16), m.Handle(POINTER), LEASE)
    script.call("session", Opcode.MEM_WRITE, m.MemWrite(POINTER, 0, X), m.Empty(), LEASE)
    script.load()
    comment = "quiet: no reply comes"
    script.ask("session", Opcode.LAUNCH, launch("scale", "00000040"), session_id=LEASE, quiet=True, comment=comment)
    script.ask("session", Opcode.LAUNCH, launch("bias", "00002041"), session_id=LEASE, quiet=True)
    script.call("session", Opcode.SYNC, m.Empty(), m.Empty(), LEASE)
    script.call("session", Opcode.MEM_READ, m.MemRead(POINTER, 0, 16), m.Data(Y), LEASE)
    script.call("session", Opcode.MODULE_UNLOAD, m.Handle(MODULE), m.Empty(), LEASE)
    script.call("session", Opcode.MEM_FREE, m.Handle(POINTER), m.Empty(), LEASE)
    script.call("control", Opcode.LEASE_FREE, m.LeaseRef(LEASE), m.Empty())
    return script


def deferred_failure() -> Script:
    script = Script(
        "A quiet launch fails; what is queued behind it is skipped until a request with a reply reports it."
    )
    script.hello("control")
    script.grant()
    script.attach()
    script.load()
    bad, good = launch("scaled", "00000040"), launch("bias", "00002041")
    failed = script.ask("session", Opcode.LAUNCH, bad, session_id=LEASE, quiet=True, comment="no such kernel")
    script.ask("session", Opcode.LAUNCH, good, session_id=LEASE, quiet=True, comment="skipped, not reported")
    write = script.ask("session", Opcode.MEM_WRITE, m.MemWrite(POINTER, 0, X), session_id=LEASE, comment="not executed")
    failure = Failure(
        Status.LAUNCH_FAILED,
        "module 1 has no kernel scaled",
        hint="it has scale, bias",
        failed_request_id=failed,
        failed_op=Opcode.LAUNCH,
        kernel="scaled",
    )
    script.refuse("session", write, failure, "names the launch; the failure is now reported and the session goes on")
    script.call("session", Opcode.SYNC, m.Empty(), m.Empty(), LEASE)
    return script


def arena_copies() -> Script:
    script = Script(
        "A client that shares an arena with its session, but no ring: copies name their bytes' place in it."
    )
    script.hello("control")
    script.grant()
    script.attach(SharedMemoryRequest(arena_bytes=1 << 30), SharedMemoryGrant(arena_bytes=64 << 20))
    script.call("session", Opcode.MEM_ALLOC, m.MemAlloc(16), m.Handle(POINTER), LEASE)
    script.call("session", Opcode.ARENA_WRITE, m.ArenaCopy(POINTER, 0, 4096, 16), m.Empty(), LEASE)
    script.call("session", Opcode.ARENA_READ, m.ArenaCopy(POINTER, 8, 4112, 8), m.Empty(), LEASE)
    outside = Failure(Status.INVALID_REQUEST, "bytes 67108860 to 67108868 are outside the arena of 67108864 bytes")
    too_far = m.ArenaCopy(POINTER, 0, (64 << 20) - 4, 8)
    script.refuse("session", script.ask("session", Opcode.ARENA_READ, too_far, session_id=LEASE), outside)
    script.call("control", Opcode.LEASE_FREE, m.LeaseRef(LEASE), m.Empty())
    return script


def parameter_types() -> Script:
    script = Script("A client asks for the types of a module's parameters, since ATTACH's reply says that it may.")
    script.hello("control")
    script.grant()
    card = (90).to_bytes(2, "big") + (13000).to_bytes(4, "big")
    script.attach(told=(Tlv(SessionOption.PARAMETER_TYPES, b""), Tlv(SessionOption.CARD, card)))
    script.load()
    types = bytes([ParameterType.U64, ParameterType.U32, ParameterType.F32])
    script.call("session", Opcode.MODULE_PARAMETERS, m.Handle(MODULE), m.ModuleParameters((types, types)), LEASE)
    unknown = Failure(Status.INVALID_HANDLE, "7 is not a loaded module of this session")
    script.refuse("session", script.ask("session", Opcode.MODULE_PARAMETERS, m.Handle(7), session_id=LEASE), unknown)
    script.call("control", Opcode.LEASE_FREE, m.LeaseRef(LEASE), m.Empty())
    return script


def module_details() -> Script:
    script = Script(
        "A client writes a module's variable, since ATTACH's reply says that it may; the module's end is its."
    )
    script.hello("control")
    script.grant()
    script.attach(told=(Tlv(SessionOption.MODULE_DETAILS, b""),))
    script.call("session", Opcode.MODULE_LOAD, m.ModuleLoad(WITH_VARIABLE), m.ModuleLoaded(MODULE, KERNELS[:1]), LEASE)
    figures = m.ModuleFigures((m.KernelFigures(0, 232_448, 0, 0, 0),))
    script.call("session", Opcode.MODULE_FIGURES, m.Handle(MODULE), figures, LEASE)
    name, address = m.VariableName(MODULE, "coefficients"), POINTER
    script.call("session", Opcode.MODULE_VARIABLE, name, m.Variable(address, 16), LEASE)
    script.call("session", Opcode.MEM_WRITE, m.MemWrite(address, 4, X[4:]), m.Empty(), LEASE)
    script.call("session", Opcode.MEM_READ, m.MemRead(address, 0, 16), m.Data(X), LEASE)
    script.call("session", Opcode.MODULE_UNLOAD, m.Handle(MODULE), m.Empty(), LEASE)
    gone = Failure(Status.INVALID_HANDLE, f"{address:#x} is not a live allocation of this session")
    script.refuse("session", script.ask("session", Opcode.MEM_READ, m.MemRead(address, 0, 4), session_id=LEASE), gone)
    script.call("control", Opcode.LEASE_FREE, m.LeaseRef(LEASE), m.Empty())
    return script


def kept_buffers() -> Script:
    script = Script(
        "A buffer is kept beyond its connection's end, found, and taken; what no connection holds is freed."
    )
    script.hello("control")
    script.grant()
    asked, told = (Tlv(AttachOption.OWN_MEMORY, b""),), (Tlv(SessionOption.OWN_MEMORY, b""),)
    script.attach(told=told, asked=asked)
    script.call("session", Opcode.MEM_ALLOC, m.MemAlloc(16), m.Handle(POINTER), LEASE)
    script.call("session", Opcode.MEM_WRITE, m.MemWrite(POINTER, 0, X), m.Empty(), LEASE)
    script.call("session", Opcode.MEM_KEEP, m.MemKeep(POINTER, "steps"), m.Empty(), LEASE)
    kept = m.KeptBuffers((m.KeptBuffer("steps", POINTER, 16),))
    script.call("session", Opcode.MEM_KEPT, m.Empty(), kept, LEASE)
    script.ask("session", Opcode.MEM_KEEP, m.MemKeep(POINTER, ""), session_id=LEASE, quiet=True)
    script.call("session", Opcode.MEM_KEPT, m.Empty(), m.KeptBuffers(()), LEASE)
    script.call("session", Opcode.MEM_RESET, m.Empty(), m.Freed(0), LEASE)
    script.call("control", Opcode.LEASE_FREE, m.LeaseRef(LEASE), m.Empty())
    return script


def events() -> Script:
    script = Script("A launch between two events is timed: they go with it, without replies, and the question waits.")
    script.hello("control")
    script.grant()
    served = (SessionOption.EVENTS, SessionOption.PRINTED, SessionOption.LAUNCH_WITH, SessionOption.MEM_REUSE)
    script.attach(told=tuple(Tlv(option, b"") for option in served))
    script.call("session", Opcode.MEM_ALLOC, m.MemAlloc(16), m.Handle(POINTER), LEASE)
    script.load()
    script.ask("session", Opcode.EVENT_RECORD, m.EventRecord(0, 1), session_id=LEASE, quiet=True)
    script.ask("session", Opcode.LAUNCH, launch("scale", "00000040"), session_id=LEASE, quiet=True)
    script.ask("session", Opcode.EVENT_RECORD, m.EventRecord(0, 2), session_id=LEASE, quiet=True)
    script.call("session", Opcode.EVENT_ELAPSED, m.EventPair(1, 2), m.Elapsed(5312), LEASE)
    plain = launch("scale", "00000040")
    shape = {name: getattr(plain, name) for name in plain.__slots__}
    clustered = m.LaunchWith(**shape, region_set=0, position=0, flags=1, cluster_x=1, cluster_y=1, cluster_z=1)
    script.ask("session", Opcode.LAUNCH_WITH, clustered, session_id=LEASE, quiet=True)
    script.call("session", Opcode.PRINTED, m.Empty(), m.Printed(b"", 0), LEASE)
    script.ask(
        "session", Opcode.MEM_REUSE, m.Handle(POINTER), session_id=LEASE, quiet=True, comment="zeroed, as if new"
    )
    script.ask("session", Opcode.EVENT_DESTROY, m.Handle(1), session_id=LEASE, quiet=True)
    gone = Failure(Status.INVALID_HANDLE, "1 is not an event of this connection's")
    pair = m.EventPair(1, 2)
    script.refuse("session", script.ask("session", Opcode.EVENT_ELAPSED, pair, session_id=LEASE), gone)
    script.call("control", Opcode.LEASE_FREE, m.LeaseRef(LEASE), m.Empty())
    return script


def streams() -> Script:
    script = Script(
        "Two streams: a kernel waits for a copy in the other one; a selection behind a failure takes effect as ever."
    )
    script.hello("control")
    script.grant()
    script.attach(SharedMemoryRequest(arena_bytes=1 << 30), SharedMemoryGrant(arena_bytes=64 << 20))
    script.call("session", Opcode.MEM_ALLOC, m.MemAlloc(16), m.Handle(POINTER), LEASE)
    script.load()
    for stream in (1, 2):
        script.call("session", Opcode.STREAM_CREATE, m.Empty(), m.Handle(stream), LEASE)

    def quiet(op: Opcode, body: m.Body, comment: str = "") -> int:
        return script.ask("session", op, body, session_id=LEASE, quiet=True, comment=comment)

    quiet(Opcode.STREAM_SELECT, m.Handle(1))
    quiet(Opcode.ARENA_WRITE, m.ArenaCopy(POINTER, 0, 4096, 16), "into stream 1, done when that is waited for")
    quiet(Opcode.STREAM_SELECT, m.Handle(2))
    quiet(Opcode.STREAM_WAIT, m.StreamWait(2, 1))
    quiet(Opcode.LAUNCH, launch("scale", "00000040"), "into stream 2, behind the copy")
    script.call("session", Opcode.STREAM_SYNC, m.Handle(2), m.Empty(), LEASE)
    failed = quiet(Opcode.LAUNCH, launch("scaled", "00000040"), "no such kernel")
    quiet(Opcode.STREAM_SELECT, m.Handle(0), "takes effect: from here on the default stream")
    quiet(Opcode.STREAM_DESTROY, m.Handle(2), "skipped")
    failure = Failure(
        Status.LAUNCH_FAILED,
        "module 1 has no kernel 'scaled'",
        failed_request_id=failed,
        failed_op=Opcode.LAUNCH,
        kernel="scaled",
    )
    script.refuse("session", script.ask("session", Opcode.SYNC, m.Empty(), session_id=LEASE), failure)
    script.call("session", Opcode.STREAM_DESTROY, m.Handle(2), m.Empty(), LEASE)
    stale = Failure(Status.INVALID_HANDLE, "2 is not a stream of this connection's")
    script.refuse("session", script.ask("session", Opcode.STREAM_SYNC, m.Handle(2), session_id=LEASE), stale)
    script.call("control", Opcode.LEASE_FREE, m.LeaseRef(LEASE), m.Empty())
    return script


def launch_graph() -> Script:
    script = Script("A graph of two launches, the second's number a parameter; void once the buffer it names is freed.")
    script.hello("control")
    script.grant()
    script.attach()
    script.load()
    script.call("session", Opcode.MEM_ALLOC, m.MemAlloc(16), m.Handle(POINTER), LEASE)
    script.call("session", Opcode.MEM_WRITE, m.MemWrite(POINTER, 0, X), m.Empty(), LEASE)
    nodes = (launch("scale", "00000040"), launch("bias", "00002041"))
    graph = m.GraphCreate(
        tuple(m.GraphNode(Opcode.LAUNCH, build_body(node)) for node in nodes),
        (POINTER,),
        (m.GraphParameter("more", ParameterKind.VALUE, 4),),
        (m.GraphPlace(0, 1, 12),),
    )
    script.call("session", Opcode.GRAPH_CREATE, graph, m.Handle(1), LEASE)
    ten = m.GraphLaunch(1, bytes.fromhex("00002041"))
    script.ask("session", Opcode.GRAPH_LAUNCH, ten, session_id=LEASE, quiet=True)
    script.call("session", Opcode.SYNC, m.Empty(), m.Empty(), LEASE)
    script.call("session", Opcode.MEM_READ, m.MemRead(POINTER, 0, 16), m.Data(Y), LEASE)
    script.call("session", Opcode.MEM_FREE, m.Handle(POINTER), m.Empty(), LEASE)
    void = Failure(Status.INVALID_HANDLE, "graph 1 uses the allocation 0x7f8c20000000, which is freed")
    script.refuse("session", script.ask("session", Opcode.GRAPH_LAUNCH, ten, session_id=LEASE), void)
    script.call("session", Opcode.GRAPH_DESTROY, m.Handle(1), m.Empty(), LEASE)
    script.call("control", Opcode.LEASE_FREE, m.LeaseRef(LEASE), m.Empty())
    return script


def session_failures() -> Script:
    script = Script("Every failure a session operation has of its own; the session goes on after each but the last.")
    script.hello("control")
    script.grant()
    script.attach()
    out_of_memory = Failure(Status.ALLOC_FAILED, "1073741824 bytes wanted; 67108864 of the slice are free")
    foreign = Failure(Status.INVALID_HANDLE, "0x10 is not an allocation of this session")
    log = "line 4: unknown instruction fmma.f32"
    bad_ptx = Failure(Status.LOAD_FAILED, "the PTX does not compile", log=log, line=4)
    threads = Failure(Status.LAUNCH_FAILED, "2048 threads in a block; at most 1024", kernel="scale")
    fault = Failure(
        Status.SYNC_FAILED,
        "kernel scale read outside every allocation",
        failed_request_id=7,
        failed_op=Opcode.LAUNCH,
        kernel="scale",
        address=0x7F8C_3000_0000,
    )
    requests: list[tuple[Opcode, m.Body, Failure]] = [
        (Opcode.MEM_ALLOC, m.MemAlloc(1 << 30), out_of_memory),
        (Opcode.MEM_FREE, m.Handle(0x10), foreign),
        (Opcode.MODULE_LOAD, m.ModuleLoad(b".version 6.3\nbroken"), bad_ptx),
        (Opcode.LAUNCH, m.Launch(1, "scale", 1, 1, 1, 2048, 1, 1, 0, b"", ()), threads),
    ]
    for op, body, failure in requests:
        script.refuse("session", script.ask("session", op, body, session_id=LEASE), failure)
    script.ask("session", Opcode.LAUNCH, launch("scale", "00000040"), session_id=LEASE, quiet=True)
    script.refuse("session", script.ask("session", Opcode.SYNC, m.Empty(), session_id=LEASE), fault)
    return script


def expiry() -> Script:
    script = Script("A lease ends on its own: the session is told in its reply and by a goodbye; renewing is too late.")
    script.hello("control")
    script.grant(ttl_ms=1000)
    script.attach()
    over = Failure(Status.LEASE_EXPIRED, "the lease expired", hint="acquire another lease")
    script.refuse("session", script.ask("session", Opcode.SYNC, m.Empty(), session_id=LEASE), over)
    script.say_goodbye("session", over, "then the daemon closes this connection")
    renew = script.ask("control", Opcode.LEASE_RENEW, m.LeaseRenew(LEASE, 60_000))
    script.refuse("control", renew, over, "the control connection goes on")
    return script


def renew_and_free() -> Script:
    script = Script("A lease is renewed, freed, and can't be freed again.")
    script.hello("control")
    script.grant()
    renewed = m.LeaseRenewed(2, 300_000, EXPIRES + 180)
    script.call("control", Opcode.LEASE_RENEW, m.LeaseRenew(LEASE, 300_000), renewed)
    script.call("control", Opcode.LEASE_FREE, m.LeaseRef(LEASE), m.Empty())
    again = script.ask("control", Opcode.LEASE_FREE, m.LeaseRef(LEASE))
    script.refuse("control", again, Failure(Status.LEASE_FREED, "the lease was freed before"))
    return script


def revoke() -> Script:
    script = Script("An operator revokes a lease in use; the three outcomes; the tenant learns it from a goodbye.")
    for connection in ("control", "operator"):
        script.hello(connection)
    script.grant()
    script.attach()
    body = m.LeaseRevoke(LEASE, "maintenance")
    asked = script.ask("operator", Opcode.LEASE_REVOKE, body)
    script.say_goodbye("session", Failure(Status.REVOKED, "the lease was revoked: maintenance"))
    script.reply("operator", asked, m.LeaseRevoked(RevokeOutcome.TORN_DOWN), "sent once the memory is proved free")
    for lease_id, outcome in ((1, RevokeOutcome.NOT_FOUND), (2, RevokeOutcome.FENCED)):
        script.call("operator", Opcode.LEASE_REVOKE, m.LeaseRevoke(lease_id, ""), m.LeaseRevoked(outcome))
    script.call("operator", Opcode.FENCE_CLEAR, m.FenceClear(CARD_UUID), m.FenceCleared(1))
    free = script.ask("control", Opcode.LEASE_FREE, m.LeaseRef(LEASE))
    script.refuse("control", free, Failure(Status.REVOKED, "the lease was revoked: maintenance"))
    return script


def capacity() -> Script:
    script = Script("A lease the card has no room for is refused at once, or after the wait that was asked for.")
    script.hello("control")
    full = Failure(Status.CAPACITY_EXCEEDED, "96 GiB wanted; 6 GiB can be granted", hint="ask for less, or wait")
    for wait_ms in (0, 500):
        asked = script.ask("control", Opcode.LEASE_ALLOC, alloc(96 << 30, wait_ms=wait_ms))
        script.refuse("control", asked, full)
    return script


def exclusivity() -> Script:
    script = Script("Exclusivity classes 4 to 254 are refused, 255 is never valid, 3 needs a partition.")
    script.hello("control")
    for value in (3, 4, 17, 254, 255):
        asked = script.ask("control", Opcode.LEASE_ALLOC, alloc(SLICE, exclusivity=value))
        why = "no partition on this node" if value == Exclusivity.PARTITION_EXCLUSIVE else "no such class"
        status = Status.INVALID_REQUEST if value == 255 else Status.UNSUPPORTED
        script.refuse("control", asked, Failure(status, f"exclusivity {value}: {why}"))
    return script


def attach_refused() -> Script:
    script = Script("ATTACH to a lease that is not there, or not this tenant's, leaves a control connection.")
    script.hello("session")
    for status, why in ((Status.NOT_FOUND, "there is no such lease"), (Status.DENIED, "it is another tenant's")):
        asked = script.ask("session", Opcode.ATTACH, m.Attach(()), session_id=LEASE)
        script.refuse("session", asked, Failure(status, why))
    script.call("session", Opcode.PING, m.Ping(7), m.Ping(7))
    return script


def questions() -> Script:
    script = Script("The read-only operations, two of them in flight at once and answered the other way round.")
    script.hello("control")
    script.call("control", Opcode.PING, m.Ping(0x1122334455667788), m.Ping(0x1122334455667788))
    entry = m.InventoryEntry(CARD, GPU_RESOURCE_TYPE, 0, 80 << 30, 60 << 30)
    script.call("control", Opcode.GET_INVENTORY, m.Empty(), m.Inventory((entry,), [CARD_DETAILS]))
    query = script.ask("control", Opcode.LEASE_QUERY, m.LeaseRef(LEASE))
    listing = script.ask("control", Opcode.LEASE_LIST_ACTIVE, m.Empty())
    script.reply("control", listing, m.Report([LEASE_MAP]))
    script.reply("control", query, m.Report(LEASE_MAP))
    return script


def fleet() -> Script:
    script = Script("A directory names two nodes; one refuses, so the other is asked. The directory knows no more.")
    script.hello("directory")
    size = 8 << 30
    wanted = m.Place(size, Exclusivity.SHARED, "", ("zone=a",), None, ())
    named = (m.Candidate("node-1", ("tls:gpu1.example:7443",)), m.Candidate("node-2", ("tls:gpu2.example:7443",)))
    script.call("directory", Opcode.PLACE, wanted, m.Placement(named, None, 3, ""))
    ask = m.LeaseAlloc(GPU_RESOURCE_TYPE, size, 120_000, 0, None, ())
    script.hello("node")
    refused = Failure(Status.CAPACITY_EXCEEDED, "no card has 8.0 GiB free", "Ask for less, or wait.")
    script.refuse("node", script.ask("node", Opcode.LEASE_ALLOC, ask), refused)
    script.hello("next node")
    grant = m.LeaseGrant(LEASE, 1, size, 120_000, EXPIRES, Exclusivity.SHARED, CARD_UUID)
    script.call("next node", Opcode.LEASE_ALLOC, ask, grant)
    again = m.Place(size, Exclusivity.SHARED, "", ("zone=a",), None, ("node-1", "node-2"))
    script.call("directory", Opcode.PLACE, again, m.Placement((), None, 3, "2 were asked already, 1 drains"))
    away = Failure(Status.DISCONNECTED, "this directory has not reached etcd for 11 s", "Tell the operator.")
    script.refuse("directory", script.ask("directory", Opcode.FLEET_LIST, m.Empty()), away)
    return script


def shared_by_token() -> Script:
    script = Script(
        "A tenant makes a token for another, who reads its lease's memory and is refused a write; then it is revoked."
    )
    script.hello("control")
    script.grant()
    script.hello("session")
    script.call("session", Opcode.CAPABILITY_AUDIENCE, m.Empty(), m.Audience(AUDIENCE))
    token = bytes.fromhex("0801")
    issue = m.CapabilityIssue(LEASE, Permission.MEM_READ, AUDIENCE, 60_000, 0)
    granted = m.CapabilityGrant(token, AUDIENCE, 1, 60_000, EXPIRES)
    script.call("control", Opcode.CAPABILITY_ISSUE, issue, granted)
    held = m.CapabilityHeld(LEASE, Permission.MEM_READ, 1, 59_000, EXPIRES)
    script.call("session", Opcode.CAPABILITY_PRESENT, m.CapabilityPresent(token), held)
    attached = m.AttachReply(SLICE, "cpu", CARD_UUID, ())
    script.call("session", Opcode.ATTACH, m.Attach((Tlv(AttachOption.TOKEN, token),)), attached, LEASE)
    script.call("session", Opcode.MEM_READ, m.MemRead(POINTER, 0, 4), m.Data(bytes(4)), LEASE)
    asked = script.ask("session", Opcode.MEM_WRITE, m.MemWrite(POINTER, 0, bytes(4)), session_id=LEASE)
    script.refuse("session", asked, Failure(Status.DENIED, "the token does not permit MEM_WRITE"))
    script.call("control", Opcode.CAPABILITY_REVOKE, m.CapabilityRevoke(LEASE, 0, token), m.Empty())
    asked = script.ask("session", Opcode.MEM_READ, m.MemRead(POINTER, 0, 4), session_id=LEASE)
    script.refuse("session", asked, Failure(Status.DENIED, "the token this connection attached with is over"))
    return script


def second_token() -> Script:
    script = Script(
        "A tenant's session is refused a read while it uses its second token, for TASKLET_SUBMIT, and no longer."
    )
    script.hello("session")
    attached = m.AttachReply(SLICE, "cpu", CARD_UUID, (Tlv(SessionOption.USE_TOKEN, b""),))
    attach = m.Attach((Tlv(AttachOption.SECOND_TOKEN, bytes.fromhex("0802")),))
    script.call("session", Opcode.ATTACH, attach, attached, LEASE)
    script.ask("session", Opcode.USE_TOKEN, m.Handle(1), session_id=LEASE, quiet=True)
    asked = script.ask("session", Opcode.MEM_READ, m.MemRead(POINTER, 0, 4), session_id=LEASE)
    script.refuse("session", asked, Failure(Status.DENIED, "the token does not permit MEM_READ"))
    script.call("session", Opcode.USE_TOKEN, m.Handle(0), m.Empty(), LEASE)
    script.call("session", Opcode.MEM_READ, m.MemRead(POINTER, 0, 4), m.Data(bytes(4)), LEASE)
    return script


def permitted_streams() -> Script:
    script = Script("A token for TASKLET_SUBMIT alone: streams are its holder's to make, memory and graphs are not.")
    script.hello("session")
    token = bytes.fromhex("0802")
    attached = m.AttachReply(SLICE, "cpu", CARD_UUID, ())
    script.call("session", Opcode.ATTACH, m.Attach((Tlv(AttachOption.TOKEN, token),)), attached, LEASE)
    script.call("session", Opcode.STREAM_CREATE, m.Empty(), m.Handle(1), LEASE)
    script.call("session", Opcode.STREAM_SELECT, m.Handle(1), m.Empty(), LEASE)
    script.call("session", Opcode.STREAM_WAIT, m.StreamWait(1, 0), m.Empty(), LEASE)
    script.call("session", Opcode.STREAM_SYNC, m.Handle(1), m.Empty(), LEASE)
    script.call("session", Opcode.STREAM_DESTROY, m.Handle(1), m.Empty(), LEASE)
    for op, body in ((Opcode.MEM_ALLOC, m.MemAlloc(16)), (Opcode.GRAPH_DESTROY, m.Handle(1))):
        denied = Failure(Status.DENIED, f"the token does not permit {op.name}")
        script.refuse("session", script.ask("session", op, body, session_id=LEASE), denied)
    return script


def drain() -> Script:
    script = Script(
        "A tenant hears of its lease; an operator drains the node: a renewal is cut short, an acquire refused, and at "
        "the deadline the lease ends."
    )
    for connection in ("control", "operator"):
        script.hello(connection)
    script.grant()
    heard = script.ask("control", Opcode.LEASE_SUBSCRIBE, m.LeaseSubscribe(LEASE))
    script.reply("control", heard, m.Empty())

    def tell(sequence: int, phase: Phase, left_ms: int, *, generation: int = 1, cause: str = "", why: str = "") -> None:
        event = m.LeaseEvent(LEASE, sequence, int(sequence == 5), phase, left_ms, generation, cause, why)
        script.tell("control", heard, event, "what came between was dropped: too slow a reader" * (sequence == 5))

    tell(1, Phase.ACTIVE, 108_000)
    asked = script.ask("operator", Opcode.DRAIN, m.Drain(60_000))
    tell(2, Phase.WARNING, 60_000, why="the node is being drained: the lease can't be renewed for longer")
    script.reply("operator", asked, m.DrainStatus(60_000, 1))
    renewed = m.LeaseRenewed(2, 59_000, EXPIRES)
    script.call("control", Opcode.LEASE_RENEW, m.LeaseRenew(LEASE, 300_000), renewed)
    drained = Failure(Status.DRAINED, "the node is being drained", hint="Try another node.")
    script.refuse("operator", script.ask("operator", Opcode.LEASE_ALLOC, alloc(SLICE)), drained)
    tell(3, Phase.GRACE, 20, generation=2, cause="drained", why="the node is drained")
    tell(5, Phase.ENDED, 0, generation=2, cause="drained", why="the node is drained")
    script.call("control", Opcode.LEASE_UNSUBSCRIBE, m.LeaseUnsubscribe(heard), m.Empty())
    over = Failure(Status.DRAINED, "the lease ended because the node was drained")
    script.refuse("control", script.ask("control", Opcode.LEASE_RENEW, m.LeaseRenew(LEASE, 1000)), over)
    script.call("operator", Opcode.DRAIN_CANCEL, m.Empty(), m.DrainStatus(None, 0))
    return script


def card_drained() -> Script:
    script = Script("An operator drains card 1: who asks for it is refused, and its drain is ended.")
    script.hello("operator")
    script.call("operator", Opcode.CARD_DRAIN, m.CardDrain("1", 60_000), m.DrainStatus(60_000, 0))
    drained = Failure(Status.DRAINED, "card GPU-1 is being drained", hint="Leave the choice of the card to the daemon.")
    wanted = replace(alloc(SLICE), device="1")
    script.refuse("operator", script.ask("operator", Opcode.LEASE_ALLOC, wanted), drained)
    script.call("operator", Opcode.CARD_DRAIN, m.CardDrain("1", None), m.DrainStatus(None, 0))
    return script


def orphaned() -> Script:
    script = Script(
        "A lease that may be 30 s without a connection: its tenant's are gone, somebody who watches is told, and "
        "nobody comes. Watching is no connection of the lease."
    )
    for connection in ("control", "control again"):
        script.hello(connection)
    parameters = (LeaseParameter(ORPHAN.tag, (30_000).to_bytes(4, "big")),)
    grant = m.LeaseGrant(LEASE, 1, SLICE, 120_000, EXPIRES, Exclusivity.SESSION_EXCLUSIVE, CARD_UUID)
    wanted = m.LeaseAlloc(GPU_RESOURCE_TYPE, SLICE, 120_000, 0, None, parameters)
    script.call("control", Opcode.LEASE_ALLOC, wanted, grant)
    heard = script.ask("control again", Opcode.LEASE_SUBSCRIBE, m.LeaseSubscribe(LEASE))
    script.reply("control again", heard, m.Empty())

    def tell(sequence: int, phase: Phase, left_ms: int, cause: str, why: str, comment: str = "") -> None:
        event = m.LeaseEvent(LEASE, sequence, 0, phase, left_ms, 1, cause, why)
        script.tell("control again", heard, event, comment)

    tell(1, Phase.ACTIVE, 108_000, "", "")
    why = "nobody is connected to the lease: it is orphaned unless somebody connects"
    tell(2, Phase.WARNING, 30_000, "", why, "the control connection was closed")
    tell(3, Phase.ENDED, 0, "orphaned", "nobody was connected to it for 30 s")
    over = Failure(Status.LEASE_EXPIRED, "the lease was orphaned: nobody was connected to it for 30 s")
    script.refuse("control again", script.ask("control again", Opcode.LEASE_RENEW, m.LeaseRenew(LEASE, 1000)), over)
    return script


def health() -> Script:
    script = Script("Whether a daemon is ready, asked by anybody; its metrics, which a tenant is refused.")
    checks = [
        {"check": "listening", "ok": True, "detail": ""},
        {"check": "journal", "ok": False, "detail": "No space left on device"},
    ]
    for connection in ("control", "operator"):
        script.hello(connection)
        script.call(connection, Opcode.HEALTH, m.Empty(), m.Report({"ready": False, "checks": checks}))
    denied = Failure(Status.DENIED, "METRICS is for operators")
    script.refuse("control", script.ask("control", Opcode.METRICS, m.Empty()), denied)
    exposition = "# TYPE gpulease_ready gauge\ngpulease_ready 0.0\n"
    metrics = m.Metrics("text/plain; version=0.0.4; charset=utf-8", exposition)
    script.call("operator", Opcode.METRICS, m.Empty(), metrics)
    return script


def goodbye() -> Script:
    script = Script("A connection over the daemon's limit is told so before it is closed, whatever it has sent.")
    script.ask("control", Opcode.HELLO, m.Hello(0, "gpulease 0.1.0", ()))
    busy = Failure(Status.BUSY, "1000 connections are open", hint="try again later")
    script.say_goodbye("control", busy)
    return script


def daemon_restarted() -> Script:
    script = Script("The daemon is restarted under a session, which goes on; its tenant connects again to renew.")
    keeps = Tlv(HelloOption.KEEPS_LEASES, b"")
    script.hello("control", keeps)
    script.grant()
    script.attach()
    leaving = Failure(Status.BUSY, "the daemon is being restarted; leases go on", hint="connect again")
    script.say_goodbye("control", leaving)
    script.call("session", Opcode.SYNC, m.Empty(), m.Empty(), LEASE)
    script.hello("control again", keeps)
    script.call("control again", Opcode.LEASE_RENEW, m.LeaseRenew(LEASE, 60_000), m.LeaseRenewed(2, 60_000, EXPIRES))
    return script


SCRIPTS = (
    main_job,
    deferred_failure,
    arena_copies,
    parameter_types,
    module_details,
    events,
    kept_buffers,
    streams,
    launch_graph,
    session_failures,
    expiry,
    renew_and_free,
    daemon_restarted,
    revoke,
    capacity,
    exclusivity,
    attach_refused,
    questions,
    shared_by_token,
    second_token,
    permitted_streams,
    submit,
    typed_submit,
    regions,
    cancelled_region,
    resized,
    parked,
    moved,
    noted,
    drain,
    card_drained,
    orphaned,
    health,
    fleet,
    goodbye,
)


def documents() -> dict[str, dict[str, Any]]:
    return {script.__name__: script().to_json() for script in SCRIPTS}
