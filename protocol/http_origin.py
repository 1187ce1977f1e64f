"""The check that every HTTP face makes of a request's headers: Host, Origin, Sec-Fetch-Site and those of its length.

Our HTTP faces listen on loopback. Two attacks reach such a server through a browser of its host:

- DNS rebinding: a foreign page makes its own name resolve to 127.0.0.1 and asks by that name. The Host header gives it
  away: a face answers only to the names it knows, 421 otherwise.
- A foreign page sends a request to 127.0.0.1 directly. Browsers say so in Origin and Sec-Fetch-Site, 403.

A request with Content-Length and Transfer-Encoding has two lengths. A proxy that takes the other one than the face
takes what is left for the next request, of somebody else (RFC 9112, 6.1 and 11.2): 400, and the connection ends.

A program sends no Origin and no Sec-Fetch-Site, so the check costs it nothing. A reverse proxy is let through when the
operator names the host that browsers know it by.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

MISDIRECTED: Final = 421
"""The status for a name that the face does not know (RFC 9110, 15.5.20)."""

READING: Final = ("GET", "HEAD")
"""The methods that change nothing; no browser lets a foreign page read what they answer."""

_HOST_NAME: Final = re.compile(r"(?!-)[A-Za-z0-9.-]{1,253}(?<!-)", re.ASCII)
_NOT_OF_HOSTS: Final = re.compile(rb"[\x00-\x20/?#@\\\x7f-\xff]")
_FOREIGN: Final = frozenset({b"cross-site", b"same-site"})

Headers = Mapping[bytes, list[bytes]]
"""The values of each header, by its name in lower case."""


@dataclass(frozen=True, slots=True)
class KnownHosts:
    """The names that a face may be asked by, without ports.

    Attributes:
        own: The face's own address and names; None on a Unix socket, which no browser can reach by any name.
        named: Names that the operator added: a proxy's, behind which the face has another origin.
        setting: The name of the operator's setting, for the refusal's text.
    """

    own: frozenset[str] | None
    named: frozenset[str]
    setting: str


def parse_host_names(names: Iterable[str]) -> frozenset[str]:
    """The operator's further host names, in lower case. Raises ValueError."""
    names = list(names)
    for name in names:
        if _HOST_NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is not a host name: write it as in the Host header, without a port")
    return frozenset(name.lower() for name in names)


def loopback_hosts(address: str) -> frozenset[str]:
    """The names of a face that listens at a loopback IP address."""
    return frozenset({f"[{address}]" if ":" in address else address, "localhost"})


def headers_of(pairs: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers by name, from the pairs of an ASGI scope."""
    headers: dict[bytes, list[bytes]] = {}
    for name, value in pairs:
        headers.setdefault(name, []).append(value)
    return headers


def refusal(headers: Headers, known: KnownHosts, *, is_act: bool, is_linked: bool = False) -> tuple[int, str] | None:
    """The status and the sentence that refuse a request; None if it may go on.

    Args:
        headers: The request's.
        known: The names that the face answers to.
        is_act: Whether the request changes something.
        is_linked: Whether a link on a foreign page may lead here.
    """
    hosts = headers.get(b"host", [])
    if len(hosts) != 1:
        return 400, "There must be one Host header."
    if known.own is not None and host_of(hosts[0]) not in known.own | known.named:
        return MISDIRECTED, f"This server is not asked by that name: see {known.setting}."
    if not _is_host(hosts[0]):
        return 400, "The Host header must be a host and a port."
    if b"content-length" in headers and b"transfer-encoding" in headers:
        return 400, "There must be Content-Length or Transfer-Encoding, and not both."
    if is_act and not _is_own_page(headers, hosts[0], known.named):
        return 403, "The request does not come from this server's own page."
    if headers.get(b"sec-fetch-site", [b"none"])[0] in _FOREIGN and not is_linked:
        return 403, "The request comes from another site's page."
    return None


def _is_host(header: bytes) -> bool:
    """Return whether a URL can be made of a Host header, which frameworks do."""
    if _NOT_OF_HOSTS.search(header):
        return False
    try:
        urlsplit(f"//{header.decode('ascii')}").port  # noqa: B018  # it raises
    except ValueError:
        return False
    return True


def _is_own_page(headers: Headers, host: bytes, named: frozenset[str]) -> bool:
    """Return whether the face's own page asks, or a program. Browsers send every script's origin."""
    if headers.get(b"sec-fetch-site", [b"same-origin"]) != [b"same-origin"]:
        return False
    origins = headers.get(b"origin")
    if origins is None:
        return True
    scheme, _, origin = origins[0].partition(b"://")
    # Another port of this host is another server; a proxy may ask by a name of its own.
    is_ours = origin.lower() == host.lower() or host_of(origin) in named
    return len(origins) == 1 and scheme in (b"http", b"https") and is_ours


def host_of(header: bytes) -> str:
    """The host of a Host header, without its port; "" for what is none (RFC 9110, 7.2)."""
    text = header.decode("latin-1").lower()
    host, _, port = text.rpartition(":") if not text.endswith("]") and ":" in text else (text, "", "")
    return host if port == "" or port.isdecimal() else ""
