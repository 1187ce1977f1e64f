"""Files that can't be the node's identity, and what the operator reads of each."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpulease.daemon.remote.node_identity import BadIdentity, Identity, IdentityFiles, server_context
from gpulease.daemon.remote.pki.certificates import PkiAuthority

WrongFile = tuple[Callable[[IdentityFiles], IdentityFiles], str]
"""A change of the right files, and the error."""


def _with_fifo_as(field: str) -> WrongFile:
    """Return the change of one file into a FIFO that nobody writes to. Opening it to read would wait forever."""

    def change(files: IdentityFiles) -> IdentityFiles:
        fifo = files.key.with_name("fifo")
        if not fifo.exists():
            os.mkfifo(fifo)
        return replace(files, **{field: fifo})

    return change, f"{field} .*/fifo: it must be a regular file, not a folder, a FIFO or a device"


WRONG: dict[str, WrongFile] = {
    "no certificate": (
        lambda files: replace(files, certificate=files.certificate.with_name("no")),
        "certificate .*/no: No such file or directory",
    ),
    "no key": (lambda files: replace(files, key=files.key.with_name("no")), "key .*/no: No such file or directory"),
    "a folder as key": (
        lambda files: replace(files, key=files.key.parent),
        "key .*: it must be a regular file, not a folder, a FIFO or a device",
    ),
    **{f"a FIFO as {field}": _with_fifo_as(field) for field in ("certificate", "key", "client_ca", "crl")},
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
