"""`python -P -m helpers.etcd_history ENDPOINTS FILE PREFIX`: writes all changes of keys since etcd was created.

Run it on a host that can reach etcd. It writes a line of JSON to FILE for each change of a key with the prefix.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Final

from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.transactions import Delete, KeyValue, Put, Transaction, TransactionAnswer

TIMEOUT_S: Final = 5.0
MARK: Final = b"~end"
"""Suffix of a key that is written and deleted after all changes, so that the watch reports a last change.

etcd reports changes in batches of a thousand, and does not count keys that were deleted since.
"""


async def main(endpoints: str, path: Path, prefix: bytes) -> None:
    """Write all changes so far of keys with the prefix."""
    client = EtcdClient(EtcdSettings(tuple(endpoints.split(",")), timeout_s=TIMEOUT_S))
    try:
        mark = prefix + MARK
        newest = await revision_of(client, Transaction(writes=(Put(mark, b""),)))
        await revision_of(client, Transaction(writes=(Delete(mark),)))
        with path.open("w") as file:
            async for batch in client.watch(prefix, 1):
                for change in (change for change in batch.changes if change.key != mark):
                    value = change.value.decode() if isinstance(change, KeyValue) else None
                    told = {"key": change.key.decode(), "value": value, "revision": change.mod_revision}
                    file.write(json.dumps(told) + "\n")
                if batch.revision >= newest:
                    return
    finally:
        await client.close()


async def revision_of(client: EtcdClient, transaction: Transaction) -> int:
    """Repeat a write until it succeeds, and return its revision."""
    while not isinstance(outcome := await client.do(transaction), TransactionAnswer):
        pass
    return outcome.revision


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3].encode()))
