"""The client of etcd, against real members that are killed, paused, compacted, full, and closed by certificates."""

import asyncio
import contextlib
import shutil
import socket
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pool

from gpulease.daemon.fleet.etcd.client import (
    MAX_REQUEST_BYTES,
    PAGE_KEYS,
    EtcdClient,
    EtcdSettings,
)
from gpulease.daemon.fleet.etcd.endpoints import MAX_ENDPOINTS, BadEtcdSettings, parse_endpoints
from gpulease.daemon.fleet.etcd.transactions import (
    Compacted,
    CreateRevisionIs,
    Delete,
    Get,
    KeyValue,
    ModRevisionIs,
    Outcome,
    Put,
    Removed,
    Transaction,
    TransactionAnswer,
    TransactionRejected,
    Unknown,
    WatchBatch,
    WatchRefused,
)
from gpulease.daemon.remote.pki.certificates import PkiAuthority
from helpers.etcd_cluster import SMALLEST_QUOTA_BYTES, EtcdCluster, issued_tenant

SHORT_S = 1.0
"""A client's time where a member is to be silent."""

LONG_S = 30.0
"""A client's time where everything answers, however busy the host."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member for tests that leave it running."""
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def client_of(*endpoints: str, timeout_s: float = LONG_S, **files: Path) -> AsyncIterator[EtcdClient]:
    client = EtcdClient(EtcdSettings(endpoints, timeout_s=timeout_s, **files))
    try:
        yield client
    finally:
        await client.close()


def on(cluster: EtcdCluster, test: Callable[[EtcdClient], Awaitable[None]], timeout_s: float = LONG_S) -> None:
    async def run() -> None:
        async with client_of(*cluster.endpoints, timeout_s=timeout_s) as client:
            await test(client)

    asyncio.run(run())


async def answered(asked: Awaitable[Outcome]) -> TransactionAnswer:
    outcome = await asked
    assert isinstance(outcome, TransactionAnswer), outcome
    return outcome


def put(key: bytes, value: bytes = b"v") -> Transaction:
    return Transaction(writes=(Put(key, value),))


async def insist(client: EtcdClient, transaction: Transaction) -> TransactionAnswer:
    """Ask until there is an answer, as only one may whose transaction may have been done twice."""
    while not isinstance(outcome := await client.do(transaction), TransactionAnswer):
        assert isinstance(outcome, Unknown)
    return outcome


def closed_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_claim_of_an_absent_key_is_given_once(shared: EtcdCluster) -> None:
    async def claim(client: EtcdClient) -> None:
        key = b"/claim/once"
        first, second = await asyncio.gather(
            *(
                answered(client.do(Transaction((CreateRevisionIs(key, 0),), (Put(key, value),), (Get(key),))))
                for value in (b"a", b"b")
            )
        )
        won, lost = (first, second) if first.succeeded else (second, first)
        assert won.succeeded
        assert not lost.succeeded
        # Who lost reads who won.
        assert lost.found == won.found
        (kept,) = won.found[0]
        assert kept.create_revision == kept.mod_revision == won.revision
        assert won.cluster_id == lost.cluster_id != 0

    on(shared, claim)


def test_revisions_rise_and_stale_ones_are_refused(shared: EtcdCluster) -> None:
    async def rewrite(client: EtcdClient) -> None:
        key = b"/rewrite"
        made = await answered(client.do(put(key, b"1")))
        moved = await answered(client.do(Transaction((ModRevisionIs(key, made.revision),), (Put(key, b"2"),))))
        stale = await answered(
            client.do(Transaction((ModRevisionIs(key, made.revision),), (Put(key, b"3"),), (Get(key),)))
        )
        assert moved.succeeded
        assert not stale.succeeded
        assert moved.revision > made.revision
        assert stale.found == ((KeyValue(key, b"2", made.revision, moved.revision),),)
        # The key is the one that was made then, until it is made anew.
        removal = Transaction((CreateRevisionIs(key, made.revision),), (Delete(key),))
        assert (await answered(client.do(removal))).succeeded
        anew = await answered(client.do(put(key)))
        assert not (await answered(client.do(removal))).succeeded
        assert (await answered(client.do(Transaction(reads=(Get(key),))))).found[0][0].create_revision == anew.revision

    on(shared, rewrite)


