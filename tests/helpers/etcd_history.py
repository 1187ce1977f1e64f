"""All changes of etcd's keys since its store was made: `python -P -m helpers.etcd_history ENDPOINTS FILE PREFIX`.

It runs on a host from which etcd is reached, and writes a line of JSON for each change.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Final

from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.transactions import Answer, Get, KeyValue, Transaction

TIMEOUT_S: Final = 5.0


async def main(endpoints: str, path: Path, prefix: bytes) -> None:
    """Write all changes up to now, of keys with the prefix."""
    client = EtcdClient(EtcdSettings(tuple(endpoints.split(",")), timeout_s=TIMEOUT_S))
    try:
        while not isinstance(last := await client.do(Transaction(reads=(Get(prefix, is_prefix=True),))), Answer):
            pass
        newest = max((found.mod_revision for found in last.found[0]), default=0)
        with path.open("w") as file:
            async for batch in client.watch(prefix, 1):
                for change in batch.changes:
                    value = change.value.decode() if isinstance(change, KeyValue) else None
                    told = {"key": change.key.decode(), "value": value, "revision": change.mod_revision}
                    file.write(json.dumps(told) + "\n")
                if batch.revision >= newest:
                    return
    finally:
        await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3].encode()))
