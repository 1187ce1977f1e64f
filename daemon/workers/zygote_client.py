"""The broker's side of the zygote, which forks workers on request and is replaced when it dies.

`Zygotes` holds the zygote that forks workers now, and those of earlier daemons, which no longer fork.
"""

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.contract.control_page import PageFds
from gpulease.daemon.contract.message_fields import MalformedMessage, Message, parse_message
from gpulease.daemon.contract.messages import (
    FROM_ZYGOTE,
    FromZygote,
    HelperBroken,
    LeaseChanged,
    LivenessPing,
    PagesRenewed,
    Pong,
    Preloaded,
    Retire,
    WorkerForgotten,
)
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.host.answers import answer_within
from gpulease.daemon.host.cannot_start import CannotStart
from gpulease.daemon.host.heap_wipe import WIPING_HEAP
from gpulease.daemon.host.ipc import ChannelClosed, Outbox, channel_listener, channel_pair, close_all, receive_message
from gpulease.daemon.host.processes import has_ended
from gpulease.daemon.host.version import VERSION, own_build
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.daemon.workers.helper_process import Heartbeat, ordinary_timeouts
from gpulease.daemon.workers.zygote_discovery import FoundZygote

RESTART_DELAY_S: Final = 1.0
"""Time between the death of a zygote and the start of the next. Stops a zygote that always dies at once from being
started in a busy loop.
"""


class ZygoteBroken(CannotStart):
    """The zygote can't preload the driver, so no worker can start."""


class Zygotes:
    """All zygotes of a broker.

    Args:
        driver: The driver by which workers open their contexts.
        on_message: Called with the zygote, each of its messages, and the descriptors, which then belong to the callee.
        on_exit: Called with each zygote that has ended; its workers die with it.
        sandbox: The workers' sandbox.
        folder: Where zygotes listen for the next broker; None if they must die with this one.
        wipes_heap: Whether zygotes and their workers overwrite memory that they free.

    Attributes:
        current: The zygote that forks workers, running or not.
    """

    def __init__(
        self,
        driver: str,
        on_message: Callable[["ZygoteClient", FromZygote, list[int]], None],
        on_exit: Callable[["ZygoteClient"], None],
        sandbox: SandboxSettings,
        folder: Path | None,
        wipes_heap: bool,
    ) -> None:
        self._driver = driver
        self._on_message = on_message
        self._on_exit = on_exit
        self._sandbox = sandbox
        self._folder = folder
        self._wipes_heap = wipes_heap
        self.current = self._new()
        self._earlier: list[ZygoteClient] = []
        self._restart: asyncio.Task[None] | None = None

    def take_over(self, found_zygote: FoundZygote) -> "ZygoteClient":
        """Take over a zygote of an earlier daemon. From now on it forks workers, if it can and no other zygote does."""
        zygote = self._new()
        # Only one zygote forks for this broker. Every other zygote keeps its workers, and ends when its last worker has
        # ended.
        if zygote.take_over(found_zygote) and not self.current.is_running:
            self.current = zygote
        else:
            zygote.retire()
            self._earlier.append(zygote)
        return zygote

    async def start(self) -> None:
        """Start a zygote, unless one that was taken over forks workers. Raises ZygoteBroken."""
        if not self.current.is_running:
            await self.current.start()

    async def stop(self) -> None:
        """End all zygotes, and with them their workers."""
        await self._stop_restarting()
        for zygote in (self.current, *self._earlier):
            zygote.stop()

    async def leave(self) -> None:
        """Close the channels to all zygotes, which keep their workers and wait for the next broker."""
        await self._stop_restarting()
        for zygote in (self.current, *self._earlier):
            zygote.leave()

    async def _stop_restarting(self) -> None:
        if self._restart is not None:
            self._restart.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restart

    def _new(self) -> "ZygoteClient":
        return ZygoteClient(
            self._driver, self._on_message, self._on_zygote_exit, self._sandbox, self._folder, self._wipes_heap
        )

    def _on_zygote_exit(self, zygote: "ZygoteClient") -> None:
        # Report the ends of its workers first; the next zygote starts without them.
        self._on_exit(zygote)
        if zygote is not self.current:
            log_event(LogEvent.ZYGOTE_LEFT)
            self._earlier.remove(zygote)
            return
        log_event(LogEvent.ZYGOTE_DIED)
        self._restart = asyncio.get_running_loop().create_task(self._start_again())

    async def _start_again(self) -> None:
        while True:
            await asyncio.sleep(RESTART_DELAY_S)
            self.current = self._new()
            try:
                await self.current.start()
            except ZygoteBroken as error:
                log_event(LogEvent.ZYGOTE_NOT_STARTED, reason=str(error), hint=error.hint)
                continue
            log_event(LogEvent.ZYGOTE_BACK)
            return


