"""Listening sockets that the service manager hands over when it starts the daemon: sd_listen_fds(3).

There are two kinds. The service manager made the sockets of a .socket unit, with their owner and mode. An earlier
daemon made the others and stored them with the service manager (FDSTORE=1 of sd_notify(3)). So a client that connects
while no daemon runs waits instead of being refused. The daemon recognises stored sockets by the name it gave them.
"""

import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from gpulease.protocol.address import Address, UnixAddress

FIRST_FD: Final = 3
"""SD_LISTEN_FDS_START."""

MAX_HANDED_OVER: Final = 256
"""More descriptors are a mistake; the daemon checks each."""

MAX_DIGITS: Final = 6
"""The digits of the descriptors' count. Python would convert a number of any length before the check."""

KEPT_PREFIX: Final = "kept-by-gpuleased-"
"""The prefix of stored sockets' names (FDNAME). No unit's name begins so."""

_COUNT: Final = "LISTEN_FDS"
_PROCESS: Final = "LISTEN_PID"
_NAMES: Final = "LISTEN_FDNAMES"


class BadHandover(Exception):
    """A handed over descriptor is no socket of the daemon's addresses; the message is a sentence for the operator."""


@dataclass(frozen=True, slots=True)
class GivenSocket:
    """A socket that the service manager handed over.

    Attributes:
        sock: The listening socket.
        name: The name of its unit, or the name under which it was stored.
    """

    sock: socket.socket
    name: str

    @property
    def was_kept(self) -> bool:
        """True if an earlier daemon made the socket."""
        return self.name.startswith(KEPT_PREFIX)

    def __str__(self) -> str:
        where = self.sock.getsockname()
        place = f"unix:{where}" if self.sock.family == socket.AF_UNIX else f"{where[0]} port {where[1]}"
        return f"{place} ({self.name})" if self.name else place


def kept_name(address: Address) -> str:
    """Return the name under which an address's sockets are stored. It depends on the words of the settings alone."""
    return KEPT_PREFIX + blake2b(str(address).encode(), digest_size=8).hexdigest()


def take_sockets(environment: MutableMapping[str, str], pid: int) -> list[GivenSocket]:
    """Return the sockets handed over to this process.

    Removes the variables from the environment, and keeps children from inheriting the descriptors. Raises BadHandover
    for a descriptor that is no listening stream socket.
    """
    process, count, names = (environment.pop(name, "") for name in (_PROCESS, _COUNT, _NAMES))
    if process != str(pid):
        # The variables are meant for another process, whose child this is.
        return []
    if not (count.isascii() and count.isdigit() and len(count) <= MAX_DIGITS) or int(count) > MAX_HANDED_OVER:
        raise BadHandover(f"{_COUNT} is {count[:40]!r}: it must be a number of descriptors, {MAX_HANDED_OVER} at most")
    fds = range(FIRST_FD, FIRST_FD + int(count))
    known = names.split(":") if names else []
    if len(known) != len(fds):
        known = [""] * len(fds)
    given = []
    for fd, name in zip(fds, known, strict=True):
        try:
            os.set_inheritable(fd, False)
            given.append(GivenSocket(_listening(fd), name))
        except OSError:
            what = f"descriptor {fd}{f' ({name})' if name else ''}"
            raise BadHandover(
                f"{what}, which the service manager handed over, is no listening stream socket:"
                " ListenStream= in the .socket unit, without Accept="
            ) from None
    return given


def _listening(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    is_stream = sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
    if not is_stream or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.detach()
        raise OSError("not what was expected")
    sock.setblocking(False)
    return sock


@dataclass
class Assigned:
    """The handed over sockets, by the addresses that the daemon listens on.

    Attributes:
        by_address: The sockets of each address.
        stale: Stored sockets of addresses that the settings no longer name, and duplicates.
    """

    by_address: dict[Address, list[GivenSocket]] = field(default_factory=dict)
    stale: list[GivenSocket] = field(default_factory=list)

    def of(self, address: Address) -> list[socket.socket]:
        """Return an address's sockets; none if the daemon must bind it."""
        return [given.sock for given in self.by_address.get(address, [])]

    def is_units(self, address: Address) -> bool:
        """Return whether an address's sockets are a unit's, which sets their owner and mode."""
        return any(not given.was_kept for given in self.by_address.get(address, []))


def assign(given: Iterable[GivenSocket], listen: Mapping[Address, Sequence[tuple[str, int]]]) -> Assigned:
    """Assign each handed over socket to an address.

    Args:
        given: The sockets.
        listen: The addresses of the settings; TCP addresses with the hosts and ports that their names resolve to.

    Raises BadHandover for a unit's socket that no address names: it would be open, and nobody would answer.
    """
    assigned = Assigned()
    by_kept_name = {kept_name(address): address for address in listen}
    # Units' sockets come first: a stored socket of the same address is dropped for them.
    for one in sorted(given, key=lambda one: one.was_kept):
        if one.was_kept:
            owner = by_kept_name.get(one.name)
            units = owner is not None and assigned.is_units(owner)
            if owner is None or units or not _is_reachable(one, owner):
                assigned.stale.append(one)
                continue
        else:
            owner = next((address for address, hosts in listen.items() if _answers_for(one.sock, address, hosts)), None)
            if owner is None:
                raise BadHandover(
                    f"the service manager handed over a socket at {one}, which neither listen nor http names:"
                    f" there are {', '.join(map(str, listen))}; name it there, or take it out of the .socket unit"
                )
        assigned.by_address.setdefault(owner, []).append(one)
    for address, sockets in list(assigned.by_address.items()):
        if isinstance(address, UnixAddress) and len(sockets) > 1:
            # Nobody can tell to which of several sockets the file leads.
            assigned.stale += assigned.by_address.pop(address)
    return assigned


def _is_reachable(one: GivenSocket, address: Address) -> bool:
    """Return whether clients can still reach a stored socket. Somebody may have removed a Unix socket's file."""
    if not isinstance(address, UnixAddress):
        return one.sock.family != socket.AF_UNIX
    return one.sock.family == socket.AF_UNIX and os.path.exists(address.path)


def _answers_for(sock: socket.socket, address: Address, hosts: Sequence[tuple[str, int]]) -> bool:
    where = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        # /var/run is a link to /run. A socket without a path has bytes as its name.
        is_path = isinstance(where, str) and isinstance(address, UnixAddress)
        return is_path and os.path.realpath(where) == os.path.realpath(str(getattr(address, "path", "")))
    if isinstance(address, UnixAddress):
        return False
    names = [where[0]]
    is_any = sock.family == socket.AF_INET6 and where[0] == "::"
    if is_any and not sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
        # The socket takes IPv4 too; ListenStream= with a port alone makes such sockets.
        names.append("0.0.0.0")
    return any((name, int(where[1])) in hosts for name in names)
