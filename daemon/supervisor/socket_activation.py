"""Listening sockets that the service manager hands over when it starts the daemon: sd_listen_fds(3).

They are of two kinds. Those of a .socket unit are the service manager's: it made them, with their owner and mode. The
others this daemon's predecessor made, and left in its keeping (FDSTORE=1 of sd_notify(3)) so that who connects while
there is no daemon waits instead of being refused; these are known by the name they were left under.
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
"""More is no number of addresses, but a mistake; each is looked at."""

MAX_DIGITS: Final = 6
"""Of their number; a number of any length would be made before it is looked at."""

KEPT_PREFIX: Final = "kept-by-gpuleased-"
"""Of the names under which sockets are left in the service manager's keeping (FDNAME). No unit's begins so."""

_COUNT: Final = "LISTEN_FDS"
_PROCESS: Final = "LISTEN_PID"
_NAMES: Final = "LISTEN_FDNAMES"


class BadHandover(Exception):
    """What was handed over is not what the daemon was told to listen on; the message is a sentence for the operator."""


@dataclass(frozen=True, slots=True)
class GivenSocket:
    """One socket that was handed over.

    Attributes:
        name: Its unit's, or the one it was left under.
    """

    sock: socket.socket
    name: str

    @property
    def was_kept(self) -> bool:
        """Whether an earlier daemon made it."""
        return self.name.startswith(KEPT_PREFIX)

    def __str__(self) -> str:
        where = self.sock.getsockname()
        place = f"unix:{where}" if self.sock.family == socket.AF_UNIX else f"{where[0]} port {where[1]}"
        return f"{place} ({self.name})" if self.name else place


def kept_name(address: Address) -> str:
    """The name under which an address's sockets are left; the same for the same words in the settings."""
    return KEPT_PREFIX + blake2b(str(address).encode(), digest_size=8).hexdigest()


def take_sockets(environment: MutableMapping[str, str], pid: int) -> list[GivenSocket]:
    """What was handed over to this process; the variables are taken out, and children inherit no descriptor.

    Raises BadHandover: a descriptor is something else than a listening stream socket.
    """
    process, count, names = (environment.pop(name, "") for name in (_PROCESS, _COUNT, _NAMES))
    if process != str(pid):
        # Meant for another, whose child this is.
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
    """Which of the sockets that were handed over an address is listened at by.

    Attributes:
        stale: Those that an earlier daemon left for addresses that are not listened on any more, or twice.
    """

    by_address: dict[Address, list[GivenSocket]] = field(default_factory=dict)
    stale: list[GivenSocket] = field(default_factory=list)

    def of(self, address: Address) -> list[socket.socket]:
        """An address's; none if it is to be bound."""
        return [given.sock for given in self.by_address.get(address, [])]

    def is_units(self, address: Address) -> bool:
        """Whether they are a unit's: owner and mode are not this daemon's to say."""
        return any(not given.was_kept for given in self.by_address.get(address, []))


def assign(given: Iterable[GivenSocket], listen: Mapping[Address, Sequence[tuple[str, int]]]) -> Assigned:
    """Whose socket each is. `listen`: the addresses of the settings, TCP ones with what their names stand for.

    Raises BadHandover for a unit's socket that no address names: it would be open, and nobody would answer.
    """
    assigned = Assigned()
    by_kept_name = {kept_name(address): address for address in listen}
    # A unit's first: what an earlier daemon left for the same address gives way.
    for one in sorted(given, key=lambda one: one.was_kept):
        if one.was_kept:
            owner = by_kept_name.get(one.name)
            units = owner is not None and assigned.is_units(owner)
            if owner is None or units or not _is_there(one, owner):
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
    for address, those in list(assigned.by_address.items()):
        if isinstance(address, UnixAddress) and len(those) > 1:
            # Of one path: nobody can tell which of them its file leads to.
            assigned.stale += assigned.by_address.pop(address)
    return assigned


def _is_there(one: GivenSocket, address: Address) -> bool:
    """Whether a socket that was left can still be reached: a Unix one's file may have been taken away."""
    if not isinstance(address, UnixAddress):
        return one.sock.family != socket.AF_UNIX
    return one.sock.family == socket.AF_UNIX and os.path.exists(address.path)


def _answers_for(sock: socket.socket, address: Address, hosts: Sequence[tuple[str, int]]) -> bool:
    where = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        # /var/run is /run; a socket without a path has a name of bytes.
        is_path = isinstance(where, str) and isinstance(address, UnixAddress)
        return is_path and os.path.realpath(where) == os.path.realpath(str(getattr(address, "path", "")))
    if isinstance(address, UnixAddress):
        return False
    names = [where[0]]
    is_any = sock.family == socket.AF_INET6 and where[0] == "::"
    if is_any and not sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY):
        # It takes IPv4 too: what ListenStream= with a port alone makes.
        names.append("0.0.0.0")
    return any((name, int(where[1])) in hosts for name in names)
