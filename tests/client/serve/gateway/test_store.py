"""The properties that every idempotency store has, tested on each kind."""

import secrets
import threading
from collections.abc import Callable

import pytest

from gpulease.client import InvalidRequest
from gpulease.client.serve.gateway import OperationConflict, ReplicatedIdempotencyStore, StaleEpoch, StoreUnavailable
from gpulease.client.serve.gateway.ledger import (
    MAX_OUTCOME_BYTES,
    InFlight,
    OperationCompleted,
    Reservation,
    UnknownOutcome,
)

from .conftest import Clock, OpenStore

HASH = bytes(32)
TTL_S = 10.0
DAY_S = 86_400.0


@pytest.fixture
def key() -> str:
    return f"inference:{secrets.token_hex(8)}"


def reserved(store: ReplicatedIdempotencyStore, key: str, epoch: int = 1) -> Reservation:
    answer = store.reserve(key, HASH, TTL_S)
    assert isinstance(answer, Reservation), answer
    assert (answer.key, answer.request_hash, answer.epoch) == (key, HASH, epoch)
    return answer


def test_one_attempt_from_beginning_to_end(store: ReplicatedIdempotencyStore, key: str, clock: Clock) -> None:
    held = reserved(store, key)
    clock.now_s += 4
    assert store.reserve(key, HASH, TTL_S) == InFlight(1, 6.0)
    store.start(held)
    assert store.reserve(key, HASH, TTL_S) == InFlight(1, 6.0)
    store.complete(held, b"\0out\xff")
    clock.now_s += DAY_S
    assert store.reserve(key, HASH, TTL_S) == OperationCompleted(1, b"\0out\xff")


def test_another_operation_by_the_same_key(store: ReplicatedIdempotencyStore, key: str, clock: Clock) -> None:
    held = reserved(store, key)
    steps: list[Callable[[], None]] = [lambda: store.start(held), lambda: store.complete(held, b""), lambda: None]
    for step in steps:
        with pytest.raises(OperationConflict, match="another operation"):
            store.reserve(key, b"\1" * 32, TTL_S)
        step()
    assert store.reserve(key, HASH, TTL_S) == OperationCompleted(1, b"")


def test_what_was_released_is_for_the_next(store: ReplicatedIdempotencyStore, key: str) -> None:
    first = reserved(store, key)
    store.release(first)
    second = reserved(store, key, epoch=2)
    assert second.claim_id != first.claim_id
    steps: list[Callable[[Reservation], None]] = [store.start, store.release, lambda held: store.complete(held, b"x")]
    for step in steps:
        with pytest.raises(StaleEpoch, match="epoch 1 of this attempt"):
            step(first)
    store.start(second)


def test_an_attempt_that_did_nothing_is_taken_over(store: ReplicatedIdempotencyStore, key: str, clock: Clock) -> None:
    slow = reserved(store, key)
    clock.now_s += TTL_S
    taken = reserved(store, key, epoch=2)
    with pytest.raises(StaleEpoch, match="has epoch 2 and is reserved"):
        store.start(slow)
    store.start(taken)
    with pytest.raises(StaleEpoch):
        store.complete(slow, b"late")
    store.complete(taken, b"once")
    with pytest.raises(StaleEpoch):
        store.release(slow)
    assert store.reserve(key, HASH, TTL_S) == OperationCompleted(2, b"once")


def test_an_attempt_that_had_started_is_not_done_again(
    store: ReplicatedIdempotencyStore, key: str, clock: Clock
) -> None:
    dead = reserved(store, key)
    store.start(dead)
    clock.now_s += TTL_S
    for _ in range(2):
        assert store.reserve(key, HASH, TTL_S) == UnknownOutcome(2)
    with pytest.raises(StaleEpoch, match="is unknown"):
        store.complete(dead, b"late")


def test_steps_come_in_their_order(store: ReplicatedIdempotencyStore, key: str) -> None:
    held = reserved(store, key)
    with pytest.raises(StaleEpoch, match="is reserved"):
        store.complete(held, b"nothing was started")
    store.start(held)
    store.start(held)
    with pytest.raises(StaleEpoch, match="is started"):
        store.release(held)
    store.complete(held, b"x")
    store.complete(held, b"x")
    with pytest.raises(StaleEpoch, match="is completed"):
        store.complete(held, b"y")
    with pytest.raises(StaleEpoch, match="is gone"):
        store.start(Reservation(f"{key}!", HASH, 1, held.claim_id))


def test_what_is_forgotten_can_be_done_again(store: ReplicatedIdempotencyStore, key: str, clock: Clock) -> None:
    held = reserved(store, key)
    store.start(held)
    clock.now_s += DAY_S
    recent = reserved(store, f"{key}!")
    assert store.forget(DAY_S / 2) >= 1
    reserved(store, key)
    with pytest.raises(StaleEpoch):
        store.complete(held, b"long ago")
    store.start(recent)


def test_two_openers_of_one_store(open_store: OpenStore, key: str) -> None:
    one, other = open_store(), open_store()
    held = reserved(one, key)
    assert isinstance(other.reserve(key, HASH, TTL_S), InFlight)
    one.start(held)
    one.complete(held, b"told to both")
    one.close()
    assert other.reserve(key, HASH, TTL_S) == OperationCompleted(1, b"told to both")


def test_many_threads_one_reservation(store: ReplicatedIdempotencyStore, key: str) -> None:
    answers: list[object] = []
    together = threading.Barrier(16)

    def ask() -> None:
        together.wait()
        answers.append(store.reserve(key, HASH, TTL_S))

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(answer).__name__ for answer in answers) == ["InFlight"] * 15 + ["Reservation"]


def test_large_outcomes(store: ReplicatedIdempotencyStore, key: str) -> None:
    held = reserved(store, key)
    store.start(held)
    with pytest.raises(InvalidRequest, match="at most"):
        store.complete(held, bytes(MAX_OUTCOME_BYTES + 1))
    store.complete(held, b"\x7f" * MAX_OUTCOME_BYTES)
    answer = store.reserve(key, HASH, TTL_S)
    assert isinstance(answer, OperationCompleted)
    assert answer.outcome == b"\x7f" * MAX_OUTCOME_BYTES


def test_a_closed_store(store: ReplicatedIdempotencyStore, key: str) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        store.reserve(key, HASH, TTL_S)
