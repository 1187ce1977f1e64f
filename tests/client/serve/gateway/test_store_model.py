"""Any order of steps, expired claims, slow attempts and forgetting: each store against a model of a few lines."""

import secrets
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from gpulease.client.serve.gateway import OperationConflict, ReplicatedIdempotencyStore, StaleEpoch
from gpulease.client.serve.gateway.ledger import InFlight, OperationCompleted, Reservation, UnknownOutcome
from gpulease.client.serve.gateway.postgres_store import PostgresStore
from gpulease.client.serve.gateway.sqlite_store import SqliteStore
from helpers.postgres_server import PostgresServer

from .conftest import Clock

KEYS = st.sampled_from(["a", "b"])
HASHES = {letter: letter.encode() * 32 for letter in "ab"}
TTL_S = 10.0


class Truth:
    """The state that one key must have: its owner, the owner's claim and its phase."""

    def __init__(self) -> None:
        self.phase = "free"
        self.epoch = 0
        self.until_s = 0.0
        self.outcome = b""
        self.effects = 0


class Machine(RuleBasedStateMachine):
    store: ReplicatedIdempotencyStore
    clock: Clock

    def __init__(self) -> None:
        super().__init__()
        self.prefix = f"{secrets.token_hex(8)}:"
        self.clock.now_s, self.clock.clock_id = 1000.0, "this boot"
        self.truths = {"a": Truth(), "b": Truth()}
        self.held: list[tuple[str, Reservation]] = []

    def holders(self) -> st.SearchStrategy[tuple[str, Reservation]]:
        return st.sampled_from(self.held)

    @rule(name=KEYS, ttl_s=st.sampled_from([TTL_S, 1.0]))
    def reserve(self, name: str, ttl_s: float) -> None:
        truth = self.truths[name]
        is_over = truth.until_s <= self.clock.now_s
        answer = self.store.reserve(self.prefix + name, HASHES[name], ttl_s)
        if truth.phase == "completed":
            assert answer == OperationCompleted(truth.epoch, truth.outcome)
        elif truth.phase == "started" and is_over:
            truth.epoch, truth.phase = truth.epoch + 1, "unknown"
            assert answer == UnknownOutcome(truth.epoch)
        elif truth.phase == "unknown":
            assert answer == UnknownOutcome(truth.epoch)
        elif truth.phase in ("started", "reserved") and not is_over:
            assert answer == InFlight(truth.epoch, truth.until_s - self.clock.now_s)
        else:
            truth.epoch, truth.phase, truth.until_s = truth.epoch + 1, "reserved", self.clock.now_s + ttl_s
            assert isinstance(answer, Reservation)
            assert answer.epoch == truth.epoch
            self.held.append((name, answer))

    @rule(name=KEYS)
    def conflict(self, name: str) -> None:
        if self.truths[name].phase == "free":
            return
        with pytest.raises(OperationConflict):
            self.store.reserve(self.prefix + name, b"?" * 32, TTL_S)

    def step(self, held: tuple[str, Reservation], from_phase: str, to_phase: str, do: Any) -> bool:
        name, reservation = held
        truth = self.truths[name]
        is_mine = truth.epoch == reservation.epoch
        if is_mine and truth.phase == from_phase:
            do(reservation)
            truth.phase = to_phase
            return True
        if is_mine and truth.phase == to_phase:
            do(reservation)  # once more
            return False
        with pytest.raises(StaleEpoch):
            do(reservation)
        return False

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        held = data.draw(self.holders())
        self.truths[held[0]].effects += self.step(held, "reserved", "started", self.store.start)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        held = data.draw(self.holders())
        outcome = held[1].epoch.to_bytes(2, "big")
        if self.step(held, "started", "completed", lambda reservation: self.store.complete(reservation, outcome)):
            self.truths[held[0]].outcome = outcome

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.step(data.draw(self.holders()), "reserved", "released", self.store.release)

    @rule(seconds=st.sampled_from([0.5, 5.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @invariant()
    def nothing_is_done_twice(self) -> None:
        assert all(truth.effects <= 1 for truth in self.truths.values())


def check(store: ReplicatedIdempotencyStore, clock: Clock, examples: int) -> None:
    kind = type("StoreMachine", (Machine,), {"store": store, "clock": clock})
    try:
        run_state_machine_as_test(
            kind,
            settings=settings(
                max_examples=examples,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
    finally:
        store.close()


def test_sqlite(tmp_path: Path, clock: Clock) -> None:
    check(SqliteStore(tmp_path / "store", clock=clock.moment), clock, 40)


@pytest.mark.exhaustive
def test_postgres(postgres: PostgresServer, clock: Clock) -> None:
    check(PostgresStore(postgres.conninfo, now_s=lambda: clock.now_s), clock, 25)


def test_a_claim_of_an_earlier_boot_is_over(tmp_path: Path, clock: Clock) -> None:
    store = SqliteStore(tmp_path / "store", clock=clock.moment)
    assert isinstance(store.reserve("k", HASHES["a"], TTL_S), Reservation)
    clock.clock_id, clock.now_s = "the next boot", 3.0
    answer = store.reserve("k", HASHES["a"], TTL_S)
    assert isinstance(answer, Reservation)
    assert answer.epoch == 2
    store.close()
