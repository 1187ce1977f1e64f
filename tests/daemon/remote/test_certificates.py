import stat
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from gpulease.daemon.remote.pki.__main__ import main
from gpulease.daemon.remote.pki.certificates import PkiAuthority, PkiError


@pytest.fixture
def authority(tmp_path: Path) -> PkiAuthority:
    return PkiAuthority.create(tmp_path / "pki")


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_keys_are_their_owners_and_nothing_is_overwritten(authority: PkiAuthority) -> None:
    ann = authority.issue_tenant("ann")
    for key in (ann.key, authority.folder / "ca.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = {path: path.read_bytes() for path in authority.folder.iterdir()}
    for again in (lambda: PkiAuthority.create(authority.folder), lambda: authority.issue_tenant("ann")):
        with pytest.raises(PkiError, match="already exists and"):
            again()
    assert {path: path.read_bytes() for path in authority.folder.iterdir()} == before


def test_a_certificate_says_who_and_what_for(authority: PkiAuthority) -> None:
    ann = certificate(authority.issue_tenant("ann", timedelta(hours=1)).certificate)
    names = ann.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["gpulease:tenant:ann"]
    assert list(ann.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [
        ExtendedKeyUsageOID.CLIENT_AUTH
    ]
    assert ann.not_valid_after_utc - ann.not_valid_before_utc < timedelta(hours=1, minutes=6)
    ann.verify_directly_issued_by(authority.certificate)
    node = certificate(authority.issue_server(["gpu1.example", "::1"]).certificate)
    names = node.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["gpu1.example"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["::1"]


def test_revocations_add_up(authority: PkiAuthority, tmp_path: Path) -> None:
    issued = [authority.issue_tenant(name) for name in ("ann", "bob")]
    for one in issued:
        authority.revoke(one.certificate)
    crl = x509.load_pem_x509_crl(authority.crl_path.read_bytes())
    assert {entry.serial_number for entry in crl} == {certificate(one.certificate).serial_number for one in issued}
    assert crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number == 3
    with pytest.raises(PkiError, match="is already revoked"):
        authority.revoke(issued[0].certificate)
    other = PkiAuthority.create(tmp_path / "other")
    with pytest.raises(PkiError, match=r"it can't be revoked"):
        other.revoke(tmp_path / "nothing.pem")


@pytest.mark.parametrize("name", ["", "uid:0", "tcp", "a b", "*"])
def test_a_name_that_is_none_gets_no_certificate(authority: PkiAuthority, name: str) -> None:
    with pytest.raises(PkiError, match="not a valid tenant name"):
        authority.issue_tenant(name)


@pytest.mark.parametrize("name", ["", "a b", "gpu1/../x", "gpu1:7443", "h\u00f6st"])
def test_a_host_that_is_none_gets_no_certificate(authority: PkiAuthority, name: str) -> None:
    with pytest.raises(PkiError, match="not a valid host name"):
        authority.issue_server([name])


def test_the_authority_does_not_revoke_itself(authority: PkiAuthority) -> None:
    with pytest.raises(PkiError, match="the authority's own"):
        authority.revoke(authority.certificate_path)


def test_the_commands(tmp_path: Path) -> None:
    folder = tmp_path / "pki"

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, [words[0], str(folder), *words[1:]])
        return done.exit_code, done.output

    assert run("init") == (0, f"{folder / 'ca.pem'}\n{folder / 'crl.pem'}\n")
    status, said = run("init")
    assert (status, "already exists" in said) == (1, True)
    assert run("issue", "--server", "gpu1")[0] == 0
    assert run("issue", "--tenant", "ann", "--days", "0.5")[0] == 0
    for days in ("1e12", "0", "nan", "inf"):
        assert run("issue", "--tenant", "eve", "--days", days)[0] == 2
    assert run("issue")[0] == run("issue", "--tenant", "a", "--server", "b")[0] == 2
    assert run("revoke", str(folder / "tenant-ann.pem"))[0] == 0
    (tmp_path / "file").write_text("no folder")
    done = CliRunner().invoke(main, ["init", str(tmp_path / "file" / "pki")])
    assert (done.exit_code, done.output) == (74, f"gpulease pki: {tmp_path}/file/pki: Not a directory\n")


@pytest.mark.parametrize("ends", ["revoked", "expired"])
def test_one_that_nobody_accepts_any_more_is_replaced(tmp_path: Path, ends: str) -> None:
    authority = PkiAuthority.create(tmp_path / "pki")
    expired = timedelta(seconds=-1)
    first = authority.issue_tenant("ann", expired) if ends == "expired" else authority.issue_tenant("ann")
    old = first.certificate.read_bytes(), first.key.read_bytes()
    if ends == "revoked":
        authority.revoke(first.certificate)
    second = authority.issue_tenant("ann")
    assert second == first, "the files that settings name"
    assert (second.certificate.read_bytes(), second.key.read_bytes()) != old
    kept = sorted((tmp_path / "pki").glob("tenant-ann-*"))
    assert [path.suffix for path in kept] == [".key", ".pem"]
    assert (kept[1].read_bytes(), kept[0].read_bytes()) == old
    with pytest.raises(PkiError, match=r"is valid until .*: revoke it"):
        authority.issue_tenant("ann")
