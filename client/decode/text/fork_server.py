"""The decode server's side of the processes that read texts: it starts the fork server and gives jobs to workers."""

import array
import asyncio
import json
import os
import socket
import subprocess
import sys
from typing import Any, Final, Self

from gpulease.client.decode.blocked_sighup import sighup_blocked
from gpulease.client.decode.decode_errors import ModelRejected, TextProcessesFailed
from gpulease.client.decode.first_ended import answer_within
from gpulease.client.decode.text.text_jobs import LENGTH, MAX_ANSWER_BYTES, unpacked

MODULE: Final = "gpulease.client.decode.text.text_fork_server"

MAX_PACKET_BYTES: Final = 65536
"""Maximum number of bytes of a packet that the fork server sends."""

START_LIMIT_S: Final = 120.0
"""Longest time, in seconds, for the fork server to load the tokenizer. A large vocabulary takes a few seconds, and much
longer on a busy host."""

STOP_LIMIT_S: Final = 5.0
"""Longest time, in seconds, for the fork server to end its workers and then itself. After that it is killed."""

POLL_S: Final = 0.005
"""Seconds between two checks whether the fork server has ended, which usually takes a few milliseconds."""

ENVIRONMENT: Final = {
    # Forking a process with threads is unsafe. With these variables, neither library starts threads.
    "TOKENIZERS_PARALLELISM": "false",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Variables of a process that reads texts."""


class ForkedWorker:
    """A forked process that runs jobs, one after another.

    Attributes:
        number: Its number in packets of the fork server.
        started: Completed when it is forked, with an error if the fork failed.
        ended: Completed when it has ended, with its status from waitpid, or with None if the fork server has ended,
            too.
    """

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[int | None] = loop.create_future()
        self._reader, self._writer = reader, writer

    async def do(self, frame: bytes) -> dict[str, Any] | None:
        """Send a job to the worker. Returns its answer; None if the worker ended, or violated the protocol."""
        try:
            self._writer.write(frame)
            await self._writer.drain()
            (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            # A template may have taken over the worker, so check its message's size before allocating memory.
            if size > MAX_ANSWER_BYTES:
                return None
            answer: dict[str, Any] = unpacked(await self._reader.readexactly(size))
            return answer
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            return None

    def close(self) -> None:
        """Close the worker's socket, so that the worker ends after its current job."""
        self._writer.transport.abort()


class ForkServer:
    """A running fork server. `start` creates it; `stop` ends it with its workers."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
        self._process, self._control = process, control
        self._loop = asyncio.get_running_loop()
        self._is_ready: asyncio.Future[None] = self._loop.create_future()
        self._workers: dict[int, ForkedWorker] = {}
        self._numbers = 0
        self.is_alive = True
        # Packets may arrive at any time. The event loop calls `_receive` for each; no task is needed.
        self._loop.add_reader(control, self._receive)

    @classmethod
    async def start(cls, tokenizer_fd: int) -> Self:
        """Start a fork server, and wait until it is ready. It reads the tokenizer from the start of `tokenizer_fd`.

        Raises OSError, TextProcessesFailed, or ModelRejected for a tokenizer that it can't load.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Reopen the file rather than duplicate its descriptor, which would share the offset with earlier fork servers.
        tokenizer_copy = os.open(f"/proc/self/fd/{tokenizer_fd}", os.O_RDONLY)
        try:
            # Popen returns after exec, so it blocks the loop only briefly.
            with sighup_blocked():
                process = subprocess.Popen(  # noqa: ASYNC220
                    # With -P the program does not import modules from the current folder.
                    [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(tokenizer_copy)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), tokenizer_copy),
                    env=os.environ | ENVIRONMENT,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(tokenizer_copy)
        ours.setblocking(False)
        server = cls(process, ours)
        try:
            # Wait for {"ready": true}, or for the rejection of the tokenizer.
            await answer_within(server._is_ready, START_LIMIT_S)
        except BaseException as error:
            await server.stop()
            if isinstance(error, TimeoutError):
                text = f"the process that reads texts was not ready within {START_LIMIT_S:g} s"
                raise TextProcessesFailed(text) from None
            raise
        return server

    async def fork(self) -> ForkedWorker:
        """Fork a worker. Raises OSError, or TextProcessesFailed if the fork fails or the server has ended."""
        ours, theirs = socket.socketpair()
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        self._numbers += 1
        worker = self._workers[self._numbers] = ForkedWorker(self._numbers, reader, writer)
        try:
            # Send the worker's end of the socket with the request. Jobs then go directly to the worker.
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()]))
            self._control.sendmsg([json.dumps({"fork": worker.number}).encode()], [rights])
        except OSError:
            self._lose()
        finally:
            theirs.close()
        try:
            # "forked", "failed" or the loss of the fork server complete this.
            await worker.started
        except BaseException:
            self.kill(worker)
            raise
        return worker

    def kill(self, worker: ForkedWorker) -> None:
        """Let the fork server kill a worker, whatever the worker is doing. `worker.ended` then gets its status."""
        worker.close()
        if self.is_alive and self._workers.get(worker.number) is worker:
            self._send({"kill": worker.number})

    async def stop(self) -> None:
        """End the fork server and its workers. If it does not end within STOP_LIMIT_S, it is killed."""
        self._lose()
        # Closing its control socket ends the server. Poll for the end, because this process uses no child watcher.
        deadline = self._loop.time() + STOP_LIMIT_S
        while self._process.poll() is None:
            if self._loop.time() > deadline:
                self._process.kill()
            await asyncio.sleep(POLL_S)

    def _send(self, packet: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(packet).encode())
        except OSError:
            self._lose()

    def _receive(self) -> None:
        """Handle one packet of the fork server: ready, rejected, forked, failed or ended."""
        try:
            packet = self._control.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        # An empty packet means that the fork server has exited or was killed.
        if not packet:
            self._lose()
            return
        message = json.loads(packet)
        # The packets about workers contain the worker's number.
        worker = self._workers.get(message.get("forked") or message.get("failed") or message.get("ended") or 0)
        if "ready" in message and not self._is_ready.done():
            self._is_ready.set_result(None)
        elif "rejected" in message and not self._is_ready.done():
            self._is_ready.set_exception(ModelRejected(message["rejected"]))
        elif worker is not None and "forked" in message:
            if not worker.started.done():  # It is cancelled if the task that waited for it was cancelled.
                worker.started.set_result(None)
        elif worker is not None:
            self._end(worker, message.get("status"), message.get("why", "it ended"))

    def _end(self, worker: ForkedWorker, status: int | None, reason: str) -> None:
        # Wake the tasks that wait for the worker's start or its end.
        self._workers.pop(worker.number, None)
        if not worker.started.done():
            worker.started.set_exception(TextProcessesFailed(f"no process that reads texts can be forked: {reason}"))
        if not worker.ended.done():
            worker.ended.set_result(status)

    def _lose(self) -> None:
        """Process the server's end. It kills its workers when it ends; if it was killed, the kernel kills them."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._loop.remove_reader(self._control)
        self._control.close()
        if not self._is_ready.done():
            self._is_ready.set_exception(TextProcessesFailed("the process that reads texts ended as it started"))
        for worker in list(self._workers.values()):
            worker.close()
            self._end(worker, None, "the process that forks them has ended")
