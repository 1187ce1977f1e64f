"""A client of etcd over gRPC, for the fleet's own processes. A process that imports it can't fork.

No write is executed twice. The client sends a write to a second member only if the first certainly did not execute it.
After any other failure the outcome is Unknown, and the caller reads the keys back. So gRPC's own retries are off. Reads
are repeated while time is left.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import grpc

from gpulease.daemon.fleet.etcd import etcd_messages as messages
from gpulease.daemon.fleet.etcd.endpoints import MAX_ENDPOINTS, BadEtcdSettings
from gpulease.daemon.fleet.etcd.etcd_certificates import Certificates, certificate_files, read_certificates
from gpulease.daemon.fleet.etcd.transactions import (
    Compacted,
    CreateRevisionIs,
    Get,
    KeyValue,
    Outcome,
    Put,
    Removed,
    StoreSize,
    Transaction,
    TransactionAnswer,
    TransactionRejected,
    Unknown,
    WatchBatch,
    WatchRefused,
)
from gpulease.daemon.host.cancellation import cancel_all
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.foreign_text import printable

_Reply = TypeVar("_Reply")

MAX_REQUEST_BYTES: Final = 1 << 20
"""Maximum bytes of a request. etcd accepts 1.5 MiB by default, and each member keeps requests in its log."""

MAX_ANSWER_BYTES: Final = 64 << 20
"""Maximum bytes of an answer, and so of a page, to limit the memory that foreign values may take."""

PAGE_KEYS: Final = 1_000
"""Number of keys in one page. Records of nodes with 16 cards then take 2 MiB, which a member returns within the time of
one request."""

MAX_READ_BYTES: Final = 512 << 20
"""Maximum bytes of all pages of one read. 50,000 nodes and 500,000 claims have 300 MiB."""

MAX_REASON_CHARS: Final = 300
"""Maximum characters of an error text. Longer ones are cut."""

CONNECT_LIMIT_MS: Final = 2_000
"""Maximum milliseconds to connect to a member, TLS included."""

RECONNECT_MS: Final = (100, 1_000)
"""Minimum and maximum milliseconds between two attempts to connect to a member."""

KEEPALIVE_MS: Final = 6_000
"""Milliseconds between pings on a connection. etcd closes connections that ping more often than every 5 s."""

KEEPALIVE_LIMIT_MS: Final = 2_000
"""Maximum milliseconds until a ping is answered. So a watch leaves a member that hangs or is disconnected after 8 s."""

READ_TRIES: Final = 3
"""A read waits for one member at most for its whole time divided by this number, so that time is left for other
members.
"""

WATCH_LIFE_S: Final = 600.0
"""Maximum seconds of one stream of a watch. The watch then continues on another stream, because a stream may break
without an error."""

WATCH_RETRY_S: Final = 0.2
"""Seconds to wait after a watch is interrupted, in case all members fail at once."""

_LEADER_NEEDED: Final = (("hasleader", "true"),)
"""Metadata with which a member without a leader fails requests at once and ends watches (etcd, v3rpc/interceptor.go).
"""

REASON_LIMIT_S: Final = 0.2
"""Maximum seconds to find out why no member is reachable. Members that refuse connections do so at once."""

SIZES_LIMIT_S: Final = 1.0
"""Maximum seconds to get the size of a member's database."""

_END: Final[object] = getattr(grpc.aio, "EOF")  # noqa: B009 - its types lack it
_NO_LEADER: Final = "etcdserver: no leader"
_NO_SPACE: Final = "etcdserver: mvcc: database space exceeded"
_WITHOUT_SPACE: Final = TransactionRejected("etcd has no space left")
"""The outcome of a write to which etcd answered `database space exceeded`. The write may have been done."""

