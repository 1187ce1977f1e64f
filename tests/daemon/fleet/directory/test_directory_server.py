"""A directory's server: what it answers, to whom, and what a hostile peer gets from it."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import wraps
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gpulease.daemon.fleet.directory import directory_server, fleet_watch
from gpulease.daemon.fleet.directory.directory_server import NO_TENANTS, CannotServe, DirectoryServer
from gpulease.daemon.fleet.directory.fleet_view import ClaimView
from gpulease.daemon.fleet.directory.fleet_watch import FleetWatch
from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.transactions import KeyValue
from gpulease.daemon.fleet.records.fleet_records import (
    CardRecord,
    ClaimRecord,
    InventoryRecord,
    NodeRecord,
    name_key,
    node_key,
)
from gpulease.daemon.leases.devices import PlacementOrder
from gpulease.daemon.remote.node_identity import TENANT_PREFIX, IdentityFiles
from gpulease.protocol import Connection, Failure, Goodbye, Opcode, Reply, Role, Status
from gpulease.protocol.address import Address, TcpAddress, TlsAddress, UnixAddress, parse_address
from gpulease.protocol.codec import build_body, parse_body
from gpulease.protocol.framing import MAGIC, build_frame
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Body, Empty, Hello, LeaseRef, Metrics, Ping, Place, Placement, Report
from helpers.remote import Pki
from helpers.waiting import PATIENCE_S

CARD = CardRecord("GPU-1", "a card", 8 << 30, 4 << 30, 0, False)
NODE = NodeRecord("n", inventory=InventoryRecord(("tls:gpu.example:7443",), {}, (CARD,)))
PLACE = Place(1 << 30, 0, "", (), None, ())


class Watch(FleetWatch):
    """A watch that has read a fleet of one node and three names, and that etcd confirms as long as the test says so."""

    def __init__(self, client: EtcdClient) -> None:
        self.now_s = 100.0
        super().__init__(client, PlacementOrder.PACK, Random(1), lambda: self.now_s)
        self.view.put(KeyValue(node_key("n1"), NODE.encode(), 3, 4), self.now_s)
        for name, tenant in (("model-a", "ann"), ("model-b", "bob"), ("model-c", f"uid:{os.getuid()}")):
            claim = ClaimRecord("n1", 3, "0" * 32, tenant, "n")
            self.view.put(KeyValue(name_key(name), claim.encode(), 7, 7), self.now_s)
        self._is_read, self._confirmed_s = True, self.now_s


class Scene:
    """A server in this process, and peers of it."""

    def __init__(self, server: DirectoryServer, watch: Watch, folder: Path, pki: Pki) -> None:
        self.server, self.watch, self.folder, self.pki = server, watch, folder, pki

    def unix(self) -> UnixAddress:
        address = self.server.listen(UnixAddress(str(self.folder / "d.sock")))
        assert isinstance(address, UnixAddress)
        return address

    async def connect(self, address: Address, context: ssl.SSLContext | None = None) -> "Peer":
        if isinstance(address, UnixAddress):
            return Peer(*await asyncio.open_unix_connection(address.path))
        name = "localhost" if context is not None else None
        return Peer(*await asyncio.open_connection(address.host, address.port, ssl=context, server_hostname=name))


class Peer:
    """A client's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.connection = Connection(Role.CLIENT, max_payload_bytes=MAX_PAYLOAD_BYTES)

    async def ask(self, op: Opcode, body: Body) -> Any:
        _, frame = self.connection.send_request(op, body)
        self.writer.write(frame)
        event = await self.event()
        assert isinstance(event, Reply), event
        return event.result

    async def hello(self) -> "Peer":
        assert not isinstance(await self.ask(Opcode.HELLO, Hello(0, "test", ())), Failure)
        return self

    async def event(self) -> Any:
        """The next event; None at the stream's end."""
        while (event := self.connection.next_event()) is None:
            try:
                data = await asyncio.wait_for(self.reader.read(1 << 16), PATIENCE_S)
            except (ConnectionError, ssl.SSLError):
                return None
            if not data:
                return None
            self.connection.receive_data(data)
        return event

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError, TimeoutError):
            await self.writer.wait_closed()


