"""Where a daemon listens, as one string: `unix:/path` or `tcp:HOST:PORT` (`tcp:[::1]:PORT` for IPv6)."""

from dataclasses import dataclass
from typing import Final

DEFAULT_ADDRESS: Final = "unix:/run/gpulease/gpuleased.sock"
ADDRESS_VARIABLE: Final = "GPULEASE_ADDRESS"
MAX_UNIX_PATH_BYTES: Final = 107
"""What fits struct sockaddr_un (unix(7)); a longer path fails later with a less helpful error."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix stream socket."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP socket; `host` is a name or an IP address without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """The address a string names. Raises ValueError with a sentence that says what is wrong with it."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix":
        return _parse_unix(text, rest)
    if scheme == "tcp":
        return _parse_tcp(text, rest)
    raise ValueError(f"{text!r} is not an address: write unix:/path/to/socket or tcp:HOST:PORT")


def _parse_unix(text: str, path: str) -> UnixAddress:
    if not path.startswith("/"):
        raise ValueError(f"{text!r}: the path of a Unix socket must be absolute")
    if len(path.encode()) > MAX_UNIX_PATH_BYTES or "\0" in path:
        raise ValueError(f"{text!r}: a Unix socket's path has at most {MAX_UNIX_PATH_BYTES} bytes and no NUL")
    return UnixAddress(path)


def _parse_tcp(text: str, rest: str) -> TcpAddress:
    host, _, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: write an IPv6 address in brackets, tcp:[::1]:PORT")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{text!r} is not an address: write tcp:HOST:PORT with a port from 0 to 65535")
    return TcpAddress(host, int(port))
