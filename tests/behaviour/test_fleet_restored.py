"""etcd is restored from a backup, by the words of the manual: no name is served twice, and its epochs rise."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from helpers.etcd_cluster import EtcdCluster, Member
from helpers.fleet_rig import Worker, fleet

MANUAL = Path(__file__).parents[2] / "daemon/manual/fleet.md"
NAME = "model-a"


def procedure(tool: str) -> tuple[str, str]:
    """The manual's commands: one for each member, and one for the cluster."""
    section = MANUAL.read_text().partition("\n## Restore etcd\n")[2].partition("\n## ")[0]
    restore, renew = (
        dedent(block) for block in re.findall(r"^ *```sh\n(.*?)^ *```$", section, re.MULTILINE | re.DOTALL)
    )
    if tool == "etcdutl":
        (more,) = re.findall(r"`etcdutl` takes the place of `etcdctl`, and more: `(.+?)`", section)
        restore = f"{restore.rstrip()} {more}".replace("etcdctl", "etcdutl")
        asked = ["etcdutl", "snapshot", "restore", "--help"]
        if not shutil.which(tool) or "--bump-revision" not in subprocess.check_output(asked, text=True):
            pytest.skip("SKIPPED FOR WANT OF etcdutl of etcd 3.6")
    return restore, renew


def run(command: str, folder: Path, **variables: str) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def restore_member(cluster: EtcdCluster, member: Member, backup: Path, command: str) -> None:
    shutil.copy(backup, member.folder / "backup.db")
    shutil.rmtree(member.folder / "data")
    urls = {other.name: f"http://{other.host}:{other.peer_port}" for other in cluster.members}
    all_urls = ",".join(f"{name}={url}" for name, url in urls.items())
    run(command, member.folder, NAME=member.name, PEER=urls[member.name], CLUSTER=all_urls)
    (member.folder / "restored").rename(member.folder / "data")
    cluster.start(member)


@pytest.mark.parametrize("tool", ["etcdctl", "etcdutl"])
def test_etcd_is_restored_by_the_words_of_the_manual(tmp_path: Path, tool: str) -> None:
    """The backup is older than the claim, and etcd is back before the claim's lease has ended."""
    restore, renew = procedure(tool)
    with fleet(tmp_path, members=3) as (cluster, (first, second)):
        for node in (first, second):
            node.now.allowed_trouble.append("fleet")
        cluster.save(tmp_path / "backup.db")
        lease = first.acquire(NAME)
        before = Worker(lease)
        before.wait_until_working()
        for member in cluster.members:
            cluster.kill(member)
        for member in cluster.members:
            restore_member(cluster, member, tmp_path / "backup.db", restore)
        for member in cluster.members:
            cluster.wait_for(member)
        run(renew, tmp_path, ETCDCTL_ENDPOINTS=",".join(cluster.endpoints))
        with second.acquire(NAME) as again:
            after = Worker(again)
            after.wait_until_working()
            before.wait_for_end()
            after.stop()
            assert max(end for _, end in before.spans) < min(begin for begin, _ in after.spans)
            assert again.epoch > lease.epoch
        first.wait_until_joined()
