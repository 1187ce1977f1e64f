"""What a relay that was taken over can still reach: tried in a process that is shut in as one."""

import json
import platform
import subprocess
import sys

import pytest

from gpulease.daemon.sandbox import landlock
from helpers.daemon import python_environment

TRY = """
import json, os, signal, socket, subprocess, sys
from gpulease.daemon.remote.relay import confine
attempts = {
    "read a file": lambda: open("/etc/passwd").read(),
    "list a folder": lambda: os.listdir("/"),
    "signal its parent": lambda: os.kill(os.getppid(), 0),
    "a TCP socket": lambda: socket.socket(socket.AF_INET),
    "a process": os.fork,
    "a program": lambda: os.execv("/bin/true", ["true"]),
    "what it is for": lambda: (ends[0].send(b"x"), ends[1].recv(1)),
}
ends = socket.socketpair()
confine(tuple(end.fileno() for end in ends))
said = {}
for name, attempt in attempts.items():
    try:
        attempt()
        said[name] = "done"
    except PermissionError:
        said[name] = "EPERM"
sys.stdout.write(json.dumps(said))
"""


def has_landlock() -> bool:
    try:
        return landlock.abi() >= landlock.FILES_SINCE
    except OSError:
        return False


@pytest.mark.skipif(platform.machine() != "x86_64" or not has_landlock(), reason="this host lacks a measure")
def test_a_relay_reaches_nothing_but_its_connection() -> None:
    command = [sys.executable, "-P", "-c", TRY]
    done = subprocess.run(command, capture_output=True, text=True, env=python_environment(), check=True, timeout=60)
    said = json.loads(done.stdout)
    assert said.pop("what it is for") == "done"
    assert set(said.values()) == {"EPERM"}, said
