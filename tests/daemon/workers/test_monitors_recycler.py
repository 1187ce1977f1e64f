"""A card that can't be read keeps neither a warm context nor a scrub waiting."""

import asyncio
from dataclasses import dataclass
from typing import cast

import pytest

from gpulease.daemon.contract.control_page import BrokerPage
from gpulease.daemon.contract.worker_spec import WorkerSpec
from gpulease.daemon.gpus.source import CardSource, CardsUnavailable
from gpulease.daemon.leases.events import Event, WorkerReady, WorkerScrubbed
from gpulease.daemon.leases.model import FIRST_WARM_ID
from gpulease.daemon.workers.monitors import Recycler
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.worker import Worker
from gpulease.daemon.workers.zygote_client import ZygoteClient


@dataclass
class MadeCards:
    error: Exception

    def process_bytes(self, card_uuid: str, pid: int) -> int:
        raise self.error


@dataclass
class MadeWorkers:
    one: Worker
    wipes_heap: bool = True

    def worker(self, lease_id: int) -> Worker:
        return self.one


async def settled() -> None:
    while others := asyncio.all_tasks() - {cast(asyncio.Task[None], asyncio.current_task())}:
        await asyncio.gather(*others)


@pytest.mark.parametrize(
    "error", [CardsUnavailable("no", hint="Look."), MemoryError(), RuntimeError("can't start new thread")], ids=repr
)
def test_a_card_that_can_not_be_asked(error: Exception) -> None:
    async def story() -> None:
        spec = WorkerSpec(FIRST_WARM_ID, "GPU-a", 0, is_shared=False)
        worker, theirs = Worker.create(spec, cast(ZygoteClient, None))
        posted: list[Event] = []
        recycler = Recycler(cast(CardSource, MadeCards(error)), cast(Workers, MadeWorkers(worker)), posted.append)
        recycler.on_fresh(worker)
        assert posted == [], "it is weighed first"
        await settled()
        assert posted == [WorkerReady(FIRST_WARM_ID)]
        worker.next_page = BrokerPage()
        recycler.on_scrubbed(worker, "", 0)
        await settled()
        scrubbed = posted[1]
        assert isinstance(scrubbed, WorkerScrubbed)
        assert scrubbed.doubt.startswith("the card can't be read")
        theirs.close()
        worker.close()

    asyncio.run(story())
