"""`python -m gpulease.daemon.zygote DRIVER CHANNEL_FD PARENT_PID SANDBOX`: started by the broker, never by hand.

The zygote imports what a context needs and forks a worker for each request. It never calls cuInit: a CUDA driver that
was initialised does not survive a fork (CUDA C++ Programming Guide, "Compute Modes"; fork after initialisation is
unsupported). It is single-threaded, so that a fork copies a process in which no lock is held.
"""

import gc
import os
import select
import signal
import socket
import sys
from typing import NoReturn

from gpulease.daemon.channel import ChannelClosed, close_all, receive_message, send_message
from gpulease.daemon.drivers.interface import Driver, DriverError
from gpulease.daemon.drivers.registry import driver_named
from gpulease.daemon.processes import die_with_parent, exit_text, set_name
from gpulease.daemon.sandbox.measures import SandboxBroken
from gpulease.daemon.sandbox.plan import Plan
from gpulease.daemon.sandbox.settings import SandboxSettings
from gpulease.daemon.sandbox.trial import prepare
from gpulease.daemon.worker.exits import WorkerExit
from gpulease.daemon.worker.life import live, stand_by
from gpulease.daemon.worker.native.functions import serving_code
from gpulease.daemon.worker.spec import WorkerSpec


class Zygote:
    """Forks workers on request and reaps them."""

    def __init__(self, driver: Driver, channel: socket.socket, plan: Plan) -> None:
        self._driver = driver
        self._plan = plan
        self._channel = channel
        self._leases: dict[int, str] = {}
        # SIGCHLD must wake poll(2): its arrival is written here by the C-level handler.
        self._wakeup, wakeup_end = socket.socketpair()
        self._wakeup_end = wakeup_end
        for end in (self._wakeup, wakeup_end):
            end.setblocking(False)
        self._pid = os.getpid()

    def run(self) -> None:
        """Serve until the broker is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wakeup.fileno():
                    self._drain_wakeup()
                    self._reap()
                else:
                    message, fds = receive_message(self._channel)
                    self._spawn(WorkerSpec.from_message(message), fds)

    def _spawn(self, spec: WorkerSpec, fds: list[int]) -> None:
        channel_fd, page_fd = fds
        lease = f"{spec.lease_id:032x}"
        try:
            pid = os.fork()
        except OSError as error:
            close_all(fds)
            send_message(self._channel, {"op": "no_fork", "lease": lease, "reason": f"fork: {error.strerror}"})
            return
        if pid == 0:
            self._become_worker(spec, channel_fd, page_fd)
        close_all(fds)
        self._leases[pid] = lease
        # Before any wait for this child, so the number can't have been given to another process.
        pidfd = os.pidfd_open(pid)
        try:
            send_message(self._channel, {"op": "spawned", "lease": lease, "pid": pid}, (pidfd,))
        finally:
            os.close(pidfd)

    def _become_worker(self, spec: WorkerSpec, channel_fd: int, page_fd: int) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for sock in (self._channel, self._wakeup, self._wakeup_end):
                sock.close()
            channel = socket.socket(fileno=channel_fd)
            status = self._enter_and_begin(spec, channel, page_fd)
        finally:
            # Not sys.exit: the worker must not run what the zygote registered for its own exit.
            sys.stderr.flush()
            os._exit(status)

    def _enter_and_begin(self, spec: WorkerSpec, channel: socket.socket, page_fd: int) -> WorkerExit:
        try:
            self._plan.enter((channel.fileno(), page_fd), self._pid)
        except SandboxBroken as error:
            send_message(channel, {"op": "failed", "reason": str(error)})
            return WorkerExit.NO_CONTEXT
        begin = stand_by if spec.is_warm else live
        return begin(spec, self._driver, channel, page_fd)

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
            lease = self._leases.pop(pid, None)
            if lease is not None:
                send_message(self._channel, {"op": "exited", "lease": lease, "reason": exit_text(status)})


def main(driver_name: str, channel_fd: int, parent_pid: int, sandbox: str) -> int:
    """Preload, find out what the sandbox can be, say ready, serve. Returns the exit status."""
    die_with_parent(parent_pid)
    set_name("gpul-zygote")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=channel_fd)
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
    try:
        send_message(channel, {"op": "preloaded", "sandbox": [finding.to_message() for finding in findings]})
        Zygote(driver, channel, plan).run()
    except ChannelClosed:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
