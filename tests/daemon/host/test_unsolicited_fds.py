"""Descriptors that nobody asked for are refused. faults/test_passed_descriptors tests kernels that can't."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.daemon.host import unsolicited_fds

with socket.socket(socket.AF_UNIX) as tried:
    CAN_REFUSE = unsolicited_fds.refuse_descriptors(tried)


@pytest.fixture(params=["a pair", "a listener"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Who sends, and who has refused."""
    with contextlib.ExitStack() as stack:
        if request.param == "a pair":
            ours, theirs = map(stack.enter_context, socket.socketpair())
            unsolicited_fds.refuse_descriptors(ours)
        else:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(tmp_path / "s"))
            unsolicited_fds.refuse_descriptors(listener)
            listener.listen()
            theirs = stack.enter_context(socket.socket(socket.AF_UNIX))
            theirs.connect(str(tmp_path / "s"))
            ours = stack.enter_context(listener.accept()[0])
        yield theirs, ours


@pytest.mark.skipif(not CAN_REFUSE, reason="this kernel is older than Linux 6.16")
def test_the_kernel_refuses_them_one_way(ends: tuple[socket.socket, socket.socket]) -> None:
    theirs, ours = ends
    with pytest.raises(PermissionError):
        socket.send_fds(theirs, [b"x"], [0])
    theirs.sendall(b"y")
    assert ours.recv(9) == b"y"
    socket.send_fds(ours, [b"z"], [0])
    _, fds, _, _ = socket.recv_fds(theirs, 9, 1)
    assert len(fds) == 1
    socket.close(fds[0])