_REFUSALS: Final = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Status codes of errors that etcd returns before it writes. gRPC itself also uses some of them, so the text must have
etcd's prefix too."""


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """How to reach a fleet's etcd.

    Attributes:
        endpoints: etcd's members, as HOST:PORT.
        ca_file: The CA of the members' certificates, in PEM; None for connections without TLS, on which anyone on the
            network can write.
        cert_file: This client's certificate, with etcd's user as common name. None if etcd does not require one.
        key_file: The key of this client's certificate.
        timeout_s: Maximum seconds for a transaction. If no answer has come by then, the outcome is Unknown.
    """

    endpoints: tuple[str, ...]
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    timeout_s: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= len(self.endpoints) <= MAX_ENDPOINTS:
            raise BadEtcdSettings(f"name 1 to {MAX_ENDPOINTS} members of etcd, not {len(self.endpoints)}")
        if (self.cert_file is None) != (self.key_file is None):
            raise BadEtcdSettings("a certificate for etcd needs its key, and a key its certificate: set both or none")
        if self.cert_file is not None and self.ca_file is None:
            raise BadEtcdSettings("a certificate for etcd needs the CA of etcd's own certificates: set it too")
        if not self.timeout_s > 0:
            raise BadEtcdSettings(f"the timeout must be more than 0 s, not {self.timeout_s:g} s")

    def read_certificates(self) -> Certificates | None:
        """Return the files' current contents; None without TLS. Raises BadEtcdSettings."""
        return read_certificates(certificate_files(self.ca_file, self.key_file, self.cert_file))


class _EtcdMember:
    """A member of etcd: the channel to the member, and its services."""

    def __init__(self, endpoint: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.endpoint = endpoint
        target = f"dns:///{endpoint}"
        if credentials is None:
            self.channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        else:
            self.channel = grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
        self.calls = messages.EtcdCalls(self.channel)
        self.watches: set[Any] = set()

    async def close(self) -> None:
        """Cancel the member's watches, and close the channel."""
        # In gRPC 1.66 to 1.80, a stream that is being read does not end when its channel is closed.
        for call in self.watches:
            call.cancel()
        await self.channel.close(None)

    @property
    def is_connected(self) -> bool:
        return self.channel.get_state() is grpc.ChannelConnectivity.READY

    async def connect(self) -> "_EtcdMember":
        """Wait until this member is connected, without a limit, and return it."""
        # `get_state` makes gRPC connect. Each turn of the loop waits for a change of the channel's state.
        while (state := self.channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            await self.channel.wait_for_state_change(state)
        return self

    async def failure_reason(self, within_s: float) -> str:
        """Return gRPC's reason why the member is unreachable. Makes a call, because only calls get a reason."""
        try:
            await self.calls.status(messages.StatusRequest(), timeout=within_s)
        except grpc.aio.AioRpcError as error:
            return f"{self.endpoint}: {_words(error)}"
        return f"{self.endpoint}: it answers again"


_OPTIONS: Final[Sequence[tuple[str, Any]]] = (
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", 2 * MAX_REQUEST_BYTES),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.min_reconnect_backoff_ms", CONNECT_LIMIT_MS),
    ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS[0]),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MS[1]),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_LIMIT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_LIMIT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)


