"""Callers' keys: kept as their sha256 alone, compared in constant time."""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final

from gpulease.client.errors import InvalidRequest

MAX_KEY_BYTES: Final = 512
"""Longest key: what is longer is hashed for nothing."""


class ApiKeys:
    """The tenants' keys."""

    def __init__(self, tenant_of: Mapping[bytes, str]) -> None:
        """Args: tenant_of: The tenant's id by its key's sha256, 32 bytes."""
        self._tenant_of = dict(tenant_of)

    def tenant(self, authorization: str) -> str | None:
        """Return the tenant of the key in a header `Authorization: Bearer KEY`; None for an unknown key."""
        asked, found = bearer_digest(authorization), None
        if asked is None:
            return None
        # Every key is compared, so that the time reveals nothing.
        for digest, tenant in self._tenant_of.items():
            if hmac.compare_digest(digest, asked):
                found = tenant
        return found


def key_digest(key: str) -> bytes:
    """Return a key's sha256, which is that of its UTF-8."""
    return hashlib.sha256(key.encode()).digest()


def bearer_digest(authorization: str) -> bytes | None:
    """Return the sha256 of the key in a header `Authorization: Bearer KEY` (RFC 6750, 2.1).

    Args:
        authorization: The header's value, its bytes as Latin-1, as ASGI frameworks have it.

    Returns None if there is no key, or one that is too long.
    """
    scheme, _, said = authorization.partition(" ")
    # White space of HTTP alone: others' codes are parts of characters in UTF-8.
    key = said.strip(" \t").encode("latin-1")
    if scheme.lower() != "bearer" or not 0 < len(key) <= MAX_KEY_BYTES:
        return None
    return hashlib.sha256(key).digest()


def distinct_keys(keys: Mapping[str, bytes]) -> ApiKeys:
    """Return the tenants' keys, by their digests. Raises InvalidRequest if two have one key."""
    tenant_of: dict[bytes, str] = {}
    for tenant, digest in keys.items():
        if (other := tenant_of.setdefault(digest, tenant)) != tenant:
            raise InvalidRequest(f"tenants {other} and {tenant} have one key", "Give each a key of its own")
    return ApiKeys(tenant_of)
