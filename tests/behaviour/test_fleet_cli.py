"""`gpulease fleet` and `gpulease serve directory` as an operator uses them, with real processes and a real etcd."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from gpulease.client.cli.__main__ import main
from gpulease.daemon.fleet.records.fleet_records import HORIZON, QUOTA_DEFAULT, held_key, name_key, node_key
from gpulease.daemon.fleet.rules.quota_records import shard_key
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.lease_ids import lease_id_of
from helpers.daemon import Daemon, python_environment
from helpers.etcd_cluster import EtcdCluster
from helpers.fleet_directory import Directory, put_claim, put_daemon, put_node, record_of
from helpers.fleet_rig import fleet
from helpers.remote import Pki
from helpers.waiting import wait_until


@pytest.fixture
def directory(cluster: EtcdCluster, tmp_path: Path) -> Iterator[Directory]:
    with Directory(cluster, tmp_path / "d") as directory:
        yield directory


def gpulease(*words: str, at: str) -> Result:
    """Run a command to its end in this process, which takes a tenth of a process's time. `at` is its GPULEASE_ADDRESS.

    A command that connects to etcd would end this process.
    """
    return CliRunner().invoke(main, words, env={ADDRESS_VARIABLE: at, "COLUMNS": "200"})


def gpulease_process(*words: str, at: str = "", typed: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end in a process. `typed` is its standard input."""
    command = [sys.executable, "-P", "-m", "gpulease.client.cli", *words]
    variables = python_environment() | {ADDRESS_VARIABLE: at, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, input=typed, check=False, env=variables, timeout=60)


def etcd_of(cluster: EtcdCluster) -> str:
    return f"etcd://{','.join(cluster.endpoints)}"


def keys(cluster: EtcdCluster, key: bytes) -> str:
    return cluster.control("get", "--keys-only", key.decode()).strip()


def create_revision(cluster: EtcdCluster, key: bytes) -> int:
    found = json.loads(cluster.control("get", "--write-out=json", key.decode()))
    return int(found["kvs"][0]["create_revision"])


def test_nodes_and_names_are_listed(cluster: EtcdCluster, directory: Directory, daemon: Daemon) -> None:
    put_daemon(cluster, "n1", daemon)
    put_node(cluster, "n2", record_of("tls:gpu2.example:7443"))
    put_claim(cluster, "model-a", "n1", create_revision(cluster, node_key("n1")))
    address = f"fleet:{directory.address}"

    def listed() -> list[dict[str, object]]:
        done = gpulease("fleet", "names", "--json", at=address)
        return json.loads(done.stdout) if done.exit_code == 0 else []

    (name,) = wait_until(listed, "the directory sees the name")
    assert {key: name[key] for key in ("name", "node_id", "tenant")} == {
        "name": "model-a",
        "node_id": "n1",
        "tenant": "ann",
    }
    assert [node["node_id"] for node in json.loads(gpulease("fleet", "nodes", "--json", at=address).stdout)] == [
        "n1",
        "n2",
    ]
    table = gpulease("fleet", "nodes", at=address).stdout.splitlines()
    assert table[0].split()[:3] == ["node", "state", "address"]
    assert table[1].split()[:3] == ["n1", "ready", daemon.address]
    assert "model-a" in gpulease("fleet", "names", at=address).stdout
    # This command asks the node itself.
    done = gpulease("fleet", "drain", "n1", "--within", "10m", at=address)
    assert (done.exit_code, "Node n1 grants no more leases" in done.stdout) == (0, True)
    assert "Node n1 is not drained" in gpulease("fleet", "drain", "n1", "--cancel", at=address).stdout
    unknown = gpulease("fleet", "drain", "n9", at=address)
    assert (unknown.exit_code, "the fleet has no node n9" in unknown.stderr) == (1, True)
    nowhere = gpulease("fleet", "nodes", at=daemon.address)
    assert "GPULEASE_ADDRESS must name a fleet, not" in nowhere.stderr


