"""`python -m gpulease.daemon.zygote DRIVER CHANNEL_FD PARENT_PID SANDBOX [LISTENER_FD]`: started by the broker alone.

The zygote imports what a context needs and forks a worker for each request. It never calls cuInit: a CUDA driver that
was initialised does not survive a fork (CUDA C++ Programming Guide, "Compute Modes"; fork after initialisation is
unsupported). It is single-threaded, so that a fork copies a process in which no lock is held.

Without a listener it dies with its broker. With one it outlives it, keeps its workers (see `keeper`), and tells them to
the next broker that connects (see `telling`).
"""

import gc
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, Final, NoReturn

from gpulease.daemon.contract.control_page import PageFds, for_worker
from gpulease.daemon.contract.worker_spec import WorkerExit, WorkerSpec
from gpulease.daemon.drivers.interface import Driver, DriverError
from gpulease.daemon.drivers.registry import driver_named
from gpulease.daemon.host.fd_passing import interrupting_closes
from gpulease.daemon.host.heap import is_told_to_wipe
from gpulease.daemon.host.ipc import ChannelClosed, Outbox, close_all, receive_message, send_message
from gpulease.daemon.host.processes import die_with_parent, exit_text, set_name, survive_stderr
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import go_on_logging, log_event, stop_logging
from gpulease.daemon.sandbox.measures import SandboxBroken, SandboxSettings
from gpulease.daemon.sandbox.plan import Plan
from gpulease.daemon.sandbox.trial import prepare
from gpulease.daemon.session.main import live, stand_by
from gpulease.daemon.session.native.launch_fast_path import serving_code
from gpulease.daemon.zygote.handover import ZYGOTE_NAME, admit, tell
from gpulease.daemon.zygote.worker_output import WorkerOutput, say_to
from gpulease.daemon.zygote.worker_table import ALONE_S, WorkerTable

MAX_POLL_MS: Final = 3_600_000
"""Longest single poll: its milliseconds must fit a C int."""

NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000


