"""The `[tls]` table as a value, and the rule for tenants' names, which certificates carry too."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

OVER_TCP: Final = "tcp"
"""The tenant that all peers over plain TCP are."""

RESERVED_TENANTS: Final = (OVER_TCP, "default", "gpuleased")
"""Names that no tenant may have: "default" is the table for tenants without one, "gpuleased" the daemon itself in the
audit log."""

_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_tenant(name: object) -> str:
    """Return the name if an operator, or a certificate, may give it to a tenant. Raises ValueError.

    A local user without a name is the tenant `uid:N`; the colon keeps everybody else from that name.
    """
    if not isinstance(name, str) or not _TENANT.fullmatch(name) or name in RESERVED_TENANTS:
        raise ValueError(f"{name!r} is no name for a tenant: use letters, digits, dots, dashes and underscores")
    return name


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The `[tls]` table.

    Attributes:
        certificate: A PEM file with this node's certificate, followed by the certificates up to its CA.
        key: The file of the node's private key.
        client_ca: The CAs that tenants' certificates come from. The host's own CAs are not trusted here.
        crl: Lists of revoked certificates, one for each of those CAs; None to do without.
        operators: Tenants who are operators when they come by TLS.
        max_connections: Relays at a time, those of sessions included. Each relay is a process.
        max_connections_per_tenant: Relays at a time of one tenant, operators included.
    """

    certificate: Path
    key: Path
    client_ca: Path
    crl: Path | None = None
    operators: frozenset[str] = frozenset()
    max_connections: int = 512
    max_connections_per_tenant: int = 128