def test_all_writes_of_a_transaction_have_its_revision(shared: EtcdCluster) -> None:
    async def write(client: EtcdClient) -> None:
        done = await answered(
            client.do(Transaction(writes=(Put(b"/both/a", b"1"), Delete(b"/none"), Put(b"/both/b", b"2"))))
        )
        read = await answered(client.do(Transaction(reads=(Get(b"/both/", is_prefix=True), Get(b"/none")))))
        assert [found.mod_revision for found in read.found[0]] == [done.revision] * 2
        assert read.found[1] == ()

    on(shared, write)


@pytest.mark.parametrize("prefix", [b"/prefix/", b"/prefix\xff", b"\xff\xff"])
def test_a_prefix_finds_its_keys_and_no_others(shared: EtcdCluster, prefix: bytes) -> None:
    async def read(client: EtcdClient) -> None:
        keys = [prefix, prefix + b"\0", prefix + b"a", prefix + b"\xff\xff"]
        others = [prefix[:-1] + bytes([prefix[-1] - 1]) + b"\xff", prefix[:-1] or b"z", b"/other"]
        for key in keys + others:
            await answered(client.do(put(key)))
        found = await answered(client.do(Transaction(reads=(Get(prefix, is_prefix=True), Get(prefix)))))
        assert [each.key for each in found.found[0]] == keys
        assert [each.key for each in found.found[1]] == [prefix]
        everything = await answered(client.do(Transaction(reads=(Get(b"", is_prefix=True),))))
        assert {*keys, *others} <= {each.key for each in everything.found[0]}

    on(shared, read)


class InterruptedClient(EtcdClient):
    """A client beside which something happens after the first page that it reads."""

    meanwhile: Callable[[], Awaitable[object]] | None = None

    async def _attempt(self, *args: Any, **kwargs: Any) -> Any:
        reply = await super()._attempt(*args, **kwargs)
        if kwargs["is_read"] and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return reply


def test_many_keys_are_read_in_pages_of_one_revision(shared: EtcdCluster) -> None:
    keys = [b"/pages/%05d" % number for number in range(2 * PAGE_KEYS + 1)]

    async def read() -> None:
        async with client_of(*shared.endpoints) as writer:
            for at in range(0, len(keys), 100):
                await answered(writer.do(Transaction(writes=tuple(Put(key, b"1") for key in keys[at : at + 100]))))
            client = InterruptedClient(EtcdSettings(shared.endpoints, timeout_s=LONG_S))
            client.meanwhile = lambda: writer.do(Transaction(writes=(Put(keys[0], b"2"), Delete(keys[-1]))))
            both = Transaction(reads=(Get(b"/pages/", is_prefix=True), Get(keys[-1])))
            answer = await answered(client.do(both))
            assert [item.key for item in answer.found[0]] == keys
            assert {item.value for item in answer.found[0]} == {b"1"}
            # The second read is of the revision of the first, too.
            assert answer.found[1] == answer.found[0][-1:]
            after = await answered(client.do(Transaction(reads=(Get(b"/pages/", is_prefix=True),))))
            assert len(after.found[0]) == len(keys) - 1
            # History that goes while it is read: whoever reads begins anew.
            client.meanwhile = partial(_forget_history, writer)
            outcome = await client.do(both)
            assert isinstance(outcome, TransactionRejected)
            assert "has been compacted" in outcome.reason
            await client.close()

    asyncio.run(read())


async def _forget_history(client: EtcdClient) -> None:
    newest = await answered(client.do(put(b"/pages/newest")))
    await answered(client.compact(newest.revision))


def test_etcd_s_messages_are_in_a_pool_of_their_own() -> None:
    for name in ("etcdserverpb.TxnRequest", "mvccpb.KeyValue"):
        with pytest.raises(KeyError):
            descriptor_pool.Default().FindMessageTypeByName(name)


def test_history_goes_when_it_is_compacted_and_no_further(shared: EtcdCluster) -> None:
    async def compact(client: EtcdClient) -> None:
        old = await answered(client.do(put(b"/history", b"1")))
        new = await answered(client.do(put(b"/history", b"2")))
        await answered(client.compact(new.revision))
        with pytest.raises(Compacted):
            await anext(client.watch(b"/history", old.revision))
        again, future = [await client.compact(revision) for revision in (old.revision, new.revision + 1_000)]
        assert isinstance(again, TransactionRejected)
        assert "has been compacted" in again.reason
        assert isinstance(future, TransactionRejected)
        assert "future revision" in future.reason

    on(shared, compact)


