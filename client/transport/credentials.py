"""TLS credentials: the PEM files with which a tenant proves its identity to a remote daemon and checks the daemon's."""

import os
from dataclasses import field, fields
from typing import Any, Final, Self

from gpulease.client.errors import InvalidRequest
from gpulease.client.texts import quoted
from gpulease.protocol.address import Address, TlsAddress
from gpulease.protocol.fast_dataclass import dataclass

VARIABLES: Final = {
    "certificate": "GPULEASE_TLS_CERTIFICATE",
    "key": "GPULEASE_TLS_KEY",
    "ca": "GPULEASE_TLS_CA",
}


MAX_PATH_BYTES: Final = 4095
"""Maximum length of a path in bytes: Linux's PATH_MAX, without the NUL (path_resolution(7))."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files; None for files that the program did not name.

    Attributes:
        certificate: The tenant's certificate, followed by the certificates between it and its CA.
        key: The certificate's private key.
        ca: The CAs that issue nodes' certificates.
    """

    certificate: str | None = None
    key: str | None = None
    ca: str | None = None

    def completed(self) -> Self:
        """Fill in missing paths from the environment. Raises InvalidRequest if one is still missing."""
        # A path that the program names has priority over the environment's.
        paths = {item.name: getattr(self, item.name) or os.environ.get(VARIABLES[item.name]) for item in fields(self)}
        if missing := [VARIABLES[name] for name, path in paths.items() if not path]:
            raise InvalidRequest(
                f"a tls: address needs a certificate, its key and the node's CA; missing: {', '.join(missing)}",
                "Set these variables, or call GpuBuilder.tls(certificate, key, ca)",
            )
        return type(self)(**{name: _path(path, VARIABLES[name]) for name, path in paths.items()})


def _path(value: Any, subject: str) -> str:
    """Check that the kernel accepts a path. Raises InvalidRequest."""
    try:
        # Accept bytes, strings and path objects.
        path = os.fsdecode(value)
        if len(os.fsencode(path)) <= MAX_PATH_BYTES and "\0" not in path:
            return path
    except (TypeError, UnicodeError):
        pass
    raise InvalidRequest(f"{subject} must be the path of a file, not {quoted(value)}")


@dataclass(frozen=True, slots=True)
class SecuredAddress(TlsAddress):
    """A tls: address, with the files that a connection to it needs."""

    files: TlsFiles = field(default_factory=TlsFiles)

    @classmethod
    def of(cls, address: TlsAddress, files: TlsFiles) -> Self:
        """Combine an address and its files. Raises InvalidRequest if a file is missing."""
        return cls(address.host, address.port, files.completed())

    def __str__(self) -> str:
        return str(TlsAddress(self.host, self.port))


def with_files(address: Address, files: TlsFiles) -> Address:
    """Return the address; combines a tls: address with its files. Raises InvalidRequest if a file is missing."""
    return SecuredAddress.of(address, files) if isinstance(address, TlsAddress) else address