START_TIMEOUT_S: Final = 60.0
"""Longest time for a zygote's imports, which take seconds from a cold disk."""

END_TIMEOUT_S: Final = 5.0
"""Longest wait for the end of a killed zygote of an earlier daemon, which is not this process's child."""

HUNG_AFTER_S: Final = 20.0
"""Time without an answer to pings after which a zygote is killed. While it hangs, no worker that ends is reaped, so the
zygote must be dead before such a worker's bytes are fenced (reclaim_timeout_s of [limits], 30)."""

MAX_WAITING: Final = 16_384
"""Maximum number of messages that wait for room in the channel: several for each possible lease (max_leases of
[limits], 4096). The kernel has room for about 180. Stops a zygote that does not read from filling the broker's
memory."""


class ZygoteClient:
    """A zygote process and the channel to it.

    Args:
        driver: The driver by which workers open their contexts.
        on_message: Called with this zygote, each of its messages, and the descriptors, which then belong to the callee.
        on_exit: Called once with this zygote when it has ended; its workers die with it.
        sandbox: The workers' sandbox.
        folder: Where it listens for the next broker; None for one that dies with this one.
        wipes_heap: Whether it and its workers overwrite memory that they free.

    Attributes:
        findings: The sandbox measures that its workers are under, as the zygote reported them when it was ready.
        version: The daemon's version that its code and its workers' code come from.
        is_current: Whether that is the code of this daemon, with the same settings for workers.
    """

    def __init__(
        self,
        driver: str,
        on_message: Callable[["ZygoteClient", FromZygote, list[int]], None],
        on_exit: Callable[["ZygoteClient"], None],
        sandbox: SandboxSettings,
        folder: Path | None = None,
        wipes_heap: bool = False,
    ) -> None:
        self.findings: list[dict[str, Any]] = []
        self.version, self.is_current = VERSION, True
        self._driver = driver
        self._sandbox = sandbox
        self._on_message = on_message
        self._on_exit = on_exit
        self._folder = folder
        self._wipes_heap = wipes_heap
        self._channel: socket.socket | None = None
        self._outbox: Outbox | None = None
        # This broker's child, or the pidfd of a process that an earlier broker started.
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._pidfd = -1
        self._path: Path | None = None
        self._preloaded: asyncio.Future[None] | None = None
        self._heartbeat = Heartbeat(ordinary_timeouts().beat_s, HUNG_AFTER_S, self._ping, self._kill_hung)

    @property
    def outlives_its_broker(self) -> bool:
        """Return whether the zygote remembers workers that have ended until the broker orders it to forget them."""
        return self._folder is not None

    @property
    def is_running(self) -> bool:
        """Return whether there is a channel to the zygote."""
        return self._channel is not None

    # --- begin and end ---

    async def start(self) -> None:
        """Start the process and wait until it can fork workers. Raises ZygoteBroken."""
        loop = asyncio.get_running_loop()
        try:
            # Step 1: start the process. It imports the driver and then reports Preloaded or Broken.
            self._channel = self._launch()
        except OSError as error:
            raise ZygoteBroken(f"no process can be started: {error.strerror or error}") from None
        self._outbox = Outbox(self._channel)
        # Step 2: make the future before the reader, so that the first message completes it.
        self._preloaded = loop.create_future()
        loop.add_reader(self._channel, self.read_arrived)
        try:
            # Step 3: wait. No worker is requested before that.
            await answer_within(self._preloaded, START_TIMEOUT_S)
        except TimeoutError:
            self.stop()
            raise ZygoteBroken(f"the zygote was not ready after {START_TIMEOUT_S:g} s") from None
        except BaseException:
            self.stop()
            raise
        self._heartbeat.begin()

    def _launch(self) -> socket.socket:
        """Start the process. The caller must be the main thread: the process ends with the thread that started it.

        Source: prctl(2), PR_SET_PDEATHSIG.
        """
        command = [sys.executable, "-P", "-m", "gpulease.daemon.zygote"]
        # Keep BLAS from starting threads on import, which would make every fork unsafe.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        if self._wipes_heap:
            environment |= WIPING_HEAP
        # `undo` closes our ends after a failure; `handed_over` closes the zygote's ends here in any case.
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as handed_over:
            own_end, peer_end = channel_pair()
            undo.callback(own_end.close)
            handed_over.callback(peer_end.close)
            own_end.setblocking(False)
            arguments = [self._driver, str(peer_end.fileno()), str(os.getpid()), self._sandbox.to_text()]
            fds = [peer_end.fileno()]
            if self._folder is not None:
                # The broker makes the socket, so that the next broker finds it as soon as the process exists.
                self._path = self._folder / f"{secrets.token_hex(4)}.sock"
                listener = handed_over.enter_context(channel_listener(str(self._path)))
                arguments.append(str(listener.fileno()))
                fds.append(listener.fileno())
            # Start it in its own session, because only the broker handles a Ctrl-C at its terminal.
            self._process = subprocess.Popen(
                command + arguments,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
            self._pid = self._process.pid
            undo.pop_all()
        return own_end

    def take_over(self, found_zygote: FoundZygote) -> bool:
        """Take over a zygote that an earlier broker left. Returns whether it can fork workers for this one."""
        # From now on treat it as if this broker had started it, except that it is not our child: the channel and the
        # pidfd show its end.
        self._channel, self._pidfd, self._path = found_zygote.channel, found_zygote.pidfd, found_zygote.path
        self._channel.setblocking(False)
        self._outbox = Outbox(self._channel)
        asyncio.get_running_loop().add_reader(self._channel, self.read_arrived)
        self._pid, self.findings = found_zygote.pid, found_zygote.findings
        if found_zygote.answers_pings:
            self._heartbeat.begin()
        # Compare builds as well: with versions alone, an upgrade of the same version would have no effect while this
        # zygote runs.
        own = (VERSION, own_build(), self._driver, self._sandbox.to_text(), self._wipes_heap)
        self.version = found_zygote.version
        self.is_current = (
            found_zygote.version,
            found_zygote.build,
            found_zygote.driver,
            found_zygote.sandbox,
            found_zygote.wipes_heap,
        ) == own
        return self.is_current

    def stop(self) -> None:
        """End the zygote, and with it all its workers. No callback is called."""
        self._close_channel()
        # Reap a child. A zygote of an earlier daemon is another process's child, so only wait for its end.
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            has_ended(self._pidfd, END_TIMEOUT_S)
            os.close(self._pidfd)
            self._pidfd = -1
        # Remove the socket, so that the next broker does not try to take over this zygote.
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def leave(self) -> None:
        """Close the channel, and leave the zygote to the next broker."""
        self._close_channel()
        if self._process is not None:
            # This process is about to end, so another becomes the zygote's parent and waits for it.
            self._process.returncode = 0
            self._process = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _close_channel(self) -> None:
        self._heartbeat.end()
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None
        if self._channel is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._channel)
            loop.remove_writer(self._channel)
            self._channel.close()
            self._channel = None

    def _kill_hung(self, _: str) -> None:
        """Kill a zygote that hangs. Then `_read` finds its channel closed, as for any zygote that dies.

        A zygote that hangs forks and reaps no workers, so every lease that ends would leave a fence.
        """
        log_event(LogEvent.ZYGOTE_HUNG, zygote_pid=self._pid)
        if self._process is not None:
            self._process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    # --- to the zygote ---

    def spawn(self, spec: WorkerSpec, channel_fd: int, page_fds: PageFds, broker_end_fd: int) -> None:
        """Request a worker. Raises ChannelClosed, or OSError if the message can't be sent soon."""
        # A zygote that outlives its broker keeps the broker's end of each channel for the next one.
        inherited_fds = (broker_end_fd,) if self.outlives_its_broker else ()
        self._send(spec, (channel_fd, *page_fds, *inherited_fds))

    def change(self, serial: int, spec: WorkerSpec, on_sent: Callable[[], None]) -> None:
        """Report to the zygote that a worker has another lease.

        The next broker needs this, and so does the log, which names the lease of a worker's output. `on_sent` is called
        once the message is sent. Raises as `spawn` does.
        """
        self._send(LeaseChanged(spec, serial), (), on_sent)

    def renew(self, serial: int, spec: WorkerSpec, page_fds: PageFds) -> None:
        """Report that a worker was scrubbed and has other control pages. Raises as `spawn` does."""
        self._send(PagesRenewed(spec, serial), page_fds)

    def forget(self, serial: int) -> None:
        """Report that a worker's bytes are proved free, so that no broker needs a record of the worker any more."""
        if self.outlives_its_broker:
            self._send_or_drop(WorkerForgotten(serial))

    def retire(self) -> None:
        """Order the zygote to end with the last of its workers."""
        self._send_or_drop(Retire())

    def _ping(self) -> None:
        # While messages wait for room, `_flush` counts each one that is read as an answer.
        if not self._outbox:
            self._send(LivenessPing())

    def _send_or_drop(self, message: Message) -> None:
        # A zygote that has ended needs no message. If the channel is full because the zygote does not read, the lost
        # message only makes it keep a record for too long.
        with contextlib.suppress(ChannelClosed, BlockingIOError):
            self._send(message)

    def _send(self, message: Message, fds: tuple[int, ...] = (), on_sent: Callable[[], None] = lambda: None) -> None:
        """Send a message as soon as there is room for it. Raises as `spawn` does."""
        if self._channel is None or self._outbox is None:
            raise ChannelClosed("the zygote is not running")
        if len(self._outbox) >= MAX_WAITING:
            raise BlockingIOError(errno.EAGAIN, f"{MAX_WAITING} messages wait for the zygote")
        self._outbox.send(message.to_map(), fds, on_sent)
        if self._outbox:
            asyncio.get_running_loop().add_writer(self._channel, self._flush)

    def _flush(self) -> None:
        if self._channel is None or self._outbox is None:
            return
        # `_read` notices a closed channel.
        with contextlib.suppress(ChannelClosed):
            if self._outbox.flush():
                self._heartbeat.on_answer()
            if self._outbox:
                return
        asyncio.get_running_loop().remove_writer(self._channel)

    # --- from the zygote ---

    def read_arrived(self) -> None:
        """Process all messages that have arrived: the zygote is trusted, and reports workers that have ended."""
        while self._channel is not None:
            try:
                message, fds = receive_message(self._channel)
            except BlockingIOError:
                return
            except ChannelClosed:
                self._on_closed()
                return
            self._on_received(message, fds)

    def _on_received(self, received: dict[str, Any], fds: list[int]) -> None:
        message: FromZygote | None = None
        with contextlib.suppress(MalformedMessage):
            message = parse_message(FROM_ZYGOTE, received)
        # The first message of a new zygote is what `start` waits for.
        if self._preloaded is not None and not self._preloaded.done():
            close_all(fds)
            self._on_first_message(message, self._preloaded)
        elif isinstance(message, Pong):
            close_all(fds)
            self._heartbeat.on_answer()
        elif message is not None:
            self._on_message(self, message, fds)
        else:
            close_all(fds)

    def _on_first_message(self, message: FromZygote | None, preloaded: asyncio.Future[None]) -> None:
        match message:
            case Preloaded(findings):
                self.findings = findings
                preloaded.set_result(None)
            case HelperBroken(reason, hint, is_misconfigured):
                status = os.EX_CONFIG if is_misconfigured else os.EX_UNAVAILABLE
                preloaded.set_exception(ZygoteBroken(reason, hint, status))
            case _:
                preloaded.set_exception(ZygoteBroken("the zygote's first message does not say that it is ready"))

    def _on_closed(self) -> None:
        self.stop()
        if self._preloaded is not None and not self._preloaded.done():
            self._preloaded.set_exception(ZygoteBroken("the zygote died while it was starting; its log says why"))
            return
        if self._preloaded is not None and (self._preloaded.cancelled() or self._preloaded.exception() is not None):
            return  # It never forked a worker, and `start` has raised the reason.
        self._on_exit(self)
