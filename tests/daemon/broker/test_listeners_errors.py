"""The sentence for each reason not to listen, and whether a later start may succeed."""

import errno
import os
import shutil
import socket
import subprocess
import sys

import pytest

from gpulease.daemon.broker.listeners import NeverListens, cannot_listen
from helpers.daemon import python_environment

BIND = """
import fcntl, socket, struct
from gpulease.daemon.broker.listeners import cannot_listen
from gpulease.daemon.broker.listeners import bound_at
with socket.socket() as up:
    # Loopback is down in a new namespace (netdevice(7): SIOCSIFFLAGS, IFF_UP).
    fcntl.ioctl(up, 0x8914, struct.pack("16sh", b"lo", 1))
try:
    bound_at(socket.AF_INET, ("192.0.2.1", 0))
except OSError as error:
    said = cannot_listen("listen on it", error, "gpulease-tls.socket")
    print(type(said).__name__, said)
"""


@pytest.mark.parametrize(
    ("number", "path", "never", "says"),
    [
        (errno.EADDRINUSE, None, False, "can't listen on it: Address already in use; end the program that uses it"),
        (errno.EADDRNOTAVAIL, None, False, "can't listen on it: Cannot assign requested address"),
        (errno.EMFILE, None, False, "can't listen on it: Too many open files"),
        (errno.ENOSPC, "/run/d.sock.lock", False, "can't listen on it: No space left on device"),
        (errno.EAFNOSUPPORT, None, True, "this host has no IPv6, .*; use an IPv4 address"),
        (errno.EACCES, None, True, "a port below 1024 needs root, or gpulease-x.socket"),
        (errno.EACCES, "/d.sock.lock", True, "may not use /d.sock.lock; give it permission, or choose another address"),
        (errno.EROFS, "/usr/d.sock.lock", True, "read-only there.*ReadWritePaths="),
        (errno.ELOOP, "/x", True, "/x: Too many levels of symbolic links; use another path"),
        (errno.EISDIR, "/d.sock.lock", True, "can't listen on it: /d.sock.lock: Is a directory; use another path"),
        (errno.ENAMETOOLONG, None, True, "can't listen on it: File name too long; use another path"),
    ],
)
def test_each_reason(number: int, path: str | None, never: bool, says: str) -> None:
    error = OSError(number, os.strerror(number)) if path is None else OSError(number, os.strerror(number), path)
    said = cannot_listen("listen on it", error, "gpulease-x.socket")
    assert isinstance(said, NeverListens) == never
    assert said.status == (os.EX_CONFIG if never else os.EX_UNAVAILABLE)
    with pytest.raises(type(said), match=says):
        raise said


def test_a_name_that_is_not_known_may_be_later() -> None:
    said = cannot_listen("listen on it", socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))
    assert not isinstance(said, NeverListens)
    assert str(said) == "can't listen on it: Temporary failure in name resolution"


def test_an_address_of_the_hosts_where_the_daemon_has_no_network() -> None:
    """As in a service with PrivateNetwork=, of which a drop-in has allowed the sockets alone."""
    alone = ("unshare", "--net", "--map-root-user")
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    command = [*alone, sys.executable, "-P", "-c", BIND]
    said = subprocess.run(command, env=python_environment(), capture_output=True, text=True, check=True).stdout
    assert said.startswith(
        "NeverListens can't listen on it: no socket unit passes it to the daemon, and the daemon's network"
    )
    assert "enable gpulease-tls.socket, or create a drop-in (systemctl edit gpuleased)" in said
