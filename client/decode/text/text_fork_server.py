"""The processes that read texts: a fork server, which loads the tokenizer once, and the workers that it forks.

    python -m gpulease.client.decode.text.text_fork_server CONTROL TOKENIZER

CONTROL is the descriptor's number of a socket of packets. First the server sends {"ready": true}, or {"rejected": text}
and exits. Then it receives {"fork": number} with a socket for the new worker, and {"kill": number}. It replies
{"forked": number} or {"failed": number, "why": text}, and sends {"ended": number, "status": status}, with waitpid's
status, when a worker has ended. When the socket is closed, it kills its workers and exits. TOKENIZER is the
descriptor's number of a file with `Tokenizer.values`, the context and the limits.

The server never opens CUDA, never reads a tenant's text, and runs a single thread, so it may fork at any time.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from math import ceil
from typing import Any, Final, NoReturn

if __name__ == "__main__":
    from gpulease.imports import begin_imports

    begin_imports()

from gpulease.client.decode.decode_errors import LibraryPanicked, ModelRejected, RequestRejected
from gpulease.client.decode.library_errors import panics_caught
from gpulease.client.decode.text.prompt_reader import PromptReader
from gpulease.client.decode.text.text_jobs import LENGTH, TextLimits, framed, refusal, unpacked
from gpulease.client.decode.text.tokenizer import Tokenizer
from gpulease.imports import end_imports

MAX_PACKET_BYTES: Final = 4096
"""Maximum number of bytes of a packet that CONTROL receives."""

MAX_ERROR_CHARACTERS: Final = 600
"""Maximum number of characters of an error in a packet, where each may take 6 bytes of JSON."""

MAX_KEPT_BYTES: Final = 64 << 20
"""Maximum number of bytes by which a worker's memory may have grown after a job. A worker that has grown more is
replaced."""

MAX_TRACEBACK_CHARACTERS: Final = 4000
"""Maximum number of characters of a traceback, so that an error that repeats a text can't fill the server's log."""

OUT_OF_MEMORY_SCORE: Final = b"500"
"""The workers' oom_score_adj, so that the kernel kills them before the server when the host runs out of memory."""

PR_SET_PDEATHSIG: Final = 1
"""prctl's option that sets the signal for the parent's death, from linux/prctl.h."""


def main(control_fd: int, tokenizer_fd: int) -> None:
    """Serve until CONTROL's other end is closed."""
    # A terminal or a service manager signals the whole process group. The decode server must finish its replies before
    # it ends this process, so ignore the signal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The decode server reloads its settings on SIGHUP, which may also be sent to the whole group.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    with open(tokenizer_fd, "rb", closefd=True) as file:
        values, context, limits = unpacked(file.read())
    try:
        reader = PromptReader(Tokenizer.of_values(values), context)
    except ModelRejected as error:
        control.send(json.dumps({"rejected": str(error)[:MAX_ERROR_CHARACTERS]}).encode())
        return
    del values
    # Exempt all existing objects from garbage collection. It would write to their pages, which would then no longer be
    # shared with the workers.
    gc.collect()
    gc.freeze()
    control.send(b'{"ready": true}')
    _ForkServer(control, reader, TextLimits(**limits)).run()


class _ForkServer:
    def __init__(self, control: socket.socket, reader: PromptReader, limits: TextLimits) -> None:
        self._control, self._reader, self._limits = control, reader, limits
        self._numbers: dict[int, int] = {}

    def run(self) -> None:
        # SIGCHLD, when a worker ends, writes a byte that wakes the selector.
        bell, ring = socket.socketpair()
        bell.setblocking(False)
        ring.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(ring.fileno())
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(bell, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if bell in ready:
                with contextlib.suppress(BlockingIOError):
                    bell.recv(MAX_PACKET_BYTES)
                self._report_ends()
            if self._control in ready and not self._handle([selector, bell, ring]):
                break
        # CONTROL is closed: the decode server has ended, or no longer needs the workers.
        for pid in self._numbers:
            os.kill(pid, signal.SIGKILL)
        for pid in self._numbers:
            os.waitpid(pid, 0)

    def _report_ends(self) -> None:
        for pid, number in list(self._numbers.items()):
            # One signal may stand for several workers, so check all of them.
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid:
                del self._numbers[pid]
                self._send(ended=number, status=status)

    def _handle(self, own_fds: list[Any]) -> bool:
        """Process one packet. Returns False when CONTROL is closed."""
        # An empty packet means that the socket was closed, because the decode server never sends one.
        packet, sockets, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1)
        if not packet:
            return False
        request = json.loads(packet)
        if "kill" in request:
            # The pid can't belong to another process: it may be reused only after waitpid, and then it is no longer
            # listed here.
            for pid in [pid for pid, number in self._numbers.items() if number == request["kill"]]:
                os.kill(pid, signal.SIGKILL)
            return True
        # Get the pid before the fork, so that the worker can check whether its parent is still this process.
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(sockets[0])
            self._send(failed=request["fork"], why=str(error))
            return True
        # In the worker, close the fork server's descriptors. `_work` never returns to the loop.
        if not pid:
            for closable in (*own_fds, self._control):
                closable.close()
            _work(socket.socket(fileno=sockets[0]), self._reader, self._limits, server)
        os.close(sockets[0])
        self._numbers[pid] = request["fork"]
        self._send(forked=request["fork"])
        return True

    def _send(self, **packet: Any) -> None:
        self._control.send(json.dumps(packet).encode())


