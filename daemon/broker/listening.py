"""The sockets the broker listens on: its own, or those that the service manager handed over.

TCP is bound to loopback only: it is neither encrypted nor authenticated. Where TLS is spoken, `remote` listens.
"""

import asyncio
import contextlib
import errno
import inspect
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.broker.cannot_listen import NeverListens, cannot_listen
from gpulease.daemon.broker.socket_places import PlaceLock, prepare_place
from gpulease.daemon.uninvited import refuse_descriptors
from gpulease.protocol.address import Address, TcpAddress, UnixAddress

BACKLOG: Final = 512
"""Connections the kernel keeps until they are accepted; the kernel's own limit may be lower."""


class Listeners:
    """All listening sockets of one broker."""

    def __init__(self, factory: Callable[[], asyncio.BaseProtocol], socket_mode: int) -> None:
        self._factory = factory
        self._socket_mode = socket_mode
        self._servers: list[asyncio.Server] = []
        self._paths: list[str] = []
        self._locks: list[PlaceLock] = []
        self._bound: list[tuple[Address, int]] = []

    @property
    def bound(self) -> list[tuple[Address, int]]:
        """The descriptors of the sockets that were made here, each with its address as it was asked for."""
        return list(self._bound)

    def leave_paths(self) -> None:
        """Somebody else keeps the sockets open: their files stay when they are closed here."""
        self._paths.clear()

    async def listen(
        self, address: UnixAddress | TcpAddress, given: Sequence[socket.socket] = (), *, set_mode: bool = True
    ) -> UnixAddress | TcpAddress:
        """Listen on one more address; returns it with the port the kernel chose. Raises CannotListen.

        `given`: sockets that listen there already. `set_mode`: whether a Unix one's permissions are to be set.
        """
        try:
            if isinstance(address, UnixAddress):
                return await self._listen_unix(address, given, set_mode)
            return await self._listen_tcp(address, given)
        except OSError as error:
            raise cannot_listen(f"listen on {address}", error) from None

    def close(self) -> None:
        """Stop listening and remove the sockets' files; connections that were accepted go on."""
        for server in self._servers:
            server.close()
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        for lock in self._locks:
            lock.release()
        self._servers, self._paths, self._locks, self._bound = [], [], [], []

    async def _listen_unix(self, address: UnixAddress, given: Sequence[socket.socket], set_mode: bool) -> UnixAddress:
        if not given:
            prepare_place(address, self._socket_mode)
        self._locks.append(PlaceLock(address))
        if given:
            (sock,) = given
            if set_mode:
                os.chmod(address.path, self._socket_mode)
        else:
            sock = self._bind_unix(address)
            self._paths.append(address.path)
            self._bound.append((address, sock.fileno()))
        refuse_descriptors(sock)
        loop = asyncio.get_running_loop()
        # From Python 3.13 on asyncio removes the file when the server is closed; here it is known whether it may be.
        takes = inspect.signature(loop.create_unix_server).parameters
        options: dict[str, Any] = {"cleanup_socket": False} if "cleanup_socket" in takes else {}
        self._servers.append(await loop.create_unix_server(self._factory, sock=sock, backlog=BACKLOG, **options))
        return address

    def _bind_unix(self, address: UnixAddress) -> socket.socket:
        path = Path(address.path)
        if path.is_socket():
            # The lock is ours, so whoever made this socket is gone.
            path.unlink()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            refuse_descriptors(sock)
            sock.bind(address.path)
            os.chmod(address.path, self._socket_mode)
            # At once: who sees the file may connect.
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
        return sock

    async def _listen_tcp(self, address: TcpAddress, given: Sequence[socket.socket]) -> TcpAddress:
        loop = asyncio.get_running_loop()
        # Not by its own way of binding: that leaves out, and says nothing of it, what it may make no socket for.
        for sock in given or await self._bind_tcp(address):
            _check_loopback(address, str(sock.getsockname()[0]))
            port = int(sock.getsockname()[1])
            self._servers.append(await loop.create_server(self._factory, sock=sock, backlog=BACKLOG))
        return TcpAddress(address.host, port)

    async def _bind_tcp(self, address: TcpAddress) -> list[socket.socket]:
        """For every address of its name, with one port; not for one of a family that this host is without."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        port, bound, lacking = address.port, list[socket.socket](), list[OSError]()
        for family, where in sorted({(entry[0], entry[4]) for entry in found}):
            _check_loopback(address, str(where[0]))
            try:
                bound.append(bound_at(family, (where[0], port, *where[2:])))
            except OSError as error:
                if error.errno == errno.EAFNOSUPPORT:
                    lacking.append(error)
                    continue
                for sock in bound:
                    sock.close()
                raise
            port = int(bound[0].getsockname()[1])
        if not bound:
            raise lacking[0]
        self._bound += [(address, sock.fileno()) for sock in bound]
        return bound


def bound_at(family: int, where: tuple[Any, ...]) -> socket.socket:
    """A TCP socket that listens there. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(where)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _check_loopback(address: TcpAddress, host: str) -> None:
    if not ipaddress.ip_address(host).is_loopback:
        raise NeverListens(
            f"can't listen on {address}: plain TCP is for loopback only, and {host} is not a loopback address;"
            " use tls: for others"
        )
