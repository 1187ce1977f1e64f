"""What a fleet process that was taken over can still reach: tried in a process that is shut in as one."""

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from gpulease.daemon.sandbox import landlock
from helpers.daemon import python_environment

TRY: Final = """
import json, os, pathlib, signal, socket, sys, threading
from gpulease.daemon.fleet.__main__ import needs_of
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.daemon.sandbox.trial import prepare
folder, etcd, other, local = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]

def connect(endpoint):
    host, _, port = endpoint.rpartition(":")
    with socket.socket() as sock:
        sock.connect((host, int(port)))

def listen():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()

def run(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

attempts = {
    "connect to etcd": lambda: connect(etcd),
    "resolve a name": lambda: socket.getaddrinfo(b"localhost", 1),
    "read the resolver's settings": lambda: open("/etc/hosts").read(),
    "a socket to ask for names": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
    "run a thread": lambda: run(lambda: None),
    "tell the broker": lambda: (ends[0].send(b"x"), ends[1].recv(1)),
    "read a file of anybody's": lambda: (folder / "readable").read_text(),
    "write a file of anybody's": lambda: (folder / "writable").write_text("x"),
    "make a file": lambda: (folder / "new").write_text("x"),
    "write to /etc": lambda: open("/etc/gpulease-test", "w"),
    "list the root": lambda: os.listdir("/"),
    "read another process's environment": lambda: open(f"/proc/{os.getppid()}/environ").read(),
    "open a device": lambda: open("/dev/zero", "rb"),
    "connect elsewhere": lambda: connect(other),
    "serve": listen,
    "a local socket": lambda: socket.socket(socket.AF_UNIX).connect(local),
    "a local datagram": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", local),
    "a raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    "a netlink socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "a process": os.fork,
    "a program": lambda: os.execv("/bin/true", ["true"]),
    "signal its parent": lambda: os.kill(os.getppid(), 0),
}
ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
plan, findings = prepare(SandboxSettings(), needs_of([etcd]), lambda _: ())
parent = os.getppid()
plan.enter([end.fileno() for end in ends], parent)
said = {}
for name, attempt in attempts.items():
    try:
        attempt()
        said[name] = "done"
    except OSError as error:
        said[name] = "refused" if isinstance(error, PermissionError) else repr(error)
on = [finding.measure.value for finding in findings if finding.is_on]
sys.stdout.write(json.dumps({"said": said, "on": on}))
"""

MAY: Final = {
    "connect to etcd",
    "resolve a name",
    "read the resolver's settings",
    "a socket to ask for names",
    "run a thread",
    "tell the broker",
}


def has_all_measures() -> bool:
    try:
        return landlock.abi() >= landlock.SCOPE_SINCE and platform.machine() == "x86_64"
    except OSError:
        return False


@pytest.fixture
def listeners() -> Iterator[list[str]]:
    """Two places to connect to; only the first is etcd's."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    yield [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Anybody's, and all above it, too: what stops the process must not be who it belongs to."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.mark.skipif(not has_all_measures(), reason="this host lacks a measure")
def test_it_reaches_etcd_and_names_and_nothing_else(folder: Path, listeners: list[str]) -> None:
    for name in ("readable", "writable"):
        (folder / name).write_text(name)
        (folder / name).chmod(0o666)
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(str(folder / "sock"))
        local.listen()
        (folder / "sock").chmod(0o666)
        command = [sys.executable, "-P", "-c", TRY, str(folder), *listeners, str(folder / "sock")]
        done = subprocess.run(command, capture_output=True, text=True, env=python_environment(), timeout=60, check=True)
    told = json.loads(done.stdout)
    said = told["said"]
    assert {name for name in said if said[name] == "done"} == MAY, said
    assert {said[name] for name in said.keys() - MAY} == {"refused"}, said
    assert {path.name for path in folder.iterdir()} == {"readable", "writable", "sock"}
    assert (folder / "writable").read_text() == "writable"
    assert ("user" in told["on"]) == (os.geteuid() == 0)
    assert {"network", "files", "syscalls"} <= set(told["on"])
