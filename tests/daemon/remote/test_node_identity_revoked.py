from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from gpulease.daemon.remote.node_identity import _serials_of, revoked_serials
from gpulease.daemon.remote.pki.certificates import PkiAuthority


def test_what_an_authority_revoked_is_read_from_its_list(tmp_path: Path) -> None:
    first, second = (PkiAuthority.create(tmp_path / name) for name in ("a", "b"))
    assert revoked_serials(first.crl_path.read_bytes()) == frozenset()
    expected = set()
    for authority, count in ((first, 2), (second, 5)):
        for number in range(count):
            issued = authority.issue_tenant(f"t{number}", timedelta(days=1))
            authority.revoke(issued.certificate)
            expected.add(x509.load_pem_x509_certificate(issued.certificate.read_bytes()).serial_number)
    both = first.crl_path.read_bytes() + b"\n" + second.crl_path.read_bytes()
    assert revoked_serials(both) == expected


@given(st.binary())
def test_any_bytes_are_a_list_or_a_value_error(der: bytes) -> None:
    try:
        list(_serials_of(der))
    except ValueError:
        return


def test_a_list_that_is_cut_off_is_told(tmp_path: Path) -> None:
    authority = PkiAuthority.create(tmp_path / "pki")
    authority.revoke(authority.issue_tenant("ann").certificate)
    crl = x509.load_pem_x509_crl(authority.crl_path.read_bytes())
    der = crl.public_bytes(Encoding.DER)
    for cut in range(1, 60):
        with pytest.raises(ValueError, match="truncated"):
            list(_serials_of(der[:cut]))
