"""The wire format of gpulease: bytes to messages and back. No I/O, no clock, no import of the other packages.

The adjacent `README.md` is the specification.
"""

from gpulease.protocol.connection import (
    Connection,
    EndOfStream,
    Event,
    Goodbye,
    Notification,
    RegionNotification,
    Rejected,
    Reply,
    Request,
    Role,
    StreamBroken,
)
from gpulease.protocol.connection_states import State
from gpulease.protocol.errors import (
    BodyError,
    FramingError,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
)
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Exclusivity, Opcode, Phase, RevokeOutcome, Status, Waiting

__all__ = [
    "BodyError",
    "Connection",
    "EndOfStream",
    "Event",
    "Exclusivity",
    "Failure",
    "FramingError",
    "Goodbye",
    "LocalProtocolError",
    "Notification",
    "Opcode",
    "Phase",
    "ProtocolError",
    "RegionNotification",
    "Rejected",
    "RemoteProtocolError",
    "Reply",
    "Request",
    "RevokeOutcome",
    "Role",
    "State",
    "Status",
    "StreamBroken",
    "Waiting",
]