@contextlib.asynccontextmanager
async def scene_of(folder: Path, pki: Pki, tenants: Mapping[str, str] = NO_TENANTS) -> AsyncIterator[Scene]:
    client = EtcdClient(EtcdSettings(("127.0.0.1:1",)))
    files = IdentityFiles(
        pki.server.certificate, pki.server.key, pki.authority.certificate_path, pki.authority.crl_path
    )
    watch = Watch(client)
    server = DirectoryServer(watch, files, frozenset({"ops"}), tenants)
    try:
        yield Scene(server, watch, folder, pki)
    finally:
        await server.close()
        await client.close()
        await asyncio.sleep(0)


Play = Callable[[Scene], Awaitable[None]]


def with_scene(play: Play) -> Callable[[Path, Pki], None]:
    @wraps(play)
    def run(tmp_path: Path, pki: Pki) -> None:
        async def inside() -> None:
            async with scene_of(tmp_path, pki) as scene:
                await play(scene)

        asyncio.run(inside())

    del run.__wrapped__
    return run


@with_scene
async def test_a_directory_answers_hello_ping_place_and_list_and_refuses_the_rest(scene: Scene) -> None:
    peer = await (await scene.connect(scene.unix())).hello()
    assert await peer.ask(Opcode.PING, Ping(7)) == Ping(7)
    placed = await peer.ask(Opcode.PLACE, PLACE)
    assert isinstance(placed, Placement)
    assert [one.node_id for one in placed.candidates] == ["n1"]
    listing = await peer.ask(Opcode.FLEET_LIST, Empty())
    assert isinstance(listing, Report)
    assert [node["node_id"] for node in listing.report["nodes"]] == ["n1"]
    refused = await peer.ask(Opcode.LEASE_QUERY, LeaseRef(1))
    assert refused.status is Status.UNSUPPORTED
    assert await peer.ask(Opcode.PING, Ping(8)) == Ping(8)
    await peer.close()


@with_scene
async def test_requests_that_make_no_sense_are_refused_and_the_connection_goes_on(scene: Scene) -> None:
    peer = await (await scene.connect(scene.unix())).hello()
    assert (await peer.ask(Opcode.PLACE, Place(1, 200, "", (), None, ()))).status is Status.UNSUPPORTED
    assert (await peer.ask(Opcode.PLACE, Place(1, 0, "../nodes/x", (), None, ()))).status is Status.INVALID_REQUEST
    assert isinstance(await peer.ask(Opcode.PLACE, PLACE), Placement)
    await peer.close()


@with_scene
async def test_a_view_that_is_too_old_names_no_nodes(scene: Scene) -> None:
    peer = await (await scene.connect(scene.unix())).hello()
    scene.watch.now_s += 10.0
    assert isinstance(await peer.ask(Opcode.PLACE, PLACE), Placement)
    scene.watch.now_s += 0.1
    for op, body in ((Opcode.PLACE, PLACE), (Opcode.FLEET_LIST, Empty())):
        failure = await peer.ask(op, body)
        assert (failure.status, "has not reached etcd for 10 s" in failure.message) == (Status.DISCONNECTED, True)
    await peer.close()


@with_scene
async def test_by_tls_a_certificate_says_whose_names_are_shown_and_who_sees_nodes(scene: Scene) -> None:
    address = scene.server.listen(TlsAddress("127.0.0.1", 0))
    pki = scene.pki
    for who, names in ((pki.ann, ["model-a"]), (pki.bob, ["model-b"]), (pki.ops, ["model-a", "model-b", "model-c"])):
        peer = await (await scene.connect(address, pki.context(who))).hello()
        listing = await peer.ask(Opcode.FLEET_LIST, Empty())
        assert [name["name"] for name in listing.report["names"]] == names
        is_operator = who is pki.ops
        assert listing.report["operator"] is is_operator
        assert [node["node_id"] for node in listing.report["nodes"]] == (["n1"] if is_operator else [])
        await peer.close()


