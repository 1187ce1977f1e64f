"""A decoder with a fleet's address: if its node is lost, all tenants get the same tokens from another node."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from gpulease.client.decode import Decoder
from gpulease.client.decode.checkpoint import RandomCheckpoint
from gpulease.client.decode.openai.decode_settings import EXAMPLE
from gpulease.client.decode.sample_models import TINY_MODEL
from gpulease.client.decode.supervisor import serving_engine
from gpulease.client.decode.supervisor.decoder import _engine_spec
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Drain, Empty
from helpers.daemon import Daemon, python_environment
from helpers.decode.decoder_rig import (
    SETTINGS,
    TENANTS,
    Gate,
    Recorder,
    one_by_one,
    outputs_around,
    play,
)
from helpers.decode.random_models import LIGHT
from helpers.etcd_cluster import EtcdCluster
from helpers.fleet_directory import Directory, put_daemon
from helpers.fleet_rig import HORIZON_S, FleetNode, counted_bytes, fleet, quota
from helpers.lasting_fleet import LastingFleet, lent_fleet, stop_fleets
from helpers.processes import stop_process
from helpers.remote import Pki
from helpers.waiting import wait_until

# Compile the kernels once beforehand: else the engines of two nodes would compile them at the same time.
pytestmark = pytest.mark.usefixtures("_decode_kernels")

KEY = "replace-this-key"
"""The key of the first tenant in the example settings."""


@contextmanager
def nodes_at(folder: Path, tenants: str) -> Iterator[tuple[str, EtcdCluster, list[FleetNode]]]:
    """Yield a fleet of two nodes: its address, its etcd and the nodes."""
    with (
        fleet(folder, tenants=tenants) as (cluster, nodes),
        Directory(cluster, folder / "d", horizon_s=str(HORIZON_S)) as directory,
    ):
        directory.wait_for("view of its fleet is current")
        yield f"fleet:{directory.address}", cluster, nodes


@pytest.fixture(scope="module")
def _fleets() -> Iterator[list[LastingFleet]]:
    yield from stop_fleets()


@pytest.fixture
def pair(_fleets: list[LastingFleet], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LastingFleet]:
    """Return two nodes with a directory. After the test, both must run, without leases."""
    yield from lent_fleet(_fleets, tmp_path_factory.mktemp("fleet"), with_directory=True)


def place_of(address: str, nodes: Sequence[FleetNode]) -> tuple[FleetNode, FleetNode]:
    """Return the node with this address, and the other node."""
    here = next(node for node in nodes if node.address == address)
    return here, next(node for node in nodes if node is not here)


def kill_node(node: FleetNode) -> None:
    """Kill all of a node's processes at once, as if its host lost power."""
    node.now.allowed_trouble += ["worker", "zygote", "fleet"]
    for info in node.processes():
        os.kill(info.pid, signal.SIGKILL)
    node.kill()


@pytest.mark.exhaustive
def test_a_drained_node_is_left_for_another_before_its_leases_end(
    pair: LastingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Recorder()
    monkeypatch.setattr(serving_engine, "WATCH_PAUSE_S", 0.2)

    async def scene(decoder: Decoder) -> None:
        alone = await one_by_one(decoder)
        for _ in range(2):  # There, and back.
            here, there = place_of(decoder.engine.lease.address, pair.nodes)
            with monkeypatch.context() as patched:
                gate = Gate(patched, opens_before=True)
                ask(Opcode.DRAIN, Drain(3_600_000), here.address)
                await gate.is_asked.wait()

                async def let_it_leave(gate: Gate = gate) -> None:
                    gate.may_open.set()

                assert await outputs_around(decoder, let_it_leave) == alone
            assert decoder.engine.lease.address == there.address
            await asyncio.to_thread(wait_until, lambda here=here: not here.now.leases(), "the drained node is empty")
            ask(Opcode.DRAIN_CANCEL, Empty(), here.address)
        assert await one_by_one(decoder) == alone

    play(pair.address, scene, heard)
    assert [report.is_planned for report in heard.rebuilt] == [True, True]
    assert {report.tenant_id for report in heard.rebinds} == set("abcd"), "they were in the midst of it"


def stop_node(node: FleetNode) -> None:
    """Stop all of a node's processes: connections stay open, but nothing replies."""
    for info in node.processes():
        stop_process(info.pid)


def kill_daemon(node: FleetNode) -> None:
    """Kill only the daemon: the engine's session continues without it."""
    node.kill()


async def abandoned(decoder: Decoder, node: FleetNode) -> None:
    """Start a lost node again. Returns once no task tries to end the engine there any more."""
    for info in node.processes():
        os.kill(info.pid, signal.SIGKILL)
    await asyncio.to_thread(node.now.process.wait)
    await asyncio.to_thread(node.start)
    while len(decoder._supervisor._tasks._tasks) > 1:  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0.01)


