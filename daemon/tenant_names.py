"""What a tenant may be called, and whose name is another's from now on."""

import re
from collections.abc import Mapping
from typing import Final

OVER_TCP: Final = "tcp"
"""All peers over plain TCP."""

RESERVED_TENANTS: Final = (OVER_TCP, "default", "gpuleased")
"""Names with a meaning of their own: all peers over TCP, every tenant that has no rules of its own, and the daemon
itself in the audit log."""

_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_tenant(name: object) -> str:
    """The name, if an operator, or a certificate, may give it to a tenant. Raises ValueError.

    A local user without a name is `uid:N`, which nobody can be named.
    """
    if not isinstance(name, str) or not _TENANT.fullmatch(name) or name in RESERVED_TENANTS:
        raise ValueError(f"{name!r} is no name for a tenant: use letters, digits, dots, dashes and underscores")
    return name


def changed_hands(
    of_uid: tuple[Mapping[int, str], Mapping[int, str]], of_certificate: tuple[Mapping[str, str], Mapping[str, str]]
) -> frozenset[str]:
    """The names that may be other people's than before; each argument is what an operator said before, and says now.

    Without a table, certificates say themselves whose they are: any name could be one's.
    """
    tables = (*of_uid, *of_certificate)
    if bool(of_certificate[0]) != bool(of_certificate[1]):
        return frozenset(name for table in tables for name in table.values())
    moved = (of_uid[0].items() ^ of_uid[1].items()) | (of_certificate[0].items() ^ of_certificate[1].items())
    return frozenset(name for _, name in moved)
