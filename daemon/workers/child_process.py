"""Whether a process that the broker speaks to lives: it is asked, and what never answers is given up.

Processes whose end the loop waits for: it is told by their descriptors (pidfd_open(2)), and never held up.

A process that the broker keeps beside it: started, listened to, asked for signs of life, ended, and started anew.

So live the gate and the web process. The zygote, which may be an earlier broker's and is left to the next one, is asked
for signs of life as they are.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from gpulease.daemon.host.fd_passing import refuse_descriptors
from gpulease.daemon.host.ipc import ChannelClosed, channel_pair, close_all, receive_message, send_message
from gpulease.daemon.host.processes import exit_text
from gpulease.daemon.host.socket_activation import CannotListen
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event


class Heartbeat:
    """Asks one again and again.

    Questions are counted, not seconds: while this process was stopped, stuck, or suspended with its host, none was
    asked; and what was answered meanwhile is read before the next one.

    Args:
        beat_s: Between two questions.
        hung_after_s: Of questions in a row without an answer: then it is not asked again but given up.
        ask: Sends a question; may raise ChannelClosed or BlockingIOError.
        on_silence: Gives it up; gets a clause for the log.
    """

    def __init__(
        self, beat_s: float, hung_after_s: float, ask: Callable[[], None], on_silence: Callable[[str], None]
    ) -> None:
        self._beat_s = beat_s
        self._most_unanswered = max(1, round(hung_after_s / beat_s))
        self._ask = ask
        self._on_silence = on_silence
        self._unanswered = 0
        self._next: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Ask from now on."""
        self.end()
        self._unanswered = 0
        self._beat()

    def on_answer(self) -> None:
        """It lives."""
        self._unanswered = 0

    def end(self) -> None:
        """Ask no more."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _beat(self) -> None:
        if self._unanswered >= self._most_unanswered:
            self._next = None
            self._on_silence(f"it gave no sign of life for {self._unanswered * self._beat_s:g} s")
            return
        self._unanswered += 1
        self._next = asyncio.get_running_loop().call_later(self._beat_s, self._beat)
        # One that has no room for the question has not answered the earlier ones either.
        with contextlib.suppress(BlockingIOError, ChannelClosed):
            self._ask()


class Child:
    """One that was started here: reaped when it has ended, be that an hour after it was killed."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """Raises OSError, and ends it, if there is no descriptor left to watch it by."""
        self._process = process
        self._ended = asyncio.Event()
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def kill(self) -> None:
        """End it, if it has not ended yet."""
        self._process.kill()

    async def end(self, within_s: float) -> str | None:
        """How it ended, in words, once it has; None if it has not in time."""
        try:
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        except TimeoutError:
            return None
        status = self._process.returncode
        return exit_text(status << 8 if status >= 0 else -status)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._ended.set()


def reap_later(pid: int, on_end: Callable[[int], None]) -> None:
    """Tell when a process has ended that was not started here, and reap it if it is a child all the same.

    A descendant becomes one when its own parent dies (see processes.adopt_orphans); what an earlier daemon left never
    does.
    """
    loop = asyncio.get_running_loop()
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        on_end(pid)
        return

    def reap() -> None:
        loop.remove_reader(pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)
        on_end(pid)

    loop.add_reader(pidfd, reap)


START_TIMEOUT_S: Final = 30.0
"""For one to serve: the web process imports an HTTP server, which a cold disk takes seconds for."""

EXIT_S: Final = 1.0
"""For one that has closed its channel to be gone by itself, so that the log has how; then it is killed."""

END_TIMEOUT_S: Final = 5.0
"""For one that was killed to be gone. What is in a system call that can't be interrupted, of a disk that hangs, goes
later; nobody waits for that."""

RESTART_DELAY_S: Final = 1.0
"""Between the death of one and the next; twice as long after each that has not lived for STEADY_S. Stops one that dies
at once from being started in a busy loop."""

MAX_RESTART_DELAY_S: Final = 60.0

STEADY_S: Final = 60.0

BEAT_S: Final = 5.0
"""Between two questions whether one lives."""

HUNG_AFTER_S: Final = 30.0
"""Of questions without an answer, until one is killed: long, for hosts under heavy load."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long things may take; each field is the constant of its name."""

    start_s: float
    exit_s: float
    end_s: float
    restart_s: float
    max_restart_s: float
    steady_s: float
    beat_s: float
    hung_after_s: float


