"""The web process as the broker sees it: its listening socket, its start, its end, and what goes between the two.

By a connection of the protocol it sees the leases, and changes nothing. By the channel it was started with it passes on
what an operator asks for by the page, with the operator's token, which is looked at here.

The broker holds the socket, so that it outlives a web process that dies; it never reads from it.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpulease.daemon.broker.listening import BACKLOG, CannotListen, reason_of
from gpulease.daemon.broker.page_desk import Acts, PageDesk
from gpulease.daemon.broker.peers import Peer
from gpulease.daemon.channel import ChannelClosed, channel_pair, close_all, receive_message, send_message
from gpulease.daemon.config import ConfigError
from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.logs.telling import tell
from gpulease.daemon.processes import exit_text
from gpulease.daemon.sandbox.settings import SandboxSettings
from gpulease.daemon.web.settings import BadToken, HttpSettings
from gpulease.protocol.address import Address

START_TIMEOUT_S: Final = 30.0
"""For the process to be there: it imports an HTTP server, which a cold disk takes seconds for."""

RESTART_DELAY_S: Final = 1.0
"""Between the death of one and the next; twice as long after each that has not lived for STEADY_S."""

MAX_RESTART_DELAY_S: Final = 60.0

STEADY_S: Final = 60.0

SECRET_BYTES: Final = 32
"""Of what pseudonyms are made with: as long as the hash."""

READER: Final = Peer("gpuleased", is_operator=True, is_known=True, is_reader=True)
"""Who the web process is: one who sees all and may do nothing."""

MakeConnection = Callable[[Peer], asyncio.BaseProtocol]


class WebDoor:
    """The web process and what it was given. Raises ConfigError for a token that can't be used.

    Attributes:
        bound: The descriptor of the socket that was made here, if one was, with its address.
    """

    def __init__(
        self, settings: HttpSettings, sandbox: SandboxSettings, make_connection: MakeConnection, acts: Acts
    ) -> None:
        self.bound: list[tuple[Address, int]] = []
        self._settings = settings
        self._sandbox = sandbox
        self._make_connection = make_connection
        self._token_digest = token_digest_of(settings)
        self._desk = PageDesk(acts, self._token_digest)
        # The same for every process of this broker's, so that a tenant keeps its pseudonym.
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._listener: socket.socket | None = None
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._awaited: asyncio.Future[None] | None = None
        self._awaited_word = ""
        self._restarting: asyncio.Task[None] | None = None
        self._delay_s = RESTART_DELAY_S
        self._began_s = 0.0

    async def listen(self, given: Sequence[socket.socket] = ()) -> str:
        """Listen, start the process, and wait until it serves; returns the page's URL. Raises CannotListen.

        `given`: a socket that listens there already.
        """
        self._listener = given[0] if given else self._bind()
        self._listener.setblocking(False)
        await self._start()
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def take_token(self, digest: bytes) -> None:
        """The operator's token is another from now on, for the process too; `digest`: its SHA-256, b"" for none."""
        if digest == self._token_digest:
            return
        self._token_digest = digest
        self._desk.take_token(digest)
        if self._channel is not None:
            try:
                send_message(self._channel, {"op": "token", "digest": digest})
            except (BlockingIOError, ChannelClosed):
                # It has not read for as long as takes to fill the channel: the next one is given the new token.
                self._gone()

    def _bind(self) -> socket.socket:
        address = self._settings.address
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            listener = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
        except OSError as error:
            where = str(address).removeprefix("tcp:")
            raise CannotListen(f"can't serve the web page at {where}: {reason_of(error)}") from None
        self.bound.append((address, listener.fileno()))
        return listener

    async def stop(self) -> None:
        """Show nothing any more."""
        if self._restarting is not None:
            self._restarting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restarting
        self._end()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as unconnected:
            undo.callback(self._end)
            unconnected.callback(ours.close)
            try:
                with theirs:
                    self._channel = self._launch(theirs)
            except (OSError, ChannelClosed) as error:
                raise CannotListen(f"the web process can't be started: {error}") from None
            loop.add_reader(self._channel, self._read)
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._expect("prepared")
                    # Not before: whoever is connected has little time to introduce itself.
                    ready = self._expect("ready")
                    ours.setblocking(False)
                    await loop.connect_accepted_socket(lambda: self._make_connection(READER), ours)
                    unconnected.pop_all()
                    await ready
            except TimeoutError:
                raise CannotListen(f"the web process was not ready after {START_TIMEOUT_S:g} s") from None
            undo.pop_all()
        self._began_s = time.monotonic()

    def _expect(self, word: str) -> asyncio.Future[None]:
        """Done once the process says so."""
        self._awaited = asyncio.get_running_loop().create_future()
        self._awaited_word = word
        return self._awaited

    def _launch(self, broker: socket.socket) -> socket.socket:
        """Start the process; from this thread, whose end would be its end too (prctl(2), PR_SET_PDEATHSIG)."""
        if self._listener is None:
            raise CannotListen("the web page's socket is closed")
        ours, theirs = channel_pair()
        ours.setblocking(False)
        command = [sys.executable, "-P", "-m", "gpulease.daemon.web", str(theirs.fileno()), str(os.getpid())]
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            self._process = subprocess.Popen(
                [*command, self._sandbox.to_text()],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            undo.callback(self._end)
            host = self._settings.address.host
            hosts = [f"[{host}]" if ":" in host else host, "localhost"]
            told: dict[str, Any] = {"hosts": hosts, "others": sorted(self._settings.hosts)}
            told |= {"token_digest": self._token_digest, "secret": self._secret}
            send_message(ours, told, (broker.fileno(), self._listener.fileno()))
            undo.pop_all()
        return ours

    def _end(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    # --- what it says ---

    def _read(self) -> None:
        """One word in a turn of the loop: whoever took the process over could talk for ever."""
        if self._channel is None:
            return
        try:
            message, fds = receive_message(self._channel)
        except BlockingIOError:
            return
        except ChannelClosed:
            self._gone()
            return
        close_all(fds)
        channel = self._channel
        self._desk.take(message, lambda answer: self._answer(channel, answer))
        self._take(message)

    def _answer(self, channel: socket.socket, message: dict[str, Any]) -> None:
        """To that process, if it is there still and reads."""
        if channel is self._channel:
            with contextlib.suppress(BlockingIOError, ChannelClosed):
                send_message(channel, message)

    def _take(self, message: dict[str, Any]) -> None:
        if self._awaited is None or self._awaited.done():
            return
        match message:
            case {"op": "broken", "reason": reason}:
                self._awaited.set_exception(CannotListen(f"the web process can't serve: {reason}"))
            case {"op": word} if word == self._awaited_word:
                self._awaited.set_result(None)

    def _gone(self) -> None:
        status = None if self._process is None else self._process.poll()
        self._end()
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(CannotListen("the web process died as it started; the log says why"))
            return
        how = None if status is None else exit_text(status << 8 if status >= 0 else -status)
        tell(LogEvent.WEB_DIED, reason=how)
        self._restarting = asyncio.get_running_loop().create_task(self._restart())

    async def _restart(self) -> None:
        if time.monotonic() - self._began_s > STEADY_S:
            self._delay_s = RESTART_DELAY_S
        while True:
            await asyncio.sleep(self._delay_s)
            self._delay_s = min(2 * self._delay_s, MAX_RESTART_DELAY_S)
            try:
                await self._start()
            except CannotListen as error:
                tell(LogEvent.WEB_NOT_STARTED, reason=str(error))
                continue
            tell(LogEvent.WEB_BACK)
            return


def token_digest_of(settings: HttpSettings) -> bytes:
    """The SHA-256 of the operator's token as its file has it now, b"" if there is none. Raises ConfigError."""
    try:
        return settings.token_digest()
    except BadToken as error:
        raise ConfigError(f"setting http_token_file: {error}") from None
