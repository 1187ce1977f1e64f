"""Listening sockets that the service manager passes when it starts the daemon: sd_listen_fds(3).

A .socket unit's sockets belong to the service manager: it created them and set their owner and mode. Other sockets were
created by an earlier daemon, which left them in the service manager's file descriptor store (FDSTORE=1, sd_notify(3)),
under a name (FDNAME) that identifies them. With either kind, a client that connects while no daemon runs waits instead
of being refused.
"""

import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from gpulease.daemon.host.cannot_start import CannotStart, Misconfigured
from gpulease.protocol.address import Address, UnixAddress

FIRST_FD: Final = 3
"""SD_LISTEN_FDS_START."""

MAX_HANDED_OVER: Final = 256
"""Maximum number of passed sockets. A larger number is a mistake: no settings name so many addresses."""

MAX_DIGITS: Final = 6
"""Maximum number of digits of the number of sockets, so that Python does not convert a text of any length before it is
checked."""

KEPT_PREFIX: Final = "kept-by-gpuleased-"
"""Prefix of the names (FDNAME) of sockets in the file descriptor store. No unit's name begins with it."""

_COUNT: Final = "LISTEN_FDS"
_PROCESS: Final = "LISTEN_PID"
_NAMES: Final = "LISTEN_FDNAMES"


class CannotListen(CannotStart):
    """The daemon, or one of its processes, can't serve an address. The message is a sentence for the operator."""


class BadHandover(Misconfigured):
    """The passed sockets don't fit the addresses of the settings. The message is a sentence for the operator."""


@dataclass(frozen=True, slots=True)
class GivenSocket:
    """A socket that the service manager passed.

    Attributes:
        name: The name of its unit, or the name under which an earlier daemon stored it.
    """

    sock: socket.socket
    name: str

    @property
    def was_kept(self) -> bool:
        """Whether an earlier daemon created the socket and left it with the service manager, by its name."""
        return self.name.startswith(KEPT_PREFIX)

    def __str__(self) -> str:
        name = self.sock.getsockname()
        place = f"unix:{name}" if self.sock.family == socket.AF_UNIX else f"{name[0]} port {name[1]}"
        return f"{place} ({self.name})" if self.name else place


def kept_name(address: Address) -> str:
    """Return the name under which an address's sockets are stored. It depends only on the address in the settings."""
    return KEPT_PREFIX + blake2b(str(address).encode(), digest_size=8).hexdigest()


def take_sockets(environment: MutableMapping[str, str], pid: int) -> list[GivenSocket]:
    """Return the sockets that the service manager passed to this process.

    The variables are removed from `environment`, and children inherit no descriptor.

    Raises:
        BadHandover: A descriptor is not a listening stream socket.
    """
    process, count, names = (environment.pop(name, "") for name in (_PROCESS, _COUNT, _NAMES))
    if process != str(pid):
        # The sockets are meant for another process, which started this one.
        return []
    if not (count.isascii() and count.isdigit() and len(count) <= MAX_DIGITS) or int(count) > MAX_HANDED_OVER:
        raise BadHandover(f"{_COUNT} must be a number of descriptors, at most {MAX_HANDED_OVER}, not {count[:40]!r}")
    fds = range(FIRST_FD, FIRST_FD + int(count))
    # Names are optional. A list of another length can't be matched, so no socket gets a name.
    fd_names = names.split(":") if names else []
    if len(fd_names) != len(fds):
        fd_names = [""] * len(fds)
    sockets = []
    for fd, name in zip(fds, fd_names, strict=True):
        try:
            # The service manager passes descriptors without close-on-exec; no child of the daemon may inherit them.
            os.set_inheritable(fd, False)
            sockets.append(GivenSocket(_listening(fd), name))
        except OSError:
            subject = f"descriptor {fd}{f' ({name})' if name else ''}"
            raise BadHandover(
                f"{subject}, passed by the service manager, must be a listening stream socket: use "
                "ListenStream= in the .socket unit, without Accept="
            ) from None
    return sockets


