"""A process that grants, renews and ends leases with a journal until it is killed: `python keeping_child.py FOLDER`.

It writes each reply to its standard output, one line each: the outcome, the lease and its generation.
"""

import asyncio
import itertools
import os
import secrets
import sys
import time
from pathlib import Path

from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import (
    AcquireRequested,
    Event,
    FreeDone,
    FreeRequested,
    Granted,
    LeaseRestored,
    Outcome,
    ReclaimProved,
    Renewed,
    RenewRequested,
    RevokeRequested,
    WorkerExited,
    WorkerReady,
)
from gpulease.daemon.leases.model import LeaseTerms
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.record.journal import open_journal

BOOT = "a1" * 16
_ANSWERS = Granted | Renewed | FreeDone


class Child:
    """A lease table whose workers are ready, dead and proved free immediately."""

    def __init__(self, folder: Path) -> None:
        self.journal = open_journal(folder, BOOT)
        limits = CoreLimits(max_leases_per_tenant=4096, grace_ms={})
        self.table = LeaseTable([Card("GPU-a", 0, "a", 1 << 40, 10)], limits, 0, self.journal.recovered)
        self.journal.observe(self.table, lambda _: 1, self.post)
        for kept in self.journal.kept:
            self.post(LeaseRestored(kept, has_worker=True))

    def post(self, event: Event) -> None:
        now_ns = time.monotonic_ns()
        effects = self.table.handle(event, now_ns)
        self.journal.on_event(event, effects)
        for effect in effects:
            if isinstance(effect, _ANSWERS):
                self.journal.answer(effect, tell)

    async def live(self) -> None:
        for number in itertools.count(1):
            lease_id = secrets.randbits(128) or 1
            self.post(AcquireRequested(number, "ann", lease_id, LeaseTerms(100, 60_000)))
            self.post(WorkerReady(lease_id))
            if number % 3 == 0:
                self.post(RenewRequested(number, lease_id, "ann", 70_000))
            if number % 4 == 0:
                self.end(number, lease_id)
            if number % 8 == 0:
                await asyncio.sleep(0)
            if len(self.table.snapshots()) > 200:
                self.end(number, self.table.snapshots()[0].lease_id)
                await asyncio.sleep(0.001)

    def end(self, number: int, lease_id: int) -> None:
        revoke = RevokeRequested(0, lease_id, "because")
        self.post(revoke if number % 16 == 0 else FreeRequested(number, lease_id, "ann"))
        self.post(WorkerExited(lease_id, "killed"))
        self.post(ReclaimProved(lease_id))


def tell(outcome: Outcome) -> None:
    if isinstance(outcome, _ANSWERS):
        lease = outcome.lease
        line = f"{type(outcome).__name__} {lease.lease_id:x} {lease.generation} {lease.deadline_ns}\n"
        os.write(sys.stdout.fileno(), line.encode())


async def main() -> None:
    await Child(Path(sys.argv[1])).live()


if __name__ == "__main__":
    asyncio.run(main())
