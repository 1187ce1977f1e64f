"""Files that can't be the node's identity, and what the operator reads of each."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpulease.daemon.remote.node_identity import BadIdentity, Identity, IdentityFiles, server_context
from gpulease.daemon.remote.pki.certificates import PkiAuthority

WRONG: dict[str, tuple[Callable[[IdentityFiles], IdentityFiles], str]] = {
    "no certificate": (
        lambda files: replace(files, certificate=files.certificate.with_name("no")),
        "certificate .*/no: No such file or directory",
    ),
    "no key": (lambda files: replace(files, key=files.key.with_name("no")), "key .*/no: No such file or directory"),
    "a folder as key": (lambda files: replace(files, key=files.key.parent), "key .* is a folder: name a file"),
    "lists as CA": (
        lambda files: replace(files, client_ca=files.crl or Path()),
        "client_ca .*/crl.pem contains no certificate",
    ),
    "certificates as list": (
        lambda files: replace(files, crl=files.client_ca),
        "crl .*/ca.pem contains no list of revoked certificates",
    ),
}


@pytest.mark.parametrize(("spoil", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_named_with_the_reason(
    tmp_path: Path, spoil: Callable[[IdentityFiles], IdentityFiles], said: str
) -> None:
    authority = PkiAuthority.create(tmp_path / "pki")
    server = authority.issue_server(["localhost"])
    files = IdentityFiles(server.certificate, server.key, authority.certificate_path, authority.crl_path)
    assert Identity(files).revoked == frozenset()
    for read in (Identity, server_context):
        with pytest.raises(BadIdentity) as refused:
            read(spoil(files))
        assert re.fullmatch(said, str(refused.value))