def _listening(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    # SO_ACCEPTCONN: whether it listens. A connected socket, as Accept=yes passes it, can't be served here.
    is_stream = sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
    if not is_stream or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.detach()
        raise OSError("not what was expected")
    sock.setblocking(False)
    return sock


@dataclass
class Assigned:
    """The passed sockets, by the address that they serve.

    Attributes:
        stale: Sockets of an earlier daemon whose address the settings have dropped, or whose address has another
            socket.
    """

    by_address: dict[Address, list[GivenSocket]] = field(default_factory=dict)
    stale: list[GivenSocket] = field(default_factory=list)

    def of(self, address: Address) -> list[socket.socket]:
        """Return an address's sockets; an empty list if the daemon has to bind it."""
        return [activated.sock for activated in self.by_address.get(address, [])]

    def kept(self, address: Address) -> list[GivenSocket]:
        """Return the sockets of an address that an earlier daemon created."""
        return [activated for activated in self.by_address.get(address, []) if activated.was_kept]

    def is_units(self, address: Address) -> bool:
        """Return whether an address's sockets are a unit's, which sets their owner and mode."""
        return any(not activated.was_kept for activated in self.by_address.get(address, []))


def assign(sockets: Iterable[GivenSocket], listen: Mapping[Address, Sequence[tuple[str, int]]]) -> Assigned:
    """Assign each socket to an address of the settings.

    Args:
        sockets: The passed sockets.
        listen: The addresses in the settings. Each TCP address has the IP addresses and ports of its name.

    Raises:
        BadHandover: A unit's socket matches no address. It would accept connections that the daemon never answers.
    """
    assigned = Assigned()
    by_kept_name = {kept_name(address): address for address in listen}
    # Take units' sockets first, because a stored socket of the same address gives way.
    for given in sorted(sockets, key=lambda given: given.was_kept):
        if given.was_kept:
            # A stored socket is dropped if its address left the settings, if a unit serves the address now, or if its
            # file is gone.
            owner = by_kept_name.get(given.name)
            units = owner is not None and assigned.is_units(owner)
            if owner is None or units or not _is_there(given, owner):
                assigned.stale.append(given)
                continue
        else:
            # A unit's socket has no stored name: its bound address decides which of the settings' addresses it serves.
            owner = next(
                (address for address, hosts in listen.items() if _answers_for(given.sock, address, hosts)), None
            )
            if owner is None:
                raise BadHandover(
                    f"the service manager passed a socket for {given}, but listen and http name only "
                    f"{', '.join(map(str, listen))}; add the address to the settings, or remove it from "
                    "the .socket unit"
                )
        assigned.by_address.setdefault(owner, []).append(given)
    for address, those in list(assigned.by_address.items()):
        if isinstance(address, UnixAddress) and len(those) > 1:
            # It is unknown to which of them the file at this path leads, so the daemon binds a new one.
            assigned.stale += assigned.by_address.pop(address)
    return assigned


def _is_there(given: GivenSocket, address: Address) -> bool:
    """Return whether clients can still reach a stored socket: the file of a Unix socket may have been removed."""
    if not isinstance(address, UnixAddress):
        return given.sock.family != socket.AF_UNIX
    return given.sock.family == socket.AF_UNIX and os.path.exists(address.path)


def _answers_for(sock: socket.socket, address: Address, hosts: Sequence[tuple[str, int]]) -> bool:
    where = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        # /var/run is /run; the name of a socket without a path is bytes.
        is_path = isinstance(where, str) and isinstance(address, UnixAddress)
        return is_path and os.path.realpath(where) == os.path.realpath(str(getattr(address, "path", "")))
    if isinstance(address, UnixAddress):
        return False
    # A host name in the settings was resolved to addresses; the socket is bound to one of them, or to all interfaces.
    names = [where[0]]
    is_any = sock.family == socket.AF_INET6 and where[0] == "::"
    if is_any and not sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
        # The socket also accepts IPv4: ListenStream= with only a port makes such a socket.
        names.append("0.0.0.0")
    return any((name, int(where[1])) in hosts for name in names)