def test_a_name_is_acquired_used_by_another_process_and_freed_at_a_fleet_s_address(tmp_path: Path) -> None:
    attach = (
        "from gpulease.client import GpuSession\n"
        "with GpuSession.attach() as session: print(session.lease.name, session.lease.epoch, session.mem_alloc(4))"
    )
    # The horizon is long, because a busy host takes seconds to start a command.
    with (
        fleet(tmp_path / "etcd", nodes=1, horizon_s=120) as (cluster, (node,)),
        Directory(cluster, tmp_path / "d") as directory,
    ):
        at = f"fleet:{directory.address}"

        def acquired() -> dict[str, object]:
            done = gpulease_process("acquire", "--vram", "1MiB", "--name", "model-a", "--json", at=at)
            return json.loads(done.stdout) if done.returncode == 0 else {}

        lease = wait_until(acquired, "the directory knows the node, and the node has room", seen=directory.log)
        assert (lease["address"], lease["name"]) == (node.address, "model-a")
        environment = dict(lease["environment"])  # type: ignore[call-overload]
        assert environment == {
            "GPULEASE_ADDRESS": node.address,
            "GPULEASE_LEASE_ID": lease["lease_id"],
            "GPULEASE_EPOCH": str(lease["epoch"]),
        }
        program = [sys.executable, "-P", "-c", attach]
        used = subprocess.run(
            program, capture_output=True, text=True, check=False, env=python_environment() | environment, timeout=60
        )
        assert used.stdout.split()[:2] == ["model-a", str(lease["epoch"])], used.stderr
        # Neither command knows the node. The directory finds it by the lease's name.
        words = (str(lease["lease_id"]), "--json")
        wait_until(lambda: gpulease("renew", *words, at=at).exit_code == 0, "the directory knows the name")
        assert gpulease("free", *words, at=at).exit_code == 0
        assert node.now.query(lease_id_of(words[0]))["cause"] == "freed"
        unnamed = json.loads(gpulease_process("acquire", "--vram", "1MiB", "--json", at=at).stdout)
        unknown = gpulease("free", unnamed["lease_id"], at=at)
        assert (unknown.exit_code, "the fleet has no name for lease" in unknown.stderr) == (1, True)
        assert gpulease("free", unnamed["lease_id"], at=unnamed["address"]).exit_code == 0


def test_a_fence_by_hand_frees_the_names_of_that_membership_alone(cluster: EtcdCluster) -> None:
    for node_id in ("n1", "n2"):
        put_node(cluster, node_id, record_of("tls:gpu.example:7443"))
    old, other = (create_revision(cluster, node_key(node_id)) for node_id in ("n1", "n2"))
    put_claim(cluster, "model-a", "n1", old)
    put_claim(cluster, "model-b", "n1", old + 1000)
    put_claim(cluster, "model-c", "n2", other)
    for node_id, name in (("n1", "model-a"), ("n1", "model-b"), ("n2", "model-c")):
        cluster.control("put", held_key(node_id, name).decode(), "nonce")
    words = ("fleet", "fence", "n1", "--etcd", etcd_of(cluster))
    # Use a short horizon, so that the test does not take long.
    cluster.control("put", HORIZON.decode(), "2")
    done = gpulease_process(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Node n1 is fenced: it can't claim any more names, and its leases with names end.",
        "Waiting 2.0 s, until the node's leases with names have ended even if it can't be reached.",
        "Free names: model-a.",
    ]
    assert [bool(keys(cluster, node_key(node_id))) for node_id in ("n1", "n2")] == [False, True]
    assert [bool(keys(cluster, name_key(f"model-{letter}"))) for letter in "abc"] == [False, True, True]
    held = [held_key("n1", "model-a"), held_key("n1", "model-b"), held_key("n2", "model-c")]
    assert [bool(keys(cluster, key)) for key in held] == [False, True, True]
    again = gpulease_process(*words)
    assert (again.returncode, "the fleet has no node n1" in again.stderr) == (1, True)


@pytest.mark.exhaustive
def test_an_operator_who_pulled_the_plug_says_so_twice_and_does_not_wait(cluster: EtcdCluster) -> None:
    put_node(cluster, "n1", record_of("tls:gpu.example:7443"))
    put_claim(cluster, "model-a", "n1", create_revision(cluster, node_key("n1")))
    # The horizon is so long that the test would fail if the command waited for it.
    cluster.control("put", HORIZON.decode(), "600")
    words = ("fleet", "fence", "n1", "--etcd", etcd_of(cluster), "--pulled-the-plug")
    for typed in ("", "n\n"):
        kept = gpulease_process(*words, typed=typed)
        assert (kept.returncode, "its names will be served twice. Is its power off?" in kept.stdout) == (1, True)
        assert keys(cluster, node_key("n1"))
    assert gpulease_process(*words, typed="y\n").stdout.splitlines()[-1] == "Free names: model-a."
    put_node(cluster, "n1", record_of("tls:gpu.example:7443"))
    assert gpulease_process(*words, "--yes").stdout.splitlines()[-1] == "The node had no names."