class EtcdClient:
    """A client of one etcd, for one event loop.

    Args:
        settings: How to reach etcd.
        read: Returns the current certificates, or None without TLS. By default, the client reads the settings' files.

    Raises BadEtcdSettings for unreadable certificates.
    """

    def __init__(self, settings: EtcdSettings, read: Callable[[], Certificates | None] | None = None) -> None:
        self._settings = settings
        self._read_now = read or settings.read_certificates
        self._certificates = self._read_now()
        self._members = self._open()
        self._watch_starts = 0
        self._closing: asyncio.Future[list[None]] | None = None

    async def do(self, transaction: Transaction) -> Outcome:
        """Return a transaction's outcome within the settings' time, or twice that if etcd is out of space.

        A read-only transaction has that time for each page of PAGE_KEYS keys, and all pages are of one revision.
        Network failures are outcomes; none is raised.
        """
        # A read-only transaction is read page by page, which works even if etcd is out of space.
        if not transaction.compares and not transaction.writes:
            return await self._read(transaction.reads)
        request = _request(transaction)
        if (size_bytes := request.ByteSize()) > MAX_REQUEST_BYTES:
            return TransactionRejected(
                f"a request to etcd must have at most {MAX_REQUEST_BYTES} bytes, not {size_bytes}"
            )
        # Compare and write in one request. If etcd reports that it has no space, find out whether it wrote.
        outcome = await self._attempt(
            lambda member, limit_s: self._ask(member, transaction, request, limit_s), is_read=not transaction.writes
        )
        return await self._after_no_space(transaction) if outcome is _WITHOUT_SPACE else outcome

    async def compact(self, revision: int) -> Outcome:
        """Remove etcd's history before a revision.

        The outcome is TransactionRejected if that history is already removed, if the revision is in the future, or if
        this user may not do this.
        """

        async def ask(member: _EtcdMember, limit_s: float) -> TransactionAnswer:
            request = messages.CompactionRequest(revision=revision)
            reply = await member.calls.compact(request, timeout=limit_s, metadata=_LEADER_NEEDED)
            return TransactionAnswer(True, reply.header.revision, cluster_id=reply.header.cluster_id)

        return await self._attempt(ask, is_read=False)

    async def sizes(self) -> list[StoreSize]:
        """Return the database sizes of those members that answer within SIZES_LIMIT_S."""

        async def ask(member: _EtcdMember) -> StoreSize:
            reply = await member.calls.status(messages.StatusRequest(), timeout=SIZES_LIMIT_S)
            return StoreSize(member.endpoint, reply.db_size, reply.db_size_quota)

        # Leave out members that do not answer, and members whose channel was closed because the certificates changed.
        replies = await asyncio.gather(*map(ask, self._members), return_exceptions=True)
        return [size for size in replies if isinstance(size, StoreSize)]

    async def watch(self, prefix: bytes, from_revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yield all changes of keys with a prefix from a revision on, or from now on if it is 0.

        The watch continues after interruptions. Raises Compacted if etcd no longer has the changes, and WatchRefused if
        this user may not read these keys.
        """
        # Each turn is one stream, which begins after the last change that was yielded.
        revision = from_revision
        while True:
            member = await self._connected_for_watch()
            try:
                async with contextlib.aclosing(self._watch_once(member, prefix, revision)) as stream:
                    async for batch in stream:
                        revision = batch.revision + 1
                        yield batch
            except grpc.aio.AioRpcError as error:
                # Any other error is an interruption: try the next member.
                if _is_refusal(error):
                    raise WatchRefused(f"{member.endpoint}: {_words(error)}") from None
            except asyncio.CancelledError:
                # gRPC also cancels streams when `_renew_certificates` closes their channel. Then this task was not
                # cancelled.
                if (task := asyncio.current_task()) is None or task.cancelling() or member in self._members:
                    raise
            await asyncio.sleep(WATCH_RETRY_S)

    async def close(self) -> None:
        """Close all connections. The outcome of a transaction in progress becomes Unknown."""
        # Empty the list first, which ends every loop over the members.
        members, self._members = self._members, []
        if self._closing is not None:
            await self._closing
        await asyncio.gather(*(member.close() for member in members))

    def _open(self) -> list[_EtcdMember]:
        credentials, now = None, self._certificates
        if now is not None:
            credentials = grpc.ssl_channel_credentials(now.ca, now.key, now.certificate)
        # A random order distributes the nodes of a fleet over the members.
        endpoints = list(self._settings.endpoints)
        Random().shuffle(endpoints)
        return [_EtcdMember(endpoint, credentials) for endpoint in endpoints]

    async def _connected(self, unfit: Sequence[_EtcdMember], deadline_s: float) -> _EtcdMember | None:
        """Return a connected member, preferably the one that answered last; None if none is connected in time."""
        usable = [member for member in self._members if member not in unfit]
        # Usually a connection is up, and there is no wait.
        for member in usable:
            if member.is_connected:
                return member
        # No connection is up. The certificates may have expired, so read them again.
        if self._renew_certificates():
            usable = self._members
        return await _first_connected(usable, _left_s(deadline_s))

    async def _connected_for_watch(self) -> _EtcdMember:
        """Wait for a connected member, if possible not the last watch's, and return it. Raises WatchRefused."""
        while self._members:
            # Begin with another member each time, in case a member ends all its watches.
            self._watch_starts += 1
            turn = self._watch_starts % len(self._members)
            for member in self._members[turn:] + self._members[:turn]:
                if member.is_connected:
                    return member
            self._renew_certificates()
            if await _first_connected(self._members, self._settings.timeout_s) is None:
                await asyncio.sleep(WATCH_RETRY_S)
        raise WatchRefused("the client is closed")

    def _prefer_another(self, member: _EtcdMember) -> None:
        """Move a member that did not answer to the end of the list. Its host may hang with the connection still up."""
        if member in self._members:
            self._members.remove(member)
            self._members.append(member)

    def _renew_certificates(self) -> bool:
        """Reconnect if the certificates have changed. Returns whether they have."""
        try:
            certificates = self._read_now()
        # The files may be half replaced now. The next attempt reads them again.
        except BadEtcdSettings:
            return False
        if certificates == self._certificates or not self._members:
            return False
        self._certificates = certificates
        # Open new channels with the new certificates. The old channels are closed in the background. A request on one
        # of them fails and is tried again.
        old, self._members = self._members, self._open()
        self._closing = asyncio.gather(*(member.close() for member in old))
        return True

    async def _failure_reason(self) -> str:
        """Return the reasons why all members are unreachable."""
        reasons = (member.failure_reason(REASON_LIMIT_S) for member in self._members)
        return "no member of etcd can be reached; " + "; ".join(await asyncio.gather(*reasons))

    async def _attempt(
        self, call: Callable[[_EtcdMember, float], Awaitable[_Reply]], *, is_read: bool
    ) -> _Reply | Unknown | TransactionRejected:
        """Call members one after the other, within the settings' time, until one answers or may have done a write."""
        deadline_s = asyncio.get_running_loop().time() + self._settings.timeout_s
        # Skip members that have failed. The loop ends when the time is over or no member is left.
        unfit: list[_EtcdMember] = []
        reason = ""
        while (member := await self._connected(unfit, deadline_s)) is not None:
            # A read leaves time to ask other members. A write is sent once and may take all the time.
            limit_s = self._settings.timeout_s / READ_TRIES if is_read else self._settings.timeout_s
            try:
                return await call(member, min(limit_s, _left_s(deadline_s)))
            except grpc.aio.AioRpcError as error:
                reason = f"{member.endpoint}: {_words(error)}"
                # etcd reports lack of space after it has applied a write or before (apply.go, quotaApplierV3). The
                # caller reads the keys back.
                if error.details() == _NO_SPACE and not is_read:
                    return _WITHOUT_SPACE
                # etcd wrote nothing, and another member would answer the same.
                if _is_refusal(error):
                    return TransactionRejected(reason)
                self._prefer_another(member)
                # Only after this error is a write sent to a second member, because etcd returns it before it processes
                # a write.
                if not is_read and error.details() != _NO_LEADER:
                    return Unknown(reason)
                unfit.append(member)
        return Unknown(reason or await self._failure_reason())

    async def _ask(
        self, member: _EtcdMember, transaction: Transaction, request: Any, limit_s: float
    ) -> TransactionAnswer:
        reply = await member.calls.txn(request, timeout=limit_s, metadata=_LEADER_NEEDED)
        # Responses are in the order of `_request`: if the comparisons held, the writes come first.
        written = len(transaction.writes) if reply.succeeded else 0
        ranges = [response.response_range for response in reply.responses[written:]]
        items = tuple(_key_values(response.kvs) for response in ranges)
        return TransactionAnswer(reply.succeeded, reply.header.revision, items, reply.header.cluster_id)

    async def _read(self, reads: Sequence[Get]) -> Outcome:
        """Read keys at one revision. Uses Range, because an etcd without space rejects even read-only transactions."""
        revision, cluster_id, size_bytes = 0, 0, 0
        items: list[tuple[KeyValue, ...]] = []
        # The first page decides the revision of all further pages and reads.
        for get in reads:
            request, is_last = _range(get), False
            request.limit = PAGE_KEYS
            kvs: list[KeyValue] = []
            while not is_last:
                request.revision = revision
                # Pages may come from different members. With one revision, they are one snapshot.
                page = await self._attempt(partial(_read_page, request), is_read=True)
                if isinstance(page, Unknown | TransactionRejected):
                    return page
                kvs += _key_values(page.kvs)
                size_bytes += page.ByteSize()
                if size_bytes > MAX_READ_BYTES:
                    return TransactionRejected(f"the values read from etcd have more than {MAX_READ_BYTES} bytes")
                revision, cluster_id = revision or page.header.revision, page.header.cluster_id
                is_last = not page.more
                if not is_last:
                    # Continue with the key directly after the page's last one.
                    request.key = kvs[-1].key + b"\0"
            items.append(tuple(kvs))
        return TransactionAnswer(True, revision, tuple(items), cluster_id)

    async def _after_no_space(self, transaction: Transaction) -> Outcome:
        """Return the outcome of a write to which etcd answered that it has no space, by reading the keys back."""
        read = await self.do(Transaction(reads=tuple(Get(write.key) for write in transaction.writes)))
        if not isinstance(read, TransactionAnswer):
            return Unknown("etcd reports that it has no space left, and the keys can't be read back")
        # If a key has the written value, or is absent after a deletion, the write may have been done.
        for write, items in zip(transaction.writes, read.found, strict=True):
            value = items[0].value if items else None
            if value == (write.value if isinstance(write, Put) else None):
                return Unknown("etcd reports that it has no space left, but the write may have been done")
        # No key has the written value, so the transaction was not executed.
        return TransactionRejected(
            "etcd has no space left: compact and defragment it, raise its quota, and disarm its alarm"
        )

    async def _watch_once(self, member: _EtcdMember, prefix: bytes, revision: int) -> AsyncGenerator[WatchBatch, None]:
        """Yield a watch's batches from one stream. Raises AioRpcError, Compacted and WatchRefused."""
        call = member.calls.watch(timeout=WATCH_LIFE_S, metadata=_LEADER_NEEDED)
        member.watches.add(call)
        try:
            create = messages.WatchCreateRequest(
                key=prefix, range_end=_prefix_end(prefix), start_revision=revision, progress_notify=True
            )
            # etcd first confirms the watch. If a member does not, use another member.
            async with asyncio.timeout(self._settings.timeout_s):
                await call.write(messages.WatchRequest(create_request=create))
                reply = await call.read()
            while reply is not _END:
                # etcd no longer has the requested history, so the caller must read everything again.
                if reply.compact_revision:
                    raise Compacted(reply.compact_revision)
                if reply.canceled:
                    raise WatchRefused(f"{member.endpoint}: {_clean(reply.cancel_reason) or 'it cancels the watch'}")
                # The first reply has the revision at which a watch from now on starts. Later replies have changes.
                if not reply.created:
                    yield _batch(reply)
                elif not revision:
                    yield WatchBatch(reply.header.revision)
                reply = await call.read()
        except TimeoutError:
            self._prefer_another(member)
        finally:
            member.watches.discard(call)
            call.cancel()


async def _read_page(request: Any, member: _EtcdMember, limit_s: float) -> Any:
    return await member.calls.range(request, timeout=limit_s, metadata=_LEADER_NEEDED)


async def _first_connected(members: Sequence[_EtcdMember], within_s: float) -> _EtcdMember | None:
    """Connect to all members at once, and return the first that is connected; None if none is in time."""
    tasks = [asyncio.ensure_future(member.connect()) for member in members]
    # Connect to all at the same time, so that members that are down cost no time.
    try:
        done, _ = (
            await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED) if tasks else ((), ())
        )
        return next((task.result() for task in done), None)
    finally:
        await cancel_all(tasks)


