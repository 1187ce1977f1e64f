"""Callers' keys. The server has only each key's SHA-256, and compares in constant time."""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final

from gpulease.client.errors import InvalidRequest

MAX_KEY_BYTES: Final = 512
"""Maximum bytes of a key. A longer key is refused before it is hashed."""


class ApiKeys:
    def __init__(self, tenant_of: Mapping[bytes, str]) -> None:
        """`tenant_of` maps the sha256 of each key, 32 bytes, to the tenant's id."""
        self._tenant_of = dict(tenant_of)

    @property
    def digests(self) -> dict[str, bytes]:
        """The sha256 of each tenant's key, by tenant, as `distinct_keys` takes it."""
        return {tenant: digest for digest, tenant in self._tenant_of.items()}

    def tenant(self, authorization: str) -> str | None:
        """Return the tenant of the key in a header `Authorization: Bearer KEY`; None for an unknown key."""
        sent_digest, match = bearer_digest(authorization), None
        if sent_digest is None:
            return None
        # Compare with every key, so that the time does not show which one matched.
        for digest, tenant in self._tenant_of.items():
            if hmac.compare_digest(digest, sent_digest):
                match = tenant
        return match


def key_digest(key: str) -> bytes:
    """Return the sha256 of a key's UTF-8 bytes."""
    return hashlib.sha256(key.encode()).digest()


def bearer_digest(authorization: str) -> bytes | None:
    """Return the sha256 of the key in a header `Authorization: Bearer KEY` (RFC 6750, 2.1).

    Args:
        authorization: The header's value, decoded as Latin-1, as ASGI frameworks do.

    Returns None for a header without a key, or with a key that is too long.
    """
    scheme, _, token = authorization.partition(" ")
    # Strip only HTTP's white space. Other white space in Latin-1 may be a byte of a UTF-8 character.
    key = token.strip(" \t").encode("latin-1")
    if scheme.lower() != "bearer" or not 0 < len(key) <= MAX_KEY_BYTES:
        return None
    return hashlib.sha256(key).digest()


def distinct_keys(keys: Mapping[str, bytes]) -> ApiKeys:
    """Return the keys of tenants. `keys` maps each tenant to the digest of its key.

    Raises InvalidRequest if two tenants have the same key.
    """
    tenant_of: dict[bytes, str] = {}
    for tenant, digest in keys.items():
        if (other := tenant_of.setdefault(digest, tenant)) != tenant:
            raise InvalidRequest(f"tenants {other} and {tenant} have the same key", "Give each its own key")
    return ApiKeys(tenant_of)
