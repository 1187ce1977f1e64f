"""`python -m gpulease.client.bench.stream PORT BYTES`: the far end of a plain TCP stream.

What bulk copies over TCP are held against: two processes, one connection on loopback, each byte copied once by the
kernel into one buffer, and nothing else.
"""

import socket
import subprocess
import sys
from typing import Final

from gpulease.client.bench.figures import gigabytes_per_s

COPIES: Final = 15
_TIMEOUT_S: Final = 60.0
_TO_HERE: Final = b"r"
_TO_THERE: Final = b"w"


def stream_rates(sizes: tuple[int, ...]) -> dict[str, float]:
    """GB/s of so many bytes at a time, there (write) and back (read), the end of each told by a byte."""
    figures: dict[str, float] = {}
    for size in sizes:
        with socket.create_server(("127.0.0.1", 0)) as server:
            command = [
                sys.executable,
                "-P",
                "-m",
                "gpulease.client.bench.stream",
                str(server.getsockname()[1]),
                str(size),
            ]
            far_end = subprocess.Popen(command)
            server.settimeout(_TIMEOUT_S)
            with server.accept()[0] as sock:
                figures |= _rates(sock, size)
            far_end.wait(_TIMEOUT_S)
    return figures


def _rates(sock: socket.socket, size: int) -> dict[str, float]:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = memoryview(bytearray(size))
    answer = memoryview(bytearray(1))

    def write() -> None:
        sock.sendall(_TO_THERE)
        sock.sendall(data)
        _fill(sock, answer)

    def read() -> None:
        sock.sendall(_TO_HERE)
        _fill(sock, data)

    write()
    return {
        f"write_{size >> 20}m_gb_s": gigabytes_per_s(write, size, COPIES),
        f"read_{size >> 20}m_gb_s": gigabytes_per_s(read, size, COPIES),
    }


def _fill(sock: socket.socket, buffer: memoryview) -> bool:
    """Receive exactly so many bytes; False if the stream ends before."""
    while buffer:
        count = sock.recv_into(buffer)
        if not count:
            return False
        buffer = buffer[count:]
    return True


def serve(port: int, size: int) -> None:
    """Take and send what is asked for until the other end closes."""
    data, word = memoryview(bytearray(size)), memoryview(bytearray(1))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _fill(sock, word):
            if word.tobytes() == _TO_THERE:
                _fill(sock, data)
                sock.sendall(word)
            else:
                sock.sendall(data)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
