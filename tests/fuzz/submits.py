"""A submit's worker, in this process, on the embedded driver: `SubmitServer` and `SubmitOperations`.

The invariant. Whatever a tenant sends, in whatever pieces, and whenever the broker ends the submit or a token expires:

- the worker ends, at the latest with the connection, and raises no error; nothing is left of it: no descriptor and no
  thread;
- each request that wants a reply gets at most one, in order, for its operation, number and session, with a known status
  and a body of that operation, or a failure; nothing follows a goodbye;
- at most one run is executed, and nothing after it; it has as many outputs as requested, of the requested lengths, with
  zeros where its kernel wrote nothing;
- once the submit has ended, or the token with which it was requested, nothing succeeds; and nothing succeeds that the
  token does not permit;
- the ledger's sums are those of its entries, within the slice, and the control page shows them.
"""

import contextlib
import gc
import socket
import time
from collections.abc import Iterator
from typing import Final

from gpulease.daemon.contract.control_page import BrokerPage, Counter, WorkerPage
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.drivers.interface import KernelFault
from gpulease.daemon.host.ipc import channel_pair, receive_message, send_message
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.server import SubmitServer
from gpulease.daemon.session.session import Session
from gpulease.protocol import messages as m
from gpulease.protocol.capabilities import Permission
from gpulease.protocol.codec import build_body, parse_body, reply_body
from gpulease.protocol.errors import FramingError
from gpulease.protocol.framing import Frame, FrameReader, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.opcodes import ArgumentKind, Flag, Opcode, Status

from .draws import Draws
from .sessions import ENDS, FRAMES, GONE_S, LEASE, STATUSES, count
from .submit_requests import ALLOWANCE, RUN_OPS, SLICE, run_body

MAX_BYTES = 512
MAX_STEPS = 24
DEADLINE_NS: Final = 1 << 62
ATTACH_ID: Final = 1
MARK: Final = 7
WELCOME: Final = m.AttachReply(SLICE, "cpu", "GPU-x", ())
GUESTS: Final = (
    None,
    None,
    Guest(Permission.TASKLET_SUBMIT, DEADLINE_NS, 1, MARK),
    Guest(Permission.MEM_READ, DEADLINE_NS, 1, MARK),
    Guest(Permission.TASKLET_SUBMIT, 1, 1, MARK),
)
SPENDING: Final = (0, Status.LOAD_FAILED, Status.LAUNCH_FAILED, Status.ALLOC_FAILED)
"""Statuses with which only a run that was begun is answered."""


def check(data: bytes) -> None:
    descriptors, threads = count("/proc/self/fd"), count("/proc/self/task")
    play(Draws(data))
    if count("/proc/self/fd") != descriptors:
        gc.collect()
    assert count("/proc/self/fd") == descriptors
    until = time.monotonic() + GONE_S
    while count("/proc/self/task") != threads:
        assert time.monotonic() < until


def play(draws: Draws) -> None:
    page = BrokerPage()
    page.set_deadline(DEADLINE_NS, 1)
    view = WorkerPage(page.fds)
    context = CpuContext(SLICE, hosts=1)
    ledger = Ledger(SLICE, ALLOWANCE)
    session = Waiting(LEASE, context, ledger, view, is_submit=True)
    channel, workers_end = channel_pair()
    try:
        around = Around(draws, page, channel)
        session.around = around
        SubmitServer(workers_end, session, WELCOME).run()
        around.check_end(session.submit.is_spent)
        check_books(context, ledger, page)
    finally:
        session.around = None
        with contextlib.suppress(KernelFault):
            # If it ended before its kernel did, wait for the kernel, which would end with the process.
            context.sync()
        context.close()
        around.tenant.close()
        for sock in (channel, workers_end):
            sock.close()
        session._counters.release()
        session._graphs._counters.release()
        view.close()
        page.close()


class Waiting(Session):
    """A session that reports when its worker is about to wait, because then all earlier requests are done."""

    around: "Around | None" = None

    def poll(self) -> None:
        super().poll()
        if self.around is not None and not self._counters[Counter.DOING]:
            self.around.go_on()