@pytest.mark.parametrize(
    ("horizon", "told"),
    [
        (None, "etcd has no /gpulease/v1/horizon"),
        pytest.param("soon", "/gpulease/v1/horizon can't be read", marks=pytest.mark.exhaustive),
    ],
)
def test_a_fence_whose_wait_nobody_knows_does_nothing(cluster: EtcdCluster, horizon: str | None, told: str) -> None:
    put_node(cluster, "n1", record_of("tls:gpu.example:7443"))
    if horizon is not None:
        cluster.control("put", HORIZON.decode(), horizon)
    done = gpulease_process("fleet", "fence", "n1", "--etcd", etcd_of(cluster))
    assert (done.returncode, told in done.stderr) == (1, True), done.stderr
    assert keys(cluster, node_key("n1"))


@pytest.mark.exhaustive
def test_the_commands_of_a_fleet_say_which_values_they_can_t_read(cluster: EtcdCluster, directory: Directory) -> None:
    put_node(cluster, "n1", record_of("tls:gpu.example:7443"))
    put_claim(cluster, "model-a", "n1", create_revision(cluster, node_key("n1")))
    etcd, at = ("--etcd", etcd_of(cluster)), f"fleet:{directory.address}"
    wait_until(lambda: "n1" in gpulease("fleet", "nodes", at=at).stdout, "the directory sees the node")
    for key, value in {
        node_key("n2"): json.dumps({"nonce": "n", "boot_ms": 2**70}),
        node_key("n3"): '{"nonce":"n","boot_ms":' + "9" * 5_000 + "}",
        node_key("n4"): '{"nonce":"\\ud800"}',
        name_key("model-b"): '{"node_id":"n1","incarnation":1e999}',
        shard_key("ann", 3): '{"budget":1e999,"used":{},"default":0}',
        QUOTA_DEFAULT: '{"total":1e999}',
    }.items():
        cluster.control("put", key.decode(), value)

    def warned() -> Result | None:
        done = gpulease("fleet", "nodes", at=at)
        return done if "4 values" in done.stderr else None

    nodes = wait_until(warned, "the directory says so")
    assert nodes is not None
    assert "4 values in etcd can't be read: /gpulease/v1/n" in nodes.stderr
    assert [line.split()[0] for line in nodes.stdout.splitlines()] == ["node", "n1"]
    assert gpulease("fleet", "names", at=at).exit_code == 0
    quotas = gpulease_process("fleet", "quota", *etcd)
    assert (
        "ann: a part of its quota can't be read, so its leases are refused (/gpulease/v1/quotas/ann/03: "
        in quotas.stdout
    )
    assert "default: a quota that can't be read (Number out of range" in quotas.stdout
    assert (
        "in etcd can't be read as a part of a quota" in gpulease_process("fleet", "quota", "ann", "1GiB", *etcd).stderr
    )
    assert gpulease_process("fleet", "quota", "ann", "2048PiB", *etcd).returncode == 2
    fenced = gpulease_process("fleet", "fence", "n1", *etcd, "--pulled-the-plug", "--yes")
    assert (
        "The claim /gpulease/v1/names/model-b can't be read, so its node is unknown, and it was not deleted"
        in fenced.stdout
    )
    assert fenced.stdout.splitlines()[-1] == "Free names: model-a."


def test_a_fence_without_etcd_says_that_nothing_is_known(tmp_path: Path) -> None:
    done = gpulease_process("fleet", "fence", "n1", "--etcd", "etcd://127.0.0.1:1")
    assert done.returncode == 1
    assert "etcd did not answer, so the outcome is unknown" in done.stderr
    assert gpulease_process("fleet", "fence", "n1", "--etcd", "h1").returncode == 2


