"""A local peer sends descriptors to the broker.

The last process that closes a descriptor may have to wait for the close.
"""

import contextlib
import socket

import pytest

from gpulease.protocol import Opcode
from gpulease.protocol.messages import Ping
from helpers.daemon import Daemon, Faults
from helpers.raw_peer import RawPeer, frame_of
from helpers.slow_to_close import slow_to_close

pytestmark = pytest.mark.exhaustive

BEFORE_LINUX_6_16 = {"gpulease.daemon.host.unsolicited_fds:SO_PASSRIGHTS": 0xFFFF}
"""With a number that no kernel has, the option SO_PASSRIGHTS is missing, as before Linux 6.16."""

REQUESTS_BEFORE = 500


@pytest.mark.parametrize("constants", [{}, BEFORE_LINUX_6_16], ids=["this kernel", "an older one"])
def test_one_that_takes_long_to_close_holds_nobody_up(constants: dict[str, int]) -> None:
    daemon = Daemon(faults=Faults(constants))
    try:
        daemon.wait_until_it_answers()
        with RawPeer(daemon.address).hello() as other, RawPeer(daemon.address).hello() as peer, slow_to_close() as slow:
            ping = frame_of(Opcode.PING, Ping(1), 2)
            # While the broker serves these, this process closes its own descriptor, before the broker receives its
            # copy.
            peer.sock.sendall(REQUESTS_BEFORE * ping)
            with contextlib.suppress(PermissionError):
                socket.send_fds(peer.sock, [ping], [slow.fileno()])
                # Now the daemon has the last one.
                slow.close()
            assert other.request(Opcode.PING, Ping(2)) == Ping(2)
    finally:
        daemon.stop()
