"""The broker's side of the web process: its socket, its start and end, and the messages between the two.

The web process reads the leases through a control connection that may only read. Through the channel that it was
started with, it forwards the actions that operators request, each with the operator's token; `web_actions` checks the
token.

The broker holds the listening socket, so that the socket outlives a web process that dies, but never reads from it.

`LoadHistory` records how busy the cards were in the last hour, for the web page.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from gpulease.daemon.broker.listeners import cannot_listen
from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.broker.web_actions import WebActionHandler, WebActions
from gpulease.daemon.config.settings import ConfigError
from gpulease.daemon.contract.messages import HelperPrepared, Ready
from gpulease.daemon.gpus.source import CardLoad, CardSource
from gpulease.daemon.host.ipc import ChannelClosed
from gpulease.daemon.host.periodic_task import PeriodicTask
from gpulease.daemon.host.socket_activation import CannotListen
from gpulease.daemon.host.unix_place import BACKLOG
from gpulease.daemon.host.unsolicited_fds import refuse_descriptors
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.sandbox.measures import SandboxSettings
from gpulease.daemon.web.fleet_membership import FleetMembership
from gpulease.daemon.web.http_settings import BadToken, HttpSettings
from gpulease.daemon.web.load_samples import MAX_SAMPLES, SAMPLE_S, CardLoads, LoadSample
from gpulease.daemon.web.web_messages import FROM_WEB, ActionRefused, FromWeb, TokenChanged, WebRefusal, WebStart
from gpulease.daemon.workers.helper_process import ChildKind, ChildProcess, Timeouts
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.worker import held_bytes
from gpulease.protocol.address import Address

SECRET_BYTES: Final = 32
"""Length of the key for pseudonyms, which is the length of the hash."""

READER: Final = Peer("gpuleased", is_operator=True, is_known=True, is_reader=True)
"""The web process as a peer: it may read every lease and change nothing."""

SEND_RETRY_S: Final = 0.05
"""Pause before a message is sent again to a starting process with a full channel."""

MakeConnection = Callable[[Peer], asyncio.BaseProtocol]


class WebFrontend:
    """The web process and its listening socket.

    Args:
        make_connection: Makes a control connection for the web process.
        actions: Performs the actions that operators request on the page.
        first: Returns the messages for a new process, such as those of `LoadHistory.messages`.

    Attributes:
        bound: The descriptor and address of the socket, if it was made here.

    Raises:
        ConfigError: The operator's token can't be used.
    """

    def __init__(
        self,
        settings: HttpSettings,
        sandbox: SandboxSettings,
        make_connection: MakeConnection,
        actions: WebActions,
        timeouts: Timeouts | None = None,
        first: Callable[[], Iterable[CardLoads | FleetMembership]] = tuple,
    ) -> None:
        self._first = first
        self.bound: list[tuple[Address, int]] = []
        self._settings = settings
        self._make_connection = make_connection
        self._token_digest = token_digest_of(settings)
        self._action_handler = WebActionHandler(actions, self._token_digest)
        # Use one key for all web processes of this broker, so that a tenant keeps its pseudonym.
        self._secret = secrets.token_bytes(SECRET_BYTES)
        # None until `listen`, and again after `stop`.
        self._listener: socket.socket | None = None
        self._process = ChildProcess(
            _web_kind(sandbox), self._begin, self._on_message, timeouts=timeouts, on_unhandled=self._on_unhandled
        )

    async def listen(self, sockets: Sequence[socket.socket] = ()) -> str:
        """Listen, start the process, and wait until it serves. Returns the page's URL. Raises CannotListen.

        Args:
            sockets: A socket that listens there already, if there is one.
        """
        # A reload or a restart of the web process keeps this socket, so that clients can connect at any time.
        self._listener = sockets[0] if sockets else self._bind()
        self._listener.setblocking(False)
        await self._process.start()
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def set_token(self, digest: bytes) -> None:
        """Accept another operator's token from now on, here and in the process.

        Args:
            digest: The token's SHA-256, b"" for no token.
        """
        if digest == self._token_digest:
            return
        self._token_digest = digest
        # Change it here first: from now on an action with the old token is refused, even if the process still accepts
        # it.
        self._action_handler.set_token(digest)
        try:
            self._process.send(TokenChanged(digest))
        except BlockingIOError:
            self._process.give_up("it has read nothing for so long that its channel is full")
        except ChannelClosed:
            pass  # The next process gets the new token when it starts.

    def send(self, message: CardLoads | FleetMembership) -> None:
        """Send a sample of a card or the node's membership.

        A process that does not read the message loses it, and its page then shows less.
        """
        with contextlib.suppress(BlockingIOError, ChannelClosed):
            self._process.send(message)

    def _bind(self) -> socket.socket:
        address = self._settings.address
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            listener = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
        except OSError as error:
            location = str(address).removeprefix("tcp:")
            raise cannot_listen(f"serve the web page at {location}", error, "gpulease-http.socket") from None
        # Record it, because the service manager stores it for the next daemon (`supervisor.lifecycle`).
        self.bound.append((address, listener.fileno()))
        return listener

    async def stop(self) -> None:
        await self._process.stop()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _begin(self) -> None:
        """Send a new process its settings, connect it, and send it the first messages."""
        if self._listener is None:
            raise CannotListen("the web page's socket is closed")
        # Make the control connection here, so that no other process gets the web process's read-only
        # access.
        own_end, peer_end = socket.socketpair()
        refuse_descriptors(own_end)
        with contextlib.ExitStack() as unconnected:
            unconnected.callback(own_end.close)
            with peer_end:
                host = self._settings.address.host
                # Step 1: send the settings with the two sockets. Until our end is connected in step 2, an error must
                # close it.
                start = WebStart(
                    hosts=(f"[{host}]" if ":" in host else host, "localhost"),
                    others=tuple(sorted(self._settings.hosts)),
                    token_digest=self._token_digest,
                    secret=self._secret,
                    node=os.uname().nodename,
                )
                self._process.send(start, (peer_end.fileno(), self._listener.fileno()))
            await self._process.expect(HelperPrepared)
            # Step 2: connect it only when it is ready, because a connected peer must send HELLO soon.
            ready = self._process.expect(Ready)
            own_end.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: self._make_connection(READER), own_end)
            unconnected.pop_all()
        # Step 3: once it serves, send it the samples and the membership.
        await ready
        await self._send_first()

    async def _send_first(self) -> None:
        """Send all first messages, even if the channel has little room. The start's timeout bounds this."""
        # Iterate over a copy, because samples are added while this waits.
        for message in list(self._first()):
            while True:
                try:
                    self._process.send(message)
                    break
                except BlockingIOError:
                    await asyncio.sleep(SEND_RETRY_S)

    def _on_message(self, message: FromWeb, fds: list[int]) -> None:
        self._action_handler.handle(message, self._process.to_this_one())

    def _on_unhandled(self, number: int) -> None:
        # The page waits for an answer to each number, so a failure here is answered as well.
        text = (
            "The daemon failed while handling this request; its log has details. Check the page before you "
            "repeat the request."
        )
        self._process.to_this_one()(ActionRefused(number, WebRefusal.FAILED, text))


