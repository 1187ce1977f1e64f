"""Who is at the other end of a control connection.

On a Unix socket the kernel says which user connected (unix(7), SO_PEERCRED). By TLS a certificate does, which a relay
has verified (`gpulease.daemon.remote`). On loopback TCP nobody does: such peers share one tenant, may use only leases
whose ids they know, and are never operators.
"""

import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

ANONYMOUS_TENANT: Final = "tcp"
_NO_NAMES: Final[Mapping[int, str]] = MappingProxyType({})
_UCRED: Final = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer.

    Attributes:
        tenant: Who its leases belong to.
        is_operator: Whether it may list and revoke everybody's leases: root, the daemon's own user, and remote tenants
            whom the settings say it of.
        is_known: Whether anybody vouches for `tenant`: the kernel, or a certificate.
        is_relayed: Whether a relay is between it and this host, so that no memory can be shared with it.
        is_reader: Whether it may look and do nothing else, operator or not.
    """

    tenant: str
    is_operator: bool
    is_known: bool
    is_relayed: bool = False
    is_reader: bool = False

    def is_stranger_to(self, tenant: str) -> bool:
        """Whether it may be another than that tenant."""
        return self.tenant != tenant or not self.is_known

    def __str__(self) -> str:
        return f"{self.tenant}{' (operator)' if self.is_operator else ''}"


def identify(sock: Any, tenant_of_uid: Mapping[int, str] = _NO_NAMES) -> Peer:
    """The peer of an accepted socket; `tenant_of_uid` names the tenants of some users."""
    if sock.family != socket.AF_UNIX:
        return Peer(ANONYMOUS_TENANT, is_operator=False, is_known=False)
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(credentials)
    return Peer(tenant_of_uid.get(uid, f"uid:{uid}"), is_operator=uid in (0, os.geteuid()), is_known=True)
