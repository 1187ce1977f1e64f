"""A certificate authority in a folder: it issues and revokes certificates.

Keys are ECDSA P-256, in files that only their owner can read. Only the list of revoked certificates is ever
overwritten. A server's certificate is valid only for servers, and a tenant's only for clients (extended key usage, RFC
5280, 4.2.1.12), so no tenant can pass for the node.
"""

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gpulease.daemon.remote.node_identity import TENANT_PREFIX
from gpulease.daemon.remote.tls_settings import check_tenant
from gpulease.protocol.fast_dataclass import dataclass

AUTHORITY_LIFE: Final = datetime.timedelta(days=365)
LEAF_LIFE: Final = datetime.timedelta(days=30)
"""Life of a certificate, and so the longest use of a leaked one that is never revoked."""

BACKDATED: Final = datetime.timedelta(minutes=5)
"""How long before its issue a certificate becomes valid, because the clocks of two hosts differ."""

_CA = "ca.pem"
_CA_KEY = "ca.key"
_CRL = "crl.pem"
_HOST = re.compile(r"(?:\*\.)?[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*")
_SIGNING = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=False,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)
_ISSUING = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


class PkiError(Exception):
    """A request that the authority refuses. The message is a sentence with the reason."""


@dataclass(frozen=True, slots=True)
class Issued:
    """The files of a certificate, in PEM, and of its private key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class PkiAuthority:
    """An authority in its folder: `ca.pem`, `ca.key`, `crl.pem`, and the certificates it issued."""

    folder: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_path(self) -> Path:
        return self.folder / _CA

    @property
    def crl_path(self) -> Path:
        return self.folder / _CRL

    @classmethod
    def create(cls, folder: Path, life: datetime.timedelta = AUTHORITY_LIFE) -> Self:
        """Make a new authority. Raises PkiError if the folder already has one."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (folder / file for file in (_CA, _CA_KEY, _CRL)):
            if path.exists():
                raise PkiError(f"{path} already exists and is not overwritten")
        # The authority signs its own certificate. It may sign leaves but no further authority (path length 0).
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpulease test authority")])
        builder = _builder(key.public_key(), name, name, life)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_ISSUING, critical=True)
        certificate = builder.sign(key, hashes.SHA256())
        # Write the key first, because a certificate without its key is useless.
        _write_key(folder / _CA_KEY, key)
        _write(folder / _CA, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        authority = cls(folder, certificate, key)
        # Write an empty list, so that nodes can be configured with a list from the start.
        authority._write_crl([], 1)
        return authority

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Return the authority in a folder. Raises PkiError."""
        try:
            certificate = x509.load_pem_x509_certificate((folder / _CA).read_bytes())
            key = serialization.load_pem_private_key((folder / _CA_KEY).read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise PkiError(
                f"{folder} contains no usable authority: {_description(error)}; `gpulease pki init` makes one"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise PkiError(f"{folder / _CA_KEY} was not made by `gpulease pki init`")
        return cls(folder, certificate, key)

    def issue_server(self, hosts: Sequence[str], life: datetime.timedelta = LEAF_LIFE) -> Issued:
        """Issue a node's certificate for the host names and IP addresses by which tenants reach it. Raises PkiError."""
        if not hosts:
            raise PkiError("a server's certificate needs the host names by which tenants reach the server")
        names = [_host_name(host) for host in hosts]
        return self._issue(f"server-{_file_name(hosts[0])}", hosts[0], names, ExtendedKeyUsageOID.SERVER_AUTH, life)

    def issue_tenant(self, tenant: str, life: datetime.timedelta = LEAF_LIFE) -> Issued:
        """Issue a tenant's certificate, in place of one that is revoked or has expired. Raises PkiError."""
        try:
            uri = TENANT_PREFIX.removeprefix("URI:") + check_tenant(tenant)
        except ValueError as error:
            raise PkiError(str(error)) from None
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)]
        return self._issue(f"tenant-{tenant}", tenant, names, ExtendedKeyUsageOID.CLIENT_AUTH, life)

    def revoke(self, certificate: Path) -> None:
        """Put one of this authority's certificates on its list. Raises PkiError."""
        try:
            revoked = x509.load_pem_x509_certificate(certificate.read_bytes())
            old = x509.load_pem_x509_crl(self.crl_path.read_bytes())
        except (OSError, ValueError) as error:
            raise PkiError(f"it can't be revoked: {_description(error)}") from None
        if revoked.issuer != self.certificate.subject:
            raise PkiError(f"{certificate} was not issued by this authority")
        if revoked.serial_number == self.certificate.serial_number:
            raise PkiError(
                f"{certificate} is the authority's own certificate, which can't be revoked; make another "
                "authority instead"
            )
        if old.get_revoked_certificate_by_serial_number(revoked.serial_number) is not None:
            raise PkiError(f"{certificate} is already revoked")
        # Write the whole list: the old entries, the new one, and the next number (RFC 5280, 5.2.3).
        entry = (
            x509.RevokedCertificateBuilder()
            .serial_number(revoked.serial_number)
            .revocation_date(datetime.datetime.now(datetime.UTC))
            .build()
        )
        number = old.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        self._write_crl([*old, entry], number + 1)

    def _issue(
        self, stem: str, name: str, names: list[x509.GeneralName], use: x509.ObjectIdentifier, life: datetime.timedelta
    ) -> Issued:
        issued = Issued(self.folder / f"{stem}.pem", self.folder / f"{stem}.key")
        self._make_room(issued)
        # Step 1: make a new key, and a certificate that is valid for a single purpose.
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        builder = _builder(key.public_key(), subject, self.certificate.subject, life)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_SIGNING, critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([use]), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(self._key_identifier(), critical=False)
        # Step 2: sign it, and write both files. Neither exists, because of `_make_room`.
        certificate = builder.sign(self.key, hashes.SHA256())
        _write_key(issued.key, key)
        _write(issued.certificate, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        return issued

    def _make_room(self, issued: Issued) -> None:
        """Move an expired or revoked certificate and its key aside. Raises PkiError for one that is still valid."""
        try:
            old = x509.load_pem_x509_certificate(issued.certificate.read_bytes())
            crl = x509.load_pem_x509_crl(self.crl_path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise PkiError(f"{issued.certificate} can't be replaced: {_description(error)}") from None
        is_revoked = crl.get_revoked_certificate_by_serial_number(old.serial_number) is not None
        if not is_revoked and old.not_valid_after_utc > datetime.datetime.now(datetime.UTC):
            raise PkiError(
                f"{issued.certificate} already exists and is valid until {old.not_valid_after_utc:%Y-%m-%d}: revoke"
                " it first, or move it and its key away"
            )
        for path in (issued.certificate, issued.key):
            if path.exists():
                path.rename(path.with_stem(f"{path.stem}-{old.serial_number:x}"))

    def _write_crl(self, revoked: Sequence[x509.RevokedCertificate], number: int) -> None:
        now = datetime.datetime.now(datetime.UTC)
        # The list expires with the authority and not sooner, because no process would renew it in time.
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now - BACKDATED)
            .next_update(self.certificate.not_valid_after_utc)
            .add_extension(x509.CRLNumber(number), critical=False)
            .add_extension(self._key_identifier(), critical=False)
        )
        for entry in revoked:
            builder = builder.add_revoked_certificate(entry)
        text = builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        new = self.folder / f"{_CRL}.new"
        new.unlink(missing_ok=True)
        _write(new, text, 0o644)
        # A daemon that reads the file at this moment reads the old list or the new one.
        new.replace(self.crl_path)

    def _key_identifier(self) -> x509.AuthorityKeyIdentifier:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())


def _builder(
    key: ec.EllipticCurvePublicKey, subject: x509.Name, issuer: x509.Name, life: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    # A negative life makes a certificate that has already expired. It must still begin before it ends.
    begin = min(now - BACKDATED, now + life - BACKDATED)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if _HOST.fullmatch(host) is None:
        raise PkiError(f"{host!r} is not a valid host name: use letters, digits, dashes and dots, or an IP address")
    return x509.DNSName(host)


def _file_name(host: str) -> str:
    return "".join(char if char.isalnum() or char in ".-" else "_" for char in host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write(path, text, 0o600)


def _write(path: Path, data: bytes, mode: int) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise PkiError(f"{path} already exists and is not overwritten") from None
    with open(fd, "wb") as file:
        file.write(data)


def _description(error: Exception) -> str:
    """Return a sentence about a file's error, because the library's own message describes the library's internals."""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return "its file must contain a certificate or key in PEM format"
