"""The permissions of a token, and how its holder narrows them. Daemon, tenants and holders must agree on both.

To its bearer, a token consists of opaque bytes. It contains a Biscuit (biscuitsec.org, specification version 3): a
block that the daemon signed, and any number of blocks that holders appended. An appended block can only take
permissions away. A daemon accepts only blocks that `narrowing_source` could have written, so no holder can make it
evaluate a program.
"""

import re
from collections.abc import Iterable
from enum import IntEnum, IntFlag
from functools import lru_cache
from typing import Final


class Permission(IntFlag):
    """The actions that a token permits on one lease; LEASE_ALLOC is an action on the node."""

    LEASE_QUERY = 0x01
    LEASE_RENEW = 0x02
    LEASE_FREE = 0x04
    TASKLET_SUBMIT = 0x08
    MEM_READ = 0x10
    MEM_WRITE = 0x20
    REVOKE = 0x40
    LEASE_ALLOC = 0x80
    REGION = 0x100


class AttachOption(IntEnum):
    """The types of ATTACH's options that do not concern shared memory.

    TOKEN: the token by which the session is opened. OWN_MEMORY, without a value: the objects that the connection makes
    in the session end with it. SECOND_TOKEN: a token by which the connection's requests are served after USE_TOKEN.
    """

    TOKEN = 16
    OWN_MEMORY = 17
    SECOND_TOKEN = 18


ALL_PERMISSIONS: Final = Permission(sum(Permission))

SESSION_PERMISSIONS: Final = Permission.TASKLET_SUBMIT | Permission.MEM_READ | Permission.MEM_WRITE
"""The permissions that apply to a session's connection. `operations.py` says which of them an operation needs."""

OPERATOR_PERMISSIONS: Final = Permission.REVOKE | Permission.LEASE_ALLOC
"""The permissions that only operators can give."""

NODE_LEASE: Final = 0
"""The lease id of a token for the node instead of a lease, which permits LEASE_ALLOC."""

_MAX_EXPIRY_DIGITS: Final = 18
_BY_NAME: Final = {permission.name: permission for permission in Permission}
# The pattern matches exactly the texts that `narrowing_source` writes: an expiry, and optionally a set of permissions.
_NARROWING: Final = re.compile(
    rf"check if time\(\$t\), \$t <= ([0-9]{{1,{_MAX_EXPIRY_DIGITS}}});\n"
    r'(?:check if permission\(\$p\), \{([A-Z_", ]*)\}\.contains\(\$p\);\n)?'
)


@lru_cache(maxsize=64)
def names_of(permissions: Permission) -> tuple[str, ...]:
    """Return the names of permissions, as in tokens and messages. Cached, because few different sets occur."""
    return tuple(str(permission.name) for permission in Permission if permission & permissions)


def permissions_of(names: Iterable[str]) -> Permission:
    """Return the permissions with these names. Raises ValueError for an unknown name."""
    permissions = Permission(0)
    for name in names:
        if name not in _BY_NAME:
            raise ValueError(f"{name!r} is not a permission; the permissions are {', '.join(map(str, _BY_NAME))}")
        permissions |= _BY_NAME[name]
    return permissions


def narrowing_source(expires_ms: int, permissions: Permission | None) -> str:
    """Return the Datalog of a block that ends a token at `expires_ms` of its node's clock and keeps `permissions`.

    Raises ValueError for a time that a daemon refuses, or for no permission at all.
    """
    # A daemon's pattern allows a bounded number of digits, so a token with a longer time could never be used.
    if not 0 <= expires_ms < 10**_MAX_EXPIRY_DIGITS:
        raise ValueError(f"{expires_ms} ms is not a valid time of a node's clock")
    source = f"check if time($t), $t <= {expires_ms};\n"
    # Without permissions the block narrows only the time, and the daemon assumes that all permissions are kept.
    if permissions is None:
        return source
    if not permissions:
        raise ValueError("a token that permits nothing is useless: name at least one permission")
    # Sort the names, so that the same permissions always give the same bytes.
    names = ", ".join(f'"{name}"' for name in sorted(names_of(permissions)))
    return f"{source}check if permission($p), {{{names}}}.contains($p);\n"


def parse_narrowing(source: str) -> tuple[int, Permission]:
    """Return the expiry and the permissions that an appended block leaves.

    Raises ValueError for a block that `narrowing_source` could not have written.
    """
    match = _NARROWING.fullmatch(source)
    if match is None:
        raise ValueError("the block must contain only an expiry and a set of permissions")
    # A block without a permission check narrows only the time.
    if match[2] is None:
        return int(match[1]), ALL_PERMISSIONS
    return int(match[1]), permissions_of(name.strip('"') for name in match[2].split(", "))