class Zygote:
    """Forks workers on request and reaps them.

    Args:
        plan: What its workers are shut in by.
        about: What it tells of itself to those who take it over.
        listener: Where the next broker connects; None to end with this one.
    """

    def __init__(
        self,
        driver: Driver,
        channel: socket.socket,
        plan: Plan,
        about: dict[str, Any],
        listener: socket.socket | None,
    ) -> None:
        self._driver = driver
        self._plan = plan
        self._about = about
        channel.setblocking(False)
        self._channel: socket.socket | None = channel
        # A broker that hangs must not make this process wait. What waits for it is bounded by workers: each is told of
        # when it is made and when it has ended.
        self._outbox = Outbox(channel)
        self._listener = listener
        self._keeper = WorkerTable()
        self._empty_since_ns = 0
        # SIGCHLD must wake poll(2): its arrival is written here by the C-level handler.
        self._wakeup, wakeup_end = socket.socketpair()
        self._wakeup_end = wakeup_end
        for end in (self._wakeup, wakeup_end):
            end.setblocking(False)
        self._pid = os.getpid()
        self._poll = select.poll()
        self._sayings = WorkerOutput(self._poll, self._log_saying)
        self._is_retired = False

    def run(self) -> None:
        """Serve until the broker is gone, or, with a listener, until nobody needs this process any more."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        self._poll.register(self._wakeup, select.POLLIN)
        if self._listener is not None:
            self._poll.register(self._listener, select.POLLIN)
        if self._channel is not None:
            self._poll.register(self._channel, select.POLLIN)
        timeout_ms: int | None = None
        while True:
            heard = {fd for fd, _ in self._poll.poll(timeout_ms)}
            # Before the reap: what one said last is told as its lease's.
            for fd in heard:
                if fd in self._sayings:
                    self._sayings.hear(fd)
            if self._wakeup.fileno() in heard:
                self._drain_wakeup()
                self._reap()
            if self._channel is not None and self._channel.fileno() in heard:
                self._flush()
                self._serve_broker()
            if self._listener is not None and self._listener.fileno() in heard:
                self._let_in(self._listener)
            if self._channel is None and self._listener is None:
                return
            if self._is_retired and not self._keeper.living() and not self._keeper.ended():
                return
            now_ns = time.monotonic_ns()
            if self._channel is None:
                due_ns = self._alone(now_ns)
                if due_ns <= now_ns:
                    return
            elif (look_ns := self._keeper.end_overdue(now_ns)) is not None:
                due_ns = look_ns
            else:
                timeout_ms = None
                continue
            timeout_ms = min(max(0, -(-(due_ns - now_ns) // NS_PER_MS)), MAX_POLL_MS)

    # --- the broker ---

    def _serve_broker(self) -> None:
        """Take all it has said; it may be its last."""
        while (channel := self._channel) is not None and _has_news(channel):
            try:
                message, fds = receive_message(channel)
            except ChannelClosed:
                self._lose_broker()
                return
            match message.get("op"):
                case "spawn":
                    self._spawn(WorkerSpec.from_message(message), fds)
                    continue
                case "lease":
                    self._keeper.change(message["serial"], WorkerSpec.from_message(message))
                case "renew" if len(fds) == 2:
                    self._keeper.change(message["serial"], WorkerSpec.from_message(message), PageFds(*fds))
                    continue
                case "forget":
                    self._keeper.forget(message["serial"])
                case "ping":
                    self._say({"op": "pong"})
                case "retire":
                    self._is_retired = True
            close_all(fds)

    def _say(self, message: dict[str, object], fds: tuple[int, ...] = ()) -> None:
        """Tell the broker, if there is one; what the next one must know is kept besides."""
        if self._channel is None:
            return
        try:
            self._outbox.send(message, fds)
        except ChannelClosed:
            # Its last messages may still be there to be read: that it is gone is seen behind them.
            if self._listener is None:
                raise
        except OSError:
            # No descriptor is left for one that would wait: the broker does without it.
            self._outbox.send(message)
        if self._outbox:
            self._poll.modify(self._channel, select.POLLIN | select.POLLOUT)

    def _flush(self) -> None:
        if self._channel is None or not self._outbox:
            return
        try:
            self._outbox.flush()
        except ChannelClosed:
            # As above.
            self._outbox.close()
        if not self._outbox:
            self._poll.modify(self._channel, select.POLLIN)

    def _lose_broker(self) -> None:
        self._outbox.close()
        if self._channel is not None:
            self._poll.unregister(self._channel)
            self._channel.close()
            self._channel = None
        self._empty_since_ns = now_ns = time.monotonic_ns()
        if self._listener is not None:
            self._keeper.lose_broker(now_ns)

    def _let_in(self, listener: socket.socket) -> None:
        if self._channel is not None:
            # It may have died a moment ago.
            self._serve_broker()
        channel = admit(listener, is_taken=self._channel is not None)
        if channel is None:
            return
        try:
            tell(channel, self._about, self._keeper)
        except ChannelClosed:
            channel.close()
            return
        channel.setblocking(False)
        self._channel, self._outbox = channel, Outbox(channel)
        self._poll.register(channel, select.POLLIN)
        self._keeper.regain_broker()

    def _alone(self, now_ns: int) -> int:
        """End what is due while there is no broker; when to look again, not after now if there is no use."""
        due_ns = self._keeper.enforce(now_ns)
        if self._keeper.living():
            self._empty_since_ns = now_ns
            # Those that were killed wake this process when they are dead.
            return now_ns + int(ALONE_S * NS_PER_S) if due_ns is None else max(due_ns, now_ns + 1)
        return self._empty_since_ns + int(ALONE_S * NS_PER_S)

    # --- workers ---

    def _spawn(self, spec: WorkerSpec, fds: list[int]) -> None:
        lease = f"{spec.lease_id:032x}"
        if len(fds) != 3 + (self._listener is not None):
            close_all(fds)
            self._say({"op": "no_fork", "lease": lease, "reason": "the zygote has no descriptors left"})
            return
        channel_fd, lease_fd, claims_fd, *broker_end = fds
        page_fds = PageFds(lease_fd, claims_fd)
        said: tuple[int, ...] = ()
        try:
            said = heard_fd, said_fd = os.pipe()
            pid = os.fork()
        except OSError as error:
            close_all([*fds, *said])
            self._say({"op": "no_fork", "lease": lease, "reason": f"fork: {error.strerror}"})
            return
        if pid == 0:
            self._become_worker(spec, channel_fd, page_fds, said_fd, [*broker_end, heard_fd])
        close_all([channel_fd, said_fd])
        self._sayings.listen(heard_fd, pid)
        try:
            # Before any wait for this child, so the number can't have been given to another process.
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            close_all([*page_fds, *broker_end])
            self._say({"op": "no_fork", "lease": lease, "reason": f"pidfd_open: {error.strerror}"})
            return
        kept = self._keeper.add(spec, pid, (pidfd, page_fds, broker_end[0] if broker_end else -1))
        self._say({"op": "spawned", "lease": lease, "pid": pid, "serial": kept.serial}, (pidfd,))

    def _become_worker(
        self, spec: WorkerSpec, channel_fd: int, page_fds: PageFds, said_fd: int, not_its: list[int]
    ) -> NoReturn:
        status = 1
        try:
            # First of all: nothing of another lease, nor of the broker, stays open here.
            stop_logging()
            self._keeper.close()
            self._outbox.close()
            self._sayings.close()
            close_all(not_its)
            say_to(said_fd)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for sock in (self._channel, self._listener, self._wakeup, self._wakeup_end):
                if sock is not None:
                    sock.close()
            channel = socket.socket(fileno=channel_fd)
            status = self._enter_and_begin(spec, channel, page_fds)
        finally:
            # Not sys.exit: the worker must not run what the zygote registered for its own exit.
            os._exit(status)

    def _enter_and_begin(self, spec: WorkerSpec, channel: socket.socket, page_fds: PageFds) -> WorkerExit:
        try:
            # Before it is shut in: the page's mode is its owner's to change.
            page_fds = for_worker(page_fds)
            self._plan.enter((channel.fileno(), *page_fds), self._pid)
        except (OSError, SandboxBroken) as error:
            send_message(channel, {"op": "failed", "reason": str(error)})
            return WorkerExit.NO_CONTEXT
        begin = stand_by if spec.is_warm else live
        return begin(spec, self._driver, channel, page_fds)

    def _log_saying(self, pid: int, line: str, lost_lines: int) -> None:
        lease_id = self._keeper.lease_of(pid)
        log_event(LogEvent.WORKER_SAID, lease_id=lease_id, worker_pid=pid, said=line, lost_lines=lost_lines or None)

    def _drain_wakeup(self) -> None:
        try:
            while self._wakeup.recv(4096):
                pass
        except BlockingIOError:
            return

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            reason = exit_text(status)
            kept = self._keeper.end(pid, reason, remember=self._listener is not None)
            if kept is not None:
                exited = {"op": "exited", "lease": f"{kept.born_as:032x}", "serial": kept.serial, "reason": reason}
                self._say(exited | ({"is_overdue": True, "overran": kept.overran} if kept.is_overdue else {}))


def _has_news(channel: socket.socket) -> bool:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(0))


def main(driver_name: str, channel_fd: int, parent_pid: int, sandbox: str, listener_fd: int = -1) -> int:
    """Preload, find out what the sandbox can be, say ready, serve. Returns the exit status."""
    listener = socket.socket(fileno=listener_fd) if listener_fd >= 0 else None
    if listener is None:
        die_with_parent(parent_pid)
    else:
        # Again, though the broker does already: the kernel tells those who connect who called it last (unix(7)).
        listener.listen()
        listener.setblocking(False)
    survive_stderr()
    go_on_logging("zygote")
    set_name(ZYGOTE_NAME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=channel_fd)
    try:
        return _serve(driver_name, channel, sandbox, listener)
    finally:
        if listener is not None:
            with suppress(FileNotFoundError):
                os.unlink(listener.getsockname())


def _serve(driver_name: str, channel: socket.socket, sandbox: str, listener: socket.socket | None) -> int:
    try:
        driver = driver_named(driver_name)
        driver.preload()
        serving_code()
        plan, findings = prepare(SandboxSettings.from_text(sandbox), driver.needs(), driver.keep_for)
    except (DriverError, SandboxBroken) as error:
        send_message(channel, {"op": "broken", "reason": str(error), "hint": error.hint})
        return 1
    if len(os.listdir("/proc/self/task")) != 1:
        send_message(channel, {"op": "broken", "reason": "a thread was started before the fork", "hint": ""})
        return 1
    # What is alive now is alive in every worker: keep the collector from touching, and so copying, its pages.
    gc.collect()
    gc.freeze()
    told = [finding.to_message() for finding in findings]
    about = {
        "driver": driver_name,
        "sandbox": sandbox,
        "findings": told,
        "wipes_heap": is_told_to_wipe(),
        "answers_pings": True,
    }
    zygote = Zygote(driver, channel, plan, about, listener)
    try:
        send_message(channel, {"op": "preloaded", "sandbox": told})
    except ChannelClosed:
        if listener is None:
            return 0
    try:
        # What a worker sends its broker is closed here, too.
        with interrupting_closes():
            zygote.run()
    except ChannelClosed:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:])))
