"""Addresses of etcd as operators write them: `etcd://HOST[:PORT][,HOST[:PORT]]...`."""

import re
from typing import Final

DEFAULT_PORT: Final = 2379
"""etcd's port for clients (IANA: etcd-client)."""

MAX_ENDPOINTS: Final = 16
"""Maximum number of members in an address. etcd recommends at most 7 members."""

_ENDPOINT: Final = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}))(?::([0-9]{1,5}))?")


class BadEtcdSettings(ValueError):
    """The settings can't be used to reach etcd. The text names the mistake and the correct form."""


def parse_endpoints(address: str) -> tuple[str, ...]:
    """Return the members that `etcd://HOST[:PORT][,HOST[:PORT]]...` names, as HOST:PORT. Raises BadEtcdSettings."""
    scheme, separator, hosts = address.partition("://")
    if not separator or scheme != "etcd":
        raise BadEtcdSettings(f"{address!r} must be an address of etcd: write etcd://HOST,HOST:PORT")
    endpoints = []
    for host in hosts.split(","):
        # Each part is a host name or address, and perhaps a port.
        match = _ENDPOINT.fullmatch(host)
        port = int(match[2] or DEFAULT_PORT) if match else 0
        if match is None or not 0 < port < 1 << 16:
            raise BadEtcdSettings(f"{host!r} in {address!r} must be a member of etcd: write HOST or HOST:PORT")
        endpoints.append(f"{match[1]}:{port}")
    if len(set(endpoints)) != len(endpoints) or len(endpoints) > MAX_ENDPOINTS:
        raise BadEtcdSettings(f"{address!r} names a member twice, or more than {MAX_ENDPOINTS} members")
    return tuple(endpoints)


def port_of(endpoint: str) -> int:
    """Return the port of a HOST:PORT that `parse_endpoints` made."""
    return int(endpoint.rpartition(":")[2])
