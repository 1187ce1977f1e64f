"""`python -m gpulease.daemon.zygote DRIVER CHANNEL_FD PARENT_PID SANDBOX [LISTENER_FD]`: only the broker starts it.

The zygote imports all modules that a context needs, and forks a worker for each request. It never calls cuInit: an
initialised CUDA driver does not survive a fork (CUDA C++ Programming Guide, "Compute Modes"; fork after initialisation
is unsupported). It is single-threaded, so that a fork copies a process in which no lock is held.

Without a listener the zygote dies with its broker. With one it outlives the broker, keeps its workers and ends their
leases (see `worker_table`), and passes them to the next broker that connects.
"""

import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, Final, NoReturn, assert_never

if __name__ == "__main__":
    from gpulease.imports import begin_imports

    begin_imports()

from gpulease.daemon.contract import messages
from gpulease.daemon.contract.control_page import PageFds, for_worker
from gpulease.daemon.contract.message_fields import Message, parse_message
from gpulease.daemon.contract.worker_spec import WorkerExit, WorkerSpec
from gpulease.daemon.drivers.interface import Driver, DriverError, UnusableSetting
from gpulease.daemon.host.heap_wipe import wipes_heap_by_environment
from gpulease.daemon.host.ipc import ChannelClosed, Outbox, channel_listener, close_all, receive_message, send_message
from gpulease.daemon.host.processes import die_with_parent, exit_text, reaped_children, set_name, survive_stderr
from gpulease.daemon.host.unix_place import CHECK_INTERVAL_S, file_at
from gpulease.daemon.host.unsolicited_fds import interrupting_closes
from gpulease.daemon.host.version import VERSION, own_build
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import go_on_logging, log_event, stop_logging
from gpulease.daemon.sandbox.measures import SandboxSettings, SandboxUnavailable
from gpulease.daemon.sandbox.sandbox_entry import SandboxPlan
from gpulease.daemon.sandbox.trial import prepare
from gpulease.daemon.session.main import run_lease_worker, run_warm_worker
from gpulease.daemon.session.native.pacing import session_code
from gpulease.daemon.zygote.driver_registry import driver_named
from gpulease.daemon.zygote.worker_output import WorkerOutput, redirect_output
from gpulease.daemon.zygote.worker_table import WorkerTable
from gpulease.imports import end_imports
from gpulease.protocol.peer_credentials import UCRED_BYTES, parse_ucred
from gpulease.protocol.time_units import NS_PER_MS, NS_PER_S

ALONE_S: Final = 60.0
"""Seconds for which a zygote without workers waits for a broker, so that it does not stay forever if none comes."""

HANDOVER_TIMEOUT_S: Final = 30.0
"""Longest time for a new broker to read one message, so that a broker that hangs does not delay the ends of leases."""

MAX_POLL_MS: Final = 3_600_000
"""Longest single poll, because its milliseconds must fit into a C int."""


def main(driver_name: str, channel_fd: int, parent_pid: int, sandbox: str, listener_fd: int = -1) -> int:
    """Preload the driver, test the sandbox, and fork workers. Returns the exit status.

    Args:
        driver_name: The driver with which workers open their contexts.
        channel_fd: The channel to the broker.
        parent_pid: The broker's process id.
        sandbox: Sandbox settings, as returned by `SandboxSettings.to_text`.
        listener_fd: The socket where the next broker connects; -1 if the zygote dies with this broker.
    """
    # Either die with the broker, or be the process that listens for the next one.
    listener = socket.socket(fileno=listener_fd) if listener_fd >= 0 else None
    if listener is None:
        die_with_parent(parent_pid)
    else:
        # The broker has called listen as well, but the next broker must find this process at the socket: the peer's
        # credentials name the process that called listen last (unix(7), SO_PEERCRED).
        listener.listen()
        listener.setblocking(False)
    listener_path = "" if listener is None else str(listener.getsockname())
    survive_stderr()
    go_on_logging("zygote")
    set_name(messages.ZYGOTE_NAME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=channel_fd)
    try:
        zygote = _preload(driver_name, channel, sandbox, listener)
        return 1 if zygote is None else _serve(zygote, channel, listener)
    finally:
        if listener_path:
            with suppress(FileNotFoundError):
                os.unlink(listener_path)


