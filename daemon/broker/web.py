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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from gpulease.daemon.broker.cannot_listen import CannotListen, cannot_listen
from gpulease.daemon.broker.listening import BACKLOG
from gpulease.daemon.broker.page_desk import Acts, PageDesk
from gpulease.daemon.broker.peers import Peer
from gpulease.daemon.broker.side_process import Kind, Patience, SideProcess
from gpulease.daemon.channel import ChannelClosed
from gpulease.daemon.config import ConfigError
from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.sandbox.settings import SandboxSettings
from gpulease.daemon.uninvited import refuse_descriptors
from gpulease.daemon.web.settings import BadToken, HttpSettings
from gpulease.protocol.address import Address

SECRET_BYTES: Final = 32
"""Of what pseudonyms are made with: as long as the hash."""

READER: Final = Peer("gpuleased", is_operator=True, is_known=True, is_reader=True)
"""Who the web process is: one who sees all and may do nothing."""

TELL_AGAIN_S: Final = 0.05
"""Until a process that is just starting is told more, once its channel is full."""

MakeConnection = Callable[[Peer], asyncio.BaseProtocol]


class WebDoor:
    """The web process and what it was given. Raises ConfigError for a token that can't be used.

    Args:
        loads: What a new process is told of the cards' last hour: `LoadHistory.messages`.

    Attributes:
        bound: The descriptor of the socket that was made here, if one was, with its address.
    """

    def __init__(
        self,
        settings: HttpSettings,
        sandbox: SandboxSettings,
        make_connection: MakeConnection,
        acts: Acts,
        patience: Patience | None = None,
        loads: Callable[[], Iterable[dict[str, Any]]] = tuple,
    ) -> None:
        self._loads = loads
        self.bound: list[tuple[Address, int]] = []
        self._settings = settings
        self._make_connection = make_connection
        self._token_digest = token_digest_of(settings)
        self._desk = PageDesk(acts, self._token_digest)
        # The same for every process of this broker's, so that a tenant keeps its pseudonym.
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._listener: socket.socket | None = None
        self._process = SideProcess(_web_of(sandbox), self._begin, self._take, patience=patience)

    async def listen(self, given: Sequence[socket.socket] = ()) -> str:
        """Listen, start the process, and wait until it serves; returns the page's URL. Raises CannotListen.

        `given`: a socket that listens there already.
        """
        self._listener = given[0] if given else self._bind()
        self._listener.setblocking(False)
        await self._process.start()
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def take_token(self, digest: bytes) -> None:
        """The operator's token is another from now on, for the process too; `digest`: its SHA-256, b"" for none."""
        if digest == self._token_digest:
            return
        self._token_digest = digest
        self._desk.take_token(digest)
        try:
            self._process.send({"op": "token", "digest": digest})
        except BlockingIOError:
            self._process.give_up("it has not read for as long as takes to fill its channel")
        except ChannelClosed:
            pass  # the next one is given the new token

    def tell_load(self, message: dict[str, Any]) -> None:
        """A sample of a card was taken. It is lost to a process that does not read: its page shows a gap."""
        with contextlib.suppress(BlockingIOError, ChannelClosed):
            self._process.send(message)

    def _bind(self) -> socket.socket:
        address = self._settings.address
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            listener = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
        except OSError as error:
            where = str(address).removeprefix("tcp:")
            raise cannot_listen(f"serve the web page at {where}", error, "gpulease-http.socket") from None
        self.bound.append((address, listener.fileno()))
        return listener

    async def stop(self) -> None:
        """Show nothing any more."""
        await self._process.stop()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _begin(self) -> None:
        """Give a new process what it is to have, and connect it."""
        if self._listener is None:
            raise CannotListen("the web page's socket is closed")
        ours, theirs = socket.socketpair()
        refuse_descriptors(ours)
        with contextlib.ExitStack() as unconnected:
            unconnected.callback(ours.close)
            with theirs:
                host = self._settings.address.host
                hosts = [f"[{host}]" if ":" in host else host, "localhost"]
                told: dict[str, Any] = {"hosts": hosts, "others": sorted(self._settings.hosts)}
                told |= {"token_digest": self._token_digest, "secret": self._secret, "node": os.uname().nodename}
                self._process.send(told, (theirs.fileno(), self._listener.fileno()))
            await self._process.expect("prepared")
            # Not before: whoever is connected has little time to introduce itself.
            ready = self._process.expect("ready")
            ours.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: self._make_connection(READER), ours)
            unconnected.pop_all()
        await ready
        await self._tell_history()

    async def _tell_history(self) -> None:
        """All of it, however little a channel holds; as long as a start may take."""
        for message in list(self._loads()):
            while True:
                try:
                    self._process.send(message)
                    break
                except BlockingIOError:
                    await asyncio.sleep(TELL_AGAIN_S)

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        self._desk.take(message, self._process.to_this_one())


def _web_of(sandbox: SandboxSettings) -> Kind:
    return Kind(
        name="the web process",
        module="gpulease.daemon.web",
        broken="the web process can't serve",
        died=LogEvent.WEB_DIED,
        hung=LogEvent.WEB_HUNG,
        not_started=LogEvent.WEB_NOT_STARTED,
        back=LogEvent.WEB_BACK,
        arguments=[sandbox.to_text()],
    )


def token_digest_of(settings: HttpSettings) -> bytes:
    """The SHA-256 of the operator's token as its file has it now, b"" if there is none. Raises ConfigError."""
    try:
        return settings.token_digest()
    except BadToken as error:
        raise ConfigError(f"setting http_token_file: {error}") from None
