"""The recorded history of etcd's keys, from which tests judge a fleet, is complete."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.transactions import Delete, Put, Transaction, TransactionAnswer
from helpers.daemon import python_environment
from helpers.etcd_cluster import EtcdCluster, need_etcd

CHANGES = 1_200
"""More changes than the 1,000 revisions that etcd sends in one batch (watchBatchMaxRevs)."""


async def write_and_delete(cluster: EtcdCluster) -> None:
    client = EtcdClient(EtcdSettings(tuple(cluster.endpoints)))
    try:
        for number in range(CHANGES // 2):
            for write in (Put(b"/names/a", str(number).encode()), Delete(b"/names/a")):
                assert isinstance(await client.do(Transaction(writes=(write,))), TransactionAnswer)
    finally:
        await client.close()


def test_changes_of_keys_that_are_gone_are_all_told(tmp_path: Path) -> None:
    need_etcd()
    with EtcdCluster(tmp_path) as cluster:
        asyncio.run(write_and_delete(cluster))
        path = tmp_path / "changes"
        command = [sys.executable, "-P", "-m", "helpers.etcd_history", ",".join(cluster.endpoints), str(path)]
        subprocess.run([*command, "/names/"], check=True, timeout=60, env=python_environment())
        told = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(told) == CHANGES
        assert told[-1]["value"] is None