def _preload(driver_name: str, channel: socket.socket, sandbox: str, listener: socket.socket | None) -> "Zygote | None":
    """Import everything that a worker needs; if that fails, notify the broker and return None."""
    try:
        # Step 1: everything slow is done once, here, before any fork.
        driver = driver_named(driver_name)
        driver.preload()
        session_code()
        plan, findings = prepare(SandboxSettings.from_text(sandbox), driver.needs(), driver.keep_for)
    except (DriverError, SandboxUnavailable) as error:
        is_misconfigured = True if isinstance(error, UnusableSetting) else None
        send_message(channel, messages.HelperBroken(str(error), error.hint, is_misconfigured).to_map())
        return None
    # A fork copies only the calling thread: locks that another thread holds would stay locked in the worker forever.
    if len(os.listdir("/proc/self/task")) != 1:
        send_message(channel, messages.HelperBroken("a thread was started before the fork", "").to_map())
        return None
    # Without a listener, no later broker compares the build.
    build = own_build() if listener is not None else ""
    # Every worker shares the objects alive now. The garbage collector must not write to their pages, because that would
    # copy them.
    end_imports()
    introduction = messages.ZygoteIntroduction(
        version=VERSION,
        build=build,
        handover=messages.HANDOVER,
        pid=os.getpid(),
        driver=driver_name,
        sandbox=sandbox,
        findings=[finding.to_message() for finding in findings],
        wipes_heap=wipes_heap_by_environment(),
        answers_pings=True,
    )
    return Zygote(driver, channel, plan, introduction, listener)


def _serve(zygote: "Zygote", channel: socket.socket, listener: socket.socket | None) -> int:
    try:
        send_message(channel, messages.Preloaded(zygote.introduction.findings).to_map())
    except ChannelClosed:
        # The broker died before the zygote was ready. Without a listener, the zygote ends now.
        if listener is None:
            return 0
    try:
        # Here, too, closing a descriptor that a worker sent to its broker can block.
        with interrupting_closes():
            zygote.run()
    except ChannelClosed:
        return 0
    return 0