def test_sizes_are_those_of_all_members_that_answer(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path, 3) as cluster:

        async def sizes(client: EtcdClient) -> None:
            assert {size.endpoint for size in await client.sizes()} == set(cluster.endpoints)
            cluster.kill(cluster.members[0])
            left = await client.sizes()
            assert {size.endpoint for size in left} == set(cluster.endpoints[1:])
            assert all(size.size_bytes > 0 for size in left)

        on(cluster, sizes)


def test_clients_load_all_members(tmp_path: Path) -> None:
    def handled(endpoint: str) -> int:
        with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=LONG_S) as page:
            lines = page.read().decode().splitlines()
        name = 'grpc_server_handled_total{grpc_code="OK",grpc_method="Txn"'
        return sum(int(line.split()[1]) for line in lines if line.startswith(name))

    async def write(cluster: EtcdCluster) -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(client_of(*cluster.endpoints)) for _ in range(30)]
            for _ in range(2):
                await asyncio.gather(*(answered(client.do(put(b"/loaded"))) for client in clients))
            await asyncio.gather(*(client.sizes() for client in clients))
            before = [handled(endpoint) for endpoint in cluster.endpoints]
            await asyncio.gather(*(answered(client.do(put(b"/loaded"))) for client in clients))
            # One of three that no client of thirty chose: once in 100,000 runs.
            assert all(handled(at) > was for at, was in zip(cluster.endpoints, before, strict=True))

    with EtcdCluster(tmp_path, 3) as cluster:
        asyncio.run(write(cluster))


def test_a_transaction_that_is_too_large_is_rejected(shared: EtcdCluster) -> None:
    async def write(client: EtcdClient) -> None:
        assert isinstance(await client.do(put(b"/large", bytes(MAX_REQUEST_BYTES))), TransactionRejected)
        many = Transaction(writes=tuple(Put(b"/many/%d" % number, b"") for number in range(129)))
        refused = await client.do(many)
        assert isinstance(refused, TransactionRejected)
        assert "too many operations" in refused.reason
        twice = await client.do(Transaction(writes=(Put(b"/twice", b"1"), Put(b"/twice", b"2"))))
        assert isinstance(twice, TransactionRejected)
        read = await answered(client.do(Transaction(reads=(Get(b"/large"), Get(b"/many/", True), Get(b"/twice")))))
        assert read.found == ((), (), ())

    on(shared, write)


def test_another_member_gets_what_a_dead_one_can_not_have_got(shared: EtcdCluster) -> None:
    async def write() -> None:
        async with client_of(closed_port(), *shared.endpoints, closed_port()) as client:
            assert (await answered(client.do(put(b"/third")))).succeeded

    asyncio.run(write())


def test_nobody_there_is_unknown_with_the_reasons(shared: EtcdCluster) -> None:
    async def write() -> None:
        dead = closed_port()
        async with client_of(dead, timeout_s=SHORT_S) as client:
            outcome = await client.do(put(b"/nobody"))
            assert isinstance(outcome, Unknown)
            assert dead in outcome.reason
            assert "refused" in outcome.reason

    asyncio.run(write())


def test_a_paused_member_leaves_a_write_unknown_and_it_may_still_be_done(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path) as cluster:

        async def write(client: EtcdClient) -> None:
            await answered(client.do(put(b"/paused", b"before")))
            (member,) = cluster.members
            cluster.pause(member)
            assert isinstance(await client.do(put(b"/paused", b"while")), Unknown)
            assert isinstance(await client.do(Transaction(reads=(Get(b"/paused"),))), Unknown)
            cluster.resume(member)
            read = await insist(client, Transaction(reads=(Get(b"/paused"),)))
            # The member found the request in its socket. gRPC's reset lay behind it: either may win.
            assert read.found[0][0].value in (b"before", b"while")

        on(cluster, write, SHORT_S)


def test_a_paused_member_is_asked_last(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path, 3) as cluster:

        async def write() -> None:
            paused = cluster.follower()
            others = [endpoint for endpoint in cluster.endpoints if endpoint != paused.endpoint]
            async with client_of(paused.endpoint, *others, timeout_s=5) as client:
                await insist(client, put(b"/asked"))
                cluster.pause(paused)
                first = await client.do(put(b"/asked", b"2"))
                # A read gets to another member by itself.
                read = await answered(client.do(Transaction(reads=(Get(b"/asked"),))))
                assert isinstance(first, Unknown) or read.found[0][0].value == b"2"
                assert (await answered(client.do(put(b"/asked", b"3")))).succeeded
                cluster.resume(paused)

        asyncio.run(write())


