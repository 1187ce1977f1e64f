"""The warm-up of a warm worker: a session without a tenant, which does everything that is slow the first time.

The first compilation in a process took the driver of an H100 28 to 126 ms, depending on how much of its compiler the
host still had in memory. In a newly forked process, the first run of any code copies the pages that it writes to. So
the warm-up does each kind of operation with the code that serves tenants: first with a session alone, then with a
server and a connection that has a ring and an arena. At the end it releases everything: a lease notices only the speed.
"""

import gc
import select
import socket
from typing import Any, Final, cast

from gpulease.daemon.contract.control_page import BrokerPage, WorkerPage
from gpulease.daemon.contract.messages import AttachOrder, EndSession
from gpulease.daemon.drivers.interface import Context
from gpulease.daemon.host.ipc import channel_pair, send_message
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.server import SessionServer
from gpulease.daemon.session.session import Session
from gpulease.protocol.codec import build_body, parse_body
from gpulease.protocol.failures import Failure
from gpulease.protocol.framing import Frame, FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import (
    AttachReply,
    Empty,
    ErrorBody,
    Handle,
    Launch,
    MemAlloc,
    MemRead,
    MemWrite,
    ModuleLoad,
    ModuleLoaded,
)
from gpulease.protocol.opcodes import Flag, Opcode, Status

SLICE_BYTES: Final = 1 << 20

_COUNTED_BYTES: Final = 1 << 30
"""The slice's size in the ledger. The image is ours, so no bound is needed."""

_LEASE: Final = 1
_BYTES: Final = 4096
_ARENA_BYTES: Final = 4 << 20
_FAR_NS: Final = 1 << 62

_ROUNDS: Final = 3
"""Number of rounds of launch, wait and copies, and of connections: the interpreter specialises code that has run twice
(PEP 659)."""

_PTX: Final = b""".version 7.0
.target sm_75
.address_size 64
.visible .entry rehearse(.param .u64 into, .param .u32 value)
{
    .reg .b32 %r1;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [into];
    cvta.to.global.u64 %rd2, %rd1;
    ld.param.u32 %r1, [value];
    st.global.u32 [%rd2], %r1;
    ret;
}
"""


class RehearsalFailed(Exception):
    """The context can't do something that every lease needs; the message says what and why."""


def rehearse(context: Context) -> None:
    """Execute each kind of operation, on a temporary control page, and release everything.

    Raises RehearsalFailed, DriverError.
    """
    broker_page = BrokerPage()
    # Use a deadline that is never reached.
    page = WorkerPage(broker_page.fds)
    try:
        broker_page.set_deadline(_FAR_NS, 1)
        _Rehearsal(Session(_LEASE, context, Ledger(_COUNTED_BYTES), page, native=context.native())).run()
        context.sync()
    finally:
        page.close()
        broker_page.close()
    # A session's objects form cycles, and modules are unloaded with their last reference, so collect now.
    gc.collect()
    # The remaining objects live until the process ends, so the collector need not visit them again.
    gc.freeze()


class _Rehearsal:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._reader = FrameReader(MAX_PAYLOAD_BYTES)
        self._request_id = 0

    def run(self) -> None:
        """Send all requests. Raises RehearsalFailed."""
        # Allocate memory and load a module, as nearly every lease does first.
        buffer = parse_body(Handle, self._ask(Opcode.MEM_ALLOC, MemAlloc(_BYTES))).handle
        module = parse_body(ModuleLoaded, self._ask(Opcode.MODULE_LOAD, ModuleLoad(_PTX))).module
        for number in range(_ROUNDS):
            self._round(buffer, module, number)
        for number in range(_ROUNDS):
            self._serve(_launch(buffer, module, number))
        self._ask(Opcode.MODULE_UNLOAD, Handle(module))
        self._ask(Opcode.MEM_FREE, Handle(buffer))

    def _round(self, buffer: int, module: int, number: int) -> None:
        # Copy in, launch, wait, copy out; then check that the kernel ran.
        self._ask(Opcode.MEM_WRITE, MemWrite(buffer, 0, bytes(_BYTES)))
        self._ask(Opcode.LAUNCH, _launch(buffer, module, number))
        self._ask(Opcode.SYNC, Empty())
        read = self._ask(Opcode.MEM_READ, MemRead(buffer, 0, _BYTES))
        if bytes(read[-_BYTES:][:4]) != number.to_bytes(4, "little"):
            raise RehearsalFailed("a kernel's result is not what it wrote")

    def _serve(self, launch: Launch) -> None:
        """Run a server with a connection that has sent quiet launches and a SYNC and then ends."""
        # Build the frames that a tenant would have sent after ATTACH.
        body = build_body(launch)
        sent = b"".join(self._frame(Opcode.LAUNCH, body, int(Flag.QUIET)) for _ in range(_ROUNDS))
        sent += self._frame(Opcode.SYNC, b"")
        # On the broker's channel, the server first receives the connection, then the channel's end.
        broker, worker = channel_pair()
        tenant, connection = socket.socketpair()
        with worker, tenant:
            with broker, connection:
                # Ask for all that a client's session asks for.
                attach = AttachOrder(1, sent, ring=True, arena_bytes=_ARENA_BYTES, owns=True, words=True)
                send_message(broker, attach.to_map(), (connection.fileno(),))
                send_message(broker, EndSession().to_map())
            # `run` returns after both connections were served.
            SessionServer(worker, self._session, AttachReply(_BYTES, "", "", ()), is_shared=False).run()
            if not select.select([tenant], [], [], 0)[0]:
                raise RehearsalFailed("a connection that was handed over was not answered")
        self._session.arena.close()

    def _frame(self, op: Opcode, body: bytes, flags: int = 0) -> bytes:
        self._request_id += 1
        return build_frame(op, body, request_id=self._request_id, session_id=_LEASE, flags=flags)

    def _ask(self, op: Opcode, body: Any) -> memoryview:
        """Send a request; return the payload of its reply. Raises RehearsalFailed."""
        # Use the same parser and builder as for a tenant's request.
        self._reader.receive_data(self._frame(op, build_body(body)))
        reply = self._session.handle(cast(Frame, self._reader.next_frame()))
        answers = FrameReader(MAX_PAYLOAD_BYTES)
        answers.receive_data(reply or b"")
        answer = answers.next_frame()
        if answer is None:
            raise RehearsalFailed(f"{op.name} was not answered")
        if answer.status != Status.OK:
            failure = Failure.from_body(answer.status, parse_body(ErrorBody, answer.payload))
            raise RehearsalFailed(f"{op.name}: {failure.message}")
        return memoryview(answer.payload)


def _launch(buffer: int, module: int, value: int) -> Launch:
    args = buffer.to_bytes(8, "little") + value.to_bytes(4, "little")
    return Launch(module, "rehearse", 1, 1, 1, 1, 1, 1, 0, args, (8, 4))