class Zygote:
    """Forks workers on request, reaps them, and ends leases while no broker runs.

    Args:
        driver: The driver, preloaded.
        channel: The channel to the broker.
        plan: The sandbox of the workers.
        introduction: The zygote's introduction to the next broker.
        listener: The socket where the next broker connects; None if the zygote ends with this broker.
    """

    def __init__(
        self,
        driver: Driver,
        channel: socket.socket,
        plan: SandboxPlan,
        introduction: messages.ZygoteIntroduction,
        listener: socket.socket | None,
    ) -> None:
        self.introduction = introduction
        self._driver = driver
        self._plan = plan
        channel.setblocking(False)
        self._channel: socket.socket | None = channel
        # A broker that hangs must not make this process wait. The number of workers limits the waiting messages: each
        # worker is reported when it is made and when it has ended.
        self._outbox = Outbox(channel)
        self._listener = listener
        self._check_listener_ns = 0
        self._is_listener_lost = False
        self._workers = WorkerTable()
        self._empty_since_ns = 0
        self._is_retired = False
        # SIGCHLD must wake poll(2): the C-level handler writes here when it arrives.
        self._wakeup, self._wakeup_end = socket.socketpair()
        for end in (self._wakeup, self._wakeup_end):
            end.setblocking(False)
        self._pid = os.getpid()
        self._poll = select.poll()
        self._output = WorkerOutput(self._poll, self._log_output)

    def run(self) -> None:
        """Serve until the broker is gone or, with a listener, until no broker can need this process."""
        # The handler does nothing, but only a signal with a handler is written to the wake-up descriptor.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        for sock in (self._wakeup, self._listener, self._channel):
            if sock is not None:
                self._poll.register(sock, select.POLLIN)
        timeout_ms: int | None = None
        while True:
            # Step 1: wait for messages, ends of workers, output, a new broker, or the next due time.
            self._on_ready({fd for fd, _ in self._poll.poll(timeout_ms)})
            if self._is_over():
                return
            now_ns = time.monotonic_ns()
            self._restore_listener(now_ns)
            # Step 2: end leases. While there is a broker, end only the leases that it should have ended a second ago;
            # otherwise end all that are due.
            has_broker = self._channel is not None
            due_ns = self._workers.end_overdue(now_ns) if has_broker else self._end_due(now_ns)
            # Step 3: compute the next wake-up. A time in the past means that this process must end.
            if due_ns is None:
                timeout_ms = None
            elif has_broker or due_ns > now_ns:
                timeout_ms = min(max(0, -(-(due_ns - now_ns) // NS_PER_MS)), MAX_POLL_MS)
            else:
                return
            if self._listener is not None:
                timeout_ms = min(MAX_POLL_MS if timeout_ms is None else timeout_ms, int(CHECK_INTERVAL_S * 1000))

    def _on_ready(self, fds: set[int]) -> None:
        # Read output before reaping, which forgets to which lease a worker's last output belongs.
        for fd in fds:
            if fd in self._output:
                self._output.on_readable(fd)
        if self._wakeup.fileno() in fds:
            self._drain_wakeup()
            self._reap()
        # Read the broker's messages before accepting a new broker: they may be its last.
        if self._channel is not None and self._channel.fileno() in fds:
            self._flush()
            self._serve_broker()
        if self._listener is not None and self._listener.fileno() in fds:
            self._accept_broker(self._listener)

    def _is_over(self) -> bool:
        """Return whether this process must end: without a broker and a listener, or retired and without workers."""
        if self._channel is None and self._listener is None:
            return True
        return self._is_retired and self._workers.is_empty()

    def _end_due(self, now_ns: int) -> int:
        """End leases while no broker runs. Returns when to call again, or a past time if the zygote must end."""
        due_ns = self._workers.end_due(now_ns)
        if self._workers.live_workers():
            self._empty_since_ns = now_ns
            # When the killed workers have died, SIGCHLD wakes this process.
            return now_ns + int(ALONE_S * NS_PER_S) if due_ns is None else max(due_ns, now_ns + 1)
        return self._empty_since_ns + int(ALONE_S * NS_PER_S)

    def _restore_listener(self, now_ns: int) -> None:
        """Recreate the socket if its file was removed; the next broker needs it to find this process's leases."""
        if self._listener is None or now_ns < self._check_listener_ns:
            return
        self._check_listener_ns = now_ns + int(CHECK_INTERVAL_S * NS_PER_S)
        path = str(self._listener.getsockname())
        # Usually the file is still there.
        if file_at(path) is not None:
            return
        try:
            listener = channel_listener(path)
        except OSError as error:
            if not self._is_listener_lost:
                log_event(LogEvent.SOCKET_LOST, path=path, reason=str(error))
            self._is_listener_lost = True
            return
        # The new socket replaces the old one, which no client can reach now.
        self._poll.unregister(self._listener)
        self._listener.close()
        self._listener, self._is_listener_lost = listener, False
        self._poll.register(listener, select.POLLIN)
        log_event(LogEvent.SOCKET_ANEW, path=path)

    # --- the broker ---

    def _serve_broker(self) -> None:
        """Handle every waiting message, because they may be the broker's last ones."""
        while (channel := self._channel) is not None and _is_readable(channel):
            try:
                message, fds = receive_message(channel)
            except ChannelClosed:
                self._lose_broker()
                return
            self._on_message(parse_message(messages.TO_ZYGOTE, message), fds)

    def _on_message(self, message: messages.ToZygote | None, fds: list[int]) -> None:
        # A case that uses the descriptors of its message owns them; the other descriptors are closed at the end.
        match message:
            case WorkerSpec() as spec:
                self._fork(spec, fds)
                return
            case messages.LeaseChanged(spec, serial):
                self._workers.change(serial, spec)
            case messages.PagesRenewed(spec, serial):
                if len(fds) == 2:
                    self._workers.change(serial, spec, PageFds(*fds))
                    return
            case messages.WorkerForgotten(serial):
                self._workers.forget(serial)
            case messages.LivenessPing():
                self._send(messages.Pong())
            case messages.Retire():
                self._is_retired = True
            case None:
                # A newer broker's message.
                pass
            case _:
                assert_never(message)
        close_all(fds)

    def _send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send the message to the broker, if there is one. If not, nothing is lost: the next broker reads the table."""
        if self._channel is None:
            return
        try:
            self._outbox.send(message.to_map(), fds)
        except ChannelClosed:
            # The broker's last messages may still be waiting. After them, `_serve_broker` finds that the broker is
            # gone.
            if self._listener is None:
                raise
        except OSError:
            # A waiting message needs duplicates of its descriptors, and this process can open no more, so send it
            # without them.
            self._outbox.send(message.to_map())
        if self._outbox:
            self._poll.modify(self._channel, select.POLLIN | select.POLLOUT)

    def _flush(self) -> None:
        if self._channel is None or not self._outbox:
            return
        try:
            self._outbox.flush()
        except ChannelClosed:
            # After the broker's last messages, `_serve_broker` also finds that it has exited.
            self._outbox.close()
        if not self._outbox:
            self._poll.modify(self._channel, select.POLLIN)

    def _lose_broker(self) -> None:
        self._outbox.close()
        if self._channel is not None:
            self._poll.unregister(self._channel)
            self._channel.close()
            self._channel = None
        # From now on the zygote itself ends leases.
        self._empty_since_ns = now_ns = time.monotonic_ns()
        if self._listener is not None:
            self._workers.lose_broker(now_ns)

    def _accept_broker(self, listener: socket.socket) -> None:
        """Pass all workers to the broker that connects."""
        if self._channel is not None:
            # The previous broker may have died a moment ago, so handle its last messages first.
            self._serve_broker()
        channel = _accept(listener, has_broker=self._channel is not None)
        if channel is None:
            return
        try:
            self._hand_over(channel)
        except ChannelClosed:
            channel.close()
            return
        channel.setblocking(False)
        self._channel, self._outbox = channel, Outbox(channel)
        self._poll.register(channel, select.POLLIN)
        self._workers.regain_broker()

    def _hand_over(self, channel: socket.socket) -> None:
        """Send a broker this zygote's introduction and its workers. Raises ChannelClosed if it does not read."""
        # The introduction has the zygote's own pidfd, because a process id could have passed to another process.
        own_pidfd = os.pidfd_open(self._pid)
        try:
            send_message(channel, self.introduction.to_map(), (own_pidfd,))
        finally:
            os.close(own_pidfd)
        # Then one message for each worker, and an end mark.
        for message, fds in self._workers.handover():
            send_message(channel, message.to_map(), fds)

    # --- workers ---

    def _fork(self, spec: WorkerSpec, fds: list[int]) -> None:
        """Fork a worker. `fds` are its channel and pages and, with a listener, the broker's end of the channel."""
        if len(fds) != 3 + (self._listener is not None):
            close_all(fds)
            self._send(messages.ForkFailed(spec.lease_id, "the zygote has no descriptors left"))
            return
        # If a step fails, release the resources of the steps before it, and report the failure to the broker.
        channel_fd, lease_fd, claims_fd, *broker_end = fds
        page_fds = PageFds(lease_fd, claims_fd)
        pipe: tuple[int, ...] = ()
        try:
            # The pipe for the worker's output must exist before the fork.
            pipe = output_fd, worker_output_fd = os.pipe()
            pid = os.fork()
        except OSError as error:
            close_all([*fds, *pipe])
            self._send(messages.ForkFailed(spec.lease_id, f"fork: {error.strerror}"))
            return
        # This is the child, which never returns from here.
        if pid == 0:
            self._become_worker(spec, channel_fd, page_fds, worker_output_fd, [*broker_end, output_fd])
        close_all([channel_fd, worker_output_fd])
        self._output.add(output_fd, pid)
        try:
            # Open the pidfd before any wait for this child, so that the kernel can't have given its number to another
            # process.
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            close_all([*page_fds, *broker_end])
            self._send(messages.ForkFailed(spec.lease_id, f"pidfd_open: {error.strerror}"))
            return
        worker = self._workers.add(spec, pid, (pidfd, page_fds, broker_end[0] if broker_end else -1))
        self._send(messages.WorkerForked(spec.lease_id, pid, worker.serial), (pidfd,))

    def _become_worker(
        self, spec: WorkerSpec, channel_fd: int, page_fds: PageFds, output_fd: int, others_fds: list[int]
    ) -> NoReturn:
        status = 1
        try:
            # First close everything that belongs to other leases or to the broker.
            stop_logging()
            self._workers.close()
            self._outbox.close()
            self._output.close()
            close_all(others_fds)
            redirect_output(output_fd)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for sock in (self._channel, self._listener, self._wakeup, self._wakeup_end):
                if sock is not None:
                    sock.close()
            status = self._run_worker(spec, socket.socket(fileno=channel_fd), page_fds)
        finally:
            # Do not use sys.exit: the worker must not run the functions that the zygote registered for its own exit.
            os._exit(status)

    def _run_worker(self, spec: WorkerSpec, channel: socket.socket, page_fds: PageFds) -> WorkerExit:
        try:
            # Do this before entering the sandbox: only the owner of the page's file can change its mode.
            page_fds = for_worker(page_fds)
            self._plan.enter((channel.fileno(), *page_fds), self._pid)
        except (OSError, SandboxUnavailable) as error:
            send_message(channel, messages.Failed(str(error)).to_map())
            return WorkerExit.NO_CONTEXT
        # From here on, session/main.py runs the worker.
        begin = run_warm_worker if spec.is_warm else run_lease_worker
        return begin(spec, self._driver, channel, page_fds)

    def _log_output(self, pid: int, line: str, lost_lines: int) -> None:
        lease_id = self._workers.lease_of(pid)
        log_event(LogEvent.WORKER_SAID, lease_id=lease_id, worker_pid=pid, said=line, lost_lines=lost_lines or None)

    def _drain_wakeup(self) -> None:
        try:
            # Do not block: the bytes only mean that SIGCHLD arrived, and their number does not matter.
            while self._wakeup.recv(4096):
                pass
        except BlockingIOError:
            return

    def _reap(self) -> None:
        for pid, status in reaped_children():
            reason = exit_text(status)
            worker = self._workers.reap(pid, reason, remember=self._listener is not None)
            if worker is not None:
                overdue: dict[str, Any] = {"is_overdue": True, "overran": worker.overran} if worker.is_overdue else {}
                self._send(messages.WorkerReaped(worker.forked_for, worker.serial, reason, **overdue))


def _is_readable(channel: socket.socket) -> bool:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(0))


def _accept(listener: socket.socket, *, has_broker: bool) -> socket.socket | None:
    """Accept a broker, which must run as root or as this user, and only one at a time."""
    try:
        channel, _ = listener.accept()
    except OSError:
        return None
    # The kernel supplies the peer's user (unix(7), SO_PEERCRED).
    uid = parse_ucred(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED_BYTES)).uid
    if uid in (0, os.geteuid()) and not has_broker:
        channel.settimeout(HANDOVER_TIMEOUT_S)
        return channel
    # Send a second broker the reason, but do not wait for it to read.
    if has_broker:
        channel.setblocking(False)
        with suppress(ChannelClosed, BlockingIOError):
            send_message(channel, messages.ZygoteTaken().to_map())
    channel.close()
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:])))
