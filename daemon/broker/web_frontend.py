"""The web process as the broker sees it: its listening socket, its start, its end, and what goes between the two.

By a connection of the protocol it sees the leases, and changes nothing. By the channel it was started with it passes on
what an operator asks for by the page, with the operator's token, which is looked at here.

The broker holds the socket, so that it outlives a web process that dies; it never reads from it.

How busy the cards were in the last hour, for the web page: a sample of each card every ten seconds, kept in memory.

The cards are asked in a thread. While a driver does not answer, no sample is taken, and the page shows a gap. Times
are monotonic. A restart of the daemon begins anew; one of the web process does not.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from gpulease.daemon.broker.handlers.admin_requests import WebActionHandler, WebActions
from gpulease.daemon.broker.listeners import BACKLOG, cannot_listen
from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.config.settings import ConfigError
from gpulease.daemon.gpus.source import CardLoad, CardSource
from gpulease.daemon.host.fd_passing import refuse_descriptors
from gpulease.daemon.host.ipc import ChannelClosed
from gpulease.daemon.host.socket_activation import CannotListen
from gpulease.daemon.leases import LeaseTable
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.daemon.web.load_samples import MAX_SAMPLES, SAMPLE_S, LoadSample, message_of
from gpulease.daemon.web.settings import BadToken, HttpSettings
from gpulease.daemon.workers.child_process import ChildKind, ChildProcess, Timeouts
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.worker import held_bytes
from gpulease.protocol.address import Address

SECRET_BYTES: Final = 32
"""Of what pseudonyms are made with: as long as the hash."""

READER: Final = Peer("gpuleased", is_operator=True, is_known=True, is_reader=True)
"""Who the web process is: one who sees all and may do nothing."""

TELL_AGAIN_S: Final = 0.05
"""Until a process that is just starting is told more, once its channel is full."""

MakeConnection = Callable[[Peer], asyncio.BaseProtocol]


class WebFrontend:
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
        acts: WebActions,
        patience: Timeouts | None = None,
        loads: Callable[[], Iterable[dict[str, Any]]] = tuple,
    ) -> None:
        self._loads = loads
        self.bound: list[tuple[Address, int]] = []
        self._settings = settings
        self._make_connection = make_connection
        self._token_digest = token_digest_of(settings)
        self._desk = WebActionHandler(acts, self._token_digest)
        # The same for every process of this broker's, so that a tenant keeps its pseudonym.
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._listener: socket.socket | None = None
        self._process = ChildProcess(_web_of(sandbox), self._begin, self._take, timeouts=patience)

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


def _web_of(sandbox: SandboxSettings) -> ChildKind:
    return ChildKind(
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


OnSample = Callable[[dict[str, Any]], None]


class LoadHistory:
    """Takes the samples and keeps them.

    Args:
        on_sample: Told each sample as it is taken, a message for each card.
    """

    def __init__(
        self,
        table: LeaseTable,
        source: CardSource,
        workers: Workers,
        on_sample: OnSample,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._table = table
        self._source = source
        self._workers = workers
        self._on_sample = on_sample
        self._clock_ns = clock_ns
        self._samples = {card.uuid: deque[LoadSample](maxlen=MAX_SAMPLES) for card in table.cards()}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take samples from now on."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Take none any more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def messages(self) -> Iterator[dict[str, Any]]:
        """All that is kept, a message for each card."""
        return (message_of(uuid, samples) for uuid, samples in self._samples.items() if samples)

    async def sample(self) -> None:
        """Take a sample of each card now."""
        loads = await asyncio.to_thread(self._ask_cards)
        now_ns = self._clock_ns()
        leased, allocated = self._leased_bytes(), self._allocated_bytes()
        for uuid, kept in self._samples.items():
            load = loads[uuid]
            used_bytes = allocated[uuid] if load.used_bytes is None else load.used_bytes
            kept.append(LoadSample(now_ns, load.utilization_percent, used_bytes, leased[uuid]))
            self._on_sample(message_of(uuid, [kept[-1]]))

    async def _run(self) -> None:
        while True:
            try:
                await self.sample()
            except Exception:
                # No thread, or a bug of ours, in what no lease depends on: the page shows a gap.
                log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="taking a sample of the cards")
            await asyncio.sleep(SAMPLE_S)

    def _ask_cards(self) -> dict[str, CardLoad]:
        return {uuid: self._source.load(uuid) for uuid in self._samples}

    def _leased_bytes(self) -> Mapping[str, int]:
        leased: defaultdict[str, int] = defaultdict(int)
        for lease in self._table.snapshots():
            leased[lease.card_uuid] += lease.size_bytes
        return leased

    def _allocated_bytes(self) -> Mapping[str, int]:
        """By sessions' own count, for cards whose driver does not say what is used."""
        allocated: defaultdict[str, int] = defaultdict(int)
        for lease in self._table.snapshots():
            if (worker := self._workers.worker(lease.lease_id)) is not None:
                allocated[lease.card_uuid] += held_bytes(worker, lease.size_bytes)
        return allocated
