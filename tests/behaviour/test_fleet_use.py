"""Everything that uses leases also works with a fleet's address: regions, submits, tokens, servers, decoding."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpulease.client import GpuBuilder, GpuSession, InvalidRequest, Permission
from gpulease.client.cli.__main__ import main
from gpulease.client.decode import Decoder
from gpulease.client.decode.checkpoint.random_checkpoint import RandomCheckpoint
from gpulease.client.serve.gateway import DaemonEffects, NodeAuthority, SqliteStore, serve_inference_request
from gpulease.client.sync.lease import my_audience
from gpulease.protocol import Phase
from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.daemon import Daemon
from helpers.decode.decoder_rig import PROMPTS, SETTINGS, TENANTS, read, submit
from helpers.decode.random_models import LIGHT
from helpers.etcd_cluster import EtcdCluster
from helpers.fleet_directory import Directory, put_daemon
from helpers.gateway_steps import AFFINE, KERNEL, OUTPUT, request
from helpers.model_rig import ModelRig, item, obey, right
from helpers.submits import ROOM, check_scaled, scaling

MIB = 1 << 20


@pytest.fixture(scope="module")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory, shared_daemon: Daemon) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fleet")
    with EtcdCluster(folder / "etcd") as cluster:
        put_daemon(cluster, "n1", shared_daemon)
        with Directory(cluster, folder / "d") as directory:
            directory.wait_for("view of its fleet is current")
            yield f"fleet:{directory.address}"


@pytest.fixture
def fleet(shared_fleet: str, daemon: Daemon) -> str:
    """Return the address of a fleet with one node, which is idle again after the test."""
    return shared_fleet


def test_regions_submits_and_tokens(fleet: str, daemon: Daemon) -> None:
    with GpuBuilder(fleet).min_vram(64 * MIB).submits(ROOM).lease_secs(60).acquire() as lease:
        assert lease.address == daemon.address
        with GpuSession(lease) as session:
            with lease.region(4 * MIB, ttl_secs=30) as region:
                region.renew(20)
            check_scaled(scaling(lease).launch())
            buffer = session.mem_alloc(16)
            assert session.mem_read(buffer, 0, 16) == bytes(16)
        grant = lease.issue(Permission.LEASE_QUERY, my_audience(lease.address))
        assert lease.inspect_token(grant).permissions == Permission.LEASE_QUERY
        with pytest.raises(InvalidRequest, match="use the address of a single daemon here"):
            my_audience(fleet)
        lease.grow(MIB)
        lease.keep_alive().stop()
        with lease.events() as events:
            assert next(iter(events)).phase is Phase.ACTIVE


def test_a_gateway(fleet: str, daemon: Daemon, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store")
    try:
        served = serve_inference_request(
            DaemonEffects(store, fleet), NodeAuthority(), request("one"), AFFINE.read_bytes(), KERNEL
        )
    finally:
        store.close()
    assert served.output == OUTPUT
    assert daemon.query(served.lease_id)["cause"] == "freed"


def test_a_model_server(fleet: str, daemon: Daemon) -> None:
    async def play() -> None:
        rig = ModelRig(fleet, obey())
        async with rig.host:
            lease_id = await rig.leased()
            assert await rig.ask(item(7)) == right(7)
            assert [report["lease_id"] for report in daemon.leases()] == [f"{lease_id:032x}"]

    asyncio.run(play())


@pytest.mark.exhaustive
def test_a_prompt_that_is_continued_by_hand(fleet: str, daemon: Daemon) -> None:
    words = ["decode", "Changed in version", "--max-tokens", "2", "--json"]
    done = CliRunner().invoke(main, words, env={ADDRESS_VARIABLE: fleet})
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.output)["tokens"]) == 2
    assert daemon.leases() == []


@pytest.mark.usefixtures("_decode_kernels")
def test_a_decoder_whose_second_engine_comes_from_the_fleet_too(fleet: str) -> None:
    async def play() -> None:
        async with Decoder.open(RandomCheckpoint(LIGHT, 1), TENANTS, SETTINGS, address=fleet) as decoder:
            alone = [await read(submit(decoder, name)) for name in PROMPTS]
            generations = [submit(decoder, name) for name in PROMPTS]
            first = [await anext(generation) for generation in generations]
            await decoder.move()
            others = await asyncio.gather(*map(read, generations))
            assert [[token, *rest] for token, rest in zip(first, others, strict=True)] == alone

    asyncio.run(play())