@pytest.mark.exhaustive
def test_a_node_that_hangs_is_replaced_by_another(pair: LastingFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Recorder()
    monkeypatch.setattr(serving_engine, "FLEET_LEASE_S", 16.0)
    monkeypatch.setattr(serving_engine, "WATCH_PAUSE_S", 0.1)
    monkeypatch.setattr(serving_engine, "DAEMON_RESTART_S", 0.2)

    async def scene(decoder: Decoder) -> None:
        alone = await one_by_one(decoder)
        here, there = place_of(decoder.engine.lease.address, pair.nodes)

        async def stop() -> None:
            stop_node(here)

        assert await outputs_around(decoder, stop) == alone
        assert decoder.engine.lease.address == there.address
        await abandoned(decoder, here)

    play(pair.address, scene, heard)
    assert [report.is_planned for report in heard.rebuilt] == [False]
    assert heard.rebinds


@pytest.mark.exhaustive
def test_a_node_whose_daemon_stays_away_is_left_while_its_session_goes_on(
    pair: LastingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Recorder()
    monkeypatch.setattr(serving_engine, "WATCH_PAUSE_S", 0.1)
    monkeypatch.setattr(serving_engine, "DAEMON_RESTART_S", 0.2)

    async def scene(decoder: Decoder) -> None:
        alone = await one_by_one(decoder)
        here, there = place_of(decoder.engine.lease.address, pair.nodes)
        with monkeypatch.context() as patched:
            gate = Gate(patched, opens_before=True)
            kill_daemon(here)
            await gate.is_asked.wait()

            async def let_it_leave() -> None:
                gate.may_open.set()

            assert await outputs_around(decoder, let_it_leave) == alone
        assert decoder.engine.lease.address == there.address
        await abandoned(decoder, here)

    play(pair.address, scene, heard)
    assert [report.is_planned for report in heard.rebuilt] == [True]


@pytest.mark.exhaustive
def test_a_killed_node_s_share_of_a_quota_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quota has room for one engine. The next one is refused until the fleet has declared the node dead."""
    heard, counted = Recorder(), "[tenants.default]\nfleet_quota = true\n"
    monkeypatch.setattr(serving_engine, "WATCH_PAUSE_S", 0.1)
    monkeypatch.setattr(serving_engine, "DAEMON_RESTART_S", 0.2)
    size_bytes = _engine_spec(RandomCheckpoint(LIGHT, 1), tuple(TENANTS), SETTINGS).size_bytes

    async def scene(decoder: Decoder) -> None:
        alone = await one_by_one(decoder)
        here, there = place_of(decoder.engine.lease.address, nodes)

        async def kill() -> None:
            kill_node(here)

        assert await outputs_around(decoder, kill) == alone
        assert decoder.engine.lease.address == there.address
        await abandoned(decoder, here)

    with nodes_at(tmp_path, counted) as (address, cluster, nodes):
        quota(cluster, "default", str(size_bytes))
        play(address, scene, heard)
        wait_until(lambda: not counted_bytes(cluster), "all bytes came back")
    assert [report.is_planned for report in heard.rebuilt] == [False]
    assert heard.rebinds


@pytest.mark.exhaustive
def test_nodes_that_share_no_memory_with_the_decoder_give_the_same_tokens(
    start_daemon: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TLS, as from another host: a region is revoked, then the load moves to the other node."""
    pki = Pki.make(tmp_path / "pki")
    pki.be(pki.ann, monkeypatch)
    daemons = [start_daemon(tls=True, config=pki.settings()) for _ in range(2)]

    async def scene(decoder: Decoder) -> None:
        alone, here = await one_by_one(decoder), decoder.engine.lease.address
        assert not decoder.engine.session.shares_memory
        (daemon,) = [daemon for daemon in daemons if daemon.tls_address == here]

        async def revoke() -> None:
            daemon.revoke(decoder.regions.pools["a"].region.lease_id)

        assert await outputs_around(decoder, revoke) == alone
        ask(Opcode.DRAIN, Drain(3_600_000), daemon.address)
        while decoder.engine.lease.address == here:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.01)
        assert await one_by_one(decoder) == alone

    with EtcdCluster(tmp_path / "etcd") as cluster:
        for number, daemon in enumerate(daemons):
            put_daemon(cluster, f"n{number}", daemon, addresses=(daemon.tls_address,))
        with Directory(cluster, tmp_path / "d") as directory:
            directory.wait_for("view of its fleet is current")
            play(f"fleet:{directory.address}", scene, heard := Recorder())
    assert {report.tenant_id for report in heard.rebinds} == {"a"}
    assert [report.is_planned for report in heard.rebuilt] == [True]


# --- As a user would run it ---


@contextmanager
def server_at(address: str, folder: Path) -> Iterator[httpx.Client]:
    """Yield a client of `gpulease serve decode`, which uses the fleet's address and the example's settings."""
    config, sock, log = folder / "decode.toml", folder / "server.sock", folder / "server.log"
    config.write_text(
        EXAMPLE.read_text().replace("../../tiny", str(TINY_MODEL)).replace("max_rows = 64", "max_rows = 32")
    )
    words = ["serve", "decode", str(config), "--listen", f"unix:{sock}"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gpulease.client.cli", *words],
            stdout=file,
            stderr=file,
            env=python_environment() | {"GPULEASE_ADDRESS": address},
        )
    try:
        wait_until(lambda: "decode listens on" in log.read_text(), "the server listens", seen=log.read_text)
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(
            base_url="http://localhost", transport=httpx.HTTPTransport(uds=str(sock)), headers=headers, timeout=300
        ) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()


def text_around(client: httpx.Client, event: Callable[[], None]) -> str:
    """Return the text of a streamed completion. The event happens after its first pieces."""
    asked = {"prompt": "Changed in version", "max_tokens": 100, "temperature": 0, "stream": True}
    text, pieces = "", 0
    with client.stream("POST", "/v1/completions", json=asked) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                pieces += 1
                if pieces == 4:
                    event()
    return text


@pytest.mark.exhaustive
def test_a_served_stream_outlives_the_node_that_it_began_on(pair: LastingFleet, tmp_path: Path) -> None:
    with server_at(pair.address, tmp_path) as client:
        undisturbed = text_around(client, lambda: None)

        def lose_node() -> None:
            lost.append(next(node for node in pair.nodes if node.now.leases()))
            kill_node(lost[0])

        lost: list[FleetNode] = []
        assert text_around(client, lose_node) == undisturbed
        (other,) = [node for node in pair.nodes if node is not lost[0]]
        assert other.now.leases()
        assert client.get("/healthz").status_code == 200
