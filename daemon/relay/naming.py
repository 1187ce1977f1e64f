"""Whose connection it is, by the names in a verified certificate.

A certificate names its tenant by one subjectAltName, `URI:gpulease:tenant:NAME`; or, where the settings have a table
`[tenant_of_certificate]`, by one of the names in that table, and then by nothing else. The subject is never looked at.
Refused are a certificate without such a name, one with several of them, one with a wildcard among its names, and a NAME
that is none for a tenant.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from gpulease.daemon.tenant_names import check_tenant

TENANT_PREFIX: Final = "URI:gpulease:tenant:"

MAX_NAMES: Final = 64
"""Of one certificate. Nobody needs more; it bounds what a relay tells the gate."""

MAX_NAME_BYTES: Final = 512
"""Of one name; the longest DNS name has 253."""

MAX_SERIAL_CHARS: Final = 40
"""Of a serial number in hexadecimal (RFC 5280, 4.1.2.2)."""


class NoTenant(Exception):
    """A certificate that names no tenant, or not one alone; the message is a sentence for its holder."""


def are_bounded(names: Sequence[str]) -> bool:
    """Whether a certificate's names are few and short enough to be passed on."""
    return len(names) <= MAX_NAMES and all(len(name.encode()) <= MAX_NAME_BYTES for name in names)


def tenant_named(names: Sequence[str], tenants: Mapping[str, str]) -> str:
    """The tenant that a certificate with these names, each as `KIND:value`, belongs to. Raises NoTenant."""
    if any("*" in name for name in names):
        raise NoTenant("a name in the certificate has a wildcard, and a tenant is one")
    if tenants:
        found = [name for name in names if name in tenants]
        wanted = "one of those that the node's operator has listed"
    else:
        found = [name for name in names if name.startswith(TENANT_PREFIX)]
        wanted = f"{TENANT_PREFIX}NAME"
    if len(found) != 1:
        why = "several names of tenants are" if found else "no name of a tenant is"
        raise NoTenant(f"{why} in the certificate; one is needed: {wanted}")
    try:
        return tenants[found[0]] if tenants else check_tenant(found[0].removeprefix(TENANT_PREFIX))
    except ValueError as error:
        raise NoTenant(str(error)) from None