def _web_kind(sandbox: SandboxSettings) -> ChildKind:
    return ChildKind(
        name="the web process",
        module="gpulease.daemon.web",
        sends=FROM_WEB,
        broken="the web process can't serve",
        died=LogEvent.WEB_DIED,
        hung=LogEvent.WEB_HUNG,
        not_started=LogEvent.WEB_NOT_STARTED,
        back=LogEvent.WEB_BACK,
        arguments=[sandbox.to_text()],
    )


def token_digest_of(settings: HttpSettings) -> bytes:
    """Return the SHA-256 of the operator's token in its file now; b"" for no token. Raises ConfigError."""
    try:
        return settings.token_digest()
    except BadToken as error:
        raise ConfigError(f"setting http_token_file: {error}") from None


OnSample = Callable[[CardLoads], None]


class LoadHistory:
    """The cards' load in the last hour: a sample of each card every ten seconds, kept in memory.

    A thread polls the cards. While a driver does not answer, no sample is taken and the page shows a gap. Times are
    monotonic. The history survives the web process, and ends with the daemon.

    Args:
        on_sample: Called with each sample when it is taken, one message for each card.
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
        self._task = PeriodicTask(self.sample, SAMPLE_S, _log_fault)

    def start(self) -> None:
        self._task.start(at_once=True)

    async def stop(self) -> None:
        await self._task.stop()

    def messages(self) -> Iterator[CardLoads]:
        """Return all samples that are kept, one message for each card."""
        return (CardLoads(uuid, tuple(samples)) for uuid, samples in self._samples.items() if samples)

    async def sample(self) -> None:
        # Poll in a thread, because a driver may take milliseconds or hang.
        loads = await asyncio.to_thread(self._ask_cards)
        now_ns = self._clock_ns()
        leased, allocated = self._leased_bytes(), self._allocated_bytes()
        # Use one time for all cards, so that the page can draw them in one picture.
        for uuid, samples in self._samples.items():
            load = loads[uuid]
            used_bytes = allocated[uuid] if load.used_bytes is None else load.used_bytes
            samples.append(LoadSample(now_ns, load.utilization_percent, used_bytes, leased[uuid]))
            self._on_sample(CardLoads(uuid, (samples[-1],)))

    def _ask_cards(self) -> dict[str, CardLoad]:
        return {uuid: self._source.load(uuid) for uuid in self._samples}

    def _leased_bytes(self) -> Mapping[str, int]:
        leased: defaultdict[str, int] = defaultdict(int)
        for lease in self._table.snapshots():
            leased[lease.card_uuid] += lease.size_bytes
        return leased

    def _allocated_bytes(self) -> Mapping[str, int]:
        """Add up the bytes that sessions report, for cards with a driver that does not report used bytes."""
        allocated: defaultdict[str, int] = defaultdict(int)
        for lease in self._table.snapshots():
            if (worker := self._workers.worker(lease.lease_id)) is not None:
                allocated[lease.card_uuid] += held_bytes(worker, lease.size_bytes)
        return allocated


def _log_fault(error: Exception) -> None:
    # No thread could be started, or this is a bug of ours. No lease depends on samples.
    log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="taking a sample of the cards")