@with_scene
async def test_who_serves_a_name_is_told_to_its_tenant_and_to_operators(scene: Scene) -> None:
    address = scene.server.listen(TlsAddress("127.0.0.1", 0))
    pki = scene.pki
    for who, holder in ((pki.ann, "n1"), (pki.ops, "n1"), (pki.bob, None)):
        peer = await (await scene.connect(address, pki.context(who))).hello()
        placed = await peer.ask(Opcode.PLACE, Place(1 << 30, 0, "model-a", (), None, ()))
        assert (placed.holder, [one.node_id for one in placed.candidates]) == (holder, ["n1"])
        await peer.close()


def test_a_directory_names_tenants_as_the_nodes_do(tmp_path: Path, pki: Pki) -> None:
    async def run() -> None:
        tenants = {f"{TENANT_PREFIX}bob": "ann", f"{TENANT_PREFIX}ann": "ops"}
        async with scene_of(tmp_path, pki, tenants) as scene:
            address = scene.server.listen(TlsAddress("127.0.0.1", 0))
            for who, names in ((pki.bob, ["model-a"]), (pki.ann, ["model-a", "model-b", "model-c"])):
                peer = await (await scene.connect(address, pki.context(who))).hello()
                listing = await peer.ask(Opcode.FLEET_LIST, Empty())
                assert [name["name"] for name in listing.report["names"]] == names
                await peer.close()
            nobody = await scene.connect(address, pki.context(pki.ops))
            assert isinstance(goodbye := await nobody.event(), Goodbye)
            assert "no tenant name is in the certificate" in goodbye.failure.message
            await nobody.close()

    asyncio.run(run())


@with_scene
async def test_metrics_are_told_to_operators(scene: Scene) -> None:
    address = scene.server.listen(TlsAddress("127.0.0.1", 0))
    ops = await (await scene.connect(address, scene.pki.context(scene.pki.ops))).hello()
    told = await ops.ask(Opcode.METRICS, Empty())
    assert isinstance(told, Metrics)
    assert 'gpu_directory_nodes{state="ready"} 1.0' in told.exposition
    assert "gpu_directory_connections 1.0" in told.exposition
    ann = await (await scene.connect(address, scene.pki.context(scene.pki.ann))).hello()
    assert (await ann.ask(Opcode.METRICS, Empty())).status is Status.DENIED
    for peer in (ops, ann):
        await peer.close()


@with_scene
async def test_by_tls_nobody_comes_without_a_good_certificate(scene: Scene) -> None:
    address = scene.server.listen(TlsAddress("127.0.0.1", 0))
    revoked = scene.pki.authority.issue_tenant("eve")
    scene.pki.authority.revoke(revoked.certificate)
    for who in (None, scene.pki.short_lived("late", -60), revoked, scene.pki.server):
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            peer = await scene.connect(address, scene.pki.context(who))
            _, frame = peer.connection.send_request(Opcode.HELLO, Hello(0, "test", ()))
            peer.writer.write(frame)
            assert await peer.event() is None
            await peer.close()
    await _until(lambda: scene.server.connections == 0)


@with_scene
async def test_over_tcp_names_are_shown_to_nobody_and_only_loopback_is_served(scene: Scene) -> None:
    peer = await (await scene.connect(scene.server.listen(TcpAddress("127.0.0.1", 0)))).hello()
    assert (await peer.ask(Opcode.FLEET_LIST, Empty())).report["names"] == []
    await peer.close()
    with pytest.raises(CannotServe, match="an address of plain TCP must be on loopback"):
        scene.server.listen(TcpAddress("0.0.0.0", 0))


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # what it looks at tells nobody
            await asyncio.sleep(0.005)


