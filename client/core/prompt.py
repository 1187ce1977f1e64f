"""Requests whose answer is awaited on the spot: one known frame out, one known frame back.

A successful reply without a body is known to the byte before it comes, one with a handle but for the handle. Where it
comes while this side still looks for it, nothing has to be parsed, and a round trip costs a few microseconds. Anything
else, a failure or a long wait, is left to the general way.
"""

from typing import TYPE_CHECKING, Any, Final

from gpulease.client.core.exchange import receive
from gpulease.client.core.steps import Procedure
from gpulease.protocol import Failure, Opcode
from gpulease.protocol.fastpath import MIDDLE_AT, REQUEST_ID_OFFSET, data_prefix, mem_read_frame
from gpulease.protocol.framing import build_frame
from gpulease.protocol.messages import Body
from gpulease.protocol.opcodes import Flag

if TYPE_CHECKING:
    from gpulease.client.core.session import SessionState

_REPLY: Final = int(Flag.REPLY)


class Prompter:
    """Asks one operation of one session, again and again, each time with a payload of the same size."""

    def __init__(self, op: Opcode, payload_bytes: int, session_id: int, answer_bytes: int = 0) -> None:
        """Args: answer_bytes: What a successful reply's body has."""
        self._op = op
        self._answer_bytes = answer_bytes
        request = build_frame(op, bytes(payload_bytes), request_id=0, session_id=session_id)
        reply = build_frame(op, bytes(answer_bytes), request_id=0, session_id=session_id, flags=_REPLY)
        self._head, self._middle = request[:REQUEST_ID_OFFSET], request[MIDDLE_AT : len(request) - payload_bytes]
        self._reply_head, self._reply_tail = reply[:REQUEST_ID_OFFSET], reply[MIDDLE_AT : len(reply) - answer_bytes]
        self._late_id = 0

    def ask(self, session: "SessionState", payload: bytes = b"", more_ns: int = 0) -> bool | None:
        """Ask, under the session's lock: True if it is done, False if `rest` is still to be driven.

        None if the session can't be asked this way now: nothing was sent. `more_ns`: how long the work takes itself.
        """
        channel = session.channel
        if not session.is_at_rest:
            return None
        link = channel.link
        request_id = link.connection.next_request_id()
        number = request_id.to_bytes(8, "big")
        outcome: bool | None = False
        try:
            outcome = channel.ask(
                b"".join((self._head, number, self._middle, payload)),
                b"".join((self._reply_head, number, self._reply_tail)),
                more_ns,
            )
        finally:
            if outcome is False:
                self._late_id = request_id
                link.expect_late(self._op, request_id)
                channel.feed()
        if outcome:
            session.settle(None, "")
        return outcome

    def ask_for(self, session: "SessionState", payload: bytes) -> bytes | bool | None:
        """The same where a reply carries `answer_bytes`: they stand for True."""
        channel = session.channel
        if not session.is_at_rest:
            return None
        request_id = channel.link.connection.next_request_id()
        number = request_id.to_bytes(8, "big")
        answer = bytearray(self._answer_bytes)
        outcome: bool | None = False
        try:
            outcome = channel.ask_data(
                b"".join((self._head, number, self._middle, payload)),
                b"".join((self._reply_head, number, self._reply_tail)),
                memoryview(answer),
            )
        finally:
            if outcome is False:
                self._late_id = request_id
                channel.link.expect_late(self._op, request_id)
                channel.feed()
        if not outcome:
            return outcome
        session.settle(None, "")
        return bytes(answer)

    def rest(self, session: "SessionState") -> Procedure[None]:
        """Wait for the reply to the last `ask`."""
        yield from self.late_answer(session)

    def late_answer(self, session: "SessionState") -> Procedure[Any]:
        """The same after `ask_for`: the reply's body."""
        result: Body | Failure = yield from receive(session.channel, self._late_id, session.limit)
        session.settle(result, self._op.name.lower())
        return result

    def do(self, session: "SessionState", payload: bytes = b"", more_ns: int = 0) -> Procedure[None]:
        """Ask, one way or the other, and wait for the reply."""
        is_done = self.ask(session, payload, more_ns)
        if is_done is None:
            yield from session.ask(self._op, payload)
        elif not is_done:
            yield from self.rest(session)


class SmallRead:
    """The same for reads: a reply whose beginning is known, and the data behind it, which goes where it belongs."""

    def __init__(self) -> None:
        self._late_id = 0

    def ask(self, session: "SessionState", handle: int, offset: int, into: memoryview) -> bool | None:
        """See Prompter."""
        channel, connection = session.channel, session.connection
        if not session.is_at_rest:
            return None
        request_id = connection.last_request_id = connection.last_request_id + 1
        numbers = {"request_id": request_id, "session_id": session.session_id}
        request = mem_read_frame(handle, offset, len(into), **numbers)
        outcome: bool | None = False
        try:
            outcome = channel.ask_data(request, data_prefix(len(into), **numbers), into)
        finally:
            if outcome is False:
                self._late_id = request_id
                channel.link.expect_late(Opcode.MEM_READ, request_id, into)
                channel.feed()
        if outcome:
            session.settle(None, "")
        return outcome

    def rest(self, session: "SessionState") -> Procedure[None]:
        """Wait for the reply to the last `ask`."""
        result: Body | Failure = yield from receive(session.channel, self._late_id, session.limit)
        session.settle(result, "mem_read")
