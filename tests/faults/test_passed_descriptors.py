"""A local peer that sends the broker descriptors: whoever is the last to have one is held up by closing it."""

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
"""No kernel has an option of that number."""

REQUESTS_BEFORE = 500


@pytest.mark.parametrize("constants", [{}, BEFORE_LINUX_6_16], ids=["this kernel", "an older one"])
def test_one_that_takes_long_to_close_holds_nobody_up(constants: dict[str, int]) -> None:
    daemon = Daemon(faults=Faults(constants))
    try:
        daemon.wait_until_it_answers()
        with RawPeer(daemon.address).hello() as other, RawPeer(daemon.address).hello() as peer, slow_to_close() as slow:
            ping = frame_of(Opcode.PING, Ping(1), 2)
            # Busy with these, it comes to the descriptor once this process has closed its own.
            peer.sock.sendall(REQUESTS_BEFORE * ping)
            with contextlib.suppress(PermissionError):
                socket.send_fds(peer.sock, [ping], [slow.fileno()])
                # The last one is the daemon's.
                slow.close()
            assert other.request(Opcode.PING, Ping(2)) == Ping(2)
    finally:
        daemon.stop()
