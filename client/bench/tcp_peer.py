"""A plain TCP stream, the baseline for bulk copies over TCP.

Two processes share one connection on loopback. Each process only sends from one buffer, or receives into one. `python
-m gpulease.client.bench.tcp_peer PORT BYTES` runs the far end.
"""

import socket
import subprocess
import sys
from typing import Final

from gpulease.client.bench.figures import gigabytes_per_s

COPIES: Final = 15
_TIMEOUT_S: Final = 60.0
_READ: Final = b"r"
_WRITE: Final = b"w"


def stream_rates(sizes: tuple[int, ...]) -> dict[str, float]:
    """Return the median throughput over loopback in 1e9 bytes/s.

    The figures are `write_Nm_gb_s` and `read_Nm_gb_s` for each size of N MiB (`sizes` is in bytes). A write includes
    the far end's one-byte acknowledgement. Raises ConnectionError if the far end closes the connection during a copy.
    """
    figures: dict[str, float] = {}
    for size in sizes:
        # The far end is another process, as a remote daemon would be.
        with socket.create_server(("127.0.0.1", 0)) as server:
            command = [
                sys.executable,
                "-P",
                "-m",
                "gpulease.client.bench.tcp_peer",
                str(server.getsockname()[1]),
                str(size),
            ]
            peer = subprocess.Popen(command)
            server.settimeout(_TIMEOUT_S)
            with server.accept()[0] as sock:
                figures |= _rates(sock, size)
            peer.wait(_TIMEOUT_S)
    return figures


def _rates(sock: socket.socket, size: int) -> dict[str, float]:
    """Time writes and reads of `size` bytes. Raises ConnectionError if the stream ends before a copy is complete."""
    # As in the client, small messages must not wait for an acknowledgement.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = memoryview(bytearray(size))
    answer = memoryview(bytearray(1))

    def receive(buffer: memoryview) -> None:
        # A copy that was cut short must not be timed as a complete one.
        if not _fill(sock, buffer):
            raise ConnectionError("the far end closed the connection during a copy")

    def write() -> None:
        sock.sendall(_WRITE)
        sock.sendall(data)
        receive(answer)

    def read() -> None:
        sock.sendall(_READ)
        receive(data)

    # Write once before timing, so that the sockets' buffers have grown.
    write()
    return {
        f"write_{size >> 20}m_gb_s": gigabytes_per_s(write, size, COPIES),
        f"read_{size >> 20}m_gb_s": gigabytes_per_s(read, size, COPIES),
    }


def _fill(sock: socket.socket, buffer: memoryview) -> bool:
    """Receive until the buffer is full. Return False if the stream ends before that."""
    while buffer:
        count = sock.recv_into(buffer)
        if not count:
            return False
        buffer = buffer[count:]
    return True


def serve(port: int, size: int) -> None:
    """Run the far end: receive or send `size` bytes at each request, until the other end closes the connection."""
    data, direction = memoryview(bytearray(size)), memoryview(bytearray(1))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _fill(sock, direction):
            # The byte before each copy gives its direction.
            if direction.tobytes() == _WRITE:
                if not _fill(sock, data):
                    return
                sock.sendall(direction)
            else:
                sock.sendall(data)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
