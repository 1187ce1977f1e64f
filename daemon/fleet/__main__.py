"""The fleet process: `python -m gpulease.daemon.fleet CHANNEL_FD PARENT_PID SANDBOX`, which the broker starts.

The process parses etcd's answers, so it runs in the workers' sandbox. It may connect only to etcd's ports. The broker
opens the certificate files and sends the descriptors.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from secrets import token_hex
from typing import Final

if __name__ == "__main__":
    from gpulease.imports import begin_imports

    begin_imports()

from gpulease.daemon.contract.message_fields import MalformedMessage, expect_message
from gpulease.daemon.contract.messages import HelperBroken
from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.endpoints import BadEtcdSettings, port_of
from gpulease.daemon.fleet.etcd.etcd_certificates import Certificates, received_certificates
from gpulease.daemon.fleet.fleet_messages import START, FleetStart
from gpulease.daemon.fleet.machine_readings import MachineReadings
from gpulease.daemon.fleet.process import INSTANCE_BYTES, FleetProcess
from gpulease.daemon.fleet.rules.fleet_events import FleetTerms
from gpulease.daemon.fleet.rules.member import Member
from gpulease.daemon.host.ipc import ChannelClosed, close_all, receive_message, send_message
from gpulease.daemon.host.processes import die_with_parent, set_name
from gpulease.daemon.log.writer import go_on_logging
from gpulease.daemon.sandbox.measures import SandboxNeeds, SandboxSettings, SandboxUnavailable
from gpulease.daemon.sandbox.trial import prepare
from gpulease.imports import end_imports

MAX_PRIVATE_BYTES: Final = 2 << 30
"""Maximum private memory of the process in bytes, whatever etcd answers. The process normally uses about 80 MiB, and 8
MiB of addresses for each of gRPC's threads. Hosts with more cores have more threads."""

DNS_PORT: Final = 53

RESOLVER: Final = Path("/etc/resolv.conf")

RANDOM: Final = Path("/dev/urandom")
"""gRPC's library reads random numbers from this device, and ends the process if it can't."""

_LIBRARIES: Final = tuple(map(Path, ("/lib", "/lib64", "/usr/lib", "/usr/lib64")))
"""Folders of the C library, which loads its name resolution modules at the first look-up."""


def main(channel_fd: int, parent_pid: int, sandbox: SandboxSettings) -> int:
    """Receive the settings from the broker, enter the sandbox, and serve. Returns the exit status."""
    die_with_parent(parent_pid)
    set_name("gpul-fleet")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    go_on_logging("fleet", reopens=False)
    # Receive the settings. Nothing is read from etcd before the process is in the sandbox.
    channel = socket.socket(fileno=channel_fd)
    try:
        # Keep the open certificate files, because the process can't open files later.
        received, fds = receive_message(channel)
        files = SentFiles()
        try:
            start = expect_message(START, received)
            files.take(start.files, fds)
        finally:
            close_all(fds)
        # Open the machine's clocks while /dev and /proc are still reachable.
        readings = MachineReadings()
        # Enter the sandbox before the client is created. gRPC starts threads with its first channel, and threads that
        # exist already would stay outside.
        plan, _ = prepare(sandbox, needs_of(start.etcd), lambda _: ())
        plan.enter((channel_fd, *readings.fds), parent_pid)
        asyncio.run(_serve(start, files, channel, readings))
    except ChannelClosed:
        return 0
    except (BadEtcdSettings, MalformedMessage, SandboxUnavailable, OSError) as error:
        send_message(channel, HelperBroken(str(error)).to_map())
        return 1
    return 0


class SentFiles:
    """The open certificate files that the broker sent last."""

    def __init__(self) -> None:
        self._last: Certificates | None = None

    def take(self, names: Sequence[str], fds: Sequence[int]) -> None:
        """Read the passed open files, named by `names`. They stay open. Raises BadEtcdSettings."""
        self._last = received_certificates(names, fds)

    def read(self) -> Certificates | None:
        return self._last


def needs_of(endpoints: Sequence[str]) -> SandboxNeeds:
    """Return the access that the process needs inside the sandbox: etcd's ports, and the files for name resolution.

    Other programs replace these files by new ones with the same names, so the sandbox has the whole folders.
    """
    ports = {DNS_PORT, *map(port_of, endpoints)}
    readable = (RESOLVER.parent, RESOLVER.resolve().parent, RANDOM, *_LIBRARIES)
    return SandboxNeeds(readable=readable, private_bytes=MAX_PRIVATE_BYTES, tcp_ports=tuple(sorted(ports)))


async def _serve(start: FleetStart, files: SentFiles, channel: socket.socket, readings: MachineReadings) -> None:
    """Serve the broker. Raises ChannelClosed when the broker's channel closes."""
    # gRPC's threads start here, inside the sandbox.
    client = EtcdClient(EtcdSettings(start.etcd, timeout_s=start.timeout_s), files.read)
    try:
        member = Member(
            start.node,
            FleetTerms(horizon_s=start.horizon_s),
            start.incarnation,
            start.identity,
            start.mark,
            instance=token_hex(INSTANCE_BYTES),
            history_s=start.history_s,
        )
        await FleetProcess(member, client, channel, files.take, readings).run()
    finally:
        readings.close()
        await client.close()


if __name__ == "__main__":
    end_imports()
    fd, parent = map(int, sys.argv[1:3])
    sys.exit(main(fd, parent, SandboxSettings.from_text(sys.argv[3])))
