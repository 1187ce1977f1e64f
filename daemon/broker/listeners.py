"""The sockets that the broker listens on: its own, or those that the service manager passed to it.

TCP is bound to loopback only, because it is neither encrypted nor authenticated. `tls_frontend` listens for TLS.

The code after `Listeners` makes a Unix socket's folder, and explains why the daemon can't listen on an address.
"""

import asyncio
import errno
import inspect
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.host.socket_activation import CannotListen
from gpulease.daemon.host.unix_place import BACKLOG, UnixPlace
from gpulease.daemon.host.unsolicited_fds import refuse_descriptors
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.place_log import log_place_change
from gpulease.daemon.log.writer import log_event
from gpulease.protocol.address import DEFAULT_ADDRESS, Address, TcpAddress, UnixAddress


class NeverListens(CannotListen):
    """The daemon can't listen on an address, and a restart won't help until the host or the settings are changed."""

    usual_status = os.EX_CONFIG


class Listeners:
    """All listening sockets of one broker.

    Args:
        factory: Makes the protocol of an accepted connection.
        socket_mode: The permissions of Unix sockets.
    """

    def __init__(self, factory: Callable[[], asyncio.BaseProtocol], socket_mode: int) -> None:
        self._factory = factory
        self._socket_mode = socket_mode
        self._servers: list[asyncio.Server] = []
        self._places: list[tuple[UnixPlace, asyncio.Server]] = []
        self._keeps_files = False
        self._bound: list[tuple[Address, int]] = []

    @property
    def bound(self) -> list[tuple[Address, int]]:
        """The sockets made here: each one's address in the settings, and its descriptor."""
        return list(self._bound)

    def leave_paths(self) -> None:
        """Keep the sockets' files on `close`, because another process keeps the sockets open."""
        self._keeps_files = True

    def problem(self) -> str:
        """Return why clients can't connect at an address that the daemon listens on; "" while they can."""
        return next((place.problem for place, _ in self._places if place.problem), "")

    async def restore(self) -> list[Address]:
        """Make Unix sockets again if their files were removed; to be called periodically. Returns their addresses."""
        recreated: list[Address] = []
        for number, (place, server) in enumerate(self._places):
            sock = place.restore()
            if sock is not None:
                self._places[number] = (place, await self._serve_unix(sock))
                # Accepted connections continue. Without a name, no client can reach the old socket any more.
                server.close()
                self._bound = [bound for bound in self._bound if bound[0] != place.address]
                self._bound.append((place.address, sock.fileno()))
                recreated.append(place.address)
        return recreated

    async def listen(
        self, address: UnixAddress | TcpAddress, sockets: Sequence[socket.socket] = (), *, set_mode: bool = True
    ) -> UnixAddress | TcpAddress:
        """Listen on one more address. Returns it with the port that the kernel chose. Raises CannotListen.

        Args:
            address: Port 0 means any free port.
            sockets: Sockets that listen there already.
            set_mode: Whether to set the permissions of a given Unix socket.
        """
        try:
            if isinstance(address, UnixAddress):
                return await self._listen_unix(address, sockets, set_mode)
            return await self._listen_tcp(address, sockets)
        except OSError as error:
            raise cannot_listen(f"listen on {address}", error) from None

    def close(self) -> None:
        """Stop listening and remove the sockets' files. Accepted connections continue."""
        for server in self._servers:
            server.close()
        for place, server in self._places:
            server.close()
            place.release(keep_file=self._keeps_files)
        self._servers, self._places, self._bound = [], [], []

    async def _listen_unix(self, address: UnixAddress, sockets: Sequence[socket.socket], set_mode: bool) -> UnixAddress:
        # The folder of a given socket belongs to whoever made the socket.
        if not sockets:
            prepare_place(address, self._socket_mode)
        place = UnixPlace(address, self._socket_mode, log_place_change)
        try:
            sock = place.take(sockets[0], set_mode=set_mode) if sockets else place.bind()
            refuse_descriptors(sock)
            server = await self._serve_unix(sock)
        except BaseException:
            place.release()
            raise
        self._places.append((place, server))
        # Sockets that were made here are stored with the service manager, for the next daemon.
        if sock not in sockets:
            self._bound.append((address, sock.fileno()))
        return address

    async def _serve_unix(self, sock: socket.socket) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        # From Python 3.13 on, asyncio removes the file when the server is closed. Prevent that: the caller decides
        # whether it may be removed.
        takes = inspect.signature(loop.create_unix_server).parameters
        options: dict[str, Any] = {"cleanup_socket": False} if "cleanup_socket" in takes else {}
        return await loop.create_unix_server(self._factory, sock=sock, backlog=BACKLOG, **options)

    async def _listen_tcp(self, address: TcpAddress, sockets: Sequence[socket.socket]) -> TcpAddress:
        loop = asyncio.get_running_loop()
        # Bind here, because create_server silently skips address families for which it may not make a socket.
        for sock in sockets or await self._bind_tcp(address):
            _check_loopback(address, str(sock.getsockname()[0]))
            port = int(sock.getsockname()[1])
            self._servers.append(await loop.create_server(self._factory, sock=sock, backlog=BACKLOG))
        return TcpAddress(address.host, port)

    async def _bind_tcp(self, address: TcpAddress) -> list[socket.socket]:
        """Bind every address of the name to one port, except for address families that this host lacks."""
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        port, bound, lacking = address.port, list[socket.socket](), list[OSError]()
        # All addresses of a name get the port of the first, which the kernel may have chosen.
        for family, sockaddr in sorted({(entry[0], entry[4]) for entry in infos}):
            _check_loopback(address, str(sockaddr[0]))
            try:
                bound.append(bound_at(family, (sockaddr[0], port, *sockaddr[2:])))
            except OSError as error:
                # A host without IPv6 still serves IPv4. Any other error must be reported, after releasing the sockets
                # that were bound.
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


