"""A link that is cut drops bytes in both directions, and closes no connection."""

import socket

import pytest

from .cuttable_link import CuttableLink


def test_a_link_carries_both_ways_until_it_is_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = CuttableLink(f"127.0.0.1:{server.getsockname()[1]}")
        host, _, port = link.endpoint.partition(":")
        with socket.create_connection((host, int(port))) as near:
            far, _ = server.accept()
            with far:
                for one, other in ((near, far), (far, near)):
                    one.sendall(b"ping")
                    assert other.recv(4) == b"ping"
                link.cut()
                near.sendall(b"lost")
                far.sendall(b"lost")
                for end in (near, far):
                    end.settimeout(0.2)
                    with pytest.raises(TimeoutError):
                        end.recv(4)
                link.close()
                near.settimeout(60)
                assert near.recv(4) == b""
