"""The part of the settings that is about remote tenants: whose certificates are taken, and for whom."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from gpulease.daemon.tenant_names import check_tenant

NAME_KINDS: Final = ("URI:", "DNS:")
"""The names of a certificate that can be a tenant's: its subjectAltName's URIs and DNS names (RFC 5280, 4.2.1.6)."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The `[tls]` table.

    Attributes:
        certificate: This node's certificate, and behind it those between it and its CA, as PEM.
        key: Its private key.
        client_ca: The CAs that tenants' certificates come from. Not the host's own: nobody else's CA makes a tenant.
        crl: Lists of revoked certificates, one for each of those CAs; None to do without.
        operators: Tenants who are operators when they come by TLS.
        max_connections: Relays at a time, sessions' among them: each is a process.
        max_connections_per_tenant: The same for one tenant, operators too.
    """

    certificate: Path
    key: Path
    client_ca: Path
    crl: Path | None = None
    operators: frozenset[str] = frozenset()
    max_connections: int = 512
    max_connections_per_tenant: int = 128


def parse_tls(table: Any) -> TlsSettings:
    """The settings of a `[tls]` table. Raises ValueError."""
    if not isinstance(table, dict):
        raise ValueError("it must be a table")
    known = {"certificate": _path, "key": _path, "client_ca": _path, "crl": _path, "operators": _operators}
    known |= {"max_connections": _count, "max_connections_per_tenant": _count}
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in known:
            raise ValueError(f"there is no {name!r}; known are {', '.join(known)}")
        try:
            values[name] = known[name](value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if missing := [name for name in ("certificate", "key", "client_ca") if name not in values]:
        raise ValueError(f"{' and '.join(missing)} must be given")
    settings = TlsSettings(**values)
    if "max_connections_per_tenant" not in values:
        fitting = min(settings.max_connections, settings.max_connections_per_tenant)
        return TlsSettings(**values, max_connections_per_tenant=fitting)
    if settings.max_connections_per_tenant > settings.max_connections:
        raise ValueError("max_connections_per_tenant is more than max_connections")
    return settings


def parse_certificate_names(table: Any) -> Mapping[str, str]:
    """Tenants by the names of their certificates, of `[tenant_of_certificate]`. Raises ValueError."""
    if not isinstance(table, dict):
        raise ValueError("it must be a table")
    if not table:
        # It would read as nobody, and be as if it were not there: everybody with a name of their own.
        raise ValueError("it is empty: name a certificate, or leave the table out to take the names they have")
    for name, tenant in table.items():
        if not name.startswith(NAME_KINDS) or "*" in name:
            raise ValueError(f'{name!r} is no name of a certificate: write "URI:..." or "DNS:...", without wildcards')
        check_tenant(tenant)
    return MappingProxyType(dict(table))


def _path(value: Any) -> Path:
    if not isinstance(value, str) or not Path(value).is_absolute() or "\0" in value:
        raise ValueError(f"{value!r} is not an absolute path")
    return Path(value)


def _operators(value: Any) -> frozenset[str]:
    if not isinstance(value, list):
        raise ValueError("it must be a list of tenants")
    return frozenset(check_tenant(tenant) for tenant in value)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is not a number of connections")
    return value
