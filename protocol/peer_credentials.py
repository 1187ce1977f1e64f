"""What the kernel reports of a Unix socket's peer: the bytes of SO_PEERCRED (unix(7))."""

import struct
from typing import Final, NamedTuple

_UCRED: Final = struct.Struct("3i")

UCRED_BYTES: Final = _UCRED.size
"""Size of the kernel's `struct ucred`, to be passed to getsockopt(2)."""


class PeerCredentials(NamedTuple):
    """Who called connect(2), or listen(2) last on a socket that listens, at that time.

    Attributes:
        pid: The process; 0 if it is in another pid namespace.
        uid: Its effective user.
        gid: Its effective group.
    """

    pid: int
    uid: int
    gid: int


def parse_ucred(ucred: bytes) -> PeerCredentials:
    """Return the fields of `sock.getsockopt(SOL_SOCKET, SO_PEERCRED, UCRED_BYTES)`."""
    return PeerCredentials(*_UCRED.unpack(ucred))
