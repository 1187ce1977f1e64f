import asyncio
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease.daemon.broker.listeners import Listeners
from gpulease.daemon.host.socket_activation import CannotListen
from gpulease.protocol.address import TcpAddress, UnixAddress


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="gpul-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "d.sock"


class Greeter(asyncio.Protocol):
    """Says who it is and closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"here")
        transport.close()


def serving(body: Callable[[Listeners], Coroutine[Any, Any, None]], mode: int = 0o600) -> None:
    """Run `body` with listeners that are closed afterwards."""

    async def main() -> None:
        listeners = Listeners(Greeter, mode)
        try:
            await body(listeners)
        finally:
            listeners.close()

    asyncio.run(main())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def greeting(address: UnixAddress | TcpAddress) -> bytes:
    if isinstance(address, UnixAddress):
        reader, writer = await asyncio.open_unix_connection(address.path)
    else:
        reader, writer = await asyncio.open_connection(address.host, address.port)
    said = await reader.read()
    writer.close()
    await writer.wait_closed()
    return said


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_a_unix_socket_and_its_mode(path: Path, mode: int) -> None:
    async def body(listeners: Listeners) -> None:
        address = UnixAddress(str(path))
        assert await listeners.listen(address) == address
        assert mode_of(path) == mode
        assert await greeting(address) == b"here"

    serving(body, mode)
    assert not path.exists()


def test_a_socket_in_use_is_not_taken(path: Path) -> None:
    async def body(listeners: Listeners) -> None:
        address = UnixAddress(str(path))
        await listeners.listen(address)
        second = Listeners(Greeter, 0o600)
        with pytest.raises(CannotListen, match="another gpuleased listens on it"):
            await second.listen(address)
        second.close()
        assert await greeting(address) == b"here"

    serving(body)


def test_a_socket_left_behind_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))

    async def body(listeners: Listeners) -> None:
        await listeners.listen(UnixAddress(str(path)))
        assert await greeting(UnixAddress(str(path))) == b"here"

    serving(body)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_socket_is_left_alone(path: Path, kind: str) -> None:
    if kind == "file":
        path.write_text("precious")
    else:
        path.mkdir()

    async def body(listeners: Listeners) -> None:
        with pytest.raises(CannotListen, match=r"can't listen on unix:"):
            await listeners.listen(UnixAddress(str(path)))

    serving(body)
    assert path.is_dir() or path.read_text() == "precious"


def test_the_same_path_again_after_a_close(path: Path) -> None:
    async def body(listeners: Listeners) -> None:
        for _ in range(3):
            await listeners.listen(UnixAddress(str(path)))
            listeners.close()
        assert not os.listdir(path.parent)

    serving(body)


def test_the_port_the_kernel_chose() -> None:
    async def body(listeners: Listeners) -> None:
        address = await listeners.listen(TcpAddress("127.0.0.1", 0))
        assert isinstance(address, TcpAddress)
        assert address.port > 0
        assert await greeting(address) == b"here"
        with pytest.raises(CannotListen, match="can't listen on tcp:127"):
            await Listeners(Greeter, 0).listen(address)

    serving(body)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "2001:db8::1", "::ffff:192.0.2.1"])
def test_tcp_beyond_loopback(host: str) -> None:
    async def body(listeners: Listeners) -> None:
        with pytest.raises(CannotListen, match="only for loopback"):
            await listeners.listen(TcpAddress(host, 0))

    serving(body)


def test_a_name_nobody_knows() -> None:
    async def body(listeners: Listeners) -> None:
        with pytest.raises(CannotListen, match="no-such-host"):
            await listeners.listen(TcpAddress("no-such-host.invalid", 0))

    serving(body)
