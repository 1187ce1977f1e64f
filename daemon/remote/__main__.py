"""`python -m gpulease.daemon.remote CHANNEL_FD PARENT_PID MAX MAX_PER_TENANT FILES...`: the broker starts it."""

import signal
import socket
import sys

if __name__ == "__main__":
    from gpulease.imports import begin_imports

    begin_imports()

from gpulease.daemon.contract.messages import HelperBroken, Ready
from gpulease.daemon.host.ipc import ChannelClosed, send_message
from gpulease.daemon.host.processes import die_with_parent, set_name
from gpulease.daemon.log.writer import go_on_logging
from gpulease.daemon.remote.acceptor import TlsAcceptor, get_ready
from gpulease.daemon.remote.node_identity import BadIdentity, IdentityFiles
from gpulease.imports import end_imports


def main(channel_fd: int, parent_pid: int, max_relays: int, max_relays_per_tenant: int, files: list[str]) -> int:
    """Read the files, report ready, and serve. Returns the exit status."""
    die_with_parent(parent_pid)
    set_name("gpul-gate")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    go_on_logging("gate")
    channel = socket.socket(fileno=channel_fd)
    try:
        acceptor = TlsAcceptor(channel, IdentityFiles.from_arguments(files), max_relays, max_relays_per_tenant)
        get_ready()
        send_message(channel, Ready().to_map())
        acceptor.run()
    except BadIdentity as error:
        send_message(channel, HelperBroken(str(error)).to_map())
        return 1
    except ChannelClosed:
        return 0
    return 0


if __name__ == "__main__":
    end_imports()
    channel, parent, most, most_per_tenant = map(int, sys.argv[1:5])
    sys.exit(main(channel, parent, most, most_per_tenant, sys.argv[5:]))
