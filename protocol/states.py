"""What may be said when: the life of one connection, as a table.

Theory of operation. Both peers keep the same state and move it by the same table, whoever sends. A connection opens
with HELLO, then takes control requests, any number in flight. ATTACH is the last of them: it is sent with nothing else
in flight, because the daemon then hands the socket, and every byte behind the ATTACH, to the session's worker, and
no one could answer what was asked before. GPU_SUBMIT is the same for a worker of its own. Refused, the connection is a
control connection again; accepted, it speaks session operations until it is closed.

What is not in `TRANSITIONS` is not allowed. A forbidden request is answered INVALID_REQUEST and changes nothing.
"""

from enum import Enum, auto
from typing import Final

from gpulease.protocol.opcodes import SESSION_OPCODES, Opcode


class State(Enum):
    """Where a connection is in its life."""

    OPENING = auto()
    GREETING = auto()
    CONTROL = auto()
    ATTACHING = auto()
    SESSION = auto()
    CLOSED = auto()


class Trigger(Enum):
    """What happened on the wire, in either direction."""

    HELLO = auto()
    HELLO_REPLY = auto()
    HELLO_REFUSED = auto()
    CONTROL_REQUEST = auto()
    CONTROL_REPLY = auto()
    ATTACH = auto()
    ATTACH_REPLY = auto()
    ATTACH_REFUSED = auto()
    PING = auto()
    PING_REPLY = auto()
    SESSION_REQUEST = auto()
    SESSION_REPLY = auto()


TRANSITIONS: Final[dict[tuple[State, Trigger], State]] = {
    (State.OPENING, Trigger.HELLO): State.GREETING,
    (State.GREETING, Trigger.HELLO_REPLY): State.CONTROL,
    (State.GREETING, Trigger.HELLO_REFUSED): State.CLOSED,
    (State.CONTROL, Trigger.CONTROL_REQUEST): State.CONTROL,
    (State.CONTROL, Trigger.CONTROL_REPLY): State.CONTROL,
    (State.CONTROL, Trigger.PING): State.CONTROL,
    (State.CONTROL, Trigger.PING_REPLY): State.CONTROL,
    (State.CONTROL, Trigger.ATTACH): State.ATTACHING,
    (State.ATTACHING, Trigger.ATTACH_REPLY): State.SESSION,
    (State.ATTACHING, Trigger.ATTACH_REFUSED): State.CONTROL,
    (State.SESSION, Trigger.SESSION_REQUEST): State.SESSION,
    (State.SESSION, Trigger.SESSION_REPLY): State.SESSION,
    (State.SESSION, Trigger.PING): State.SESSION,
    (State.SESSION, Trigger.PING_REPLY): State.SESSION,
}


def request_trigger(op: Opcode) -> Trigger | None:
    """What asking for an operation triggers; None for one that is never asked for."""
    if op in SESSION_OPCODES:
        return Trigger.SESSION_REQUEST
    return _REQUESTS.get(op, Trigger.CONTROL_REQUEST)


def reply_trigger(op: Opcode, *, refused: bool) -> Trigger | None:
    """What answering an operation triggers."""
    if op in SESSION_OPCODES:
        return Trigger.SESSION_REPLY
    answered, denied = _REPLIES.get(op, (Trigger.CONTROL_REPLY, Trigger.CONTROL_REPLY))
    return denied if refused else answered


_REQUESTS: Final[dict[Opcode, Trigger | None]] = {
    Opcode.HELLO: Trigger.HELLO,
    Opcode.ATTACH: Trigger.ATTACH,
    Opcode.GPU_SUBMIT: Trigger.ATTACH,
    Opcode.PING: Trigger.PING,
    Opcode.GOODBYE: None,
    Opcode.LEASE_EVENT: None,
}
_REPLIES: Final = {
    Opcode.HELLO: (Trigger.HELLO_REPLY, Trigger.HELLO_REFUSED),
    Opcode.ATTACH: (Trigger.ATTACH_REPLY, Trigger.ATTACH_REFUSED),
    Opcode.GPU_SUBMIT: (Trigger.ATTACH_REPLY, Trigger.ATTACH_REFUSED),
    Opcode.PING: (Trigger.PING_REPLY, Trigger.PING_REPLY),
}