def ordinary_timeouts() -> Timeouts:
    """A daemon's."""
    return Timeouts(
        START_TIMEOUT_S, EXIT_S, END_TIMEOUT_S, RESTART_DELAY_S, MAX_RESTART_DELAY_S, STEADY_S, BEAT_S, HUNG_AFTER_S
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildKind:
    """What a process is, and what is logged of it.

    Attributes:
        name: What it is called in sentences, "the ..." for one.
        module: What is run: with the channel's descriptor, the broker's process id, and `arguments`.
        broken: What can't be done if it says that it is broken, to go before the reason.
        environment: Variables besides the daemon's own.
        passes_descriptors: Whether it has any to send.
        died, hung, not_started, back: What is logged, and when; the first three have a field `reason`.
    """

    name: str
    module: str
    broken: str
    died: LogEvent
    hung: LogEvent
    not_started: LogEvent
    back: LogEvent
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    passes_descriptors: bool = False


class ChildProcess:
    """One process after the other, each with a channel to it.

    Args:
        on_start: Has a new one serve, by `send` and `expect`. May raise CannotListen, OSError, or what these two raise.
        on_message: Takes what one says, but for what is said here; of the descriptors those that it takes out are its.
        on_end: Called when one that was started is gone, or as good as gone.
    """

    def __init__(
        self,
        kind: ChildKind,
        on_start: Callable[[], Awaitable[None]],
        on_message: Callable[[dict[str, Any], list[int]], None],
        on_end: Callable[[], None] = lambda: None,
        patience: Timeouts | None = None,
    ) -> None:
        self._kind = kind
        self._on_start = on_start
        self._on_message = on_message
        self._on_end = on_end
        self._patience = patience or ordinary_timeouts()
        self._channel: socket.socket | None = None
        self._child: Child | None = None
        self._awaited: asyncio.Future[None] | None = None
        self._awaited_word = ""
        self._is_up = False
        self._restarting: asyncio.Task[None] | None = None
        self._delay_s = self._patience.restart_s
        self._began_s = 0.0
        ask = partial(self.send, {"op": "ping"})
        self._heartbeat = Heartbeat(self._patience.beat_s, self._patience.hung_after_s, ask, self.give_up)

    @property
    def pid(self) -> int:
        """The process's id; 0 if there is none."""
        return 0 if self._child is None else self._child.pid

    @property
    def is_running(self) -> bool:
        """Whether it can be spoken to."""
        return self._channel is not None

    async def start(self) -> None:
        """Start one and wait until it serves; from then on there is always one. Raises CannotListen."""
        kind = self._kind
        try:
            self._launch()
            async with asyncio.timeout(self._patience.start_s):
                await self._on_start()
            if self._channel is None:
                raise ChannelClosed("it is gone")
        except TimeoutError:
            await self._end()
            raise CannotListen(f"{kind.name} was not ready after {self._patience.start_s:g} s") from None
        except ChannelClosed:
            await self._end()
            raise CannotListen(f"{kind.name} died as it started; the log says why") from None
        except OSError as error:
            await self._end()
            raise CannotListen(f"{kind.name} can't be started: {error.strerror or error}") from None
        except BaseException:
            await self._end()
            raise
        self._is_up, self._began_s = True, time.monotonic()
        self._heartbeat.begin()

    async def stop(self) -> None:
        """End it, and start no other."""
        if self._restarting is not None:
            self._restarting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restarting
        self._is_up = False
        await self._end()

    def give_up(self, reason: str) -> None:
        """End the one that runs, which hangs, and start another; `reason`, for the log, is a clause."""
        if self._child is not None:
            self._child.kill()
        self._lose(self._kind.hung, reason)

    def expect(self, word: str) -> asyncio.Future[None]:
        """Done once it says {"op": word}; fails with CannotListen if it says why it can't, or ChannelClosed."""
        self._awaited = asyncio.get_running_loop().create_future()
        self._awaited_word = word
        if self._channel is None:
            self._awaited.set_exception(ChannelClosed("it is gone"))
        return self._awaited

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Say something. Raises ChannelClosed, or BlockingIOError if it has not read for long."""
        if self._channel is None:
            raise ChannelClosed(f"{self._kind.name} is not running")
        send_message(self._channel, message, fds)

    def to_this_one(self) -> Callable[[dict[str, Any]], None]:
        """Says things to the one that runs now: they are lost, to the next one too, if it is gone or does not read."""
        channel = self._channel

        def say(message: dict[str, Any]) -> None:
            if channel is not None and channel is self._channel:
                with contextlib.suppress(BlockingIOError, ChannelClosed):
                    send_message(channel, message)

        return say

    # --- its begin and its end ---

    def _launch(self) -> None:
        """Start the process; from this thread, whose end would be its end too (prctl(2), PR_SET_PDEATHSIG)."""
        ours, theirs = channel_pair()
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            ours.setblocking(False)
            if not self._kind.passes_descriptors:
                refuse_descriptors(ours)
            command = [sys.executable, "-P", "-m", self._kind.module, str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(
                [*command, *self._kind.arguments],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                # A Ctrl-C at the broker's terminal is the broker's to handle.
                start_new_session=True,
                env=os.environ | self._kind.environment,
            )
            self._child = Child(process)
            undo.pop_all()
        self._channel = ours
        asyncio.get_running_loop().add_reader(ours, self._read)

    def _lose(self, event: LogEvent, reason: str) -> None:
        """It is dead, or is to be: start another if it was more than a try."""
        self._hang_up()
        if self._is_up:
            self._is_up = False
            self._restarting = asyncio.get_running_loop().create_task(self._replace(event, reason))
        elif self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(ChannelClosed("it is gone"))

    def _hang_up(self) -> None:
        self._heartbeat.end()
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None

    async def _end(self) -> None:
        self._hang_up()
        if self._child is not None:
            self._child.kill()
            await self._child.end(self._patience.end_s)
            self._child = None
            self._on_end()

    async def _replace(self, event: LogEvent, reason: str) -> None:
        if time.monotonic() - self._began_s > self._patience.steady_s:
            self._delay_s = self._patience.restart_s
        how = None
        if event is self._kind.died and self._child is not None:
            how = await self._child.end(self._patience.exit_s)
        await self._end()
        log_event(event, reason=how or reason)
        while True:
            await asyncio.sleep(self._delay_s)
            self._delay_s = min(2 * self._delay_s, self._patience.max_restart_s)
            try:
                await self.start()
            except CannotListen as error:
                log_event(self._kind.not_started, reason=str(error))
                continue
            log_event(self._kind.back)
            return

    # --- what it says ---

    def _read(self) -> None:
        """One word in a turn of the loop: whoever took the process over could talk for ever."""
        if self._channel is None:
            return
        try:
            message, fds = receive_message(self._channel)
        except BlockingIOError:
            return
        except ChannelClosed as error:
            self._lose(self._kind.died, str(error))
            return
        try:
            self._take(message, fds)
        finally:
            close_all(fds)

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        awaited = None if self._awaited is None or self._awaited.done() else self._awaited
        match message:
            case {"op": "pong"}:
                self._heartbeat.on_answer()
            case {"op": "broken", "reason": reason} if awaited is not None:
                awaited.set_exception(CannotListen(f"{self._kind.broken}: {reason}"))
            case {"op": word} if awaited is not None and word == self._awaited_word:
                awaited.set_result(None)
            case _:
                self._on_message(message, fds)
