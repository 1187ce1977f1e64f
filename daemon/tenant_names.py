"""What a tenant may be called."""

import re
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
