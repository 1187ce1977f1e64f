"""Every search of the wait queue in these tests is compared with a walk through the queue."""

from collections.abc import Iterator

import pytest

from gpulease.daemon.leases.devices import CardAccount
from gpulease.daemon.leases.invariants import first_placeable
from gpulease.daemon.leases.wait_queue import Waiter, WaitQueue


@pytest.fixture(scope="session", autouse=True)
def compared_searches() -> Iterator[None]:
    search = WaitQueue.next_placeable

    def next_placeable(queue: WaitQueue) -> tuple[Waiter, CardAccount] | None:
        found = search(queue)
        assert found == first_placeable(queue)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WaitQueue, "next_placeable", next_placeable)
        yield
