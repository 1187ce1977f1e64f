"""`python -m gpulease.daemon.relay CHANNEL_FD PARENT_PID MAX_RELAYS FILES...`: started by the broker, never by hand."""

import logging
import signal
import socket
import sys

from gpulease.daemon.channel import ChannelClosed, send_message
from gpulease.daemon.processes import die_with_parent, set_name
from gpulease.daemon.relay.gate import Gate, get_ready
from gpulease.daemon.relay.identity import BadIdentity, IdentityFiles


def main(channel_fd: int, parent_pid: int, max_relays: int, files: list[str]) -> int:
    """Read the files, say ready, serve. Returns the exit status."""
    die_with_parent(parent_pid)
    set_name("gpul-gate")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    channel = socket.socket(fileno=channel_fd)
    try:
        gate = Gate(channel, IdentityFiles.from_arguments(files), max_relays)
        get_ready()
        send_message(channel, {"op": "ready"})
        gate.run()
    except BadIdentity as error:
        send_message(channel, {"op": "broken", "reason": str(error)})
        return 1
    except ChannelClosed:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
