"""The line: bounds, order and batches, whatever happens in it."""

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


def waiting(items: int = 1, at: float = 0.0, *, is_alone: bool = False) -> WaitingRequest:
    return WaitingRequest(b"", items, at, at + 1, LOOP.create_future(), is_alone=is_alone)


def test_when_a_batch_is_due() -> None:
    line = BatchQueue(100, 4)
    assert line.due_at(1.0) is None
    line.join(waiting(at=5.0))
    line.join(waiting(2, at=6.0))
    assert line.due_at(1.0) == 6.0
    line.join(waiting(at=6.5))
    assert line.due_at(1.0) == 0.0
    alone = BatchQueue(100, 4)
    alone.join(waiting(at=5.0, is_alone=True))
    assert alone.due_at(1.0) == 0.0


def test_who_is_to_be_alone_is_alone() -> None:
    line = BatchQueue(100, 4)
    requests = [waiting(), waiting(is_alone=True), waiting(), waiting()]
    for request in requests:
        line.join(request)
    batches = [line.next_batch() for _ in range(4)]
    assert batches == [requests[:1], requests[1:2], requests[2:], []]


def test_who_went_away_is_left_out() -> None:
    line = BatchQueue(100, 4)
    requests = [waiting(), waiting(), waiting()]
    for request in requests:
        line.join(request)
    requests[0].answer.cancel()
    requests[1].settle(Answer(1, b""))
    requests[1].settle(Answer(2, b""))  # a second answer is none
    assert line.next_batch() == [requests[2]]
    assert (line.items, bool(line)) == (0, False)


def test_those_put_back_are_in_front() -> None:
    line = BatchQueue(2, 2)
    requests = [waiting(), waiting()]
    for request in requests:
        assert line.join(request)
    batch = line.next_batch()
    late = waiting()
    assert line.join(late)
    line.rejoin(batch)
    assert line.next_batch() == batch
    assert line.leave(late)
    assert not line.leave(late)
    assert line.items == 0


@given(st.lists(st.integers(1, 9), max_size=40), st.integers(1, 60), st.integers(9, 20))
def test_nobody_is_lost_or_overtaken_and_no_bound_is_passed(sizes: list[int], most: int, batch: int) -> None:
    line = BatchQueue(most, batch)
    requests = [waiting(size) for size in sizes]
    taken = [request for request in requests if line.join(request)]
    assert line.items == sum(request.items for request in taken) <= most
    done: list[WaitingRequest] = []
    while line:
        found = line.next_batch()
        assert 0 < sum(request.items for request in found) <= batch
        done += found
    assert done == taken
    assert line.items == 0
