"""The batch queue keeps its bounds and its order, and forms its batches, under any sequence of calls."""

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.serve.models.request_queue import BatchQueue, WaitingRequest
from gpulease.client.serve.rpc import Answer

LOOP = asyncio.new_event_loop()


@pytest.fixture(scope="module", autouse=True)
def _close() -> Iterator[None]:
    yield
    LOOP.close()


def waiting(items: int = 1, arrived_s: float = 0.0, *, is_alone: bool = False) -> WaitingRequest:
    return WaitingRequest(b"", items, arrived_s, arrived_s + 1, LOOP.create_future(), is_alone=is_alone)


def test_when_a_batch_is_due() -> None:
    queue = BatchQueue(100, 4)
    assert queue.due_at(1.0) is None
    queue.add(waiting(arrived_s=5.0))
    queue.add(waiting(2, arrived_s=6.0))
    assert queue.due_at(1.0) == 6.0
    queue.add(waiting(arrived_s=6.5))
    assert queue.due_at(1.0) == 0.0
    alone = BatchQueue(100, 4)
    alone.add(waiting(arrived_s=5.0, is_alone=True))
    assert alone.due_at(1.0) == 0.0


def test_who_is_to_be_alone_is_alone() -> None:
    queue = BatchQueue(100, 4)
    requests = [waiting(), waiting(is_alone=True), waiting(), waiting()]
    for request in requests:
        queue.add(request)
    batches = [queue.next_batch() for _ in range(4)]
    assert batches == [requests[:1], requests[1:2], requests[2:], []]


def test_who_went_away_is_left_out() -> None:
    queue = BatchQueue(100, 4)
    requests = [waiting(), waiting(), waiting()]
    for request in requests:
        queue.add(request)
    requests[0].answer.cancel()
    requests[1].resolve(Answer(1, b""))
    requests[1].resolve(Answer(2, b""))  # a second answer is none
    assert queue.next_batch() == [requests[2]]
    assert (queue.items, bool(queue)) == (0, False)


def test_those_put_back_are_in_front() -> None:
    queue = BatchQueue(2, 2)
    requests = [waiting(), waiting()]
    for request in requests:
        assert queue.add(request)
    batch = queue.next_batch()
    late = waiting()
    assert queue.add(late)
    queue.put_first(batch)
    assert queue.next_batch() == batch
    assert queue.remove(late)
    assert not queue.remove(late)
    assert queue.items == 0


@given(st.lists(st.integers(1, 9), max_size=40), st.integers(1, 60), st.integers(9, 20))
def test_nobody_is_lost_or_overtaken_and_no_bound_is_passed(sizes: list[int], most: int, batch: int) -> None:
    queue = BatchQueue(most, batch)
    requests = [waiting(size) for size in sizes]
    taken = [request for request in requests if queue.add(request)]
    assert queue.items == sum(request.items for request in taken) <= most
    done: list[WaitingRequest] = []
    while queue:
        found = queue.next_batch()
        assert 0 < sum(request.items for request in found) <= batch
        done += found
    assert done == taken
    assert queue.items == 0
