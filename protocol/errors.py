"""The errors of the wire format, by the side that made the mistake.

    ProtocolError
    ├── LocalProtocolError      this side tried to send something that is not allowed
    └── RemoteProtocolError     the peer sent something that is not allowed
        ├── FramingError        the stream has lost its frames: answer and close
        └── BodyError           one frame is invalid; the next one may be valid

Each error has the `Status` with which it is answered.
"""

from gpulease.protocol.opcodes import Status


class ProtocolError(Exception):
    """A breach of the wire format.

    Attributes:
        status: The status of the answer.
    """

    def __init__(self, message: str, status: Status = Status.INVALID_REQUEST) -> None:
        super().__init__(message)
        self.status = status


class LocalProtocolError(ProtocolError):
    """A mistake of this side. Nothing was sent, and the connection is unchanged."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the wire format. `FramingError` ends its connection, `BodyError` does not."""


class FramingError(RemoteProtocolError):
    """The header can't be trusted, so neither can the bytes after it."""


class BodyError(RemoteProtocolError):
    """A complete frame has a payload that does not fit its operation."""