def _work(jobs: socket.socket, reader: PromptReader, limits: TextLimits, server: int) -> NoReturn:
    """Do jobs in a newly forked worker until its socket is closed. Then exits the process, and never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Let the kernel kill the worker when the server dies, because nobody else would. If the server died before this
        # call, the parent is another process: then exit at once.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == server:
            # Set the limits before reading anything of a tenant.
            max_kept_bytes = _confine(limits)
            while job := _receive(jobs):
                # Give each job the same CPU time, however much earlier jobs used.
                _give_processor_time(limits)
                answer = _answer(reader, unpacked(job))
                del job
                # End the worker after a failure, or if it has kept too much memory. A new one replaces it.
                is_last = "failed" in answer or _memory_bytes() > max_kept_bytes
                jobs.sendall(framed(answer | {"is_last": is_last}))
                if is_last:
                    break
        code = 0
    except (BrokenPipeError, ConnectionResetError):
        code = 0  # The decode server has closed the socket and does not need the answer.
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _confine(limits: TextLimits) -> int:
    """Set the limits that apply until the worker ends. Returns the memory in bytes above which it is replaced."""
    # A failure is not fatal, because a container may forbid this.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as score:
        score.write(OUT_OF_MEMORY_SCORE)
    own_bytes = _memory_bytes()
    for kind, limit in (
        (resource.RLIMIT_AS, own_bytes + limits.memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard_limit = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit),) * 2)
    return own_bytes + MAX_KEPT_BYTES


def _give_processor_time(limits: TextLimits) -> None:
    """Give the process `limits.processor_s` more seconds of CPU time, after which SIGXCPU ends it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    # The limit counts from the process's start, so add to what earlier jobs have used.
    limit = ceil(used.ru_utime + used.ru_stime) + limits.processor_s
    resource.setrlimit(
        resource.RLIMIT_CPU, (limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit), hard_limit)
    )


def _memory_bytes() -> int:
    """Return the bytes of this process's address space, which RLIMIT_AS limits."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _answer(reader: PromptReader, job: dict[str, Any]) -> dict[str, Any]:
    """Run one job and return the answer. The server names the function; a tenant controls only its arguments."""
    try:
        # The call is MODULE:NAME, and only the decode server writes it.
        module, _, name = job["call"].partition(":")
        call: Callable[..., dict[str, Any]] = getattr(importlib.import_module(module), name)
        with panics_caught():
            return call(reader, **job["arguments"])
    except RequestRejected as error:
        return refusal(error)
    # The library may have kept broken state of the job, which could break later jobs of this process.
    except LibraryPanicked as error:
        return {"failed": "panic", "said": error.message[:MAX_TRACEBACK_CHARACTERS]}
    except MemoryError:
        return {"failed": "memory"}
    except Exception:
        return {"failed": traceback.format_exc(limit=-4)[:MAX_TRACEBACK_CHARACTERS]}


def _receive(jobs: socket.socket) -> bytes:
    """Return the next job's message; b"" when the socket is closed."""
    head = _exactly(jobs, LENGTH.size)
    return _exactly(jobs, *LENGTH.unpack(head)) if head else b""


def _exactly(jobs: socket.socket, size: int) -> bytes:
    # The decode server has limited the frame's size.
    data = bytearray(size)
    view, received = memoryview(data), 0
    while received < size:
        count = jobs.recv_into(view[received:])
        if not count:
            return b""
        received += count
    return bytes(data)


if __name__ == "__main__":
    end_imports()
    main(int(sys.argv[1]), int(sys.argv[2]))
