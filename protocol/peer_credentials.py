"""The kernel's report about a Unix socket's peer: the bytes of SO_PEERCRED (unix(7))."""

import struct
from typing import Final, NamedTuple

_UCRED: Final = struct.Struct("3i")

UCRED_BYTES: Final = _UCRED.size
"""Size of the kernel's `struct ucred`, which getsockopt(2) needs."""


class PeerCredentials(NamedTuple):
    """The process that called connect(2), or last called listen(2) on a listening socket, at the time of that call.

    Attributes:
        pid: The process; 0 if it is in another pid namespace.
        uid: The process's effective user.
        gid: The process's effective group.
    """

    pid: int
    uid: int
    gid: int


def parse_ucred(ucred: bytes) -> PeerCredentials:
    """Return the fields of `sock.getsockopt(SOL_SOCKET, SO_PEERCRED, UCRED_BYTES)`."""
    return PeerCredentials(*_UCRED.unpack(ucred))
