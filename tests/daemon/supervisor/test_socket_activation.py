"""Sockets that the service manager hands over: which are taken, whose each is, and what is refused."""

import contextlib
import fcntl
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest

from gpulease.client import GpuBuilder, GpuSession
from gpulease.client.cli.service import UNITS
from gpulease.client.sync.driver import ask
from gpulease.daemon.host import socket_activation
from gpulease.daemon.host.socket_activation import BadHandover, GivenSocket, assign, kept_name, take_sockets
from gpulease.protocol import Opcode
from gpulease.protocol.address import Address, UnixAddress, parse_address
from gpulease.protocol.messages import Ping
from helpers.daemon import python_environment
from helpers.kernels import check_main_job
from helpers.service_manager import ServiceManager
from helpers.waiting import wait_until

PLACE = 200
"""Where descriptors lie in these tests: the first ones are pytest's."""

PID = 77


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpul-", dir="/tmp") as name:
        yield Path(name)


def unix_listener(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen()
    return sock


def tcp_listener(host: str = "127.0.0.1") -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")


def place(*socks: socket.socket) -> None:
    """Have each where it is looked for, and nowhere else."""
    for number, sock in enumerate(socks, start=PLACE):
        assert fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD, number) == number
        sock.close()


def variables(count: int, names: str = "", pid: int = PID) -> dict[str, str]:
    return {"LISTEN_PID": str(pid), "LISTEN_FDS": str(count), "LISTEN_FDNAMES": names}


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(socket_activation, "FIRST_FD", PLACE)
    yield
    for fd in range(PLACE, PLACE + 4):
        with contextlib.suppress(OSError):
            os.close(fd)


def test_all_are_taken_with_their_names(folder: Path) -> None:
    place(unix_listener(folder / "a"), tcp_listener())
    environment = variables(2, "gpuleased.socket:other")
    given = take_sockets(environment, PID)
    assert environment == {}
    assert [(one.name, one.sock.family, one.was_kept) for one in given] == [
        ("gpuleased.socket", socket.AF_UNIX, False),
        ("other", socket.AF_INET, False),
    ]
    assert str(given[0]) == f"unix:{folder}/a (gpuleased.socket)"
    assert not any(os.get_inheritable(one.sock.fileno()) for one in given)
    for one in given:
        one.sock.close()


@pytest.mark.parametrize("environment", [{}, variables(2, pid=PID + 1), {"LISTEN_FDS": "2"}], ids=str)
def test_what_is_another_process_s_is_left(environment: dict[str, str]) -> None:
    assert take_sockets(environment, PID) == []
    assert environment == {}


@pytest.mark.parametrize("count", ["", "-1", "two", "257", "9999999999", "000000999999999999", "0" * 6 + "9" * 5000])
def test_a_count_that_is_none(count: str) -> None:
    with pytest.raises(BadHandover, match="LISTEN_FDS must be"):
        take_sockets({"LISTEN_PID": str(PID), "LISTEN_FDS": count}, PID)


