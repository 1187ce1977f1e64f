"""Addresses at which a server listens, and sockets that it replaces."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.client import InvalidRequest
from gpulease.client.serve.http.uvicorn_server import listening


@pytest.fixture
def path() -> Iterator[Path]:
    # Not pytest's tmp_path: a Unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="gpul-", dir="/tmp") as folder:
        yield Path(folder) / "s"


@pytest.mark.parametrize(
    "address", ["tcp:0.0.0.0:0", "tcp:10.1.2.3:80", "tcp:example.org:80", "tcp:[::]:0", "tls:127.0.0.1:1", "8080"]
)
def test_only_where_this_host_alone_can_connect(address: str) -> None:
    with pytest.raises(InvalidRequest), listening(address):
        pass


def test_its_url() -> None:
    with listening("tcp:127.0.0.1:0") as (sock, url):
        assert url == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_a_socket_that_was_left_is_taken_and_one_in_use_is_not(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with listening(f"unix:{path}") as (_, url):
        assert url == f"http+unix://{path}"
        with pytest.raises(InvalidRequest, match="in use"), listening(f"unix:{path}"):
            pass
        assert path.exists()
    assert not path.exists()


def test_what_is_no_socket_stays(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(InvalidRequest), listening(f"unix:{path}"):
        pass
    assert path.read_text() == "mine"
