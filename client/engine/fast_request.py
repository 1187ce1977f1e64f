"""Requests whose answer is awaited on the spot: one known frame out, one known frame back.

A successful reply without a body is known to the byte before it comes, one with a handle but for the handle. Where it
comes while this side still looks for it, nothing has to be parsed, and a round trip costs a few microseconds. Anything
else, a failure or a long wait, is left to the general way.
"""

from typing import TYPE_CHECKING, Any, Final

from gpulease.client.engine.exchange import doing_of, receive
from gpulease.client.engine.steps import Procedure
from gpulease.protocol import Failure, Opcode
from gpulease.protocol.fastpath import MIDDLE_AT, REQUEST_ID_OFFSET, data_prefix, mem_read_frame
from gpulease.protocol.framing import build_frame
from gpulease.protocol.messages import Body
from gpulease.protocol.opcodes import Flag
from gpulease.protocol.ring import NO_DATA

if TYPE_CHECKING:
    from gpulease.client.engine.session import SessionCore

_REPLY: Final = int(Flag.REPLY)


class _Asked:
    """One operation of one session, asked again and again, each time when the last was answered."""

    def __init__(self, op: Opcode) -> None:
        self._op = op
        self._late_id = 0

    def _ask(
        self,
        session: "SessionCore",
        request_id: int,
        request: bytes,
        reply: bytes,
        into: memoryview = NO_DATA,
        more_ns: int = 0,
        late_into: memoryview | None = None,
    ) -> bool | None:
        """See `Channel.ask`; `late_into`: where a late reply's data goes, None if it is to be parsed."""
        channel = session.channel
        outcome: bool | None = False
        try:
            outcome = channel.ask(request, reply, into, more_ns)
        finally:
            if outcome is False:
                self._late_id = request_id
                channel.link.expect_late(self._op, request_id, late_into)
                channel.feed()
        if outcome:
            if session.freed:
                session.settle(None, "")
            if self._op in session.fences or session.settled_id == request_id - 1:
                session.settled_id = request_id  # as `acknowledge` does
        return outcome

    def rest(self, session: "SessionCore") -> Procedure[None]:
        """Wait for the reply to what was asked last."""
        yield from self.late_answer(session)

    def late_answer(self, session: "SessionCore") -> Procedure[Any]:
        """The same; its body."""
        result: Body | Failure = yield from receive(session.channel, self._late_id, session.limit)
        session.settle(result, doing_of(self._op))
        session.acknowledge(self._op, self._late_id)
        return result


class FastRequest(_Asked):
    """Asks with a payload of the same size each time."""

    def __init__(self, op: Opcode, payload_bytes: int, session_id: int, answer_bytes: int = 0) -> None:
        """Args: answer_bytes: What a successful reply's body has."""
        super().__init__(op)
        self._answer_bytes = answer_bytes
        request = build_frame(op, bytes(payload_bytes), request_id=0, session_id=session_id)
        reply = build_frame(op, bytes(answer_bytes), request_id=0, session_id=session_id, flags=_REPLY)
        self._head, self._middle = request[:REQUEST_ID_OFFSET], request[MIDDLE_AT : len(request) - payload_bytes]
        self._reply_head, self._reply_tail = reply[:REQUEST_ID_OFFSET], reply[MIDDLE_AT : len(reply) - answer_bytes]

    def ask(
        self, session: "SessionCore", payload: bytes = b"", more_ns: int = 0, into: memoryview = NO_DATA
    ) -> bool | None:
        """Ask, under the session's lock: True if it is done, False if `rest` is still to be driven.

        None if the session can't be asked this way now: nothing was sent. `more_ns`: how long the work takes itself.
        """
        if not session.is_at_rest:
            return None
        request_id = session.connection.next_request_id()
        number = request_id.to_bytes(8, "big")
        request = b"".join((self._head, number, self._middle, payload))
        return self._ask(
            session, request_id, request, b"".join((self._reply_head, number, self._reply_tail)), into, more_ns
        )

    def ask_for(self, session: "SessionCore", payload: bytes) -> bytes | bool | None:
        """The same where a reply carries `answer_bytes`: they stand for True."""
        answer = bytearray(self._answer_bytes)
        return self.ask(session, payload, into=memoryview(answer)) and bytes(answer)

    def do(self, session: "SessionCore", payload: bytes = b"", more_ns: int = 0) -> Procedure[None]:
        """Ask, one way or the other, and wait for the reply."""
        is_done = self.ask(session, payload, more_ns)
        if is_done is None:
            yield from session.ask(self._op, payload)
        elif not is_done:
            yield from self.rest(session)


class SmallRead(_Asked):
    """The same for reads: a reply whose beginning is known, and the data behind it, which goes where it belongs."""

    def __init__(self) -> None:
        super().__init__(Opcode.MEM_READ)

    def ask(self, session: "SessionCore", handle: int, offset: int, into: memoryview) -> bool | None:
        """See FastRequest."""
        if not session.is_at_rest:
            return None
        request_id = session.connection.next_request_id()
        numbers = {"request_id": request_id, "session_id": session.session_id}
        request = mem_read_frame(handle, offset, len(into), **numbers)
        return self._ask(session, request_id, request, data_prefix(len(into), **numbers), into, late_into=into)