@pytest.mark.exhaustive
def test_a_directory_by_tls_places_leases_of_a_tls_node(
    cluster: EtcdCluster, tmp_path: Path, start_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    pki = Pki.make(tmp_path / "pki")
    node = start_daemon(tls=True, config=pki.settings())
    put_node(cluster, "n1", record_of(node.tls_address))
    options = ["--certificate", str(pki.server.certificate), "--key", str(pki.server.key)]
    options += ["--client-ca", str(pki.authority.certificate_path), "--crl", str(pki.authority.crl_path)]
    options += ["--operator", "ops"]
    with Directory(cluster, tmp_path / "d", *options, listen=["tls:127.0.0.1:0"]) as directory:
        directory.wait_for("view of its fleet is current")
        lease = pki.builder(f"fleet:{directory.address}", pki.ann).acquire()
        with lease:
            assert lease.address == node.tls_address
            assert [one["tenant"] for one in node.leases()] == ["ann"]
        at = f"fleet:{directory.address.replace('tls:', 'tls://')}"
        pki.be(pki.ann, monkeypatch)
        denied = gpulease("fleet", "nodes", at=at)
        assert (denied.exit_code, "only operators can list the fleet's nodes" in denied.stderr) == (1, True)
        pki.be(pki.ops, monkeypatch)
        assert node.tls_address in gpulease("fleet", "nodes", at=at).stdout


SOMEWHERE = ("--listen", "unix:/nowhere/s")
UNUSED = ("--etcd", "etcd://127.0.0.1:1")


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (UNUSED, 2, "Missing option '--listen'"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ((*UNUSED, *SOMEWHERE), 1, "can't listen on unix:/nowhere/s"),
                ((*UNUSED, *SOMEWHERE, "--tenant-of-certificate", "ann"), 2, "is not a valid certificate name"),
                (
                    (*UNUSED, *SOMEWHERE, "--tenant-of-certificate", "URI:x:ann=ann", "--operator", "ops"),
                    2,
                    "no --tenant-of-certificate gives a certificate this tenant's name",
                ),
                (("--etcd", "h1", *SOMEWHERE), 2, "must be an address of etcd"),
                ((*UNUSED, "--listen", "tls:127.0.0.1:0"), 1, "TLS needs --certificate, --key and --client-ca"),
            )
        ),
    ],
)
def test_serve_directory_says_what_is_wrong(words: tuple[str, ...], status: int, told: str) -> None:
    done = gpulease_process("serve", "directory", *words)
    assert (done.returncode, told in done.stderr) == (status, True), done.stderr


def test_a_directory_stops_in_order(directory: Directory) -> None:
    process = directory.process
    assert process is not None
    process.terminate()
    assert process.wait(60) == 0, directory.log()
    assert not Path(directory.address.removeprefix("unix:")).exists()


@pytest.mark.exhaustive
def test_a_directory_tells_its_metrics_by_http_and_by_the_command(cluster: EtcdCluster, tmp_path: Path) -> None:
    put_node(cluster, "n1", record_of("tls:gpu1.example:7443"))
    with Directory(cluster, tmp_path / "d", "--http", "127.0.0.1:0", "--http-host", "dir.example") as directory:
        directory.wait_for("/metrics")
        (base,) = re.findall(r"(http://[^\s\"]+)/metrics", directory.log())

        def fetched(path: str, host: str = "") -> httpx.Response:
            headers = {"Host": host} if host else {}
            return httpx.get(f"{base}{path}", headers=headers, timeout=60, trust_env=False)

        wait_until(lambda: fetched("/readyz").status_code == 200, "it has read its fleet", seen=directory.log)
        for host in ("", "dir.example"):
            answer = fetched("/metrics", host)
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert 'gpu_directory_nodes{state="ready"} 1.0' in answer.text
            assert "process_cpu_seconds_total" in answer.text
        refused = fetched("/metrics", "evil.example")
        assert (refused.status_code, "--http-host" in refused.text) == (421, True)
        assert [fetched(path).status_code for path in ("/healthz", "/", "/api/v1/state")] == [200, 404, 404]
        assert 'gpu_directory_nodes{state="ready"} 1.0' in gpulease("metrics", at=directory.address).stdout
        cluster.pause(cluster.members[0])
        wait_until(lambda: fetched("/readyz").status_code == 503, "it does not know its fleet any more")
        assert "gpu_directory_current 0.0" in fetched("/metrics").text
        cluster.resume(cluster.members[0])
        with httpx.Client(trust_env=False) as kept:
            kept.get(f"{base}/healthz")
            assert directory.process is not None
            directory.process.terminate()
            assert directory.process.wait(60) == 0, directory.log()
        assert "Traceback" not in directory.log()


@pytest.mark.exhaustive
def test_a_peer_that_leaves_does_not_end_a_directory_started_by_the_command(
    cluster: EtcdCluster, tmp_path: Path
) -> None:
    path = tmp_path / "d.sock"
    words = ["serve", "directory", "--etcd", etcd_of(cluster), "--listen", f"unix:{path}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gpulease.client.cli", *words], stderr=log, env=python_environment()
        )
    try:
        wait_until(path.exists, "it listens")
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as sock:
                wait_until(lambda sock=sock: sock.connect_ex(str(path)) == 0, "it accepts")  # type: ignore[misc]
                sock.sendall(b"no frame" * 10)
        wait_until(lambda: gpulease("fleet", "nodes", "--json", at=f"fleet:unix:{path}").stdout == "[]\n", "it answers")
        assert process.poll() is None
    finally:
        process.terminate()
        assert process.wait(60) == 0, (tmp_path / "log").read_text()
