"""A helper process of the broker: the broker starts it, pings it, kills it if it hangs, and replaces it when it ends.

The relays' acceptor, the web process and the fleet process are helper processes. `Heartbeat` also pings the zygote. The
zygote is different: an earlier broker may have started it, and it is left to the next broker.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any, Final

from gpulease.daemon.contract.message_fields import MalformedMessage, Message, expect_message, request_of
from gpulease.daemon.contract.messages import FROM_HELPER, HelperBroken, HelperPrepared, LivenessPing, Pong, Ready
from gpulease.daemon.host.answers import answer_within
from gpulease.daemon.host.ipc import ChannelClosed, Outbox, channel_pair, close_all, receive_message, send_message
from gpulease.daemon.host.processes import exit_text
from gpulease.daemon.host.socket_activation import CannotListen
from gpulease.daemon.host.unsolicited_fds import refuse_descriptors
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.rate_limit import LINE_EVERY_S, RateLimit
from gpulease.daemon.log.writer import log_event
from gpulease.protocol.back_off import back_off_s
from gpulease.protocol.fast_dataclass import dataclass

START_TIMEOUT_S: Final = 30.0
"""Longest time until a process serves. The web process imports an HTTP server, which takes seconds from a cold disk."""

EXIT_S: Final = 1.0
"""Time within which a process that has closed its channel may end by itself, so that the log has the reason. After it,
the process is killed."""

END_TIMEOUT_S: Final = 5.0
"""Longest wait for a killed process to end. If it is in a system call that can't be interrupted, for example on a hung
disk, it ends later, and nothing waits for that."""

RESTART_DELAY_S: Final = 1.0
"""Pause between the death of a process and the next start. It is doubled after each process that has not run for
STEADY_S. Stops a process that dies at once from being started in a busy loop."""

MAX_RESTART_DELAY_S: Final = 60.0

STEADY_S: Final = 60.0

BEAT_S: Final = 5.0

HUNG_AFTER_S: Final = 30.0
"""Time without an answer to pings after which a process is killed. It is long, because hosts may be under heavy
load."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits. Each field has the constant of the same name as its default."""

    start_s: float
    exit_s: float
    end_s: float
    restart_s: float
    max_restart_s: float
    steady_s: float
    beat_s: float
    hung_after_s: float


