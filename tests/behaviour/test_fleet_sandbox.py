"""A real daemon's fleet process runs in a sandbox.

It is a member nevertheless, although it can't open the certificate files.
"""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpulease.daemon.fleet.records.fleet_records import GENERATION
from gpulease.daemon.remote.pki.certificates import PkiAuthority
from helpers.daemon import python_environment
from helpers.etcd_cluster import EtcdCluster, issued_tenant
from helpers.fleet_rig import FleetNode, fleet
from helpers.processes import open_files, status_of
from helpers.waiting import wait_until


def test_the_fleet_process_is_shut_in_with_all_its_threads(tmp_path: Path) -> None:
    with fleet(tmp_path, nodes=1) as (_, (node,)):
        found = {each["measure"]: each["on"] for each in node.now.inventory().details[0]["sandbox"]}
        pid = node.fleet_pid()
        tasks = [int(task) for task in os.listdir(f"/proc/{pid}/task")]
        assert len(tasks) > 1
        for task in tasks:
            status = status_of(task)
            assert status["NoNewPrivs"] == "1"
            assert found["user"] == (int(status["Uid"].split()[0]) != os.geteuid())
            assert found["syscalls"] == (status["Seccomp"] == "2")
            assert [int(status[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")] == [0] * 4
        if os.geteuid() == 0:
            kinds = {to.partition(":[")[0] for to in open_files(pid).values()}
            assert not {kind for kind in kinds if "gpulease" in kind or "state" in kind}, kinds


def write_pki(folder: Path, authority: PkiAuthority) -> dict[str, Any]:
    """Write certificates into a folder that only its owner can read."""
    folder.mkdir(mode=0o700, exist_ok=True)
    issued = issued_tenant(authority, "node")
    sources = {"ca": authority.certificate_path, "certificate": issued.certificate, "key": issued.key}
    for name, source in sources.items():
        # Like tools that renew certificates: write a new file, then rename it to the old name.
        shutil.copy(source, folder / "new")
        (folder / "new").chmod(0o600)
        (folder / "new").rename(folder / name)
    return {name: str(folder / name) for name in sources}


@pytest.mark.exhaustive
def test_a_node_joins_by_certificates_that_are_renewed_meanwhile(tmp_path: Path) -> None:
    good, stranger = PkiAuthority.create(tmp_path / "good"), PkiAuthority.create(tmp_path / "stranger")
    files = write_pki(tmp_path / "node", stranger)
    with EtcdCluster(tmp_path / "etcd", authority=good) as cluster:
        cluster.control("put", GENERATION.decode(), "made by the test")
        node = FleetNode(cluster, "node-0", **files)
        try:
            node.start()
            pid = node.fleet_pid()
            assert "not joined" in node.fleet_check()["detail"]
            write_pki(tmp_path / "node", good)
            node.wait_until_joined()
            assert node.fleet_pid() == pid
        finally:
            node.stop()


def test_a_certificate_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f'[fleet]\netcd = "etcd://h1"\nca = "{tmp_path}/none.pem"\n')
    command = [sys.executable, "-P", "-m", "gpulease.daemon", "--driver", "cpu"]
    command += ["--config", str(tmp_path / "config.toml"), "--listen", f"unix:{tmp_path}/d.sock"]
    done = subprocess.run(command, capture_output=True, text=True, env=python_environment(), timeout=60, check=False)
    assert done.returncode == os.EX_UNAVAILABLE
    assert f"the fleet process can't serve: {tmp_path}/none.pem: No such file or directory" in done.stderr


@pytest.mark.exhaustive
def test_a_name_of_etcd_is_resolved_in_the_sandbox(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path) as cluster:
        cluster.control("put", GENERATION.decode(), "made by the test")
        port = cluster.members[0].client_port
        node = FleetNode(cluster, "node-0", etcd=f"etcd://localhost:{port}")
        try:
            node.start()
            node.wait_until_joined()
        finally:
            node.stop()


@pytest.mark.exhaustive
def test_a_fleet_process_that_is_started_anew_is_shut_in_too(tmp_path: Path) -> None:
    with fleet(tmp_path, nodes=1) as (_, (node,)):
        node.now.allowed_trouble.append("fleet process died")
        killed = node.fleet_pid()
        os.kill(killed, 9)
        wait_until(lambda: node.workers().get("gpul-fleet", killed) != killed, "another runs")
        node.wait_until_joined()

        def is_shut_in() -> bool:
            # The killed process may still be listed, and be gone when its status is read.
            with suppress(FileNotFoundError, ProcessLookupError):
                return status_of(node.fleet_pid())["NoNewPrivs"] == "1"
            return False

        # The node may still be a member because of the killed process, so check the new one.
        wait_until(is_shut_in, "the new one is shut in")
