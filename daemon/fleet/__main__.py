"""`python -m gpulease.daemon.fleet CHANNEL_FD PARENT_PID`: the broker starts it."""

import asyncio
import signal
import socket
import sys
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.endpoints import BadEtcdSettings
from gpulease.daemon.fleet.process import FleetProcess
from gpulease.daemon.fleet.rules.fleet_events import FleetIdentity, FleetTerms
from gpulease.daemon.fleet.rules.member import Member
from gpulease.daemon.host.ipc import ChannelClosed, close_all, receive_message, send_message
from gpulease.daemon.host.processes import die_with_parent, set_name
from gpulease.daemon.log.writer import go_on_logging

INSTANCE_BYTES: Final = 8
"""Random bytes that tell this process's writes from those of every other of the node."""


def main(channel_fd: int, parent_pid: int) -> int:
    """Receive the settings from the broker, and serve. Returns the exit status."""
    die_with_parent(parent_pid)
    set_name("gpul-fleet")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    go_on_logging("fleet", opens_own=False)
    channel = socket.socket(fileno=channel_fd)
    try:
        start, fds = receive_message(channel)
        close_all(fds)
        asyncio.run(_serve(start, channel))
    except ChannelClosed:
        return 0
    except (BadEtcdSettings, OSError) as error:
        send_message(channel, {"op": "broken", "reason": str(error)})
        return 1
    return 0


async def _serve(start: dict[str, Any], channel: socket.socket) -> None:
    """Raises ChannelClosed, or BadEtcdSettings for a certificate that can't be read."""
    client = EtcdClient(etcd_settings(start))
    try:
        terms, identity = FleetTerms(horizon_s=start["horizon_s"]), FleetIdentity(**start["identity"])
        member = Member(start["node"], terms, start["incarnation"], identity, instance=token_hex(INSTANCE_BYTES))
        await FleetProcess(member, client, channel).run()
    finally:
        await client.close()


def etcd_settings(start: dict[str, Any]) -> EtcdSettings:
    """Return the way to etcd that the broker's first message names."""
    files = (None if start[name] is None else Path(start[name]) for name in ("ca", "certificate", "key"))
    ca_file, cert_file, key_file = files
    return EtcdSettings(tuple(start["etcd"]), ca_file, cert_file, key_file, timeout_s=start["timeout_s"])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