@pytest.mark.parametrize("kind", ["datagram", "connected", "unbound", "file", "closed"])
def test_what_is_no_listening_socket(kind: str, folder: Path) -> None:
    if kind == "datagram":
        place(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    elif kind == "connected":
        ours, theirs = socket.socketpair()
        place(ours)
        theirs.close()
    elif kind == "unbound":
        place(socket.socket(socket.AF_INET))
    elif kind == "file":
        fd = os.open(folder, os.O_RDONLY)
        os.dup2(fd, PLACE)
        os.close(fd)
    with pytest.raises(BadHandover, match=rf"descriptor {PLACE} \(a.socket\).* must be a listening stream socket"):
        take_sockets(variables(1, "a.socket"), PID)


def hosts(*texts: str) -> dict[Address, list[tuple[str, int]]]:
    """Addresses as the settings have them; numbers stand for themselves."""
    found: dict[Address, list[tuple[str, int]]] = {}
    for text in texts:
        address = parse_address(text)
        found[address] = [] if isinstance(address, UnixAddress) else [(address.host, address.port)]
    return found


@pytest.mark.parametrize(
    ("bound", "listen"),
    [
        ("127.0.0.1", "tcp:127.0.0.1:{}"),
        ("127.0.0.1", "tls:127.0.0.1:{}"),
        ("::1", "tls:[::1]:{}"),
        ("::", "tls:[::]:{}"),
        ("::", "tls:0.0.0.0:{}"),
    ],
)
def test_a_socket_is_the_address_s_that_names_it(bound: str, listen: str) -> None:
    with tcp_listener(bound) as sock:
        text = listen.format(sock.getsockname()[1])
        assigned = assign([GivenSocket(sock, "a.socket")], hosts("unix:/nowhere", text))
        assert assigned.of(parse_address(text)) == [sock]
        assert assigned.is_units(parse_address(text))
        assert assigned.of(parse_address("unix:/nowhere")) == []


def test_a_path_is_the_same_by_another_way(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "var").symlink_to(folder / "run")
    with unix_listener(folder / "run" / "d") as sock:
        address = parse_address(f"unix:{folder}/var/d")
        assert assign([GivenSocket(sock, "")], {address: []}).of(address) == [sock]


@pytest.mark.parametrize("listen", ["unix:/elsewhere", "tcp:127.0.0.1:1"])
def test_a_unit_s_socket_that_nobody_names(folder: Path, listen: str) -> None:
    with unix_listener(folder / "d") as sock, pytest.raises(BadHandover) as raised:
        assign([GivenSocket(sock, "gpuleased.socket")], hosts(listen))
    assert str(raised.value) == (
        f"the service manager passed a socket for unix:{folder}/d (gpuleased.socket), but listen and http name only"
        f" {listen}; add the address to the settings, or remove it from the .socket unit"
    )


@pytest.mark.parametrize("unit", sorted(UNITS.glob("*.socket")), ids=lambda unit: unit.name)
def test_no_unit_of_ours_is_taken_for_what_a_daemon_left(unit: Path, folder: Path) -> None:
    """Systemd names what it hands over by its unit (systemd.socket(5), FileDescriptorName=)."""
    with unix_listener(folder / "d") as sock:
        address = parse_address(f"unix:{folder}/d")
        assert assign([GivenSocket(sock, unit.name)], {address: []}).is_units(address)


def test_what_an_earlier_daemon_left(folder: Path) -> None:
    here, gone, moved = (parse_address(f"unix:{folder}/{name}") for name in ("here", "gone", "moved"))
    with unix_listener(folder / "here") as a, unix_listener(folder / "gone") as b, unix_listener(folder / "moved") as c:
        (folder / "gone").unlink()
        left = [GivenSocket(sock, kept_name(address)) for sock, address in ((a, here), (b, gone), (c, moved))]
        assigned = assign(left, {here: [], gone: []})
        assert assigned.of(here) == [a]
        assert not assigned.is_units(here)
        assert [one.sock for one in assigned.stale] == [b, c]
        # Twice for one path: it can't be told which of them is reached by it.
        assert assign([left[0], left[0]], {here: []}).of(here) == []
        # A unit's own goes first.
        both = assign([left[0], GivenSocket(a, "gpuleased.socket")], {here: []})
        assert both.of(here) == [a]
        assert both.stale == [left[0]]


# --- a daemon, started so ---


@pytest.mark.exhaustive
def test_a_unit_s_socket_is_served_as_it_is(manager: ServiceManager) -> None:
    with unix_listener(manager.path) as sock, tcp_listener() as tcp:
        manager.path.chmod(0o640)
        port = tcp.getsockname()[1]
        manager.start_ready("--listen", f"tcp:127.0.0.1:{port}", units=[(sock, "gpuleased.socket"), (tcp, "tcp")])
        assert manager.path.stat().st_mode & 0o777 == 0o640, "its mode is the unit's to say"
        for address in (manager.address, f"tcp:127.0.0.1:{port}"):
            assert ask(Opcode.PING, Ping(7), address) == Ping(7)
        assert manager.kept == {}, "what is a unit's is kept by its unit"
        assert manager.end() == 0
    assert manager.path.exists(), "the socket is not the daemon's to remove"


@pytest.mark.exhaustive
def test_a_socket_that_listen_does_not_name(manager: ServiceManager) -> None:
    with unix_listener(manager.folder / "other") as sock:
        manager.start(units=[(sock, "gpuleased.socket")])
        assert manager.wait_for_exit() == 78
    assert f"gpuleased: the service manager passed a socket for unix:{manager.folder}/other" in manager.log()


@pytest.mark.exhaustive
def test_what_is_no_socket_is_told_before_anything_is_begun(manager: ServiceManager) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        manager.start(units=[(sock, "gpuleased.socket")])
        assert manager.wait_for_exit() == 78
    (said,) = manager.said
    assert said.startswith("STATUS=descriptor 3 (gpuleased.socket), passed by the service manager, must be a listening")


@pytest.mark.exhaustive
def test_who_connects_while_the_daemon_restarts_waits(manager: ServiceManager) -> None:
    config = f'state = "{manager.folder}/state"\non_stop = "keep"\nsocket_mode = "0600"\n'
    manager.start_ready("--listen", "tcp:127.0.0.1:0", config=config)
    assert set(manager.kept) == {kept_name(parse_address(manager.address)), kept_name(parse_address("tcp:127.0.0.1:0"))}
    with manager.builder().acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
        for number in (signal.SIGKILL, signal.SIGTERM):
            manager.end(number)
            with socket.socket(socket.AF_UNIX) as waiting:
                # There is no daemon.
                waiting.connect(str(manager.path))
                manager.start_ready("--listen", "tcp:127.0.0.1:0", config=config.replace("0600", "0620"))
                check_main_job(session)
                with manager.builder().acquire() as other, GpuSession(other) as another:
                    check_main_job(another)
        assert manager.path.stat().st_mode & 0o777 == 0o620
    assert manager.end(signal.SIGINT) == 0
    ports = re.findall(r"listens on tcp:127\.0\.0\.1:(\d+)\n", manager.log())
    assert (len(ports), len(set(ports))) == (3, 1), "the port stays, too"


@pytest.mark.exhaustive
def test_what_is_not_listened_on_any_more_is_let_go(manager: ServiceManager) -> None:
    manager.start_ready("--listen", f"unix:{manager.folder}/other")
    manager.end(signal.SIGKILL)
    manager.start_ready()
    assert set(manager.kept) == {kept_name(parse_address(manager.address))}
    assert manager.said.count("FDSTORE=1") == 0, "what is kept already need not be sent again"
    assert manager.end() == 0


@pytest.mark.exhaustive
def test_a_socket_made_anew_is_the_one_that_is_kept(manager: ServiceManager) -> None:
    manager.start_ready()
    manager.path.unlink()
    # The one that clients reach no more goes first.
    manager.wait_for("FDSTOREREMOVE=1")
    manager.wait_for("FDSTORE=1", times=2)
    ((kept,),) = manager.kept.values()
    manager.end(signal.SIGKILL)
    with socket.socket(socket.AF_UNIX) as client, socket.socket(fileno=os.dup(kept)) as listener:
        client.connect(str(manager.path))
        assert select.select([listener], [], [], 60)[0], "whoever connects meanwhile waits for the next daemon"
    manager.start_ready()
    assert ask(Opcode.PING, Ping(7), manager.address) == Ping(7)
    assert manager.end() == 0


@pytest.mark.exhaustive
@pytest.mark.skipif(which("systemd-socket-activate") is None, reason="systemd-socket-activate is not installed")
def test_systemd_starts_it_at_the_first_connection(folder: Path) -> None:
    path, log = folder / "d.sock", folder / "log"
    command = ["systemd-socket-activate", "--listen", str(path), "--setenv=PYTHONPATH", "--fdname=gpuleased.socket"]
    command += [sys.executable, "-P", "-m", "gpulease.daemon", "--driver", "cpu", "--listen", f"unix:{path}"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=python_environment()
        )
    try:
        wait_until(lambda: "Listening on" in log.read_text(), "systemd listens")
        assert "gpulease" not in log.read_text(), "nothing is started before somebody comes"
        with GpuBuilder(f"unix:{path}").min_vram(1 << 20).acquire() as lease, GpuSession(lease) as session:
            check_main_job(session)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
