"""A daemon's address as one string: `unix:/path`, `tcp:HOST:PORT` or `tls:HOST:PORT` (IPv6: `tls:[::1]:PORT`).

The parser also accepts `tls://HOST:PORT` and `tcp://HOST:PORT`, because people type URLs; addresses print without
slashes. A fleet's address consists of its directories' addresses: `fleet:tls:HOST:PORT,tls:HOST:PORT`.
"""

import errno
from typing import Final

from gpulease.protocol.fast_dataclass import dataclass

DEFAULT_ADDRESS: Final = "unix:/run/gpulease/gpuleased.sock"
ADDRESS_VARIABLE: Final = "GPULEASE_ADDRESS"
MAX_UNIX_PATH_BYTES: Final = 107
"""Length in bytes of the longest path in struct sockaddr_un (unix(7)). A longer one would fail later, with a less
helpful error."""

NOBODY_LISTENS: Final = frozenset({errno.ECONNREFUSED, errno.ENOENT})
"""Errors of connect(2) which show that no process listens at a Unix socket's path, so that a new socket may take it.
Other errors, such as a full backlog or a missing permission, do not show that."""

MAX_ADDRESS_CHARS: Final = 512
"""Maximum number of characters of an address. The longest host name has 253 characters (RFC 1035, 2.3.4), so a longer
string is a mistake. Errors do not quote all of it."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix stream socket; `path` is absolute and has at most MAX_UNIX_PATH_BYTES."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP socket; `host` is a name or an IP address without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:{_host_and_port(self.host, self.port)}"


@dataclass(frozen=True, slots=True)
class TlsAddress:
    """A TCP socket on which both ends present certificates (TLS 1.3, RFC 8446); `host` is as in TcpAddress."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tls:{_host_and_port(self.host, self.port)}"


Address = UnixAddress | TcpAddress | TlsAddress

FLEET_SCHEME: Final = "fleet:"

MAX_DIRECTORIES: Final = 16
"""Maximum number of directories in a fleet's address. A tenant tries one after the other; two to five are enough for
any fleet."""


@dataclass(frozen=True, slots=True)
class FleetAddress:
    """A fleet, named by the addresses of its directories. Any of them answers for the fleet."""

    directories: tuple[Address, ...]

    def __str__(self) -> str:
        return FLEET_SCHEME + ",".join(map(str, self.directories))


def _host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(text: str) -> Address:
    """Return the address that a string names. Raises ValueError with a sentence that says what is wrong."""
    if len(text) > MAX_ADDRESS_CHARS:
        raise ValueError(f"{text[:40]!r}... is not an address: it has {len(text)} characters")
    try:
        # A lone surrogate, which a command line with invalid bytes may contain, could be neither sent nor printed.
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!r} is not an address: it contains half of a surrogate pair") from None
    scheme, _, rest = text.partition(":")
    if scheme == "unix":
        return _parse_unix(text, rest)
    if scheme == "tcp":
        return TcpAddress(*_parse_host_and_port(text, scheme, rest))
    if scheme == "tls":
        return TlsAddress(*_parse_host_and_port(text, scheme, rest))
    # The fleet scheme is known, but only `parse_fleet_address` accepts it.
    if text.startswith(FLEET_SCHEME):
        raise ValueError(
            f"{text!r} is a fleet's address; use the address of a single daemon here, without {FLEET_SCHEME}"
        )
    raise ValueError(f"{text!r} is not an address: write unix:/path/to/socket, tcp:HOST:PORT or tls:HOST:PORT")


def parse_fleet_address(text: str) -> FleetAddress:
    """Return the fleet that a string `fleet:ADDRESS[,ADDRESS...]` names. Raises ValueError."""
    if len(text) > MAX_ADDRESS_CHARS:
        raise ValueError(f"{text[:40]!r}... is not an address: it has {len(text)} characters")
    if not text.startswith(FLEET_SCHEME):
        raise ValueError(f"{text!r} is not a fleet's address: write {FLEET_SCHEME}tls:HOST:PORT")
    parts = text.removeprefix(FLEET_SCHEME).split(",")
    # Count the parts before any is parsed, because parsing costs far more than splitting.
    if len(parts) > MAX_DIRECTORIES:
        raise ValueError(f"{text[:40]!r}...: a fleet's address must name at most {MAX_DIRECTORIES} directories")
    directories = tuple(parse_address(part) for part in parts)
    # Refuse a directory that is named twice: it would be asked twice, and would hide that a fleet has only one.
    if len(set(directories)) < len(directories):
        raise ValueError(f"{text!r} names a directory twice")
    return FleetAddress(directories)


def _parse_unix(text: str, path: str) -> UnixAddress:
    if not path.startswith("/"):
        raise ValueError(f"{text!r}: the path of a Unix socket must be absolute")
    # Count bytes, not characters, because the kernel's limit is for the encoded path.
    if len(path.encode()) > MAX_UNIX_PATH_BYTES or "\0" in path:
        raise ValueError(f"{text!r}: a Unix socket's path must have at most {MAX_UNIX_PATH_BYTES} bytes and no NUL")
    return UnixAddress(path)


def _parse_host_and_port(text: str, scheme: str, rest: str) -> tuple[str, int]:
    # The port follows the last colon; an IPv6 address has more colons before it.
    host, _, port = rest.removeprefix("//").rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, {scheme}:[::1]:PORT")
    # `isdigit` alone would accept digits of other scripts, which `int` reads too.
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{text!r} is not an address: write {scheme}:HOST:PORT with a port from 0 to 65535")
    _check_host(text, host)
    return host, int(port)


def _check_host(text: str, host: str) -> None:
    """Raise ValueError for a name that no look-up accepts.

    Looking it up would raise another kind of error than looking up an unknown name.
    """
    try:
        # A NUL would end the name for the C library, and a slash shows that a URL's path was pasted with it. The IDNA
        # codec refuses empty and overlong labels (RFC 3490).
        if not {"\0", "/"} & {*host} and host.encode("idna"):
            return
    except UnicodeError:
        pass
    raise ValueError(f"{text!r}: {host!r} is not a valid host name")