def test_writes_go_on_after_the_leader_is_killed(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path, 3) as cluster:

        async def write(client: EtcdClient) -> None:
            before = await insist(client, put(b"/led", b"1"))
            leader = cluster.leader()
            cluster.kill(leader)
            after = await insist(client, put(b"/led", b"2"))
            assert after.revision > before.revision
            cluster.restart(leader)
            assert (await insist(client, put(b"/led", b"3"))).revision > after.revision

        on(cluster, write, SHORT_S)


def test_a_minority_answers_nothing(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path, 3) as cluster:

        async def write(client: EtcdClient) -> None:
            await insist(client, put(b"/minor", b"1"))
            for member in cluster.members[:2]:
                cluster.kill(member)
            assert isinstance(await client.do(put(b"/minor", b"2")), Unknown)
            assert isinstance(await client.do(Transaction(reads=(Get(b"/minor"),))), Unknown)
            for member in cluster.members[:2]:
                cluster.start(member)
            assert (await insist(client, Transaction(reads=(Get(b"/minor"),)))).found[0][0].value in (b"1", b"2")

        on(cluster, write, SHORT_S)


# --- Watches. ---


async def take(watch: AsyncIterator[WatchBatch], count: int) -> list[KeyValue | Removed]:
    """A watch's next changes; batches without any are passed over."""
    changes: list[KeyValue | Removed] = []
    while len(changes) < count:
        batch = await anext(watch)
        changes += batch.changes
        assert not batch.changes or batch.revision == batch.changes[-1].mod_revision
    return changes


def test_a_watch_tells_all_changes_from_a_revision_on(shared: EtcdCluster) -> None:
    async def watch(client: EtcdClient) -> None:
        made = await answered(client.do(put(b"/watched/a", b"1")))
        await answered(client.do(put(b"/unwatched")))
        async with contextlib.aclosing(client.watch(b"/watched/", made.revision)) as changes:
            assert await take(changes, 1) == [KeyValue(b"/watched/a", b"1", made.revision, made.revision)]
            both = await answered(
                client.do(Transaction(writes=(Delete(b"/watched/a"), Put(b"/watched/b", b"2"), Put(b"/x", b"2"))))
            )
            told = await take(changes, 2)
            assert Removed(b"/watched/a", both.revision) in told
            assert KeyValue(b"/watched/b", b"2", both.revision, both.revision) in told

    on(shared, watch)


def test_a_watch_from_now_on_says_from_when(shared: EtcdCluster) -> None:
    async def watch(client: EtcdClient) -> None:
        before = await answered(client.do(put(b"/now", b"1")))
        async with contextlib.aclosing(client.watch(b"/now", 0)) as changes:
            first = await anext(changes)
            assert first == WatchBatch(before.revision)
            after = await answered(client.do(put(b"/now", b"2")))
            assert await take(changes, 1) == [KeyValue(b"/now", b"2", before.revision, after.revision)]

    on(shared, watch)


def test_a_closed_client_ends_its_watches_and_does_nothing(shared: EtcdCluster) -> None:
    async def watch(client: EtcdClient) -> None:
        changes = client.watch(b"/closed", 0)
        await anext(changes)
        reading = asyncio.ensure_future(anext(changes))
        await client.close()
        with pytest.raises(WatchRefused, match="closed"):
            await reading
        assert isinstance(await client.do(put(b"/closed")), Unknown)

    on(shared, watch)


def test_a_watch_goes_on_over_restarts_without_a_gap(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path) as cluster:

        async def watch(client: EtcdClient) -> None:
            first = await answered(client.do(put(b"/gap", b"0")))
            async with contextlib.aclosing(client.watch(b"/gap", first.revision)) as changes:
                told = await take(changes, 1)
                for number in (1, 2):
                    reading = asyncio.ensure_future(take(changes, 2))
                    cluster.restart(cluster.members[0])
                    await insist(client, put(b"/gap", b"%d" % number))
                    await insist(client, put(b"/gap", b"%d" % number))
                    told += await reading
            assert [change.mod_revision for change in told] == list(range(first.revision, first.revision + len(told)))

        on(cluster, watch)


