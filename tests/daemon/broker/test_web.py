"""The web process as the broker sees it, where that is not what it seems."""

import asyncio
import socket
import subprocess
import sys
import time

from gpulease.daemon.broker.web import WebDoor
from gpulease.daemon.channel import channel_pair
from gpulease.daemon.sandbox.settings import SandboxSettings
from gpulease.daemon.web.settings import HttpSettings
from gpulease.protocol.address import TcpAddress
from helpers.web_rig import Scene

FLOOD_S = 20
TALKS = f"""
import socket, sys, time, msgpack
channel, message = socket.socket(fileno=int(sys.argv[1])), msgpack.packb({{"op": [[]] * 100_000}})
until = time.monotonic() + {FLOOD_S}
while time.monotonic() < until:
    channel.send(message)
"""


def test_a_web_process_that_never_stops_talking_does_not_keep_the_loop() -> None:
    async def run(ours: socket.socket) -> float:
        door = WebDoor(
            HttpSettings(TcpAddress("127.0.0.1", 0)), SandboxSettings(), lambda _: asyncio.Protocol(), Scene()
        )
        ours.setblocking(False)
        door._channel = ours
        loop = asyncio.get_running_loop()
        await loop.sock_recv(ours, 1)
        loop.add_reader(ours, door._read)
        begun_s = time.monotonic()
        for _ in range(20):
            await asyncio.sleep(0.01)
        loop.remove_reader(ours)
        return time.monotonic() - begun_s

    ours, theirs = channel_pair()
    command = [sys.executable, "-c", TALKS, str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.DEVNULL) as process:
        theirs.close()
        try:
            assert asyncio.run(run(ours)) < FLOOD_S / 2
        finally:
            process.kill()
