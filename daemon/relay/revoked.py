"""Which certificates a list says are revoked: their serial numbers, out of a PEM file of CRLs.

Handshakes do without: OpenSSL looks at the lists there, and at who signed them. This is for connections that were open
before, and of lists that OpenSSL has taken. What is read is RFC 5280, 5.1: CertificateList, whose first part has a
version (maybe), an algorithm, an issuer, one or two times, and then, maybe, a sequence of revoked certificates, each of
which begins with its serial number.
"""

import base64
import re
from collections.abc import Iterator
from typing import Final

_PEM: Final = re.compile(rb"-----BEGIN X509 CRL-----(.*?)-----END X509 CRL-----", re.DOTALL)

_INTEGER: Final = 0x02
_SEQUENCE: Final = 0x30
_TIMES: Final = (0x17, 0x18)
"""UTCTime and GeneralizedTime."""

_LONG_LENGTH: Final = 0x80


def revoked_serials(pem: bytes) -> frozenset[int]:
    """The serial numbers of all lists in a PEM file. Raises ValueError if one makes no sense."""
    return frozenset(serial for found in _PEM.finditer(pem) for serial in _of_list(base64.b64decode(found[1])))


def _of_list(der: bytes) -> Iterator[int]:
    (_, whole), *_ = _elements(der)
    (_, first), *_ = _elements(whole)
    fields = _elements(first)
    if fields and fields[0][0] == _INTEGER:
        del fields[0]
    # Behind the algorithm, the issuer and the times; what else may come there is tagged otherwise (extensions).
    rest = [field for field in fields[2:] if field[0] not in _TIMES]
    if rest and rest[0][0] == _SEQUENCE:
        for _, entry in _elements(rest[0][1]):
            (tag, serial), *_ = _elements(entry)
            if tag != _INTEGER:
                raise ValueError("an entry of a list of revoked certificates has no serial number")
            yield int.from_bytes(serial, "big", signed=True)


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """(tag, content) of each element, one after the other (X.690, 8.1). Raises ValueError if they don't fit."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while at < len(der):
        if len(der) - at < 2:
            raise ValueError("a list of revoked certificates is cut off")
        tag, length = der[at], der[at + 1]
        at += 2
        if length & _LONG_LENGTH:
            size = length & ~_LONG_LENGTH
            length = int.from_bytes(der[at : at + size], "big")
            at += size
        if at + length > len(der):
            raise ValueError("a list of revoked certificates is cut off")
        found.append((tag, der[at : at + length]))
        at += length
    return found
