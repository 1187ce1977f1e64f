"""One of several processes that write to etcd: `python -P -m helpers.etcd_contender ENDPOINTS NAME FILE`.

Each write has a unique nonce, and replaces only the revision that was read before. Its outcome is a line of JSON in
FILE. The process continues until it is killed. With the name `history`, it writes all changes since the store was
created, and ends.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.fleet.etcd.client import EtcdClient, EtcdSettings
from gpulease.daemon.fleet.etcd.transactions import (
    CreateRevisionIs,
    Delete,
    Get,
    KeyValue,
    ModRevisionIs,
    Put,
    Transaction,
    TransactionAnswer,
)

PREFIX: Final = b"/contended/"
KEYS: Final = tuple(PREFIX + b"%d" % number for number in range(3))
TIMEOUT_S: Final = 1.0
WRITES_PER_DELETION: Final = 5


def tell(path: Path, **members: Any) -> None:
    """Append a line with a single write(2), so that a kill leaves no partial line."""
    with path.open("a") as file:
        file.write(json.dumps(members) + "\n")


async def contend(client: EtcdClient, name: str, path: Path) -> None:
    number = 0
    while True:
        number += 1
        key, nonce = KEYS[number % len(KEYS)], f"{name}-{number}"
        read = await client.do(Transaction(reads=(Get(key),)))
        if not isinstance(read, TransactionAnswer):
            continue
        found = read.found[0]
        compare = ModRevisionIs(key, found[0].mod_revision) if found else CreateRevisionIs(key, 0)
        deletes = bool(found) and number % WRITES_PER_DELETION == 0
        write = Delete(key) if deletes else Put(key, nonce.encode())
        sent_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        outcome = await client.do(Transaction((compare,), (write,)))
        told: dict[str, Any] = {"nonce": None if deletes else nonce, "outcome": type(outcome).__name__}
        if isinstance(outcome, TransactionAnswer):
            told |= {"succeeded": outcome.succeeded, "revision": outcome.revision}
        tell(path, sent_ns=sent_ns, done_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME), **told)


async def tell_history(client: EtcdClient, path: Path) -> None:
    while not isinstance(last := await client.do(Transaction(reads=(Get(PREFIX),))), TransactionAnswer):
        pass
    async for batch in client.watch(b"", 1):
        for change in batch.changes:
            if isinstance(change, KeyValue) and change.key in KEYS:
                tell(path, nonce=change.value.decode(), revision=change.mod_revision)
        if batch.revision >= last.revision:
            return


async def main(endpoints: str, name: str, path: Path) -> None:
    client = EtcdClient(EtcdSettings(tuple(endpoints.split(",")), timeout_s=TIMEOUT_S))
    try:
        await (tell_history(client, path) if name == "history" else contend(client, name, path))
    finally:
        await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