class Around:
    """The broker and the tenant of one submit. Each time the worker waits, one of them does something."""

    def __init__(self, draws: Draws, page: BrokerPage, channel: socket.socket) -> None:
        self._draws, self._page, self._channel = draws, page, channel
        channel.setblocking(False)
        self.tenant, self._theirs = socket.socketpair()
        self.tenant.setblocking(False)
        self._guest: Guest | None = None
        self._said, self._heard = FrameReader(MAX_PAYLOAD_BYTES), FrameReader(MAX_PAYLOAD_BYTES)
        self._can_follow = True
        self._requests: list[Frame] = []
        self._pieces: list[bytes] = []
        self._steps = self._last_id = self._replies = self._last_op = 0
        self._is_attached = self._is_over = self._is_last = False

    def go_on(self) -> None:
        self._hear()
        self._steps += 1
        is_late = self._draws.is_over or self._steps > MAX_STEPS
        if not self._is_attached:
            self._tell({"op": "end"}) if is_late else self._hand_over()
        elif self._pieces:
            self._put(self._pieces.pop(0))
        elif is_late:
            self._leave()
        else:
            self._step()

    # --- what they do ---

    def _hand_over(self) -> None:
        draws = self._draws
        way = draws.byte()
        if way >= 250:
            self._tell({"op": "end"} if way % 2 else {"op": "attach"})
            return
        if way >= 240:
            self._tell({"op": "nothing"}, self.tenant.fileno())
            return
        self._guest = draws.pick(GUESTS)
        rest = self._run() if way % 4 == 3 else b""
        terms = None if self._guest is None else self._guest.to_message()
        self._note(rest)
        self._is_attached = True
        attach = {"op": "attach", "request_id": ATTACH_ID, "rest": rest, "ring": False, "arena": 0, "guest": terms}
        self._tell(attach, self._theirs.fileno())
        self._theirs.close()

    def _step(self) -> None:
        draws = self._draws
        way = draws.byte()
        if way < 150:
            wire = self._run()
            cut = draws.below(4) * len(wire) // 5
            self._pieces += [piece for piece in (wire[:cut], wire[cut:]) if piece]
            self._put(self._pieces.pop(0))
        elif way < 180:
            self._last_id += 1
            self._put(build_frame(Opcode.PING, build_body(m.Ping(way)), request_id=self._last_id, session_id=LEASE))
        elif way < 200:
            self._put(draws.pick(FRAMES))
        elif way < 212:
            self._put(draws.sized(60) or b"\0")
        elif way < 235:
            self._end(way)
        elif way < 250:
            self._tell({"op": "nothing"}, self.tenant.fileno())
        else:
            self._leave()

    def _end(self, way: int) -> None:
        """End the submit or the token. The broker reports it at once, or a request arrives first."""
        if way % 3 == 0:
            self._page.set_deadline(DEADLINE_NS, 2)
            self._is_over = self._is_over or self._guest is not None
        elif way % 3 == 1:
            self._page.revoke_token(MARK, 1 << 40, 1)
            self._is_over = self._is_over or self._guest is not None
        else:
            self._page.refuse(self._draws.pick(ENDS), "a reason")
            self._is_over = True
        if self._draws.chance(2):
            self._put(self._run())
        else:
            self._tell({"op": "end"})

    def _run(self) -> bytes:
        draws = self._draws
        way = draws.byte()
        payload = build_body(run_body(draws))
        if way >= 240:
            payload = payload[: draws.byte()] + draws.sized(16)
        self._last_id += way != 239
        op = Opcode.SUBMIT_RUN if way < 230 else draws.pick(RUN_OPS)
        flags = Flag.QUIET if way in range(220, 226) else Flag(0)
        return build_frame(op, payload, request_id=self._last_id, session_id=LEASE + (way == 238), flags=flags)

    def _put(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            # The buffer has room for all of it, because the tenant sends little, and the worker reads before it waits.
            assert self.tenant.send(data) == len(data)
        self._note(data)

    def _note(self, data: bytes) -> None:
        """Record the requests that the tenant sends, as long as its frames are valid."""
        self._said.receive_data(data)
        try:
            while self._can_follow and (frame := self._said.next_frame()) is not None:
                self._requests.append(frame._replace(payload=bytes(frame.payload)))
        except FramingError:
            self._can_follow = False

    def _leave(self) -> None:
        self.tenant.close()
        # Also wake a worker that polls the channel first.
        self._tell({"op": "nothing"})

    def _tell(self, message: dict[str, object], *fds: int) -> None:
        send_message(self._channel, message, fds if all(fd >= 0 for fd in fds) else ())

    # --- what they are told ---

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                message, fds = receive_message(self._channel)
                assert message in ({"op": "attached"}, {"op": "look"})
                assert not fds
        with contextlib.suppress(BlockingIOError, OSError):
            while data := self.tenant.recv(1 << 16):
                self._heard.receive_data(data)
        while (frame := self._heard.next_frame()) is not None:
            assert not self._is_last, "a word behind the last one"
            self._take(frame._replace(payload=bytes(frame.payload)))

    def _take(self, reply: Frame) -> None:
        assert reply.flags == Flag.REPLY
        assert reply.status in STATUSES
        self._last_op = reply.op
        if not self._replies:
            assert (reply.op, reply.request_id, reply.status) == (Opcode.GPU_SUBMIT, ATTACH_ID, 0)
            assert parse_body(m.AttachReply, reply.payload) == WELCOME
            self._replies = 1
            return
        if reply.request_id == 0:
            assert (reply.op, bool(reply.status)) == (Opcode.GOODBYE, True)
            self._is_last = True
            return
        asked = self._asked_for(reply)
        self._replies += 1
        if asked.op == Opcode.SUBMIT_RUN and reply.status in SPENDING:
            self._is_last = True
        if reply.status:
            parse_body(m.ErrorBody, reply.payload)
            return
        assert not self._is_over, "what is over did what it was asked"
        body = parse_body(reply_body(Opcode(reply.op)), reply.payload)
        if isinstance(body, m.SubmitDone):
            assert self._guest is None or self._guest.permissions & Permission.TASKLET_SUBMIT
            assert self._guest is None or self._guest.expires_ns == DEADLINE_NS
            check_outputs(parse_body(m.SubmitRun, asked.payload), body.outputs)

    def _asked_for(self, reply: Frame) -> Frame:
        """Return the request to which this can be the reply.

        Quiet requests have no reply, and neither has a request that ended the connection.
        """
        while self._requests:
            asked = self._requests.pop(0)
            if not asked.flags:
                assert (reply.op, reply.request_id, reply.session_id) == (asked.op, asked.request_id, asked.session_id)
                return asked
        raise AssertionError("a reply to nothing")

    def check_end(self, is_spent: bool) -> None:
        """Check the end.

        The worker has returned, so it has sent everything, and its end of the connection is closed.
        """
        self._hear()
        self._theirs.close()
        if self.tenant.fileno() >= 0:
            assert self.tenant.recv(1) == b""
            assert not is_spent or self._last_op == Opcode.SUBMIT_RUN, "a run was not answered, or not the last"


def check_outputs(asked: m.SubmitRun, outputs: tuple[bytes, ...]) -> None:
    answered = [one for one in asked.arguments if one.kind in (ArgumentKind.OUTPUT, ArgumentKind.INOUT)]
    sizes = [one.size_bytes if one.kind == ArgumentKind.OUTPUT else len(one.data) for one in answered]
    assert [len(output) for output in outputs] == sizes
    if asked.kernel == "fill_u32" and answered and answered[0].kind == ArgumentKind.OUTPUT:
        value, (output, *_) = asked.arguments[2].data, outputs
        words = {output[at : at + 4] for at in range(0, len(output) // 4 * 4, 4)}
        assert words <= {value, bytes(4)}, "an output held something before"


def check_books(context: CpuContext, ledger: Ledger, page: BrokerPage) -> None:
    assert ledger.used_bytes == sum(ledger._allocations.values())
    assert 0 <= ledger.used_bytes <= ledger.charged_bytes <= SLICE
    start = context._arena.memory.address
    held = {address - start for address in ledger._allocations}
    variables = {at - start for module in context._modules for at in module.variable_addresses if at}
    assert context._arena._sizes.keys() == held | variables
    assert page.counter(Counter.ALLOCATED_BYTES) == ledger.charged_bytes
    assert page.counter(Counter.DOING) == 0
    assert page.counter(Counter.LAUNCHES) in (0, 1)
    assert page.counter(Counter.SYNCS) <= page.counter(Counter.LAUNCHES)


def seeds() -> Iterator[bytes]:
    """Yield runs of every shape, kernel and image; each event before a run and after it; and all tokens."""
    fill = bytes([0, 3, 1, 0, 0, 1, 0, 0, 2, 0, 2, 2, 0, 0, 0, 9, 0, 0, 0])
    for kernel in range(8):
        for shape in range(8):
            body = bytes([0, kernel, kernel % 3, 0, 0, shape % 4, 0, 0, shape, *range(1, 13)])
            yield bytes([0, 0, 0]) + body + bytes([0, kernel % 4])
            yield bytes([3, 2]) + body
    for guest in range(len(GUESTS)):
        for way in (150, 180, 200, 211, *range(212, 235, 2), 240, 250):
            yield bytes([0, guest, way, 5, 1, 2, 3, 4, 5, 0]) + fill + bytes([0]) + bytes([0]) + fill
            yield bytes([0, guest, way, 4, 1]) + fill + bytes([2, 160, 0]) + fill
    for way in (220, 229, 230, 238, 239, 240, 255):
        yield bytes([0, 0, 0, way]) + fill[1:] + bytes([9, 5, 1, 2, 3, 4, 5, 0, 160]) + bytes([0]) + fill
    for way in (240, 245, 250, 251):
        yield bytes([way]) + bytes([0, 0, 0]) + fill
    for number in range(0, len(FRAMES), 7):
        yield bytes([0, 0, 190, *number.to_bytes(2, "big")[-1 - (len(FRAMES) > 256) :], 0]) + fill
