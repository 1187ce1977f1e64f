"""A daemon that follows a test's script. One thread per connection acts first as the broker, then as the worker.

It tests how a client reacts to the messages that it receives. By default it behaves like a daemon: it grants leases,
keeps memory in bytearrays, accepts any module as one with the kernels in `KERNELS`, and keeps the first failure of a
quiet request.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpulease.daemon.session.connection import RING_LAYOUT, ConnectionLost, RingWire, WorkerSpinPolicy
from gpulease.protocol import (
    Connection,
    EndOfStream,
    Failure,
    Opcode,
    Rejected,
    Request,
    RevokeOutcome,
    Role,
    State,
    Status,
    StreamBroken,
)
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import (
    AttachReply,
    Body,
    Data,
    Empty,
    Freed,
    Handle,
    HelloReply,
    KeptBuffer,
    KeptBuffers,
    KernelEntry,
    Launch,
    LaunchIn,
    LaunchWith,
    LeaseAlloc,
    LeaseGrant,
    LeaseMove,
    LeaseRef,
    LeaseRenew,
    LeaseRenewed,
    LeaseRevoked,
    MemAlloc,
    MemKeep,
    MemRead,
    MemWrite,
    ModuleLoaded,
    MovedSession,
    ParkedSession,
    Ping,
    RegionGrant,
    RegionOpen,
    Report,
)
from gpulease.protocol.opcodes import SessionOption
from gpulease.protocol.operations import SPECS
from gpulease.protocol.primitives import Tlv
from gpulease.protocol.ring import SharedMemoryGrant

KERNELS = (
    KernelEntry("scale", 1024, (8, 4, 4)),
    KernelEntry("nothing", 1024, ()),
    KernelEntry("small", 64, (4,)),
)
CARD = "GPU-00000000-0000-0000-0000-000000000001"
LEASE_ID = 0xABCDEF
REGION_ID = 0xFACE00
GRANULE = 2 << 20


class HangUp(Exception):
    """Raised by a handler: close the connection without a reply."""


@dataclass
class SayGoodbye(Exception):
    """Raised by a handler: send a goodbye with a failure, together with a reply if there is one, and close."""

    failure: Failure
    behind: Body | None = None


@dataclass
class SendRaw(Exception):
    """Raised by a handler: send these bytes instead of a reply, and optionally close the connection."""

    data: bytes
    closes: bool = False


class Silence(Exception):
    """Raised by a handler: send no reply."""


Handler = Callable[[Request], Body]


@dataclass
class Conversation:
    sock: socket.socket
    connection: Connection
    ring: RingWire | None = None
    is_worker: bool = False
    kept: Failure | None = None
    skipped: int = 0
    announced: set[int] = field(default_factory=set)


@dataclass
class ScriptedPeer:
    """The scripted daemon. Handlers in `script` replace the defaults. Received requests are appended to `heard`."""

    path: Path
    script: dict[Opcode, Handler] = field(default_factory=dict)
    heard: list[Request] = field(default_factory=list)
    memory: dict[int, bytearray] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    ttl_ms: int | None = None
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    gives_rings: bool = False
    owns_memory: bool = False
    kept: dict[str, int] = field(default_factory=dict)
    region_granule_bytes: int = GRANULE

    def __post_init__(self) -> None:
        self.address = f"unix:{self.path}"
        self.problems: list[BaseException] = []
        self._next_handle = 0x7000_0000_0000
        self._last_stream = 0
        self._regions = 0
        self._open: set[socket.socket] = set()  # Several threads change it, by atomic operations.
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        self._start(self._accept)

    # --- for tests ---

    def fail(self, op: Opcode, status: Status, message: str = "made up", **details: Any) -> None:
        """Reply to an operation with a failure from now on."""

        def refuse(_: Request) -> Body:
            raise Refusal(Failure(status, message, **details))

        self.script[op] = refuse

    def on(self, op: Opcode, outcome: BaseException | Body) -> None:
        """From now on, reply to an operation with a body, or act as the exception says."""

        def answer(_: Request) -> Body:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        self.script[op] = answer

    def ops(self) -> list[str]:
        """The names of the received requests, in order."""
        return [request.op.name for request in self.heard]

    def cut(self) -> None:
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all threads and close all sockets. Raises an error that occurred in a thread."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(60)  # After this there are no new connections.
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(60)
        if self.problems:
            raise self.problems[0]

    # --- its threads ---

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(sock)
            self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        talk = Conversation(sock, Connection(Role.SERVER, max_payload_bytes=MAX_PAYLOAD_BYTES))
        try:
            while self._step(talk):
                pass
        except (HangUp, ConnectionLost, ConnectionError, BrokenPipeError):
            pass
        except OSError as error:
            self.problems.append(error)
        except Exception as error:
            self.problems.append(error)
        finally:
            self._open.discard(sock)
            if talk.ring is not None:
                talk.ring.close()
            sock.close()

    def _step(self, talk: Conversation) -> bool:
        if talk.connection.state is State.GREETING:
            # The test left HELLO without a reply; a daemon serves no requests before that reply.
            return bool(talk.sock.recv(1 << 16))
        event = talk.connection.next_event()
        match event:
            case None if talk.ring is not None:
                self._listen(talk, talk.ring)
            case None:
                count = talk.sock.recv_into(talk.connection.reader.get_buffer())
                if talk.connection.state is State.CLOSED:
                    return False
                if count:
                    talk.connection.reader.buffer_updated(count)
                else:
                    talk.connection.receive_eof()
            case EndOfStream():
                return False
            case StreamBroken(failure=failure):
                raise AssertionError(failure.message)
            case Rejected(failure=failure):
                raise AssertionError(failure.message)
            case Request():
                return self._answer(talk, event)
            case _:
                raise AssertionError(event)
        return True

    def _answer(self, talk: Conversation, request: Request) -> bool:
        self.heard.append(request)
        ability = SPECS[request.op].ability
        assert ability is None or ability in talk.announced, f"{request.op.name} was asked of a worker too old for it"
        if request.is_quiet:
            self._keep(talk, request)
            return True
        try:
            reply = talk.connection.send_reply(request, self._outcome(talk, request))
        except Refusal as refusal:
            reply = talk.connection.send_failure(request, refusal.failure)
        except SayGoodbye as goodbye:
            answer = b"" if goodbye.behind is None else talk.connection.send_reply(request, goodbye.behind)
            self._say(talk, answer + talk.connection.send_goodbye(goodbye.failure))
            return False
        except SendRaw as raw:
            self._say(talk, raw.data)
            return not raw.closes
        except Silence:
            return True
        if self.gives_rings and request.op is Opcode.ATTACH and reply[8:10] == bytes(2):
            talk.ring = RingWire(talk.sock, WorkerSpinPolicy())
            socket.send_fds(talk.sock, [reply], [talk.ring.fd])
            talk.sock.setblocking(False)
        else:
            self._say(talk, reply)
        return True

    def _say(self, talk: Conversation, data: bytes) -> None:
        if talk.ring is None:
            talk.sock.sendall(data)
        else:
            assert talk.ring.send(data, 10_000_000_000) is None

    def _listen(self, talk: Conversation, ring: RingWire) -> None:
        reader = talk.connection.reader
        try:
            if not ring.receive(reader) and ring.prepare_sleep(for_room=False):
                select.select([talk.sock], [], [])
                ring.end_sleep(True)
        except ConnectionLost:
            talk.connection.receive_eof()

    def _keep(self, talk: Conversation, request: Request) -> None:
        if talk.kept is not None:
            talk.skipped += 1
            return
        try:
            self._handle(request)
        except Refusal as refusal:
            kernel = request.body.kernel if isinstance(request.body, Launch | LaunchIn | LaunchWith) else ""
            talk.kept = replace(
                refusal.failure, failed_request_id=request.request_id, failed_op=int(request.op), kernel=kernel
            )

    def _outcome(self, talk: Conversation, request: Request) -> Body:
        kept, talk.kept = talk.kept, None
        if kept is not None:
            raise Refusal(kept)
        result = self._handle(request)
        if isinstance(result, AttachReply):
            talk.announced = {option.type for option in result.options}
        return result

    def _handle(self, request: Request) -> Body:
        handler = self.script.get(request.op) or _DEFAULTS[request.op].__get__(self)
        return handler(request)

    # --- default handlers ---

    def _hello(self, _: Request) -> Body:
        return HelloReply(0, "made-up", self.max_payload_bytes, ())

    def _ping(self, request: Request) -> Body:
        assert isinstance(request.body, Ping)
        return request.body

    def _lease_alloc(self, request: Request) -> Body:
        wanted = request.body
        assert isinstance(wanted, LeaseAlloc)
        ttl_ms = self.ttl_ms or wanted.ttl_ms
        exclusivity = wanted.parameters[0].value[0] if wanted.parameters else 0
        end = int(time.time() + ttl_ms / 1000)
        return LeaseGrant(LEASE_ID, 1, wanted.size_bytes, ttl_ms, end, exclusivity, CARD)

    def _lease_renew(self, request: Request) -> Body:
        assert isinstance(request.body, LeaseRenew)
        return LeaseRenewed(2, request.body.ttl_ms, int(time.time() + request.body.ttl_ms / 1000))

    def _lease_free(self, request: Request) -> Body:
        assert isinstance(request.body, LeaseRef)
        return Empty()

    def _lease_query(self, _: Request) -> Body:
        known = {"lease_id": f"{LEASE_ID:032x}", "state": "active", "cause": None, "reason": "", "generation": 1}
        return Report(known | {"remaining_ms": 1000, "card_uuid": CARD} | self.report)

    def _attach(self, request: Request) -> Body:
        assert request.session_id == LEASE_ID
        given = SharedMemoryGrant(RING_LAYOUT) if self.gives_rings else SharedMemoryGrant()
        granule = self.region_granule_bytes.to_bytes(4, "big")
        newer = (Tlv(SessionOption.REGIONS, granule), Tlv(SessionOption.LAUNCH_WITH, b""))
        told: tuple[Tlv, ...] = newer if self.region_granule_bytes else ()
        if self.owns_memory:
            told += (Tlv(SessionOption.OWN_MEMORY, b""),)
        return AttachReply(1 << 30, "made-up", CARD, given.to_options() + told)

    def _region_open(self, request: Request) -> Body:
        wanted = request.body
        assert isinstance(wanted, RegionOpen)
        size_bytes = -(-wanted.size_bytes // GRANULE) * GRANULE
        self._next_handle += 1 << 32
        self._regions += 1
        self.memory[self._next_handle] = bytearray(size_bytes)
        region_id, end = REGION_ID + self._regions, int(time.time() + wanted.ttl_ms / 1000)
        return RegionGrant(region_id, 1, size_bytes, wanted.ttl_ms, end, self._next_handle, self._regions, 7)

    def _revoke(self, _: Request) -> Body:
        return LeaseRevoked(RevokeOutcome.TORN_DOWN)

    def _resize(self, request: Request) -> Body:
        return request.body

    def _park(self, request: Request) -> Body:
        assert isinstance(request.body, LeaseRef)
        return ParkedSession(request.body.lease_id, sum(map(len, self.memory.values())))

    def _move(self, request: Request) -> Body:
        assert isinstance(request.body, LeaseMove)
        card = f"GPU-{request.body.device}"
        return MovedSession(request.body.lease_id, card, sum(map(len, self.memory.values())), 1000)

    def _mem_alloc(self, request: Request) -> Body:
        assert isinstance(request.body, MemAlloc)
        self._next_handle += 1 << 32
        self.memory[self._next_handle] = bytearray(request.body.size_bytes)
        return Handle(self._next_handle)

    def _mem_free(self, request: Request) -> Body:
        assert isinstance(request.body, Handle)
        if self.memory.pop(request.body.handle, None) is None:
            raise Refusal(Failure(Status.INVALID_HANDLE, "no such buffer"))
        return Empty()

    def _mem_reuse(self, request: Request) -> Body:
        assert isinstance(request.body, Handle)
        if request.body.handle not in self.memory:
            raise Refusal(Failure(Status.INVALID_HANDLE, "no such buffer"))
        self.memory[request.body.handle][:] = bytes(len(self.memory[request.body.handle]))
        return Empty()

    def _mem_keep(self, request: Request) -> Body:
        assert isinstance(request.body, MemKeep)
        self.kept = {name: handle for name, handle in self.kept.items() if handle != request.body.handle}
        if request.body.name:
            self.kept[request.body.name] = request.body.handle
        return Empty()

    def _mem_kept(self, _: Request) -> Body:
        return KeptBuffers(tuple(KeptBuffer(name, at, len(self.memory[at])) for name, at in sorted(self.kept.items())))

    def _mem_reset(self, _: Request) -> Body:
        freed = sum(len(self.memory.pop(handle)) for handle in self.kept.values())
        self.kept.clear()
        return Freed(freed)

    def _mem_write(self, request: Request) -> Body:
        body = request.body
        assert isinstance(body, MemWrite)
        self.memory[body.handle][body.offset : body.offset + len(body.data)] = body.data
        return Empty()

    def _mem_read(self, request: Request) -> Body:
        body = request.body
        assert isinstance(body, MemRead)
        return Data(bytes(self.memory[body.handle][body.offset : body.offset + body.length]))

    def _module_load(self, _: Request) -> Body:
        self._next_handle += 1
        return ModuleLoaded(self._next_handle, KERNELS)

    def _stream_create(self, _: Request) -> Body:
        self._last_stream += 1
        return Handle(self._last_stream)

    def _empty(self, _: Request) -> Body:
        return Empty()


@dataclass
class Refusal(Exception):
    """Raised by a handler: reply with this failure, or keep the failure if the request was quiet."""

    failure: Failure


_DEFAULTS: dict[Opcode, Any] = {
    Opcode.HELLO: ScriptedPeer._hello,
    Opcode.ATTACH: ScriptedPeer._attach,
    Opcode.PING: ScriptedPeer._ping,
    Opcode.LEASE_ALLOC: ScriptedPeer._lease_alloc,
    Opcode.LEASE_RENEW: ScriptedPeer._lease_renew,
    Opcode.LEASE_FREE: ScriptedPeer._lease_free,
    Opcode.LEASE_QUERY: ScriptedPeer._lease_query,
    Opcode.MEM_ALLOC: ScriptedPeer._mem_alloc,
    Opcode.MEM_FREE: ScriptedPeer._mem_free,
    Opcode.MEM_REUSE: ScriptedPeer._mem_reuse,
    Opcode.MEM_KEEP: ScriptedPeer._mem_keep,
    Opcode.MEM_KEPT: ScriptedPeer._mem_kept,
    Opcode.MEM_RESET: ScriptedPeer._mem_reset,
    Opcode.MEM_WRITE: ScriptedPeer._mem_write,
    Opcode.MEM_READ: ScriptedPeer._mem_read,
    Opcode.MODULE_LOAD: ScriptedPeer._module_load,
    Opcode.LAUNCH: ScriptedPeer._empty,
    Opcode.SYNC: ScriptedPeer._empty,
    Opcode.MODULE_UNLOAD: ScriptedPeer._empty,
    Opcode.REGION_OPEN: ScriptedPeer._region_open,
    Opcode.REGION_CANCEL: ScriptedPeer._empty,
    Opcode.REGION_SET: ScriptedPeer._stream_create,
    Opcode.REGION_SET_FREE: ScriptedPeer._empty,
    Opcode.REGION_RELEASE: ScriptedPeer._empty,
    Opcode.REGION_REFUSED: ScriptedPeer._empty,
    Opcode.LAUNCH_IN: ScriptedPeer._empty,
    Opcode.LAUNCH_WITH: ScriptedPeer._empty,
    Opcode.LEASE_REVOKE: ScriptedPeer._revoke,
    Opcode.LEASE_RESIZE: ScriptedPeer._resize,
    Opcode.LEASE_PARK: ScriptedPeer._park,
    Opcode.LEASE_MOVE: ScriptedPeer._move,
    Opcode.LEASE_NOTE: ScriptedPeer._empty,
    Opcode.STREAM_CREATE: ScriptedPeer._stream_create,
    Opcode.STREAM_DESTROY: ScriptedPeer._empty,
    Opcode.STREAM_SELECT: ScriptedPeer._empty,
    Opcode.STREAM_WAIT: ScriptedPeer._empty,
    Opcode.STREAM_SYNC: ScriptedPeer._empty,
}


@contextlib.contextmanager
def scripted_peer(path: Path, **settings: Any) -> Iterator[ScriptedPeer]:
    """Yield a scripted daemon on a Unix socket. It is closed after the block."""
    peer = ScriptedPeer(path, **settings)
    try:
        yield peer
    finally:
        peer.close()
