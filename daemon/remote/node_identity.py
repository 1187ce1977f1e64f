"""The node's identity towards remote tenants, and the tenant that a certificate names.

A certificate names its tenant by one subjectAltName, `URI:gpulease:tenant:NAME`. If the settings have a table
`[tenant_of_certificate]`, only the names in that table count. The certificate's subject is ignored. A certificate is
refused if it has no such name, several of them, or a wildcard among its names, or if no tenant may have its NAME.

OpenSSL checks lists of revoked certificates in handshakes only. `revoked_serials` reads their serial numbers, so that
the acceptor can end connections that were open before.
"""

import base64
import os
import re
import ssl
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from gpulease.daemon.host.regular_files import check_regular
from gpulease.daemon.remote.tls_settings import TlsSettings, check_tenant
from gpulease.protocol.fast_dataclass import dataclass

TENANT_PREFIX: Final = "URI:gpulease:tenant:"


class NoTenant(Exception):
    """A certificate names no tenant, or several. The message is a sentence for the certificate's holder."""


def tenant_named(names: Sequence[str], tenants: Mapping[str, str]) -> str:
    """Return the tenant that a certificate belongs to. Raises NoTenant.

    Args:
        names: The certificate's names, each as `KIND:value`.
        tenants: `[tenant_of_certificate]`, tenants by such names; empty without that table.
    """
    # A wildcard stands for many names, and a certificate must name exactly one tenant.
    if any("*" in name for name in names):
        raise NoTenant("a name in the certificate contains a wildcard, but a certificate must name exactly one tenant")
    # With a table, only its names count; without one, the names in our own URI form.
    if tenants:
        matches = [name for name in names if name in tenants]
        expected = "one of the names that the node's operator has listed"
    else:
        matches = [name for name in names if name.startswith(TENANT_PREFIX)]
        expected = f"{TENANT_PREFIX}NAME"
    # Two names could belong to two tenants, and no rule says which of them connects.
    if len(matches) != 1:
        reason = "several tenant names are" if matches else "no tenant name is"
        raise NoTenant(f"{reason} in the certificate; it must contain exactly one: {expected}")
    try:
        return tenants[matches[0]] if tenants else check_tenant(matches[0].removeprefix(TENANT_PREFIX))
    except ValueError as error:
        raise NoTenant(str(error)) from None


Stamp = tuple[int, int, int] | None
"""Inode, size and time of change of a file; None without a file. A changed file has another stamp."""

_FIELDS: Final = ("certificate", "key", "client_ca", "crl")


class BadIdentity(Exception):
    """The files can't be used. The message names them and the reason, for the operator."""


@dataclass(frozen=True, slots=True)
class IdentityFiles:
    """The files of an Identity. `TlsSettings` describes each."""

    certificate: Path
    key: Path
    client_ca: Path
    crl: Path | None

    @classmethod
    def of(cls, settings: TlsSettings) -> Self:
        return cls(settings.certificate, settings.key, settings.client_ca, settings.crl)

    def to_arguments(self) -> list[str]:
        """Return the files as arguments of a command line."""
        return [str(getattr(self, field) or "") for field in _FIELDS]

    @classmethod
    def from_arguments(cls, arguments: list[str]) -> Self:
        """Return the files that a command line's arguments name."""
        certificate, key, client_ca, crl = arguments
        return cls(Path(certificate), Path(key), Path(client_ca), Path(crl) if crl else None)

    def stamps(self) -> tuple[Stamp, ...]:
        return tuple(_stamp(getattr(self, field)) for field in _FIELDS)


