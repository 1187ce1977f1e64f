"""The broker's books of its workers, where no process is needed for it."""

import asyncio

from gpulease.daemon.broker.workers import Workers
from gpulease.daemon.core import FIRST_WARM_ID, Event, WorkerExited
from gpulease.daemon.worker.spec import WorkerSpec

LEASE = 7


def test_an_end_is_told_by_the_number_the_worker_has_by_then() -> None:
    """Its lease may have given it back and been given another worker meanwhile, which has not ended."""
    told: list[Event] = []

    async def run() -> None:
        workers = Workers("cpu")
        workers.deliver_to(told.append)
        # There is no zygote, so it ends at once, and that is told a little later.
        workers.spawn(WorkerSpec(LEASE, "GPU-0", 1, is_shared=False))
        workers.rename(LEASE, FIRST_WARM_ID)
        await asyncio.sleep(0)
        assert workers.ended_pid(LEASE) == 0
        assert workers.page(LEASE) is None

    asyncio.run(run())
    assert told == [WorkerExited(FIRST_WARM_ID, "could not be started: the zygote is not running")]
