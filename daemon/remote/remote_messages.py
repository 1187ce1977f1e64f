"""The messages between the broker and the remote tenants' acceptor, and between the acceptor and its relays.

    from      to        messages                                   descriptors with them
    broker    acceptor  Listen                                     a listening socket
                        LeftOverRelay                              the relay's pidfd
                        Ping
    acceptor  broker    RelayBegan, RelayLeft
                        RelayArrived                               the far end of the relay's inner socket
                        what every helper process sends
    acceptor  relay     TakeConnection, once                       the remote tenant's socket
    relay     acceptor  PeerVerified, or PeerRefused

A tenant may have taken over its relay, and then the acceptor. So each of the two receivers checks every bound. The
broker keeps the content of RelayArrived in its journal, for the next acceptor and the next daemon.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

from gpulease.daemon.contract.message_fields import (
    MAX_PID,
    Message,
    Text,
    by_op,
    converted,
    integer,
    listed,
    matching,
    messages_of,
    text,
)
from gpulease.daemon.contract.messages import LivenessPing
from gpulease.protocol.fast_dataclass import dataclass

MAX_NAMES: Final = 64
"""Maximum number of names in one certificate, which bounds a relay's report to the acceptor. No peer needs more."""

MAX_NAME_BYTES: Final = 512
"""Maximum length of one name; the longest DNS name has 253 bytes."""

MAX_SERIAL_CHARS: Final = 40
"""Maximum length of a serial number in hexadecimal (RFC 5280, 4.1.2.2)."""

MAX_PEER_CHARS: Final = 128
"""Maximum length of an address with its port."""


def are_bounded(names: Sequence[str]) -> bool:
    """Return whether a certificate's names are few and short enough to be passed on."""
    return len(names) <= MAX_NAMES and all(map(_is_short, names))


def _is_short(name: str) -> bool:
    return len(name.encode()) <= MAX_NAME_BYTES


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _is_short(value):
        raise ValueError(f"a name must be a text of at most {MAX_NAME_BYTES} bytes")
    return value


RelayPid = Annotated[int, integer(1, MAX_PID)]
Names = Annotated[tuple[str, ...], listed(converted(_name), MAX_NAMES)]
"""The names in a certificate."""
Serial = Annotated[str, matching(f"-?[0-9A-F]{{1,{MAX_SERIAL_CHARS}}}")]
"""A certificate's serial number, in hexadecimal."""


# --- broker to acceptor ---


@dataclass(frozen=True, slots=True)
class Listen(Message):
    """Accept connections from another listening socket, in addition to the earlier ones."""

    OP: ClassVar[str] = "listen"


@dataclass(frozen=True, slots=True)
class LeftOverRelay(Message):
    """An earlier acceptor left a relay. End the relay if its peer's certificate is revoked."""

    OP: ClassVar[str] = "left_over"
    serial: Serial


# --- acceptor to broker ---


@dataclass(frozen=True, slots=True)
class RelayBegan(Message):
    """A relay was forked. The broker reaps it if the acceptor dies first."""

    OP: ClassVar[str] = "began"
    pid: RelayPid


@dataclass(frozen=True, slots=True)
class RelayArrived(Message):
    """A relay's peer is known.

    Attributes:
        pid: The relay's process.
        peer: The peer's address.
        names: The names in the peer's certificate.
        serial: The certificate's serial number.
    """

    OP: ClassVar[str] = "arrived"
    pid: RelayPid
    peer: Annotated[str, text(MAX_PEER_CHARS)]
    names: Names
    serial: Serial


@dataclass(frozen=True, slots=True)
class RelayLeft(Message):
    """A relay has ended, and the acceptor has reaped it."""

    OP: ClassVar[str] = "left"
    pid: RelayPid


# --- acceptor to relay ---


@dataclass(frozen=True, slots=True)
class TakeConnection(Message):
    OP: ClassVar[str] = "connection"


# --- relay to acceptor ---


@dataclass(frozen=True, slots=True)
class PeerVerified(Message):
    """The handshake is done, and the peer's certificate is valid."""

    OP: ClassVar[str] = "verified"
    names: Names
    serial: Serial


@dataclass(frozen=True, slots=True)
class PeerRefused(Message):
    """The handshake failed. `reason` is a clause for the operator."""

    OP: ClassVar[str] = "failed"
    reason: Text


# --- directions ---

ToAcceptor = LivenessPing | Listen | LeftOverRelay
TO_ACCEPTOR: Final[Mapping[str, type[ToAcceptor]]] = messages_of(ToAcceptor)

FromAcceptor = RelayBegan | RelayArrived | RelayLeft
FROM_ACCEPTOR: Final[Mapping[str, type[FromAcceptor]]] = messages_of(FromAcceptor)

TO_RELAY: Final = by_op(TakeConnection)

FromRelay = PeerVerified | PeerRefused
FROM_RELAY: Final[Mapping[str, type[FromRelay]]] = messages_of(FromRelay)
