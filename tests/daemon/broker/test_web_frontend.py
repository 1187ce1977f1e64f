"""A taken-over web process that floods the broker with messages."""

import asyncio
import socket
import subprocess
import sys
import time

import pytest

from gpulease.daemon.broker.web_actions import MAX_WRONG_TOKENS
from gpulease.daemon.broker.web_frontend import WebFrontend
from gpulease.daemon.host.ipc import channel_pair
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.daemon.web.http_settings import HttpSettings
from gpulease.protocol.address import TcpAddress
from helpers.web_rig import Scene

FLOOD_S = 120
TALKS = f"""
import socket, sys, time, msgpack
channel, message = socket.socket(fileno=int(sys.argv[1])), msgpack.packb(eval(sys.argv[2]))
until = time.monotonic() + {FLOOD_S}
while time.monotonic() < until:
    channel.send(message)
"""


NONSENSE = """{"op": [[]] * 100_000}"""
GUESS = """{"op": "revoke", "number": 1, "lease_id": "0" * 32, "reason": "x" * 512, "token": b"t" * 4096}"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("message", "most"), [(NONSENSE, 0), (GUESS, MAX_WRONG_TOKENS)], ids=["nonsense", "guesses"])
def test_a_web_process_that_never_stops_talking_does_not_keep_the_loop(message: str, most: int) -> None:
    scene = Scene()

    async def run(ours: socket.socket) -> float:
        frontend = WebFrontend(
            HttpSettings(TcpAddress("127.0.0.1", 0)), SandboxSettings(), lambda _: asyncio.Protocol(), scene
        )
        ours.setblocking(False)
        frontend._process._channel = ours
        loop = asyncio.get_running_loop()
        await loop.sock_recv(ours, 1)
        loop.add_reader(ours, frontend._process._read)
        begun_s = time.monotonic()
        for _ in range(20):
            await asyncio.sleep(0.01)
        loop.remove_reader(ours)
        return time.monotonic() - begun_s

    ours, theirs = channel_pair()
    command = [sys.executable, "-c", TALKS, str(theirs.fileno()), message]
    with ours, subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.DEVNULL) as process:
        theirs.close()
        try:
            assert asyncio.run(run(ours)) < FLOOD_S / 2
        finally:
            process.kill()
    assert scene.revoked == []
    assert min(most, 1) <= len(scene.refusals) <= most, "nor does it guess, or fill the log"
