"""An RpcServer in a thread of the test's process, and callers that violate the protocol."""

import asyncio
import contextlib
import os
import socket
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpulease.client.serve.rpc import Answer, Handler, Outcome, RpcServer
from gpulease.client.serve.rpc.shared import MappedCall
from gpulease.protocol.rpc import GREETING_BYTES, CallError, CallErrorCode

ECHO, FAIL, NEVER, SLOW, HUGE, RAISE, TIME_LEFT, IN_TIME = 1, 2, 3, 4, 5, 6, 7, 8
"""Numbers of the methods of the rig's server."""

SLOW_S: Final = 0.05


class RpcRig:
    """A server with methods that succeed, fail, take long, or never end.

    Attributes:
        address: The address that it listens on.
        server: The server. Its thread uses it, so tests may only read it.
        cancelled: Number of calls that were cancelled because their caller disconnected.
    """

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "rpc.sock")
        self.address = f"unix:{self.path}"
        self.server: RpcServer
        self.cancelled = 0
        self.thread_id = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "RpcRig":
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(self.path)
            sock.listen()
            handler: Handler = self._call
            async with RpcServer(sock, handler, lambda: b'{"echo": 1}') as self.server:
                self.thread_id = threading.get_native_id()
                self._ready.set()
                await self._stop.wait()
        os.unlink(self.path)

    def _call(self, method_id: int, payload: bytes, left_s: float | None) -> "asyncio.Future[Outcome]":
        if method_id == RAISE:
            raise RuntimeError("a mistake of the handler's")
        answer: asyncio.Future[Outcome] = self._loop.create_future()
        answer.add_done_callback(self._count)
        if method_id == SLOW:
            self._loop.call_later(SLOW_S, self._settle, answer, Answer(SLOW, payload))
        elif method_id == FAIL:
            answer.set_result(CallError(CallErrorCode.QUEUE_FULL, "no room", 250))
        elif method_id == TIME_LEFT:
            answer.set_result(Answer(TIME_LEFT, repr(left_s).encode()))
        elif method_id == IN_TIME:
            late = CallError(CallErrorCode.TOO_LATE, "it was not begun in its time")
            self._loop.call_later(SLOW_S, self._settle, answer, late)
        elif method_id == HUGE:
            answer.set_result(Answer(HUGE, bytes(40_000)))
        elif method_id != NEVER:
            answer.set_result(Answer(method_id, payload))
        return answer

    def _settle(self, answer: "asyncio.Future[Outcome]", outcome: Outcome) -> None:
        if not answer.done():
            answer.set_result(outcome)

    def _count(self, answer: "asyncio.Future[Outcome]") -> None:
        self.cancelled += answer.cancelled()


@contextlib.contextmanager
def raw_caller(path: str) -> Iterator[tuple[socket.socket, MappedCall]]:
    """Yield a connection and its shared memory, which the test may use in any way."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(path)
        data, rights, _, _ = sock.recvmsg(GREETING_BYTES, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        assert len(data) == GREETING_BYTES
        shared = MappedCall(array("i", rights[0][2])[0])
        try:
            yield sock, shared
        finally:
            shared.close()


@contextlib.contextmanager
def scripted_server(path: Path, *sends: tuple[bytes, list[int]]) -> Iterator[str]:
    """Yield the address of a server that accepts one client for each of `sends`, and sends it these."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()

        def serve() -> None:
            for data, fds in sends:
                peer, _ = sock.accept()
                with peer:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
                    # On a busy host a client may have timed out and closed the connection.
                    with contextlib.suppress(BrokenPipeError):
                        peer.sendmsg([data], rights)
                        peer.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"unix:{path}"
        finally:
            thread.join()