def ordinary_timeouts() -> Timeouts:
    """Return the timeouts of a daemon; tests use shorter ones."""
    return Timeouts(
        START_TIMEOUT_S, EXIT_S, END_TIMEOUT_S, RESTART_DELAY_S, MAX_RESTART_DELAY_S, STEADY_S, BEAT_S, HUNG_AFTER_S
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildKind:
    """The program of a child process, and the log events about it.

    Attributes:
        name: Its name in sentences, with "the".
        module: The module to run. Its arguments are the channel's descriptor, the broker's process id, and `arguments`.
        sends: The messages that it may send, in addition to those of every helper process.
        broken: Clause that precedes the reason when the process reports that it can't work.
        environment: Variables in addition to the daemon's own.
        passes_descriptors: Whether the process sends descriptors.
        died, hung, not_started, back: The log events; the first three have a field `reason`.
    """

    name: str
    module: str
    sends: Mapping[str, type[Message]]
    broken: str
    died: LogEvent
    hung: LogEvent
    not_started: LogEvent
    back: LogEvent
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    passes_descriptors: bool = False


class ChildProcess:
    """A program that is kept running: if its process ends, another one is started. Each has a channel to this process.

    Args:
        kind: The program.
        on_start: Makes a new process serve, with `send` and `expect`. May raise CannotListen, OSError and
          ChannelClosed.
        on_message: Called with each message of `kind.sends`, and its descriptors. The callee removes the descriptors
          that it keeps from the list; the others are closed.
        on_end: Called when a process has ended, or was killed and does not end.
        on_unhandled: Called with the number of a request or an answer that can't be read, or that raised an exception
          when it was handled. The callee must answer the waiting request.
        timeouts: The time limits; None for a daemon's.
    """

    def __init__(
        self,
        kind: ChildKind,
        on_start: Callable[[], Awaitable[None]],
        on_message: Callable[[Any, list[int]], None],
        on_end: Callable[[], None] = lambda: None,
        timeouts: Timeouts | None = None,
        on_unhandled: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._kind = kind
        self._on_start = on_start
        self._on_message = on_message
        self._on_end = on_end
        self._on_unhandled = on_unhandled
        self._messages: Mapping[str, type[Message]] = {**FROM_HELPER, **kind.sends}
        self._fault_lines = RateLimit(LINE_EVERY_S)
        self._timeouts = timeouts or ordinary_timeouts()
        # The current process: its channel, the messages that wait for room in it, and the message that `start` waits
        # for.
        self._channel: socket.socket | None = None
        self._outbox: Outbox | None = None
        self._child: _Child | None = None
        self._expected: asyncio.Future[None] | None = None
        self._expected_kind: type[Message] = Ready
        # Whether it has served, so that it is restarted when it ends; and the number of restarts in a row.
        self._is_up = False
        self._restarting: asyncio.Task[None] | None = None
        self._restarts = 0
        self._began_s = 0.0
        ping = partial(self.send, LivenessPing())
        self._heartbeat = Heartbeat(self._timeouts.beat_s, self._timeouts.hung_after_s, ping, self.give_up)

    @property
    def pid(self) -> int:
        """The process id; 0 while no process runs, for example between an end and the next start."""
        return 0 if self._child is None else self._child.pid

    @property
    def is_running(self) -> bool:
        """Return whether there is a channel to a process."""
        return self._channel is not None

    async def start(self) -> None:
        """Start a process and wait until it serves. From then on it is replaced if it ends. Raises CannotListen."""
        kind = self._kind
        try:
            # Start the process, with its channel, and wait until it serves.
            self._launch()
            await answer_within(self._begin(), self._timeouts.start_s)
        # After any failure end the process: a half-started one would answer pings but not serve.
        except TimeoutError:
            await self._end()
            raise CannotListen(f"{kind.name} was not ready after {self._timeouts.start_s:g} s") from None
        except ChannelClosed:
            await self._end()
            raise CannotListen(f"{kind.name} died while it was starting; the log says why") from None
        except OSError as error:
            await self._end()
            raise CannotListen(f"{kind.name} can't be started: {error.strerror or error}") from None
        except BaseException:
            self._is_up = False
            await self._end()
            raise

    async def _begin(self) -> None:
        """Make a new process serve. Raises what `on_start` may raise."""
        # Step 1: the owner sends it what it needs, and waits until it reports that it serves.
        await self._on_start()
        # The process may have died after that message.
        if self._channel is None:
            raise ChannelClosed("it is gone")
        # Step 2: from now on, start another process when this one ends.
        self._is_up, self._began_s = True, time.monotonic()
        self._heartbeat.begin()

    async def stop(self) -> None:
        """End the process permanently, and cancel a restart that is due."""
        # Cancel the restart first: otherwise it would start the next process while this one is being ended.
        if self._restarting is not None:
            self._restarting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restarting
        self._is_up = False
        await self._end()

    def give_up(self, reason: str) -> None:
        """Kill the process, because it hangs, and start another one. `reason`: a clause for the log."""
        # Use SIGKILL, because a process that hangs does not notice that its channel is closed.
        if self._child is not None:
            self._child.kill()
        self._on_lost(self._kind.hung, reason)

    def expect(self, kind: type[HelperPrepared] | type[Ready]) -> asyncio.Future[None]:
        """Return a future that is done once the process sends a message of that class.

        It fails with CannotListen if the process sends Broken instead, and with ChannelClosed if it ends.
        """
        # The caller must call this before it sends its request, because the answer may come at once.
        self._expected = asyncio.get_running_loop().create_future()
        self._expected_kind = kind
        if self._channel is None:
            self._expected.set_exception(ChannelClosed("it is gone"))
        return self._expected

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message. Raises ChannelClosed, or BlockingIOError if the process has not read for a long time."""
        if self._channel is None:
            raise ChannelClosed(f"{self._kind.name} is not running")
        send_message(self._channel, message.to_map(), fds)

    def send_in_turn(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message now, or as soon as the process has read the earlier ones. Raises ChannelClosed.

        The caller bounds the waiting messages by `unsent`; the heartbeat ends a process that does not read.
        """
        if self._channel is None or self._outbox is None:
            raise ChannelClosed(f"{self._kind.name} is not running")
        self._outbox.send(message.to_map(), fds)
        if len(self._outbox):
            asyncio.get_running_loop().add_writer(self._channel, self._flush)

    @property
    def unsent(self) -> int:
        """Number of messages that wait for the process to read."""
        return 0 if self._outbox is None else len(self._outbox)

    def to_this_one(self) -> Callable[[Message], None]:
        """Return a function that sends to the current process. Messages are lost once it has ended or does not read."""
        # Keep the channel, so that a late answer is not sent to the successor of the process that asked.
        channel = self._channel

        def send(message: Message) -> None:
            if channel is not None and channel is self._channel:
                with contextlib.suppress(BlockingIOError, ChannelClosed):
                    send_message(channel, message.to_map())

        return send

    # --- begin and end ---

    def _launch(self) -> None:
        """Start the process. The caller must be the main thread: the process ends with the thread that started it.

        Source: prctl(2), PR_SET_PDEATHSIG.
        """
        own_end, peer_end = channel_pair()
        with contextlib.ExitStack() as undo, peer_end:
            undo.callback(own_end.close)
            own_end.setblocking(False)
            if not self._kind.passes_descriptors:
                refuse_descriptors(own_end)
            command = [sys.executable, "-P", "-m", self._kind.module, str(peer_end.fileno()), str(os.getpid())]
            process = subprocess.Popen(
                [*command, *self._kind.arguments],
                pass_fds=(peer_end.fileno(),),
                stdin=subprocess.DEVNULL,
                # Only the broker handles a Ctrl-C at its terminal.
                start_new_session=True,
                env=os.environ | self._kind.environment,
            )
            self._child = _Child(process)
            undo.pop_all()
        self._channel, self._outbox = own_end, Outbox(own_end)
        asyncio.get_running_loop().add_reader(own_end, self._read)

    def _on_lost(self, event: LogEvent, reason: str) -> None:
        """Close the channel of a process that is dead or about to be killed.

        Start another one if this one has served.
        """
        # Close the channel first: from now on, send nothing to this process and read nothing from it.
        self._close_channel()
        if self._is_up:
            self._is_up = False
            self._restarting = asyncio.get_running_loop().create_task(self._replace(event, reason))
        elif self._expected is not None and not self._expected.done():
            self._expected.set_exception(ChannelClosed("it is gone"))

    def _close_channel(self) -> None:
        self._heartbeat.end()
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            asyncio.get_running_loop().remove_writer(self._channel)
            self._channel.close()
            self._channel = None
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None

    async def _end(self) -> None:
        self._close_channel()
        if self._child is not None:
            # Kill it in any case: closing the channel only asks it to end.
            self._child.kill()
            await self._child.end(self._timeouts.end_s)
            self._child = None
            self._on_end()

    async def _replace(self, event: LogEvent, reason: str) -> None:
        # The process ran long enough to count as healthy, so begin with a short pause again.
        if time.monotonic() - self._began_s > self._timeouts.steady_s:
            self._restarts = 0
        # Give a process that closed its channel a moment to end, so that the log has its exit status.
        exit_status = None
        if event is self._kind.died and self._child is not None:
            exit_status = await self._child.end(self._timeouts.exit_s)
        await self._end()
        log_event(event, reason=exit_status or reason)
        # Try forever: without this process a part of the daemon is missing. Each failure is logged.
        while True:
            await asyncio.sleep(back_off_s(self._restarts, self._timeouts.restart_s, self._timeouts.max_restart_s))
            self._restarts += 1
            try:
                await self.start()
            except CannotListen as error:
                log_event(self._kind.not_started, reason=str(error))
                continue
            log_event(self._kind.back)
            return

    # --- messages ---

    def _flush(self) -> None:
        if self._channel is None or self._outbox is None:
            return
        try:
            self._outbox.flush()
        except ChannelClosed:
            # The process has ended; the reader notices that.
            self._outbox.close()
        if not len(self._outbox):
            asyncio.get_running_loop().remove_writer(self._channel)

    def _read(self) -> None:
        """Read one message per turn of the loop, because a compromised process could send forever."""
        if self._channel is None:
            return
        try:
            message, fds = receive_message(self._channel)
        except BlockingIOError:
            return
        except ChannelClosed as error:
            self._on_lost(self._kind.died, str(error))
            return
        try:
            self._take(message, fds)
        finally:
            close_all(fds)

    def _take(self, received: dict[str, Any], fds: list[int]) -> None:
        """Handle one message. If it can't be read or handled, log that and have the waiting request answered."""
        try:
            self._handle(expect_message(self._messages, received), fds)
        except Exception as error:
            # The process was compromised, or this is a bug of ours. If it repeats, it must not fill the log.
            if (suppressed := self._fault_lines.admit()) is not None:
                operation = f"reading a message of {self._kind.name}: {error}"
                operation += f" ({suppressed} more like this)" if suppressed else ""
                log_event(LogEvent.DAEMON_FAULT, is_fault=not isinstance(error, MalformedMessage), doing=operation)
            if (number := request_of(received)) is not None:
                self._on_unhandled(number)

    def _handle(self, message: Message, fds: list[int]) -> None:
        # While `start` waits for Prepared or Ready, that message or Broken is the answer. Pass all other messages to
        # the owner.
        expected = None if self._expected is None or self._expected.done() else self._expected
        match message:
            case Pong():
                self._heartbeat.on_answer()
            case HelperBroken():
                if expected is not None:
                    expected.set_exception(CannotListen(f"{self._kind.broken}: {message.reason}"))
            case HelperPrepared() | Ready():
                if expected is not None and type(message) is self._expected_kind:
                    expected.set_result(None)
            case _:
                self._on_message(message, fds)


class Heartbeat:
    """Pings a process repeatedly, and reports when it stops answering.

    It counts unanswered pings, not seconds: while this process is stopped, stuck, or suspended with its host, it sends
    no ping, and afterwards it reads the answers before it sends the next one.

    Args:
        beat_s: Time between two pings.
        hung_after_s: Time without an answer, counted in pings, after which the process is reported.
        ping: Sends a ping; may raise ChannelClosed or BlockingIOError.
        on_silence: Called once with a clause for the log. After that no ping is sent.
    """

    def __init__(
        self, beat_s: float, hung_after_s: float, ping: Callable[[], None], on_silence: Callable[[str], None]
    ) -> None:
        self._beat_s = beat_s
        self._most_unanswered = max(1, round(hung_after_s / beat_s))
        self._ping = ping
        self._on_silence = on_silence
        self._unanswered = 0
        self._next: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self.end()
        self._unanswered = 0
        self._beat()

    def on_answer(self) -> None:
        self._unanswered = 0

    def end(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _beat(self) -> None:
        # Check this before the next ping: each ping has had a whole interval for its answer.
        if self._unanswered >= self._most_unanswered:
            self._next = None
            self._on_silence(f"it gave no sign of life for {self._unanswered * self._beat_s:g} s")
            return
        # Arm the timer before the ping is sent, because an error of the channel must not end the heartbeat.
        self._unanswered += 1
        self._next = asyncio.get_running_loop().call_later(self._beat_s, self._beat)
        # If the channel has no room for the ping, the process has not answered the earlier pings either.
        with contextlib.suppress(BlockingIOError, ChannelClosed):
            self._ping()


class _Child:
    """A process that this one started.

    The loop reaps it by its pidfd when it ends, even if that is long after its kill.

    Raises OSError, and kills the process, if no descriptor is left for the pidfd.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._ended = asyncio.Event()
        try:
            # The pidfd is readable when the process has ended (pidfd_open(2)), so the loop notices the end without a
            # thread.
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:
            # Without a pidfd the loop would not notice the end, and the process would stay a zombie.
            process.kill()
            process.wait()
            raise
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Kill the process, if it has not ended yet."""
        self._process.kill()

    async def end(self, within_s: float) -> str | None:
        """Wait for the end. Returns a description of how the process ended; None if it has not ended in time."""
        try:
            await answer_within(self._ended.wait(), within_s)
        except TimeoutError:
            return None
        # Popen has -signal for a signal; wait(2) statuses have the exit code in the high byte and the signal in the low
        # one.
        status = self._process.returncode
        return exit_text(status << 8 if status >= 0 else -status)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        # The process has ended, so this does not block.
        self._process.wait()
        self._ended.set()


def reap_later(pid: int, on_end: Callable[[int], None]) -> None:
    """Call `on_end` when a process that another one started has ended, and reap it if it is this process's child.

    A descendant becomes a child when its own parent dies (see processes.adopt_orphans); a process that an earlier
    daemon left never does.
    """
    loop = asyncio.get_running_loop()
    try:
        # No such process: it has been reaped already.
        pidfd = os.pidfd_open(pid)
    except OSError:
        on_end(pid)
        return

    def reap() -> None:
        loop.remove_reader(pidfd)
        # A process that is not this one's child is reaped by its own parent.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)
        on_end(pid)

    loop.add_reader(pidfd, reap)