def bound_at(family: int, sockaddr: tuple[Any, ...]) -> socket.socket:
    """Return a TCP socket that listens at an address of the family. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Otherwise the socket would accept IPv4 as well, and the IPv4 address could not be bound.
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(sockaddr)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _check_loopback(address: TcpAddress, host: str) -> None:
    if not ipaddress.ip_address(host).is_loopback:
        raise NeverListens(
            f"can't listen on {address}: plain TCP is only for loopback, and {host} is not a loopback "
            "address; use tls: for other hosts"
        )


# --- the folder of a Unix socket ---

OWN_FOLDER: Final = Path(DEFAULT_ADDRESS.removeprefix("unix:")).parent
"""The only folder that the daemon creates, because /run is empty after a reboot. Any other missing folder may be a
typing error, and tenants would not find the socket there."""

_WRITABLE: Final = "a drop-in (systemctl edit gpuleased) with ReadWritePaths="


def prepare_place(address: UnixAddress, socket_mode: int) -> None:
    """Check that a socket can be made at a path, and make its folder if that is the daemon's own. Raises CannotListen.

    Users who may write to the socket may enter a folder made here; no others may.
    """
    # Find every problem before the socket is made, so that the operator gets a sentence instead of an errno.
    path = Path(address.path)
    if path.parent == OWN_FOLDER:
        _make_own_folder(path.parent, socket_mode, address)
    try:
        problem = _place_problem(path)
    except PermissionError:
        problem = (
            f"the daemon's user may not enter {path.parent}; give it permission, or choose another address "
            "with --listen"
        )
    if problem:
        raise NeverListens(f"can't listen on {address}: {problem}")


def _make_own_folder(folder: Path, socket_mode: int, address: UnixAddress) -> None:
    try:
        folder.mkdir()
    except FileExistsError:
        return
    except OSError as error:
        raise NeverListens(
            f"can't listen on {address}: the daemon may not create the folder {folder} "
            f"({error.strerror}); create it for the daemon's user, or choose another address with --listen"
        ) from None
    # Users who may write to the socket must be able to enter the folder (execute) and list it (read).
    mode = sum(5 << shift for shift in (3, 0) if socket_mode >> shift & 2) | 0o700
    # Set the mode here and not in mkdir(2), where the umask reduces it: a service manager sets the umask to 077.
    folder.chmod(mode)
    log_event(LogEvent.DAEMON_MADE_FOLDER, path=str(folder), mode=f"{mode:04o}")


def _place_problem(path: Path) -> str:
    folder = path.parent
    if not folder.exists():
        # Name the topmost missing folder, which is probably the mistyped one.
        missing = next(ancestor for ancestor in (folder, *folder.parents) if ancestor.parent.exists())
        return f"the folder {missing} does not exist; correct the path, or create the folder first"
    if not folder.is_dir():
        return f"{folder} is not a folder; use another path"
    if path.is_symlink() and not path.exists():
        return "it is a symbolic link to nothing; delete it, or use another path"
    if path.is_dir():
        return "it is a folder; add a file name for the socket"
    if path.exists() and not path.is_socket():
        return "a file that is not a socket has this path; move it, or use another path"
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{folder} is read-only for the daemon; use a path in {OWN_FOLDER}, or create {_WRITABLE}{folder}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return (
            f"the daemon's user may not write in {folder}; give it permission, or choose another address with --listen"
        )
    return ""


# --- why an address can't be listened on ---

_NETWORK: Final = (
    "a drop-in (systemctl edit gpuleased) with PrivateNetwork=no and RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6"
)


def cannot_listen(action: str, error: OSError, unit: str = "a .socket unit with that ListenStream=") -> CannotListen:
    """Return the exception for an address, with a sentence for the operator.

    Args:
        action: The clause after "can't".
        error: The error of the kernel, or of the look-up of a name.
        unit: The systemd unit that would pass such a socket to the daemon.
    """
    remedy = _lasting_problem(error, unit)
    if remedy:
        return NeverListens(f"can't {action}: {remedy}")
    # socket.create_server() adds the address to the error, but `doing` has named it already.
    problem = (error.strerror or str(error)).partition(" (while attempting")[0]
    hint = (
        "; end the program that uses it (`ss -ltnp` lists it), or choose another address"
        if error.errno == errno.EADDRINUSE
        else ""
    )
    return CannotListen(f"can't {action}: {problem}{hint}")


def _lasting_problem(error: OSError, unit: str) -> str:
    """Return the change that the operator must make; "" for a problem that may disappear by itself."""
    without = f"no socket unit passes it to the daemon, and {{}}: enable {unit}, or create {_NETWORK}"
    if isinstance(error, socket.gaierror):
        # This error's errno is not the kernel's. A name server may be available again in a moment.
        return "" if _may_make(socket.AF_INET) else without.format("the daemon may not resolve names over a network")
    # Each case names the setting of the service or the host that prevents it.
    match error.errno:
        case errno.EAFNOSUPPORT if _may_make(socket.AF_INET):
            return "this host has no IPv6, or RestrictAddressFamilies= of the service forbids it; use an IPv4 address"
        case errno.EAFNOSUPPORT:
            return without.format("the daemon may not create network sockets")
        case errno.EADDRNOTAVAIL if _has_only_loopback():
            return without.format("the daemon's network has only a loopback interface")
        case errno.EACCES | errno.EPERM if error.filename:
            return (
                f"the daemon's user may not use {error.filename}; give it permission, or choose another "
                "address with --listen"
            )
        case errno.EACCES | errno.EPERM:
            return (
                f"the daemon may not use it ({error.strerror}); a port below 1024 needs root, or {unit}, "
                "which passes it to the daemon"
            )
        case errno.EROFS:
            return f"the file system is read-only there; use a path in /run/gpulease, or create {_WRITABLE}"
        case errno.EISDIR | errno.ENOTDIR | errno.ELOOP | errno.ENAMETOOLONG:
            # The file may be the lock next to the socket.
            return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror}; use another path"
    return ""


def _may_make(family: socket.AddressFamily) -> bool:
    """Return whether the service manager and the host allow this process to make sockets of a family."""
    try:
        socket.socket(family, socket.SOCK_STREAM).close()
    except OSError as error:
        return error.errno != errno.EAFNOSUPPORT
    return True


def _has_only_loopback() -> bool:
    """Return whether this process has no interface but loopback, as with PrivateNetwork= (network_namespaces(7))."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    # The first two lines are headings (proc(5)).
    return all(line.split(":")[0].strip() == "lo" for line in lines[2:])