def test_a_watch_moves_from_a_paused_member_to_another(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path, 3) as cluster:

        async def watch() -> None:
            leader = cluster.leader()
            first, second = [member for member in cluster.members if member is not leader]
            async with client_of(leader.endpoint) as writer, client_of(first.endpoint, second.endpoint) as client:
                made = await insist(writer, put(b"/moved", b"1"))
                # The watch can only begin at the first.
                cluster.kill(second)
                async with contextlib.aclosing(client.watch(b"/moved", made.revision)) as changes:
                    await take(changes, 1)
                    cluster.restart(second)
                    cluster.pause(first)
                    reading = asyncio.ensure_future(take(changes, 1))
                    after = await insist(writer, put(b"/moved", b"2"))
                    assert [change.mod_revision for change in await reading] == [after.revision]
                cluster.resume(first)

        asyncio.run(watch())


def test_a_watch_from_before_a_compaction_says_so(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path) as cluster:

        async def watch(client: EtcdClient) -> None:
            first = await answered(client.do(put(b"/old", b"1")))
            last = await answered(client.do(put(b"/old", b"2")))
            cluster.compact(last.revision)
            with pytest.raises(Compacted) as ended:
                await anext(client.watch(b"/old", first.revision))
            assert ended.value.revision == last.revision
            # What is read anew goes on from there.
            async with contextlib.aclosing(client.watch(b"/old", ended.value.revision)) as changes:
                assert [change.mod_revision for change in await take(changes, 1)] == [last.revision]

        on(cluster, watch)


# --- No space, certificates, users. ---


def test_without_space_writes_are_rejected_and_reads_answered(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path, quota_bytes=SMALLEST_QUOTA_BYTES) as cluster:

        async def fill(client: EtcdClient) -> None:
            written = 0
            while isinstance(
                outcome := await client.do(put(b"/full/%d" % written, bytes(64 << 10))), TransactionAnswer
            ):
                written += 1
            # A write at the edge may have been done all the same; then none is.
            if isinstance(outcome, Unknown):
                assert "may have been done" in outcome.reason
            refused = await client.do(put(b"/claim"))
            assert isinstance(refused, TransactionRejected), refused
            assert "space" in refused.reason
            read = await answered(client.do(Transaction(reads=(Get(b"/full/", is_prefix=True), Get(b"/claim")))))
            assert len(read.found[0]) >= written > 0
            assert read.found[1] == ()
            # A write that is there already can't be told from one that was done.
            assert isinstance(await client.do(put(b"/full/0", bytes(64 << 10))), Unknown)

        on(cluster, fill)


@pytest.fixture
def authority(tmp_path: Path) -> PkiAuthority:
    return PkiAuthority.create(tmp_path / "pki")


def tls_of(authority: PkiAuthority, name: str) -> dict[str, Path]:
    issued = issued_tenant(authority, name)
    return {"ca_file": authority.certificate_path, "cert_file": issued.certificate, "key_file": issued.key}


def test_over_tls_certificates_say_who_may_write(tmp_path: Path, authority: PkiAuthority) -> None:
    stranger = PkiAuthority.create(tmp_path / "other")
    with EtcdCluster(tmp_path / "etcd", authority=authority) as cluster:

        async def write(why: str, **files: Path) -> None:
            async with client_of(*cluster.endpoints, timeout_s=LONG_S if not why else SHORT_S, **files) as client:
                outcome = await client.do(put(b"/tls"))
                assert isinstance(outcome, Unknown if why else TransactionAnswer), outcome
                assert not isinstance(outcome, Unknown) or why in outcome.reason.lower()

        good = tls_of(authority, "node")
        asyncio.run(write("", **good))
        asyncio.run(write("certificate", **good | {"ca_file": stranger.certificate_path}))
        # TLS 1.3 tells the client after its first bytes that its certificate is none: the words are the transport's.
        asyncio.run(write("unavailable", **tls_of(stranger, "node") | {"ca_file": authority.certificate_path}))
        asyncio.run(write("unavailable", ca_file=authority.certificate_path))
        asyncio.run(write("unavailable"))
        asyncio.run(write("", **good))


