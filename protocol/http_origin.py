"""Checks the headers of every request to our HTTP servers: Host, Origin, Sec-Fetch-Site and the length.

Our HTTP servers listen on loopback. Two attacks reach such a server through a browser on its host:

- DNS rebinding: a foreign page makes its own name resolve to 127.0.0.1 and sends requests to that name. The Host header
  reveals it: a server answers only to its known names, and otherwise with 421.
- A foreign page sends a request to 127.0.0.1 directly. Browsers reveal that in Origin and Sec-Fetch-Site: 403.

A request with both Content-Length and Transfer-Encoding has two lengths. If a proxy uses one and the server the other,
the proxy takes the remaining bytes for another client's next request (RFC 9112, 6.1 and 11.2). The server answers 400
and closes the connection.

Programs send neither Origin nor Sec-Fetch-Site, so the check does not affect them. Operators admit a reverse proxy by
naming the host that browsers use for it, and other sites' pages by naming their origins.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import urlsplit

from gpulease.protocol.fast_dataclass import dataclass

MISDIRECTED: Final = 421
"""The status for a name that is not the server's (RFC 9110, 15.5.20)."""

READING: Final = ("GET", "HEAD")
"""The methods that change nothing. Browsers do not let a foreign page read the answers."""

_HOST_NAME: Final = re.compile(r"(?!-)[A-Za-z0-9.-]{1,253}(?<!-)", re.ASCII)
_NOT_OF_HOSTS: Final = re.compile(rb"[\x00-\x20/?#@\\\x7f-\xff]")
_FOREIGN: Final = frozenset({b"cross-site", b"same-site"})

Headers = Mapping[bytes, list[bytes]]
"""The values of each header, by its name in lower case."""


@dataclass(frozen=True, slots=True)
class KnownHosts:
    """The names by which a server may be addressed, without ports.

    Attributes:
        own: The server's own address and names; None on a Unix socket, which a browser can't address by any name.
        named: Names that the operator added, such as a proxy's, through which the server has another origin.
        setting: The name of the operator's setting, for the refusal's text.
        origins: Origins of other sites' pages that the operator admits; b"*" admits all.
    """

    own: frozenset[str] | None
    named: frozenset[str]
    setting: str
    origins: frozenset[bytes] = frozenset()


def parse_host_names(names: Iterable[str]) -> frozenset[str]:
    """Return the operator's additional host names, in lower case. Raises ValueError."""
    names = list(names)
    for name in names:
        if _HOST_NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is not a host name: write it as in the Host header, without a port")
    return frozenset(name.lower() for name in names)


def loopback_hosts(address: str) -> frozenset[str]:
    """Return the names of a server that listens at a loopback IP address."""
    return frozenset({f"[{address}]" if ":" in address else address, "localhost"})


def headers_of(pairs: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers by name, from the pairs of an ASGI scope."""
    headers: dict[bytes, list[bytes]] = {}
    for name, value in pairs:
        headers.setdefault(name, []).append(value)
    return headers


def refusal(
    headers: Headers, known_hosts: KnownHosts, *, is_act: bool, is_linked: bool = False
) -> tuple[int, str] | None:
    """Return the status and the sentence that refuse a request; None if it may continue.

    Args:
        headers: The request's headers.
        known_hosts: The names of the server.
        is_act: Whether the request changes something.
        is_linked: Whether a foreign page may link to the requested page.
    """
    # RFC 9112, 3.2: a request with no Host header, or with several, gets 400.
    hosts = headers.get(b"host", [])
    if len(hosts) != 1:
        return 400, "There must be one Host header."
    # Check the name first: after DNS rebinding all other headers look like those of a genuine request.
    if known_hosts.own is not None and host_of(hosts[0]) not in known_hosts.own | known_hosts.named:
        return MISDIRECTED, f"This server does not have that name: see {known_hosts.setting}."
    # The name is acceptable, but the header as a whole must also be safe in a URL.
    if not _is_host(hosts[0]):
        return 400, "The Host header must be a host and a port."
    # A request with two lengths may be the attack on proxies that is described above.
    if b"content-length" in headers and b"transfer-encoding" in headers:
        return 400, "There must be either Content-Length or Transfer-Encoding, not both."
    # If the operator admits the page's origin, its browser checks the rest (Fetch Standard, CORS protocol).
    origins = headers.get(b"origin", [])
    if len(origins) == 1 and known_hosts.origins & {b"*", origins[0]}:
        return None
    # For a request that changes something, require that this server's own page, or a program, sent it.
    if is_act and not _is_own_page(headers, hosts[0], known_hosts.named):
        return 403, "The request does not come from this server's own page."
    # Refuse a foreign page's request to read, unless links are allowed: for a link, a browser sends the same header.
    if headers.get(b"sec-fetch-site", [b"none"])[0] in _FOREIGN and not is_linked:
        return 403, "The request comes from another site's page."
    return None


def _is_host(header: bytes) -> bool:
    """Return whether a Host header can be part of a URL, because frameworks build URLs from it."""
    if _NOT_OF_HOSTS.search(header):
        return False
    try:
        urlsplit(f"//{header.decode('ascii')}").port  # noqa: B018  # it raises
    except ValueError:
        return False
    return True


def _is_own_page(headers: Headers, host: bytes, named: frozenset[str]) -> bool:
    """Return whether this server's own page, or a program, sent the request."""
    # Every current browser sends Sec-Fetch-Site. Without it the Origin decides; without both, the sender is a program.
    if headers.get(b"sec-fetch-site", [b"same-origin"]) != [b"same-origin"]:
        return False
    origins = headers.get(b"origin")
    if origins is None:
        return True
    scheme, _, origin = origins[0].partition(b"://")
    # Another port of this host belongs to another server; a proxy may have another name.
    is_ours = origin.lower() == host.lower() or host_of(origin) in named
    return len(origins) == 1 and scheme in (b"http", b"https") and is_ours


def host_of(header: bytes) -> str:
    """Return the host of a Host header, without its port; "" if the header is invalid (RFC 9110, 7.2)."""
    text = header.decode("latin-1").lower()
    # An IPv6 address contains colons and ends with a bracket, unless a port follows it.
    host, _, port = text.rpartition(":") if not text.endswith("]") and ":" in text else (text, "", "")
    return host if port == "" or port.isdecimal() else ""
