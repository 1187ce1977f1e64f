"""The place of a Unix socket: who may take it, what is made anew there, and the lock beside it."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpulease.daemon.host.socket_activation import CannotListen
from gpulease.daemon.host.unix_place import PlaceLock, UnixPlace, bound_to_path, listener_at
from gpulease.daemon.log.place_log import log_place_change
from gpulease.protocol.address import UnixAddress

MODE = 0o660
ROUNDS = 100
TAKERS = 4


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return "d.sock"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def place_at(path: str, stack: ExitStack) -> UnixPlace:
    place = UnixPlace(UnixAddress(path), MODE, log_place_change)
    stack.callback(place.release)
    return place


def bound(place: UnixPlace, stack: ExitStack) -> socket.socket:
    return stack.enter_context(place.bind())


def test_without_the_lock_a_second_one_finds_the_first_by_connecting(path: str, stack: ExitStack) -> None:
    bound(place_at(path, stack), stack)
    os.unlink(f"{path}.lock")
    second = UnixPlace(UnixAddress(path), MODE, log_place_change)
    with pytest.raises(CannotListen, match="another process listens on it"):
        second.bind()
    second.release()
    assert listener_at(path) == os.getpid(), "the first one's is there"


@pytest.mark.parametrize("gone", [("d.sock",), ("d.sock.lock",), ("d.sock", "d.sock.lock")])
def test_what_was_removed_is_made_anew(
    path: str, stack: ExitStack, gone: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    place = place_at(path, stack)
    first = bound(place, stack)
    for name in gone:
        os.unlink(name)
    made = place.restore()
    assert (made is not None) == (path in gone)
    if made is not None:
        first.close()
        stack.enter_context(made)
    assert listener_at(path) == os.getpid()
    assert os.stat(path).st_mode & 0o777 == MODE
    with pytest.raises(CannotListen, match="another gpuleased listens on it"):
        UnixPlace(UnixAddress(path), MODE, log_place_change)
    said = {"d.sock": "a socket's file was removed", "d.sock.lock": "the lock next to a socket was removed"}
    assert len(caplog.records) == len(gone)
    assert all(any(said[name] in message for message in caplog.messages) for name in gone)
    assert place.restore() is None
    assert len(caplog.records) == len(gone)


def test_a_living_process_that_came_to_the_path_keeps_it(
    path: str, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    place = UnixPlace(UnixAddress(path), MODE, log_place_change)
    bound(place, stack)
    os.unlink(path)
    other = stack.enter_context(bound_to_path(path, MODE))
    for _ in range(2):
        assert place.restore() is None
    assert place.problem == (
        "clients can't connect to unix:d.sock: its file was removed, and "
        "can't listen on unix:d.sock: another process listens on it"
    )
    assert len(caplog.records) == 1, "once, not at each look"
    place.release()
    assert listener_at(path) == os.getpid(), "an end removes nothing of another's"
    other.close()


def test_the_place_is_taken_again_as_soon_as_it_is_free(path: str, stack: ExitStack) -> None:
    place = place_at(path, stack)
    bound(place, stack)
    os.unlink(path)
    with bound_to_path(path, MODE):
        assert place.restore() is None
        assert place.problem
    made = place.restore()
    assert made is not None
    stack.enter_context(made)
    assert not place.problem


def test_a_second_one_that_looks_just_now_is_no_problem(
    path: str, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    place = place_at(path, stack)
    bound(place, stack)
    os.unlink(f"{path}.lock")
    second = PlaceLock(UnixAddress(path))
    assert place.restore() is None
    assert (place.problem, caplog.messages) == ("", [])
    second.release()
    place.restore()
    assert os.path.exists(f"{path}.lock")


@pytest.mark.parametrize("backlog", ["full", "free"])
def test_one_that_does_not_accept_is_alive(path: str, stack: ExitStack, backlog: str) -> None:
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(path)
    listener.listen(0)
    if backlog == "full":
        stack.enter_context(socket.socket(socket.AF_UNIX)).connect(path)
    with pytest.raises(CannotListen, match="another process listens on it"):
        place_at(path, stack).bind()


def test_a_socket_of_another_kind_is_left_alone(path: str, stack: ExitStack) -> None:
    stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(path)
    with pytest.raises(
        CannotListen, match=r"it is unknown whether .* \(Protocol wrong type for socket\); if it is not, delete it"
    ):
        place_at(path, stack).bind()
    assert os.path.exists(path)


def test_one_left_by_a_crash_is_replaced(path: str, stack: ExitStack) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
        left.listen()
    bound(place_at(path, stack), stack)
    assert listener_at(path) == os.getpid()


def test_a_given_socket_that_clients_reach_stays(path: str, stack: ExitStack) -> None:
    given = stack.enter_context(bound_to_path(path, 0o600))
    place = UnixPlace(UnixAddress(path), MODE, log_place_change)
    assert place.take(given, set_mode=True) is given
    assert os.stat(path).st_mode & 0o777 == MODE
    assert place.restore() is None
    place.release()
    assert os.path.exists(path), "it is its maker's"


@pytest.mark.parametrize("leads", ["nowhere", "to a socket that nobody serves"])
def test_a_given_socket_that_nobody_reaches_is_replaced(path: str, stack: ExitStack, leads: str) -> None:
    given = bound_to_path(path, MODE)
    os.unlink(path)
    if leads != "nowhere":
        bound_to_path(path, MODE).close()
    made = stack.enter_context(place_at(path, stack).take(given, set_mode=False))
    assert given.fileno() == -1, "closed"
    assert made is not given
    assert listener_at(path) == os.getpid()


def test_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("run")
    place = place_at("run/d.sock", stack)
    bound(place, stack)
    for name in os.listdir("run"):
        os.unlink(f"run/{name}")
    os.rmdir("run")
    assert place.restore() is None
    assert "No such file or directory" in place.problem
    os.mkdir("run")
    made = place.restore()
    assert made is not None
    stack.enter_context(made)
    assert sorted(os.listdir("run")) == ["d.sock", "d.sock.lock"]


# --- the lock ---


def test_a_released_lock_leaves_no_file(tmp_path: Path) -> None:
    address = UnixAddress(str(tmp_path / "d.sock"))
    lock = PlaceLock(address)
    with pytest.raises(CannotListen, match="another gpuleased listens on it"):
        PlaceLock(address)
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
