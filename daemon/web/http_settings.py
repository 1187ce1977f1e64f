"""The settings of the web page: its address, its host names, and the operator's token."""

import hashlib
import ipaddress
import os
import re
import stat
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.host.extras import check_installed
from gpulease.daemon.host.regular_files import open_regular
from gpulease.protocol.address import TcpAddress, parse_address
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.settings_reader import must_be

NEEDED: Final = ("starlette", "uvicorn", "h11")
"""The packages that serve the page, from the extra `serve`."""

MIN_TOKEN_CHARS: Final = 32
"""Minimum length of the operator's token. The number of tries is not limited, so a shorter token could be guessed."""

MAX_TOKEN_BYTES: Final = 4096
"""Maximum size of the token's file. A larger file can't be a token file."""

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*", re.ASCII)
"""The characters of a Bearer token (RFC 6750, 2.1)."""


class BadToken(Exception):
    """The operator's token can't be used; the message is a sentence with the reason."""


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The settings of the web page.

    Attributes:
        address: The loopback address that serves the page.
        hosts: Further host names of the page, such as those of a proxy in front of it.
        token_file: The file with the operator's token; None for no token. Only requests with the token see tenants'
            names and lease ids, and may act.
    """

    address: TcpAddress
    hosts: frozenset[str] = frozenset()
    token_file: Path | None = None

    def token_digest(self) -> bytes:
        """Return the SHA-256 of the operator's token, b"" if there is none. Raises BadToken."""
        if self.token_file is None:
            return b""
        return hashlib.sha256(_read_token(self.token_file)).digest()


def parse_http(value: Any) -> TcpAddress:
    """Return the address that the setting `http` names. Raises ValueError."""
    if not isinstance(value, str):
        raise must_be("a string such as 127.0.0.1:9400", value)
    # Step 1: parse it like all other addresses.
    try:
        address = parse_address(f"tcp:{value}")
    except ValueError:
        raise ValueError(f"{value!r} is not an address: write 127.0.0.1:PORT or [::1]:PORT") from None
    # Step 2: it must be an IP address of the loopback interface.
    try:
        is_loopback = isinstance(address, TcpAddress) and ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        # Names are not accepted, not even localhost, because the page's address must not depend on name resolution.
        raise ValueError(f"{value!r} contains no IP address: write 127.0.0.1:PORT or [::1]:PORT") from None
    # Step 3: refuse every other address, because operators send their token to the page without TLS.
    if not isinstance(address, TcpAddress) or not is_loopback:
        raise ValueError(
            f"{value} is not on loopback, and plain HTTP is only served there: write 127.0.0.1:PORT, and "
            "use a proxy that terminates TLS and authenticates users"
        )
    check_installed(NEEDED, "serve")
    return address


def _read_token(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            # Check the open file, not the path, so that the file can't be replaced between the check and the read.
            status = os.fstat(file.fileno())
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise BadToken(f"{path} must be a file that only its owner can read: run chmod 600 on it")
            text = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise BadToken(f"{path}: {error.strerror}") from None
    # Editors end a file with a line feed, which is not part of the token.
    token = text.strip()
    if len(text) > MAX_TOKEN_BYTES or len(token) < MIN_TOKEN_CHARS:
        raise BadToken(
            f"{path} must contain a token of at least {MIN_TOKEN_CHARS} characters; `openssl rand -hex 32` makes one"
        )
    if _TOKEN.fullmatch(token.decode("ascii", "replace")) is None:
        raise BadToken(
            f"{path} must contain only characters that a Bearer token can have (RFC 6750); `openssl rand -hex "
            "32` makes a token"
        )
    return token