def test_tls_is_never_left_for_plain_text(shared: EtcdCluster, authority: PkiAuthority) -> None:
    async def write() -> None:
        files = tls_of(authority, "node")
        async with client_of(*shared.endpoints, timeout_s=SHORT_S, **files) as client:
            assert isinstance(await client.do(put(b"/plain")), Unknown)
        async with client_of(*shared.endpoints) as client:
            assert (await answered(client.do(Transaction(reads=(Get(b"/plain"),))))).found == ((),)

    asyncio.run(write())


def test_renewed_certificates_are_read_when_the_old_ones_are_refused(tmp_path: Path, authority: PkiAuthority) -> None:
    stranger = PkiAuthority.create(tmp_path / "other")
    with EtcdCluster(tmp_path / "etcd", authority=authority) as cluster:

        async def write() -> None:
            files = {name: tmp_path / name for name in ("ca_file", "cert_file", "key_file")}
            for name, path in tls_of(stranger, "node").items():
                shutil.copy(path, files[name])
            async with client_of(*cluster.endpoints, timeout_s=5, **files) as client:
                assert isinstance(await client.do(put(b"/renewed")), Unknown)
                for name, path in tls_of(authority, "node").items():
                    shutil.copy(path, files[name])
                await insist(client, put(b"/renewed"))

        asyncio.run(write())


def test_a_certificate_s_name_is_etcd_s_user(tmp_path: Path, authority: PkiAuthority) -> None:
    with EtcdCluster(tmp_path / "etcd", authority=authority) as cluster:
        for name in ("root", "etcdctl", "node"):
            cluster.control("user", "add", name, "--no-password")
        cluster.control("role", "add", "root")
        cluster.control("user", "grant-role", "root", "root")
        cluster.control("user", "grant-role", "etcdctl", "root")
        cluster.control("role", "add", "fleet")
        cluster.control("role", "grant-permission", "fleet", "--prefix=true", "readwrite", "/gpulease/")
        cluster.control("user", "grant-role", "node", "fleet")
        cluster.control("auth", "enable")

        async def write() -> None:
            async with client_of(*cluster.endpoints, timeout_s=LONG_S, **tls_of(authority, "node")) as client:
                assert (await answered(client.do(put(b"/gpulease/x")))).succeeded
                for refused in (put(b"/others"), Transaction(reads=(Get(b"/others"),))):
                    outcome = await client.do(refused)
                    assert isinstance(outcome, TransactionRejected)
                    assert "permission denied" in outcome.reason
                with pytest.raises(WatchRefused, match="permission denied"):
                    await anext(client.watch(b"/others", 0))

        asyncio.run(write())


# --- Settings. ---


@pytest.mark.parametrize(
    ("address", "endpoints"),
    [
        ("etcd://h1,h2:2380", ("h1:2379", "h2:2380")),
        ("etcd://[::1],10.0.0.1", ("[::1]:2379", "10.0.0.1:2379")),
        ("etcd://a.example", ("a.example:2379",)),
    ],
)
def test_an_address_names_members(address: str, endpoints: tuple[str, ...]) -> None:
    assert parse_endpoints(address) == endpoints


@pytest.mark.parametrize(
    "address",
    [
        *("", "etcd", "etcd://", "etcd:h1", "http://h1", "etcd://h1,", "etcd://h1:0", "etcd://h1:65536", "etcd://h1/x"),
        *("etcd://user@h1", "etcd://-h", "etcd://h1,h1:2379", "etcd://" + ",".join(f"h{n}" for n in range(17))),
    ],
)
def test_what_names_no_members_is_refused(address: str) -> None:
    with pytest.raises(BadEtcdSettings):
        parse_endpoints(address)


def test_settings_that_reach_nothing_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for endpoints in ((), tuple(f"h{number}:1" for number in range(MAX_ENDPOINTS + 1))):
        with pytest.raises(BadEtcdSettings, match="members"):
            EtcdSettings(endpoints)
    with pytest.raises(BadEtcdSettings, match="key"):
        EtcdSettings(("h:1",), ca_file=file, cert_file=file)
    with pytest.raises(BadEtcdSettings, match="CA"):
        EtcdSettings(("h:1",), cert_file=file, key_file=file)
    with pytest.raises(BadEtcdSettings, match="timeout"):
        EtcdSettings(("h:1",), timeout_s=0)
    with pytest.raises(BadEtcdSettings, match="No such file"):
        EtcdClient(EtcdSettings(("h:1",), ca_file=file))
