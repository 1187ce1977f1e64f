"""The `[tls]` table as a value, and the rule for tenants' names, which also applies to certificates."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Protocol, TypeVar

from gpulease.daemon.host.absolute_paths import path_setting
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.settings_reader import BadSetting, Setting, must_be, read_values

OVER_TCP: Final = "tcp"
"""The tenant of all peers over plain TCP."""

RESERVED_TENANTS: Final = (OVER_TCP, "default", "gpuleased")
"""Names that no tenant may have. "default" is the table for tenants without one, and "gpuleased" is the daemon itself
in the audit log."""

NAME_KINDS: Final = ("URI:", "DNS:")
"""The kinds of names in a certificate that can be a tenant's: URIs and DNS names of its subjectAltName (RFC 5280,
4.2.1.6)."""

_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_tenant(name: object) -> str:
    """Return the name if an operator, or a certificate, may give it to a tenant. Raises ValueError.

    A local user without a name is the tenant `uid:N`. No other tenant can have that name, because of its colon.
    """
    if not isinstance(name, str) or not _TENANT.fullmatch(name) or name in RESERVED_TENANTS:
        raise ValueError(f"{name!r} is not a valid tenant name: use letters, digits, dots, dashes and underscores")
    return name


def parse_certificate_names(table: Any) -> Mapping[str, str]:
    """Return the tenants of `[tenant_of_certificate]`, by the names of their certificates. Raises ValueError."""
    if not isinstance(table, dict):
        raise must_be("a table", table)
    if not table:
        # An operator may mean an empty table to admit no tenant, but it would let every certificate name its own
        # tenant.
        raise ValueError(
            "it is empty: add a certificate, or leave the table out, so that certificates name their tenants themselves"
        )
    for name, tenant in table.items():
        if not name.startswith(NAME_KINDS) or "*" in name:
            raise ValueError(
                f'{name!r} is not a valid certificate name: write "URI:..." or "DNS:...", without wildcards'
            )
        check_tenant(tenant)
    return MappingProxyType(dict(table))


def _read_operators(value: Any) -> frozenset[str]:
    if not isinstance(value, list):
        raise must_be("a list of tenants", value)
    return frozenset(check_tenant(tenant) for tenant in value)


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """The `[tls]` table: how remote tenants reach the node, and how many may connect."""

    certificate: Annotated[
        Path,
        path_setting(
            "A PEM file with this node's certificate, followed by the certificates of the CAs above it.",
            "/etc/gpulease/pki/server.pem",
        ),
    ]
    key: Annotated[Path, path_setting("The node's private key.", "/etc/gpulease/pki/server.key")]
    client_ca: Annotated[
        Path,
        path_setting(
            "A file with the CAs that sign tenants' certificates. The host's own CAs are not trusted here.",
            "/etc/gpulease/pki/ca.pem",
        ),
    ]
    crl: Annotated[
        Path | None,
        path_setting(
            "A file with lists of revoked certificates, one for each CA in client_ca.", "/etc/gpulease/pki/crl.pem"
        ),
    ] = None
    operators: Annotated[
        frozenset[str],
        Setting(
            "Tenants that are operators when they connect through TLS.", what="a list of tenants", read=_read_operators
        ),
    ] = frozenset()
    max_connections: Annotated[
        int,
        Setting("Maximum number of open TLS connections, including those to sessions. Each has a process.", least=1),
    ] = 512
    max_connections_per_tenant: Annotated[
        int, Setting("Maximum number of open TLS connections of one tenant, operators included.", least=1)
    ] = 128


class _Connections(Protocol):
    """Settings with bounds on connections, for all tenants and for one."""

    @property
    def max_connections(self) -> int: ...

    @property
    def max_connections_per_tenant(self) -> int: ...


Bounded = TypeVar("Bounded", bound=_Connections)


def fitting_connections(settings: Bounded) -> Bounded:
    """Return settings whose bound for one tenant does not exceed the bound for all, if only the latter was set."""
    fitting = min(settings.max_connections, settings.max_connections_per_tenant)
    return replace(settings, max_connections_per_tenant=fitting)  # type: ignore[type-var]  # a dataclass


def parse_tls(table: Any) -> TlsSettings:
    """Return the settings of a `[tls]` table. Raises BadSetting."""
    values = read_values(TlsSettings, table)
    settings = TlsSettings(**values)
    if "max_connections_per_tenant" not in values:
        return fitting_connections(settings)
    if settings.max_connections_per_tenant > settings.max_connections:
        raise BadSetting("{} must be at most max_connections", ("max_connections_per_tenant",))
    return settings