def _request(transaction: Transaction) -> Any:
    # If the comparisons hold, the writes come before the reads, which then see them. Otherwise only the reads are done.
    reads = [messages.RequestOp(request_range=_range(get)) for get in transaction.reads]
    writes = [
        messages.RequestOp(request_put=messages.PutRequest(key=write.key, value=write.value))
        if isinstance(write, Put)
        else messages.RequestOp(request_delete_range=messages.DeleteRangeRequest(key=write.key))
        for write in transaction.writes
    ]
    compares = [
        messages.Compare(target=messages.CREATE, key=compare.key, create_revision=compare.revision)
        if isinstance(compare, CreateRevisionIs)
        else messages.Compare(target=messages.MOD, key=compare.key, mod_revision=compare.revision)
        for compare in transaction.compares
    ]
    return messages.TxnRequest(compare=compares, success=[*writes, *reads], failure=reads)


def _range(get: Get) -> Any:
    end = _prefix_end(get.key) if get.is_prefix else b""
    return messages.RangeRequest(key=get.key or b"\0", range_end=end)


def _prefix_end(prefix: bytes) -> bytes:
    """Return the first key after all keys with a prefix (etcd, clientv3: GetPrefixRangeEnd)."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


def _key_values(messages: Any) -> tuple[KeyValue, ...]:
    return tuple(
        KeyValue(message.key, message.value, message.create_revision, message.mod_revision) for message in messages
    )


def _batch(reply: Any) -> WatchBatch:
    """Return a watch's reply as a batch. The header's revision counts only if the reply has no changes."""
    changes = tuple(
        Removed(event.kv.key, event.kv.mod_revision)
        if event.type == messages.DELETE
        else KeyValue(event.kv.key, event.kv.value, event.kv.create_revision, event.kv.mod_revision)
        for event in reply.events
    )
    return WatchBatch(changes[-1].mod_revision if changes else reply.header.revision, changes)


def _is_refusal(error: grpc.aio.AioRpcError) -> bool:
    return error.code() in _REFUSALS and (error.details() or "").startswith("etcdserver: ")


def _words(error: grpc.aio.AioRpcError) -> str:
    return f"{_clean(error.details() or '')} ({error.code().name})"


def _clean(text: str) -> str:
    return printable(text, instead=" ")[:MAX_REASON_CHARS]


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - asyncio.get_running_loop().time())