def test_peers_that_say_nothing_or_half_are_cut_off(tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(scene: Scene, address: Address) -> Peer:
        return await scene.connect(address)

    async def half(scene: Scene, address: Address) -> Peer:
        peer = await (await scene.connect(address)).hello()
        peer.writer.write(build_frame(Opcode.PLACE, b"x" * 100, request_id=9)[:-50])
        return peer

    async def idle(scene: Scene, address: Address) -> Peer:
        return await (await scene.connect(address)).hello()

    cuts = {
        "HELLO_TIMEOUT_S": (silent, "no HELLO"),
        "STALL_TIMEOUT_S": (half, "the rest of a frame did not arrive"),
        "IDLE_TIMEOUT_S": (idle, "no request arrived"),
    }
    # For TLS alone, where nobody here shakes hands.
    monkeypatch.setattr(directory_server, "HANDSHAKE_TIMEOUT_S", 0.1)

    async def run() -> None:
        async with scene_of(tmp_path, pki) as scene:
            unix, tls = scene.unix(), scene.server.listen(TlsAddress("127.0.0.1", 0))
            no_handshake = await scene.connect(parse_address(f"tcp:127.0.0.1:{tls.port}"))  # type: ignore[union-attr]
            for name, (begin, why) in cuts.items():
                # The only short limit is the one that this peer exceeds: a slow host keeps to the others.
                with monkeypatch.context() as short:
                    short.setattr(directory_server, name, 0.1)
                    peer = await begin(scene, unix)
                    goodbye = await peer.event()
                assert isinstance(goodbye, Goodbye)
                assert why in goodbye.failure.message
                assert await peer.event() is None
                await peer.close()
            assert await no_handshake.reader.read() == b""
            await _until(lambda: scene.server.connections == 0)
            await no_handshake.close()

    asyncio.run(run())


@with_scene
async def test_bytes_that_are_no_frames_end_a_connection(scene: Scene) -> None:
    address = scene.unix()
    too_long = MAGIC + bytes([1, 0]) + Opcode.HELLO.to_bytes(2, "big") + bytes(4) + b"\xff\xff\xff\xff" + bytes(24)
    for data in (b"GET / HTTP/1.1\r\n\r\n" + b"x" * 40, too_long):
        peer = await scene.connect(address)
        peer.writer.write(data)
        assert isinstance(await peer.event(), Goodbye)
        await peer.close()
    await _until(lambda: scene.server.connections == 0)


def test_one_source_can_t_take_all_connections(tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_server, "MAX_PER_SOURCE", 3)

    async def run() -> None:
        async with scene_of(tmp_path, pki) as scene:
            unix = scene.unix()
            peers = [await (await scene.connect(unix)).hello() for _ in range(3)]
            beyond = await scene.connect(unix)
            assert await beyond.event() is None
            tcp = await (await scene.connect(scene.server.listen(TcpAddress("127.0.0.1", 0)))).hello()
            assert scene.server.connections == 4
            await peers.pop().close()
            await _until(lambda: scene.server.connections == 3)
            again = await (await scene.connect(unix)).hello()
            for peer in (*peers, beyond, tcp, again):
                await peer.close()

    asyncio.run(run())


def test_a_peer_that_asks_and_never_reads_is_cut_off(tmp_path: Path, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_server, "STALL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(directory_server, "WRITE_BUFFER_BYTES", 1 << 12)

    async def run() -> None:
        async with scene_of(tmp_path, pki) as scene:
            address = scene.unix()
            loop = asyncio.get_running_loop()
            with socket.socket(socket.AF_UNIX) as sock:
                sock.setblocking(False)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                await loop.sock_connect(sock, address.path)
                connection = Connection(Role.CLIENT, max_payload_bytes=MAX_PAYLOAD_BYTES)
                _, frame = connection.send_request(Opcode.HELLO, Hello(0, "test", ()))
                await loop.sock_sendall(sock, frame)
                asking = _ask_for_ever(sock)
                with pytest.raises((BrokenPipeError, ConnectionResetError)):
                    await asyncio.wait_for(asking, PATIENCE_S)
            await _until(lambda: scene.server.connections == 0)

    asyncio.run(run())


async def _ask_for_ever(sock: socket.socket) -> None:
    for number in count(2):
        frame = build_frame(Opcode.FLEET_LIST, request_id=number)
        await asyncio.get_running_loop().sock_sendall(sock, frame)


@with_scene
async def test_a_listing_is_made_once_a_second_for_all_who_see_the_same(scene: Scene) -> None:
    watch = scene.watch
    operators, ann, nobody = (
        watch.listing(tenant, is_operator=is_operator)
        for tenant, is_operator in (("ops", True), ("ann", False), ("", False))
    )
    watch.view.delete(name_key("model-a"))
    watch.now_s += 0.9
    assert watch.listing("ops-too", is_operator=True) is operators
    assert watch.listing("ann", is_operator=False) is ann
    watch.now_s += 0.2
    again = watch.listing("ann", is_operator=False)
    assert isinstance(again, bytes)
    assert again is not ann
    assert parse_body(Report, again).report["names"] == []
    assert isinstance(nobody, bytes)
    assert parse_body(Report, nobody).report["names"] == []
    for number in range(200):
        watch.listing(f"tenant{number}", is_operator=False)
    assert len(watch._listings) <= fleet_watch.MAX_LISTINGS


@with_scene
async def test_an_answer_that_nobody_reads_is_not_copied_for_each(scene: Scene) -> None:
    long = build_body(Report({"names": [os.urandom(1 << 20) for _ in range(16)]}))
    scene.watch.listing = lambda tenant, *, is_operator: long  # type: ignore[method-assign]
    unix, tls = scene.unix(), scene.server.listen(TlsAddress("127.0.0.1", 0))
    context = scene.pki.context(scene.pki.ann)
    lazy = [await (await scene.connect(unix)).hello() for _ in range(4)]
    lazy += [await (await scene.connect(tls, context)).hello() for _ in range(4)]
    for peer in lazy:
        _, frame = peer.connection.send_request(Opcode.FLEET_LIST, Empty())
        peer.writer.write(frame)
    await _until(lambda: sum(one._is_peer_slow for one in scene.server._connections) == len(lazy))
    held = [one._transport.get_write_buffer_size() for one in scene.server._connections if one._transport]
    assert max(held) <= 2 * directory_server.WRITE_BUFFER_BYTES
    # Whoever reads gets all of it, and others are served meanwhile.
    for address, secured in ((unix, None), (tls, context)):
        peer = await (await scene.connect(address, secured)).hello()
        assert build_body(await peer.ask(Opcode.FLEET_LIST, Empty())) == long
        assert await peer.ask(Opcode.PING, Ping(7)) == Ping(7)
        await peer.close()
    for peer in lazy:
        await peer.close()


@with_scene
async def test_a_source_of_many_connections_has_one_turn_a_round(scene: Scene) -> None:
    unix, tcp = scene.unix(), scene.server.listen(TcpAddress("127.0.0.1", 0))
    flood = [await (await scene.connect(unix)).hello() for _ in range(20)]
    other = await (await scene.connect(tcp)).hello()
    rounds = 0

    def count_round() -> None:
        nonlocal rounds
        rounds += 1
        loop.call_soon(count_round)

    loop = asyncio.get_running_loop()
    loop.call_soon(count_round)
    for peer in flood:
        for _ in range(300):
            _, frame = peer.connection.send_request(Opcode.PLACE, PLACE)
            peer.writer.write(frame)
    before = rounds
    for number in range(20):
        assert await other.ask(Opcode.PING, Ping(number)) == Ping(number)
    placed = scene.watch.counts.placements["placed"]
    assert 0 < placed <= directory_server.REQUESTS_PER_TURN * (rounds - before + 2)
    await _until(lambda: scene.watch.counts.placements["placed"] == 20 * 300)
    for peer in (*flood, other):
        await peer.close()


@with_scene
async def test_a_socket_that_somebody_listens_at_is_not_taken(scene: Scene) -> None:
    address = scene.unix()
    with pytest.raises(CannotServe, match="another gpuleased listens on it"):
        scene.server.listen(address)
    with pytest.raises(CannotServe, match=r"can't listen on unix:/nowhere/d\.sock"):
        scene.server.listen(UnixAddress("/nowhere/d.sock"))


@with_scene
async def test_a_fault_of_the_directory_is_an_answer_too(scene: Scene) -> None:
    """A view that no record could make: a listing of it can't be encoded, and a placement can't be made."""
    peer = await (await scene.connect(scene.unix())).hello()
    odd = ClaimRecord("n1", 2**70, "\ud800", f"uid:{os.getuid()}", "n")
    scene.watch.view.claims["model-c"] = ClaimView(odd, 7)
    scene.watch.view.index.silent = None  # type: ignore[assignment]
    for op, body in ((Opcode.FLEET_LIST, Empty()), (Opcode.PLACE, replace(PLACE, size_bytes=1 << 50))):
        assert (await peer.ask(op, body)).status is Status.INTERNAL
    assert await peer.ask(Opcode.PING, Ping(8)) == Ping(8)
    await peer.close()
