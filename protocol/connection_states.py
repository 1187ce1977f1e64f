"""The states of a connection and the messages that change them. The table is the same for both peers.

`connection.py` describes the sequence.
"""

from enum import Enum, auto
from typing import Final


class State(Enum):
    """The state of a connection, by the latest message that either side sent.

    OPENING: nothing was sent. GREETING: HELLO was sent, and not its reply. CONTROL: the broker serves requests.
    ATTACHING: the connection is on its way to a worker. SESSION: a worker serves requests. CLOSED: no more messages are
    sent or accepted.
    """

    # States and triggers are looked up with each frame. `Enum` hashes the members' names, which is slow.
    __hash__ = object.__hash__

    OPENING = auto()
    GREETING = auto()
    CONTROL = auto()
    ATTACHING = auto()
    SESSION = auto()
    CLOSED = auto()


class WireTrigger(Enum):
    """A message on the wire, in either direction."""

    __hash__ = object.__hash__

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


TRANSITIONS: Final[dict[tuple[State, WireTrigger], State]] = {
    # HELLO comes first and once. A refused HELLO closes the connection.
    (State.OPENING, WireTrigger.HELLO): State.GREETING,
    (State.GREETING, WireTrigger.HELLO_REPLY): State.CONTROL,
    (State.GREETING, WireTrigger.HELLO_REFUSED): State.CLOSED,
    # Control requests and their replies do not change the state.
    (State.CONTROL, WireTrigger.CONTROL_REQUEST): State.CONTROL,
    (State.CONTROL, WireTrigger.CONTROL_REPLY): State.CONTROL,
    (State.CONTROL, WireTrigger.PING): State.CONTROL,
    (State.CONTROL, WireTrigger.PING_REPLY): State.CONTROL,
    # The broker answers an ATTACH that it refuses, and keeps the connection. A worker answers an accepted one.
    (State.CONTROL, WireTrigger.ATTACH): State.ATTACHING,
    (State.ATTACHING, WireTrigger.ATTACH_REPLY): State.SESSION,
    (State.ATTACHING, WireTrigger.ATTACH_REFUSED): State.CONTROL,
    # No message leads from a session back to CONTROL, because the broker has passed the socket to a worker.
    (State.SESSION, WireTrigger.SESSION_REQUEST): State.SESSION,
    (State.SESSION, WireTrigger.SESSION_REPLY): State.SESSION,
    (State.SESSION, WireTrigger.PING): State.SESSION,
    (State.SESSION, WireTrigger.PING_REPLY): State.SESSION,
}

REPLIES: Final[dict[WireTrigger, tuple[WireTrigger, WireTrigger]]] = {
    # Success and refusal lead to different states only for HELLO and ATTACH.
    WireTrigger.HELLO: (WireTrigger.HELLO_REPLY, WireTrigger.HELLO_REFUSED),
    WireTrigger.CONTROL_REQUEST: (WireTrigger.CONTROL_REPLY, WireTrigger.CONTROL_REPLY),
    WireTrigger.ATTACH: (WireTrigger.ATTACH_REPLY, WireTrigger.ATTACH_REFUSED),
    WireTrigger.PING: (WireTrigger.PING_REPLY, WireTrigger.PING_REPLY),
    WireTrigger.SESSION_REQUEST: (WireTrigger.SESSION_REPLY, WireTrigger.SESSION_REPLY),
}
"""By a request's trigger: the triggers of its successful reply and of its refusal."""
