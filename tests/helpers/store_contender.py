"""One of several processes that attempt the same operations: `python -P -m helpers.store_contender URL FOLDER`.

Each effect is a line in the file `effects` of the folder, written by one write(2). When every operation has ended, the
process exits with status 0. It may be killed at any time.
"""

import os
import random
import sys
import time
from pathlib import Path
from typing import Final

from gpulease.client.serve.gateway.gateway_errors import StaleEpoch
from gpulease.client.serve.gateway.ledger import OperationCompleted, Reservation, UnknownOutcome
from gpulease.client.serve.gateway.store import open_store

KEYS: Final = [f"key-{number}" for number in range(12)]
HASH: Final = bytes(32)
CLAIM_TTL_S: Final = 0.4


def main(url: str, folder: Path) -> None:
    """Attempt every operation that has not ended, until none is left."""
    store = open_store(url)
    effects = os.open(folder / "effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    left = list(KEYS)
    try:
        while left:
            key = random.choice(left)
            match store.reserve(key, HASH, CLAIM_TTL_S):
                case OperationCompleted() | UnknownOutcome():
                    left.remove(key)
                case Reservation() as held:
                    try:
                        # One in eight operations is so slow that its claim expires before it begins.
                        time.sleep(random.choice([0, 0, 0, 0, 0.01, 0.01, 0.02, 1.5 * CLAIM_TTL_S]))
                        store.start(held)
                        line = f"{key} {held.epoch}\n".encode()
                        os.write(effects, line)
                        time.sleep(random.choice([0, 0, 0.01]))
                        store.complete(held, line)
                    except StaleEpoch:
                        pass
                case _:
                    time.sleep(0.005)
    finally:
        os.close(effects)
        store.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
