"""Why an address can't be listened on: what the operator is to do, and whether a later start may find it otherwise."""

import errno
import os
import socket
from pathlib import Path
from typing import Final

DROP_IN: Final = (
    "a drop-in (systemctl edit gpuleased) with PrivateNetwork=no and RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6"
)

WRITABLE: Final = "a drop-in (systemctl edit gpuleased) with ReadWritePaths="


class CannotListen(Exception):
    """An address that can't be listened on; the message is a sentence for the operator."""


class NeverListens(CannotListen):
    """One that no later start can listen on either, unless somebody changes something."""

    status = os.EX_CONFIG


def cannot_listen(doing: str, error: OSError, unit: str = "a .socket unit with that ListenStream=") -> CannotListen:
    """Why not, in a sentence.

    Args:
        doing: What was tried, behind "can't".
        error: What the kernel, or the look-up of a name, says.
        unit: Which unit would hand such a socket over.
    """
    why = _never(error, unit)
    if why:
        return NeverListens(f"can't {doing}: {why}")
    # socket.create_server() says the address, too, which `doing` has named already.
    what = (error.strerror or str(error)).partition(" (while attempting")[0]
    then = "; end who has it (`ss -ltnp` names them), or take another" if error.errno == errno.EADDRINUSE else ""
    return CannotListen(f"can't {doing}: {what}{then}")


def _never(error: OSError, unit: str) -> str:
    """What somebody has to change; "" for what may pass by itself."""
    without = f"no socket unit hands it over, and {{}}: enable {unit}, or make {DROP_IN}"
    if isinstance(error, socket.gaierror):
        # Of another kind of number than the kernel's; a server of names may be back in a moment.
        return "" if _may_make(socket.AF_INET) else without.format("the daemon may not look names up in a network")
    match error.errno:
        case errno.EAFNOSUPPORT if _may_make(socket.AF_INET):
            return "this host, or RestrictAddressFamilies= of the service, does without IPv6; name an IPv4 address"
        case errno.EAFNOSUPPORT:
            return without.format("the daemon may make no network sockets")
        case errno.EADDRNOTAVAIL if _is_apart():
            return without.format("the daemon has no network of its own but loopback")
        case errno.EACCES | errno.EPERM if error.filename:
            return f"the daemon's user may not use {error.filename}; let it, or --listen elsewhere"
        case errno.EACCES | errno.EPERM:
            return (
                f"the daemon may not have it ({error.strerror}); a port below 1024 is root's, or {unit} hands it over"
            )
        case errno.EROFS:
            return f"files are read-only there; name a place in /run/gpulease, or make {WRITABLE}"
        case errno.ENOTDIR | errno.ELOOP | errno.ENAMETOOLONG:
            return f"{error.strerror}; name another path"
    return ""


def _may_make(family: socket.AddressFamily) -> bool:
    """Whether this process may make such sockets at all: the service manager, or the host, may be against it."""
    try:
        socket.socket(family, socket.SOCK_STREAM).close()
    except OSError as error:
        return error.errno != errno.EAFNOSUPPORT
    return True


def _is_apart() -> bool:
    """Whether this process sees no interface but loopback, as with PrivateNetwork= (network_namespaces(7))."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    # Two lines of headings (proc(5)).
    return all(line.split(":")[0].strip() == "lo" for line in lines[2:])
