"""etcd is restored from a backup with the manual's commands: no name is served twice, and its epochs increase."""

from pathlib import Path

import pytest

from helpers.etcd_cluster import run_shell
from helpers.fleet_manual import restore_commands
from helpers.fleet_rig import Worker, fleet

NAME = "model-a"


@pytest.mark.exhaustive
@pytest.mark.parametrize("tool", ["etcdctl", "etcdutl"])
def test_etcd_is_restored_by_the_words_of_the_manual(tmp_path: Path, tool: str) -> None:
    """The backup is older than the claim, and etcd is restored before the claim's lease has ended."""
    restore, renew = restore_commands(tool)
    with fleet(tmp_path, members=3) as (cluster, (first, second)):
        for node in (first, second):
            node.now.allowed_trouble.append("fleet")
        cluster.save(tmp_path / "backup.db")
        lease = first.acquire(NAME)
        before = Worker(lease)
        before.wait_until_working()
        cluster.restore(tmp_path / "backup.db", restore)
        run_shell(renew, tmp_path, ETCDCTL_ENDPOINTS=",".join(cluster.endpoints))
        with second.acquire(NAME) as again:
            after = Worker(again)
            after.wait_until_working()
            before.wait_for_end()
            after.stop()
            assert max(end for _, end in before.spans) < min(begin for begin, _ in after.spans)
            assert again.epoch > lease.epoch
        first.wait_until_joined()
