"""A proxy between a client and its PostgreSQL server. On a test's request, it loses the reply to a commit."""

import socket
import threading
from pathlib import Path

_SOCKET_NAME = ".s.PGSQL.5432"


class LosingProxy:
    """The proxy, which listens on a Unix socket in `folder`.

    Attributes:
        lose: Whether to pass the next commit to the server, but not its reply to the client.
        lost: Number of lost replies.
    """

    def __init__(self, server_folder: Path, folder: Path) -> None:
        self.lose = False
        self.lost = 0
        self.conninfo = f"postgresql:///postgres?host={folder}&user=gateway"
        self._server_path = str(server_folder / _SOCKET_NAME)
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / _SOCKET_NAME))
        self._listener.listen()
        self._start(self._accept)

    def close(self) -> None:
        """Accept no more clients. Those that are connected must have disconnected."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _start(self, work: object, *args: object) -> None:
        self._threads.append(threading.Thread(target=work, args=args))  # type: ignore[arg-type]
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server_path)
            self._start(self._forward, client, server)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        """Pass requests on one by one. Relies on a client that waits for each reply before its next request."""
        back = threading.Thread(target=self._forward_back, args=(client, server))
        back.start()
        with client, server:
            while data := _receive(client):
                if self.lose and b"COMMIT" in data:
                    self.lose = False
                    self.lost += 1
                    client.shutdown(socket.SHUT_WR)
                server.sendall(data)
            _end(server)
            back.join()

    def _forward_back(self, client: socket.socket, server: socket.socket) -> None:
        while data := _receive(server):
            try:
                client.sendall(data)
            except OSError:
                break
        _end(client)


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except OSError:
        return b""


def _end(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
