"""The manual's commands for maintaining a fleet's etcd, executed exactly as written, with a real etcd."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Final

from helpers.etcd_cluster import SMALLEST_QUOTA_BYTES, EtcdCluster, need_etcd
from helpers.waiting import wait_until

MANUAL: Final = Path(__file__).parents[2] / "daemon/manual/fleet.md"
STATUS: Final = "etcdctl --endpoints h1:2379,h2:2379,h3:2379 endpoint status"
BY_HAND: Final = "etcdctl --endpoints h1:2379 endpoint status --write-out fields"
FLAGS: Final = "etcd --quota-backend-bytes"


def commands(beginning: str) -> list[str]:
    """Return the lines of the manual's code block that begins with `beginning`."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", MANUAL.read_text(), flags=re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(beginning)]
    return str(block).splitlines()


def run(cluster: EtcdCluster, command: str) -> str:
    """Run a command of the manual, with the endpoints of this cluster's members."""
    for number, endpoint in enumerate(cluster.endpoints, 1):
        command = command.replace(f"h{number}:2379", endpoint)
    environment = os.environ | {"ETCDCTL_API": "3"}
    done = subprocess.run(
        shlex.split(command), capture_output=True, text=True, check=False, env=environment, timeout=60
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def test_members_are_defragmented_and_saved(tmp_path: Path) -> None:
    backup = tmp_path / "backup.db"
    with EtcdCluster(tmp_path / "etcd", 3) as cluster:
        cluster.control("put", "/gpulease/v1/horizon", "30")
        for command in commands(STATUS):
            run(cluster, command.replace("/var/backups/gpulease-etcd.db", str(backup)))
        assert cluster.control("get", "/gpulease/v1/horizon", "--print-value-only") == "30\n"
    assert backup.stat().st_size > 0


def test_an_etcd_without_space_writes_again(tmp_path: Path) -> None:
    with EtcdCluster(tmp_path, 3, quota_bytes=SMALLEST_QUOTA_BYTES) as cluster:

        def is_full() -> bool:
            cluster.try_control("put", "/gpulease/v1/filler", "x" * 60_000)
            return "NOSPACE" in cluster.control("alarm", "list")

        wait_until(is_full, "etcd raises its alarm")
        assert cluster.try_control("put", "/gpulease/v1/horizon", "30").returncode != 0
        first, *others = commands(BY_HAND)
        (revision,) = re.findall(r'^"Revision" : (\d+)$', run(cluster, first), flags=re.MULTILINE)
        for command in others:
            run(cluster, command.replace("123456", revision))
        cluster.control("put", "/gpulease/v1/horizon", "30")


def test_etcd_has_the_flags() -> None:
    need_etcd()
    (line,) = commands(FLAGS)
    done = subprocess.run([*shlex.split(line), "--version"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    bad = subprocess.run(["etcd", "--no-such-flag", "--version"], capture_output=True, check=False, timeout=60)
    assert bad.returncode != 0, "etcd says its version without a look at its flags"
