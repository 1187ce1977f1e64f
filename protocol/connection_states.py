"""The states of a connection and the messages that change them: the same table for both peers, whichever side sends.

`connection.py` describes the sequence.
"""

from enum import Enum, auto
from typing import Final


class State(Enum):
    """The state of a connection, by the latest message that either side sent.

    OPENING: nothing was sent. GREETING: HELLO awaits its reply. CONTROL: the broker serves requests. ATTACHING: the
    connection is on its way to a worker. SESSION: a worker serves requests. CLOSED: no more messages are taken or sent.
    """

    OPENING = auto()
    GREETING = auto()
    CONTROL = auto()
    ATTACHING = auto()
    SESSION = auto()
    CLOSED = auto()


class Trigger(Enum):
    """A message on the wire, in either direction."""

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
    # HELLO comes first and once. A refused HELLO closes the connection.
    (State.OPENING, Trigger.HELLO): State.GREETING,
    (State.GREETING, Trigger.HELLO_REPLY): State.CONTROL,
    (State.GREETING, Trigger.HELLO_REFUSED): State.CLOSED,
    # Control requests leave the state alone, in flight or answered.
    (State.CONTROL, Trigger.CONTROL_REQUEST): State.CONTROL,
    (State.CONTROL, Trigger.CONTROL_REPLY): State.CONTROL,
    (State.CONTROL, Trigger.PING): State.CONTROL,
    (State.CONTROL, Trigger.PING_REPLY): State.CONTROL,
    # The broker answers a refused ATTACH itself and keeps the connection; a worker answers an accepted one.
    (State.CONTROL, Trigger.ATTACH): State.ATTACHING,
    (State.ATTACHING, Trigger.ATTACH_REPLY): State.SESSION,
    (State.ATTACHING, Trigger.ATTACH_REFUSED): State.CONTROL,
    # No message leads from a session back to CONTROL: the broker has given its socket away.
    (State.SESSION, Trigger.SESSION_REQUEST): State.SESSION,
    (State.SESSION, Trigger.SESSION_REPLY): State.SESSION,
    (State.SESSION, Trigger.PING): State.SESSION,
    (State.SESSION, Trigger.PING_REPLY): State.SESSION,
}

REPLIES: Final[dict[Trigger, tuple[Trigger, Trigger]]] = {
    # Only for HELLO and ATTACH do success and refusal lead to different states.
    Trigger.HELLO: (Trigger.HELLO_REPLY, Trigger.HELLO_REFUSED),
    Trigger.CONTROL_REQUEST: (Trigger.CONTROL_REPLY, Trigger.CONTROL_REPLY),
    Trigger.ATTACH: (Trigger.ATTACH_REPLY, Trigger.ATTACH_REFUSED),
    Trigger.PING: (Trigger.PING_REPLY, Trigger.PING_REPLY),
    Trigger.SESSION_REQUEST: (Trigger.SESSION_REPLY, Trigger.SESSION_REPLY),
}
"""By a request's trigger: the triggers of its successful reply and of its refusal."""
