"""A proxy for a member of etcd that can begin to drop all bytes."""

import contextlib
import socket
import threading
from typing import Final

_CHUNK_BYTES: Final = 1 << 16


class CuttableLink:
    """A proxy for one member of etcd. After `cut`, it drops all bytes, without an error."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._member = host, int(port)
        self._is_cut = threading.Event()
        # All sockets, so that `close` can end the threads that wait on them.
        self._sockets: list[socket.socket] = [socket.create_server(("127.0.0.1", 0))]
        self.endpoint = f"127.0.0.1:{self._sockets[0].getsockname()[1]}"
        threading.Thread(target=self._accept, args=(self._sockets[0],), daemon=True).start()

    def cut(self) -> None:
        """Discard all further bytes, without closing any connection."""
        self._is_cut.set()

    def close(self) -> None:
        """Close the listener and every connection. This ends the threads that copy bytes."""
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                # Use a thread for each direction, so that neither waits for the other.
                near, _ = listener.accept()
                self._sockets.append(near)
                far = socket.create_connection(self._member)
                self._sockets.append(far)
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                # After the cut, read bytes and drop them, so that neither end sees an error or an end of file.
                if not self._is_cut.is_set():
                    sink.sendall(data)
            if not self._is_cut.is_set():
                sink.shutdown(socket.SHUT_RDWR)
