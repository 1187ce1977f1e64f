"""The states of a connection and the messages that change them: the same table for both peers, whichever side sends.

`connection.py` describes the sequence.
"""

from enum import Enum, auto
from typing import Final


class State(Enum):
    """The state of a connection."""

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

REPLIES: Final[dict[Trigger, tuple[Trigger, Trigger]]] = {
    Trigger.HELLO: (Trigger.HELLO_REPLY, Trigger.HELLO_REFUSED),
    Trigger.CONTROL_REQUEST: (Trigger.CONTROL_REPLY, Trigger.CONTROL_REPLY),
    Trigger.ATTACH: (Trigger.ATTACH_REPLY, Trigger.ATTACH_REFUSED),
    Trigger.PING: (Trigger.PING_REPLY, Trigger.PING_REPLY),
    Trigger.SESSION_REQUEST: (Trigger.SESSION_REPLY, Trigger.SESSION_REPLY),
}
"""By a request's trigger: the triggers of its successful reply and of its refusal."""
