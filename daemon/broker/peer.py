"""The identity of a control connection's peer.

On a Unix socket the kernel names the user who connected (unix(7), SO_PEERCRED). With TLS, a certificate names the
tenant, and a relay has verified the certificate (`gpulease.daemon.remote`). On loopback TCP nothing proves the peer's
identity: such peers share one tenant, may use only leases whose ids they have, and are never operators.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Any, Final

from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.peer_credentials import UCRED_BYTES, parse_ucred

ANONYMOUS_TENANT: Final = "tcp"
_NO_NAMES: Final[Mapping[int, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a control connection.

    Attributes:
        tenant: The tenant that owns the peer's leases.
        is_operator: Whether the peer may list and revoke every tenant's leases: root, the daemon's own user, and the
          remote tenants that the settings name.
        is_known: Whether the kernel or a certificate proves `tenant`.
        is_relayed: Whether a relay is between the peer and this host, so that no memory can be shared with it.
        is_reader: Whether the peer may only read, even if it is an operator.
        pid: The process on this host that connected; 0 if the kernel does not name it.
    """

    tenant: str
    is_operator: bool
    is_known: bool
    is_relayed: bool = False
    is_reader: bool = False
    pid: int = field(default=0, compare=False)

    def is_stranger_to(self, tenant: str) -> bool:
        """Return whether the peer may be someone other than `tenant`."""
        return self.tenant != tenant or not self.is_known

    def __str__(self) -> str:
        return f"{self.tenant}{' (operator)' if self.is_operator else ''}"


def identify(sock: Any, tenant_of_uid: Mapping[int, str] = _NO_NAMES) -> Peer:
    """Identify the peer of an accepted socket. `tenant_of_uid` names the tenants of some local users."""
    if sock.family != socket.AF_UNIX:
        return Peer(ANONYMOUS_TENANT, is_operator=False, is_known=False)
    # The kernel recorded the user when it connected, so a later change of user does not change the tenant.
    user = parse_ucred(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED_BYTES))
    tenant = tenant_of_uid.get(user.uid, f"uid:{user.uid}")
    return Peer(tenant, is_operator=user.uid in (0, os.geteuid()), is_known=True, pid=user.pid)
