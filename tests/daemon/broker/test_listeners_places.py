"""The folder of a socket, and the lock beside it."""

import os
import stat
import threading
from pathlib import Path

import pytest

from gpulease.daemon.broker import listeners
from gpulease.daemon.broker.listeners import NeverListens, PlaceLock, prepare_place
from gpulease.daemon.host.socket_activation import CannotListen
from gpulease.protocol.address import UnixAddress

ROUNDS = 100
TAKERS = 4


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
    with pytest.raises(NeverListens, match=r"there is no folder .*/run: name another path if it is mistyped, or make"):
        prepare_place(address, 0o660)
    assert not list(tmp_path.iterdir())


def test_its_own_folder_can_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "OWN_FOLDER", tmp_path / "no" / "run")
    with pytest.raises(NeverListens, match=r"may not make the folder .*/no/run \(No such file or directory\)"):
        prepare_place(UnixAddress(str(tmp_path / "no" / "run" / "d.sock")), 0o660)


def test_a_released_lock_leaves_no_file(tmp_path: Path) -> None:
    address = UnixAddress(str(tmp_path / "d.sock"))
    lock = PlaceLock(address)
    with pytest.raises(CannotListen, match="another gpuleased does") as failure:
        PlaceLock(address)
    assert not isinstance(failure.value, NeverListens), "it may end in a moment"
    assert os.listdir(tmp_path) == ["d.sock.lock"]
    lock.release()
    assert not os.listdir(tmp_path)


def test_one_left_by_a_crash_is_taken(tmp_path: Path) -> None:
    (tmp_path / "d.sock.lock").touch()
    PlaceLock(UnixAddress(str(tmp_path / "d.sock"))).release()
    assert not os.listdir(tmp_path)


def test_a_lock_whose_file_is_somebody_elses_by_now(tmp_path: Path) -> None:
    address, path = UnixAddress(str(tmp_path / "d.sock")), tmp_path / "d.sock.lock"
    first = PlaceLock(address)
    path.unlink()
    second = PlaceLock(address)
    first.release()
    assert path.exists(), "the second's"
    second.release()
    assert not path.exists()


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    (tmp_path / "d.sock.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        PlaceLock(UnixAddress(str(tmp_path / "d.sock")))


def test_there_is_never_a_second_holder(tmp_path: Path) -> None:
    """However removing the file and locking it fall together."""
    address, inside, met = UnixAddress(str(tmp_path / "d.sock")), [0], list[int]()

    def take_again_and_again() -> None:
        taken = 0
        while taken < ROUNDS:
            try:
                lock = PlaceLock(address)
            except CannotListen:
                continue
            inside[0] += 1
            met.append(inside[0])
            inside[0] -= 1
            lock.release()
            taken += 1

    threads = [threading.Thread(target=take_again_and_again) for _ in range(TAKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [1] * ROUNDS * TAKERS
    assert not os.listdir(tmp_path)
