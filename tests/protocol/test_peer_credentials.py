import os
import socket

from gpulease.protocol.peer_credentials import UCRED_BYTES, PeerCredentials, parse_ucred


def test_the_kernel_reports_the_process_at_the_other_end() -> None:
    here, there = socket.socketpair()
    with here, there:
        ucred = here.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED_BYTES)
    assert parse_ucred(ucred) == PeerCredentials(os.getpid(), os.geteuid(), os.getegid())
