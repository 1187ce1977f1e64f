"""The folder of a socket."""

import os
import socket
import stat
from pathlib import Path

import pytest

from gpulease.daemon.broker import listeners
from gpulease.daemon.broker.listeners import NeverListens, prepare_place
from gpulease.protocol.address import UnixAddress


@pytest.fixture
def address(tmp_path: Path) -> UnixAddress:
    return UnixAddress(str(tmp_path / "run" / "d.sock"))


@pytest.mark.parametrize(
    ("socket_mode", "folder_mode"), [(0o600, 0o700), (0o660, 0o750), (0o666, 0o755), (0o606, 0o705)]
)
@pytest.mark.parametrize("umask", [0o077, 0o000])
def test_its_own_folder_lets_in_whom_the_socket_does(
    tmp_path: Path,
    address: UnixAddress,
    monkeypatch: pytest.MonkeyPatch,
    socket_mode: int,
    folder_mode: int,
    umask: int,
) -> None:
    monkeypatch.setattr(listeners, "OWN_FOLDER", tmp_path / "run")
    before = os.umask(umask)
    try:
        prepare_place(address, socket_mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == folder_mode
    (tmp_path / "run").chmod(0o711)
    prepare_place(address, socket_mode)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o711, "one that is there is the operator's"


def test_no_other_folder_is_made(tmp_path: Path, address: UnixAddress) -> None:
    with pytest.raises(
        NeverListens,
        match=r"the folder .*/run does not exist; correct the path, or create the folder",
    ):
        prepare_place(address, 0o660)
    assert not list(tmp_path.iterdir())


def test_its_own_folder_can_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "OWN_FOLDER", tmp_path / "no" / "run")
    with pytest.raises(NeverListens, match=r"may not create the folder .*/no/run \(No such file or directory\)"):
        prepare_place(UnixAddress(str(tmp_path / "no" / "run" / "d.sock")), 0o660)


def test_a_link_to_nothing_is_refused_and_one_to_a_socket_is_not(tmp_path: Path) -> None:
    link = tmp_path / "d.sock"
    link.symlink_to(tmp_path / "real.sock")
    with pytest.raises(NeverListens, match="it is a symbolic link to nothing; delete it, or use another path"):
        prepare_place(UnixAddress(str(link)), 0o660)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "real.sock"))
        prepare_place(UnixAddress(str(link)), 0o660)
