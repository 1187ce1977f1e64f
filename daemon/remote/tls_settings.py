"""The `[tls]` table as a value, and the rule for tenants' names, which certificates carry too."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

OVER_TCP: Final = "tcp"
"""The tenant that all peers over plain TCP are."""

RESERVED_TENANTS: Final = (OVER_TCP, "default", "gpuleased")
"""Names that no tenant may have: "default" is the table for tenants without one, "gpuleased" the daemon itself in the
audit log."""

NAME_KINDS: Final = ("URI:", "DNS:")
"""The kinds of names in a certificate that can be a tenant's: URIs and DNS names of its subjectAltName (RFC 5280,
4.2.1.6)."""

_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_tenant(name: object) -> str:
    """Return the name if an operator, or a certificate, may give it to a tenant. Raises ValueError.

    A local user without a name is the tenant `uid:N`; the colon keeps everybody else from that name.
    """
    if not isinstance(name, str) or not _TENANT.fullmatch(name) or name in RESERVED_TENANTS:
        raise ValueError(f"{name!r} is not a valid tenant name: use letters, digits, dots, dashes and underscores")
    return name


def parse_certificate_names(table: Any) -> Mapping[str, str]:
    """Return the tenants of `[tenant_of_certificate]`, by the names of their certificates. Raises ValueError."""
    if not isinstance(table, dict):
        raise ValueError("it must be a table")
    if not table:
        # An operator means "nobody" by it; without entries every certificate would name its tenant itself.
        raise ValueError("it is empty: name a certificate, or leave the table out to take the names they have")
    for name, tenant in table.items():
        if not name.startswith(NAME_KINDS) or "*" in name:
            raise ValueError(
                f'{name!r} is not a valid certificate name: write "URI:..." or "DNS:...", without wildcards'
            )
        check_tenant(tenant)
    return MappingProxyType(dict(table))


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
