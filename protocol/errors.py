"""What can be wrong with bytes, and whose fault it is.

    ProtocolError
    ├── LocalProtocolError      this side tried to send what the protocol does not allow
    └── RemoteProtocolError     the peer sent it
        ├── FramingError        the stream can't be followed any further: answer and close
        └── BodyError           one frame is wrong; the next one may be right

Each carries the `Status` that answers it.
"""

from gpulease.protocol.opcodes import Status


class ProtocolError(Exception):
    """A rule of the wire format was broken.

    Attributes:
        status: What to answer.
    """

    def __init__(self, message: str, status: Status = Status.INVALID_REQUEST) -> None:
        super().__init__(message)
        self.status = status


class LocalProtocolError(ProtocolError):
    """This side's mistake: nothing was sent, and the connection is as it was."""


class RemoteProtocolError(ProtocolError):
    """The peer's mistake."""


class FramingError(RemoteProtocolError):
    """The header can't be trusted, so neither can what follows."""


class BodyError(RemoteProtocolError):
    """The frame is whole, its payload is not what its operation says."""
