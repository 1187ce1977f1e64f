import os
import socket

import pytest

from gpulease.daemon.broker.peer import ANONYMOUS_TENANT, Peer, identify


def test_a_unix_peer_is_who_the_kernel_says() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        peer = identify(ours)
    assert peer == Peer(f"uid:{os.getuid()}", is_operator=True, is_known=True)
    assert "operator" in str(peer)


def test_a_tcp_peer_is_nobody() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as theirs,
        server.accept()[0] as ours,
    ):
        assert identify(ours) == identify(theirs) == Peer(ANONYMOUS_TENANT, is_operator=False, is_known=False)


@pytest.mark.parametrize(
    ("peer", "is_stranger"),
    [(Peer("ann", False, True), False), (Peer("bob", True, True), True), (Peer("ann", False, False), True)],
    ids=["its own", "another", "who may be anybody"],
)
def test_who_is_a_stranger_to_a_tenant(peer: Peer, is_stranger: bool) -> None:
    assert peer.is_stranger_to("ann") is is_stranger


def test_a_user_with_a_tenants_name() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert identify(ours, {os.getuid(): "ann"}) == Peer("ann", is_operator=True, is_known=True)
        assert identify(ours, {os.getuid() + 1: "ann"}).tenant == f"uid:{os.getuid()}"
