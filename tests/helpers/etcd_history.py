"""All changes of etcd's keys since its store was made: `python -P -m helpers.etcd_history ENDPOINTS FILE PREFIX`.

It runs on a host from which etcd is reached, and writes a line of JSON for each change.
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
"""Ends a key that is written behind all changes: etcd tells a thousand at a time, and keys that are gone count none."""


async def main(endpoints: str, path: Path, prefix: bytes) -> None:
    """Write all changes up to now, of keys with the prefix."""
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
    """The revision at which a write was done, which is tried until it is."""
    while not isinstance(outcome := await client.do(transaction), TransactionAnswer):
        pass
    return outcome.revision


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3].encode()))
