"""Who this node is to remote tenants, and which of them it believes: files, read again when they change."""

import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from gpulease.daemon.relay.revoked import revoked_serials
from gpulease.daemon.tls_settings import TlsSettings

Stamp = tuple[int, int, int] | None
"""What tells one state of a file from another: inode, size, time of change; None if there is no file."""

_FIELDS: Final = ("certificate", "key", "client_ca", "crl")


class BadIdentity(Exception):
    """The files can't be used; the message says which and why, for the operator."""


@dataclass(frozen=True, slots=True)
class IdentityFiles:
    """Where it is read from; see TlsSettings."""

    certificate: Path
    key: Path
    client_ca: Path
    crl: Path | None

    @classmethod
    def of(cls, settings: TlsSettings) -> Self:
        """Those of the settings."""
        return cls(settings.certificate, settings.key, settings.client_ca, settings.crl)

    def to_arguments(self) -> list[str]:
        """For a command line."""
        return [str(getattr(self, field) or "") for field in _FIELDS]

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Self:
        """From a command line."""
        certificate, key, client_ca, crl = arguments
        return cls(Path(certificate), Path(key), Path(client_ca), Path(crl) if crl else None)

    def stamps(self) -> tuple[Stamp, ...]:
        """What they are now."""
        return tuple(_stamp(getattr(self, field)) for field in _FIELDS)


class Identity:
    """What a handshake needs, as it was read last.

    Theory of operation. A handshake begins by a context without the key, changes to the one with it when the tenant's
    first message is read, which is where OpenSSL lets a server choose its certificate, and goes back when it is done.
    Only so can the key be forgotten while the connection lives: it keeps the context it began with.

    Attributes:
        revoked: Serial numbers of certificates that hold no more.
    """

    def __init__(self, files: IdentityFiles) -> None:
        """Raises BadIdentity."""
        self._files = files
        self._stamps = files.stamps()
        self._keyless = _context(files, with_key=False)
        self._keyed: ssl.SSLContext | None = _context(files, with_key=True)
        self.revoked = _revoked(files.crl)

    def is_current(self) -> bool:
        """Whether the files are what they were."""
        return self._files.stamps() == self._stamps

    def wrap(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """A connection whose handshake is still to come."""

        def choose(tls: Any, name: str | None, context: ssl.SSLContext) -> None:
            tls.context = self._keyed

        self._keyless.sni_callback = choose
        return self._keyless.wrap_bio(incoming, outgoing, server_side=True)

    def forget_key(self, tls: ssl.SSLObject) -> None:
        """The handshake is done: nothing in this process has the key any more. OpenSSL overwrites what it frees."""
        tls.context = self._keyless
        self._keyless.sni_callback = None
        self._keyed = None


def _context(files: IdentityFiles, *, with_key: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # No ticket, no resumption: each connection's certificate is looked at anew. Early data would need a ticket.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    _load(context, files.client_ca, "client_ca")
    if files.crl is not None:
        _load(context, files.crl, "crl")
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    if with_key:
        _load_key(context, files)
    return context


def _load(context: ssl.SSLContext, path: Path, what: str) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        # ssl.SSLError is one too.
        raise BadIdentity(f"{what} {path}: {error.strerror or error}") from None


def _load_key(context: ssl.SSLContext, files: IdentityFiles) -> None:
    def no_password() -> str:
        raise BadIdentity(f"key {files.key} has a password: there is nobody to ask for it")

    for what, path in (("certificate", files.certificate), ("key", files.key)):
        if not os.access(path, os.R_OK):
            raise BadIdentity(f"{what} {path} can't be read")
    # Of a group that operators made for it a key may be; whoever else can read it can be this node.
    if files.key.stat().st_mode & stat.S_IROTH:
        raise BadIdentity(f"key {files.key} can be read by everybody: chmod o-r it")
    try:
        context.load_cert_chain(files.certificate, files.key, no_password)
    except OSError as error:
        raise BadIdentity(f"certificate {files.certificate} with key {files.key}: {error.strerror or error}") from None


def _revoked(path: Path | None) -> frozenset[int]:
    try:
        return frozenset() if path is None else revoked_serials(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadIdentity(f"crl {path}: {error}") from None


def _stamp(path: Path | None) -> Stamp:
    try:
        found = None if path is None else path.stat()
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)