class Identity:
    """The node's certificate and key, the CAs it trusts, and the revoked certificates, as last read from the files.

    A TLS connection keeps the context that it began with. So that a relay can forget the node's key, a handshake begins
    with a context without the key. When OpenSSL lets the server choose a certificate, on the tenant's first message,
    the handshake changes to the context with the key. When it is done, it changes back.

    Attributes:
        revoked: Serial numbers of revoked certificates.
    """

    def __init__(self, files: IdentityFiles) -> None:
        """Read the certificates, the key and the revocations in `files`. Raises BadIdentity."""
        self._files = files
        self._stamps = files.stamps()
        self._keyless = _context(files, with_key=False)
        self._keyed: ssl.SSLContext | None = _context(files, with_key=True)
        self.revoked = _revoked(files.crl)

    def is_current(self) -> bool:
        return self._files.stamps() == self._stamps

    def wrap(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """Return a server's TLS connection before its handshake."""

        def choose(tls: Any, name: str | None, context: ssl.SSLContext) -> None:
            tls.context = self._keyed

        self._keyless.sni_callback = choose
        return self._keyless.wrap_bio(incoming, outgoing, server_side=True)

    def forget_key(self, tls: ssl.SSLObject) -> None:
        """Drop the node's key from this process after the handshake. OpenSSL overwrites the memory that it frees."""
        tls.context = self._keyless
        self._keyless.sni_callback = None
        self._keyed = None


def server_context(files: IdentityFiles) -> ssl.SSLContext:
    """Return the TLS context of a server that keeps its key. It requires TLS 1.3, and a certificate of each peer.

    Raises BadIdentity.
    """
    return _context(files, with_key=True)


def _context(files: IdentityFiles, *, with_key: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # Without tickets neither resumption nor early data exist, so each connection shows its certificate.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    # Trust the tenants' CAs alone, not those of the host.
    _load(context, files.client_ca, "client_ca")
    # OpenSSL takes certificates and revocation lists from either file. Without a certificate, every tenant would be
    # refused.
    if not context.cert_store_stats()["x509"]:
        raise BadIdentity(f"client_ca {files.client_ca} contains no certificate")
    # Check the revocation list for the peer's own certificate, not for the CAs above it.
    if files.crl is not None:
        _load(context, files.crl, "crl")
        if not context.cert_store_stats()["crl"]:
            raise BadIdentity(f"crl {files.crl} contains no list of revoked certificates")
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    if with_key:
        _load_key(context, files)
    return context


def _load(context: ssl.SSLContext, path: Path, subject: str) -> None:
    _check_readable(path, subject)
    try:
        context.load_verify_locations(path)
    except OSError as error:
        # ssl.SSLError is an OSError.
        raise BadIdentity(f"{subject} {path}: {error.strerror or error}") from None


def _check_readable(path: Path, subject: str) -> None:
    """Raise BadIdentity unless OpenSSL can read the file.

    OpenSSL's own error for an unreadable file does not name the file, and opening a FIFO would wait for its writer.
    """
    try:
        check_regular(path.stat(), path)
    except OSError as error:
        raise BadIdentity(f"{subject} {path}: {error.strerror}") from None
    if not os.access(path, os.R_OK):
        raise BadIdentity(f"{subject} {path} can't be read by the daemon's user")


def _load_key(context: ssl.SSLContext, files: IdentityFiles) -> None:
    def no_password() -> str:
        raise BadIdentity(f"key {files.key} has a password, which a daemon can't enter: remove the password")

    _check_readable(files.certificate, "certificate")
    _check_readable(files.key, "key")
    # Operators may give the key's group read access. Anyone who can read the key can pass for this node.
    if files.key.stat().st_mode & stat.S_IROTH:
        raise BadIdentity(f"key {files.key} can be read by all users: run chmod o-r on it")
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
        status = None if path is None else path.stat()
    except OSError:
        return None
    return None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


# --- lists of revoked certificates ---

_PEM: Final = re.compile(rb"-----BEGIN X509 CRL-----(.*?)-----END X509 CRL-----", re.DOTALL)

_INTEGER: Final = 0x02
_SEQUENCE: Final = 0x30
_TIMES: Final = (0x17, 0x18)
"""UTCTime and GeneralizedTime."""

_LONG_LENGTH: Final = 0x80


def revoked_serials(pem: bytes) -> frozenset[int]:
    """Return the serial numbers in all lists of a PEM file. Raises ValueError for a malformed list.

    The structure is RFC 5280, 5.1: the first element of a CertificateList holds an optional version, an algorithm, an
    issuer, one or two times, and an optional sequence of entries. Each entry begins with its serial number.
    """
    return frozenset(serial for match in _PEM.finditer(pem) for serial in _serials_of(base64.b64decode(match[1])))


def _serials_of(der: bytes) -> Iterator[int]:
    # CertificateList, and its first element, the TBSCertList (RFC 5280, 5.1).
    (_, signed_part), *_ = _elements(der)
    (_, first), *_ = _elements(signed_part)
    fields = _elements(first)
    # Version 2 begins with an integer; version 1 has none.
    if fields and fields[0][0] == _INTEGER:
        del fields[0]
    # The entries follow the algorithm, the issuer and the times. Extensions have another tag.
    entries = [field for field in fields[2:] if field[0] not in _TIMES]
    if entries and entries[0][0] == _SEQUENCE:
        for _, entry in _elements(entries[0][1]):
            (tag, serial), *_ = _elements(entry)
            if tag != _INTEGER:
                raise ValueError("an entry in a list of revoked certificates has no serial number")
            yield int.from_bytes(serial, "big", signed=True)


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Return each element's tag and content (X.690, 8.1). Raises ValueError for an element that is cut off."""
    elements: list[tuple[int, bytes]] = []
    at = 0
    while at < len(der):
        if len(der) - at < 2:
            raise ValueError("a list of revoked certificates is truncated")
        tag, length = der[at], der[at + 1]
        at += 2
        # The long form: the low bits say how many bytes hold the length (X.690, 8.1.3.5).
        if length & _LONG_LENGTH:
            size = length & ~_LONG_LENGTH
            length = int.from_bytes(der[at : at + size], "big")
            at += size
        if at + length > len(der):
            raise ValueError("a list of revoked certificates is truncated")
        elements.append((tag, der[at : at + length]))
        at += length
    return elements
